"""`outrider drafter`: starts, lists, scales and ends the drafter groups of a Ray cluster."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from ..config import GroupAutoscalingConfig, parse
from ..config.speculation import GROUP_NAME
from ..errors import ConfigError
from .console import note, say
from .options import EngineOptions, options_of
from .session import terminable

if TYPE_CHECKING:
    from ..cluster.drafters import GroupFacts, Size

_POLL_S = 2.0
_PANEL = "Drafter group"
_Autoscaling: Any = options_of(
    GroupAutoscalingConfig, _PANEL, GroupAutoscalingConfig.model_fields.keys()
)


class GroupOptions(_Autoscaling):
    """The group, and its size."""

    panel = _PANEL
    name: str | None = Field(None, description="The group's name; default: lists all.")
    members: int | None = Field(None, ge=0)
    """Draft models, each over --tensor-parallel-size ranks; for a running group, the new number.
    Default 1."""
    max_engines: int | None = Field(None, ge=1)
    """Engines that may share a member, each with an equal part of its KV cache. Default 4."""
    detach: bool = Field(False, description="Return, and leave it running.")
    stop: bool = Field(False, description="End the group.")
    address: str | None = None
    """Ray cluster to join: host:port, or auto. Default: RAY_ADDRESS, else auto."""

    def check(self, *, has_model: bool) -> None:
        """Raises `ConfigError` if options contradict each other."""
        name = self.name
        if name is not None and not re.match(GROUP_NAME, name):
            raise ConfigError.at("name", f"{name!r}: letters, digits, '.', '_' and '-', at most 64")
        given = self.members is not None or bool(self._limits())
        if name is None and (has_model or given or self.stop):
            raise ConfigError.at("name", "give the group a --name")
        if has_model and self.stop:
            raise ConfigError.at("stop", "it ends a group that runs; leave the model out")
        if self.stop and given:
            raise ConfigError.at("members", "--stop ends all of them; leave it out")
        if self.members is not None and self._limits():
            raise ConfigError.at(
                "members", "it fixes their number; leave out what scales it by load"
            )

    def size(self) -> Size | None:
        """Returns the requested number of members; None if not given.

        Raises:
            ConfigError: the limits are invalid.
        """
        limits = self._limits()
        return parse(GroupAutoscalingConfig, limits) if limits else self.members

    def _limits(self) -> dict[str, Any]:
        found = {key: getattr(self, key) for key in GroupAutoscalingConfig.model_fields}
        return {key: value for key, value in found.items() if value is not None}


def drafter(
    engine: EngineOptions,
    options: GroupOptions,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Draft model: a folder or a GGUF file.")
    ] = None,
) -> None:
    """Starts, lists, scales and ends draft models that the engines of a Ray cluster share."""
    if checkpoint is not None:
        engine = engine.with_argument("model", checkpoint)
    has_model = engine.model is not None or engine.config is not None
    options.check(has_model=has_model)
    size = options.size()
    if not has_model:
        given = {
            **engine.given(),
            "max_engines": options.max_engines,
            "detach": options.detach or None,
        }
        for key, value in given.items():
            if value is not None:
                raise ConfigError.at(key, "it is chosen as a group starts; give its model too")
    config = engine.resolve() if has_model else None
    if config is not None and config.executor != "ray":
        raise ConfigError.at("executor", f"{config.executor!r}: drafter groups run on Ray")
    _join(options.address)
    from ..cluster import drafters

    name = options.name
    if name is None:
        for each in drafters.group_names():
            say(_line(drafters.facts_of(drafters.find_group(each, "name"))))
        return
    if config is not None:
        group = drafters.start_group(
            name,
            config,
            num_members=1 if size is None else size,
            max_engines=options.max_engines or 4,
        )
        if not options.detach:
            _watch(group)
        return
    group = drafters.find_group(name, "name")
    if options.stop:
        drafters.end_group(group)
        note(f"Drafter group {name} has ended.")
        return
    if size is not None:
        drafters.scale_group(group, size)
    say(_line(drafters.facts_of(group)))


def _join(address: str | None) -> None:
    """Joins the cluster; raises `ConfigError` if there is none."""
    from ..cluster.local_ray import find_ray, join_ray

    found = None if address == "local" else find_ray(address)
    if found is None:
        raise ConfigError.at(
            "address",
            "drafter groups live in a Ray cluster, and none runs here; start one with "
            "`ray start --head`, or give its host:port",
        )
    join_ray(found)


def _line(facts: GroupFacts) -> str:
    why = "; ".join(sorted({reason for reason in facts.members.values() if reason}))
    limits, size = "", facts.size
    if isinstance(size, GroupAutoscalingConfig):
        limits = f" ({size.min_members} to {size.max_members} by load)"
    held = f", of {', '.join(facts.applications)}" if facts.applications else ""
    return (
        f"{facts.name}: {facts.folder}, {facts.num_up} of {len(facts.members)} members up{limits}, "
        f"{facts.max_engines} engines each{held}{f' ({why})' if why else ''}"
    )


def _watch(group: Any) -> None:
    """Prints the group's state whenever it changes, until Ctrl-C or SIGTERM, which end the group.

    Raises:
        WorkerDiedError: the group has ended for another reason.
    """
    from ..cluster import drafters

    shown = ""
    with terminable():
        try:
            while True:
                line = _line(drafters.facts_of(group))
                if line != shown:
                    note(line)
                shown = line
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            note("Ending the drafter group...")
            drafters.end_group(group)
