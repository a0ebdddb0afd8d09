"""Multiplies rows by panels, for products and attention, and lays out panels.

A panel holds 16 columns of a matrix for one vector of results: `[units, 16]`. A unit is what one
lane multiplies at once, 32 bits: a pair of bfloat16 of adjacent rows, or one float32. Four panels
form a group and are interleaved, `[units, 4, 16]`, so that a tile reads memory in order. Every
result is one chain of additions over the units, whatever the tile, so it does not depend on what is
computed with it. bfloat16 pairs are multiplied and added by one instruction if the CPU has it
(AVX512_BF16), and as two products in float32 otherwise.

Tiles are outer products, as in Goto and van de Geijn 2008, doi:10.1145/1356052.1356053.

This module also sums the chosen experts of a mixture: products over rows sorted by expert, with
weights in panels. Every row's experts are added in the order of their numbers, in float32, so a
row's bits do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from torch import Tensor
from torch.nn.functional import pad

from . import GROUP, LANES, PANEL, STRIDE, UNIT, Kind, Matrix, inlined, shared
from .amx import ROWS as TILE_ROWS
from .amx import release_tiles, rows_nearby, set_tiles, tiled_rows, uses_tiles
from .elementwise import gate_rows
from .prepare import item64
from .vector import (
    F32,
    FULL,
    HALF,
    HAS_PAIR_DOT,
    I16,
    I32,
    I64,
    VECTOR,
    WORDS,
    BFloat,
    add,
    constant,
    emit_bias,
    emit_call,
    emit_fetch,
    emit_fma,
    emit_load,
    emit_mask,
    emit_masked_load,
    emit_masked_store,
    emit_offset,
    emit_places,
    emit_round,
    emit_splat,
    emit_store,
    fma,
    instruction,
    is_half,
    load,
    load_one,
    load_some,
    mul,
    splat,
    store_some,
)

QUAD = 4  # units that are transposed at once


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
        kind: Any, result: Any, row: Any, row_stride: Any, count: Any, group: Any,
        group_stride: Any, ahead: Any, length: Any, out: Any, out_stride: Any, num_columns: Any,
        bias: Any, adds: Any,
    ) -> Any:  # fmt: skip
        half, rounds = is_half(kind), is_half(result)

        def emit(builder: Any, *arguments: Any) -> None:
            _, _, row, to_row, count, group, to_group, ahead, length, *more = arguments
            out, to, columns, bias, adds = more
            rows = emit_rows(builder, row, to_row, count, num_rows)
            targets = emit_rows(builder, out, to, count, num_rows)
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
            totals = [emit_places(builder, num_panels) for _ in rows]

            def place_of(index: int, at: int) -> Any:
                return builder.add(targets[index], I64(at * LANES * width))

            if not rounds:
                with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
                    for index, line in enumerate(totals):
                        for at, total in enumerate(line):
                            place = place_of(index, at)
                            builder.store(
                                emit_masked_load(builder, place, VECTOR, 4, masks[at]), total
                            )
            _emit_panels(builder, half, rows, panels, ahead if fetches else None, length, totals)
            shifts = [emit_bias(builder, bias, rounds, at, mask) for at, mask in enumerate(masks)]
            for index, line in enumerate(totals):
                for at, total in enumerate(line):
                    value = builder.fadd(builder.load(total), shifts[at])
                    value = emit_round(builder, value) if rounds else value
                    emit_masked_store(builder, value, place_of(index, at), width, masks[at])

        return types.void(kind, result, *[types.int64] * 12), emit

    return tile


def emit_rows(builder: Any, start: Any, to_row: Any, count: Any, num_rows: int) -> list[Any]:
    """Returns addresses of rows; those beyond `count` repeat the last one."""
    last, rows = builder.sub(count, I64(1)), []
    for index in range(num_rows):
        own = builder.select(builder.icmp_signed("<", I64(index), count), I64(index), last)
        rows.append(builder.add(start, builder.mul(to_row, own)))
    return rows


def _emit_pair_dot(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Computes total + left * right of bfloat16 pairs, lane by lane."""
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
def transpose_quad(source: Any, to_row: Any, slots: Any, out: Any) -> Any:
    """Transposes 4 units of 16 rows to 4 rows of a group's panel.

    `transpose_quad(source, to_row, slots, out)`: `slots` is the address of the rows' indices,
    int64, relative to `source`.
    """

    def emit(builder: Any, source: Any, to_row: Any, slots: Any, out: Any) -> None:
        for index, unit in enumerate(emit_quad(builder, source, to_row, slots)):
            emit_store(builder, unit, builder.add(out, I64(index * STRIDE)), 4)

    return types.void(*[types.int64] * 4), emit


def emit_quad(builder: Any, source: Any, to_row: Any, slots: Any) -> list[Any]:
    """Returns 4 units of 16 rows as 4 vectors of float32."""
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
    """Returns the elements `first` and `second` of every quarter of two vectors, alternating."""
    return [
        4 * part + at + side for part in range(4) for at in (first, second) for side in (0, LANES)
    ]


@instruction
def zip_rows(kind: Any, first: Any, second: Any, count: Any, out: Any) -> Any:
    """Writes a row of a panel from up to 16 columns of a row, or of two rows for bfloat16.

    `zip_rows(kind, first, second, count, out)`: for float32, only the first row is read.
    """
    half = is_half(kind)

    def emit(builder: Any, _: Any, first: Any, second: Any, count: Any, out: Any) -> None:
        mask = emit_mask(builder, count, LANES)
        emit_store(builder, emit_zip(builder, half, first, second, mask), out, 4)

    return types.void(kind, *[types.int64] * 4), emit


def emit_zip(builder: Any, half: bool, first: Any, second: Any, mask: Any) -> Any:
    """Returns 16 units of one row of float32, or of two rows of bfloat16."""
    if not half:
        return emit_masked_load(builder, first, VECTOR, 4, mask)
    halves = ir.VectorType(I16, LANES)
    low, high = (
        builder.zext(emit_masked_load(builder, each, halves, 2, mask), WORDS)
        for each in (first, second)
    )
    return builder.or_(low, builder.shl(high, constant(WORDS, 16)))


# -- products with a weight laid out in groups of panels, one group at a time
#
# A group is read by all rows before the next: whole, if there are up to six, else in two halves by
# up to twelve rows at a time. The first rows of either fetch what lies 16 kB behind, so that up to
# twelve rows wait for memory no more often than one. Where a group would not stay in the second
# level of cache, it is read in sections, and sums between sections lie in `scratch`. With AMX as
# many rows pass all groups together as stay in that cache (`amx.py`). A row's results do not depend
# on how many rows there are.

ONE, TWO, THREE, FOUR, FIVE, SIX = (panel_tile(rows, 4) for rows in range(1, 7))
EIGHT, TEN, TWELVE = (panel_tile(rows, 2) for rows in (8, 10, 12))
ONE_WIDE = panel_tile(1, 8)
FOUR_BY_THREE, EIGHT_BY_THREE = (panel_tile(rows, 3, fetches=False) for rows in (4, 8))
AHEAD = 16384  # bytes
SECTION = 2048  # units: half a megabyte of a group
FLOATS = Kind(FULL, 4)
SCRATCH_ROWS = 48
SCRATCH_BYTES = SCRATCH_ROWS * GROUP * 4


@inlined
def _half_rows(kind, result, rows, num_rows, group, ahead, length, out, columns, bias, adds):
    """Multiplies all rows by two panels of a group."""
    tag, into, done = kind.tag, result.tag, 0
    while done < num_rows:
        left = num_rows - done
        n = 12 if left > 18 else left if left <= 12 else (left + 1) // 2
        x, to_x = rows.start + done * rows.to_row, rows.to_row
        o, to_o = out.start + done * out.to_row, out.to_row
        if n <= 8:
            EIGHT(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, columns, bias, adds)
        elif n <= 10:
            TEN(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, columns, bias, adds)
        else:
            TWELVE(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, columns, bias, adds)
        done += n
        ahead = 0


@inlined
def _three_panels(kind, result, rows, num_rows, group, length, out, columns, bias, adds):
    """Multiplies all rows by the first three panels of a last group; nothing is prefetched."""
    tag, into, done = kind.tag, result.tag, 0
    while done < num_rows:
        x, to_x = rows.start + done * rows.to_row, rows.to_row
        o, to_o = out.start + done * out.to_row, out.to_row
        n = min(num_rows - done, 8)
        if n <= 4:
            FOUR_BY_THREE(tag, into, x, to_x, n, group, 0, 0, length, o, to_o, columns, bias, adds)
        else:
            EIGHT_BY_THREE(tag, into, x, to_x, n, group, 0, 0, length, o, to_o, columns, bias, adds)
        done += n


@shared
def group_rows(kind, result, rows, num_rows, group, ahead, length, out, num_columns, bias, adds):
    """Multiplies all rows by a group of panels; `begin_tiles` must have been called."""
    tag, into, n = kind.tag, result.tag, num_rows
    three = 2 * LANES < num_columns <= 3 * LANES  # heads of 40 or 48 dimensions
    x, to_x, o, to_o = rows.start, rows.to_row, out.start, out.to_row
    if uses_tiles(tag, length):
        tiled_rows(result, rows, n, group, ahead, length, out, num_columns, bias, adds)
    elif n == 1:
        ONE(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, num_columns, bias, adds)
    elif n == 2:
        TWO(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, num_columns, bias, adds)
    elif three and (n == 3 or n == 4 or n > 6):
        _three_panels(kind, result, rows, n, group, length, out, num_columns, bias, adds)
    elif n == 3:
        THREE(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, num_columns, bias, adds)
    elif n == 4:
        FOUR(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, num_columns, bias, adds)
    elif n == 5:
        FIVE(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, num_columns, bias, adds)
    elif n == 6:
        SIX(tag, into, x, to_x, n, group, 0, ahead, length, o, to_o, num_columns, bias, adds)
    else:
        for half in range(2):
            first = half * GROUP // 2
            if first < num_columns:
                to = Matrix(out.start + first * result.width, out.to_row)
                shift = bias + first * result.width if bias else 0
                panels = group + half * 2 * PANEL
                left = num_columns - first
                _half_rows(kind, result, rows, n, panels, ahead, length, to, left, shift, adds)


@inlined
def begin_tiles(kind, num_rows, length):
    """Prepares `group_rows` for this number of rows and units, and later groups."""
    if uses_tiles(kind.tag, length):
        set_tiles(max(min(num_rows, TILE_ROWS), 1))


@inlined
def end_tiles(kind):
    if uses_tiles(kind.tag, 0):
        release_tiles()


@inlined
def product_rows(kind, rows, num_rows, weight, bias, out, num_columns, length, scratch):
    """Computes out = rows @ weight.T + bias, over `length` units; groups are consecutive."""
    most = rows_nearby(num_rows, length) if uses_tiles(kind.tag, length) else max(num_rows, 1)
    for first in range(0, num_rows, most):
        part = Matrix(rows.start + first * rows.to_row, rows.to_row)
        to_part = Matrix(out.start + first * out.to_row, out.to_row)
        count = min(most, num_rows - first)
        begin_tiles(kind, count, length)
        _all_columns(kind, part, count, weight, bias, to_part, num_columns, length, scratch)
    end_tiles(kind)


@inlined
def _all_columns(kind, rows, num_rows, weight, bias, out, num_columns, length, scratch):
    tag, to_group = kind.tag, length * STRIDE
    end = weight + (num_columns + GROUP - 1) // GROUP * to_group
    column, by_tiles = 0, uses_tiles(tag, length)
    while column < num_columns:
        shift = bias + column * kind.width if bias else 0
        group, left = weight + column // GROUP * to_group, num_columns - column
        to = Matrix(out.start + column * kind.width, out.to_row)
        ahead = AHEAD if by_tiles or group + to_group + AHEAD <= end else 0
        if num_rows == 1 and left >= 2 * GROUP and length <= SECTION and not by_tiles:
            ONE_WIDE(
                tag, tag, rows.start, 0, 1, group, to_group, ahead, length, to.start, 0, left,
                shift, 0,
            )  # fmt: skip
            column += GROUP
        elif length <= SECTION:
            group_rows(kind, kind, rows, num_rows, group, ahead, length, to, left, shift, 0)
        else:
            for first in range(0, num_rows, SCRATCH_ROWS):
                part = Matrix(rows.start + first * rows.to_row, rows.to_row)
                to_part = Matrix(to.start + first * to.to_row, to.to_row)
                count = min(SCRATCH_ROWS, num_rows - first)
                _in_sections(kind, part, count, group, ahead, length, to_part, left, shift, scratch)
        column += GROUP


@inlined
def _in_sections(kind, rows, num_rows, group, ahead, length, out, num_columns, bias, scratch):
    """Runs `group_rows` over one section of the length after another."""
    sums = Matrix(scratch, GROUP * 4)
    begin_tiles(kind, num_rows, SECTION)
    for begin in range(0, length, SECTION):
        count = min(SECTION, length - begin)
        x = Matrix(rows.start + begin * UNIT, rows.to_row)
        section, adds = group + begin * STRIDE, 1 if begin else 0
        group_rows(kind, FLOATS, x, num_rows, section, ahead, count, sums, GROUP, 0, adds)
    for row in range(num_rows):
        source, target = sums.start + row * sums.to_row, out.start + row * out.to_row
        for column in range(0, min(num_columns, GROUP), LANES):
            left = min(num_columns, GROUP) - column
            value = load(FULL, source + column * 4)
            if bias:
                value = add(value, load_some(kind.tag, bias + column * kind.width, left))
            store_some(kind.tag, target + column * kind.width, value, left)


# -- weights as they are laid out at load


def kind_of(dtype: torch.dtype) -> Kind:
    """Returns the kernels' kind of a dtype."""
    return Kind(HALF, 2) if dtype == torch.bfloat16 else Kind(FULL, 4)


def panels_of(
    weight: Tensor,  # [out_features, in_features]
) -> Tensor:  # [num_groups, units, 64, values of a unit]
    """Returns the weight's copy in panels, padded with zeros to whole units and groups."""
    per_unit = UNIT // weight.dtype.itemsize
    filled = pad(weight, (0, -weight.shape[1] % per_unit, 0, -weight.shape[0] % GROUP))
    shape = (-1, GROUP, filled.shape[1] // per_unit, per_unit)
    return filled.view(shape).permute(0, 2, 1, 3).contiguous()


ROWS = 96  # that an expert computes at once


class Weights(NamedTuple):
    """All experts' weights in groups of panels, one expert after the other."""

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
    """Returns the scratch memory of `mix_rows`."""
    parts = ROWS * (2 * weights.hidden_size + 3 * weights.width) * value_bytes
    return num_rows * weights.hidden_size * 4 + parts + SCRATCH_BYTES


@inlined
def _add_scaled(kind, source, factor, sums, size):
    """Computes sums += factor * a row of values."""
    for at in range(0, size, LANES):
        value = load_some(kind.tag, source + at * kind.width, size - at)
        value = fma(value, splat(factor), load_some(FULL, sums + at * 4, size - at))
        store_some(FULL, sums + at * 4, value, size - at)


@inlined
def _put_scaled(source_kind, source, factor, kind, target, size):
    """Computes target = factor * a row of values."""
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
                gate_rows(kind, activation, inner, gated, unit_bytes, count, inner_size)
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
