"""A tile of attention: adjacent keys and values laid out in panels, and two products with them.

All queries of a tile share the layout, and no dot requires a sum across a vector. Up to four
queries are computed without it (`attend.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import GROUP, HAS_TILES, LANES, PANEL, STRIDE, UNIT, Matrix, inlined
from .amx import uses_tiles, whole_steps
from .panels import FLOATS, QUAD, group_rows, transpose_quad, zip_rows
from .prepare import INT64, item, item64
from .vector import (
    FULL,
    add,
    div,
    exp,
    fetch_lines,
    load,
    load_codes,
    load_one,
    load_some,
    load_some_codes,
    mul,
    power_of_two,
    splat,
    store,
    store_one,
    store_some,
    sub,
)

# Which keys a row sees (`ops/plan.py`): those before it, its ancestors in a tree, a window.

MINUS = np.float32(-math.inf)


class KeySequence(NamedTuple):
    """One sequence of a step."""

    blocks: int  # address of its block table
    tree_start: int
    key_len: int
    offset: int  # first row minus keys before the step


class Tile(NamedTuple):
    """Adjacent keys of a sequence."""

    begin: int
    num_keys: int


@inlined
def slot_of(key, blocks, block_size):
    return item(blocks, key // block_size) * block_size + key % block_size


@inlined
def _key_position(key, sequence, step):
    """Returns the position of a key by its index in the sequence."""
    return key if key < sequence.tree_start else item(step.positions, key + sequence.offset)


@inlined
def _in_reach(key_position, position, layer):
    if layer.window and key_position <= position - layer.window:
        return False
    return not layer.chunk or key_position // layer.chunk == position // layer.chunk


@inlined
def first_visible(position, layer):
    """Returns the lowest key index that a row at `position` can see."""
    window, chunk = layer.window, layer.chunk
    first = position - window + 1 if window else 0
    if chunk and position // chunk * chunk > first:
        first = position // chunk * chunk
    return first if first > 0 else 0


@inlined
def num_seen(row, tile, sequence, step, layer):
    """Returns the number of a tile's keys up to the last that a row sees; 0 if it sees none."""
    index, begin, num_keys = item(step.row_index, row), tile.begin, tile.num_keys
    if first_visible(item(step.positions, row), layer) >= begin + num_keys:
        return 0
    if index >= sequence.tree_start:
        return num_keys
    return max(min(index + 1 - begin, num_keys), 0)


@inlined
def _hide_keys(scores, first, end):
    for key in range(first, end, LANES):
        store_some(FULL, scores + key * 4, splat(MINUS), end - key)


@inlined
def hide(scores, row, num_keys, begin, sequence, step, layer):
    """Minus infinity for what a query's row does not see of the keys from `begin` on.

    So do the scores behind them, in pairs of vectors.
    """
    position, index = item(step.positions, row), item(step.row_index, row)
    low = min(first_visible(position, layer) - begin, num_keys)
    high = max(min(min(index + 1, sequence.tree_start) - begin, num_keys), 0)
    end = high
    if index >= sequence.tree_start:
        end = num_keys
        for key in range(high, num_keys):
            node = begin + key - sequence.tree_start
            seen = False
            if node < step.num_words * 64:
                word = load_one(INT64, step.ancestors + (row * step.num_words + node // 64) * 8)
                seen = (word >> (node % 64)) & 1 == 1
                if seen and (layer.window or layer.chunk):
                    seen = _in_reach(_key_position(begin + key, sequence, step), position, layer)
            if not seen:
                store_one(scores + key * 4, MINUS)
    _hide_keys(scores, 0, low)
    _hide_keys(scores, end, whole_pairs(num_keys))


@inlined
def cap(scores, num_keys, scale, softcap):
    """Computes tanh(scale * score / softcap) * softcap, through exp."""
    one, two, most = splat(np.float32(1)), splat(np.float32(2)), splat(softcap)
    factor = splat(np.float32(2) * scale / softcap)
    for key in range(0, num_keys, LANES):
        grown = exp(mul(load(FULL, scores + key * 4), factor))
        store(FULL, scores + key * 4, mul(sub(one, div(two, add(grown, one))), most))


TILE = 256  # keys, at most


def most_keys(by_tiles: bool) -> int:
    """Returns the keys of a tile; with AMX, keys, values and scores fit into the first cache."""
    return TILE // 2 if by_tiles else TILE


_most_keys = inlined(most_keys)


class Panels(NamedTuple):
    """Addresses of a tile's layout."""

    slots: int  # int64 [TILE]
    keys: int  # groups of keys
    values: int  # groups of dimensions of the values


@inlined
def panels_at(start, units):
    begin = (start + PANEL - 1) // PANEL * PANEL
    keys = begin + 2 * TILE * 8  # the slots of the next tile lie between
    return Panels(begin, keys, keys + TILE * units * UNIT)


def panel_bytes(width: int, dim: int, value_dim: int) -> int:
    """Returns the memory after the address of `decoded_at`."""
    wide = -(-value_dim // GROUP) * GROUP
    rows = whole_row(dim * width) + wide * width
    return PANEL + 2 * TILE * 8 + TILE * rows + PANEL + TILE * (8 + rows)


def whole_row(num_bytes: int) -> int:
    """Returns the bytes of a query or key in whole lines, as tiles read them."""
    return -(-num_bytes // PANEL) * PANEL


@inlined
def whole_vectors(count):
    return (count + LANES - 1) // LANES * LANES


# Keys and values of one head of a tile that are kept as codes (`KVCode`), as the kernel reads them.


class Decoded(NamedTuple):
    """Addresses of decoded keys and values."""

    slots: int  # int64 [TILE], their numbers from 0 on
    keys: int
    values: int
    end: int


@inlined
def decoded_at(start, key_bytes, value_bytes):
    slots = (start + PANEL - 1) // PANEL * PANEL
    keys = slots + TILE * 8
    values = keys + TILE * key_bytes
    return Decoded(slots, keys, values, values + TILE * value_bytes)


@inlined
def number_slots(decoded):
    for index in range(TILE):
        store_one(decoded.slots + index * 8, np.int64(index))


@inlined
def decode_rows(kind, rows, slots, num_rows, size, bits, scale, out):
    """Decodes rows of codes by their indices, in whole vectors of consecutive rows."""
    factor, whole = splat(np.float32(scale)), size // LANES * LANES
    for row in range(whole_vectors(num_rows)):
        place, target = rows.start + item64(slots, row) * rows.to_row, out + row * size * kind.width
        for begin in range(0, whole, LANES):
            values = mul(load_codes(place + begin, bits), factor)
            store(kind.tag, target + begin * kind.width, values)
        if whole < size:
            values = mul(load_some_codes(place + whole, bits, size - whole), factor)
            store_some(kind.tag, target + whole * kind.width, values, size - whole)


@inlined
def whole_pairs(count):
    return (count + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)


@inlined
def tile_from(kind, begin, last, block_size):
    """Returns adjacent keys before `last`: whole blocks, or a part of one; may be empty."""
    size = _most_keys(uses_tiles(kind.tag, 0))
    most = size // block_size * block_size if block_size <= size else size
    if block_size > size:
        most = min(most, block_size - begin % block_size)
    return Tile(begin, max(min(most, last - begin), 0))


@inlined
def lay_out(kind, panels, keys, values, ahead, tile, dim, value_dim):
    """Lays out a tile's keys and values in panels; prefetches the next memory."""
    units = dim * kind.width // UNIT
    for first in range(0, tile.num_keys, LANES):
        _lay_keys(panels, keys, ahead, first, units, whole_steps(kind, units))
    _lay_values(kind, panels, values, tile.num_keys, value_dim)


@inlined
def find_slots(slots, tile, blocks, block_size):
    """Finds the slot of every key, block by block; pads whole vectors with the last one."""
    if tile.num_keys == 0:
        return
    at = 0
    while at < tile.num_keys:
        key = tile.begin + at
        first = slot_of(key, blocks, block_size)
        count = min(block_size - key % block_size, tile.num_keys - at)
        for index in range(count):
            store_one(slots + (at + index) * 8, first + index)
        at += count
    last = item64(slots, tile.num_keys - 1)
    for index in range(tile.num_keys, whole_vectors(tile.num_keys)):
        store_one(slots + index * 8, last)


@inlined
def _lay_keys(panels, keys, ahead, first, units, whole):
    """16 keys, from `first` of the tile on, filled up with zeros to `whole` units."""
    slots, last = panels.slots + first * 8, units - QUAD
    panel = panels.keys + first // GROUP * whole * STRIDE + first % GROUP * UNIT
    for begin in range(0, units, QUAD):
        fetch_lines(ahead, first, begin // QUAD)
        unit = min(begin, last)  # the last units of a row that has no whole number of quads
        transpose_quad(keys.start + unit * UNIT, keys.to_row, slots, panel + unit * STRIDE)
    for unit in range(units, whole):
        store(FULL, panel + unit * STRIDE, splat(np.float32(0)))


@inlined
def pair_of(kind, unit):
    """Which of a tile's pairs of keys is a unit of weights (`weight_pairs`)."""
    if not uses_tiles(kind.tag, 0):
        return unit
    return unit // 16 * 16 + unit % 16 // 4 * 2 + unit % 4 // 2 * 8 + unit % 2


@inlined
def _lay_values(kind, panels, values, num_values, dim):
    per_unit = UNIT // kind.width
    to_group = TILE // per_unit * STRIDE
    units = whole_steps(kind, (num_values + per_unit - 1) // per_unit)
    for begin in range(0, dim, LANES):
        source = values.start + begin * kind.width
        out = panels.values + begin // GROUP * to_group + begin % GROUP * UNIT
        for unit in range(units):
            key = pair_of(kind, unit) * per_unit
            if key >= num_values:
                store(FULL, out + unit * STRIDE, splat(np.float32(0)))
                continue
            slot = panels.slots + key * 8
            first = source + item64(slot, 0) * values.to_row
            second = source + item64(slot, per_unit - 1) * values.to_row
            zip_rows(kind.tag, first, second, dim - begin, out + unit * STRIDE)


@inlined
def score_panels(kind, panels, queries, num_queries, num_keys, dim, scores):
    """Computes dots of all queries with a tile's keys, in whole vectors, after `begin_tiles`."""
    units = whole_steps(kind, dim * kind.width // UNIT)
    for begin in range(0, num_keys, GROUP):
        keys = panels.keys + begin // GROUP * units * STRIDE
        out = Matrix(scores.start + begin * 4, scores.to_row)
        count = min(GROUP, whole_vectors(num_keys - begin))
        group_rows(kind, FLOATS, queries, num_queries, keys, 0, units, out, count, 0, 0)


@inlined
def add_panels(kind, panels, weights, num_queries, num_values, dim, results):
    """Adds weighted sums of a tile's values to every query's result, in whole vectors."""
    per_unit = UNIT // kind.width
    to_group = TILE // per_unit * STRIDE
    units = whole_steps(kind, (num_values + per_unit - 1) // per_unit)
    for begin in range(0, dim, GROUP):
        values = panels.values + begin // GROUP * to_group
        out = Matrix(results.start + begin * 4, results.to_row)
        count = min(GROUP, whole_vectors(dim - begin))
        group_rows(kind, FLOATS, weights, num_queries, values, 0, units, out, count, 0, 1)


# Scratch memory of a pass of attention: its queries, and what is known of their results so far.

MAX_QUERIES = 256 if HAS_TILES else 64  # rows times heads of a pass
BLOCK = 32  # queries whose scores are computed at once: they stay in the first cache
LOG2_E = np.float32(1.4426950408889634)


class Work(NamedTuple):
    """Scratch memory of the queries of a pass, head by head; all float32 but the queries."""

    queries: Matrix  # [num_queries, dim] of the kernel's kind
    scores: Matrix  # [BLOCK, TILE], of one block after the other
    peaks: int  # address of [num_queries]
    sums: int  # address of [num_queries, LANES]
    results: Matrix  # [num_queries, padded]
    panels: Panels
    decoded: Decoded


@inlined
def row_of(matrix, row):
    return matrix.start + row * matrix.to_row


@inlined
def work_at(scratch, kind, dim, padded):
    units = whole_steps(kind, dim * kind.width // UNIT)
    to_query = units * UNIT
    scores = scratch + MAX_QUERIES * to_query
    peaks = scores + BLOCK * TILE * 4
    sums = peaks + MAX_QUERIES * 4
    results = Matrix(sums + MAX_QUERIES * LANES * 4, (padded + 4 * LANES) * 4)
    decoded = decoded_at(
        results.start + MAX_QUERIES * results.to_row, dim * kind.width, padded * kind.width
    )
    panels = panels_at(decoded.end, units)
    queries, scored = Matrix(scratch, to_query), Matrix(scores, TILE * 4)
    return Work(queries, scored, peaks, sums, results, panels, decoded)


@inlined
def work_of(work, query, slots):
    """The part of the queries that begin there; scores are of no use to the next."""
    panels = Panels(slots, work.panels.keys, work.panels.values)
    return Work(
        Matrix(row_of(work.queries, query), work.queries.to_row),
        work.scores,
        work.peaks + query * 4,
        work.sums + query * LANES * 4,
        Matrix(row_of(work.results, query), work.results.to_row),
        panels,
        work.decoded,
    )


@inlined
def shrink(work, query, change, dim):
    """A query's sum and its result so far, less by as many powers of two as `change` is below 0."""
    factor, sums_of = power_of_two(splat(change)), work.sums + query * LANES * 4
    store(FULL, sums_of, mul(load(FULL, sums_of), factor))
    for begin in range(0, dim, LANES):
        o = row_of(work.results, query) + begin * 4
        store(FULL, o, mul(load(FULL, o), factor))


@inlined
def begin_query(work, query, source, size, sink, padded):
    """A query of `size` bytes, and what is known of its softmax before the first key."""
    target, whole = row_of(work.queries, query), work.queries.to_row
    for byte in range(0, size, 4 * LANES):  # an even number of halves, moved as floats
        values = load_some(FULL, source + byte, (size - byte) // 4)
        store_some(FULL, target + byte, values, (whole - byte) // 4)
    store_one(work.peaks + query * 4, load_one(FULL, sink) * LOG2_E if sink else MINUS)
    store(FULL, work.sums + query * LANES * 4, splat(np.float32(1 / LANES if sink else 0)))
    for begin in range(0, padded, LANES):
        store(FULL, row_of(work.results, query) + begin * 4, splat(np.float32(0)))
