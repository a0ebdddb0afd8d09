"""Attention over paged keys and values: no gather, online softmax, a tree as ancestor bits.

Of each sequence and key head, all query heads that share it are computed together, up to
`MAX_QUERIES` at a time, over `TILE` keys at a time, which are laid out first (`tiles.py`) unless
there are few queries (`few.py`): scores, weights, weighted values, each in one pass over what is in
the first levels of cache. Scores and sums are float32; weights are of the kernel's kind. A row's
results do not depend on how many rows there are, as long as they begin at the same key.

The online softmax is that of Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import Matrix, inlined
from .few import add_few, are_few, score_few
from .prepare import item
from .tiles import TILE, Panels, add_panels, find_tile, lay_out, panels_at, score_panels
from .vector import (
    FULL,
    LANES,
    add,
    div,
    exp,
    fma,
    greatest,
    larger,
    load,
    load_one,
    load_some,
    mul,
    power_of_two,
    splat,
    store,
    store_one,
    store_some,
    sub,
    total,
)
from .visible import MINUS, Sequence, Tile, first_visible, hide

MAX_QUERIES = 64  # rows times heads of a group
LOG2_E = np.float32(1.4426950408889634)


class Work(NamedTuple):
    """Scratch memory of some queries, all float32 but the queries."""

    queries: Matrix  # [num_queries, dim] of the kernel's kind
    scores: Matrix  # [num_queries, TILE]
    peaks: int  # address of [num_queries]
    sums: int  # address of [num_queries]
    results: Matrix  # [num_queries, padded]
    panels: Panels


@inlined
def row_of(matrix, row):
    return matrix.start + row * matrix.to_row


@inlined
def _cap(scores, num_keys, scale, softcap):
    """Scores become tanh(scale * score / softcap) * softcap, by way of exp."""
    one, two, most = splat(np.float32(1)), splat(np.float32(2)), splat(softcap)
    factor = splat(np.float32(2) * scale / softcap)
    for key in range(0, num_keys, LANES):
        grown = exp(mul(load(FULL, scores + key * 4), factor))
        store(FULL, scores + key * 4, mul(sub(one, div(two, add(grown, one))), most))


@inlined
def _soften(kind, work, query, num_keys, scale, dim):
    """Scores to weights: a query's running maximum, its sum, and its result so far.

    Weights are of the kernel's kind and lie where the scores began, which are wider or as wide.
    `scale` is positive, and a power of two is taken: it holds log2(e).
    """
    place = row_of(work.scores, query)
    peak_of, sum_of = work.peaks + query * 4, work.sums + query * 4
    most = splat(MINUS)
    for key in range(0, num_keys, LANES):
        most = larger(load(FULL, place + key * 4), most)
    before = load_one(FULL, peak_of)
    peak = max(before, greatest(most) * scale)
    if peak == MINUS:
        for key in range(0, num_keys, LANES):
            store(kind.tag, place + key * kind.width, splat(np.float32(0)))
        return
    factor, level, added = splat(scale), splat(-peak), splat(np.float32(0))
    for key in range(0, num_keys, LANES):
        weight = power_of_two(fma(load(FULL, place + key * 4), factor, level))
        store(kind.tag, place + key * kind.width, weight)
        added = add(added, weight)
    if before == peak:
        store_one(sum_of, load_one(FULL, sum_of) + total(added))
        return
    store_one(peak_of, peak)
    shrink = power_of_two(add(splat(before), level))
    store_one(sum_of, load_one(FULL, sum_of) * greatest(shrink) + total(added))
    if before > MINUS:
        for begin in range(0, dim, LANES):
            o = row_of(work.results, query) + begin * 4
            store(FULL, o, mul(load(FULL, o), shrink))


@inlined
def _begin_query(work, query, source, sink, padded):
    """A query next to the others, and what is known of its softmax before the first key."""
    target, size = row_of(work.queries, query), work.queries.to_row
    for byte in range(0, size, 4 * LANES):  # an even number of halves, moved as floats
        left = (size - byte) // 4
        store_some(FULL, target + byte, load_some(FULL, source + byte, left), left)
    store_one(work.peaks + query * 4, load_one(FULL, sink) * LOG2_E if sink else MINUS)
    store_one(work.sums + query * 4, np.float32(1) if sink else np.float32(0))
    for begin in range(0, padded, LANES):
        store(FULL, row_of(work.results, query) + begin * 4, splat(np.float32(0)))


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
def _work_at(scratch, kind, dim, padded):
    to_query = dim * kind.width
    scores = scratch + MAX_QUERIES * to_query
    peaks = scores + MAX_QUERIES * TILE * 4
    sums = peaks + MAX_QUERIES * 4
    results = Matrix(sums + MAX_QUERIES * 4, (padded + 4 * LANES) * 4)
    panels = panels_at(results.start + MAX_QUERIES * results.to_row, kind, dim)
    return Work(Matrix(scratch, to_query), Matrix(scores, TILE * 4), peaks, sums, results, panels)


@inlined
def _attend_tiles(kind, work, first_row, num_queries, head, span, cache, sequence, step, layer):
    """All keys from the first to the last that any of the rows sees, tile by tile."""
    group = layer.num_heads // layer.num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    scale, softcap = np.float32(layer.scale), np.float32(layer.softcap)
    factor = LOG2_E if softcap > 0 else scale * LOG2_E
    width, block_size = kind.width, step.block_size
    keys = Matrix(cache.keys + head * dim * width, layer.num_kv_heads * dim * width)
    values = Matrix(cache.values + head * value_dim * width, layer.num_kv_heads * value_dim * width)
    if layer.shared_values:
        values = keys
    begin, last = span
    begin = begin // step.alignment * step.alignment
    per_tile = max(TILE // block_size, 1) * block_size if block_size <= TILE else TILE
    few, panels = are_few(kind, num_queries, dim), work.panels
    while begin < last:
        num_keys = min(per_tile, last - begin)
        if block_size > TILE:
            num_keys = min(num_keys, block_size - begin % block_size)
        tile = Tile(begin, num_keys)
        num_slots = find_tile(panels, tile, sequence, block_size)
        if few:
            score_few(
                kind, panels, work.queries, num_queries, keys, values, num_keys, num_slots, dim,
                value_dim, work.scores,
            )  # fmt: skip
        else:
            lay_out(kind, panels, keys, values, tile, num_slots, dim, value_dim)
            score_panels(kind, panels, work.queries, num_queries, num_keys, dim, work.scores)
        for query in range(num_queries):
            scores = row_of(work.scores, query)
            if softcap > 0:
                _cap(scores, num_keys, scale, softcap)
            hide(scores, first_row + query // group, tile, sequence, step, layer)
            _soften(kind, work, query, num_keys, factor, value_dim)
        weights, results = work.scores, work.results
        if few:
            add_few(kind, panels, weights, num_queries, values, num_keys, value_dim, results)
        else:
            add_panels(kind, panels, weights, num_queries, num_keys, value_dim, results)
        begin += num_keys


@inlined
def _attend_rows(kind, rows, num_rows, seq, head, joined, cache, out, scratch, step, layer):
    """Some rows of one sequence, from `rows` on, and all query heads of one key head."""
    width, num_kv_heads = kind.width, layer.num_kv_heads
    group = layer.num_heads // num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    padded = (value_dim + LANES - 1) // LANES * LANES
    sequence, work = _sequence_of(step, seq), _work_at(scratch, kind, dim, padded)
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
    most = max(MAX_QUERIES // group, 1)
    for seq in range(step.num_seqs):
        begin, end = item(step.query_start, seq), item(step.query_start, seq + 1)
        for head in range(layer.num_kv_heads):
            for row in range(begin, end, most):
                _attend_rows(
                    kind, row, min(most, end - row), seq, head, read, cache, out, scratch, step,
                    layer,
                )  # fmt: skip
