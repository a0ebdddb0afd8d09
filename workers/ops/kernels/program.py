"""A layer stack's operations as a list that all threads of a step process together.

A phase is one operation on all rows, divided into units. Every thread first takes the units of its
own share, whose rows are in its caches, then units that others have left. It continues with the
next phase when all units of this one are done, so a thread that is late or suspended delays at most
one unit. No Python runs in between: Python threads take turns, and waking one that waits for its
turn costs more than a small operation.

Operands are addresses or sizes. An address below `NUM_VARIABLES` is the index of a variable, whose
value is set for each step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import FLOAT, GROUP, INT, LANES, STRIDE, inlined
from .amx import rows_nearby, uses_tiles
from .attend import num_passes
from .panels import SCRATCH_BYTES
from .prepare import item, item64, number, read_layer, read_step
from .vector import (
    FULL,
    LINE,
    Claims,
    call_of,
    greatest,
    larger,
    load,
    load_one,
    load_some,
    next_unit,
    num_done,
    pause,
    store,
    store_one,
    store_some,
    unit_done,
)

COPY, NORM, ADD_NORM, PRODUCT, PREPARE, ATTEND, GATE, BEST, CODED, GATED_PRODUCT = range(10)
NUM_OPERANDS = 16  # of a phase, its kind included
NUM_VARIABLES = 1024  # a page that no address lies in
INSIDE = LINE  # from the number of the step that runs to how many helpers are inside
_UNITS_PER_THREAD = 3
_FEWEST_OF_MANY = 16  # rows for each thread, from which on they are shared out, not columns
_FEWEST_ROWS = 4  # of a unit
_MOST_ROWS = 96  # of a product's unit without AMX: what they read stays near
_MOST_OF_CODES = 256  # likewise; for every unit a weight is unpacked again
GATE_BYTES = 1 << 19  # of gates beside what they gate, between their product and the gated unit
_PATIENCE = 2000  # pauses before a thread that waits lets others run

_NORM_CALL = call_of(*[INT] * 7, FLOAT)
_ADD_NORM_CALL = call_of(INT, INT, FLOAT, INT, INT, FLOAT, INT, INT, FLOAT, INT, INT, INT)
_PRODUCT_CALL = call_of(*[INT] * 10)
_CODED_CALL = call_of(*[INT] * 13)
_PREPARE_CALL = call_of(*[INT] * 9)
_ATTEND_CALL = call_of(*[INT] * 12)
_GATE_CALL = call_of(*[INT] * 6, FLOAT, FLOAT)
_YIELD_CALL = call_of()


class Functions(NamedTuple):
    """Addresses of the functions that phases call; `let_run` yields to another thread."""

    norm: int
    add_norm: int
    product: int
    prepare: int
    attend: int
    gate: int
    let_run: int


class Team(NamedTuple):
    """The threads of a step."""

    num_threads: int
    member: int  # this thread's number
    scratch: int  # address of this thread's own


@inlined
def _operand(phase, index, variables):
    value = item64(phase, index)
    return item64(variables, value) if 0 < value < NUM_VARIABLES else value


@inlined
def _divided(size, share):
    return (size + share - 1) // share


@inlined
def _shares(size, fewest, num_threads):
    """Returns the rows or columns of a unit, so that each thread gets some."""
    if num_threads == 1:
        return max(size, 1)
    parts = _UNITS_PER_THREAD * num_threads
    return max(_divided(size, parts), fewest)


@inlined
def _product_units(kind, phase, num_rows, num_threads):
    """Returns the groups of columns and the rows of a unit."""
    groups = _divided(item64(phase, 7), GROUP)
    num_rows = max(num_rows, 1)
    if num_threads == 1:
        return groups, num_rows
    by_tiles, share = uses_tiles(kind.tag, item64(phase, 8)), _divided(num_rows, num_threads)
    fewest = _FEWEST_OF_MANY * (4 if by_tiles else 1)
    if num_rows < fewest * num_threads:
        return _shares(groups, 2 if num_rows == 1 else 1, num_threads), num_rows
    most = rows_nearby(share, item64(phase, 8)) if by_tiles else _MOST_ROWS
    if item64(phase, 0) == CODED:
        most = _MOST_OF_CODES
    blocks = _divided(share, most) * num_threads
    return groups, _divided(num_rows, blocks)


@inlined
def _num_units(kind, phase, variables, num_threads):
    operation, num_rows = item64(phase, 0), _operand(phase, 1, variables)
    if operation in (PRODUCT, CODED, GATED_PRODUCT):
        columns, rows = _product_units(kind, phase, num_rows, num_threads)
        groups = _divided(item64(phase, 7), GROUP)
        return _divided(groups, columns) * _divided(num_rows, rows)
    if operation == ATTEND:
        step, layer = _operand(phase, 2, variables), read_layer(item64(phase, 7), item64(phase, 8))
        return num_passes(kind, read_step(step), layer, num_threads)
    return _divided(num_rows, _shares(num_rows, _FEWEST_ROWS, num_threads))


@inlined
def _part_of_product(kind, phase, variables, unit, team):
    """Returns first row, number of rows, first column and number of columns of a product's unit."""
    num_rows = _operand(phase, 1, variables)
    columns, rows = _product_units(kind, phase, num_rows, team.num_threads)
    per_row = _divided(_divided(item64(phase, 7), GROUP), columns)
    first, column = unit // per_row * rows, unit % per_row * columns * GROUP
    return (
        first, min(rows, num_rows - first), column,
        min(columns * GROUP, item64(phase, 7) - column),
    )  # fmt: skip


@inlined
def _multiply_codes(kind, phase, variables, functions, unit, team):
    """Multiplies by a weight in codes; the phase has the kernel's address."""
    first, num_rows, column, num_columns = _part_of_product(kind, phase, variables, unit, team)
    read, out, bias = _operand(phase, 2, variables), _operand(phase, 6, variables), item64(phase, 5)
    to_row, to_codes, to_out = item64(phase, 3), item64(phase, 8), item64(phase, 9)
    _CODED_CALL(
        item64(phase, 12), read + first * to_row, to_row,
        item64(phase, 4) + column // GROUP * to_codes, to_codes, item64(phase, 10),
        item64(phase, 11), bias + column * 2 if bias else 0, out + first * to_out + column * 2,
        to_out, num_rows, num_columns, functions.product, team.scratch,
    )  # fmt: skip


@inlined
def _multiply(kind, phase, variables, functions, unit, team):
    first, num_rows, column, num_columns = _part_of_product(kind, phase, variables, unit, team)
    read, out = _operand(phase, 2, variables), _operand(phase, 6, variables)
    length, to_row, to_out = item64(phase, 8), item64(phase, 3), item64(phase, 9)
    bias = item64(phase, 5)
    _PRODUCT_CALL(
        functions.product, read + first * to_row, to_row,
        item64(phase, 4) + column // GROUP * length * STRIDE,
        bias + column * kind.width if bias else 0,
        out + first * to_out + column * kind.width, to_out, num_rows, num_columns, length,
        team.scratch,
    )  # fmt: skip


@inlined
def _multiply_gated(kind, phase, variables, functions, unit, team):
    """Computes gated units for as many rows and columns at a time as fit into a cache."""
    begin, num_rows, column, num_columns = _part_of_product(kind, phase, variables, unit, team)
    read, out = _operand(phase, 2, variables), _operand(phase, 6, variables)
    to_row, panels, bias, size = (
        item64(phase, 3), item64(phase, 4), item64(phase, 5), item64(phase, 7),
    )  # fmt: skip
    length, to_out, width = item64(phase, 8), item64(phase, 9), kind.width
    end, gates = begin + num_rows, team.scratch + SCRATCH_BYTES
    most_rows = min(rows_nearby(num_rows, length), GATE_BYTES // (2 * GROUP * width))
    for first in range(begin, end, most_rows):
        count = min(most_rows, end - first)
        most = GATE_BYTES // (2 * count * width) // GROUP * GROUP
        for at in range(column, column + num_columns, most):
            wide = min(most, column + num_columns - at)
            for half in range(2):
                place = at + half * size
                _PRODUCT_CALL(
                    functions.product, read + first * to_row, to_row,
                    panels + place // GROUP * length * STRIDE,
                    bias + place * width if bias else 0, gates + half * wide * width,
                    2 * wide * width, count, wide, length, team.scratch,
                )  # fmt: skip
            _GATE_CALL(
                functions.gate, item64(phase, 10), gates, out + first * to_out + at * width,
                to_out, count, wide, number(phase, 11), number(phase, 12),
            )  # fmt: skip


@inlined
def _prepare(kind, phase, variables, functions, first, count, team):
    """A step's rows from `first` on are a step of their own, as far as this operation reads it."""
    step, own = _operand(phase, 2, variables), team.scratch
    for index in range(14):
        store_one(own + index * 8, item64(step, index))
    store_one(own, count)
    store_one(own + 5 * 8, item64(step, 5) + first * 4)  # positions
    store_one(own + 6 * 8, item64(step, 6) + first * 4)  # slots
    angles, factors = item64(phase, 11), _operand(phase, 6, variables)
    cos, sin = _operand(phase, 4, variables), _operand(phase, 5, variables)
    _PREPARE_CALL(
        functions.prepare, _operand(phase, 3, variables) + first * item64(phase, 12),
        cos + first * angles if cos else 0, sin + first * angles if sin else 0,
        factors + first * 4 if factors else 0, own, item64(phase, 7), item64(phase, 8),
        _operand(phase, 9, variables), _operand(phase, 10, variables),
    )  # fmt: skip


@inlined
def _copy(phase, variables, first, count):
    """Copies rows, or those in an array of int32, as whole lines of float32."""
    read, out = _operand(phase, 2, variables), _operand(phase, 3, variables)
    size, chosen = item64(phase, 4), _operand(phase, 5, variables)
    to_row, to_out = item64(phase, 6), item64(phase, 7)
    for row in range(first, first + count):
        source = read + (item(chosen, row) if chosen else row) * to_row
        for begin in range(0, size // 4, LANES):
            value = load_some(FULL, source + begin * 4, size // 4 - begin)
            store_some(FULL, out + row * to_out + begin * 4, value, size // 4 - begin)


@inlined
def _first_best(kind, row, size, scratch):
    """Returns the first index of a row's largest value; it has at least `LANES` values."""
    last = size - LANES
    best = load(kind.tag, row + last * kind.width)
    for begin in range(0, last, LANES):
        best = larger(best, load(kind.tag, row + begin * kind.width))
    most = greatest(best)
    for begin in range(0, size, LANES):
        begin = min(begin, last)
        values = load(kind.tag, row + begin * kind.width)
        if greatest(values) == most:
            store(FULL, scratch, values)
            for lane in range(LANES):
                if load_one(FULL, scratch + lane * 4) == most:
                    return begin + lane
    return 0


@inlined
def _choose(kind, phase, variables, first, count, team):
    """Writes each row's best column as int32, or its entry in an array of int64."""
    read, out = _operand(phase, 2, variables), _operand(phase, 3, variables)
    size, names = item64(phase, 4), item64(phase, 5)
    for row in range(first, first + count):
        best = _first_best(kind, read + row * size * kind.width, size, team.scratch)
        store_one(out + row * 4, np.int32(item64(names, best) if names else best))


@inlined
def _compute(kind, phase, variables, functions, unit, team):
    """Computes one unit of a phase."""
    operation, num_rows = item64(phase, 0), _operand(phase, 1, variables)
    if operation == PRODUCT:
        _multiply(kind, phase, variables, functions, unit, team)
        return
    if operation == CODED:
        _multiply_codes(kind, phase, variables, functions, unit, team)
        return
    if operation == GATED_PRODUCT:
        _multiply_gated(kind, phase, variables, functions, unit, team)
        return
    share = _shares(num_rows, _FEWEST_ROWS, team.num_threads)
    first = unit * share
    count, width = min(share, num_rows - first), kind.width
    if operation == COPY:
        _copy(phase, variables, first, count)
    elif operation == BEST:
        _choose(kind, phase, variables, first, count, team)
    elif operation == PREPARE:
        _prepare(kind, phase, variables, functions, first, count, team)
    elif operation == GATE:
        read, size = _operand(phase, 2, variables), item64(phase, 4)
        _GATE_CALL(
            functions.gate, item64(phase, 5), read + first * 2 * size * width,
            _operand(phase, 3, variables) + first * size * width, size * width, count, size,
            number(phase, 6), number(phase, 7),
        )  # fmt: skip
    else:
        size, read = item64(phase, 4), _operand(phase, 2, variables)
        out = _operand(phase, 3, variables)
        if operation == NORM:
            to_row, to_out = item64(phase, 7), item64(phase, 8)
            _NORM_CALL(
                functions.norm, read + first * to_row, to_row, item64(phase, 5),
                out + first * to_out, to_out, count, size, number(phase, 6),
            )  # fmt: skip
        else:
            offset = first * size * width
            _ADD_NORM_CALL(
                functions.add_norm, read + offset, _operand(phase, 7, variables) + offset,
                number(phase, 8), item64(phase, 9), item64(phase, 10), number(phase, 11),
                item64(phase, 12), item64(phase, 5), number(phase, 6), out + offset, count, size,
            )  # fmt: skip


@inlined
def run_phase(kind, phase, variables, functions, counters, team):
    """Runs this thread's share of a phase; returns when the whole phase is done."""
    num_units = _num_units(kind, phase, variables, team.num_threads)
    claims = Claims(counters, num_units, team.num_threads, team.member)
    if item64(phase, 0) == ATTEND:
        _ATTEND_CALL(
            functions.attend, _operand(phase, 3, variables), _operand(phase, 4, variables),
            _operand(phase, 5, variables), _operand(phase, 6, variables), team.scratch,
            _operand(phase, 2, variables), item64(phase, 7), item64(phase, 8), counters, num_units,
            team.num_threads, team.member,
        )  # fmt: skip
    else:
        unit = next_unit(claims)
        while unit >= 0:
            _compute(kind, phase, variables, functions, unit, team)
            unit_done(claims)
            unit = next_unit(claims)
    waits = 0
    while num_done(claims) < num_units:
        waits += 1
        if waits > _PATIENCE:
            _YIELD_CALL(functions.let_run)
        else:
            pause()
