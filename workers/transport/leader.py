"""One message per node: a node's first rank hands the engine's messages on to its node's others.

The engine sends a step to the ranks of its own node, and on every other node to the first rank
only, the leader. A leader passes each frame on as it came, before it computes, and passes back what
its followers answer: their errors. To the engine a leader's connection stands for all ranks behind
it: it ends when one of them is gone, and when it ends, theirs end too. Heartbeats are not handed
on; every rank sends its own.

`channel.py` serves a rank's end with `RankEnd`; `cluster/ray_group.py` connects by `routes`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Sequence

from ...errors import WorkerDiedError
from . import framing
from .reader import FrameReader
from .waiting import Lookout


def routes(
    nodes: Sequence[str],  # of every rank; ranks of a node are neighbours
    here: str,  # the engine's
) -> dict[int, tuple[int, ...]]:
    """The ranks that the engine connects to, in order, with the followers of each."""
    first: dict[str, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for rank, node in enumerate(nodes):
        leader = rank if node == here else first.setdefault(node, rank)
        found[leader] = (*found.get(leader, ()), rank) if leader != rank else ()
    return found


class RankEnd:
    """A rank's end of the step channel, with the connections to its followers if it leads.

    Args:
        connection: to the engine, or to the leader.
        followers: they are closed at the end; the connection is not.
        spin_s: how long to look for a message before sleeping.
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
        self._writes = threading.Lock()  # of answers: the rank's own and its followers'

    def __enter__(self) -> RankEnd:
        for follower in self._followers:
            threading.Thread(
                target=self._relay, args=(follower,), name="outrider-follower", daemon=True
            ).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for follower in self._followers:
            with contextlib.suppress(OSError):  # gone already
                follower.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
            follower.close()

    def receive(self) -> bytes:
        """The next message, handed on (raises `WorkerDiedError`, OSError)."""
        if not self._reader.has_data:
            self._lookout.look(self._lookout.spin_s)
        body = self._reader.receive()
        for follower in self._followers:
            framing.send(follower, body)
        return body

    def has_message(self) -> bool:
        """Whether a message has begun to arrive, or the connection has ended."""
        return self._reader.has_data or bool(self._poll.poll(0))

    def answer(self, body: bytes) -> None:
        """Sends an answer (raises OSError)."""
        with self._writes:
            framing.send(self._connection, body)

    def _relay(self, follower: socket.socket) -> None:
        """Passes on what a follower answers; when it is gone, so is this connection."""
        with contextlib.suppress(OSError, WorkerDiedError):
            while True:
                self.answer(framing.receive(follower))
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
