"""DraftTarget: a small model of the same vocabulary drafts a chain (Leviathan et al. 2023).

This is the scheduler's side: whose tokens the draft model has in its own paged KV, what it still
has to compute, and what a verdict rewinds. The model itself (`workers/draft.py`) runs in its own
workers or inside the target's; from here that is one `DraftModel` either way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..config import DraftTargetConfig
from ..errors import WorkerDiedError
from ..scheduler import tree
from ..scheduler.blocks import BlockPool
from ..scheduler.packing import Row, pack
from ..scheduler.sequence import PagedTokens
from ..scheduler.types import (
    Batch,
    Draft,
    Drafted,
    DraftProbs,
    DraftStep,
    IntArray,
    Request,
    SamplingRows,
    Verdict,
    ints,
)
from .protocol import DraftModel, Needs

log = logging.getLogger(__name__)


class DraftTarget:
    """Keeps the draft model's cache in step with what the target committed."""

    name = "draft_target"
    needs = Needs(probabilities=True)

    def __init__(self, config: DraftTargetConfig, model: DraftModel) -> None:
        self._model = model
        self._probs_top = config.probs_top if config.wants_draft_probs else 0
        self._salted = config.salts_rounds
        self._pool = BlockPool(model.num_blocks, model.block_size)
        self._sequences: dict[str, PagedTokens] = {}  # least recently drafted first
        self._drawn: dict[str, int] = {}  # nodes drawn in the step that runs
        self._step = 0
        self._down = False

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._sequences[request.id] = PagedTokens(
                request.tenant, request.prompt, request.emitted
            )

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        if self._down and not self._revived():
            return drafts
        rows, sources = self._rows(batch, budgets)
        if not rows:
            return drafts
        self._step += 1
        known = pack(self._step, rows, ints([]).reshape(0, 2), _select(batch.sampling, sources))
        step = DraftStep(
            known=tree.join(known, [tree.EMPTY] * len(rows), self._pool.block_size),
            max_nodes=known.max_nodes,
            probs_top=self._probs_top,
            salted=self._salted,
        )
        try:
            drafted = self._model.draft(step)
        except WorkerDiedError:
            self._down = True
            raise
        for index, (row, source) in enumerate(zip(rows, sources, strict=True)):
            row.sequence.num_computed += row.num_chunk
            row.sequence.publish(self._pool)
            drafts[source] = self._draft(drafted, index)
            self._drawn[row.request_id] = drafts[source].num_nodes
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
                sequence.drop(self._pool)

    def shutdown(self) -> None:
        self._model.shutdown()

    def check(self) -> None:
        """Asserts that every block is either free or held by a known sequence."""
        self._pool.check(sequence.blocks for sequence in self._sequences.values())

    def _rows(self, batch: Batch, budgets: IntArray) -> tuple[list[Row], list[int]]:
        """The rows that fit into one draft step, and which rows of `batch` they are."""
        rows: list[Row] = []
        sources: list[int] = []
        self._drawn.clear()
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
                sequence.adopt_prefix(self._pool)
            if not self._reserve(sequence, sequence.num_tokens + budget, busy):
                continue
            # A step that came to nothing left the root computed already; its logits are needed.
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            missing = sequence.num_tokens - sequence.num_computed
            chunk = min(missing, left)
            left -= chunk
            nodes = budget if chunk == missing else 0  # catch up first
            rows.append(Row(request_id, sequence, chunk, nodes))
            sources.append(source)
        return rows, sources

    def _reserve(self, sequence: PagedTokens, num_slots: int, busy: set[str]) -> bool:
        """Blocks for `num_slots` tokens, taken from sequences that rest if need be."""
        idle = (s for rid, s in self._sequences.items() if rid not in busy and s.blocks)
        while not sequence.reserve(self._pool, num_slots):
            victim = next(idle, None)
            if victim is None:
                return False
            victim.drop(self._pool)
        return True

    def _draft(self, drafted: Drafted, index: int) -> Draft:
        begin, end = int(drafted.start[index]), int(drafted.start[index + 1])
        if begin == end:
            return tree.EMPTY
        probs = drafted.probs
        if probs is not None:
            probs = DraftProbs(probs.ids[begin:end], probs.probs[begin:end])
        return tree.chain(drafted.tokens[begin:end], self.name, probs)

    def _revived(self) -> bool:
        """Whether the model runs again; its cache is then empty."""
        if not self._model.revive():
            return False
        for sequence in self._sequences.values():
            sequence.drop(self._pool)
        self._pool.clear_cache()
        self._down = False
        log.info("drafter %s is back", self.name)
        return True


def _select(sampling: SamplingRows, rows: list[int]) -> SamplingRows:
    """These rows' settings; penalties and biases are the target's business alone."""
    index = np.array(rows, dtype=np.int64)
    return replace(
        sampling,
        temperature=sampling.temperature[index],
        top_k=sampling.top_k[index],
        top_p=sampling.top_p[index],
        min_p=sampling.min_p[index],
        seeds=sampling.seeds[index],
        min_new_tokens=np.zeros(len(rows), dtype=np.int32),
        num_logprobs=np.full(len(rows), -1, dtype=np.int32),
        ends=(),
        penalties=(),
        biases=(),
        thinking=None,
    )
