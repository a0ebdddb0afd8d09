"""A tile of attention: neighbouring keys and values laid out in panels, and two products with them.

All queries of a tile share the layout, and no dot is left to be added up across a vector. A few
queries do without it (`few.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from . import Matrix, inlined
from .panels import GROUP, PANEL, QUAD, STRIDE, UNIT, fetch, transpose_quad, zip_rows
from .prepare import item64
from .product import FLOATS, group_rows
from .vector import LANES, store_one
from .visible import Tile, slot_of

TILE = 256  # keys
AHEAD = 64  # keys
LINE = 64  # bytes of memory that are read at once


class Panels(NamedTuple):
    """Where a tile is laid out, of which all are addresses."""

    slots: int  # int64 [TILE + AHEAD]
    keys: int  # groups of keys
    values: int  # groups of dimensions of the values


@inlined
def panels_at(start, kind, dim):
    begin = (start + PANEL - 1) // PANEL * PANEL
    keys = begin + (TILE + AHEAD) * 8
    return Panels(begin, keys, keys + TILE * dim * kind.width)


def panel_bytes(width: int, dim: int, value_dim: int) -> int:
    """Memory behind the address of `panels_at`."""
    wide = -(-value_dim // GROUP) * GROUP
    return PANEL + (TILE + AHEAD) * 8 + TILE * dim * width + TILE * wide * width


@inlined
def whole_vectors(count):
    return (count + LANES - 1) // LANES * LANES


@inlined
def find_tile(panels, tile, sequence, block_size):
    """The slots of a tile's keys and of those that are fetched meanwhile; their number."""
    num_slots = min(tile.num_keys + AHEAD, sequence.key_len - tile.begin)
    _find_slots(panels.slots, Tile(tile.begin, num_slots), sequence.blocks, block_size)
    return num_slots


@inlined
def lay_out(kind, panels, keys, values, tile, num_slots, dim, value_dim):
    """Keys and values of a tile in panels; memory that is read next is fetched meanwhile."""
    key_size = dim * kind.width
    value_size = 0 if values.start == keys.start else value_dim * kind.width
    for first in range(0, tile.num_keys, LANES):
        fetch_ahead(panels, keys, values, first, num_slots, key_size, value_size)
        _lay_keys(panels, keys, first, key_size // UNIT)
    _lay_values(kind, panels, values, tile.num_keys, value_dim)


@inlined
def _find_slots(slots, tile, blocks, block_size):
    """The slot of every key, block after block; whole vectors are filled up with the last one."""
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
def fetch_ahead(panels, keys, values, first, num_slots, key_size, value_size):
    """Begins to read 16 values, from `first` of the tile on, and the keys some way behind them."""
    slots = panels.slots + first * 8
    _fetch_rows(values, slots, value_size)
    if first + AHEAD < num_slots:
        _fetch_rows(keys, slots + AHEAD * 8, key_size)


@inlined
def _fetch_rows(rows, slots, size):
    """The lines of 16 rows."""
    for index in range(LANES):
        place = rows.start + item64(slots, index) * rows.to_row
        for byte in range(0, size, LINE):
            fetch(place + byte)


@inlined
def _lay_keys(panels, keys, first, units):
    """16 keys, from `first` of the tile on."""
    slots, last = panels.slots + first * 8, units - QUAD
    panel = panels.keys + first // GROUP * units * STRIDE + first % GROUP * UNIT
    for begin in range(0, units, QUAD):
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
