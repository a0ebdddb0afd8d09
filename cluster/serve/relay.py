"""Event streams from an ingress to Serve's proxy over a socket, beside Ray.

Serve hands every chunk of an answer to its proxy as an object of a Ray generator, which costs both
processes several times what the chunk itself does. Here each proxy listens (`ProxyRelay`, a
middleware that `connections.guard` installs) and puts its address into the request's scope, which
no client can reach. An ingress (`IngressRelay`) that answers such a request with an event stream
connects to the proxy once and sends the chunks of all streams there, those of one turn of its event
loop as one frame. What is waiting for a client goes out as one piece; nothing waits for more.

Serve's call stays pending for the whole answer, and its status, its end, its failures and the
client's disconnect take Serve's way. Where a proxy does not listen, so do the chunks.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import OutriderError
from ...workers.transport import framing
from .frames import FrameListener, FrameProtocol, adopt

# The scope's key, with plain values only: it reaches replicas of other applications, too.
ADDRESS = "outrider.relay"
RELAYED = "outrider.relayed"  # mark of a response's start: the body comes over the socket
_PART = struct.Struct("<QI")  # stream, number of bytes; none: the stream's end


def packed(number: int, part: bytes) -> tuple[bytes, bytes]:
    """A part of stream `number` as it goes into a frame."""
    return _PART.pack(number, len(part)), part


def parts(frame: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a frame, each with its stream."""
    begin = 0
    while begin < len(frame):
        number, size = _PART.unpack_from(frame, begin)
        begin += _PART.size
        yield number, frame[begin : begin + size]
        begin += size


log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 60.0  # after a proxy could not be reached
MAX_LINK_BYTES = 256 * 2**20  # of one link, for a proxy that does not read


class IngressRelay:
    """In front of the application: event streams go to the proxy that asked for them."""

    def __init__(self, app: ASGIApp, node: str) -> None:
        self._app = app
        self._node = node
        self._links: dict[bytes, asyncio.Task[_Link | None]] = {}  # by the proxy's secret
        self._retry_at_s: dict[bytes, float] = {}  # of proxies that could not be reached

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = scope.get(ADDRESS)
        if address is not None:
            send = _Outlet(lambda: self._link(*address[:4]), address[4], send)
        await self._app(scope, receive, send)

    async def _link(
        self, node: str, unix: framing.Address, tcp: framing.Address, secret: bytes
    ) -> _Link | None:
        """The link to a proxy; None where it cannot be reached, which is tried now and then."""
        task = self._links.get(secret)
        if task is None or _ended(task):
            now = time.monotonic()
            self._retry_at_s = {key: at for key, at in self._retry_at_s.items() if at > now}
            if secret in self._retry_at_s:
                return None
            there = unix if node == self._node else tcp
            self._links = {key: each for key, each in self._links.items() if not _ended(each)}
            self._links[secret] = task = asyncio.ensure_future(_connect(there, secret))
        link = await asyncio.shield(task)
        if link is None:
            self._retry_at_s[secret] = time.monotonic() + _RETRY_S
        return link


def _ended(task: asyncio.Task[_Link | None]) -> bool:
    return task.done() and ((link := task.result()) is None or link.lost)


async def _connect(address: framing.Address, secret: bytes) -> _Link | None:
    link = _Link()
    try:
        connection = await asyncio.to_thread(framing.connect, address, secret, _CONNECT_TIMEOUT_S)
        await adopt(asyncio.get_running_loop(), connection, lambda: link)
    except (OSError, OutriderError) as error:
        log.warning("streams are sent through Ray: a proxy cannot be reached: %s", error)
        return None
    return link


class _Link(FrameProtocol):
    """To one proxy. The parts of one turn of the event loop are one frame."""

    def __init__(self) -> None:
        super().__init__(lambda frame: None, self._end)  # a proxy sends nothing
        self._parts: list[bytes] = []
        self.lost = False

    def put(self, number: int, part: bytes) -> None:
        """Another part of a stream.

        Raises:
            ConnectionError: the link is lost, or the proxy does not read.
        """
        if self.lost:
            raise ConnectionError("the connection to the proxy is lost")
        if self.transport.get_write_buffer_size() > MAX_LINK_BYTES:
            self.lost = True
            self.transport.abort()
            raise ConnectionError("the proxy does not read")
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts += packed(number, part)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if not self.lost:
            self.send(b"".join(parts))

    def _end(self, error: Exception | None) -> None:
        self.lost = True


class _Outlet:
    """One answer in the ingress: parts of an event stream go to the link, the rest to Serve."""

    def __init__(self, connect: Callable[[], Any], number: int, send: Send) -> None:
        self._connect = connect
        self._number = number
        self._send = send
        self._link: _Link | None = None

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start" and _is_event_stream(message):
            self._link = await self._connect()
            if self._link is not None:
                message = {**message, RELAYED: True}
        elif kind == "http.response.body" and self._link is not None:
            body = message.get("body", b"")
            if body:
                self._link.put(self._number, body)
            if message.get("more_body", False):
                return
            self._link.put(self._number, b"")
            message = {"type": kind, "body": b"", "more_body": False}
        await self._send(message)


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )


MAX_WAITING_BYTES = 16 * 2**20  # of one stream, for a client that reads too slowly


class ProxyRelay:
    """In front of Serve's own application: hands parts to the clients' connections.

    Args:
        node: the node's id; ingresses there use the Unix socket.
        host: this node's address, for ingresses elsewhere.
        folder: for the Unix socket.
    """

    def __init__(self, app: ASGIApp, node: str, host: str, folder: str | None = None) -> None:
        self._app = app
        self._node, self._host, self._folder = node, host, folder
        self._listener: FrameListener | None = None
        self._cannot_listen = False
        self._numbers = itertools.count()
        self._inlets: dict[int, _Inlet] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        listener = self._listening() if is_post else None
        if listener is None:
            await self._app(scope, receive, send)
            return
        number = next(self._numbers)
        inlet = self._inlets[number] = _Inlet(receive, send)
        address = (self._node, listener.unix, listener.tcp, listener.secret, number)
        try:
            await self._app({**scope, ADDRESS: address}, inlet.receive, inlet.send)
        finally:
            del self._inlets[number]
            inlet.close()

    def shutdown(self) -> None:
        """Stops listening."""
        if self._listener is not None:
            self._listener.shutdown()

    def _listening(self) -> FrameListener | None:
        """The listener, opened with the first request; None where it cannot be opened."""
        if self._listener is None and not self._cannot_listen:
            loop = asyncio.get_running_loop()
            try:
                self._listener = FrameListener(self._host, loop, self._connection, self._folder)
            except OSError as error:
                self._cannot_listen = True
                log.warning("streams are sent through Ray: a proxy cannot listen: %s", error)
        return self._listener

    def _connection(self) -> FrameProtocol:
        streams: set[int] = set()  # that this connection has sent parts of

        def take(frame: bytes) -> None:
            for number, part in parts(frame):
                inlet = self._inlets.get(number)
                if inlet is not None:
                    streams.add(number)
                    inlet.put(part)
                if inlet is None or not part:
                    streams.discard(number)

        def lost(error: Exception | None) -> None:
            log.info("an ingress's connection has ended: %s", error)
            for number in streams:
                if number in self._inlets:
                    self._inlets[number].lose("the ingress closed its connection")

        return FrameProtocol(take, lost)


class _Inlet:
    """One answer in the proxy: its messages from Serve, and its parts from the socket."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._pump: asyncio.Task[None] | None = None
        self._waiting: list[bytes] = []
        self._num_waiting = 0  # bytes
        self._wake = asyncio.Event()
        self._ended = False
        self._lost: str | None = None
        self._is_lost = asyncio.Event()

    async def receive(self) -> Message:
        """The client's next message. A lost stream is as if it had hung up: Serve aborts it."""
        message = asyncio.ensure_future(self._receive())
        lost = asyncio.ensure_future(self._is_lost.wait())
        try:
            await asyncio.wait({message, lost}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            lost.cancel()

    async def send(self, message: Message) -> None:
        """Takes a message from Serve; the body's end waits for the parts before it."""
        if message["type"] == "http.response.start" and message.pop(RELAYED, False):
            await self._send(message)
            self._pump = asyncio.create_task(self._forward())
            return
        if self._pump is not None:
            await self._pump
        await self._send(message)

    def put(self, part: bytes) -> None:
        """Another part from the socket; an empty one is the last.

        A part of any size may wait alone: a prompt's log-probabilities are one event.
        """
        if not part:
            self._ended = True
        elif self._waiting and self._num_waiting + len(part) > MAX_WAITING_BYTES:
            self.lose("the client reads too slowly")
        elif self._lost is None:
            self._waiting.append(part)
            self._num_waiting += len(part)
        self._wake.set()

    def lose(self, reason: str) -> None:
        """Nothing more will come: what waits is dropped, and the answer breaks off."""
        if not self._ended:
            self._lost = reason
            self._waiting, self._num_waiting = [], 0
            self._wake.set()
            self._is_lost.set()

    def close(self) -> None:
        """The answer is over for Serve."""
        if self._pump is not None:
            self._pump.cancel()
            self._pump.add_done_callback(_retrieve)

    async def _forward(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._waiting:
                body = b"".join(self._waiting)
                self._waiting, self._num_waiting = [], 0
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            if self._lost is not None:
                raise ConnectionError(self._lost)
            if self._ended and not self._waiting:
                return


def _retrieve(task: asyncio.Task[None]) -> None:
    """An answer that broke off twice, in Serve and here, is no news."""
    if not task.cancelled():
        task.exception()
