"""A tile of attention: neighbouring keys and values laid out in panels, and two products with them.

All queries of a tile share the layout, and no dot is left to be added up across a vector. A few
queries do without it (`few.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from . import Matrix, inlined
from .ahead import fetch_lines
from .panels import GROUP, PANEL, QUAD, STRIDE, UNIT, transpose_quad, zip_rows
from .prepare import item64
from .product import FLOATS, group_rows
from .vector import LANES, store_one
from .visible import Tile, slot_of

TILE = 256  # keys


class Panels(NamedTuple):
    """Where a tile is laid out, of which all are addresses."""

    slots: int  # int64 [TILE]
    keys: int  # groups of keys
    values: int  # groups of dimensions of the values


@inlined
def panels_at(start, kind, dim):
    begin = (start + PANEL - 1) // PANEL * PANEL
    keys = begin + 2 * TILE * 8  # the slots of the next tile lie between
    return Panels(begin, keys, keys + TILE * dim * kind.width)


def panel_bytes(width: int, dim: int, value_dim: int) -> int:
    """Memory behind the address of `panels_at`."""
    wide = -(-value_dim // GROUP) * GROUP
    return PANEL + 2 * TILE * 8 + TILE * dim * width + TILE * wide * width


@inlined
def whole_vectors(count):
    return (count + LANES - 1) // LANES * LANES


@inlined
def tile_from(begin, last, block_size):
    """Neighbouring keys before `last`, whole blocks of them or in one block; there may be none."""
    most = TILE // block_size * block_size if block_size <= TILE else TILE
    if block_size > TILE:
        most = min(most, block_size - begin % block_size)
    return Tile(begin, max(min(most, last - begin), 0))


@inlined
def lay_out(kind, panels, keys, values, ahead, tile, dim, value_dim):
    """Keys and values of a tile in panels; memory that is read next is fetched meanwhile."""
    for first in range(0, tile.num_keys, LANES):
        _lay_keys(panels, keys, ahead, first, dim * kind.width // UNIT)
    _lay_values(kind, panels, values, tile.num_keys, value_dim)


@inlined
def find_slots(slots, tile, blocks, block_size):
    """The slot of every key, block after block; whole vectors are filled up with the last one."""
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
def _lay_keys(panels, keys, ahead, first, units):
    """16 keys, from `first` of the tile on."""
    slots, last = panels.slots + first * 8, units - QUAD
    panel = panels.keys + first // GROUP * units * STRIDE + first % GROUP * UNIT
    for begin in range(0, units, QUAD):
        fetch_lines(ahead, first, begin // QUAD)
        unit = min(begin, last)  # the last units of a row that has no whole number of quads
        transpose_quad(keys.start + unit * UNIT, keys.to_row, slots, panel + unit * STRIDE)


@inlined
def _lay_values(kind, panels, values, num_values, dim):
    per_unit = UNIT // kind.width
    to_group = TILE // per_unit * STRIDE
    units = (num_values + per_unit - 1) // per_unit
    for begin in range(0, dim, LANES):
        source = values.start + begin * kind.width
        out = panels.values + begin // GROUP * to_group + begin % GROUP * UNIT
        for unit in range(units):
            slot = panels.slots + unit * per_unit * 8
            first = source + item64(slot, 0) * values.to_row
            second = source + item64(slot, per_unit - 1) * values.to_row
            zip_rows(kind.tag, first, second, dim - begin, out + unit * STRIDE)


@inlined
def score_panels(kind, panels, queries, num_queries, num_keys, dim, scores):
    """Dots of all queries with the keys of a tile, in whole vectors."""
    units = dim * kind.width // UNIT
    for begin in range(0, num_keys, GROUP):
        keys = panels.keys + begin // GROUP * units * STRIDE
        out = Matrix(scores.start + begin * 4, scores.to_row)
        count = min(GROUP, whole_vectors(num_keys - begin))
        group_rows(kind, FLOATS, queries, num_queries, keys, 0, units, out, count, 0, 0)


@inlined
def add_panels(kind, panels, weights, num_queries, num_values, dim, results):
    """Weighted sums of the values of a tile, added to every query's, in whole vectors."""
    per_unit = UNIT // kind.width
    to_group = TILE // per_unit * STRIDE
    units = (num_values + per_unit - 1) // per_unit
    for begin in range(0, dim, GROUP):
        values = panels.values + begin // GROUP * to_group
        out = Matrix(results.start + begin * 4, results.to_row)
        count = min(GROUP, whole_vectors(dim - begin))
        group_rows(kind, FLOATS, weights, num_queries, values, 0, units, out, count, 0, 1)
