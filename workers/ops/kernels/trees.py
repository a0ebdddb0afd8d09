"""The best nodes of trees whose levels' tokens are independent of one another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from . import VOID, compiled

_LOGS: Any = types.float32[:, :, ::1]
_IDS: Any = types.int64[:, :, ::1]
_NODES: Any = types.int32[:, ::1]


@compiled(VOID, _LOGS, _IDS, _NODES, _NODES)
def best_trees(
    logs: NDArray[np.float32],
    ids: NDArray[np.int64],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
) -> None:
    """Fills in trees by taking the likeliest node that may follow, one after the other.

    Of a node that is taken, its next sibling and its first child may follow (arXiv:2604.12989,
    Alg. 1); the one that may earlier comes first where both are as likely.

    Args:
        logs: [num_levels, num_drafts, num_ranks], log-probabilities, best first.
        ids: alike, the tokens.
        tokens: [num_drafts, num_nodes], written; there are as many nodes.
        parents: alike; -1 is the root.
    """
    num_levels, num_drafts, num_ranks = logs.shape
    num_nodes = tokens.shape[1]
    # Of what may follow: its score, its parent's, the parent, level and rank.
    scores = np.empty((2 * num_nodes + 1, 2), dtype=np.float32)
    places = np.empty((2 * num_nodes + 1, 3), dtype=np.int64)
    for draft in range(num_drafts):
        scores[0, 0], scores[0, 1] = logs[0, draft, 0], 0.0
        places[0, 0], places[0, 1], places[0, 2] = -1, 0, 0
        size = 1
        for node in range(num_nodes):
            best = -1
            for other in range(size):
                if places[other, 2] < num_ranks and (
                    best < 0 or scores[other, 0] > scores[best, 0]
                ):
                    best = other
            score, above = scores[best, 0], scores[best, 1]
            parent, level, rank = places[best, 0], places[best, 1], places[best, 2]
            tokens[draft, node], parents[draft, node] = ids[level, draft, rank], parent
            places[best, 2] = rank + 1  # after the last there is none
            if rank + 1 < num_ranks:
                scores[best, 0] = above + logs[level, draft, rank + 1]
            if level + 1 < num_levels:
                scores[size, 0], scores[size, 1] = score + logs[level + 1, draft, 0], score
                places[size, 0], places[size, 1], places[size, 2] = node, level + 1, 0
                size += 1


def most_nodes(num_levels: int, num_ranks: int, limit: int) -> int:
    """Nodes of a tree of all these tokens, `limit` at most."""
    found, width = 0, 1
    for _ in range(num_levels):
        width *= num_ranks
        found += width
        if found >= limit:
            return limit
    return found
