"""Attention over paged keys and values: no gather, online softmax, a tree as ancestor bits.

Of each sequence, up to `MAX_QUERIES` rows times heads are computed in one pass over the keys,
`TILE` of them at a time. The heads of a key are neighbours in memory, so all that a pass has take
their turns with a tile, while the next one is read from memory in its order (`ahead.py`). All
queries of a key head are computed together, over keys that are laid out first (`tiles.py`) unless
there are few queries (`few.py`). Scores and sums are float32; weights are of the kernel's kind. A
row's results do not depend on what else is in a pass, as long as it begins at the same key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import Matrix, inlined
from .ahead import Ahead
from .few import add_few, are_few, score_few
from .panels import QUAD, UNIT
from .prepare import item
from .softmax import cap, soften
from .tiles import TILE, add_panels, find_slots, lay_out, score_panels, tile_from
from .vector import (
    FULL,
    LANES,
    load,
    load_one,
    mul,
    splat,
    store_some,
)
from .visible import Sequence, first_visible, hide
from .work import LOG2_E, MAX_QUERIES, begin_query, row_of, work_at, work_of

_TILE_BYTES = 2**21  # keys and values of a pass's tile: whole rows of most models


class Heads(NamedTuple):
    """Key heads of a pass."""

    first: int
    num_heads: int


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
def _attend_tile(
    kind, work, first_row, num_queries, keys, values, ahead, tile, sequence, step, layer
):  # fmt: skip
    """One key head's part of a tile."""
    group = layer.num_heads // layer.num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    scale, softcap = np.float32(layer.scale), np.float32(layer.softcap)
    factor = LOG2_E if softcap > 0 else scale * LOG2_E
    few, panels, num_keys = are_few(kind, num_queries, dim), work.panels, tile.num_keys
    if few:
        score_few(kind, panels, work.queries, num_queries, keys, ahead, num_keys, dim, work.scores)
    else:
        lay_out(kind, panels, keys, values, ahead, tile, dim, value_dim)
        score_panels(kind, panels, work.queries, num_queries, num_keys, dim, work.scores)
    for query in range(num_queries):
        scores = row_of(work.scores, query)
        if softcap > 0:
            cap(scores, num_keys, scale, softcap)
        hide(scores, first_row + query // group, tile, sequence, step, layer)
        soften(kind, work, query, num_keys, factor, value_dim)
    weights, results = work.scores, work.results
    if few:
        add_few(kind, panels, weights, num_queries, values, num_keys, value_dim, results)
    else:
        add_panels(kind, panels, weights, num_queries, num_keys, value_dim, results)


@inlined
def _rows_of(start, head, num_heads, size):
    return Matrix(start + head * size, num_heads * size)


@inlined
def _attend_tiles(kind, work, first_row, num_queries, heads, span, cache, sequence, step, layer):
    """All keys from the first to the last that any of the rows sees, tile by tile."""
    key_bytes, value_bytes = layer.head_dim * kind.width, layer.value_dim * kind.width
    num_quads = key_bytes // UNIT // QUAD
    keys = _rows_of(cache.keys, heads.first, layer.num_kv_heads, key_bytes)
    values = _rows_of(cache.values, heads.first, layer.num_kv_heads, value_bytes)
    if layer.shared_values:
        values = keys
    block_size, panels = step.block_size, work.panels
    slots, next_slots = panels.slots, panels.slots + TILE * 8
    tile = tile_from(span[0] // step.alignment * step.alignment, span[1], block_size)
    bits = 0 if heads.num_heads == layer.num_kv_heads else 2
    find_slots(slots, tile, sequence.blocks, block_size)
    while tile.num_keys > 0:
        next_tile = tile_from(tile.begin + tile.num_keys, span[1], block_size)
        find_slots(next_slots, next_tile, sequence.blocks, block_size)
        for index in range(heads.num_heads):
            quad = index * num_quads
            ahead = Ahead(keys, values, next_slots, next_tile.num_keys, quad, bits)
            own_keys = Matrix(keys.start + index * key_bytes, keys.to_row)
            own_values = Matrix(values.start + index * value_bytes, values.to_row)
            part = work_of(work, index * num_queries, slots)
            _attend_tile(
                kind, part, first_row, num_queries, own_keys, own_values, ahead, tile, sequence,
                step, layer,
            )  # fmt: skip
        tile, slots, next_slots = next_tile, next_slots, slots


@inlined
def _attend_rows(kind, rows, num_rows, seq, heads, joined, cache, out, scratch, step, layer):
    """Some rows of one sequence, from `rows` on, and all query heads of some key heads."""
    width, num_kv_heads = kind.width, layer.num_kv_heads
    group = layer.num_heads // num_kv_heads
    dim, value_dim = layer.head_dim, layer.value_dim
    padded = (value_dim + LANES - 1) // LANES * LANES
    sequence, work = _sequence_of(step, seq), work_at(scratch, kind, dim, padded)
    num_queries, num_lanes = num_rows * group, heads.num_heads * group

    last, first = 0, sequence.key_len
    for row in range(num_rows):
        flat = rows + row
        for lane in range(num_lanes):
            number = heads.first * group + lane
            sink = layer.sinks + number * 4 if layer.sinks else 0
            source = row_of(joined, flat) + number * work.queries.to_row
            query = lane // group * num_queries + row * group + lane % group
            begin_query(work, query, source, sink, padded)
        index = item(step.row_index, flat)
        last = max(last, sequence.key_len if index >= sequence.tree_start else index + 1)
        first = min(first, first_visible(item(step.positions, flat), layer))

    span = (first, last)
    _attend_tiles(kind, work, rows, num_queries, heads, span, cache, sequence, step, layer)

    for query in range(heads.num_heads * num_queries):
        head, rest = heads.first + query // num_queries, query % num_queries
        row, lane = rows + rest // group, head * group + rest % group
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
    tile_bytes = TILE * (layer.head_dim + own_values) * kind.width
    most = max(MAX_QUERIES // group, 1)
    for seq in range(step.num_seqs):
        begin, end = item(step.query_start, seq), item(step.query_start, seq + 1)
        num_rows = min(most, end - begin)
        per_pass = max(min(MAX_QUERIES // (num_rows * group), _TILE_BYTES // tile_bytes), 1)
        for head in range(0, layer.num_kv_heads, per_pass):
            heads = Heads(head, min(per_pass, layer.num_kv_heads - head))
            for row in range(begin, end, most):
                _attend_rows(
                    kind, row, min(most, end - row), seq, heads, read, cache, out, scratch, step,
                    layer,
                )  # fmt: skip
