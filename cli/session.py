"""Ray for the length of a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ..cluster.local_ray import find_ray, start_ray
from ..engine.preflight import check_files, check_request, preflight, require_checkpoints
from ..errors import ConfigError
from .console import err

if TYPE_CHECKING:
    from ..cluster.backend import LLM
    from ..config import EngineConfig


Adapter = Annotated[
    str | None, typer.Option(help="One of --lora-modules; default: the target alone.")
]


def loaded(
    config: EngineConfig,
    stack: ExitStack,
    adapter: str | None = None,
    *,
    prompts: Sequence[str] = (),
    max_tokens: int | None = None,
) -> LLM:
    """The model of `config`, until `stack` ends (raises as `prepare`)."""
    prepare(config, stack, adapter=adapter, prompts=prompts, max_tokens=max_tokens)
    from ..cluster.backend import LLM

    with err().status("Loading the model..."):
        return stack.enter_context(LLM.from_config(config))


def prepare(
    config: EngineConfig,
    stack: ExitStack,
    *,
    address: str | None = None,
    num_engines: int = 1,
    adapter: str | None = None,
    prompts: Sequence[str] = (),
    max_tokens: int | None = None,
    on_ray: Callable[[], None] | None = None,
) -> None:
    """Checks the checkpoints, and starts or joins Ray if it is needed; then calls `on_ray`.

    Nothing is started or joined before what small files show has passed, so that most mistakes are
    reported within a second or two, with nothing to take down. A Ray of this command's own, and
    what `on_ray` starts, start while weights and models are compared: that computes for seconds,
    the others mostly wait. A cluster of others is joined when all checks have passed.

    Args:
        adapter: the one that the command asks for; None: none.
        prompts, max_tokens: of requests that the command will make, as far as it knows them.

    Raises:
        InvalidRequestError: a prompt is empty, or the context is too short for `max_tokens`.
        ConfigError, CheckpointError: as `preflight`; there is no Ray at `address`, or no such
            adapter in the configuration.
    """
    names = [each.name for each in config.lora_modules]
    if adapter is not None and adapter not in names:
        known = ", ".join(map(repr, names)) or "none: set --lora-modules"
        raise ConfigError.at("adapter", f"{adapter!r} is not served; there is {known}")

    def join() -> None:
        if start_ray(config, address=address, num_engines=num_engines):
            import ray

            stack.callback(ray.shutdown)
        if on_ray is not None:
            on_ray()

    require_checkpoints(config)
    check_request(config, prompts, max_tokens or 0)
    found = find_ray(address) if config.executor == "ray" else None
    check_files(config, is_local=found is None)
    if config.executor == "ray" and found is None:
        with (
            err().status("Checking the checkpoints, starting Ray..."),
            ThreadPoolExecutor(1, "outrider-checks") as checks,
        ):
            checked = checks.submit(preflight, config, is_local=True)
            join()
            checked.result()
        return
    with err().status("Checking the checkpoints..."):
        preflight(config, is_local=config.executor == "local")
    if config.executor == "ray":
        with err().status("Joining Ray..."):
            join()
