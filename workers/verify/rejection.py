"""Exact rejection sampling for chains and trees: a child x is accepted with min(1, p(x) / q(x)).

p is the target's processed distribution at the row, and q the one from which the child was drawn.
After a rejection, p becomes norm(max(0, p - q)), and the next sibling is tested against that.

- A deterministic sibling (no probabilities, or a row of zeros) has q(x) = 1: it is accepted with
  probability p(x); otherwise, p(x) becomes 0 and the rest is renormalised.
- Siblings sampled without replacement: q with the earlier siblings zeroed, renormalised.

Exact as long as no node's existence depends on nodes drawn after it (later siblings, deeper
nodes); siblings that were *selected* by q instead of drawn from it must be sent as deterministic.

Full distributions stay on the device. For each row, the host receives the target's probabilities of
the few tokens that some child's q contains (the *support*), the mass outside, and a token drawn
from outside. All rows are then decided together in float64; `noise` provides the randomness.

Sources: Leviathan et al. 2023, Alg. 1, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318;
SpecInfer, Miao et al. 2023, arXiv:2305.09781; EAGLE, Li et al. 2024, arXiv:2401.15077; for block
verification, Sun et al. 2024, arXiv:2403.10444.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import DraftProbs, IntArray, SamplingRows
from . import noise
from .noise import argmax
from .process import GREEDY_BELOW, CandidatePool, DraftRows, DrawSettings, pools
from .rules import Choice, child_table, draw_rows, first_taken, match

Probs = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Siblings:
    """Every row's children and the support of their distributions."""

    children: Index  # [num_rows, max_children], rows of the children in order; -1 pads
    support: Index  # [num_rows, num_support], token ids, ascending and distinct; -1 pads
    column: Index  # [num_rows, max_children], the child's own token in the support
    draft_probs: Probs  # [num_rows, max_children, num_support]; zeros: deterministic


@dataclass(frozen=True, slots=True)
class Evidence:
    """The part of the target's distribution at every row that the host needs."""

    target_probs: Probs  # [num_rows, num_support]
    outside: Probs  # [num_rows], mass of all other tokens
    tokens: IntArray  # [num_rows], drawn from the other tokens


@dataclass(frozen=True, slots=True)
class Odds:
    """The distribution of a row's decision: children in order, then the replacement."""

    accept: Probs  # [num_rows, max_children], if all earlier ones were rejected
    residual: Probs  # [num_rows, num_support], if all were rejected, up to a factor
    outside: Probs  # [num_rows], the residual's mass outside the support, with the same factor


@dataclass(frozen=True, slots=True)
class Rejection:
    """Accepts a child by the ratio of the target's to the drafter's probability."""

    name: ClassVar[str] = "rejection"

    def choose(
        self, rows: DraftRows, sampling: SamplingRows, draft_probs: DraftProbs | None,
        logits: Tensor,
    ) -> Choice:  # fmt: skip
        greedy = sampling.temperature[rows.seq] < GREEDY_BELOW
        if greedy.all() or not rows.drafted.any():  # nothing to decide
            return match(rows, draw_rows(rows, sampling, logits))
        family = siblings(rows, draft_probs, greedy)
        seen = evidence(rows, sampling, family.support, logits)
        return self._decided(rows, family, seen)

    def _decided(self, rows: DraftRows, family: Siblings, seen: Evidence) -> Choice:
        chances = odds(family, seen.target_probs, seen.outside)
        coins, spare = draw_coins(rows, family.children.shape[1])
        return decide(rows, family, chances, seen.tokens, coins, spare)


def siblings(
    rows: DraftRows,
    draft_probs: DraftProbs | None,
    deterministic: NDArray[np.bool_],  # [num_rows], rows whose children's probabilities are ignored
) -> Siblings:
    """Returns children, support and draft distributions of every row, on one set of columns."""
    children = child_table(rows)
    num_rows, max_children = children.shape
    exists = children >= 0
    tokens = np.where(exists, rows.tokens[children], -1).astype(np.int64)
    if draft_probs is None:
        ids = np.empty((num_rows, max_children, 0), dtype=np.int64)
        probs = np.empty((num_rows, max_children, 0))
    else:
        nodes = np.where(exists, rows.nodes[children], 0)
        probs = draft_probs.probs[nodes].astype(np.float64)
        probs[~exists | deterministic[:, None]] = 0.0
        ids = np.where(probs > 0, draft_probs.ids[nodes], -1).astype(np.int64)
    support, column = _distinct(np.concatenate([tokens, ids.reshape(num_rows, -1)], axis=1))
    shape = (num_rows, max_children, support.shape[1])
    group = np.arange(num_rows * max_children).reshape(num_rows, max_children, 1)
    at = group * shape[2] + column[:, max_children:].reshape(ids.shape)
    dense = np.zeros(int(np.prod(shape)))
    np.add.at(dense, at.ravel(), probs.ravel())
    return Siblings(children, support, column[:, :max_children], dense.reshape(shape))


def _distinct(ids: Index) -> tuple[Index, Index]:
    """Returns row-wise distinct `ids` [num_rows, num_support], and the column of every input id."""
    order = np.argsort(ids, axis=1, kind="stable")
    ascending = np.take_along_axis(ids, order, axis=1)
    group = np.zeros_like(ids)
    group[:, 1:] = np.cumsum(ascending[:, 1:] != ascending[:, :-1], axis=1)
    support = np.full((len(ids), int(group.max(initial=-1)) + 1), -1, dtype=np.int64)
    column = np.empty_like(ids)
    np.put_along_axis(support, group, ascending, axis=1)
    np.put_along_axis(column, order, group, axis=1)
    return support, column


def evidence(
    rows: DraftRows,
    sampling: SamplingRows,
    support: Index,  # [num_rows, num_support], -1 pads
    logits: Tensor,  # [num_rows, vocab]
) -> Evidence:
    """Returns the target's probabilities on the support, the remaining mass, and a draw from it."""
    device, num_support = logits.device, support.shape[1]
    row_keys = noise.keys(rows.seeds, rows.positions).to(device)
    packed = torch.empty((rows.num_rows, num_support + 2), dtype=torch.float64, device=device)
    for pool in pools(logits, DrawSettings.of(sampling, rows.seq)):
        for part in noise.passes(len(pool.rows), pool.logits.shape[1], device):
            known = torch.from_numpy(support[pool.rows[part]]).to(device)
            at = torch.from_numpy(pool.rows[part]).to(device)
            packed[at] = _weigh(pool, part, known, row_keys[at])
    host = packed.cpu().numpy()
    return Evidence(host[:, :-2], host[:, -2], host[:, -1].astype(np.int32))


def _weigh(
    pool: CandidatePool,
    part: slice,  # rows of the pool
    support: Tensor,  # [num_part, num_support], -1 pads
    row_keys: Tensor,  # [num_part]
) -> Tensor:  # [num_part, num_support + 2] float64: probabilities, mass outside, token outside
    scaled = pool.logits[part]
    if pool.greedy:
        best = argmax(scaled)[:, None]
        inside = support == best
        return torch.cat([inside, ~inside.any(1, keepdim=True), best], dim=1).double()
    ids = None if pool.ids is None else pool.ids[part]
    index, known = pool.find(part, support)
    at_index = scaled.gather(1, index)
    hidden = at_index.masked_fill(known, -torch.inf)  # amin: a pad may share a token's index
    outside = scaled.scatter_reduce(1, index, hidden, "amin")
    peak = scaled.amax(1, keepdim=True)
    inside = (at_index.masked_fill_(~known, -torch.inf) - peak).exp_().double()
    rest = (outside - peak).exp_().sum(1, keepdim=True, dtype=torch.float64)
    weights = torch.cat([inside, rest], dim=1)
    drawn = noise.perturbed_argmax(outside, row_keys, ids)[:, None]
    token = drawn if ids is None else ids.gather(1, drawn)
    return torch.cat([weights / weights.sum(1, keepdim=True), token.double()], dim=1)


def drawn_from(
    family: Siblings,
    child: int,
    fresh: Probs | float = 1.0,  # [num_rows, num_support], 0 at the tokens of earlier siblings
) -> Probs:  # [num_rows, num_support]
    """Returns each row's distribution of that child; for a deterministic child, its own token."""
    rows, own = np.arange(len(family.column)), family.column[:, child]
    probs = family.draft_probs[:, child] * fresh
    one_hot = np.zeros_like(probs)
    one_hot[rows, own] = 1.0
    probs = np.where((probs[rows, own] > 0)[:, None], probs, one_hot)
    return probs / probs.sum(1, keepdims=True)


def odds(
    family: Siblings,
    target_probs: Probs,  # [num_rows, num_support]
    outside: Probs,  # [num_rows], the target's mass outside the support
) -> Odds:
    """Returns every row's distribution of decisions; deterministic, so tests can enumerate it."""
    num_rows, max_children = family.children.shape
    rows = np.arange(num_rows)
    accept = np.zeros((num_rows, max_children))
    fresh = np.ones_like(target_probs)  # 0 at the tokens of earlier siblings
    for child in range(max_children):
        own = family.column[:, child]
        source = drawn_from(family, child, fresh)
        exists = family.children[:, child] >= 0
        ratio = target_probs[rows, own] / source[rows, own]
        accept[:, child] = np.where(exists, np.minimum(1.0, ratio), 0.0)

        left = np.maximum(target_probs - source, 0.0)
        total = left.sum(1) + outside
        # An empty residual means p = q: a rejection is a rounding error, and any p is valid.
        exists &= total > 0
        divisor = np.where(exists, total, 1.0)
        target_probs = np.where(exists[:, None], left / divisor[:, None], target_probs)
        outside = outside / divisor
        fresh[rows, own] = 0.0
    return Odds(accept, target_probs, outside)


def decide(
    rows: DraftRows,
    family: Siblings,
    chances: Odds,
    outside_tokens: IntArray,  # [num_rows], drawn from the target outside the support
    coins: Probs,  # [num_rows, max_children], in (0, 1)
    spare: Probs,  # [num_rows], in (0, 1): draws from the residual
) -> Choice:
    """Takes the first child whose coin is below its probability, else a token of the residual."""
    taken = first_taken(rows, family.children, coins < chances.accept)
    return Choice(taken, replacements(family, chances, outside_tokens, spare))


def replacements(
    family: Siblings,
    chances: Odds,
    outside_tokens: IntArray,  # [num_rows]
    spare: Probs,  # [num_rows], in (0, 1)
) -> IntArray:  # [num_rows]
    """Draws a token of every row's residual."""
    levels = np.cumsum(np.column_stack([chances.outside, chances.residual]), axis=1)
    drawn = (spare[:, None] * levels[:, -1:] >= levels).sum(1)  # 0: outside the support
    tokens = np.column_stack([outside_tokens, family.support])[np.arange(len(spare)), drawn]
    return tokens.astype(np.int32)


def draw_coins(rows: DraftRows, max_children: int) -> tuple[Probs, Probs]:
    """Draws a coin per row and sibling, and one per row for the residual."""
    streams = torch.tensor([*range(noise.COINS, noise.COINS + max_children), noise.RESIDUAL])
    coins = noise.uniform(rows.seeds[:, None], rows.positions[:, None], streams).numpy()
    return coins[:, :-1], coins[:, -1]


@dataclass(frozen=True, slots=True)
class BlockVerification(Rejection):
    """Block verification of chains: exact, and on average never fewer tokens than `rejection`.

    Token-by-token verification rejects a node that is too likely under the drafter even if later
    nodes would compensate for it. This rule decides about the chain as a whole. With x_1 .. x_n
    drawn from q:

    - w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)): the remaining weight of the path up to i.
    - s_i = sum over x of max(0, w_i p(x) - q(x)), with p and q after x_i; without a node after i,
      q is 0 and s_i = w_i.
    - Every i has a coin; i is the last accepted node if it is the deepest whose coin is below
      s_i / (s_i + 1 - w_i). The token after it is drawn from norm(max(0, w_i p - q)).

    The q of a deterministic node is concentrated on its own token. A sequence whose draft branches
    is verified by `rejection` in that round.

    Whether x_1 is emitted depends on x_2 and its coin. If x_2 used the fixed noise of position 2,
    the next round would draw it again from noise that has already influenced a decision, which is
    not exact. So drafts and coins use a stream of their round (`noise.ROUND_DRAFT`,
    `noise.ROUND_COINS`). The token that ends a round influences nothing unless it is emitted, so it
    uses the position's noise, as does a row without a draft, which emits its coupled token.
    """

    name: ClassVar[str] = "block"

    def _decided(self, rows: DraftRows, family: Siblings, seen: Evidence) -> Choice:
        _, spare = draw_coins(rows, family.children.shape[1])
        chances = chain_odds(rows, family, seen)
        choice = decide_chain(rows, family, chances, seen.tokens, round_coins(rows), spare)
        branches = branching(rows, family)
        if not branches.any():
            return choice
        other = Rejection._decided(self, rows, family, seen)
        return Choice(
            np.where(branches, other.taken, choice.taken),
            np.where(branches, other.tokens, choice.tokens),
        )


def branching(
    rows: DraftRows, family: Siblings
) -> NDArray[np.bool_]:  # [num_rows], whether the draft of the row's sequence is not a chain
    """Returns rows of sequences in which some node has siblings."""
    forks = (family.children >= 0).sum(1) > 1
    return np.isin(rows.seq, rows.seq[forks])


def chain_odds(rows: DraftRows, family: Siblings, seen: Evidence) -> Odds:
    """Returns the distribution of every chain's decision; deterministic, so tests can enumerate it.

    `accept` [num_rows] is the probability of a hit, and the deepest hit is the last accepted node;
    the residual is the row's if it is that node.
    """
    at = np.arange(rows.num_rows)
    child, own = family.children[:, 0], family.column[:, 0]
    source = drawn_from(family, 0)
    ratio = seen.target_probs[at, own] / source[at, own]
    source[child < 0] = 0.0

    weight = np.ones(rows.num_rows)
    for depth in range(int(rows.depth.max(initial=0))):
        parents = np.flatnonzero((rows.depth == depth) & (child >= 0))
        weight[child[parents]] = np.minimum(1.0, weight[parents] * ratio[parents])

    owed = weight[:, None] * seen.target_probs
    left, outside = np.maximum(owed - source, 0.0), weight * seen.outside
    mass = left.sum(1) + outside
    room = mass + (1.0 - weight)
    accept = np.divide(mass, room, out=np.ones_like(mass), where=room > 0)
    # An empty residual is a rounding error, and any choice of p is valid, as in `odds`.
    spent = mass <= 0
    residual = np.where(spent[:, None], seen.target_probs, left)
    return Odds(accept, residual, np.where(spent, seen.outside, outside))


def decide_chain(
    rows: DraftRows,
    family: Siblings,
    chances: Odds,
    outside_tokens: IntArray,  # [num_rows], drawn from the target outside the support
    coins: Probs,  # [num_rows], in (0, 1)
    spare: Probs,  # [num_rows], in (0, 1): draws from the residual
) -> Choice:
    """Returns each sequence's nodes down to its deepest hit, and a token of the residual there."""
    hit = rows.drafted & (coins < chances.accept)
    num_accepted = np.zeros(rows.num_seqs, dtype=np.int64)
    np.maximum.at(num_accepted, rows.seq[hit], rows.depth[hit])
    taken = rows.is_root | (rows.drafted & (rows.depth <= num_accepted[rows.seq]))
    return Choice(taken, replacements(family, chances, outside_tokens, spare))


def round_coins(rows: DraftRows) -> Probs:  # [num_rows]
    """Draws a coin per row from the stream of this round."""
    rounds = torch.from_numpy(rows.positions[rows.root].astype(np.int64))
    return noise.uniform(rows.seeds, rows.positions, rounds + noise.ROUND_COINS).numpy()
