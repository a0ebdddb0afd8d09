"""Norms, residual additions and gated units: passes over rows of at most a few thousand values.

Arithmetic is in float32; results are rounded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import LANES, inlined
from .vector import (
    FULL,
    add,
    fma,
    larger,
    load_some,
    mul,
    rounded,
    sigmoid,
    smaller,
    splat,
    store_some,
    total,
)

SILU, GELU_TANH, RELU, CLAMPED_SILU = range(4)


class RowNorm(NamedTuple):
    """RMSNorm of a row."""

    is_there: int
    weight: int  # address of float32 weights; 0: all ones
    eps: float


@inlined
def _squares(kind, row, size):
    """Returns lanes whose sum is a row's sum of squares."""
    squares = splat(np.float32(0))
    for begin in range(0, size, LANES):
        value = load_some(kind.tag, row + begin * kind.width, size - begin)
        squares = fma(value, value, squares)
    return squares


@inlined
def _inverse_rms(squares, size, eps):
    """Returns 1 / root mean square of a row."""
    return np.float32(1.0 / math.sqrt(np.float64(total(squares)) / size + eps))


@inlined
def norm_row(kind, row, norm, out, size):
    """Normalizes one row; in place if `out` is `row`."""
    _scale_row(kind, row, _squares(kind, row, size), norm, out, size)


@inlined
def _scale_row(kind, row, squares, norm, out, size):
    tag, width = kind.tag, kind.width
    factor = splat(_inverse_rms(squares, size, norm.eps))
    for begin in range(0, size, LANES):
        value = mul(load_some(tag, row + begin * width, size - begin), factor)
        if norm.weight:
            value = mul(value, load_some(FULL, norm.weight + begin * 4, size - begin))
        store_some(tag, out + begin * width, value, size - begin)


@inlined
def norm_rows(kind, rows, norm, out, num_rows, size):
    for row in range(num_rows):
        norm_row(kind, rows.start + row * rows.to_row, norm, out.start + row * out.to_row, size)


@inlined
def add_norm_rows(kind, residual, update, scale, after, before, out, num_rows, size):
    tag, width = kind.tag, kind.width
    factor = splat(np.float32(scale))
    for row in range(num_rows):
        place = residual + row * size * width
        new = update + row * size * width
        grown = factor
        if after.is_there:
            squares = _squares(kind, new, size)
            grown = mul(factor, splat(_inverse_rms(squares, size, after.eps)))
        squares = splat(np.float32(0))
        for begin in range(0, size, LANES):
            value = load_some(tag, new + begin * width, size - begin)
            if after.is_there and after.weight:
                value = mul(value, load_some(FULL, after.weight + begin * 4, size - begin))
            value = fma(value, grown, load_some(tag, place + begin * width, size - begin))
            store_some(tag, place + begin * width, value, size - begin)
            value = rounded(tag, value)
            squares = fma(value, value, squares)
        if before.is_there:
            _scale_row(kind, place, squares, before, out + row * size * width, size)


class Activation(NamedTuple):
    """The activation of a gated unit."""

    function: int
    limit: np.float32
    alpha: np.float32


@inlined
def _activated(tag, activation, first, up):
    function, limit, alpha = activation
    if function == CLAMPED_SILU:
        first = smaller(first, splat(limit))
        up = larger(smaller(up, splat(limit)), splat(-limit))
        up = add(up, splat(np.float32(1)))
        return mul(mul(up, first), sigmoid(tag, mul(first, splat(alpha))))
    if function == SILU:
        return mul(mul(first, sigmoid(tag, first)), up)
    if function == RELU:
        return mul(larger(first, splat(np.float32(0))), up)
    # tanh(x) + 1 = 2 sigmoid(2 x)
    cubic = mul(mul(first, first), mul(first, splat(np.float32(0.044715))))
    inner = mul(add(first, cubic), splat(np.float32(2 * math.sqrt(2 / math.pi))))
    return mul(mul(first, sigmoid(tag, inner)), up)


@inlined
def gate_rows(kind, activation, rows, out, to_out, num_rows, size):
    tag, width = kind.tag, kind.width
    for row in range(num_rows):
        gates = rows + row * 2 * size * width
        ups = gates + size * width
        to = out + row * to_out
        for begin in range(0, size, LANES):
            left, offset = size - begin, begin * width
            first = load_some(tag, gates + offset, left)
            up = load_some(tag, ups + offset, left)
            store_some(tag, to + offset, _activated(tag, activation, first, up), left)
