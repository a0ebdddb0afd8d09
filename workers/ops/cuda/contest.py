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
from .noise import gumbel, row_key
from .winners import Parts, better, share

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
    key = row_key(tl.load(seeds + row), tl.load(positions + row))
    start, end = share(part, width, PARTS, BLOCK)
    highest = tl.zeros([], tl.float32) + float("-inf")
    winner = start
    for begin in range(start, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        score = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
        score = score.to(tl.float32)
        if is_drawn:
            if HAS_TOKENS:
                token = tl.load(tokens + column, mask=inside, other=0).to(tl.int32)
            else:
                token = first + column
            score = gumbel(key, token) + tl.div_rn(score, heat)
        highest, winner = better(score, begin, highest, winner)
    tl.store(best + row * PARTS + part, highest)
    tl.store(winners + row * PARTS + part, winner)


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
    if not num_rows:
        return logits.new_empty(0, dtype=torch.float32), logits.new_empty(0, dtype=torch.int32)
    parts, is_first = Parts.of(logits, num_processors), isinstance(tokens, int)
    _contest_kernel[(num_rows, parts.num_parts)](
        logits, settings.seeds, positions, settings.temperature,
        parts.winners if is_first else tokens, parts.best, parts.winners,
        width, logits.stride(0), tokens if is_first else 0, not is_first, parts.num_parts,
        parts.block,
    )  # fmt: skip
    return parts.merged()
