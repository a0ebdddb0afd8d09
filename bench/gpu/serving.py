"""Servers under load, and several GPUs: the parts `serve` and `ranks` of the proof."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .machine import SIZES, Case, Machine, Row

_DEMO = Path(__file__).resolve().parents[2] / "demo" / "models" / "target"
_MESSAGE_BYTES = (8 << 10, 64 << 10, 512 << 10, 2 << 20)
_MAX_LINES = 12  # of a failed command


def _suite(machine: Machine, model: Path, out: Path, options: dict[str, Any]) -> Row:
    """Runs `outrider bench suite`; the figures of every contender and load."""
    every: dict[str, Any] = {
        "model": model, "out": out, "device": machine.device.type, "workloads": "code",
        "rates": "none", "rounds": 1, "baselines": "none", **options,
    }  # fmt: skip
    command = [sys.executable, "-m", "outrider", "bench", "suite"]
    for name, value in every.items():
        option = "--" + name.replace("_", "-")
        command += [option] if value is True else [option, str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-_MAX_LINES:]))
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    row: Row = {
        f"{each['contender']}, {each['load']}, tokens/s": each["tokens_per_s"]
        for each in report["results"]
    }
    for each in report["contenders"]:
        if each["excluded"]:
            row[each["name"]] = each["excluded"]
    return row


def served(machine: Machine, model: Path | None, *, tensor_parallel_size: int = 1) -> Row:
    """A model over HTTP, plain and with drafts, beside vLLM where that is installed."""
    options: dict[str, Any] = {
        "drafters": "ngram", "streams": "1,8,64", "num_prompts": 64, "alone": True,
        "dtype": str(machine.dtype).removeprefix("torch."),
        "tensor_parallel_size": tensor_parallel_size,
    }  # fmt: skip
    if find_spec("vllm") is not None and not machine.is_dry:
        options["peer"] = "vllm"
    if machine.is_dry:
        options |= {
            "in_process": True, "executor": "local", "streams": "1", "num_prompts": 1,
            "max_tokens": 3, "num_kv_blocks": 256, "drafters": "none",
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return _suite(machine, model or _DEMO, Path(folder), options)


def serve_cases(machine: Machine, model: Path | None) -> Iterator[Case]:
    """The part `serve`; without a model, with the demo's."""
    yield (model or _DEMO).name, partial(served, machine, model)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sum(rank: int, size: int, port: int, machine: Machine, results: Any) -> None:
    """Times sums of messages on one rank, by symmetric memory where there is some."""
    from ...workers.collective import Collective

    backend: Any = "nccl" if machine.device.type == "cuda" else "gloo"
    device = torch.device("cuda", rank) if backend == "nccl" else machine.device
    if backend == "nccl":
        torch.cuda.set_device(device)
    own = Machine(device, machine.dtype, SIZES["tiny"], machine.rounds, machine.is_dry)
    with torch.inference_mode():
        group = Collective.connect(
            backend, "127.0.0.1", port, rank, size, 0, 60, device, symmetric_memory=True
        )
        row: Row = {"by": group.all_reduce_by}
        sums = group._sums
        for num_bytes in _MESSAGE_BYTES:
            message = torch.ones(num_bytes // own.dtype.itemsize, dtype=own.dtype, device=device)
            add, title = partial(group.all_reduce, message), f"{num_bytes >> 10} KiB"
            row[f"{title}, us"] = own.time_ms(add) * 1e3
            if sums is not None:
                group._sums = None
                row[f"{title}, NCCL, us"] = own.time_ms(add) * 1e3
                group._sums = sums
        if rank == 0:
            results.put(row)


def summed(machine: Machine, size: int) -> Row:
    """Sums of small messages over the GPUs."""
    context, port = multiprocessing.get_context("spawn"), _free_port()
    results = context.Queue()
    ranks = [
        context.Process(target=_sum, args=(rank, size, port, machine, results), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        row: Row = results.get(timeout=180)
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.terminate()
    return row


def rank_cases(machine: Machine, model: Path | None) -> Iterator[Case]:
    """The part `ranks`; nothing where there is one GPU."""
    count = 2 if machine.is_dry else torch.cuda.device_count()
    for size in (2, 4, 8):
        if size <= count:
            yield f"all-reduce over {size}", partial(summed, machine, size)
            if model is not None:
                run = partial(served, machine, model, tensor_parallel_size=size)
                yield f"{model.name}, {size} ranks", run
