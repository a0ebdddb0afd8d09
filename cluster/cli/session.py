"""Ray for the length of a command."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .check import preflight
from .console import err

if TYPE_CHECKING:
    from ...config import EngineConfig


def prepare(config: EngineConfig, stack: ExitStack, address: str | None = None) -> None:
    """Checks the checkpoints, which is cheap, and starts or joins Ray if it is needed.

    Raises:
        ConfigError, CheckpointError: as `preflight`; or there is no Ray at `address`.
    """
    with err().status("Checking the checkpoints..."):
        preflight(config)
    if config.executor == "ray":
        with err().status("Starting Ray..."):
            join_ray(address, stack)


def join_ray(address: str | None, stack: ExitStack) -> None:
    """Joins the cluster at `address` (or in RAY_ADDRESS), or starts one that `stack` ends."""
    import ray

    if ray.is_initialized():
        return
    try:
        ray.init(
            address=address,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"address: cannot join Ray at {address or 'this machine'}: {error}", field="address"
        ) from None
    stack.callback(ray.shutdown)
