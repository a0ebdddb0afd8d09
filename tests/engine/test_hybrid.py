"""Hybrid targets on whole engines: what recurrent layers keep is never behind, nor ahead."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from outrider.config import EngineConfig
from outrider.engine.estimate import estimate
from outrider.engine.preflight import preflight
from outrider.errors import ConfigError, WorkerDiedError
from outrider.scheduler.budget import DraftBudget
from outrider.scheduler.loop import OverlapLoop
from outrider.workers.group import LocalGroup
from outrider.workers.model.family import recurrent
from outrider.workers.ops.recurrent import recur_by_chunks

from ..helpers import mtp
from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.hybrid import DELTA, KINDS, VOCAB, greedy_texts, write_hybrid

NUM_TOKENS = 40
PROMPTS = random_prompts(8, VOCAB, seed=3, longest=50)
SLOW = pytest.mark.slow
SMALL = {"block_size": 4, "num_kv_blocks": 60, "max_num_batched_tokens": 24}
SECTIONS = {
    "ngram": {"decoding_type": "NGram", "max_draft_len": 5, "max_matching_ngram_size": 1},
    "suffix": {"decoding_type": "Suffix", "shape": "tree", "max_draft_len": 6},
    "lookahead": {"decoding_type": "Lookahead"},
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """`hybrid(kind)`: its folder, and what it says after each prompt."""
    found = {}

    def of(kind):
        if kind not in found:
            folder = write_hybrid(tmp_path_factory.mktemp(kind), kind)
            texts = greedy_texts(folder, PROMPTS, NUM_TOKENS)
            found[kind] = folder, {str(index): text for index, text in enumerate(texts)}
        return found[kind]

    return of


@pytest.fixture
def trees(hybrid, tmp_path):
    """`trees(kind, seed)`: the section of a drafter with random trees around the right text."""

    def of(kind, seed):
        outputs = hybrid(kind)[1]
        texts = [[*prompt, *outputs[str(i)]] for i, prompt in enumerate(PROMPTS)]
        (tmp_path / "texts.json").write_text(json.dumps(texts))
        return {
            "decoding_type": "User",
            "drafter": "outrider.tests.helpers.hybrid:RandomTrees",
            "max_draft_len": 7,
            "options": {"texts": str(tmp_path / "texts.json"), "seed": seed},
            "timeout_s": 20,
        }

    return of


def sizes(size, stages):
    return {"tensor_parallel_size": size, "pipeline_parallel_size": stages}


@pytest.mark.parametrize(
    ("kind", "size", "stages"),
    [
        *((kind, 1, 1) for kind in KINDS),
        *((kind, *each) for kind in ("qwen3_next", "granite4") for each in [(2, 1), (1, 2)]),
        *(pytest.param(kind, *each, marks=SLOW) for kind in KINDS for each in [(2, 2), (1, 4)]),
    ],
)
def test_trees_preemptions_and_chunks_change_nothing(hybrid, trees, kind, size, stages):
    """Also in stages some of which keep no states, or no keys and values."""
    folder, expected = hybrid(kind)
    options = {**SMALL, **sizes(size, stages)}
    with engine_of(folder, trees(kind, 0), **options) as engine:
        found, last = complete(engine, PROMPTS, max_tokens=NUM_TOKENS)
        assert engine.stats()["requests"]["num_preemptions"] > 0
        assert sum(each.usage.num_accepted_tokens for each in last.values()) > 40
    assert found == expected


@pytest.mark.parametrize("name", list(SECTIONS))
def test_every_drafter_gives_what_none_gives(hybrid, name):
    folder, expected = hybrid("qwen3_5")
    with engine_of(folder, SECTIONS[name], **SMALL) as engine:
        assert complete(engine, PROMPTS, max_tokens=NUM_TOKENS)[0] == expected


def test_a_batch_changes_no_bits(hybrid, trees):
    folder, _ = hybrid("qwen3_next")
    options = {"dtype": "bfloat16", "deterministic": True}
    with engine_of(folder, **options) as engine:
        alone, _ = complete(engine, PROMPTS[:4], at_once=1, max_tokens=12)
    with engine_of(
        folder, trees("qwen3_next", 1), **options, **{**SMALL, "block_size": 8}
    ) as engine:
        assert complete(engine, PROMPTS[:4], max_tokens=12)[0] == alone


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_fuzz(hybrid, trees, seed):
    """Other trees, batches, chunks and numbers of blocks each time."""
    kind = list(KINDS)[seed % len(KINDS)]
    folder, expected = hybrid(kind)
    rng = np.random.default_rng(seed)
    options = {
        "block_size": int(rng.choice([1, 3, 4, 16])),
        "max_num_batched_tokens": int(rng.integers(8, 80)),
        "max_num_seqs": int(rng.integers(2, 9)),
        **sizes(int(rng.choice([1, 2])), 1 + seed % 3),
    }
    options["num_kv_blocks"] = int(rng.integers(110, 240)) // options["block_size"]
    with engine_of(folder, trees(kind, seed), **options) as engine:
        at_once = int(rng.integers(1, 9))
        assert complete(engine, PROMPTS, at_once=at_once, max_tokens=NUM_TOKENS)[0] == expected


def test_a_draft_model_with_states_is_refused(hybrid):
    folder, _ = hybrid("qwen3_5")
    config = EngineConfig.load(
        {
            "model": folder,
            "executor": "local",
            "speculative_config": {"decoding_type": "DraftTarget", "speculative_model": folder},
        }
    )
    errors: list[ConfigError] = []  # there is no tokenizer either
    preflight(config, errors=errors)
    assert any("a draft model cannot be a 'qwen3_5_text' model" in str(each) for each in errors)


def test_the_check_shows_states(hybrid):
    folder, _ = hybrid("qwen3_5")
    config = EngineConfig.load({"model": folder, "executor": "local"})
    facts = preflight(config, errors=[])  # there is no tokenizer
    # 3 layers: 4 heads of 8 x 8 float32, and 3 tokens of 2 * 16 + 32 columns
    size = 4 * 64 * 4 + 3 * 64 * 4
    assert facts["states per rank"].startswith(f"{3 * size:,} bytes a sequence")
    assert facts["KV cache per rank"].startswith(f"{2 * 2 * 16 * 4} bytes a token")
    staged = config.model_copy(update={"pipeline_parallel_size": 2})
    facts = preflight(staged, errors=[])  # attention is in the second one alone
    assert facts["states per rank"].startswith(f"at most {2 * size:,} bytes a sequence")
    assert facts["KV cache per rank"].startswith(f"at most {2 * 2 * 16 * 4} bytes a token")


@pytest.mark.parametrize(("size", "drafts"), [(1, False), (1, True), (2, True)])
def test_steps_ahead_of_their_verdicts(hybrid, trees, monkeypatch, size, drafts):
    """Also where a drafter rests now and then."""
    folder, expected = hybrid("qwen3_next")
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    rng = random.Random(size)
    monkeypatch.setattr(DraftBudget, "rests", lambda self, num_running: rng.random() < 0.5)
    section = trees("qwen3_next", size) if drafts else None
    with engine_of(folder, section, tensor_parallel_size=size) as engine:
        assert type(engine._loop) is OverlapLoop
        assert complete(engine, PROMPTS, max_tokens=NUM_TOKENS)[0] == expected


@pytest.mark.parametrize(
    ("overlaps", "options"),
    [
        (False, {"num_kv_blocks": 24}),
        (True, {"num_kv_blocks": 24}),
        (True, {"tensor_parallel_size": 2}),
        (True, {"pipeline_parallel_size": 2}),
    ],
)
def test_its_own_mtp_module(tmp_path, monkeypatch, overlaps, options):
    """Whose layer has full attention; the ranks keep its drafts where steps overlap."""
    layers = {"layer_types": ["linear_attention", "full_attention"], **DELTA}
    monkeypatch.setitem(mtp.TARGETS, "qwen", {**mtp.TARGETS["qwen"], **layers})
    monkeypatch.setattr(LocalGroup, "is_concurrent", overlaps)
    folder = mtp.Made(tmp_path, "qwen").folder
    with engine_of(folder) as engine:
        expected = complete(engine, PROMPTS, max_tokens=NUM_TOKENS)[0]
    section = {"decoding_type": "MTP", "max_draft_len": 3}
    with engine_of(folder, section, **options) as engine:
        found, last = complete(engine, PROMPTS, max_tokens=NUM_TOKENS)
        assert sum(each.usage.num_accepted_tokens for each in last.values()) > 0
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "size", "stages"),
    [
        ("qwen3_5", 1, 1),
        pytest.param("qwen3_5", 2, 1, marks=SLOW),
        pytest.param("qwen3_5", 1, 2, marks=SLOW),
        ("nemotron_h", 1, 4),
    ],
)
def test_cached_prefixes_begin_at_checkpoints(hybrid, trees, kind, size, stages):
    """Of prompts that begin alike, the first keeps the end of its own, the second the fork."""
    folder, _ = hybrid(kind)
    stem = random_prompts(1, VOCAB, seed=9, longest=2)[0] + list(range(2, 42))
    prompts = [[*stem, *end] for end in ([3] * 5, [4] * 9, [5] * 6, [6], [7] * 20)]
    texts = greedy_texts(folder, prompts, NUM_TOKENS)
    expected = {str(index): text for index, text in enumerate(texts)}
    options = {**SMALL, "num_kv_blocks": 200, **sizes(size, stages)}
    with engine_of(folder, trees(kind, 5), **options) as engine:
        for at_once in (1, 5):
            found, last = complete(engine, prompts, at_once=at_once, max_tokens=NUM_TOKENS)
            assert found == expected
            hits = [last[str(index)].num_cached_tokens for index in range(5)]
            if at_once == 1:
                assert hits == [0, 0, 40, 40, 40]
        assert hits == [(len(prompt) - 1) // 4 * 4 for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_fuzz_of_cached_prefixes(hybrid, trees, monkeypatch, seed):
    """Few checkpoints, prompts with common beginnings, preemption, several turns."""
    folder, outputs = hybrid(list(KINDS)[seed % len(KINDS)])
    rng = np.random.default_rng(100 + seed)
    prompts, expected = [], {}
    for _ in range(24):
        index = int(rng.integers(len(PROMPTS)))
        count = int(rng.integers(0, 30))
        expected[str(len(prompts))] = outputs[str(index)][count:][:10]
        prompts.append([*PROMPTS[index], *outputs[str(index)][:count]])
    monkeypatch.setattr(LocalGroup, "is_concurrent", bool(seed % 3))
    options = {
        "block_size": int(rng.choice([1, 2, 4, 8])),
        "max_num_batched_tokens": int(rng.integers(8, 80)),
        "max_num_seqs": int(rng.integers(1, 9)),
        **sizes(int(rng.choice([1, 2])), 1 + seed % 2),
    }
    options["num_kv_blocks"] = int(rng.integers(110, 300)) // options["block_size"]
    section = trees(list(KINDS)[seed % len(KINDS)], seed) if seed % 4 else None
    rests = random.Random(seed)
    monkeypatch.setattr(DraftBudget, "rests", lambda self, num_running: rests.random() < 0.5)
    with engine_of(folder, section, **options) as engine:
        at_once = int(rng.integers(1, 9))
        found, _ = complete(engine, prompts, at_once=at_once, max_tokens=10)
        assert found == expected
        engine._loop.scheduler.check()
        longest = max(prompts, key=len)
        found, last = complete(engine, [longest] * 2, at_once=1, max_tokens=10)
        assert found == dict.fromkeys(found, expected[str(prompts.index(longest))])
        assert last["1"].num_cached_tokens > 0
        engine._loop.scheduler.check()


def test_by_chunks(hybrid, trees, monkeypatch):
    """The recurrence of devices without the compiled scan."""
    monkeypatch.setattr(recurrent, "recur", recur_by_chunks)
    folder, expected = hybrid("qwen3_next")
    with engine_of(folder, trees("qwen3_next", 2), **{**SMALL, "num_kv_blocks": 200}) as engine:
        for _ in range(2):  # with cached prefixes
            found, last = complete(engine, PROMPTS, max_tokens=NUM_TOKENS)
            assert found == expected
        assert sum(each.num_cached_tokens for each in last.values()) > 0


@pytest.mark.parametrize(("size", "stages"), [(1, 1), (2, 1), (1, 3)])
def test_ranks_die_and_requests_are_replayed(hybrid, trees, size, stages):
    folder, expected = hybrid("qwen3_next")
    options = {**SMALL, **sizes(size, stages), "max_restarts": 4}
    with engine_of(folder, trees("qwen3_next", 4), **options) as engine:
        group, verb = engine._host.target_group, "call" if stages == 1 else "send"
        plain, messages = getattr(group, verb), []

        def dies_at_times(message):
            messages.append(message)
            if len(messages) in (9, 14, 40):
                raise WorkerDiedError("gone")
            return plain(message)

        setattr(group, verb, dies_at_times)
        assert complete(engine, PROMPTS, max_tokens=NUM_TOKENS)[0] == expected
        assert engine.stats()["num_restarts"] == 3


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 3)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_plan_counts_the_states_of_a_rank(hybrid, kind, size, stages):
    folder, _ = hybrid(kind)
    options = {**sizes(size, stages), "dtype": "float32", "max_num_seqs": 6}
    options["num_kv_blocks"] = None  # as many as the stage with attention has room for
    with engine_of(folder, **options) as engine:
        reports = [each.target for each in engine._host.target_group.reports]
        assert engine._loop.scheduler._keeps_states
    settings = {"model": folder, "executor": "local", **options}
    (group,) = estimate(EngineConfig.load(settings), 0)
    alone = {**settings, "enable_prefix_caching": False}
    (less,) = estimate(EngineConfig.load(alone), 0)
    assert any(report.state_bytes for report in reports)
    for index, report in enumerate(reports):
        assert group.bytes_of(index).states == (6 + 6) * report.state_bytes
        assert group.bytes_of(index).kv_per_token == report.kv_bytes_per_token
        assert less.bytes_of(index).states == 6 * report.state_bytes
