"""Attention over a paged cache: its kernels, their tile sizes from shapes alone, the launches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention import KVCode, inverse
from ..plan import PagedStep
from ..protocol import AttentionSpec, Rotation
from .elementwise import facts, tanh
from .linear import FP8, decoded, dot
from .prepare import factor_of, prepared, store_rows
from .schedule import MINUS, join, schedule_kernel, schedule_of

# Attention over a paged cache: trees, windows, chunks, soft caps, sinks, grouped heads.
#
# A program computes up to BLOCK_M queries of one sequence that share a key head: rows times the
# query heads of a group, so that a decode step of a grouped model fills a product's tile too. It
# walks over a part of the keys, tile by tile, with an online softmax; of several parts, those who
# end last add them. Which sequence a program belongs to, where its keys begin and end, and what is
# visible is read on the device; `workers/ops/plan.py` defines it.
# How many parts a sequence has is decided once a step (`schedule.py`). Where a library has computed
# attention to the context (`library.py`), its result is where the softmax over the step's own keys
# begins: a peak of its log-sum, a total of one, and its rows as the sums.
#
# Codes of a cache (`KVCode`) become values of the queries' type on their way from memory. Their
# scales are one a layer, so scores and results are multiplied by them, and no value is rounded.
#
# Keys that are not a power of two long are multiplied in two parts, for example 96 = 64 + 32 and
# 576 = 512 + 64 (MLA's latent and its rotated part).
#
# Sources: Dao 2023, FlashAttention-2, arXiv:2307.08691; Dao, Haziza, Massa, Sizov 2023,
# Flash-Decoding; Kwon et al. 2023, PagedAttention, arXiv:2309.06180; ancestor masks as in
# Miao et al. 2023, SpecInfer, arXiv:2305.09781.

Arguments = tuple[Any, ...]
"""Arguments of a kernel, in its order."""

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 30)  # above every position
NOTHING = tl.constexpr(1 << 24)  # above every number of blocks


@triton.jit
def _sequence_of(block, query_start, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence of a program: sequence s has blocks from query_start[s] * GROUP // BLOCK_M + s.

    That leaves each one at least as many as it needs, with a grid that depends on shapes only.
    """
    low = block * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start + middle) * GROUP // BLOCK_M + middle
        low = tl.where(begins <= block, middle, low)
        high = tl.where(begins <= block, high, middle)
    return low


@triton.jit
def _visible(
    key,  # [BLOCK_N], indices in the sequence
    inside,  # [BLOCK_N] bool
    row,  # [BLOCK_M], rows of the step
    real,  # [BLOCK_M] bool
    index,  # [BLOCK_M], key index of each row
    position,  # [BLOCK_M]
    start,  # the sequence's `tree_start`
    to_row,  # the row of key index 0, if it had one
    positions,
    ancestors,
    num_words,
    has_nodes,  # whether keys at or beyond `start` are in the tile
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):  # [BLOCK_M, BLOCK_N] bool
    """What each query sees of a tile: `visible` of `reference.py`."""
    seen = (inside & (key < start))[None, :] & (key[None, :] <= index[:, None])
    if has_nodes:
        node = key - start
        known = inside & (node >= 0) & (node < num_words * 64)
        node = tl.where(known, node, 0)
        place = ancestors + row[:, None].to(tl.int64) * num_words + (node // 64)[None, :]
        word = tl.load(place, mask=real[:, None] & known[None, :], other=0)
        bit = (word >> (node % 64).to(tl.int64)[None, :]) & 1
        seen = seen | (bit == 1)
    if WINDOW or CHUNK:
        own = tl.load(positions + to_row + key, mask=inside & (key >= start), other=0)
        theirs = tl.where(key < start, key, own)
        if WINDOW:
            seen = seen & (theirs[None, :] > position[:, None] - WINDOW)
        if CHUNK:
            seen = seen & ((theirs // CHUNK)[None, :] == (position // CHUNK)[:, None])
    return seen


@triton.jit
def _as(stored, KIND: tl.constexpr):
    """What the cache holds, in KIND; codes may be bits, where a device has no type for them."""
    if stored.dtype == tl.uint8:
        return decoded(stored, FP8).to(KIND)
    else:
        return stored.to(KIND)


@triton.jit
def _scores(
    low,  # [BLOCK_M, DIM_LOW]
    high,  # [BLOCK_M, DIM_HIGH], or unused
    place,  # [BLOCK_N], where each key begins
    inside,  # [BLOCK_N] bool
    scale,  # times LOG2E where there is no cap
    softcap,
    HAS_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_LOW: tl.constexpr,
    DIM_HIGH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Base-2 exponents [BLOCK_M, BLOCK_N] float32, and the keys' lower part [DIM_LOW, BLOCK_N]."""
    column = tl.arange(0, DIM_LOW)
    mask = (column < HEAD_DIM)[:, None]
    if MASKED:
        mask = mask & inside[None, :]
    key = _as(tl.load(place[None, :] + column[:, None], mask=mask, other=0.0), low.dtype)
    scores = dot(low, key, tl.zeros([low.shape[0], key.shape[1]], tl.float32))
    if DIM_HIGH:
        column = DIM_LOW + tl.arange(0, DIM_HIGH)
        mask = (column < HEAD_DIM)[:, None]
        if MASKED:
            mask = mask & inside[None, :]
        rest = _as(tl.load(place[None, :] + column[:, None], mask=mask, other=0.0), low.dtype)
        scores = dot(high, rest, scores)
    scores = scores * scale
    if HAS_CAP:
        scores = tanh(scores / softcap) * (softcap * LOG2E)
    return scores, key


@triton.jit
def _accumulate(
    scores,  # [BLOCK_M, BLOCK_N]
    value,  # [BLOCK_N, BLOCK_V]
    peak,  # [BLOCK_M]
    total,  # [BLOCK_M]
    sums,  # [BLOCK_M, BLOCK_V]
):
    """The online softmax's step; a row that has seen nothing yet keeps a peak of -inf."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    level = tl.where(higher == MINUS, 0.0, higher)
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(peak - level)
    total = total * shrink + tl.sum(weights, axis=1)
    sums = dot(weights.to(value.dtype), value, sums * shrink[:, None])
    return higher, total, sums


@triton.jit
def _bounds(
    index,  # [BLOCK_M], -1: no row
    position,  # [BLOCK_M], FAR: no row
    begin,  # keys before it are not this kernel's
    start,
    key_len,
    part,
    num_parts,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """This part's first key, the first that not every query sees, and the end."""
    highest = tl.max(index, axis=0)
    end = tl.where(highest >= start, key_len, highest + 1)
    if WINDOW:
        begin = tl.maximum(begin, tl.min(position, axis=0) - WINDOW + 1)
    if CHUNK:
        begin = tl.maximum(begin, tl.min(position, axis=0) // CHUNK * CHUNK)
    if SHARE:  # cut at fixed keys, in tiles from fixed keys
        begin = tl.maximum(tl.maximum(begin, 0) // BLOCK_N * BLOCK_N, part * SHARE)
        end = tl.minimum((part + 1) * SHARE, end)
    else:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_parts) * BLOCK_N
        begin = begin + part * share
        end = tl.minimum(begin + share, end)
    free = begin
    if not WINDOW and not CHUNK:
        whole = tl.minimum(tl.min(tl.where(index < 0, FAR, index), axis=0) + 1, start)
        free = begin + tl.maximum(tl.minimum(end, whole) - begin, 0) // BLOCK_N * BLOCK_N
    return begin, free, end


@triton.jit
def _values(place, key, inside, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
            SHARED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """A tile's values [BLOCK_N, BLOCK_V]; with SHARED, the keys that are already there."""
    if SHARED:
        return tl.trans(key)
    else:
        column = tl.arange(0, BLOCK_V)
        mask = (column < VALUE_DIM)[None, :]
        if MASKED:
            mask = mask & inside[:, None]
        return _as(tl.load(place[:, None] + column[None, :], mask=mask, other=0.0), key.dtype)


@triton.jit
def _before(
    sinks, context_out, context_logs,  # as of `attend_kernel`
    item, head, row, real, part, context, num_rows,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The softmax's peak, total and sums before the first key: the sink's, in the first part; or
    the context's."""
    BLOCK_M: tl.constexpr = real.shape[0]
    peak = tl.full([BLOCK_M], MINUS, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if sinks is not None:
        if part == 0:
            peak = tl.load(sinks + head, mask=real, other=0.0) * LOG2E
            total = total + 1.0
    if context_out is not None:
        has_keys = real & (row * 0 < context)  # of none, a library may leave anything
        place = context_logs + head.to(tl.int64) * num_rows + row
        peak = tl.load(place, mask=has_keys, other=MINUS) * LOG2E
        total = has_keys.to(tl.float32)
        column = tl.arange(0, BLOCK_V)
        mask = has_keys[:, None] & (column < VALUE_DIM)[None, :]
        place = context_out + (item * VALUE_DIM)[:, None] + column[None, :]
        sums = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return peak, total, sums


@triton.jit
def _part(
    heads,  # [BLOCK_M, 1], where queries begin
    real, cos, sin, warmth, factor, weight,
    begin: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_BEGIN: tl.constexpr,
    ROTARY_DIM: tl.constexpr, NORM: tl.constexpr, PREPARES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Columns `[begin, begin + DIM)` of the queries, [BLOCK_M, DIM]."""
    column = begin + tl.arange(0, DIM)[None, :]
    mask = real[:, None] & (column < HEAD_DIM)
    if PREPARES:
        wide = prepared(
            heads, column, mask, cos, sin, factor, weight, HEAD_DIM, ROTARY_BEGIN, ROTARY_DIM, NORM
        )
        return (wide * warmth[:, None]).to(heads.dtype.element_ty)
    else:
        return tl.load(heads + column, mask=mask, other=0.0)


@triton.jit
def _item(
    block,
    items,
    query_start,
    num_seqs,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """A program's sequence, block of queries (beyond any: none), part, and number of parts."""
    seq, first, part, num_parts = block, block * 0, block * 0, block * 0 + 1
    if IS_SPLIT:
        place = items + block * 4
        seq, first = tl.load(place), tl.load(place + 1)
        part, num_parts = tl.load(place + 2), tl.load(place + 3)
        first = tl.where(seq < 0, NOTHING, first)
        seq = tl.maximum(seq, 0)
    elif not ONE_BLOCK:
        seq = _sequence_of(block, query_start, num_seqs, GROUP, BLOCK_M)
        first = block - (tl.load(query_start + seq) * GROUP // BLOCK_M + seq)
    return seq, first, part, num_parts


@triton.jit
def _queries(
    query, begin_row,
    row, item, real,  # [BLOCK_M]
    part, begin, end, context, kv_head,
    cos, sin, temperature, slots, is_tempered, key_factor, value_factor, keys, values,
    QUERY_NORM: tl.constexpr, query_weight, query_eps,
    KEY_NORM: tl.constexpr, key_weight, key_eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, DIM_LOW: tl.constexpr, DIM_HIGH: tl.constexpr, BLOCK_V: tl.constexpr,
    ROTARY_BEGIN: tl.constexpr, ROTARY_DIM: tl.constexpr, BITS: tl.constexpr,
    PREPARES: tl.constexpr,
):  # fmt: skip
    """Both parts of a block of queries; with PREPARES, once the keys that they read are stored."""
    heads, factor, warmth = query + (item * HEAD_DIM)[:, None], 1.0, 1.0
    half = (row.to(tl.int64) * (ROTARY_DIM // 2))[:, None]
    if PREPARES:
        BLOCK: tl.constexpr = 2 * DIM_LOW if DIM_HIGH else DIM_LOW
        first_row = tl.where(part > 0, tl.maximum(begin - context, 0), 0)
        store_rows(
            query, begin_row, first_row, end - context, kv_head, cos, sin, slots, keys, values,
            key_factor, value_factor, KEY_NORM, key_weight, key_eps, NUM_HEADS, NUM_KV_HEADS,
            HEAD_DIM, VALUE_DIM, ROTARY_BEGIN, ROTARY_DIM, BITS, BLOCK, BLOCK_V,
        )  # fmt: skip
        BESIDE: tl.constexpr = NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM)
        heads += (row.to(tl.int64) * BESIDE)[:, None]
        bits = tl.load(temperature + row, mask=real & (row * 0 < is_tempered), other=ONE)
        warmth = bits.to(tl.float32, bitcast=True)
        if QUERY_NORM:
            column = tl.arange(0, BLOCK)[None, :]
            of_head = real[:, None] & (column < HEAD_DIM)
            factor = factor_of(heads, column, of_head, query_eps, HEAD_DIM, 1)[:, None]
        tl.debug_barrier()  # keys that other threads have stored are read below
    low = _part(heads, real, cos + half, sin + half, warmth, factor, query_weight, 0, HEAD_DIM,
                ROTARY_BEGIN, ROTARY_DIM, QUERY_NORM, PREPARES, DIM_LOW)  # fmt: skip
    high = low
    if DIM_HIGH:
        high = _part(heads, real, cos + half, sin + half, warmth, factor, query_weight, DIM_LOW,
                     HEAD_DIM, ROTARY_BEGIN, ROTARY_DIM, QUERY_NORM, PREPARES,
                     DIM_HIGH)  # fmt: skip
    return low, high


@triton.jit
def _walk(
    low, high, peak, total, sums,
    begin, free, end,  # keys; those before `free` are seen by all queries
    keys, values,
    table,  # of the sequence's blocks
    kv_head, row, real, index, position, start,
    before,  # rows before the sequence's first key's
    positions, ancestors, num_words, to_value, to_value_head, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_N: tl.constexpr, DIM_LOW: tl.constexpr, DIM_HIGH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Peak, total and sums after a part of the keys, tile by tile."""
    if not HAS_CAP:
        scale = scale * LOG2E
    keys += kv_head * HEAD_DIM
    values += kv_head * to_value_head
    for at in tl.range(begin, free, BLOCK_N, disable_licm=SHARED):
        key = at + tl.arange(0, BLOCK_N)
        slot = tl.load(table + key // PAGE).to(tl.int64) * PAGE + key % PAGE
        scores, tile = _scores(
            low, high, keys + slot * (NUM_KV_HEADS * HEAD_DIM), key < end, scale, softcap,
            HAS_CAP, HEAD_DIM, DIM_LOW, DIM_HIGH, False,
        )  # fmt: skip
        value = _values(
            values + slot * to_value, tile, key < end, VALUE_DIM, BLOCK_V, SHARED, False
        )
        peak, total, sums = _accumulate(scores, value, peak, total, sums)
    # A slot that no row sees may hold anything, also what is not a number: its values are zeros.
    # Beside the sums of a tile of latents there are no registers for what is computed before the
    # loop, nor for tiles on their way; few keys are not seen by all queries.
    STAGES: tl.constexpr = 1 if SHARED else None
    for at in tl.range(free, end, BLOCK_N, num_stages=STAGES, disable_licm=SHARED):
        key = at + tl.arange(0, BLOCK_N)
        inside = key < end
        slot = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
        seen = _visible(
            key, inside, row, real, index, position, start, before, positions,
            ancestors, num_words, at + BLOCK_N > start, WINDOW, CHUNK,
        )  # fmt: skip
        is_read = tl.max(seen.to(tl.int32), axis=0) > 0
        if SHARED:
            inside = is_read
        scores, tile = _scores(
            low, high, keys + slot * (NUM_KV_HEADS * HEAD_DIM), inside, scale, softcap,
            HAS_CAP, HEAD_DIM, DIM_LOW, DIM_HIGH, True,
        )  # fmt: skip
        value = _values(values + slot * to_value, tile, inside, VALUE_DIM, BLOCK_V, SHARED, True)
        scores = tl.where(seen, scores, MINUS)
        if not SHARED:
            value = tl.where(is_read[:, None], value, 0.0)
        peak, total, sums = _accumulate(scores, value, peak, total, sums)
    return peak, total, sums


_SIZES = ("num_rows", "num_seqs", "max_blocks", "num_words", "is_tempered")
_ARRAYS = ("logs", "sinks", "context_logs", "items", "counts", "positions", "row_index",
           "query_start", "context_lens", "tree_start", "block_tables", "ancestors", "temperature",
           "slots")  # fmt: skip
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


# A step's sizes and the addresses of its arrays are not compiled in: see `variants`.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ARRAYS)
def attend_kernel(
    query,  # [num_rows, NUM_HEADS, HEAD_DIM]; with PREPARES joined rows, with keys and values
    keys,  # [num_slots, NUM_KV_HEADS, HEAD_DIM]
    values,  # [num_slots, NUM_KV_HEADS, VALUE_DIM]; the keys if they are shared
    out,  # [num_rows, NUM_HEADS, VALUE_DIM]
    parts,  # [num_items, NUM_KV_HEADS, BLOCK_M, VALUE_DIM] float32, each normalised; with IS_SPLIT
    logs,  # [num_items, NUM_KV_HEADS, BLOCK_M] float32: logarithms to base 2 of their sums
    sinks,  # [NUM_HEADS] float32, or None
    context_out,  # [num_rows, NUM_HEADS, VALUE_DIM], attention to the context alone; or None
    context_logs,  # [NUM_HEADS, num_rows] float32, natural logarithms of its sums
    items, counts,  # of `schedule_kernel`
    positions, row_index,  # [num_rows]
    query_start, context_lens, tree_start,  # per sequence
    block_tables,  # [num_seqs, max_blocks]
    ancestors,  # [num_rows, num_words] int64
    num_rows, num_seqs, max_blocks, num_words, to_value, to_value_head, scale, softcap, value_scale,
    cos, sin, temperature, slots,  # as of `_prepare_kernel`; the third's bits, if `is_tempered`
    is_tempered, key_factor, value_factor,
    QUERY_NORM: tl.constexpr, query_weight, query_eps,
    KEY_NORM: tl.constexpr, key_weight, key_eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr, SHARED: tl.constexpr, IS_SPLIT: tl.constexpr, SHARE: tl.constexpr,
    ONE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM_LOW: tl.constexpr,
    DIM_HIGH: tl.constexpr, BLOCK_V: tl.constexpr, ROTARY_BEGIN: tl.constexpr,
    ROTARY_DIM: tl.constexpr, BITS: tl.constexpr, PREPARES: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of queries, or items, NUM_KV_HEADS).

    With PREPARES, a sequence's queries are one block, and who reads a key of the step stores it.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    block, kv_head = tl.program_id(0), tl.program_id(1)
    seq, first, part, num_parts = _item(
        block, items, query_start, num_seqs, GROUP, BLOCK_M, IS_SPLIT, ONE_BLOCK
    )
    begin_row = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - begin_row
    if first * BLOCK_M >= query_len * GROUP:
        return
    flat = first * BLOCK_M + tl.arange(0, BLOCK_M)
    real = flat < query_len * GROUP
    row = begin_row + tl.where(real, flat // GROUP, 0)
    head = kv_head * GROUP + flat % GROUP
    index = tl.load(row_index + row, mask=real, other=-1)
    position = tl.load(positions + row, mask=real, other=FAR)
    start, context = tl.load(tree_start + seq), tl.load(context_lens + seq)
    first_key = context if context_out is not None else context * 0
    begin, free, end = _bounds(index, position, first_key, start, context + query_len, part,
                               num_parts, WINDOW, CHUNK, SHARE, BLOCK_N)  # fmt: skip
    item = row.to(tl.int64) * NUM_HEADS + head
    low, high = _queries(
        query, begin_row, row, item, real, part, begin, end, context, kv_head,
        cos, sin, temperature, slots, is_tempered, key_factor, value_factor, keys, values,
        QUERY_NORM, query_weight, query_eps, KEY_NORM, key_weight, key_eps,
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, DIM_LOW, DIM_HIGH, BLOCK_V,
        ROTARY_BEGIN, ROTARY_DIM, BITS, PREPARES,
    )  # fmt: skip
    peak, total, sums = _before(sinks, context_out, context_logs, item, head, row, real, part,
                                context, num_rows, VALUE_DIM, BLOCK_V)  # fmt: skip
    table = block_tables + seq.to(tl.int64) * max_blocks
    peak, total, sums = _walk(
        low, high, peak, total, sums, begin, free, end, keys, values, table, kv_head,
        row, real, index, position, start, begin_row - context, positions, ancestors,
        num_words, to_value, to_value_head, scale, softcap, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, PAGE,
        WINDOW, CHUNK, HAS_CAP, SHARED, BLOCK_N, DIM_LOW, DIM_HIGH, BLOCK_V,
    )  # fmt: skip
    rows = out + item * VALUE_DIM
    if IS_SPLIT:
        if num_parts > 1:
            join(
                parts, logs, counts, block, part, num_parts, kv_head, real, peak, total, sums,
                rows, value_scale, NUM_KV_HEADS, VALUE_DIM, BLOCK_V,
            )  # fmt: skip
            return
    # A row that sees nothing in any part becomes zeros.
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    column = tl.arange(0, BLOCK_V)
    mask = real[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(rows[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


MIN_KEYS_PER_PART = 256
PROGRAMS_PER_PROCESSOR = 2
_WAVES = 8  # of programs: with more blocks of queries the device is busy whatever their lengths
FIXED = 0
"""Value of `splits`: parts of `FIXED_KEYS` keys from the first key on, and fixed tile sizes."""
FIXED_KEYS = 2048
FIXED_QUERIES = 64
_MIN_TILE = 16  # the smallest side of a matrix product on tensor cores


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes of one launch."""

    queries: int  # BLOCK_M: rows times heads of a group
    keys: int  # BLOCK_N
    dim_low: int
    dim_high: int  # 0: the whole head is in the lower part
    values: int  # BLOCK_V
    num_warps: int
    num_stages: int


def tiles(spec: AttentionSpec, max_query_len: int, itemsize: int) -> Tiles:
    """Returns block sizes for queries of at most that length.

    A tile of keys and one of values, times the stages, stay below 96 KiB of shared memory. Tiles of
    latents have 64 queries if there are more than the smallest tile has: one tile of latents is
    read for all of them, and Hopper's products take 64 rows.
    """
    low, high = split_dim(spec.head_dim)
    values = max(_MIN_TILE, triton.next_power_of_2(spec.value_dim))
    rows = max_query_len * (spec.num_heads // spec.num_kv_heads)
    widest = max(low + high, values)
    most = 64 if widest <= 256 else 32 if widest <= 512 else 16
    queries = min(max(_MIN_TILE, triton.next_power_of_2(rows)), most)
    if _shares_tile(spec, low, values) and itemsize == 2:
        queries = 64 if rows > _MIN_TILE else _MIN_TILE
    own_values = 0 if _shares_tile(spec, low, values) else values
    bytes_per_key = (low + high + own_values) * itemsize
    keys = 64
    while keys > _MIN_TILE and keys * bytes_per_key * 2 > 96 << 10:
        keys //= 2
    num_warps = 8 if queries * widest >= 64 * 256 else 4
    return Tiles(queries, keys, low, high, values, num_warps, 2)


def _shares_tile(spec: AttentionSpec, low: int, values: int) -> bool:
    """Returns True if the lower part of a tile of keys is also a tile of values."""
    return spec.shared_values and low == values == spec.value_dim


def split_dim(head_dim: int) -> tuple[int, int]:
    """Splits a head's columns into one or two powers of two, with minimal padding."""
    low = max(_MIN_TILE, triton.next_power_of_2(head_dim))
    if low in (head_dim, _MIN_TILE):
        return low, 0
    low //= 2
    return low, max(_MIN_TILE, triton.next_power_of_2(head_dim - low))


def num_programs(num_rows: int, num_seqs: int, group: int, queries: int) -> int:
    """Returns the blocks of queries that suffice for any distribution of rows over sequences."""
    return num_rows * group // queries + num_seqs


def most_parts(blocks: int, num_kv_heads: int, max_key_len: int, num_processors: int) -> int:
    """Returns the number of parts in addition to one per block of queries; 0: nothing is cut."""
    wanted = PROGRAMS_PER_PROCESSOR * num_processors
    if max_key_len < 2 * MIN_KEYS_PER_PART or blocks * num_kv_heads >= _WAVES * wanted:
        return 0
    return max(1, wanted // num_kv_heads)


@dataclass(frozen=True, slots=True)
class Variant:
    """The constants compiled into `attend_kernel`, besides a layer's own facts."""

    tile: Tiles
    prepares: bool  # queries, keys and values: of joined rows
    one_block: bool  # each sequence's queries fit into one tile, and no keys are cut
    is_split: bool
    is_fixed: bool

    @staticmethod
    def of(
        spec: AttentionSpec, max_query_len: int, itemsize: int, *, is_split: bool, is_fixed: bool
    ) -> Variant:
        """Returns the variant for queries of at most that length."""
        tile = tiles(spec, FIXED_QUERIES if is_fixed else max_query_len, itemsize)
        group = spec.num_heads // spec.num_kv_heads
        one_block = max_query_len * group <= tile.queries
        # Only one kernel prepares where a row's bits may not depend on the rows beside it.
        takes_joined = one_block and not is_fixed and not spec.shared_values
        takes_joined = takes_joined and not spec.is_prepared
        takes_joined = takes_joined and not (spec.norms_all_heads or spec.norms_after_rotation)
        return Variant(tile, takes_joined, one_block and not is_split, is_split, is_fixed)

    def constants(self, spec: AttentionSpec, block_size: int, bits: int) -> Arguments:
        """Returns the kernel's constants for a layer; `bits` are those of the mantissa of codes."""
        tile = self.tile
        shares_tile = _shares_tile(spec, tile.dim_low, tile.values)
        return (
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, block_size,
            spec.window or 0, spec.chunk or 0, spec.softcap is not None, shares_tile,
            self.is_split, FIXED_KEYS if self.is_fixed else 0, self.one_block,
            tile.queries, tile.keys, tile.dim_low, tile.dim_high, tile.values,
            *((spec.rotary_begin, spec.rotary_dim, bits) if self.prepares else (0, 0, 0)),
            self.prepares,
        )  # fmt: skip

    def norms(self, spec: AttentionSpec) -> Arguments:
        """Returns `facts` of the queries' and the keys' norms."""
        given = (spec.query_norm, spec.key_norm) if self.prepares else (None, None)
        return (*facts(given[0]), *facts(given[1]))

    def schedule_constants(self, spec: AttentionSpec) -> Arguments:
        """Returns the constants of `schedule_kernel`."""
        group = spec.num_heads // spec.num_kv_heads
        bounds = () if self.is_fixed else (spec.window, spec.chunk)
        reach = min((bound for bound in bounds if bound), default=0)
        share = FIXED_KEYS if self.is_fixed else 0
        return (group, reach, share, MIN_KEYS_PER_PART, self.tile.queries, self.tile.keys)

    @property
    def options(self) -> dict[str, int]:
        """Returns the options of a launch."""
        return {"num_warps": self.tile.num_warps, "num_stages": self.tile.num_stages}


def variants(spec: AttentionSpec, itemsize: int, *, is_fixed: bool) -> list[Variant]:
    """Returns every variant of a layer that any step can need: 2 to 8.

    Variants do not depend on a step's sizes or addresses. They depend on the longest query only
    through its tile, and on the number of parts only through whether there are several.
    """
    found: list[Variant] = []
    max_query_len = 1
    while not found or found[-1].one_block:
        for is_split in (True, False):
            found.append(
                Variant.of(spec, max_query_len, itemsize, is_split=is_split, is_fixed=is_fixed)
            )
        max_query_len *= 2
    return list(dict.fromkeys(found))


def warm_up(
    specs: Iterable[AttentionSpec],
    dtype: torch.dtype,
    of_cache: torch.dtype,  # keys and values
    block_size: int,
    of_codes: int,  # bits of the mantissa
    *,
    is_fixed: bool,
    shows_progress: bool,
    merges: Callable[[AttentionSpec], bool] = lambda _: False,  # layers with `attend`'s `context`
) -> int:
    """Compiles every variant of these layers, launching none; returns the number of kernels."""
    from tqdm import tqdm

    todo = [
        (spec, variant, False)
        for spec in specs
        for variant in variants(spec, dtype.itemsize, is_fixed=is_fixed)
    ]
    todo += [
        (spec, variants(spec, dtype.itemsize, is_fixed=is_fixed)[-1], True)
        for spec in specs
        if merges(spec)
    ]
    made: set[int] = set()
    for spec, variant, is_merged in tqdm(
        todo, "Kernels of attention", disable=not shows_progress, file=sys.stderr
    ):
        stored, bits = (dtype, 0) if spec.is_prepared else (of_cache, of_codes)
        to_value_head = spec.head_dim if spec.shared_values else spec.value_dim
        strides = (to_value_head * spec.num_kv_heads, to_value_head)
        sinks = None if spec.sinks is None else spec.sinks.dtype
        sums = torch.float32
        angles = sums if variant.prepares and spec.rotary_dim else dtype
        norms = [each.dtype if isinstance(each, Tensor) else each for each in variant.norms(spec)]
        kernel = attend_kernel.warmup(
            dtype, stored, stored, dtype, sums if variant.is_split else dtype,
            sums if variant.is_split else dtype, sinks,
            *((dtype, sums) if is_merged else (None, None)), *[torch.int32] * 8, torch.int64,
            2, 2, 2, 2, *strides, 1.0, 1.0, 1.0, angles, angles, torch.int32, torch.int32,
            2, 1.0, 1.0, *norms, *variant.constants(spec, block_size, bits),
            grid=(1,), **variant.options,
        )  # fmt: skip
        made.add(id(kernel))
        if variant.is_split:
            schedule = schedule_kernel.warmup(
                *[torch.int32] * 4, 2, 2, 2, 2, 2, *variant.schedule_constants(spec), grid=(1,)
            )
            made.add(id(schedule))
    return len(made)


def prepares(spec: AttentionSpec, max_query_len: int, itemsize: int, splits: int | None) -> bool:
    """Returns True if `attend` takes joined rows that are not prepared."""
    is_fixed = splits == FIXED
    return Variant.of(spec, max_query_len, itemsize, is_split=False, is_fixed=is_fixed).prepares


def attend(
    query: Tensor,  # [num_rows, num_heads, head_dim], or joined rows
    keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
    values: Tensor,  # [num_slots, num_kv_heads, value_dim]; unused if the spec shares them
    plan: PagedStep,
    spec: AttentionSpec,
    num_processors: int,
    splits: int | None = None,  # None: chosen from shapes; `FIXED`
    code: KVCode | None = None,  # of keys and values
    beside: tuple[Rotation | None, Tensor | None] | None = None,  # rotation, temperature
    context: tuple[Tensor, Tensor] | None = None,  # [num_rows, ...] as the result, logarithms
) -> Tensor:  # [num_rows, num_heads, value_dim]
    """Computes attention over keys in their slots; with `beside`, from unprepared joined rows.

    With `context`, which has the attention to the context alone and the natural logarithms of its
    sums [num_heads, num_rows] float32, only the keys of the step are added.
    """
    num_rows = query.shape[0]
    size = (num_rows, spec.num_heads, spec.value_dim)
    out = torch.empty(size, dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    assert query.is_contiguous(), query.stride()
    assert keys.is_contiguous(), keys.stride()
    group = spec.num_heads // spec.num_kv_heads
    is_fixed, max_query_len, itemsize = splits == FIXED, plan.max_query_len, query.element_size()
    made = partial(Variant.of, spec, max_query_len, itemsize, is_fixed=is_fixed)
    variant = made(is_split=False)
    blocks = plan.num_seqs
    if not variant.one_block:
        blocks = num_programs(num_rows, plan.num_seqs, group, variant.tile.queries)
    fixed, most = splits or 0, 1
    num_items = blocks * fixed
    if is_fixed:
        num_items = blocks * max(1, triton.cdiv(plan.max_key_len, FIXED_KEYS))
    elif not fixed and context is None:
        bounds = [bound + max_query_len for bound in (spec.window, spec.chunk) if bound]
        reach = min([plan.max_key_len, *bounds])
        most = most_parts(blocks, spec.num_kv_heads, reach, num_processors)
        num_items = blocks + most
    if spec.shared_values:
        values = keys
    key_scale, value_scale = (1.0, 1.0) if code is None else (code.key_scale, code.value_scale)
    parts, logs, items, counts = out, out, plan.query_start, plan.query_start
    bits = 0 if code is None else code.format.mantissa_bits
    if num_items > blocks:
        variant = made(is_split=True)
        sizes = (num_items, most, fixed, spec.num_kv_heads)
        source = plan if is_fixed or plan.like is None else plan.like
        schedule = schedule_of(source, variant.schedule_constants(spec), *sizes)
        items, counts = schedule.items, schedule.counts
        lanes = (num_items, spec.num_kv_heads, variant.tile.queries)
        parts = query.new_empty((*lanes, spec.value_dim), dtype=torch.float32)
        logs = query.new_empty(lanes, dtype=torch.float32)
    rotation, temperature = beside or (None, None)
    variant = replace(variant, prepares=variant.prepares and beside is not None)
    cos, sin = rotation or (query, query)
    factors = plan.positions if temperature is None else temperature.view(torch.int32)
    attend_kernel[(max(blocks, num_items), spec.num_kv_heads)](
        query, keys, values, out, parts, logs, spec.sinks, *(context or (None, None)),
        items, counts,
        plan.positions, plan.row_index, plan.query_start, plan.context_lens, plan.tree_start,
        plan.block_tables, plan.ancestors,
        num_rows, plan.num_seqs, plan.block_tables.shape[1], plan.ancestors.shape[1],
        values.stride(0), values.stride(1), spec.scale * key_scale, float(spec.softcap or 0.0),
        value_scale, cos, sin, factors, plan.slots, int(temperature is not None),
        inverse(key_scale), inverse(value_scale), *variant.norms(spec),
        *variant.constants(spec, plan.block_size, bits), **variant.options,
    )  # fmt: skip
    return out
