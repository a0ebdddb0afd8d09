"""Rows times a weight in codes of four or eight bits, which stays so in memory.

A group of codes is what shares a scale: neighbouring columns of one row of the weight. Codes of 64
rows of the weight and one group lie together, unit by unit as in `panels.py`, of each the four
panels; behind them the scales of the 64 rows in float16 and, where there are such, minima with the
sign turned. A weight is code * scale - minimum, exact in float32 but for the last addition, rounded
to bfloat16: what a dequantised weight would be. So results are those of `product_rows` by that
weight, bit by bit, however many rows there are: up to twelve rows multiply units as they are
unpacked, more rows a group of panels that is unpacked for all of them.
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

from . import GROUP, INT, LANES, PANEL, STRIDE, UNIT, inlined
from .amx import uses_tiles
from .panels import SCRATCH_BYTES, emit_products, emit_rows
from .vector import (
    HALF,
    HAS_PAIR_DOT,
    I8,
    I32,
    I64,
    VECTOR,
    WORDS,
    BFloat,
    call_of,
    constant,
    emit_bias,
    emit_call,
    emit_fma,
    emit_load,
    emit_mask,
    emit_masked_store,
    emit_places,
    emit_round,
    emit_store,
    instruction,
)

FOUR, CENTRED, EIGHT = np.uint16(0), np.uint32(0), np.uint8(0)
"""Tags of codes of four bits, 0 to 15; of such less 8; and of eight bits, -128 to 127."""
PLAIN, SHIFTED = np.int8(0), np.int16(0)
"""Tags of groups without and with minima."""
PANELS = GROUP // LANES
CENTRE = 8  # of `CENTRED`


class CodedShape(NamedTuple):
    """Sizes of a weight that is laid out."""

    to_codes: int  # bytes from one group of panels to the next
    num_groups: int  # groups of codes of a row
    units: int  # of a panel in a group


def unpacked_bytes(length: int) -> int:
    """Returns the scratch memory of `coded_rows` for rows of `length` values."""
    return length // 2 * STRIDE + SCRATCH_BYTES


class _Codes:
    """What a kernel reads of a kind of codes.

    Two vectors of float32 make a unit of a panel: of the panel's first eight rows, and of its
    others, each with both columns of a unit side by side.
    """

    def __init__(self, width: Any, minima: Any) -> None:
        self.bits = 8 if width == types.uint8 else 4
        self.offset = CENTRE if width == types.uint32 else 0
        self.num_factors = 2 if minima == types.int16 else 1
        self.panel_bytes = 2 * LANES * self.bits // 8  # of a unit

    def emit_factors(self, builder: Any, tail: Any, panel: int) -> list[list[Any]]:
        """Returns scales, and minima, of both vectors of a panel's units."""
        halves = ir.VectorType(ir.HalfType(), LANES)
        found = []
        for index in range(self.num_factors):
            place = builder.add(tail, I64((index * GROUP + panel * LANES) * 2))
            row = builder.fpext(emit_load(builder, place, halves, 2), VECTOR)
            orders = [[(first + lane) // 2 for lane in range(LANES)] for first in (0, LANES)]
            found.append(
                [builder.shuffle_vector(row, row, ir.Constant(WORDS, each)) for each in orders]
            )
        return found

    def emit_unit(self, builder: Any, place: Any, factors: Sequence[Sequence[Any]]) -> Any:
        """Returns a unit of a panel in bfloat16, as in a dequantised weight's panel."""
        wide = []
        for half, number in enumerate(self._emit_numbers(builder, place)):
            if self.num_factors == 1:
                wide.append(builder.fmul(number, factors[0][half]))
            else:
                wide.append(emit_fma(builder, number, factors[0][half], factors[1][half]))
        if HAS_PAIR_DOT:
            kind = ir.VectorType(BFloat(), 2 * LANES)
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            return builder.bitcast(emit_call(builder, name, kind, wide[1], wide[0]), WORDS)
        low, high = (emit_round(builder, each) for each in wide)
        order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
        return builder.bitcast(builder.shuffle_vector(low, high, order), WORDS)

    def _emit_numbers(self, builder: Any, place: Any) -> list[Any]:
        """Returns the codes of both vectors, minus the offset."""
        part = ir.VectorType(I8, LANES)
        if self.bits == 8:
            places = (place, builder.add(place, I64(LANES)))
            signed = [builder.sext(emit_load(builder, each, part, 1), WORDS) for each in places]
            return [builder.sitofp(each, VECTOR) for each in signed]
        low = builder.zext(emit_load(builder, place, part, 1), WORDS)
        halves = (low, builder.lshr(low, constant(WORDS, 4)))
        if HAS_PAIR_DOT:  # by a table of which an index's low four bits choose
            table = ir.Constant(VECTOR, [float(code - self.offset) for code in range(LANES)])
            name = "llvm.x86.avx512.permvar.sf.512"
            return [emit_call(builder, name, VECTOR, table, each) for each in halves]
        codes = (builder.and_(each, constant(WORDS, 15)) for each in halves)
        less = constant(WORDS, self.offset)
        return [builder.sitofp(builder.sub(each, less), VECTOR) for each in codes]

    def emit_groups(self, builder: Any, codes: Any, num_groups: Any, units: Any, use: Any) -> None:
        """Calls `use` in a loop over units, with a unit's number and its vectors of all panels."""
        step_bytes = PANELS * self.panel_bytes
        code_bytes = builder.mul(units, I64(step_bytes))
        group_bytes = builder.add(code_bytes, I64(GROUP * 2 * self.num_factors))
        with cgutils.for_range(builder, num_groups) as group:
            start = builder.add(codes, builder.mul(group.index, group_bytes))
            first = builder.mul(group.index, units)
            tail = builder.add(start, code_bytes)
            factors = [self.emit_factors(builder, tail, at) for at in range(PANELS)]
            with cgutils.for_range(builder, units) as step:
                place = builder.add(start, builder.mul(step.index, I64(step_bytes)))
                found = [
                    self.emit_unit(builder, builder.add(place, I64(at * self.panel_bytes)), each)
                    for at, each in enumerate(factors)
                ]
                use(builder.add(first, step.index), found)


@instruction
def _unpack(width: Any, minima: Any, codes: Any, num_groups: Any, units: Any, out: Any) -> Any:
    """A group of panels from its codes: `unpack(width, minima, codes, num_groups, units, out)`."""
    kind = _Codes(width, minima)

    def emit(
        builder: Any, _: Any, __: Any, codes: Any, num_groups: Any, units: Any, out: Any
    ) -> None:
        def put(unit: Any, vectors: Sequence[Any]) -> None:
            place = builder.add(out, builder.mul(unit, I64(STRIDE)))
            for at, each in enumerate(vectors):
                emit_store(builder, each, builder.add(place, I64(at * PANEL)), 4)

        kind.emit_groups(builder, codes, num_groups, units, put)

    return types.void(width, minima, *[types.int64] * 4), emit


def code_tile(num_rows: int) -> Any:
    """A tile of `num_rows` by a group of panels of codes.

    `tile(width, minima, row, row_stride, count, codes, num_groups, units, out, out_stride,
    num_columns, bias)`: two tags first; a group has `units` per panel, and `codes` is the address
    of the first panel's first; the rest is as in `panel_tile`.
    """

    @instruction
    def tile(
        width: Any, minima: Any, row: Any, row_stride: Any, count: Any, codes: Any,
        num_groups: Any, units: Any, out: Any, out_stride: Any, num_columns: Any, bias: Any,
    ) -> Any:  # fmt: skip
        kind = _Codes(width, minima)

        def emit(builder: Any, *arguments: Any) -> None:
            _, _, row, to_row, count, codes, num_groups, units, *more = arguments
            out, to, columns, bias = more
            rows = emit_rows(builder, row, to_row, count, num_rows)
            totals = [emit_places(builder, PANELS) for _ in rows]

            def multiply(unit: Any, vectors: Sequence[Any]) -> None:
                at = builder.mul(unit, I64(UNIT))
                for address, line in zip(rows, totals, strict=True):
                    emit_products(builder, True, builder.add(address, at), vectors, line)

            kind.emit_groups(builder, codes, num_groups, units, multiply)
            targets = emit_rows(builder, out, to, count, num_rows)
            _emit_results(builder, totals, targets, columns, bias)

        return types.void(width, minima, *[types.int64] * 10), emit

    return tile


def _emit_results(
    builder: Any, totals: Sequence[Any], targets: Sequence[Any], columns: Any, bias: Any
) -> None:
    """Stores totals plus biases, rounded to bfloat16."""
    for at in range(len(totals[0])):
        mask = emit_mask(builder, builder.sub(columns, I64(at * LANES)), LANES)
        shift = emit_bias(builder, bias, True, at, mask)
        for target, line in zip(targets, totals, strict=True):
            value = builder.fadd(builder.load(line[at]), shift)
            place = builder.add(target, I64(at * LANES * 2))
            emit_masked_store(builder, emit_round(builder, value), place, 2, mask)


_MOST = 6  # rows of the largest tile
_FEW = 2 * _MOST  # rows for which units are unpacked again, rather than kept
_ONE, _TWO, _FOUR, _SIX = (code_tile(rows) for rows in (1, 2, 4, _MOST))
_PRODUCT_CALL = call_of(*[INT] * 10)


@inlined
def coded_rows(
    width, minima, rows, num_rows, codes, shape, bias, out, num_columns, product, scratch
):
    """Computes out = rows @ weight.T + bias; a bias of 0 is none; `product` is a kernel's address.

    `scratch` has `unpacked_bytes`.
    """
    to_x, to_o, g, units = rows.to_row, out.to_row, shape.num_groups, shape.units
    panels = scratch + SCRATCH_BYTES
    for column in range(0, num_columns, GROUP):
        group, shift = codes + column // GROUP * shape.to_codes, bias + column * 2 if bias else 0
        x, o, left, done = rows.start, out.start + column * 2, num_columns - column, 0
        if num_rows > _FEW or uses_tiles(HALF, g * units):
            _unpack(width, minima, group, g, units, panels)
            columns = min(left, GROUP)
            _PRODUCT_CALL(
                product, x, to_x, panels, shift, o, to_o, num_rows, columns, g * units, scratch
            )
            done = num_rows
        while done < num_rows:
            n = num_rows - done
            n = n if n <= _MOST else (n + 1) // 2
            if n == 1:
                _ONE(width, minima, x, to_x, n, group, g, units, o, to_o, left, shift)
            elif n == 2:
                _TWO(width, minima, x, to_x, n, group, g, units, o, to_o, left, shift)
            elif n <= 4:
                _FOUR(width, minima, x, to_x, n, group, g, units, o, to_o, left, shift)
            else:
                _SIX(width, minima, x, to_x, n, group, g, units, o, to_o, left, shift)
            x, o, done = x + n * to_x, o + n * to_o, done + n


# -- weights as they are laid out at load


def panels_of_codes(
    codes: Tensor,  # [rows, columns] uint8 below 16, or int8
    scales: Tensor,  # [rows, num_groups]
    minima: Tensor | None,  # likewise
    bits: int,
) -> tuple[Tensor, CodedShape]:  # [groups of panels, num_groups, bytes]
    """Returns the weight's copy; rows are padded with zeros to whole groups of panels."""
    short, num_groups = -codes.shape[0] % GROUP, scales.shape[1]
    codes = pad(codes.view(torch.uint8), (0, 0, 0, short))
    units = codes.shape[1] // num_groups // 2
    halves = codes.view(-1, PANELS, 2, LANES // 2, num_groups, units, 2)
    laid = halves.permute(0, 4, 5, 1, 2, 3, 6)  # [groups, num_groups, units, panels, 2, 8, 2]
    if bits == 4:
        laid = laid[:, :, :, :, 0] | (laid[:, :, :, :, 1] << 4)
    parts = [laid.flatten(2)]
    for each in (scales, *(() if minima is None else (-minima,))):
        lines = pad(each.half(), (0, 0, 0, short)).view(-1, GROUP, num_groups)
        parts.append(lines.transpose(1, 2).contiguous().view(torch.uint8).flatten(2))
    packed = torch.cat(parts, dim=2).contiguous()
    return packed, CodedShape(packed.stride(0), num_groups, units)
