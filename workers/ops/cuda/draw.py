"""One token per row: temperature, cuts, coupled noise and argmax.

Settings are tensors on the device; nothing is read on the host. The noise is that of
`workers/verify/noise.py`, bit by bit, and the tokens equal those of `workers/verify/process.py`.
Greedy rows compare plain logits. Several programs share a row in every kernel that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...verify.device_settings import DeviceSettings
from ...verify.process import GREEDY_BELOW, MASS

# -- rows that several programs share, and the best column of each: the program that ends last
# takes the best of what all found

_WINNERS_BLOCK = 1024
_MAX_PARTS = 64


def num_parts(num_rows: int, num_blocks: int, num_processors: int) -> int:
    """Returns the number of programs per row: a power of two that fills the device."""
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
def _leave(
    highest, winner,  # of this part
    row, part,
    tokens,  # [width] int64, or None: they are neighbours
    first,  # of neighbours
    width,
    best, winners, counts, scores, drawn,  # of `Parts`
    PARTS: tl.constexpr,
):  # fmt: skip
    """The row's best score and its token, by the program that ends last; of equal ones the first.

    It leaves the count as it was: 0.
    """
    is_last = part < PARTS
    if PARTS > 1:
        place = row * PARTS
        tl.store(best + place + part, highest)
        tl.store(winners + place + part, winner)
        tl.debug_barrier()  # before the count, of all threads
        is_last = tl.atomic_add(counts + row, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            found = tl.load(best + place + tl.arange(0, PARTS), cache_modifier=".cg")
            highest, index = tl.max(found, axis=0, return_indices=True)
            winner = tl.load(winners + place + index, cache_modifier=".cg")
            tl.store(counts + row, 0)
    if is_last:
        tl.store(scores + row, highest)
        token = first + winner
        if tokens is not None:
            token = tl.load(tokens + winner, mask=winner < width, other=0)
        tl.store(drawn + row, token.to(drawn.dtype.element_ty))


def counts_of(device: torch.device) -> Tensor:  # [most rows that several programs share] int32
    """Returns the program counters of consecutive draws; they are zero between draws."""
    return torch.zeros(1024, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory in which the programs of a row store their best score and column, and the row's."""

    best: Tensor  # [num_rows, num_parts] float32
    winners: Tensor  # [num_rows, num_parts] int32
    counts: Tensor  # of `counts_of`
    scores: Tensor  # [num_rows] float32
    drawn: Tensor  # [num_rows], tokens
    block: int  # columns that a program reads at once

    @staticmethod
    def of(
        logits: Tensor,  # [num_rows, width]
        num_processors: int,
        counts: Tensor,
        kind: torch.dtype,  # of tokens
    ) -> Parts:
        (num_rows, width), make = logits.shape, partial(torch.empty, device=logits.device)
        block, parts = min(_WINNERS_BLOCK, triton.next_power_of_2(max(1, width))), 1
        if 0 < num_rows <= len(counts):
            parts = num_parts(num_rows, max(1, triton.cdiv(width, block)), num_processors)
        size, row = (num_rows, parts), (num_rows,)
        return Parts(
            make(size, dtype=torch.float32), make(size, dtype=torch.int32), counts,
            make(row, dtype=torch.float32), make(row, dtype=kind), block,
        )  # fmt: skip

    @property
    def num_parts(self) -> int:
        return self.best.shape[1]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Returns the kernel arguments, in order."""
        return self.best, self.winners, self.counts, self.scores, self.drawn


# -- where top-k and top-p end, exactly, without sorting the vocabulary
#
# Tokens are ranked by (logit, lower id first), and both limits keep a beginning of that ranking:
# it is described by its last token's logit and id. The logit is found by radix selection: from the
# highest digit of its bits to the lowest, a launch per digit. Every program of a row adds up its
# part's weights by digit, of the tokens whose higher digits are those found so far; the launch
# after it adds the parts and so finds the digit. A last launch finds the id among equal logits.
# Sums of counts and of fixed-point masses are integers, so they do not depend on the order of
# summation, and the result equals that of `workers/verify/process.py`, which sorts.

_CUT_BLOCK = 1024
_DIGIT_BITS = 4
_NUM_DIGITS = 32 // _DIGIT_BITS
_BITS = tl.constexpr(_DIGIT_BITS)
_DIGITS = tl.constexpr(_NUM_DIGITS)
_BINS = tl.constexpr(1 << _DIGIT_BITS)
_LOWEST = tl.constexpr(-(2**31))  # below the rank of every logit
_MASS = tl.constexpr(MASS)


@triton.jit
def _mass(chance):  # float32 -> int64
    """Computes `process.masses` from a share; multiplying by a power of two is exact."""
    return (chance * _MASS).to(tl.int64)


@triton.jit
def rank(logit):  # float32 -> int64
    """An integer that grows with the logit; both zeros have the same."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _counted(logits, begin, vocab, level, last, BLOCK: tl.constexpr):
    """Neighbouring tokens, their ranks, and which are ranked up to the token `last` at `level`."""
    token = begin + tl.arange(0, BLOCK)
    inside = token < vocab
    ranked = rank(tl.load(logits + token, mask=inside, other=float("-inf")))
    return token, ranked, inside & ((ranked > level) | ((ranked == level) & (token <= last)))


@triton.jit
def _is_on(limit, vocab, COUNT: tl.constexpr):
    """Whether top-k or top-p of that value cuts anything."""
    if COUNT:
        return (limit > 0) & (limit < vocab)
    else:
        return limit < 1.0


@triton.jit
def _found(
    sums,  # [_DIGITS, num_rows, PARTS, _BINS] int64
    states,  # [_DIGITS, num_rows, 3] int64
    limit,
    row,
    number,
    num_rows,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The first `number` digits of the last kept rank, and what lies above them; both int64.

    Then the sum over all tokens, and the least sum that is not allowed before the last kept token.
    """
    prefix = tl.zeros([], tl.int64)
    above = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    reach = limit.to(tl.float64)
    if number > 0:
        before = (number - 1).to(tl.int64) * num_rows + row
        prefix = tl.load(states + before * 3)
        above = tl.load(states + before * 3 + 1)
        total = tl.load(states + before * 3 + 2)
        bins, part = tl.arange(0, _BINS), tl.arange(0, PARTS)
        of_parts = sums + (before * PARTS + part)[:, None] * _BINS + bins[None, :]
        weights = tl.sum(tl.load(of_parts), axis=0)
        if number == 1:
            total = tl.sum(weights, axis=0)
        if not COUNT:
            # The first token is kept whatever the share is: only before it lies less than 1.
            reach = tl.maximum(reach * total.to(tl.float64), 1.0)
        higher = above + tl.sum(weights, axis=0) - tl.cumsum(weights, axis=0)
        digit = _BINS - tl.sum((higher.to(tl.float64) < reach).to(tl.int32), axis=0)
        above = tl.sum(tl.where(bins == digit, higher, 0), axis=0)
        prefix = (prefix << _BITS) | digit.to(tl.int64)
    return prefix, above, total, reach


@triton.jit(do_not_specialize=["number", "num_rows"])
def _digit_kernel(
    logits,  # [num_rows, vocab] float32, divided by the temperature
    shares,  # [num_rows, vocab] float32, probabilities over the likeliest token's
    limits,  # [num_rows], top-k in int32 or top-p in float32
    levels,  # [num_rows] int64, of top-k, read by top-p
    lasts,  # [num_rows] int32, alike
    sums,  # [_DIGITS, num_rows, PARTS, _BINS] int64: [number] is written
    states,  # [_DIGITS, num_rows, 3] int64: [number] is written
    vocab,
    number,
    num_rows,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.load(limits + row)
    if _is_on(limit, vocab, COUNT):
        prefix, above, total, _ = _found(sums, states, limit, row, number, num_rows, COUNT, PARTS)
        place = number.to(tl.int64) * num_rows + row
        if part == 0:
            tl.store(states + place * 3, prefix)
            tl.store(states + place * 3 + 1, above)
            tl.store(states + place * 3 + 2, total)
        level = tl.zeros([], tl.int64) + _LOWEST
        last = tl.zeros([], tl.int32) + vocab
        if not COUNT:
            level, last = tl.load(levels + row), tl.load(lasts + row)
        shift = 32 - _BITS * (number + 1)
        bins = tl.arange(0, _BINS)
        weights = tl.zeros([_BINS, BLOCK], tl.int32 if COUNT else tl.int64)
        begin, end = share(part, vocab, PARTS, BLOCK)
        for first in range(begin, end, BLOCK):
            token, ranked, counted = _counted(
                logits + row * vocab, first, vocab, level, last, BLOCK
            )
            digits = (ranked - _LOWEST) >> shift
            counted = counted & ((digits >> _BITS) == prefix)
            if tl.max(counted.to(tl.int32), axis=0) > 0:
                weight = counted.to(tl.int32)
                if not COUNT:
                    own_share = tl.load(shares + row * vocab + token, mask=counted, other=0.0)
                    weight = _mass(own_share)
                own = (digits & (_BINS - 1)).to(tl.int32)
                weights += tl.where(own[None, :] == bins[:, None], weight[None, :], 0)
        totals = tl.sum(weights, axis=1).to(tl.int64)
        tl.store(sums + (place * PARTS + part) * _BINS + bins, totals)


@triton.jit
def _last_kernel(
    logits,  # as of `_digit_kernel`, up to `states`
    shares,
    limits,
    levels,  # [num_rows] int64, written
    lasts,  # [num_rows] int32, written
    sums,
    states,
    vocab,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    logits += row * vocab
    level = tl.zeros([], tl.int64) + _LOWEST
    last = tl.zeros([], tl.int32) + vocab
    if not COUNT:
        level, last = tl.load(levels + row), tl.load(lasts + row)
    limit = tl.load(limits + row)
    if _is_on(limit, vocab, COUNT):
        number = tl.zeros([], tl.int32) + _DIGITS
        key, above, _, reach = _found(sums, states, limit, row, number, num_rows, COUNT, PARTS)
        place = ((_DIGITS - 1) * num_rows + row) * PARTS
        part = tl.arange(0, PARTS)
        weights = tl.load(sums + (place + part) * _BINS + (key & (_BINS - 1)))
        each = tl.zeros([], tl.int64) + 1  # equal logits have equal masses
        if not COUNT:
            of_part = tl.min(tl.where(weights > 0, part, PARTS - 1), axis=0)
            begin, end = share(of_part, vocab, PARTS, BLOCK)
            for first in range(begin, end, BLOCK):
                token, ranked, counted = _counted(logits, first, vocab, level, last, BLOCK)
                ties = counted & (ranked - _LOWEST == key)
                own = tl.load(shares + row * vocab + token, mask=ties, other=0.0)
                each = tl.maximum(each, tl.max(_mass(own), axis=0))
        num_ties = weights // each
        low = tl.zeros([], tl.int64)
        high = tl.sum(num_ties, axis=0)
        while low < high:  # how many of them are kept
            middle = (low + high) >> 1
            fits = (above + middle * each).to(tl.float64) < reach
            low = tl.where(fits, middle + 1, low)
            high = tl.where(fits, high, middle)
        until = tl.cumsum(num_ties, axis=0)
        of_part = tl.minimum(tl.sum((until < low).to(tl.int32), axis=0), PARTS - 1)
        seen = tl.sum(tl.where(part < of_part, num_ties, 0), axis=0)
        begin, end = share(of_part, vocab, PARTS, BLOCK)
        found = tl.zeros([], tl.int32) - 1
        for first in range(begin, end, BLOCK):
            token, ranked, counted = _counted(logits, first, vocab, level, last, BLOCK)
            ties = (counted & (ranked - _LOWEST == key)).to(tl.int64)
            kept = (ties > 0) & (seen + tl.cumsum(ties, axis=0) <= low)
            found = tl.maximum(found, tl.max(tl.where(kept, token, -1), axis=0))
            seen += tl.sum(ties, axis=0)
        level, last = key + _LOWEST, found
    tl.store(levels + row, level)
    tl.store(lasts + row, last)


def cuts(
    logits: Tensor,  # [num_rows, vocab] float32, divided by the temperature
    shares: Tensor,  # [num_rows, vocab] float32, probabilities over the likeliest token's
    top_k: Tensor,  # [num_rows] int32, 0 is off
    top_p: Tensor,  # [num_rows] float32, 1 is off
    num_processors: int,
) -> tuple[Tensor, Tensor]:  # [num_rows] int64, [num_rows] int32
    """Returns the rank and the id of the last token that top-k, then top-p keep."""
    num_rows, vocab = logits.shape
    assert logits.is_contiguous(), logits.stride()
    assert shares.is_contiguous(), shares.stride()
    levels = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    lasts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    block = min(_CUT_BLOCK, triton.next_power_of_2(vocab))
    parts = num_parts(num_rows, triton.cdiv(vocab, block), num_processors)
    sums = levels.new_empty((_NUM_DIGITS, num_rows, parts, 1 << _DIGIT_BITS))
    states = levels.new_empty((_NUM_DIGITS, num_rows, 3))
    for limits, counts in ((top_k, True), (top_p, False)):
        kept = (logits, shares, limits, levels, lasts, sums, states, vocab)
        for number in range(_NUM_DIGITS):
            _digit_kernel[(num_rows, parts)](
                *kept, number, num_rows, counts, parts, block, num_warps=8
            )
        _last_kernel[(num_rows,)](*kept, counts, parts, block, num_warps=8)
    return levels, lasts


# -- the target's noise: `workers/verify/noise.py`, bit by bit


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
    """Computes in float64, rounded once. The constants are exact in float32 too."""
    unit = _hashed(key, token).to(tl.int32, bitcast=True).to(tl.float64) + 2147483648.0
    unit = (unit + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(unit))).to(tl.float32)


# -- draws with cuts

_COLDEST = tl.constexpr(GREEDY_BELOW)
_LEAST = tl.constexpr(float(torch.finfo(torch.float32).min))


@triton.jit
def _scale_kernel(
    logits,  # [num_rows, vocab], rows `stride` apart
    peaks,  # [num_rows], their largest
    temperature, min_p,  # [num_rows] float32
    scaled,  # [num_rows, vocab] float32, written: divided by the temperature
    below,  # alike, less the row's largest
    floors,  # [num_rows] float32, written: the least that min-p keeps
    vocab,
    stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds as `process` does: the logarithm is taken in float64."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    heat = tl.where(heat < _COLDEST, 1.0, heat)
    peak = tl.div_rn(tl.load(peaks + row).to(tl.float32), heat)  # as division keeps the order
    if part == 0:
        least = tl.load(min_p + row).to(tl.float64)
        log = tl.log(tl.where(least > 0, least, 1.0)).to(tl.float32)
        tl.store(floors + row, peak + tl.where(least > 0, log, float("-inf")))
    peak = tl.maximum(peak, _LEAST)
    first, end = share(part, vocab, PARTS, BLOCK)
    for begin in range(first, end, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        value = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
        value = tl.div_rn(value, tl.zeros([BLOCK], tl.float32) + heat)
        tl.store(scaled + row * vocab + token, value, mask=inside)
        tl.store(below + row * vocab + token, value - peak, mask=inside)


def _scaled(
    logits: Tensor, settings: DeviceSettings, num_processors: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits divided by the temperature, shares for `cuts`, and min-p's floors."""
    num_rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    make = partial(torch.empty, dtype=torch.float32, device=logits.device)
    scaled, below, floors = make((num_rows, vocab)), make((num_rows, vocab)), make(num_rows)
    block = min(_CUT_BLOCK, triton.next_power_of_2(vocab))
    parts = num_parts(num_rows, triton.cdiv(vocab, block), num_processors)
    _scale_kernel[(num_rows, parts)](
        logits, logits.amax(1), settings.temperature, settings.min_p, scaled, below, floors,
        vocab, logits.stride(0), parts, block,
    )  # fmt: skip
    return scaled, below.exp_(), floors


@triton.jit
def _draw_kernel(
    logits,  # [num_rows, vocab] float32, divided by the temperature
    seeds,  # [num_rows] int64
    positions,  # [num_rows]
    temperature,  # [num_rows] float32
    floors,  # [num_rows] float32, least logit that min-p keeps
    levels,  # [num_rows] int64, rank of the last token that is kept
    lasts,  # [num_rows] int32, its column
    tokens,  # [vocab] int64, or None: a column is its token
    best, winners, counts, scores, drawn,  # of `Parts`, written
    vocab,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
        name = token
        if tokens is not None:
            name = tl.load(tokens + token, mask=inside, other=0).to(tl.int32)
        noise = tl.where(greedy, 0.0, gumbel(key, name))
        score = tl.where(kept, noise + value, float("-inf"))
        highest, winner = better(score, begin, highest, winner)
    _leave(highest, winner, row, part, tokens, 0, vocab, best, winners, counts, scores, drawn,
           PARTS)  # fmt: skip


def draw(
    logits: Tensor,
    positions: Tensor,
    settings: DeviceSettings,
    tokens: Tensor | None,
    num_processors: int,
    counts: Tensor,
) -> Tensor:
    """Implements `DeviceOps.draw_on_device`; rows without any candidate draw the first token."""
    num_rows, vocab = logits.shape
    if not num_rows:
        return logits.new_empty(0, dtype=torch.int32)
    parts = Parts.of(logits, num_processors, counts, torch.int32)
    logits, shares, floors = _scaled(logits, settings, num_processors)
    levels, lasts = cuts(logits, shares, settings.top_k, settings.top_p, num_processors)
    _draw_kernel[(num_rows, parts.num_parts)](
        logits, settings.seeds, positions, settings.temperature, floors, levels, lasts, tokens,
        *parts.arguments, vocab, parts.num_parts, parts.block,
    )  # fmt: skip
    return parts.drawn


# -- the best score of each row over a part of the vocabulary, without cuts. A draw by temperature
# alone, or greedily, is the best of the parts' best; a token's noise does not depend on the part.


@triton.jit(do_not_specialize=["ahead"])
def _gumbel_argmax_kernel(
    logits,  # [num_rows, width], rows `stride` apart
    seeds,  # [num_rows] int64
    positions,  # [num_rows]
    temperature,  # [num_rows] float32
    tokens,  # [width] int64, or None: they are neighbours
    best, winners, counts, scores, drawn,  # of `Parts`, written
    width,
    stride,
    first,  # of neighbours
    ahead,  # of all positions
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    is_drawn = heat >= _COLDEST
    key = row_key(tl.load(seeds + row), tl.load(positions + row).to(tl.int64) + ahead)
    start, end = share(part, width, PARTS, BLOCK)
    highest = tl.zeros([], tl.float32) + float("-inf")
    winner = start
    for begin in range(start, end, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        score = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
        score = score.to(tl.float32)
        if is_drawn:
            token = first + column
            if tokens is not None:
                token = tl.load(tokens + column, mask=inside, other=0).to(tl.int32)
            score = gumbel(key, token) + tl.div_rn(score, heat)
        highest, winner = better(score, begin, highest, winner)
    _leave(highest, winner, row, part, tokens, first, width, best, winners, counts, scores, drawn,
           PARTS)  # fmt: skip


def gumbel_argmax(
    logits: Tensor,
    positions: Tensor,
    settings: DeviceSettings,
    tokens: Tensor | int,
    num_processors: int,
    counts: Tensor,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    """Implements `DeviceOps.gumbel_argmax_on_device`."""
    num_rows, width = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    table, first = (None, tokens) if isinstance(tokens, int) else (tokens, 0)
    kind = torch.int32 if table is None else table.dtype
    parts = Parts.of(logits, num_processors, counts, kind)
    if num_rows:
        _gumbel_argmax_kernel[(num_rows, parts.num_parts)](
            logits, settings.seeds, positions, settings.temperature, table, *parts.arguments,
            width, logits.stride(0), first, ahead, parts.num_parts, parts.block,
        )  # fmt: skip
    return parts.scores, parts.drawn
