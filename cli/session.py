"""Loads models and starts or joins Ray for the duration of a command."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cluster.local_ray import find_ray, num_cpus_of, start_ray
from ..engine.checkpoints import draft_outline, resolved, trust
from ..engine.preflight import (
    check_files,
    check_members,
    check_request,
    preflight,
    require_checkpoints,
)
from ..errors import ConfigError, below
from .console import err

if TYPE_CHECKING:
    from ..cluster.backend import LLM
    from ..config import DrafterGroupConfig, EngineConfig


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
    """Returns the loaded model of `config`, which `stack` closes; raises as `prepare`."""
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
    groups: Sequence[DrafterGroupConfig] = (),
    adapter: str | None = None,
    prompts: Sequence[str] = (),
    max_tokens: int | None = None,
    on_ray: Callable[[], None] | None = None,
) -> None:
    """Checks the checkpoints, and starts or joins Ray if it is needed; then calls `on_ray`.

    Nothing is started or joined before small files have been checked, so that most mistakes are
    reported within a second or two with nothing to clean up. The command's own Ray, and what
    `on_ray` starts, start while weights and models are compared, because the comparison computes
    for seconds while the others mostly wait. An existing cluster is joined after all checks have
    passed.

    Args:
        groups: drafter groups that start with the engines.
        adapter: the requested adapter; None: none.
        prompts, max_tokens: of the requests that the command will make, as far as known.

    Raises:
        InvalidRequestError: a prompt is empty, or the context is too short for `max_tokens`.
        ConfigError, CheckpointError: as `preflight`; or there is no Ray at `address`, or the
            configuration has no such adapter.
    """
    names = [each.name for each in config.lora_modules]
    if adapter is not None and adapter not in names:
        known = ", ".join(map(repr, names)) or "none: set --lora-modules"
        raise ConfigError.at("adapter", f"{adapter!r} is not served; there is {known}")

    def join() -> None:
        beside = sum(each.max_members * num_cpus_of(each.engine) for each in groups)
        if start_ray(config, address=address, num_engines=num_engines, num_cpus_beside=beside):
            import ray

            stack.callback(ray.shutdown)
        if on_ray is not None:
            on_ray()

    def check(*, is_local: bool) -> None:
        preflight(config, is_local=is_local)
        check_groups(config, groups)

    require_checkpoints(config)
    check_request(config, prompts, max_tokens or 0)
    found = find_ray(address) if config.executor == "ray" else None
    check_files(config, is_local=found is None)
    if config.executor == "ray" and found is None:
        with (
            err().status("Checking the checkpoints, starting Ray..."),
            ThreadPoolExecutor(1, "outrider-checks") as checks,
        ):
            checked = checks.submit(check, is_local=True)
            join()
            checked.result()
        return
    with err().status("Checking the checkpoints..."):
        check(is_local=config.executor == "local")
    if config.executor == "ray":
        with err().status("Joining Ray..."):
            join()


def check_groups(
    config: EngineConfig,
    groups: Sequence[DrafterGroupConfig],
    facts: dict[str, Any] | None = None,  # written: what is translated
) -> list[EngineConfig]:
    """Checks that drafter groups can draft for the target; returns their full settings.

    Raises:
        ConfigError, CheckpointError: a group cannot; names its section.
    """
    from ..workers.model.info import outline

    config, found = resolved(config) if groups else config, []
    for index, each in enumerate(groups):
        with below(f"serve.drafter_groups.{index}"):
            members, vocab_size = draft_outline(each.engine)
        for section in config.drafter_groups.get(each.name, ()):
            target = outline(Path(config.model), config.tensor_parallel_size, **trust(config))
            other = check_members(config, section, members.model, vocab_size, target.vocab_size)
            if other is not None and facts is not None:
                facts[f"drafter group {each.name}'s vocabulary"] = str(other)
        found.append(members)
    return found


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM and Ctrl-C interrupt the command, even if a shell had SIGINT ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, interrupt) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
