"""Workers that outlive their engine, so that the engine's successor need not load them again.

A `Keeper` is a small detached actor, one per engine of a server. It makes and ends the placement
groups, ranks and spare processes, which are detached, too. A Unix socket shows the keeper the death
of its engine. A keeper without an engine waits for the next replica of the same deployment, and
ends with its workers after `keep_workers_s`. If a keeper dies, its engine starts another, which
adopts the ranks (`keeper_link.py`); workers without keeper and engine end (`rank.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from hashlib import sha256

import ray

from ..config import ResourcesConfig
from ..errors import WorkerDiedError
from ..workers.spec import RankLocation, WorkerSpec
from ..workers.transport import framing
from .rank_actors import Formed, RankActors

log = logging.getLogger(__name__)
_ATTACH_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Successors:
    """Which engines may take each other's workers over.

    Args:
        deployment: application and deployment; unlike others, these replace each other.
        settings: digest of the engine's configuration.
        wait_s: how long workers wait for the next engine.
    """

    deployment: str
    settings: str
    wait_s: float

    @property
    def prefix(self) -> str:
        """What the names of the keepers of these engines begin with."""
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
        self._engine: socket.socket | None = None  # of the engine that has connected
        self._noted: int | None = None
        self._secret = secrets.token_bytes(32)
        self._end: threading.Timer | None = None

    def attach(self, settings: str) -> tuple[framing.Address, bytes, str] | None:
        """Where an engine connects, and the node; None where this keeper has one, or has to end."""
        with self._lock:
            if self._attached and not self._has_hung_up():
                return None
            if settings != self._successors.settings:  # the deployment was changed
                self._end_in(0.0)
                return None
            self._attached = True
            if self._end is not None:
                self._end.cancel()
            self._engine = None
            self._turn += 1
            turn = self._turn
        server, address = framing.listen(None)
        threading.Thread(
            target=self._follow, args=(server, address, turn), name="outrider-engine", daemon=True
        ).start()
        return address, self._secret, node_id()

    def note(self, vocab_size: int | None) -> None:
        self._noted = vocab_size

    def recall(self) -> int | None:
        return self._noted

    def form(
        self, key: str, spec: WorkerSpec, resources: ResourcesConfig, node: str, reuse: bool
    ) -> Formed:
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = RankActors(spec, resources, keeper=self._itself)
        return group.form(node, reuse=reuse)

    def adopt(self, key: str, spec: WorkerSpec, resources: ResourcesConfig, formed: Formed) -> None:
        """Takes over ranks whose keeper has died; they go on meanwhile."""
        group = RankActors(spec, resources, keeper=self._itself)
        with self._lock:
            self._groups[key] = group
        group.adopt(formed)

    def drop(self, key: str) -> None:
        if key in self._groups:  # a keeper that was started for another group does not have it yet
            self._groups[key].drop()

    def spares(self, key: str) -> list[RankLocation]:
        return self._groups[key].spares() if key in self._groups else []

    def close(self, key: str) -> int:
        """Ends a group; how many are left."""
        with self._lock:
            group = self._groups.pop(key, None)
        if group is not None:
            group.shutdown()
        return len(self._groups)

    def _follow(self, server: socket.socket, address: framing.Address, turn: int) -> None:
        """Returns when the engine is gone; from then on there may be another."""
        with (
            contextlib.suppress(OSError, WorkerDiedError),
            server,
            framing.accept(server, self._secret, _ATTACH_TIMEOUT_S) as engine,
        ):
            framing.unlink(address)
            with self._lock:
                if turn == self._turn:
                    self._engine = engine
            framing.receive(engine)  # an engine sends nothing; this returns at its end
        framing.unlink(address)
        with self._lock:
            if turn == self._turn:
                self._attached, self._engine = False, None
                self._end_in(self._successors.wait_s)

    def _has_hung_up(self) -> bool:
        """Whether the engine is gone, although its thread has not noticed yet."""
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
    """Of this process."""
    return str(ray.get_runtime_context().get_node_id())
