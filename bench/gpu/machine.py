"""The device that is measured: its clock, its facts, and a random Llama on it."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ...workers.model.family import FamilyModel, FamilySpec
from ...workers.model.family.decoder import AttentionBlock, GatedUnit, Layer, Rope, as_is
from ...workers.ops import DeviceOps, make_ops
from ...workers.ops.protocol import AttentionSpec, Gate, GateKind, Norm

Row = dict[str, Any]
"""What a case found, by column."""
Case = tuple[str, Callable[[], Row]]
_COLD_BYTES = 256 << 20  # written between rounds: more than any cache holds
_BESIDE = ("triton", "vllm", "flash-attn", "torchao", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


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


@dataclass(frozen=True)
class Machine:
    """Where, in what precision, and how often."""

    device: torch.device
    dtype: torch.dtype
    size: Size
    rounds: int
    is_dry: bool = False  # no device: kernels are interpreted, graphs are plain calls

    @cached_property
    def ops(self) -> DeviceOps:
        """The device's operations; in a dry run those of a GPU."""
        if not self.is_dry:
            ops: Any = make_ops(self.device, self.dtype)
            return ops
        from ...workers.ops.cuda.ops import CudaOps

        return CudaOps(self.device)

    @property
    def num_processors(self) -> int:
        """Of the device; few where there is none."""
        return int(getattr(self.ops, "num_processors", 1))

    @cached_property
    def copied_bytes_per_s(self) -> float:
        """Bytes that a copy reads and writes in a second: the bandwidth of reference."""
        num_bytes = 1 << 20 if self.is_dry else 1 << 30
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.time_ms(lambda: target.copy_(source)) * 1e3

    @cached_property
    def _cold(self) -> Tensor:
        return torch.empty(_COLD_BYTES, dtype=torch.uint8, device=self.device)

    def random(self, *shape: int) -> Tensor:
        """Normal values that a product of that depth leaves near 1."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(std=shape[-1] ** -0.5)

    def time_ms(self, run: Callable[[], object]) -> float:
        """The median of the rounds, by the device's events, each with cold caches."""
        for _ in range(0 if self.is_dry else 3):
            run()
        return statistics.median(self._once_ms(run) for _ in range(self.rounds))

    def captured_us(self, run: Callable[[], object]) -> float:
        """The same of a CUDA graph, without the time that launches take."""
        return self.time_ms(self.captured(run)) * 1e3

    def _once_ms(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e3
        self._cold.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run` as a CUDA graph; itself where there are none."""
        if self.device.type != "cuda":
            return run
        run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def is_usable(self) -> bool:
        """Whether the device still computes: some errors of kernels end a process's use of it."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True


def random_model(machine: Machine) -> tuple[FamilyModel, int]:
    """A Llama and the bytes of the weights that a step reads."""
    size, ops = machine.size, machine.ops
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


# -- what the device is


def _output(*command: str) -> str:
    """What a command prints; why it prints nothing."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout if done.returncode == 0 else done.stderr).strip()


def _device_facts(machine: Machine) -> Row:
    if machine.device.type != "cuda":
        return {"device": "cpu", "operations": machine.ops.name}
    found = torch.cuda.get_device_properties(machine.device)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory, GiB": round(found.total_memory / 2**30, 1),
        "devices": torch.cuda.device_count(),
        "operations": machine.ops.name,
    }


def _versions() -> Row:
    found: Row = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda}
    for name in _BESIDE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _driver() -> Row:
    compiler = os.environ.get("CC", "cc")
    return {
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "C compiler": _output(compiler, "--version").split("\n")[0],
    }


def _bandwidth(machine: Machine) -> Row:
    return {"copy, GB/s": machine.copied_bytes_per_s / 1e9}


def facts(machine: Machine) -> Iterator[Case]:
    """The part `machine` of the proof."""
    yield "device", partial(_device_facts, machine)
    yield "software", _versions
    yield "driver and compiler", _driver
    yield "links", lambda: {"links": _output("nvidia-smi", "topo", "-m")}
    yield "bandwidth", partial(_bandwidth, machine)
