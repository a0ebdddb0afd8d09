"""RMSNorm, the residual's update between two blocks, and gated units: one pass over memory each.

Arithmetic is in float32. Values are rounded to the model's dtype where the reference rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..protocol import Gate, GateKind, Norm

KINDS = {kind: number for number, kind in enumerate(GateKind)}
SILU = tl.constexpr(KINDS[GateKind.SILU])
GELU = tl.constexpr(KINDS[GateKind.GELU])
GELU_TANH = tl.constexpr(KINDS[GateKind.GELU_TANH])
RELU = tl.constexpr(KINDS[GateKind.RELU])
CLAMPED_SILU = tl.constexpr(KINDS[GateKind.CLAMPED_SILU])
_GATE_BLOCK = 1024


@triton.jit
def _normed(wide, weight, eps, columns, mask, SIZE: tl.constexpr):
    """A row in float32, divided by its root mean square; `weight` may be None."""
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    if weight is not None:
        wide = wide * tl.load(weight + columns, mask=mask, other=0.0)
    return wide


@triton.jit
def _norm_kernel(
    states,  # [num_rows, SIZE], rows `to_row` elements apart
    to_row,
    weight,  # [SIZE] float32, or None
    out,  # [num_rows, SIZE]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    wide = tl.load(states + row * to_row + columns, mask=mask, other=0.0).to(tl.float32)
    wide = _normed(wide, weight, eps, columns, mask, SIZE)
    tl.store(out + row * SIZE + columns, wide.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_norm_kernel(
    residual,  # [num_rows, SIZE], written
    update,  # [num_rows, SIZE], or None
    out,  # [num_rows, SIZE]
    kept,  # [num_rows, SIZE], written, or None
    scale,
    AFTER: tl.constexpr, after_weight, after_eps,  # of `facts`: weights are [SIZE] float32, or None
    BEFORE: tl.constexpr, before_weight, before_eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """residual += scale * after(update); kept = residual; out = before(residual)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    offset = row * SIZE + columns
    kind = residual.dtype.element_ty
    total = tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    if update is not None:
        added = tl.load(update + offset, mask=mask, other=0.0).to(tl.float32)
        if AFTER:
            added = _normed(added, after_weight, after_eps, columns, mask, SIZE)
            added = added.to(kind).to(tl.float32)
        total += added * scale
        tl.store(residual + offset, total.to(kind), mask=mask)
    if kept is not None:
        tl.store(kept + offset, total.to(kind), mask=mask)
    if BEFORE:
        wide = total.to(kind).to(tl.float32)
        wide = _normed(wide, before_weight, before_eps, columns, mask, SIZE)
        tl.store(out + offset, wide.to(kind), mask=mask)


@triton.jit
def _enter_kernel(
    embedded,  # [num_rows, EMBEDDING], rows `to_embedded` elements apart
    feature,  # [num_rows, SIZE], rows `to_feature` elements apart
    both,  # [num_rows, EMBEDDING + SIZE], written
    residual,  # [num_rows, SIZE], written
    to_embedded,
    to_feature,
    FIRST: tl.constexpr, first_weight, first_eps,  # of `facts`, of the embedding
    SECOND: tl.constexpr, second_weight, second_eps,  # of the feature
    EMBEDDING: tl.constexpr,
    SIZE: tl.constexpr,
    NORMED: tl.constexpr,  # whether the residual is
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kind = both.dtype.element_ty
    target = both + row * (EMBEDDING + SIZE)
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_E)
        inside = column < EMBEDDING
        token = tl.load(embedded + row * to_embedded + column, mask=inside, other=0.0)
        token = token.to(tl.float32)
        if FIRST:
            token = _normed(token, first_weight, first_eps, column, inside, EMBEDDING)
        tl.store(target + column, token.to(kind), mask=inside)
    else:
        columns = tl.arange(0, BLOCK)
        mask = columns < SIZE
        held = tl.load(feature + row * to_feature + columns, mask=mask, other=0.0)
        wide = held.to(tl.float32)
        if SECOND:
            wide = _normed(wide, second_weight, second_eps, columns, mask, SIZE)
        normed = wide.to(kind)
        tl.store(target + EMBEDDING + columns, normed, mask=mask)
        if NORMED:
            tl.store(residual + row * SIZE + columns, normed, mask=mask)
        else:
            tl.store(residual + row * SIZE + columns, held, mask=mask)


@triton.jit
def tanh(x):
    """Computes tanh through exp, which every target has."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def gated(first, up, limit, alpha, KIND: tl.constexpr):
    """`activation(first) * up` in float32."""
    if KIND == CLAMPED_SILU:
        first = tl.minimum(first, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        first = first / (1.0 + tl.exp(-first * alpha))
    elif KIND == SILU:
        first = first / (1.0 + tl.exp(-first))
    elif KIND == RELU:
        first = tl.maximum(first, 0.0)
    elif KIND == GELU:
        first = 0.5 * first * (1.0 + tl.erf(first * 0.7071067811865476))
    else:
        cubed = first * first * first
        first = 0.5 * first * (1.0 + tanh(0.7978845608028654 * (first + 0.044715 * cubed)))
    return first * up


@triton.jit
def _gate_kernel(
    gate_up,  # [num_rows, 2 * width], gates first
    out,  # [num_rows, width]
    width,
    limit,
    alpha,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    place = gate_up + row * 2 * width + columns
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    result = gated(first, up, limit, alpha, KIND)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=mask)


def norm(states: Tensor, norm: Norm) -> Tensor:  # [num_rows, size], alike
    """Computes RMSNorm of every row; rows may be columns of a wider tensor."""
    num_rows, size = states.shape
    assert states.stride(1) == 1, states.stride()
    out = torch.empty((num_rows, size), dtype=states.dtype, device=states.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _norm_kernel[(num_rows,)](
            states, states.stride(0), norm.weight, out, norm.eps, size, block,
            num_warps=num_warps(block),
        )  # fmt: skip
    return out


def add_norm(
    residual: Tensor, update: Tensor | None, after: Norm | None, scale: float,
    before: Norm | None, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Implements `Ops.add_norm`."""
    num_rows, size = residual.shape
    for each in (residual, update, kept):
        assert each is None or each.is_contiguous(), each.stride()
        assert each is None or each.shape == residual.shape, (each.shape, residual.shape)
    out = residual if before is None else torch.empty_like(residual)
    if num_rows:
        block = triton.next_power_of_2(size)
        _add_norm_kernel[(num_rows,)](
            residual, update, out, kept, float(scale), *facts(after), *facts(before), size, block,
            num_warps=num_warps(block),
        )  # fmt: skip
    return out


def enter(
    embedded: Tensor,
    embedding_norm: Norm | None,
    feature: Tensor,
    feature_norm: Norm | None,
    *,
    is_residual_normed: bool,
) -> tuple[Tensor, Tensor]:
    """Implements `Ops.enter`."""
    (num_rows, first), size = embedded.shape, feature.shape[1]
    assert embedded.stride(1) == feature.stride(1) == 1, (embedded.stride(), feature.stride())
    both, residual = feature.new_empty(num_rows, first + size), feature.new_empty(num_rows, size)
    if num_rows:
        blocks = triton.next_power_of_2(first), triton.next_power_of_2(size)
        _enter_kernel[(num_rows, 2)](
            embedded, feature, both, residual, embedded.stride(0), feature.stride(0),
            *facts(embedding_norm), *facts(feature_norm), first, size, is_residual_normed, *blocks,
            num_warps=num_warps(max(blocks)),
        )  # fmt: skip
    return both, residual


def gate(gate_up: Tensor, gate: Gate) -> Tensor:  # [num_rows, 2 * width] -> [num_rows, width]
    """Computes the gated unit between an MLP's two products."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), gate_up.stride()
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        block = min(_GATE_BLOCK, triton.next_power_of_2(width))
        _gate_kernel[(num_rows, triton.cdiv(width, block))](
            gate_up, out, width, gate.limit, gate.alpha, KINDS[gate.kind], block
        )
    return out


def facts(norm: Norm | None) -> tuple[bool, Tensor | None, float]:
    """Returns whether there is a norm, its weights and its eps, in the form that kernels take."""
    return (False, None, 0.0) if norm is None else (True, norm.weight, norm.eps)


def num_warps(block: int) -> int:
    """Returns the warps for a row of that many elements, at most 16 elements per thread."""
    return max(1, min(16, block // 512))
