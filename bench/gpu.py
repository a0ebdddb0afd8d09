"""What the family's decoder costs on a GPU, over random weights that are generated there.

    python -m outrider.bench.gpu [--device cuda] [--size 8b] [--dtype bfloat16] [--context 1024]

In one process, without a scheduler: decoding one token, verifying a tree of 8 nodes, and attention
alone beside torch's. On a CUDA device each forward is also captured in a graph and replayed. The
share of the bandwidth compares the bytes that a step must read (weights and cache) with the rate
of a copy that is timed in the same run. `--dry-run` with TRITON_INTERPRET=1 in the environment runs
the same code and kernels anywhere, on a tiny model under Triton's interpreter, and `--device cpu`
with a CPU's operations; their figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from ..workers.attention import KVCache, KVShape
from ..workers.model.family import FamilyModel, FamilySpec
from ..workers.model.family.decoder import AttentionBlock, GatedUnit, Layer, Rope, as_is
from ..workers.ops import Ops, PagedStep, make_ops
from ..workers.ops.protocol import AttentionSpec, Gate, GateKind, Norm
from .forward import BLOCK_SIZE, DTYPES, tree_step

NUM_NODES = 8


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama's sizes."""

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int


SIZES = {
    "8b": Size(32, 4096, 14336, 32, 8, 128, 128256),
    "1b": Size(16, 2048, 8192, 32, 8, 64, 128256),
    "tiny": Size(2, 64, 96, 4, 2, 16, 256),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and in what precision."""

    device: torch.device
    dtype: torch.dtype
    rounds: int
    is_dry: bool = False  # no device: kernels are interpreted, graphs are plain calls

    def ops(self) -> Ops:
        """The device's operations; in a dry run those of a GPU."""
        if not self.is_dry:
            return make_ops(self.device, self.dtype)
        from ..workers.ops.cuda.ops import CudaOps

        return CudaOps(self.device)

    def random(self, *shape: int) -> Tensor:
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(std=shape[-1] ** -0.5)

    def time_ms(self, run: Callable[[], object]) -> float:
        """The median of the rounds, each waited for."""
        for _ in range(3):
            run()
        return statistics.median(self._once(run) for _ in range(self.rounds))

    def _once(self, run: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def captured(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """`run` as a CUDA graph; None where there are none."""
        if self.is_dry:
            return run
        if self.device.type != "cuda":
            return None
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def random_model(size: Size, machine: Machine, ops: Ops) -> tuple[FamilyModel, int]:
    """A Llama and the bytes of the weights that a step reads."""
    spec = AttentionSpec(
        size.num_heads, size.num_kv_heads, size.head_dim, size.head_dim, size.head_dim**-0.5,
        rotary_dim=size.head_dim,
    )  # fmt: skip
    num_read = 0

    def pack(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        nonlocal num_read
        weight = machine.random(rows, columns)
        num_read += weight.numel() * weight.element_size()
        return ops.pack(weight, None)

    norm = Norm(torch.ones(size.hidden, device=machine.device), 1e-5)
    gate = Gate(GateKind.SILU)
    layers = []
    for _ in range(size.num_layers):
        joined = pack(spec.joined_width, size.hidden)
        output = pack(size.hidden, spec.num_heads * spec.value_dim)
        unit = GatedUnit(
            ops, pack(2 * size.inner, size.hidden), pack(size.hidden, size.inner), gate, as_is
        )
        block = AttentionBlock(joined, output, as_is, spec, 0, False)
        layers.append(Layer(norm, block, None, norm, unit, None))
    half = torch.arange(size.head_dim // 2, device=machine.device)
    rope = Rope(500000.0 ** (-2 * half / size.head_dim), 1.0)
    table = machine.random(size.vocab, size.hidden)
    model = FamilyModel(
        ops, FamilySpec(gate), layers, (rope,), norm,
        lambda tokens: embedding(tokens, table), pack(size.vocab, size.hidden),
    )  # fmt: skip
    return model, num_read


def copy_rate(machine: Machine) -> float:
    """Bytes a second that a copy reads and writes."""
    num_bytes = 1 << 30 if machine.device.type == "cuda" else 1 << 22
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / machine.time_ms(lambda: target.copy_(source)) * 1e3


def planned(
    size: Size, machine: Machine, ops: Ops, num_tokens: int, context_len: int
) -> tuple[PagedStep, KVCache]:
    """A root and the tree below it after a context, and a cache of random keys and values."""
    step, num_blocks = tree_step(num_tokens, context_len, size.vocab)
    shape = KVShape(size.num_kv_heads, size.head_dim, size.head_dim)
    shapes = [shape] * size.num_layers
    cache = KVCache(shapes, num_blocks, BLOCK_SIZE, machine.dtype, machine.device)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return ops.plan(step, cache), cache


@torch.inference_mode()
def report(size: Size, machine: Machine, context_len: int) -> list[str]:
    """The lines of a report."""
    ops = machine.ops()
    model, num_read = random_model(size, machine, ops)
    rate = copy_rate(machine)
    kv_bytes = 2 * size.num_kv_heads * size.head_dim * context_len * size.num_layers
    kv_bytes *= machine.dtype.itemsize
    lines = [
        f"device: {describe(machine.device)}, operations: {ops.name}, torch {torch.__version__}",
        f"weights read: {num_read / 1e9:.3f} GB, cache read: {kv_bytes / 1e9:.3f} GB, "
        f"copy: {rate / 1e9:.0f} GB/s",
    ]
    best: dict[int, float] = {}
    for num_tokens in (1, 1 + NUM_NODES):
        plan, cache = planned(size, machine, ops, num_tokens, context_len)

        def run(plan: PagedStep = plan, cache: KVCache = cache) -> object:
            return model.forward(plan, cache, None)

        times_ms = {"launched": machine.time_ms(run)}
        replay = machine.captured(run)
        if replay is not None:
            times_ms["captured"] = machine.time_ms(replay)
        best[num_tokens] = min(times_ms.values())
        share = (num_read + kv_bytes) / rate * 1e3 / best[num_tokens]
        shown = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times_ms.items())
        lines.append(f"forward of {num_tokens}: {shown}; {share:.0%} of the copy's bandwidth")
        lines.append(f"attention of {num_tokens}: {attention(size, machine, ops, plan, cache)}")
    lines.append(f"{1 + NUM_NODES} tokens cost {best[1 + NUM_NODES] / best[1]:.2f} times one")
    return lines


def attention(size: Size, machine: Machine, ops: Ops, plan: PagedStep, cache: KVCache) -> str:
    """One layer's attention beside torch's over keys that lie dense, without their gathering."""
    num_rows, heads, dim = plan.num_tokens, size.num_heads, size.head_dim
    spec = AttentionSpec(heads, size.num_kv_heads, dim, dim, dim**-0.5)
    joined = machine.random(num_rows, spec.joined_width)
    query = machine.random(1, heads, num_rows, dim)
    dense = machine.random(2, 1, size.num_kv_heads, plan.max_key_len, dim)
    key, value = dense.unbind(0)

    def paged() -> object:
        return ops.rope_store_attend(joined, None, None, plan, cache, 0, spec)

    def plain() -> object:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    times_us = [machine.time_ms(machine.captured(run) or run) * 1e3 for run in (paged, plain)]
    return f"paged, with preparation, {times_us[0]:.1f} us, torch dense {times_us[1]:.1f} us"


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def begin_dry_run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Makes `options` those of a dry run."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # read when Triton is imported: by torch, maybe
        parser.error("--dry-run: set TRITON_INTERPRET=1 in the environment")
    options.device, options.size, options.dtype = "cpu", "tiny", "float32"
    options.context, options.rounds = min(options.context, 40), 1


def machine_of(options: argparse.Namespace) -> Machine:
    """Where the options say."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    return Machine(device, dtype, options.rounds, options.dry_run)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.gpu")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="8b", choices=tuple(SIZES))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, interpreted")
    options = parser.parse_args(arguments)
    if options.dry_run:
        begin_dry_run(parser, options)
    if options.context < 1 or options.rounds < 1:
        parser.error("--context and --rounds must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device; `--dry-run` tries the code")
    machine = machine_of(options)
    for line in report(SIZES[options.size], machine, options.context):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
