"""Prepares attention: queries and keys with their norms and rotation, keys and values in a cache.

A kernel has one program per head of each row. Queries go to a separate tensor, because a program
that wrote them back into `joined` could overwrite values that another of its threads has yet to
read. If a sequence's queries are one block of attention's, attention does the same itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention import KVCode, inverse
from ..plan import PagedStep
from ..protocol import AttentionSpec, Rotation
from .elementwise import facts


@triton.jit
def _normed(wide, factor, weight, columns, mask, kind: tl.constexpr):
    """Elements `columns` of heads times `factor` and the norm's weights, rounded."""
    wide = wide * factor
    if weight is not None:
        wide = wide * tl.load(weight + columns, mask=mask, other=0.0)
    return wide.to(kind).to(tl.float32)


@triton.jit
def prepared(
    heads,  # where they begin: of one, or of several with an axis of columns
    columns,  # along the last axis
    inside,  # those of the heads
    cos, sin,  # where [ROTARY_DIM / 2] of the heads' rows begin
    factor,  # of the norm, of each head
    weight,
    HEAD_DIM: tl.constexpr,
    ROTARY_BEGIN: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,  # before the rotation
):  # fmt: skip
    """Columns of heads as attention reads them, in float32."""
    kind: tl.constexpr = heads.dtype.element_ty
    wide = tl.load(heads + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        wide = _normed(wide, factor, weight, columns, columns < HEAD_DIM, kind)
    if ROTARY_DIM:
        HALF: tl.constexpr = ROTARY_DIM // 2
        local = columns - ROTARY_BEGIN
        turned = (local >= 0) & (local < ROTARY_DIM)
        lower = local < HALF
        partner = tl.where(lower, columns + HALF, columns - HALF)
        other = tl.load(heads + partner, mask=turned & inside, other=0.0).to(tl.float32)
        if NORM:
            other = _normed(other, factor, weight, partner, turned, kind)
        angle = tl.where(lower, local, local - HALF)
        along = tl.load(cos + angle, mask=turned & inside, other=1.0)
        across = tl.load(sin + angle, mask=turned & inside, other=0.0)
        wide = wide * along + other * tl.where(lower, -across, across)
        wide = wide.to(kind).to(tl.float32)
    return wide


@triton.jit
def factor_of(heads, columns, inside, eps, NUM: tl.constexpr, AXIS: tl.constexpr):
    """One over the root mean square of heads of NUM elements."""
    wide = tl.load(heads + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=AXIS) / NUM + eps)


@triton.jit
def _prepared_head(
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
    WIDE: tl.constexpr,  # a power of 2 for all heads, if the norm is of all; else 0
    BLOCK: tl.constexpr,
):  # [BLOCK] float32
    """One head, with any kind of norm."""
    kind: tl.constexpr = heads.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < HEAD_DIM
    place = heads + head * HEAD_DIM
    weights = weight
    factor = 1.0
    if NORM and not NORM_AFTER:
        if WIDE:
            every = tl.arange(0, WIDE)
            factor = factor_of(heads, every, every < NUM * HEAD_DIM, eps, NUM * HEAD_DIM, 0)
            if weight is not None:
                weights = weight + head * HEAD_DIM
        else:
            factor = factor_of(place, columns, mask, eps, HEAD_DIM, 0)
    wide = prepared(place, columns, mask, cos, sin, factor, weights, HEAD_DIM, ROTARY_BEGIN,
                    ROTARY_DIM, NORM and not NORM_AFTER)  # fmt: skip
    if NORM and NORM_AFTER:
        factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / HEAD_DIM + eps)
        wide = _normed(wide, factor, weights, columns, mask, kind)
    return wide


ROWS = tl.constexpr(16)  # that attention puts into the cache at once


@triton.jit
def coded(wide, BITS: tl.constexpr):  # float32 -> uint8
    """Codes of 8 bits with BITS of a mantissa: `KVFormat.encode`, in integers that every device
    rounds alike.

    The smallest have no exponent: as the last bits of a float of the right size, they are counted.
    """
    BIAS: tl.constexpr = (1 << (6 - BITS)) - 1
    LARGEST: tl.constexpr = 448.0 if BITS == 3 else 57344.0
    SHIFT: tl.constexpr = 23 - BITS
    size = tl.minimum(tl.abs(wide), LARGEST)
    words = size.to(tl.int32, bitcast=True)
    rounded = words + ((1 << (SHIFT - 1)) - 1) + ((words >> SHIFT) & 1)
    code = (rounded - ((127 - BIAS) << 23)) >> SHIFT
    counted = (size + 2.0 ** (24 - BIAS - BITS)).to(tl.int32, bitcast=True)
    code = tl.where(size < 2.0 ** (1 - BIAS), counted - ((151 - BIAS - BITS) << 23), code)
    sign = (wide.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def _keep(place, wide, factor, mask, BITS: tl.constexpr):
    """Stores values as a cache keeps them, with BITS as codes."""
    if BITS:
        kind: tl.constexpr = place.dtype.element_ty  # of 8 bits
        code = coded(wide.to(tl.float32) * factor, BITS)
        tl.store(place, code.to(kind, bitcast=True), mask=mask)
    else:
        tl.store(place, wide, mask=mask)


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
    key_factor,  # of codes
    value_factor,
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
    BITS: tl.constexpr,  # of mantissa, of codes; 0: the cache holds none
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
        wide = _prepared_head(
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
            wide = _prepared_head(
                begin + NUM_HEADS * HEAD_DIM, head, cos + half, sin + half, key_weight, key_eps,
                NUM_KV_HEADS, HEAD_DIM, ROTARY_BEGIN, ROTARY_DIM, KEY_NORM, NORM_AFTER, KEY_WIDE,
                BLOCK,
            )  # fmt: skip
            place = keys + (slot * NUM_KV_HEADS + head) * HEAD_DIM + columns
            inside = columns < tl.where(slot >= 0, HEAD_DIM, 0)
            _keep(place, wide.to(kind), key_factor, inside, BITS)
        else:
            head = lane - NUM_HEADS - NUM_KV_HEADS
            wanted = tl.arange(0, BLOCK_V)
            source = begin + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + head * VALUE_DIM
            value = tl.load(source + wanted, mask=wanted < VALUE_DIM, other=0.0)
            target = values + (slot * NUM_KV_HEADS + head) * VALUE_DIM + wanted
            is_wanted = wanted < tl.where(slot >= 0, VALUE_DIM, 0)
            _keep(target, value, value_factor, is_wanted, BITS)


@triton.jit
def store_rows(
    joined,  # [num_rows, joined width]
    begin, first, end,  # the sequence's first row; which of its rows
    kv_head, cos, sin, slots, keys, values, key_factor, value_factor,
    NORM: tl.constexpr, weight, eps,  # of keys
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROTARY_BEGIN: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Puts keys and values of a sequence's rows `[first, end)` into their slots, of one head."""
    WIDTH: tl.constexpr = (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM + NUM_KV_HEADS * VALUE_DIM
    kind: tl.constexpr = joined.dtype.element_ty
    columns, column = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_V)[None, :]
    for at in range(first, end, ROWS):
        index = at + tl.arange(0, ROWS)[:, None]
        row, real = (begin + index).to(tl.int64), index < end
        slot = tl.load(slots + row, mask=real, other=-1).to(tl.int64) * NUM_KV_HEADS + kv_head
        heads = joined + row * WIDTH + (NUM_HEADS + kv_head) * HEAD_DIM
        half, mask = row * (ROTARY_DIM // 2), real & (columns < HEAD_DIM)
        factor = 1.0
        if NORM:
            factor = factor_of(heads, columns, mask, eps, HEAD_DIM, 1)[:, None]
        key = prepared(heads, columns, mask, cos + half, sin + half, factor, weight, HEAD_DIM,
                       ROTARY_BEGIN, ROTARY_DIM, NORM).to(kind)  # fmt: skip
        source = heads + (NUM_KV_HEADS - kv_head) * HEAD_DIM + kv_head * VALUE_DIM
        value = tl.load(source + column, mask=real & (column < VALUE_DIM), other=0.0)
        mask &= slot >= 0
        _keep(keys + slot * HEAD_DIM + columns, key, key_factor, mask, BITS)
        mask = (slot >= 0) & (column < VALUE_DIM)
        _keep(values + slot * VALUE_DIM + column, value, value_factor, mask, BITS)


def prepare_and_store(
    joined: Tensor,  # [num_rows, spec.joined_width]
    rotation: Rotation | None,
    temperature: Tensor | None,  # [num_rows] float32
    plan: PagedStep,
    keys: Tensor,  # [num_slots, num_kv_heads, head_dim], written
    values: Tensor,  # [num_slots, num_kv_heads, value_dim], written
    spec: AttentionSpec,
    code: KVCode | None = None,  # of keys and values
) -> Tensor:  # [num_rows, num_heads, head_dim]
    """Returns prepared queries; writes keys and values to their slots."""
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
    bits, factors = 0, [1.0, 1.0]
    if code is not None:
        bits = code.format.mantissa_bits
        factors = [inverse(code.key_scale), inverse(code.value_scale)]
    if num_rows:
        _prepare_kernel[(num_rows, num_lanes)](
            joined, joined.stride(0), cos, sin, temperature, plan.slots,
            query, keys, values, *factors, *facts(spec.query_norm), *facts(spec.key_norm),
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim,
            spec.rotary_begin, rotary_dim, spec.norms_after_rotation, *wide, bits,
            triton.next_power_of_2(spec.head_dim), triton.next_power_of_2(spec.value_dim),
            num_warps=1,
        )  # fmt: skip
    return query


def can_prepare(spec: AttentionSpec) -> bool:
    """Returns True if the kernel supports the layer: not if all heads are normed after rotation."""
    normed = spec.query_norm is not None or spec.key_norm is not None
    return not (normed and spec.norms_all_heads and spec.norms_after_rotation)
