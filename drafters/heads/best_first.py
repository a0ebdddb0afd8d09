"""The best tree of a number of nodes under the head's own probabilities (DDTree).

A node's score is the logarithm of the product of the probabilities along its path, which no
descendant exceeds. The nodes with the highest scores are therefore a tree, and of all trees with as
many nodes the one with the most expected tokens, as far as the head's probabilities hold.

Source: Ringel and Romano 2026, arXiv:2604.12989, Alg. 1, for positions that are independent given
the text. A heap takes one node after the other there. Here the same nodes are found level by level,
for all sequences at once and without a value on the host: of a level only so many nodes can be in
the tree, and a node only if those that are surely better leave room for it. The children of a node
may also depend on its token (a Markov or selector correction).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .protocol import Trees

Children = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""What may follow the nodes of a level. Arguments: the children's level (0: the root's), and the
tokens of their parents [num_drafts, width]. Returns log-probabilities, none above 0 and best first,
and the target's ids, [num_drafts, width, num_ranks] each; of width 1: the same below every node."""


def ranked(
    logits: Tensor,  # [..., vocab]
    max_ranks: int,
) -> tuple[Tensor, Tensor]:  # [..., num_ranks] each
    """Log-probabilities of the likeliest columns, best first, and the columns."""
    logits = logits.float()
    best, columns = logits.topk(min(max_ranks, logits.shape[-1]), dim=-1)
    # Rounding must not make a child likelier than its parent.
    return (best - logits.logsumexp(-1, keepdim=True)).clamp_(max=0), columns


def best_first_tree(
    children: Children,
    emitted: Tensor,  # [num_drafts], the root's token
    num_levels: int,
    max_nodes: int,
) -> Trees:
    """The best tree of at most `max_nodes` nodes and `num_levels` levels, the best node first.

    Its first nodes are the best smaller tree.
    """
    num_drafts, device = len(emitted), emitted.device
    tokens = emitted[:, None]
    score = torch.zeros(num_drafts, 1, dtype=torch.float32, device=device)
    place = emitted.new_full((num_drafts, 1), -1)  # index in the pool
    ids, scores, above = [], [], []
    size = 0
    for level in range(min(num_levels, max_nodes)):
        logs, found = children(level, tokens)
        width, num_ranks = logs.shape[1:]
        is_shared = width == 1
        pairs = candidates(tokens.shape[1], num_ranks, level, max_nodes, is_shared, device)
        if not len(pairs):
            break
        rows, ranks = pairs.unbind(1)
        of = torch.zeros_like(rows) if is_shared else rows
        made = score[:, rows] + logs[:, of, ranks]
        ids.append(found[:, of, ranks])
        scores.append(made)
        above.append(place[:, rows])
        # Those that can have children; below as many others as there are levels above.
        most = min(len(pairs), max_nodes - level - 1)
        score, chosen = made.sort(dim=1, descending=True, stable=True)
        score, chosen = score[:, :most], chosen[:, :most]
        tokens, place = ids[-1].gather(1, chosen), size + chosen
        size += len(pairs)
    return best_nodes(torch.cat(ids, 1), torch.cat(scores, 1), torch.cat(above, 1), max_nodes)


@cache  # made by the first call: a captured step copies nothing to the device
def candidates(
    width: int, num_ranks: int, level: int, max_nodes: int, is_shared: bool, device: torch.device
) -> Tensor:  # [num_candidates, 2] int64
    """Rows of the level above, which is sorted, with the ranks that can be in the tree.

    Better than rank r below row i, or equal and before it, are: all of the rows up to i, ancestors
    above them, the ranks before r below row i, and below the rows before i too where all rows have
    the same children.
    """
    pairs = []
    for row in range(width):
        of_levels = 0 if level == 0 else row + level  # the rows up to this one, and one a level
        for rank in range(num_ranks):
            siblings = (rank + 1) * (row + 1 if is_shared else 1)
            if of_levels + siblings > max_nodes:
                break
            pairs.append((row, rank))
    return torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)


def best_nodes(
    ids: Tensor,  # [num_drafts, pool]
    scores: Tensor,  # [num_drafts, pool], none above its parent's
    above: Tensor,  # [num_drafts, pool], index of the parent, which comes first; -1 is the root
    max_nodes: int,
) -> Trees:
    """The best nodes of a pool, best first; ties go to the earlier, so parents come first."""
    count = min(max_nodes, ids.shape[1])
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    place = torch.full_like(ids, -1)
    place.scatter_(1, kept, torch.arange(count, device=ids.device).expand(len(ids), -1))
    parents = above.gather(1, kept)
    found = place.gather(1, parents.clamp(min=0))
    return Trees(ids.gather(1, kept), torch.where(parents < 0, -1, found))
