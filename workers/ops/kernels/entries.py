"""The kernels that are called, compiled for one type of values when they are first wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from . import FLOAT, INT, VOID, Kind, Matrix, compiled
from .attend import attend_step
from .elementwise import Activation, RowNorm, add_norm_rows, gate_rows, norm_rows
from .prepare import Angles, Cache, prepare_rows, read_layer, read_step
from .product import product_rows
from .vector import FULL, HALF

Kernel = Callable[..., None]


class Kernels(NamedTuple):
    """Of one type of values."""

    width: int  # bytes of a value
    product: Kernel
    norm: Kernel
    add_norm: Kernel
    gate: Kernel
    prepare: Kernel
    attend: Kernel


@cache
def bfloat16_kernels() -> Kernels:
    return _compile(HALF, 2)


@cache
def float32_kernels() -> Kernels:
    return _compile(FULL, 4)


def _compile(tag: np.generic, width: int) -> Kernels:
    kind = Kind(tag, width)
    if compiled.is_taken("product"):  # the other half, beside the process that has begun
        _attention(kind)
    return Kernels(width, *_products(kind), *_elementwise(kind), *_attention(kind))


def _products(kind: Kind) -> tuple[Kernel]:
    @compiled(VOID, *[INT] * 10)
    def product(rows, to_row, weight, bias, out, to_out, num_rows, num_columns, length, scratch):
        """out = rows @ weight.T + bias; a bias of 0 is none."""
        read, written = Matrix(rows, to_row), Matrix(out, to_out)
        product_rows(kind, read, num_rows, weight, bias, written, num_columns, length, scratch)

    return (product,)


def _elementwise(kind: Kind) -> tuple[Kernel, Kernel, Kernel]:
    @compiled(VOID, *[INT] * 7, FLOAT)
    def norm(rows, to_row, weight, out, to_out, num_rows, size, eps):
        """RMSNorm of every row; a weight of 0 is none."""
        how = RowNorm(1, weight, eps)
        norm_rows(kind, Matrix(rows, to_row), how, Matrix(out, to_out), num_rows, size)

    @compiled(VOID, INT, INT, FLOAT, INT, INT, FLOAT, INT, INT, FLOAT, INT, INT, INT)
    def add_norm(
        residual, update, scale, has_after, after, after_eps, has_before, before, before_eps,
        out, num_rows, size,
    ):  # fmt: skip
        """residual += scale * after(update); out = before(residual)."""
        first = RowNorm(has_after, after, after_eps)
        last = RowNorm(has_before, before, before_eps)
        add_norm_rows(kind, residual, update, scale, first, last, out, num_rows, size)

    @compiled(VOID, *[INT] * 5, FLOAT, FLOAT)
    def gate(function, rows, out, num_rows, size, limit, alpha):
        """Gated units of rows [gates, ups]."""
        activation = Activation(function, np.float32(limit), np.float32(alpha))
        gate_rows(kind, activation, rows, out, num_rows, size)

    return norm, add_norm, gate


def _attention(kind: Kind) -> tuple[Kernel, Kernel]:
    @compiled(VOID, *[INT] * 9)
    def prepare(joined, cos, sin, temperature, step, layer, floats, keys, values):
        """Rows [queries, keys, values] in place, then keys and values into the cache."""
        angles = Angles(cos, sin)
        cache = Cache(keys, values)
        prepare_rows(
            kind, joined, angles, temperature, read_step(step), read_layer(layer, floats), cache
        )

    @compiled(VOID, *[INT] * 8)
    def attend(joined, keys, values, out, scratch, step, layer, floats):
        """Attention of every row of a step."""
        cache = Cache(keys, values)
        attend_step(kind, joined, cache, out, scratch, read_step(step), read_layer(layer, floats))

    return prepare, attend
