"""The target's noise in Triton: `workers/verify/noise.py`, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl


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
