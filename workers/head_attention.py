"""Attention of a head's layers over the paged cache: of a step, and of a draft that grows.

A draft's rows lie in slots behind those of the blocks (`KVShape.num_spare`) and are overwritten by
the next draft: keys that come from the head's own guesses never enter a block. A level of a draft
is planned like a step of the target, with ancestor bits, so a context is never copied. Blocks have
one slot each there, because accepted nodes are still in the slots that the step gave them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.heads.protocol import BlockView, Frontier
from ..scheduler.types import IntArray, StepInput, Verdict, ints, slots_of
from .attention import KVCache
from .ops import PagedStep, PlannedOps
from .ops.plan import WORD_BITS
from .ops.protocol import AttentionSpec


def committed(
    step: StepInput, verdict: Verdict, ends: Frontier, block_size: int, room: int
) -> tuple[IntArray, IntArray]:  # [num_drafts, key_len + room], [num_drafts]
    """Slots of all committed rows of the sequences, and their number.

    Accepted nodes are still in the slots that the step gave them; they move before the next step.
    """
    # The token just emitted has no row yet.
    chunks, roots = step.query_lens - step.num_nodes, step.root_rows
    known = (step.context_lens + chunks + verdict.num_accepted)[ends.seqs]
    index = np.arange(int(known.max(initial=0)) + room)
    tables = step.block_tables[ends.seqs]
    within = np.minimum(index, tables.shape[1] * block_size - 1)
    slots = slots_of(tables, within[None], block_size)
    slots[index >= known[:, None]] = 0
    for draft, seq in enumerate(ends.seqs.tolist()):
        path = verdict.nodes(seq)
        if len(path):
            rows = roots[seq] + 1 + path
            slots[draft, known[draft] - len(path) : known[draft]] = step.slot_mapping[rows]
    return slots, known


_spec = functools.cache(AttentionSpec)  # one object for equal layers: operations look it up


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Attention alone of planned rows, whose queries and keys a head's layer has prepared.

    Implements `Attend`.
    """

    planned: PlannedOps
    plan: PagedStep
    cache: KVCache
    first: int  # the head's first layer in the cache

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        sizes = (query.shape[1], key.shape[1], query.shape[2], value.shape[2])
        spec = _spec(*sizes, scale, window=window)
        place = (self.plan, self.cache, self.first + layer)
        return self.planned.attend(query, key, value, *place, spec)


@dataclass(frozen=True, slots=True)
class BlockAttend:
    """Attention of a draft's block; implements `Attend`."""

    plain: PagedAttend | None  # of layers whose rows see the whole block
    causal: PagedAttend | None  # of layers whose rows see those before
    views: Sequence[BlockView]  # by layer

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        view = self.views[layer]
        rows = self.causal if view.causal else self.plain
        assert rows is not None, "every kind of view is planned"
        return rows(layer, query, key, value, scale, view.window)


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """The committed rows of sequences that draft, on the device."""

    slots: Tensor  # [num_drafts, key_len + room] int32; what comes after `known` is any slot
    known: Tensor  # [num_drafts] int32, their number
    base: Tensor  # [num_drafts] int64, position of the last
    max_known: int  # bound of `known`


def committed_rows(
    step: StepInput, verdict: Verdict, ends: Frontier, cache: KVCache, room: int
) -> CommittedRows:
    """The rows that a step on the host leaves."""
    slots, known = committed(step, verdict, ends, cache.block_size, room)

    def put(values: NDArray[np.int32], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(values).to(cache.device, dtype, non_blocking=True)

    base = put(step.positions[ends.rows], torch.int64)
    return CommittedRows(put(ints(slots)), put(ints(known)), base, int(known.max()))


class PagedLevels:
    """One draft of each of `num_drafts` sequences; implements `DraftLevels`.

    No value is read on the host.

    Args:
        room: rows that may be added per sequence.
        branches: whether a row may have siblings; without, rows are causal and need no bits.
    """

    def __init__(
        self,
        planned: PlannedOps,
        cache: KVCache,
        first: int,
        rows: CommittedRows,
        room: int,
        *,
        branches: bool,
    ) -> None:
        self._planned, self._cache, self._first, self._rows = planned, cache, first, rows
        device, num_drafts = cache.device, len(rows.known)
        spare = torch.arange(num_drafts * room, device=device, dtype=torch.int32)
        self._spare = (spare + cache.num_slots).view(num_drafts, room)
        self._index = rows.known[:, None] + torch.arange(room, device=device, dtype=torch.int32)
        self._tables = rows.slots.scatter(1, self._index.long(), self._spare)
        self._tree_start = rows.known if branches else rows.known + room
        self._bits = _own_bits(room if branches else 0, device)
        self._seen = self._bits.new_zeros(num_drafts, 1, self._bits.shape[1])
        self._seqs = torch.arange(num_drafts + 1, device=device, dtype=torch.int32)
        self._branches = branches
        self._size, self._depth = 0, 0

    def level(self, above: Tensor) -> PagedAttend:  # [num_drafts, width]
        width = above.shape[1]
        self._depth += 1
        positions = (self._rows.base + self._depth).to(torch.int32).repeat_interleave(width)
        ancestors = self._ancestors(above, self._size, self._size + width)
        return self._attend(width, positions, ancestors)

    def chain(self, width: int) -> PagedAttend:
        assert not self._branches, "rows that are causal need no bits"
        ahead = torch.arange(1, width + 1, device=self._rows.base.device) + self._depth
        self._depth += width
        positions = (self._rows.base[:, None] + ahead).to(torch.int32).flatten()
        ancestors = self._seen.expand(-1, width, -1).flatten(0, 1)
        return self._attend(width, positions, ancestors)

    def block(self, width: int, views: Sequence[BlockView]) -> BlockAttend:
        assert self._branches, "rows of a block may see later ones"
        assert not self._size, "a block is a draft of its own"
        # Windows count rows: where features were lost, a position is more than its row's index.
        positions = self._index[:, :width].flatten().contiguous()
        own = self._bits[:width]
        seen = {True: own.cumsum(0), False: own.sum(0).expand(width, -1)}  # bits that differ
        attends: dict[bool, PagedAttend] = {}
        for causal in {view.causal for view in views}:
            ancestors = seen[causal].repeat(len(self._rows.known), 1)
            self._size = 0  # the rows are the same
            attends[causal] = self._attend(width, positions, ancestors)
        return BlockAttend(attends.get(False), attends.get(True), tuple(views))

    def _attend(
        self,
        width: int,
        positions: Tensor,  # [num_drafts * width] int32
        ancestors: Tensor,  # [num_drafts * width, num_words] int64
    ) -> PagedAttend:
        """The attention of the next `width` rows of every sequence."""
        begin, end = self._size, self._size + width
        self._size = end
        plan = PagedStep(
            token_ids=positions,  # attention reads none
            positions=positions,
            slots=self._spare[:, begin:end].flatten().contiguous(),
            row_seq=self._seqs[:-1].repeat_interleave(width),
            row_index=self._index[:, begin:end].flatten().contiguous(),
            query_start=self._seqs * width,
            context_lens=self._index[:, begin].contiguous(),
            tree_start=self._tree_start,
            block_tables=self._tables,
            ancestors=ancestors,
            block_size=1,
            max_query_len=width,
            max_key_len=self._rows.max_known + end,
        )
        return PagedAttend(self._planned, self._planned.ops.adopt(plan), self._cache, self._first)

    def _ancestors(
        self,
        above: Tensor,  # [num_drafts, width]
        begin: int,
        end: int,
    ) -> Tensor:  # [num_drafts * width, num_words] int64
        if not self._branches:
            return self._seen.expand(-1, end - begin, -1).flatten(0, 1)
        words = self._seen.shape[2]
        seen = self._seen.gather(1, above[..., None].expand(-1, -1, words))
        self._seen = seen | self._bits[begin:end]
        return self._seen.flatten(0, 1)


def _own_bits(room: int, device: torch.device) -> Tensor:  # [room, num_words] int64
    """Each row's bit among all rows of a draft."""
    rows = torch.arange(room, device=device)
    words = torch.arange(max(1, -(-room // WORD_BITS)), device=device)
    bit = torch.ones_like(rows) << rows % WORD_BITS
    return torch.where(rows[:, None] // WORD_BITS == words, bit[:, None], 0)
