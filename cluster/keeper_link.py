"""An engine's side of its keeper: `KeeperLink`, and the ranks that it forms.

The death of a keeper takes nothing along: another one is started, and is given what the engine
knows of its workers.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..config import ResourcesConfig
from ..errors import OutriderError, WorkerDiedError
from ..workers.spec import RankLocation, WorkerSpec
from ..workers.transport import framing
from .keeper import Keeper, Successors, node_id
from .rank_actors import LOAD_TIMEOUT_S, NAMESPACE, Formed, cause_of

log = logging.getLogger(__name__)
_ATTACH_TIMEOUT_S = 10.0
_STATS_TIMEOUT_S = 1.0
_SHUTDOWN_TIMEOUT_S = 10.0
Result = TypeVar("Result")


@dataclass
class KeeperLink:
    """An engine's keeper: found or started when it is first needed, and replaced when it dies."""

    successors: Successors
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _keeper: Any = None
    _noted: int | None = None
    _connection: socket.socket | None = None
    _num_groups: dict[str, int] = field(default_factory=dict)  # by specification
    _formed: dict[str, tuple[KeptRanks, Formed]] = field(default_factory=dict)  # by key
    _has_left: bool = False

    def group(self, spec: WorkerSpec, resources: ResourcesConfig) -> KeptRanks:
        """The ranks of a specification; a second group of the same one has others."""
        digest = sha256(repr((spec, resources)).encode()).hexdigest()
        with self._lock:  # groups start at once
            number = self._num_groups[digest] = self._num_groups.get(digest, 0) + 1
        return KeptRanks(self, f"{digest}-{number}", spec, resources)

    def recall(self) -> int | None:
        """What an engine that died has noted with its keeper, which is this engine's now."""
        with self._lock:
            self._keeper = self._keeper or self._find()
        try:
            noted: int | None = self.call("recall", timeout_s=_ATTACH_TIMEOUT_S)
        except WorkerDiedError:
            return None
        return noted

    def note(self, vocab_size: int) -> None:
        """For `recall` of a later engine; sent to every keeper that is started."""
        self._noted = vocab_size

    def call(self, method: str, *arguments: Any, timeout_s: float, may_start: bool = False) -> Any:
        """The keeper's answer.

        Raises:
            OutriderError: what the call raised.
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
                # Ranks that run have to stay the keeper's only ones of their key.
                self._keeper = (None if self._formed else self._find()) or self._start()
                self._keeper.note.remote(self._noted)
                ray.get([self._adoption(*each) for each in self._formed.values()])
            return self._keeper

    def _adoption(self, ranks: KeptRanks, formed: Formed) -> Any:
        return self._keeper.adopt.remote(ranks.key, ranks.spec, ranks.resources, formed)

    @property
    def is_up(self) -> bool:
        """Whether there is a keeper, as far as is known."""
        return self._keeper is not None

    def holds(self, ranks: KeptRanks, formed: Formed | None) -> None:
        """What a further keeper will be given; None: nothing any more."""
        with self._lock:
            self._formed.pop(ranks.key, None)
            if formed is not None:
                self._formed[ranks.key] = ranks, formed

    def leave(self) -> Any:
        """Hangs up, as the death of this process would; the keeper."""
        with self._lock:
            self._has_left, keeper = True, self._keeper
            self._hang_up()
        return keeper

    def end(self) -> None:
        """Ends the keeper, which holds nothing any more."""
        keeper = self.leave()
        if keeper is not None:
            ray.kill(keeper)

    def _hang_up(self) -> None:
        self._keeper, connection, self._connection = None, self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):  # `close` would not wake `_follow`
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _follow(self, connection: socket.socket) -> None:
        """Replaces the keeper at once when it dies."""
        with contextlib.suppress(OSError, WorkerDiedError):
            framing.receive(connection)  # a keeper sends nothing; this returns at its end
        with self._lock:
            if connection is self._connection:
                self._hang_up()
        if self._has_left or not ray.is_initialized():
            return
        log.warning("the keeper of the workers died; another one takes them over")
        try:
            self.call("recall", timeout_s=LOAD_TIMEOUT_S, may_start=True)
        except (OutriderError, RayError) as error:  # the next call that needs one tries again
            log.warning("the keeper of the workers is not replaced: %s", error)

    def _find(self) -> Any:
        """A keeper on this node whose engine died, attached; None if there is none.

        Keepers of the deployment's earlier settings end.
        """
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["namespace"] == NAMESPACE and named["name"].startswith(self.successors.prefix):
                try:
                    keeper = ray.get_actor(named["name"], namespace=NAMESPACE)
                    if self._attach(keeper):
                        log.warning("the workers of an engine that died are taken over")
                        return keeper
                except (ValueError, RayError, OSError):  # it has ended meanwhile, or hangs
                    continue
        return None

    def _start(self) -> Any:
        node = ray.get_runtime_context().get_node_id()
        keeper = (
            ray.remote(Keeper)
            .options(
                name=self.successors.prefix + secrets.token_hex(8),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
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
            return False  # its window goes on when nobody connects
        connection = framing.connect(tuple(address), secret, _ATTACH_TIMEOUT_S)
        self._connection = connection
        threading.Thread(
            target=self._follow, args=(connection,), name="outrider-keeper", daemon=True
        ).start()
        return True


@dataclass(frozen=True)
class KeptRanks:
    """A `RankSource` whose actors the keeper owns."""

    link: KeeperLink
    key: str
    spec: WorkerSpec
    resources: ResourcesConfig

    def form(self, node: str, *, reuse: bool) -> Formed:
        formed: Formed = self._call_twice(
            lambda: self.link.call(
                "form",
                self.key,
                self.spec,
                self.resources,
                node,
                reuse,
                timeout_s=LOAD_TIMEOUT_S,
                may_start=True,
            )
        )
        self.link.holds(self, formed)
        return formed

    def drop(self) -> None:
        with contextlib.suppress(WorkerDiedError):
            self.link.call("drop", self.key, timeout_s=_SHUTDOWN_TIMEOUT_S)

    def spares(self) -> list[RankLocation]:
        try:
            found: list[RankLocation] = self.link.call(
                "spares", self.key, timeout_s=_STATS_TIMEOUT_S
            )
        except WorkerDiedError:
            return []
        return found

    def shutdown(self) -> None:
        self.link.holds(self, None)
        try:
            num_left = self.link.call("close", self.key, timeout_s=_SHUTDOWN_TIMEOUT_S)
        except WorkerDiedError:
            num_left = 0
        if num_left == 0:
            self.link.end()

    def _call_twice(self, call: Callable[[], Result]) -> Result:
        """A keeper that died is replaced once; more of it counts as a failed restart."""
        try:
            return call()
        except WorkerDiedError:
            if self.link.is_up:  # it is the workers that died
                raise
            return call()
