"""Multiplies rows by a group of panels with AMX's tiles, for bfloat16.

A tile holds 16 rows of 64 bytes: 16 rows of 16 units of the left side, 16 units of a panel of the
right side, or 16 rows of a panel of float32 results. Panels have the layout of tiles (`panels.py`),
so one copy of a weight suffices. Every result is one chain of additions over steps of 16 units,
whatever is computed with it, so its bits do not depend on the number of rows. They differ from
those of `panel_tile`, whose chain has one unit per step.

Up to 16 rows are multiplied by four panels at a time, and 32 rows by two panels, so that every
loaded value is used twice. The latter also prefetch the next group, evenly over all instructions;
up to 16 rows mostly wait for memory, and prefetching does not make them faster.
(Intel 64 and IA-32 Architectures Optimization Reference Manual, AMX.)
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from . import HAS_TILES, LANES, PANEL, STRIDE, UNIT, inlined
from .vector import (
    F32,
    I1,
    I8,
    I64,
    VECTOR,
    emit_bias,
    emit_call,
    emit_fetch,
    emit_load,
    emit_mask,
    emit_masked_store,
    emit_round,
    instruction,
    is_half,
)

ROWS = 16  # of a tile
STEP = 16  # units
_LINE = 64  # bytes of a tile's row
_LEFT, _RIGHT = (4, 5), (6, 7)  # tiles; results are 0 to 3


def _emit_tile(builder: Any, name: str, *arguments: Any) -> None:
    emit_call(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _emit_load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    place = builder.inttoptr(address, I8.as_pointer())
    _emit_tile(builder, "tileloadd64", I8(tile), place, stride)


def _emit_store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    place = builder.inttoptr(address, I8.as_pointer())
    _emit_tile(builder, "tilestored64", I8(tile), place, stride)


@instruction
def uses_tiles(kind: Any, length: Any) -> Any:
    """Returns True if tiles multiply `length` units of values of a tag."""
    able = HAS_TILES and is_half(kind)

    def emit(builder: Any, _: Any, length: Any) -> Any:
        if not able:
            return I1(0)
        rest = builder.and_(length, I64(STEP - 1))
        return builder.icmp_signed("==", rest, I64(0))

    return types.boolean(kind, types.int64), emit


@inlined
def whole_steps(kind, length):
    """Returns this number of units, rounded up to whole tiles if they are used."""
    whole = (length + STEP - 1) // STEP * STEP
    return whole if uses_tiles(kind.tag, whole) else length


@instruction
def set_tiles(num_rows: Any) -> Any:
    """Sets the rows, 1 to 16, of the tiles of the left side and of results."""

    def emit(builder: Any, num_rows: Any) -> None:
        kind = ir.VectorType(I8, 64)
        widths = [1, *[0] * 15, *[_LINE, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8]
        rows = builder.trunc(num_rows, I8)
        settings = ir.Constant(kind, widths)
        for tile in range(_RIGHT[0]):
            settings = builder.insert_element(settings, rows, ir.IntType(32)(48 + tile))
        place = cgutils.alloca_once(builder, kind)
        place.align = 64
        builder.store(settings, place).align = 64
        _emit_tile(builder, "ldtilecfg", builder.bitcast(place, I8.as_pointer()))

    return types.void(types.int64), emit


@instruction
def release_tiles() -> Any:
    """Releases the tiles, so that thread switches do not save them."""
    return types.void(), lambda b: _emit_tile(b, "tilerelease")


def amx_tile(num_lefts: int) -> Any:
    """Returns a function that multiplies 16 rows by four panels, or twice 16 rows by two.

    `tile(result, row, other, row_stride, group, steps, out, other_out, out_stride, count,
    num_columns, bias, adds, fetched, num_fetched)`: addresses and strides in bytes. `other` is the
    second 16 rows, which may overlap the first ones. `count` rows are written, as in `panel_tile`.
    Twice 16 rows fetch `num_fetched` lines in each step, from `fetched` on.
    """
    num_panels = 4 // num_lefts

    @instruction
    def tile(
        result: Any, row: Any, other: Any, row_stride: Any, group: Any, steps: Any,
        out: Any, other_out: Any, out_stride: Any, count: Any, num_columns: Any, bias: Any,
        adds: Any, fetched: Any, num_fetched: Any,
    ) -> Any:  # fmt: skip
        rounds = is_half(result)

        def emit(builder: Any, *arguments: Any) -> None:
            _, row, other, to_row, group, steps, out, other_out, to_out, count, *more = arguments
            columns, bias, adds, fetched, num_fetched = more
            rows, outs = (row, other)[:num_lefts], (out, other_out)[:num_lefts]
            tiles = [(left, at, left * num_panels + at) for at in range(num_panels)
                     for left in range(num_lefts)]  # fmt: skip

            def used(at: int) -> Any:
                return builder.icmp_signed(">", columns, I64(at * LANES))

            for left, at, number in tiles:
                _emit_tile(builder, "tilezero", I8(number))
                if rounds:
                    continue
                with builder.if_then(
                    builder.and_(builder.icmp_signed("!=", adds, I64(0)), used(at))
                ):
                    place = builder.add(outs[left], I64(at * _LINE))
                    _emit_load(builder, number, place, to_out)
            with cgutils.for_range(builder, steps) as loop:
                step = builder.mul(loop.index, I64(_LINE))
                for left, each in zip(_LEFT, rows, strict=False):
                    _emit_load(builder, left, builder.add(each, step), to_row)
                first = builder.add(group, builder.mul(loop.index, I64(STEP * STRIDE)))
                if num_lefts == 2:
                    done = builder.mul(loop.index, num_fetched)
                    with cgutils.for_range(builder, num_fetched) as lines:
                        line = builder.mul(builder.add(done, lines.index), I64(_LINE))
                        emit_fetch(builder, builder.add(fetched, line))
                for at in range(num_panels):
                    right = _RIGHT[at % 2]
                    place = builder.add(first, I64(at * PANEL))

                    def multiply(at: int = at, right: int = right, place: Any = place) -> None:
                        _emit_load(builder, right, place, I64(STRIDE))
                        for left in range(num_lefts):
                            number = left * num_panels + at
                            names = (I8(number), I8(_LEFT[left]), I8(right))
                            _emit_tile(builder, "tdpbf16ps", *names)

                    if at == 0:
                        multiply()
                    else:
                        with builder.if_then(used(at), likely=True):
                            multiply()
            if rounds:
                _emit_rounded(builder, tiles, outs, to_out, count, columns, bias)
                return
            for left, at, number in tiles:
                with builder.if_then(used(at)):
                    place = builder.add(outs[left], I64(at * _LINE))
                    _emit_store(builder, number, place, to_out)

        return types.void(result, *[types.int64] * 14), emit

    return tile


def _emit_rounded(
    builder: Any, tiles: Any, outs: Any, to_out: Any, count: Any, columns: Any, bias: Any
) -> None:
    """Emits results with biases, rounded, through memory on the stack."""
    num_panels = len(tiles) // len(outs)
    to_sums = num_panels * _LINE
    sums = cgutils.alloca_once(builder, ir.ArrayType(F32, len(outs) * ROWS * num_panels * LANES))
    sums.align = 64
    start = builder.ptrtoint(sums, I64)
    for left, at, number in tiles:
        place = builder.add(start, I64(left * ROWS * to_sums + at * _LINE))
        _emit_store(builder, number, place, I64(to_sums))
    lefts = [builder.sub(columns, I64(at * LANES)) for at in range(num_panels)]
    masks = [emit_mask(builder, left, LANES) for left in lefts]
    shifts = [emit_bias(builder, bias, True, at, mask) for at, mask in enumerate(masks)]
    for left, out in enumerate(outs):
        source = builder.add(start, I64(left * ROWS * to_sums))
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(source, builder.mul(loop.index, I64(to_sums)))
            target = builder.add(out, builder.mul(loop.index, to_out))
            for at in range(num_panels):
                value = emit_load(builder, builder.add(line, I64(at * _LINE)), VECTOR, 64)
                value = emit_round(builder, builder.fadd(value, shifts[at]))
                place = builder.add(target, I64(at * LANES * 2))
                emit_masked_store(builder, value, place, 2, masks[at])


def _score_panels(num_steps: int) -> Any:
    """Returns a function for dots of the tiles' rows with panels of keys; 0: any number of steps.

    `score(queries, to_query, keys, steps, num_panels, out, to_out)`: queries of few steps stay in
    tiles.
    """

    @instruction
    def score(
        queries: Any, to_query: Any, keys: Any, steps: Any, num_panels: Any, out: Any,
        to_out: Any,
    ) -> Any:  # fmt: skip
        def emit(
            builder: Any, queries: Any, to_query: Any, keys: Any, steps: Any, num_panels: Any,
            out: Any, to_out: Any,
        ) -> None:  # fmt: skip
            to_group = builder.mul(steps, I64(STEP * STRIDE))

            def left(tile: int, step: Any) -> None:
                place = builder.add(queries, builder.mul(step, I64(_LINE)))
                _emit_load(builder, tile, place, to_query)

            def multiply(panel: Any, step: Any, by: int, right: int) -> None:
                place = builder.add(panel, builder.mul(step, I64(STEP * STRIDE)))
                _emit_load(builder, right, place, I64(STRIDE))
                _emit_tile(builder, "tdpbf16ps", I8(0), I8(by), I8(right))

            for step in range(num_steps):
                left(_LEFT[step], I64(step))
            with cgutils.for_range(builder, num_panels) as loop:
                group = builder.mul(builder.lshr(loop.index, I64(2)), to_group)
                at = builder.mul(builder.and_(loop.index, I64(3)), I64(PANEL))
                panel = builder.add(keys, builder.add(group, at))
                _emit_tile(builder, "tilezero", I8(0))
                for step in range(num_steps):
                    multiply(panel, I64(step), _LEFT[step], _RIGHT[step])
                if not num_steps:
                    with cgutils.for_range(builder, steps) as inner:
                        left(_LEFT[0], inner.index)
                        multiply(panel, inner.index, _LEFT[0], _RIGHT[0])
                _emit_store(
                    builder, 0, builder.add(out, builder.mul(loop.index, I64(_LINE))), to_out
                )

        return types.void(*[types.int64] * 7), emit

    return score


SCORE_ONE, SCORE_TWO, SCORE_ANY = (_score_panels(num_steps) for num_steps in (1, 2, 0))


@inlined
def score_panels_of(rows, keys, steps, num_panels, out):
    """Computes dots of a tile's rows with panels of keys, over whole steps of units."""
    x, to_x, o, to_o = rows.start, rows.to_row, out.start, out.to_row
    if steps == 1:
        SCORE_ONE(x, to_x, keys, steps, num_panels, o, to_o)
    elif steps == 2:
        SCORE_TWO(x, to_x, keys, steps, num_panels, o, to_o)
    else:
        SCORE_ANY(x, to_x, keys, steps, num_panels, o, to_o)


FOUR_PANELS, TWO_PANELS = amx_tile(1), amx_tile(2)


_LINES = STEP * STRIDE // _LINE  # of a group's step
_NEAR = 3 << 18  # bytes of rows that stay in the second cache while groups of panels pass


@inlined
def rows_nearby(num_rows, length):
    """Returns how many rows, at least one, are multiplied by all groups before the next ones."""
    most = max(_NEAR // (length * UNIT), 4 * ROWS)
    num_parts = max((num_rows + most - 1) // most, 1)
    share = (num_rows + num_parts - 1) // num_parts
    return max((share + 2 * ROWS - 1) // (2 * ROWS) * (2 * ROWS), 1)


@inlined
def tiled_rows(result, rows, num_rows, group, ahead, length, out, num_columns, bias, adds):
    """All rows, of which there may be none, with a group of panels, over whole steps of units.

    `set_tiles` was called for as many rows, or 16. More than 16 rows fetch the next group, if there
    is anything `ahead`.
    """
    if num_rows == 0:
        return
    tag, steps, n, to_x, to_o = result.tag, length // STEP, num_rows, rows.to_row, out.to_row
    x, o = rows.start, out.start
    if n <= ROWS:
        FOUR_PANELS(tag, x, x, to_x, group, steps, o, o, to_o, n, num_columns, bias, adds, 0, 0)
        return
    done, fetched = 0, group + length * STRIDE
    num_fetched = (_LINES - 1) // (2 * ((n + ROWS - 1) // (2 * ROWS))) + 1 if ahead else 0
    while n - done > ROWS:
        # The last rows of an odd number are some of the first ones too, and the same.
        first, second = done, min(done + ROWS, n - ROWS)
        for half in range(2):
            column = half * 2 * LANES
            if column < num_columns:
                to = o + column * result.width
                TWO_PANELS(
                    tag, x + first * to_x, x + second * to_x, to_x, group + half * 2 * PANEL,
                    steps, to + first * to_o, to + second * to_o, to_o, ROWS, num_columns - column,
                    bias + column * result.width if bias else 0, adds, fetched, num_fetched,
                )  # fmt: skip
                fetched += steps * num_fetched * _LINE
        done += 2 * ROWS
    if done < n and adds:  # to what is written once
        set_tiles(n - done)
        x, o = x + done * to_x, o + done * to_o
        FOUR_PANELS(
            tag, x, x, to_x, group, steps, o, o, to_o, n - done, num_columns, bias, adds, 0, 0
        )
        set_tiles(ROWS)
    elif done < n:
        x, o = x + (n - ROWS) * to_x, o + (n - ROWS) * to_o
        FOUR_PANELS(tag, x, x, to_x, group, steps, o, o, to_o, ROWS, num_columns, bias, adds, 0, 0)
