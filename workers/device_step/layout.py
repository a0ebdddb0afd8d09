"""A step's rows from the seats, on the device: what `workers/ops/plan.py` computes on the host.

Every sequence has `query_len` rows, its root and its nodes. Nodes that pad it are leaves below the
root: no other row sees them, and their keys and values go into the padding's block. Every tree is
described by ancestor bits, chains too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import PagedStep
from ..ops.plan import WORD_BITS
from ..verify.device_draw import DeviceSettings
from .seats import DeviceSeats
from .shape import StepShape


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The rows of a step; row s * query_len + l is lane l of sequence s."""

    plan: PagedStep
    seats: Tensor  # [num_seqs] int64
    is_real: Tensor  # [num_seqs] bool, no padding
    nodes: Tensor  # [num_seqs, num_nodes] int32, tokens
    parents: Tensor  # [num_seqs, num_nodes] int64, lanes
    is_node: Tensor  # [num_seqs, num_nodes] bool, no padding
    ancestors: Tensor  # [num_seqs, num_nodes, num_nodes] bool, a node's ancestors and itself
    depths: Tensor  # [num_seqs, num_nodes] int64, 1 below the root
    slots: Tensor  # [num_seqs, query_len] int64
    spare_slot: int  # of the padding's block


def lay_out(seats: DeviceSeats, shape: StepShape) -> DeviceLayout:
    """The rows of the staged step."""
    sizes, device = seats.sizes, seats.device
    who = seats.step_seats(shape).long()
    num_nodes, tokens, parents = seats.step_nodes(shape)
    lanes = torch.arange(shape.query_len, device=device, dtype=torch.int32)
    is_node = lanes[:-1] < num_nodes[:, None]
    context = seats.lengths.index_select(0, who) - 1
    roots = seats.tokens.view(-1).index_select(0, who * sizes.width + context)
    tables = seats.tables.index_select(0, who)
    ancestors = closure(parents.long())
    depths = ancestors.sum(2)
    index = context[:, None] + lanes
    positions, token_ids = index, roots
    spare_slot = sizes.num_blocks * sizes.block_size
    blocks = tables.gather(1, (index // sizes.block_size).long())
    slots = blocks * sizes.block_size + index % sizes.block_size
    words = torch.zeros((shape.num_seqs, 1, 1), dtype=torch.int64, device=device)
    if shape.num_nodes:
        token_ids = torch.cat([roots[:, None], tokens], dim=1)
        positions = context[:, None] + torch.nn.functional.pad(depths, (1, 0)).to(torch.int32)
        slots = torch.cat([slots[:, :1], torch.where(is_node, slots[:, 1:], spare_slot)], dim=1)
        words = bits(ancestors)
    starts = torch.arange(shape.num_seqs + 1, device=device, dtype=torch.int32) * shape.query_len
    plan = PagedStep(
        token_ids=token_ids.view(-1),
        positions=positions.view(-1),
        slots=slots.view(-1),
        row_seq=torch.arange(shape.num_rows, device=device, dtype=torch.int32) // shape.query_len,
        row_index=index.view(-1),
        query_start=starts,
        context_lens=context,
        tree_start=context + 1,
        block_tables=tables,
        ancestors=words.flatten(0, 1),
        block_size=sizes.block_size,
        max_query_len=shape.query_len,
        max_key_len=sizes.width,
    )
    return DeviceLayout(
        plan,
        who,
        who < sizes.num_seats,
        tokens,
        parents.long() + 1,
        is_node,
        ancestors,
        depths,
        slots.long(),
        spare_slot,
    )


def closure(
    parents: Tensor,  # [num_seqs, num_nodes] int64, -1 is the root
) -> Tensor:  # [num_seqs, num_nodes, num_nodes] bool
    """`[s, i, j]`: node j is node i's ancestor or itself. Twice as many levels in every round."""
    num_nodes = parents.shape[1]
    if num_nodes == 0:
        return torch.zeros((*parents.shape, 0), dtype=torch.bool, device=parents.device)
    nodes = torch.arange(num_nodes, device=parents.device)
    seen = (nodes[:, None] == nodes).expand(*parents.shape, num_nodes)
    above = parents
    for _ in range((num_nodes - 1).bit_length()):
        inside = above >= 0
        at = above.clamp(min=0)
        reached = seen.gather(1, at[:, :, None].expand_as(seen))
        seen = seen | (reached & inside[:, :, None])
        above = torch.where(inside, above.gather(1, at), -1)
    return seen


def bits(
    ancestors: Tensor,  # [num_seqs, num_nodes, num_nodes] bool
) -> Tensor:  # [num_seqs, 1 + num_nodes, num_words] int64, of the root none
    """The words of `PagedStep.ancestors`."""
    lanes = torch.arange(WORD_BITS, device=ancestors.device)
    missing = -ancestors.shape[2] % WORD_BITS
    padded = torch.nn.functional.pad(ancestors, (0, missing)).unflatten(2, (-1, WORD_BITS))
    return torch.nn.functional.pad((padded.long() << lanes).sum(3), (0, 0, 1, 0))


def row_settings(seats: DeviceSeats, layout: DeviceLayout, shape: StepShape) -> DeviceSettings:
    """Sampling settings of every row."""
    who = layout.seats.repeat_interleave(shape.query_len, output_size=shape.num_rows)
    return seat_settings(seats, who)


def seat_settings(
    seats: DeviceSeats,
    who: Tensor,  # [num_rows] int64
) -> DeviceSettings:
    """Sampling settings of the seats `who`."""
    words = seats.settings.index_select(0, who)

    def real(column: int) -> Tensor:
        return words[:, column : column + 1].view(torch.float32)[:, 0].contiguous()

    return DeviceSettings(
        seeds=words[:, :2].view(torch.int64)[:, 0].contiguous(),
        temperature=real(2),
        top_k=words[:, 3].contiguous(),
        top_p=real(4),
        min_p=real(5),
    )
