"""The step loop: the page to read first.

One step: who runs, what is guessed, what the target says, what is committed, what the drafters
learn. `Loop` knows neither Ray nor torch; the target and the drafters are behind two protocols.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .scheduler import Scheduler
from .types import Batch, Delta, Draft, Request, Verdict


class Target(Protocol):
    """The only authority on what is emitted."""

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        """One forward on every rank; acceptance on the device.

        Raises:
            WorkerError: a rank raised; the step came to nothing.
            WorkerDiedError: a rank is gone.
        """
        ...


class Drafting(Protocol):
    """All drafters of an engine as one; its failures cost speed and nothing else."""

    @property
    def branches(self) -> bool:
        """Whether a draft may be more than a chain."""
        ...

    def open(self, requests: Sequence[Request]) -> None:
        """Requests are about to be served."""
        ...

    def propose(self, batch: Batch) -> list[Draft]:
        """One draft per row, of at most `batch.max_nodes` nodes, `batch.max_depth` deep."""
        ...

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """What the target made of it."""
        ...

    def close(self, request_ids: Sequence[str]) -> None:
        """Requests are done."""
        ...


@dataclass(slots=True)
class StepTimes:
    """Where the time of all steps so far went, in milliseconds."""

    num_steps: int = 0
    num_tokens: int = 0  # computed in target forwards, drafts included
    schedule_ms: float = 0.0
    propose_ms: float = 0.0
    verify_ms: float = 0.0
    forward_ms: float = 0.0  # of verify_ms, inside the model and the rule
    commit_ms: float = 0.0
    observe_ms: float = 0.0


class Loop:
    """Schedules, drafts, verifies, commits; one call of `step` each round."""

    def __init__(self, scheduler: Scheduler, target: Target, drafting: Drafting) -> None:
        self.scheduler = scheduler
        self.target = target
        self.drafting = drafting
        scheduler.budget.branches = drafting.branches
        self.times = StepTimes()

    def add(self, request: Request) -> None:
        """Queues a request (raises as `Scheduler.add` does)."""
        self.scheduler.add(request)
        self.drafting.open([request])

    def abort(
        self, request_id: str, reason: str = "abort", error: str | None = None
    ) -> list[Delta]:
        """Ends a request; its blocks are free afterwards."""
        deltas = self.scheduler.abort(request_id, reason, error)
        if deltas:
            self.drafting.close([request_id])
        return deltas

    def expire(self) -> list[Delta]:
        """Ends requests whose deadline has passed."""
        return [
            delta
            for request_id in self.scheduler.late()
            for delta in self.abort(request_id, "error", "the request's deadline has passed")
        ]

    def step(self) -> list[Delta]:
        """One round for every request that can run."""
        clock = _Clock()
        batch = self.scheduler.schedule()
        if batch.num_seqs == 0:
            return []
        schedule_ms = clock.lap_ms()
        drafts = self.drafting.propose(batch)
        propose_ms = clock.lap_ms()
        try:
            verdict = self.target.verify(batch, drafts)
        finally:
            self.last_batch = batch
        verify_ms = clock.lap_ms()
        deltas = self.scheduler.commit(batch, drafts, verdict)
        commit_ms = clock.lap_ms()
        self.drafting.observe(batch, verdict)
        finished = [delta.request_id for delta in deltas if delta.finish_reason]
        if finished:
            self.drafting.close(finished)
        times = self.times
        times.num_steps += 1
        times.num_tokens += len(batch.token_ids) + sum(draft.num_nodes for draft in drafts)
        times.schedule_ms += schedule_ms
        times.propose_ms += propose_ms
        times.verify_ms += verify_ms
        times.forward_ms += verdict.forward_ms
        times.commit_ms += commit_ms
        times.observe_ms += clock.lap_ms()
        return deltas


class _Clock:
    """A stopwatch read in laps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap_ms(self) -> float:
        now = time.perf_counter()
        elapsed_ms, self._last = (now - self._last) * 1e3, now
        return elapsed_ms
