"""Shapes that were captured are replayed, with a recorder in the place of CUDA's graphs."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.scheduler.loop import Loop
from outrider.tests.helpers.device_step import lives
from outrider.tests.helpers.device_step.lives import (
    GuessingDrafting,
    emitted,
    make,
    requests_of,
)
from outrider.tests.helpers.device_step.ops import TensorOps
from outrider.tests.helpers.device_step.parallel import RANKS, ParallelTarget
from outrider.tests.workers.device_step.conftest import RecordedGraphs, TapedCollective
from outrider.tests.workers.model.conftest import checkpoint  # noqa: F401
from outrider.workers.collective import Collective
from outrider.workers.device_step.service import Captured, CaptureError
from outrider.workers.device_step.shape import Sampler, StepShape
from outrider.workers.model.target import load_model


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
                       collective=Collective.single(), ops=TensorOps())  # fmt: skip
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
    known, other = StepShape(1, 1, 1, Sampler.PLAIN), StepShape(1, 4, 4, Sampler.PLAIN)
    captured.capture([known], lambda: api, staged.append)
    assert (staged, ran, captured.num_captured) == ([known], [known, known], 1)
    captured.run(known)
    assert (len(ran), api.num_replays) == (2, 1)
    captured.run(other)
    assert ran[-1] == other


class FailedCompilation(Exception):
    """What Triton raises is no RuntimeError."""


STAGES = {
    "api": "RuntimeError: no stream",
    "warm-up": "FailedCompilation: no ptxas",
    "recording": "FailedCompilation: no ptxas",
    "capture": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
}


@pytest.mark.parametrize("fails", STAGES)
def test_ranks_capture_all_shapes_or_none(run_ranks, fails):
    """Rank 1 fails at its second shape, between two collectives of it or behind the last; no rank
    is left in a collective or with a replay."""
    first, second = StepShape(4, 1, 4, Sampler.PLAIN), StepShape(1, 1, 1, Sampler.PLAIN)

    def work(group: Collective):
        collective = TapedCollective(group)
        values, is_failing, runs = torch.ones(1), collective.rank == 1, []
        api = FailingGraphs(1 if is_failing and fails == "capture" else 9, collective)

        def run(shape):
            runs.append(shape)
            collective.all_reduce(values)
            fail_at = {"warm-up": 1, "recording": 2}.get(fails)
            if is_failing and runs.count(second) == fail_at:
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
        runs.clear()
        captured.run(first)  # eagerly, and in step with the other rank
        assert float(values) == collective.size**2
        assert api.num_replays == 0
        return str(raised.value)

    assert run_ranks(2, work) == [f"rank 1: {STAGES[fails]}"] * 2


def test_collectives_are_executed_once_before_a_recording(run_ranks):
    """Each of every size, whichever shapes have it."""
    shapes = [StepShape(size, 1, size, Sampler.PLAIN) for size in (4, 2, 1)]

    def work(group: Collective):
        executed, rows = [], {4: 8, 2: 8, 1: 3}

        class Counted(TapedCollective):
            def _entry(self, work, tensor, name="all_reduce"):
                if self._rehearsed is None:
                    executed.append((name, len(tensor)))
                return super()._entry(work, tensor, name)

        collective = Counted(group)

        def run(shape):
            values = torch.ones(rows[shape.num_seqs])
            collective.all_reduce(values)
            collective.all_gather(values)

        captured = Captured(run, collective, torch.device("cpu"))
        captured.capture(shapes, lambda: RecordedGraphs(collective), lambda shape: None)
        sizes = [entry for entry in executed if entry != ("all_reduce", collective.size)]
        return captured.num_captured, sizes

    wanted = [(verb, size) for size in (8, 3) for verb in ("all_reduce", "all_gather")]
    assert run_ranks(2, work) == [(3, wanted)] * 2


def test_ranks_that_cannot_capture_serve_uncaptured(checkpoint, run_ranks, caplog):  # noqa: F811
    """Rank 1 fails in the middle of a model's step, between the sums of its layers."""
    folder = checkpoint("llama")[0]
    models = run_ranks(
        RANKS,
        lambda group: load_model(
            folder, device=lives.CPU, collective=TapedCollective(group), ops=TensorOps()
        ),
    )
    requests = requests_of(random.Random(5))[:2]
    wanted = emitted(loop_of(models, on_device=False), requests, 0)
    loop = loop_of(models, on_device=True)
    services = [service.device_step for service in loop.target.services]
    broken, left = models[1].collective, [7]
    healthy = broken.all_reduce

    def fail(tensor):
        left[0] -= broken._rehearsed is not None
        if left[0] < 0 and broken._rehearsed is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return healthy(tensor)

    broken.all_reduce = fail
    apis = [RecordedGraphs(model.collective) for model in models]
    with caplog.at_level("WARNING"), ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda service, api: service.capture(api), services, apis))
    broken.all_reduce = healthy
    reason = "rank 1: OutOfMemoryError: CUDA out of memory"
    for service in services:
        assert service.report.on
        assert (service.report.num_captured, service.report.capture_error) == (0, reason)
        service._step.outcome.zero_()  # rehearsals leave values that no collective made equal
        service._step.logprobs.zero_()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"device step: not captured, it runs uncaptured: {reason}"] * RANKS
    assert emitted(loop, requests, 0) == wanted
    assert services[0].num_steps > 3


def loop_of(models, *, on_device):
    loop = make(Loop, models[0], GuessingDrafting({}, 0), 120, on_device=False)
    loop.target = ParallelTarget(models, 120, on_device=on_device)
    return loop
