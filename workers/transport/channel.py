"""The step channel: one message to every rank of a group, one answer from rank 0.

`SocketChannel` uses persistent framed sockets: a message is encoded once and written to every rank
of the engine's node, and to one rank of every other node, which hands it on.
`ThreadChannel` is the equivalent within one process. A rank that raises answers with its error; one
that is gone closes its socket. Code that watches the processes may call `kill`.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...errors import StepMemoryError, WorkerDiedError, WorkerError
from . import framing, wire
from .later import Later
from .leader import RankEnd

Handler = Callable[[Any], Any]
Raised = tuple[bool, str]  # whether memory was lacking, and the traceback
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_JOIN_S = 1.0
_LOOK_S = 5e-5  # between two looks for the next message and at the device


class NoAnswerError(Exception):
    """No answer arrived within the timeout; it may still arrive."""


class Channel(Protocol):
    """The engine's end. With one rank several answers may be outstanding; they keep order."""

    def call(self, message: Any, timeout_s: float) -> Any:
        """Rank 0's answer.

        Raises:
            WorkerError: a rank raised; the others may be stuck in a collective.
            StepMemoryError: a rank ran out of memory; likewise.
            WorkerDiedError: a rank is gone, or did not answer in time.
        """
        ...

    def send(self, message: Any, timeout_s: float) -> None:
        """Sends `message` to all ranks (raises `WorkerDiedError`)."""
        ...

    def receive(self, timeout_s: float) -> Any:
        """Rank 0's answer to the oldest message (raises as `call` does).

        Raises:
            NoAnswerError: no answer within `timeout_s`.
        """
        ...

    def kill(self, reason: str) -> None:
        """Makes pending and later calls raise `WorkerDiedError`; from any thread."""
        ...

    def close(self) -> None:
        """Closes the connections to the ranks."""
        ...


class ThreadChannel:
    """Ranks as threads of this process.

    Args:
        inline: a single rank's handler runs directly in `send`.
    """

    def __init__(self, handlers: Sequence[Handler], *, inline: bool = True) -> None:
        self._alone = handlers[0] if inline and len(handlers) == 1 else None
        self._num_ranks = len(handlers)
        self._inboxes: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._replies: queue.SimpleQueue[tuple[int, Any, Raised | None]] = queue.SimpleQueue()
        self._num_missing = 0  # ranks that have not answered the oldest message yet
        self._answer: Any = None  # rank 0's, until all ranks have answered
        self._dead: str | None = None
        if self._alone is None:
            for rank, handler in enumerate(handlers):
                inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._inboxes.append(inbox)
                thread = threading.Thread(
                    target=self._run,
                    args=(rank, handler, inbox),
                    daemon=True,
                    name=f"outrider-rank-{rank}",
                )
                self._threads.append(thread)
                thread.start()

    def call(self, message: Any, timeout_s: float) -> Any:
        self.send(message, timeout_s)
        try:
            return self.receive(timeout_s)
        except NoAnswerError:
            self._dead = f"no answer within {timeout_s} s"
            raise WorkerDiedError(self._dead) from None

    def send(self, message: Any, timeout_s: float) -> None:
        if self._dead is not None:
            raise WorkerDiedError(self._dead)
        if self._alone is not None:
            self._replies.put((0, *_guarded(self._alone, message)))
        for inbox in self._inboxes:
            inbox.put(message)

    def receive(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        self._num_missing = self._num_missing or self._num_ranks
        while self._num_missing:  # waits for every rank, so that none lags behind
            if self._dead is not None:
                raise WorkerDiedError(self._dead)
            try:
                rank, reply, error = self._replies.get(
                    timeout=max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                raise NoAnswerError from None
            if self._dead is not None:
                raise WorkerDiedError(self._dead)
            self._num_missing -= 1
            if error is not None:
                self._num_missing = 0
                if self._num_ranks > 1:
                    self._dead = error[1]  # the other ranks are stuck in a collective
                raise _error(*error)
            if rank == 0:
                self._answer = reply
        answer, self._answer = self._answer, None
        return answer

    def kill(self, reason: str) -> None:
        self._dead = reason
        self._replies.put((-1, None, (False, reason)))

    def close(self) -> None:
        self.kill(self._dead or "closed")
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:  # a thread stuck in a collective is abandoned
            thread.join(timeout=_JOIN_S)

    def _run(self, rank: int, handler: Handler, inbox: queue.SimpleQueue[Any]) -> None:
        while (message := inbox.get()) is not None:
            reply, error = _guarded(handler, message)
            self._replies.put((rank, reply, error))


class SocketChannel:
    """The engine's end of the ranks' sockets, rank 0's first.

    Args:
        num_ranks: ranks behind the connections, with those that a leader hands messages on to
            (`leader.py`); None: one behind each.
    """

    def __init__(self, connections: Sequence[socket.socket], num_ranks: int | None = None) -> None:
        self._connections = list(connections)
        self._num_ranks = num_ranks or len(self._connections)
        self._dead: str | None = None
        # The reader stays open after `close`, so that a pending call wakes up.
        self._wake, self._wake_reader = socket.socketpair()
        self._timeout_s: float | None = None  # of the connections
        self._waiting = select.poll()  # `selectors` would take several times as long a step
        self._by_number = {each.fileno(): each for each in self._connections}
        for number in (self._wake_reader.fileno(), *self._by_number):
            self._waiting.register(number, select.POLLIN)

    def call(self, message: Any, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        self.send(message, timeout_s)
        try:
            return self.receive(max(0.0, deadline - time.monotonic()))
        except NoAnswerError:
            raise WorkerDiedError(f"no answer within {timeout_s} s") from None

    def send(self, message: Any, timeout_s: float) -> None:
        if self._dead is not None:
            raise WorkerDiedError(self._dead)
        body = wire.encode(message)
        try:
            if timeout_s != self._timeout_s:
                for connection in self._connections:
                    connection.settimeout(timeout_s)  # a hung rank may also stop reading
                self._timeout_s = timeout_s
            for connection in self._connections:
                framing.send(connection, body)
        except OSError as error:
            raise WorkerDiedError(self._dead or f"a rank is gone: {error}") from None

    def receive(self, timeout_s: float) -> Any:
        if self._dead is not None:
            raise WorkerDiedError(self._dead)
        ready = [number for number, _ in self._waiting.poll(timeout_s * 1e3)]
        if not ready:
            raise NoAnswerError
        if self._dead is not None or any(number not in self._by_number for number in ready):
            raise WorkerDiedError(self._dead or "killed")
        connection = self._by_number[ready[0]]
        try:
            ok, rank, reply = wire.decode(framing.receive(connection))
        except (OSError, WorkerDiedError) as error:
            raise WorkerDiedError(self._dead or f"a rank is gone: {error}") from None
        if not ok:
            lacks_memory, text = reply
            if self._num_ranks > 1:  # the others are stuck in a collective,
                self._dead = text  # and may answer this message later
            raise _error(lacks_memory, f"rank {rank}: {text}")
        return reply  # without an error only rank 0 answers

    @property
    def dead(self) -> bool:
        """Whether every further call raises `WorkerDiedError`."""
        return self._dead is not None

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
) -> None:
    """A rank's end: answers messages in order until the engine closes the connection.

    While a device computes a reply (`Later`), the next message is taken in, if it arrives by then.
    """
    with RankEnd(connection, followers) as end, contextlib.suppress(OSError, WorkerDiedError):
        pending: Later | None = None
        while True:
            if pending is not None and not _arrives_before(end, pending):
                pending = _answer(end, rank, *_guarded(Later.result, pending))
                continue
            reply, error = _guarded(handler, wire.decode(end.receive()))
            if pending is not None:
                _answer(end, rank, *_guarded(Later.result, pending))
            pending = _answer(end, rank, reply, error)


def _arrives_before(end: RankEnd, pending: Later) -> bool:
    """Whether a message is there before the reply."""
    while not pending.is_ready:
        if end.has_message():
            return True
        time.sleep(_LOOK_S)
    return False


def _answer(end: RankEnd, rank: int, reply: Any, error: Raised | None) -> Later | None:
    """Sends a reply or an error; a reply in the making is returned instead."""
    if isinstance(reply, Later):
        return reply
    if rank == 0 or error is not None:
        end.answer(wire.encode((error is None, rank, reply if error is None else error)))
    return None


def _guarded(handler: Handler, message: Any) -> tuple[Any, Raised | None]:
    """The handler's answer, or what it raised."""
    try:
        return handler(message), None
    except Exception as error:  # noqa: BLE001 - whatever a model raises goes back to the engine
        return None, (_lacks_memory(error), traceback.format_exc(limit=-4))


def _lacks_memory(error: Exception) -> bool:
    """Whether an allocation failed: of Python, of CUDA, or of torch on a CPU, which has no type."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def _error(lacks_memory: bool, text: str) -> WorkerError:
    return StepMemoryError(text) if lacks_memory else WorkerError(text)
