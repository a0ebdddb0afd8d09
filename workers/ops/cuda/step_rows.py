"""The rest of a device step: its rows, the updates after the draw, and levels of drafts."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...verify.device_settings import DeviceSettings, DeviceWalk, Settled
from ..plan import DeviceLayout, DraftLevel, KeptDrafts, PagedStep, StagedStep

_COLUMNS = 1024  # of a block table that a program copies


def _num_lanes(query_len: int) -> int:
    """Returns the lanes of a program for a sequence: shapes with few rows share a variant."""
    return max(32, triton.next_power_of_2(query_len))


# -- before the forward: a step's rows


@triton.jit
def _load_node(node, inside, given, begin, own, seat, width, is_own, DRAFTS: tl.constexpr):
    """What the host staged for nodes of a sequence, or the seat holds for them."""
    value = tl.load(given + begin + 1 + node, mask=inside & ~is_own, other=0)
    if DRAFTS:
        place = tl.minimum(node, width - 1)
        held = tl.load(own + seat * width + place, mask=inside & is_own, other=0)
        value = tl.where(is_own, held, value)
    return value


@triton.jit
def _count(lane, given, own_drafts, held, room, DRAFTS: tl.constexpr):
    """A sequence's number of nodes, and whether they are the seat's, for each lane."""
    count = tl.load(given)
    is_own = lane < 0
    if DRAFTS:
        kept = tl.minimum(tl.load(held), tl.load(room))
        count = tl.where(tl.load(own_drafts) > 0, kept, count)
        is_own = lane * 0 + tl.load(own_drafts) > 0
    return count, is_own


@triton.jit
def _paths(lane, is_node, count, given, begin, own, seat, width, is_own, DRAFTS: tl.constexpr,
           ROOM: tl.constexpr):  # fmt: skip
    """Ancestors' bits, depths and parents' rows: every node follows its path to the root."""
    path = tl.zeros([lane.shape[0], ROOM], tl.int64)
    depth = lane * 0
    parent_row = begin + lane
    word = tl.arange(0, ROOM)[None]
    node = tl.where(is_node, lane - 1, -1)
    left = count
    while left > 0:
        alive = node >= 0
        bit = tl.full(lane.shape, 1, tl.int64) << (node & 63).to(tl.int64)
        path = path | tl.where(alive[:, None] & ((node >> 6)[:, None] == word), bit[:, None], 0)
        above = _load_node(node, alive, given, begin, own, seat, width, is_own, DRAFTS)
        parent_row = tl.where(is_node & (depth == 0), begin + 1 + above, parent_row)
        depth += alive.to(tl.int32)
        node = tl.where(alive, above, -1)
        left = tl.where(tl.max(node, axis=0) >= 0, left - 1, 0)
    return path, depth, parent_row


@triton.jit
def _copy_columns(to, source, first, num_columns, COLUMNS: tl.constexpr):
    """A part of a row of a table."""
    column = first + tl.arange(0, COLUMNS)
    inside = column < num_columns
    tl.store(to + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit
def _store_settings(row, mask, words, seeds, temperature, top_k, top_p, min_p):
    """A seat's settings at rows of theirs."""
    zeros = row * 0
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.int64)
    seed = low | (tl.load(words + 1).to(tl.int64) << 32)
    tl.store(seeds + row, zeros + seed, mask=mask)
    tl.store(top_k + row, zeros.to(tl.int32) + tl.load(words + 3), mask=mask)
    none = zeros.to(tl.float32)
    tl.store(temperature + row, none + tl.load(words + 2).to(tl.float32, bitcast=True), mask=mask)
    tl.store(top_p + row, none + tl.load(words + 4).to(tl.float32, bitcast=True), mask=mask)
    tl.store(min_p + row, none + tl.load(words + 5).to(tl.float32, bitcast=True), mask=mask)


_SEATS = ["all_tokens", "all_tables", "all_settings", "lengths", "draft_tokens", "draft_parents",
          "draft_counts", "own_drafts", "seats", "query_start", "num_nodes", "room", "node_tokens",
          "node_parents"]  # fmt: skip
_SIZES = ["width", "num_columns", "num_settings", "num_draft_nodes", "block_size", "spare_slot"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SEATS)
def lay_out_kernel(
    all_tokens, all_tables, all_settings, lengths,  # of all seats
    draft_tokens, draft_parents, draft_counts, own_drafts,
    seats, query_start, num_nodes, room,  # of the step's sequences
    node_tokens, node_parents,  # of the step's rows
    token_ids, positions, next_positions, slots, row_index,  # [num_rows] int32, written
    lanes, first, depths,
    long_slots, parents, row_seats, ancestors,  # [num_rows] int64, written
    seeds, temperature, top_k, top_p, min_p,  # [num_rows], written
    long_seats, context_lens, tree_start, tables,  # of the step's sequences, written
    seat_seeds, seat_temperature, seat_top_k, seat_top_p, seat_min_p,
    width, num_columns, num_settings, num_draft_nodes, block_size, spare_slot,
    WORDS: tl.constexpr,  # of ancestors; 0: there are no nodes
    ROOM: tl.constexpr,  # a power of 2 that holds them
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs, 1 + blocks of a table's columns)."""
    seq = tl.program_id(0)
    seat = tl.load(seats + seq).to(tl.int64)
    if tl.program_id(1) > 0:
        place = tables + seq.to(tl.int64) * num_columns
        first_column = (tl.program_id(1) - 1) * COLUMNS
        _copy_columns(place, all_tables + seat * num_columns, first_column, num_columns, COLUMNS)
        return
    begin = tl.load(query_start + seq)
    end = tl.load(query_start + seq + 1)
    context = tl.load(lengths + seat) - 1
    lane = tl.arange(0, BLOCK)
    row = begin + lane
    inside = row < end
    token = tl.zeros([BLOCK], tl.int32) + tl.load(all_tokens + seat * width + context)
    depth = tl.zeros([BLOCK], tl.int32)
    parent_row = row
    is_stored = inside
    if WORDS:
        count, is_own = _count(
            lane, num_nodes + seq, own_drafts, draft_counts + seat, room + seq, DRAFTS
        )
        is_node = inside & (lane > 0) & (lane <= count)
        behind = inside & (lane > 0)
        drafted = _load_node(lane - 1, behind, node_tokens, begin, draft_tokens, seat,
                             num_draft_nodes, is_own, DRAFTS)  # fmt: skip
        token = tl.where(behind, drafted, token)
        path, depth, parent_row = _paths(
            lane, is_node, count, node_parents, begin, draft_parents, seat, num_draft_nodes,
            is_own, DRAFTS, ROOM,
        )  # fmt: skip
        word = tl.arange(0, ROOM)[None]
        place = ancestors + row.to(tl.int64)[:, None] * WORDS + word
        tl.store(place, path, mask=inside[:, None] & (word < WORDS))
        is_stored = inside & ((lane == 0) | is_node)
    else:
        tl.store(ancestors + row, tl.zeros([BLOCK], tl.int64), mask=inside)
    index = context + lane
    block = tl.load(all_tables + seat * num_columns + index // block_size, mask=is_stored, other=0)
    slot = tl.where(is_stored, block * block_size + index % block_size, spare_slot)
    tl.store(token_ids + row, token, mask=inside)
    tl.store(positions + row, context + depth, mask=inside)
    tl.store(next_positions + row, context + depth + 1, mask=inside)
    tl.store(slots + row, slot, mask=inside)
    tl.store(long_slots + row, slot.to(tl.int64), mask=inside)
    tl.store(row_index + row, index, mask=inside)
    tl.store(lanes + row, lane, mask=inside)
    tl.store(first + row, row * 0 + begin, mask=inside)
    tl.store(depths + row, depth, mask=inside)
    tl.store(parents + row, parent_row.to(tl.int64), mask=inside)
    tl.store(row_seats + row, row * 0 + seat, mask=inside)
    words = all_settings + seat * num_settings
    _store_settings(row, inside, words, seeds, temperature, top_k, top_p, min_p)
    _store_settings(seq, None, words, seat_seeds, seat_temperature, seat_top_k, seat_top_p,
                    seat_min_p)  # fmt: skip
    tl.store(long_seats + seq, seat)
    tl.store(context_lens + seq, context)
    tl.store(tree_start + seq, context + 1)


def lay_out(staged: StagedStep) -> DeviceLayout:
    """Implements `DeviceOps.lay_out_on_device`."""
    num_rows, num_seqs = len(staged.row_seq), len(staged.seats)
    num_columns, num_words = staged.tables.shape[1], staged.num_words
    new = partial(torch.empty, device=staged.tokens.device)
    ints = [new(num_rows, dtype=torch.int32) for _ in range(8)]
    longs = [new(num_rows, dtype=torch.int64) for _ in range(3)]
    ancestors = new((num_rows, num_words), dtype=torch.int64)
    long_seats = new(num_seqs, dtype=torch.int64)
    context_lens, tree_start = (new(num_seqs, dtype=torch.int32) for _ in range(2))
    tables = new((num_seqs, num_columns), dtype=torch.int32)
    kinds = (torch.int64, torch.float32, torch.int32, torch.float32, torch.float32)
    settings, seat_settings = (
        DeviceSettings(*(new(count, dtype=kind) for kind in kinds))
        for count in (num_rows, num_seqs)
    )
    # A head's drafts have columns in all seats or in none, where any address will do.
    num_draft_nodes = staged.drafts[0].shape[1]
    words = num_words if staged.max_nodes else 0
    lay_out_kernel[(num_seqs, 1 + triton.cdiv(num_columns, _COLUMNS))](
        staged.tokens, staged.tables, staged.settings, staged.lengths, *staged.drafts,
        staged.draft_counts, staged.own_drafts,
        staged.seats, staged.query_start, staged.num_nodes, staged.room, *staged.nodes,
        *ints, *longs, ancestors, *settings,
        long_seats, context_lens, tree_start, tables, *seat_settings,
        staged.tokens.shape[1], num_columns, staged.settings.shape[1], num_draft_nodes,
        staged.block_size, staged.spare_slot,
        words, triton.next_power_of_2(num_words), num_draft_nodes > 0,
        _num_lanes(1 + staged.max_nodes), _COLUMNS, num_warps=1,
    )  # fmt: skip
    token_ids, positions, next_positions, slots, row_index, lanes, first, depths = ints
    long_slots, parents, row_seats = longs
    plan = PagedStep(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        row_seq=staged.row_seq,
        row_index=row_index,
        query_start=staged.query_start,
        context_lens=context_lens,
        tree_start=tree_start,
        block_tables=tables,
        ancestors=ancestors,
        block_size=staged.block_size,
        max_query_len=1 + staged.max_nodes,
        max_key_len=staged.tokens.shape[1],
    )
    rows = (row_seats, first, lanes, depths, parents, long_slots, next_positions)
    return DeviceLayout(plan, long_seats, *rows, settings, seat_settings)


# -- after the draw: the walk, the compaction's moves, the update of the seats


_VIEWS = ["query_start", "context_lens", "appends", "tokens", "lengths", "counts"]  # of the seats


@triton.jit(
    do_not_specialize=["width", "num_seats", "num_rows", "vocab", "spare_slot"],
    do_not_specialize_on_alignment=_VIEWS,
)
def settle_kernel(
    drawn, token_ids, parents, ancestors, depths, slots,  # of the step's rows
    query_start, context_lens, seats,  # of the step's sequences
    appends,  # [1]
    tokens, lengths, counts,  # of all seats, written
    outcome, source, target,  # [num_rows], written
    last, emitted, known, base,  # [num_seqs], written
    width, num_seats, num_rows, vocab, spare_slot,
    NUM_WORDS: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs,). A node is accepted if the nodes on its path, itself among them, are all
    what is drawn at their parents. Whatever is no node has a depth of 0."""
    seq = tl.program_id(0)
    begin = tl.load(query_start + seq).to(tl.int64)
    end = tl.load(query_start + seq + 1).to(tl.int64)
    context = tl.load(context_lens + seq)
    seat = tl.load(seats + seq).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    row = begin + lane
    inside = row < end
    token = tl.load(drawn + row, mask=inside, other=0)
    depth = tl.load(depths + row, mask=inside, other=0)
    accepted = inside & ((lane == 0) | (depth > 0))
    if NUM_WORDS:
        is_node = inside & (depth > 0)
        above = tl.load(parents + row, mask=is_node, other=0)
        guessed = tl.load(token_ids + row, mask=is_node, other=0)
        guessed = is_node & (guessed == tl.load(drawn + above, mask=is_node, other=0))
        bit = tl.full([BLOCK], 1, tl.int64) << ((lane - 1) & 63).to(tl.int64)
        for word in tl.static_range(NUM_WORDS):
            is_own = guessed & (lane > 64 * word) & (lane <= 64 * word + 64)
            passed = tl.sum(tl.where(is_own, bit, 0), axis=0)
            path = tl.load(ancestors + row * NUM_WORDS + word, mask=is_node, other=0)
            accepted = accepted & ((path & ~passed) == 0)
        moved = accepted & (depth != lane)
        slot = tl.load(slots + row, mask=moved, other=0)
        place = tl.load(slots + begin + depth, mask=moved, other=0)
        spare = tl.zeros([BLOCK], tl.int64) + spare_slot
        tl.store(source + row, tl.where(moved, slot, spare), mask=inside)
        tl.store(target + row, tl.where(moved, place, spare), mask=inside)
    tl.store(outcome + row, tl.where(accepted, token, ~token), mask=inside)

    written = accepted & (lane * 0 + seat < num_seats) & (lane * 0 + tl.load(appends) > 0)
    tl.store(tokens + seat * width + context + depth + 1, token, mask=written)
    if COUNTS:
        tl.atomic_add(counts + seat * vocab + token, 1, mask=written)
    num_written = tl.sum(written.to(tl.int32), axis=0)
    if num_written > 0:  # padding sequences share a seat, which none of them writes to
        tl.store(lengths + seat, tl.load(lengths + seat) + num_written)

    deepest = tl.max(tl.where(accepted, row, 0), axis=0)
    deepest = tl.maximum(deepest, tl.minimum(begin, num_rows - 1))
    tl.store(last + seq, deepest)
    tl.store(emitted + seq, tl.load(drawn + deepest).to(tl.int64))
    index = context + tl.load(depths + deepest)
    tl.store(known + seq, index + 1)
    tl.store(base + seq, index.to(tl.int64))


def settle(drawn: Tensor, walk: DeviceWalk) -> Settled:
    """Implements `DeviceOps.settle_on_device`."""
    num_rows, num_seqs = len(drawn), len(walk.seats)
    make = partial(torch.empty, device=drawn.device)
    made = Settled(
        make(num_rows, dtype=torch.int64), make(num_rows, dtype=torch.int64),
        make(num_seqs, dtype=torch.int64), make(num_seqs, dtype=torch.int64),
        make(num_seqs, dtype=torch.int32), make(num_seqs, dtype=torch.int64),
    )  # fmt: skip
    counts = walk.counts
    settle_kernel[(num_seqs,)](
        drawn, walk.token_ids, walk.parents, walk.ancestors, walk.depths, walk.slots,
        walk.query_start, walk.context_lens, walk.seats, walk.appends,
        walk.tokens, walk.lengths, walk.lengths if counts is None else counts,
        walk.outcome, made.source, made.target, made.last, made.emitted, made.known,
        made.base,
        walk.tokens.shape[1], len(walk.tokens) - 1, num_rows,
        0 if counts is None else counts.shape[1], walk.spare_slot,
        walk.ancestors.shape[1] if walk.query_len > 1 else 0, counts is not None,
        _num_lanes(walk.query_len), num_warps=1,
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize_on_alignment=["query_start"])
def move_kernel(
    places,  # as of `KVCache`, written where they point to
    source, target,  # [num_rows], slots
    query_start,  # [num_seqs + 1]
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs, number of places). Nodes move in order, each to where one before it was or
    stayed, so that none is overwritten before it is read."""
    begin = tl.load(query_start + tl.program_id(0))
    end = tl.load(query_start + tl.program_id(0) + 1)
    lane = tl.arange(0, BLOCK)
    inside = begin + lane < end
    read = tl.load(source + begin + lane, mask=inside, other=0)
    written = tl.load(target + begin + lane, mask=inside, other=0)
    left = tl.where(read != written, lane, BLOCK)
    following = tl.min(left, axis=0)
    if following < BLOCK:
        place = places + tl.program_id(1) * 2
        slots = tl.load(place).to(tl.pointer_type(tl.int32))
        width = tl.load(place + 1) // 4
        while following < BLOCK:
            is_next = lane == following
            first = tl.sum(tl.where(is_next, read, 0), axis=0) * width
            last = tl.sum(tl.where(is_next, written, 0), axis=0) * width
            for at in range(0, width, WIDTH):
                column = at + tl.arange(0, WIDTH)
                held = tl.load(slots + first + column, mask=column < width)
                tl.store(slots + last + column, held, mask=column < width)
            left = tl.where(is_next, BLOCK, left)
            following = tl.min(left, axis=0)


_WIDTH = 256  # words of a slot that are copied at once


def move(places: Tensor, settled: Settled, query_start: Tensor, query_len: int) -> None:
    """Implements `DeviceOps.move_on_device`."""
    move_kernel[(len(query_start) - 1, len(places))](
        places, settled.source, settled.target, query_start,
        _num_lanes(query_len), _WIDTH, num_warps=1,
    )  # fmt: skip


# -- drafts: what the next step begins with, and their levels


_KEPT = ["to_tokens", "token_step", "to_parents", "parent_step", "to_chances", "num_nodes", "width"]


@triton.jit(do_not_specialize=_KEPT, do_not_specialize_on_alignment=["room", "counts", "drafted",
            "above", "outcome", "sizes"])  # fmt: skip
def keep_kernel(
    tokens, parents, sizes, chances,  # as of `KeptDrafts`; None: there are none
    room, seats,
    counts, drafted, above,  # of all seats, written
    outcome,  # written: counts, tokens, parents, chances
    to_tokens, token_step, to_parents, parent_step, to_chances, num_nodes, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_drafts,)."""
    draft, num_drafts = tl.program_id(0), tl.num_programs(0)
    seat = tl.load(seats + draft)
    count = tl.minimum(tl.load(room + draft), num_nodes)
    if sizes is not None:
        count = tl.minimum(count, tl.load(sizes + draft).to(tl.int32))
    tl.store(counts + seat, count)
    tl.store(outcome + draft, count)
    lane = tl.arange(0, BLOCK)
    inside, is_node = lane < width, lane < num_nodes
    token = tl.load(tokens + draft * to_tokens + lane * token_step, mask=is_node, other=0)
    parent = lane - 1
    if parents is not None:
        place = parents + draft * to_parents + lane * parent_step
        parent = tl.load(place, mask=is_node, other=0).to(tl.int32)
    parent = tl.where(is_node, parent, -1)
    tl.store(drafted + seat * width + lane, token.to(tl.int32), mask=inside)
    tl.store(above + seat * width + lane, parent, mask=inside)
    row = outcome + num_drafts + draft * width + lane
    tl.store(row, token.to(tl.int32), mask=inside)
    tl.store(row + num_drafts * width, parent, mask=inside)
    if chances is not None:
        chance = tl.load(chances + draft * to_chances + lane, mask=is_node, other=0.0)
        chance = chance.to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(row + 2 * num_drafts * width, chance, mask=inside)


def keep(kept: KeptDrafts) -> None:
    """Implements `DeviceOps.keep_on_device`."""
    tokens, parents, chances = kept.tokens, kept.parents, kept.chances
    width = kept.drafts[0].shape[1]
    assert chances is None or chances.stride(1) == 1, chances.stride()
    keep_kernel[(len(tokens),)](
        tokens, parents, kept.sizes, chances, kept.room, kept.seats, kept.counts, *kept.drafts,
        kept.outcome,
        *tokens.stride(), *((0, 0) if parents is None else parents.stride()),
        0 if chances is None else chances.stride(0), tokens.shape[1], width,
        max(32, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_columns", "block_size", "total", "first_spare", "room"])
def draft_slots_kernel(
    tables,  # [num_drafts, num_columns]
    known,  # [num_drafts]
    slots,  # [num_drafts, total], written up to the draft's last row
    num_columns, block_size, total, first_spare, room,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_drafts, blocks of slots)."""
    draft = tl.program_id(0).to(tl.int64)
    count = tl.load(known + draft)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = (index < count + room) & (index < total)
    own = index - count
    is_known = written & (own < 0)
    block = tl.load(tables + draft * num_columns + index // block_size, mask=is_known, other=0)
    slot = tl.where(own < 0, block * block_size + index % block_size, first_spare + own)
    slot = tl.where(own < 0, slot, slot + draft.to(tl.int32) * room)
    tl.store(slots + draft * total + index, slot, mask=written)


def draft_slots(
    tables: Tensor, known: Tensor, block_size: int, max_known: int, first_spare: int, room: int
) -> Tensor:
    """Implements `DeviceOps.draft_slots_on_device`."""
    num_drafts, num_columns = tables.shape
    total = max_known + room
    slots = torch.empty((num_drafts, total), dtype=torch.int32, device=tables.device)
    draft_slots_kernel[(num_drafts, triton.cdiv(total, _COLUMNS))](
        tables, known, slots, num_columns, block_size, total, first_spare, room, _COLUMNS
    )
    return slots


_LEVEL = ["to_slots", "above_row", "above_column", "last_width", "begin", "width", "depth", "room"]


@triton.jit(do_not_specialize=_LEVEL)
def draft_level_kernel(
    slots, known, base,  # as of `DraftLevel`
    above, seen,  # [num_drafts, width]; [num_drafts, last_width, WORDS]
    positions, row_slots, row_seq, row_index,  # [num_drafts * width] int32, written
    query_start,  # [num_drafts + 1], written
    context_lens, tree_start,  # [num_drafts], written
    ancestors,  # [num_drafts * width, WORDS], written
    to_slots, above_row, above_column, last_width, begin, width, depth, room,
    WORDS: tl.constexpr, BRANCHES: tl.constexpr, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_drafts,)."""
    draft = tl.program_id(0)
    count = tl.load(known + draft)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    row = draft * width + lane
    index = count + begin + lane
    position = (tl.load(base + draft) + depth).to(tl.int32)
    slot = tl.load(slots + draft.to(tl.int64) * to_slots + index, mask=inside)
    tl.store(row_slots + row, slot, mask=inside)
    tl.store(row_seq + row, lane * 0 + draft, mask=inside)
    tl.store(row_index + row, index, mask=inside)
    tl.store(context_lens + draft, count + begin)
    tl.store(query_start + draft, draft * width)
    tl.store(query_start + draft + 1, (draft + 1) * width)  # as the next program does
    if BRANCHES:
        tl.store(positions + row, lane * 0 + position, mask=inside)
        tl.store(tree_start + draft, count)
        node = begin + lane
        if not IS_FIRST:
            place = above + draft.to(tl.int64) * above_row + lane * above_column
            parent = tl.load(place, mask=inside, other=0)
        for word in tl.static_range(WORDS):
            own = tl.full([BLOCK], 1, tl.int64) << (node & 63).to(tl.int64)
            path = tl.where(node >> 6 == word, own, 0)
            if not IS_FIRST:
                path = path | tl.load(
                    seen + (draft * last_width + parent) * WORDS + word, mask=inside, other=0
                )
            tl.store(ancestors + row * WORDS + word, path, mask=inside)
    else:
        tl.store(positions + row, position + lane, mask=inside)
        tl.store(tree_start + draft, count + room)
        tl.store(ancestors + row, tl.zeros([BLOCK], tl.int64), mask=inside)


def draft_level(level: DraftLevel) -> PagedStep:
    """Implements `DeviceOps.draft_level_on_device`."""
    num_drafts, width, above, seen = len(level.known), level.width, level.above, level.seen
    make = partial(torch.empty, dtype=torch.int32, device=level.known.device)
    positions, row_slots, row_seq, row_index = (make(num_drafts * width) for _ in range(4))
    query_start, context_lens, tree_start = make(num_drafts + 1), make(num_drafts), make(num_drafts)
    ancestors = make((num_drafts * width, level.num_words), dtype=torch.int64)
    strides = (0, 0) if above is None else above.stride()
    draft_level_kernel[(num_drafts,)](
        level.slots, level.known, level.base,
        level.base if above is None else above, ancestors if seen is None else seen,
        positions, row_slots, row_seq, row_index, query_start, context_lens, tree_start, ancestors,
        level.slots.shape[1], *strides, 1 if seen is None else seen.shape[1],
        level.begin, width, level.depth, level.room,
        level.num_words, above is not None, seen is None, max(32, triton.next_power_of_2(width)),
        num_warps=1,
    )  # fmt: skip
    return PagedStep(
        token_ids=positions,  # attention reads none
        positions=positions,
        slots=row_slots,
        row_seq=row_seq,
        row_index=row_index,
        query_start=query_start,
        context_lens=context_lens,
        tree_start=tree_start,
        block_tables=level.slots,
        ancestors=ancestors,
        block_size=1,
        max_query_len=width,
        max_key_len=level.slots.shape[1] - level.room + level.begin + width,
    )
