"""Shared n-gram pools over Ray: one named, detached actor per tokenizer, and one link per engine.

The actor is a `PoolStore`, which collects what every engine publishes. An engine's link exchanges
windows with it a few times a second in a thread of its own, so the step loop never waits for Ray. A
slow or lost pool costs only speed: there is at most one pending request, and an actor that died is
restarted empty.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ..drafters.lookup.pool import Differences, PoolStore, pack, unpack
from ..errors import ConfigError
from ..scheduler.types import IntArray
from .process import start_thread

log = logging.getLogger(__name__)
NAMESPACE = "outrider"
EXCHANGE_EVERY_S = 0.2  # two exchanges pass a window from one engine to another
MAX_HELD_TOKENS = 2**16  # waiting to be sent; and per tenant, waiting to be fetched
_START_TIMEOUT_S = 30.0
_SNAPSHOT_EVERY_S = 60.0
_MAX_TENANTS = 1024  # followed at once; the least recently polled one is dropped
_MAX_FAULTS = 8  # not yet taken
_FAILURES = (RayError, ValueError, OSError, ConfigError)


def actor_name(fingerprint: str) -> str:
    """Returns the actor's name; engines with different tokenizers have different pools."""
    return f"outrider-pool-{fingerprint[:32]}"


class RayPoolLink:
    """A drafter's link to the actor; only its thread waits for Ray.

    Raises:
        PoolSnapshotError: the initial snapshot is invalid, or of another tokenizer.
        ConfigError: the snapshot could not be saved.
    """

    def __init__(
        self,
        fingerprint: str,
        max_tokens: int,
        vocab_size: int,
        snapshot: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self._fingerprint = fingerprint
        self._sizes = (max_tokens, vocab_size)
        self._timeout_s = timeout_s
        self._snapshot = snapshot
        self._source = secrets.token_hex(8)
        self._actor: Any = None
        self._unanswered: Any = None  # a call that timed out; no other is made until it ends
        self._saved_at = time.monotonic()
        self._is_down = self._is_snapshot_bad = False
        self._epoch = ""
        self._lock = threading.Lock()  # guards the attributes below
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._outbox_tokens = 0
        self._inbox: dict[str, list[IntArray]] = {}
        self._cursors: OrderedDict[str, int] = OrderedDict()  # least recently polled first
        self._faults: deque[Exception] = deque(maxlen=_MAX_FAULTS)
        self._closed = threading.Event()
        try:
            actor = self._find()
            if snapshot is not None:
                self._answer(actor.open.remote(snapshot), _START_TIMEOUT_S)
            self._actor = actor
        except RayError as error:
            self._note(error)
        self._thread = start_thread("pool", self._run)

    def publish(self, tenant: str, tokens: IntArray) -> None:
        with self._lock:
            self._outbox.append((tenant, pack(tokens)))
            self._outbox_tokens += len(tokens)
            while self._outbox_tokens > MAX_HELD_TOKENS:
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
            return self._faults.popleft() if self._faults else None

    def shutdown(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2 * self._timeout_s)
        if self._thread.is_alive() or not ray.is_initialized():
            return
        try:
            self._exchange()
            if self._snapshot is not None:
                self._save()
        except _FAILURES as error:
            log.warning("the shared pool was not saved: %s", error)

    def _run(self) -> None:
        while not self._closed.wait(EXCHANGE_EVERY_S):
            self._work()

    def _work(self) -> None:
        try:
            self._exchange()
            late_s = time.monotonic() - self._saved_at
            if self._snapshot is not None and late_s > _SNAPSHOT_EVERY_S:
                self._save()
        except _FAILURES as error:
            self._note(error)
        else:
            self._is_down = False

    def _save(self) -> None:
        self._saved_at = time.monotonic()  # set even if saving fails, to avoid an immediate retry
        self._answer(self._connect().save.remote(self._snapshot))
        self._is_snapshot_bad = False

    def _exchange(self) -> None:
        """Sends queued windows and fetches new ones."""
        if not ray.is_initialized():  # do not start Ray here
            raise ConnectionError("Ray is not there")
        self._settle()
        actor = self._connect()
        with self._lock:
            published, self._outbox = list(self._outbox), deque()
            self._outbox_tokens = 0
            cursors = {
                tenant: cursor
                for tenant, cursor in self._cursors.items()
                if sum(map(len, self._inbox.get(tenant, ()))) < MAX_HELD_TOKENS
            }
        if not published and not cursors:
            return
        call = actor.exchange.remote(self._source, published, self._epoch, cursors)
        answer: Differences = self._answer(call)
        with self._lock:
            if answer.epoch != self._epoch:  # a new actor counts from 0
                self._epoch = answer.epoch
                self._cursors = OrderedDict.fromkeys(self._cursors, 0)
            for tenant, cursor in answer.cursors.items():
                if tenant in self._cursors:
                    self._cursors[tenant] = cursor
            for tenant, tokens in answer.windows:
                if tenant in self._cursors:  # not dropped meanwhile
                    self._inbox.setdefault(tenant, []).append(unpack(tokens))

    def _find(self) -> Any:
        """Returns the actor, which is created if there is none."""
        return (
            ray.remote(PoolStore)
            .options(
                name=actor_name(self._fingerprint),
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
            )
            .remote(self._fingerprint, *self._sizes)
        )

    def _connect(self) -> Any:
        """Returns the actor; a lost one is looked up again and loads the snapshot."""
        if self._actor is None:
            actor = self._find()
            if self._snapshot is not None:
                self._warm(actor)
            self._actor = actor
        return self._actor

    def _warm(self, actor: Any) -> None:
        """Loads the snapshot; an invalid one is a fault, and the pool starts without it."""
        try:
            self._answer(actor.open.remote(self._snapshot))
            self._is_snapshot_bad = False
        except (ConfigError, RayTaskError) as error:
            if not self._is_snapshot_bad:
                log.warning("the shared pool goes on without its snapshot: %s", error)
                with self._lock:
                    self._faults.append(error)
            self._is_snapshot_bad = True

    def _answer(self, call: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(call, timeout=timeout_s or self._timeout_s)
        except GetTimeoutError:
            self._unanswered = call
            raise
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise

    def _settle(self) -> None:
        """Waits for a call that timed out, so that calls do not accumulate at the actor.

        Its windows arrive with the next exchange.
        """
        if self._unanswered is not None:
            done, _ = ray.wait([self._unanswered], timeout=self._timeout_s)
            if not done:
                raise GetTimeoutError("the shared pool does not answer")
            self._unanswered = None

    def _note(self, error: Exception) -> None:
        """Records a failure once until the pool works again; the actor is looked up anew."""
        if not isinstance(error, GetTimeoutError):  # a slow actor is kept
            self._actor = None
        with self._lock:
            if not self._is_down:
                self._faults.append(error)
        self._is_down = True
