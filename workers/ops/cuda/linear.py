"""Products with a fixed order of additions, for plain or quantised weights.

A program computes a tile of rows and columns over a part of the depth (`SPLITS`); the parts are
added in order. With a fixed tile of rows (`fixed_rows`), every size depends only on the weight's
shape, so a row's bits do not depend on the number of rows. Quantised weights are dequantised tile
by tile and rounded to the type of the states, so a product equals that of the dequantised weight,
but reads a quarter or half of its bytes.

Fixed tiles against batch variance: He and Thinking Machines Lab 2025, "Defeating Nondeterminism in
LLM Inference".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantised import QuantisedTensor

# Products of tiles, exact in float32.

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(left, right, total):  # [m, k], [k, n], [m, n] float32 -> [m, n] float32
    """`total + left @ right`. The interpreter would multiply the bits of bfloat16 as integers."""
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc=total, input_precision="ieee")


PLAIN, FP8, INTEGER, NIBBLES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FIXED_ROWS = 64
_COLUMNS = 64
_DEPTH = 64
_MAX_SPLITS = 8
_MIN_STEPS = 8  # steps of a part, at least


@triton.jit
def decoded(stored, KIND: tl.constexpr):
    """Codes in float32; e4m3's bits, as float16's, are the value over 256."""
    if KIND == FP8:
        bits = stored.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return stored.to(tl.float32)


@triton.jit
def of_groups(
    groups,  # [OUT, num_groups], scales or zeros
    column,  # [BLOCK_N]
    inside,  # [BLOCK_N] bool
    begin,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # [BLOCK_N, BLOCK_K] float32, or [BLOCK_N, 1] where the whole depth is in one group
    """A group's value for each of its columns `[begin, begin + BLOCK_K)`, loaded once a group."""
    NUM_GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    row = groups + column * NUM_GROUPS
    if NUM_GROUPS == 1:
        return tl.load(row, mask=inside, other=0).to(tl.float32)[:, None]
    elif GROUP % BLOCK_K == 0:
        return tl.load(row + begin // GROUP, mask=inside, other=0).to(tl.float32)[:, None]
    else:
        # Columns in runs that lie in one group each: a power of two that divides GROUP.
        POWER: tl.constexpr = GROUP & -GROUP
        RUN: tl.constexpr = POWER if POWER < BLOCK_K else BLOCK_K
        first = begin + tl.arange(0, BLOCK_K // RUN) * RUN
        both = inside[:, None] & (first < IN)[None, :]
        found = tl.load(row[:, None] + (first // GROUP)[None, :], mask=both, other=0)
        wide = tl.broadcast_to(
            found.to(tl.float32)[:, :, None], [column.shape[0], BLOCK_K // RUN, RUN]
        )
        return tl.reshape(wide, [column.shape[0], BLOCK_K])


@triton.jit
def scaled(
    wide,  # [BLOCK_N, BLOCK_K] float32, codes
    scales,  # [OUT, num_groups]
    zeros,  # alike uint8, or None
    column,  # [BLOCK_N]
    inside,  # [BLOCK_N] bool
    begin,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(code - zero) * scale of the code's group."""
    if zeros is not None:
        wide = wide - of_groups(zeros, column, inside, begin, IN, GROUP, BLOCK_K)
    elif OFFSET:
        wide = wide - OFFSET
    return wide * of_groups(scales, column, inside, begin, IN, GROUP, BLOCK_K)


@triton.jit
def read_rows(rows, factor, depth, real, deep):  # [BLOCK_M] addresses -> [BLOCK_M, BLOCK_K]
    """Columns `depth` of rows, times the rows' factors if there are any."""
    read = tl.load(rows[:, None] + depth[None, :], mask=real[:, None] & deep[None, :], other=0.0)
    if factor is not None:
        read = (read.to(tl.float32) * factor[:, None]).to(rows.dtype.element_ty)
    return read


@triton.jit
def add_step(
    total,  # [BLOCK_M, BLOCK_N] float32
    states,  # [BLOCK_M] addresses of rows
    factor,  # [BLOCK_M] float32 of the rows, or None
    values, scales, zeros,
    real,  # [BLOCK_M] bool
    column,  # [BLOCK_N] int64
    inside,  # [BLOCK_N] bool
    begin,
    IN: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`total` and the product over `BLOCK_K` of the depth."""
    depth = begin + tl.arange(0, BLOCK_K)
    deep = depth < IN
    read = read_rows(states, factor, depth, real, deep)
    if KIND == PLAIN:
        place = values + column[None, :] * IN + depth[:, None]
        weight = tl.load(place, mask=deep[:, None] & inside[None, :], other=0)
    else:
        if KIND == NIBBLES:
            pair = begin // 2 + tl.arange(0, BLOCK_K // 2)
            place = values + column[:, None] * (IN // 2) + pair[None, :]
            stored = tl.load(place, mask=inside[:, None] & (pair < IN // 2)[None, :], other=0)
            stored = tl.interleave(stored & 15, stored >> 4)
        else:
            place = values + column[:, None] * IN + depth[None, :]
            stored = tl.load(place, mask=inside[:, None] & deep[None, :], other=0)
        wide = decoded(stored, KIND)
        wide = scaled(wide, scales, zeros, column, inside, begin, IN, GROUP, OFFSET, BLOCK_K)
        weight = tl.trans(wide.to(states.dtype.element_ty))
    return dot(read, weight, total)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    states,  # [num_rows, num_heads, IN], rows `to_row` and heads `to_head` elements apart
    values,  # [num_heads, OUT, IN], or [num_heads, OUT, IN / 2]
    scales, zeros,  # [OUT, num_groups], with one head
    bias,  # [OUT], or None
    out,  # [num_rows, num_heads, OUT], or [SPLITS, num_rows, ...] float32
    num_rows, to_row, to_head, num_heads,
    OUT: tl.constexpr, IN: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    SPLITS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of columns, blocks of rows, num_heads * SPLITS)."""
    head, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < num_rows
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < OUT
    read = states + row.to(tl.int64) * to_row + head.to(tl.int64) * to_head
    values += head.to(tl.int64) * OUT * IN
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = split * SHARE
    for begin in range(first, tl.minimum(first + SHARE, IN), BLOCK_K):
        total = add_step(
            total, read, None, values, scales, zeros, real, column.to(tl.int64), inside,
            begin, IN, GROUP, OFFSET, KIND, BLOCK_K,
        )  # fmt: skip
    place = (split.to(tl.int64) * num_rows + row[:, None]) * num_heads + head
    place = place * OUT + column[None, :]
    if bias is not None:
        if SPLITS == 1:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    both = real[:, None] & inside[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=both)


@triton.jit
def _sum_kernel(
    parts,  # [SPLITS, num_values] float32
    bias,  # [OUT], or None
    out,  # [num_values]
    num_values,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_values
    total = tl.load(parts + place, mask=inside, other=0.0)
    part = place
    for _ in tl.static_range(1, SPLITS):
        part += num_values  # in 64 bits: all parts together may be longer than 32 bits count
        total += tl.load(parts + part, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % OUT, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A weight in the form that kernels take."""

    tensors: tuple[Tensor, Tensor | None, Tensor | None]  # values, scales, zeros
    facts: tuple[int, int, int]  # the kernels' KIND, GROUP and OFFSET


def stored(weight: Tensor) -> Stored:
    """Returns the weight's own memory, or the codes of a `QuantisedTensor`."""
    if not isinstance(weight, QuantisedTensor):
        return Stored((weight.detach().contiguous(), None, None), (PLAIN.value, 1, 0))
    codes = weight.codes
    kind, values = INTEGER, codes.values.contiguous()
    if codes.is_packed:
        kind = NIBBLES
    elif values.dtype == torch.float8_e4m3fn:
        kind, values = FP8, values.view(torch.uint8)
    zeros = None if codes.zeros is None else codes.zeros.contiguous()
    facts = (kind.value, codes.group, codes.offset)
    return Stored((values, codes.scales.contiguous(), zeros), facts)


class TiledProduct:
    """A weight [out_features, in_features], or one per head, and its product."""

    def __init__(
        self,
        weight: Tensor,  # [out, in] or [num_heads, out, in]; may be a `QuantisedTensor`
        bias: Tensor | None,  # [out]
        num_processors: int,
        *,
        fixed_rows: bool,
    ) -> None:
        self._heads = weight.shape[0] if weight.dim() == 3 else 1
        self._out, self._in = weight.shape[-2:]
        self._bias, self._fixed_rows, self._weight = bias, fixed_rows, stored(weight)
        wanted = 2 * num_processors // max(1, triton.cdiv(self._out, _COLUMNS) * self._heads)
        most = min(wanted, self._in // (_DEPTH * _MIN_STEPS), _MAX_SPLITS)
        self._splits = 1 if most < 2 else 1 << (most.bit_length() - 1)
        self._share = triton.cdiv(triton.cdiv(self._in, self._splits), _DEPTH) * _DEPTH

    def __call__(self, states: Tensor) -> Tensor:  # [num_rows, in] or [num_rows, num_heads, in]
        num_rows = states.shape[0]
        assert states.shape[-1] == self._in, (states.shape, self._in)
        if states.stride(-1) != 1:
            states = states.contiguous()
        size = (*states.shape[:-1], self._out)
        out = torch.empty(size, dtype=states.dtype, device=states.device)
        if not num_rows:
            return out
        rows, splits = FIXED_ROWS, self._splits
        if not self._fixed_rows:
            rows = min(FIXED_ROWS, max(16, triton.next_power_of_2(num_rows)))
            splits = splits if num_rows <= FIXED_ROWS else 1
        share = self._share if splits > 1 else self._in
        parts = out
        if splits > 1:
            parts = torch.empty((splits, *size), dtype=torch.float32, device=states.device)
        grid = (triton.cdiv(self._out, _COLUMNS), triton.cdiv(num_rows, rows), self._heads * splits)
        _product_kernel[grid](
            states, *self._weight.tensors, self._bias, parts,
            num_rows, states.stride(0), states.stride(1) if states.dim() == 3 else 0, self._heads,
            self._out, self._in, *self._weight.facts, splits, share,
            rows, _COLUMNS, _DEPTH if states.element_size() == 2 else _DEPTH // 2,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            block, num_values = 1024, out.numel()
            _sum_kernel[(triton.cdiv(num_values, block),)](
                parts, self._bias, out, num_values, self._out, splits, block
            )
        return out
