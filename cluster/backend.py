"""The backend for `executor: ray`: worker groups as Ray actors, and pools in named actors.

Ray is imported only where it is used, so that `outrider.LLM` with `executor: local` works without
Ray installed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..config import EngineConfig, ResourcesConfig
from ..drafters.lookup.pool import PoolLink
from ..drafters.protocol import DraftMembers
from ..engine import async_llm, llm
from ..engine.host import Backend, MembersAsk
from ..workers.group import WorkerGroup
from ..workers.spec import WorkerSpec
from .local_ray import start_ray

if TYPE_CHECKING:
    from .keeper import KeeperLink, Successors


# `spare_workers: auto` requires this much free memory, plus about this much per spare.
_FREE_BYTES, _SPARE_BYTES = 4 * 2**30, 2**30
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (  # a container's limit and usage: cgroup version 2, version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


class RayBackend(Backend):
    """Runs every rank in its own actor.

    If the first backend of this process started Ray, the last one shuts it down.

    Args:
        successors: engines that take over each other's workers; None: workers end with the engine.
    """

    shares_pools = True
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_users: ClassVar[int] = 0
    _is_own: ClassVar[bool] = False  # this process started Ray

    def __init__(self, successors: Successors | None = None) -> None:
        self._uses_ray = False
        self._serves = successors is not None
        self._keeper: KeeperLink | None = None  # the keeper of all groups
        if successors is not None and successors.wait_s:
            from .keeper import KeeperLink

            self._keeper = KeeperLink(successors)

    def start(self, config: EngineConfig) -> None:
        with self._lock:
            RayBackend._is_own = start_ray(config) or self._is_own
            RayBackend._num_users += not self._uses_ray
            self._uses_ray = True

    def stop(self) -> None:
        with self._lock:
            RayBackend._num_users -= self._uses_ray
            self._uses_ray = False
            if self._is_own and not self._num_users:
                import ray

                RayBackend._is_own = False
                ray.shutdown()

    def recall(self) -> int | None:
        return self._keeper.recall() if self._keeper is not None else None

    def note(self, vocab_size: int) -> None:
        if self._keeper is not None:
            self._keeper.note(vocab_size)

    def retain(self) -> None:
        if self._keeper is not None:
            self._keeper.retain()

    def group(self, spec: WorkerSpec, resources: ResourcesConfig) -> WorkerGroup:
        from .rank_actors import RankActors, RayGroup

        spares = wants_spares(spec, resources, serves=self._serves)
        resources = resources.model_copy(update={"spare_workers": spares})
        if self._keeper is None:
            return RayGroup(spec, RankActors(spec, resources))
        return RayGroup(spec, self._keeper.group(spec, resources))

    def placed(self, config: EngineConfig) -> EngineConfig:
        from .placement import has_workers_apart, placed

        if not has_workers_apart(config):
            return config
        import ray

        return placed(config, [node["Resources"] for node in ray.nodes() if node["Alive"]])

    def can_start_at_once(self, specs: Sequence[WorkerSpec], resources: ResourcesConfig) -> bool:
        """True if one node has a CPU for each; otherwise, the target is placed first."""
        from .rank_actors import accelerator, needs, single_node_cpus

        asked = [(spec.size, *needs(spec, resources)) for spec in specs]
        if any(gpus for _, _, gpus in asked) or any(accelerator(each, resources) for each in specs):
            return False
        return sum(size * cpus for size, cpus, _ in asked) <= single_node_cpus()

    def draft_members(self, ask: MembersAsk) -> DraftMembers:
        from .drafters import GroupLink

        return GroupLink(ask)

    def shared_pool(
        self, fingerprint: str, max_tokens: int, vocab_size: int, snapshot: str | None
    ) -> PoolLink:
        from .pools import RayPoolLink

        return RayPoolLink(fingerprint, max_tokens, vocab_size, snapshot)


def backend_of(config: EngineConfig, successors: Successors | None = None) -> Backend:
    """Returns the backend of `executor`; `successors` as in `RayBackend`."""
    return RayBackend(successors) if config.executor == "ray" else Backend()


def wants_spares(spec: WorkerSpec, resources: ResourcesConfig, *, serves: bool) -> bool:
    """Returns True if a group gets spare workers; `auto` gives them only to targets of servers."""
    if resources.spare_workers != "auto":
        return resources.spare_workers
    needed = _FREE_BYTES + spec.size * _SPARE_BYTES
    return serves and spec.target is not None and free_bytes() >= needed


def free_bytes() -> int:
    """Returns the free memory in bytes of this node or its container; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration, ValueError):
        return 0
    return min([free, *(_left_of(*files) for files in _CGROUP_FILES)])


def _left_of(limit_file: str, used_file: str) -> int:
    """Returns the bytes that a container may still use; unlimited if the files are missing."""
    try:
        limit, used = ((_CGROUPS / each).read_text() for each in (limit_file, used_file))
        return int(limit) - int(used)
    except (OSError, ValueError):  # no limit: the file is missing or contains "max"
        return sys.maxsize


class LLM(llm.LLM):
    # The public class, which supports every executor.
    __doc__ = llm.LLM.__doc__
    _backend_of = staticmethod(backend_of)


class AsyncLLM(async_llm.AsyncLLM):
    # Likewise, for an event loop.
    __doc__ = async_llm.AsyncLLM.__doc__
    _sync = LLM


LLM.__module__ = AsyncLLM.__module__ = "outrider"
