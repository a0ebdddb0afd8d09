"""Shapes that were captured are replayed, with a recorder in the place of CUDA's graphs."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.scheduler.loop import Loop
from outrider.tests.helpers.device_step.lives import (
    GuessingDrafting,
    emitted,
    make,
    requests_of,
)
from outrider.tests.workers.device_step.conftest import RecordedGraphs, TapedCollective
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step.capture import Captured, CaptureError
from outrider.workers.device_step.shape import Sampler, StepShape
from outrider.workers.model import load_model
from outrider.workers.ops import ReferenceOps


class FailingGraphs(RecordedGraphs):
    """Records some shapes and then fails, as a driver without memory does."""

    def __init__(self, num_captures: int, collective: Collective | None = None) -> None:
        super().__init__(collective)
        self.left = num_captures

    def capture(self, work):
        replay = super().capture(work)
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 2.00 GiB")
        return replay


def test_a_failed_capture_leaves_the_step_uncaptured(checkpoint, caplog):  # noqa: F811
    """One line in the log, the reason in the report, and steps that are launched one by one."""
    model = load_model(checkpoint("llama")[0], device=torch.device("cpu"),
                       collective=Collective.single(), ops=ReferenceOps())  # fmt: skip
    requests, api = requests_of(random.Random(5))[:3], FailingGraphs(3)
    wanted = emitted(make(Loop, model, GuessingDrafting({}, 0), 120, on_device=False), requests, 0)
    loop = make(Loop, model, GuessingDrafting({}, 0), 120, on_device=True)
    device_step = loop.target.service.device_step
    with caplog.at_level("WARNING"):
        device_step.capture(api)
    report = device_step.report
    reason = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert (report.on, report.num_captured, report.capture_error) == (True, 0, reason)
    assert [record.getMessage() for record in caplog.records] == [
        f"device step: not captured, it runs uncaptured: {reason}"
    ]
    assert emitted(loop, requests, 0) == wanted
    assert device_step.num_steps > 10
    assert api.num_replays == 0


def test_other_shapes_run_eagerly():
    ran, staged, api = [], [], RecordedGraphs()
    captured = Captured(ran.append, Collective.single(), torch.device("cpu"))
    known, other = StepShape(1, 1, Sampler.PLAIN), StepShape(1, 4, Sampler.PLAIN)
    captured.capture([known], lambda: api, staged.append)
    assert (staged, ran, captured.num_captured) == ([known], [known, known], 1)
    captured.run(known)
    assert (len(ran), api.num_replays) == (2, 1)
    captured.run(other)
    assert ran[-1] == other


class FailedCompilation(Exception):
    """What Triton raises is no RuntimeError."""


@pytest.mark.parametrize("fails", ["capture", "rehearsal", "api"])
def test_ranks_capture_all_shapes_or_none(run_ranks, fails):
    """Rank 1 fails at its second shape; no rank is left in a collective or with a replay."""
    first, second = StepShape(4, 1, Sampler.PLAIN), StepShape(1, 1, Sampler.PLAIN)

    def work(group: Collective):
        collective = TapedCollective(group)
        values, is_failing = torch.ones(1), collective.rank == 1
        failing = {"api": 0, "rehearsal": 9}.get(fails, 1)
        api = FailingGraphs(failing if is_failing else 9, collective)

        def run(shape):
            if is_failing and fails == "rehearsal" and shape == second:
                raise FailedCompilation("no ptxas")
            collective.all_reduce(values)

        def make_api():
            if is_failing and fails == "api":
                raise RuntimeError("no stream")
            return api

        captured = Captured(run, collective, torch.device("cpu"))
        with pytest.raises(CaptureError) as raised:
            captured.capture([first, second], make_api, lambda shape: None)
        assert captured.num_captured == 0
        values.fill_(1)
        if fails != "rehearsal":
            captured.run(second)  # eagerly, and in step with the other rank
            assert float(values) == collective.size
        return str(raised.value)

    reason = {
        "capture": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "rehearsal": "FailedCompilation: no ptxas",
        "api": "RuntimeError: no stream",
    }[fails]
    assert run_ranks(2, work) == [f"rank 1: {reason}"] * 2
