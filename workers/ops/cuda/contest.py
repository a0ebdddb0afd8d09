"""The best score of each row over a part of the vocabulary, without cuts: one pass, no sums.

What `draw.py` draws by temperature alone, or greedily, is the best of the parts' best; the noise
of a token does not depend on the part. Greedy rows compute no noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...verify.device_draw import DeviceSettings
from ...verify.settings import GREEDY_BELOW
from .draw import finalise, gumbel, hashed, num_parts

_BLOCK = 1024
_COLDEST = tl.constexpr(GREEDY_BELOW)


@triton.jit
def _contest_kernel(
    logits,  # [num_rows, width], rows `stride` apart
    seeds,  # [num_rows] int64
    positions,  # [num_rows]
    temperature,  # [num_rows] float32
    tokens,  # [width] int64, unused without HAS_TOKENS
    best,  # [num_rows, PARTS] float32, written
    winners,  # [num_rows, PARTS] int32, written
    width,
    stride,
    first,
    HAS_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    is_drawn = heat >= _COLDEST
    key = finalise(tl.load(seeds + row).to(tl.uint64) + 0x9E3779B97F4A7C15)
    key = finalise(key + tl.load(positions + row).to(tl.uint64) * 0x9E3779B97F4A7C15)
    share = tl.cdiv(tl.cdiv(width, BLOCK), PARTS) * BLOCK
    start = part * share
    highest = tl.zeros([], tl.float32) + float("-inf")
    winner = start
    for begin in range(start, tl.minimum(start + share, width), BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        score = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
        score = score.to(tl.float32)
        if is_drawn:
            if HAS_TOKENS:
                token = tl.load(tokens + column, mask=inside, other=0).to(tl.int32)
            else:
                token = first + column
            score = gumbel(hashed(key, token)) + tl.div_rn(score, heat)
        top, index = tl.max(score, axis=0, return_indices=True)
        winner = tl.where(top > highest, begin + index, winner)
        highest = tl.maximum(highest, top)
    tl.store(best + row * PARTS + part, highest)
    tl.store(winners + row * PARTS + part, winner)


@triton.jit
def _merge_kernel(
    best,  # [num_rows, PARTS] float32
    winners,  # [num_rows, PARTS] int32
    scores,  # [num_rows] float32, written
    columns,  # [num_rows] int32, written
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top, index = tl.max(tl.load(best + row * PARTS + part), axis=0, return_indices=True)
    tl.store(scores + row, top)
    tl.store(columns + row, tl.load(winners + row * PARTS + index))


def contest(
    logits: Tensor,  # [num_rows, width]
    positions: Tensor,  # [num_rows]
    settings: DeviceSettings,
    tokens: Tensor | int,  # [width] int64, of the columns, or of the first of neighbours
    num_processors: int,
) -> tuple[Tensor, Tensor]:  # each [num_rows]: float32, int32
    """As `device_draw.contest`."""
    num_rows, width = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    columns = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return scores, columns
    block = min(_BLOCK, triton.next_power_of_2(max(1, width)))
    parts = num_parts(num_rows, max(1, triton.cdiv(width, block)), num_processors)
    best = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
    winners = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    is_first = isinstance(tokens, int)
    _contest_kernel[(num_rows, parts)](
        logits, settings.seeds, positions, settings.temperature,
        columns if is_first else tokens, best, winners,
        width, logits.stride(0), tokens if is_first else 0, not is_first, parts, block,
    )  # fmt: skip
    _merge_kernel[(num_rows,)](best, winners, scores, columns, parts, num_warps=1)
    return scores, columns
