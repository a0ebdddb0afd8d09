"""A leader hands messages on: one message a node, and errors and deaths as without one."""

from __future__ import annotations

import socket
import threading
from collections import Counter

import pytest

from outrider.errors import StepMemoryError, WorkerDiedError, WorkerError
from outrider.workers.transport import framing
from outrider.workers.transport.socket_channel import SocketChannel, routes, serve


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ("aaaa", {0: (), 1: (), 2: (), 3: ()}),  # the engine's own node
        ("aabbbc", {0: (), 1: (), 2: (3, 4), 5: ()}),
        ("bb", {0: (1,)}),
        ("bbcc", {0: (1,), 2: (3,)}),
    ],
)
def test_routes(nodes, found):
    assert routes(nodes, "a") == found
    assert list(routes(nodes, "a")) == list(found)


class Nodes:
    """Ranks in threads, joined as in `cluster/backend.py`; `a` is the engine's.

    Args:
        handle: `handle(rank, message)` is a rank's answer.
    """

    def __init__(self, nodes: str, handle) -> None:
        self.nodes, self.threads = nodes, []
        self.theirs: dict[int, socket.socket] = {}  # every rank's end
        ours: dict[int, socket.socket] = {}
        for rank in range(len(nodes)):
            ours[rank], self.theirs[rank] = socket.socketpair()
        found = routes(nodes, "a")
        self.channel = SocketChannel([ours[rank] for rank in found], len(nodes))
        self.receivers = {ours[rank]: rank for rank in ours}
        for rank in range(len(nodes)):
            followers = [ours[each] for each in found.get(rank, ())]
            thread = threading.Thread(target=self._run, args=(rank, handle, followers), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _run(self, rank, handle, followers) -> None:
        with self.theirs[rank] as connection:
            serve(connection, rank, lambda message: handle(rank, message), followers)

    def close(self) -> None:
        """All ranks end with the engine's connections."""
        self.channel.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("nodes", ["aabbbcc", "bbb", "a"])
def test_one_message_a_node(nodes, monkeypatch):
    """Messages that cross from node to node are counted where they are written."""
    seen = [[] for _ in nodes]
    done, sent = threading.Semaphore(0), Counter()

    def handle(rank, message):
        seen[rank].append(message)
        done.release()
        return (rank, message)

    group, write = Nodes(nodes, handle), framing.send

    def counted(connection, body) -> None:
        if connection in group.receivers:
            writer = threading.current_thread()
            rank = group.receivers[connection]
            source = nodes[group.threads.index(writer)] if writer in group.threads else "a"
            sent[source, nodes[rank]] += 1
        write(connection, body)

    monkeypatch.setattr(framing, "send", counted)
    for value in range(5):
        assert group.channel.call(value, 10.0) == (0, value)
    for _ in range(5 * len(nodes)):
        assert done.acquire(timeout=10)
    assert seen == [list(range(5))] * len(nodes)
    crossed = {pair: count for pair, count in sent.items() if pair[0] != pair[1]}
    assert crossed == {("a", node): 5 for node in set(nodes) - {"a"}}
    assert sum(sent.values()) == 5 * len(nodes)
    group.close()


@pytest.mark.parametrize("broken", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [ValueError, MemoryError])
def test_an_error_has_its_rank(broken, kind):
    stuck = threading.Event()

    def handle(rank, message):
        if rank == broken:
            raise kind("bad weights")
        stuck.wait(10)

    group = Nodes("abbb", handle)
    with pytest.raises(StepMemoryError if kind is MemoryError else WorkerError) as error:
        group.channel.call("go", 10.0)
    assert f"rank {broken}: " in str(error.value)
    assert "bad weights" in str(error.value)
    with pytest.raises(WorkerDiedError):  # the others are stuck in a collective
        group.channel.call("next", 10.0)
    stuck.set()
    group.close()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_leader_or_follower_that_is_gone_ends_the_call_and_its_node(lost):
    entered, stuck = threading.Semaphore(0), threading.Event()

    def handle(rank, message):
        entered.release()
        stuck.wait(10)

    group = Nodes("abbb", handle)
    group.channel.send("go", 10.0)
    for _ in range(4):
        assert entered.acquire(timeout=10)
    group.theirs[lost].shutdown(socket.SHUT_RDWR)
    with pytest.raises(WorkerDiedError, match="a rank is gone"):
        group.channel.receive(10.0)
    stuck.set()
    for thread in group.threads[1:]:
        thread.join(10)
        assert not thread.is_alive()
    group.close()


def test_large_messages_pass(monkeypatch):
    """More than a socket holds, while the leader's own answers go the other way."""
    group = Nodes("bb", lambda rank, message: len(message))
    for size in (1, 1 << 22, 3):
        assert group.channel.call(b"x" * size, 30.0) == size
    group.close()
