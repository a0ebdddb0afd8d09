"""What the kernels' vectors are worth: products and attention against plain loops of numba.

    python -m outrider.bench.micro.plain_loops

One thread; the quickest of 60 calls, in microseconds. The plain loops leave vectors to LLVM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit

from ...workers.attention import KVCache, KVShape
from ...workers.ops.cpu import CpuOps, PanelProjection
from ...workers.ops.protocol import AttentionSpec
from ...workers.seats import sample_step

BLOCK_SIZE, SPEC = 16, AttentionSpec(10, 2, 64, 64, 0.125)
_plain: Callable[[Callable[..., None]], Callable[..., None]] = njit(fastmath=True)


@_plain
def product(rows: Any, weight: Any, out: Any) -> None:
    for row in range(len(rows)):
        for column in range(len(weight)):
            total = np.float32(0)
            for index in range(weight.shape[1]):
                total += rows[row, index] * weight[column, index]
            out[row, column] = total


@_plain
def product_of_halves(rows: Any, weight: Any, out: Any) -> None:
    """`weight` is bfloat16's bits; `rows` are widened."""
    words = np.empty(weight.shape[1], np.uint32)
    wide = words.view(np.float32)
    for row in range(len(rows)):
        for column in range(len(weight)):
            total = np.float32(0)
            for index in range(weight.shape[1]):
                words[index] = np.uint32(weight[column, index]) << np.uint32(16)
            for index in range(weight.shape[1]):
                total += rows[row, index] * wide[index]
            out[row, column] = total


@_plain
def attend(query: Any, keys: Any, values: Any, slots: Any, scale: Any, out: Any) -> None:
    scores = np.empty(len(slots), np.float32)
    group = len(query) // keys.shape[1]
    for head in range(len(query)):
        peak, total = np.float32(-1e30), np.float32(0)
        for key in range(len(slots)):
            dot = np.float32(0)
            for dim in range(query.shape[1]):
                dot += query[head, dim] * keys[slots[key], head // group, dim]
            scores[key] = dot * scale
            peak = max(peak, scores[key])
        for key in range(len(slots)):
            scores[key] = np.exp(scores[key] - peak)
            total += scores[key]
        out[head] = 0
        for key in range(len(slots)):
            weight = scores[key] / total
            for dim in range(query.shape[1]):
                out[head, dim] += weight * values[slots[key], head // group, dim]


def _quickest_us(call: Callable[[], object]) -> float:
    times_s = []
    for _ in range(60):
        start = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start)
    return min(times_s) * 1e6


def _show(what: str, kernel: Callable[[], object], loops: Callable[[], object]) -> None:
    times = f"kernel {_quickest_us(kernel):.0f}, plain loops {_quickest_us(loops):.0f}"
    sys.stdout.write(f"{what}: {times}\n")


def main() -> None:
    torch.set_num_threads(1)
    for size in ((1536, 1024), (480, 320)):
        weight = torch.randn(size)
        for num_rows in (1, 5, 8):
            rows, out = torch.randn(num_rows, size[1]), np.empty((num_rows, size[0]), np.float32)
            halves, narrow = weight.bfloat16(), rows.bfloat16()
            bits, wide = halves.view(torch.int16).numpy().view(np.uint16), narrow.float().numpy()
            full, half = PanelProjection(weight, None), PanelProjection(halves, None)
            case = f"{size[0]} x {size[1]}, {num_rows} rows"
            plain = partial(product, rows.numpy(), weight.numpy(), out)
            _show(f"product {case}, float32", partial(full, rows), plain)
            plain = partial(product_of_halves, wide, bits, out)
            _show(f"product {case}, bfloat16", partial(half, narrow), plain)
    for context_len in (200, 2000):
        table = np.random.default_rng(0).permutation(context_len // BLOCK_SIZE + 1)
        step = sample_step([1], context_len, table.tolist(), block_size=BLOCK_SIZE)
        cache = KVCache(
            [KVShape(2, 64, 64)], len(table), BLOCK_SIZE, torch.float32, torch.device("cpu")
        )
        cache.keys[0].normal_()
        ops = CpuOps(torch.float32)
        plan, joined = ops.plan(step, cache), torch.randn(1, SPEC.joined_width)
        slots = (table[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[: context_len + 1]
        query, out = np.ones((10, 64), np.float32), np.empty((10, 64), np.float32)
        pages = (cache.keys[0].numpy(), cache.values[0].numpy())
        _show(
            f"attention to {context_len} keys, float32",
            partial(ops.rope_store_attend, joined, None, None, plan, cache, 0, SPEC),
            partial(attend, query, *pages, slots, np.float32(0.125), out),
        )


if __name__ == "__main__":
    main()
