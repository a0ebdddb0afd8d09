"""Block verification of chains: exact, and on average never fewer tokens than `rejection`.

Token-by-token verification rejects a node that is too likely under the drafter even if later nodes
would compensate for it. This rule decides about the chain as a whole. With x_1 .. x_n drawn from q:

- w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)): the remaining weight of the path up to i.
- s_i = sum over x of max(0, w_i p(x) - q(x)), with p and q after x_i; without a node after i,
  q is 0 and s_i = w_i.
- Every i has a coin; i is the last accepted node if it is the deepest whose coin falls below
  s_i / (s_i + 1 - w_i). The token after it is drawn from norm(max(0, w_i p - q)).

A deterministic node has all of q on its own token. A sequence whose draft branches is verified by
`rejection` in that round.

Whether x_1 is emitted depends on x_2 and its coin. If x_2 used the fixed noise of position 2, the
next round would draw it again from noise that has already influenced a decision, which is not
exact. So drafts and coins use a stream of their round (`noise.ROUND_DRAFT`, `noise.ROUND_COINS`).
The token that ends a round influences nothing unless it is emitted: it uses the position's noise,
as does a row without a draft, which emits its coupled token.

Source: Sun et al. 2024, arXiv:2403.10444.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...scheduler.types import IntArray
from . import noise, rejection
from .process import DraftRows
from .rejection import Evidence, Odds, Probs, Rejection, Siblings
from .rules import Choice


@dataclass(frozen=True, slots=True)
class BlockVerification(Rejection):
    """Accepts the longest prefix of a chain allowed by the joint probabilities."""

    name: ClassVar[str] = "block"

    def _decided(self, rows: DraftRows, family: Siblings, seen: Evidence) -> Choice:
        _, spare = rejection.draw_coins(rows, family.children.shape[1])
        chances = odds(rows, family, seen)
        choice = decide(rows, family, chances, seen.tokens, _coins(rows), spare)
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
) -> NDArray[np.bool_]:  # [num_rows], the row's sequence has a draft that is no chain
    """Rows of sequences in which some node has siblings."""
    forks = (family.children >= 0).sum(1) > 1
    return np.isin(rows.seq, rows.seq[forks])


def odds(rows: DraftRows, family: Siblings, seen: Evidence) -> Odds:
    """The distribution of every chain's decision; deterministic, so that tests can enumerate it.

    `accept` [num_rows] is the chance of a hit, and the deepest hit is the last accepted node; the
    residual is the row's if it is that node.
    """
    at = np.arange(rows.num_rows)
    child, own = family.children[:, 0], family.column[:, 0]
    source = rejection.drawn_from(family, 0)
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
    # An empty residual is a rounding error, and any choice of p is valid, as in `rejection.odds`.
    spent = mass <= 0
    residual = np.where(spent[:, None], seen.target_probs, left)
    return Odds(accept, residual, np.where(spent, seen.outside, outside))


def decide(
    rows: DraftRows,
    family: Siblings,
    chances: Odds,
    outside_tokens: IntArray,  # [num_rows], drawn from the target outside the support
    coins: Probs,  # [num_rows], in (0, 1)
    spare: Probs,  # [num_rows], in (0, 1): draws from the residual
) -> Choice:
    """Every sequence's nodes down to its deepest hit, and a token of the residual there."""
    hit = rows.drafted & (coins < chances.accept)
    num_accepted = np.zeros(rows.num_seqs, dtype=np.int64)
    np.maximum.at(num_accepted, rows.seq[hit], rows.depth[hit])
    taken = rows.is_root | (rows.drafted & (rows.depth <= num_accepted[rows.seq]))
    return Choice(taken, rejection.replacements(family, chances, outside_tokens, spare))


def _coins(rows: DraftRows) -> Probs:  # [num_rows]
    """A coin per row from the stream of this round."""
    rounds = torch.from_numpy(rows.positions[rows.root].astype(np.int64))
    return noise.uniform(rows.seeds, rows.positions, rounds + noise.ROUND_COINS).numpy()
