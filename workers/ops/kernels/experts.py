"""A mixture of experts: routing row by row, and products over rows sorted by expert.

Every row's experts are added in the order of their numbers, in float32, so that a row's bits do not
depend on the others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import Matrix, inlined
from .elementwise import gate_rows
from .panels import GROUP, SCRATCH_BYTES, STRIDE, UNIT, product_rows
from .prepare import item64
from .vector import FULL, LANES, fma, load_one, load_some, mul, splat, store_one, store_some

SOFTMAX, SIGMOID, SOFTMAX_OF_TOP, SIGMOID_OF_TOP = range(4)


class Routing(NamedTuple):
    """How experts are chosen (`Router`)."""

    num_experts: int
    top: int
    scoring: int
    correction: int  # address of [num_experts] float32; 0: none
    num_groups: int
    top_groups: int
    group_top: int
    normalise: int
    scale: float


@inlined
def _next_best(values, begin, end, value, index):
    """The best of [begin, end) behind (value, index), where a lower index is better among equals;
    `begin` where there is none, as among values that are no numbers."""
    best, found = -math.inf, -1
    for each in range(begin, end):
        own = load_one(FULL, values + each * 4)
        behind = own < value or (own == value and each > index)
        if behind and (found < 0 or own > best):
            best, found = own, each
    return max(found, begin)


@inlined
def _sigmoid(value):
    return 1.0 / (1.0 + math.exp(-value))


@inlined
def _keep_groups(wanted, merits, routing):
    """Minus infinity outside of the best groups; a group's merit is the sum of its best."""
    size = routing.num_experts // routing.num_groups
    for group in range(routing.num_groups):
        merit, value, index = 0.0, math.inf, -1
        for _ in range(routing.group_top):
            index = _next_best(wanted, group * size, (group + 1) * size, value, index)
            value = np.float64(load_one(FULL, wanted + index * 4))
            merit += value
        store_one(merits + group * 4, np.float32(merit))
    value, index = math.inf, -1
    for _ in range(routing.top_groups):
        index = _next_best(merits, 0, routing.num_groups, value, index)
        value = np.float64(load_one(FULL, merits + index * 4))
    for group in range(routing.num_groups):
        merit = load_one(FULL, merits + group * 4)
        if merit < value or (merit == value and group > index):
            for each in range(group * size, (group + 1) * size):
                store_one(wanted + each * 4, np.float32(-math.inf))


@inlined
def _weight(value, most, scoring):
    if scoring == SOFTMAX_OF_TOP:
        return math.exp(value - most)
    return _sigmoid(value) if scoring == SIGMOID_OF_TOP else value


@inlined
def _weigh(best, routing):
    """The chosen experts' scores, in place."""
    top, total, most = routing.top, 0.0, -math.inf
    for place in range(top):
        most = max(most, np.float64(load_one(FULL, best + place * 4)))
    for place in range(top):
        value = np.float64(load_one(FULL, best + place * 4))
        weight = _weight(value, most, routing.scoring)
        total += weight
        store_one(best + place * 4, np.float32(weight))
    factor = routing.scale
    if routing.scoring == SOFTMAX_OF_TOP:
        factor /= total
    elif routing.normalise:
        factor /= total + 1e-20
    for place in range(top):
        value = np.float64(load_one(FULL, best + place * 4))
        store_one(best + place * 4, np.float32(value * factor))


@inlined
def _score(value, most, total, scoring):
    if scoring == SOFTMAX:
        return math.exp(value - most) / total
    return _sigmoid(value) if scoring == SIGMOID else value


@inlined
def route_rows(logits, num_rows, routing, chosen, best, scratch):
    """`chosen` int64 and `best` float32, each [num_rows, top], of logits in float32."""
    count, top, wanted = routing.num_experts, routing.top, scratch + routing.num_experts * 4
    for row in range(num_rows):
        values, most, total = logits + row * count * 4, -math.inf, 0.0
        for each in range(count):
            most = max(most, np.float64(load_one(FULL, values + each * 4)))
        if routing.scoring == SOFTMAX:
            for each in range(count):
                total += math.exp(np.float64(load_one(FULL, values + each * 4)) - most)
        for each in range(count):
            value = np.float64(load_one(FULL, values + each * 4))
            score = np.float32(_score(value, most, total, routing.scoring))
            store_one(scratch + each * 4, score)
            if routing.correction:
                score += load_one(FULL, routing.correction + each * 4)
            store_one(wanted + each * 4, score)
        if routing.num_groups > 1:
            _keep_groups(wanted, wanted + count * 4, routing)
        own, last, index = best + row * top * 4, math.inf, -1
        for place in range(top):
            index = _next_best(wanted, 0, count, last, index)
            last = np.float64(load_one(FULL, wanted + index * 4))
            store_one(chosen + (row * top + place) * 8, index)
            store_one(own + place * 4, load_one(FULL, scratch + index * 4))
        _weigh(own, routing)


# -- the chosen experts' sum

ROWS = 96  # that an expert computes at once


class Weights(NamedTuple):
    """All experts' weights in groups of panels, one expert behind the other."""

    num_experts: int
    hidden_size: int
    width: int  # of the gated unit
    gate_up: int
    gate_up_bias: int  # 0: none
    down: int
    down_bias: int  # 0: none
    scores_input: int  # the score multiplies what an expert reads


def mixing_bytes(num_rows: int, top: int, weights: Weights, value_bytes: int) -> int:
    """Scratch memory of `mix_rows`."""
    sums = num_rows * weights.hidden_size * 4 + (weights.num_experts + num_rows * top) * 8
    return sums + ROWS * (2 * weights.hidden_size + 3 * weights.width) * value_bytes + SCRATCH_BYTES


@inlined
def _sort_pairs(chosen, num_pairs, num_experts, ends, order):
    """Numbers of the pairs (row, place), expert by expert, and where each expert's end."""
    for expert in range(num_experts):
        store_one(ends + expert * 8, 0)
    for pair in range(num_pairs):
        place = ends + item64(chosen, pair) * 8
        store_one(place, item64(place, 0) + 1)
    begin = 0
    for expert in range(num_experts):
        count = item64(ends, expert)
        store_one(ends + expert * 8, begin)
        begin += count
    for pair in range(num_pairs):
        place = ends + item64(chosen, pair) * 8
        store_one(order + item64(place, 0) * 8, pair)
        store_one(place, item64(place, 0) + 1)


@inlined
def _groups_bytes(columns, length, kind):
    """One expert's share of a weight in panels."""
    return (columns + GROUP - 1) // GROUP * (length * kind.width // UNIT) * STRIDE


@inlined
def _add_row(kind, given, factor, sums, size):
    for begin in range(0, size, LANES):
        left = size - begin
        value = load_some(kind.tag, given + begin * kind.width, left)
        added = fma(value, splat(factor), load_some(FULL, sums + begin * 4, left))
        store_some(FULL, sums + begin * 4, added, left)


@inlined
def mix_rows(kind, activation, states, num_rows, chosen, scores, top, weights, out, scratch):
    """out = sum of score * down(gate(gate_up(row))) over a row's experts; rows lie contiguous."""
    width, size, inner_size = kind.width, weights.hidden_size, weights.width
    row_bytes, num_pairs = size * width, num_rows * top
    ends = scratch + num_rows * size * 4
    order = ends + weights.num_experts * 8
    read = order + num_pairs * 8
    given = read + ROWS * row_bytes
    inner = given + ROWS * row_bytes
    gated = inner + ROWS * 2 * inner_size * width
    product_scratch = gated + ROWS * inner_size * width
    _sort_pairs(chosen, num_pairs, weights.num_experts, ends, order)
    for place in range(num_rows * size):
        store_one(scratch + place * 4, np.float32(0))
    begin = 0
    for expert in range(weights.num_experts):
        end = item64(ends, expert)
        while begin < end:
            count = min(ROWS, end - begin)
            for index in range(count):
                pair = item64(order, begin + index)
                factor = splat(load_one(FULL, scores + pair * 4))
                source, to = states + pair // top * row_bytes, read + index * row_bytes
                for at in range(0, size, LANES):
                    value = load_some(kind.tag, source + at * width, size - at)
                    if weights.scores_input:
                        value = mul(value, factor)
                    store_some(kind.tag, to + at * width, value, size - at)
            for is_down in range(2):  # one copy of the code of products
                rows, columns, length = Matrix(read, row_bytes), 2 * inner_size, size
                first, bias, to = weights.gate_up, weights.gate_up_bias, inner
                if is_down:
                    rows, columns, length = Matrix(gated, inner_size * width), size, inner_size
                    first, bias, to = weights.down, weights.down_bias, given
                    gate_rows(kind, activation, inner, gated, count, inner_size)
                panels = first + expert * _groups_bytes(columns, length, kind)
                shift = bias + expert * columns * width if bias else 0
                product_rows(
                    kind, rows, count, panels, shift, Matrix(to, columns * width), columns,
                    length * width // UNIT, product_scratch,
                )  # fmt: skip
            for index in range(count):
                pair = item64(order, begin + index)
                factor = load_one(FULL, scores + pair * 4)
                if weights.scores_input:
                    factor = np.float32(1)
                to = scratch + pair // top * size * 4
                _add_row(kind, given + index * row_bytes, factor, to, size)
            begin += count
    for row in range(num_rows):
        for at in range(0, size, LANES):
            value = load_some(FULL, scratch + (row * size + at) * 4, size - at)
            store_some(kind.tag, out + row * row_bytes + at * width, value, size - at)
