"""`outrider check --compile`: a GPU's kernels, compiled ahead of serving and without that GPU.

Rank 0's part of the model is built on the meta device, at full size and without memory, and does
what a start does there: attention's variants, steps of few and of many rows, and a device step of
every shape, with the head. A driver stands in for the GPU, so Triton finds what to compile for, and
keeps it under the keys under which a start looks for it. Nothing is launched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import EngineConfig, SpeculationBase
from ..config.heads import HeadConfig
from ..drafters.heads.protocol import TargetFacts
from ..errors import ConfigError
from ..workers.attention import KVCache
from ..workers.device_step.draft import DeviceHead
from ..workers.device_step.seats import DeviceSeats, SeatSizes
from ..workers.device_step.service import DeviceStep
from ..workers.device_step.shape import all_shapes
from ..workers.head import HeadRunner
from ..workers.model.checkpoint.quantised_formats import WeightFormat, find_format
from ..workers.model.family.decoder import FamilyRunner
from ..workers.model.info import read_config
from ..workers.model.paged import ForwardChoice, PagedModel
from ..workers.model.sharding import HeadShards
from ..workers.ops import PlannedOps
from .gpu_model import META, Loaded, gpu_ops, load

PROCESSORS = {"sm80": 108, "sm86": 84, "sm89": 142, "sm90": 132, "sm100": 148, "sm120": 188}
"""Of an architecture's largest GPUs: A100, A40, L40S, H100 (SXM) and H200, B200, RTX PRO 6000."""
ARCHITECTURES = {"sm80": 80, "sm86": 86, "sm89": 89, "sm90": 90, "sm100": 100, "sm120": 120}


class _Driver:
    """What Triton asks of a driver before it launches anything."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", ARCHITECTURES[arch], 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@contextmanager
def compiling(arch: str) -> Iterator[dict[str, set[int]]]:
    """Has launches compile for a GPU of that architecture; kernels by name, each counted once."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launched, before = JITFunction.run, driver._active
    found: dict[str, set[int]] = {}
    used: dict[int, Any] = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if id(kernel) not in used:
            used[id(kernel)] = kernel
            kernel.device_caches.clear()
        made = launched(kernel, *args, grid=grid, warmup=True, **options)
        found.setdefault(kernel.__name__, set()).add(id(made))
        return made

    driver.set_active(_Driver(arch))
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = launched
        driver._active = before
        for kernel in used.values():
            kernel.device_caches.clear()


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A configuration's target, as `gpu_model.load` takes one."""

    name: str
    num_ranks: int
    form: WeightFormat | None
    hf_config: Any

    def config(self) -> Any:
        return self.hf_config


def compile_ahead(config: EngineConfig, arch: str, num_processors: int) -> dict[str, int]:
    """Compiles what rank 0 needs; the numbers of kernels by name.

    Into how many parts draws and the products of quantised weights are cut follows from the
    number of processors, and is compiled in.

    Raises:
        ConfigError: what cannot be compiled ahead, by field.
    """
    loaded, ops = _load(config, num_processors)
    with torch.inference_mode(), compiling(arch) as found, _rehearsal(loaded):
        _as_a_start(config, loaded, ops)
    return {name: len(kernels) for name, kernels in sorted(found.items())}


def _rehearsal(loaded: Loaded) -> Any:
    return loaded.collective.rehearsal() if loaded.collective.size > 1 else nullcontext()


def _load(config: EngineConfig, num_processors: int) -> tuple[Loaded, Any]:
    path = Path(config.model)
    trust = {"trust_remote_code": config.trust_remote_code, "allow_pickle": config.allow_pickle}
    found, form = read_config(path, **trust), find_format(path)
    dtype = found.dtype if config.dtype == "auto" else config.dtype
    if str(dtype).removeprefix("torch.") != "bfloat16":
        raise ConfigError.at("dtype", f"--compile compiles for bfloat16, not {dtype}")
    if config.pipeline_parallel_size > 1:
        raise ConfigError.at("pipeline_parallel_size", "--compile compiles for one stage")
    if config.kv_cache_dtype != "auto":
        raise ConfigError.at("kv_cache_dtype", "--compile compiles for keys in bfloat16")
    if config.forward == "bridge":
        raise ConfigError.at("forward", "--compile compiles the family's forward")
    if config.deterministic:
        raise ConfigError.at("deterministic", "--compile compiles for the usual products")
    if form is not None and (form.method != "fp8" or form.block != (128, 128)):
        raise ConfigError.at(
            "model", f"--compile knows quantised weights in float8 blocks of 128x128, not {path}"
        )
    ops = gpu_ops(num_processors)
    try:
        target: Any = _Checkpoint(path.name, config.tensor_parallel_size, form, found)
        return load(target, ops), ops
    except ValueError as error:
        raise ConfigError.at("model", f"--compile: {error}") from error


def is_compiled_ahead(section: SpeculationBase) -> bool:
    """Whether a drafter's kernels are compiled with the target's."""
    return isinstance(section, HeadConfig) and section.placement == "colocated"


def _as_a_start(config: EngineConfig, loaded: Loaded, ops: Any) -> None:
    """What `Worker.allocate` does with the target and a colocated head."""
    info, ranks, size = loaded.info, config.tensor_parallel_size, config.block_size
    runner = FamilyRunner(loaded.model, info, ranks)
    model = PagedModel(
        info, nn.Identity(), META, loaded.collective, runner, ForwardChoice("family")
    )
    model.warm_up(size, config.max_num_batched_tokens)
    section, head = config.speculative_config, None
    if isinstance(section, HeadConfig) and is_compiled_ahead(section):
        facts, shards = TargetFacts.of(info, META), HeadShards(loaded.collective)
        head = HeadRunner(
            section, facts, loaded.ends, PlannedOps(ops), info.num_layers, config.max_num_seqs,
            shards=shards,
        )  # fmt: skip
    if config.device_step != "off":
        _device_steps(config, loaded, model, head)


def _device_steps(
    config: EngineConfig, loaded: Loaded, model: PagedModel, head: HeadRunner | None
) -> None:
    from tqdm import tqdm

    num_nodes = config.speculative_config.max_nodes if head is not None else 0
    longest = min(config.max_model_len or loaded.info.max_model_len, loaded.info.max_model_len)
    num_blocks = -(-longest // config.block_size)
    shapes = (*model.kv_shapes, *(head.kv_shapes if head is not None else ()))
    cache = KVCache(shapes, num_blocks + 1, config.block_size, torch.bfloat16, META)
    seats = DeviceSeats(
        SeatSizes(
            config.max_num_seqs, longest, num_blocks, config.block_size, num_nodes,
            loaded.info.vocab_size,
        ),
        META,
    )  # fmt: skip
    drafter = None
    if head is not None:
        head.attach(cache)
        drafter = DeviceHead(head, cache, seats)
    step = DeviceStep(loaded.model, cache, seats, drafter)
    for shape in tqdm(all_shapes(config.max_num_seqs, num_nodes), "Shapes", file=sys.stderr):
        step.run(shape)
