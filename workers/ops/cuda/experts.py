"""A mixture's experts as two grouped products over fixed shapes; one kernel sorts the rows.

A program of a grouped product has one expert's block of (token, choice) pairs and a range of
columns. The first product computes gates and ups together and applies the unit between them; the
second multiplies by the router's scores. Grids are bounds that follow from the number of pairs and
experts; programs beyond the blocks that are in use return at once.

Source: Gale, Narayanan, Young, Zaharia 2022, MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..protocol import Experts
from ..reference import sum_in_order
from .elementwise import KINDS, gated
from .linear import FIXED_ROWS, PLAIN, add_step, dot, read_rows, stored

# -- pairs of (token, choice) laid out expert by expert, each expert's padded to whole blocks. Every
# program has one expert: it counts the pairs of all experts, so that it has the place of its own,
# and writes its pairs there in order. Sizes are bounds of what any routing needs, so no number is
# read on the host.

_BLOCK = 512
_MAX_PAIR_BYTES = 512 << 20  # of the second product's results before they are added


@dataclass(frozen=True, slots=True)
class Alignment:
    """Blocks of pairs; each block belongs to one expert."""

    pairs: Tensor  # [num_blocks * block_rows] int32; the number of pairs marks padding
    experts: Tensor  # [num_blocks] int32
    num_used: Tensor  # [1] int32, blocks that hold pairs; the others are not written
    num_blocks: int
    block_rows: int


@triton.jit(do_not_specialize=["num_pairs"])
def _align_kernel(
    chosen,  # [num_pairs]; negative: of no expert here
    pairs,  # [num_blocks * ROWS] int32, written
    experts,  # [num_blocks] int32, written
    num_used,  # [1] int32, written
    num_pairs,
    EXPERTS: tl.constexpr,  # a power of two, at least the number of experts
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (number of experts,)."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    numbers = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        inside = begin + lane < num_pairs
        theirs = tl.load(chosen + begin + lane, mask=inside, other=-1).to(tl.int32)
        counts += tl.histogram(theirs, EXPERTS, mask=theirs >= 0)
    padded = (counts + ROWS - 1) // ROWS * ROWS
    if expert == 0:
        tl.store(num_used, tl.sum(padded, axis=0) // ROWS)
    start = tl.sum(tl.where(numbers < expert, padded, 0), axis=0)
    size = tl.sum(tl.where(numbers == expert, padded, 0), axis=0)
    for row in range(0, size, ROWS):
        tl.store(experts + (start + row) // ROWS, expert)
    done = start * 0
    for begin in range(0, num_pairs, BLOCK):
        inside = begin + lane < num_pairs
        theirs = tl.load(chosen + begin + lane, mask=inside, other=-1).to(tl.int32)
        mine = (theirs == expert).to(tl.int32)
        place = start + done + tl.cumsum(mine, axis=0) - mine
        tl.store(pairs + place, begin + lane, mask=mine == 1)
        done += tl.sum(mine, axis=0)
    rest = done + tl.arange(0, ROWS)
    tl.store(pairs + start + rest, num_pairs, mask=rest < size)


def align(chosen: Tensor, num_experts: int, block_rows: int) -> Alignment:
    """Returns blocks for any choice: `chosen` is [num_tokens, top] of expert numbers."""
    num_pairs = chosen.numel()
    num_blocks = num_pairs // block_rows + min(num_pairs, num_experts)
    pairs, experts, num_used = (
        torch.empty(size, dtype=torch.int32, device=chosen.device)
        for size in (num_blocks * block_rows, num_blocks, 1)
    )
    _align_kernel[(num_experts,)](
        chosen.contiguous(), pairs, experts, num_used, num_pairs,
        triton.next_power_of_2(num_experts), block_rows, _BLOCK,
    )  # fmt: skip
    return Alignment(pairs, experts, num_used, num_blocks, block_rows)


_DEPTH = 64  # columns of a step of a product


@triton.jit(do_not_specialize=["num_pairs"])
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
        rows = states + token * HIDDEN
        if CODES != PLAIN:
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
            read = read_rows(rows, factor, depth, real, deep)
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


@triton.jit(do_not_specialize=["num_pairs"])
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
    out,  # [num_pairs, num_columns] float32
    num_pairs,
    first,  # of the columns of `down`
    num_columns,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = score * (inner @ down.T) of each pair, at columns `[first, first + num_columns)`."""
    block = tl.program_id(0)
    if block >= tl.load(num_used):
        return
    expert = tl.load(experts + block).to(tl.int64)
    pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    real = pair < num_pairs
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < num_columns
    lane = expert * HIDDEN + first + column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, WIDTH, BLOCK_K):
        total = add_step(
            total, inner + pair * WIDTH, None, weight, scales, zeros, real, lane, inside,
            begin, WIDTH, GROUP, OFFSET, CODES, BLOCK_K,
        )  # fmt: skip
    if bias is not None:
        shift = tl.load(bias + lane, mask=inside, other=0.0)
        total += shift.to(tl.float32)[None, :]
    if scores is not None:
        total = total * tl.load(scores + pair, mask=real, other=0.0)[:, None]
    place = out + pair[:, None] * num_columns + column[None, :]
    tl.store(place, total, mask=real[:, None] & inside[None, :])


class CudaMixture:
    """A `Mixture` of packed experts, plain or quantised.

    With `fixed_rows`, blocks have one size and choices are added in order, so that a row's bits do
    not depend on the others.
    """

    def __init__(self, experts: Experts, *, fixed_rows: bool = False) -> None:
        self._experts, self._fixed_rows = experts, fixed_rows
        self._gate_up, self._down_weight = stored(experts.gate_up), stored(experts.down)
        # Gates' and ups' codes beside the states: three stages would not fit into 64 KiB.
        self._gate_up_stages = 3 if self._gate_up.facts[0] == PLAIN.value else 2

    def __call__(self, states: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
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
        """Computes the second product by ranges of columns if there are many pairs."""
        hidden, num_pairs = self._experts.down.shape[1], len(inner)
        block = min(64, max(16, triton.next_power_of_2(hidden)))
        most = max(block, _MAX_PAIR_BYTES // (4 * num_pairs) // block * block)
        parts = []
        for first in range(0, hidden, most):
            size = (num_pairs, min(most, hidden - first))
            make = torch.zeros if self._experts.is_part else torch.empty
            out = make(size, dtype=torch.float32, device=states.device)
            self._down_columns(inner, scores, aligned, first, out, block)
            choices = out.unflatten(0, scores.shape)
            total = sum_in_order(choices) if self._fixed_rows else choices.sum(1)
            parts.append(total.to(states.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _down_columns(
        self,
        inner: Tensor,  # [num_pairs, width]
        scores: Tensor,  # [num_tokens, top]
        aligned: Alignment,
        first: int,
        out: Tensor,  # [num_pairs, num_columns] float32, written
        block: int,
    ) -> None:
        experts, (num_pairs, num_columns) = self._experts, out.shape
        _, hidden, width = experts.down.shape
        _down_kernel[(aligned.num_blocks, triton.cdiv(num_columns, block))](
            inner, *self._down_weight.tensors, experts.down_bias,
            None if experts.scores_input else scores,
            aligned.pairs, aligned.experts, aligned.num_used, out, num_pairs, first, num_columns,
            hidden, width, *self._down_weight.facts, aligned.block_rows, block, _depth(width),
            num_warps=4, num_stages=3,
        )  # fmt: skip


def block_rows(num_pairs: int, num_experts: int) -> int:
    """Returns the rows of a block: an expert's mean number of pairs, within hardware limits."""
    mean = triton.next_power_of_2(max(1, num_pairs // num_experts))
    return min(64, max(16, mean))


def _depth(size: int) -> int:
    return min(_DEPTH, max(16, triton.next_power_of_2(size)))
