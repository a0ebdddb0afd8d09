"""DraftTarget: a small model of the same vocabulary drafts a chain (Leviathan et al. 2023).

This is the engine's side: the accounting of the draft model's paged KV, which tokens it still has
to compute, and what a verdict rewinds. The model (`workers/draft.py`) runs in its own workers or
inside the target's, behind `DraftModel`. A separate model has a deadline: when it misses one, that
step and later ones run without drafts and do not wait, until the model answers in time again. One
request is outstanding at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import DraftTargetConfig
from ..errors import WorkerDiedError, WorkerError
from ..scheduler import tree
from ..scheduler.blocks import BlockPool
from ..scheduler.seating import Row, Seating
from ..scheduler.sequence import PagedTokens
from ..scheduler.types import Batch, Draft, DraftProbs, IntArray, Request, SeatSettings, Verdict
from .protocol import Drafted, Drafter, DraftModel, DraftStep, Needs, OwnWorkers


@dataclass(slots=True)
class _Pending:
    """A draft step without an answer yet."""

    rows: list[Row]
    computed: list[int]  # per row, tokens in the model's cache at the request
    asked_at: float  # monotonic clock
    num_polls: int = 0  # without an answer


class DraftTarget(OwnWorkers, Drafter):
    """Keeps the draft model's cache consistent with the committed tokens."""

    name = "draft_target"
    needs = Needs(probabilities=True)

    def __init__(self, config: DraftTargetConfig, model: DraftModel) -> None:
        self._model = model
        self._probs_top = config.probs_top if config.wants_draft_probs else 0
        self._salted = config.salts_rounds
        self._draft_min, self._p_min = config.draft_min, config.p_min
        self._pool = BlockPool(model.num_blocks, model.block_size)
        self._seating = Seating()
        self._sequences: dict[str, PagedTokens] = {}  # least recently drafted first
        self._drawn: dict[str, int] = {}  # nodes drawn in the step that runs
        self._step = 0
        self._timeout_s = config.draft_timeout_s
        self._pending: _Pending | None = None

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._sequences[request.id] = PagedTokens(request, SeatSettings.for_drafting(request))

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        self._drawn.clear()
        if self._down and not self._recovered():
            return drafts
        if self._pending is not None:
            self._receive(0.0)  # drawn for an earlier state of the sequences: not used
            if self._pending is not None:
                return drafts
        rows, sources = self._rows(batch, budgets)
        if not rows:
            return drafts
        self._step += 1
        step = DraftStep(
            plan=self._seating.plan(self._step, rows),
            probs_top=self._probs_top,
            salted=self._salted,
            p_min=self._p_min,
        )
        drafted = self._ask(step, rows)
        if drafted is not None:
            for index, source in enumerate(sources):
                draft = self._draft(drafted, index)
                self._drawn[batch.request_ids[source]] = draft.num_nodes
                if draft.num_nodes >= self._draft_min:
                    drafts[source] = draft
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, request_id in enumerate(batch.request_ids):
            sequence = self._sequences.get(request_id)
            emitted = verdict.tokens(row)
            if sequence is None or not len(emitted):
                continue
            drawn = self._drawn.pop(request_id, 0)
            if drawn:
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

    def check(self) -> None:
        """Asserts that every block is either free or held by a known sequence."""
        self._pool.check(sequence.blocks for sequence in self._sequences.values())

    def _ask(self, step: DraftStep, rows: list[Row]) -> Drafted | None:
        """The answer, if it arrives before the deadline.

        Raises:
            TimeoutError: the deadline was missed; not raised again until an answer is in time.
        """
        pending = _Pending(rows, [row.sequence.num_computed for row in rows], time.monotonic())
        try:
            self._model.ask(step)
        except WorkerDiedError as error:
            self._lost(error.message)
            raise
        self._pending = pending
        drafted = self._receive(0.0 if self._late else self._timeout_s)
        if drafted is None and not self._late:
            raise self._missed()
        return drafted

    def _receive(self, timeout_s: float) -> Drafted | None:
        """The pending answer; the tokens it computed count even if it is late."""
        pending, self._pending = self._pending, None
        assert pending is not None
        try:
            drafted = self._model.answer(timeout_s)
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
        for row, computed in zip(pending.rows, pending.computed, strict=True):
            sequence = row.sequence
            known = self._sequences.get(sequence.request.id) is sequence
            if known and sequence.num_computed == computed:
                sequence.num_computed += row.num_chunk
                sequence.cache_blocks(self._pool)
        # If a long step delayed the first poll, the model may still have answered in time.
        took_s = time.monotonic() - pending.asked_at
        if took_s < self._timeout_s or (
            pending.num_polls == 1 and drafted.forward_ms < self._timeout_s * 1e3
        ):
            self._late = False
        return drafted

    def _lost(self, reason: str) -> None:
        self._down = reason or "it died"
        self._late = False
        self._pending = None

    def _rows(self, batch: Batch, budgets: IntArray) -> tuple[list[Row], list[int]]:
        """The rows that fit into one draft step, and their indices in `batch`."""
        rows: list[Row] = []
        sources: list[int] = []
        left = self._model.max_num_batched_tokens
        busy = {rid for rid, budget in zip(batch.request_ids, budgets, strict=True) if budget > 0}
        for source, (request_id, budget) in enumerate(
            zip(batch.request_ids, budgets.tolist(), strict=True)
        ):
            sequence = self._sequences.get(request_id)
            if budget <= 0 or sequence is None or left <= 0:
                continue
            if sequence.num_tokens + budget > self._model.max_model_len:
                continue
            self._sequences[request_id] = self._sequences.pop(request_id)  # drafted most recently
            if not sequence.blocks:
                sequence.acquire_cached(self._pool)
            if not self._reserve(sequence, sequence.num_tokens + budget, busy):
                continue
            # After a failed step the root may be computed already, but its logits are needed.
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            missing = sequence.num_tokens - sequence.num_computed
            chunk = min(missing, left)
            left -= chunk
            nodes = budget if chunk == missing else 0  # known tokens first
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
        return True

    def _draft(self, drafted: Drafted, index: int) -> Draft:
        begin, end = int(drafted.start[index]), int(drafted.start[index + 1])
        if begin == end:
            return tree.EMPTY
        probs = drafted.probs
        if probs is not None:
            probs = DraftProbs(probs.ids[begin:end], probs.probs[begin:end])
        return tree.chain(drafted.tokens[begin:end], self.name, probs)

    def _recovered(self) -> bool:
        """Whether the model is up again; if so, resets the accounting to an empty cache."""
        if not super()._recovered():
            return False
        for sequence in self._sequences.values():
            sequence.free(self._pool)
        self._seating.reset(self._sequences.values())
        self._pool.clear_cache()
        return True
