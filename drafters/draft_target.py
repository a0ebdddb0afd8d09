"""DraftTarget: a small model drafts a chain (Leviathan et al. 2023).

This is the engine's side: the accounting of the draft model's paged KV, the tokens that it must
still compute, and the rewind after a verdict. The model (`workers/draft.py`) runs in its own
workers or inside the target's, behind `DraftModel`. A separate model has a deadline: when it misses
one, that step and later ones run without drafts and do not wait, until the model answers in time
again. One request is outstanding at a time.

With a speculation cache (`speculation_cache.py`), a round ends with another request: the model
computes the drafts that the target is about to verify, and prepares those of the next round
meanwhile. A model that reads the target's verdicts draws drafts that it has not prepared
(`Continuation`) before it is asked, in blocks that are reserved for them here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..config import DraftTargetConfig, PARDConfig
from ..errors import WorkerDiedError, WorkerError
from ..scheduler import tree
from ..scheduler.blocks import BlockPool
from ..scheduler.sequence import PagedTokens, Row, Seating
from ..scheduler.types import (
    Batch,
    Draft,
    FloatArray,
    IntArray,
    JoinedDrafts,
    Request,
    SeatSettings,
    Verdict,
    ints,
)
from .lookup.base import num_agreeing
from .protocol import (
    CacheCounts,
    Continuation,
    Drafted,
    Drafter,
    DraftFault,
    DraftModel,
    DraftStep,
    DraftWait,
    LinkCounts,
    Needs,
    OwnWorkers,
)
from .speculation_cache import SpeculationCache, chain_of
from .vocabulary import mask_token

log = logging.getLogger(__name__)
_ALL = 1 << 20  # more nodes than a sequence has: each is computed in a separate forward
_FEW_TOKENS = 64  # uncomputed tokens for which a step may wait


class _Pending:
    """An unanswered draft step.

    Args:
        rows: the sequences that take part.
        chains: of a preparation, by row: the chain that the target verifies after the known tokens.
        round_: of a preparation: the step that verifies, and its row for each row.
    """

    def __init__(
        self,
        step: int,
        rows: list[Row],
        now_s: float,
        chains: Sequence[IntArray] | None = None,
        round_: tuple[int, list[int]] = (-1, []),
    ) -> None:
        self.step, self.rows, self.chains = step, rows, chains
        self.round_step, self.sources = round_
        self.num_accepted = [0] * len(rows)  # nodes of `chains`, known after the verdict
        self.computed = [row.sequence.num_computed for row in rows]  # in the model's cache
        self.known = [row.sequence.num_tokens for row in rows]
        self.asked_at = now_s
        self.num_polls = 0  # polls without an answer
        self.waited_ms = 0.0  # by steps


class DraftTarget(OwnWorkers, Drafter):
    """Keeps the draft model's cache consistent with the committed tokens."""

    name = "draft_target"
    needs = Needs(probabilities=True)
    takes_min_prob = True
    mask_token: int | None = None  # as in `DraftStep`

    def __init__(self, config: DraftTargetConfig, model: DraftModel) -> None:
        self._model = model
        self._probs_top = config.probs_top if config.wants_draft_probs else 0
        self._salted, self._draft_len = config.salts_rounds, config.draft_len
        self._draft_min, self._p_min = config.draft_min, config.p_min
        self._pool = BlockPool(model.num_blocks, model.block_size)
        self._seating = Seating()
        self._sequences: dict[str, PagedTokens] = {}  # least recently drafted first
        self._drawn: dict[str, int] = {}  # nodes drawn in a step in flight
        self._step = 0
        self.wait = DraftWait(config.draft_timeout_s)
        self._pending: _Pending | None = None
        self._waited_ms = 0.0  # for drafts, in the current step
        self._prepares: bool | None = None  # in the current step; None: not decided
        self._has_missed = False  # in the current step: not all drafts were prepared
        self._asked: list[int] | None = None  # rows of the batch whose chains are outstanding
        self.load = 0.0  # share of the last second that the model drafted for other engines
        self.deadline_s: float | None = None  # by the clock; no wait exceeds it
        if config.placement == "separate":
            self.link_counts = LinkCounts()
        self._cache: SpeculationCache | None = None
        if config.speculation_cache is not None:
            # With masks, every drafted token except the first has a row in the same forward.
            rows_each = 1 if self.mask_token is None else config.prepared_len
            most = max(1, model.max_num_batched_tokens // rows_each)
            self._cache = SpeculationCache(config, self.name, most)
            self.cache_counts = self._cache.counts

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._sequences[request.id] = PagedTokens(request, SeatSettings.for_drafting(request))

    def detach(self) -> None:
        self._model.detach()

    def is_up(self) -> bool:
        """Whether the model is up; if not, its restart is started."""
        return not self._down or self._recovered()

    def share_counts(self, counts: CacheCounts | None, link_counts: LinkCounts) -> None:
        """Records the speculation cache's work, and messages, in these counters from now on."""
        self.link_counts = link_counts
        if self._cache is not None and counts is not None:
            self.cache_counts = self._cache.counts = counts

    def begin_anew(self) -> None:
        if self.link_counts is not None:
            self.link_counts = LinkCounts()
        if self._cache is None:
            return
        try:
            if self._pending is not None:  # the last preparation, which no request uses
                self._receive(self._timeout_s)
        finally:
            self._waited_ms = 0.0
            self._cache.begin_anew()
            self.cache_counts = self._cache.counts

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        try:
            missed = self.gather(batch, budgets, drafts)
            self.ask(batch, missed)
            self.take(batch, drafts)
            self.finish(batch, budgets, drafts, {})
        except (WorkerError, TimeoutError) as error:
            if self._cache is None:
                raise
            # Drafts found in the cache are still valid.
            raise DraftFault(str(error), drafts) from error
        return drafts

    def gather(
        self,
        batch: Batch,
        budgets: IntArray,
        drafts: list[Draft],  # output
        helped: Collection[str] = (),
    ) -> IntArray:  # [num_seqs]
        """First part of `propose`: collects prepared drafts; returns numbers of nodes to draw now.

        Args:
            helped: requests for which another model drafts and this one only prepares.
        """
        self._prepares = None
        self._asked = None
        for request_id in batch.request_ids:
            self._drawn.pop(request_id, None)
        if self._down and not self._recovered():
            return np.zeros_like(budgets)
        if self._pending is not None:
            # Drafts for an earlier state of the sequences are not used; prepared ones may be.
            is_due = self._pending.chains is not None and not self._late
            self._waited_ms = 0.0
            self._receive(self._timeout_s if is_due else 0.0)
            if self._pending is not None:
                if is_due:
                    raise self._missed()
                return np.zeros_like(budgets)
        cache = self._cache
        if cache is None:
            return budgets
        prepares = self._prepares = cache.pace.begin_round(batch, self.clock())
        missed = budgets.copy()
        if cache.is_empty and not prepares:
            return missed
        for row, request_id in enumerate(batch.request_ids):
            sequence = self._sequences.get(request_id)
            if budgets[row] <= 0 or sequence is None:
                continue
            helps = request_id in helped
            found = cache.look_up(request_id, sequence.tokens.view, helps=helps)
            if found is not None:
                draft = tree.truncate(found, int(budgets[row]))
                drafts[row] = draft if self._is_used(draft, sequence) else tree.EMPTY
                missed[row] = 0
            elif helps or (prepares and sequence.num_uncomputed > _FEW_TOKENS):
                missed[row] = 0  # its prompt is computed along with the preparation
        return missed

    def ask(self, batch: Batch, missed: IntArray) -> None:
        """Second part: requests chains for rows with nodes to draw, if it pays to wait."""
        cache = self._cache
        if cache is not None:
            num_missed = int((missed > 0).sum())
            self._has_missed = num_missed > 0
            if not num_missed or (
                self._prepares and not cache.drafts_misses(num_missed, batch.num_seqs)
            ):
                return
        rows, sources = self._rows(
            batch, np.where(missed > 0, missed, -1), _ALL if self.mask_token is None else 1
        )
        if rows:
            self._post(self._step_of(rows), _Pending(self._step, rows, self.clock()))
            self._asked = sources

    def take(
        self,
        batch: Batch,
        drafts: list[Draft],  # output
    ) -> None:
        """Third part: waits for the chains, up to the deadline.

        Raises:
            TimeoutError: the deadline was missed; not raised again until an answer is in time.
        """
        sources, self._asked = self._asked, None
        pending = self._pending
        if sources is None or pending is None:
            return
        drafted = self._receive(0.0 if self._late else self._timeout_s)
        if drafted is None:
            if self._late:
                return
            raise self._missed()
        for index, source in enumerate(sources):
            draft = chain_of(drafted, index, self.name)
            self._drawn[batch.request_ids[source]] = draft.num_nodes
            if self._is_used(draft, pending.rows[index].sequence):
                drafts[source] = draft

    def _is_used(self, draft: Draft, sequence: PagedTokens) -> bool:
        """Returns True if a draft is to be verified: not if it is shorter than `draft_min`.

        If chains end where the model is unsure, their length depends on their tokens. If these were
        drawn, a rule that weighs them is exact only if it sees all of them.
        """
        if draft.num_nodes >= self._draft_min:
            return True
        wish = sequence.request.speculation.min_prob
        ends_early = (self._p_min if wish is None else wish) > 0
        return ends_early and draft.probs is not None and bool(draft.probs.probs.any())

    def finish(
        self,
        batch: Batch,
        budgets: IntArray,
        drafts: list[Draft],
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        """Last part: prepares the next round, once all drafts of this one are known.

        Args:
            places: by request that several models prepare: index of this model, and their number.
        """
        self.wait.proposed(self.clock())
        cache, prepares = self._cache, self._prepares
        if cache is None or prepares is None:
            return
        cache.end_round(batch, drafts, self._waited_ms, has_missed=self._has_missed)
        self._waited_ms = 0.0
        if prepares and self._pending is None:
            self._prepare(cache, batch, budgets, drafts, places)

    def _prepare(
        self,
        cache: SpeculationCache,
        batch: Batch,
        budgets: IntArray,
        drafts: list[Draft],
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        """Requests the drafts of the next round without waiting."""
        nodes = ints([draft.num_nodes for draft in drafts])
        rows, sources = self._rows(batch, np.where(budgets > 0, nodes, -1), 0)
        if not rows:
            return
        chains = [
            drafts[source].tokens[: row.max_nodes]
            for row, source in zip(rows, sources, strict=True)
        ]
        for source in sources:  # these nodes are computed again, with the last node
            self._drawn.pop(batch.request_ids[source], None)
        whole = [row.num_chunk == row.sequence.num_uncomputed for row in rows]
        reach = [
            min(int(batch.max_depth[source]), self._model.max_model_len - row.sequence.num_tokens)
            for row, source in zip(rows, sources, strict=True)
        ]
        continuation = self._continuation(cache, batch, budgets, rows, sources)
        step = self._step_of(rows)
        joined = JoinedDrafts(np.concatenate(chains), ints([len(chain) for chain in chains]))
        plan = replace(step.plan, drafts=joined) if len(joined.tokens) else step.plan
        preparation = cache.preparation(whole, reach)
        if places:
            shares = [places.get(batch.request_ids[source], (0, 1)) for source in sources]
            preparation = replace(preparation, shares=ints(shares).reshape(-1, 2))
        step = replace(step, plan=plan, preparation=preparation, continuation=continuation)
        round_ = batch.step, sources
        self._post(step, _Pending(self._step, rows, self.clock(), chains, round_))

    @property
    def _num_ahead(self) -> int:
        """Slots after the known tokens that a chain may use before it is requested."""
        reads = self._cache is not None and self._model.reads_verdicts
        return self._draft_len if reads else 0

    def _continuation(
        self,
        cache: SpeculationCache,
        batch: Batch,
        budgets: IntArray,
        rows: list[Row],
        sources: list[int],
    ) -> Continuation | None:
        """Returns what follows a preparation of `rows`; reserves its blocks, if there are any.

        A draft of the next round has as many nodes as one of this round may have.
        """
        least = cache.least_missed(len(rows)) if self._model.reads_verdicts else 0
        if not least:
            return None
        size, room = self._pool.block_size, []
        for sequence, num_chunk, num_nodes, _ in rows:
            known = sequence.num_tokens
            if num_chunk < sequence.num_uncomputed:
                room.append(0)
                continue
            wanted = min(known + num_nodes + 1 + self._num_ahead, self._model.max_model_len)
            sequence.allocate(self._pool, wanted)
            room.append(min(wanted, len(sequence.blocks) * size) - known)
        return Continuation(batch.step, ints(sources), budgets[sources], ints(room), least)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.wait.observed(self.clock())
        pending = self._pending
        if pending is not None and pending.chains is not None and pending.round_step == batch.step:
            for index, chain in enumerate(pending.chains):
                emitted = verdict.tokens(pending.sources[index]).tolist()
                pending.num_accepted[index] = num_agreeing(emitted, chain.tolist())
        emitted, starts = verdict.emitted.tolist(), verdict.emitted_start.tolist()
        for row, request_id in enumerate(batch.request_ids):
            sequence, begin, end = self._sequences.get(request_id), starts[row], starts[row + 1]
            if sequence is None or begin == end:
                continue
            drawn = self._drawn.pop(request_id, 0)
            if drawn and self.mask_token is None:  # otherwise, the nodes' rows are masks
                # The last node drawn was never fed back, so its KV does not exist.
                sequence.num_computed += min(len(verdict.nodes(row)), drawn - 1)
            sequence.tokens.extend(emitted[begin:end])
            sequence.trim(self._pool, self._num_ahead)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                sequence.free(self._pool)
                self._seating.leave(sequence)
            self._drawn.pop(request_id, None)
        if self._cache is not None:
            self._cache.close(request_ids)

    def check(self) -> None:
        """Asserts that every block is either free or held by a known sequence."""
        self._pool.check(sequence.blocks for sequence in self._sequences.values())

    def _step_of(self, rows: list[Row]) -> DraftStep:
        """Returns the next step for these rows."""
        self._step += 1
        wishes = [row.sequence.request.speculation.min_prob for row in rows]
        min_probs: FloatArray | None = None
        if any(each is not None for each in wishes):
            own = [self._p_min if each is None else each for each in wishes]
            min_probs = np.array(own, dtype=np.float32)
        return DraftStep(
            plan=self._seating.plan(self._step, rows),
            probs_top=self._probs_top,
            salted=self._salted,
            p_min=self._p_min,
            min_probs=min_probs,
            mask_token=self.mask_token,
        )

    def _post(self, step: DraftStep, pending: _Pending) -> None:
        try:
            self._model.ask(step)
        except WorkerDiedError as error:
            self._lost(error.message)
            raise
        self._pending = pending

    def _receive(self, timeout_s: float) -> Drafted | None:
        """Returns the pending answer; the tokens that it computed count even if it is late."""
        pending, self._pending = self._pending, None
        assert pending is not None
        start = self.clock()
        if self.deadline_s is not None:
            timeout_s = min(timeout_s, max(0.0, self.deadline_s - start))
        try:
            drafted = self._model.answer(timeout_s)
            while drafted is not None and drafted.step != pending.step:
                if self._cache is not None:
                    self._cache.counts.num_dropped += 1
                left_s = start + timeout_s - self.clock()
                drafted = self._model.answer(max(0.0, left_s))
        except WorkerDiedError as error:
            self._lost(error.message)
            raise
        except WorkerError:  # some ranks may have received the plan, or none
            self._seating.reset(self._sequences.values())
            raise
        waited_ms = (self.clock() - start) * 1e3
        pending.waited_ms += waited_ms
        if drafted is None:
            self._pending = pending
            pending.num_polls += 1
            return None
        self.load = drafted.load
        self._count_computed(pending)
        # If a long step delayed the first poll, the model may still have answered in time.
        took_s = self.clock() - pending.asked_at
        if self.link_counts is not None:
            # Waiting for a chain that was begun before does not measure the link.
            is_asked = pending.chains is None and not drafted.num_begun
            is_awaited = is_asked and pending.num_polls == 0
            self.link_counts.count(drafted, took_s if is_awaited else None)
        self._learn_wait(waited_ms / 1e3)
        if took_s < self._timeout_s or (
            pending.num_polls == 1 and drafted.forward_ms < self._timeout_s * 1e3
        ):
            self._late = False
        if self._cache is not None:
            self._waited_ms += waited_ms
            is_prepared = pending.chains is not None
            self._cache.counts.num_begun += drafted.num_begun
            self._cache.count_wait(
                pending.waited_ms,
                drafted.forward_ms,
                prepared=is_prepared,
                begun_ms=drafted.begun_ms,
            )
            if pending.chains is not None:
                # A request that was closed meanwhile may have passed its id to another.
                ids = [
                    row.sequence.request.id if self._is_open(row.sequence) else None
                    for row in pending.rows
                ]
                self._cache.store(drafted, ids, pending.known, pending.chains)
        return drafted

    def _is_open(self, sequence: PagedTokens) -> bool:
        return self._sequences.get(sequence.request.id) is sequence

    def _count_computed(self, pending: _Pending) -> None:
        """Counts the tokens that an answered step has computed, including accepted nodes."""
        for index, row in enumerate(pending.rows):
            sequence, known = row.sequence, pending.known[index]
            is_open = self._is_open(sequence)
            if not is_open or sequence.num_computed != pending.computed[index]:
                continue
            sequence.num_computed += row.num_chunk
            if sequence.num_computed == known:
                # Only these: a chain that was begun on that verdict may use the nodes' slots.
                sequence.num_computed += pending.num_accepted[index]
            sequence.cache_blocks(self._pool)

    def _lost(self, reason: str) -> None:
        self._down = reason or "it died"
        self._late = False
        self._pending = None

    def _rows(
        self,
        batch: Batch,
        num_nodes: IntArray,  # [num_seqs], requested after the known tokens; -1: no row at all
        num_free: int,
    ) -> tuple[list[Row], list[int]]:
        """Returns the rows that fit into one draft step, and their indices in `batch`.

        Args:
            num_free: nodes of a sequence that are not computed along with the known tokens.
        """
        rows: list[Row] = []
        sources: list[int] = []
        left = self._model.max_num_batched_tokens
        busy = {
            rid for rid, wanted in zip(batch.request_ids, num_nodes, strict=True) if wanted >= 0
        }
        for source, (request_id, wanted) in enumerate(
            zip(batch.request_ids, num_nodes.tolist(), strict=True)
        ):
            sequence = self._sequences.get(request_id)
            if wanted < 0 or sequence is None or left <= 0:
                continue
            if sequence.num_tokens + wanted > self._model.max_model_len:
                continue
            self._sequences[request_id] = self._sequences.pop(request_id)  # drafted most recently
            if not sequence.blocks:
                sequence.acquire_cached(self._pool)
            if not self._reserve(sequence, sequence.num_tokens + wanted, busy):
                continue
            # After a failed step the root may be computed already, but its logits are needed.
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            missing = sequence.num_tokens - sequence.num_computed
            chunk = min(missing, left)
            left -= chunk
            nodes = wanted if chunk == missing else 0  # known tokens first
            nodes = min(nodes, left + num_free)
            left -= max(0, nodes - num_free)
            rows.append(Row(sequence, chunk, nodes))
            sources.append(source)
        return rows, sources

    def _reserve(self, sequence: PagedTokens, num_slots: int, busy: set[str]) -> bool:
        """Allocates blocks for `num_slots` tokens; evicts sequences that do not draft if needed."""
        idle = (s for rid, s in self._sequences.items() if rid not in busy and s.blocks)
        while not sequence.allocate(self._pool, num_slots):
            victim = next(idle, None)
            if victim is None:
                return False
            victim.free(self._pool)
            self._drawn.pop(victim.request.id, None)
        return True

    def _recovered(self) -> bool:
        """Returns True if the model is up again; then resets the accounting to an empty cache."""
        if not super()._recovered():
            return False
        self._drawn.clear()
        for sequence in self._sequences.values():
            sequence.free(self._pool)
        self._seating.reset(self._sequences.values())
        self._pool.clear_cache()
        if self._cache is not None:
            self._cache.clear()
        return True


class PARD(DraftTarget):
    """Drafts a chain in one forward (arXiv:2504.18583).

    The model's input is the tokens that the target emitted, and a mask token for every drafted
    token except the first. The rows of the last emitted token and of the masks give the chain. No
    row depends on a drafted token, so the distribution of each is known before it is drawn. The
    rows of masks are not part of the model's cache, and an accepted token is computed in the next
    round.
    """

    name = "pard"

    def __init__(self, config: PARDConfig, model: DraftModel) -> None:
        self.mask_token = mask_token(config, model.vocab_size)
        super().__init__(config, model)
