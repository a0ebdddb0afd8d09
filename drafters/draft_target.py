"""DraftTarget: a small model of the same vocabulary drafts a chain (Leviathan et al. 2023).

This is the engine's side: the accounting of the draft model's paged KV, which tokens it still has
to compute, and what a verdict rewinds. The model (`workers/draft.py`) runs in its own workers or
inside the target's, behind `DraftModel`. A separate model has a deadline: when it misses one, that
step and later ones run without drafts and do not wait, until the model answers in time again. One
request is outstanding at a time.

With a speculation cache (`speculation_cache.py`) a round ends with another request: the model
computes the drafts that the target is about to verify, and prepares those of the next round while
it does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..config import DraftTargetConfig
from ..errors import WorkerDiedError, WorkerError
from ..scheduler import tree
from ..scheduler.blocks import BlockPool
from ..scheduler.sequence import PagedTokens, Row, Seating
from ..scheduler.timer import Clock
from ..scheduler.types import (
    Batch,
    Draft,
    IntArray,
    JoinedDrafts,
    Request,
    SeatSettings,
    Verdict,
    ints,
)
from .protocol import Drafted, Drafter, DraftFault, DraftModel, DraftStep, Needs, OwnWorkers
from .speculation_cache import SpeculationCache, chain_of, common_prefix

_ALL = 1 << 20  # more nodes than a sequence has: each is computed in a forward of its own
_FEW_TOKENS = 64  # not computed yet, for which a step may wait


class _Pending:
    """A draft step without an answer yet.

    Args:
        rows: the sequences that take part.
        chains: of a preparation, by row: what the target verifies behind the known tokens.
    """

    def __init__(
        self, step: int, rows: list[Row], now_s: float, chains: Sequence[IntArray] | None = None
    ) -> None:
        self.step, self.rows, self.chains = step, rows, chains
        self.computed = [row.sequence.num_computed for row in rows]  # in the model's cache
        self.known = [row.sequence.num_tokens for row in rows]
        self.asked_at = now_s
        self.num_polls = 0  # without an answer


class DraftTarget(OwnWorkers, Drafter):
    """Keeps the draft model's cache consistent with the committed tokens."""

    name = "draft_target"
    needs = Needs(probabilities=True)
    mask_token: int | None = None  # as of `DraftStep`

    def __init__(self, config: DraftTargetConfig, model: DraftModel) -> None:
        self._model = model
        self.clock: Clock = time.monotonic  # of deadlines; a simulation sets its own
        self._probs_top = config.probs_top if config.wants_draft_probs else 0
        self._salted = config.salts_rounds
        self._draft_min, self._p_min = config.draft_min, config.p_min
        self._pool = BlockPool(model.num_blocks, model.block_size)
        self._seating = Seating()
        self._sequences: dict[str, PagedTokens] = {}  # least recently drafted first
        self._drawn: dict[str, int] = {}  # nodes drawn in a step in flight
        self._step = 0
        self._timeout_s = config.draft_timeout_s
        self._pending: _Pending | None = None
        self._waited_ms = 0.0  # for drafts, in the step that runs
        self._cache: SpeculationCache | None = None
        if config.speculation_cache is not None:
            # With masks, every drafted token but the first has a row in the same forward.
            rows_each = 1 if self.mask_token is None else config.prepared_len
            self._cache = SpeculationCache(
                config.speculation_cache,
                config.prepared_len,
                config.draft_len,
                max(1, model.max_num_batched_tokens // rows_each),
                self.name,
                shares_noise=config.shares_noise,
            )
            self.cache_counts = self._cache.counts

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._sequences[request.id] = PagedTokens(request, SeatSettings.for_drafting(request))

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        for request_id in batch.request_ids:
            self._drawn.pop(request_id, None)
        if self._down and not self._recovered():
            return drafts
        if self._pending is not None:
            # Drafts for an earlier state of the sequences are not used; prepared ones may be.
            is_due = self._pending.chains is not None and not self._late
            self._waited_ms = 0.0
            self._receive(self._timeout_s if is_due else 0.0)
            if self._pending is not None:
                if is_due:
                    raise self._missed()
                return drafts
        if self._cache is None:
            self._draw(batch, budgets, drafts)
            return drafts
        try:
            self._propose_prepared(self._cache, batch, budgets, drafts)
        except (WorkerError, TimeoutError) as error:  # what was found in the cache is still good
            raise DraftFault(str(error), drafts) from error
        return drafts

    def _propose_prepared(
        self,
        cache: SpeculationCache,
        batch: Batch,
        budgets: IntArray,
        drafts: list[Draft],  # written
    ) -> None:
        """Fills `drafts` from the cache; then has the next round prepared."""
        prepares = cache.pace.begin_round(batch, self.clock())
        missed = budgets.copy()
        if not cache.is_empty or prepares:
            for row, request_id in enumerate(batch.request_ids):
                sequence = self._sequences.get(request_id)
                if budgets[row] <= 0 or sequence is None:
                    continue
                found = cache.look_up(request_id, sequence.tokens.view)
                if found is not None:
                    draft = tree.truncate(found, int(budgets[row]))
                    drafts[row] = draft if draft.num_nodes >= self._draft_min else tree.EMPTY
                    missed[row] = 0
                elif prepares and sequence.num_uncomputed > _FEW_TOKENS:
                    missed[row] = 0  # its prompt is computed along with the preparation
        num_missed = int((missed > 0).sum())
        if num_missed and (not prepares or cache.drafts_misses(num_missed, batch.num_seqs)):
            self._draw(batch, missed, drafts)
        elif not num_missed:
            cache.count_saved(self._waited_ms, sum(draft.num_nodes > 0 for draft in drafts))
        self._waited_ms = 0.0
        num_drafted = sum(draft.num_nodes > 0 for draft in drafts)
        cache.pace.end_round(batch, num_drafted, cache.mean_accepted)
        if prepares and self._pending is None:
            self._prepare(cache, batch, budgets, drafts)

    def _draw(self, batch: Batch, budgets: IntArray, drafts: list[Draft]) -> None:
        """Has chains drawn for rows with a budget, and waits for them."""
        nodes = np.where(budgets > 0, budgets, -1)
        rows, sources = self._rows(batch, nodes, _ALL if self.mask_token is None else 1)
        if not rows:
            return
        drafted = self._ask(self._step_of(rows), _Pending(self._step, rows, self.clock()))
        if drafted is not None:
            for index, source in enumerate(sources):
                draft = chain_of(drafted, index, self.name)
                self._drawn[batch.request_ids[source]] = draft.num_nodes
                if draft.num_nodes >= self._draft_min:
                    drafts[source] = draft

    def _prepare(
        self, cache: SpeculationCache, batch: Batch, budgets: IntArray, drafts: list[Draft]
    ) -> None:
        """Asks for the drafts of the next round, without waiting."""
        nodes = ints([draft.num_nodes for draft in drafts])
        rows, sources = self._rows(batch, np.where(budgets > 0, nodes, -1), 0)
        if not rows:
            return
        chains = [
            drafts[source].tokens[: row.max_nodes]
            for row, source in zip(rows, sources, strict=True)
        ]
        for source in sources:  # these nodes are computed again, with the last one
            self._drawn.pop(batch.request_ids[source], None)
        whole = [row.num_chunk == row.sequence.num_uncomputed for row in rows]
        reach = [
            min(int(batch.max_depth[source]), self._model.max_model_len - row.sequence.num_tokens)
            for row, source in zip(rows, sources, strict=True)
        ]
        step = self._step_of(rows)
        joined = JoinedDrafts(np.concatenate(chains), ints([len(chain) for chain in chains]))
        plan = replace(step.plan, drafts=joined) if len(joined.tokens) else step.plan
        step = replace(step, plan=plan, preparation=cache.preparation(whole, reach))
        self._post(step, _Pending(self._step, rows, self.clock(), chains))

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, request_id in enumerate(batch.request_ids):
            sequence = self._sequences.get(request_id)
            emitted = verdict.tokens(row)
            if sequence is None or not len(emitted):
                continue
            drawn = self._drawn.pop(request_id, 0)
            if drawn and self.mask_token is None:  # else the nodes' rows are masks'
                # The last node drawn was never fed back, so its KV does not exist.
                sequence.num_computed += min(len(verdict.nodes(row)), drawn - 1)
            sequence.tokens.extend(emitted)
            sequence.trim(self._pool)

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
        """The next step, of these rows."""
        self._step += 1
        return DraftStep(
            plan=self._seating.plan(self._step, rows),
            probs_top=self._probs_top,
            salted=self._salted,
            p_min=self._p_min,
            mask_token=self.mask_token,
        )

    def _post(self, step: DraftStep, pending: _Pending) -> None:
        try:
            self._model.ask(step)
        except WorkerDiedError as error:
            self._lost(error.message)
            raise
        self._pending = pending

    def _ask(self, step: DraftStep, pending: _Pending) -> Drafted | None:
        """The answer, if it arrives before the deadline.

        Raises:
            TimeoutError: the deadline was missed; not raised again until an answer is in time.
        """
        self._post(step, pending)
        drafted = self._receive(0.0 if self._late else self._timeout_s)
        if drafted is None and not self._late:
            raise self._missed()
        return drafted

    def _receive(self, timeout_s: float) -> Drafted | None:
        """The pending answer; the tokens it computed count even if it is late."""
        pending, self._pending = self._pending, None
        assert pending is not None
        start = self.clock()
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
        except WorkerError:  # the plan may have reached some ranks, or none
            self._seating.reset(self._sequences.values())
            raise
        if drafted is None:
            self._pending = pending
            pending.num_polls += 1
            return None
        self._count_computed(pending)
        # If a long step delayed the first poll, the model may still have answered in time.
        took_s = self.clock() - pending.asked_at
        if took_s < self._timeout_s or (
            pending.num_polls == 1 and drafted.forward_ms < self._timeout_s * 1e3
        ):
            self._late = False
        if self._cache is not None:
            self._waited_ms = (self.clock() - start) * 1e3
            self._cache.count_wait(self._waited_ms, drafted)
            if pending.chains is not None:
                # A request that was closed meanwhile may have given its id to another.
                ids = [
                    row.sequence.request.id if self._is_open(row.sequence) else None
                    for row in pending.rows
                ]
                self._cache.store(drafted, ids, pending.known, pending.chains)
        return drafted

    def _is_open(self, sequence: PagedTokens) -> bool:
        return self._sequences.get(sequence.request.id) is sequence

    def _count_computed(self, pending: _Pending) -> None:
        """Counts the tokens that an answered step has computed, accepted nodes included."""
        for index, row in enumerate(pending.rows):
            sequence, known = row.sequence, pending.known[index]
            is_open = self._is_open(sequence)
            if not is_open or sequence.num_computed != pending.computed[index]:
                continue
            sequence.num_computed += row.num_chunk
            if pending.chains is not None and sequence.num_computed == known:
                emitted = sequence.tokens.part(known, sequence.num_tokens).tolist()
                sequence.num_computed += common_prefix(emitted, pending.chains[index].tolist())
            sequence.cache_blocks(self._pool)

    def _lost(self, reason: str) -> None:
        self._down = reason or "it died"
        self._late = False
        self._pending = None

    def _rows(
        self,
        batch: Batch,
        num_nodes: IntArray,  # [num_seqs], wanted behind the known tokens; -1: no row at all
        num_free: int,
    ) -> tuple[list[Row], list[int]]:
        """The rows that fit into one draft step, and their indices in `batch`.

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
        """Whether the model is up again; if so, resets the accounting to an empty cache."""
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
