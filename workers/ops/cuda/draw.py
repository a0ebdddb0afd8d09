"""One token per row: temperature, cuts, coupled noise and argmax in one pass over the vocabulary.

Settings are tensors on the device; nothing is read on the host. The noise is that of
`workers/verify/noise.py`, bit by bit, and the tokens equal those of `workers/verify/sample.py`.
Greedy rows compare plain logits. A row is shared by several programs; a second, small kernel takes
the best of their winners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...verify.device_settings import DeviceSettings
from ...verify.process import GREEDY_BELOW, masses

# -- where top-k and top-p end, exactly, without sorting the vocabulary
#
# Tokens are ranked by (logit, lower id first), and both limits keep a beginning of that ranking:
# it is described by its last token's logit and id. One program per row finds the logit by
# bisection of its bits, where a step sums what lies above; then the id, among tokens with that
# logit. Sums of counts and of fixed-point masses are integers, so they do not depend on the order
# of summation, and the result equals that of `workers/verify/process.py`, which sorts.

_CUT_BLOCK = 4096


@triton.jit
def rank(logit):  # float32 -> int64
    """An integer that grows with the logit; both zeros have the same."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _ranked(logits, begin, vocab, BLOCK: tl.constexpr):
    """Neighbouring tokens, which of them there are, and their ranks."""
    token = begin + tl.arange(0, BLOCK)
    inside = token < vocab
    return token, inside, rank(tl.load(logits + token, mask=inside, other=float("-inf")))


@triton.jit
def _weights(masses, token, inside, COUNT: tl.constexpr):
    """What each token adds: one for top-k, its mass for top-p."""
    if COUNT:
        return inside.to(tl.int64)
    else:
        return tl.load(masses + token, mask=inside, other=0)


@triton.jit
def _above(logits, masses, level, last, vocab, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over tokens ranked above `level`, and over those at it with ids up to `last`."""
    total = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, vocab, BLOCK):
        token, inside, ranked = _ranked(logits, begin, vocab, BLOCK)
        counted = inside & ((ranked > level) | ((ranked == level) & (token <= last)))
        total += tl.where(counted, _weights(masses, token, inside, COUNT), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _last_kept(logits, masses, limit, vocab, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The last token of the ranking before which less than `limit` lies: its rank and its id."""
    low = tl.zeros([], tl.int64) - 2147483648
    high = tl.zeros([], tl.int64) + 2147483647
    while low < high:
        middle = (low + high) >> 1
        fits = _above(logits, masses, middle, -1, vocab, COUNT, BLOCK).to(tl.float64) < limit
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    before = _above(logits, masses, high, -1, vocab, COUNT, BLOCK)
    last = tl.zeros([], tl.int32) - 1
    for begin in range(0, vocab, BLOCK):
        token, inside, ranked = _ranked(logits, begin, vocab, BLOCK)
        ties = inside & (ranked == high)
        added = tl.where(ties, _weights(masses, token, inside, COUNT), 0)
        ahead = before + tl.cumsum(added, axis=0) - added
        kept = ties & (ahead.to(tl.float64) < limit)
        last = tl.maximum(last, tl.max(tl.where(kept, token, -1), axis=0))
        before += tl.sum(added, axis=0)
    return high, last


@triton.jit
def _cut_kernel(
    logits,  # [num_rows, vocab] float32, divided by the temperature
    masses,  # [num_rows, vocab] int64
    top_k,  # [num_rows] int32, 0 is off
    top_p,  # [num_rows] float32, 1 is off
    levels,  # [num_rows] int64, written
    lasts,  # [num_rows] int32, written
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    masses += row * vocab
    most, share = tl.load(top_k + row), tl.load(top_p + row).to(tl.float64)
    level = tl.zeros([], tl.int64) - 2147483648
    last = tl.zeros([], tl.int32) + vocab
    if most > 0:
        if most < vocab:
            level, last = _last_kept(logits, masses, most.to(tl.float64), vocab, True, BLOCK)
    if share < 1.0:
        total = _above(logits, masses, level, last, vocab, False, BLOCK)
        # The first token is kept whatever the share is: only before it lies less than 1.
        limit = tl.maximum(share * total.to(tl.float64), 1.0)
        other, until = _last_kept(logits, masses, limit, vocab, False, BLOCK)
        last = tl.where(
            other > level, until, tl.where(other == level, tl.minimum(last, until), last)
        )
        level = tl.maximum(level, other)
    tl.store(levels + row, level)
    tl.store(lasts + row, last)


def cuts(
    logits: Tensor,  # [num_rows, vocab] float32, divided by the temperature
    masses: Tensor,  # [num_rows, vocab] int64, of `process.masses`
    top_k: Tensor,  # [num_rows] int32, 0 is off
    top_p: Tensor,  # [num_rows] float32, 1 is off
) -> tuple[Tensor, Tensor]:  # [num_rows] int64, [num_rows] int32
    """The rank and the id of the last token that top-k, then top-p keep."""
    num_rows, vocab = logits.shape
    assert logits.is_contiguous(), logits.stride()
    assert masses.is_contiguous(), masses.stride()
    levels = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    lasts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    block = min(_CUT_BLOCK, triton.next_power_of_2(vocab))
    _cut_kernel[(num_rows,)](logits, masses, top_k, top_p, levels, lasts, vocab, block, num_warps=8)
    return levels, lasts


# The target's noise in Triton: `workers/verify/noise.py`, bit by bit.


@triton.jit
def _finalise(word):  # uint64, alike
    """splitmix64's finaliser."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def row_key(seed, position):  # int64, any integer -> uint64
    """What a row's noise depends on, beside the token."""
    key = _finalise(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    return _finalise(key + position.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _hashed(key, token):  # uint64, int32 -> uint32
    """A token's 32 bits under a row's key."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    bits = tl.mul(token.to(tl.uint32), 0x9E3779B1, sanitize_overflow=False)
    bits = tl.add(bits, low, sanitize_overflow=False)
    bits = tl.mul(bits ^ (bits >> 16), 0x7FEB352D, sanitize_overflow=False) ^ high
    bits = tl.mul(bits ^ (bits >> 15), 0x846CA68B, sanitize_overflow=False)
    return bits ^ (bits >> 16)


@triton.jit
def gumbel(key, token):  # uint64, int32 -> float32
    """In float64, rounded once. The constants are exact in float32 too."""
    unit = _hashed(key, token).to(tl.int32, bitcast=True).to(tl.float64) + 2147483648.0
    unit = (unit + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(unit))).to(tl.float32)


# The best column of every row, found by several programs a row and a small kernel after them.

_WINNERS_BLOCK = 1024
_MAX_PARTS = 64


def num_parts(num_rows: int, num_blocks: int, num_processors: int) -> int:
    """Programs for a row: a power of two, enough to fill the device."""
    most = max(1, min(4 * num_processors // num_rows, num_blocks, _MAX_PARTS))
    return 1 << (most.bit_length() - 1)


@triton.jit
def share(part, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a part: the first, and the end."""
    size = tl.cdiv(tl.cdiv(width, BLOCK), PARTS) * BLOCK
    return part * size, tl.minimum(part * size + size, width)


@triton.jit
def better(score, begin, highest, winner):
    """The best score so far and its column, after a block of scores."""
    top, index = tl.max(score, axis=0, return_indices=True)
    winner = tl.where(top > highest, begin + index, winner)
    return tl.maximum(highest, top), winner


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


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the programs of a row leave their best score and its column."""

    best: Tensor  # [num_rows, num_parts] float32
    winners: Tensor  # [num_rows, num_parts] int32
    block: int  # columns that a program reads at once

    @staticmethod
    def of(logits: Tensor, num_processors: int) -> Parts:  # [num_rows, width]
        num_rows, width = logits.shape
        block = min(_WINNERS_BLOCK, triton.next_power_of_2(max(1, width)))
        parts = num_parts(num_rows, max(1, triton.cdiv(width, block)), num_processors)
        best = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
        return Parts(best, torch.empty_like(best, dtype=torch.int32), block)

    @property
    def num_parts(self) -> int:
        return self.best.shape[1]

    def merged(self) -> tuple[Tensor, Tensor]:  # each [num_rows]: float32, int32
        """Every row's best; of equal ones the first."""
        scores, columns = torch.empty_like(self.best[:, 0]), torch.empty_like(self.winners[:, 0])
        _merge_kernel[(len(scores),)](
            self.best, self.winners, scores, columns, self.num_parts, num_warps=1
        )
        return scores, columns


_COLDEST = tl.constexpr(GREEDY_BELOW)


@triton.jit
def _draw_kernel(
    logits,  # [num_rows, vocab] float32, divided by the temperature
    seeds,  # [num_rows] int64
    positions,  # [num_rows]
    temperature,  # [num_rows] float32
    floors,  # [num_rows] float32, least logit that min-p keeps
    levels,  # [num_rows] int64, rank of the last token that is kept
    lasts,  # [num_rows] int32, its id
    best,  # [num_rows, PARTS] float32, written
    winners,  # [num_rows, PARTS] int32, written
    vocab,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    greedy = tl.load(temperature + row) < _COLDEST
    key = row_key(tl.load(seeds + row), tl.load(positions + row))
    floor = tl.where(greedy, float("-inf"), tl.load(floors + row))
    level = tl.where(greedy, -2147483649, tl.load(levels + row))
    last = tl.load(lasts + row)
    first, end = share(part, vocab, PARTS, BLOCK)
    highest = tl.zeros([], tl.float32) + float("-inf")
    winner = first
    for begin in range(first, end, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        value = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
        ranked = rank(value)
        kept = inside & (value >= floor)
        kept = kept & ((ranked > level) | ((ranked == level) & (token <= last)))
        noise = tl.where(greedy, 0.0, gumbel(key, token))
        score = tl.where(kept, noise + value, float("-inf"))
        highest, winner = better(score, begin, highest, winner)
    tl.store(best + row * PARTS + part, highest)
    tl.store(winners + row * PARTS + part, winner)


def draw(
    logits: Tensor, positions: Tensor, settings: DeviceSettings, num_processors: int
) -> Tensor:
    """As `DeviceOps.draw_on_device`; rows without any candidate draw token 0."""
    num_rows, vocab = logits.shape
    if not num_rows:
        return logits.new_empty(0, dtype=torch.int32)
    heat = torch.where(settings.temperature < GREEDY_BELOW, 1.0, settings.temperature)
    # As `process` rounds it: the logarithm in float64, then to float32.
    floors = logits.amax(1) / heat + settings.min_p.double().log().float()
    parts = Parts.of(logits, num_processors)
    logits = logits.contiguous() / heat[:, None]
    levels, lasts = cuts(logits, masses(logits), settings.top_k, settings.top_p)
    _draw_kernel[(num_rows, parts.num_parts)](
        logits, settings.seeds, positions, settings.temperature, floors, levels, lasts, parts.best,
        parts.winners, vocab, parts.num_parts, parts.block,
    )  # fmt: skip
    return parts.merged()[1]


# -- the best score of each row over a part of the vocabulary, without cuts. A draw by temperature
# alone, or greedily, is the best of the parts' best; a token's noise does not depend on the part.


@triton.jit
def _gumbel_argmax_kernel(
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


def gumbel_argmax(
    logits: Tensor,
    positions: Tensor,
    settings: DeviceSettings,
    tokens: Tensor | int,
    num_processors: int,
) -> tuple[Tensor, Tensor]:
    """As `DeviceOps.gumbel_argmax_on_device`."""
    num_rows, width = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if not num_rows:
        return logits.new_empty(0, dtype=torch.float32), logits.new_empty(0, dtype=torch.int32)
    parts, is_first = Parts.of(logits, num_processors), isinstance(tokens, int)
    _gumbel_argmax_kernel[(num_rows, parts.num_parts)](
        logits, settings.seeds, positions, settings.temperature,
        parts.winners if is_first else tokens, parts.best, parts.winners,
        width, logits.stride(0), tokens if is_first else 0, not is_first, parts.num_parts,
        parts.block,
    )  # fmt: skip
    return parts.merged()
