"""Biases, forbidden ends, penalties and log-probabilities of the device step, in two kernels.

A program whose row's request asks for none of them ends after a few loads, so that a captured step
can always contain both. The edited logits are those of `workers/verify/process.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...verify import device_settings as words_of
from ...verify.device_settings import MAX_BIASES, MAX_ENDS, MAX_TOP, NUM_WORDS, PROMPT, DeviceEdits
from .draw import num_parts, share

_BLOCK = 1024
_REPETITION = tl.constexpr(words_of.REPETITION)
_FREQUENCY = tl.constexpr(words_of.FREQUENCY)
_PRESENCE = tl.constexpr(words_of.PRESENCE)
_MIN_LEN = tl.constexpr(words_of.MIN_LEN)
_NUM_LOGPROBS = tl.constexpr(words_of.NUM_LOGPROBS)
_NUM_BIASES = tl.constexpr(words_of.NUM_BIASES)
_NUM_ENDS = tl.constexpr(words_of.NUM_ENDS)
_WORDS = tl.constexpr(NUM_WORDS)
_BIASES = tl.constexpr(MAX_BIASES)
_ENDS = tl.constexpr(MAX_ENDS)
_TOP = tl.constexpr(MAX_TOP)
_BITS = tl.constexpr(words_of.WORD_BITS)
_PROMPT = tl.constexpr(PROMPT)


@triton.jit
def _double(word):  # pointer to two int32 words -> float64
    low = tl.load(word).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(word + 1).to(tl.int64) << 32
    return (high | low).to(tl.float64, bitcast=True)


@triton.jit
def _edit_kernel(
    logits,  # [num_rows, vocab] float32, written
    seats,  # [num_seqs] int64
    positions,  # [num_rows] int32
    ancestors,  # [num_rows, WORDS] int64
    nodes,  # [num_seqs, NODES] int32
    words,  # [num_seats, _WORDS] int32
    bias_ids,  # [num_seats, _BIASES] int32
    biases,  # [num_seats, _BIASES] float32
    ends,  # [num_seats, _ENDS] int32
    counts,  # [num_seats, vocab] int32
    vocab,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = row // (NODES + 1)
    seat = tl.load(seats + seq)
    own = words + seat * _WORDS
    num_biases = tl.load(own + _NUM_BIASES)
    num_ends = tl.load(own + _NUM_ENDS)
    if tl.load(own + _MIN_LEN) <= tl.load(positions + row) + 1:
        num_ends = 0
    repetition, frequency = _double(own + _REPETITION), _double(own + _FREQUENCY)
    presence = _double(own + _PRESENCE)
    penalised = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    if (num_biases + num_ends > 0) | penalised:
        first, end = share(part, vocab, PARTS, BLOCK)
        for begin in range(first, end, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            inside = token < vocab
            value = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
            for index in range(num_biases):
                bias = tl.load(biases + seat * _BIASES + index)
                chosen = token == tl.load(bias_ids + seat * _BIASES + index)
                value = tl.where(chosen, value + bias, value)
            for index in range(num_ends):
                chosen = token == tl.load(ends + seat * _ENDS + index)
                value = tl.where(chosen, float("-inf"), value)
            if penalised:
                held = tl.load(counts + seat * vocab + token, mask=inside, other=0)
                count = held & (_PROMPT - 1)
                for word in range(WORDS if NODES else 0):
                    path = tl.load(ancestors + row * WORDS + word)
                    for node in range(word * _BITS, tl.minimum((word + 1) * _BITS, NODES)):
                        on_path = ((path >> (node - word * _BITS)) & 1) != 0
                        chosen = on_path & (token == tl.load(nodes + seq * NODES + node))
                        count += chosen.to(tl.int32)
                seen = (held > 0) | (count > 0)
                factor = tl.where(seen, repetition, 1.0).to(tl.float32)
                less = frequency * count.to(tl.float64) + tl.where(count > 0, presence, 0.0)
                scaled = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
                value = scaled - less.to(tl.float32)
            tl.store(logits + row * vocab + token, value, mask=inside)


@triton.jit
def _block(logits, begin, vocab, BLOCK: tl.constexpr):
    """Ids of neighbouring tokens, and a row's logits of them in float32."""
    token = begin + tl.arange(0, BLOCK)
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    return token, value.to(tl.float32)


@triton.jit
def _logprobs_kernel(
    logits,  # [num_rows, vocab]
    tokens,  # [num_rows] int32
    seats,  # [num_seqs] int64
    words,  # [num_seats, _WORDS] int32
    values,  # [num_rows, 1 + _TOP] float32, written
    ids,  # [num_rows, 1 + _TOP] int32, written: the token's rank first
    vocab,
    QUERY_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(words + tl.load(seats + row // QUERY_LEN) * _WORDS + _NUM_LOGPROBS)
    if num_top >= 0:
        logits += row * vocab
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, vocab, BLOCK):
            peaks = tl.maximum(peaks, _block(logits, begin, vocab, BLOCK)[1])
        peak = tl.max(peaks, axis=0)
        chosen = tl.load(tokens + row)
        own = tl.load(logits + chosen).to(tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        ahead = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, vocab, BLOCK):
            token, value = _block(logits, begin, vocab, BLOCK)
            sums += tl.exp(value - peak)
            is_ahead = (value > own) | ((value == own) & (token < chosen))
            ahead += (is_ahead & (token < vocab)).to(tl.int32)
        log_sum = tl.log(tl.sum(sums, axis=0))
        tl.store(ids + row * (1 + _TOP), 1 + tl.sum(ahead, axis=0))
        tl.store(values + row * (1 + _TOP), own - peak - log_sum)
        last, last_id = float("inf"), -1  # the ranking so far: by value, then lower id
        for index in range(tl.minimum(num_top, vocab)):
            best = tl.full([], float("-inf"), tl.float32)
            best_id = vocab
            for begin in range(0, vocab, BLOCK):
                token, value = _block(logits, begin, vocab, BLOCK)
                behind = (value < last) | ((value == last) & (token > last_id))
                value = tl.where(behind & (token < vocab), value, float("-inf"))
                top, lane = tl.max(value, axis=0, return_indices=True)
                best_id = tl.where(top > best, begin + lane, best_id)
                best = tl.maximum(best, top)
            tl.store(values + row * (1 + _TOP) + 1 + index, best - peak - log_sum)
            tl.store(ids + row * (1 + _TOP) + 1 + index, tl.minimum(best_id, vocab - 1))
            last, last_id = best, best_id


def edit(logits: Tensor, edits: DeviceEdits, num_processors: int) -> None:
    """As `DeviceOps.edit_on_device`."""
    num_rows, vocab = logits.shape
    tables = edits.tables
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    parts = num_parts(num_rows, triton.cdiv(vocab, block), num_processors)
    _edit_kernel[(num_rows, parts)](
        logits, edits.seats, edits.positions, edits.ancestors, edits.nodes, tables.words,
        tables.bias_ids, tables.biases.view(torch.float32), tables.ends, tables.counts,
        vocab, edits.nodes.shape[1], edits.ancestors.shape[1], parts, block,
        enable_fp_fusion=False,  # products are rounded before they are added, as on the host
    )  # fmt: skip


def logprobs(logits: Tensor, tokens: Tensor, edits: DeviceEdits) -> tuple[Tensor, Tensor]:
    """As `DeviceOps.logprobs_on_device`; rows that ask for none are unspecified."""
    num_rows, vocab = logits.shape
    values = torch.empty((num_rows, 1 + MAX_TOP), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, 1 + MAX_TOP), dtype=torch.int32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _logprobs_kernel[(num_rows,)](
        logits.contiguous(), tokens, edits.seats, edits.tables.words, values, ids, vocab,
        edits.query_len, block,
    )  # fmt: skip
    return values, ids
