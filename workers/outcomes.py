"""Likely outcomes of a round, for which draft models and separate heads prepare chains.

A round is the verification of a chain for every sequence. Its outcome is the number of accepted
nodes and the bonus token after them. `choose_outcomes` scores the candidates of the drafter's
distributions and takes the best of every sequence, with longer chains behind likelier ones. Source:
Kumar et al. 2026, arXiv:2603.03251 (Saguaro).

`lay_out_outcomes` makes each outcome a sequence of a draft model, so that all are drafted in one
batch. Its table has the sequence's blocks up to the bonus token, and scratch blocks from there on;
the partly filled block is copied to a scratch block. An outcome of a head (`OutcomeRows`) shares
the rows of its sequence and of the round's chain, which have their own slots, so nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.heads.protocol import Frontier, Verified, last_emitted
from ..drafters.protocol import Outcomes, Preparation, blocks_per_outcome
from ..scheduler.types import (
    FloatArray,
    IntArray,
    JoinedDrafts,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
)
from .attention import KVCache
from .collective import Collective
from .head_layers import CommittedRows
from .seats import lay_out
from .verify.process import DrawSettings, rank_draws


@dataclass(frozen=True, slots=True)
class Round:
    """The chains that the target verifies."""

    tokens: IntArray  # [num_nodes], of all sequences
    num_nodes: IntArray  # [num_seqs]
    known: IntArray  # [num_seqs], tokens before the chain
    samples: NDArray[np.bool_]  # [num_seqs], whether all known tokens are computed
    sampling: SamplingRows
    rows: NDArray[np.signedinteger]  # [num_seqs], rows of `sampling`

    @staticmethod
    def of(step: StepInput) -> Round:
        """Returns the round whose chains are the draft nodes of `step`."""
        num_nodes = step.num_nodes
        known = step.context_lens + step.query_lens - num_nodes
        rows = np.arange(step.num_seqs)
        return Round(step.draft_tokens, num_nodes, known, step.samples, step.sampling, rows)


def choose_outcomes(
    preparation: Preparation,
    round_: Round,
    logits: Tensor,  # [num_rows, vocab], of roots and nodes
    collective: Collective,
) -> tuple[Outcomes, IntArray]:  # the second: [num_outcomes], tokens to draw
    """Returns the likeliest outcomes of every sequence; rank 0 chooses."""
    room = int(preparation.num_outcomes[round_.samples].sum())
    found = torch.full((room + 1, 5), -1, dtype=torch.int32)
    if room:
        table = _ranked(preparation, round_, logits)
        found[0, 0] = len(table)
        found[1 : len(table) + 1] = torch.from_numpy(table)
    found = collective.broadcast(found.to(logits.device).contiguous()).cpu()
    *columns, lens = found[1 : max(0, int(found[0, 0])) + 1].numpy().T.copy()
    return Outcomes(*columns), lens


def _ranked(
    preparation: Preparation, round_: Round, logits: Tensor
) -> IntArray:  # [num_outcomes, 5]: sequence, accepted, bonus, rank, tokens to draw
    """Returns the best `num_outcomes` outcomes of each sequence that are worth preparing."""
    num_nodes, samples = round_.num_nodes, round_.samples
    owner = np.arange(len(samples)).repeat(np.where(samples, 1 + num_nodes, 0))
    place = _places(owner)  # number of accepted nodes if the bonus token is drawn at this row
    num_ranks = preparation.rank_rates.shape[1]
    tokens, weights = (
        part.cpu().numpy()
        for part in rank_draws(
            logits,
            ints(round_.known[owner] + place),
            DrawSettings.of(round_.sampling, round_.rows[owner]),
            num_ranks + 1,
            shares_noise=preparation.shares_noise,
        )
    )
    is_whole = place == num_nodes[owner]
    drafted = np.full(len(owner), -1, dtype=np.int32)  # the drafted node that the row verifies
    drafted[~is_whole] = round_.tokens
    tokens, own = tokens.copy(), (tokens == drafted[:, None]) & (drafted >= 0)[:, None]
    agreed = (weights * own).sum(1)
    # A rejected node's token cannot be the bonus token: it is sorted to the end, with weight 0.
    order = np.argsort(own, axis=1, kind="stable")[:, :num_ranks]
    tokens = np.take_along_axis(np.where(own, -1, tokens), order, axis=1)
    weights = np.take_along_axis(np.where(own, 0, weights), order, axis=1)
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-9)
    measured = preparation.rank_rates[is_whole.astype(np.intp), : tokens.shape[1]]
    chance = _chances(preparation, place, is_whole, agreed)
    score = chance[:, None] * (weights + measured) / 2
    score[tokens < 0] = 0.0
    seqs = owner.repeat(tokens.shape[1])
    lens = preparation.lens(seqs, place.repeat(tokens.shape[1]), score.ravel())
    flat = np.lexsort((-score.ravel() * (lens > 0), seqs))
    standing = _places(seqs)  # rank within its sequence, the best first
    if preparation.shares is not None:
        model, num_models = preparation.shares[seqs].T
        standing = np.where(standing % num_models == model, standing // num_models, len(standing))
    is_useful = (lens > 0) & (score.ravel() > 0)
    kept = flat[(standing < preparation.num_outcomes[seqs]) & is_useful[flat]]
    row, rank = kept // tokens.shape[1], kept % tokens.shape[1]
    return ints(np.stack([owner[row], place[row], tokens[row, rank], rank, lens[kept]], axis=1))


def _places(owner: NDArray[np.int64]) -> NDArray[np.int64]:  # [n], ascending -> [n]
    """Returns every item's index among the items of its owner."""
    first = np.searchsorted(owner, owner)
    return np.arange(len(owner)) - first


def _chances(
    preparation: Preparation,
    place: NDArray[np.int64],  # [num_rows]
    is_whole: NDArray[np.bool_],  # [num_rows]
    agreed: FloatArray,  # [num_rows], the model's probability of the node that the row verifies
) -> FloatArray:  # [num_rows]
    """Returns the probability that exactly the nodes before a row are accepted."""
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
    lens: IntArray,  # [num_outcomes], tokens to draw
    depth: int,  # maximum number of tokens
    step: StepInput,
    block_size: int,
    first_scratch: int,  # the first scratch block
    mask_token: int | None,
) -> StepInput:
    """Returns a step of the bonus tokens, followed by masks; each outcome is one sequence."""
    seqs, count = outcomes.seqs, len(outcomes.seqs)
    known = step.context_lens + step.query_lens - step.num_nodes
    index = known[seqs] + outcomes.num_accepted  # position of the bonus token
    begun, filled = index // block_size, index % block_size
    size = blocks_per_outcome(depth, block_size)
    tables = np.zeros((count, int(begun.max(initial=0)) + size), dtype=np.int32)
    width = min(tables.shape[1], step.block_tables.shape[1])
    tables[:, :width] = step.block_tables[seqs, :width]
    source = tables[np.arange(count), begun]  # the partly filled block, if there is one
    scratch = first_scratch + np.arange(count * size, dtype=np.int32).reshape(count, size)
    tables[np.arange(count)[:, None], begun[:, None] + np.arange(size)] = scratch
    lane = np.arange(count).repeat(filled)
    offset = _places(lane)
    moves = np.stack([source[lane], scratch[lane, 0]], axis=1) * block_size + offset[:, None]
    masks = None
    if mask_token is not None and (num_masks := lens - 1).any():
        masks = JoinedDrafts(np.full(num_masks.sum(), mask_token, dtype=np.int32), ints(num_masks))
    return lay_out(
        token_ids=outcomes.bonus,
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=ints(index),
        block_tables=tables,
        samples=np.ones(count, dtype=np.bool_),
        max_nodes=lens,
        sampling=step.sampling,
        drafts=masks,
        block_size=block_size,
        kv_moves=ints(moves),
    )


class OutcomeRows:
    """The rows that a head's chains behind outcomes see; each outcome is one sequence.

    These are the rows of the sequence, of the round's accepted nodes, and of the chain itself. The
    chain's rows lie in spare slots after the nodes' slots, level by level.
    """

    def __init__(
        self,
        cache: KVCache,  # its blocks have one slot
        rows: CommittedRows,  # of sequences, with room for the round's nodes
        room: int,  # maximum number of nodes per sequence
        owner: Tensor,  # [num_outcomes] int64, index in `rows`
        num_accepted: Tensor,  # [num_outcomes] int64
        depth: int,  # rows of a chain
    ) -> None:
        count, self._first = len(owner), len(rows.known) * room
        ahead = torch.arange(depth, device=cache.device)
        lanes = torch.arange(count, device=cache.device)
        known = rows.known[owner] + num_accepted
        self._slots = torch.nn.functional.pad(rows.slots[owner], (0, depth))
        own = cache.num_slots + self._first + ahead * count + lanes[:, None]
        self._slots.scatter_(1, known[:, None] + ahead, own.to(self._slots.dtype))
        self._known, self._base = known.to(rows.known.dtype), rows.base[owner] + num_accepted
        self._max_known, self._count = rows.max_known + room, count

    def at(self, level: int, count: int) -> CommittedRows:
        """Returns what a level's rows of the first `count` outcomes see, except themselves."""
        return CommittedRows(
            self._slots[:count],
            self._known[:count] + level,
            self._base[:count] + level,
            self._max_known + level,
            self._first + level * self._count,
        )


def last_rows(done: Verified, ends: Frontier, rows: CommittedRows) -> Verified:
    """Returns a step of the last committed row of each sequence of `ends`, over one-slot blocks."""
    step, count = done.step, len(ends.seqs)
    one_each, none = ints(np.arange(count + 1)), ints([])
    plain = lay_out(
        token_ids=step.token_ids[ends.rows],
        query_start=one_each,
        context_lens=rows.known.cpu().numpy() - 1,
        block_tables=rows.slots.cpu().numpy(),
        samples=np.ones(count, dtype=np.bool_),
        max_nodes=np.zeros(count, dtype=np.int32),
        sampling=step.sampling,
        drafts=None,
        block_size=1,
    )
    emitted = last_emitted(done.verdict, ends)
    verdict = Verdict(step.step, emitted, one_each, none, np.zeros(count + 1, dtype=np.int32))
    at = torch.from_numpy(ends.rows)
    hidden = {layer: part[at.to(part.device)] for layer, part in done.hidden.items()}
    # If features were lost, a position exceeds its row's index.
    return Verified(replace(plain, positions=step.positions[ends.rows]), verdict, hidden)
