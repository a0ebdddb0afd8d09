"""Whether a step can be planned before the outcome of the step in flight is back, and for whom.

Called by `Scheduler.schedule_ahead`.
"""

from __future__ import annotations

from collections import abc

from .blocks import BlockPool
from .budget import DraftBudget, share_nodes
from .fairness import beyond_share
from .plan import Batch
from .sequence import Sequence


def may_be_seated(waiting: Sequence, running: abc.Sequence[Sequence], max_num_seqs: int) -> bool:
    """Whether the first of the waiting may have a free seat, or take one from another request."""
    return (
        len(running) < max_num_seqs
        or waiting.request.priority < max(each.request.priority for each in running)
        or bool(beyond_share(waiting, running))
    )


def nodes_ahead(
    last: Batch,
    running: abc.Sequence[Sequence],
    pool: BlockPool,
    budget: DraftBudget | None,  # None: nothing is drafted
    max_tokens: int,  # of a step
    step: int,
) -> dict[Sequence, int]:
    """Those of `running` that may emit more than the outcome of `last`, and their draft nodes.

    Each has blocks for whatever `last` emits and for the nodes after it; what is not needed is
    given back when `last` is committed. Empty if that is not the whole next step: a request is not
    in `last` or has prompt left, or blocks are short.
    """
    in_step = set(last.request_ids) if last.samples.all() else set()
    if not all(each.request.id in in_step for each in running):
        return {}
    nodes = {each: 0 for each in running if each.num_tokens + 1 < each.limit}
    if budget is not None:
        wishes = budget.wishes(nodes, len(running))
        nodes |= share_nodes(wishes, max_tokens - len(nodes), step)
    flying = nodes_of(last)
    for each, count in nodes.items():
        if not each.allocate(pool, each.num_tokens + flying[each.request.id] + 1 + count):
            return {}
    return nodes


def nodes_of(batch: Batch | None) -> dict[str, int]:
    """Draft nodes that a step has room for, by request."""
    if batch is None:
        return {}
    return dict(zip(batch.request_ids, batch.max_nodes.tolist(), strict=True))
