"""The chosen experts' sum: products over rows sorted by expert, whose weights lie in panels.

Every row's experts are added in the order of their numbers, in float32, so that a row's bits do not
depend on the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import Matrix, inlined
from .elementwise import gate_rows
from .panels import GROUP, SCRATCH_BYTES, STRIDE, UNIT, product_rows
from .prepare import item64
from .vector import FULL, LANES, fma, load_one, load_some, mul, splat, store_some

ROWS = 96  # that an expert computes at once


class Weights(NamedTuple):
    """All experts' weights in groups of panels, one expert behind the other."""

    hidden_size: int
    width: int  # of the gated unit
    gate_up: int
    gate_up_bias: int  # 0: none
    down: int
    down_bias: int  # 0: none
    scores_input: int  # the score multiplies what an expert reads


class Pairs(NamedTuple):
    """Rows with their experts: addresses of arrays."""

    num_pairs: int
    top: int  # experts of a row
    chosen: int  # int64 [num_rows, top]
    scores: int  # float32 [num_rows, top]
    order: int  # int64, numbers of the pairs expert by expert


def mixing_bytes(num_rows: int, weights: Weights, value_bytes: int) -> int:
    """Scratch memory of `mix_rows`."""
    parts = ROWS * (2 * weights.hidden_size + 3 * weights.width) * value_bytes
    return num_rows * weights.hidden_size * 4 + parts + SCRATCH_BYTES


@inlined
def _add_scaled(kind, source, factor, sums, size):
    """sums += factor * a row of values."""
    for at in range(0, size, LANES):
        value = load_some(kind.tag, source + at * kind.width, size - at)
        value = fma(value, splat(factor), load_some(FULL, sums + at * 4, size - at))
        store_some(FULL, sums + at * 4, value, size - at)


@inlined
def _put_scaled(source_kind, source, factor, kind, target, size):
    """target = factor * a row of values."""
    for at in range(0, size, LANES):
        value = load_some(source_kind.tag, source + at * source_kind.width, size - at)
        store_some(kind.tag, target + at * kind.width, mul(value, splat(factor)), size - at)


@inlined
def mix_rows(kind, wide, activation, states, num_rows, pairs, weights, out, scratch):
    """out = sum of score * down(gate(gate_up(row))) over a row's experts; rows lie contiguous.

    `wide` is float32's kind.
    """
    size, inner_size, one = weights.hidden_size, weights.width, np.float32(1)
    row_bytes, unit_bytes = size * kind.width, inner_size * kind.width
    read = scratch + num_rows * size * 4
    given = read + ROWS * row_bytes
    inner = given + ROWS * row_bytes
    gated = inner + ROWS * 2 * unit_bytes
    for row in range(num_rows):
        _put_scaled(
            kind, states + row * row_bytes, np.float32(0), wide, scratch + row * size * 4, size
        )
    begin = 0
    while begin < pairs.num_pairs:
        expert = item64(pairs.chosen, item64(pairs.order, begin))
        end = begin
        while end < min(begin + ROWS, pairs.num_pairs):
            pair = item64(pairs.order, end)
            if item64(pairs.chosen, pair) != expert:
                break
            factor = load_one(FULL, pairs.scores + pair * 4) if weights.scores_input else one
            source, target = (
                states + pair // pairs.top * row_bytes,
                read + (end - begin) * row_bytes,
            )
            _put_scaled(kind, source, factor, kind, target, size)
            end += 1
        count = end - begin
        for is_down in range(2):  # one copy of the code of products
            rows, columns, length = Matrix(read, row_bytes), 2 * inner_size, row_bytes // UNIT
            first, bias, to = weights.gate_up, weights.gate_up_bias, inner
            if is_down:
                rows, columns, length = Matrix(gated, unit_bytes), size, unit_bytes // UNIT
                first, bias, to = weights.down, weights.down_bias, given
                gate_rows(kind, activation, inner, gated, count, inner_size)
            panels = first + expert * ((columns + GROUP - 1) // GROUP * length * STRIDE)
            shift = bias + expert * columns * kind.width if bias else 0
            written = Matrix(to, columns * kind.width)
            product_scratch = gated + ROWS * unit_bytes
            product_rows(
                kind, rows, count, panels, shift, written, columns, length, product_scratch
            )
        for index in range(count):
            pair = item64(pairs.order, begin + index)
            factor = one if weights.scores_input else load_one(FULL, pairs.scores + pair * 4)
            sums = scratch + pair // pairs.top * size * 4
            _add_scaled(kind, given + index * row_bytes, factor, sums, size)
        begin = end
    for row in range(num_rows):
        _put_scaled(wide, scratch + row * size * 4, one, kind, out + row * row_bytes, size)
