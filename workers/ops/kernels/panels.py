"""Rows times panels: the tile of products and of attention; laying panels out.

A panel holds 16 columns of a matrix for one vector of results: `[units, 16]`, where a unit is what
one lane multiplies at once, 32 bits: a pair of bfloat16 of neighbouring rows, or one float32. Four
panels are a group and lie side by side, `[units, 4, 16]`, so that a tile reads memory in its order.
Every result is one chain of additions over the units, whatever the tile: it does not depend on what
is computed beside it. bfloat16 pairs are multiplied and added by one instruction where the CPU has
it (AVX512_BF16), and as two products in float32 elsewhere.

Tiles are outer products, as in Goto and van de Geijn 2008, doi:10.1145/1356052.1356053.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from .ahead import emit_fetch
from .vector import (
    F32,
    HAS_PAIR_DOT,
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    WORDS,
    BFloat,
    constant,
    emit_call,
    emit_fma,
    emit_load,
    emit_mask,
    emit_masked_load,
    emit_masked_store,
    emit_offset,
    emit_round,
    emit_splat,
    emit_store,
    emit_widen,
    instruction,
    is_half,
)

UNIT = 4  # bytes
PANEL = 64  # bytes of a panel's row
STRIDE = 4 * PANEL  # from one unit of a group to the next
GROUP = 4 * LANES  # columns
QUAD = 4  # units that are transposed at once

__all__ = [
    "GROUP",
    "PANEL",
    "QUAD",
    "STRIDE",
    "UNIT",
    "emit_indices",
    "emit_products",
    "emit_quad",
    "emit_zip",
    "panel_tile",
    "transpose_quad",
    "zip_rows",
]


def panel_tile(num_rows: int, num_panels: int, fetches: bool = True) -> Any:
    """A tile of `num_rows` by `num_panels` panels over `length` units.

    `tile(kind, result, row, row_stride, count, group, group_stride, ahead, length, out,
    out_stride, num_columns, bias, adds)`: addresses and strides in bytes; rows beyond `count` are
    the last one again; what lies `ahead` of the groups is fetched meanwhile, if the tile `fetches`
    at all; `result` tags what is written, of which there are `num_columns` per row; `bias` is the
    address of the columns' biases, of the tag's type, or 0; with `adds`, which takes a float32
    `result`, chains go on from what `out` holds.
    """

    @instruction
    def tile(
        _: Any, kind: Any, result: Any, row: Any, row_stride: Any, count: Any, group: Any,
        group_stride: Any, ahead: Any, length: Any, out: Any, out_stride: Any, num_columns: Any,
        bias: Any, adds: Any,
    ) -> Any:  # fmt: skip
        half, rounds = is_half(kind), is_half(result)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, _, row, to_row, count, group, to_group, ahead, length, *more = arguments
            out, to, columns, bias, adds = more
            indices = emit_indices(builder, count, num_rows)
            rows = [builder.add(row, builder.mul(to_row, index)) for index in indices]
            panels = [
                builder.add(
                    emit_offset(builder, group, to_group, index // 4), I64(index % 4 * PANEL)
                )
                for index in range(num_panels)
            ]
            masks = [
                emit_mask(builder, builder.sub(columns, I64(index * LANES)), LANES)
                for index in range(num_panels)
            ]
            width = 2 if rounds else 4
            stored = ir.VectorType(I16, LANES) if rounds else VECTOR
            zero = constant(VECTOR, 0.0)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in panels] for _ in rows]
            for total in (total for line in totals for total in line):
                builder.store(zero, total)

            def place_of(index: int, at: int) -> Any:
                line = builder.add(out, builder.mul(to, indices[index]))
                return builder.add(line, I64(at * LANES * width))

            if not rounds:
                with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
                    for index, line in enumerate(totals):
                        for at, total in enumerate(line):
                            place = place_of(index, at)
                            builder.store(
                                emit_masked_load(builder, place, VECTOR, 4, masks[at]), total
                            )
            _emit_panels(builder, half, rows, panels, ahead if fetches else None, length, totals)
            shifts = [cgutils.alloca_once_value(builder, zero) for _ in panels]
            for shift in shifts:
                builder.store(zero, shift)
            with builder.if_then(builder.icmp_signed("!=", bias, I64(0))):
                for at, shift in enumerate(shifts):
                    place = builder.add(bias, I64(at * LANES * width))
                    values = emit_masked_load(builder, place, stored, width, masks[at])
                    builder.store(emit_widen(builder, values) if rounds else values, shift)
            for index, line in enumerate(totals):
                for at, total in enumerate(line):
                    value = builder.fadd(builder.load(total), builder.load(shifts[at]))
                    value = emit_round(builder, value) if rounds else value
                    emit_masked_store(builder, value, place_of(index, at), width, masks[at])
            return context.get_dummy_value()

        return types.void(kind, result, *[types.int64] * 12), emit

    return tile


def emit_indices(builder: Any, count: Any, num_rows: int) -> list[Any]:
    """Numbers of rows; those beyond `count` are the last one again."""
    last = builder.sub(count, I64(1))
    return [
        builder.select(builder.icmp_signed("<", I64(index), count), I64(index), last)
        for index in range(num_rows)
    ]


def _emit_pair_dot(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right of bfloat16 pairs, lane by lane."""
    if HAS_PAIR_DOT:
        kind = ir.VectorType(BFloat(), 2 * LANES)
        pairs = (builder.bitcast(side, kind) for side in (left, right))
        return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, total, *pairs)
    words = [builder.bitcast(side, WORDS) for side in (left, right)]
    low = [builder.shl(side, constant(WORDS, 16)) for side in words]
    high = [builder.and_(side, constant(WORDS, 0xFFFF0000)) for side in words]
    for one, other in (low, high):
        one, other = builder.bitcast(one, VECTOR), builder.bitcast(other, VECTOR)
        total = emit_fma(builder, one, other, total)
    return total


def _emit_panels(
    builder: Any,
    half: bool,
    rows: Sequence[Any],  # addresses
    panels: Sequence[Any],  # addresses
    ahead: Any | None,
    length: Any,
    totals: Sequence[Sequence[Any]],  # places, by row and panel
) -> None:
    """Adds every row's products with every panel to the totals."""
    kept = WORDS if half else VECTOR
    with cgutils.for_range(builder, length) as loop:
        offset = builder.mul(loop.index, I64(STRIDE))
        places = [builder.add(each, offset) for each in panels]
        right = [emit_load(builder, place, kept, 4) for place in places]
        for place in places if ahead is not None else ():
            emit_fetch(builder, builder.add(place, ahead))
        step = builder.mul(loop.index, I64(UNIT))
        for address, line in zip(rows, totals, strict=True):
            emit_products(builder, half, builder.add(address, step), right, line)


def emit_products(
    builder: Any,
    half: bool,
    place: Any,  # address of a unit
    right: Sequence[Any],  # vectors of units
    totals: Sequence[Any],  # places of vectors
) -> None:
    """Adds a unit's products with every vector to the totals."""
    left = emit_splat(builder, emit_load(builder, place, I32 if half else F32, 2))
    for total, values in zip(totals, right, strict=True):
        added = builder.load(total)
        if half:
            added = _emit_pair_dot(builder, added, left, values)
        else:
            added = emit_fma(builder, left, values, added)
        builder.store(added, total)


@instruction
def transpose_quad(_: Any, source: Any, to_row: Any, slots: Any, out: Any) -> Any:
    """4 units of 16 rows become 4 rows of a group's panel.

    `transpose_quad(source, to_row, slots, out)`: `slots` is the address of the rows' numbers,
    int64, by which they lie behind `source`.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, to_row, slots, out = arguments
        for index, unit in enumerate(emit_quad(builder, source, to_row, slots)):
            emit_store(builder, unit, builder.add(out, I64(index * STRIDE)), 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


def emit_quad(builder: Any, source: Any, to_row: Any, slots: Any) -> list[Any]:
    """4 units of 16 rows as 4 vectors of float32."""
    four = ir.VectorType(F32, 4)

    def row(index: int) -> Any:
        slot = emit_load(builder, builder.add(slots, I64(index * 8)), I64, 8)
        return emit_load(builder, builder.add(source, builder.mul(slot, to_row)), four, 2)

    def mixed(left: Any, right: Any, lanes: Sequence[int]) -> Any:
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return builder.shuffle_vector(left, right, order)

    # Row i beside rows i + 4, i + 8 and i + 12, so that units change places within quarters.
    lines = []
    for index in range(4):
        halves = [mixed(row(first), row(first + 4), range(8)) for first in (index, index + 8)]
        lines.append(mixed(halves[0], halves[1], range(16)))
    low, high = (_quarters(first, first + 1) for first in (0, 2))
    pairs = [mixed(lines[one], lines[one + 1], part) for one in (0, 2) for part in (low, high)]
    low, high = (
        [4 * part + at for part in range(4) for at in order]
        for order in ((0, 1, LANES, LANES + 1), (2, 3, LANES + 2, LANES + 3))
    )
    return [mixed(pairs[at], pairs[at + 2], part) for at in (0, 1) for part in (low, high)]


def _quarters(first: int, second: int) -> list[int]:
    """Of every quarter of two vectors, their elements `first` and `second`, in turns."""
    return [
        4 * part + at + side for part in range(4) for at in (first, second) for side in (0, LANES)
    ]


@instruction
def zip_rows(_: Any, kind: Any, first: Any, second: Any, count: Any, out: Any) -> Any:
    """A row of a panel from up to 16 columns of a row, with those of the next for bfloat16.

    `zip_rows(kind, first, second, count, out)`: of float32 the first row alone is read.
    """
    half = is_half(kind)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, first, second, count, out = arguments
        mask = emit_mask(builder, count, LANES)
        emit_store(builder, emit_zip(builder, half, first, second, mask), out, 4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), emit


def emit_zip(builder: Any, half: bool, first: Any, second: Any, mask: Any) -> Any:
    """16 units of one row of float32, or of two rows of bfloat16."""
    if not half:
        return emit_masked_load(builder, first, VECTOR, 4, mask)
    halves = ir.VectorType(I16, LANES)
    low, high = (
        builder.zext(emit_masked_load(builder, each, halves, 2, mask), WORDS)
        for each in (first, second)
    )
    return builder.or_(low, builder.shl(high, constant(WORDS, 16)))
