"""CUDA graphs of the device step, one per shape, captured before the first request.

A graph launches all kernels of a step at once. Graphs share one pool of memory, since no two run
at the same time; the largest is captured first. Shapes that are not captured run eagerly.

Several ranks capture the same shapes or none: a rank that failed would otherwise be in another
collective than the others. So no step waits for another rank before its graph exists: a shape is
warmed up without collectives, which is where kernels are compiled and memory is allocated; then its
collectives are executed on their own, so that connections are open; then it is recorded, which
executes none. After each of these the ranks agree to go on. Of what can fail, only the collectives
themselves end the start, as nothing could be served without them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..collective import Agreement, Call, Collective
from .shape import StepShape

log = logging.getLogger(__name__)

Work = Callable[[], None]
Result = TypeVar("Result")


class GraphApi(Protocol):
    """What records work on a device for replay."""

    def warm_up(self, work: Work) -> None:
        """Runs `work` where it is going to be recorded, to compile its kernels."""

    def capture(self, work: Work) -> Work:
        """Records `work` and returns what replays it; its collectives are not executed."""


class CudaGraphs:
    """CUDA's graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: NCCL's looks at the events of earlier collectives.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


class CaptureError(Exception):
    """A shape could not be captured on some rank; all ranks raise it with the same reason."""


class Captured:
    """Runs shapes: those that were captured by a replay, others eagerly.

    Args:
        collective: of the ranks that run the same shapes.
    """

    def __init__(
        self, run: Callable[[StepShape], None], collective: Collective, device: torch.device
    ) -> None:
        self._run = run
        self._collective = collective
        self._agreement = Agreement(collective, device)
        self._replays: dict[StepShape, Work] = {}
        self._exercised: set[Call] = set()

    @property
    def num_captured(self) -> int:
        return len(self._replays)

    def capture(
        self,
        shapes: Iterable[StepShape],  # largest first
        make_api: Callable[[], GraphApi],
        stage: Callable[[StepShape], None],  # stages a step of padding alone
        *,
        shows_progress: bool = False,
    ) -> None:
        """Captures every shape; if one fails on any rank, none is captured on any.

        Raises:
            CaptureError: a shape could not be captured.
        """
        from tqdm import tqdm

        bar = tqdm(list(shapes), "CUDA graphs", disable=not shows_progress, file=sys.stderr)
        try:
            api = self._together(make_api)
            for shape in bar:
                self._replays[shape] = self._captured(shape, api, stage)
        except BaseException:
            self._replays.clear()
            raise
        finally:
            bar.close()

    def _captured(
        self, shape: StepShape, api: GraphApi, stage: Callable[[StepShape], None]
    ) -> Work:
        def work() -> None:
            self._run(shape)

        def warm_up() -> list[tuple[Call, Tensor]]:
            stage(shape)
            if self._collective.size == 1:
                api.warm_up(work)
                return []
            with self._collective.rehearsal() as called:
                api.warm_up(work)
            new = [call for call in dict.fromkeys(called) if call not in self._exercised]
            return [(call, call.operand()) for call in new]

        pairs = self._together(warm_up)
        calls, operands = [call for call, _ in pairs], [operand for _, operand in pairs]
        self._together(lambda: self._collective.exercise(calls, operands))
        self._exercised.update(calls)
        return self._together(lambda: api.capture(work))

    def _together(self, verb: Callable[[], Result]) -> Result:
        """`verb()`; raises on every rank if it raises on one."""
        own, results = "", []
        try:
            results.append(verb())
        except Exception as error:  # of CUDA, Triton or a compiler: steps run without graphs
            reason = " ".join(str(error).split())[:300]
            own = f"{type(error).__name__}: {reason}"
            log.debug("a shape could not be captured", exc_info=True)
        problem = self._agreement.problem(own)
        if problem:
            raise CaptureError(problem)
        return results[0]

    def run(self, shape: StepShape) -> None:
        """Computes the staged step."""
        replay = self._replays.get(shape)
        if replay is None:
            self._run(shape)
        else:
            replay()
