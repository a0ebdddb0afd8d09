"""The actors of a tensor-parallel group: their places, the ranks, and spare processes.

Whoever calls `RankActors.form` owns the actors, and Ray ends them with it: an engine's process, or
a `Keeper` that outlives it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..config import ResourcesConfig
from ..errors import OutriderError, WorkerDiedError, WorkerError
from ..workers.group import agreed_blocks, with_device_steps
from ..workers.spec import RankLocation, WorkerReport, WorkerSpec
from .placement import needs, place
from .rank import Rank, RankPlace

log = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 1800.0
NAMESPACE = "outrider"
_CONNECT_TIMEOUT_S = 30.0
_RENEW_TIMEOUT_S = 10.0  # beyond it, new ranks are the faster way
_SPARE_TIMEOUT_S = 60.0  # one that still warms up is ahead of a fresh process
_SPARE_DELAY_S = 5.0  # after the ranks: what they and the engine do first has the cores
_ENV = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Formed:
    """Ranks that can be connected to, in rank order, and what their next owner has to know."""

    ranks: list[Any]  # actor handles
    places: list[RankPlace]
    reports: list[WorkerReport]
    placement: PlacementGroup | None
    devices: list[str | None]  # by bundle
    generation: int


class RankSource(Protocol):
    """Where a group gets its ranks from."""

    def form(self, node: str, *, reuse: bool) -> Formed:
        """New ranks, with models loaded and caches empty; earlier ones are ended.

        Args:
            node: of the engine, whose node rank 0 shares if any rank is there.
            reuse: ranks that an engine left behind do too.

        Raises:
            ResourcesError, ConfigError, CheckpointError, WorkerError.
        """
        ...

    def drop(self) -> None:
        """Ends the ranks; their places and their spares remain."""
        ...

    def spares(self) -> list[RankLocation]:
        """Spare processes that could take over now."""
        ...

    def shutdown(self) -> None:
        """Ends everything."""
        ...


class RankActors:
    """The owner's side.

    Args:
        resources: `spare_workers` is not `auto` any more.
        keeper: owns the ranks, which are detached: they stay when their engine hangs up, and when
            the keeper dies meanwhile. None: this process owns them.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        resources: ResourcesConfig,
        *,
        keeper: Any = None,
    ) -> None:
        self._spec, self._resources = spec, resources
        self._keeper = keeper
        self._generation = 0
        self._placement: PlacementGroup | None = None
        self._ranks: list[Any] = []
        self._known: list[WorkerReport] = []  # of the ranks, or of those before them
        self._places: list[RankPlace] = []
        self._devices: list[str | None] = []  # by bundle
        self._lock = threading.Lock()  # of what is about spares
        self._spares: list[Any] = []  # by bundle; none while they take over
        self._warm: list[RankLocation] = []
        self._spare_epoch = 0  # changes where spares that are being started are not needed

    def form(self, node: str, *, reuse: bool) -> Formed:
        if reuse and self._ranks and (renewed := self._renew()) is not None:
            return renewed
        self.drop()
        self._generation += 1
        try:
            with _own_errors():
                if not self._use_spares(node):
                    self.shutdown()
                    self._start(node)
        except BaseException:
            self.shutdown()
            raise
        self._start_spares()
        return self._formed()

    def adopt(self, formed: Formed) -> None:
        """Owns what another keeper has formed."""
        self._ranks, self._places, self._known = formed.ranks, formed.places, formed.reports
        self._placement, self._devices = formed.placement, formed.devices
        self._generation = formed.generation
        for rank in self._ranks:  # one that is dead is its engine's business
            rank.adopt.remote(self._keeper)
        self._start_spares()

    def drop(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    def spares(self) -> list[RankLocation]:
        return list(self._warm)

    def shutdown(self) -> None:
        self.drop()
        for spare in self._take_spares():
            ray.kill(spare)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _start(self, node: str) -> None:
        self._placement = place(self._spec, self._resources, detached=self._keeper is not None)
        self._ranks = self._actors(*needs(self._spec, self._resources))
        places = _get([rank.place.remote() for rank in self._ranks])
        self._devices = [each.devices for each in places]
        self._load(places, node)

    def _actors(self, cpus: float, gpus: float) -> list[Any]:
        """One actor per bundle, in the bundles' order."""
        assert self._placement is not None
        detached = {} if self._keeper is None else {"lifetime": "detached", "namespace": NAMESPACE}
        return [
            ray.remote(Rank)
            .options(
                **detached,
                num_cpus=cpus,
                num_gpus=gpus,
                max_concurrency=4,
                runtime_env={"env_vars": _ENV},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=index
                ),
            )
            .remote(self._spec, self._keeper)
            for index in range(self._spec.size)
        ]

    def _load(self, places: list[RankPlace], node: str) -> None:
        """Makes a group of `_ranks`, of which nothing is loaded yet."""
        size = self._spec.size
        # Neighbouring ranks share a node, wherever the bundles landed.
        order = sorted(
            range(size),
            key=lambda index: (places[index].node_id != node, places[index].node_id, index),
        )
        self._ranks = [self._ranks[index] for index in order]
        self._places = places = [places[index] for index in order]
        master = (places[0].host, places[0].free_port)
        spread = sum(each["Alive"] for each in ray.nodes()) > 1  # feature links leave nodes too
        _get(
            [
                rank.join.remote(index, *master, self._generation, spread)
                for index, rank in enumerate(self._ranks)
            ]
        )
        known: list[Any] = [*self._known] or [None] * size
        self._known = _get(
            [rank.load.remote(each) for rank, each in zip(self._ranks, known, strict=True)]
        )
        self._allocate()

    def _allocate(self) -> None:
        blocks = agreed_blocks(self._known)
        steps = _get([rank.allocate.remote(*blocks) for rank in self._ranks])
        self._known = with_device_steps(self._known, steps)

    def _renew(self) -> Formed | None:
        """The same ranks for another engine; None if one is gone or busy."""
        try:
            ray.get([rank.renew.remote() for rank in self._ranks], timeout=_RENEW_TIMEOUT_S)
            self._allocate()
        except (RayError, OSError) as error:
            log.warning("workers could not be taken over: %s", str(error).splitlines()[0])
            return None
        return self._formed()

    def _formed(self) -> Formed:
        return Formed(
            self._ranks,
            self._places,
            self._known,
            self._placement,
            self._devices,
            self._generation,
        )

    def _use_spares(self, node: str) -> bool:
        """Whether the spares took over; where a node is gone, they cannot."""
        spares = self._take_spares()
        if not spares:
            return False
        self._ranks = spares
        try:
            taken = [
                spare.take_over.remote(devices)
                for spare, devices in zip(spares, self._devices, strict=True)
            ]
            ray.get(taken, timeout=_SPARE_TIMEOUT_S)
            places = ray.get([each.place.remote() for each in spares], timeout=_CONNECT_TIMEOUT_S)
            self._load(places, node)
        except (RayError, OSError, WorkerDiedError) as error:
            log.warning("the spare workers could not take over: %s", str(error).splitlines()[0])
            return False
        return True

    def _take_spares(self) -> list[Any]:
        with self._lock:
            self._spare_epoch += 1
            spares, self._spares, self._warm = self._spares, [], []
            return spares

    def _start_spares(self) -> None:
        """Holds processes ready in the ranks' bundles: what they need was reserved once."""
        if self._resources.spare_workers is True:
            threading.Thread(
                target=self._hold_spares,
                args=(self._spare_epoch,),
                name="outrider-spares",
                daemon=True,
            ).start()

    def _hold_spares(self, epoch: int) -> None:
        """Starts spares and replaces those that die, with pauses, until others are needed."""
        pause_s = _SPARE_DELAY_S
        while ray.is_initialized():
            time.sleep(pause_s)
            try:
                with self._lock:
                    if epoch != self._spare_epoch:
                        return
                    for spare in self._spares:
                        ray.kill(spare)
                    self._spares, self._warm = self._actors(0.0, 0.0), []
                    spares = self._spares
                warm = ray.get([spare.warm.remote() for spare in spares], timeout=LOAD_TIMEOUT_S)
                with self._lock:
                    if epoch != self._spare_epoch:
                        return
                    self._warm = warm
                begun = time.monotonic()
                # Fails when a spare dies; one that became a rank never returns either.
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
    """What ranks and Ray raise, as errors of ours."""
    try:
        yield
    except RayTaskError as error:
        raise cause_of(error) from None
    except GetTimeoutError:
        raise WorkerDiedError(f"the workers did not load in {LOAD_TIMEOUT_S:.0f} s") from None
    except RayActorError as error:
        raise WorkerDiedError(f"a worker died while it loaded: {error}") from None


def cause_of(error: RayTaskError) -> OutriderError:
    """What a call raised, as what it was if it is one of ours."""
    cause = error.cause
    if isinstance(cause, OutriderError):
        return cause
    return WorkerError(f"a worker failed to load: {type(cause).__name__}: {cause}")


def _get(refs: list[Any]) -> list[Any]:
    return ray.get(refs, timeout=LOAD_TIMEOUT_S)
