"""A fault while the engine handles a message costs that message's request."""

from __future__ import annotations

import pytest

from outrider.errors import InternalError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, ints

from ..helpers.engines import Box, complete, engine_of, random_prompts

PROMPTS = random_prompts(4, 96)


def failing(call, request_id):
    """`call`, which raises for one request."""

    def checked(first, *rest):
        if request_id in (first, getattr(first, "id", None)):
            raise KeyError("a fault")
        return call(first, *rest)

    return checked


@pytest.mark.parametrize("executor_overlaps", [False, True])
def test_a_fault_costs_one_request(tiny, executor_overlaps, caplog):
    with engine_of(tiny.target, overlap_scheduling=executor_overlaps) as engine:
        wanted, _ = complete(engine, PROMPTS)
        loop, box = engine._loop, Box()
        drafting_open, abort = loop.drafting.open, loop.abort

        def open_all(requests):
            if any(each.id == "bad" for each in requests):
                raise KeyError("a fault")
            drafting_open(requests)

        loop.drafting.open = open_all  # the scheduler has it already
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)
        batch = [Request(name, ints([3, 4]), sampling, 1) for name in ("good", "bad")]
        with pytest.raises(InternalError, match="KeyError"):
            engine.submit_all(batch, box)
        assert engine.stats()["running"] + engine.stats()["waiting"] == 0
        assert "request bad was not added" in caplog.text

        def hung_up(error):
            raise RuntimeError("the caller's loop is closed")

        engine.post([Request("gone", ints([3, 4]), sampling, 1)], box, hung_up)
        engine.abort("gone")
        last = box.last()
        while last.request_id != "gone":
            last = box.last()
        assert "a message failed" in caplog.text

        loop.abort = failing(abort, "stuck")
        engine.submit(Request("stuck", ints([3, 4]), sampling, 1), box)
        engine.abort("stuck")
        last = box.last()
        while last.request_id != "stuck":  # those that were taken back
            last = box.last()
        assert last.finish_reason == "error"
        assert "KeyError" in last.error
        loop.abort = abort
        assert complete(engine, PROMPTS)[0] == wanted
