"""The step channel over persistent framed sockets, and a rank's end of it.

A message is encoded once and written to every rank of the engine's node, and to one rank of every
other node, which hands it on. A rank that is gone closes its socket.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from ...errors import WorkerDiedError
from . import framing, wire
from .channel import Handler, NoAnswerError, Raised, error_of, guarded
from .later import Later
from .leader import RankEnd
from .reader import FrameReader
from .waiting import SPIN_S, UsualWait

_LOOK_S = 5e-5  # between two looks for the next message and at the device


class SocketChannel:
    """The engine's end of the ranks' sockets, rank 0's first.

    Args:
        num_ranks: ranks behind the connections, with those that a leader hands messages on to
            (`leader.py`); None: one behind each.
        spin_s: how long to look for an answer, around the time when it usually comes, before
            sleeping.
    """

    def __init__(
        self,
        connections: Sequence[socket.socket],
        num_ranks: int | None = None,
        spin_s: float = SPIN_S,
    ) -> None:
        self._connections = list(connections)
        self._num_ranks = num_ranks or len(self._connections)
        self._dead: str | None = None
        # The reader stays open after `close`, so that a pending call wakes up.
        self._wake, self._wake_reader = socket.socketpair()
        self._timeout_s: float | None = None  # of the connections
        self._waiting = select.poll()  # `selectors` would take several times as long a step
        self._readers = {each.fileno(): FrameReader(each) for each in self._connections}
        self._usual = UsualWait(self._waiting, spin_s)
        for number in (self._wake_reader.fileno(), *self._readers):
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
        reader = self._next_reader(timeout_s)
        try:
            ok, rank, reply = wire.decode(reader.receive())
        except (OSError, WorkerDiedError) as error:
            raise WorkerDiedError(self._dead or f"a rank is gone: {error}") from None
        if not ok:
            lacks_memory, text = reply
            if self._num_ranks > 1:  # the others are stuck in a collective,
                self._dead = text  # and may answer this message later
            raise error_of(lacks_memory, f"rank {rank}: {text}")
        return reply  # without an error only rank 0 answers

    def _next_reader(self, timeout_s: float) -> FrameReader:
        """Of a connection on which an answer comes; raises as `receive` does."""
        for reader in self._readers.values():
            if reader.has_data:
                return reader
        ready = [number for number, _ in self._usual.wait(timeout_s)]
        if not ready:
            raise NoAnswerError
        if self._dead is not None or any(number not in self._readers for number in ready):
            raise WorkerDiedError(self._dead or "killed")
        return self._readers[ready[0]]

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
    spin_s: float = SPIN_S,
) -> None:
    """A rank's end: answers messages in order until the engine closes the connection.

    While a device computes a reply (`Later`), the next message is taken in, if it arrives by then.
    """
    with (
        RankEnd(connection, followers, spin_s) as end,
        contextlib.suppress(OSError, WorkerDiedError),
    ):
        pending: Later | None = None
        while True:
            if pending is not None and not _arrives_before(end, pending):
                pending = _answer(end, rank, *guarded(Later.result, pending))
                continue
            reply, error = guarded(handler, wire.decode(end.receive()))
            if pending is not None:
                _answer(end, rank, *guarded(Later.result, pending))
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
