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
from .noise import gumbel, row_key
from .winners import Parts, better, share

_COLDEST = tl.constexpr(GREEDY_BELOW)


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
    key = row_key(tl.load(seeds + row), tl.load(positions + row))
    floor = tl.where(greedy, float("-inf"), tl.load(floors + row))
    if CUT:
        level = tl.where(greedy, -2147483649, tl.load(levels + row))
        last = tl.load(lasts + row)
    first, end = share(part, vocab, PARTS, BLOCK)
    highest = tl.zeros([], tl.float32) + float("-inf")
    winner = first
    for begin in range(first, end, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        value = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
        if not CUT:
            value = tl.div_rn(value, heat)
        kept = inside & (value >= floor)
        if CUT:
            ranked = rank(value)
            kept = kept & ((ranked > level) | ((ranked == level) & (token <= last)))
        noise = tl.where(greedy, 0.0, gumbel(key, token))
        score = tl.where(kept, noise + value, float("-inf"))
        highest, winner = better(score, begin, highest, winner)
    tl.store(best + row * PARTS + part, highest)
    tl.store(winners + row * PARTS + part, winner)


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
    if not num_rows:
        return logits.new_empty(0, dtype=torch.int32)
    logits = logits.contiguous()
    heat = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)
    # As `process` rounds it: the logarithm in float64, then to float32.
    floors = logits.amax(1) / heat + min_p.double().log().float()
    parts = Parts.of(logits, num_processors)
    levels = lasts = parts.winners
    is_cut = top_k is not None and top_p is not None
    if top_k is not None and top_p is not None:
        logits = logits / heat[:, None]
        levels, lasts = cuts(logits, masses(logits), top_k, top_p)
    _draw_kernel[(num_rows, parts.num_parts)](
        logits, seeds, positions, temperature, floors, levels, lasts, parts.best, parts.winners,
        vocab, is_cut, parts.num_parts, parts.block,
    )  # fmt: skip
    return parts.merged()[1]
