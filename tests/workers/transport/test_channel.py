"""The socket channel and its twin behave alike: answers, errors, death, silence."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from outrider.errors import WorkerDiedError, WorkerError
from outrider.workers.transport import framing
from outrider.workers.transport.channel import (
    Channel,
    Handler,
    NoAnswerError,
    PendingReply,
    ThreadChannel,
)
from outrider.workers.transport.socket_channel import SocketChannel, serve

SECRET = b"s" * 32


def over_sockets(host: str | None) -> Callable[[list[Handler]], Channel]:
    def make(handlers: list[Handler]) -> Channel:
        ends = []
        for rank, handler in enumerate(handlers):
            server, address = framing.listen(host)

            def run(server=server, address=address, rank=rank, handler=handler) -> None:
                with server:
                    connection = framing.accept(server, SECRET, 10.0)
                framing.unlink(address)
                with connection:
                    serve(connection, rank, handler)

            threading.Thread(target=run, daemon=True).start()
            ends.append(framing.connect(address, SECRET, 10.0))
        return SocketChannel(ends)

    return make


@pytest.fixture(params=["threads", "unix", "tcp"])
def make(request) -> Callable[[list[Handler]], Channel]:
    if request.param == "threads":
        return ThreadChannel
    return over_sockets(None if request.param == "unix" else "127.0.0.1")


@pytest.mark.parametrize("size", [1, 3])
def test_rank_zero_answers_and_all_hear(make, size):
    heard = [[] for _ in range(size)]
    done = threading.Semaphore(0)

    def handler(rank):
        def handle(message):
            heard[rank].append(message)
            done.release()
            return (rank, message)

        return handle

    channel = make([handler(rank) for rank in range(size)])
    for value in range(5):
        assert channel.call(value, 10.0) == (0, value)
    for _ in range(5 * size):
        assert done.acquire(timeout=10)
    assert heard == [list(range(5))] * size
    channel.close()


def test_any_ranks_error_comes_back_with_its_traceback(make):
    stuck = threading.Event()

    def broken(message):
        raise ValueError("bad weights")

    def waiting(message):
        stuck.wait(5)

    channel = make([waiting, broken])
    with pytest.raises(WorkerError, match="bad weights"):
        channel.call("go", 10.0)
    stuck.set()
    channel.close()


def test_a_lone_rank_goes_on_after_an_error(make):
    def fussy(message):
        if message == "bad":
            raise ValueError("no")
        return "fine"

    channel = make([fussy])
    with pytest.raises(WorkerError):
        channel.call("bad", 10.0)
    assert channel.call("good", 10.0) == "fine"
    channel.close()


def test_kill_wakes_a_pending_call(make):
    entered, stuck = threading.Event(), threading.Event()

    def waiting(message):
        entered.set()
        stuck.wait(10)

    channel = make([waiting, waiting])
    threading.Thread(target=lambda: (entered.wait(10), channel.kill("node lost"))).start()
    with pytest.raises(WorkerDiedError, match="node lost"):
        channel.call("go", 30.0)
    stuck.set()
    channel.close()


def test_silence_is_death(make):
    stuck = threading.Event()
    channel = make([lambda message: stuck.wait(10)] * 2)
    with pytest.raises(WorkerDiedError, match="no answer"):
        channel.call("go", 0.05)
    stuck.set()
    channel.close()


def test_a_rank_that_stops_reading_is_death():
    here, there = socket.socketpair()
    channel = SocketChannel([here])
    with pytest.raises(WorkerDiedError):
        channel.call(b"x" * 2**24, 0.05)
    there.close()
    channel.close()


@pytest.mark.parametrize("what", ["message", "answer"])
def test_kill_wakes_a_call_in_the_middle_of_a_frame(what):
    """A rank was stopped while it read a step larger than the socket's buffer, or answered."""
    here, there = socket.socketpair()
    channel = SocketChannel([here])
    if what == "answer":
        there.sendall((1000).to_bytes(8, "little") + b"half")

    def kill_later() -> None:
        assert there.recv(1)  # the call is under way
        time.sleep(0.2)
        channel.kill("no heartbeat")

    killer = threading.Thread(target=kill_later, daemon=True)
    killer.start()
    outcome: list[BaseException] = []

    def call() -> None:
        try:
            channel.call(b"x" * (2**24 if what == "message" else 1), 1000.0)
        except WorkerDiedError as error:
            outcome.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(30)
    assert [str(error) for error in outcome] == ["no heartbeat"]
    there.close()
    channel.close()


def test_a_closed_socket_is_death():
    here, there = socket.socketpair()
    channel = SocketChannel([here])
    there.close()
    with pytest.raises(WorkerDiedError):
        channel.call("go", 10.0)


def test_a_stranger_gets_nothing_and_the_owner_still_gets_in():
    server, address = framing.listen("127.0.0.1")
    strangers = [socket.create_connection(address[1:]) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    framing.send(strangers[1], b"x" * 32)
    found = []
    thread = threading.Thread(target=lambda: found.append(framing.accept(server, SECRET, 10.0)))
    thread.start()
    mine = framing.connect(address, SECRET, 10.0)
    thread.join(10)
    framing.send(found[0], b"hello")
    assert framing.receive(mine) == b"hello"
    for end in (*strangers, mine, found[0], server):
        end.close()


def test_idle_strangers_delay_nobody(monkeypatch):
    """Their handshakes would end only after the test, were they taken one after the other."""
    monkeypatch.setattr(framing, "HANDSHAKE_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(framing, "MAX_HANDSHAKES", 8)
    server, address = framing.listen("127.0.0.1")
    strangers = [socket.create_connection(address[1:]) for _ in range(14)]
    strangers[0].sendall(framing.STEPS[:3])  # one that sends a little, and then nothing
    acceptor = framing.Acceptor(server, SECRET)
    found = []
    thread = threading.Thread(target=lambda: found.append(acceptor.next(20.0)))
    thread.start()
    mine = framing.connect(address, SECRET, 10.0, framing.STEPS)
    thread.join(30)
    assert framing.receive(found[0]) == framing.STEPS
    acceptor.close()
    for end in (*strangers, mine, found[0], server):
        end.close()


def test_tcp_connections_break_within_seconds_of_a_lost_peer():
    server, address = framing.listen("127.0.0.1")
    mine = framing.connect(address, SECRET, 10.0)
    theirs = framing.accept(server, SECRET, 10.0)
    for end in (mine, theirs):
        idle_s, between_s, count, unacknowledged_ms = (
            end.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
        assert idle_s + between_s * count <= 10
        assert 0 < unacknowledged_ms <= 10_000
    for end in (mine, theirs, server):
        end.close()


def test_after_a_ranks_error_no_stale_answer_is_taken(make):
    """Rank 0 answers the failed message late; that must not pass for the next message's answer."""
    go, answered = threading.Event(), threading.Event()

    def slow(message):
        if message == "first":
            go.wait(10)
            answered.set()
        return message

    def broken(message):
        if message == "first":
            raise ValueError("bad weights")

    channel = make([slow, broken])
    with pytest.raises(WorkerError, match="bad weights"):
        channel.call("first", 10.0)
    go.set()
    assert answered.wait(10)
    with pytest.raises(WorkerDiedError):
        channel.call("second", 10.0)
    channel.close()


def test_closing_wakes_a_pending_call(make):
    entered, stuck = threading.Event(), threading.Event()

    def waiting(message):
        entered.set()
        stuck.wait(10)

    channel = make([waiting, waiting])
    threading.Thread(target=lambda: (entered.wait(10), channel.close())).start()
    with pytest.raises(WorkerDiedError) as caught:
        channel.call("go", 30.0)
    assert "no answer" not in str(caught.value), "it has waited for its end"
    stuck.set()


class Computing(PendingReply):
    """A reply that a device gives when it is told to."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value, self.done = value, threading.Event()

    @property
    def is_ready(self) -> bool:
        return self.done.is_set()

    def _finish(self) -> object:
        assert self.done.wait(10)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_the_next_message_is_handled_while_a_reply_is_computed():
    """Answers keep their order, also where the later one is ready first, and so do errors."""
    begun = {name: Computing(name) for name in ("a", "b", "c")}
    begun["b"].value = ValueError("lost device")
    seen = {name: threading.Event() for name in (*begun, "plain")}

    def handler(message):
        seen[message].set()
        return begun.get(message, message)

    channel = over_sockets(None)([handler])
    for message in ("a", "b"):
        channel.send(message, 10.0)
    assert seen["b"].wait(10)  # `a` is not answered
    begun["b"].done.set()
    with pytest.raises(NoAnswerError):
        channel.receive(0.05)
    begun["a"].done.set()
    assert channel.receive(10.0) == "a"
    with pytest.raises(WorkerError, match="lost device"):
        channel.receive(10.0)
    channel.send("c", 10.0)
    channel.send("plain", 10.0)
    assert seen["plain"].wait(10)
    begun["c"].done.set()
    assert [channel.receive(10.0) for _ in range(2)] == ["c", "plain"]
    channel.close()


def test_a_reply_in_the_making_is_sent_when_it_is_ready():
    """Without another message."""
    reply = Computing(7)
    channel = over_sockets(None)([lambda message: reply])
    channel.send("ask", 10.0)
    reply.done.set()
    assert channel.receive(10.0) == 7
    channel.close()
