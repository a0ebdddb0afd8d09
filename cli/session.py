"""Ray for the length of a command."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..cluster.local_ray import find_ray, start_ray
from ..engine.preflight import preflight, require_checkpoints
from .console import err

if TYPE_CHECKING:
    from ..config import EngineConfig


def prepare(
    config: EngineConfig,
    stack: ExitStack,
    *,
    address: str | None = None,
    num_engines: int = 1,
    on_ray: Callable[[], None] | None = None,
) -> None:
    """Checks the checkpoints, and starts or joins Ray if it is needed; then calls `on_ray`.

    A Ray of this command's own starts while the checkpoints are checked, as does what `on_ray`
    starts: the checks compute for seconds, the others mostly wait. A cluster of others is joined
    when the checks have passed.

    Raises:
        ConfigError, CheckpointError: as `preflight`; or there is no Ray at `address`.
    """
    require_checkpoints(config)
    if config.executor == "ray" and find_ray(address) is None:
        with (
            err().status("Checking the checkpoints, starting Ray..."),
            ThreadPoolExecutor(1, "outrider-checks") as checks,
        ):
            checked = checks.submit(preflight, config, is_local=True)
            _join(config, stack, address, num_engines, on_ray)
            checked.result()
        return
    with err().status("Checking the checkpoints..."):
        preflight(config, is_local=config.executor == "local")
    if config.executor == "ray":
        with err().status("Joining Ray..."):
            _join(config, stack, address, num_engines, on_ray)


def _join(
    config: EngineConfig,
    stack: ExitStack,
    address: str | None,
    num_engines: int,
    on_ray: Callable[[], None] | None,
) -> None:
    if start_ray(config, address=address, num_engines=num_engines):
        import ray

        stack.callback(ray.shutdown)
    if on_ray is not None:
        on_ray()
