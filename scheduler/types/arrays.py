"""Arrays that cross process boundaries, and what is reckoned with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


def ints(values: object) -> IntArray:
    """`values` as an int32 array."""
    return np.asarray(values, dtype=np.int32)


def starts_of(counts: object) -> IntArray:  # [num_seqs] -> [num_seqs + 1]
    """Where each sequence's part of a flat array begins, and where the last one ends."""
    lens = ints(counts)
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    lens.cumsum(dtype=np.int32, out=starts[1:])
    return starts


def lens_of(starts: IntArray) -> IntArray:  # [num_seqs + 1] -> [num_seqs]
    """The inverse of `starts_of`; `np.diff` takes several times as long."""
    return starts[1:] - starts[:-1]


def slots_of(
    tables: IntArray,  # [max_blocks], or [num_seqs, max_blocks]
    index: IntArray,  # [num_tokens], or what broadcasts to [num_seqs, num_tokens]
    block_size: int,
) -> IntArray:  # shape of `index`, one row per table
    """Cache slots of the tokens at `index` of their sequences."""
    blocks = np.take_along_axis(tables, index // block_size, axis=-1)
    return blocks * block_size + index % block_size
