"""One rank's keys and values in paged storage, and attention over them with a tree of new tokens.

A slot holds one token: `slot = block * block_size + offset`. Which slots belong to whom is the
scheduler's business (`scheduler/blocks.py`); every rank holds its own heads of the same slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..scheduler.tree import ancestor_mask, is_chain
from ..scheduler.types import IntArray, StepInput


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores for one token on this rank. MLA's values are narrower than its keys."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_spare: int = 0  # slots after those of the blocks, for rows that no later step reads

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim)


class KVCache:
    """Keys and values of every layer. Zeroed, since padding reads slots that none has written."""

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.device = device
        self.keys: list[Tensor] = [torch.empty(0)] * len(shapes)
        """Per layer [num_slots + its spare ones, num_kv_heads, head_dim]: views of `_storages`."""
        self.values: list[Tensor] = [torch.empty(0)] * len(shapes)
        """Per layer [num_slots + its spare ones, num_kv_heads, value_dim]: views of `_storages`."""
        self._storages: list[Tensor] = []  # [num_layers of one shape, num_slots, heads, dim]
        for shape in dict.fromkeys(shapes):
            layers = [index for index, other in enumerate(shapes) if other == shape]
            for views, dim in ((self.keys, shape.head_dim), (self.values, shape.value_dim)):
                num_slots = self.num_slots + shape.num_spare
                size = (len(layers), num_slots, shape.num_kv_heads, dim)
                storage = torch.zeros(size, dtype=dtype, device=device)
                self._storages.append(storage)
                for layer, view in zip(layers, storage.unbind(0), strict=True):
                    views[layer] = view

    @property
    def num_bytes(self) -> int:
        return sum(storage.numel() * storage.element_size() for storage in self._storages)

    def write(
        self,
        layer: int,
        slots: Tensor,  # [num_tokens] int64
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
    ) -> None:
        """Put new tokens' keys and values of one layer into their slots."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def apply_moves(self, kv_moves: IntArray) -> None:  # [num_moves, 2], (source, destination)
        """Copy slots to slots in every layer; every read comes before every write."""
        if not len(kv_moves):
            return
        source, destination = torch.as_tensor(kv_moves, dtype=torch.int64).T.to(self.device)
        self.move(source, destination)

    def move(
        self,
        source: Tensor,  # [num_moves] int64, slots
        destination: Tensor,  # [num_moves] int64
    ) -> None:
        """`apply_moves` of tensors on the device."""
        for storage in self._storages:
            storage.index_copy_(1, destination, storage.index_select(1, source))


class StepAttention(Protocol):
    """One step's attention: paged, over block tables, with a tree among the new tokens."""

    def attend(
        self,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        scale: float,
        *,
        window: int | None = None,  # a query sees keys whose position is above its own minus this
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [num_heads], logits of a key that holds no value
        chunk: int | None = None,  # a query sees keys whose position // chunk is its own's
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        """Write keys and values into their slots, then attend."""


BoolArray = NDArray[np.bool_]

MAX_WASTE = 0.5
"""Padding that a group may add, as a share of its real (query, key) pairs."""
FREE_PAIRS = 2048
"""Padded pairs that cost less than the overhead of one more group."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a query sees, by positions; with neither bound, to the beginning."""

    window: int | None = None  # keys above its own position minus this
    chunk: int | None = None  # keys of its own chunk: positions divided by this are equal

    def covers(self, key_len: int) -> bool:
        """Whether nothing among that many positions from 0 is out of reach."""
        return (self.window is None or key_len <= self.window) and (
            self.chunk is None or key_len <= self.chunk
        )


EVERYTHING = Reach()


@dataclass(slots=True)
class Group:
    """Sequences that are padded together to one query length and one key length."""

    step: StepInput
    members: list[int]
    query_lens: IntArray  # [num_seqs], of the group
    key_lens: IntArray  # [num_seqs]
    query_len: int
    key_len: int
    device: torch.device
    slots: Tensor  # [num_seqs * key_len] int64
    rows: Tensor | None = None  # [num_seqs * query_len] into the flat query; None: all, in order
    _masks: dict[tuple[Reach, int], Tensor | None] = field(default_factory=dict)
    _flat_rows: IntArray | None = None  # [num_seqs * query_len], padding repeats the last query

    @property
    def num_seqs(self) -> int:
        return len(self.members)

    @property
    def is_fresh_chain(self) -> bool:
        """One sequence, nothing cached, no branches: the mask is a plain triangle."""
        return self.num_seqs == 1 and self.query_len == self.key_len and not self._has_branches()

    def mask(
        self, reach: Reach, fold: int = 1
    ) -> Tensor | None:  # [num_seqs, 1, fold * query_len, key_len] bool
        """Who sees whom within `reach`, `fold` times over; None: every query sees every key."""
        key = (EVERYTHING if reach.covers(self.key_len) else reach, fold)
        if key not in self._masks:
            visible = self._visible(key[0])
            if visible is None:
                self._masks[key] = None
            else:
                visible = visible if fold == 1 else np.tile(visible, (1, fold, 1))
                mask = torch.from_numpy(visible).unsqueeze(1)
                self._masks[key] = mask.to(self.device, non_blocking=True)
        return self._masks[key]

    def flat_rows(self) -> IntArray:
        if self._flat_rows is None:
            lane = np.minimum(np.arange(self.query_len), self.query_lens[:, None] - 1)
            rows = self.step.query_start[self.members][:, None] + lane
            self._flat_rows = rows.astype(np.int32).reshape(-1)
        return self._flat_rows

    def _has_branches(self) -> bool:
        return any(not is_chain(_parents(self.step, seq)) for seq in self.members)

    def _visible(self, reach: Reach) -> BoolArray | None:  # [num_seqs, query_len, key_len]
        """Every query sees the keys up to its own index; nodes see their ancestors only."""
        even = int(self.key_lens.min()) == self.key_len
        if reach == EVERYTHING and even and self.query_len == 1:
            return None
        lane, index = np.arange(self.query_len), np.arange(self.key_len)
        first = self.key_lens - self.query_lens
        last = np.minimum(first[:, None] + lane, self.key_lens[:, None] - 1)
        visible: BoolArray = index <= last[:, :, None]
        if len(self.step.draft_parents):
            self._graft(visible)
        if reach != EVERYTHING:
            self._narrow(visible, reach, first, index)
        return visible

    def _narrow(
        self,
        visible: BoolArray,  # [num_seqs, query_len, key_len], written
        reach: Reach,
        first: IntArray,  # [num_seqs], index of the first query
        index: NDArray[np.int64],  # [key_len]
    ) -> None:
        """Hide what is out of reach."""
        positions = self.step.positions[self.flat_rows()].reshape(self.num_seqs, -1)
        new = np.clip(index - first[:, None], 0, self.query_lens[:, None] - 1)
        own = np.take_along_axis(positions, new, axis=1)
        keys = np.where(index < first[:, None], index, own)[:, None, :]
        queries = positions[:, :, None]
        if reach.window is not None:
            visible &= keys > queries - reach.window
        if reach.chunk is not None:
            visible &= keys // reach.chunk == queries // reach.chunk

    def _graft(self, visible: BoolArray) -> None:
        """Let draft nodes see, among the nodes, only their ancestors and themselves."""
        for lane, seq in enumerate(self.members):
            parents = _parents(self.step, seq)
            if is_chain(parents):
                continue
            end = int(self.key_lens[lane])
            first = int(self.query_lens[lane]) - len(parents)
            block = visible[lane, first:, end - len(parents) : end]
            mask = ancestor_mask(parents)
            block[: len(parents)] = mask
            block[len(parents) :] = mask[-1]  # padded queries repeat the last node


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs of a step, the same for every layer.

    Sequence i has `context_lens[i]` tokens in the cache, at indices `[0, context_len)`, whose
    positions are their indices; its query (chunk, then draft nodes) takes the next indices in
    order. Nodes that are siblings share a position, so windows and chunks are computed from
    positions, never from indices. Masks and positions, which a step may not need, are computed when
    they are asked for.
    """

    slot_mapping: Tensor  # [num_tokens] int64
    groups: tuple[Group, ...]
    restore: Tensor | None  # [num_tokens] into the groups' outputs laid end to end; None: in order


def build_plan(step: StepInput, block_size: int, device: torch.device) -> AttentionPlan:
    """Group the sequences, pad each group, and lay out slots."""
    query_lens = step.query_start[1:] - step.query_start[:-1]
    key_lens = step.context_lens + query_lens
    slot_mapping = _to_device(step.slot_mapping, device)
    parts = partition(query_lens, key_lens)
    groups = tuple(
        _build_group(step, members, query_lens, key_lens, block_size, device) for members in parts
    )
    if len(parts) == 1 and groups[0].num_seqs * groups[0].query_len == len(step.token_ids):
        return AttentionPlan(slot_mapping, groups, None)
    restore, begin = np.empty(len(step.token_ids), dtype=np.int32), 0
    for group in groups:
        rows = group.flat_rows()
        # Padding repeats a sequence's last row, mask and all: whichever of them wins is right.
        restore[rows] = np.arange(begin, begin + len(rows), dtype=np.int32)
        group.rows = _to_device(rows, device)
        begin += len(rows)
    return AttentionPlan(slot_mapping, groups, _to_device(restore, device))


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
) -> Group:
    tables = step.block_tables
    if len(members) < len(query_lens):
        query_lens, key_lens, tables = query_lens[members], key_lens[members], tables[members]
    key_len = int(key_lens.max())
    num_blocks = -(-key_len // block_size)
    lane = np.arange(block_size, dtype=np.int32)
    slots = (tables[:, :num_blocks, None] * block_size + lane).reshape(len(members), -1)
    slots = slots[:, :key_len]
    if int(key_lens.min()) < key_len:  # padding repeats the sequence's own last key
        index = np.minimum(np.arange(key_len), key_lens[:, None] - 1)
        slots = np.take_along_axis(slots, index, axis=1)
    return Group(
        step=step,
        members=members,
        query_lens=query_lens,
        key_lens=key_lens,
        query_len=int(query_lens.max()),
        key_len=key_len,
        device=device,
        slots=_to_device(slots.reshape(-1), device),
    )


def _parents(step: StepInput, seq: int) -> IntArray:
    return step.draft_parents[step.draft_start[seq] : step.draft_start[seq + 1]]


def _to_device(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, torch.int64, non_blocking=True)


MAX_FOLDED_QUERY = 64
"""Longest query whose heads are folded; beyond it, the repeated mask costs more than it saves."""


class SdpaAttention:
    """`StepAttention` on any device that torch knows.

    Slots are gathered, and each group of sequences takes one dense attention. `index_select`
    gathers about six times faster than advanced indexing.
    """

    def __init__(self, step: StepInput, cache: KVCache) -> None:
        self._plan = build_plan(step, cache.block_size, cache.device)
        self._cache = cache

    def attend(
        self,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [num_heads]
        chunk: int | None = None,
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        plan, cache = self._plan, self._cache
        reach = EVERYTHING if window is None and chunk is None else Reach(window, chunk)
        cache.write(layer, plan.slot_mapping, key, value)
        keys, values = cache.keys[layer], cache.values[layer]
        outputs = []
        for group in plan.groups:
            rows = query if group.rows is None else query.index_select(0, group.rows)
            near, far = _gather(keys, group), _gather(values, group)
            if softcap is not None or sinks is not None:
                out = _explicit(rows, near, far, group, scale, reach, softcap, sinks)
            else:
                out = _fused(rows, near, far, group, scale, reach)
            outputs.append(out)
        if plan.restore is None:
            return outputs[0]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, plan.restore)


def _gather(
    pages: Tensor,  # [num_slots, num_kv_heads, dim]
    group: Group,
) -> Tensor:  # [num_seqs, num_kv_heads, key_len, dim], strided
    rows = pages.index_select(0, group.slots)
    return rows.view(group.num_seqs, group.key_len, pages.shape[1], pages.shape[2]).transpose(1, 2)


def _fused(
    query: Tensor,  # [num_seqs * query_len, num_heads, head_dim]
    key: Tensor,  # [num_seqs, num_kv_heads, key_len, head_dim]
    value: Tensor,  # [num_seqs, num_kv_heads, key_len, value_dim]
    group: Group,
    scale: float,
    reach: Reach,
) -> Tensor:  # [num_seqs * query_len, num_heads, value_dim]
    """Torch's own attention.

    Grouped heads are folded into a short query: every key head is then read once for all the query
    heads that share it (on a CPU 1.1 to 7 times faster than `enable_gqa`, and no slower).
    """
    padded = _padded(query, group)
    num_seqs, num_heads, query_len, _ = padded.shape
    num_kv_heads = key.shape[1]
    if query_len <= MAX_FOLDED_QUERY:
        fold = num_heads // num_kv_heads
        folded = padded.reshape(num_seqs, num_kv_heads, fold * query_len, -1)
        mask = group.mask(reach, 1 if query_len == 1 else fold)
        out = scaled_dot_product_attention(folded, key, value, mask, scale=scale)
        out = out.reshape(num_seqs, num_heads, query_len, -1)
    else:
        is_causal = reach.covers(group.key_len) and group.is_fresh_chain
        mask = None if is_causal else group.mask(reach)
        out = scaled_dot_product_attention(
            padded, key, value, mask,
            is_causal=is_causal, scale=scale, enable_gqa=num_heads > num_kv_heads,
        )  # fmt: skip
    return out.transpose(1, 2).flatten(0, 1)


def _explicit(
    query: Tensor,  # [num_seqs * query_len, num_heads, head_dim]
    key: Tensor,  # [num_seqs, num_kv_heads, key_len, head_dim]
    value: Tensor,  # [num_seqs, num_kv_heads, key_len, value_dim]
    group: Group,
    scale: float,
    reach: Reach,
    softcap: float | None,
    sinks: Tensor | None,  # [num_heads]
) -> Tensor:  # [num_seqs * query_len, num_heads, value_dim]
    """Attention spelled out, for what the fused kernels do not know: soft caps and sinks."""
    padded = _padded(query, group)
    num_kv_heads = key.shape[1]
    grouped = (group.num_seqs, num_kv_heads, padded.shape[1] // num_kv_heads, group.query_len)
    scores = torch.matmul(padded.reshape(*grouped, -1), key.unsqueeze(2).transpose(3, 4))
    scores = scores.float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mask = group.mask(reach)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, grouped[1], grouped[2], 1, 1)
        scores = torch.cat([scores, column.expand(*grouped, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : group.key_len].to(value.dtype)
    out = torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2)
    return out.transpose(1, 2).flatten(0, 1)


def _padded(
    query: Tensor,  # [num_seqs * query_len, num_heads, head_dim]
    group: Group,
) -> Tensor:  # [num_seqs, num_heads, query_len, head_dim]
    heads, dim = query.shape[1], query.shape[2]
    return query.reshape(group.num_seqs, group.query_len, heads, dim).transpose(1, 2)
