"""ReDrafter: its beams against the equations, exactness, files, and what is wrong with them."""

from __future__ import annotations

import pytest
import torch

from outrider.config import EngineConfig, ReDrafterConfig, parse
from outrider.drafters import head_drafters
from outrider.errors import CheckpointError, ConfigError
from outrider.scheduler import tree
from outrider.scheduler.types import Draft
from outrider.tests.helpers.heads.tokens import check_plain_tokens
from outrider.tests.helpers.redrafter import (
    Reference,
    redrafter_tensors,
    write_redrafter,
    write_target,
)

from ...helpers.engines import complete, engine_of, plain_outputs, random_prompts

CASES = {  # layers, exit_dim, rnn, layout, num_beams, length, max_total_draft_tokens
    "sum": (1, None, False, "reference", 4, 4, None),
    "sum-pt-deep": (2, None, False, "pt", 3, 3, None),
    "rnn-bare": (1, None, True, "bare", 4, 5, 9),
    "narrow": (1, 48, False, "plural", 2, 3, None),
    "wide-rnn": (2, 160, True, "plural", 5, 2, None),
    "chain": (1, None, True, "reference", 1, 4, None),
    "flat": (1, None, False, "reference", 5, 4, None),  # what is beyond the 50 likeliest counts
    "broad": (1, None, True, "reference", 60, 2, None),  # more beams than tokens with a chance
}
PROMPTS = [[7, 3, 50, 21, 9, 4, 33, 80, 61], [5, 6], [11, 12, 13, 90, 14, 15, 16]]


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("redrafter") / "target")


@pytest.fixture(scope="session")
def heads(target, tmp_path_factory):
    """By case: folder, tensors."""
    folder, made = tmp_path_factory.mktemp("redrafters"), {}
    for name, (layers, exit_dim, rnn, layout, *_) in CASES.items():
        tensors = redrafter_tensors(target, layers, exit_dim, rnn=rnn)
        if name == "flat":
            tensors["lm_head.1.weight"] *= 0.02
        made[name] = write_redrafter(folder / name, tensors, layout), tensors
    return made


def section(folder: str, **fields):
    return {"decoding_type": "ReDrafter", "speculative_model": folder, **fields}


@pytest.mark.parametrize("case", CASES)
def test_drafts_follow_the_equations(target, heads, case, monkeypatch):
    """Every tree of a batch, with chunked prefill and few blocks, against a search by hand."""
    folder, tensors = heads[case]
    *_, num_beams, length, total = CASES[case]
    reference = Reference(target, tensors)
    texts = {str(index): list(prompt) for index, prompt in enumerate(PROMPTS)}
    sizes = []
    observe = head_drafters.Colocated.observe

    def spy(self, batch, verdict):
        drafts, drafting = verdict.next_drafts, batch.samples & (batch.max_nodes > 0)
        deepest = min(length, int(batch.max_nodes[drafting].max(initial=0)))
        for row, request_id in enumerate(batch.request_ids):
            texts[request_id] += verdict.tokens(row).tolist()
            span = slice(drafts.start[row], drafts.start[row + 1])
            assert drafting[row] == (drafts.start[row] < drafts.start[row + 1])
            if drafting[row]:
                text = texts[request_id]
                assert drafts.lens[row] == len(text)
                assert drafts.lens[row] == batch.plan.context_lens[row] + gained(
                    batch, verdict, row
                )
                draft = Draft(drafts.tokens[span], drafts.parents[span])
                assert tree.problem(draft, 96) is None
                wanted = reference.tree(text, num_beams, deepest, int(batch.max_nodes[row]))
                assert set(paths_of(draft)) == set(wanted)
                assert paths_of(draft)[0] == wanted[0]
                sizes.append(draft.num_nodes)
        observe(self, batch, verdict)

    monkeypatch.setattr(head_drafters.Colocated, "observe", spy)
    fields = {"redrafter_num_beams": num_beams, "redrafter_draft_len_per_beam": length}
    if total is not None:
        fields["max_total_draft_tokens"] = total
    options = {"max_num_batched_tokens": 400 if case == "broad" else 90, "block_size": 4}
    options["allow_pickle"] = "-pt-" in case
    with engine_of(target, section(folder, **fields), **options) as engine:
        complete(engine, PROMPTS, max_tokens=16)
        drafter = engine.stats()["drafters"]["redrafter"]
    assert drafter["faults"] == 0
    assert drafter["num_acc_tokens"] > 0
    assert len(sizes) > 10
    most = min(num_beams * length, total or num_beams * length)
    assert max(sizes) <= most
    if num_beams > 2 and total is None:
        assert length < max(sizes)
        assert len(set(sizes)) > 1  # shared prefixes are there once


def gained(batch, verdict, row) -> int:
    """Tokens that the row gained: its chunk and what was emitted."""
    return int(batch.plan.chunk_lens[row]) + len(verdict.tokens(row))


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize(
    ("case", "at_once", "tensor_parallel_size"),
    [("sum", 1, 1), ("rnn-bare", 8, 1), ("narrow", 8, 2)],
)
def test_tokens_are_those_without_a_drafter(target, heads, case, at_once, tensor_parallel_size):
    """Greedy and sampled, with chunked prefill, preemptions and prefix hits."""
    check_plain_tokens(
        target,
        section(heads[case][0], redrafter_num_beams=3, redrafter_draft_len_per_beam=3),
        at_once=at_once,
        tensor_parallel_size=tensor_parallel_size,
    )


def test_rejection_is_greedy_at_temperature_0_and_runs_above(target, heads):
    prompts = random_prompts(6, 96)
    (greedy,) = plain_outputs(target, prompts, {})
    with engine_of(target, section(heads["sum"][0], verification="rejection")) as engine:
        assert complete(engine, prompts)[0] == greedy
        hot, _ = complete(engine, prompts, temperature=1.0)
        assert all(len(tokens) == 32 for tokens in hot.values())
        assert engine.stats()["drafters"]["redrafter"]["faults"] == 0


def test_spellings():
    ours = parse(ReDrafterConfig, section("m"))
    assert (ours.redrafter_num_beams, ours.draft_len) == (5, 5)
    assert ours.max_nodes == 25
    assert parse(ReDrafterConfig, ours.model_dump()) == ours
    apple = {"model": "m", "speculative_config": section("m", beam_width=3, beam_length=5)}
    wanted = section("m", redrafter_num_beams=3, redrafter_draft_len_per_beam=4)
    assert EngineConfig.load(apple).speculative_config == parse(ReDrafterConfig, wanted)
    assert parse(ReDrafterConfig, section("m", max_total_draft_tokens=12)).max_nodes == 12
    vllm = {"method": "redrafter", "model": "head", "num_speculative_tokens": 3}
    config = EngineConfig.load({"model": "m", "speculative_config": vllm}).speculative_config
    assert isinstance(config, ReDrafterConfig)
    assert (config.draft_len, config.max_nodes) == (3, 15)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"redrafter_num_beams": 0}, "redrafter_num_beams"),
        ({"redrafter_draft_len_per_beam": -1}, "redrafter_draft_len_per_beam"),
        ({"redrafter_draft_len_per_beam": 3, "max_draft_len": 4}, "max_draft_len .4. say the same"),
        ({"max_total_draft_tokens": 4}, r"max_total_draft_tokens \(4\) is below the 5 tokens"),
        (
            {"beam_width": 3, "redrafter_num_beams": 3},
            "redrafter_num_beams: given twice; beam_width means the same",
        ),
        ({"beam_length": 1}, "beam_length: it counts the last known token too"),
        ({"redrafter_num_beam": 3}, "did you mean 'redrafter_num_beams'"),
    ],
)
def test_a_wrong_section_names_the_key(fields, named):
    with pytest.raises(ConfigError, match=named):
        EngineConfig.load({"model": "m", "speculative_config": section("m", **fields)})


def test_what_is_wrong_with_a_file_is_named(target, heads, tmp_path):
    tensors, narrow = heads["rnn-bare"][1], heads["narrow"][1]
    none = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
    bare = {key: value for key, value in tensors.items() if "linear" not in key}
    cases = {
        "missing": (without(tensors, "lm_head.0.linear.bias"), "lm_head.0.linear.bias"),
        "half-rnn": (without(tensors, "rnn_w.weight"), r"lacks tensor 'rnn_w.weight'"),
        "projection": (without(narrow, "input_proj.bias"), r"lacks tensor 'input_proj.bias'"),
        "surplus": (tensors | {"lm_head.3.linear.bias": torch.ones(2)}, "lm_head.3.linear.bias"),
        "size": (
            tensors | {"rnn_u.weight": torch.ones(32, 32)},
            r"rnn_u\.weight.*\[32, 32\], expected \[64, 64\]",
        ),
        "hidden": (
            narrow | {"input_proj.weight": torch.ones(48, 64)},
            r"input_proj\.weight.*\[48, 64\], expected \[48, 128\]",
        ),
        "vocab": (
            tensors | {"lm_head.1.weight": torch.ones(95, 128)},
            r"lm_head\.1\.weight.*\[95, 128\], expected \[96, 128\]",
        ),
        "flat": (tensors | {"lm_head.1.weight": torch.ones(96)}, r"lm_head\.1\.weight"),
        "no-head": (none, "holds no ReDrafter head"),
        "no-layers": (without(bare, "lm_head.1.weight") | ZERO, "has no residual layer"),
    }
    for name, (changed, message) in cases.items():
        folder = write_redrafter(tmp_path / name, changed)
        with (
            pytest.raises(CheckpointError, match=message) as caught,
            engine_of(target, section(folder)),
        ):
            pass
        assert caught.value.field == "speculative_config.speculative_model"
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(CheckpointError, match="has none of model"),
        engine_of(target, section(str(tmp_path / "empty"))),
    ):
        pass


ZERO = {"lm_head.0.weight": torch.ones(96, 128)}


def without(tensors: dict, name: str) -> dict:
    return {key: value for key, value in tensors.items() if key != name}
