"""Drafters whose head runs in the target's workers, or in its own worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import WorkerDiedError, WorkerError
from ..scheduler import tree
from ..scheduler.sequence import TokenBuffer
from ..scheduler.types import (
    Batch,
    Draft,
    IntArray,
    JoinedDrafts,
    NextDrafts,
    Request,
    Verdict,
    ints,
)
from .protocol import (
    Drafter,
    DraftFault,
    DraftWait,
    HeadAnswer,
    HeadAsk,
    HeadModel,
    Needs,
    OwnWorkers,
)
from .speculation_cache import SpeculationCache

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
        """Returns the drafts of the target's rank for a step that was planned ahead."""
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

    def keep(self, request_ids: Sequence[str | None], drafts: NextDrafts | None) -> None:
        """Replaces the stored drafts of these requests."""
        if not self._drafts and (drafts is None or not len(drafts.tokens)):
            return
        for row, request_id in enumerate(request_ids):
            if request_id is None:
                continue
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """An unanswered request, by sequence of a verified step.

    Args:
        request_ids: None: nothing is requested for the sequence.
        chains: of a preparation: the chains that the target verifies after the known tokens.
        bases: of a preparation: numbers of known tokens.
        asked_at: by the drafter's clock.
    """

    request_ids: Sequence[str | None]
    texts: Sequence[TokenBuffer | None]
    chains: Sequence[IntArray] | None = None
    bases: Sequence[int] = ()
    asked_at: float = 0.0


class SeparateHead(OwnWorkers, Colocated):
    """A head in its own worker, which gets features from the target's worker.

    `observe` sends a request without waiting, so the head drafts while the engine commits and
    schedules; `propose` receives the answer, up to a deadline. After a missed deadline or a
    restart, no step waits until an answer has arrived in time again: a slow head costs one
    deadline, not one per step. Late answers are dropped, since their sequences have changed.

    With a speculation cache, `propose` ends with another request: while the target verifies, the
    head prepares drafts behind likely outcomes, from its own states. `observe` looks up the
    outcome, and requests drafts for requests whose outcome was not prepared.

    Args:
        name: name of the method in statistics.
        wait: how long a step waits for drafts.
        is_chain: no draft branches.
    """

    def __init__(
        self,
        name: str,
        model: HeadModel,
        wait: DraftWait,
        *,
        is_chain: bool = False,
        cache: SpeculationCache | None = None,
    ) -> None:
        super().__init__(name, is_chain=is_chain)
        self._model = model
        self.wait = wait
        self._texts: dict[str, TokenBuffer] = {}
        self._asked: dict[tuple[int, bool], _Asked] = {}  # by step and kind, oldest first
        self._cache = cache
        self.cache_counts = None if cache is None else cache.counts
        # The last verdict's step and number of sequences, and the rows that emitted and continue.
        self._observed: tuple[int, int, dict[str, int]] = (-1, 0, {})
        self._observed_before = -1  # step of the previous verdict
        self._prepared: deque[int] = deque(maxlen=_MAX_OUTSTANDING)  # steps with a preparation
        self._prepares = True  # whether rounds are prepared now
        self._has_missed = False  # not all drafts of the next step were prepared
        self._waited_ms = 0.0  # of the next step, for answers that are counted
        self._uncounted_ms = 0.0  # waits since the last counted answer

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._texts[request.id] = TokenBuffer(request.prompt, request.emitted)

    def begin_anew(self) -> None:
        if self._cache is None:
            return
        try:
            if not self._down:
                self._receive(self._timeout_s, lambda asked: True)  # an unused preparation
        finally:
            self._asked.clear()
            self._waited_ms = self._uncounted_ms = 0.0
            self._cache.begin_anew()
            self.cache_counts = self._cache.counts

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        if self._down and not self._recovered():
            return [tree.EMPTY] * batch.num_seqs
        if (cache := self._cache) is not None:
            self._prepares = cache.pace.begin_round(batch, self.clock())
        try:
            is_due = partial(_is_draft, batch.request_ids)
            if self._receive(0.0 if self._late else self._timeout_s, is_due):
                raise self._missed()
        except (DraftFault, WorkerError, TimeoutError) as fault:
            if cache is None and not isinstance(fault, DraftFault):
                raise
            # Other answers and prepared drafts may be valid.
            raise DraftFault(str(fault), super().propose(batch, budgets)) from fault
        self.wait.proposed(self.clock())
        drafts = super().propose(batch, budgets)
        if cache is not None:
            cache.end_round(batch, drafts, self._waited_ms, has_missed=self._has_missed)
            self._waited_ms = 0.0
            if self._prepares and not self._late:
                self._prepare(cache, batch, budgets, drafts)
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.wait.observed(self.clock())
        self._waited_ms = 0.0
        rows, most = dict[str, int](), batch.max_depth.tolist()
        for row, request_id in enumerate(batch.request_ids):
            emitted, text = verdict.tokens(row), self._texts.get(request_id)
            if text is not None and len(emitted):
                text.extend(emitted)
                if len(emitted) <= most[row]:  # otherwise, the request has all of its tokens
                    rows[request_id] = row
        self._observed_before = self._observed[0]
        self._observed = batch.step, batch.num_seqs, rows
        self.keep(batch.request_ids, None)
        try:
            if not self._down and self._receive(
                0.0 if self._late else self._timeout_s, partial(_is_preparation, rows)
            ):
                raise self._missed()
        finally:
            self._ask(batch)

    def close(self, request_ids: Sequence[str]) -> None:
        super().close(request_ids)
        for request_id in request_ids:
            self._texts.pop(request_id, None)
        if self._cache is not None:
            self._cache.close(request_ids)

    def detach(self) -> None:
        self._model.detach()

    def _ask(self, batch: Batch) -> None:
        """Requests drafts for the requests without a prepared one."""
        step, num_seqs, rows = self._observed
        if self._cache is None:
            if not self._down:
                self._post(HeadAsk(step, self._timeout_s), self._asked_of(batch.request_ids))
            return
        missed = [request_id for request_id in rows if not self._look_up(request_id)]
        self._has_missed = bool(missed)
        if self._prepares and not self._cache.drafts_misses(len(missed), len(rows)):
            missed = []
        # If no preparation may follow, the head must be asked so that it keeps up.
        if self._down or (not missed and step in self._prepared):
            return
        wanted = np.zeros(num_seqs, dtype=np.bool_)
        wanted[[rows[request_id] for request_id in missed]] = True
        ids = [
            request_id if is_wanted else None
            for request_id, is_wanted in zip(batch.request_ids, wanted.tolist(), strict=True)
        ]
        self._post(HeadAsk(step, self._timeout_s, wanted), self._asked_of(ids))

    def _look_up(self, request_id: str) -> bool:
        """Returns True if a draft was prepared for a request's current tokens."""
        assert self._cache is not None, "the caller looked"
        text = self._texts[request_id].view
        if (draft := self._cache.look_up(request_id, text)) is None:
            return False
        self._drafts[request_id] = len(text), draft
        return True

    def _prepare(
        self,
        cache: SpeculationCache,
        batch: Batch,
        budgets: IntArray,
        drafts: Sequence[Draft],
    ) -> None:
        """Requests the drafts of the next round without waiting."""
        step, num_seqs, rows = self._observed
        places = {
            rows[request_id]: source
            for source, request_id in enumerate(batch.request_ids)
            if budgets[source] > 0 and request_id in rows and request_id in self._texts
        }
        if not places:
            return
        sources = [places.get(row) for row in range(num_seqs)]
        ids = [None if source is None else batch.request_ids[source] for source in sources]
        asked = self._asked_of(ids)
        chains = [
            tree.EMPTY.tokens if source is None else drafts[source].tokens for source in sources
        ]
        bases = [0 if text is None else len(text) for text in asked.texts]
        reach = [0 if source is None else int(batch.max_depth[source]) for source in sources]
        ask = HeadAsk(
            step,
            self._timeout_s,
            chains=JoinedDrafts(np.concatenate(chains), ints([len(chain) for chain in chains])),
            preparation=cache.preparation([source is not None for source in sources], reach),
        )
        if self._post(ask, replace(asked, chains=chains, bases=bases)):
            self._prepared.append(batch.step)

    def _asked_of(self, request_ids: Sequence[str | None]) -> _Asked:
        texts = [None if each is None else self._texts.get(each) for each in request_ids]
        return _Asked(request_ids, texts)

    def _post(self, ask: HeadAsk, asked: _Asked) -> bool:
        """Sends a request and returns True, unless too many are unanswered."""
        if self._model.num_outstanding >= (1 if self._late else _MAX_OUTSTANDING):
            return False
        try:
            self._model.ask(ask)
        except WorkerDiedError as error:
            self._lost(error.message)
            raise
        asked = replace(asked, asked_at=self.clock())
        self._asked[ask.step, ask.preparation is not None] = asked
        return True

    def _receive(self, timeout_s: float, is_due: Callable[[_Asked], bool]) -> bool:
        """Stores all answers that have arrived, and waits up to `timeout_s` for those due.

        Returns True if one of these is missing and this is worth an error.

        Raises:
            DraftFault: an answer carries an error.
            WorkerDiedError: the head is gone.
        """
        start = self.clock()
        error, is_missing = "", False
        while self._model.num_outstanding:
            is_missing = any(map(is_due, self._asked.values()))
            asked_at = self.clock()
            left_s = start + timeout_s - asked_at if is_missing else 0.0
            try:
                answer = self._model.answer(max(0.0, left_s))
            except WorkerDiedError as lost:
                self._lost(lost.message)
                raise
            finally:
                waited_s = self.clock() - asked_at
                self._uncounted_ms += waited_s * 1e3
            if answer is None:
                break
            self._learn_wait(waited_s)
            self._take(answer)
            error = error or answer.error
        else:
            self._asked.clear()
            is_missing = False
        if error:
            raise DraftFault(f"the head failed in its worker: {error}")
        return is_missing and not self._late

    def _take(self, answer: HeadAnswer) -> None:
        asked = self._asked.pop((answer.step, answer.is_preparation), None)
        if not self._model.num_outstanding and self._is_in_time(answer, asked):
            self._late = False
        if self._cache is not None:
            self._count(self._cache, asked, answer)
        if answer.drafts is not None and asked is not None:
            self.keep(asked.request_ids, answer.drafts)
            ended = [each for each in asked.request_ids if each and each not in self._texts]
            super().close(ended)
        if not answer.linked:
            self._lost("its link to the target broke")

    def _is_in_time(self, answer: HeadAnswer, asked: _Asked | None) -> bool:
        """Returns True if waiting for the answer was possible.

        This includes an answer that was polled for after a long step. It excludes an answer that
        came many steps later from a head that was stopped meanwhile and must now process all of
        them.
        """
        if asked is None or answer.took_s >= self._timeout_s:
            return False
        is_recent = answer.step >= self._observed_before
        return is_recent or self.clock() - asked.asked_at < self._timeout_s

    def _count(self, cache: SpeculationCache, asked: _Asked | None, answer: HeadAnswer) -> None:
        """Counts an answer, and stores its prepared drafts."""
        if asked is None:
            cache.counts.num_dropped += 1
            return
        if not any(asked.request_ids):  # the head only kept up
            return
        waited_ms, self._uncounted_ms = self._uncounted_ms, 0.0
        self._waited_ms += waited_ms
        cache.count_wait(waited_ms, answer.took_s * 1e3, prepared=answer.is_preparation)
        if answer.drafted is not None and asked.chains is not None:
            # A request that was closed meanwhile may have passed its id to another.
            ids = [
                request_id if request_id and self._texts.get(request_id) is text else None
                for request_id, text in zip(asked.request_ids, asked.texts, strict=True)
            ]
            cache.store(answer.drafted, ids, asked.bases, asked.chains)

    def _recovered(self) -> bool:
        if not super()._recovered():
            return False
        if self._cache is not None:
            self._cache.clear()
        return True

    def _lost(self, reason: str) -> None:
        self._down, self._late = reason or "it died", True
        self._asked.clear()


def _is_draft(request_ids: Collection[str], asked: _Asked) -> bool:
    """Returns True if drafts are requested for one of these requests."""
    return asked.chains is None and any(each in request_ids for each in asked.request_ids)


def _is_preparation(request_ids: Collection[str], asked: _Asked) -> bool:
    """Returns True if a preparation is requested for one of these requests."""
    return asked.chains is not None and any(each in request_ids for each in asked.request_ids)
