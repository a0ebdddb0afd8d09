"""A hash table that grows bit by bit: linear hashing (Litwin 1980), compiled.

A table is (rows, heads, used), int32. Rows are in order of arrival: four columns of key, the next
row of the same bucket, and the values. `heads` has the first row of each bucket. When there are
more rows than buckets, one bucket is split in two, so no step rehashes a whole table. Enlarging a
table copies memory and moves no row to another bucket.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from ....scheduler.types import IntArray
from . import INT, INTS, TABLE, compiled

Hashed = tuple[IntArray, IntArray, IntArray]
HASHED: Any = types.Tuple((TABLE, INTS, INTS))

CHAIN, VALUE = 4, 5  # columns: the next row, and the first value
NUM_ROWS, MASK, SPLIT = range(3)  # of `used`: rows; buckets of a round, less one; those split in it
USED = 3
FIRST_MASK = 63
MIN_ROWS = FIRST_MASK + 1


def new_table(num_columns: int, num_more: int = 0, num_rows: int = 0) -> Hashed:
    """An empty table; `used` has `num_more` additional numbers for the caller.

    Memory for `num_rows` rows is reserved at once and used as the table fills.
    """
    num_rows = max(num_rows, MIN_ROWS)
    rows: IntArray = np.empty((num_rows, num_columns), dtype=np.int32)
    heads: IntArray = np.empty(num_rows, dtype=np.int32)
    heads[:MIN_ROWS] = -1
    used: IntArray = np.zeros(USED + num_more, dtype=np.int32)
    used[MASK] = FIRST_MASK
    return rows, heads, used


def grown(table: Hashed, needed: int) -> Hashed:
    """The table with room for more than `needed` rows."""
    rows, heads, used = table
    size = 1 << needed.bit_length()
    return larger(rows, size), larger(heads, size), used


def larger(array: IntArray, size: int) -> IntArray:
    """The array with `size` rows."""
    result: IntArray = np.empty((size, *array.shape[1:]), dtype=np.int32)
    result[: len(array)] = array
    return result


class Key(NamedTuple):
    """The four columns of a key."""

    one: int
    two: int
    three: int
    four: int


KEY: Any = types.NamedUniTuple(INT, 4, Key)


@compiled(KEY, INT, INT, INT, INT)
def key_of(one: int, two: int, three: int, four: int) -> Key:
    """A key of integers of any width."""
    return Key(one, two, three, four)


@compiled(KEY, TABLE, INT)
def stored_key(rows: IntArray, row: int) -> Key:
    """The key of a row."""
    return key_of(rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3])


@compiled(INT, INTS, KEY)
def bucket_of(used: IntArray, key: Key) -> int:
    mixed = key.one * 0x1E3779B97F4A7C15 + key.two * 0x3C6EF372FE94F82B
    mixed += key.three * 0x5851F42D4C957F2D + key.four * 0x14057B7EF767814F
    mixed ^= mixed >> 32
    bucket = mixed & used[MASK]
    return bucket if bucket >= used[SPLIT] else mixed & (2 * used[MASK] + 1)


@compiled(INT, HASHED, KEY)
def find(table: Hashed, key: Key) -> int:
    """The row of a key; -1 if there is none."""
    rows, heads, used = table
    row = heads[bucket_of(used, key)]
    while row >= 0 and not (
        rows[row, 0] == key.one
        and rows[row, 1] == key.two
        and rows[row, 2] == key.three
        and rows[row, 3] == key.four
    ):
        row = rows[row, CHAIN]
    return row


@compiled(INT, HASHED, KEY)
def insert(table: Hashed, key: Key) -> int:
    """Adds a row for a key that has none; there must be room."""
    rows, heads, used = table
    new = used[NUM_ROWS]
    used[NUM_ROWS] += 1
    rows[new, 0], rows[new, 1], rows[new, 2], rows[new, 3] = key
    bucket = bucket_of(used, key)
    rows[new, CHAIN], heads[bucket] = heads[bucket], new
    if used[NUM_ROWS] > used[MASK] + 1 + used[SPLIT]:
        row = heads[used[SPLIT]]
        heads[used[SPLIT]] = heads[used[SPLIT] + used[MASK] + 1] = -1
        used[SPLIT] += 1
        while row >= 0:
            after = rows[row, CHAIN]
            bucket = bucket_of(used, stored_key(rows, row))
            rows[row, CHAIN], heads[bucket] = heads[bucket], row
            row = after
        if used[SPLIT] > used[MASK]:
            used[MASK], used[SPLIT] = 2 * used[MASK] + 1, 0
    return new
