"""Tokens to the edge: one socket per pair of engine replica and ingress, one message per step.

An ingress listens (`EdgeListener`); a replica that gets a request from it connects back once
(`EdgeLink`, a sink of the engine) and pushes each step's deltas for all of that ingress's requests
together. Control stays with Ray: see `serve_client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, cast

import msgpack

from ...errors import WorkerDiedError, WorkerError
from ...scheduler.types import Delta, SpeculationUsage
from ...workers.transport import framing
from ...workers.transport.wire import decode, encode
from ..process import start_thread
from .frames import FrameListener, FrameProtocol
from .resume_tokens import TokenStore

log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 10.0
MAX_WAITING_DELTAS = 1 << 16  # for one ingress: seconds of a full batch's tokens
# What of a delta, and of its usage, a flat list has.
_FLAT = attrgetter(
    "request_id",
    "token_ids",
    "num_accepted",
    "finish_reason",
    "stop_token_id",
    "num_cached_tokens",
)
_USAGE = attrgetter(*(each.name for each in fields(SpeculationUsage)))


def encode_deltas(deltas: Sequence[Delta]) -> bytes:
    """For `decode_deltas`. The common delta, tokens and counts, is a flat list, others are records.

    A record of `workers/transport/wire.py` costs some 20 us to encode and as much to decode, a flat
    list 1 us; a full batch sends one delta per sequence and step.
    """
    return bytes(msgpack.packb([_flat(delta) for delta in deltas], use_bin_type=True))


def decode_deltas(data: bytes) -> list[Delta]:
    """The deltas in `data`.

    Raises:
        WorkerError: `data` is malformed.
    """
    try:
        return [_delta(given) for given in msgpack.unpackb(data, raw=False)]
    except (msgpack.UnpackException, ValueError, TypeError) as error:
        raise WorkerError(f"malformed message of {len(data)} bytes: {error}") from None


def _flat(delta: Delta) -> list[Any] | bytes:
    if (
        delta.logprobs
        or delta.trace is not None
        or delta.prompt_logprobs is not None
        or delta.times is not None
        or delta.error is not None
    ):
        return encode(delta)
    return [*_FLAT(delta), None if delta.usage is None else _USAGE(delta.usage)]


def _delta(given: list[Any] | bytes) -> Delta:
    if isinstance(given, bytes):
        return cast("Delta", decode(given))
    request_id, token_ids, num_accepted, reason, stop_token_id, num_cached, counts = given
    usage = None if counts is None else SpeculationUsage(*counts)
    ids = tuple(token_ids)
    return Delta(request_id, ids, num_accepted, reason, stop_token_id, (), num_cached, usage)


class EdgeLostError(WorkerError):
    """The connection between a replica and an ingress broke; the request can be sent again."""


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """The address to which tokens for an ingress are sent."""

    ingress: str
    node: str
    unix: framing.Address
    tcp: framing.Address
    secret: bytes


class Inbox:
    """The deltas of one request, for one reader; None among them is that reader's own mark.

    An `asyncio.Queue` with what one reader needs: it is woken once per token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[Delta | None] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put_nowait(self, item: Delta | None) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Delta | None:
        while not self._items:
            self._reader = self._loop.create_future()
            await self._reader
        return self._items.popleft()


class EdgeListener:
    """The ingress's side: deltas of any replica, given out by request.

    Args:
        ingress: a name that no other ingress has.
        node: the node's id; replicas there use the Unix socket.
        host: this node's address, for replicas elsewhere.
        loop: the event loop that the requests' queues belong to.
    """

    def __init__(self, ingress: str, node: str, host: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[str, Inbox] = {}
        self._listener = FrameListener(host, loop, lambda: FrameProtocol(self._give_out, _ended))
        unix, tcp, secret = self._listener.unix, self._listener.tcp, self._listener.secret
        self.reply_to = ReplyTo(ingress, node, unix, tcp, secret)

    def open(self, request_id: str) -> Inbox:
        """Where the deltas of one request will come."""
        opened = Inbox(self._loop)
        self._queues[request_id] = opened
        return opened

    def close(self, request_id: str) -> None:
        """Forgets a request; what still comes for it is dropped."""
        self._queues.pop(request_id, None)

    def shutdown(self) -> None:
        """Stops listening."""
        self._listener.shutdown()

    def _give_out(self, message: bytes) -> None:
        for delta in decode_deltas(message):
            waiting = self._queues.get(delta.request_id)
            if waiting is not None:
                waiting.put_nowait(delta)


def _ended(error: Exception | None) -> None:
    log.info("a replica's connection has ended: %s", error)


class EdgeLink:
    """The replica's side: a sink for all requests of one ingress.

    The engine's loop writes what the socket takes at once. The rest, and what comes behind it, is
    written by a thread, what piles up meanwhile as one message, so that the loop never waits.
    Another thread notices when the ingress is gone. One that does not read is given up at
    `MAX_WAITING_DELTAS`: its requests fail here with `EdgeLostError`, and it replays them from the
    tokens that it has once it reads again.

    Raises:
        EdgeLostError: the ingress cannot be reached from here; from another replica it may be.
    """

    def __init__(self, reply_to: ReplyTo, node: str, store: TokenStore | None = None) -> None:
        address = reply_to.unix if reply_to.node == node else reply_to.tcp
        self._store = store
        try:
            self._socket = framing.connect(address, reply_to.secret, _CONNECT_TIMEOUT_S)
        except OSError as error:
            raise EdgeLostError(f"the ingress cannot be reached at {address}: {error}") from None
        # What is left of a frame that was written in part, or nothing; and the deltas.
        self._outbox: queue.SimpleQueue[tuple[bytes, list[Delta]] | None] = queue.SimpleQueue()
        self._num_put = self._num_taken = 0  # deltas; each counted by one thread alone
        self._pending: dict[str, Future[Delta]] = {}
        self._lock = threading.Lock()
        self._lost = False
        for name, target in (("write", self._write), ("watch", self._watch)):
            start_thread(f"edge-{name}", target)

    @property
    def lost(self) -> bool:
        return self._lost

    def expect(self, request_id: str) -> Future[Delta]:
        """Done with the last delta once that has been sent; fails where the link is lost."""
        future: Future[Delta] = Future()
        with self._lock:
            if self._lost:
                raise EdgeLostError("the connection to the ingress is lost")
            self._pending[request_id] = future
        return future

    def forget(self, request_id: str) -> None:
        """Expects nothing more of a request, which may never have begun."""
        with self._lock:
            self._pending.pop(request_id, None)

    def deliver(self, deltas: list[Delta]) -> None:
        if self._store is not None:
            self._store.record(deltas)  # before any of them can reach a client
        if self._lost:
            return
        if self._num_put == self._num_taken:  # the thread has nothing to write
            self._write_at_once(deltas)
            return
        self._num_put += len(deltas)
        if self._num_put - self._num_taken > MAX_WAITING_DELTAS:
            log.warning("an ingress does not read its tokens; its requests end here")
            self.close()
            return
        self._outbox.put((b"", deltas))

    def close(self) -> None:
        """Hangs up; requests that still run fail with `EdgeLostError`."""
        with self._lock:
            self._lost = True
            pending, self._pending = self._pending, {}
        self._outbox.put(None)
        # A thread in `recv` is woken by `shutdown`, not by `close`.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for future in pending.values():
            _settle(partial(future.set_exception, EdgeLostError("the ingress is gone")))

    def _write_at_once(self, deltas: list[Delta]) -> None:
        frame = framing.frame(_encoded(deltas))
        try:
            num_sent = self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            num_sent = 0
        except OSError as error:
            log.warning("the connection to an ingress is lost: %s", error)
            self.close()
            return
        if num_sent == len(frame):
            self._settle_finished(deltas)
        else:
            self._num_put += len(deltas)
            self._outbox.put((frame[num_sent:], deltas))

    def _write(self) -> None:
        try:
            while True:
                item = self._outbox.get()
                if item is None:
                    return
                rest, deltas = item
                if not rest:
                    deltas = [*deltas]
                    while not self._outbox.empty():
                        more = self._outbox.get()
                        if more is None:
                            return
                        assert not more[0], "written at once behind others"
                        deltas += more[1]
                    rest = framing.frame(_encoded(deltas))
                self._socket.sendall(rest)
                self._num_taken += len(deltas)
                self._settle_finished(deltas)
        except OSError as error:
            log.warning("the connection to an ingress is lost: %s", error)
            self.close()

    def _settle_finished(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                with self._lock:
                    future = self._pending.pop(delta.request_id, None)
                if future is not None:
                    _settle(partial(future.set_result, delta))

    def _watch(self) -> None:
        try:
            while True:
                framing.receive(self._socket)  # an ingress sends nothing; this returns at its end
        except (OSError, WorkerDiedError):
            if not self._lost:
                self.close()


def _encoded(deltas: list[Delta]) -> bytes:
    """Without failures: the pending call raises those, with their types."""
    return encode_deltas([delta for delta in deltas if delta.error is None])


def _settle(call: Callable[[], None]) -> None:
    """A future whose waiter was cancelled takes no result."""
    with contextlib.suppress(InvalidStateError):
        call()
