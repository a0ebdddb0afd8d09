"""A step's rows from the seats, on the device: what `workers/ops/plan.py` computes on the host.

Every sequence has its root's row and one for each node, one after the other; how many is staged by
the host. Rows that pad a step are leaves below their sequence's root: no row sees them, not even
their own, since their keys and values go into the padding's block. Every tree is described by
ancestor bits, chains too.

What a row takes from its ancestors is computed in rounds, of which each reaches twice as far up:
`jumps` has the row that each round reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..collective import Collective
from ..ops import DeviceOps, PagedStep
from ..ops.plan import WORD_BITS
from ..verify.device_settings import DeviceSettings, DeviceWalk
from .seats import DeviceSeats
from .shape import StepShape


@dataclass(frozen=True)
class DeviceLayout:
    """The rows of a step."""

    plan: PagedStep
    seats: Tensor  # [num_seqs] int64
    row_seats: Tensor  # [num_rows] int64
    is_real: Tensor  # [num_rows] bool, of a sequence that is no padding
    first: Tensor  # [num_rows] int32, the root's row
    lanes: Tensor  # [num_rows] int32, 0 is the root
    is_node: Tensor  # [num_rows] bool, no padding
    depths: Tensor  # [num_rows] int32, 1 below the root
    jumps: tuple[Tensor, ...]  # [num_rows] int64 each; the first has the parents' rows
    slots: Tensor  # [num_rows] int64
    spare_slot: int  # of the padding's block

    @cached_property
    def seqs(self) -> Tensor:  # [num_rows] int64
        return self.plan.row_seq.long()


def lay_out(seats: DeviceSeats, shape: StepShape) -> DeviceLayout:
    """The rows of the staged step."""
    sizes, device = seats.sizes, seats.device
    who = seats.step_seats(shape).long()
    starts, row_seq = seats.step_rows(shape)
    seqs = row_seq.long()
    row_seats = who.index_select(0, seqs)
    rows = torch.arange(shape.num_rows, device=device, dtype=torch.int32)
    first = starts.index_select(0, seqs)
    lanes = rows - first
    context = seats.lengths.index_select(0, who) - 1
    before = context.index_select(0, seqs)
    token_ids = seats.tokens.view(-1).index_select(0, row_seats * sizes.width + before)
    index, positions = before + lanes, before
    jumps: tuple[Tensor, ...] = ()
    tables = seats.tables.index_select(0, who)
    spare_slot = sizes.num_blocks * sizes.block_size
    columns = seqs * sizes.num_columns + index // sizes.block_size
    slots = tables.view(-1).index_select(0, columns) * sizes.block_size + index % sizes.block_size
    if shape.num_nodes:
        is_node, tokens, parents = seats.step_nodes(shape, row_seats, seqs, lanes)
        is_root = lanes == 0
        token_ids = torch.where(is_root, token_ids, tokens)
        jumps = jumps_of(torch.where(is_node, first + 1 + parents, rows).long(), shape.num_nodes)
        depths = is_node.to(torch.int32)
        words = bits(lanes - 1, is_node, shape.num_nodes)
        for above in jumps:
            depths = depths + depths.index_select(0, above)
            words = words | words.index_select(0, above)
        positions = before + depths
        slots = torch.where(is_node | is_root, slots, spare_slot)
    else:
        is_node, depths = torch.zeros_like(lanes, dtype=torch.bool), torch.zeros_like(lanes)
        words = torch.zeros((shape.num_rows, 1), dtype=torch.int64, device=device)
    plan = PagedStep(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        row_seq=row_seq,
        row_index=index,
        query_start=starts,
        context_lens=context,
        tree_start=context + 1,
        block_tables=tables,
        ancestors=words,
        block_size=sizes.block_size,
        max_query_len=shape.query_len,
        max_key_len=sizes.width,
    )
    is_real = row_seats < sizes.num_seats
    nodes = (is_node, depths, jumps)
    return DeviceLayout(
        plan, who, row_seats, is_real, first, lanes, *nodes, slots.long(), spare_slot
    )


def jumps_of(
    parents: Tensor,  # [num_rows] int64, parents' rows; of a root its own
    num_nodes: int,
) -> tuple[Tensor, ...]:
    """`DeviceLayout.jumps` of trees of at most so many nodes."""
    found = [parents]
    while 1 << len(found) <= num_nodes:
        found.append(found[-1].index_select(0, found[-1]))
    return tuple(found)


def bits(
    nodes: Tensor,  # [num_rows] int32, below 0: a root
    is_node: Tensor,  # [num_rows] bool
    num_nodes: int,
) -> Tensor:  # [num_rows, num_words] int64
    """The words of `PagedStep.ancestors` with every row's own bit alone."""
    bit = is_node.long() << (nodes % WORD_BITS)
    if num_nodes <= WORD_BITS:
        return bit[:, None]
    words = torch.arange(-(-num_nodes // WORD_BITS), device=nodes.device)
    return bit[:, None] * ((nodes // WORD_BITS)[:, None] == words)


def seat_settings(seats: DeviceSeats, who: Tensor) -> DeviceSettings:  # [num_rows] int64
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


# -- after the draw


def walk_of(
    seats: DeviceSeats, layout: DeviceLayout, shape: StepShape, *, counts_tokens: bool = False
) -> DeviceWalk:
    """What the walk reads, and the seats that it updates."""
    plan, tables = layout.plan, seats.edits
    return DeviceWalk(
        token_ids=plan.token_ids,
        jumps=layout.jumps,
        ancestors=plan.ancestors,
        depths=layout.depths,
        slots=layout.slots,
        query_start=plan.query_start,
        context_lens=plan.context_lens,
        seats=layout.seats,
        appends=seats.appends,
        tokens=seats.tokens,
        lengths=seats.lengths,
        counts=tables.counts if counts_tokens and tables is not None else None,
        spare_slot=layout.spare_slot,
        query_len=shape.query_len,
    )


# -- draws over a vocabulary that is divided among ranks
#
# Greedily, or by temperature alone, the token drawn has the highest score, and no score depends on
# the other tokens; so each rank draws from its own part, and two numbers a row cross between them.
# Ties go to the lower token, as they do over the whole vocabulary.
#
# Top-k, top-p, min-p, penalties and log-probabilities need all logits of a row. For them the ranks
# divide the rows: each gets whole rows of its share from the others, draws them, and sends the
# tokens round. That is exact whatever the settings are, and moves and computes a part of what
# a gathering of all rows on every rank would.


@dataclass(frozen=True, slots=True)
class Share:
    """The rows that this rank draws whole; as many on every rank, with the last row repeated."""

    rows: Tensor | None  # [num_rows] int64; None: all of them, on every rank

    @staticmethod
    def of(num_rows: int, collective: Collective, device: torch.device) -> Share:
        if collective.size == 1:
            return Share(None)
        count = -(-num_rows // collective.size)
        begin = collective.rank * count
        rows = torch.arange(begin, begin + count, device=device)
        return Share(rows.clamp(max=num_rows - 1))

    def take(self, values: Tensor) -> Tensor:  # [num_rows, ...] of all
        """Of its own rows."""
        return values if self.rows is None else values.index_select(0, self.rows)


Part = tuple[Tensor, Tensor]
"""Each row's best score of one rank, float32, and its token; each [num_rows]."""


def draw_part(
    ops: DeviceOps,
    logits: Tensor,  # [num_rows, width]
    positions: Tensor,  # [num_rows], index of the drawn token in prompt + output
    settings: DeviceSettings,  # by temperature alone
    tokens: Tensor | int,  # [width], of the columns, or of the first of neighbours
) -> Part:
    """The best of this rank's tokens."""
    scores, columns = ops.gumbel_argmax_on_device(logits, positions, settings, tokens)
    if isinstance(tokens, int):
        return scores, columns + tokens
    if not len(tokens):
        return scores, columns
    return scores, tokens.index_select(0, columns)


def best_of_ranks(part: Part, collective: Collective) -> Tensor:  # [num_rows]
    """The best of all ranks' tokens; the same on every rank."""
    scores, tokens = part
    if collective.size == 1:
        return tokens
    own = torch.stack([scores.view(torch.int32), tokens.to(torch.int32)], dim=1)[:, None]
    every = collective.all_gather(own, dim=1)  # [num_rows, size, 2]
    best = every[:, :, 0].contiguous().view(torch.float32).argmax(1, keepdim=True)
    return every[:, :, 1].gather(1, best)[:, 0]
