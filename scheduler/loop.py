"""The step loop: the page to read first.

One step: schedule the requests, propose drafts, verify them on the target, commit the result, and
let the drafters observe it. `Loop` imports neither Ray nor torch; the target and the drafters are
behind two protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .scheduler import Scheduler
from .timer import StepTimer
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

    def open(self, requests: Sequence[Request]) -> None:
        """Requests are about to be served."""
        ...

    def propose(self, batch: Batch) -> list[Draft]:
        """One draft per row, of at most `batch.max_nodes` nodes, `batch.max_depth` deep."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether `propose` would return empty drafts, whatever the target emits."""
        ...

    @property
    def ranks_draft(self) -> bool:
        """Whether the ranks keep every draft, so that a step need not wait for `propose`."""
        ...

    def drafted(self, batch: Batch) -> list[Draft]:
        """The drafts of a step that was planned ahead, once the step before is observed."""
        ...

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """What the target made of it."""
        ...

    def close(self, request_ids: Sequence[str]) -> None:
        """Requests are done."""
        ...


class Loop:
    """Schedules, drafts, verifies, commits; one call of `step` each round."""

    def __init__(self, scheduler: Scheduler, target: Target, drafting: Drafting) -> None:
        self.scheduler = scheduler
        self.target = target
        self.drafting = drafting
        self.timer = StepTimer()
        self.take_in: Callable[[], None] = lambda: None  # adds requests that arrived meanwhile

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def has_posted(self) -> bool:
        """Whether a step was posted whose verdict is not back; this loop posts none."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a request has a seat, or a step has not ended."""
        return bool(self.scheduler.running)

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

    def abort_expired(self) -> list[Delta]:
        """Ends requests whose deadline has passed."""
        return [
            delta
            for request_id in self.scheduler.expired()
            for delta in self.abort(request_id, "error", "the request's deadline has passed")
        ]

    def drop(self) -> None:
        """Discards posted steps after a failed one; this loop posts none."""

    def settle(self) -> list[Delta]:
        """Waits for posted steps (raises as `step`); what they gave. This loop posts none."""
        return []

    def step(self) -> list[Delta]:
        """One round for every request that can run."""
        timed = self.timer
        batch = timed("schedule_ms", self.scheduler.schedule)
        if not batch.request_ids:
            return []
        drafts = timed("propose_ms", self.drafting.propose, batch)
        verdict = timed("verify_ms", self.target.verify, batch, drafts)
        deltas = self._commit(batch, drafts, verdict)
        finished = [delta.request_id for delta in deltas if delta.finish_reason]
        if finished:
            self.drafting.close(finished)
        return deltas

    def _commit(self, batch: Batch, drafts: Sequence[Draft], verdict: Verdict) -> list[Delta]:
        deltas = self.timer("commit_ms", self.scheduler.commit, batch, drafts, verdict)
        self.timer("observe_ms", self.drafting.observe, batch, verdict)
        elapsed_ms = self.timer.count(batch, drafts, verdict)
        self.scheduler.budget.end_step(batch, drafts, verdict, elapsed_ms)
        return deltas
