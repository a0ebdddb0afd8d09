"""Drafts from a head's own output: a chain, a fixed tree, or a dynamic tree.

For heads whose row j consumes a feature and the embedding of token j + 1, and whose output is used
as the next feature. A chain is drawn with the target's noise; a fixed tree takes tokens by rank;
EAGLE-2's dynamic tree expands the highest products of probabilities (arXiv:2406.16858).

`TreeDraftingHead.expand` is the whole loop as torch operations without host reads. The device step
runs it unchanged (`workers/device_step/draft.py`); `draft` plans the inputs of any head's loop on
the host, and copies its result.

The best tree of a number of nodes under the head's own probabilities (DDTree): a node's score is
the logarithm of the product of the probabilities along its path, which no descendant exceeds. The
nodes with the highest scores therefore form a tree. Of all trees with as many nodes, it has the
most expected tokens, if the head's probabilities are right. Source: Ringel and Romano 2026,
arXiv:2604.12989, Alg. 1, for positions that are independent given the text. That algorithm takes
one node after the other from a heap. Here, the same nodes are found level by level, for all
sequences at once and without host reads: each level has a limited number of nodes that can be in
the tree, and a node can be in it only if the nodes that are surely better leave room. The children
of a node may also depend on its token (a Markov or selector correction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...config.heads import Choice, TreeDraftingConfig
from ...scheduler.types import IntArray, NextDrafts, StepInput, Verdict, ints
from .protocol import (
    Attend,
    DraftLevels,
    DraftStart,
    EarlierRows,
    FeatureModule,
    Frontier,
    Head,
    HeadHost,
    HeadRows,
    Trees,
    Verified,
    drafts_of,
    frontier,
    last_emitted,
    log_of_best,
    on,
)

Children = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Returns the candidates that may follow the nodes of a level.

Arguments: the children's level (0: the root's), and the tokens of their parents
[num_drafts, width]. Returns log-probabilities, none above 0 and best first, and the target's ids,
[num_drafts, width, num_ranks] each; with width 1, they are the same for every node.
"""


def ranked(
    logits: Tensor,  # [..., vocab]
    max_ranks: int,
) -> tuple[Tensor, Tensor]:  # [..., num_ranks] each
    """Returns log-probabilities of the likeliest columns, best first, and the columns."""
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
    """Returns the best tree of at most `max_nodes` nodes and `num_levels` levels, best node first.

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
        # Nodes that can have children; further nodes only as many as there are levels above.
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
    """Returns rows of the level above, which is sorted, with the ranks that can be in the tree.

    Better than rank r below row i, or equal and before it, are: all of the rows up to i, ancestors
    above them, the ranks before r below row i, and, if all rows have the same children, those below
    the rows before i.
    """
    pairs = []
    for row in range(width):
        of_levels = 0 if level == 0 else row + level  # the rows up to this one, and one per level
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
    """Returns the best nodes of a pool, best first; earlier nodes win ties, so parents lead."""
    count = min(max_nodes, ids.shape[1])
    best, order = scores.sort(dim=1, descending=True, stable=True)
    kept = order[:, :count]
    place = torch.full_like(ids, -1)
    place.scatter_(1, kept, torch.arange(count, device=ids.device).expand(len(ids), -1))
    parents = above.gather(1, kept)
    found = place.gather(1, parents.clamp(min=0))
    parents = torch.where(parents < 0, -1, found)
    return Trees(ids.gather(1, kept), parents, scores=best[:, :count])


MAX_DEPTH = np.iinfo(np.int32).max  # of drafts whose length a step does not limit


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """One level of a fixed tree; int64."""

    rows: Tensor  # [num_nodes], parent row in the level above
    ranks: Tensor  # [num_nodes]
    inner: Tensor  # nodes with children, in the order of their rows
    width: int  # number of ranks that are considered

    def take(
        self,
        logits: Tensor,  # [num_drafts, num_rows, vocab], of the rows above; 1 row: for all
        *,
        with_logs: bool,
    ) -> tuple[Tensor, Tensor | None]:  # [num_drafts, num_nodes] each
        """Returns the nodes' columns, and logarithms of their probabilities if requested."""
        best, columns = logits.topk(self.width, dim=2)
        rows = 0 if logits.shape[1] == 1 else self.rows
        if not with_logs:
            return columns[:, rows, self.ranks], None
        logs = best.float() - logits.float().logsumexp(2, keepdim=True)
        return columns[:, rows, self.ranks], logs[:, rows, self.ranks]


@dataclass(frozen=True, slots=True)
class FixedTree:
    """A tree of rank paths as the index tensors that fill it; int64."""

    levels: tuple[TreeLevel, ...]
    order: Tensor  # [num_nodes], the draft's nodes among those of all levels
    parents: Tensor  # [num_nodes], of the draft's nodes

    def filled(
        self,
        tokens: Sequence[Tensor],  # per level, [num_drafts, num_nodes]
        logs: Sequence[Tensor | None],  # per level, as in `TreeLevel.take`
    ) -> Trees:
        """Returns the drafts."""
        whole = torch.cat(list(tokens), dim=1)[:, self.order]
        scores, above = list[Tensor](), whole.new_zeros((), dtype=torch.float32)
        for level, own in zip(self.levels, logs, strict=True):
            if own is None:
                return Trees(whole, self.parents.expand_as(whole))
            scores.append(own + (above[:, level.rows] if scores else above))
            above = scores[-1][:, level.inner]
        ordered = torch.cat(scores, dim=1)[:, self.order]
        return Trees(whole, self.parents.expand_as(whole), scores=ordered)


@cache  # made by the first call: a captured step copies nothing to the device
def fixed_tree(nodes: tuple[Choice, ...], device: torch.device) -> FixedTree:
    """Returns the tree of `nodes`, parents first, on a device."""

    def put(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    place = {path: index for index, path in enumerate(nodes)}
    inner = {path[:-1] for path in nodes}
    rows: dict[Choice, int] = {(): 0}
    levels: list[TreeLevel] = []
    columns: list[int] = []
    for depth in range(1, max(map(len, nodes)) + 1):
        paths = [path for path in nodes if len(path) == depth]
        ranks = [path[-1] for path in paths]
        with_children = [index for index, path in enumerate(paths) if path in inner]
        parents = put([rows[path[:-1]] for path in paths])
        levels.append(TreeLevel(parents, put(ranks), put(with_children), max(ranks) + 1))
        columns += [place[path] for path in paths]
        rows = {paths[index]: row for row, index in enumerate(with_children)}
    above = put([place.get(path[:-1], -1) for path in nodes])
    return FixedTree(tuple(levels), put(columns).argsort(), above)


@dataclass(slots=True)
class Level:
    """The last level of the drafts under construction."""

    feature: Tensor  # [num_drafts, width, feature]
    # [num_drafts, width, hidden_size], for the output layer; with width 1: the same for all nodes
    read: Tensor
    depth: int = 0


class TreeDraftingHead:
    """A head that computes its drafts level by level, from its own output."""

    target_ids: Tensor | None  # [draft_vocab], target id of every draft token; None: the same
    reads_device_only = has_chances = False
    only_module: FeatureModule | None = None

    def __init__(self, config: TreeDraftingConfig) -> None:
        self._config = config
        self._nodes = config.nodes  # of a fixed tree
        self.branches = self.is_tree
        self.room = config.draft_len if config.nodes is None else len(config.nodes)
        if config.use_dynamic_tree:
            self.room = config.draft_len * config.dynamic_tree_max_topK

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        """Implements `Head.rows`."""
        raise NotImplementedError

    def advance(
        self,
        level: int,  # 1 is the first level below the root
        token_ids: Tensor,  # [num_rows], the target's
        feature: Tensor,  # [num_rows, feature], of their parent rows
        positions: Tensor,  # [num_rows]
        attend: Attend,
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # next feature [num_rows, feature], output [num_rows, hidden_size]
        """Computes the rows of a level."""
        raise NotImplementedError

    def resume(
        self,
        feature: Tensor,  # [num_rows, feature], its own
        depth: Tensor,  # [num_rows], the level of a draft whose rows have it
    ) -> tuple[Tensor, int]:  # [num_rows, feature]
        """Returns what replaces the target's states behind a draft's nodes, and the next level."""
        return feature, 1

    @property
    def is_tree(self) -> bool:
        """Whether a draft is a fixed or dynamic tree, with all of its levels."""
        return self._nodes is not None or self._config.is_grown

    def expand(self, start: DraftStart, depth: int, host: HeadHost) -> Trees:
        if self._nodes is not None:
            return self._fixed(fixed_tree(self._nodes, start.base.device), start, host)
        if self._config.use_dynamic_tree:
            return self._dynamic(start, host)
        return Trees(self._chain(start, min(depth, self._config.draft_len), host), None)

    def _chain(self, start: DraftStart, depth: int, host: HeadHost) -> Tensor:
        state = Level(start.feature[:, None], start.read[:, None])
        drawn: list[Tensor] = []
        for level in range(depth):
            if level:
                state = self._advance(start, state, drawn[-1][:, None], None, host)
            drawn.append(start.draw(state.read, level)[:, 0])
        return torch.stack(drawn, dim=1)

    def _fixed(self, tree: FixedTree, start: DraftStart, host: HeadHost) -> Trees:
        """Fills a static tree: each node is a rank among its parent's likeliest tokens."""
        state, parts, logs = Level(start.feature[:, None], start.read[:, None]), [], []
        for level in tree.levels:
            logits = self._logits(state.read, host)
            columns, own = level.take(logits, with_logs=start.cut is not None)
            tokens = self._ids(columns)
            parts.append(tokens)
            logs.append(own)
            if len(level.inner):
                above = level.rows[level.inner].expand(len(tokens), -1)
                state = self._advance(start, state, tokens[:, level.inner], above, host)
        return tree.filled(parts, logs)

    def _dynamic(self, start: DraftStart, host: HeadHost) -> Trees:
        """Expands the best nodes of each level; the draft is the best nodes of all levels."""
        top, num_drafts = self._config.dynamic_tree_max_topK, len(start.base)
        place = start.base.new_full((num_drafts, 1), -1)  # index in the pool of the rows read
        score = start.read.new_zeros(num_drafts, 1, dtype=torch.float32)
        state = Level(start.feature[:, None], start.read[:, None])
        ids, scores, above = [], [], []
        size = 0
        for level in range(self._config.draft_len):
            logs = self._logits(state.read, host).log_softmax(2)
            best, ranked = logs.topk(min(top, logs.shape[2]), dim=2)
            width = ranked.shape[2]
            best = best + score[..., None]
            tokens, best = self._ids(ranked).expand_as(best).flatten(1), best.flatten(1)
            ids.append(tokens)
            scores.append(best)
            above.append(place.repeat_interleave(width, dim=1))
            if level + 1 == self._config.draft_len:
                break
            score, chosen = best.topk(min(top, best.shape[1]), dim=1)
            place, size = size + chosen, size + best.shape[1]
            state = self._advance(start, state, tokens.gather(1, chosen), chosen // width, host)
        pool = torch.cat(ids, 1), torch.cat(scores, 1), torch.cat(above, 1)
        return best_nodes(*pool, self._config.max_nodes)

    def _advance(
        self,
        start: DraftStart,
        state: Level,
        tokens: Tensor,  # [num_drafts, width], the target's ids
        above: Tensor | None,  # [num_drafts, width], parent row in the last level; None: a chain's
        host: HeadHost,
    ) -> Level:
        """Computes one more level, whose nodes are `tokens`."""
        assert start.levels is not None, "a head with a recurrence attends"
        depth, before = state.depth + 1, state.feature
        if above is None:
            attend = start.levels.chain(1)
        else:
            attend = start.levels.level(above)
            before = before.gather(1, above[..., None].expand(-1, -1, before.shape[2]))
        rows = before.flatten(0, 1)
        feature, read = self.advance(
            depth, tokens.reshape(-1), rows, attend.positions, attend, host
        )
        return Level(feature.unflatten(0, tokens.shape), read.unflatten(0, tokens.shape), depth)

    def _logits(self, read: Tensor, host: HeadHost) -> Tensor:  # [..., draft vocab], float32
        logits = host.draft_logits(read.reshape(-1, read.shape[-1]))
        return logits.float().unflatten(0, read.shape[:-1])

    def _ids(self, ranked: Tensor) -> Tensor:
        """Returns the target's ids of draft tokens."""
        return ranked if self.target_ids is None else self.target_ids[ranked]


def draft(head: Head, done: Verified, host: HeadHost) -> NextDrafts:
    """Computes a head's rows of a step on the host, then drafts from the last committed ones."""
    step, device = done.step, host.target.device
    ends = frontier(step, done.verdict)
    feature, read = head.rows(rows_of(done, host, attends=bool(head.layers)), host)
    if not len(ends.seqs):
        return drafts_of(step, ends, ints([]).reshape(0, 0), ints([]))
    rows = on(ends.rows, device)
    levels = host.draft_attention(step, done.verdict, ends) if head.room else None
    grow = partial(head.expand, host=host)
    return grown(head, done, ends, (feature[rows], read[rows], levels), grow, host)


def depth_of(step: StepInput, ends: Frontier) -> int:
    """Returns the maximum number of nodes of the drafts."""
    return MAX_DEPTH if step.max_nodes is None else int(step.max_nodes[ends.seqs].max())


def grown(
    head: Head,
    done: Verified,
    ends: Frontier,
    begin: tuple[Tensor, Tensor, DraftLevels | None],  # `feature`, `read`, `levels` of `DraftStart`
    grow: Callable[[DraftStart, int], Trees],
    host: HeadHost,
) -> NextDrafts:
    """Returns the drafts that `grow` builds from a step's last committed rows."""
    step, device = done.step, host.target.device

    def draw(read: Tensor, level: int) -> Tensor:
        logits = host.draft_logits(read.flatten(0, 1))
        return draw_from(logits.unflatten(0, read.shape[:2]), level)

    cut = host.cut(step.sampling, ends.seqs)

    def draw_from(logits: Tensor, level: int) -> Tensor:
        if cut is not None:
            cut.see(log_of_best(logits))
        width = logits.shape[1]
        positions = ints(ends.lens[:, None] + np.arange(level, level + width)).reshape(-1)
        seqs = np.repeat(ends.seqs, width)
        rows = logits.flatten(0, 1)
        drawn = host.draw(rows, step.sampling, seqs, positions, head.target_ids)
        return drawn.unflatten(0, logits.shape[:2])

    start = DraftStart(
        on(step.positions[ends.rows], device),
        on(last_emitted(done.verdict, ends), device),
        *begin,
        draw,
        draw_from,
        cut,
    )
    trees = grow(start, depth_of(step, ends))
    if cut is not None:
        trees = cut.of(trees)
    num_nodes, parts = trees.tokens.shape[1], [trees.tokens]
    if trees.parents is not None:
        parts.append(trees.parents)
    if trees.sizes is not None:
        parts.append(trees.sizes[:, None])
    values = ints(torch.cat(parts, dim=1).cpu().numpy())
    tokens, parents = values[:, :num_nodes], ints(np.arange(-1, num_nodes - 1))
    if trees.parents is not None:
        parents = values[:, num_nodes : 2 * num_nodes]
    sizes = None if trees.sizes is None else values[:, -1]
    chances = None if trees.chances is None else trees.chances.float().cpu().numpy()
    return drafts_of(step, ends, tokens, parents, sizes, chances)


def is_plain(step: StepInput) -> bool:
    """Returns True if every sequence had one token, which was sampled from."""
    return len(step.token_ids) == step.num_seqs and b"\0" not in step.samples.tobytes()


def follows(before: Verified, step: StepInput) -> bool:
    """Returns True if a step computes only the tokens that a plain step emitted."""
    return (
        is_plain(step)
        and _same(step.token_ids, before.verdict.emitted)
        and _same(step.positions, before.step.positions + 1)
    )


def _same(one: IntArray, other: IntArray) -> bool:
    """Compares a few numbers, five times as fast as numpy's comparison."""
    return one.tobytes() == other.tobytes()


def runs(steps: Sequence[Verified]) -> list[list[Verified]]:
    """Splits plain steps where one does not continue all sequences of the previous one."""
    found: list[list[Verified]] = []
    for _, same_size in groupby(steps, key=lambda each: each.step.num_seqs):
        part = list(same_size)
        if len(part) == 1:
            found.append(part)
            continue
        # [num_steps, num_seqs]
        emitted = np.stack([each.verdict.emitted for each in part])
        tokens = np.stack([each.step.token_ids for each in part])
        lens = np.stack([each.step.context_lens for each in part])
        blocks = np.stack([each.step.block_tables[:, 0] for each in part])
        goes_on = (tokens[1:] == emitted[:-1]) & (lens[1:] == lens[:-1] + 1)
        goes_on &= blocks[1:] == blocks[:-1]  # of the same texts
        cuts = np.flatnonzero(~goes_on.all(axis=1)) + 1
        found += [part[begin:end] for begin, end in pairwise([0, *cuts.tolist(), len(part)])]
    return found


def joined(steps: Sequence[Verified]) -> Verified:
    """Joins consecutive plain steps into the last one, with all of their rows as its chunks."""
    if len(steps) == 1:
        return steps[0]
    parts, last = [each.step for each in steps], steps[-1]
    num_steps, num_seqs = len(steps), last.step.num_seqs

    def by_sequence(name: str) -> IntArray:  # [num_seqs * num_steps]
        return np.stack([getattr(part, name) for part in parts], axis=1).reshape(-1)

    step = replace(
        last.step,
        token_ids=by_sequence("token_ids"),
        positions=by_sequence("positions"),
        slot_mapping=by_sequence("slot_mapping"),
        query_start=ints(np.arange(num_seqs + 1) * num_steps),
        context_lens=parts[0].context_lens,
    )
    hidden = {
        layer: torch.stack([each.hidden[layer] for each in steps], dim=1).flatten(0, 1)
        for layer in last.hidden
    }
    return Verified(step, last.verdict, hidden)


def rows_of(done: Verified, host: HeadHost, *, attends: bool = True) -> HeadRows:
    """Returns the rows of a step on the host; without attention, only their hidden states."""
    step, device = done.step, host.target.device
    if not attends:
        none = torch.empty(0, dtype=torch.int64)
        return HeadRows(none, none, none, done.hidden, None, None)

    @cache  # shared by the modules of one head
    def before() -> EarlierRows:
        ends, size = np.maximum(step.context_lens - 1, 0), host.block_size
        blocks = step.block_tables[np.arange(step.num_seqs), ends // size]
        return EarlierRows(
            on(step.slot_mapping, device),
            on(earlier(step), device),
            on(blocks * size + ends % size, device),
        )

    after = on(next_tokens(step, done.verdict), device)
    ids, positions = on(step.token_ids, device), on(step.positions, device)
    return HeadRows(ids, after, positions, done.hidden, host.attention(step), before)


def next_tokens(step: StepInput, verdict: Verdict) -> IntArray:  # [num_tokens]
    """Returns the token after each computed one; undefined for rejected nodes."""
    roots = step.root_rows
    ids = np.append(step.token_ids[1:], 0).astype(np.int32)
    if step.next_tokens is not None:
        partial = ~step.samples
        ids[roots[partial]] = step.next_tokens[partial]
    emitting = np.flatnonzero(verdict.num_emitted)
    first = roots[emitting]
    ids[first] = verdict.emitted[verdict.emitted_start[emitting]]
    later = np.ones(len(verdict.emitted), dtype=np.bool_)
    later[verdict.emitted_start[emitting]] = False
    ids[verdict.accepted_rows(step)] = verdict.emitted[later]
    return ids


def earlier(step: StepInput) -> NDArray[np.int64]:  # [num_tokens]
    """Returns the row of the token before each; for a node, its parent's row.

    num_tokens + i stands for the last token of sequence i before the step.
    """
    num_nodes = step.num_nodes
    rows = np.arange(-1, len(step.token_ids) - 1)
    roots = np.repeat(step.root_rows, num_nodes)
    nodes = np.arange(len(step.draft_parents)) - np.repeat(step.draft_start[:-1], num_nodes)
    rows[roots + 1 + nodes] = roots + 1 + step.draft_parents  # parent -1 is the root
    rows[step.query_start[:-1]] = len(rows) + np.arange(step.num_seqs)
    return rows


def a_token_earlier(
    layer: int,  # layer of the head that stores them
    feature: Tensor,  # [num_rows, feature]
    earlier: EarlierRows,
    host: HeadHost,
) -> Tensor:  # [num_rows, feature]
    """Stores the features of a step's rows; returns those of the token before each."""
    left = host.cached(layer, earlier.last_slots)[0][:, 0]
    host.keep(layer, earlier.slots, feature[:, None], feature.new_zeros(len(feature), 1, 0))
    return torch.cat([feature, left])[earlier.rows]
