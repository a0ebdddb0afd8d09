"""The draft model's part of a worker: compute the known tokens, then draw chains token by token.

The worker draws whole chains, so a round takes one message each way. With `coupled` verification
the draws use the target's noise (Daliri, Musco, Suresh 2024, arXiv:2408.07978); with `rejection`
and `block` the sparse distributions that they were drawn from are returned too.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from ..drafters.protocol import Drafted, DraftStep
from ..scheduler.types import (
    DraftProbs,
    IntArray,
    SamplingRows,
    StepInput,
    ints,
    starts_of,
)
from .collective import Collective
from .model.paged import PagedModel
from .seats import Seats, lay_out
from .verify.process import DrawSettings
from .verify.sample import draw, draw_siblings


class DraftService:
    """A loaded draft model and its cache; all ranks use rank 0's draws."""

    def __init__(
        self, model: PagedModel, num_blocks: int, block_size: int, collective: Collective
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._cache = model.new_cache(num_blocks, block_size)
        self._seats = Seats(block_size)
        self._collective = collective

    def draft(self, step: DraftStep) -> Drafted:
        """Draws a chain of up to `max_nodes` tokens per sequence, in one batch."""
        start = time.perf_counter()
        with torch.inference_mode():
            tokens, probs, lengths = self._chains(step)
        order = [(row, depth) for row, length in enumerate(lengths) for depth in range(length)]
        picked = tuple(np.array(order, dtype=np.int64).reshape(-1, 2).T)
        return Drafted(
            tokens=tokens[picked],
            start=starts_of(lengths),
            probs=None if probs is None else DraftProbs(probs.ids[picked], probs.probs[picked]),
            forward_ms=(time.perf_counter() - start) * 1e3,
        )

    def _chains(self, step: DraftStep) -> tuple[IntArray, DraftProbs | None, IntArray]:
        """Draws chains: tokens, distributions and lengths.

        Shapes: [num_seqs, depth], [num_seqs, depth, top] if requested, and [num_seqs].
        """
        known, budgets = self._seats.expand(step.plan), step.plan.max_nodes
        num_seqs, depth = known.num_seqs, int(budgets.max(initial=0))
        tokens = np.zeros((num_seqs, depth), dtype=np.int32)
        ids = np.zeros((num_seqs, depth, step.probs_top), dtype=np.int32)
        probs = np.zeros((num_seqs, depth, step.probs_top), dtype=np.float32)
        lengths = np.zeros(num_seqs, dtype=np.int32)
        lens = known.context_lens + known.query_lens  # tokens computed after `known`
        rows = ints(np.flatnonzero(known.samples))
        logits = self._model.forward(known, self._cache)
        keep = budgets[rows] > 0
        rows, logits = rows[keep], logits[torch.from_numpy(keep).to(logits.device)]
        for level in range(depth):
            if level:
                last, index = tokens[rows, level - 1], lens[rows] + level - 1
                following = _next_token(known, rows, last, index, self._block_size)
                logits = self._model.forward(following, self._cache)
            if step.p_min > 0:
                keep = self._likely(logits, step.p_min)
                rows, logits = rows[keep], logits[torch.from_numpy(keep).to(logits.device)]
                if not len(rows):
                    break
            drawn = self._draw(step, known.sampling, rows, logits, lens[rows], level)
            lengths[rows] += 1
            tokens[rows, level] = drawn[0]
            if step.probs_top:
                width = drawn[1].shape[1]
                ids[rows, level, :width], probs[rows, level, :width] = drawn[1], drawn[2]
            going = budgets[rows] > level + 1
            rows = rows[going]
            if not len(rows):
                break
        return tokens, DraftProbs(ids, probs) if step.probs_top else None, lengths

    def _likely(self, logits: Tensor, p_min: float) -> np.ndarray:
        """Rows [num_rows] whose likeliest token is likely enough; rank 0's answer.

        It depends on the distribution alone and not on what is drawn from it, so that every
        verification rule stays exact.
        """
        best = logits.float().softmax(-1).amax(-1) >= p_min
        agreed = self._collective.broadcast(best.to(torch.int32).contiguous())
        return agreed.cpu().numpy().astype(np.bool_)

    def _draw(
        self,
        step: DraftStep,
        sampling: SamplingRows,
        rows: IntArray,  # [num_rows]
        logits: Tensor,  # [num_rows, vocab]
        first: IntArray,  # [num_rows], position of the chain's first token
        level: int,
    ) -> tuple[np.ndarray, ...]:
        """Rank 0's tokens [num_rows], and ids and probs [num_rows, top] if requested."""
        positions, settings = first + level, DrawSettings.of(sampling, rows)
        if step.probs_top:
            rounds = first if step.salted else None
            drawn, ids, probs = draw_siblings(
                logits, positions, settings, step.probs_top, rounds=rounds
            )
            tokens = drawn[:, 0]
        else:
            tokens = draw(logits, positions, settings)
        tokens = self._collective.broadcast(tokens.contiguous())
        if not step.probs_top:
            return (tokens.cpu().numpy(),)
        return tokens.cpu().numpy(), ids.cpu().numpy(), probs.cpu().numpy()


def _next_token(
    known: StepInput, rows: IntArray, tokens: IntArray, index: IntArray, block_size: int
) -> StepInput:
    """A step of one token for each of `rows`, at position `index` of its sequence."""
    return lay_out(
        token_ids=tokens,
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        context_lens=index.astype(np.int32),
        block_tables=known.block_tables[rows],
        samples=np.ones(len(rows), dtype=np.bool_),
        max_nodes=np.zeros(len(rows), dtype=np.int32),
        sampling=known.sampling,
        drafts=None,
        block_size=block_size,
    )
