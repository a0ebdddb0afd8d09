"""Both kinds of waits find what comes, early, late or never, and sleep where there is one core."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from outrider.workers.transport import socket_channel
from outrider.workers.transport.socket_channel import SocketChannel, serve


class _Machine:
    """A clock and a poll object: an event comes at `at_s`; a look takes a microsecond."""

    def __init__(self, monkeypatch, cores: int = 2) -> None:
        self.now_s = 10.0
        self.at_s = float("inf")
        self.sleeps_s: list[float] = []
        monkeypatch.setattr(socket_channel.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(socket_channel.os, "sched_yield", lambda: None)
        monkeypatch.setattr(socket_channel, "num_cores", lambda: cores)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.now_s += 1e-6
        if timeout_ms:
            until_s = min(self.now_s + timeout_ms / 1e3, max(self.at_s, self.now_s))
            self.sleeps_s.append(until_s - self.now_s)
            self.now_s = until_s
        return [(3, 1)] if self.now_s >= self.at_s else []


def test_looks_for_so_long_and_no_longer(monkeypatch) -> None:
    machine = _Machine(monkeypatch)
    lookout = socket_channel.Lookout(machine, 2e-3)
    machine.at_s = machine.now_s + 1e-3
    assert lookout.look(2e-3) == [(3, 1)]
    assert machine.now_s == pytest.approx(machine.at_s, abs=1e-5)
    machine.at_s = machine.now_s + 5e-3
    begin_s = machine.now_s
    assert lookout.look(1.0) == []
    assert machine.now_s - begin_s == pytest.approx(2e-3, abs=1e-5)
    assert not machine.sleeps_s


def test_a_wait_of_the_usual_length_ends_awake(monkeypatch) -> None:
    machine = _Machine(monkeypatch)
    usual = socket_channel.Lookout(machine, 2e-3)
    for _ in range(30):
        machine.at_s = machine.now_s + 6e-3
        machine.sleeps_s.clear()
        assert usual.wait(60.0) == [(3, 1)]
    assert sum(machine.sleeps_s) == pytest.approx(5e-3, abs=1e-4)
    for taken_s in (1e-3, 40e-3):  # sooner, and later than anyone looks
        begin_s = machine.now_s
        machine.at_s = begin_s + taken_s
        assert usual.wait(60.0) == [(3, 1)]
        assert machine.now_s - begin_s == pytest.approx(taken_s, abs=1e-5)


@pytest.mark.parametrize("timeout_s", [0.0, 1e-3, 0.05])
def test_nothing_comes(monkeypatch, timeout_s) -> None:
    machine = _Machine(monkeypatch)
    usual = socket_channel.Lookout(machine, 2e-3)
    for _ in range(10):
        begin_s = machine.now_s
        assert usual.wait(timeout_s) == []
        assert machine.now_s - begin_s == pytest.approx(timeout_s, abs=1e-4)


@pytest.mark.parametrize(("cores", "spin_s"), [(1, 2e-3), (2, 0.0)])
def test_nobody_looks_on_one_core_or_where_it_is_switched_off(monkeypatch, cores, spin_s) -> None:
    machine = _Machine(monkeypatch, cores)
    machine.at_s = machine.now_s + 6e-3
    assert socket_channel.Lookout(machine, spin_s).wait(60.0) == [(3, 1)]
    assert machine.sleeps_s == [pytest.approx(6e-3, abs=1e-5)]
    machine.at_s = float("inf")
    begin_s = machine.now_s
    assert socket_channel.Lookout(machine, spin_s).look(1.0) == []
    assert machine.now_s - begin_s < 1e-4


@pytest.mark.parametrize(("engine_s", "rank_s"), [(0.0, 0.0), (0.02, 0.0), (0.0, 0.02)])
def test_each_end_of_a_channel_looks_as_long_as_it_is_told(monkeypatch, engine_s, rank_s) -> None:
    """The answer comes when the engine has looked, if it looks, and the next message likewise."""
    looking = set()
    monkeypatch.setattr(
        socket_channel.os, "sched_yield", lambda: looking.add(threading.get_ident())
    )
    monkeypatch.setattr(socket_channel, "num_cores", lambda: 2)
    near, far = socket.socketpair()

    def pause(other: int | None, spin_s: float) -> None:
        """Long enough for the other end to look."""
        for _ in range(10_000 if spin_s else 5):
            time.sleep(0.001)
            if other in looking:
                return

    engine = threading.get_ident()

    def answer(message: int) -> int:
        pause(engine, engine_s)
        return message + 1

    rank = threading.Thread(target=serve, args=(far, 0, answer, (), rank_s))
    rank.start()
    channel = SocketChannel([near], spin_s=engine_s)
    for message in range(3):
        assert channel.call(message, 60.0) == message + 1
        pause(rank.ident, rank_s)
    idents = {name for name, spin_s in ((engine, engine_s), (rank.ident, rank_s)) if spin_s}
    channel.close()
    rank.join()
    far.close()
    assert looking == idents


def test_an_engine_sleeps_while_its_rank_has_more_to_do(monkeypatch) -> None:
    """Two messages are posted: nobody waits for whoever reads the first answer."""
    looks = []
    monkeypatch.setattr(socket_channel.os, "sched_yield", lambda: looks.append(channel))
    monkeypatch.setattr(socket_channel, "num_cores", lambda: 2)
    near, far = socket.socketpair()
    go = threading.Semaphore(0)

    def answer(message: int) -> int:
        go.acquire()
        return message + 1

    rank = threading.Thread(target=serve, args=(far, 0, answer, (), 0.0))
    rank.start()
    channel = SocketChannel([near], spin_s=0.1)
    channel.send(1, 60.0)
    channel.send(2, 60.0)
    threading.Timer(0.02, go.release).start()
    assert channel.receive(60.0) == 2
    assert not looks
    threading.Timer(0.02, go.release).start()
    assert channel.receive(60.0) == 3
    assert looks, "the rank waits for the next message"
    channel.close()
    rank.join()
    far.close()
