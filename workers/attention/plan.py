"""One step's attention plan: which slots each sequence reads, and who sees whom.

Built once per step from a `StepInput`, in numpy, and shared by all layers. Sequence i has
`context_lens[i]` tokens in the cache, at indices `[0, context_len)`, whose positions are their
indices; its query (chunk, then draft nodes) takes the next indices in order. Nodes that are
siblings share a position, so windows are computed from positions, never from indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.tree import ancestor_mask, is_chain
from ...scheduler.types import IntArray, StepInput

BoolArray = NDArray[np.bool_]
Index = NDArray[np.int32]

MAX_WASTE = 0.5
"""Padding that a group may add, as a share of its real (query, key) pairs."""
FREE_PAIRS = 2048
"""Padded pairs that cost less than the overhead of one more group."""


@dataclass(slots=True)
class Group:
    """Sequences that are padded together to one query length and one key length."""

    num_seqs: int
    query_len: int
    key_len: int
    slots: Tensor  # [num_seqs * key_len] int64
    rows: Tensor | None  # [num_seqs * query_len] int64 into the flat query; None: all, in order
    visible: BoolArray | None  # [num_seqs, query_len, key_len]; None: every key
    causal: bool  # a single fresh chain: the mask is a triangle
    query_positions: IntArray  # [num_seqs, query_len]
    key_positions: IntArray  # [num_seqs, key_len]
    device: torch.device
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def is_plain(self, window: int | None) -> bool:
        """Whether `window` hides nothing that is not hidden already."""
        return window is None or self.key_len <= window

    def mask(self, window: int | None) -> Tensor | None:  # [num_seqs, 1, query_len, key_len] bool
        """Who sees whom within `window`; None where every query sees every key."""
        if self.is_plain(window):
            window = None
        if window not in self._masks:
            self._masks[window] = self._build(window)
        return self._masks[window]

    def _build(self, window: int | None) -> Tensor | None:
        visible = self.visible
        if window is not None:
            near = self.key_positions[:, None, :] > self.query_positions[:, :, None] - window
            visible = near if visible is None else visible & near
        if visible is None:
            return None
        return torch.from_numpy(visible).unsqueeze(1).to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What `sdpa` needs of a step, the same for every layer."""

    slot_mapping: Tensor  # [num_tokens] int64
    groups: tuple[Group, ...]
    restore: Tensor | None  # [num_tokens] into the groups' outputs laid end to end; None: in order


def build_plan(step: StepInput, block_size: int, device: torch.device) -> AttentionPlan:
    """Group the sequences, pad each group, and lay out slots and masks."""
    query_lens = np.diff(step.query_start)
    key_lens = step.context_lens + query_lens
    slot_mapping = _to_device(step.slot_mapping, device)
    groups, restore, begin = [], np.empty(len(step.token_ids), dtype=np.int64), 0
    for members in partition(query_lens, key_lens):
        group, rows, valid = _build_group(step, members, query_lens, key_lens, block_size, device)
        restore[rows[valid]] = begin + np.flatnonzero(valid)
        begin += rows.size
        groups.append(group)
    in_order = len(groups) == 1 and groups[0].rows is None
    return AttentionPlan(
        slot_mapping, tuple(groups), None if in_order else _to_device(restore, device)
    )


def partition(query_lens: IntArray, key_lens: IntArray) -> list[list[int]]:
    """Sequences to pad together, of similar query and key length, so that waste is bounded."""
    if len(query_lens) == 1:
        return [[0]]
    order = np.lexsort((key_lens, query_lens)).tolist()
    groups: list[list[int]] = []
    real = longest_query = longest_key = 0
    for seq in order:
        query_len, key_len = int(query_lens[seq]), int(key_lens[seq])
        if query_len == 0:
            continue
        query_pad, key_pad = max(longest_query, query_len), max(longest_key, key_len)
        pairs = real + query_len * key_len
        padded = (len(groups[-1]) + 1) * query_pad * key_pad if groups else 0
        if groups and padded - pairs <= max(FREE_PAIRS, MAX_WASTE * pairs):
            groups[-1].append(seq)
            real, longest_query, longest_key = pairs, query_pad, key_pad
        else:
            groups.append([seq])
            real, longest_query, longest_key = query_len * key_len, query_len, key_len
    return [sorted(group) for group in groups]


def _build_group(
    step: StepInput,
    members: list[int],
    query_lens: IntArray,  # [num_seqs]
    key_lens: IntArray,  # [num_seqs]
    block_size: int,
    device: torch.device,
) -> tuple[Group, Index, BoolArray]:
    """The group, its rows in the flat query, and which of them are not padding."""
    seqs = np.asarray(members)
    query_lens, key_lens, context_lens = query_lens[seqs], key_lens[seqs], step.context_lens[seqs]
    query_len, key_len = int(query_lens.max()), int(key_lens.max())
    lane = np.arange(query_len)
    valid = lane < query_lens[:, None]
    rows = step.query_start[seqs, None] + np.minimum(lane, query_lens[:, None] - 1)
    index = np.minimum(np.arange(key_len), key_lens[:, None] - 1)  # padding repeats the last key
    slots = np.take_along_axis(step.block_tables[seqs], index // block_size, axis=1)
    slots = slots * block_size + index % block_size
    trees = [_parents(step, seq) for seq in members]
    chains = all(is_chain(parents) for parents in trees)
    uniform = bool(valid.all()) and key_len == int(key_lens.min())
    if uniform and query_len == 1:
        visible = None
    else:
        visible = _causal(context_lens, key_lens, query_len, key_len)
        if not chains:
            _graft(visible, trees, context_lens, query_lens)
    query_positions = step.positions[rows]
    every_row = bool(valid.all()) and rows.size == len(step.token_ids)
    in_order = every_row and members == list(range(len(members)))
    group = Group(
        num_seqs=len(members),
        query_len=query_len,
        key_len=key_len,
        slots=_to_device(slots.reshape(-1), device),
        rows=None if in_order else _to_device(rows.reshape(-1), device),
        visible=visible,
        causal=len(members) == 1 and chains and int(context_lens[0]) == 0,
        query_positions=query_positions,
        key_positions=_key_positions(index, context_lens, query_lens, query_positions),
        device=device,
    )
    return group, rows.reshape(-1), valid.reshape(-1)


def _parents(step: StepInput, seq: int) -> IntArray:
    return step.draft_parents[step.draft_start[seq] : step.draft_start[seq + 1]]


def _causal(
    context_lens: IntArray,  # [num_seqs]
    key_lens: IntArray,  # [num_seqs]
    query_len: int,
    key_len: int,
) -> BoolArray:  # [num_seqs, query_len, key_len]
    """Every query sees the keys up to its own index; padded ones see those of the last."""
    last = np.minimum(context_lens[:, None] + np.arange(query_len), key_lens[:, None] - 1)
    visible: BoolArray = np.arange(key_len) <= last[:, :, None]
    return visible


def _graft(
    visible: BoolArray,  # [num_seqs, query_len, key_len], written to
    trees: list[IntArray],  # parents, per sequence
    context_lens: IntArray,  # [num_seqs]
    query_lens: IntArray,  # [num_seqs]
) -> None:
    """Let draft nodes see, among the nodes, only their ancestors and themselves."""
    for lane, parents in enumerate(trees):
        if not len(parents):
            continue
        first = int(query_lens[lane]) - len(parents)
        begin = int(context_lens[lane]) + first
        block = visible[lane, first:, begin : begin + len(parents)]
        mask = ancestor_mask(parents)
        block[: len(parents)] = mask
        block[len(parents) :] = mask[-1]  # padded queries repeat the last node


def _key_positions(
    index: Index,  # [num_seqs, key_len]
    context_lens: IntArray,  # [num_seqs]
    query_lens: IntArray,  # [num_seqs]
    query_positions: IntArray,  # [num_seqs, query_len]
) -> IntArray:  # [num_seqs, key_len]
    """A committed token's position is its index; a new token's is its own."""
    new = index - context_lens[:, None]
    mine = np.take_along_axis(query_positions, np.clip(new, 0, query_lens[:, None] - 1), axis=1)
    return np.where(new < 0, index, mine).astype(np.int32)


def _to_device(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)
