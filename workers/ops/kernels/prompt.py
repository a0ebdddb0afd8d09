"""A tile of attention for the many rows of a prompt: keys and values in panels, and two products.

Laying a tile out costs as much as some ten queries' dots with it, so it is done for many rows; they
share it, and no dot is left to be added up across a vector.
"""

from __future__ import annotations

from typing import NamedTuple

from . import Matrix, inlined
from .panels import GROUP, PANEL, STRIDE, UNIT, transpose, zip_rows
from .prepare import item64
from .product import FLOATS, group_rows
from .vector import FULL, HALF, LANES, load, load_one, store, store_one
from .visible import slot_of

TILE = 128  # keys


class Panels(NamedTuple):
    """Where a tile is laid out, of which all are addresses."""

    slots: int  # int64 [TILE]
    line: int  # 16 keys side by side, where a block has fewer
    keys: int  # groups of keys
    values: int  # groups of dimensions of the values


@inlined
def panels_at(start, kind, dim):
    begin = (start + PANEL - 1) // PANEL * PANEL
    line = begin + TILE * 8
    keys = line + LANES * dim * kind.width
    return Panels(begin, line, keys, keys + TILE * dim * kind.width)


def panel_bytes(width: int, dim: int, value_dim: int) -> int:
    """Memory behind the address of `panels_at`."""
    wide = -(-value_dim // GROUP) * GROUP
    return PANEL + TILE * 8 + (LANES + TILE) * dim * width + TILE * wide * width


@inlined
def lay_out(kind, panels, keys, values, tile, blocks, block_size, dim, value_dim):
    """Keys and values of a tile in panels."""
    for key in range(tile.num_keys):
        store_one(panels.slots + key * 8, slot_of(tile.begin + key, blocks, block_size))
    whole = block_size % LANES == 0 and tile.begin % LANES == 0
    _lay_keys(kind, panels, keys, tile.num_keys, dim, whole)
    _lay_values(kind, panels, values, tile.num_keys, value_dim)


@inlined
def _lay_keys(kind, panels, keys, num_keys, dim, whole):
    to_line = dim * kind.width
    units = to_line // UNIT
    for first in range(0, (num_keys + GROUP - 1) // GROUP * GROUP, LANES):
        count = min(LANES, num_keys - first)
        source, to_row = panels.line, to_line
        if count > 0 and whole:  # neighbours within a block
            source = keys.start + item64(panels.slots, first) * keys.to_row
            to_row = keys.to_row
        elif count > 0:
            for key in range(count):
                place = keys.start + item64(panels.slots, first + key) * keys.to_row
                for byte in range(0, to_line, 2):
                    store_one(source + key * to_line + byte, load_one(HALF, place + byte))
        panel = panels.keys + first // GROUP * units * STRIDE + first % GROUP * UNIT
        for unit in range(0, units, LANES):
            left = min(LANES, units - unit)
            transpose(source + unit * UNIT, to_row, count, left, panel + unit * STRIDE)


@inlined
def _lay_values(kind, panels, values, num_values, dim):
    per_unit = UNIT // kind.width
    to_group = TILE // per_unit * STRIDE
    for unit in range((num_values + per_unit - 1) // per_unit):
        value = unit * per_unit
        first = values.start + item64(panels.slots, value) * values.to_row
        second = 0
        if per_unit == 2 and value + 1 < num_values:
            second = values.start + item64(panels.slots, value + 1) * values.to_row
        for begin in range(0, (dim + GROUP - 1) // GROUP * GROUP, LANES):
            offset = begin * kind.width
            out = panels.values + begin // GROUP * to_group + begin % GROUP * UNIT
            zip_rows(
                kind.tag, first + offset, second + offset if second else 0, dim - begin,
                out + unit * STRIDE,
            )  # fmt: skip


@inlined
def score_panels(kind, panels, queries, num_queries, num_keys, dim, scores):
    """Dots of all queries with the keys of a tile."""
    units = dim * kind.width // UNIT
    for begin in range(0, num_keys, GROUP):
        keys = panels.keys + begin // GROUP * units * STRIDE
        out = Matrix(scores.start + begin * 4, scores.to_row)
        group_rows(kind, FLOATS, queries, num_queries, keys, 0, units, out, GROUP, 0, 0)


@inlined
def narrow(kind, weights, num_keys):
    """A query's weights, float32, as values of the kernel's kind in the same place."""
    if kind.width == 2:
        for key in range(0, num_keys, LANES):
            store(HALF, weights + key * 2, load(FULL, weights + key * 4))


@inlined
def add_panels(kind, panels, weights, num_queries, num_values, dim, results):
    """Weighted sums of the values of a tile, added to every query's."""
    per_unit = UNIT // kind.width
    to_group = TILE // per_unit * STRIDE
    units = (num_values + per_unit - 1) // per_unit
    for begin in range(0, dim, GROUP):
        values = panels.values + begin // GROUP * to_group
        out = Matrix(results.start + begin * 4, results.to_row)
        group_rows(kind, FLOATS, weights, num_queries, values, 0, units, out, GROUP, 0, 1)
