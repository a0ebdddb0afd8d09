"""The step loop that does not wait: it returns while the ranks compute. Read `loop.py` first.

The same five verbs, cut at another place: a step is posted at the end of a call and its verdict is
collected at the beginning of a later one, so that delivering tokens and taking in requests cost no
time of the ranks. Where nothing is drafted, or the ranks draft, the next step is posted before the
verdict on the last one is back: ranks append to their seats what they emit, keep there what they
draft, and take lengths, tokens and nodes from there.

Every rank computes its steps in the order in which they were posted. A block may therefore be given
to another request as soon as a verdict frees it: a posted step that still names it writes to it
before any step that the new owner takes part in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..errors import InvalidRequestError, WorkerError
from .loop import Drafting, Loop, Target
from .scheduler import Scheduler
from .types import Batch, Delta, Draft, Request, Verdict


class PostedTarget(Target, Protocol):
    """A target that takes steps before it has answered earlier ones."""

    def post(self, batch: Batch, drafts: Sequence[Draft]) -> None:
        """First half of `verify` (raises `WorkerDiedError`)."""
        ...

    def collect(self) -> Verdict:
        """The verdict on the oldest posted step (raises as `verify` does)."""
        ...


class OverlapLoop(Loop):
    """Emits token for token what `Loop` emits."""

    target: PostedTarget

    def __init__(self, scheduler: Scheduler, target: PostedTarget, drafting: Drafting) -> None:
        super().__init__(scheduler, target, drafting)
        self._posted: deque[tuple[Batch, list[Draft]]] = deque()  # at most two
        self._closing: list[str] = []  # aborted in a posted step
        self._error: WorkerError | None = None  # of a step that could not be posted

    @property
    def has_work(self) -> bool:
        return bool(self._posted) or super().has_work

    @property
    def has_posted(self) -> bool:
        return bool(self._posted)

    @property
    def is_busy(self) -> bool:
        return bool(self._posted) or super().is_busy

    def add(self, request: Request) -> None:
        if request.id in self._closing:
            message = f"request id {request.id!r} is in use: its last step has not ended"
            raise InvalidRequestError(message, field="request_id")
        super().add(request)

    def abort(
        self, request_id: str, reason: str = "abort", error: str | None = None
    ) -> list[Delta]:
        if not self._in_flight(request_id):
            return super().abort(request_id, reason, error)
        deltas = self.scheduler.abort(request_id, reason, error)
        if deltas:  # drafters observe the posted step, then close
            self._closing.append(request_id)
        return deltas

    def step(self) -> list[Delta]:
        """Posts a step and returns what an earlier one gave; waits only for that."""
        is_full = self._error is not None or len(self._posted) > self._depth
        deltas = self._retire() if is_full else []
        batch = self._plan()
        if batch is None and not deltas:  # it takes the outcome of the posted step
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
        """After a failure: posted steps come to nothing."""
        # A rank that lives answers the others, too.
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
        overlaps = self.drafting.is_idle or self.drafting.ranks_draft
        return int(overlaps and self.scheduler.ranks_append)

    def _plan(self) -> Batch | None:
        if not self._posted:
            return self.timer("schedule_ms", self.scheduler.schedule)
        if not self._depth:  # it has changed since the last step was posted
            return None
        drafts = self.drafting.ranks_draft
        return self.timer("schedule_ms", lambda: self.scheduler.schedule_ahead(drafts=drafts))

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
        self._close([delta.request_id for delta in deltas if delta.finish_reason])
        self.take_in()  # who arrived while the ranks computed is in the very next step
        return deltas

    def _close(self, finished: list[str]) -> None:
        self._closing += finished
        ended = [each for each in self._closing if not self._in_flight(each)]
        if ended:
            self._closing = [each for each in self._closing if self._in_flight(each)]
            self.drafting.close(ended)

    def _in_flight(self, request_id: str) -> bool:
        return any(request_id in batch.request_ids for batch, _ in self._posted)
