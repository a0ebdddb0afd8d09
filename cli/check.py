"""`outrider check`: checks everything about a configuration that needs no computation.

`--cluster` plans the placement and memory of every worker. `--load` also starts the workers,
decodes one token and stops them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import Field

from ..cluster.local_ray import cluster_nodes, find_ray, worker_niceness
from ..cluster.placement import Node, Plan, has_workers_apart, make_plan, parse_nodes, placed
from ..engine.preflight import preflight
from ..errors import ConfigError
from .console import err, grid, note, say, table
from .options import EngineOptions, Options, serve_section
from .session import check_groups

if TYPE_CHECKING:
    from rich.table import Table

    from ..config import DrafterGroupConfig, EngineConfig


class CheckOptions(Options):
    """Further checks."""

    load: bool = Field(False, description="Start the workers, decode a token, and stop them.")
    compile: Literal["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"] | None = None
    """Compile the kernels of the target and a colocated head for GPUs of this architecture into
    Triton's cache; no GPU is needed."""
    compile_processors: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Processors (SMs) of the GPUs that --compile compiles for, by default those of "
        "an A100 (108), A40 (84), L40S (142), H100 SXM or H200 (132), B200 (148), RTX PRO 6000 "
        "(188); of an H100 PCIe, 114.",
    )
    cluster: bool = False
    """Plan the placement and memory of workers on the running Ray cluster."""
    nodes: str | None = None
    """Plan for these nodes instead: 2x8xH100-80G (2 nodes with 8 GPUs of 80 GiB each),
    1xL4-24G+16cpu, 16cpu-64G; separated by commas."""

    def check(self) -> None:
        """Raises a `ConfigError` for an option without the one that it belongs to."""
        if self.compile is None and self.compile_processors is not None:
            raise ConfigError.at(
                "compile_processors",
                "only valid with --compile",
            )


def check(
    engine: EngineOptions,
    options: CheckOptions,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="YAML or JSON: our keys, TensorRT-LLM's, vLLM's JSON; or a checkpoint: a "
            "folder or a GGUF file.",
        ),
    ] = None,
) -> None:
    """Checks a configuration, its files and whether they match; prints the full configuration.

    All errors are reported, each with its field.
    """
    import yaml

    options.check()
    cluster, nodes = options.cluster, options.nodes
    if file is not None:
        if file.suffix == ".safetensors" or (file.name == "config.json" and _is_part(file)):
            raise ConfigError.at(
                "config", f"{file} is part of a checkpoint; give its folder, {file.parent}"
            )
        is_model = os.path.isdir(file) or file.suffix.lower() == ".gguf"
        given = ("model", str(file)) if is_model else ("config", file)
        engine = engine.with_argument(*given)
    if cluster and nodes is not None:
        raise ConfigError.at("nodes", "--cluster plans for the nodes that run; give one of them")
    config = engine.resolve()
    section = serve_section(engine, {})
    described = None if nodes is None else parse_nodes(nodes)
    address = None if config.executor == "local" or described is not None else find_ray()
    if cluster and described is None and address is None:
        raise ConfigError.at(
            "cluster",
            "there is no Ray to plan for: start one, set RAY_ADDRESS, or describe its nodes with "
            "--nodes"
            if config.executor == "ray"
            else "executor 'local' starts no workers on nodes",
        )
    errors: list[ConfigError] = []
    asks = cluster or (address is not None and has_workers_apart(config))
    found = described or (cluster_nodes(address or "") if asks else None)
    try:
        if config.executor == "ray" and has_workers_apart(config):
            config = placed(config, [node.total for node in found or _this_machine()])
    except ConfigError as error:
        errors.append(error)
    facts = preflight(
        config, is_local=address is None and described is None, in_full=True, errors=errors
    )
    drafters: list[EngineConfig] = []
    try:
        if not errors:
            drafters = check_groups(config, section.drafter_groups, facts)
    except ConfigError as error:
        errors.append(error)
    if errors:
        errors[0].others = errors[1:]
        raise errors[0]
    if address is not None and (niceness := worker_niceness(address)) > 0:
        facts["niceness"] = (
            f"{niceness}: this Ray's workers wait for every other process of their machines; "
            "start it with RAY_worker_niceness=0"
        )
    for group, members in zip(section.drafter_groups, drafters, strict=True):
        facts[f"drafter group {group.name}"] = members.model
    say(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip())
    table("Checked", facts)
    if found is not None and (cluster or described is not None):
        count = section.num_replicas if isinstance(section.num_replicas, int) else 1
        groups = [*zip(section.drafter_groups, drafters, strict=True)]
        _plan(config, found, count, groups)
    if options.compile is not None:
        _compile(config, options.compile, options.compile_processors)
    if options.load:
        _load(config)
    note("The configuration is sound.")


def _this_machine() -> list[Node]:
    """Returns the resources of a Ray started here, which has as many CPUs as workers request."""
    import torch

    total = {"CPU": 1e6, "GPU": float(torch.cuda.device_count())}
    return [Node("this machine", total, total)]


def _is_part(file: Path) -> bool:
    """Returns True if the folder of a configuration file contains weights."""
    return any(file.parent.glob("*.safetensors"))


def _compile(config: EngineConfig, arch: str, num_processors: int | None) -> None:
    """Compiles kernels into Triton's cache and prints their number.

    Raises:
        ConfigError: the configuration cannot be compiled ahead of time.
    """
    from ..bench.gpu_model import unusable
    from ..workers.ops import triton_cache

    if reason := unusable():
        raise ConfigError.at("compile", reason.replace("gpu-model", "--compile"))
    from ..bench.ahead import PROCESSORS, compile_ahead, is_compiled_ahead

    begin = time.perf_counter()
    num_processors = num_processors or PROCESSORS[arch]
    found = compile_ahead(config, arch, num_processors)
    spent_s = time.perf_counter() - begin
    kind = f"{arch} with {num_processors} processors"
    note(f"{sum(found.values())} kernels for {kind} are in {triton_cache()}, {spent_s:.0f} s.")
    section = config.speculative_config
    if any(each.has_model and not is_compiled_ahead(each) for each in section.sections):
        note("Left to the start: draft models and heads that are not the target's.")


def _load(config: EngineConfig) -> None:
    """Starts the workers, decodes one token, and stops them.

    Raises:
        OutriderError: the errors with which `generate` and `serve` would fail.
    """
    from .. import LLM
    from ..scheduler.sampling import SamplingParams

    with err().status("Loading the model..."), LLM.from_config(config) as llm:
        llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    note("The workers started, decoded a token and stopped.")


def _plan(
    config: EngineConfig,
    nodes: list[Node],
    num_engines: int,
    drafters: Sequence[tuple[DrafterGroupConfig, EngineConfig]],
) -> None:
    """Prints placement and memory of all workers; drafter groups have their minimum of members.

    Raises:
        ConfigError: something does not fit; `others` has further errors.
    """
    from ..engine.estimate import estimate, estimate_members

    num_gpus = sum(node.total.get("GPU", 0.0) for node in nodes)
    members = [
        (group, own.resources)
        for index, (each, own) in enumerate(drafters)
        for group in estimate_members(
            own, each.name, each.min_members, f"serve.drafter_groups.{index}", num_gpus
        )
    ]
    groups = estimate(config, num_gpus)
    plan = make_plan(groups, nodes, config.resources, num_engines, members)
    err(wide=True).print(_plan_table(plan, nodes))
    unused = {node.name for node in nodes} - {rank.node for rank in plan.ranks}
    if unused:
        note(f"Without a worker: {', '.join(sorted(unused))}.")
    if plan.problems:
        plan.problems[0].others = plan.problems[1:]
        raise plan.problems[0]


_PLAN_COLUMNS = (
    *("node", "device", "workers", "weights", "heads", "graphs", "states", "KV", "sum", "of"),
    "KV tokens",
)


def _plan_table(plan: Plan, nodes: list[Node]) -> Table:
    """Returns a table in GiB; neighbouring ranks that hold the same share a row."""
    kinds = {node.name: node.kind for node in nodes}
    rows: list[tuple[str, ...]] = []
    for ranks in plan.runs():
        first, last = ranks[0], ranks[-1]
        held = first.held
        parts = (held.weights, held.heads, held.graphs, held.states)
        rows.append(
            (
                f"{first.node} ({kinds[first.node]})",
                _span([rank.device for rank in ranks]),
                f"{first.group} {first.rank}" + (f"-{last.rank}" if last.rank > first.rank else ""),
                *map(_gib, parts),
                _gib(first.kv_bytes),
                _gib(first.total_bytes),
                "?" if first.memory_bytes is None else _gib(first.memory_bytes),
                "-" if first.kv_tokens is None else f"{first.kv_tokens:,}",
            )
        )
    return grid("Plan: GiB of each device, estimated", _PLAN_COLUMNS, rows)


def _span(devices: list[str]) -> str:
    """Returns `GPU 0-7` for consecutive devices."""
    first, last = devices[0], devices[-1]
    return first if first == last else f"{first}-{last.rpartition(' ')[2]}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f}"
