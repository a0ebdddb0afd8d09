"""Drafters whose head runs in the target's workers, or in a worker of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import WorkerDiedError
from ..scheduler import tree
from ..scheduler.types import Batch, Draft, IntArray, NextDrafts, Request, Verdict
from .protocol import Drafter, DraftFault, DraftWait, HeadAnswer, HeadModel, Needs, OwnWorkers

_MAX_OUTSTANDING = 16  # requests; a head that lags catches up with its next answer


class Colocated(Drafter):
    """A head in the target's workers: drafts arrive with the previous verdict.

    One round trip per step: `observe` stores the head's drafts, and `propose` returns a draft if
    its sequence has not changed since.

    Args:
        name: name of the method in statistics.
        is_chain: no draft branches.
    """

    takes_min_prob = True

    def __init__(self, name: str, *, is_chain: bool = False) -> None:
        self.name, self.needs = name, Needs(shape="chain" if is_chain else "tree")
        self._drafts: dict[str, tuple[int, Draft]] = {}  # (number of known tokens, draft)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        known = batch.known_lens
        return [
            self._draft(request_id, int(known[row]), int(budgets[row]))
            for row, request_id in enumerate(batch.request_ids)
        ]

    def drafted(self, batch: Batch) -> list[Draft]:
        """What the target's rank drafted for a step that was planned ahead."""
        pairs = zip(batch.request_ids, batch.max_nodes.tolist(), strict=True)
        return [
            tree.truncate(self._drafts.get(request_id, (-1, tree.EMPTY))[1], room)
            for request_id, room in pairs
        ]

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        drafts = verdict.next_drafts
        self.keep(batch.request_ids, drafts)
        if drafts is not None and drafts.error:
            raise DraftFault(f"the head failed in the worker: {drafts.error}")

    def keep(self, request_ids: Sequence[str], drafts: NextDrafts | None) -> None:
        """Replaces the stored drafts of these requests."""
        if not self._drafts and (drafts is None or not len(drafts.tokens)):
            return
        for row, request_id in enumerate(request_ids):
            self._drafts.pop(request_id, None)
            if drafts is None or drafts.start[row] == drafts.start[row + 1]:
                continue
            span = slice(drafts.start[row], drafts.start[row + 1])
            tokens, parents, chances = drafts.tokens[span], drafts.parents[span], drafts.chances
            chances = None if chances is None else chances[span]
            draft = Draft(tokens, parents, source=self.name, chances=chances)
            self._drafts[request_id] = (int(drafts.lens[row]), draft)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._drafts.pop(request_id, None)

    def _draft(self, request_id: str, num_known: int, budget: int) -> Draft:
        known, draft = self._drafts.get(request_id, (-1, tree.EMPTY))
        return tree.truncate(draft, budget) if known == num_known and budget > 0 else tree.EMPTY


class SeparateHead(OwnWorkers, Colocated):
    """A head in a worker of its own, which gets features from the target's worker.

    `observe` sends a request without waiting, so the head drafts while the engine commits and
    schedules; `propose` receives the answer, up to a deadline. After a missed deadline or a restart
    no step waits until an answer has arrived in time again: a slow head costs one deadline, not one
    per step. Late answers are dropped, since their sequences have changed.

    Args:
        name: name of the method in statistics.
        wait: how long a step waits for drafts.
        is_chain: no draft branches.
    """

    def __init__(
        self, name: str, model: HeadModel, wait: DraftWait, *, is_chain: bool = False
    ) -> None:
        super().__init__(name, is_chain=is_chain)
        self._model = model
        self.wait = wait
        self._open: set[str] = set()
        self._asked: dict[int, tuple[str, ...]] = {}  # by step, oldest first

    def open(self, requests: Sequence[Request]) -> None:
        self._open.update(request.id for request in requests)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        if self._down and not self._recovered():
            return [tree.EMPTY] * batch.num_seqs
        try:
            self._receive(0.0 if self._late else self._timeout_s)
        except DraftFault as fault:  # other answers may be valid
            fault.drafts = super().propose(batch, budgets)
            raise
        if self._model.num_outstanding and not self._late:
            raise self._missed()
        self.wait.proposed(time.monotonic())
        return super().propose(batch, budgets)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.wait.observed(time.monotonic())
        self.keep(batch.request_ids, None)
        try:
            if not self._down:
                self._receive(0.0)
        finally:
            self._ask(batch)

    def close(self, request_ids: Sequence[str]) -> None:
        super().close(request_ids)
        self._open.difference_update(request_ids)

    def detach(self) -> None:
        self._model.detach()

    def _ask(self, batch: Batch) -> None:
        if self._down or self._model.num_outstanding >= (1 if self._late else _MAX_OUTSTANDING):
            return
        try:
            self._model.ask(batch.step, self._timeout_s)
        except WorkerDiedError as error:
            self._lost(error.message)
            raise
        self._asked[batch.step] = batch.request_ids

    def _receive(self, timeout_s: float) -> None:
        """Stores all answers that arrive within `timeout_s`.

        Raises:
            DraftFault: an answer carries an error.
            WorkerDiedError: the head is gone.
        """
        deadline = time.monotonic() + timeout_s
        error = ""
        while self._model.num_outstanding:
            try:
                answer = self._model.answer(max(0.0, deadline - time.monotonic()))
            except WorkerDiedError as lost:
                self._lost(lost.message)
                raise
            if answer is None:
                break
            self._take(answer)
            error = error or answer.error
        else:
            self._asked.clear()
        if error:
            raise DraftFault(f"the head failed in its worker: {error}")

    def _take(self, answer: HeadAnswer) -> None:
        request_ids = self._asked.pop(answer.step, ())
        if not self._model.num_outstanding and answer.took_s < self._timeout_s:
            self._late = False
        if answer.drafts is not None:
            self.keep(request_ids, answer.drafts)
            super().close([each for each in request_ids if each not in self._open])
        if not answer.linked:
            self._lost("its link to the target broke")

    def _lost(self, reason: str) -> None:
        self._down, self._late = reason or "it died", True
        self._asked.clear()
