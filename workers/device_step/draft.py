"""A head's rows and its whole draft loop in the device step, without a value on the host.

The loop itself is the head's (`drafters/heads/tree_drafting.py`), and so is the attention of its
levels (`workers/head_attention.py`): the host path runs the same. Here are the tensors that they
start from. They come from the seats and from the walk, after the compaction, so that a sequence's
committed rows are where its block table says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...drafters.heads.protocol import DraftStart, EarlierRows, HeadRows, TensorHead, Trees
from ..attention import KVCache
from ..head import HeadRunner
from ..head_attention import CommittedRows, PagedAttend, PagedLevels
from ..ops import PlannedOps
from ..verify.device_draw import DeviceSettings
from .accept import Accepted
from .contest import best_of_ranks, draw_part, rows_of
from .layout import DeviceLayout, seat_settings
from .seats import DeviceSeats
from .shape import MAX_NODES, Sampler, StepShape


@dataclass(frozen=True, slots=True)
class DeviceDrafts:
    """What a head drafts for the next step."""

    counts: Tensor  # [num_seqs] int32, nodes of each
    tokens: Tensor  # [num_seqs, width] int32
    parents: Tensor  # [num_seqs, width] int32, -1 is the root


def head_obstacle(head: HeadRunner, num_nodes: int) -> str:
    """Why the device step cannot run a head in the target's ranks, or nothing."""
    if not isinstance(head.head, TensorHead):
        return "the head's drafts are put together on the host"
    if head.planned is None:
        return "the head's attention is planned on the host"
    if not head.planned.ops.reads_device_only:
        return f"the head's operations {head.planned.ops.name!r} plan steps on the host"
    if head.head.layers and head.module_reason:
        return f"the head's layers run as torch modules: {head.module_reason}"
    if num_nodes > MAX_NODES:
        return f"a draft of {num_nodes} nodes is longer than a step's {MAX_NODES}"
    return ""


class DeviceHead:
    """A head between the seats' tensors.

    Args:
        cache: the target's, with the head's layers.
    """

    def __init__(self, service: HeadRunner, cache: KVCache, seats: DeviceSeats) -> None:
        assert isinstance(service.head, TensorHead), type(service.head)
        assert service.planned is not None, service.module_reason
        self._service, self._cache, self._seats = service, cache, seats
        self._head: TensorHead = service.head
        self._planned: PlannedOps = service.planned
        self.capture = service.capture

    def rows(
        self,
        layout: DeviceLayout,
        drawn: Tensor,  # [num_rows] int32, the target's own token at every row
        hidden: tuple[Tensor, ...],  # per captured layer, [num_rows, hidden_size]
    ) -> tuple[Tensor, Tensor]:  # feature [num_rows, feature], read [num_rows, hidden_size]
        """Computes and stores the head's rows of the step; before the compaction.

        An accepted node's child on the path is what was drawn at it, so what was drawn at a row is
        the token after it wherever that is defined.
        """
        first = self._service.first_layer
        step = HeadRows(
            drawn.long(),
            layout.plan.positions.long(),
            dict(zip(self.capture, hidden, strict=True)),
            PagedAttend(self._planned, layout.plan, self._cache, first),
            lambda: self._earlier(layout),
        )
        return self._head.rows(step, self._service)

    def _earlier(self, layout: DeviceLayout) -> EarlierRows:
        """As `step_rows.rows_of` has it for a step on the host."""
        size = self._seats.sizes.block_size
        slots = layout.slots
        num_seqs, query_len = slots.shape
        seqs = torch.arange(num_seqs, device=slots.device)[:, None]
        before = torch.cat([seqs + slots.numel(), seqs * query_len + layout.parents], dim=1)
        ends = (layout.plan.context_lens - 1).clamp(min=0)[:, None]
        blocks = layout.plan.block_tables.gather(1, (ends // size).long())
        last = (blocks * size + ends % size).long()
        return EarlierRows(slots.flatten(), before.flatten(), last.flatten())

    def draft(
        self,
        layout: DeviceLayout,
        accepted: Accepted,
        rows: tuple[Tensor, Tensor],  # as `rows` returns them
        shape: StepShape,
    ) -> DeviceDrafts:
        """Drafts for the next step; after the compaction."""
        last = accepted.path.gather(1, accepted.counts[:, None] - 1)[:, 0]
        lanes = torch.arange(shape.num_seqs, device=last.device) * shape.query_len + last
        feature, read = (part.index_select(0, lanes) for part in rows)
        known = layout.plan.context_lens + accepted.counts.to(torch.int32)
        base = known.long() - 1
        levels = self._levels(layout, known, base) if self._head.drafting.room else None
        emitted = accepted.emitted.gather(1, accepted.counts[:, None] - 1)[:, 0].long()
        draw = Draw(self._service, layout, self._seats, base, shape)
        start = DraftStart(base, emitted, feature, read, levels, draw)
        trees = self._head.drafting.expand(start, shape.num_nodes, self._service)
        drafts = self._cut(trees, self._seats.step_room(shape))
        self._seats.keep_drafts(layout.seats, drafts.counts, (drafts.tokens, drafts.parents))
        return drafts

    def drop(self, layout: DeviceLayout) -> None:
        """For a step without room for nodes: its seats have no drafts."""
        self._seats.keep_drafts(layout.seats, torch.zeros_like(layout.plan.context_lens), None)

    def _levels(self, layout: DeviceLayout, known: Tensor, base: Tensor) -> PagedLevels:
        """The attention of the drafts over the seats' blocks."""
        drafting, sizes = self._head.drafting, self._seats.sizes
        index = torch.arange(sizes.width + drafting.room, device=base.device)
        inside = index.clamp(max=sizes.num_columns * sizes.block_size - 1)
        tables = layout.plan.block_tables.index_select(1, inside // sizes.block_size)
        slots = tables * sizes.block_size + (inside % sizes.block_size).to(torch.int32)
        rows = CommittedRows(slots, known, base, sizes.width)
        first = self._service.first_layer
        return PagedLevels(
            self._planned, self._cache, first, rows, drafting.room, branches=drafting.branches
        )

    def _cut(self, trees: Trees, room: Tensor) -> DeviceDrafts:
        """Drafts of the width that seats and outcome have, and of what each has room for."""
        num_nodes, width = trees.tokens.shape[1], self._seats.sizes.num_draft_nodes
        missing = (0, width - num_nodes)
        counts = room.clamp(max=num_nodes)
        if trees.sizes is not None:
            counts = counts.minimum(trees.sizes.to(torch.int32))
        return DeviceDrafts(
            counts,
            torch.nn.functional.pad(trees.tokens.to(torch.int32), missing),
            torch.nn.functional.pad(trees.parents.to(torch.int32), missing, value=-1),
        )


class Draw:
    """`DraftStart.draw` by the seats' settings."""

    def __init__(
        self,
        service: HeadRunner,
        layout: DeviceLayout,
        seats: DeviceSeats,
        base: Tensor,  # [num_drafts] int64
        shape: StepShape,
    ) -> None:
        assert service.planned is not None
        assert isinstance(service.head, TensorHead)
        self._service, self._base = service, base
        self._ops, self._head = service.planned.ops, service.head
        self._is_plain = shape.sampler is Sampler.PLAIN
        self._settings = seat_settings(seats, layout.seats)

    def __call__(self, read: Tensor, level: int) -> Tensor:  # [num_drafts, hidden_size]
        positions, ids = self._base + 2 + level, self._head.target_ids
        if self._is_plain:
            logits, first = self._service.part_of_logits(read)
            part = draw_part(
                self._ops,
                logits,
                positions,
                self._settings,
                first if ids is None else ids[first : first + logits.shape[1]],
            )
            return best_of_ranks(part, self._service.collective).long()
        own_logits = self._service.logits_of_own_rows(read)
        if own_logits is None:
            return self._drawn(self._service.draft_logits(read), positions, self._settings)
        collective = self._service.collective
        begin = collective.rank * len(own_logits)
        rows = slice(begin, begin + len(own_logits))
        own = self._drawn(own_logits, positions[rows], rows_of(self._settings, rows))
        return collective.all_gather(own, dim=0)

    def _drawn(self, logits: Tensor, positions: Tensor, settings: DeviceSettings) -> Tensor:
        whole = self._service.over_vocabulary(logits.float(), self._head.target_ids)
        return self._ops.draw_on_device(whole, positions, settings).long()
