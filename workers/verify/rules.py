"""`verify` turns a step's logits into its verdict under a rule; `Coupled` is the default rule.

A rule decides at every row, whether or not the walk reaches it. The walk, the verdict and the
log-probabilities are computed here for all rules.

`Coupled`: the target draws its own token; a draft node is accepted if it equals that token. The
noise of a draw depends only on (request seed, position, token), so the emitted tokens equal those
of a run without speculation, whatever was drafted. A drafter that draws with the same noise
(`sample.draw`) agrees with probability at least (1 - d) / (1 + d), where d is the total variation
distance of the two distributions. Source: Daliri, Musco, Suresh 2024, arXiv:2408.07978. At
temperature 0 this is greedy matching (Stern, Shazeer, Uszkoreit 2018, arXiv:1811.03115).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import (
    DraftProbs,
    IntArray,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
    starts_of,
)
from .process import (
    GREEDY_BELOW,
    DraftRows,
    DrawSettings,
    allow,
    draw,
    edit,
    spread,
    token_logprobs,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule's decision at every row, whether or not the walk reaches it."""

    taken: NDArray[np.bool_]  # [num_rows], whether the parent's row accepts this row
    tokens: IntArray  # [num_rows], the token emitted if the walk ends at the row


class Rule(Protocol):
    """How draft nodes are accepted. A frozen dataclass; its fields are the rule's parameters.

    `choose` gets the rows, the sampling settings, the draft's sparse distributions and
    the logits with penalties and biases applied, and returns a `Choice`: which child every row
    takes, and which token is emitted if the walk ends there. `process.pools` gives the processed
    distributions, `noise.uniform` coins that depend on (seed, position, stream) only. A rule
    whose decision on a node depends on later nodes (`block`) must draw its drafts and coins from a
    stream that changes with every round; otherwise it is not exact.

    To add a rule: write its file, add its class to `RULES` (`__init__.py`), and its name and the
    keys of its parameters to `config/section.py`.
    """

    name: ClassVar[str]

    def choose(
        self,
        rows: DraftRows,
        sampling: SamplingRows,
        draft_probs: DraftProbs | None,  # rows of zeros for deterministic nodes
        logits: Tensor,  # [num_rows, vocab] float32, edited
    ) -> Choice: ...


@dataclass(frozen=True, slots=True)
class Coupled:
    """Accepts the draft node that equals the target's own draw."""

    name: ClassVar[str] = "coupled"

    def choose(
        self, rows: DraftRows, sampling: SamplingRows, draft_probs: object, logits: Tensor
    ) -> Choice:
        return match(rows, draw_rows(rows, sampling, logits))


def draw_rows(
    rows: DraftRows,
    sampling: SamplingRows,
    logits: Tensor,  # [num_rows, vocab]
) -> IntArray:  # [num_rows]
    """Returns the target's own token at every row, copied to the CPU at once."""
    if not np.count_nonzero(sampling.temperature >= GREEDY_BELOW):
        on_cpu = logits.device.type == "cpu"  # numpy is ten times faster there
        best = logits.numpy().argmax(1) if on_cpu else logits.argmax(1).cpu().numpy()
        return best.astype(np.int32)
    drawn = draw(logits, rows.positions, DrawSettings.of(sampling, rows.seq))
    return drawn.cpu().numpy()


def match(rows: DraftRows, drawn: IntArray) -> Choice:  # [num_rows]
    """Accepts the child that equals its parent's draw; siblings differ, so at most one does."""
    agrees = (rows.tokens == drawn[rows.parent]) & ~rows.window
    return Choice(agrees | (rows.nodes < 0), drawn)


def verify(
    rule: Rule,
    step: StepInput,
    logits: Tensor,  # [num_rows, vocab] float32, not modified
) -> Verdict:
    """Returns the verdict on `step` under `rule`."""
    rows, sampling, edited = rows_of(step), step.sampling, logits
    assert len(logits) == len(rows.seq), (logits.shape, len(rows.seq))
    if sampling.penalties or sampling.biases or sampling.ends:
        edited = edit(rows, sampling, edited)
    if step.masks is not None:
        edited = allow(edited, step.masks)
    choice = rule.choose(rows, step.sampling, step.draft_probs, edited)
    passed = walk(rows, choice)
    result = verdict(step.step, rows, choice, passed)
    if step.num_window is not None:
        window, starts = _window(step.num_window, rows, edited)
        result = replace(result, window=window, window_start=starts)
    asked = step.sampling.num_logprobs[rows.seq[passed]]
    wanted = asked >= 0
    if not np.count_nonzero(wanted):
        return result
    emitting = torch.from_numpy(passed[wanted]).to(logits.device)
    # Under the model's own distribution; all rows get the largest requested `top`.
    scores = token_logprobs(logits[emitting], result.emitted[wanted], int(asked.max()))
    return replace(result, logprobs=spread(scores, wanted))


def _window(
    num_window: IntArray,  # [num_seqs]
    rows: DraftRows,
    logits: Tensor,  # [num_rows, vocab]
) -> tuple[IntArray, IntArray]:  # [num_window nodes], [num_seqs + 1]
    """Returns the most likely token after every window node, and the offsets of the sequences.

    It is not a draw: the token may become a guess for a position whose noise must stay unused.
    """
    nodes = torch.from_numpy(np.flatnonzero(rows.window)).to(logits.device)
    sampled = np.bincount(rows.seq[rows.window], minlength=len(num_window))
    likely = logits[nodes].argmax(1).to(torch.int32).cpu().numpy()
    return likely, starts_of(sampled)


# -- rows, and the walk over them


def rows_of(step: StepInput) -> DraftRows:
    """Returns the logit rows of `step`."""
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
    window = np.zeros(len(seq), dtype=np.bool_)
    if step.num_window is not None:
        window = (nodes >= 0) & (nodes >= (step.draft_start[1:] - step.num_window)[seq])
    return DraftRows(
        seq=seq,
        root=root,
        parent=parent,
        nodes=nodes,
        tokens=tokens,
        depth=positions - positions[root],
        positions=positions + np.int32(1),
        seeds=step.sampling.seeds[seq],
        window=window,
        num_seqs=step.num_seqs,
    )


def child_table(rows: DraftRows) -> NDArray[np.int64]:  # [num_rows, max_children], padded with -1
    """Returns the rows of every row's children that may be accepted, in drawing order."""
    drafted = np.flatnonzero(rows.drafted)
    order = drafted[np.argsort(rows.parent[drafted], kind="stable")]
    num_children = np.bincount(rows.parent[order], minlength=rows.num_rows)
    first = np.cumsum(num_children) - num_children
    table = np.full((rows.num_rows, int(num_children.max(initial=0))), -1, dtype=np.int64)
    table[rows.parent[order], np.arange(len(order)) - first[rows.parent[order]]] = order
    return table


def first_taken(
    rows: DraftRows,
    children: NDArray[np.int64],  # [num_rows, max_children], of `child_table`
    hit: NDArray[np.bool_],  # [num_rows, max_children], False at padding
) -> NDArray[np.bool_]:  # [num_rows]
    """Returns the roots, and the first child of every row that is hit."""
    taken = rows.is_root.copy()
    taken[children[hit & (np.cumsum(hit, axis=1) == 1)]] = True
    return taken


def walk(rows: DraftRows, choice: Choice) -> NDArray[np.int64]:  # [num_emitted]
    """Returns the rows on the accepted paths, sequence by sequence, from root to leaf.

    At most one child of a row is taken, and parents come before children, so the rows in ascending
    order are the paths. Each row on a path emits one token.
    """
    passed = choice.taken
    for _ in range(int(rows.depth.max(initial=0))):
        passed = choice.taken & passed[rows.parent]
    return passed.nonzero()[0]


def longest(
    rows: DraftRows,
    passes: NDArray[np.bool_],  # [num_rows]
    log_probs: NDArray[np.float64],  # [num_rows]
) -> NDArray[np.bool_]:  # [num_rows]
    """Returns every sequence's root and longest path of passing nodes; ties go to the likeliest."""
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


def verdict(step: int, rows: DraftRows, choice: Choice, passed: NDArray[np.int64]) -> Verdict:
    """Converts the walk to a `Verdict`: accepted tokens, then the token emitted at the end."""
    seq = rows.seq[passed]
    emitted = choice.tokens[passed].astype(np.int32, copy=False)
    emitted_start = starts_of(np.bincount(seq, minlength=rows.num_seqs))
    # The row before a node on the walk emits that node's token.
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
