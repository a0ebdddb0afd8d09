"""`DrafterGroups`: the Serve deployment that owns an application's drafter groups.

A running group is used if its settings match the section; otherwise a group is started. The
deployment claims its groups every few seconds (`HeldGroup.hold`). A group that ended is therefore
restarted, and a group whose application is gone ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError

from ...config import DrafterGroupConfig, EngineConfig
from ...errors import ConfigError, OutriderError, ResourcesError, WorkerDiedError, below
from ..drafters import (
    RESTARTING,
    STARTING,
    answer_of,
    end_group,
    facts_of,
    find_group,
    group_names,
    of_members,
    release_group,
    start_group,
)
from ..process import keep_trimmed, start_thread, without_torch
from .deployment import running_serve

log = logging.getLogger(__name__)
DRAFTERS = "DrafterGroups"
_SECTION = "serve.drafter_groups"
_HOLD_S = 3.0
_POLL_S = 0.25
_PATIENCE_S = 60.0  # with a group that ends while it is claimed
_START_S = 120.0  # for the deployment to start a group


class HeldGroup:
    """A group that an application claims.

    Args:
        place: key of its section, for errors.

    Raises:
        ConfigError, CheckpointError: its model cannot draft.
    """

    def __init__(self, group: DrafterGroupConfig, place: str, application: str) -> None:
        self._group, self._place, self._application = group, place, application
        with below(place):
            self._config = of_members(group.engine)[0]

    def hold(self) -> Any:
        """Claims the group and returns its actor, which is started if there is none.

        Raises:
            ConfigError: a group of this name has other settings.
            WorkerDiedError: the group does not answer.
        """
        group, until = self._group, time.monotonic() + _PATIENCE_S
        name = group.name
        while True:
            try:
                if name not in group_names():
                    return self._start()
                actor = find_group(name, "name")
                asked = self._application, self._config, group.max_engines, group.size
                wrong, is_own = answer_of(actor.claim.remote, *asked)
            except (ValueError, WorkerDiedError, ConfigError) as error:
                # Another application started the group first, or the group is ending.
                if time.monotonic() > until:
                    raise WorkerDiedError(f"drafter group {name!r}: {error}") from None
                time.sleep(_POLL_S)
                continue
            if not wrong:
                return actor
            if not is_own:
                raise ConfigError.at(
                    f"{self._place}.name", f"there is a drafter group {name!r} already, and {wrong}"
                )
            log.info("drafter group %s is replaced: %s", name, wrong)
            end_group(actor)

    def _start(self) -> Any:
        group = self._group
        return start_group(
            group.name,
            group.engine,
            num_members=group.size,
            max_engines=group.max_engines,
            application=self._application,
        )

    def wait(self, actor: Any) -> None:
        """Waits until a member is up; returns at once if the group has no members yet.

        Raises:
            ResourcesError: no member can start.
        """
        while (facts := facts_of(actor)).members and not facts.num_up:
            reasons = set(facts.members.values()) - {STARTING, RESTARTING}
            if reasons:
                raise ResourcesError.at(self._place, "; ".join(sorted(reasons)))
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Releases the group when the application ends."""
        release_group(self._group.name, self._application)


class DrafterGroups:
    """Starts the groups, and claims them while the application lives.

    Raises:
        ConfigError, CheckpointError, ResourcesError: a group cannot start; names its section.
    """

    def __init__(self, groups: Sequence[DrafterGroupConfig]) -> None:
        keep_trimmed()
        self._ended = threading.Event()
        self._application = serve.get_replica_context().app_name
        self._held: list[HeldGroup] = []
        with without_torch(unless=any(each.engine.trust_remote_code for each in groups)):
            for index, each in enumerate(groups):
                self._held.append(HeldGroup(each, f"{_SECTION}.{index}", self._application))
        try:
            actors = [each.hold() for each in self._held]
            for held, actor in zip(self._held, actors, strict=True):
                held.wait(actor)
        except OutriderError:
            self._release()
            raise
        start_thread("groups", self._follow)

    def _follow(self) -> None:
        while not self._ended.wait(_HOLD_S):
            for each in self._held:
                try:
                    each.hold()
                except (OutriderError, RayError) as error:  # engines continue without it
                    log.warning("%s", str(error).splitlines()[0])

    def _release(self) -> None:
        for each in self._held:
            each.release()

    async def __del__(self) -> None:
        """Called by Serve at the replica's end; releases the groups if the application ended."""
        ended = getattr(self, "_ended", None)
        if ended is None or ended.is_set():
            return
        ended.set()
        running = await asyncio.to_thread(running_serve)
        if running is None or self._application not in running.routes:
            await asyncio.to_thread(self._release)


def await_groups(config: EngineConfig, names: Collection[str]) -> None:
    """Waits for the groups that an engine uses and that the application starts (`names`)."""
    wanted, until = config.drafter_groups.keys() & set(names), time.monotonic() + _START_S
    while wanted - set(group_names()) and time.monotonic() < until:
        time.sleep(_POLL_S)
