"""Ray for the length of a command or of an `LLM`: joined where there is one, started where not."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config import EngineConfig

log = logging.getLogger(__name__)


def start_ray(config: EngineConfig, *, address: str | None = None, num_engines: int = 1) -> bool:
    """Joins the cluster at `address` (or in RAY_ADDRESS), or starts one; whether it did either.

    A cluster has the CPUs that it has. One that is started here, for this process alone, is given
    as many as the workers ask for: they share the cores, which is slower than having them.

    Raises:
        ConfigError: there is no Ray at `address`.
    """
    import ray

    if ray.is_initialized():
        return False
    own: dict[str, Any] = {}
    if address is None and "RAY_ADDRESS" not in os.environ:
        num_cpus, cores = num_engines * num_cpus_of(config), len(os.sched_getaffinity(0))
        own = {"num_cpus": max(cores, math.ceil(num_cpus)), "include_dashboard": False}
        if num_cpus > cores:
            log.warning("the workers ask for %g CPUs and share %d cores", num_cpus, cores)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"address: cannot join Ray at {address or 'this machine'}: {error}", field="address"
        ) from None
    return True


def num_cpus_of(config: EngineConfig) -> float:
    """CPUs that one engine's workers ask of a cluster without GPUs."""
    from ..config import DraftModelConfig, HeadConfig

    num_workers = config.tensor_parallel_size
    for section in config.speculative_config.sections:
        if isinstance(section, DraftModelConfig) and section.placement == "separate":
            num_workers += section.draft_tensor_parallel_size or 1
        elif isinstance(section, HeadConfig) and section.placement == "separate":
            num_workers += 1
    each = config.resources.cpus_per_worker
    return num_workers * (1.0 if each is None else each)
