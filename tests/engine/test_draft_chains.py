"""Engines whose draft model draws its chains on the device, over torch's operations."""

from __future__ import annotations

from functools import partial

import pytest

from outrider.engine.weights import DrafterChange
from outrider.workers import worker
from outrider.workers.device_step.chains import ChainService

from ..helpers.device_step.ops import TensorOps
from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts

PROMPTS = random_prompts(6, 96)
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture
def num_drawn(monkeypatch) -> list[int]:
    """Every model runs as on a device; how many chains each step drew there."""
    drawn: list[int] = []
    load, draw = worker.load_model, ChainService.draw

    def counted(self, shape, known, budgets, least):
        drawn.append(len(budgets))
        return draw(self, shape, known, budgets, least)

    monkeypatch.setattr(worker, "load_model", partial(load, ops=TensorOps()))
    monkeypatch.setattr(worker.Worker, "_device_obstacle", lambda self: "")
    monkeypatch.setattr(ChainService, "draw", counted)
    return drawn


def section(model: str, **keys) -> dict[str, object]:
    """With blocks of its own, because what graphs reserve is more than a test's cache."""
    own = {"speculative_model": model, "max_draft_len": 3, "num_kv_blocks": 64}
    return {"decoding_type": "DraftTarget", **own, **keys}


@pytest.mark.parametrize(
    ("placement", "size"), [("colocated", 1), ("colocated", 2), ("separate", 1)]
)
def test_same_tokens_as_without_a_drafter(tiny, num_drawn, placement, size):
    wanted = plain_outputs(tiny.target, PROMPTS, {}, SAMPLED)
    waits = {"draft_timeout_s": 60.0} if placement == "separate" else {}
    drafting = section(tiny.draft, placement=placement, **waits)
    with engine_of(tiny.target, drafting, tensor_parallel_size=size) as engine:
        for sampling, outputs in zip(({}, SAMPLED), wanted, strict=True):
            assert complete(engine, PROMPTS, **sampling)[0] == outputs
        stats = engine.stats()
    (drafter,) = stats["drafters"].values()
    assert drafter["faults"] == 0
    assert drafter["num_acc_tokens"] > 0
    assert len(num_drawn) > 10
    step = stats["device_step"]["draft_model"]
    assert (step["on"], step["drafts"], step["num_captured"]) == (True, True, 0)
    assert step["num_shapes"] > 0
    assert step["capture_error"]  # there is no GPU


def test_preemption_sleep_and_other_drafters(tiny, num_drawn):
    """Chains are drawn on the device before and after each."""
    (wanted,) = plain_outputs(tiny.target, PROMPTS, {})
    options = {"num_kv_blocks": 16, "max_model_len": 96, "max_num_batched_tokens": 24}
    colocated = section(tiny.draft, placement="colocated")

    def check(engine) -> None:
        num_drawn.clear()
        assert complete(engine, PROMPTS)[0] == wanted
        assert len(num_drawn) > 5

    with engine_of(tiny.target, colocated, block_size=8, **options) as engine:
        check(engine)
        assert engine.stats()["requests"]["num_preemptions"] > 0
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
            check(engine)
        for change in ({"max_draft_len": 5}, {"speculative_model": tiny.target}):
            news = DrafterChange({**colocated, **change}, "draft_target")
            engine.change_drafters(news)
            check(engine)
        engine.change_drafters(DrafterChange(replaces="draft_target"))
        assert engine.stats()["device_step"]["draft_model"] is None
        assert complete(engine, PROMPTS)[0] == wanted
        engine.change_drafters(DrafterChange(colocated))
        check(engine)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"verification": "rejection"}, "no chain is drawn token by token"),
        ({"decoding_type": "PARD", "mask_token_id": 95}, "no chain is drawn token by token"),
    ],
)
def test_chains_that_the_host_draws(tiny, num_drawn, keys, reason):
    with engine_of(tiny.target, section(tiny.draft, placement="colocated", **keys)) as engine:
        complete(engine, PROMPTS[:3])
        step = engine.stats()["device_step"]["draft_model"]
    assert not step["on"]
    assert reason in step["reason"]
    assert not num_drawn
