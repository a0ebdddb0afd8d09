"""Drafts from a head's own output: a chain, a fixed tree, or a dynamic tree.

For heads whose row j consumes a feature and the embedding of token j + 1, and whose output serves
as the next feature. A chain is drawn with the target's noise; a fixed tree takes tokens by rank;
EAGLE-2's dynamic tree expands the highest products of probabilities (arXiv:2406.16858).

`TreeDrafter.expand` is the whole loop as torch operations without a value on the host. The device
step runs it as it is (`workers/device_step/draft.py`); `TreeDrafter.draft` plans on the host what
the loop reads, and copies its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...config.tree_drafting import TreeDraftingConfig
from ...scheduler.types import NextDrafts, ints
from .fixed_tree import FixedTree
from .protocol import (
    Attend,
    DraftStart,
    HeadHost,
    Trees,
    Verified,
    drafts_of,
    frontier,
    last_emitted,
    on,
)


class Recurrence(Protocol):
    """A head that computes a draft level by level."""

    target_ids: Tensor | None  # [draft_vocab], target id of every draft token; None: the same

    def advance(
        self,
        level: int,  # 1 is the first below the root
        token_ids: Tensor,  # [num_rows], the target's
        feature: Tensor,  # [num_rows, feature], of their parent rows
        positions: Tensor,  # [num_rows]
        attend: Attend,
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # next feature [num_rows, feature], output [num_rows, hidden_size]
        ...

    def logits(
        self, read: Tensor, host: HeadHost
    ) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, draft_vocab]
        ...


@dataclass(slots=True)
class _Level:
    """The last level of the drafts under construction."""

    feature: Tensor  # [num_drafts, width, feature]
    read: Tensor  # [num_drafts, width, hidden_size], for the output layer
    depth: int = 0


class TreeDrafter:
    """Builds the drafts of one head.

    Args:
        num_layers: number of the head's layers with attention.
    """

    def __init__(self, config: TreeDraftingConfig, head: Recurrence, num_layers: int) -> None:
        self._config = config
        self._head = head
        self._num_layers = num_layers
        self._tree = None if config.nodes is None else FixedTree(config.nodes)

    @property
    def branches(self) -> bool:
        """Whether a node may have siblings."""
        return self._config.use_dynamic_tree or self._tree is not None

    @property
    def room(self) -> int:
        """Rows that one draft computes, at most."""
        return room_of(self._config)

    def draft(
        self,
        done: Verified,
        feature: Tensor,  # [num_tokens, feature], of the step's rows
        read: Tensor,  # [num_tokens, hidden_size]
        host: HeadHost,
    ) -> NextDrafts:
        """Drafts from the last committed row of every sequence that may draft."""
        step, device, ids = done.step, host.target.device, self._head.target_ids
        ends = frontier(step, done.verdict)
        depth = self._config.draft_len
        if step.max_nodes is not None and not self.branches:
            depth = min(depth, int(step.max_nodes[ends.seqs].max(initial=0)))
        if not len(ends.seqs) or not depth:
            return drafts_of(step, ends, np.zeros((len(ends.seqs), 0), dtype=np.int32), ints([]))

        def draw(read: Tensor, level: int) -> Tensor:
            logits = self._head.logits(read, host)
            return host.draw(logits, step.sampling, ends.seqs, ints(ends.lens + level), ids)

        rows = on(ends.rows, device)
        start = DraftStart(
            on(step.positions[ends.rows], device),
            on(last_emitted(done.verdict, ends), device),
            feature[rows],
            read[rows],
            host.draft_attention(
                step, done.verdict, ends, self._num_layers, self.room, branches=self.branches
            ),
            draw,
        )
        trees = self.expand(start, depth, host)
        tokens, parents = torch.stack([trees.tokens, trees.parents]).cpu().numpy()
        return drafts_of(step, ends, ints(tokens), ints(parents))

    def expand(
        self,
        start: DraftStart,
        depth: int,  # levels of a chain; trees have all of theirs
        host: HeadHost,
    ) -> Trees:
        """The drafts, without a value on the host."""
        if self._tree is not None:
            return Trees(*self._fixed(self._tree, start, host))
        if self.branches:
            return Trees(*self._dynamic(start, host))
        return Trees(*self._chain(start, depth, host))

    def _chain(self, start: DraftStart, depth: int, host: HeadHost) -> tuple[Tensor, Tensor]:
        state, device = _Level(start.feature[:, None], start.read[:, None]), start.base.device
        drawn: list[Tensor] = []
        only = start.base.new_zeros(len(start.base), 1)
        for level in range(depth):
            if level:
                state = self._advance(start, state, drawn[-1][:, None], only, host)
            drawn.append(start.draw(state.read[:, 0], level))
        tokens = torch.stack(drawn, dim=1)
        return tokens, torch.arange(-1, depth - 1, device=device).expand_as(tokens)

    def _fixed(self, tree: FixedTree, start: DraftStart, host: HeadHost) -> tuple[Tensor, Tensor]:
        """A static tree: each node is a rank among its parent's likeliest tokens."""
        placed, parts = tree.on(start.base.device), []
        state = _Level(start.feature[:, None], start.read[:, None])
        for level in placed.levels:
            ranked = self._logits(state.read, host).topk(level.width, dim=2).indices
            tokens = self._ids(ranked[:, level.rows, level.ranks])
            parts.append(tokens)
            if len(level.inner):
                above = level.rows[level.inner].expand(len(tokens), -1)
                state = self._advance(start, state, tokens[:, level.inner], above, host)
        tokens = torch.cat(parts, dim=1)[:, placed.order]
        return tokens, placed.parents.expand_as(tokens)

    def _dynamic(self, start: DraftStart, host: HeadHost) -> tuple[Tensor, Tensor]:
        """Expands the best nodes of each level; the draft is the best nodes of all levels."""
        top, num_drafts = self._config.dynamic_tree_max_topK, len(start.base)
        place = start.base.new_full((num_drafts, 1), -1)  # index in the pool of the rows read
        score = start.read.new_zeros(num_drafts, 1, dtype=torch.float32)
        state = _Level(start.feature[:, None], start.read[:, None])
        ids, scores, above = [], [], []
        size = 0
        for level in range(self._config.draft_len):
            logs = self._logits(state.read, host).log_softmax(2)
            best, ranked = logs.topk(min(top, logs.shape[2]), dim=2)
            width = ranked.shape[2]
            tokens, best = self._ids(ranked).flatten(1), (best + score[..., None]).flatten(1)
            ids.append(tokens)
            scores.append(best)
            above.append(place.repeat_interleave(width, dim=1))
            if level + 1 == self._config.draft_len:
                break
            score, chosen = best.topk(min(top, best.shape[1]), dim=1)
            place, size = size + chosen, size + best.shape[1]
            state = self._advance(start, state, tokens.gather(1, chosen), chosen // width, host)
        pool = torch.cat(ids, 1), torch.cat(scores, 1), torch.cat(above, 1)
        return _best(*pool, self._config.max_nodes)

    def _advance(
        self,
        start: DraftStart,
        state: _Level,
        tokens: Tensor,  # [num_drafts, width], the target's ids
        above: Tensor,  # [num_drafts, width], parent row in the last level
        host: HeadHost,
    ) -> _Level:
        """One more level of rows."""
        assert start.levels is not None, "a head with a recurrence attends"
        depth, width = state.depth + 1, tokens.shape[1]
        size = state.feature.shape[2]
        feature, read = self._head.advance(
            depth,
            tokens.reshape(-1),
            state.feature.gather(1, above[..., None].expand(-1, -1, size)).flatten(0, 1),
            (start.base + depth).repeat_interleave(width),
            start.levels.level(above),
            host,
        )
        return _Level(feature.unflatten(0, tokens.shape), read.unflatten(0, tokens.shape), depth)

    def _logits(self, read: Tensor, host: HeadHost) -> Tensor:  # [..., draft vocab], float32
        logits = self._head.logits(read.reshape(-1, read.shape[-1]), host)
        return logits.float().unflatten(0, read.shape[:-1])

    def _ids(self, ranked: Tensor) -> Tensor:
        """The target's ids of draft tokens."""
        ids = self._head.target_ids
        return ranked if ids is None else ids[ranked]


def room_of(config: TreeDraftingConfig) -> int:
    """Rows that one draft computes, at most."""
    if config.use_dynamic_tree:
        return config.draft_len * config.dynamic_tree_max_topK
    return config.draft_len if config.nodes is None else len(config.nodes)


def _best(
    ids: Tensor,  # [num_drafts, pool]
    scores: Tensor,  # [num_drafts, pool], never above the parent's
    above: Tensor,  # [num_drafts, pool], index of the parent in the pool; -1 is the root
    max_nodes: int,
) -> tuple[Tensor, Tensor]:  # [num_drafts, num_nodes] each
    """The best nodes of the pool, in its order; ties go to the earlier, so parents are kept."""
    count = min(max_nodes, ids.shape[1])
    ranked = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    kept = ranked.sort(dim=1).values
    place = torch.full_like(ids, -1)
    place.scatter_(1, kept, torch.arange(count, device=ids.device).expand(len(ids), -1))
    parents = above.gather(1, kept)
    found = place.gather(1, parents.clamp(min=0))
    return ids.gather(1, kept), torch.where(parents < 0, -1, found)
