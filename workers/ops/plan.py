"""One step as flat arrays, which every kernel reads: rows, slots, block tables, ancestor bits.

The layout has no per-sequence padding except the block tables, and no dense mask. A key of
sequence `s` is named by its index in the sequence: index `k` is at slot
`block_tables[s, k // block_size] * block_size + k % block_size`. Row `r` of that sequence sees

- keys below `tree_start[s]` when `k <= row_index[r]`;
- key `tree_start[s] + n`, draft node `n`, when bit `n % 64` of `ancestors[r, n // 64]` is set.

A chain is causal, so it needs no bits: its `tree_start` is the end of the sequence. The position
of key `k` is `k` below `tree_start` and `positions[query_start[s] + k - context_lens[s]]` from
there on, because siblings share a position; windows and chunks are computed from positions.

Every step of every model passes through here, so the pass over rows and nodes is compiled, and
int32 arrays stay int32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import IntArray, StepInput
from ..verify.device_settings import DeviceSettings
from .kernels import compiled

Signals = SimpleQueue[bool]
"""One entry per layer that the previous part has stored; False: it failed."""


class PartFailedError(RuntimeError):
    """The previous part failed; its own error is the one to report."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One part's place in the order of threads: keys are stored before they are read.

    A part whose first rows continue a sequence of the previous part waits at every layer until that
    part has stored its keys. Parts of different sequences never wait for each other.
    """

    before: Signals | None  # from the previous part; None: this part does not read its keys
    after: Signals | None  # to the next part

    def stored(self) -> None:
        """Called once per layer, when the part's own keys are stored and before it attends.

        Raises:
            PartFailedError: the previous part has stored nothing.
        """
        if self.before is not None and not self.before.get():
            raise PartFailedError("the part before failed")
        if self.after is not None:
            self.after.put(True)

    def fail(self) -> None:
        """Releases the next part."""
        if self.after is not None:
            self.after.put(False)


# -- a step's rows and ancestor bits, in one compiled pass over its rows

_INTS: Any = types.Array(types.int32, 1, "C", readonly=True)
_INTS_OUT: Any = types.int32[::1]


@cache
def planning_kernel() -> Any:
    """Returns the kernel, compiled when the first step is planned."""

    @compiled(types.UniTuple(types.int64, 2), *[_INTS] * 4, *[_INTS_OUT] * 3, types.uint64[:, ::1])
    def plan_rows(
        query_start: Any, context_lens: Any, draft_start: Any, parents: Any,
        row_seq: Any, row_index: Any, tree_start: Any, ancestors: Any,
    ) -> tuple[int, int]:  # fmt: skip
        """Fills the last four; `ancestors` must be zero. Returns the longest query and sequence."""
        longest_query = longest_key = 0
        for seq in range(len(context_lens)):
            begin, end = query_start[seq], query_start[seq + 1]
            longest_query = max(longest_query, end - begin)
            longest_key = max(longest_key, context_lens[seq] + end - begin)
            for row in range(begin, end):
                row_seq[row] = seq
                row_index[row] = context_lens[seq] + row - begin
            first = draft_start[seq]
            num_nodes = draft_start[seq + 1] - first
            tree_start[seq] = context_lens[seq] + end - begin
            branches = False
            for node in range(num_nodes):
                branches = branches or parents[first + node] != node - 1
            if not branches:
                continue
            tree_start[seq] -= num_nodes
            root = end - num_nodes
            for node in range(num_nodes):
                parent = parents[first + node]
                if parent >= 0:
                    for word in range(ancestors.shape[1]):
                        ancestors[root + node, word] = ancestors[root + parent, word]
                own = np.uint64(1) << np.uint64(node % 64)
                ancestors[root + node, node // 64] |= own
        return longest_query, longest_key

    return plan_rows


WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's arrays on the device; int32 unless noted.

    The three lengths are bounds of the arrays' contents: host integers that belong to the shape
    of the step, so that a kernel can size its grid without reading the device.
    """

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens], where the row's key and value are written
    row_seq: Tensor  # [num_tokens], sequence of the row
    row_index: Tensor  # [num_tokens], key index of the row in its sequence
    query_start: Tensor  # [num_seqs + 1], first row of each sequence
    context_lens: Tensor  # [num_seqs], keys in the cache before the step
    tree_start: Tensor  # [num_seqs], key index of the first node whose visibility is given by bits
    block_tables: Tensor  # [num_seqs, max_blocks]
    ancestors: Tensor  # [num_tokens, num_words] int64, a node's ancestors and itself
    block_size: int
    max_query_len: int
    max_key_len: int
    host: StepInput | None = None  # the same on the host, if the step was planned there
    turn: Turn | None = None  # for a part of a step
    adapters: IntArray | None = None  # [num_tokens], on the host; 0: none. None: no row has one
    integers: NDArray[np.int64] | None = None  # inputs of CPU kernels, mostly addresses
    passes: tuple[Any, ...] = ()  # for torch's attention (`TorchOps`)
    spread: PagedStep | None = None  # for attention, with tree nodes as sequences (`invariant.py`)
    derived: dict[Any, Any] = field(default_factory=dict)  # arrays derived by operations
    like: PagedStep | None = None  # a plan of about the same size, whose division is reused

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A device step before its rows are laid out: tables by seat, and staged values; int32.

    Every sequence has consecutive rows for its root and each node. Further rows pad the step. They
    are leaves below the root that no row sees, including themselves, since their keys and values go
    into the spare slot's block.
    """

    tokens: Tensor  # [num_seats + 1, width]
    tables: Tensor  # [num_seats + 1, num_columns]
    settings: Tensor  # [num_seats + 1, words]: seed (2), temperature, top_k, top_p, min_p
    lengths: Tensor  # [num_seats + 1], known tokens
    drafts: tuple[Tensor, Tensor]  # tokens and parents [num_seats + 1, num_draft_nodes]; -1: root
    draft_counts: Tensor  # [num_seats + 1]
    own_drafts: Tensor  # [1], whether the nodes are the seats' drafts
    seats: Tensor  # [num_seqs]
    query_start: Tensor  # [num_seqs + 1]
    num_nodes: Tensor  # [num_seqs], number of the host's drafts' nodes
    room: Tensor  # [num_seqs], maximum number of nodes of the seats' drafts
    row_seq: Tensor  # [num_rows]
    nodes: tuple[Tensor, Tensor]  # tokens and parents [num_rows], of the host's drafts
    max_nodes: int  # maximum per sequence
    block_size: int
    spare_slot: int  # a slot whose keys are never read

    @property
    def num_words(self) -> int:
        """Words of a row's ancestors."""
        return max(1, -(-self.max_nodes // WORD_BITS))


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The rows of a device step."""

    plan: PagedStep  # bits describe every tree, including chains
    seats: Tensor  # [num_seqs] int64
    row_seats: Tensor  # [num_rows] int64
    first: Tensor  # [num_rows] int32, the root's row
    lanes: Tensor  # [num_rows] int32, 0 is the root
    depths: Tensor  # [num_rows] int32, 1 below the root; 0 for non-nodes
    parents: Tensor  # [num_rows] int64, the parent's row of a node; other rows: themselves
    slots: Tensor  # [num_rows] int64, as in `plan`
    next_positions: Tensor  # [num_rows] int32, positions of the tokens drawn at the rows
    settings: DeviceSettings  # of the rows
    seat_settings: DeviceSettings  # of the sequences


@dataclass(frozen=True, slots=True)
class KeptDrafts:
    """Drafts for the next step, and their destinations: the seats and the outcome."""

    tokens: Tensor  # [num_drafts, num_nodes]
    parents: Tensor | None  # [num_drafts, num_nodes]; None: chains
    sizes: Tensor | None  # [num_drafts], number of nodes; None: all
    chances: Tensor | None  # [num_drafts, num_nodes] float32
    room: Tensor  # [num_drafts] int32, maximum number of nodes in the next step
    seats: Tensor  # [num_drafts] int64
    counts: Tensor  # [num_seats + 1] int32, output
    drafts: tuple[Tensor, Tensor]  # tokens, parents [num_seats + 1, width] int32, output
    # [num_drafts * (1 + 2 * width)] int32, output: counts, tokens, parents; and, if there are
    # chances, their bits, [num_drafts * width].
    outcome: Tensor


@dataclass(frozen=True, slots=True)
class DraftLevel:
    """New rows of drafts that are extended level by level, and the rows before them."""

    slots: Tensor  # [num_drafts, max_known + room] int32: committed rows', then the draft's
    known: Tensor  # [num_drafts] int32, number of committed rows
    base: Tensor  # [num_drafts] int64, position of the last committed row
    above: Tensor | None  # [num_drafts, width] int64, parents in the last level; None: a chain
    seen: Tensor | None  # [num_drafts, last width, num_words] int64; None: the parent is the root
    begin: int  # number of a draft's earlier rows
    width: int
    depth: int  # 1: first level below the root; for a chain, depth of the first row
    room: int  # rows per draft

    @property
    def num_words(self) -> int:
        """Words of a row's ancestors."""
        return 1 if self.above is None else max(1, -(-self.room // WORD_BITS))


def plan_step(step: StepInput, block_size: int, device: torch.device) -> PagedStep:
    """Returns the flat arrays of `step`."""
    num_tokens, num_seqs = len(step.token_ids), step.num_seqs
    longest = 0
    if len(step.draft_parents):
        longest = int((step.draft_start[1:] - step.draft_start[:-1]).max())
    rows = np.empty((2, num_tokens), dtype=np.int32)
    tree_start = np.empty(num_seqs, dtype=np.int32)
    ancestors = np.zeros((num_tokens, max(1, -(-longest // WORD_BITS))), dtype=np.uint64)
    read = (step.query_start, step.context_lens, step.draft_start, step.draft_parents)
    max_query_len, max_key_len = planning_kernel()(*read, *rows, tree_start, ancestors)

    def put(values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return PagedStep(
        token_ids=put(step.token_ids),
        positions=put(step.positions),
        slots=put(step.slot_mapping),
        row_seq=put(rows[0]),
        row_index=put(rows[1]),
        query_start=put(step.query_start),
        context_lens=put(step.context_lens),
        tree_start=put(tree_start),
        block_tables=put(step.block_tables),
        ancestors=put(ancestors.view(np.int64)),
        block_size=block_size,
        max_query_len=max_query_len,
        max_key_len=max_key_len,
        host=step,
        adapters=None if step.adapters is None else step.adapters.repeat(step.query_lens),
    )


def part_of(plan: PagedStep, begin: int, end: int) -> PagedStep:
    """Returns rows `[begin, end)` as a step, with a cut sequence's earlier rows as context.

    A branching draft must not be cut. `host` remains that of the whole step.
    """
    device = plan.slots.device
    starts = plan.query_start.cpu().numpy()
    first = int(np.searchsorted(starts, begin, side="right")) - 1
    last = int(np.searchsorted(starts, end, side="left"))
    cut = starts[first : last + 1].clip(begin, end)
    context_lens = plan.context_lens.cpu().numpy()[first:last] + cut[:-1] - starts[first:last]
    query_lens = cut[1:] - cut[:-1]
    rows = slice(begin, end)
    return replace(
        plan,
        token_ids=plan.token_ids[rows],
        positions=plan.positions[rows],
        slots=plan.slots[rows],
        row_seq=plan.row_seq[rows] - first,
        row_index=plan.row_index[rows],
        query_start=torch.from_numpy(cut - np.int32(begin)).to(device),
        context_lens=torch.from_numpy(context_lens).to(device),
        tree_start=plan.tree_start[first:last],
        block_tables=plan.block_tables[first:last],
        ancestors=plan.ancestors[rows],
        adapters=None if plan.adapters is None else plan.adapters[rows],
        max_query_len=int(query_lens.max()),
        max_key_len=int((context_lens + query_lens).max()),
    )


def copied_contexts(plan: PagedStep) -> tuple[Tensor, PagedStep]:
    """Returns the concatenated blocks of all contexts, and the step over a copy of them.

    Computed once per step.
    """
    found = plan.derived.get(copied_contexts)
    if found is None:
        host = plan.host
        assert host is not None, "planned on the host"
        counts = -(-(host.context_lens + host.query_lens) // plan.block_size)
        index = np.arange(host.block_tables.shape[1], dtype=np.int32)
        blocks = host.block_tables[index < counts[:, None]].astype(np.int64)
        first = (np.cumsum(counts) - counts).astype(np.int32)
        tables = np.minimum(first[:, None] + index, np.int32(len(blocks) - 1))
        device = plan.block_tables.device
        on_device = [torch.from_numpy(each).to(device) for each in (blocks, tables)]
        found = (on_device[0], replace(plan, block_tables=on_device[1]))
        plan.derived[copied_contexts] = found
    return found


MIN_ROWS = 8
"""Minimum rows of a part; below, the fixed cost of a part exceeds the gain of a thread."""


def bounds_of(
    plan: PagedStep, num_parts: int, hidden_size: int
) -> list[int]:  # ascending, from 0 to the number of rows
    """Returns where to cut a step into parts of equal cost; [0, num_tokens]: do not cut.

    A row costs its products, and attention over its keys: `2 * hidden_size` keys cost about as much
    as the products of one row.
    """
    num_parts = min(num_parts, plan.num_tokens // MIN_ROWS)
    if num_parts < 2:
        return [0, plan.num_tokens]
    index, starts = plan.row_index.numpy(), plan.tree_start.numpy()
    costs = 1 + index / (2 * hidden_size)
    ends = costs.cumsum()
    wanted = ends[-1] * np.arange(1, num_parts) / num_parts
    cuts = np.searchsorted(ends - costs / 2, wanted)  # a row belongs to the part of its middle
    cuts = np.minimum(cuts, plan.num_tokens - 1)  # the last row may cost more than a part
    # A tree is not cut: its nodes must be adjacent, since rows are found from keys.
    cuts -= np.maximum(index[cuts] - starts[plan.row_seq.numpy()[cuts]], 0)
    return [0, *sorted({int(cut) for cut in cuts} - {0, plan.num_tokens}), plan.num_tokens]
