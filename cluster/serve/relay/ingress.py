"""The ingress's side of the relay: event streams go to the proxy that asked for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....errors import OutriderError
from ....workers.transport import framing
from ..frames import FrameProtocol, adopt
from .parts import ADDRESS, RELAYED, packed

log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 60.0  # after a proxy could not be reached
MAX_LINK_BYTES = 256 * 2**20  # of one link, for a proxy that does not read


class IngressRelay:
    """In front of the application."""

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
