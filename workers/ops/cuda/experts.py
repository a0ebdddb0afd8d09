"""A mixture's experts as two grouped products over fixed shapes; `alignment.py` sorts the rows.

A program of a grouped product has one expert's block of (token, choice) pairs and a range of
columns. The first product computes gates and ups together and applies the unit between them; the
second multiplies by the router's scores. Grids are bounds that follow from the number of pairs and
experts; programs beyond the blocks that are in use return at once.

Source: Gale, Narayanan, Young, Zaharia 2022, MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..protocol import Experts
from .alignment import Alignment, align
from .elementwise import KINDS, gated
from .linear import FIXED_ROWS, PLAIN, add_step, stored
from .product import dot

_DEPTH = 64  # columns of a step of a product


@triton.jit
def _gate_up_kernel(
    states,  # [num_tokens, HIDDEN]
    weight,  # [num_experts, 2 * WIDTH, HIDDEN], or its codes
    scales,
    zeros,  # [num_experts, 2 * WIDTH, num_groups] of the codes
    bias,  # [num_experts, 2 * WIDTH], or None
    scores,  # [num_pairs] float32, or None if they do not multiply the input
    pairs,  # [num_blocks * BLOCK_M] int32; num_pairs: padding
    experts,  # [num_blocks] int32
    num_used,  # [1] int32
    out,  # [num_pairs, WIDTH]
    num_pairs,
    limit,
    alpha,
    TOP: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    CODES: tl.constexpr,  # the weight's kind, of `linear.py`
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = activation(x @ gate.T) * (x @ up.T) of each pair's token and expert."""
    block = tl.program_id(0)
    if block >= tl.load(num_used):
        return
    expert = tl.load(experts + block).to(tl.int64)
    pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < num_pairs
    token = tl.where(real, pair // TOP, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < WIDTH
    lane = expert * 2 * WIDTH + column
    gates = weight + lane * HIDDEN
    factor = None
    if scores is not None:
        factor = tl.load(scores + pair, mask=real, other=0.0)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, HIDDEN, BLOCK_K):
        if CODES != PLAIN:
            rows = states + token * HIDDEN
            gate = add_step(
                gate, rows, factor, weight, scales, zeros, real, lane, inside, begin,
                HIDDEN, GROUP, OFFSET, CODES, BLOCK_K,
            )  # fmt: skip
            up = add_step(
                up, rows, factor, weight, scales, zeros, real, lane + WIDTH, inside, begin,
                HIDDEN, GROUP, OFFSET, CODES, BLOCK_K,
            )  # fmt: skip
        else:
            depth = begin + tl.arange(0, BLOCK_K)
            deep = depth < HIDDEN
            place = states + token[:, None] * HIDDEN + depth[None, :]
            read = tl.load(place, mask=real[:, None] & deep[None, :], other=0.0)
            if factor is not None:
                read = (read.to(tl.float32) * factor[:, None]).to(states.dtype.element_ty)
            both = deep[:, None] & inside[None, :]
            place = gates[None, :] + depth[:, None]
            gate = dot(read, tl.load(place, mask=both, other=0.0), gate)
            up = dot(read, tl.load(place + WIDTH * HIDDEN, mask=both, other=0.0), up)
    if bias is not None:
        place = bias + expert * 2 * WIDTH + column
        gate += tl.load(place, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = gated(gate, up, limit, alpha, KIND).to(out.dtype.element_ty)
    place = out + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(place, result, mask=real[:, None] & inside[None, :])


@triton.jit
def _down_kernel(
    inner,  # [num_pairs, WIDTH]
    weight,  # [num_experts, HIDDEN, WIDTH], or its codes
    scales,
    zeros,  # [num_experts, HIDDEN, num_groups] of the codes
    bias,  # [num_experts, HIDDEN], or None
    scores,  # [num_pairs] float32, or None if they multiplied the input
    pairs,  # [num_blocks * BLOCK_M] int32; num_pairs: padding
    experts,  # [num_blocks] int32
    num_used,  # [1] int32
    out,  # [num_pairs, HIDDEN] float32
    num_pairs,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = score * (inner @ down.T) of each pair."""
    block = tl.program_id(0)
    if block >= tl.load(num_used):
        return
    expert = tl.load(experts + block).to(tl.int64)
    pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    real = pair < num_pairs
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < HIDDEN
    lane = expert * HIDDEN + column
    downs = weight + lane * WIDTH
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, WIDTH, BLOCK_K):
        if CODES != PLAIN:
            total = add_step(
                total, inner + pair * WIDTH, None, weight, scales, zeros, real, lane, inside,
                begin, WIDTH, GROUP, OFFSET, CODES, BLOCK_K,
            )  # fmt: skip
        else:
            depth = begin + tl.arange(0, BLOCK_K)
            deep = depth < WIDTH
            place = inner + pair[:, None] * WIDTH + depth[None, :]
            read = tl.load(place, mask=real[:, None] & deep[None, :], other=0.0)
            both = deep[:, None] & inside[None, :]
            place = downs[None, :] + depth[:, None]
            total = dot(read, tl.load(place, mask=both, other=0.0), total)
    if bias is not None:
        shift = tl.load(bias + expert * HIDDEN + column, mask=inside, other=0.0)
        total += shift.to(tl.float32)[None, :]
    if scores is not None:
        total = total * tl.load(scores + pair, mask=real, other=0.0)[:, None]
    place = out + pair[:, None] * HIDDEN + column[None, :]
    tl.store(place, total, mask=real[:, None] & inside[None, :])


class CudaMixture:
    """Packed experts, plain or quantised.

    With `fixed_rows`, blocks have one size and choices are added in order, so that a row's bits do
    not depend on the others.
    """

    def __init__(self, experts: Experts, *, fixed_rows: bool = False) -> None:
        self._experts, self._fixed_rows = experts, fixed_rows
        self._gate_up, self._down_weight = stored(experts.gate_up), stored(experts.down)
        # Gates' and ups' codes beside the states: three stages would not fit into 64 KiB.
        self._gate_up_stages = 3 if self._gate_up.facts[0] == PLAIN.value else 2

    def __call__(
        self,
        states: Tensor,  # [num_tokens, hidden_size]
        chosen: Tensor,  # [num_tokens, top] int64
        scores: Tensor,  # [num_tokens, top] float32
    ) -> Tensor:  # [num_tokens, hidden_size]
        if not len(states):
            return torch.empty_like(states)
        experts, (num_tokens, top) = self._experts, chosen.shape
        num_experts, hidden, width = experts.down.shape
        num_pairs = num_tokens * top
        rows = FIXED_ROWS if self._fixed_rows else block_rows(num_pairs, num_experts)
        aligned = align(chosen, num_experts, rows)
        states, scores = states.contiguous(), scores.contiguous()
        inner = torch.empty((num_pairs, width), dtype=states.dtype, device=states.device)
        block = min(64, max(16, triton.next_power_of_2(width)))
        _gate_up_kernel[(aligned.num_blocks, triton.cdiv(width, block))](
            states, *self._gate_up.tensors, experts.gate_up_bias,
            scores if experts.scores_input else None,
            aligned.pairs, aligned.experts, aligned.num_used, inner, num_pairs,
            float(experts.gate.limit), float(experts.gate.alpha), top, hidden, width,
            KINDS[experts.gate.kind], *self._gate_up.facts, aligned.block_rows, block,
            _depth(hidden),
            num_warps=4, num_stages=self._gate_up_stages,
        )  # fmt: skip
        return self._down(inner, scores, aligned, states)

    def _down(
        self,
        inner: Tensor,  # [num_pairs, width]
        scores: Tensor,  # [num_tokens, top]
        aligned: Alignment,
        states: Tensor,  # [num_tokens, hidden_size]
    ) -> Tensor:  # [num_tokens, hidden_size]
        experts, num_pairs = self._experts, len(inner)
        _, hidden, width = experts.down.shape
        out = torch.empty((num_pairs, hidden), dtype=torch.float32, device=states.device)
        block = min(64, max(16, triton.next_power_of_2(hidden)))
        _down_kernel[(aligned.num_blocks, triton.cdiv(hidden, block))](
            inner, *self._down_weight.tensors, experts.down_bias,
            None if experts.scores_input else scores,
            aligned.pairs, aligned.experts, aligned.num_used, out, num_pairs,
            hidden, width, *self._down_weight.facts, aligned.block_rows, block, _depth(width),
            num_warps=4, num_stages=3,
        )  # fmt: skip
        choices = out.unflatten(0, scores.shape)
        if not self._fixed_rows:
            return choices.sum(1).to(states.dtype)
        total = choices[:, 0]
        for place in range(1, scores.shape[1]):
            total = total + choices[:, place]
        return total.to(states.dtype)


def block_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a block: the mean number of an expert's pairs, within what tensor cores take."""
    mean = triton.next_power_of_2(max(1, num_pairs // num_experts))
    return min(64, max(16, mean))


def _depth(size: int) -> int:
    return min(_DEPTH, max(16, triton.next_power_of_2(size)))
