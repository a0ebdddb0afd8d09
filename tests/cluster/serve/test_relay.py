"""Event streams beside Ray: order, fallback, slow clients, and lost connections, in one process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from starlette.types import Message, Receive, Scope, Send

from outrider.cluster.serve import relay
from outrider.cluster.serve.relay import IngressRelay, ProxyRelay

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
RUNNERS = [asyncio.run, uvloop.run]
Body = Callable[[Send], Coroutine[Any, Any, None]]


async def _receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def start(kind: bytes = b"text/event-stream; charset=utf-8") -> Message:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", kind), (b"x-other", b"1")],
    }


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Way:
    """A client's request through the proxy's relay, Serve, and the ingress's."""

    def __init__(self, body: Body, node: str = "node", send: Send | None = None) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await body(send)

        self.through_serve: list[Message] = []
        self.answer: list[Message] = []
        self.ingress = IngressRelay(app, node)
        self.proxy = ProxyRelay(self._serve, "node", "127.0.0.1")
        self._send = send or self._store

    async def run(self, **scope: Any) -> None:
        try:
            await self.proxy({**SCOPE, **scope}, _receive, self._send)
        finally:
            self.proxy.shutdown()

    async def _store(self, message: Message) -> None:
        self.answer.append(message)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def forward(message: Message) -> None:
            message = pickle.loads(pickle.dumps(message))
            self.through_serve.append(dict(message))
            await send(message)

        await self.ingress(pickle.loads(pickle.dumps(scope)), receive, forward)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.answer[1:])


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("node", ["node", "another"])
def test_a_stream_goes_over_the_socket(run: Callable[..., None], node: str) -> None:
    pieces = [f"data: {number}\n\n".encode() * (1 + number % 3) for number in range(200)]

    async def stream(send: Send) -> None:
        await send(start())
        for number, piece in enumerate(pieces):
            await send(part(piece))
            if number % 7 == 0:
                await asyncio.sleep(0)
        await send(part(b"data: [DONE]\n\n", more=False))

    way = Way(stream, node)
    run(way.run())
    assert way.answer[0] == start()  # without a mark
    assert way.body == b"".join(pieces) + b"data: [DONE]\n\n"
    assert way.answer[-1] == part(b"", more=False)
    assert all(message["more_body"] for message in way.answer[1:-1])
    assert len(way.answer) < len(pieces)  # what was waiting went out as one
    assert [message.get("body") for message in way.through_serve] == [None, b""]


@pytest.mark.parametrize("kind", [b"application/json", b"text/html"])
def test_other_answers_take_serves_way(kind: bytes) -> None:
    async def answer(send: Send) -> None:
        await send(start(kind))
        await send(part(b"{}", more=False))

    way = Way(answer)
    asyncio.run(way.run())
    assert way.answer == way.through_serve == [start(kind), part(b"{}", more=False)]
    assert not way.ingress._links


def test_without_a_relay_in_the_proxy_nothing_changes() -> None:
    async def stream(send: Send) -> None:
        await send(start())
        await send(part(b"data: 1\n\n"))
        await send(part(b"", more=False))

    way = Way(stream)
    asyncio.run(way.run(method="GET"))
    assert way.answer == way.through_serve
    assert way.body == b"data: 1\n\n"


def test_a_proxy_that_cannot_be_reached_gets_the_streams_through_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        def unreachable(scope: Scope) -> Scope:
            node, _, tcp, secret, number = scope["outrider.relay"]
            return {**scope, "outrider.relay": (node, ("unix", "/nowhere", 0), tcp, secret, number)}

        ingress = way.ingress

        async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
            await ingress(unreachable(scope), receive, send)

        way.ingress = elsewhere  # type: ignore[assignment]
        await way.proxy(SCOPE, _receive, way._store)
        await way.run()

    async def stream(send: Send) -> None:
        await send(start())
        await send(part(b"data: 1\n\n"))
        await send(part(b"", more=False))

    way, tries = Way(stream), []
    connect = relay._connect

    async def counted(*given: Any) -> Any:
        tries.append(given)
        return await connect(*given)

    monkeypatch.setattr(relay, "_connect", counted)
    asyncio.run(main())
    assert way.body == b"data: 1\n\n" * 2
    assert len(way.through_serve) == 6
    assert len(tries) == 1  # another stream does not wait for the same proxy again


@pytest.mark.parametrize("run", RUNNERS)
def test_a_lost_connection_breaks_the_answer_off(run: Callable[..., None]) -> None:
    async def stream(send: Send) -> None:
        await send(start())
        await send(part(b"data: 1\n\n"))
        await asyncio.sleep(0.05)
        (link,) = [task.result() for task in way.ingress._links.values()]
        assert link is not None
        link.transport.abort()
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError):
            await send(part(b"data: 2\n\n"))

    way = Way(stream)
    run(way.run())
    assert way.body == b"data: 1\n\n"
    assert way.answer[-1]["more_body"]  # uvicorn closes the connection of such an answer


def test_a_client_that_reads_too_slowly_is_cut_off_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "MAX_WAITING_BYTES", 1000)
    reads, received = asyncio.Event(), bytearray()

    async def slow(message: Message) -> None:
        received.extend(message.get("body", b""))
        if received:
            await reads.wait()

    async def stream(send: Send) -> None:
        await send(start())
        for _ in range(100):
            await send(part(b"x" * 100))
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        (inlet,) = way.proxy._inlets.values()
        assert inlet._num_waiting == 0  # what waited is dropped
        reads.set()
        await send(part(b"", more=False))

    way = Way(stream, send=slow)
    with pytest.raises(ConnectionError, match="too slowly"):
        asyncio.run(way.run())
    assert len(received) < 2000


def test_a_stream_that_is_cut_off_ends_for_serve_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_WAITING_BYTES", 1000)
    received: list[Message] = []

    class Serve(Way):
        async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
            answering = asyncio.create_task(super()._serve(scope, receive, send))
            received.append(await receive())
            answering.cancel()

    async def stuck(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def stream(send: Send) -> None:
        await send(start())
        while True:
            await send(part(b"x" * 100))
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(Serve(stream, send=stuck).run(), 60))
    assert received == [{"type": "http.disconnect"}]


def test_a_part_of_any_size_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_WAITING_BYTES", 1000)

    async def stream(send: Send) -> None:
        await send(start())
        await send(part(b"x" * 5000))
        await asyncio.sleep(0.05)
        await send(part(b"y", more=False))

    way = Way(stream)
    asyncio.run(way.run())
    assert way.body == b"x" * 5000 + b"y"


def test_a_proxy_that_cannot_listen_leaves_streams_to_serve() -> None:
    async def stream(send: Send) -> None:
        await send(start())
        await send(part(b"data: 1\n\n", more=False))

    way = Way(stream)
    way.proxy = ProxyRelay(way._serve, "node", "192.0.2.1")  # no address of this machine
    asyncio.run(way.run())
    assert way.answer == way.through_serve


def test_the_scope_reaches_replicas_that_lack_outrider() -> None:
    async def main() -> Scope:
        seen: list[Scope] = []

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope)

        proxy = ProxyRelay(serve, "node", "127.0.0.1")
        await proxy(SCOPE, _receive, way._store)
        proxy.shutdown()
        return seen[0]

    way = Way(lambda send: asyncio.sleep(0))
    scope = asyncio.run(main())
    assert b"outrider." not in pickle.dumps(scope["outrider.relay"]).replace(b"outrider-", b"")
    assert "outrider.relay" not in SCOPE
