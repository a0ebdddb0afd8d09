"""Products with a weight laid out in groups of panels (`panels.py`), one group at a time.

A group is read by all rows before the next: whole, if there are up to six, else in two halves by
up to twelve rows at a time. The first rows of either fetch what lies 16 kB behind, so that up to
twelve rows wait for memory no more often than one. Where a group would not stay in the second level
of cache, it is read in sections, and sums between sections lie in `scratch`. A row's results do not
depend on how many rows there are.
"""

from __future__ import annotations

from . import Kind, Matrix, inlined, shared
from .panels import GROUP, PANEL, STRIDE, UNIT, panel_tile
from .vector import FULL, LANES, add, load, load_some, store_some

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
    """All rows with two panels of a group."""
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
    """All rows with the first three panels of a last group, behind which nothing is fetched."""
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
    """All rows with a group of panels."""
    tag, into, n = kind.tag, result.tag, num_rows
    three = 2 * LANES < num_columns <= 3 * LANES  # heads of 40 or 48 dimensions
    x, to_x, o, to_o = rows.start, rows.to_row, out.start, out.to_row
    if n == 1:
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
def product_rows(kind, rows, num_rows, weight, bias, out, num_columns, length, scratch):
    """out = rows @ weight.T + bias, over `length` units; groups follow one another in `weight`."""
    tag, to_group = kind.tag, length * STRIDE
    end = weight + (num_columns + GROUP - 1) // GROUP * to_group
    column = 0
    while column < num_columns:
        shift = bias + column * kind.width if bias else 0
        group, left = weight + column // GROUP * to_group, num_columns - column
        to = Matrix(out.start + column * kind.width, out.to_row)
        ahead = AHEAD if group + to_group + AHEAD <= end else 0
        if num_rows == 1 and left >= 2 * GROUP and length <= SECTION:
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
    """`group_rows` over one section of the length after another."""
    sums = Matrix(scratch, GROUP * 4)
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
