"""The second half of split attention: a row's parts, weighted by their sums of exponentials.

Source: Dao, Haziza, Massa, Sizov 2023, Flash-Decoding for long-context inference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weighted(
    parts, level, height, split, columns, num_items, item,
    SPLITS: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """All parts at once."""
    weights = tl.exp2(level - height)
    total = tl.sum(weights, axis=0)
    place = parts + (split * num_items + item)[:, None] * VALUE_DIM + columns[None, :]
    mask = (split < SPLITS)[:, None] & (columns < VALUE_DIM)[None, :]
    part = tl.load(place, mask=mask, other=0.0)
    return tl.sum(part * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _combine_kernel(
    parts,  # [SPLITS, num_items, VALUE_DIM] float32, each normalised
    sums,  # [SPLITS, num_items] float32, base-2 logarithms of sums of exponentials
    out,  # [num_items, VALUE_DIM]
    num_items,
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S).to(tl.int64)
    columns = tl.arange(0, BLOCK_V)
    level = tl.load(sums + split * num_items + item, mask=split < SPLITS, other=float("-inf"))
    peak = tl.max(level, axis=0)
    height = tl.where(peak == float("-inf"), 0.0, peak)
    if IN_ORDER:  # parts beyond a row's keys add zeros, however many there are
        total = tl.zeros([], tl.float32)
        result = tl.zeros([BLOCK_V], tl.float32)
        place = item
        for _ in range(SPLITS):
            weight = tl.exp2(tl.load(sums + place) - height)
            part = parts + place * VALUE_DIM + columns
            total += weight
            result += tl.load(part, mask=columns < VALUE_DIM, other=0.0) * weight
            place += num_items
        result = result / tl.where(total == 0.0, 1.0, total)
    else:
        result = _weighted(parts, level, height, split, columns, num_items, item, SPLITS, VALUE_DIM)
    target = out + item * VALUE_DIM + columns
    tl.store(target, result.to(out.dtype.element_ty), mask=columns < VALUE_DIM)


def combine(
    parts: Tensor,  # [num_splits, num_rows, num_heads, value_dim] float32
    sums: Tensor,  # [num_splits, num_rows, num_heads] float32
    out: Tensor,  # [num_rows, num_heads, value_dim], written
    *,
    in_order: bool = False,
) -> None:
    """A row that sees nothing in any part becomes zeros.

    With `in_order`, parts are added one by one, so that empty ones behind do not change the bits.
    """
    num_splits, num_rows, num_heads, value_dim = parts.shape
    assert parts.dtype == sums.dtype == torch.float32, (parts.dtype, sums.dtype)
    _combine_kernel[(num_rows * num_heads,)](
        parts, sums, out, num_rows * num_heads, num_splits, value_dim,
        triton.next_power_of_2(num_splits), triton.next_power_of_2(value_dim), in_order,
    )  # fmt: skip
