"""Attention over paged keys and values: no gather, online softmax, a tree as ancestor bits.

Of each sequence and key head, all query heads that share it are computed together, up to
`MAX_QUERIES` at a time, over `TILE` keys at a time: scores, weights, weighted values, each in one
pass over what is in the first level of cache. Scores and sums are float32.

A prompt's tiles are laid out in panels first (`prompt.py`).

The online softmax is that of Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import Matrix, inlined
from .panels import UNIT
from .prepare import item
from .prompt import TILE, Panels, add_panels, lay_out, narrow, panels_at, score_panels
from .tiles import accumulate_tile, dots_tile
from .vector import (
    FULL,
    HALF,
    LANES,
    add,
    div,
    exp,
    greatest,
    larger,
    load,
    load_one,
    mul,
    splat,
    store,
    store_one,
    store_some,
    sub,
    total,
)
from .visible import MINUS, Sequence, Tile, first_visible, hide, slot_of

MAX_QUERIES = 64  # rows times heads of a group

DOTS = tuple(dots_tile(rows, 4) for rows in (1, 2, 3, 4, 5, 6))
DOTS_1, DOTS_2, DOTS_3, DOTS_4, DOTS_5, DOTS_6 = DOTS
DOT = dots_tile(1, 1)
SUM_1x1, SUM_1x3, SUM_1x4 = (accumulate_tile(1, vectors) for vectors in (1, 3, 4))
SUM_4x1, SUM_4x3, SUM_4x4 = (accumulate_tile(4, vectors) for vectors in (1, 3, 4))


class Work(NamedTuple):
    """Scratch memory of some queries, all float32 but the queries."""

    queries: Matrix  # [num_queries, dim] of the kernel's kind
    scores: Matrix  # [num_queries, TILE]
    peaks: int  # address of [num_queries]
    sums: int  # address of [num_queries]
    results: Matrix  # [num_queries, padded]
    laid: int  # whether tiles are laid out in panels
    panels: Panels


@inlined
def row_of(matrix, row):
    return matrix.start + row * matrix.to_row


@inlined
def _score_block(kind, work, num_queries, keys, num_keys, dim, first_key):
    """Dots of all queries with neighbouring keys."""
    tag, to_query, to_key = kind.tag, work.queries.to_row, keys.to_row
    to_score = work.scores.to_row
    whole = num_keys - num_keys % 4
    for first in range(0, whole, 4):
        key, done = row_of(keys, first), 0
        while done < num_queries:
            left = num_queries - done
            x = row_of(work.queries, done)
            o = row_of(work.scores, done) + (first_key + first) * 4
            if left == 1:
                DOTS_1(tag, FULL, x, to_query, key, to_key, dim, o, to_score, 0)
                done += 1
            elif left == 2:
                DOTS_2(tag, FULL, x, to_query, key, to_key, dim, o, to_score, 0)
                done += 2
            elif left == 3:
                DOTS_3(tag, FULL, x, to_query, key, to_key, dim, o, to_score, 0)
                done += 3
            elif left == 5:
                DOTS_5(tag, FULL, x, to_query, key, to_key, dim, o, to_score, 0)
                done += 5
            elif left == 4 or left == 7 or left == 8:
                DOTS_4(tag, FULL, x, to_query, key, to_key, dim, o, to_score, 0)
                done += 4
            else:
                DOTS_6(tag, FULL, x, to_query, key, to_key, dim, o, to_score, 0)
                done += 6
    for last in range(whole, num_keys):
        for query in range(num_queries):
            o = row_of(work.scores, query) + (first_key + last) * 4
            DOT(tag, FULL, row_of(work.queries, query), 0, row_of(keys, last), 0, dim, o, 0, 0)


@inlined
def _add_block(kind, work, num_queries, values, num_values, dim, first_key):
    """Weighted sums of neighbouring values, added to every query's."""
    tag, to_value = kind.tag, values.to_row
    to_weight, to_out = work.scores.to_row, work.results.to_row
    begin = 0
    while begin < dim:
        vectors = min((dim - begin + LANES - 1) // LANES, 4)
        value, left = values.start + begin * kind.width, dim - begin
        done = 0
        while done < num_queries:
            w = row_of(work.scores, done) + first_key * 4
            o = row_of(work.results, done) + begin * 4
            if num_queries - done >= 4:
                if vectors == 4:
                    SUM_4x4(tag, w, to_weight, value, to_value, num_values, left, o, to_out)
                elif vectors > 1:
                    SUM_4x3(tag, w, to_weight, value, to_value, num_values, left, o, to_out)
                else:
                    SUM_4x1(tag, w, to_weight, value, to_value, num_values, left, o, to_out)
                done += 4
            else:
                if vectors == 4:
                    SUM_1x4(tag, w, to_weight, value, to_value, num_values, left, o, to_out)
                elif vectors > 1:
                    SUM_1x3(tag, w, to_weight, value, to_value, num_values, left, o, to_out)
                else:
                    SUM_1x1(tag, w, to_weight, value, to_value, num_values, left, o, to_out)
                done += 1
        begin += vectors * LANES


@inlined
def _cap(scores, num_keys, scale, softcap):
    """Scores become tanh(scale * score / softcap) * softcap, by way of exp."""
    one, two, most = splat(np.float32(1)), splat(np.float32(2)), splat(softcap)
    factor = splat(np.float32(2) * scale / softcap)
    for key in range(0, num_keys, LANES):
        grown = exp(mul(load(FULL, scores + key * 4), factor))
        store(FULL, scores + key * 4, mul(sub(one, div(two, add(grown, one))), most))


@inlined
def _soften(work, query, num_keys, scale, dim):
    """Scores to weights: a query's running maximum, its sum, and its result so far."""
    place = row_of(work.scores, query)
    peak_of, sum_of = work.peaks + query * 4, work.sums + query * 4
    most, factor = splat(MINUS), splat(scale)
    for key in range(0, num_keys, LANES):
        score = mul(load(FULL, place + key * 4), factor)
        store(FULL, place + key * 4, score)
        most = larger(score, most)
    before = load_one(FULL, peak_of)
    peak = max(before, greatest(most))
    if peak == MINUS:
        for key in range(0, num_keys, LANES):
            store(FULL, place + key * 4, splat(np.float32(0)))
        return
    level, added = splat(peak), splat(np.float32(0))
    for key in range(0, num_keys, LANES):
        weight = exp(sub(load(FULL, place + key * 4), level))
        store(FULL, place + key * 4, weight)
        added = add(added, weight)
    shrink = np.float32(math.exp(before - peak)) if before > MINUS else np.float32(0)
    store_one(peak_of, peak)
    store_one(sum_of, load_one(FULL, sum_of) * shrink + total(added))
    if shrink != np.float32(1):
        factor = splat(shrink)
        for begin in range(0, dim, LANES):
            o = row_of(work.results, query) + begin * 4
            store(FULL, o, mul(load(FULL, o), factor))


@inlined
def _begin_query(work, query, source, sink, padded):
    """A query next to the others, and what is known of its softmax before the first key."""
    for byte in range(0, work.queries.to_row, 2):
        store_one(row_of(work.queries, query) + byte, load_one(HALF, source + byte))
    store_one(work.peaks + query * 4, load_one(FULL, sink) if sink else MINUS)
    store_one(work.sums + query * 4, np.float32(1) if sink else np.float32(0))
    for begin in range(0, padded, LANES):
        store(FULL, row_of(work.results, query) + begin * 4, splat(np.float32(0)))


@inlined
def _score_tile(kind, work, num_queries, keys, tile, sequence, block_size, dim):
    """Dots of all queries with the keys of a tile, block after block."""
    at = 0
    while at < tile.num_keys:
        key = tile.begin + at
        count = min(block_size - key % block_size, tile.num_keys - at)
        block = Matrix(row_of(keys, slot_of(key, sequence.blocks, block_size)), keys.to_row)
        _score_block(kind, work, num_queries, block, count, dim, at)
        at += count


@inlined
def _add_tile(kind, work, num_queries, values, tile, sequence, block_size, dim):
    """The weighted values of a tile, block after block."""
    at = 0
    while at < tile.num_keys:
        key = tile.begin + at
        count = min(block_size - key % block_size, tile.num_keys - at)
        block = Matrix(row_of(values, slot_of(key, sequence.blocks, block_size)), values.to_row)
        _add_block(kind, work, num_queries, block, count, dim, at)
        at += count


@inlined
def _sequence_of(step, seq):
    begin, end = item(step.query_start, seq), item(step.query_start, seq + 1)
    context = item(step.context_lens, seq)
    return Sequence(
        step.block_tables + seq * step.max_blocks * 4,
        item(step.tree_start, seq),
        context + end - begin,
        begin - context,
    )


@inlined
def _work_at(scratch, kind, dim, padded, laid):
    to_query = dim * kind.width
    scores = scratch + MAX_QUERIES * to_query
    peaks = scores + MAX_QUERIES * TILE * 4
    sums = peaks + MAX_QUERIES * 4
    results = Matrix(sums + MAX_QUERIES * 4, (padded + 4 * LANES) * 4)
    panels = panels_at(results.start + MAX_QUERIES * results.to_row, kind, dim)
    return Work(
        Matrix(scratch, to_query), Matrix(scores, TILE * 4), peaks, sums, results, laid, panels
    )


@inlined
def _attend_tiles(kind, work, first_row, num_queries, head, span, cache, sequence, step, layer):
    """All keys from the first to the last that any of the rows sees, tile by tile."""
    group = layer.num_heads // layer.num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    scale, softcap = np.float32(layer.scale), np.float32(layer.softcap)
    width, block_size = kind.width, step.block_size
    keys = Matrix(cache.keys + head * dim * width, layer.num_kv_heads * dim * width)
    values = Matrix(cache.values + head * value_dim * width, layer.num_kv_heads * value_dim * width)
    if layer.shared_values:
        values = keys
    begin, last = span
    begin = begin // step.alignment * step.alignment
    per_tile = max(TILE // block_size, 1) * block_size if block_size <= TILE else TILE
    while begin < last:
        num_keys = min(per_tile, last - begin)
        if block_size > TILE:
            num_keys = min(num_keys, block_size - begin % block_size)
        tile = Tile(begin, num_keys)
        if work.laid:
            lay_out(
                kind, work.panels, keys, values, tile, sequence.blocks, block_size, dim, value_dim
            )
            score_panels(kind, work.panels, work.queries, num_queries, num_keys, dim, work.scores)
        else:
            _score_tile(kind, work, num_queries, keys, tile, sequence, block_size, dim)
        for query in range(num_queries):
            scores = row_of(work.scores, query)
            if softcap > 0:
                _cap(scores, num_keys, scale, softcap)
            hide(scores, first_row + query // group, tile, sequence, step, layer)
            rest = np.float32(1) if softcap > 0 else scale
            _soften(work, query, num_keys, rest, value_dim)
            if work.laid:
                narrow(kind, scores, num_keys)
        if work.laid:
            add_panels(
                kind, work.panels, work.scores, num_queries, num_keys, value_dim, work.results
            )
        else:
            _add_tile(kind, work, num_queries, values, tile, sequence, block_size, value_dim)
        begin += num_keys


@inlined
def _attend_rows(kind, rows, num_rows, seq, head, joined, cache, out, scratch, step, layer, laid):
    """Some rows of one sequence, from `rows` on, and all query heads of one key head."""
    width, num_kv_heads = kind.width, layer.num_kv_heads
    group = layer.num_heads // num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    padded = (value_dim + LANES - 1) // LANES * LANES
    sequence, work = _sequence_of(step, seq), _work_at(scratch, kind, dim, padded, laid)
    num_queries = num_rows * group

    last, first = 0, sequence.key_len
    for row in range(num_rows):
        flat = rows + row
        source = row_of(joined, flat) + head * group * work.queries.to_row
        for query in range(group):
            sink = layer.sinks + (head * group + query) * 4 if layer.sinks else 0
            place = source + query * work.queries.to_row
            _begin_query(work, row * group + query, place, sink, padded)
        index = item(step.row_index, flat)
        last = max(last, sequence.key_len if index >= sequence.tree_start else index + 1)
        first = min(first, first_visible(item(step.positions, flat), layer))

    span = (first, last)
    _attend_tiles(kind, work, rows, num_queries, head, span, cache, sequence, step, layer)

    for query in range(num_queries):
        row, lane = rows + query // group, head * group + query % group
        target = out + (row * num_kv_heads * group + lane) * value_dim * width
        factor = splat(np.float32(1) / load_one(FULL, work.sums + query * 4))
        for start in range(0, value_dim, LANES):
            value = mul(load(FULL, row_of(work.results, query) + start * 4), factor)
            store_some(kind.tag, target + start * width, value, value_dim - start)


@inlined
def attend_step(kind, joined, cache, out, scratch, step, layer):
    group = layer.num_heads // layer.num_kv_heads
    own_values = 0 if layer.shared_values else layer.value_dim
    columns = layer.num_kv_heads * ((group + 1) * layer.head_dim + own_values)
    read = Matrix(joined, columns * kind.width)
    most, per_unit = max(MAX_QUERIES // group, 1), UNIT // kind.width
    for seq in range(step.num_seqs):
        begin, end = item(step.query_start, seq), item(step.query_start, seq + 1)
        laid = 1 if end - begin >= step.prompt_rows and layer.head_dim % per_unit == 0 else 0
        for head in range(layer.num_kv_heads):
            for row in range(begin, end, most):
                _attend_rows(
                    kind, row, min(most, end - row), seq, head, read, cache, out, scratch, step,
                    layer, laid,
                )  # fmt: skip
