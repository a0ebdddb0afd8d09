"""A tile of attention by AMX, for one block of queries after the other.

A block is as many queries as a tile of AMX has rows: so scores, which become weights of bfloat16 at
once (`vector.py`), stay in the first cache beside the tile's keys and values. What a weight is
relative to needs not be the maximum, whose search is a pass of its own: any score near it serves,
as long as no weight is beyond the numbers. This level is `_ROOM` above the score of the first key
that a query sees, and changes when a score is higher than that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import LANES, PANEL, UNIT, Matrix, inlined
from .amx import ROWS, STEP, score_panels_of, set_tiles, whole_steps
from .prepare import item
from .tiles import (
    LOG2_E,
    MINUS,
    add_panels,
    cap,
    first_visible,
    hide,
    most_keys,
    num_seen,
    row_of,
    shrink,
    whole_pairs,
    whole_vectors,
)
from .vector import (
    FULL,
    PART,
    UNITY,
    add_pairs,
    either,
    fma,
    greatest,
    has_steps_above,
    larger,
    load,
    load_one,
    splat,
    store,
    store_one,
    weights_of_steps,
    whole_steps_of,
)

_TO_SCORES = most_keys(by_tiles=True) * 4 + PANEL  # what is a query's in a cache is no other's
_ROOM = np.float32(64)  # powers of two: half of what bfloat16's exponent has
_BEYOND = np.float32(1.5)  # likewise: less would raise levels where no step is above (`vector.py`)


class Block(NamedTuple):
    """Neighbouring queries of a key head."""

    first: int  # of the pass
    num_queries: int
    num_keys: int  # of a tile's, that they read
    sees_all: bool  # of those, every query


@inlined
def _block(first, end, first_row, tile, sequence, step, layer):
    """As many queries as a tile of AMX has rows, and no more than there are."""
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
    """The weighted sums of a tile's values are added to what a block has."""
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
    """All queries of a key head with a tile that is laid out."""
    num_rows = 0
    for first in range(0, num_queries, ROWS):
        block = _block(first, num_queries, first_row, tile, sequence, step, layer)
        if block.num_keys == 0:
            continue
        if block.num_queries != num_rows:
            num_rows = block.num_queries
            set_tiles(num_rows)
        _attend_block(kind, work, block, first_row, tile, sequence, step, layer)
