"""Maps logit rows to sequences and draft nodes, and walks the accepted paths.

Called by `rules.verify` and by every rule. Works on the CPU in numpy, without logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...scheduler.types import IntArray, StepInput, Verdict, ints, starts_of


@dataclass(frozen=True, slots=True)
class Layout:
    """The logit rows of a step: for each sampled sequence its root, then its draft nodes."""

    seq: NDArray[np.int64]  # [num_rows], sequence in the batch
    root: NDArray[np.int64]  # [num_rows], row of the sequence's root
    parent: NDArray[np.int64]  # [num_rows], row of the parent; a root is its own parent
    nodes: NDArray[np.int64]  # [num_rows], index into the step's draft_tokens; -1 at roots
    tokens: IntArray  # [num_rows], the node's token; -1 at roots
    depth: IntArray  # [num_rows], 0 at roots
    positions: IntArray  # [num_rows], position of the token drawn at the row
    seeds: NDArray[np.int64]  # [num_rows]
    window: NDArray[np.bool_]  # [num_rows], the node is computed but never accepted
    num_seqs: int

    @property
    def num_rows(self) -> int:
        return len(self.seq)

    @property
    def is_root(self) -> NDArray[np.bool_]:  # [num_rows]
        return self.nodes < 0

    @property
    def drafted(self) -> NDArray[np.bool_]:  # [num_rows]
        """Nodes that may be accepted."""
        return (self.nodes >= 0) & ~self.window


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule's decision at every row, whether or not the walk reaches it."""

    taken: NDArray[np.bool_]  # [num_rows], the row is the child that its parent's row accepts
    tokens: IntArray  # [num_rows], the token emitted if the walk ends at the row


def layout(step: StepInput) -> Layout:
    """Builds the layout of `step`."""
    seq, rows = step.samples.nonzero()[0], np.arange(len(step.rows))
    root: NDArray[np.int64] = rows
    parent: NDArray[np.int64] = rows
    nodes, tokens = np.full(len(rows), -1), np.full(len(rows), -1, dtype=np.int32)
    if len(step.draft_tokens):
        num_rows = step.num_nodes[seq] + 1
        first = np.concatenate([[0], num_rows[:-1].cumsum(dtype=np.int64)])
        root = first.repeat(num_rows)
        seq, parent = seq.repeat(num_rows), rows.copy()
        drafted = (rows != root).nonzero()[0]
        above = root[drafted] + 1
        own = step.draft_start[seq[drafted]] + drafted - above
        nodes[drafted], tokens[drafted] = own, step.draft_tokens[own]
        parent[drafted] = above + step.draft_parents[own]
    assert len(seq) == len(rows), (len(seq), len(rows))
    positions = step.positions[step.rows]
    return Layout(
        seq=seq,
        root=root,
        parent=parent,
        nodes=nodes,
        tokens=tokens,
        depth=positions - positions[root],
        positions=positions + np.int32(1),
        seeds=step.sampling.seeds[seq],
        window=_window(step, seq, nodes),
        num_seqs=step.num_seqs,
    )


def _window(
    step: StepInput,
    seq: NDArray[np.int64],  # [num_rows]
    nodes: NDArray[np.int64],  # [num_rows]
) -> NDArray[np.bool_]:  # [num_rows]
    if step.num_window is None:
        return np.zeros(len(seq), dtype=np.bool_)
    first = step.draft_start[1:] - step.num_window
    return (nodes >= 0) & (nodes >= first[seq])


def child_table(rows: Layout) -> NDArray[np.int64]:  # [num_rows, max_children], padded with -1
    """Rows of every row's children that may be accepted, in drawing order."""
    drafted = np.flatnonzero(rows.drafted)
    order = drafted[np.argsort(rows.parent[drafted], kind="stable")]
    num_children = np.bincount(rows.parent[order], minlength=rows.num_rows)
    first = np.cumsum(num_children) - num_children
    table = np.full((rows.num_rows, int(num_children.max(initial=0))), -1, dtype=np.int64)
    table[rows.parent[order], np.arange(len(order)) - first[rows.parent[order]]] = order
    return table


def walk(rows: Layout, choice: Choice) -> NDArray[np.int64]:  # [num_emitted]
    """The rows on the accepted paths, sequence by sequence, from root to leaf.

    At most one child of a row is taken, and parents come before children, so the rows in ascending
    order are the paths. Each row on a path emits one token.
    """
    passed = choice.taken
    for _ in range(int(rows.depth.max(initial=0))):
        passed = choice.taken & passed[rows.parent]
    return passed.nonzero()[0]


def longest(
    rows: Layout,
    passes: NDArray[np.bool_],  # [num_rows]
    log_probs: NDArray[np.float64],  # [num_rows]
) -> NDArray[np.bool_]:  # [num_rows]
    """Every sequence's root and the longest path of passing nodes; ties go to the likeliest."""
    taken = rows.is_root.copy()
    reached, total = rows.is_root.copy(), np.zeros(rows.num_rows)
    best = rows.root.copy()  # at every root's row: the end of its best path
    for row in np.flatnonzero(passes).tolist():  # parents come before children
        parent, root = rows.parent[row], rows.root[row]
        if not reached[parent]:
            continue
        reached[row], total[row] = True, total[parent] + log_probs[row]
        leader = best[root]
        if (rows.depth[row], total[row]) > (rows.depth[leader], total[leader]):
            best[root] = row
    for row in best[rows.is_root].tolist():
        while not rows.is_root[row]:
            taken[row] = True
            row = rows.parent[row]
    return taken


def verdict(step: int, rows: Layout, choice: Choice, passed: NDArray[np.int64]) -> Verdict:
    """The walk as a `Verdict`: accepted tokens, then the token emitted at the end."""
    seq = rows.seq[passed]
    emitted = choice.tokens[passed].astype(np.int32, copy=False)
    emitted_start = starts_of(np.bincount(seq, minlength=rows.num_seqs))
    # A row before one of these emits that node's token.
    follows = (rows.root[passed] != passed).nonzero()[0]
    if not len(follows):
        nowhere = np.zeros(rows.num_seqs + 1, dtype=np.int32)
        return Verdict(step, emitted, emitted_start, ints([]), nowhere)
    accepted = passed[follows]
    emitted[follows - 1] = rows.tokens[accepted]
    return Verdict(
        step=step,
        emitted=emitted,
        emitted_start=emitted_start,
        path=ints(accepted - rows.root[accepted] - 1),
        path_start=starts_of(np.bincount(seq[follows], minlength=rows.num_seqs)),
    )
