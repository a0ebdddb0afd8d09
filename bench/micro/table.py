"""Measures what `workers/ops/table.py` chooses between on this processor, and prints its entries.

    python -m outrider.bench.micro.table [--rounds 9] [--dtype bfloat16 ...]

Products: the kernel and oneDNN's, packed; attention of one prompt: the kernel's and torch's. One
thread, on its own time on a CPU; ways take turns, the quickest round counts. The entry that is
proposed is the quicker way for most shapes and rows, and is yours to write into the table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from rich.console import Console

from ...workers.attention import KVCache, KVShape
from ...workers.ops.cpu import CpuOps, PackedProjection, PanelProjection
from ...workers.ops.protocol import AttentionSpec
from ...workers.ops.reference import passes_of
from ...workers.ops.table import (
    KERNEL,
    LARGE_WEIGHT,
    ONEDNN,
    SMALL,
    SMALL_WEIGHT,
    TORCH,
    capability,
    describe,
)
from ..forward import BLOCK_SIZE, DTYPES, prompt_step
from ..measure import Pair, Rows, timed

SHAPES = (
    (480, 320),
    (320, 864),
    (1728, 320),
    (576, 1536),
    (1024, 1024),
    (5632, 1024),
    (4096, 4096),
)
HEADS = ((8, 2, 40), (9, 3, 64), (16, 8, 64), (32, 8, 128))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
_ATTENTION = "attention"
LENGTHS = (64, 128, 256, 512, 1500)


def products(dtype: torch.dtype) -> Iterator[tuple[str, int, Pair]]:
    """Class and rows of every pair of products: oneDNN's, and the kernel's as reference."""
    for columns, length in SHAPES:
        weight = torch.randn(columns, length).to(dtype)
        what = SMALL_WEIGHT if weight.numel() <= SMALL[dtype] else LARGE_WEIGHT
        ways = PackedProjection(weight, None), PanelProjection(weight, None)
        for rows in ROWS:
            states = torch.randn(rows, length).to(dtype)
            ours, reference = (partial(way, states) for way in ways)
            yield what, rows, Pair(f"{columns} x {length}", str(rows), ours, reference)


def attention(dtype: torch.dtype) -> Iterator[tuple[str, int, Pair]]:
    """Class and rows of every pair: torch's fused attention, and the kernel's as reference."""
    ops = CpuOps(dtype)
    for heads, kv_heads, dim in HEADS:
        spec = AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5)
        for rows in LENGTHS:
            step, num_blocks = prompt_step(rows, 100)
            shape = KVShape(kv_heads, dim, dim)
            cache = KVCache([shape], num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"))
            plan = ops.plan(step, cache)
            (chunk,) = passes_of(plan)
            joined = torch.randn(rows, spec.joined_width).to(dtype)
            query = joined[:, : spec.key_begin].unflatten(1, (heads, dim))
            out = torch.empty(rows, heads, dim, dtype=dtype)
            ours = partial(chunk.attend, query, cache.keys[0], cache.values[0], spec, out)
            reference = partial(ops.rope_store_attend, joined, None, None, plan, cache, 0, spec)
            case = f"heads {heads}/{kv_heads} x {dim}"
            yield _ATTENTION, rows, Pair(case, str(rows), ours, reference)


@torch.inference_mode()
def main() -> None:
    """Prints the times and the entries."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.micro.table")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    console = Console(width=140)
    for dtype in options.dtype:
        console.print(f"{dtype}, {torch.cpu.get_capabilities().get('cpu_name')}")
        console.print(f"in use: {describe(DTYPES[dtype])}\n")
        table = Rows("part", "rows", "other, us", "kernel, us", "ratio")
        found: dict[str, list[float]] = {}
        for part in (products, attention):
            for what, rows, pair in part(DTYPES[dtype]):
                each = timed(pair, options.rounds)
                times = (f"{each.ours_us:.0f}", f"{each.reference_us:.0f}", f"{each.ratio:.2f}")
                table.add(pair.part, rows, *times)
                found.setdefault(what, []).append(each.ratio)
        for what, ratios in found.items():
            other = TORCH if what == _ATTENTION else ONEDNN
            quicker = other if statistics.median(ratios) < 1 else KERNEL
            console.print(f"{capability()}, {dtype}, {what}: {quicker}")


if __name__ == "__main__":
    main()
