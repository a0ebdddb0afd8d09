"""The step loop: the page to read first.

One step: schedule the requests, propose drafts, verify them on the target, commit the result, and
let the drafters observe it. `Loop` imports neither Ray nor torch; the target and the drafters are
behind two protocols.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import InvalidRequestError, WorkerError
from .scheduler import Scheduler
from .timer import StepTimer
from .types import Batch, Delta, Draft, Request, Verdict


class Target(Protocol):
    """The model that decides what is emitted."""

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        """Runs one forward on every rank and the verification rule on rank 0.

        Raises:
            WorkerError: a rank raised, and the step has no effect.
            WorkerDiedError: a rank has died.
        """


class Drafting(Protocol):
    """All drafters of an engine as one. Its failures cost speed and never correctness."""

    def open(self, requests: Sequence[Request]) -> None:
        """Called with requests that are about to be served."""

    def propose(self, batch: Batch) -> list[Draft]:
        """One draft per row, of at most `batch.max_nodes` nodes, `batch.max_depth` deep."""

    @property
    def may_rest(self) -> bool:
        """Whether `propose` may be left out before a step without draft nodes."""

    @property
    def ranks_draft(self) -> bool:
        """Whether the ranks keep every draft, so that a step need not wait for `propose`."""

    def drafted(self, batch: Batch) -> list[Draft]:
        """The drafts of a step that was planned ahead; called after the step before is observed."""

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Called with the verdict on a step."""

    def close(self, request_ids: Sequence[str]) -> None:
        """Called with requests that have ended."""


class Loop:
    """Schedules, drafts, verifies and commits: one step per call of `step`."""

    def __init__(self, scheduler: Scheduler, target: Target, drafting: Drafting) -> None:
        self.scheduler = scheduler
        self.target = target
        self.drafting = drafting
        self.timer = StepTimer(scheduler.clock)
        self.take_in: Callable[[], None] = lambda: None  # adds requests that arrived during a step

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return self.has_posted or self.scheduler.has_work

    @property
    def has_posted(self) -> bool:
        """Whether a posted step has no verdict yet; this loop posts no steps."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a request has a seat, or a step has not ended."""
        return self.has_posted or bool(self.scheduler.running)

    def add(self, request: Request) -> None:
        """Queues a request (raises as `Scheduler.add` does)."""
        self.scheduler.add(request)
        self.drafting.open([request])

    def abort(
        self,
        request_id: str,
        reason: str = "abort",
        error: str | None = None,
        field: str | None = None,
    ) -> list[Delta]:
        """Ends a request; its blocks are free afterwards."""
        deltas = self.scheduler.abort(request_id, reason, error, field)
        if deltas:
            self._close([request_id])
        return deltas

    def abort_expired(self) -> list[Delta]:
        """Ends requests whose deadline has passed."""
        return [
            delta
            for request_id in self.scheduler.expired()
            for delta in self.abort(request_id, "error", "the request's deadline has passed")
        ]

    def drop(self) -> None:
        """Discards posted steps after a failure; this loop posts no steps."""

    def settle(self) -> list[Delta]:
        """Waits for posted steps and returns their deltas (raises as `step`)."""
        return []

    def step(self) -> list[Delta]:
        """One round for every request that can run."""
        timed = self.timer
        batch = timed("schedule_ms", self.scheduler.schedule)
        if not batch.request_ids:
            return []
        drafts = timed("propose_ms", self.drafting.propose, batch)
        verdict = timed("verify_ms", self.target.verify, batch, drafts)
        return self._commit(batch, drafts, verdict)

    def _commit(self, batch: Batch, drafts: Sequence[Draft], verdict: Verdict) -> list[Delta]:
        deltas = self.timer("commit_ms", self.scheduler.commit, batch, drafts, verdict)
        self.timer("observe_ms", self.drafting.observe, batch, verdict)
        elapsed_ms = self.timer.count(batch, drafts, verdict)
        if not self.has_work:
            self.timer.rest()
        self.scheduler.budget.end_step(batch, drafts, verdict, elapsed_ms)
        self._close([delta.request_id for delta in deltas if delta.finish_reason])
        return deltas

    def _close(self, finished: list[str]) -> None:
        """Closes finished requests in the drafters."""
        if finished:
            self.drafting.close(finished)


class PostedTarget(Target, Protocol):
    """A target that accepts a step before it has answered the one before."""

    def post(self, batch: Batch, drafts: Sequence[Draft]) -> None:
        """First half of `verify` (raises `WorkerDiedError`)."""

    def collect(self) -> Verdict:
        """The verdict on the oldest posted step (raises as `verify` does)."""


class OverlapLoop(Loop):
    """The overlapped loop: `step` returns while the ranks compute.

    It uses the same five verbs, cut at another place: a step is posted at the end of a call, and
    its verdict is collected at the beginning of a later one. Delivering tokens and adding requests
    therefore cost the ranks no time. If the next step has no drafts, or if the ranks draft
    themselves, it is posted before the verdict on the last one is back: ranks append to their seats
    what they emit, keep their drafts there, and read lengths, tokens and nodes from there.

    With pipeline stages, as many steps are in flight as there are stages, each with other requests
    (`Scheduler.schedule_beside`).

    Every rank computes its steps in the order in which they were posted. A block may therefore be
    given to another request as soon as a verdict frees it: a posted step that still names it writes
    to it before any step that the new owner takes part in. Emits token for token what `Loop` emits.
    """

    target: PostedTarget

    def __init__(self, scheduler: Scheduler, target: PostedTarget, drafting: Drafting) -> None:
        super().__init__(scheduler, target, drafting)
        self._posted: deque[tuple[Batch, list[Draft]]] = deque()  # oldest first
        self._closing: list[str] = []  # aborted in a posted step
        self._error: WorkerError | None = None  # raised while posting a step

    @property
    def has_posted(self) -> bool:
        return bool(self._posted)

    def add(self, request: Request) -> None:
        if request.id in self._closing:
            message = f"request id {request.id!r} is in use: its last step has not ended"
            raise InvalidRequestError(message, field="request_id")
        super().add(request)

    def step(self) -> list[Delta]:
        """Posts a step and returns the deltas of an earlier one; waits only for the latter."""
        is_full = self._error is not None or len(self._posted) > self._depth
        deltas = self._retire() if is_full else []
        batch = self._plan()
        if batch is None and not deltas:  # planning needs the outcome of the posted step
            deltas = self._retire()
            batch = self._plan()
        if batch is not None and batch.num_seqs:
            drafts: list[Draft] = []
            if not batch.plan.own_drafts:
                drafts = self.timer("propose_ms", self.drafting.propose, batch)
            self._posted.append((batch, drafts))
            try:
                self.timer("verify_ms", self.target.post, batch, drafts)
            except WorkerError as error:  # raised in the next call: `deltas` must not be lost
                self._error = error
        return deltas

    def drop(self) -> None:
        """Discards posted steps after a failure."""
        # Ranks that are alive also answer the steps that were posted later.
        for _ in range(0 if self._error else len(self._posted) - 1):
            try:
                self.target.collect()
            except WorkerError:
                break
        self._posted.clear()
        self._error = None
        self._close([])

    def settle(self) -> list[Delta]:
        return self._retire() if self._posted else []

    @property
    def _depth(self) -> int:
        """Steps that may be in flight while another is planned."""
        return max(self.scheduler.num_groups - 1, int(self.scheduler.ranks_append))

    def _plan(self) -> Batch | None:
        scheduler, timed = self.scheduler, self.timer
        if not self._posted:
            return timed("schedule_ms", scheduler.schedule)
        if scheduler.num_groups > 1:
            return timed("schedule_ms", scheduler.schedule_beside)
        drafts = self.drafting.ranks_draft
        if not drafts and not (self.drafting.may_rest and scheduler.rests()):
            return None  # drafts and masks depend on the outcome of the step in flight
        return timed("schedule_ms", lambda: scheduler.schedule_ahead(drafts=drafts))

    def _retire(self) -> list[Delta]:
        """Collects and commits the oldest posted step."""
        if self._error is not None:
            raise self._error
        timed, (batch, drafts) = self.timer, self._posted[0]
        verdict = timed("verify_ms", self.target.collect)
        if batch.plan.own_drafts:
            drafts = timed("propose_ms", self.drafting.drafted, batch)
        self._posted.popleft()
        deltas = self._commit(batch, drafts, verdict)
        self.take_in()  # so that requests that arrived meanwhile are in the very next step
        return deltas

    def _close(self, finished: list[str]) -> None:
        self._closing += finished
        ended = [each for each in self._closing if not self._in_flight(each)]
        self._closing = [each for each in self._closing if self._in_flight(each)]
        super()._close(ended)

    def _in_flight(self, request_id: str) -> bool:
        return any(request_id in batch.request_ids for batch, _ in self._posted)
