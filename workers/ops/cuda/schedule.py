"""A step's work list for attention: which program computes which part of which sequence.

An item is (sequence, block of queries, part, number of parts). The number of parts of a sequence's
keys depends on its length relative to the others of the step, so one long context among short ones
is spread over the device and the short ones are not cut. The number of items is a bound that
depends on shapes; the lengths are read on the device.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan import PagedStep

_LANES = tl.constexpr(128)
MINUS = tl.constexpr(float("-inf"))
PARTS = tl.constexpr(16)  # that one program adds
SUMS = tl.constexpr(8192)  # that it adds at once


@triton.jit
def _work(seq, inside, query_start, context_lens, GROUP: tl.constexpr, REACH: tl.constexpr,
          BLOCK_M: tl.constexpr):  # fmt: skip
    """Blocks of queries of sequences, and the keys that each reads at most."""
    begin = tl.load(query_start + seq, mask=inside, other=0)
    query_len = tl.load(query_start + seq + 1, mask=inside, other=0) - begin
    num_keys = tl.load(context_lens + seq, mask=inside, other=0) + query_len
    if REACH:
        num_keys = tl.minimum(num_keys, REACH + query_len)
    return tl.cdiv(query_len * GROUP, BLOCK_M), num_keys


@triton.jit
def _parts_of(num_keys, share, fixed):
    return tl.where(fixed > 0, fixed, tl.maximum(tl.cdiv(num_keys, share), 1))


@triton.jit(
    do_not_specialize=["num_seqs", "num_items", "most", "fixed", "num_kv_heads"],
    do_not_specialize_on_alignment=["query_start", "context_lens"],
)
def schedule_kernel(
    query_start, context_lens,  # of the step
    items,  # [num_items, 4], written; beyond the work a sequence of -1
    counts,  # [num_items, num_kv_heads], zeroed: parts that are there, as attention counts them
    num_seqs, num_items,
    most,  # parts of the step, beside one for each block of queries
    fixed,  # parts of every sequence; 0: by its length
    num_kv_heads,
    GROUP: tl.constexpr, REACH: tl.constexpr, SHARE: tl.constexpr, MIN_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs,). A part has SHARE keys, or as many that `most` parts cover all."""
    own = tl.program_id(0)
    lane = tl.arange(0, _LANES)
    total = tl.zeros([], tl.int64)
    for first in range(0, num_seqs, _LANES):
        seq = first + lane
        blocks, num_keys = _work(
            seq, seq < num_seqs, query_start, context_lens, GROUP, REACH, BLOCK_M
        )
        total += tl.sum(blocks.to(tl.int64) * num_keys, axis=0)
    share = tl.cdiv(tl.cdiv(total, most), BLOCK_N) * BLOCK_N
    share = tl.maximum(share, MIN_KEYS).to(tl.int32)
    if SHARE:
        share = tl.zeros([], tl.int32) + SHARE
    before = tl.zeros([], tl.int32)
    for first in range(0, own, _LANES):
        seq = first + lane
        blocks, num_keys = _work(seq, seq < own, query_start, context_lens, GROUP, REACH, BLOCK_M)
        count = blocks * _parts_of(num_keys, share, fixed)
        before += tl.sum(tl.where(seq < own, count, 0), axis=0)
    blocks, num_keys = _work(own, own >= 0, query_start, context_lens, GROUP, REACH, BLOCK_M)
    num_parts = _parts_of(num_keys, share, fixed)
    end = before + blocks * num_parts
    last = tl.where(own == num_seqs - 1, num_items, end)
    for first in range(before, last, _LANES):
        item = first + lane
        is_own = item < end
        place = items + item * 4
        tl.store(place, tl.where(is_own, own, -1), mask=item < last)
        tl.store(place + 1, (item - before) // num_parts, mask=is_own)
        tl.store(place + 2, (item - before) % num_parts, mask=is_own)
        tl.store(place + 3, tl.zeros_like(item) + num_parts, mask=is_own)
    for first in range(before * num_kv_heads, end * num_kv_heads, _LANES):
        tl.store(counts + first + lane, lane * 0, mask=first + lane < end * num_kv_heads)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A step's work list."""

    items: Tensor  # [num_items, 4] int32
    counts: Tensor  # [num_items, num_kv_heads] int32
    made_from: tuple[Tensor, Tensor]  # `query_start` and `context_lens`


def schedule_of(plan: PagedStep, constants: tuple[int, ...], *sizes: int) -> Schedule:
    """Returns a step's list, shared by layers of the same sizes; takes the kernel's arguments."""
    key = (constants, *sizes)
    found = plan.derived.get(key)
    made_from = (plan.query_start, plan.context_lens)
    if found is not None and all(map(operator.is_, found.made_from, made_from)):
        return found
    make = partial(torch.empty, dtype=torch.int32, device=plan.query_start.device)
    num_items, num_kv_heads = sizes[0], sizes[-1]
    made = Schedule(make((num_items, 4)), make((num_items, num_kv_heads)), made_from)
    schedule_kernel[(plan.num_seqs,)](
        *made_from, made.items, made.counts, plan.num_seqs, *sizes, *constants
    )
    plan.derived[key] = made
    return made


# -- parts that attention has computed: the programs that end last add them


@triton.jit
def _group(
    parts, logs,  # as of `attend_kernel`
    lane,  # [BLOCK_M] int64, of the first part
    step,  # lanes from one to the next
    count,
    is_top,  # whether their sum is the result
    real, rows, value_scale,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds neighbouring parts, in order, some columns at a time: those of a wide tile fill the
    registers. Others have just written them."""
    BLOCK_M: tl.constexpr = real.shape[0]
    COLUMNS: tl.constexpr = BLOCK_V if BLOCK_M * BLOCK_V <= SUMS else SUMS // BLOCK_M
    index = tl.arange(0, PARTS)[:, None]
    inside = (index < count) & real[None, :]
    log = tl.load(logs + lane[None, :] + index * step, inside, MINUS, cache_modifier=".cg")
    peak = tl.max(log, axis=0)
    weights = tl.exp2(log - tl.where(peak == MINUS, 0.0, peak)[None, :])
    total = tl.sum(weights, axis=0)
    known = tl.where(total == 0.0, 1.0, total)
    for begin in range(0, BLOCK_V, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        mask = real[:, None] & (column < VALUE_DIM)[None, :]
        sums = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        for at in tl.range(count, num_stages=3):
            place = parts + (lane + at * step)[:, None] * VALUE_DIM + column[None, :]
            value = tl.load(place, mask, 0.0, cache_modifier=".cg")
            weight = tl.sum(tl.where(index == at, weights, 0.0), axis=0)
            sums += value * weight[:, None]
        sums = sums / known[:, None]
        tl.debug_barrier()  # read by all threads, before one writes to the first's place
        if is_top:
            result = (sums * value_scale).to(rows.dtype.element_ty)
            tl.store(rows[:, None] + column[None, :], result, mask=mask)
        else:
            place = parts + lane[:, None] * VALUE_DIM + column[None, :]
            tl.store(place, sums, mask=mask)
    tl.store(logs + lane, tl.where(total == 0.0, MINUS, peak + tl.log2(known)), mask=real)


@triton.jit
def join(
    parts, logs, counts,  # as of `attend_kernel`
    item, part, num_parts, kv_head, real, peak, total, sums,
    rows,  # [BLOCK_M], where the results of the rows begin
    value_scale,
    NUM_KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Leaves one of several parts, and if all others are there, writes the results.

    The last to be counted in a group of parts adds them, and its result is one of a group of
    groups; so sums are taken in one order, whichever program ends last. A group's result lies where
    its first part was, and its count as many places behind that as it is levels up: a group of one
    part has no such places, and is not counted.
    """
    column = tl.arange(0, BLOCK_V)
    lanes = kv_head * real.shape[0] + tl.arange(0, real.shape[0])
    step = NUM_KV_HEADS * real.shape[0]
    own = item.to(tl.int64) * step + lanes
    known = tl.where(total == 0.0, 1.0, total)
    tl.store(logs + own, tl.where(total == 0.0, MINUS, peak + tl.log2(known)), mask=real)
    mask = real[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(parts + own[:, None] * VALUE_DIM + column[None, :], sums / known[:, None], mask=mask)
    size, depth, is_last = 1, 0, num_parts > 0
    while is_last & (size < num_parts):
        first = part // (size * PARTS) * (size * PARTS)
        count = tl.minimum(tl.cdiv(num_parts - first, size), PARTS)
        if count > 1:
            tl.debug_barrier()  # before the count, of all threads
            first += item - part
            counted = counts + (first + depth) * NUM_KV_HEADS + kv_head
            is_last = tl.atomic_add(counted, 1, sem="acq_rel") % count == count - 1
            if is_last:
                lane = first.to(tl.int64) * step + lanes
                is_top = size * PARTS >= num_parts
                _group(
                    parts, logs, lane, size * step, count, is_top, real, rows, value_scale,
                    VALUE_DIM, BLOCK_V,
                )  # fmt: skip
        size, depth = size * PARTS, depth + 1
