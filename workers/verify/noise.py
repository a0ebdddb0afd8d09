"""Counter-based noise: a pure function of (seed, position, stream, token), with no state.

It is used for the draws of the target and of drafters, and for the coins of verification rules. The
token at index t of prompt + output has position t.

A row's key has 64 bits: two rounds of splitmix64's finaliser over (seed, stream, position). A
token's 32 bits come from a multiply-xorshift hash of the token id under that key, in int32
arithmetic that wraps identically on CPU and CUDA. They are converted to a uniform in (0, 1) and to
Gumbel noise in float64, and rounded once to float32, which hides differences between libm and
kernels.

Sources: Steele, Lea, Flood 2014 (splitmix64); Salmon et al. 2011 (counter-based generators);
Daliri, Musco, Suresh 2024, arXiv:2408.07978 (noise shared by drafter and target).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from ...compiled import Compiler
from ...scheduler.types import IntArray

# -- the perturbed argmax over a vocabulary on the CPU, in one compiled pass per row
#
# Noise grows with a token's hash, so the upper bits of the hash bound it; logarithms are computed
# only for the few tokens whose bound exceeds the best score so far.

_compiled = Compiler(Path(__file__), nogil=True)
_VALUES: Any = types.float32[::1]

_U_TOKEN, _U_HASH_1, _U_HASH_2 = np.uint32(0x9E3779B1), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S15, _S16 = np.uint32(15), np.uint32(16)
_BLOCK = 512  # tokens whose bounds are computed together, in vectors
_BUCKET_BITS = 10


def _noise_bounds() -> NDArray[np.float32]:  # [1 << _BUCKET_BITS]
    """Returns the largest noise of hashes with the same upper bits, plus a margin."""
    buckets = np.arange(1 << _BUCKET_BITS, dtype=np.float64)
    largest = (buckets + 1) * 2.0 ** (32 - _BUCKET_BITS) - 0.5
    noise = -np.log(-np.log(largest * 2.0**-32))
    return (noise + 1e-5).astype(np.float32)


_BOUNDS = _noise_bounds()


@_compiled(
    types.void, _VALUES, types.int64, types.int64, types.uint32, types.uint32, types.int32[::1],
    _VALUES,
)  # fmt: skip
def _bound(
    values: NDArray[np.float32],  # [vocab]
    begin: int,
    size: int,
    low: np.uint32,
    high: np.uint32,
    hashes: NDArray[np.int32],  # [_BLOCK], output
    bounds: NDArray[np.float32],  # [_BLOCK], output
) -> None:
    """Computes hashes of consecutive tokens, and upper bounds of their scores."""
    first = np.uint32(begin)
    for lane in range(size):
        bits = np.uint32(np.uint32(first + np.uint32(lane)) * _U_TOKEN + low)
        bits = np.uint32(np.uint32(bits ^ (bits >> _S16)) * _U_HASH_1) ^ high
        bits = np.uint32(np.uint32(bits ^ (bits >> _S15)) * _U_HASH_2)
        hashes[lane] = np.int32(bits ^ (bits >> _S16))
    for lane in range(size):
        bucket = (hashes[lane] >> (32 - _BUCKET_BITS)) + (1 << (_BUCKET_BITS - 1))
        bounds[lane] = _BOUNDS[bucket] + values[begin + lane]


@_compiled(types.void, types.float32[:, ::1], types.int64[::1], types.int64[::1])
def gumbel_argmax(
    logits: NDArray[np.float32],  # [num_rows, vocab], -inf: not a candidate
    row_keys: NDArray[np.int64],  # [num_rows]
    drawn: NDArray[np.int64],  # [num_rows], output
) -> None:
    """Finds the first index of every row's largest logit plus noise."""
    num_rows, vocab = logits.shape
    hashes, bounds = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
    for row in range(num_rows):
        low = np.uint32(row_keys[row] & 0xFFFFFFFF)
        high = np.uint32((row_keys[row] >> 32) & 0xFFFFFFFF)
        values = logits[row]
        best, winner = np.float32(-np.inf), 0
        for begin in range(0, vocab, _BLOCK):
            size = min(_BLOCK, vocab - begin)
            _bound(values, begin, size, low, high, hashes, bounds)
            for lane in range(size):
                if bounds[lane] > best:
                    unit = (np.float64(hashes[lane]) + (2.0**31 + 0.5)) * 2.0**-32
                    noise = np.float32(-math.log(-math.log(unit)))
                    score = np.float32(noise + values[begin + lane])
                    if score > best:
                        best, winner = score, begin + lane
        drawn[row] = winner


# -- CPU reductions by numpy, about ten times faster than torch's scalar ones, with equal results


def argmax(values: Tensor) -> Tensor:  # [num_rows, num_candidates] -> [num_rows], int64
    """Returns the first index of every row's maximum."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(1))
    return values.argmax(1)


def nonzero(mask: Tensor) -> Tensor:  # [n] on the CPU -> [num_true], int64
    """Returns indices of true elements, ascending."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


# Streams: independent noise for the same (seed, position).
TARGET = 0  # the target's own draw; under the coupled rule the drafter's too
DRAFT = 1  # draws of a drafter that must be independent of the verification
RESIDUAL = 2  # the token that replaces the rejected ones
COINS = 16  # + sibling index: whether that sibling is accepted
# For rules whose decisions depend on nodes that they do not emit, one stream per round: + position
# of the round's first token, which increases with every round and stays below 2^29.
ROUND_DRAFT = 1 << 29
ROUND_COINS = 1 << 30

_ROOM_ON_CPU = 1 << 17  # elements per pass, so that the temporaries stay in the cache
_ROOM_ON_GPU = 1 << 25  # elements per pass, so that the temporaries stay below a gigabyte


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_SPLIT_1 = _signed(0xBF58476D1CE4E5B9, 64)
_SPLIT_2 = _signed(0x94D049BB133111EB, 64)
_TOKEN = _signed(0x9E3779B1, 32)
_HASH_1 = 0x7FEB352D
_HASH_2 = _signed(0x846CA68B, 32)


def keys(
    seeds: NDArray[np.int64] | Tensor,  # [...]
    positions: IntArray | Tensor,  # [...]
    stream: int | Tensor = TARGET,  # broadcasts with the others
) -> Tensor:  # [...], int64
    """Returns a 64-bit hash of (seed, position, stream), computed on the device of the inputs."""
    key = _finalise(torch.as_tensor(seeds, dtype=torch.int64) + _GOLDEN)
    word = torch.as_tensor(positions, dtype=torch.int64) + stream * (1 << 32)
    return _finalise(key + word * _GOLDEN)


def uniform(
    seeds: NDArray[np.int64] | Tensor,  # [...]
    positions: IntArray | Tensor,  # [...]
    stream: int | Tensor,  # broadcasts with the others
) -> Tensor:  # [...], float64
    """Returns uniforms strictly inside (0, 1), with 52 bits."""
    bits = _shift(keys(seeds, positions, stream), 12, 64)
    return bits.double() * 2.0**-52 + 2.0**-53


def gumbel(
    row_keys: Tensor,  # [num_rows], from `keys`
    token_ids: Tensor | int,  # [num_rows, num_candidates], or the size of the vocabulary
) -> Tensor:  # [num_rows, num_candidates], float32
    """Returns Gumbel noise of every candidate, between -3.1 and 22.9.

    A token's noise is the same whether it is computed alone or with the whole vocabulary.
    """
    if isinstance(token_ids, int):
        token_ids = torch.arange(token_ids, device=row_keys.device)[None]
    return _to_gumbel(_hash(row_keys, token_ids))


def _hash(row_keys: Tensor, token_ids: Tensor) -> Tensor:  # [num_rows, num_candidates], int32
    low, high = (half[:, None] for half in row_keys.view(torch.int32).view(-1, 2).unbind(1))
    bits = token_ids.to(torch.int32) * _TOKEN + low
    bits.bitwise_xor_(_shift(bits, 16, 32)).mul_(_HASH_1).bitwise_xor_(high)
    bits.bitwise_xor_(_shift(bits, 15, 32)).mul_(_HASH_2)
    bits.bitwise_xor_(_shift(bits, 16, 32))
    return bits


def _to_gumbel(bits: Tensor) -> Tensor:  # same shape, float32; grows with the bits
    unit = bits.double().add_(2.0**31 + 0.5).mul_(2.0**-32)  # exact, strictly inside (0, 1)
    return unit.log_().neg_().log_().neg_().float()


def perturbed_argmax(
    logits: Tensor,  # [num_rows, num_candidates] float32, -inf: not a candidate
    row_keys: Tensor,  # [num_rows]
    token_ids: Tensor | None = None,  # [num_rows, num_candidates]; None: the whole vocabulary
) -> Tensor:  # [num_rows], index of the drawn candidate
    """Draws from softmax(logits): the argmax of logits + Gumbel noise (the Gumbel-max trick)."""
    num_rows, num_candidates = logits.shape
    if logits.device.type == "cpu" and token_ids is None:
        index = np.empty(num_rows, dtype=np.int64)
        gumbel_argmax(logits.contiguous().numpy(), row_keys.numpy(), index)
        return torch.from_numpy(index)
    drawn = []
    for part in passes(num_rows, num_candidates, logits.device):
        noise = gumbel(row_keys[part], num_candidates if token_ids is None else token_ids[part])
        drawn.append(argmax(noise.add_(logits[part])))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def passes(num_rows: int, num_candidates: int, device: torch.device) -> Iterator[slice]:
    """Yields slices of rows whose temporaries suit the device's memory."""
    room = _ROOM_ON_CPU if device.type == "cpu" else _ROOM_ON_GPU
    rows_per_pass = max(1, room // max(1, num_candidates))
    for begin in range(0, num_rows, rows_per_pass):
        yield slice(begin, begin + rows_per_pass)


def _finalise(word: Tensor) -> Tensor:
    """splitmix64's finaliser, a bijection of 64-bit words."""
    word = (word ^ _shift(word, 30, 64)) * _SPLIT_1
    word = (word ^ _shift(word, 27, 64)) * _SPLIT_2
    return word ^ _shift(word, 31, 64)


def _shift(word: Tensor, by: int, bits: int) -> Tensor:
    """Computes a logical right shift; torch's own keeps the sign."""
    return (word >> by).bitwise_and_((1 << (bits - by)) - 1)
