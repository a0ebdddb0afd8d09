"""Keys and values of the next tile, which begin to be read from memory while this one is used.

A burst of fetches would fill the buffers of lines under way, and the arithmetic behind it would
have none under way. So every quad of units of 16 keys of every head begins to read four lines of
keys and four of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types

from . import Matrix, inlined
from .vector import I32, I64, emit_call, emit_load, instruction

_LINE_BITS = 6  # a line of memory has 64 bytes
_SECOND_CACHE = I32(2)  # LLVM's name of the place for fetched lines


class Ahead(NamedTuple):
    """What is read while a tile is used."""

    keys: Matrix  # from the first key head of a pass on
    values: Matrix
    slots: int  # address of the numbers of the next tile's keys
    num_keys: int  # of the next tile
    first_quad: int  # of the pass, which has those of several heads
    bits: int  # 0: all heads are in the pass, so that rows have nothing between them; else 2


@inlined
def fetch_lines(ahead, first, quad):
    """Begins to read what belongs to a quad of units of 16 keys, from `first` of the tile on."""
    keys, values = ahead.keys, ahead.values
    if first < ahead.num_keys:
        _FETCH(
            keys.start, keys.to_row, values.start, values.to_row, ahead.slots + first * 8,
            ahead.first_quad + quad, ahead.bits,
        )  # fmt: skip


@instruction
def _FETCH(
    _: Any, keys: Any, to_key: Any, values: Any, to_value: Any, slots: Any, quad: Any, bits: Any
) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_lines(builder, arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit


def emit_fetch_lines(builder: Any, lines: Sequence[Any], quad: Any) -> None:
    """As `fetch_lines`, from the first quad among `lines` on; none where their slots are 0."""
    *places, slots, first_quad, bits = lines
    with cgutils.if_likely(builder, builder.icmp_signed("!=", slots, I64(0))):
        _emit_lines(builder, [*places, slots, builder.add(first_quad, quad), bits])


def _emit_lines(builder: Any, lines: Sequence[Any]) -> None:
    """As many quads as a row has are as many lines of four rows, of which 16 keys have four."""
    keys, to_key, values, to_value, slots, quad, bits = lines
    row = builder.and_(quad, builder.sub(builder.shl(I64(1), bits), I64(1)))
    shift = builder.shl(builder.lshr(quad, bits), I64(_LINE_BITS))
    numbers = builder.add(slots, builder.mul(row, I64(8)))
    for group in range(4):
        slot = emit_load(builder, builder.add(numbers, I64(group * 32)), I64, 8)
        for start, to_row in ((keys, to_key), (values, to_value)):
            place = builder.add(builder.add(start, shift), builder.mul(slot, to_row))
            emit_fetch(builder, place)


def emit_fetch(builder: Any, address: Any) -> None:
    """Into the second cache: the few buffers of the first one's misses would be the bound."""
    place = builder.inttoptr(address, ir.IntType(8).as_pointer())
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), _SECOND_CACHE, I32(1))
