"""The outcomes of a round that a draft model prepares: which they are, and how they are laid out.

An outcome is the number of accepted nodes of a sequence's chain and the bonus token after them.
`choose` weighs all that the model's distributions suggest and takes the best of every sequence.
`lay_out_outcomes` makes each of them a sequence of its own, so that all are drafted in one batch:
its table has the sequence's blocks up to the bonus token, and scratch blocks from there on, into
which the begun block is copied. Source: Kumar et al. 2026, arXiv:2603.03251 (Saguaro).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.protocol import Outcomes, Preparation, blocks_per_outcome
from ..scheduler.types import FloatArray, IntArray, JoinedDrafts, StepInput, ints
from .collective import Collective
from .seats import lay_out
from .verify.process import DrawSettings
from .verify.sample import rank_draws


def choose(
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
