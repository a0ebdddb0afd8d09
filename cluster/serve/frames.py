"""Framed connections in an event loop: listening sockets, and a protocol that cuts out frames.

Listening and handshakes take a thread; what arrives afterwards is read by the event loop itself, so
that a message wakes one thread and not two. The frames are those of `workers/transport/framing.py`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import cast

from ...workers.transport import framing
from ..process import start_thread

log = logging.getLogger(__name__)
_ACCEPT_POLL_S = 1.0


class FrameProtocol(asyncio.Protocol):
    """Cuts what arrives into frames.

    A frame for which `on_frame` raises, or of more than `framing.MAX_FRAME_BYTES`, ends the
    connection.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        begin = 0
        try:
            while len(buffer) - begin >= framing.HEADER.size:
                (size,) = framing.HEADER.unpack_from(buffer, begin)
                if size > framing.MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                end = begin + framing.HEADER.size + size
                if end > len(buffer):
                    break
                self._on_frame(bytes(memoryview(buffer)[begin + framing.HEADER.size : end]))
                begin = end
        except Exception:
            log.exception("a connection is closed: its data cannot be read")
            self.transport.abort()
            begin = len(buffer)
        del buffer[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(exc)

    def send(self, body: bytes) -> None:
        """Writes one frame; does not wait."""
        self.transport.write(framing.frame(body))


class FrameListener:
    """Listens on a Unix socket for this node, and on TCP for others.

    Args:
        host: this node's address.
        loop: the event loop that reads the connections.
        make_protocol: called for each connection that has sent the secret.
        folder: for the Unix socket; None is the folder for temporary files.
    """

    def __init__(
        self,
        host: str,
        loop: asyncio.AbstractEventLoop,
        make_protocol: Callable[[], asyncio.Protocol],
        folder: str | None = None,
    ) -> None:
        self._loop = loop
        self._make_protocol = make_protocol
        self._servers: list[socket.socket] = []
        self._closed = threading.Event()
        self.secret = secrets.token_bytes(32)
        self.unix = self._listen(None, folder)
        try:
            self.tcp = self._listen(host, None)
        except OSError:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stops listening; connections stay open."""
        self._closed.set()
        for server in self._servers:
            server.close()
        framing.unlink(self.unix)

    def _listen(self, host: str | None, folder: str | None) -> framing.Address:
        server, address = framing.listen(host, folder)
        self._servers.append(server)
        acceptor = framing.Acceptor(server, self.secret)
        start_thread("accept", self._accept, acceptor)
        return address

    def _accept(self, acceptor: framing.Acceptor) -> None:
        while not self._closed.is_set():
            try:
                connection = acceptor.next(_ACCEPT_POLL_S)
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed.wait(_ACCEPT_POLL_S):  # for example out of file descriptors
                    log.warning("a connection was not accepted: %s", error)
                continue
            try:
                asyncio.run_coroutine_threadsafe(
                    adopt(self._loop, connection, self._make_protocol), self._loop
                )
            except RuntimeError:  # the event loop is closed
                connection.close()
                return


async def adopt(
    loop: asyncio.AbstractEventLoop,
    connection: socket.socket,
    make_protocol: Callable[[], asyncio.Protocol],
) -> None:
    """Lets the event loop read a connected socket."""
    connection.setblocking(False)
    await loop.connect_accepted_socket(make_protocol, connection)
