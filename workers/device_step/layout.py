"""A step's rows from the seats, on the device: what `workers/ops/plan.py` computes on the host.

Every sequence has `query_len` rows, its root and its nodes. Nodes that pad it are leaves below the
root: no row sees them, not even their own, since their keys and values go into the padding's block.
Every tree is described by ancestor bits, chains too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import KVCache
from ..collective import Collective
from ..ops import DeviceOps, PagedStep
from ..ops.plan import WORD_BITS
from ..verify.device_settings import DeviceSettings
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
        words = bits(ancestors & is_node[:, :, None])
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


# -- the coupled rule's walk (the host's: `workers/verify/rules.py`), the compaction of its path
# and the update of the seats


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a step emits: lane path[s, j] of sequence s emits its token j, for j < counts[s]."""

    counts: Tensor  # [num_seqs] int64, at least 1
    path: Tensor  # [num_seqs, query_len] int64, lanes from the root on; 0 beyond the counts
    emitted: Tensor  # [num_seqs, query_len] int32


def accept(
    layout: DeviceLayout,
    drawn: Tensor,  # [num_rows] int32, the target's own token at every row
    shape: StepShape,
) -> Accepted:
    """Accepts a node that its parent's draw equals, if its ancestors are accepted."""
    of_lanes = drawn.view(shape.num_seqs, shape.query_len)
    if shape.num_nodes == 0:
        one = torch.ones(shape.num_seqs, dtype=torch.int64, device=drawn.device)
        return Accepted(one, torch.zeros_like(of_lanes, dtype=torch.int64), of_lanes)
    agrees = layout.is_node & (layout.nodes == of_lanes.gather(1, layout.parents))
    passed = ~(layout.ancestors & ~agrees[:, None]).any(2)
    # At most one node of a depth is accepted; the others go to a column that is cut off.
    column = torch.where(passed, layout.depths, shape.query_len)
    lanes = torch.arange(1, shape.query_len, device=drawn.device).expand_as(column)
    path = torch.zeros(
        (shape.num_seqs, shape.query_len + 1), dtype=torch.int64, device=drawn.device
    )
    path = path.scatter(1, column, lanes)[:, : shape.query_len]
    return Accepted(passed.sum(1) + 1, path, of_lanes.gather(1, path))


def compact(layout: DeviceLayout, accepted: Accepted, cache: KVCache) -> None:
    """Moves the accepted nodes' keys and values to where a chain's would be."""
    lanes = torch.arange(1, accepted.path.shape[1], device=accepted.path.device)
    path = accepted.path[:, 1:]
    moved = (path != 0) & (path != lanes)
    source = torch.where(moved, layout.slots.gather(1, path), layout.spare_slot)
    destination = torch.where(moved, layout.slots[:, 1:], layout.spare_slot)
    cache.move(source.view(-1), destination.view(-1))


def update(
    seats: DeviceSeats, layout: DeviceLayout, accepted: Accepted, *, counts_tokens: bool = False
) -> None:
    """Appends the emitted tokens to their seats, if the plan says so, and counts them."""
    counts = torch.where(layout.is_real, accepted.counts, 0) * seats.appends
    lanes = torch.arange(accepted.path.shape[1], device=seats.device)
    first = layout.seats * seats.sizes.width + layout.plan.context_lens + 1
    spare = seats.sizes.num_seats * seats.sizes.width
    written = lanes < counts[:, None]
    places = torch.where(written, first[:, None] + lanes, spare)
    values = torch.where(written, accepted.emitted, 0)
    seats.tokens.view(-1).index_copy_(0, places.view(-1), values.view(-1))
    seats.lengths.index_add_(0, layout.seats, counts.to(torch.int32))
    if counts_tokens and seats.edits is not None:
        table = seats.edits.counts
        places = layout.seats[:, None] * table.shape[1] + accepted.emitted
        table.view(-1).index_add_(0, places.view(-1), written.to(torch.int32).view(-1))


# -- draws over a vocabulary that is divided among ranks
#
# Greedily, or by temperature alone, the token drawn has the highest score, and no score depends on
# the other tokens; so each rank draws from its own part, and two numbers a row cross between them.
# Ties go to the lower token, as they do over the whole vocabulary.
#
# Top-k, top-p, min-p, penalties and log-probabilities need all logits of a row. For them the ranks
# divide the sequences: each gets whole rows of its share from the others, draws them, and sends
# the tokens round. That is exact whatever the settings are, and moves and computes a part of what
# a gathering of all rows on every rank would.


@dataclass(frozen=True, slots=True)
class Share:
    """The sequences whose whole rows this rank draws; the same number on every rank."""

    seqs: slice
    rows: slice
    is_part: bool  # False: all of them, on every rank

    @staticmethod
    def of(shape: StepShape, collective: Collective) -> Share:
        """All sequences where they cannot be divided evenly."""
        is_part = collective.size > 1 and shape.num_seqs % collective.size == 0
        count = shape.num_seqs // collective.size if is_part else shape.num_seqs
        begin = collective.rank * count if is_part else 0
        rows = slice(begin * shape.query_len, (begin + count) * shape.query_len)
        return Share(slice(begin, begin + count), rows, is_part)


Part = tuple[Tensor, Tensor]
"""Each row's best score of one rank, float32, and its token, int32; each [num_rows]."""


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
    return scores, tokens[columns.long()].to(torch.int32)


def best_of_ranks(part: Part, collective: Collective) -> Tensor:  # [num_rows] int32
    """The best of all ranks' tokens; the same on every rank."""
    scores, tokens = part
    if collective.size == 1:
        return tokens
    own = torch.stack([scores.view(torch.int32), tokens], dim=1)[:, None]
    every = collective.all_gather(own, dim=1)  # [num_rows, size, 2]
    best = every[:, :, 0].contiguous().view(torch.float32).argmax(1, keepdim=True)
    return every[:, :, 1].gather(1, best)[:, 0]
