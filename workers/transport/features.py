"""Transport of features and verdicts from the target's worker: one way, ordered, never blocking.

`FeatureQueue` decouples the target's step from the transport. Within a process, the head takes
items directly from it. Otherwise, a thread sends them over a socket, with the tensors as raw bytes
or through a process group of two. The queue is bounded. Beyond `MAX_BYTES`, an item loses its
features but keeps the step, so that the head can mark the missing rows. Beyond `MAX_STEPS`, whole
steps are lost, which is detectable by a gap in `serial`.

A draft model reads only verdicts (`VerdictFeed`, `VerdictEnd`), between two messages of its engine.
They are hints: any may be lost, and nothing waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import WorkerDiedError, WorkerError
from ...scheduler.types import NO_INTS, IntArray, StepInput, Verdict
from ..collective import Collective, pair_store
from . import framing, wire
from .channel import LinkOffer, ListenFeatures, OpenFeatures

log = logging.getLogger(__name__)
MAX_BYTES = 1 << 28  # of queued features
MAX_STEPS = 256  # queued, with or without features
CONNECT_TIMEOUT_S = 10.0  # from the head's first wait for features
_JOIN_S = 1.0
_POLL_S = 0.0002
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


@dataclass(frozen=True, slots=True)
class Features:
    """One verified step, as sent to a head."""

    serial: int  # counts the steps of a link, from 0
    step: StepInput
    verdict: Verdict
    rows: IntArray  # [num_rows], flat rows of known tokens and accepted nodes
    hidden: tuple[Tensor, ...] | None  # per captured layer [num_rows, hidden_size]; None: lost
    ready: Any = None  # CUDA event after which `hidden` may be read

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.hidden or ())


class FeatureQueue:
    """Queued steps, oldest first. `put` never blocks; after `close` it drops items."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_steps: int = MAX_STEPS) -> None:
        self._max_bytes, self._max_steps = max_bytes, max_steps
        self._items: deque[Features] = deque()
        self._num_bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, item: Features) -> None:
        with self._changed:
            if self._closed:
                return
            if len(self._items) >= self._max_steps:
                self._items.clear()
                self._num_bytes = 0
            if self._num_bytes and self._num_bytes + item.num_bytes > self._max_bytes:
                item = replace(item, hidden=None, ready=None)
            self._items.append(item)
            self._num_bytes += item.num_bytes
            self._changed.notify()

    def take(self, timeout_s: float | None) -> Features | None:
        """Returns the next step; None if there is none (raises `WorkerDiedError` once closed)."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout_s)
            if self._items:
                item = self._items.popleft()
                self._num_bytes -= item.num_bytes
                return item
            if self._closed:
                raise WorkerDiedError("the feature link is closed")
            return None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._num_bytes = 0
            self._changed.notify_all()


class FeatureSender:
    """A thread that sends a `FeatureQueue` to another process; connects at the first step."""

    def __init__(
        self, queue: FeatureQueue, offer: LinkOffer, device: torch.device, timeout_s: float
    ) -> None:
        self._queue = queue
        self._offer = offer
        self._device = device
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None
        self._pair: Collective | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-features", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for a closed link's thread: the process must not exit during its teardown."""
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        try:
            while (item := self._queue.take(None)) is not None:
                if self._connection is None:
                    self._connect()
                self._send(item)
        except Exception as error:  # a broken link must not affect the target
            log.debug("a feature link ended: %s", error, exc_info=True)
        finally:
            self._queue.close()
            if self._pair is not None:
                self._pair.abort()
            if self._connection is not None:
                self._connection.close()

    def _connect(self) -> None:
        offer = self._offer
        assert offer.address is not None, "an offer from another process has an address"
        self._connection = framing.connect(offer.address, offer.secret, self._timeout_s)
        self._connection.settimeout(self._timeout_s)  # a hung head may also stop reading
        if offer.store is not None:
            store = pair_store(*offer.store, self._timeout_s)
            self._pair = Collective.pair(store, 0, self._timeout_s, self._device)

    def _send(self, item: Features) -> None:
        assert self._connection is not None
        hidden, shape = item.hidden, None
        if hidden is not None:
            shape = [str(hidden[0].dtype), len(hidden), hidden[0].shape[1]]
        header = [item.serial, item.step, item.verdict, item.rows, shape]
        framing.send(self._connection, wire.encode(header))
        if hidden is None:
            return
        if self._pair is not None and self._device.type == "cuda":
            self._send_from_gpu(hidden, item.ready, self._connection, self._pair)
        elif self._pair is not None:
            self._pair.send(torch.stack(hidden), 1)
        else:
            if item.ready is not None:
                item.ready.synchronize()
            for part in hidden:
                self._connection.sendall(_bytes_of(part))

    def _send_from_gpu(
        self,
        hidden: tuple[Tensor, ...],  # as in `Features`
        ready: Any,
        connection: socket.socket,
        pair: Collective,
    ) -> None:
        # A separate stream: a send to a dead head must not block the target's stream.
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)
            pair.send(torch.stack(hidden), 1)
            done = torch.cuda.Event()
            done.record(stream)
        deadline = time.monotonic() + self._timeout_s
        while not done.query():
            if _is_closed_by_peer(connection) or time.monotonic() > deadline:
                raise WorkerDiedError("the head's worker is gone")
            time.sleep(_POLL_S)


class SocketReceiver:
    """Accepts a `FeatureSender`'s connection and reads its items."""

    def __init__(self, host: str | None, device: torch.device, timeout_s: float) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._server, self._address = framing.listen(host)
        self._acceptor: framing.Acceptor | None = None
        self._store: Any = None
        self._pair: Collective | None = None
        self._connection: socket.socket | None = None
        self._connect_by: float | None = None  # monotonic clock

    def offer(self, secret: bytes, store_host: str | None) -> LinkOffer:
        """Returns the address it listens on; with a store, tensors come through a process group."""
        self._acceptor = framing.Acceptor(self._server, secret)
        store = None
        if store_host is not None:
            self._store = pair_store(store_host, 0, self._timeout_s)
            store = (store_host, self._store.port)
        return LinkOffer(address=self._address, secret=secret, store=store)

    def take(self, timeout_s: float) -> Features | None:
        """Does the same as `FeatureQueue.take`; raises `WorkerDiedError` if the link is broken."""
        now = time.monotonic()
        deadline = now + timeout_s
        if self._connect_by is None:
            self._connect_by = now + CONNECT_TIMEOUT_S
        try:
            if self._connection is None and not self._accept(timeout_s):
                if time.monotonic() >= self._connect_by:
                    raise WorkerDiedError("the target's worker did not connect")
                return None
            assert self._connection is not None
            self._connection.settimeout(max(0.0005, deadline - time.monotonic()))
            try:
                if not self._connection.recv(1, socket.MSG_PEEK):
                    raise WorkerDiedError("the target's worker closed the feature link")
            except TimeoutError:
                return None
            self._connection.settimeout(self._timeout_s)
            return self._read(self._connection)
        except (OSError, RuntimeError) as error:  # RuntimeError is raised by the process group
            raise WorkerDiedError(f"the feature link broke: {error}") from None

    def close(self) -> None:
        """Closes the link, which the sender detects."""
        if self._pair is not None:
            self._pair.abort()
        if self._connection is not None:
            self._connection.close()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        self._server.close()
        framing.unlink(self._address)

    def _accept(self, timeout_s: float) -> bool:
        try:
            assert self._acceptor is not None, "offer() must come first"
            self._connection = self._acceptor.next(timeout_s)
        except TimeoutError:
            return False
        self._stop_listening()
        if self._store is not None:
            self._pair = Collective.pair(self._store, 1, self._timeout_s, self._device)
        return True

    def _read(self, connection: socket.socket) -> Features:
        serial, step, verdict, rows, shape = wire.decode(framing.receive(connection))
        if shape is None:
            return Features(serial, step, verdict, rows, None)
        dtype, num_layers, width = shape
        device = self._device if self._pair is not None else torch.device("cpu")
        whole = torch.empty(num_layers, len(rows), width, dtype=_DTYPES[dtype], device=device)
        if self._pair is not None:
            self._pair.receive(whole, 0)
        else:
            framing.receive_into(connection, _bytes_of(whole))
        return Features(serial, step, verdict, rows, tuple(whole.unbind(0)))


def _bytes_of(part: Tensor) -> memoryview:  # contiguous, on the CPU
    return part.view(torch.uint8).numpy().reshape(-1).data


def _is_closed_by_peer(connection: socket.socket) -> bool:
    """Returns True if the peer, which never writes, closed its end."""
    timeout_s = connection.gettimeout()
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(timeout_s)


class VerdictFeed:
    """The target's end of a link to a draft model: sends every verdict as soon as it is known."""

    def __init__(self, message: OpenFeatures) -> None:
        offer = message.offer
        assert offer is not None, "a link leads somewhere"
        self._offer, self._timeout_s = offer, message.timeout_s
        self._connection: socket.socket | None = None
        self._closed = False
        if offer.queue is None:
            threading.Thread(target=self._connect, name="outrider-verdicts", daemon=True).start()

    def push(self, verdict: Verdict) -> None:
        """Sends the emitted tokens, if this does not block."""
        if self._closed:
            return
        starts = np.zeros_like(verdict.emitted_start)
        told = Verdict(verdict.step, verdict.emitted, verdict.emitted_start, NO_INTS, starts)
        if self._offer.queue is not None:
            self._offer.queue.put(told)
            return
        connection = self._connection
        if connection is None:
            return
        body = framing.frame(wire.encode(told))
        try:
            if connection.send(body, socket.MSG_DONTWAIT) < len(body):
                self.close()
        except BlockingIOError:  # the model does not read: it computes, or hangs
            return
        except OSError:
            self.close()

    def close(self) -> None:
        """Closes the link without waiting."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> None:
        offer = self._offer
        assert offer.address is not None, "an offer from another process has an address"
        try:
            self._connection = framing.connect(offer.address, offer.secret, self._timeout_s)
        except OSError as error:
            log.debug("a link for verdicts was not opened: %s", error)
        if self._closed:
            self.close()


class VerdictEnd:
    """A draft model's end, for the thread that answers its engine.

    The newest verdict is kept until one of the engine's messages waits for it, or until another
    verdict arrives.

    Args:
        host: address of this node.
        awaits: returns the step whose verdict is useful now; -1: none.
        take: handles that verdict.
    """

    def __init__(
        self, host: str, awaits: Callable[[], int], take: Callable[[Verdict], None]
    ) -> None:
        self._host, self._awaits, self._take = host, awaits, take
        self._newest: Verdict | None = None
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._came: queue.SimpleQueue[Verdict | socket.socket] = queue.SimpleQueue()
        self._server: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._reader: framing.FrameReader | None = None
        self._poll = select.poll()
        # Called by other threads when something has arrived.
        self.wake: Callable[[], object] = lambda: self._wake.send(b"!")

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that are readable when something has arrived."""
        connection = self._connection
        own = self._woken.fileno()
        return (own,) if connection is None else (own, connection.fileno())

    def listen(self, message: ListenFeatures) -> LinkOffer:
        """Opens a new link that replaces an earlier one."""
        self.close_links()
        if message.here:
            return LinkOffer(queue=self)
        server, address = framing.listen(self._host if message.remote else None)
        self._server, secret = server, secrets.token_bytes(32)
        work = (server, address, secret)
        name = "outrider-verdicts"
        threading.Thread(target=self._accept, args=work, name=name, daemon=True).start()
        return LinkOffer(address=address, secret=secret)

    def put(self, verdict: Verdict) -> None:
        """Receives a verdict from the target within one process."""
        self._came.put(verdict)
        self.wake()

    def take_in(self) -> None:
        """Reads what has arrived, and handles the awaited verdict; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        while not self._came.empty():
            came = self._came.get()
            if isinstance(came, Verdict):
                self._newest = came
            else:
                self._begin(came)
        self._read()
        newest = self._newest
        if newest is None or newest.step != self._awaits():
            return
        self._newest = None
        try:
            self._take(newest)
        except Exception:  # only the head start is lost, and no request waits for it
            log.warning("drafts behind a verdict failed", exc_info=True)

    def close_links(self) -> None:
        """Closes the link."""
        self._end()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._newest = None
        while not self._came.empty():
            came = self._came.get()
            if isinstance(came, socket.socket):
                came.close()

    def _begin(self, connection: socket.socket) -> None:
        self._end()
        connection.settimeout(_JOIN_S)  # for a frame that has begun to arrive
        self._connection, self._reader = connection, framing.FrameReader(connection)
        self._poll.register(connection, select.POLLIN)

    def _end(self) -> None:
        connection, self._connection, self._reader = self._connection, None, None
        if connection is not None:
            self._poll.unregister(connection)
            connection.close()

    def _read(self) -> None:
        try:
            while (reader := self._reader) is not None and (reader.has_data or self._poll.poll(0)):
                found = wire.decode(reader.receive())
                if not isinstance(found, Verdict):
                    raise WorkerError(f"expected a verdict, got {type(found).__name__}")
                self._newest = found
        except (OSError, WorkerError) as error:
            log.debug("a link for verdicts ended: %s", error)
            self._end()

    def _accept(self, server: socket.socket, address: framing.Address, secret: bytes) -> None:
        with contextlib.suppress(OSError, ValueError), server:  # the next link closes it
            self._came.put(framing.accept(server, secret, CONNECT_TIMEOUT_S))
            self.wake()
        framing.unlink(address)
