"""One token per row: temperature, cuts, coupled noise and argmax in one pass over the vocabulary.

Settings are tensors on the device; nothing is read on the host. The noise is that of
`workers/verify/noise.py`, bit by bit, and the tokens equal those of `workers/verify/sample.py`.
Greedy rows compare plain logits. A row is shared by several programs; a second, small kernel takes
the best of their winners.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...verify.process import masses
from ...verify.settings import GREEDY_BELOW
from .cuts import cuts, rank

_BLOCK = 1024
_MAX_PARTS = 64
_COLDEST = tl.constexpr(GREEDY_BELOW)


@triton.jit
def finalise(word):  # uint64, alike
    """splitmix64's finaliser."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def hashed(key, token):  # uint64, int32 -> uint32
    """A token's 32 bits under a row's key."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    bits = tl.mul(token.to(tl.uint32), 0x9E3779B1, sanitize_overflow=False)
    bits = tl.add(bits, low, sanitize_overflow=False)
    bits = tl.mul(bits ^ (bits >> 16), 0x7FEB352D, sanitize_overflow=False) ^ high
    bits = tl.mul(bits ^ (bits >> 15), 0x846CA68B, sanitize_overflow=False)
    return bits ^ (bits >> 16)


@triton.jit
def gumbel(bits):  # uint32 -> float32
    """In float64, rounded once. The constants are exact in float32 too."""
    unit = bits.to(tl.int32, bitcast=True).to(tl.float64) + 2147483648.0
    unit = (unit + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(unit))).to(tl.float32)


@triton.jit
def _draw_kernel(
    logits,  # [num_rows, vocab] float32; divided by the temperature if CUT
    seeds,  # [num_rows] int64
    positions,  # [num_rows]
    temperature,  # [num_rows] float32
    floors,  # [num_rows] float32, least logit that min-p keeps
    levels,  # [num_rows] int64, rank of the last token that is kept, unused without CUT
    lasts,  # [num_rows] int32, its id, unused without CUT
    best,  # [num_rows, PARTS] float32, written
    winners,  # [num_rows, PARTS] int32, written
    vocab,
    CUT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    greedy = heat < _COLDEST
    heat = tl.where(greedy, 1.0, heat)
    key = finalise(tl.load(seeds + row).to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = finalise(key + tl.load(positions + row).to(tl.uint64) * 0x9E3779B97F4A7C15)
    floor = tl.where(greedy, float("-inf"), tl.load(floors + row))
    if CUT:
        level = tl.where(greedy, -2147483649, tl.load(levels + row))
        last = tl.load(lasts + row)
    share = tl.cdiv(tl.cdiv(vocab, BLOCK), PARTS) * BLOCK
    first = part * share
    highest = tl.zeros([], tl.float32) + float("-inf")
    winner = first
    for begin in range(first, tl.minimum(first + share, vocab), BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        value = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
        if not CUT:
            value = tl.div_rn(value, heat)
        kept = inside & (value >= floor)
        if CUT:
            ranked = rank(value)
            kept = kept & ((ranked > level) | ((ranked == level) & (token <= last)))
        noise = tl.where(greedy, 0.0, gumbel(hashed(key, token)))
        score = tl.where(kept, noise + value, float("-inf"))
        top, index = tl.max(score, axis=0, return_indices=True)
        winner = tl.where(top > highest, begin + index, winner)
        highest = tl.maximum(highest, top)
    tl.store(best + row * PARTS + part, highest)
    tl.store(winners + row * PARTS + part, winner)


@triton.jit
def _merge_kernel(
    best,  # [num_rows, PARTS] float32
    winners,  # [num_rows, PARTS] int32
    tokens,  # [num_rows] int32, written
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    _, index = tl.max(tl.load(best + row * PARTS + part), axis=0, return_indices=True)
    tl.store(tokens + row, tl.load(winners + row * PARTS + index))


def draw(
    logits: Tensor,  # [num_rows, vocab] float32, edited
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows]
    temperature: Tensor,  # [num_rows] float32, 0 is greedy
    top_k: Tensor | None,  # [num_rows] int32, 0 is off; None: neither top-k nor top-p is on
    top_p: Tensor | None,  # [num_rows] float32, 1 is off
    min_p: Tensor,  # [num_rows] float32, 0 is off
    num_processors: int,
) -> Tensor:  # [num_rows] int32
    """One token per row with the target's noise; rows without any candidate draw token 0."""
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return tokens
    logits = logits.contiguous()
    heat = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    # As `process` rounds it: the logarithm in float64, then to float32.
    floors = logits.amax(1) / heat + min_p.double().log().float()
    levels = lasts = tokens
    is_cut = top_k is not None and top_p is not None
    if top_k is not None and top_p is not None:
        logits = logits / heat[:, None]
        levels, lasts = cuts(logits, masses(logits), top_k, top_p)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    parts = num_parts(num_rows, triton.cdiv(vocab, block), num_processors)
    best = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
    winners = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    _draw_kernel[(num_rows, parts)](
        logits, seeds, positions, temperature, floors, levels, lasts, best, winners, vocab,
        is_cut, parts, block,
    )  # fmt: skip
    _merge_kernel[(num_rows,)](best, winners, tokens, parts, num_warps=1)
    return tokens


def num_parts(num_rows: int, num_blocks: int, num_processors: int) -> int:
    """Programs for a row: a power of two, enough to fill the device."""
    most = max(1, min(4 * num_processors // num_rows, num_blocks, _MAX_PARTS))
    return 1 << (most.bit_length() - 1)
