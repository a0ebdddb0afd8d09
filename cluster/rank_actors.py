"""A tensor-parallel group over Ray actors: its owner's side and its engine's side.

Ray is the control plane. It places and starts the ranks, and reports their death: a sentinel call
never returns, and fails within milliseconds of the process's death. The caller of `RankActors.form`
owns the actors, their placement and spare processes, and Ray ends them with it. The owner is an
engine's process, or a `Keeper` that outlives it.

`RayGroup` is the group as seen by the engine. Missing heartbeats reveal ranks that are alive but do
not run or cannot be reached; ranks stopped by a signal are killed earlier (`process.py`). Steps go
over the sockets of `workers/transport`. A group with a dead rank is discarded as a whole; the new
group has a new generation, a new store and new sockets. `SharedGroup` is a group used by several
engines, each over its own connection.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..config import ResourcesConfig
from ..errors import ConfigError, OutriderError, ResourcesError, WorkerDiedError, WorkerError
from ..workers.group import WorkerGroup, agreed_blocks, with_device_steps
from ..workers.model.checkpoint.progress import Amount, watched
from ..workers.spec import OpenLease, RankLocation, WeightsAnswer, WorkerReport, WorkerSpec
from ..workers.transport import framing
from ..workers.transport.socket_channel import Monitor, SocketChannel, routes
from . import placement
from .process import start_thread
from .rank import Rank, RankPlace

if TYPE_CHECKING:
    from ..engine.host import MembersAsk

log = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 1800.0
NAMESPACE = "outrider"
_CONNECT_TIMEOUT_S = 30.0
_SHARED_TIMEOUT_S = 10.0  # for connecting to a member of a drafter group
_ANSWER_TIMEOUT_S = 30.0  # for its answer
_RENEW_TIMEOUT_S = 10.0  # starting new ranks is faster than waiting longer
_AMOUNTS_TIMEOUT_S = 2.0
_SPARE_TIMEOUT_S = 60.0  # a spare that is warming up is still faster than a new process
_MAX_BEGUN = 2  # new processes per place
_SPARE_DELAY_S = 5.0  # gives ranks and engine the cores first


def accelerator(spec: WorkerSpec, resources: ResourcesConfig) -> str | None:
    """Returns Ray's name of the GPU that the group requires, or None."""
    drafts = spec.target is None or spec.head_target is not None
    return placement.accelerator(resources, drafts=drafts)


def needs(spec: WorkerSpec, resources: ResourcesConfig) -> tuple[float, float]:
    """Returns CPUs and GPUs of one rank."""
    num_gpus = ray.cluster_resources().get("GPU", 0.0)
    return placement.needs(spec.device, spec.size, resources, num_gpus)


def single_node_cpus() -> float:
    """Returns the free CPUs of a single-node cluster; 0 if it has several nodes."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return float(ray.available_resources().get("CPU", 0.0)) if len(nodes) == 1 else 0.0


def place(
    spec: WorkerSpec,
    resources: ResourcesConfig,
    asked: tuple[float, float],
    *,
    detached: bool = False,
    mark: str = "",
) -> PlacementGroup:
    """Reserves a bundle per rank or per stage, on a single node if one is large enough.

    Args:
        asked: CPUs and GPUs of a rank.
        detached: whether the placement group outlives its creator.
        mark: prefix of its name; "": no name.

    Raises:
        ResourcesError: the cluster did not provide the resources in time.
    """
    num_cpus, num_gpus = asked
    found = ray.cluster_resources().get("GPU", 0.0)
    if spec.device == "auto" and found and not num_gpus:
        log.warning(
            "device 'auto' is the CPU here: the cluster has %g GPUs, and %d ranks need one each",
            found,
            spec.size,
        )
    bundle = placement.bundle_of(num_cpus, num_gpus, accelerator(spec, resources))
    totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    reserved, per_bundle = placement.reserved_at_once(bundle, spec.size, spec.stages, totals)
    count = spec.size // per_bundle
    strategy = placement.strategy_of(reserved, count, totals, resources)
    lifetime = "detached" if detached else None
    bundles = [dict(reserved) for _ in range(count)]
    name = f"{mark}{secrets.token_hex(8)}" if mark else ""
    group = placement_group(bundles, strategy=strategy, name=name, lifetime=lifetime)
    if not group.wait(timeout_seconds=resources.placement_timeout_s):
        remove_placement_group(group)
        raise _no_place(spec, resources, bundle)
    return group


def _no_place(
    spec: WorkerSpec, resources: ResourcesConfig, bundle: placement.Bundle
) -> ResourcesError:
    """Returns the error for missing resources, with the key that requests them."""
    free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
    total = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
    field = "pipeline_parallel_size" if spec.stages > 1 else "tensor_parallel_size"
    if spec.head_target is not None:
        field = "speculative_config.placement"
    elif spec.target is None and not spec.num_leases:  # a drafter group's are its own
        field = "speculative_config.draft_tensor_parallel_size"
    return ResourcesError.at(
        field,
        f"{spec.size} workers of {bundle} each could not "
        f"be placed within {resources.placement_timeout_s:.0f} s; the cluster has "
        f"{total}, free are {free or 'none'}",
    )


@dataclass
class Formed:
    """Formed ranks, in rank order, and the state that their next owner needs."""

    spec: WorkerSpec  # with their current weights
    ranks: list[Any] = field(default_factory=list)  # actor handles
    places: list[RankPlace] = field(default_factory=list)
    reports: list[WorkerReport] = field(default_factory=list)  # or their predecessors'
    placement: PlacementGroup | None = None
    devices: list[str | None] = field(default_factory=list)  # in the order of the bundles
    asked: tuple[float, float] | None = None  # CPUs and GPUs of a rank, once decided
    generation: int = 0


class RankActors:
    """The owner's side; `OwnedRanks` has the same methods if the owner is a keeper.

    Args:
        resources: with `spare_workers` resolved to a bool.
        keeper: the owner of the ranks, which are then detached and survive their engine and the
            keeper. None: this process owns them.
        mark: prefix of the names of placement groups.
    """

    def __init__(
        self, spec: WorkerSpec, resources: ResourcesConfig, *, keeper: Any = None, mark: str = ""
    ) -> None:
        self._spec, self._resources, self._mark = spec, resources, mark
        self._keeper = keeper
        self._formed = Formed(spec)
        self._forming = threading.Lock()  # concurrent calls would use the same placement
        self._lock = threading.Lock()  # guards the attributes of spares
        self._spares: list[Any] = []  # by bundle, None if missing; empty while they take over
        self._warm: list[RankLocation] = []
        self._spare_epoch = 0  # changes when spares that are being started become unnecessary

    def respecify(self, spec: WorkerSpec) -> None:
        """Records the weights that the ranks have now; their replacements will load these."""
        self._spec = self._formed.spec = spec

    def form(self, node: str, reuse: bool, spec: WorkerSpec) -> Formed:
        """Forms new ranks, with models loaded and empty caches; ends earlier ones.

        If an engine calls this while the call of an earlier engine is running, it waits, and may
        reuse the ranks of that call.

        Args:
            node: node of the engine; rank 0 is on it if any rank is.
            reuse: whether ranks left behind by an engine are accepted, with their weights.
            spec: specification of the ranks, unless `reuse`.

        Raises:
            ResourcesError, ConfigError, CheckpointError, WorkerError.
        """
        with self._forming:
            if reuse and self._formed.ranks and self._renew():
                return replace(self._formed)
            if not reuse:
                self.respecify(spec)
            self.drop()
            self._formed.generation += 1
            try:
                with _own_errors():
                    if not self._replace(node):
                        self.shutdown()
                        self._start(node)
            except BaseException as error:
                # After a restart, keep the placement and processes for the next attempt.
                if reuse or not isinstance(error, ResourcesError):
                    self.shutdown()
                raise
            self._start_spares()
            return replace(self._formed)

    def adopt(self, formed: Formed) -> None:
        """Adopts the ranks of a keeper that died; they keep running."""
        self._formed, self._spec = formed, formed.spec
        for rank in formed.ranks:  # the engine handles dead ranks
            rank.adopt.remote(self._keeper)
        self._start_spares()

    def drop(self) -> None:
        """Ends the ranks; their placement and spares remain."""
        ranks, self._formed.ranks = self._formed.ranks, []
        for rank in ranks:
            ray.kill(rank)

    def spares(self) -> list[RankLocation]:
        """Returns the spare processes that can take over now."""
        return list(self._warm)

    def amounts(self) -> list[Amount]:
        """Returns how much of each rank's weights is loaded; empty if a rank does not answer."""
        asked = [rank.progress.remote() for rank in self._formed.ranks]
        try:
            return ray.get(asked, timeout=_AMOUNTS_TIMEOUT_S)
        except RayError:
            return []

    def shutdown(self) -> None:
        """Ends ranks, spares and placement."""
        self.drop()
        for spare in filter(None, self._take_spares()):
            ray.kill(spare)
        if self._formed.placement is not None:
            remove_placement_group(self._formed.placement)
            self._formed.placement = None

    def _start(self, node: str) -> None:
        if self._formed.asked is None:  # later, a lost node's GPUs would be missing from the count
            self._formed.asked = needs(self._spec, self._resources)
        self._formed.placement = place(
            self._spec,
            self._resources,
            self._formed.asked,
            detached=self._keeper is not None,
            mark=self._mark,
        )
        self._formed.devices = [None] * self._spec.size
        self._gather([None] * self._spec.size)
        self._load(node)

    def _replace(self, node: str) -> bool:
        """Forms ranks in the previous placement, from spares or new processes; False if it failed.

        Bundles of a lost node return with it, or are placed wherever there is room.
        """
        spares = self._take_spares()
        if self._formed.placement is None:
            return False
        try:
            self._gather(spares or [None] * self._spec.size)
            self._load(node)
        except (RayError, OSError, WorkerDiedError) as error:
            log.warning("workers could not take over: %s", str(error).splitlines()[0])
            return False
        return True

    def _gather(self, spares: list[Any]) -> None:
        """Gets a process with imports done for every bundle: an answering spare or a new one.

        A process starts as soon as its bundle is placed, without waiting for others.

        Raises:
            ResourcesError: a bundle has no place; processes with a place are kept for the next try.
        """
        asked, placed, found = self._formed.asked, self._formed.placement, list(spares)
        assert asked is not None
        assert placed is not None
        waiting: dict[Any, int] = {}
        num_begun = [0] * len(found)

        def begin(index: int) -> None:
            if found[index] is not None:
                ray.kill(found[index])
            found[index], self._formed.devices[index] = self._actor(index, *asked), None
            waiting[found[index].warm.remote(models=False)] = index
            num_begun[index] += 1

        for index, spare in enumerate(spares):
            if spare is None:
                begin(index)
            else:
                taken = spare.take_over.remote(self._spec, self._formed.devices[index])
                waiting[taken] = index
        begun, limit_s = time.monotonic(), self._resources.placement_timeout_s
        while waiting:
            done, others = ray.wait([*waiting], timeout=min(limit_s, _SPARE_TIMEOUT_S))
            elapsed_s = time.monotonic() - begun
            if not done and elapsed_s > limit_s and not placed.wait(timeout_seconds=1):
                self._keep(found, set(waiting.values()))
                bundle = placement.bundle_of(*asked, accelerator(self._spec, self._resources))
                raise _no_place(self._spec, self._resources, bundle)
            if not done and elapsed_s > LOAD_TIMEOUT_S:
                raise GetTimeoutError
            for each in done:
                index = waiting.pop(each)
                try:
                    ray.get(each)
                except RayActorError:  # also if the node was lost before Ray noticed
                    if num_begun[index] == _MAX_BEGUN:
                        raise
                    begin(index)
            for each in [] if done else others:
                if not num_begun[waiting[each]]:  # a spare that hangs
                    begin(waiting.pop(each))
        self._formed.ranks = found

    def _keep(self, found: list[Any], lacking: Collection[int]) -> None:
        """Keeps processes that have a place as spares for the next try."""
        for index in lacking:
            ray.kill(found[index])
        with self._lock:
            self._spares = [None if index in lacking else each for index, each in enumerate(found)]

    def _actor(self, index: int, cpus: float, gpus: float) -> Any:
        """Starts a process in the bundle of the rank `index`, in the order of bundles."""
        assert self._formed.placement is not None
        per_bundle = self._spec.size // self._formed.placement.bundle_count
        detached = {} if self._keeper is None else {"lifetime": "detached", "namespace": NAMESPACE}
        return (
            ray.remote(Rank)
            .options(
                **detached,
                num_cpus=cpus,
                num_gpus=gpus,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._formed.placement, placement_group_bundle_index=index // per_bundle
                ),
            )
            .remote(self._spec, self._keeper)
        )

    def _load(self, node: str) -> None:
        """Joins the ranks into a group, loads the models and allocates the caches."""
        size = self._spec.size
        places: list[RankPlace] = answers_of([rank.place.remote() for rank in self._formed.ranks])
        self._formed.devices = [each.devices for each in places]
        # Neighbouring ranks share a node, in whatever order Ray has placed the bundles.
        order = sorted(
            range(size),
            key=lambda index: (places[index].node_id != node, places[index].node_id, index),
        )
        self._formed.ranks = [self._formed.ranks[index] for index in order]
        self._formed.places = places = [places[index] for index in order]
        master = (places[0].host, places[0].free_port)
        spread = sum(each["Alive"] for each in ray.nodes()) > 1  # feature links also leave nodes
        joining = [
            rank.join.remote(index, *master, self._formed.generation, spread)
            for index, rank in enumerate(self._formed.ranks)
        ]
        self._answers(joining)
        known: list[Any] = self._formed.reports or [None] * size
        self._formed.reports = self._answers(
            [rank.load.remote(each) for rank, each in zip(self._formed.ranks, known, strict=True)]
        )
        self._allocate()

    def _allocate(self) -> None:
        blocks = agreed_blocks(self._formed.reports)
        steps = self._answers([rank.allocate.remote(*blocks) for rank in self._formed.ranks])
        self._formed.reports = with_device_steps(self._formed.reports, steps)

    def _answers(self, refs: list[Any]) -> list[Any]:
        """Returns the answers of all ranks; raises `WorkerDiedError` with the rank that died."""
        try:
            return answers_of(refs)
        except RayActorError as error:
            ids = [each._actor_id.hex() for each in self._formed.ranks]
            if error.actor_id not in ids:
                raise
            rank = ids.index(error.actor_id)
            place, lost = self._formed.places[rank], ""
            with suppress(Exception):  # Ray's head may be gone too
                nodes = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
                lost = "" if place.node_id in nodes else ", which the cluster has lost"
            raise WorkerDiedError(
                f"rank {rank} of {self._spec.size} died while it loaded, on {place.host}{lost}: "
                f"{str(error).splitlines()[0]}"
            ) from None

    def _renew(self) -> bool:
        """Prepares the ranks for another engine; returns False if one is gone or busy."""
        try:
            ray.get([rank.renew.remote() for rank in self._formed.ranks], timeout=_RENEW_TIMEOUT_S)
            self._allocate()
        except (RayError, OSError, WorkerDiedError) as error:
            log.warning("workers could not be taken over: %s", str(error).splitlines()[0])
            return False
        return True

    def _take_spares(self) -> list[Any]:
        with self._lock:
            self._spare_epoch += 1
            spares, self._spares, self._warm = self._spares, [], []
            return spares

    def _start_spares(self) -> None:
        """Starts spares in the ranks' bundles, which already reserve their resources."""
        if self._resources.spare_workers is True:
            start_thread("spares", self._hold_spares, self._spare_epoch)

    def _hold_spares(self, epoch: int) -> None:
        """Starts spares, and replaces dead ones with growing pauses, until the epoch changes."""
        pause_s = _SPARE_DELAY_S
        while ray.is_initialized():
            time.sleep(pause_s)
            try:
                with self._lock:
                    if epoch != self._spare_epoch:
                        return
                    for spare in filter(None, self._spares):
                        ray.kill(spare)
                    size = self._spec.size
                    self._spares = [self._actor(index, 0.0, 0.0) for index in range(size)]
                    self._warm = []
                    spares = self._spares
                warm = ray.get([spare.warm.remote() for spare in spares], timeout=LOAD_TIMEOUT_S)
                with self._lock:
                    if epoch != self._spare_epoch:
                        return
                    self._warm = warm
                begun = time.monotonic()
                # Fails when a spare dies; for a spare that became a rank, it never returns.
                done, _ = ray.wait([spare.sentinel.remote() for spare in spares], num_returns=1)
                ray.get(done)
            except RayError as error:
                if epoch != self._spare_epoch:
                    return
                log.warning("a spare worker died: %s", str(error).splitlines()[0])
                lasted = self._warm and time.monotonic() - begun > 60.0
                pause_s = _SPARE_DELAY_S if lasted else min(2 * pause_s, 300.0)
                self._warm = []


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Converts errors of ranks and of Ray to Outrider's."""
    try:
        yield
    except RayTaskError as error:
        raise cause_of(error) from None
    except GetTimeoutError:
        raise WorkerDiedError(f"the workers did not load in {LOAD_TIMEOUT_S:.0f} s") from None
    except RayActorError as error:
        raise WorkerDiedError(f"a worker died while it loaded: {error}") from None


def cause_of(error: RayTaskError) -> OutriderError:
    """Returns the `OutriderError` that a call raised, or a `WorkerError` for other errors."""
    cause = error.cause
    if isinstance(cause, OutriderError):
        return cause
    return WorkerError(f"a worker failed to load: {type(cause).__name__}: {cause}")


def answers_of(refs: list[Any]) -> list[Any]:
    """Returns the answers of ranks while a group is formed."""
    return ray.get(refs, timeout=LOAD_TIMEOUT_S)


class ConnectedGroup(WorkerGroup):
    """A group whose rank 0 is reached over sockets and sends heartbeats."""

    _monitor: Monitor | None = None

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
        if channel is not None:
            channel.close()


class RayGroup(ConnectedGroup):
    """A group of ranks in their own actors.

    Raises (also from `restart`):
        ResourcesError: the cluster did not provide the resources in time.
        ConfigError, CheckpointError: a rank could not load.
    """

    is_concurrent = True

    def __init__(self, spec: WorkerSpec, source: RankActors) -> None:
        super().__init__(spec)
        self._source = source
        self._ranks: list[Any] = []
        self._form(reuse=True)
        self._keep_blocks()

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
        super()._hang_up()
        self._ranks = []

    def drop(self) -> None:
        """Drops the ranks as after a death; placement, spares and keeper remain."""
        self._hang_up()
        self._source.drop()

    def _form(self, *, reuse: bool) -> None:
        """Forms the ranks and opens their channel."""
        self._hang_up()
        node = ray.get_runtime_context().get_node_id()
        with watched(self._source.amounts, self._tell_loading):
            formed = self._source.form(node, reuse, self._spec)
        self._spec = formed.spec  # an earlier engine may have loaded other weights
        try:
            self._connect(formed, node)
        except (RayError, OSError) as error:
            self.drop()
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
        """Opens the channel to the ranks `connected`; kills it when any rank dies or is silent."""
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
            if self._channel is channel:  # not if `shutdown` has closed it
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


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """The addresses at which engines connect to a member of a drafter group."""

    addresses: tuple[framing.Address, ...]  # a Unix socket for its node, and TCP
    node: str
    secret: bytes
    reports: tuple[WorkerReport, ...]


def share(formed: Formed) -> MemberPlace:
    """Makes rank 0 listen for the engines that share these ranks of a draft model."""
    secret, node = secrets.token_bytes(32), formed.places[0].node_id
    first, *others = formed.ranks
    followers = answers_of(
        [
            rank.listen.remote(secret, place.node_id == node)
            for rank, place in zip(others, formed.places[1:], strict=True)
        ]
    )
    addresses = ray.get(first.share.remote(followers, secret), timeout=_ANSWER_TIMEOUT_S)
    return MemberPlace(
        tuple((str(kind), str(host), int(port)) for kind, host, port in addresses),
        node,
        secret,
        tuple(formed.reports),
    )


class SharedGroup(ConnectedGroup):
    """A member of a drafter group, as used by one engine: a lease that ends with the connection.

    A restart connects to the member again, if the group has restarted it.

    Args:
        translation: as in `OpenLease`.

    Raises (also from `restart`):
        WorkerDiedError: the member is not up, or cannot be reached.
        ConfigError: the member has no room for another engine.
    """

    is_concurrent = True

    def __init__(self, actor: Any, member: str, ask: MembersAsk, translation: bytes) -> None:
        self._actor, self._member, self._asker = actor, member, ask
        self._translation = translation
        super().__init__(WorkerSpec(1, "auto", None, ask.timeout_s))
        self._replace_ranks()

    def shutdown(self) -> None:
        self._hang_up()

    def _replace_ranks(self) -> None:
        self.shutdown()
        try:
            place = ray.get(self._actor.place.remote(self._member), timeout=_ANSWER_TIMEOUT_S)
            if place is None:
                raise WorkerDiedError(f"member {self._member} of the drafter group is not up")
            self._connect(place)
        except (RayError, OSError) as error:
            self.shutdown()
            reason = str(error).splitlines()[0]
            raise WorkerDiedError(f"the drafter group cannot be reached: {reason}") from None
        except OutriderError:
            self.shutdown()
            raise

    def _connect(self, place: MemberPlace) -> None:
        is_here = place.node == ray.get_runtime_context().get_node_id()
        address = place.addresses[0 if is_here else 1]
        steps, beats = (
            framing.connect(address, place.secret, _SHARED_TIMEOUT_S, purpose)
            for purpose in (framing.STEPS, framing.BEATS)
        )
        channel = SocketChannel([steps], 1, self._spec.spin_s)
        self._channel = channel
        self._monitor = Monitor([beats], self._spec.heartbeat_timeout_s, channel.kill)
        draft = place.reports[0].draft
        assert draft is not None, "members run a draft model"
        num_scratch_blocks = self._asker.num_scratch_blocks(draft.block_size)
        lease = OpenLease(self._asker.engine, num_scratch_blocks, self._translation)
        answer = channel.call(lease, _ANSWER_TIMEOUT_S)
        if isinstance(answer, WeightsAnswer):
            raise ConfigError.at(f"speculative_config.{answer.field}", answer.problem)
        assert isinstance(answer, WorkerReport), type(answer)
        reports = [answer, *place.reports[1:]]
        self.reports = [replace(each, draft=answer.draft) for each in reports]
