"""Ray for the length of a command."""

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
    groups: Sequence[DrafterGroupConfig] = (),
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
        groups: drafter groups that start beside the engines.
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
    """The settings of drafter groups in full, once their models are found to draft for the target.

    Raises:
        ConfigError, CheckpointError: one cannot; names its section.
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
    """SIGTERM and Ctrl-C take everything down, also where a shell had SIGINT ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, interrupt) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
