"""Shared n-gram pools over Ray: one named, detached actor per tokenizer, and each engine's link.

The actor gathers what every engine publishes (`drafters/pool.py`). An engine's link talks to it
from a thread of its own a few times a second, so that the step loop never waits for Ray. A pool
that is slow or lost costs speed only: it is made again, empty, and filled by what is served next.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ..drafters.pool import Differences, PoolStore, pack, unpack
from ..errors import PoolSnapshotError
from ..scheduler.types import IntArray

log = logging.getLogger(__name__)
NAMESPACE = "outrider"
_INTERVAL_S = 0.2
_TIMEOUT_S = 5.0
_SNAPSHOT_EVERY_S = 60.0
_MAX_HELD_TOKENS = 2**16  # that wait to be sent, and per tenant to be fetched
_MAX_TENANTS = 1024  # followed at once; the one asked for longest ago is dropped


def actor_name(fingerprint: str) -> str:
    """Engines whose tokenizers differ have different pools."""
    return f"outrider-pool-{fingerprint[:16]}"


class PoolActor:
    """The store as a Ray actor."""

    def __init__(self, fingerprint: str, max_tokens: int) -> None:
        self._store = PoolStore(fingerprint, max_tokens)

    def warm(self, path: str) -> None:
        """Reads the snapshot, unless there is text already (raises as `PoolStore.load`)."""
        if self._store.num_tokens == 0:
            self._store.load(path)

    def exchange(
        self, source: str, published: list[tuple[str, bytes]], epoch: str, cursors: dict[str, int]
    ) -> Differences:
        return self._store.exchange(source, published, epoch, cursors)

    def save(self, path: str) -> None:
        self._store.save(path)


class RayPoolLink:
    """A drafter's line to the actor; its thread is the only one that waits for Ray.

    Raises:
        PoolSnapshotError: the snapshot to start from is not one, or of other tokens.
    """

    def __init__(self, fingerprint: str, max_tokens: int, snapshot: str | None = None) -> None:
        self._fingerprint = fingerprint
        self._max_tokens = max_tokens
        self._snapshot = snapshot
        self._source = secrets.token_hex(8)
        self._actor: Any = None
        self._epoch = ""
        self._lock = threading.Lock()  # of all below
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._outbox_tokens = 0
        self._inbox: dict[str, list[IntArray]] = {}
        self._cursors: OrderedDict[str, int] = OrderedDict()  # asked for longest ago first
        self._fault: Exception | None = None
        self._down = False
        self._closed = threading.Event()
        try:
            self._connect()
        except RayError as error:
            self._note(error)
        self._thread = threading.Thread(target=self._run, name="outrider-pool", daemon=True)
        self._thread.start()

    def publish(self, tenant: str, tokens: IntArray) -> None:
        with self._lock:
            self._outbox.append((tenant, pack(tokens)))
            self._outbox_tokens += len(tokens)
            while self._outbox_tokens > _MAX_HELD_TOKENS:
                self._outbox_tokens -= len(self._outbox.popleft()[1]) // 4

    def poll(self, tenant: str) -> list[IntArray]:
        with self._lock:
            self._cursors.setdefault(tenant, 0)
            self._cursors.move_to_end(tenant)
            if len(self._cursors) > _MAX_TENANTS:
                dropped, _ = self._cursors.popitem(last=False)
                self._inbox.pop(dropped, None)
            return self._inbox.pop(tenant, [])

    def take_fault(self) -> Exception | None:
        with self._lock:
            fault, self._fault = self._fault, None
            return fault

    def shutdown(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2 * _TIMEOUT_S)
        if self._thread.is_alive() or not ray.is_initialized():
            return
        try:
            self._exchange()
            if self._snapshot is not None:
                ray.get(self._connect().save.remote(self._snapshot), timeout=_TIMEOUT_S)
        except (RayError, OSError, PoolSnapshotError) as error:
            log.warning("the shared pool was not saved: %s", error)

    def _run(self) -> None:
        saved_at = time.monotonic()
        while not self._closed.wait(_INTERVAL_S):
            try:
                self._exchange()
                if self._snapshot is not None and time.monotonic() - saved_at > _SNAPSHOT_EVERY_S:
                    saved_at = time.monotonic()
                    ray.get(self._connect().save.remote(self._snapshot), timeout=_TIMEOUT_S)
            except (RayError, ValueError, OSError, PoolSnapshotError) as error:
                self._note(error)
            else:
                self._down = False

    def _exchange(self) -> None:
        """Sends what waits and fetches what is lacking."""
        if not ray.is_initialized():  # never start a Ray from here
            raise ConnectionError("Ray is not there")
        actor = self._connect()
        with self._lock:
            published, self._outbox = list(self._outbox), deque()
            self._outbox_tokens = 0
            cursors = {
                tenant: cursor
                for tenant, cursor in self._cursors.items()
                if sum(map(len, self._inbox.get(tenant, ()))) < _MAX_HELD_TOKENS
            }
        if not published and not cursors:
            return
        call = actor.exchange.remote(self._source, published, self._epoch, cursors)
        answer: Differences = ray.get(call, timeout=_TIMEOUT_S)
        with self._lock:
            if answer.epoch != self._epoch:  # another actor counts from the start
                self._epoch = answer.epoch
                self._cursors = OrderedDict.fromkeys(self._cursors, 0)
            for tenant, cursor in answer.cursors.items():
                if tenant in self._cursors:
                    self._cursors[tenant] = cursor
            for tenant, tokens in answer.windows:
                self._inbox.setdefault(tenant, []).append(unpack(tokens))

    def _connect(self) -> Any:
        """The actor, made if there is none."""
        if self._actor is None:
            actor: Any = (
                ray.remote(PoolActor)
                .options(
                    name=actor_name(self._fingerprint),
                    namespace=NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=0,
                )
                .remote(self._fingerprint, self._max_tokens)
            )
            if self._snapshot is not None:
                try:
                    ray.get(actor.warm.remote(self._snapshot), timeout=_TIMEOUT_S)
                except RayTaskError as error:
                    if isinstance(error.cause, PoolSnapshotError):
                        raise error.cause from None
                    raise
            self._actor = actor
        return self._actor

    def _note(self, error: Exception) -> None:
        """Something failed: said once until it works again; the actor is looked up anew."""
        self._actor = None
        with self._lock:
            if not self._down:
                self._fault = error
        self._down = True
