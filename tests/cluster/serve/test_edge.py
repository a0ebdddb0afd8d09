"""Tokens between processes' edges, here in one process: delivery, loss, and replay."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cluster.serve import edge
from outrider.cluster.serve.edge import (
    EdgeLink,
    EdgeListener,
    EdgeLostError,
    ReplyTo,
    encode_deltas,
)
from outrider.cluster.serve.serve_client import ServeClient
from outrider.errors import EngineDeadError, InvalidRequestError, OverloadedError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Delta, Request, ints
from outrider.workers.transport import framing
from outrider.workers.transport.wire import decode


def request(max_tokens: int = 12) -> Request:
    return Request("r", ints([5, 6]), SamplingParams(max_tokens=max_tokens), seed=1)


@asynccontextmanager
async def listening() -> AsyncIterator[EdgeListener]:
    listener = EdgeListener("edge", "node", "127.0.0.1", asyncio.get_running_loop())
    try:
        yield listener
    finally:
        listener.shutdown()


@pytest.mark.parametrize("node", ["node", "another"])
def test_deltas_arrive_by_request(node: str) -> None:
    async def main() -> None:
        async with listening() as listener:
            link = EdgeLink(listener.reply_to, node)
            first, second = listener.open("a"), listener.open("b")
            done = link.expect("a")
            link.deliver([Delta("a", (1, 2)), Delta("b", (3,)), Delta("gone", (9,))])
            last = Delta("a", (4,), finish_reason="length")
            link.deliver([last])
            assert (await first.get()).token_ids == (1, 2)  # type: ignore[union-attr]
            assert await first.get() == last
            assert await second.get() == Delta("b", (3,))
            assert await asyncio.wrap_future(done) == last
            link.close()

    asyncio.run(main())


def test_a_lost_ingress_fails_its_requests() -> None:
    async def main() -> None:
        async with listening() as listener:
            link = EdgeLink(listener.reply_to, "node")
            future = link.expect("a")
            replaced = replace(listener.reply_to, secret=b"wrong")
            stranger = EdgeLink(replaced, "node")
            with pytest.raises(EdgeLostError):
                await asyncio.wrap_future(stranger.expect("b"))
            link.close()
            with pytest.raises(EdgeLostError):
                await asyncio.wrap_future(future)
            with pytest.raises(EdgeLostError):
                link.expect("c")

    asyncio.run(main())


def test_an_ingress_that_does_not_read_is_given_up_and_others_go_on(monkeypatch) -> None:
    monkeypatch.setattr(edge, "MAX_WAITING_DELTAS", 500)

    async def main() -> None:
        server, address = framing.listen("127.0.0.1")  # accepts in the kernel, and never reads
        async with listening() as listener:
            stuck = EdgeLink(replace(listener.reply_to, tcp=address), "another")
            fine = EdgeLink(listener.reply_to, "another")
            lost, inbox = stuck.expect("a"), listener.open("b")
            num_delivered = 0
            while not stuck.lost:
                stuck.deliver([Delta("a", tuple(range(10_000)))])
                fine.deliver([Delta("b", (num_delivered,))])
                assert (await inbox.get()).token_ids == (num_delivered,)  # type: ignore[union-attr]
                num_delivered += 1
                assert num_delivered < 100_000
            with pytest.raises(EdgeLostError):
                await asyncio.wrap_future(lost)
            for _ in range(2000):  # the engine ends its requests a little later
                stuck.deliver([Delta("a", (1,))])
            assert stuck._outbox.qsize() <= 501
            fine.close()
        server.close()

    asyncio.run(main())


class FakeResponse:
    """What a handle's `remote` gives: awaitable and cancellable."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task
        self.is_cancelled = False

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._task.cancel()


class FakeReplicas:
    """A deployment whose replicas fail as told, one behaviour per call; the last one stays."""

    def __init__(self, make_engine: Callable[..., Any], *behaviours: Any) -> None:
        self.engine = make_engine("the cat sat on the mat. ", num_per_step=3)
        self.behaviours = list(behaviours)
        self.responses: list[FakeResponse] = []
        self.generate = SimpleNamespace(remote=self._remote)

    def _remote(self, body: bytes, reply_to: ReplyTo) -> FakeResponse:
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        task = asyncio.ensure_future(self._serve(decode(body), reply_to, behaviour))
        self.responses.append(FakeResponse(task))
        return self.responses[-1]

    async def _serve(self, wire: Request, reply_to: ReplyTo, behaviour: Any) -> None:
        if isinstance(behaviour, Exception):
            raise behaviour
        link = await asyncio.to_thread(EdgeLink, reply_to, "node")
        sinks = {"fine": lambda: link, "dies": lambda: DyingSink(link, 2)}
        sink = sinks.get(behaviour, lambda: CutSink(link, behaviour))()
        last = link.expect(wire.id)
        self.engine.submit(wire, sink)
        try:
            if behaviour != "dies":
                await asyncio.wrap_future(last)
            else:
                await asyncio.to_thread(sink.dead.wait)  # type: ignore[attr-defined]
                raise EdgeLostError("the replica died")
        finally:
            self.engine.abort(wire.id)


class CutSink:
    """The second message breaks off in the middle, or is none; the connection's end is noticed."""

    def __init__(self, link: EdgeLink, how: str) -> None:
        self.link, self.how, self.num_messages = link, how, 0

    def deliver(self, deltas: list[Delta]) -> None:
        self.num_messages += 1
        if self.num_messages != 2:
            self.link.deliver(deltas)
            return
        frame = framing.frame(b"no deltas" if self.how == "garbled" else encode_deltas(deltas))
        self.link._socket.sendall(frame if self.how == "garbled" else frame[: len(frame) // 2])
        if self.how == "cut":
            self.link._socket.shutdown(socket.SHUT_RDWR)


class DyingSink:
    """Passes on so many deltas, then nothing."""

    def __init__(self, link: EdgeLink, num_alive: int) -> None:
        self.link, self.left, self.dead = link, num_alive, threading.Event()

    def deliver(self, deltas: list[Delta]) -> None:
        if self.left > 0:
            self.left -= 1
            self.link.deliver(deltas)
        if self.left == 0:
            self.dead.set()


def run(make_engine: Callable[..., Any], *behaviours: Any) -> tuple[list[Delta], FakeReplicas]:
    async def main() -> tuple[list[Delta], FakeReplicas]:
        async with listening() as listener:
            replicas = FakeReplicas(make_engine, *behaviours)
            client = ServeClient(replicas, None, listener)  # type: ignore[arg-type]
            return [delta async for delta in client.generate(request())], replicas

    return asyncio.run(main())


def test_a_lost_replica_costs_no_token(make_engine: Callable[..., Any]) -> None:
    whole, replicas = run(make_engine, "fine")
    assert not replicas.responses[0].is_cancelled, "it ends by itself"
    expected = [token for delta in whole for token in delta.token_ids]
    assert len(expected) == 12
    for behaviours in (
        ("dies", "fine"),
        ("dies", "dies", "fine"),
        (EngineDeadError("x"), "fine"),
        ("cut", "fine"),
        ("garbled", "cut", "dies", "fine"),
    ):
        deltas, replicas = run(make_engine, *behaviours)
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert {delta.request_id for delta in deltas} == {"r"}
        assert [delta.finish_reason for delta in deltas][-1] == "length"
        assert deltas[-1].usage == whole[-1].usage, "statistics sum over the replicas"
        submitted = replicas.engine.submitted
        assert len({each.id for each in submitted}) == len(submitted)
        assert submitted[-1].was_accepted, "a full queue does not refuse it"


@pytest.mark.parametrize("error", [InvalidRequestError("bad"), OverloadedError("full")])
def test_what_is_wrong_everywhere_is_not_replayed(
    make_engine: Callable[..., Any], error: Exception
) -> None:
    from ray.exceptions import RayTaskError

    with pytest.raises(type(error)):
        run(make_engine, RayTaskError("generate", "trace", error), "fine")


def test_too_many_losses(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.cluster.serve import serve_client

    monkeypatch.setattr(serve_client, "_BACKOFF_S", 0.001)
    with pytest.raises(EngineDeadError, match="lost on 4"):
        run(make_engine, EdgeLostError("gone"))


def test_abort_gives_the_last_delta(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with listening() as listener:
            replicas = FakeReplicas(make_engine, "fine")
            replicas.engine.pause_s = 0.01
            client = ServeClient(replicas, None, listener)  # type: ignore[arg-type]
            seen = []
            async for delta in client.generate(request(10**6)):
                seen.append(delta)
                if len(seen) == 2:
                    await client.abort("r")
            assert seen[-1].finish_reason == "abort"
            assert seen[-1].usage is not None
            assert replicas.engine.stats()["running"] == 0

    asyncio.run(main())


def test_closing_aborts(make_engine: Callable[..., Any]) -> None:
    async def main() -> None:
        async with listening() as listener:
            replicas = FakeReplicas(make_engine, "fine")
            replicas.engine.pause_s = 0.01
            client = ServeClient(replicas, None, listener)  # type: ignore[arg-type]
            deltas = client.generate(request(10**6))
            await anext(deltas)
            await deltas.aclose()
            while replicas.engine.stats()["running"]:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_replay_that_meets_full_replicas_tries_again(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayTaskError

    from outrider.cluster.serve import serve_client

    monkeypatch.setattr(serve_client, "_FULL_BACKOFF_S", 0.001)
    expected = [token for delta in run(make_engine, "fine")[0] for token in delta.token_ids]
    full = RayTaskError("generate", "trace", OverloadedError("full"))
    deltas, _ = run(make_engine, "dies", *[full] * 9, "fine")
    assert [token for delta in deltas for token in delta.token_ids] == expected
    monkeypatch.setattr(serve_client, "_FULL_S", 0.05)
    with pytest.raises(EngineDeadError, match="lost on 1 replicas; .* full"):
        run(make_engine, "dies", full)


class FakeReports:
    """A deployment's handle, whose replicas answer so when they are asked for their report."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def broadcast(self, method: str) -> FakeReports:
        assert method == "report"
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0
        assert return_exceptions
        if TimeoutError in self.answers:
            raise TimeoutError
        return self.answers


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([("a", {"running": 3})], None),
        ([("a", {"error": "no rank"}), ("b", {"running": 3})], None),
        ([("a", {"error": "no rank"})], "no rank"),
        ([("a", {"recovering": "rank 0"})], "rank 0"),
        ([RuntimeError("dying")], "no engine replica"),
        ([("a", {"running": 3}), TimeoutError], None),  # full: others are before the question
    ],
)
def test_who_is_healthy(answers: list[Any], reason: str | None) -> None:
    async def main() -> None:
        async with listening() as listener:
            client = ServeClient(FakeReports(*answers), None, listener)  # type: ignore[arg-type]
            if reason is None:
                await client.check()
            else:
                with pytest.raises(EngineDeadError, match=reason):
                    await client.check()
            if TimeoutError in answers:
                assert await client.stats() == {}

    asyncio.run(main())


def test_an_ingress_that_cannot_be_reached_is_lost() -> None:
    nowhere = ReplyTo("a", "node", ("unix", "/nowhere/channel", 0), ("tcp", "", 0), b"secret")
    with pytest.raises(EdgeLostError, match="nowhere"):
        EdgeLink(nowhere, "node")


def test_a_refused_request_leaves_nothing_in_the_link() -> None:
    async def main() -> None:
        async with listening() as listener:
            link = EdgeLink(listener.reply_to, "node")
            link.expect("refused")
            link.forget("refused")
            link.forget("refused")
            assert not link._pending
            link.close()

    asyncio.run(main())


def test_a_failed_accept_does_not_end_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.cluster.serve import frames

    following, failures = framing.Acceptor.next, [OSError(24, "Too many open files")] * 2

    def flaky(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return following(*args)

    monkeypatch.setattr(framing.Acceptor, "next", flaky)
    monkeypatch.setattr(frames, "_ACCEPT_POLL_S", 0.05)

    async def main() -> None:
        async with listening() as listener:
            link = EdgeLink(listener.reply_to, "node")
            first = listener.open("a")
            link.deliver([Delta("a", (1,))])
            assert await asyncio.wait_for(first.get(), 60) == Delta("a", (1,))
            assert not failures
            link.close()

    asyncio.run(main())
