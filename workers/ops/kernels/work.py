"""Scratch memory of a pass of attention: its queries, and what is known of their results so far."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import Matrix, inlined
from .tiles import TILE, Panels, panels_at
from .vector import FULL, LANES, load_one, load_some, splat, store, store_one, store_some
from .visible import MINUS

MAX_QUERIES = 64  # rows times heads of a pass
LOG2_E = np.float32(1.4426950408889634)


class Work(NamedTuple):
    """Scratch memory of the queries of a pass, head by head; all float32 but the queries."""

    queries: Matrix  # [num_queries, dim] of the kernel's kind
    scores: Matrix  # [num_queries, TILE], of one head after the other
    peaks: int  # address of [num_queries]
    sums: int  # address of [num_queries]
    results: Matrix  # [num_queries, padded]
    panels: Panels


@inlined
def row_of(matrix, row):
    return matrix.start + row * matrix.to_row


@inlined
def work_at(scratch, kind, dim, padded):
    to_query = dim * kind.width
    scores = scratch + MAX_QUERIES * to_query
    peaks = scores + MAX_QUERIES * TILE * 4
    sums = peaks + MAX_QUERIES * 4
    results = Matrix(sums + MAX_QUERIES * 4, (padded + 4 * LANES) * 4)
    panels = panels_at(results.start + MAX_QUERIES * results.to_row, kind, dim)
    return Work(Matrix(scratch, to_query), Matrix(scores, TILE * 4), peaks, sums, results, panels)


@inlined
def work_of(work, query, slots):
    """The part of a head whose queries begin there; scores are of no use to the next head."""
    panels = Panels(slots, work.panels.keys, work.panels.values)
    return Work(
        Matrix(row_of(work.queries, query), work.queries.to_row),
        work.scores,
        work.peaks + query * 4,
        work.sums + query * 4,
        Matrix(row_of(work.results, query), work.results.to_row),
        panels,
    )


@inlined
def begin_query(work, query, source, sink, padded):
    """A query next to the others, and what is known of its softmax before the first key."""
    target, size = row_of(work.queries, query), work.queries.to_row
    for byte in range(0, size, 4 * LANES):  # an even number of halves, moved as floats
        left = (size - byte) // 4
        store_some(FULL, target + byte, load_some(FULL, source + byte, left), left)
    store_one(work.peaks + query * 4, load_one(FULL, sink) * LOG2_E if sink else MINUS)
    store_one(work.sums + query * 4, np.float32(1) if sink else np.float32(0))
    for begin in range(0, padded, LANES):
        store(FULL, row_of(work.results, query) + begin * 4, splat(np.float32(0)))
