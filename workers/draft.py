"""The draft model's part of a worker: compute the known tokens, then draw chains.

A chain is drawn token by token, or from one forward in which masks stand for its tokens (PARD). The
worker draws whole chains, so a round takes one message each way. With `coupled` verification
the draws use the target's noise (Daliri, Musco, Suresh 2024, arXiv:2408.07978); with `rejection`
and `block` the sparse distributions that they were drawn from are returned too.

A preparation draws the chains of the next round while the target verifies this one. An outcome of
this round is the number of accepted nodes of a sequence's chain and the bonus token after them.
`choose_outcomes` weighs all that the model's distributions suggest and takes the best of every
sequence. `lay_out_outcomes` makes each of them a sequence of its own, so that all are drafted in
one batch: its table has the sequence's blocks up to the bonus token, and scratch blocks from there
on, into which the begun block is copied. Source: Kumar et al. 2026, arXiv:2603.03251 (Saguaro).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.protocol import Drafted, DraftStep, Outcomes, Preparation, blocks_per_outcome
from ..scheduler.types import (
    DraftProbs,
    FloatArray,
    IntArray,
    JoinedDrafts,
    StepInput,
    ints,
    starts_of,
)
from .collective import Collective
from .model.paged import PagedModel
from .seats import Seats, lay_out
from .verify.process import DrawSettings
from .verify.sample import draw, draw_siblings, rank_draws


class DraftService:
    """A loaded draft model and its cache; all ranks use rank 0's draws.

    Args:
        num_scratch_blocks: blocks beside those of the sequences, for chains behind outcomes.
    """

    def __init__(
        self,
        model: PagedModel,
        num_blocks: int,
        block_size: int,
        collective: Collective,
        num_scratch_blocks: int = 0,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._first_scratch, self._num_scratch = num_blocks, num_scratch_blocks
        self._cache = model.new_cache(num_blocks + num_scratch_blocks, block_size)
        self._seats = Seats(block_size)
        self._collective = collective

    def draft(self, step: DraftStep) -> Drafted:
        """Draws a chain of up to `max_nodes` tokens per sequence, in one batch.

        For a preparation it draws one per outcome.
        """
        start = time.perf_counter()
        with torch.inference_mode():
            if step.preparation is not None:
                drafted = self._prepare(step, step.preparation)
            else:
                lanes = self._known(step)
                drafted = self._draw_chains(step, lanes).drafted()
        return replace(drafted, forward_ms=(time.perf_counter() - start) * 1e3, step=step.plan.step)

    def _known(self, step: DraftStep) -> _Lanes:
        """The known tokens of the sequences, and masks behind them where chains have those."""
        plan, budgets = step.plan, step.plan.max_nodes
        num_masks: IntArray = np.maximum(budgets - 1, 0)
        if step.mask_token is not None and num_masks.any():
            masks = np.full(num_masks.sum(), step.mask_token, dtype=np.int32)
            plan = replace(plan, drafts=JoinedDrafts(masks, num_masks))
        return _Lanes(self._seats.expand(plan), budgets, np.arange(len(budgets)))

    def _prepare(self, step: DraftStep, preparation: Preparation) -> Drafted:
        """One forward of the round's chains, then chains behind their likely outcomes.

        Rejected nodes stay in their slots until known tokens take these.
        """
        known = self._seats.expand(step.plan)
        logits = self._model.forward(known, self._cache)
        outcomes = choose_outcomes(preparation, known, logits, self._collective)
        if not len(outcomes.seqs):
            return replace(_Chains(ints([]), step.probs_top).drafted(), outcomes=outcomes)
        size = blocks_per_outcome(preparation.depth, self._block_size)
        assert len(outcomes.seqs) * size <= self._num_scratch, (len(outcomes.seqs), size)
        first, budgets = lay_out_outcomes(
            outcomes, preparation, known, self._block_size, self._first_scratch, step.mask_token
        )
        chains = self._draw_chains(step, _Lanes(first, budgets, outcomes.seqs))
        return replace(chains.drafted(), outcomes=outcomes)

    def _draw_chains(self, step: DraftStep, lanes: _Lanes) -> _Chains:
        """A chain behind every lane's tokens."""
        chains = _Chains(lanes.budgets, step.probs_top)
        logits = self._model.forward(lanes.first, self._cache)
        if step.mask_token is None:
            self._draw_in_turn(step, lanes, logits, chains)
        else:
            self._draw_at_once(step, lanes, logits, chains)
        return chains

    def _draw_in_turn(
        self,
        step: DraftStep,
        lanes: _Lanes,
        logits: Tensor,  # [num_sampled, vocab]
        chains: _Chains,
    ) -> None:
        """A forward for each level but the first."""
        first, lens = lanes.first, lanes.lens
        rows = ints(np.flatnonzero(first.samples))
        keep = lanes.budgets[rows] > 0
        rows, logits = rows[keep], _picked(logits, keep)
        for level in range(chains.depth):
            if level:
                last, index = chains.tokens[rows, level - 1], lens[rows] + level - 1
                following = _next_token(first, rows, last, index, self._block_size)
                logits = self._model.forward(following, self._cache)
            if step.p_min > 0:
                keep = self._likely(logits, step.p_min)
                rows, logits = rows[keep], _picked(logits, keep)
                if not len(rows):
                    break
            drawn = self._draw(step, lanes, rows, logits, level)
            chains.put(rows, level, drawn)
            chains.lengths[rows] += 1
            going = lanes.budgets[rows] > level + 1
            rows = rows[going]
            if not len(rows):
                break

    def _draw_at_once(
        self,
        step: DraftStep,
        lanes: _Lanes,
        logits: Tensor,  # [num_rows, vocab], of known tokens' ends and of masks
        chains: _Chains,
    ) -> None:
        """All levels from one forward of the known tokens and a mask for every token but the first.

        The masks are a chain behind the known tokens, whose last one predicts the first token. No
        distribution depends on a drawn token. The masks' keys and values are overwritten by those
        of known tokens.
        """
        counts = np.where(lanes.first.samples, 1 + lanes.first.num_nodes, 0)
        rows = ints(np.arange(len(counts)).repeat(counts))
        levels = ints(np.arange(len(rows)) - starts_of(counts)[rows])
        keep = levels < lanes.budgets[rows]
        rows, levels, logits = rows[keep], levels[keep], _picked(logits, keep)
        if not len(rows):
            return
        chains.put(rows, levels, self._draw(step, lanes, rows, logits, levels))
        fits = np.zeros((len(lanes.budgets), chains.depth + 1), dtype=np.bool_)
        fits[rows, levels] = True
        if step.p_min > 0:
            fits[rows, levels] = self._likely(logits, step.p_min)
        chains.lengths[:] = fits.argmin(1)

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
        lanes: _Lanes,
        rows: IntArray,  # [num_rows], lanes
        logits: Tensor,  # [num_rows, vocab]
        level: int | IntArray,  # [num_rows], of each row, or of all
    ) -> tuple[np.ndarray, ...]:
        """Rank 0's tokens [num_rows], and ids and probs [num_rows, top] if requested."""
        first = lanes.lens[rows]  # position of the chain's first token
        positions = first + level
        settings = DrawSettings.of(lanes.first.sampling, lanes.owner[rows])
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


class _Lanes:
    """Tokens behind each of which a chain is drawn: sequences, or outcomes of sequences."""

    def __init__(
        self,
        first: StepInput,  # known tokens and masks
        budgets: IntArray,  # [num_lanes], tokens to draw
        owner: NDArray[np.signedinteger],  # [num_lanes], row of the sampling settings
    ) -> None:
        self.first, self.budgets, self.owner = first, budgets, owner
        # [num_lanes], tokens before the first that is drawn
        self.lens = first.context_lens + first.query_lens - first.num_nodes


class _Chains:
    """The chains of a step as they are drawn, with as many levels as the longest may have."""

    def __init__(self, budgets: IntArray, top: int) -> None:
        self.depth = int(budgets.max(initial=0))
        shape = (len(budgets), self.depth)
        self.tokens = np.zeros(shape, dtype=np.int32)
        self.lengths = np.zeros(len(budgets), dtype=np.int32)
        self._ids = np.zeros((*shape, top), dtype=np.int32)
        self._probs = np.zeros((*shape, top), dtype=np.float32)

    def put(
        self,
        rows: IntArray,  # [num_rows], lanes
        levels: int | IntArray,  # [num_rows], of each, or of all
        drawn: tuple[np.ndarray, ...],  # as `DraftService._draw` returns them
    ) -> None:
        self.tokens[rows, levels] = drawn[0]
        if len(drawn) > 1:
            width = drawn[1].shape[1]
            self._ids[rows, levels, :width], self._probs[rows, levels, :width] = drawn[1:]

    def drafted(self) -> Drafted:
        order = [(row, depth) for row, count in enumerate(self.lengths) for depth in range(count)]
        picked = tuple(np.array(order, dtype=np.int64).reshape(-1, 2).T)
        probs = DraftProbs(self._ids[picked], self._probs[picked])
        return Drafted(
            tokens=self.tokens[picked],
            start=starts_of(self.lengths),
            probs=probs if self._ids.shape[2] else None,
        )


def _picked(logits: Tensor, keep: np.ndarray) -> Tensor:  # [num_rows, vocab], [num_rows]
    return logits if keep.all() else logits[torch.from_numpy(keep).to(logits.device)]


def _next_token(
    first: StepInput, rows: IntArray, tokens: IntArray, index: IntArray, block_size: int
) -> StepInput:
    """A step of one token for each of `rows`, at position `index` of its lane."""
    return lay_out(
        token_ids=tokens,
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        context_lens=index.astype(np.int32),
        block_tables=first.block_tables[rows],
        samples=np.ones(len(rows), dtype=np.bool_),
        max_nodes=np.zeros(len(rows), dtype=np.int32),
        sampling=first.sampling,
        drafts=None,
        block_size=block_size,
    )


def choose_outcomes(
    preparation: Preparation,
    step: StepInput,  # with the round's chains
    logits: Tensor,  # [num_rows, vocab], of roots and nodes
    collective: Collective,
) -> Outcomes:
    """The likeliest outcomes of every sequence; rank 0's choice."""
    room = int(preparation.num_outcomes[step.samples].sum())
    found = torch.full((room + 1, 4), -1, dtype=torch.int32)
    if room:
        table = _ranked(preparation, step, logits)
        found[0, 0] = len(table)
        found[1 : len(table) + 1] = torch.from_numpy(table)
    found = collective.broadcast(found.to(logits.device).contiguous()).cpu()
    columns = found[1 : max(0, int(found[0, 0])) + 1].numpy().T.copy()
    return Outcomes(*columns)


def _ranked(
    preparation: Preparation, step: StepInput, logits: Tensor
) -> IntArray:  # [num_outcomes, 4]: sequence, accepted, bonus, rank
    """All outcomes worth preparing, the best `num_outcomes` of each sequence."""
    num_nodes = step.num_nodes
    owner = np.arange(step.num_seqs).repeat(np.where(step.samples, 1 + num_nodes, 0))
    place = _places(owner)  # accepted nodes, if the bonus token is drawn at this row
    known = step.context_lens + step.query_lens - num_nodes
    num_ranks = preparation.rank_rates.shape[1]
    tokens, weights = (
        part.cpu().numpy()
        for part in rank_draws(
            logits,
            ints(known[owner] + place),
            DrawSettings.of(step.sampling, owner),
            num_ranks + 1,
            shares_noise=preparation.shares_noise,
        )
    )
    is_whole = place == num_nodes[owner]
    drafted = np.full(len(owner), -1, dtype=np.int32)  # the node that was drafted at the row
    drafted[~is_whole] = step.draft_tokens
    tokens, own = tokens.copy(), (tokens == drafted[:, None]) & (drafted >= 0)[:, None]
    agreed = (weights * own).sum(1)
    # A rejected node's token is no bonus token: it goes to the end, with no weight.
    order = np.argsort(own, axis=1, kind="stable")[:, :num_ranks]
    tokens = np.take_along_axis(np.where(own, -1, tokens), order, axis=1)
    weights = np.take_along_axis(np.where(own, 0, weights), order, axis=1)
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-9)
    measured = preparation.rank_rates[is_whole.astype(np.intp), : tokens.shape[1]]
    chance = _chances(preparation, place, is_whole, agreed)
    score = chance[:, None] * (weights + measured) / 2
    useful = preparation.reach[owner] > place + 1
    score[(tokens < 0) | ~useful[:, None]] = 0.0
    flat = np.lexsort((-score.ravel(), owner.repeat(tokens.shape[1])))
    seqs = owner.repeat(tokens.shape[1])[flat]
    kept = flat[(_places(seqs) < preparation.num_outcomes[seqs]) & (score.ravel()[flat] > 0)]
    row, rank = kept // tokens.shape[1], kept % tokens.shape[1]
    return ints(np.stack([owner[row], place[row], tokens[row, rank], rank], axis=1))


def _places(owner: NDArray[np.int64]) -> NDArray[np.int64]:  # [n], ascending -> [n]
    """The index of every item among those of its owner."""
    first = np.searchsorted(owner, owner)
    return np.arange(len(owner)) - first


def _chances(
    preparation: Preparation,
    place: NDArray[np.int64],  # [num_rows]
    is_whole: NDArray[np.bool_],  # [num_rows]
    agreed: FloatArray,  # [num_rows], the model's own probability of the node drafted at the row
) -> FloatArray:  # [num_rows]
    """The chance that exactly the nodes before a row are accepted."""
    rates = preparation.accept_rates
    measured = rates[np.minimum(place, len(rates) - 1)] if len(rates) else agreed
    accepted = np.where(is_whole, 0.0, (measured + agreed) / 2)
    chance = np.empty(len(place), dtype=np.float32)
    reached = 1.0
    for row in range(len(place)):
        reached = 1.0 if place[row] == 0 else reached * accepted[row - 1]
        chance[row] = reached * (1.0 - accepted[row])
    return chance


def lay_out_outcomes(
    outcomes: Outcomes,
    preparation: Preparation,
    step: StepInput,
    block_size: int,
    first_scratch: int,  # block
    mask_token: int | None,
) -> tuple[StepInput, IntArray]:  # and [num_outcomes], tokens to draw
    """A step of the bonus tokens, and of masks behind them; one sequence per outcome."""
    seqs, count = outcomes.seqs, len(outcomes.seqs)
    known = step.context_lens + step.query_lens - step.num_nodes
    index = known[seqs] + outcomes.num_accepted  # of the bonus token
    begun, filled = index // block_size, index % block_size
    size = blocks_per_outcome(preparation.depth, block_size)
    tables = np.zeros((count, int(begun.max(initial=0)) + size), dtype=np.int32)
    width = min(tables.shape[1], step.block_tables.shape[1])
    tables[:, :width] = step.block_tables[seqs, :width]
    source = tables[np.arange(count), begun]  # of the begun block, where there is one
    scratch = first_scratch + np.arange(count * size, dtype=np.int32).reshape(count, size)
    tables[np.arange(count)[:, None], begun[:, None] + np.arange(size)] = scratch
    lane = np.arange(count).repeat(filled)
    offset = _places(lane)
    moves = np.stack([source[lane], scratch[lane, 0]], axis=1) * block_size + offset[:, None]
    reach = preparation.reach[seqs] - outcomes.num_accepted - 1
    budgets = ints(np.minimum(reach, preparation.depth))
    masks = None
    if mask_token is not None and (num_masks := budgets - 1).any():
        masks = JoinedDrafts(np.full(num_masks.sum(), mask_token, dtype=np.int32), ints(num_masks))
    laid_out = lay_out(
        token_ids=outcomes.bonus,
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=ints(index),
        block_tables=tables,
        samples=np.ones(count, dtype=np.bool_),
        max_nodes=budgets,
        sampling=step.sampling,
        drafts=masks,
        block_size=block_size,
        kv_moves=ints(moves),
    )
    return laid_out, budgets
