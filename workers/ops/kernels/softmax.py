"""Online softmax: scores of a tile become weights, and results so far are scaled to fit them.

The online softmax is that of Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import numpy as np

from . import inlined
from .vector import (
    FULL,
    LANES,
    add,
    div,
    exp,
    fma,
    greatest,
    larger,
    load,
    load_one,
    mul,
    power_of_two,
    splat,
    store,
    store_one,
    sub,
    total,
)
from .visible import MINUS
from .work import row_of


@inlined
def cap(scores, num_keys, scale, softcap):
    """Scores become tanh(scale * score / softcap) * softcap, by way of exp."""
    one, two, most = splat(np.float32(1)), splat(np.float32(2)), splat(softcap)
    factor = splat(np.float32(2) * scale / softcap)
    for key in range(0, num_keys, LANES):
        grown = exp(mul(load(FULL, scores + key * 4), factor))
        store(FULL, scores + key * 4, mul(sub(one, div(two, add(grown, one))), most))


@inlined
def soften(kind, work, query, num_keys, scale, dim):
    """Scores to weights: a query's running maximum, its sum, and its result so far.

    Weights are of the kernel's kind and lie where the scores began, which are wider or as wide.
    `scale` is positive, and a power of two is taken: it holds log2(e).
    """
    place = row_of(work.scores, query)
    peak_of, sum_of = work.peaks + query * 4, work.sums + query * 4
    most = splat(MINUS)
    for key in range(0, num_keys, LANES):
        most = larger(load(FULL, place + key * 4), most)
    before = load_one(FULL, peak_of)
    peak = max(before, greatest(most) * scale)
    if peak == MINUS:
        for key in range(0, num_keys, LANES):
            store(kind.tag, place + key * kind.width, splat(np.float32(0)))
        return
    factor, level, added = splat(scale), splat(-peak), splat(np.float32(0))
    for key in range(0, num_keys, LANES):
        weight = power_of_two(fma(load(FULL, place + key * 4), factor, level))
        store(kind.tag, place + key * kind.width, weight)
        added = add(added, weight)
    if before == peak:
        store_one(sum_of, load_one(FULL, sum_of) + total(added))
        return
    store_one(peak_of, peak)
    shrink = power_of_two(add(splat(before), level))
    store_one(sum_of, load_one(FULL, sum_of) * greatest(shrink) + total(added))
    if before > MINUS:
        for begin in range(0, dim, LANES):
            o = row_of(work.results, query) + begin * 4
            store(FULL, o, mul(load(FULL, o), shrink))
