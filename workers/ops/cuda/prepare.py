"""Before attention: queries and keys with their norms and rotation, keys and values in their slots.

One program for each head of each row. Queries go to a tensor of their own, because a program that
wrote them back into `joined` could overwrite what another of its threads has yet to read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plan import PagedStep
from ..protocol import AttentionSpec, Rotation
from .elementwise import facts


@triton.jit
def _factor(
    heads, head, eps, columns, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr, NUM: tl.constexpr
):
    """One over the root mean square of a head, or of all `NUM` heads if `WIDE` is not 0."""
    if WIDE:
        every = tl.arange(0, WIDE)
        wide = tl.load(heads + every, mask=every < NUM * HEAD_DIM, other=0.0).to(tl.float32)
        mean = tl.sum(wide * wide, axis=0) / (NUM * HEAD_DIM)
    else:
        wide = tl.load(heads + head * HEAD_DIM + columns, mask=columns < HEAD_DIM, other=0.0)
        wide = wide.to(tl.float32)
        mean = tl.sum(wide * wide, axis=0) / HEAD_DIM
    return tl.rsqrt(mean + eps)


@triton.jit
def _normed(wide, factor, weight, columns, mask, kind: tl.constexpr):
    """Elements `columns` of a head times `factor` and the norm's weights, rounded."""
    wide = wide * factor
    if weight is not None:
        wide = wide * tl.load(weight + columns, mask=mask, other=0.0)
    return wide.to(kind).to(tl.float32)


@triton.jit
def _prepared(
    heads,  # [NUM, HEAD_DIM] of one row
    head,
    cos,  # [ROTARY_DIM / 2] of that row
    sin,
    weight,
    eps,
    NUM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_BEGIN: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # [BLOCK] float32
    """One head as attention reads it."""
    kind: tl.constexpr = heads.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < HEAD_DIM
    place = heads + head * HEAD_DIM
    wide = tl.load(place + columns, mask=mask, other=0.0).to(tl.float32)
    weights = weight
    factor = 1.0
    if NORM and not NORM_AFTER:
        factor = _factor(heads, head, eps, columns, HEAD_DIM, WIDE, NUM)
        if WIDE:
            if weight is not None:
                weights = weight + head * HEAD_DIM
        wide = _normed(wide, factor, weights, columns, mask, kind)
    if ROTARY_DIM:
        HALF: tl.constexpr = ROTARY_DIM // 2
        local = columns - ROTARY_BEGIN
        turned = (local >= 0) & (local < ROTARY_DIM)
        lower = local < HALF
        partner = tl.where(lower, columns + HALF, columns - HALF)
        other = tl.load(place + partner, mask=turned, other=0.0).to(tl.float32)
        if NORM and not NORM_AFTER:
            other = _normed(other, factor, weights, partner, turned, kind)
        angle = tl.where(lower, local, local - HALF)
        along = tl.load(cos + angle, mask=turned, other=1.0)
        across = tl.load(sin + angle, mask=turned, other=0.0)
        wide = wide * along + other * tl.where(lower, -across, across)
        wide = wide.to(kind).to(tl.float32)
    if NORM and NORM_AFTER:
        factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / HEAD_DIM + eps)
        wide = _normed(wide, factor, weights, columns, mask, kind)
    return wide


@triton.jit(do_not_specialize_on_alignment=["temperature", "slots"])
def _prepare_kernel(
    joined,  # [num_rows, joined width]: queries, keys, values
    to_row,
    cos,  # [num_rows, ROTARY_DIM / 2] float32
    sin,
    temperature,  # [num_rows] float32, or None
    slots,  # [num_rows] int32; below 0: not stored
    query,  # [num_rows, NUM_HEADS, HEAD_DIM], written
    keys,  # [num_slots, NUM_KV_HEADS, HEAD_DIM], written
    values,  # [num_slots, NUM_KV_HEADS, VALUE_DIM], written
    QUERY_NORM: tl.constexpr, query_weight, query_eps,  # of `facts`
    KEY_NORM: tl.constexpr, key_weight, key_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_BEGIN: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    QUERY_WIDE: tl.constexpr,
    KEY_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    begin = joined + row * to_row
    kind: tl.constexpr = joined.dtype.element_ty
    half = row * (ROTARY_DIM // 2)
    if lane < NUM_HEADS:
        wide = _prepared(
            begin, lane, cos + half, sin + half, query_weight, query_eps,
            NUM_HEADS, HEAD_DIM, ROTARY_BEGIN, ROTARY_DIM, QUERY_NORM, NORM_AFTER, QUERY_WIDE,
            BLOCK,
        )  # fmt: skip
        if temperature is not None:
            wide = wide * tl.load(temperature + row)
        place = query + (row * NUM_HEADS + lane) * HEAD_DIM + columns
        tl.store(place, wide.to(kind), mask=columns < HEAD_DIM)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if lane < NUM_HEADS + NUM_KV_HEADS:
            head = lane - NUM_HEADS
            wide = _prepared(
                begin + NUM_HEADS * HEAD_DIM, head, cos + half, sin + half, key_weight, key_eps,
                NUM_KV_HEADS, HEAD_DIM, ROTARY_BEGIN, ROTARY_DIM, KEY_NORM, NORM_AFTER, KEY_WIDE,
                BLOCK,
            )  # fmt: skip
            place = keys + (slot * NUM_KV_HEADS + head) * HEAD_DIM + columns
            tl.store(place, wide.to(kind), mask=columns < tl.where(slot >= 0, HEAD_DIM, 0))
        else:
            head = lane - NUM_HEADS - NUM_KV_HEADS
            wanted = tl.arange(0, BLOCK_V)
            source = begin + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + head * VALUE_DIM
            value = tl.load(source + wanted, mask=wanted < VALUE_DIM, other=0.0)
            target = values + (slot * NUM_KV_HEADS + head) * VALUE_DIM + wanted
            tl.store(target, value, mask=wanted < tl.where(slot >= 0, VALUE_DIM, 0))


def prepare_and_store(
    joined: Tensor,  # [num_rows, spec.joined_width]
    rotation: Rotation | None,
    temperature: Tensor | None,  # [num_rows] float32
    plan: PagedStep,
    keys: Tensor,  # [num_slots, num_kv_heads, head_dim], written
    values: Tensor,  # [num_slots, num_kv_heads, value_dim], written
    spec: AttentionSpec,
) -> Tensor:  # [num_rows, num_heads, head_dim]
    """Queries as attention reads them; keys and values are in their slots afterwards."""
    num_rows = joined.shape[0]
    assert joined.shape == (num_rows, spec.joined_width), (joined.shape, spec)
    assert joined.stride(1) == 1, joined.stride()
    assert keys.is_contiguous(), keys.stride()
    assert values.is_contiguous(), values.stride()
    query = torch.empty(
        (num_rows, spec.num_heads, spec.head_dim), dtype=joined.dtype, device=joined.device
    )
    rotary_dim, cos, sin = 0, plan.positions, plan.positions  # unused without rotation
    if rotation is not None and spec.rotary_dim:
        rotary_dim, (cos, sin) = spec.rotary_dim, rotation
        assert cos.shape == (num_rows, rotary_dim // 2), (cos.shape, spec)
    num_lanes = spec.num_heads + spec.num_kv_heads * (1 if spec.shared_values else 2)
    wide = [
        triton.next_power_of_2(heads * spec.head_dim) if spec.norms_all_heads else 0
        for heads in (spec.num_heads, spec.num_kv_heads)
    ]
    if num_rows:
        _prepare_kernel[(num_rows, num_lanes)](
            joined, joined.stride(0), cos, sin, temperature, plan.slots,
            query, keys, values, *facts(spec.query_norm), *facts(spec.key_norm),
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim,
            spec.rotary_begin, rotary_dim, spec.norms_after_rotation, *wide,
            triton.next_power_of_2(spec.head_dim), triton.next_power_of_2(spec.value_dim),
            num_warps=1,
        )  # fmt: skip
    return query


def can_prepare(spec: AttentionSpec) -> bool:
    """Whether the kernel covers the layer: no architecture norms all heads after rotating them."""
    normed = spec.query_norm is not None or spec.key_norm is not None
    return not (normed and spec.norms_all_heads and spec.norms_after_rotation)
