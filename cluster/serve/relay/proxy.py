"""The proxy's side of the relay: it listens, and hands parts to the clients' connections."""

from __future__ import annotations

import asyncio
import itertools
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..frames import FrameListener, FrameProtocol
from .parts import ADDRESS, RELAYED, parts

log = logging.getLogger(__name__)
MAX_WAITING_BYTES = 16 * 2**20  # of one stream, for a client that reads too slowly


class ProxyRelay:
    """In front of Serve's own application.

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
