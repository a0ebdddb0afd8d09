"""A device step's rows and walk in torch: the oracle of their kernels, on any device.

What a row takes from its ancestors is computed in rounds, of which each reaches twice as far up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.workers.ops import DeviceLayout, DraftLevel, KeptDrafts, PagedStep, StagedStep
from outrider.workers.ops.plan import WORD_BITS
from outrider.workers.verify.device_settings import DeviceSettings, DeviceWalk, Settled


def lay_out_by_tensors(staged: StagedStep) -> DeviceLayout:
    """The rows of a step, as `plan_step` has them for a step on the host."""
    who, starts, seqs = staged.seats.long(), staged.query_start, staged.row_seq.long()
    row_seats, first = who.index_select(0, seqs), starts.index_select(0, seqs)
    rows = torch.arange(len(seqs), device=seqs.device, dtype=torch.int32)
    lanes = rows - first
    context = staged.lengths.index_select(0, who) - 1
    before = context.index_select(0, seqs)
    width = staged.tokens.shape[1]
    token_ids = staged.tokens.view(-1).index_select(0, row_seats * width + before)
    index, depths = before + lanes, torch.zeros_like(lanes)
    tables, size = staged.tables.index_select(0, who), staged.block_size
    columns = seqs * tables.shape[1] + index // size
    slots = tables.view(-1).index_select(0, columns) * size + index % size
    words = torch.zeros((len(rows), staged.num_words), dtype=torch.int64, device=seqs.device)
    parents = rows.long()
    if staged.max_nodes:
        is_node, tokens, above = _nodes(staged, row_seats, seqs, lanes)
        is_root = lanes == 0
        token_ids = torch.where(is_root, token_ids, tokens)
        parents = torch.where(is_node, first + 1 + above, rows).long()
        depths, words = is_node.to(torch.int32), bits(lanes - 1, is_node, staged.max_nodes)
        for jump in jumps_of(parents, staged.max_nodes):
            depths = depths + depths.index_select(0, jump)
            words = words | words.index_select(0, jump)
        slots = torch.where(is_node | is_root, slots, staged.spare_slot)
    plan = PagedStep(
        token_ids=token_ids,
        positions=before + depths,
        slots=slots,
        row_seq=staged.row_seq,
        row_index=index,
        query_start=starts,
        context_lens=context,
        tree_start=context + 1,
        block_tables=tables,
        ancestors=words,
        block_size=size,
        max_query_len=1 + staged.max_nodes,
        max_key_len=width,
    )
    settings = [_settings(staged.settings.index_select(0, each)) for each in (row_seats, who)]
    nodes = (depths, parents, slots.long(), plan.positions + 1)
    return DeviceLayout(plan, who, row_seats, first, lanes, *nodes, *settings)


def _nodes(
    staged: StagedStep,
    row_seats: Tensor,  # [num_rows] int64
    seqs: Tensor,  # [num_rows] int64
    lanes: Tensor,  # [num_rows] int32
) -> tuple[Tensor, Tensor, Tensor]:  # each [num_rows]: bool, int32, int32
    """Which rows are nodes, their tokens and parents; -1 is the root."""
    counts, nodes = staged.num_nodes, staged.nodes
    if width := staged.drafts[0].shape[1]:
        is_own = staged.own_drafts > 0
        held = staged.draft_counts.index_select(0, staged.seats.long())
        counts = torch.where(is_own, held.minimum(staged.room), counts)
        place = row_seats * width + (lanes - 1).clamp(0, width - 1)
        tokens, above = (
            torch.where(is_own, own.view(-1).index_select(0, place), given)
            for own, given in zip(staged.drafts, nodes, strict=True)
        )
        nodes = tokens, above
    return (lanes > 0) & (lanes <= counts.index_select(0, seqs)), *nodes


def _settings(words: Tensor) -> DeviceSettings:  # [num_rows, words] int32
    temperature, top_p, min_p = (
        words[:, column].contiguous().view(torch.float32) for column in (2, 4, 5)
    )
    seeds = words[:, :2].contiguous().view(torch.int64)[:, 0]
    return DeviceSettings(seeds, temperature, words[:, 3].contiguous(), top_p, min_p)


def jumps_of(
    parents: Tensor,  # [num_rows] int64, parents' rows; of a root its own
    num_nodes: int,
) -> list[Tensor]:  # [num_rows] int64 each
    """The row that each round reads, in trees of at most so many nodes."""
    found = [parents]
    while 1 << len(found) <= num_nodes:
        found.append(found[-1].index_select(0, found[-1]))
    return found


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


def settle_by_tensors(drawn: Tensor, walk: DeviceWalk) -> Settled:
    """The walk of the coupled rule (the host's: `workers/verify/rules.py`), moves and update."""
    rows = torch.arange(len(drawn), device=drawn.device)
    seqs = torch.bucketize(rows, walk.query_start[1:].long(), right=True)
    first = walk.query_start.index_select(0, seqs)
    lanes = rows.to(torch.int32) - first
    is_root, accepted = lanes == 0, lanes == 0
    if walk.query_len > 1:
        guessed = walk.token_ids == drawn.index_select(0, walk.parents)
        accepted = is_root | ((walk.depths > 0) & guessed)
        for above in jumps_of(walk.parents, walk.query_len - 1):
            accepted = accepted & accepted.index_select(0, above)
    moved = accepted & (walk.depths != lanes)
    places = walk.slots.index_select(0, torch.where(moved, first + walk.depths, 0))
    source = torch.where(moved, walk.slots, walk.spare_slot)
    target = torch.where(moved, places, walk.spare_slot)

    row_seats = walk.seats.index_select(0, seqs)
    spare, width = len(walk.tokens) - 1, walk.tokens.shape[1]
    written = accepted & (row_seats < spare) & (walk.appends > 0)
    ends = row_seats * width + walk.context_lens.index_select(0, seqs) + walk.depths + 1
    index = torch.where(written, ends, spare * width)
    walk.tokens.view(-1).index_copy_(0, index, drawn * written)
    numbers = written.to(torch.int32)
    if walk.counts is not None:
        index = row_seats * walk.counts.shape[1] + drawn
        walk.counts.view(-1).index_add_(0, index, numbers)

    roots = walk.query_start[:-1].long().clamp(max=len(drawn) - 1)
    last = roots.scatter_reduce(0, seqs, rows * accepted, "amax")
    known = walk.context_lens + walk.depths.index_select(0, last) + 1
    walk.lengths.index_add_(0, row_seats, numbers)
    torch.where(accepted, drawn, ~drawn, out=walk.outcome)
    emitted = drawn.index_select(0, last).long()
    return Settled(source, target, last, emitted, known, known.long() - 1)


def keep_by_tensors(kept: KeptDrafts) -> None:
    """Drafts in the seats and in the outcome."""
    (num_drafts, num_nodes), width = kept.tokens.shape, kept.drafts[0].shape[1]
    parents, missing = kept.parents, (0, width - num_nodes)
    if parents is None:
        above = torch.arange(-1, num_nodes - 1, device=kept.tokens.device)
        parents = above.expand(num_drafts, -1)
    counts = kept.room.clamp(max=num_nodes)
    if kept.sizes is not None:
        counts = counts.minimum(kept.sizes.to(torch.int32))
    parts = [
        counts,
        pad(kept.tokens.to(torch.int32), missing),
        pad(parents.to(torch.int32), missing, value=-1),
    ]
    for held, made in zip((kept.counts, *kept.drafts), parts, strict=True):
        held.index_copy_(0, kept.seats, made)
    if kept.chances is not None:
        bits = kept.chances.to(torch.float32).contiguous().view(torch.int32)
        parts.append(pad(bits, missing))
    torch.cat([part.reshape(-1) for part in parts], out=kept.outcome)


def draft_slots_by_tensors(
    tables: Tensor,  # [num_drafts, num_columns] int32
    known: Tensor,  # [num_drafts] int32
    block_size: int,
    max_known: int,
    first_spare: int,
    room: int,
) -> Tensor:  # [num_drafts, max_known + room] int32
    """Slots of committed rows, and behind those of the draft's."""
    index = torch.arange(max_known + room, device=known.device, dtype=torch.int32)
    inside = index.clamp(max=tables.shape[1] * block_size - 1)
    slots = tables.index_select(1, inside // block_size) * block_size + inside % block_size
    own = index - known[:, None]
    first = first_spare + room * torch.arange(len(known), device=known.device, dtype=torch.int32)
    return torch.where((own >= 0) & (own < room), first[:, None] + own, slots)


def draft_level_by_tensors(level: DraftLevel) -> PagedStep:
    """The rows of a level, each with its ancestors' bits; of a chain, without."""
    known, width = level.known, level.width
    lanes = torch.arange(width, device=known.device)
    index = (known[:, None] + level.begin + lanes).to(torch.int32)
    drafts = torch.arange(len(known) + 1, device=known.device, dtype=torch.int32)
    words = torch.zeros(1, 1, 1, dtype=torch.int64, device=known.device)
    if level.above is not None:
        nodes = (level.begin + lanes).to(torch.int32)
        words = bits(nodes, nodes >= 0, level.room)[None]
        if level.seen is not None:
            above = level.above[..., None].expand(-1, -1, level.num_words)
            words = level.seen.gather(1, above) | words
    ahead = lanes if level.above is None else torch.zeros_like(lanes)
    positions = (level.base[:, None] + level.depth + ahead).to(torch.int32).flatten()
    return PagedStep(
        token_ids=positions,
        positions=positions,
        slots=level.slots.gather(1, index.long()).flatten(),
        row_seq=drafts[:-1].repeat_interleave(width),
        row_index=index.flatten(),
        query_start=drafts * width,
        context_lens=known + level.begin,
        tree_start=known + (level.room if level.above is None else 0),
        block_tables=level.slots,
        ancestors=words.expand(len(known), width, -1).flatten(0, 1).contiguous(),
        block_size=1,
        max_query_len=width,
        max_key_len=level.slots.shape[1] - level.room + level.begin + width,
    )
