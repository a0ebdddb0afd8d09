"""Attention over paged keys and values: no gather, online softmax, a tree as ancestor bits.

For each sequence, up to `MAX_QUERIES` rows times heads are computed in one pass over the keys,
`TILE` keys at a time. The heads of a key are adjacent in memory, so all heads of a pass use a tile
in turn, while the next one is prefetched in memory order (`vector.py`). All queries of a key head
are computed together, over keys that are first laid out in panels (`tiles.py`), unless there are up
to four queries (`score_tile`). `BLOCK` queries at a time go from scores to results, so that scores
stay in the first cache; they skip keys behind the last one that they see. Scores and sums are
float32; weights have the kernel's kind, and those of bfloat16 have only the precision that it needs
(`weight_of`). A row's results do not depend on the other rows of a pass, as long as it begins at
the same key.

With AMX, a block has as many queries as an AMX tile has rows. Scores become bfloat16 weights at
once (`vector.py`) and so stay in the first cache with the tile's keys and values. Weights need not
be relative to the maximum, whose search takes a separate pass: any nearby score suffices, as long
as no weight overflows. This level is `_ROOM` above the score of the first key that a query sees,
and changes when a score is higher than it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba.core import cgutils, types

from . import GROUP, LANES, PANEL, UNIT, Matrix, inlined
from .amx import ROWS, STEP, score_panels_of, set_tiles, uses_tiles, whole_steps
from .panels import QUAD, emit_products, emit_quad, emit_rows, emit_zip, end_tiles
from .prepare import item
from .tiles import (
    BLOCK,
    LOG2_E,
    MAX_QUERIES,
    MINUS,
    TILE,
    KeySequence,
    add_panels,
    begin_query,
    cap,
    decode_rows,
    find_slots,
    first_visible,
    hide,
    lay_out,
    most_keys,
    num_seen,
    number_slots,
    row_of,
    score_panels,
    shrink,
    tile_from,
    whole_pairs,
    whole_vectors,
    work_at,
    work_of,
)
from .vector import (
    FULL,
    I64,
    PART,
    UNITY,
    VECTOR,
    WORDS,
    Ahead,
    add,
    add_pairs,
    either,
    emit_fetch_lines,
    emit_load,
    emit_mask,
    emit_places,
    emit_store,
    fma,
    greatest,
    has_steps_above,
    instruction,
    is_half,
    larger,
    load,
    load_one,
    mul,
    next_unit,
    splat,
    store,
    store_one,
    store_some,
    total,
    unit_done,
    weight_of,
    weights_of_steps,
    whole_steps_of,
)

# -- products of up to four queries with a tile's keys and values where they lie, without panels.
#
# Keys are transposed in registers, 16 of them and four units at a time; a value's columns lie in
# lanes as they are. Every result is the chain of additions that panels give (`panels.py`), so that
# its bits do not depend on how many queries there are.


def score_tile(num_rows: int) -> Any:
    """Returns a function for dots of up to `num_rows` queries with 16 keys.

    `tile(kind, queries, to_query, count, keys, to_key, slots, quads, out, to_out, ...)`: `slots` is
    the address of the keys' indices, int64, relative to `keys`; the remaining arguments describe
    the memory to prefetch (`vector.py`).
    """

    @instruction
    def tile(
        kind: Any, queries: Any, to_query: Any, count: Any, keys: Any, to_key: Any,
        slots: Any, quads: Any, out: Any, to_out: Any, later: Any, to_later: Any, values: Any,
        to_value: Any, next_slots: Any, first_quad: Any, bits: Any,
    ) -> Any:  # fmt: skip
        half = is_half(kind)

        def emit(builder: Any, *arguments: Any) -> None:
            _, queries, to_query, count, keys, to_key, slots, quads, out, to_out, *lines = arguments
            rows = emit_rows(builder, queries, to_query, count, num_rows)
            totals = emit_places(builder, num_rows)
            with cgutils.for_range(builder, quads) as loop:
                emit_fetch_lines(builder, lines, loop.index)
                offset = builder.mul(loop.index, I64(QUAD * UNIT))
                units = emit_quad(builder, builder.add(keys, offset), to_key, slots)
                for index, unit in enumerate(units):
                    right = builder.bitcast(unit, WORDS) if half else unit
                    step = builder.add(offset, I64(index * UNIT))
                    for row, total in zip(rows, totals, strict=True):
                        emit_products(builder, half, builder.add(row, step), [right], [total])
            for row, total in zip(
                emit_rows(builder, out, to_out, count, num_rows), totals, strict=True
            ):
                emit_store(builder, builder.load(total), row, 4)

        return types.void(kind, *[types.int64] * 16), emit

    return tile


def value_tile(num_rows: int, num_vectors: int) -> Any:
    """Returns a function that adds weighted sums of values to `out`.

    `tile(kind, weights, to_weight, count, values, to_value, slots, units, out, to_out, columns)`:
    `slots` is the address of the values' indices, int64, relative to `values`; the first `columns`
    of each value are read. Results are written in whole vectors.
    """

    @instruction
    def tile(
        kind: Any, weights: Any, to_weight: Any, count: Any, values: Any, to_value: Any,
        slots: Any, units: Any, out: Any, to_out: Any, columns: Any,
    ) -> Any:  # fmt: skip
        half = is_half(kind)

        def emit(builder: Any, *arguments: Any) -> None:
            _, weights, to_weight, count, values, to_value, slots, units, *more = arguments
            out, to_out, columns = more
            rows = emit_rows(builder, weights, to_weight, count, num_rows)
            targets = emit_rows(builder, out, to_out, count, num_rows)
            shifts = [I64(index * LANES) for index in range(num_vectors)]
            masks = [emit_mask(builder, builder.sub(columns, shift), LANES) for shift in shifts]
            totals = [emit_places(builder, num_vectors) for _ in rows]
            for target, line in zip(targets, totals, strict=True):
                for index, register in enumerate(line):
                    place = builder.add(target, I64(index * LANES * 4))
                    builder.store(emit_load(builder, place, VECTOR, 4), register)
            per_unit = 2 if half else 1

            def value_of(unit: Any, index: int) -> Any:
                at = builder.add(builder.mul(unit, I64(per_unit * 8)), I64(index * 8))
                slot = emit_load(builder, builder.add(slots, at), I64, 8)
                return builder.add(values, builder.mul(slot, to_value))

            with cgutils.for_range(builder, units) as loop:
                first, second = value_of(loop.index, 0), value_of(loop.index, per_unit - 1)
                right = []
                for index, mask in enumerate(masks):
                    shift = I64(index * LANES * 4 // per_unit)
                    sides = builder.add(first, shift), builder.add(second, shift)
                    right.append(emit_zip(builder, half, *sides, mask))
                step = builder.mul(loop.index, I64(UNIT))
                for row, line in zip(rows, totals, strict=True):
                    emit_products(builder, half, builder.add(row, step), right, line)
            for target, line in zip(targets, totals, strict=True):
                for index, register in enumerate(line):
                    place = builder.add(target, I64(index * LANES * 4))
                    emit_store(builder, builder.load(register), place, 4)

        return types.void(kind, *[types.int64] * 10), emit

    return tile


FEW = 4  # queries
SCORE = score_tile(FEW)
ADD_THREE, ADD_FOUR = (value_tile(FEW, num_vectors) for num_vectors in (3, 4))


@inlined
def are_few(kind, num_queries, dim):
    """Returns True if queries are computed without panels; their keys are whole quads of units.

    AMX tiles add in another order than pair instructions, so with them the result is False.
    """
    is_few = num_queries <= FEW and dim * kind.width % (QUAD * UNIT) == 0
    return is_few and not uses_tiles(kind.tag, 0)


@inlined
def score_few(kind, panels, queries, num_queries, keys, ahead, num_keys, dim, scores):
    """Computes dots with the keys of a tile, in whole vectors; prefetches the next memory."""
    key_size = dim * kind.width
    for first in range(0, num_keys, LANES):
        later, values = ahead.keys, ahead.values
        next_slots = ahead.slots + first * 8 if first < ahead.num_keys else 0
        SCORE(
            kind.tag, queries.start, queries.to_row, num_queries, keys.start, keys.to_row,
            panels.slots + first * 8, key_size // UNIT // QUAD, scores.start + first * 4,
            scores.to_row, later.start, later.to_row, values.start, values.to_row, next_slots,
            ahead.first_quad, ahead.bits,
        )  # fmt: skip


@inlined
def add_few(kind, panels, weights, num_queries, values, num_values, dim, results):
    """Adds weighted sums of a tile's values to every query's result, in whole vectors."""
    tag, x, to_x, n = kind.tag, weights.start, weights.to_row, num_queries
    per_unit = UNIT // kind.width
    units = (num_values + per_unit - 1) // per_unit
    for begin in range(0, dim, GROUP):
        v, to_v, slots = values.start + begin * kind.width, values.to_row, panels.slots
        o, to_o, left = results.start + begin * 4, results.to_row, dim - begin
        if left <= 3 * LANES:
            ADD_THREE(tag, x, to_x, n, v, to_v, slots, units, o, to_o, left)
        else:
            ADD_FOUR(tag, x, to_x, n, v, to_v, slots, units, o, to_o, left)


# -- online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): scores of a tile become
# weights, and results so far are scaled to fit them


@inlined
def _raise_peak(work, query, num_keys, scale, dim):
    """Updates a query's running maximum; scales its sum and its result accordingly."""
    place, peak_of = row_of(work.scores, query), work.peaks + query * 4
    most, other = splat(MINUS), splat(MINUS)
    for key in range(0, num_keys, 2 * LANES):
        most = larger(load(FULL, place + key * 4), most)
        other = larger(load(FULL, place + (key + LANES) * 4), other)
    before, peak = load_one(FULL, peak_of), greatest(larger(most, other)) * scale
    if not peak > before:
        return
    store_one(peak_of, peak)
    if before > MINUS:
        shrink(work, query, before - peak, dim)


@inlined
def _soften(kind, work, query, num_keys, scale):
    """Converts scores to weights of the kernel's kind, in place of the scores."""
    tag, width, place = kind.tag, kind.width, row_of(work.scores, query)
    sums_of, peak = work.sums + query * LANES * 4, load_one(FULL, work.peaks + query * 4)
    if peak == MINUS:
        peak = np.float32(0)
    factor, level = splat(scale), splat(-peak)
    added, beside = load(FULL, sums_of), splat(np.float32(0))
    for key in range(0, num_keys, 2 * LANES):
        first = weight_of(tag, fma(load(FULL, place + key * 4), factor, level))
        second = weight_of(tag, fma(load(FULL, place + (key + LANES) * 4), factor, level))
        store(tag, place + key * width, first)
        store(tag, place + (key + LANES) * width, second)
        added, beside = add(added, first), add(beside, second)
    store(FULL, sums_of, add(added, beside))


@inlined
def soften(kind, work, num_queries, num_keys, scale, dim):
    """Converts scores to weights; finds all maxima first, so no query waits for the previous one.

    `scale` is positive and includes log2(e), since powers of two are computed. Scores are pairs of
    vectors.
    """
    for query in range(num_queries):
        _raise_peak(work, query, num_keys, scale, dim)
    for query in range(num_queries):
        _soften(kind, work, query, num_keys, scale)


_TILE_BYTES = 2**21  # keys and values of a pass's tile: whole rows of most models


class Heads(NamedTuple):
    """Key heads of a pass."""

    first: int
    num_heads: int


@inlined
def _sequence_of(step, seq):
    begin, end = item(step.query_start, seq), item(step.query_start, seq + 1)
    context = item(step.context_lens, seq)
    return KeySequence(
        step.block_tables + seq * step.max_blocks * 4,
        item(step.tree_start, seq),
        context + end - begin,
        begin - context,
    )


@inlined
def _attend_tile(
    kind, work, first_row, num_queries, keys, values, ahead, tile, sequence, step, layer
):  # fmt: skip
    """Computes one key head's part of a tile."""
    group = layer.num_heads // layer.num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    scale, softcap = np.float32(layer.scale), np.float32(layer.softcap)
    factor = LOG2_E if softcap > 0 else scale * LOG2_E
    few, panels = are_few(kind, num_queries, dim), work.panels
    if not few:
        lay_out(kind, panels, keys, values, ahead, tile, dim, value_dim)
    if uses_tiles(kind.tag, 0):
        attend_blocks(kind, work, first_row, num_queries, tile, sequence, step, layer)
        return
    for first in range(0, num_queries, BLOCK):
        count, part = min(BLOCK, num_queries - first), work_of(work, first, panels.slots)
        num_keys = 0
        rows = first_row + first // group, first_row + (first + count - 1) // group + 1
        for row in range(rows[0], rows[1]):
            num_keys = max(num_keys, num_seen(row, tile, sequence, step, layer))
        queries, scores = part.queries, part.scores
        if few:  # reads what comes next meanwhile
            score_few(kind, panels, queries, count, keys, ahead, tile.num_keys, dim, scores)
        if num_keys == 0:
            continue
        if not few:
            score_panels(kind, panels, queries, count, num_keys, dim, scores)
        for query in range(count):
            place = row_of(scores, query)
            if softcap > 0:
                cap(place, num_keys, scale, softcap)
            row = first_row + (first + query) // group
            hide(place, row, num_keys, tile.begin, sequence, step, layer)
        soften(kind, part, count, whole_pairs(num_keys), factor, value_dim)
        results = part.results
        if few:
            add_few(kind, panels, scores, count, values, num_keys, value_dim, results)
        else:
            add_panels(kind, panels, scores, count, num_keys, value_dim, results)


@inlined
def _rows_of(start, head, num_heads, size):
    return Matrix(start + head * size, num_heads * size)


@inlined
def _decode(kind, work, keys, values, slots, tile, layer):
    """Decodes one key head's keys and values of a tile from the cache's codes."""
    decoded, bits, count = work.decoded, layer.code_bits, tile.num_keys
    decode_rows(kind, keys, slots, count, layer.head_dim, bits, layer.key_scale, decoded.keys)
    read = Matrix(decoded.keys, layer.head_dim * kind.width)
    if layer.shared_values:
        return read, read
    size, scale = layer.value_dim, layer.value_scale
    decode_rows(kind, values, slots, count, size, bits, scale, decoded.values)
    return read, Matrix(decoded.values, size * kind.width)


@inlined
def _attend_tiles(kind, work, first_row, num_queries, heads, span, cache, sequence, step, layer):
    """Processes all keys from the first to the last that any of the rows sees, tile by tile."""
    num_quads, code_bits = layer.head_dim * kind.width // UNIT // QUAD, layer.code_bits
    width = 1 if code_bits else kind.width
    key_bytes, value_bytes = layer.head_dim * width, layer.value_dim * width
    keys = _rows_of(cache.keys, heads.first, layer.num_kv_heads, key_bytes)
    values = _rows_of(cache.values, heads.first, layer.num_kv_heads, value_bytes)
    if layer.shared_values:
        values = keys
    block_size, panels = step.block_size, work.panels
    slots, next_slots = panels.slots, panels.slots + TILE * 8
    tile = tile_from(kind, span[0] // step.alignment * step.alignment, span[1], block_size)
    bits = 0 if heads.num_heads == layer.num_kv_heads else 2
    find_slots(slots, tile, sequence.blocks, block_size)
    while tile.num_keys > 0:
        next_tile = tile_from(kind, tile.begin + tile.num_keys, span[1], block_size)
        find_slots(next_slots, next_tile, sequence.blocks, block_size)
        for index in range(heads.num_heads):
            quad = index * num_quads
            num_next = 0 if code_bits else next_tile.num_keys  # codes are read in order
            ahead = Ahead(keys, values, next_slots, num_next, quad, bits)
            own_keys = Matrix(keys.start + index * key_bytes, keys.to_row)
            own_values = Matrix(values.start + index * value_bytes, values.to_row)
            read = slots
            if code_bits:
                own_keys, own_values = _decode(kind, work, own_keys, own_values, slots, tile, layer)
                read = work.decoded.slots
            part = work_of(work, index * num_queries, read)
            _attend_tile(
                kind, part, first_row, num_queries, own_keys, own_values, ahead, tile, sequence,
                step, layer,
            )  # fmt: skip
        tile, slots, next_slots = next_tile, next_slots, slots


@inlined
def _attend_rows(kind, rows, num_rows, seq, heads, joined, cache, out, scratch, step, layer):
    """Computes some rows of one sequence, from `rows` on, and all query heads of some key heads."""
    width, num_kv_heads = kind.width, layer.num_kv_heads
    group = layer.num_heads // num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    padded = (value_dim + LANES - 1) // LANES * LANES
    sequence, work = _sequence_of(step, seq), work_at(scratch, kind, dim, padded)
    num_queries, num_lanes, size = num_rows * group, heads.num_heads * group, dim * width

    last, first = 0, sequence.key_len
    for row in range(num_rows):
        flat = rows + row
        for lane in range(num_lanes):
            number = heads.first * group + lane
            sink = layer.sinks + number * 4 if layer.sinks else 0
            source = row_of(joined, flat) + number * size
            query = lane // group * num_queries + row * group + lane % group
            begin_query(work, query, source, size, sink, padded)
        index = item(step.row_index, flat)
        last = max(last, sequence.key_len if index >= sequence.tree_start else index + 1)
        first = min(first, first_visible(item(step.positions, flat), layer))

    if layer.code_bits:
        number_slots(work.decoded)
    span = (first, last)
    _attend_tiles(kind, work, rows, num_queries, heads, span, cache, sequence, step, layer)

    for query in range(heads.num_heads * num_queries):
        head, rest = heads.first + query // num_queries, query % num_queries
        row, lane = rows + rest // group, head * group + rest % group
        target = out + (row * num_kv_heads * group + lane) * value_dim * width
        factor = splat(np.float32(1) / total(load(FULL, work.sums + query * LANES * 4)))
        for start in range(0, value_dim, LANES):
            value = mul(load(FULL, row_of(work.results, query) + start * 4), factor)
            store_some(kind.tag, target + start * width, value, value_dim - start)
    end_tiles(kind)


@inlined
def _most_rows(layer):
    """Returns the maximum number of rows of a pass."""
    return max(MAX_QUERIES // (layer.num_heads // layer.num_kv_heads), 1)


@inlined
def _heads_per_pass(kind, num_rows, step, layer, num_threads):
    """Returns the key heads per pass; fewer if a step has fewer sequences than threads."""
    own_values = 0 if layer.shared_values else layer.value_dim
    tile_bytes = TILE * (layer.head_dim + own_values) * kind.width
    group = layer.num_heads // layer.num_kv_heads
    most = max(min(MAX_QUERIES // (num_rows * group), _TILE_BYTES // tile_bytes), 1)
    share = (layer.num_kv_heads * step.num_seqs + num_threads - 1) // num_threads
    return min(most, max(share, 1))


@inlined
def num_passes(kind, step, layer, num_threads):
    """Returns the number of passes of a step, over all sequences."""
    most, count = _most_rows(layer), 0
    for seq in range(step.num_seqs):
        length = item(step.query_start, seq + 1) - item(step.query_start, seq)
        per_pass = _heads_per_pass(kind, min(most, length), step, layer, num_threads)
        heads = (layer.num_kv_heads + per_pass - 1) // per_pass
        count += heads * ((length + most - 1) // most)
    return count


@inlined
def attend_step(kind, joined, cache, out, scratch, step, layer, claims):
    """Computes all passes, or those that a thread claims (`program.py`)."""
    group = layer.num_heads // layer.num_kv_heads
    own_values = 0 if layer.shared_values else layer.value_dim
    columns = layer.num_kv_heads * ((group + 1) * layer.head_dim + own_values)
    read, most = Matrix(joined, columns * kind.width), _most_rows(layer)
    taken = next_unit(claims) if claims.counters else 0
    while taken >= 0:
        number = 0
        for seq in range(step.num_seqs):
            begin, end = item(step.query_start, seq), item(step.query_start, seq + 1)
            num_rows = min(most, end - begin)
            per_pass = _heads_per_pass(kind, num_rows, step, layer, claims.num_threads)
            for head in range(0, layer.num_kv_heads, per_pass):
                heads = Heads(head, min(per_pass, layer.num_kv_heads - head))
                for row in range(begin, end, most):
                    if claims.counters == 0 or number == taken:
                        _attend_rows(
                            kind, row, min(most, end - row), seq, heads, read, cache, out,
                            scratch, step, layer,
                        )  # fmt: skip
                        if claims.counters:
                            unit_done(claims)
                            taken = next_unit(claims)
                    number += 1
        if claims.counters == 0:
            taken = -1


_TO_SCORES = most_keys(by_tiles=True) * 4 + PANEL  # what is a query's in a cache is no other's
_ROOM = np.float32(64)  # powers of two: half of what bfloat16's exponent has
_BEYOND = np.float32(1.5)  # likewise: less would raise levels where no step is above (`vector.py`)


class Block(NamedTuple):
    """Adjacent queries of a key head."""

    first: int  # of the pass
    num_queries: int
    num_keys: int  # of a tile's, that they read
    sees_all: bool  # of those, every query


@inlined
def _block(first, end, first_row, tile, sequence, step, layer):
    """Returns up to as many queries as an AMX tile has rows."""
    count, group = min(ROWS, end - first), layer.num_heads // layer.num_kv_heads
    num_keys, low, high = 0, tile.begin, sequence.tree_start
    begin, last = first_row + first // group, first_row + (first + count - 1) // group
    for row in range(begin, last + 1):
        num_keys = max(num_keys, num_seen(row, tile, sequence, step, layer))
        low = max(low, first_visible(item(step.positions, row), layer))
        high = min(high, item(step.row_index, row) + 1)
    is_whole = num_keys % (2 * LANES) == 0
    sees_all = is_whole and low == tile.begin and high >= tile.begin + num_keys
    return Block(first, count, num_keys, sees_all)


@inlined
def _raise_level(work, scores, query, num_keys, scale, dim):
    """The level of a query by its highest score, if that is beyond; what it has is scaled to fit.

    `scores` is the address of its own.
    """
    most, level_of = splat(MINUS), work.peaks + query * 4
    for key in range(0, num_keys, LANES):
        most = larger(load(FULL, scores + key * 4), most)
    before, peak = load_one(FULL, level_of), greatest(most) * scale
    if not peak > before + _BEYOND:
        return
    level = peak + _ROOM
    store_one(level_of, level)
    if before > MINUS:
        shrink(work, query, before - level, dim)


@inlined
def _find_levels(work, scores, block, scale, raises, first_row, tile, sequence, step, layer):
    """A block's scores as its queries see them; levels for those without one, or for all."""
    group, num_keys = layer.num_heads // layer.num_kv_heads, block.num_keys
    if block.sees_all and not raises and layer.softcap == 0:
        lowest = load_one(FULL, work.peaks + block.first * 4)
        for query in range(block.first + 1, block.first + block.num_queries):
            lowest = min(lowest, load_one(FULL, work.peaks + query * 4))
        if lowest > MINUS:
            return
    row, lane = first_row + block.first // group, block.first % group - 1
    for index in range(block.num_queries):
        place, query = row_of(scores, index), block.first + index
        lane += 1
        if lane == group:
            row, lane = row + 1, 0
        if layer.softcap > 0:
            cap(place, num_keys, np.float32(layer.scale), np.float32(layer.softcap))
        if not block.sees_all:
            hide(place, row, num_keys, tile.begin, sequence, step, layer)
        first = MINUS
        if not raises:
            if load_one(FULL, work.peaks + query * 4) > MINUS:
                continue
            begin = max(first_visible(item(step.positions, row), layer) - tile.begin, 0)
            first = load_one(FULL, place + begin * 4) if begin < num_keys else MINUS
        if first > MINUS:
            store_one(work.peaks + query * 4, first * scale + _ROOM)
        else:
            _raise_level(work, place, query, num_keys, scale, layer.value_dim)


@inlined
def _weigh(work, scores, query, num_keys, scale, sums, seen):
    """Weights where a query's scores began, with their sum; the bits of all steps seen so far."""
    level = load_one(FULL, work.peaks + query * 4)
    if level == MINUS:
        level = np.float32(0)
    factor, shift = splat(scale * PART), splat(UNITY - level * PART)
    added = load(FULL, work.sums + query * LANES * 4)
    for key in range(0, num_keys, 2 * LANES):
        first = fma(load(FULL, scores + key * 4), factor, shift)
        second = fma(load(FULL, scores + (key + LANES) * 4), factor, shift)
        steps = whole_steps_of(first, second)
        seen = either(seen, steps)
        weights = weights_of_steps(steps)
        store(FULL, scores + key * 2, weights)
        added = add_pairs(added, weights)
    store(FULL, sums, added)
    return seen


@inlined
def _attend_block(kind, work, block, first_row, tile, sequence, step, layer):
    """Adds the weighted sums of a tile's values to a block's results."""
    dim, units = layer.value_dim, whole_steps(kind, layer.head_dim * kind.width // UNIT)
    scale = (np.float32(1) if layer.softcap > 0 else np.float32(layer.scale)) * LOG2_E
    scores = Matrix(work.scores.start, _TO_SCORES)
    sums, pairs = row_of(scores, ROWS), whole_pairs(block.num_keys)
    queries = Matrix(row_of(work.queries, block.first), work.queries.to_row)
    results = Matrix(row_of(work.results, block.first), work.results.to_row)
    num_panels = whole_vectors(block.num_keys) // LANES
    for raises in range(2):
        score_panels_of(queries, work.panels.keys, units // STEP, num_panels, scores)
        _find_levels(work, scores, block, scale, raises, first_row, tile, sequence, step, layer)
        seen = splat(np.float32(0))
        for index in range(block.num_queries):
            place, query = row_of(scores, index), block.first + index
            seen = _weigh(work, place, query, pairs, scale, sums + index * LANES * 4, seen)
        if not has_steps_above(seen):
            break
    for index in range(block.num_queries):
        place = work.sums + (block.first + index) * LANES * 4
        store(FULL, place, load(FULL, sums + index * LANES * 4))
    add_panels(kind, work.panels, scores, block.num_queries, block.num_keys, dim, results)


@inlined
def attend_blocks(kind, work, first_row, num_queries, tile, sequence, step, layer):
    """Computes all queries of a key head with a laid-out tile."""
    num_rows = 0
    for first in range(0, num_queries, ROWS):
        block = _block(first, num_queries, first_row, tile, sequence, step, layer)
        if block.num_keys == 0:
            continue
        if block.num_queries != num_rows:
            num_rows = block.num_queries
            set_tiles(num_rows)
        _attend_block(kind, work, block, first_row, tile, sequence, step, layer)
