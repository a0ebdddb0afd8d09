"""Verdicts reach a draft model between two of its engine's messages; they delay none of these."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from outrider.scheduler.types import Verdict, ints
from outrider.workers.transport import features, framing
from outrider.workers.transport.channel import (
    LinkOffer,
    ListenFeatures,
    OpenFeatures,
    ThreadChannel,
)
from outrider.workers.transport.features import VerdictEnd, VerdictFeed
from outrider.workers.transport.socket_channel import SocketChannel, serve


def verdict(step: int, num_emitted: int = 2) -> Verdict:
    emitted = ints(range(step, step + num_emitted))
    starts = ints([0, num_emitted])
    return Verdict(step, emitted, starts, emitted[1:], ints([0, num_emitted - 1]), compacted=True)


class Model:
    """Awaits the verdict whose step its engine has named last."""

    def __init__(self) -> None:
        self.awaited, self.taken, self.raises = -1, [], False
        self.end = VerdictEnd("127.0.0.1", lambda: self.awaited, self.take)

    def take(self, found: Verdict) -> None:
        self.taken.append((found.step, found.tokens(0).tolist()))
        self.awaited = -1
        if self.raises:
            raise RuntimeError("out of memory")

    def handle(self, message):
        if isinstance(message, ListenFeatures):
            return self.end.listen(message)
        self.awaited = message
        return [message, [step for step, _ in self.taken]]


@contextmanager
def running(kind: str, model: Model):
    """The engine's channel to a model, in a thread of this process or behind sockets."""
    if kind == "queue":
        channel = ThreadChannel([model.handle], inline=False, beside=model.end)
        yield channel
        channel.close()
        return
    ours, theirs = socket.socketpair()
    work = (theirs, 0, model.handle, (), 1e-3, model.end)
    thread = threading.Thread(target=serve, args=work)
    thread.start()
    channel = SocketChannel([ours])
    yield channel
    channel.close()
    thread.join(20)
    assert not thread.is_alive()


def linked(kind: str, channel) -> VerdictFeed:
    message = ListenFeatures(kind == "queue", kind == "tcp", distributed=False)
    offer = channel.call(message, 20)
    assert (offer.queue is not None) == (kind == "queue")
    feed = VerdictFeed(OpenFeatures(1, offer, (), 20.0))
    assert kind == "queue" or wait_for(lambda: feed._connection is not None)
    return feed


def wait_for(condition) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(condition())


KINDS = pytest.mark.parametrize("kind", ["queue", "unix", "tcp"])


@KINDS
def test_the_verdict_that_is_awaited_is_taken_whenever_it_comes(kind):
    model = Model()
    with running(kind, model) as channel:
        feed = linked(kind, channel)
        feed.push(verdict(3))  # before it is awaited
        assert channel.call(3, 20) == [3, []]
        assert wait_for(lambda: model.taken == [(3, [3, 4])])
        assert channel.call(4, 20) == [4, [3]]
        for step in (2, 3, 4, 4):  # stale ones, and one that comes twice
            feed.push(verdict(step))
        assert wait_for(lambda: len(model.taken) == 2)
        feed.push(verdict(5))
        assert channel.call(6, 20) == [6, [3, 4]]
        model.raises = True  # costs what it would have drawn
        feed.push(verdict(6, num_emitted=1))
        assert wait_for(lambda: len(model.taken) == 3)
        assert model.taken[-1] == (6, [6])
        assert channel.call(7, 20) == [7, [3, 4, 6]]
        feed.close()
        assert channel.call(8, 20) == [8, [3, 4, 6]]


@KINDS
def test_a_new_link_takes_the_place_of_one_that_broke(kind):
    model = Model()
    with running(kind, model) as channel:
        for step in (1, 2, 3):
            feed = linked(kind, channel)
            channel.call(step, 20)
            feed.push(verdict(step))
            assert wait_for(lambda step=step: len(model.taken) == step)
            if step != 2:
                feed.close()
        assert channel.call(9, 20) == [9, [1, 2, 3]]


def test_nothing_waits_for_a_model_that_does_not_read():
    """Its socket is full after a while; what does not fit is lost, and what was sent is whole."""
    end = VerdictEnd("127.0.0.1", lambda: 10**6, lambda found: None)
    feed = VerdictFeed(OpenFeatures(1, end.listen(ListenFeatures(False, False, False)), (), 20.0))
    assert wait_for(lambda: feed._connection is not None)
    feed._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for step in range(20_000):
        feed.push(verdict(step))
    assert wait_for(lambda: not end._came.empty())
    end.take_in()
    last = end._newest
    assert last is not None
    assert last.step < 19_999
    np.testing.assert_array_equal(last.emitted, [last.step, last.step + 1])
    end.close_links()
    feed.push(verdict(1))  # the model is gone
    feed.push(verdict(2))
    feed.close()


@pytest.mark.parametrize(
    "sent", [b"no verdict", framing.frame(b"\xc1"), framing.frame(b"\x01"), b"\xff" * 9]
)
def test_what_is_no_verdict_ends_the_link_alone(sent):
    model = Model()
    with running("unix", model) as channel:
        feed = linked("unix", channel)
        feed._connection.sendall(sent)
        assert channel.call(1, 20) == [1, []]
        feed.close()
        assert wait_for(lambda: model.end._connection is None)
        assert channel.call(2, 20) == [2, []]
        linked("unix", channel).push(verdict(2))
        assert wait_for(lambda: model.taken == [(2, [2, 3])])


def test_a_target_that_never_connects_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(features, "CONNECT_TIMEOUT_S", 0.05)
    end = VerdictEnd("127.0.0.1", lambda: -1, lambda found: None)
    offer: LinkOffer = end.listen(ListenFeatures(False, False, False))
    assert offer.address is not None
    feed = VerdictFeed(OpenFeatures(1, LinkOffer(address=("unix", "/none", 0)), (), 1.0))
    assert wait_for(lambda: "outrider-verdicts" not in {t.name for t in threading.enumerate()})
    feed.push(verdict(1))
    end.take_in()
    end.close_links()
