"""Workers that outlive their engine, so that the engine's successor need not load them again.

A `Keeper` is a small detached actor, one per engine of a server. It creates and ends the placement
groups, ranks and spare processes, which are detached as well. It notices the death of its engine by
a Unix socket. A keeper without an engine waits for the next replica of the same deployment; after
`keep_workers_s`, it ends together with its workers. If a keeper dies, its engine starts another
one, which adopts the ranks. Workers with neither keeper nor engine end (`rank.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any, cast
from weakref import WeakValueDictionary

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..config import ResourcesConfig
from ..errors import OutriderError, WorkerDiedError
from ..workers.model.checkpoint.progress import Amount
from ..workers.spec import RankLocation, WorkerSpec
from ..workers.transport import framing
from .process import start_thread
from .rank_actors import LOAD_TIMEOUT_S, NAMESPACE, Formed, RankActors, cause_of

log = logging.getLogger(__name__)
_ATTACH_TIMEOUT_S = 10.0
_STATS_TIMEOUT_S = 1.0
_SHUTDOWN_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Successors:
    """Identifies the engines that may take over each other's workers.

    Args:
        deployment: application and deployment; only engines of the same one replace each other.
        settings: digest of the engine's configuration.
        wait_s: how long workers wait for the next engine.
    """

    deployment: str
    settings: str
    wait_s: float

    @property
    def prefix(self) -> str:
        """The prefix of the names of these engines' keepers."""
        return f"outrider-keeper-{sha256(self.deployment.encode()).hexdigest()[:16]}-"


class Keeper:
    """The actor."""

    def __init__(self, successors: Successors) -> None:
        self._successors = successors
        self._itself = ray.get_runtime_context().current_actor
        self._groups: dict[str, RankActors] = {}
        self._lock = threading.Lock()
        self._attached = False
        self._turn = 0  # counts engines
        self._engine: socket.socket | None = None  # connection of the current engine
        self._noted: int | None = None
        self._secret = secrets.token_bytes(32)
        self._end: threading.Timer | None = None

    def attach(self, settings: str) -> tuple[framing.Address, bytes, str] | None:
        """Returns address, secret and node for an engine; None if the keeper is taken or ending."""
        with self._lock:
            if self._attached and not self._has_hung_up():
                return None
            if settings != self._successors.settings:  # the deployment has changed
                self._end_in(0.0)
                return None
            self._attached = True
            if self._end is not None:
                self._end.cancel()
            self._engine = None
            self._turn += 1
            turn = self._turn
        server, address = framing.listen(None)
        start_thread("engine", self._follow, server, address, turn)
        return address, self._secret, node_id()

    def note(self, vocab_size: int | None) -> None:
        self._noted = vocab_size

    def recall(self) -> int | None:
        return self._noted

    def perform(
        self,
        key: str,
        spec: WorkerSpec,
        resources: ResourcesConfig,
        verb: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Runs a method of `RankActors` on the group `key`, which is empty at first."""
        with self._lock:
            made = RankActors(spec, resources, keeper=self._itself)
            group = self._groups.setdefault(key, made)
        return verb(group, *arguments)

    def close(self, key: str) -> int:
        """Ends a group; returns how many are left."""
        with self._lock:
            group = self._groups.pop(key, None)
        if group is not None:
            group.shutdown()
        return len(self._groups)

    def retain(self, keys: Collection[str]) -> None:
        """Ends all other groups."""
        for key in [each for each in self._groups if each not in keys]:
            self.close(key)

    def _follow(self, server: socket.socket, address: framing.Address, turn: int) -> None:
        """Waits until the engine is gone; then another one may attach."""
        with (
            contextlib.suppress(OSError, WorkerDiedError),
            server,
            framing.accept(server, self._secret, _ATTACH_TIMEOUT_S) as engine,
        ):
            framing.unlink(address)
            with self._lock:
                if turn == self._turn:
                    self._engine = engine
            framing.receive(engine)  # the engine sends nothing, so this returns when it ends
        framing.unlink(address)
        with self._lock:
            if turn == self._turn:
                self._attached, self._engine = False, None
                self._end_in(self._successors.wait_s)

    def _has_hung_up(self) -> bool:
        """Returns True if the engine is gone, even before its thread has noticed."""
        if self._engine is None:
            return False
        try:
            return not self._engine.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _end_in(self, pause_s: float) -> None:
        self._end = threading.Timer(pause_s, self._end_now)
        self._end.daemon = True
        self._end.start()

    def _end_now(self) -> None:
        try:
            for group in self._groups.values():
                group.shutdown()
        finally:
            os._exit(0)


def node_id() -> str:
    """Returns the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


@dataclass
class KeeperLink:
    """An engine's keeper, which is found or started when first needed, and replaced if it dies.

    Nothing is lost with a keeper, because its successor is told about the workers.
    """

    successors: Successors
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _keeper: Any = None
    _noted: int | None = None
    _connection: socket.socket | None = None
    _owned: WeakValueDictionary[str, OwnedRanks] = field(default_factory=WeakValueDictionary)
    _formed: dict[str, tuple[OwnedRanks, Formed]] = field(default_factory=dict)  # by key
    _has_left: bool = False

    def group(self, spec: WorkerSpec, resources: ResourcesConfig) -> OwnedRanks:
        """Returns the ranks of a specification; a second call returns other ranks."""
        digest = sha256(repr((spec, resources)).encode()).hexdigest()
        with self._lock:  # groups start concurrently
            keys = (f"{digest}-{number}" for number in count(1))
            key = next(each for each in keys if each not in self._owned)
            owned = self._owned[key] = OwnedRanks(self, key, spec, resources)
        return owned

    def recall(self) -> int | None:
        """Finds the keeper of a dead engine and returns what that engine has noted with it."""
        with self._lock:
            self._keeper = self._keeper or self._find()
        with contextlib.suppress(WorkerDiedError):
            return cast("int | None", self.call("recall", timeout_s=_ATTACH_TIMEOUT_S))
        return None

    def note(self, vocab_size: int) -> None:
        """Stores a value for `recall` of a later engine; every new keeper gets it."""
        self._noted = vocab_size

    def retain(self) -> None:
        """Ends groups of an earlier engine that this one does not use."""
        with self._lock:
            keys = [*self._formed]
        with contextlib.suppress(WorkerDiedError):
            self.call("retain", keys, timeout_s=_SHUTDOWN_TIMEOUT_S)

    def call(self, method: str, *arguments: Any, timeout_s: float, may_start: bool = False) -> Any:
        """Calls the keeper and returns its answer.

        Raises:
            OutriderError: the error that the call raised.
            WorkerDiedError: the keeper died, or there is none and it may not be started.
        """
        try:
            keeper = self._connected(may_start)
            return ray.get(getattr(keeper, method).remote(*arguments), timeout=timeout_s)
        except RayTaskError as error:
            raise cause_of(error) from None
        except GetTimeoutError:
            raise WorkerDiedError(f"no answer of the keeper within {timeout_s:.0f} s") from None
        except (RayActorError, OSError) as error:
            with self._lock:
                self._hang_up()
            text = str(error).splitlines()[0]
            raise WorkerDiedError(f"the keeper of the workers died: {text}") from None

    def _connected(self, may_start: bool) -> Any:
        with self._lock:
            if self._keeper is None:
                if not may_start:
                    raise WorkerDiedError("the keeper of the workers is gone")
                # Only one keeper may own ranks of a key, so running ranks exclude another engine's
                # keeper.
                self._keeper = (None if self._formed else self._find()) or self._start()
                self._keeper.note.remote(self._noted)
                perform, adopt = self._keeper.perform.remote, RankActors.adopt
                ray.get(
                    [
                        perform(ranks.key, ranks.spec, ranks.resources, adopt, formed)
                        for ranks, formed in self._formed.values()
                    ]
                )
            return self._keeper

    @property
    def is_up(self) -> bool:
        """True if there is a keeper, as far as is known."""
        return self._keeper is not None

    def holds(self, ranks: OwnedRanks, formed: Formed | None) -> None:
        """Records what a new keeper will be told about `ranks`; None: nothing."""
        with self._lock:
            self._formed.pop(ranks.key, None)
            if formed is not None:
                self._formed[ranks.key] = ranks, formed

    def respecify(self, ranks: OwnedRanks, spec: WorkerSpec) -> None:
        """Records that the ranks have other weights."""
        with self._lock:
            if ranks.key in self._formed:
                formed = replace(self._formed[ranks.key][1], spec=spec)
                self._formed[ranks.key] = ranks, formed

    def leave(self) -> Any:
        """Disconnects, like the death of this process would; returns the keeper."""
        with self._lock:
            self._has_left, keeper = True, self._keeper
            self._hang_up()
        return keeper

    def end(self) -> None:
        """Ends the keeper, which no longer owns anything."""
        keeper = self.leave()
        if keeper is not None:
            ray.kill(keeper)

    def _hang_up(self) -> None:
        self._keeper, connection, self._connection = None, self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):  # `close` alone would not wake `_follow`
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _follow(self, connection: socket.socket) -> None:
        """Waits for the keeper's death and replaces it at once."""
        with contextlib.suppress(OSError, WorkerDiedError):
            framing.receive(connection)  # the keeper sends nothing, so this returns when it ends
        with self._lock:
            if connection is self._connection:
                self._hang_up()
        if self._has_left or not ray.is_initialized():
            return
        log.warning("the keeper of the workers died; another one takes them over")
        try:
            self.call("recall", timeout_s=LOAD_TIMEOUT_S, may_start=True)
        except (OutriderError, RayError) as error:  # the next call that needs a keeper retries
            log.warning("the keeper of the workers is not replaced: %s", error)

    def _find(self) -> Any:
        """Returns an attached keeper of this node whose engine died; None if there is none.

        Keepers with earlier settings of the deployment end.
        """
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["namespace"] == NAMESPACE and named["name"].startswith(self.successors.prefix):
                try:
                    keeper = ray.get_actor(named["name"], namespace=NAMESPACE)
                    if self._attach(keeper):
                        log.warning("the workers of an engine that died are taken over")
                        return keeper
                except (ValueError, RayError, OSError):  # it has ended meanwhile or hangs
                    continue
        return None

    def _start(self) -> Any:
        keeper = (
            ray.remote(Keeper)
            .options(
                name=self.successors.prefix + secrets.token_hex(8),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id(), soft=False),
            )
            .remote(self.successors)
        )
        if not self._attach(keeper, LOAD_TIMEOUT_S):
            raise WorkerDiedError("the keeper of the workers belongs to another engine")
        return keeper

    def _attach(self, keeper: Any, timeout_s: float = _ATTACH_TIMEOUT_S) -> bool:
        answer = ray.get(keeper.attach.remote(self.successors.settings), timeout=timeout_s)
        if answer is None:
            return False
        address, secret, node = answer
        if node != node_id():
            return False  # on another node; it keeps waiting because nobody connects
        connection = framing.connect(tuple(address), secret, _ATTACH_TIMEOUT_S)
        self._connection = connection
        start_thread("keeper", self._follow, connection)
        return True


@dataclass(eq=False)
class OwnedRanks(RankActors):
    """The interface of `RankActors` for actors that the keeper owns."""

    link: KeeperLink
    key: str
    spec: WorkerSpec
    resources: ResourcesConfig
    _ending: threading.Thread | None = None  # ends dropped ranks

    def respecify(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.link.respecify(self, spec)  # first, so that a keeper's successor gets it
        with contextlib.suppress(WorkerDiedError):
            self._perform(RankActors.respecify, spec, timeout_s=_SHUTDOWN_TIMEOUT_S)

    def form(self, node: str, reuse: bool, spec: WorkerSpec) -> Formed:
        self._end_ranks()
        perform = partial(
            self._perform,
            RankActors.form,
            node,
            reuse,
            spec,
            timeout_s=LOAD_TIMEOUT_S,
            may_start=True,
        )
        try:
            formed: Formed = perform()
        except WorkerDiedError:
            if self.link.is_up:  # so the workers died
                raise
            # A keeper that died is replaced once; another death counts as a failed restart.
            formed = perform()
        self.spec = formed.spec
        self.link.holds(self, formed)
        return formed

    def drop(self) -> None:
        """Drops ranks like the base class, but without waiting, because the keeper may hang.

        Later calls wait for it, so that it does not end ranks that were formed later.
        """
        if self._ending is None or not self._ending.is_alive():
            self._ending = start_thread("drop", self._drop)

    def _drop(self) -> None:
        with contextlib.suppress(OutriderError):
            self._perform(RankActors.drop, timeout_s=_SHUTDOWN_TIMEOUT_S)

    def _end_ranks(self) -> None:
        """Waits until dropped ranks have ended."""
        if self._ending is not None:
            self._ending.join()

    def spares(self) -> list[RankLocation]:
        try:
            return list(self._perform(RankActors.spares, timeout_s=_STATS_TIMEOUT_S))
        except WorkerDiedError:
            return []

    def amounts(self) -> list[Amount]:
        try:
            found: list[Amount] = self._perform(RankActors.amounts, timeout_s=_STATS_TIMEOUT_S)
        except OutriderError:
            return []
        return found

    def shutdown(self) -> None:
        self._end_ranks()
        self.link.holds(self, None)
        try:
            num_left = self.link.call("close", self.key, timeout_s=_SHUTDOWN_TIMEOUT_S)
        except WorkerDiedError:
            num_left = 0
        if num_left == 0:
            self.link.end()

    def _perform(self, verb: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
        group = (self.key, self.spec, self.resources)
        return self.link.call("perform", *group, verb, *arguments, **limits)
