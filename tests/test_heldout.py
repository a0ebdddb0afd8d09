"""The shipped models on held-out code: every drafter emits what no drafter emits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outrider
from outrider.bench.drafters import HEADS
from outrider.bench.drafters import SECTIONS as ALL

from .helpers.engines import complete, engine_of

DEMO = Path(outrider.__file__).resolve().parent / "demo"
TARGET, DRAFT = str(DEMO / "models" / "target"), str(DEMO / "models" / "draft")
SECTIONS = {
    "NGram": {"decoding_type": "NGram", "max_draft_len": 4},
    "DraftTarget": {
        "decoding_type": "DraftTarget",
        "speculative_model": DRAFT,
        "max_draft_len": 4,
        "draft_timeout_s": 30,  # a busy machine's pauses are no fault of its
    },
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Forty prompts that neither model was trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET, local_files_only=True)
    lines = (DEMO / "heldout.jsonl").read_text().splitlines()[:40]
    return [tokenizer(json.loads(line)["text"])["input_ids"][-160:] for line in lines]


@pytest.fixture(scope="module")
def plain(prompts):
    with engine_of(TARGET, num_kv_blocks=512) as engine:
        return {
            "greedy": complete(engine, prompts, at_once=1)[0],
            "sampled": complete(engine, prompts, at_once=1, temperature=0.8, top_p=0.95)[0],
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("size", [1, 2])
def test_forty_prompts(prompts, plain, name, size):
    options = {"tensor_parallel_size": size, "num_kv_blocks": 512}
    with engine_of(TARGET, SECTIONS[name], **options) as engine:
        for at_once in (1, 8) if size == 1 else (8,):
            assert complete(engine, prompts, at_once=at_once)[0] == plain["greedy"]
        sampled, _ = complete(engine, prompts, temperature=0.8, top_p=0.95)
        assert sampled == plain["sampled"]
        (stats,) = engine.stats()["drafters"].values()
    assert stats["num_acc_tokens"] > 0
    assert stats["faults"] == 0


FAMILY = {
    **{name: section for name, section in ALL.items() if name not in (*SECTIONS, *HEADS, "none")},
    "merged": {
        "decoding_type": "Compose",
        "mode": "merge",
        "max_draft_len": 12,
        "members": [ALL["Suffix"], SECTIONS["DraftTarget"]],
    },
    "merged look-ups and a window": {
        "decoding_type": "Compose",
        "mode": "merge",
        "members": [ALL["Suffix"], ALL["NGram"], ALL["Lookahead"]],
    },
    "replica's pool": {**ALL["NGram"], "pool_scope": "replica"},
    # A busy machine's pauses are no fault of theirs.
    "Eagle3 separate": {**ALL["Eagle3 separate"], "draft_timeout_s": 30},
    "User": {**ALL["User"], "timeout_s": 10},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_the_whole_family(prompts, plain, name):
    with engine_of(TARGET, FAMILY[name], num_kv_blocks=1024) as engine:
        outputs, _ = complete(engine, prompts[:24])
        assert outputs == {key: plain["greedy"][key] for key in map(str, range(24))}
        drafters = engine.stats()["drafters"].values()
    assert sum(stats["num_acc_tokens"] for stats in drafters) > 0
    assert not any(stats["faults"] for stats in drafters)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("size", "where", "count"),
    [(1, {}, 16), (2, {"placement": "separate", "draft_timeout_s": 30.0}, 8)],
)
def test_heads(prompts, plain, name, size, where, count):
    section = {**HEADS[name], **where}
    options = {"tensor_parallel_size": size, "num_kv_blocks": 512}
    with engine_of(TARGET, section, **options) as engine:
        for at_once, some in ((1, prompts[: count // 4]), (8, prompts[:count])):
            outputs, _ = complete(engine, some, at_once=at_once)
            assert outputs == {key: plain["greedy"][key] for key in outputs}
            assert len(outputs) == len(some)
        sampled, _ = complete(engine, prompts[:4], temperature=0.8, top_p=0.95)
        assert sampled == {key: plain["sampled"][key] for key in sampled}
        (stats,) = engine.stats()["drafters"].values()
    assert stats["num_acc_tokens"] > 0
    assert stats["faults"] == 0


@pytest.mark.slow
def test_the_first_prompts_equal_generate(prompts, plain):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, local_files_only=True)
    for index, prompt in enumerate(prompts[:8]):
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
        assert tuple(output[0, len(prompt) :].tolist()) == plain["greedy"][str(index)]
