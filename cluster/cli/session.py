"""Ray for the length of a command."""

from __future__ import annotations

import logging
import math
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .check import preflight
from .console import err, note

if TYPE_CHECKING:
    from ...config import EngineConfig


def prepare(
    config: EngineConfig, stack: ExitStack, *, address: str | None = None, num_engines: int = 1
) -> None:
    """Checks the checkpoints, which is cheap, and starts or joins Ray if it is needed.

    Raises:
        ConfigError, CheckpointError: as `preflight`; or there is no Ray at `address`.
    """
    with err().status("Checking the checkpoints..."):
        preflight(config)
    if config.executor == "ray":
        with err().status("Starting Ray..."):
            _join_ray(address, num_engines * _cpus(config), stack)


def _join_ray(address: str | None, num_cpus: float, stack: ExitStack) -> None:
    """Joins the cluster at `address` (or in RAY_ADDRESS), or starts one that `stack` ends.

    A cluster has the CPUs that it has. One that is started here, for this command alone, is given
    as many as the workers ask for: they share the cores, which is slower than having them.
    """
    import ray

    if ray.is_initialized():
        return
    own: dict[str, Any] = {}
    if address is None and "RAY_ADDRESS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        own = {"num_cpus": max(cores, math.ceil(num_cpus)), "include_dashboard": False}
        if num_cpus > cores:
            note(f"The workers ask for {num_cpus:g} CPUs and share {cores} cores.")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"address: cannot join Ray at {address or 'this machine'}: {error}", field="address"
        ) from None
    stack.callback(ray.shutdown)


def _cpus(config: EngineConfig) -> float:
    """CPUs that one engine's workers ask of a cluster without GPUs."""
    from ...config import DraftModelConfig

    section = config.speculative_config
    num_workers = config.tensor_parallel_size
    if isinstance(section, DraftModelConfig) and section.placement == "separate":
        num_workers += section.draft_tensor_parallel_size or 1
    each = config.resources.cpus_per_worker
    return num_workers * (1.0 if each is None else each)
