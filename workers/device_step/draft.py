"""A head's rows and its whole draft loop in the device step, without host reads.

The loop itself is the head's (`drafters/heads/tree_drafting.py`), and so is the attention of its
levels (`workers/head_layers.py`); the host path uses the same code. This module provides their
inputs. These come from the seats and from the walk, after the compaction, so a sequence's
committed rows are where its block table says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ...drafters.heads.protocol import Cut, DraftStart, EarlierRows, HeadRows, Trees, log_of_best
from ..attention import KVCache
from ..head import HeadRunner
from ..head_layers import CommittedRows, PagedAttend, PagedLevels
from ..ops import DeviceLayout, DeviceOps, DraftLevel, KeptDrafts, PagedStep
from ..verify.device_settings import DeviceSettings, Settled
from .seats import DeviceSeats, Share, best_of_ranks, seat_settings
from .shape import MAX_NODES, Sampler, StepShape


def head_obstacle(head: HeadRunner, num_nodes: int) -> str:
    """Returns why the device step cannot run a head in the target's ranks, or ""."""
    if not head.planned.ops.reads_device_only:
        return f"the head's operations {head.planned.ops.name!r} plan steps on the host"
    if head.head.layers and head.module_reason and not head.head.reads_device_only:
        return f"the head's layers run as torch modules: {head.module_reason}"
    if num_nodes > MAX_NODES:
        return f"a draft of {num_nodes} nodes is longer than a step's {MAX_NODES}"
    return ""


def likeliest(
    trees: Trees,  # chains
    chances: Tensor,  # [num_drafts, num_nodes] float32
    room: Tensor,  # [num_drafts] int32, maximum nodes per draft
    num_kept: Tensor,  # [1] int32, maximum nodes in total
) -> Trees:
    """Does the same as `scheduler.budget.likeliest` on the device.

    Only rule `coupled` runs on the device, so the choice of verified nodes may depend on their
    tokens.
    """
    num_drafts, num_nodes = chances.shape
    depths = torch.arange(num_nodes, device=chances.device)
    sizes = room.long()
    if trees.sizes is not None:
        sizes = sizes.minimum(trees.sizes.long())
    is_node = (depths < sizes[:, None]).T.flatten()  # shallow nodes first
    reached = chances.cumprod(1).T.flatten()
    order = torch.where(is_node, reached, -1.0).sort(descending=True, stable=True).indices
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(len(order), device=order.device))
    kept = (is_node & (place < num_kept)).view(num_nodes, num_drafts)
    return replace(trees, sizes=kept.sum(0))


class DeviceLevels(PagedLevels):
    """Levels whose arrays are all computed by one operation."""

    @cached_property
    def _plans(self) -> dict[int, PagedStep]:
        """The first plan of each width."""
        return {}

    def level(self, above: Tensor) -> PagedAttend:  # [num_drafts, width]
        assert self._branches, "a chain's rows have one above"
        return self._next(above.shape[1], above)

    def chain(self, width: int) -> PagedAttend:
        assert not self._branches, "rows that are causal need no bits"
        attend = self._next(width, None)
        self._depth += width - 1
        return attend

    def _next(self, width: int, above: Tensor | None) -> PagedAttend:  # [num_drafts, width]
        rows = self._rows
        begin, self._size = self._size, self._size + width
        self._depth += 1
        ops = cast(DeviceOps, self._planned.ops)
        plan = ops.draft_level_on_device(
            DraftLevel(
                rows.slots, rows.known, rows.base, above, self._seen,
                begin, width, self._depth, self._room,
            )
        )  # fmt: skip
        plan = replace(plan, like=self._plans.setdefault(width, plan))
        if self._branches:
            self._seen = plan.ancestors.view(len(rows.known), width, -1)
        return PagedAttend(self._planned, plan, self._cache, self._first)


class DeviceHead:
    """Runs a head on the seats' tensors.

    Args:
        cache: the target's cache, with the head's layers.
    """

    def __init__(self, service: HeadRunner, cache: KVCache, seats: DeviceSeats) -> None:
        self._service, self._cache, self._seats = service, cache, seats
        self._head, self._planned = service.head, service.planned
        self.capture = service.capture

    def rows(
        self,
        layout: DeviceLayout,
        drawn: Tensor,  # [num_rows] int32, the target's own token at every row
        hidden: dict[int, Tensor],  # by layer, at least `capture`, [num_rows, hidden_size]
    ) -> tuple[Tensor, Tensor]:  # feature [num_rows, feature], read [num_rows, hidden_size]
        """Computes and stores the head's rows of the step; runs before the compaction.

        An accepted node's child on the path is the token drawn at the node, so the token drawn at a
        row is its next token wherever that is defined.
        """
        first = self._service.first_layer
        step = HeadRows(
            layout.plan.token_ids,
            drawn,
            layout.plan.positions,
            {layer: hidden[layer] for layer in self.capture},
            PagedAttend(self._planned, layout.plan, self._cache, first),
            lambda: self._earlier(layout),
        )
        return self._head.rows(step, self._service)

    def _earlier(self, layout: DeviceLayout) -> EarlierRows:
        """Returns what `tree_drafting.rows_of` returns for a step on the host."""
        size = self._seats.sizes.block_size
        before = layout.plan.row_seq.long() + len(layout.slots)
        before = torch.where(layout.lanes == 0, before, layout.parents)
        ends = (layout.plan.context_lens - 1).clamp(min=0)[:, None]
        blocks = layout.plan.block_tables.gather(1, (ends // size).long())
        last = (blocks * size + ends % size).long()
        return EarlierRows(layout.slots, before, last.flatten())

    def draft(
        self,
        layout: DeviceLayout,
        settled: Settled,
        rows: tuple[Tensor, Tensor],  # as `rows` returns them
        shape: StepShape,
        outcome: Tensor,  # int32, output, written from its beginning, as in `KeptDrafts`
    ) -> None:
        """Drafts for the next step; runs after the compaction."""
        feature, read = (part.index_select(0, settled.last) for part in rows)
        levels = self._levels(layout, settled) if self._head.room else None
        seats, cut = self._seats, None
        if shape.sampler is not Sampler.PLAIN:  # only then may the draws of seats have cuts
            cut = Cut(seats.least_probs.index_select(0, layout.seats))
        draws = self._drawing(layout, settled.base, shape, cut)
        ops = cast(DeviceOps, self._planned.ops)
        start = DraftStart(settled.base, settled.emitted, feature, read, levels, *draws, cut)
        trees = self._head.expand(start, shape.num_nodes, self._service)
        if cut is not None:
            trees = cut.of(trees)
        assert not seats.sizes.has_chances or trees.chances is not None, "the head has chances"
        room = seats.step_room(shape)
        if trees.chances is not None and seats.sizes.chooses:
            trees = likeliest(trees, trees.chances, room, seats.num_kept)
        words = shape.num_seqs * sum(seats.sizes.draft_parts)
        kept = KeptDrafts(
            trees.tokens, trees.parents, trees.sizes,
            trees.chances if seats.sizes.has_chances else None,
            room, layout.seats, seats.draft_counts, seats.drafts,
            outcome[:words],
        )  # fmt: skip
        ops.keep_on_device(kept)

    def drop(self, layout: DeviceLayout) -> None:
        """Clears the seats' drafts, for a step without room for nodes."""
        none = torch.zeros_like(layout.plan.context_lens)
        self._seats.draft_counts.index_copy_(0, layout.seats, none)

    def _levels(self, layout: DeviceLayout, settled: Settled) -> DeviceLevels:
        """Returns the attention of the drafts over the seats' blocks."""
        room, sizes, cache = self._head.room, self._seats.sizes, self._cache
        ops = cast(DeviceOps, self._planned.ops)
        slots = ops.draft_slots_on_device(
            layout.plan.block_tables, settled.known, sizes.block_size, sizes.width,
            cache.num_slots, room,
        )  # fmt: skip
        rows = CommittedRows(slots, settled.known, settled.base, sizes.width)
        place = (self._planned, cache, self._service.first_layer)
        return DeviceLevels(*place, rows, room, branches=self._head.branches)

    def _drawing(
        self,
        layout: DeviceLayout,
        base: Tensor,  # [num_drafts] int64
        shape: StepShape,
        cut: Cut | None,
    ) -> tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int], Tensor]]:
        """Returns `DraftStart.draw` and `draw_from` with the seats' settings."""
        service, ids = self._service, self._head.target_ids
        ops = cast(DeviceOps, self._planned.ops)  # checked by `head_obstacle`
        num_drafts, device = len(base), base.device

        def rows_of(level: int, width: int) -> tuple[Tensor, DeviceSettings, int]:
            """Returns positions and settings of `width` levels' rows, and their distance."""
            if width == 1:
                return base, layout.seat_settings, level + 2
            positions = base[:, None] + torch.arange(width, device=device)
            seats = layout.seats.repeat_interleave(width)
            return positions.flatten(), seat_settings(self._seats, seats), level + 2

        def from_parts(read: Tensor, level: int) -> Tensor:
            logits, first = service.part_of_logits(read.flatten(0, 1))
            tokens = first if ids is None else ids[first : first + logits.shape[1]]
            positions, settings, ahead = rows_of(level, read.shape[1])
            part = ops.gumbel_argmax_on_device(logits, positions, settings, tokens, ahead)
            return best_of_ranks(part, service.collective).long().view(num_drafts, -1)

        def from_whole(read: Tensor, level: int) -> Tensor:
            flat = read.flatten(0, 1)
            own = service.logits_of_own_rows(flat)
            if own is None:
                logits = service.draft_logits(flat)
                return from_logits(logits.unflatten(0, read.shape[:2]), level)
            share = Share.of(len(flat), service.collective, device)
            positions, settings, ahead = rows_of(level, read.shape[1])
            taken = DeviceSettings._make(share.take(each) for each in settings)
            drawn = ops.draw_on_device(own.float(), share.take(positions) + ahead, taken, ids)
            sent = torch.stack([drawn, log_of_best(own).view(torch.int32)], dim=1)
            every = service.collective.all_gather(sent, dim=0)[: len(flat)]
            assert cut is not None, shape
            cut.see(every[:, 1].contiguous().view(torch.float32).view(num_drafts, -1))
            return every[:, 0].long().view(num_drafts, -1)

        def from_logits(logits: Tensor, level: int) -> Tensor:
            if cut is not None:
                cut.see(log_of_best(logits))
            flat = logits.flatten(0, 1).float()
            positions, settings, ahead = rows_of(level, logits.shape[1])
            drawn = ops.draw_on_device(flat, positions + ahead, settings, ids)
            return drawn.long().view(num_drafts, -1)

        return (from_parts if shape.sampler is Sampler.PLAIN else from_whole), from_logits
