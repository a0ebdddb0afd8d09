"""A target that runs out of memory in steps of too many tokens."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.scheduler.types import StepPlan
from outrider.workers.target import TargetService

from ..helpers.engines import complete, engine_of, random_prompts

ROOM = 9  # tokens of a step


def short_of_memory(patch: pytest.MonkeyPatch, room: int, error: Exception) -> None:
    post = TargetService.post

    def raising(self: Any, plan: StepPlan, rank: int) -> Any:
        if plan.num_tokens > room:
            raise error
        return post(self, plan, rank)

    patch.setattr(TargetService, "post", raising)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_scheduling": True},
        {"overlap_scheduling": False},
        {"speculative": {"decoding_type": "NGram", "max_draft_len": 4}},
        {"tensor_parallel_size": 2},
    ],
)
def test_requests_continue_in_smaller_steps(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    prompts = random_prompts(6, 96, longest=60)
    speculative = options.pop("speculative", None)
    with engine_of(str(tiny.target), speculative, **options) as engine:
        expected, _ = complete(engine, prompts)
    cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes")
    short_of_memory(monkeypatch, ROOM, cpu)
    with engine_of(str(tiny.target), speculative, **options) as engine:
        found, last = complete(engine, prompts)
        assert {delta.finish_reason for delta in last.values()} == {"length"}
        stats = engine.stats()
    assert found == expected
    assert stats["step_limit"]["num_shrunk"] > 0
    assert stats["num_failed_steps"] == 0
    assert stats["kv"]["num_free_blocks"] == stats["kv"]["num_blocks"]


def test_what_does_not_fit_alone_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(str(tiny.target)) as engine:
        short_of_memory(monkeypatch, 0, MemoryError("no more"))
        _, last = complete(engine, [[3, 4, 5]])
        assert last["0"].finish_reason == "error"
        assert "not enough memory for one token" in (last["0"].error or "")
        monkeypatch.undo()
        _, last = complete(engine, [[3, 4, 5]])
        assert last["0"].finish_reason == "length"
