"""Products of up to four queries with a tile's keys and values where they lie, without panels.

Keys are transposed in registers, 16 of them and four units at a time; a value's columns lie in
lanes as they are. Every result is the chain of additions that panels give (`panels.py`), so that
its bits do not depend on how many queries there are.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types

from . import inlined
from .ahead import emit_fetch_lines
from .panels import GROUP, QUAD, UNIT, emit_indices, emit_products, emit_quad, emit_zip
from .vector import (
    I64,
    LANES,
    VECTOR,
    WORDS,
    constant,
    emit_load,
    emit_mask,
    emit_store,
    instruction,
    is_half,
)


def _rows(builder: Any, start: Any, to_row: Any, count: Any, num_rows: int) -> list[Any]:
    """Addresses of rows; those beyond `count` are the last one again."""
    indices = emit_indices(builder, count, num_rows)
    return [builder.add(start, builder.mul(to_row, index)) for index in indices]


def _places(builder: Any, count: int) -> list[Any]:
    return [cgutils.alloca_once_value(builder, constant(VECTOR, 0.0)) for _ in range(count)]


def score_tile(num_rows: int) -> Any:
    """Dots of up to `num_rows` queries with 16 keys.

    `tile(kind, queries, to_query, count, keys, to_key, slots, quads, out, to_out, ...)`: `slots` is
    the address of the keys' numbers, int64, by which they lie behind `keys`; the rest says
    what is fetched meanwhile (`ahead.py`).
    """

    @instruction
    def tile(
        _: Any, kind: Any, queries: Any, to_query: Any, count: Any, keys: Any, to_key: Any,
        slots: Any, quads: Any, out: Any, to_out: Any, later: Any, to_later: Any, values: Any,
        to_value: Any, next_slots: Any, first_quad: Any, bits: Any,
    ) -> Any:  # fmt: skip
        half = is_half(kind)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, queries, to_query, count, keys, to_key, slots, quads, out, to_out, *lines = arguments
            rows = _rows(builder, queries, to_query, count, num_rows)
            totals = _places(builder, num_rows)
            for total in totals:
                builder.store(constant(VECTOR, 0.0), total)
            with cgutils.for_range(builder, quads) as loop:
                emit_fetch_lines(builder, lines, loop.index)
                offset = builder.mul(loop.index, I64(QUAD * UNIT))
                units = emit_quad(builder, builder.add(keys, offset), to_key, slots)
                for index, unit in enumerate(units):
                    right = builder.bitcast(unit, WORDS) if half else unit
                    step = builder.add(offset, I64(index * UNIT))
                    for row, total in zip(rows, totals, strict=True):
                        emit_products(builder, half, builder.add(row, step), [right], [total])
            for row, total in zip(
                _rows(builder, out, to_out, count, num_rows), totals, strict=True
            ):
                emit_store(builder, builder.load(total), row, 4)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 16), emit

    return tile


def value_tile(num_rows: int, num_vectors: int) -> Any:
    """Weighted sums of values, added to what `out` holds.

    `tile(kind, weights, to_weight, count, values, to_value, slots, units, out, to_out, columns)`:
    `slots` is the address of the values' numbers, int64, by which they lie behind `values`; of
    each its first `columns` are read. Results are written in whole vectors.
    """

    @instruction
    def tile(
        _: Any, kind: Any, weights: Any, to_weight: Any, count: Any, values: Any, to_value: Any,
        slots: Any, units: Any, out: Any, to_out: Any, columns: Any,
    ) -> Any:  # fmt: skip
        half = is_half(kind)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, weights, to_weight, count, values, to_value, slots, units, *more = arguments
            out, to_out, columns = more
            rows = _rows(builder, weights, to_weight, count, num_rows)
            targets = _rows(builder, out, to_out, count, num_rows)
            shifts = [I64(index * LANES) for index in range(num_vectors)]
            masks = [emit_mask(builder, builder.sub(columns, shift), LANES) for shift in shifts]
            totals = [_places(builder, num_vectors) for _ in rows]
            for target, line in zip(targets, totals, strict=True):
                for index, total in enumerate(line):
                    place = builder.add(target, I64(index * LANES * 4))
                    builder.store(emit_load(builder, place, VECTOR, 4), total)
            per_unit = 2 if half else 1

            def value_of(unit: Any, index: int) -> Any:
                at = builder.add(builder.mul(unit, I64(per_unit * 8)), I64(index * 8))
                slot = emit_load(builder, builder.add(slots, at), I64, 8)
                return builder.add(values, builder.mul(slot, to_value))

            with cgutils.for_range(builder, units) as loop:
                first, second = value_of(loop.index, 0), value_of(loop.index, per_unit - 1)
                right = []
                for index, mask in enumerate(masks):
                    shift = I64(index * LANES * 4 // per_unit)
                    sides = builder.add(first, shift), builder.add(second, shift)
                    right.append(emit_zip(builder, half, *sides, mask))
                step = builder.mul(loop.index, I64(UNIT))
                for row, line in zip(rows, totals, strict=True):
                    emit_products(builder, half, builder.add(row, step), right, line)
            for target, line in zip(targets, totals, strict=True):
                for index, total in enumerate(line):
                    place = builder.add(target, I64(index * LANES * 4))
                    emit_store(builder, builder.load(total), place, 4)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 10), emit

    return tile


FEW = 4  # queries
SCORE = score_tile(FEW)
ADD_THREE, ADD_FOUR = (value_tile(FEW, num_vectors) for num_vectors in (3, 4))


@inlined
def are_few(kind, num_queries, dim):
    """Whether queries do without panels; their keys are whole quads of units."""
    return num_queries <= FEW and dim * kind.width % (QUAD * UNIT) == 0


@inlined
def score_few(kind, panels, queries, num_queries, keys, ahead, num_keys, dim, scores):
    """Dots with the keys of a tile, in whole vectors; memory that is read next is fetched."""
    key_size = dim * kind.width
    for first in range(0, num_keys, LANES):
        later, values = ahead.keys, ahead.values
        next_slots = ahead.slots + first * 8 if first < ahead.num_keys else 0
        SCORE(
            kind.tag, queries.start, queries.to_row, num_queries, keys.start, keys.to_row,
            panels.slots + first * 8, key_size // UNIT // QUAD, scores.start + first * 4,
            scores.to_row, later.start, later.to_row, values.start, values.to_row, next_slots,
            ahead.first_quad, ahead.bits,
        )  # fmt: skip


@inlined
def add_few(kind, panels, weights, num_queries, values, num_values, dim, results):
    """Weighted sums of the values of a tile, added to every query's, in whole vectors."""
    tag, x, to_x, n = kind.tag, weights.start, weights.to_row, num_queries
    per_unit = UNIT // kind.width
    units = (num_values + per_unit - 1) // per_unit
    for begin in range(0, dim, GROUP):
        v, to_v, slots = values.start + begin * kind.width, values.to_row, panels.slots
        o, to_o, left = results.start + begin * 4, results.to_row, dim - begin
        if left <= 3 * LANES:
            ADD_THREE(tag, x, to_x, n, v, to_v, slots, units, o, to_o, left)
        else:
            ADD_FOUR(tag, x, to_x, n, v, to_v, slots, units, o, to_o, left)
