"""The step channel over persistent framed sockets, and a rank's end of it.

A message is encoded once and written to every rank of the engine's node, and to one rank of every
other node, which forwards it. A rank that is gone closes its socket.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import WorkerDiedError, WorkerError
from . import framing, wire
from .channel import (
    Beside,
    Channel,
    Handler,
    NoAnswerError,
    PendingReply,
    Raised,
    error_of,
    guarded,
)
from .framing import FrameReader


def num_cores() -> int:
    """Returns the number of cores of the process's affinity, or the cgroup v2 quota if lower."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().strip().partition(" ")
        if limit.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(limit) / int(period)))
    return max(1, cores)


Events = list[tuple[int, int]]

SPIN_S = 2e-3  # a step of 32 sequences is planned in less
_LEAD_S = 5e-4  # lead time before the usual end of a wait
_FORGET = 0.2  # weight of the last wait in the average


class Lookout:
    """Waits for events of `poll`, spinning for up to `spin_s` seconds of each wait.

    A sleeping thread wakes up 50 to 100 us after its message has arrived, with cold caches. So both
    ends of the step channel poll for a moment before they sleep (the bounded spin of Karlin et al.
    1991, doi:10.1145/121132.286599), and yield the core between two polls. On a single core,
    nothing spins, because the sender could not run meanwhile.
    """

    def __init__(self, poll: select.poll, spin_s: float) -> None:
        self.spin_s = spin_s if num_cores() > 1 else 0.0
        self._poll = poll.poll
        self._usual_s = 0.0

    def look(self, timeout_s: float) -> Events:
        """Returns events within `timeout_s` and `spin_s` without sleeping; polls at least once."""
        until_s = time.perf_counter() + min(self.spin_s, timeout_s)
        while not (found := self._poll(0)) and time.perf_counter() < until_s:
            os.sched_yield()
        return found

    def wait(self, timeout_s: float) -> Events:
        """Returns events within `timeout_s`; sleeps first, then spins near the usual end."""
        if not self.spin_s:
            return self._poll(timeout_s * 1e3)
        begin_s = time.perf_counter()
        asleep_ms = int(min(self._usual_s - _LEAD_S, timeout_s) * 1e3)  # poll takes whole ones
        found = self._poll(asleep_ms) if asleep_ms > 0 else []
        if not found:
            found = self.look(timeout_s)
        if not found:
            left_s = begin_s + timeout_s - time.perf_counter()
            found = self._poll(max(0.0, left_s) * 1e3)
        self._usual_s += _FORGET * (time.perf_counter() - begin_s - self._usual_s)
        return found


def routes(
    nodes: Sequence[str],  # of every rank; ranks of a node are neighbours
    here: str,  # the engine's
) -> dict[int, tuple[int, ...]]:
    """Returns the ranks that the engine connects to, in order, with the followers of each.

    The engine sends a step to all ranks of its own node. On every other node, it sends the step
    only to the first rank, the leader, which forwards it to its followers.
    """
    first: dict[str, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for rank, node in enumerate(nodes):
        leader = rank if node == here else first.setdefault(node, rank)
        found[leader] = (*found.get(leader, ()), rank) if leader != rank else ()
    return found


class RankEnd:
    """A rank's end of the step channel, with the connections to its followers if it leads.

    A leader forwards each frame unchanged, before it computes, and forwards its followers' answers,
    which are errors. When a follower is gone, the leader closes its own connection; when its
    connection ends, it closes its followers'. Heartbeats are not forwarded; every rank sends its
    own.

    Args:
        connection: to the engine, or to the leader.
        followers: they are closed at the end; the connection is not.
        spin_s: how long to spin for a message before sleeping.
    """

    def __init__(
        self,
        connection: socket.socket,
        followers: Sequence[socket.socket] = (),
        spin_s: float = 0.0,
    ) -> None:
        self._connection = connection
        self._followers = list(followers)
        self._reader = FrameReader(connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._lookout = Lookout(self._poll, spin_s)
        self._writes = threading.Lock()  # for answers of the rank and of its followers
        self._beside: tuple[int, ...] = ()  # further descriptors to watch

    def __enter__(self) -> RankEnd:
        for follower in self._followers:
            threading.Thread(
                target=self._relay, args=(follower,), name="outrider-follower", daemon=True
            ).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for follower in self._followers:
            with contextlib.suppress(OSError):  # already gone
                follower.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
            follower.close()

    def receive(self) -> bytes:
        """Returns the next message after forwarding it (raises `WorkerDiedError`, OSError)."""
        if not self._reader.has_data:
            self._lookout.look(self._lookout.spin_s)
        body = self._reader.receive()
        for follower in self._followers:
            framing.send(follower, body)
        return body

    def has_message(self) -> bool:
        """Whether a message has begun to arrive, or the connection has ended."""
        return self._reader.has_data or self._is_own(self._poll.poll(0))

    def attend(self, beside: Beside) -> None:
        """Lets `beside` process its messages until a message of the channel begins to arrive."""
        while not self.has_message():
            beside.take_in()
            for number in self._beside:
                self._poll.unregister(number)
            self._beside = beside.descriptors
            for number in self._beside:
                self._poll.register(number, select.POLLIN)
            if self._is_own(self._lookout.look(self._lookout.spin_s) or self._poll.poll()):
                return

    def _is_own(self, events: Events) -> bool:
        """Returns True if one of the events is of the connection."""
        return any(number == self._connection.fileno() for number, _ in events)

    def answer(self, body: bytes) -> None:
        """Sends an answer (raises OSError)."""
        with self._writes:
            framing.send(self._connection, body)

    def _relay(self, follower: socket.socket) -> None:
        """Forwards a follower's answers; when it is gone, closes this connection."""
        with contextlib.suppress(OSError, WorkerDiedError):
            reader = FrameReader(follower)
            while True:
                self.answer(reader.receive())
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


_LOOK_S = 5e-5  # between two polls for the next message and the device


class SocketChannel(Channel):
    """The engine's end of the ranks' sockets, rank 0's first.

    Args:
        num_ranks: ranks behind the connections, including those that a leader forwards to; None:
            one behind each connection.
        spin_s: how long to spin for an answer, around its usual time, before sleeping; only if the
            ranks have nothing else to do after their answer.
    """

    def __init__(
        self,
        connections: Sequence[socket.socket],
        num_ranks: int | None = None,
        spin_s: float = SPIN_S,
    ) -> None:
        super().__init__()
        self._connections = list(connections)
        self._num_ranks = num_ranks or len(self._connections)
        # The reader stays open after `close`, so that a pending call wakes up.
        self._wake, self._wake_reader = socket.socketpair()
        self._timeout_s: float | None = None  # of the connections
        self._waiting = select.poll()  # `selectors` would take several times as long a step
        self._readers = {each.fileno(): FrameReader(each) for each in self._connections}
        self._usual = Lookout(self._waiting, spin_s)
        self._num_pending = 0  # unanswered messages
        for number in (self._wake_reader.fileno(), *self._readers):
            self._waiting.register(number, select.POLLIN)

    def _send(self, message: Any, timeout_s: float) -> None:
        self._require_alive()
        body = wire.encode(message)
        self.sent_bytes = len(body)
        try:
            if timeout_s != self._timeout_s:
                for connection in self._connections:
                    connection.settimeout(timeout_s)  # a hung rank may also stop reading
                self._timeout_s = timeout_s
            for connection in self._connections:
                framing.send(connection, body)
            self._num_pending += 1
        except OSError as error:
            raise WorkerDiedError(self._dead or f"a rank is gone: {error}") from None

    def _receive(self, timeout_s: float) -> Any:
        self._require_alive()
        reader = self._next_reader(timeout_s)
        try:
            body = reader.receive()
            ok, rank, reply = wire.decode(body)
            self.received_bytes = len(body)
            self._num_pending -= 1
        except (OSError, WorkerDiedError) as error:
            raise WorkerDiedError(self._dead or f"a rank is gone: {error}") from None
        if not ok:
            lacks_memory, text = reply
            if self._num_ranks > 1:  # the others are stuck in a collective,
                self._dead = text  # and may answer this message later
            raise error_of(lacks_memory, f"rank {rank}: {text}")
        return reply  # without an error only rank 0 answers

    def _next_reader(self, timeout_s: float) -> FrameReader:
        """Returns the reader of a connection with an answer; raises as `receive` does."""
        for reader in self._readers.values():
            if reader.has_data:
                return reader
        # A rank whose next message has arrived does not wait for this answer to be read.
        is_awaited = self._num_pending <= 1
        found = self._usual.wait(timeout_s) if is_awaited else self._waiting.poll(timeout_s * 1e3)
        ready = [number for number, _ in found]
        if not ready:
            raise NoAnswerError
        if self._dead is not None or any(number not in self._readers for number in ready):
            raise WorkerDiedError(self._dead or "killed")
        return self._readers[ready[0]]

    def kill(self, reason: str) -> None:
        self._dead = reason
        with contextlib.suppress(OSError):  # already closed: no call is pending
            self._wake.send(b"!")
        for connection in self._connections:  # a call may also wait in the middle of a frame
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.kill(self._dead or "closed")
        for connection in [*self._connections, self._wake]:
            connection.close()


def serve(
    connection: socket.socket,
    rank: int,
    handler: Handler,
    followers: Sequence[socket.socket] = (),  # of a leader
    spin_s: float = SPIN_S,
    beside: Beside | None = None,
) -> None:
    """A rank's end: answers messages in order until the engine closes the connection.

    Messages beside the channel are processed while none of the channel is waiting. While a device
    computes a reply (`PendingReply`), the next message is handled if it has arrived.
    """
    with (
        RankEnd(connection, followers, spin_s) as end,
        contextlib.suppress(OSError, WorkerDiedError),
    ):
        pending: PendingReply | None = None
        while True:
            if pending is not None and not _arrives_before(end, pending):
                pending = _answer(end, rank, *guarded(PendingReply.result, pending))
                continue
            if beside is not None and pending is None:
                end.attend(beside)
            reply, error = guarded(handler, wire.decode(end.receive()))
            if pending is not None:
                _answer(end, rank, *guarded(PendingReply.result, pending))
            pending = _answer(end, rank, reply, error)


def _arrives_before(end: RankEnd, pending: PendingReply) -> bool:
    """Returns True if a message arrives before the reply is ready."""
    while not pending.is_ready:
        if end.has_message():
            return True
        time.sleep(_LOOK_S)
    return False


def _answer(end: RankEnd, rank: int, reply: Any, error: Raised | None) -> PendingReply | None:
    """Sends a reply or an error; returns a pending reply instead."""
    if isinstance(reply, PendingReply):
        return reply
    if rank == 0 or error is not None:
        end.answer(wire.encode((error is None, rank, reply if error is None else error)))
    return None


class SharedEnd:
    """A rank's end of the step channels of any number of engines, which take turns.

    Each engine has a connection for steps, which is a lease, and one for heartbeats. An engine that
    stops in the middle of a message, or does not read, is dropped after a timeout, for which the
    others wait.

    Args:
        servers: sockets to which engines connect.
        secret: the secret that they must send.
        handler: takes the number of a lease and its message; None: the lease has ended.
    """

    def __init__(
        self, servers: Sequence[socket.socket], secret: bytes, handler: Callable[[int, Any], Any]
    ) -> None:
        self._handler = handler
        self._joined: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._leases: dict[int, tuple[int, socket.socket, FrameReader]] = {}  # by descriptor
        self._num_leases = 0
        for server in servers:
            threading.Thread(
                target=self._accept,
                args=(framing.Acceptor(server, secret),),
                name="outrider-accept",
                daemon=True,
            ).start()

    def run(self) -> None:
        """Answers messages, one of each engine in turn; never returns."""
        while True:
            waiting = [number for number, (*_, reader) in self._leases.items() if reader.has_data]
            ready = [number for number, _ in self._poll.poll(0 if waiting else None)]
            for number in {*waiting, *ready}:
                if number != self._woken.fileno():
                    self._answer_one(number)
                    continue
                self._woken.recv(4096)
                while not self._joined.empty():
                    self._begin(self._joined.get())

    def _accept(self, acceptor: framing.Acceptor) -> None:
        while True:
            with contextlib.suppress(OSError, WorkerDiedError):  # includes TimeoutError
                connection = acceptor.next(_ACCEPT_S)
                connection.settimeout(_SHARED_TIMEOUT_S)
                if framing.receive(connection, max_bytes=16) == framing.STEPS:
                    self._joined.put(connection)
                    self._wake.send(b"!")
                else:
                    threading.Thread(
                        target=_beat, args=(connection,), name="outrider-heartbeat", daemon=True
                    ).start()

    def _begin(self, connection: socket.socket) -> None:
        lease, self._num_leases = self._num_leases, self._num_leases + 1
        self._leases[connection.fileno()] = (lease, connection, FrameReader(connection))
        self._poll.register(connection, select.POLLIN)

    def _answer_one(self, number: int) -> None:
        lease, connection, reader = self._leases[number]
        try:
            message = wire.decode(reader.receive())
            reply, error = guarded(lambda given: self._handler(lease, given), message)
            framing.send(
                connection, wire.encode((error is None, 0, reply if error is None else error))
            )
        except (OSError, WorkerError):  # it has ended, is too slow, or sends invalid data
            del self._leases[number]
            self._poll.unregister(number)
            connection.close()
            self._handler(lease, None)


_ACCEPT_S = 3600.0
_SHARED_TIMEOUT_S = 5.0


def _beat(connection: socket.socket) -> None:
    with connection:
        beat(connection, threading.Event())


# -- heartbeats of ranks: one byte every `BEAT_S`, from a separate thread and connection
#
# A rank that computes for minutes keeps sending them; one that is stopped or unreachable sends none
# and is detected within seconds, whether or not a step is running.


BEAT_S = 0.5
_SEND_TIMEOUT_S = 5.0  # for an engine that does not read


def beat(connection: socket.socket, stopped: threading.Event) -> None:
    """The rank's end: sends until `stopped` is set or the engine closes the connection."""
    connection.settimeout(_SEND_TIMEOUT_S)
    while not stopped.wait(BEAT_S):
        try:
            connection.send(b".")
        except TimeoutError:  # the engine is suspended, and may resume
            continue
        except OSError:
            return


class Monitor:
    """The engine's end, in its own thread.

    Args:
        connections: one per rank, in rank order.
        timeout_s: a rank that sends nothing for longer is lost.
        on_loss: called once, with the reason, when the first rank is lost.
    """

    def __init__(
        self, connections: Sequence[socket.socket], timeout_s: float, on_loss: Callable[[str], None]
    ) -> None:
        self._connections = list(connections)
        self._timeout_s = timeout_s
        self._on_loss = on_loss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching; callable from any thread. A running `on_loss` is not interrupted."""
        self._closed.set()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, rank)
            lost = self._watch(selector)
        for connection in self._connections:
            connection.close()
        if lost is not None:
            self._on_loss(lost)

    def _watch(self, selector: selectors.BaseSelector) -> str | None:
        """Waits for a loss and returns its reason; None if `close` came first."""
        last = [time.monotonic()] * len(self._connections)
        looked = time.monotonic()
        while not self._closed.is_set():
            ready = selector.select(min(framing.HANDSHAKE_TIMEOUT_S, self._timeout_s / 4))
            now = time.monotonic()
            if now - looked > self._timeout_s / 2:  # this process was suspended, not the ranks
                last = [now] * len(last)
            looked = now
            for key, _ in ready:
                if not _drain(self._connections[key.data]):
                    return f"rank {key.data} has closed its connection"
                last[key.data] = now
            for rank, at in enumerate(last):
                if now - at > self._timeout_s:
                    return (
                        f"rank {rank} has sent no heartbeat for {now - at:.1f} s "
                        f"(heartbeat_timeout_s = {self._timeout_s:g})"
                    )
        return None


def _drain(connection: socket.socket) -> bool:
    """Reads available bytes; returns False if the connection has ended."""
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False
