"""The backend for `executor: ray`: worker groups as Ray actors, pools shared by a named actor.

Ray itself is imported where it is first used, so that `outrider.LLM` with `executor: local`
works where Ray is not installed.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from ray.exceptions import RayError

from ..config import EngineConfig, ResourcesConfig
from ..drafters.lookup.pool import PoolLink
from ..engine import async_llm, llm
from ..engine.host import Backend
from ..errors import WorkerDiedError
from ..workers.group import WorkerGroup
from ..workers.spec import RankLocation, WorkerSpec
from ..workers.transport import framing
from ..workers.transport.heartbeat import Monitor
from ..workers.transport.socket_channel import SocketChannel, routes
from .local_ray import start_ray
from .process import start_thread
from .rank_actors import Formed, RankActors, answers_of

if TYPE_CHECKING:
    from .keeper import KeeperLink, OwnedRanks, Successors


# `spare_workers: auto` leaves this much memory beside the spares, which take about this much each.
_FREE_BYTES, _SPARE_BYTES = 4 * 2**30, 2**30
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (  # a container's limit and use: version 2, version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


class RayBackend(Backend):
    """Ranks in actors of their own: a tensor-parallel group as the engine uses it.

    Ray places the ranks, starts them (`rank_actors.py`), and reports when one died: a sentinel call
    that never returns fails within milliseconds of the process's death. Ranks that are alive and do
    not run, or cannot be reached, are noticed by their missing heartbeats; those that a signal has
    stopped are killed before (`process.py`). Steps go over the sockets of `workers/transport`. A
    group with a dead rank is thrown away whole; a fresh one gets a new generation, a new store and
    new sockets.

    A Ray that was started for the first backend of this process ends with the last one.

    Args:
        successors: engines that take over each other's workers; None: workers end with the engine.
    """

    shares_pools = True
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_users: ClassVar[int] = 0
    _is_own: ClassVar[bool] = False  # Ray was started here

    def __init__(self, successors: Successors | None = None) -> None:
        self._uses_ray = False
        self._serves = successors is not None
        self._keeper: KeeperLink | None = None  # of all groups
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
        from .backend import RayGroup
        from .rank_actors import RankActors

        spares = wants_spares(spec, resources, serves=self._serves)
        resources = resources.model_copy(update={"spare_workers": spares})
        if self._keeper is None:
            return RayGroup(spec, RankActors(spec, resources))
        return RayGroup(spec, self._keeper.group(spec, resources))

    def can_start_at_once(self, specs: Sequence[WorkerSpec], resources: ResourcesConfig) -> bool:
        """On one node, with a CPU for each; elsewhere the target chooses node and memory first."""
        from .rank_actors import accelerator, needs, single_node_cpus

        asked = [(spec.size, *needs(spec, resources)) for spec in specs]
        if any(gpus for _, _, gpus in asked) or any(accelerator(each, resources) for each in specs):
            return False
        return sum(size * cpus for size, cpus, _ in asked) <= single_node_cpus()

    def shared_pool(
        self, fingerprint: str, max_tokens: int, vocab_size: int, snapshot: str | None
    ) -> PoolLink:
        from .pools import RayPoolLink

        return RayPoolLink(fingerprint, max_tokens, vocab_size, snapshot)


def backend_of(config: EngineConfig, successors: Successors | None = None) -> Backend:
    """The backend that `executor` names; `successors` as for `RayBackend`."""
    return RayBackend(successors) if config.executor == "ray" else Backend()


def wants_spares(spec: WorkerSpec, resources: ResourcesConfig, *, serves: bool) -> bool:
    """Whether a group gets spare workers; `auto` gives them to targets of servers."""
    if resources.spare_workers != "auto":
        return resources.spare_workers
    needed = _FREE_BYTES + spec.size * _SPARE_BYTES
    return serves and spec.target is not None and free_bytes() >= needed


def free_bytes() -> int:
    """Memory that this node, or its container, has left; 0 where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration, ValueError):
        return 0
    return min([free, *(_left_of(*files) for files in _CGROUP_FILES)])


def _left_of(limit_file: str, used_file: str) -> int:
    """What a container may still take; a cgroup's root and bare machines have no such files."""
    try:
        limit, used = ((_CGROUPS / each).read_text() for each in (limit_file, used_file))
        return int(limit) - int(used)
    except (OSError, ValueError):  # no limit: there is no file, or it says "max"
        return sys.maxsize


class LLM(llm.LLM):
    # The Python API with every executor; users see one class, that of the package.
    __doc__ = llm.LLM.__doc__
    _backend_of = staticmethod(backend_of)


class AsyncLLM(async_llm.AsyncLLM):
    # The same for an event loop.
    __doc__ = async_llm.AsyncLLM.__doc__
    _sync = LLM


LLM.__module__ = AsyncLLM.__module__ = "outrider"


_CONNECT_TIMEOUT_S = 30.0


class RayGroup(WorkerGroup):
    """Ranks in actors of their own.

    Raises (also from `restart`):
        ResourcesError: the cluster did not provide the resources in time.
        ConfigError, CheckpointError: a rank could not load.
    """

    is_concurrent = True

    def __init__(self, spec: WorkerSpec, source: RankActors | OwnedRanks) -> None:
        super().__init__(spec)
        self._source = source
        self._ranks: list[Any] = []
        self._monitor: Monitor | None = None
        self._form(reuse=True)

    def spares(self) -> list[RankLocation]:
        return self._source.spares()

    def respecify(self, spec: WorkerSpec) -> None:
        super().respecify(spec)
        self._source.respecify(spec)

    def _replace_ranks(self) -> None:
        self._form(reuse=False)

    def shutdown(self) -> None:
        self._hang_up()
        self._source.shutdown()

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
        if channel is not None:
            channel.close()
        self._ranks = []

    def _drop_ranks(self) -> None:
        """As a step does that meets a death: places, spares and keeper remain for what follows."""
        self._hang_up()
        self._source.drop()

    def _form(self, *, reuse: bool) -> None:
        """Gets ranks and opens their channel."""
        self._hang_up()
        node = ray.get_runtime_context().get_node_id()
        formed = self._source.form(node, reuse, self._spec)
        self._spec = formed.spec  # an engine before this one may have loaded other weights
        try:
            self._connect(formed, node)
        except (RayError, OSError) as error:
            self._drop_ranks()
            what = "died while it started" if isinstance(error, RayError) else "cannot be reached"
            raise WorkerDiedError(f"a worker {what}: {error}") from None

    def _connect(self, formed: Formed, node: str) -> None:
        secret = secrets.token_bytes(32)
        self._ranks = formed.ranks
        listening = [
            rank.listen.remote(secret, place.node_id == node)
            for rank, place in zip(formed.ranks, formed.places, strict=True)
        ]
        addresses = answers_of(listening)
        found = routes([place.node_id for place in formed.places], node)
        leading = [
            formed.ranks[leader].lead.remote([addresses[each] for each in followers], secret)
            for leader, followers in found.items()
            if followers
        ]
        answers_of(leading)
        self._watch([tuple(address) for address in addresses], list(found), secret)
        self.reports = formed.reports

    def _watch(self, addresses: list[framing.Address], connected: list[int], secret: bytes) -> None:
        """Opens the channel to the ranks `connected`; ends it when any rank dies or is silent."""
        steps, beats = (
            [
                framing.connect(addresses[rank], secret, _CONNECT_TIMEOUT_S, purpose)
                for rank in ranks
            ]
            for purpose, ranks in (
                (framing.STEPS, connected),
                (framing.BEATS, range(len(addresses))),
            )
        )
        channel = SocketChannel(steps, len(addresses), self._spec.spin_s)
        self._channel = channel

        def lost(reason: str) -> None:
            channel.kill(reason)
            if self._channel is channel:  # not what `shutdown` ended
                for told in self.on_death:
                    told(reason)

        self._monitor = Monitor(beats, self._spec.heartbeat_timeout_s, lost)
        sentinels = [rank.sentinel.remote() for rank in self._ranks]

        def wait() -> None:
            try:
                done, _ = ray.wait(sentinels, num_returns=1)
                ray.get(done)
            except RayError as error:
                lost(f"a worker died: {str(error).splitlines()[0]}")

        start_thread("sentinel", wait)
