"""Length-prefixed frames over a socket, and listening sockets for them.

Unix sockets within a node, TCP with NODELAY between nodes. Every connection starts with a shared
secret, and a client without it is dropped.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import struct
import tempfile
import time
from pathlib import Path

from ...errors import WorkerDiedError

HEADER = struct.Struct("<Q")
MAX_FRAME_BYTES = 2**31
_BUFFER_BYTES = 2**16
STEPS, BEATS = b"steps", b"beats"  # purposes of a connection to a rank, sent as its first frame
MAX_HANDSHAKES = 64  # pending at once; beyond that the oldest is dropped
HANDSHAKE_TIMEOUT_S = 5.0
_GONE_S = 6.0  # a peer that does not answer for this long is gone
_NUM_PROBES = 3
Address = tuple[str, str, int]  # ("unix", path, 0) or ("tcp", host, port)


def listen(host: str | None, folder: str | None = None) -> tuple[socket.socket, Address]:
    """Opens a listening socket: TCP on a free port of `host`, or a Unix socket if it is None.

    Args:
        folder: parent of the Unix socket's own folder; None: the folder for temporary files.
    """
    if host is None:
        path = Path(tempfile.mkdtemp(prefix="outrider-", dir=folder)) / "channel"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(path))
        address: Address = ("unix", str(path), 0)
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        server.bind((host, 0))
        address = ("tcp", host, server.getsockname()[1])
    server.listen(64)
    return server, address


def unlink(address: Address) -> None:
    """Removes a Unix socket's file and folder."""
    if address[0] == "unix":
        path = Path(address[1])
        path.unlink(missing_ok=True)
        if path.parent.exists():
            os.rmdir(path.parent)


class Acceptor:
    """Accepts the connections of `server` that send the secret.

    Handshakes overlap, each with its own deadline, so a client that connects and sends nothing
    delays no other. Pending handshakes are kept between calls.
    """

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        server.setblocking(False)
        self._server = server
        self._expected = HEADER.pack(len(secret)) + secret
        self._handshakes: dict[socket.socket, tuple[bytearray, float]] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def next(self, timeout_s: float) -> socket.socket:
        """Returns the next connection that sends the secret.

        Raises:
            TimeoutError: there was none within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for key, _ in self._selector.select(self._wait_s(deadline)):
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                if peer is self._server:
                    self._begin()
                elif peer in self._handshakes and self._continue(peer):
                    return peer
            now = time.monotonic()
            for peer in [peer for peer, (_, until) in self._handshakes.items() if until <= now]:
                self._drop(peer)
            if now >= deadline:
                raise TimeoutError(f"no connection within {timeout_s} s")

    def close(self) -> None:
        """Drops pending handshakes; `server` stays open."""
        for peer in [*self._handshakes]:
            self._drop(peer)
        self._selector.close()

    def _wait_s(self, deadline: float) -> float:
        """Seconds until the earliest deadline."""
        first = min([deadline, *(until for _, until in self._handshakes.values())])
        return max(0.0, first - time.monotonic())

    def _begin(self) -> None:
        try:
            peer, _ = self._server.accept()
        except BlockingIOError:  # the client disconnected before it was accepted
            return
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self._drop(next(iter(self._handshakes)))
        peer.setblocking(False)
        self._handshakes[peer] = (bytearray(), time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._selector.register(peer, selectors.EVENT_READ)

    def _continue(self, peer: socket.socket) -> bool:
        """Reads available bytes; returns True if the secret is complete. Drops a wrong client."""
        received, _ = self._handshakes[peer]
        try:
            chunk = peer.recv(len(self._expected) - len(received))
        except OSError:
            chunk = b""
        received += chunk
        if chunk and len(received) < len(self._expected):
            return False
        if not hmac.compare_digest(received, self._expected):
            self._drop(peer)
            return False
        del self._handshakes[peer]
        self._selector.unregister(peer)
        tune(peer)
        return True

    def _drop(self, peer: socket.socket) -> None:
        del self._handshakes[peer]
        self._selector.unregister(peer)
        peer.close()


def accept(server: socket.socket, secret: bytes, timeout_s: float) -> socket.socket:
    """Accepts one connection that sends the secret (raises `TimeoutError`)."""
    acceptor = Acceptor(server, secret)
    try:
        return acceptor.next(timeout_s)
    finally:
        acceptor.close()


def connect(
    address: Address, secret: bytes, timeout_s: float, purpose: bytes | None = None
) -> socket.socket:
    """Connects to `address` and sends the secret; to a rank also `STEPS` or `BEATS`."""
    kind, host, port = address
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        connection.connect(host)
    else:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    tune(connection)
    send(connection, secret)
    if purpose is not None:
        send(connection, purpose)
    return connection


def tune(connection: socket.socket) -> None:
    """Makes a socket blocking; over TCP disables Nagle's delay and sets keepalive options."""
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_without_answers(connection, _GONE_S)


def end_without_answers(connection: socket.socket, after_s: float) -> None:
    """Makes a TCP connection end when its peer answers neither probes nor data for `after_s`.

    This happens if its machine or the network is gone. The kernel answers probes, so a busy process
    keeps its connections. The time is in whole seconds, at least one.
    """
    options = (
        ("TCP_KEEPIDLE", after_s / 2),  # seconds without traffic before the first probe
        ("TCP_KEEPINTVL", after_s / 2 / _NUM_PROBES),
        ("TCP_KEEPCNT", _NUM_PROBES),
        ("TCP_USER_TIMEOUT", after_s * 1e3),  # milliseconds that data may stay unacknowledged
    )
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options:
        if hasattr(socket, option):  # Linux has all of them
            number = getattr(socket, option)
            connection.setsockopt(socket.IPPROTO_TCP, number, max(1, round(value)))


def frame(body: bytes) -> bytes:
    """Returns the encoded frame."""
    return HEADER.pack(len(body)) + body


def send(connection: socket.socket, body: bytes) -> None:
    """Writes one frame."""
    connection.sendall(frame(body))


def receive(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Reads one frame, and nothing beyond it.

    Raises:
        WorkerDiedError: the peer closed the connection, or the frame exceeds `max_bytes`.
    """
    header = bytearray(HEADER.size)
    receive_into(connection, memoryview(header))
    body = bytearray(_size(header, max_bytes=max_bytes))
    receive_into(connection, memoryview(body))
    return bytes(body)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills `view` with the following bytes (raises `WorkerDiedError` at the end of the stream)."""
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise WorkerDiedError("the peer closed the connection")
        view = view[count:]


def _size(buffer: bytearray | memoryview, begin: int = 0, max_bytes: int = MAX_FRAME_BYTES) -> int:
    (size,) = HEADER.unpack_from(buffer, begin)
    if size > max_bytes:
        raise WorkerDiedError(f"a frame of {size} bytes exceeds {max_bytes}")
    return int(size)


class FrameReader:
    """Reads everything that arrives on `connection`; no other code may read it meanwhile.

    A small frame takes a single system call.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # of bytes that were read but not yet returned

    @property
    def has_data(self) -> bool:
        """Whether the next frame, or its beginning, has been read."""
        return self._begin < self._end

    def receive(self) -> bytes:
        """Returns the next frame.

        Raises:
            WorkerDiedError: the peer closed the connection, or the frame is too large.
        """
        while (count := self._end - self._begin) < HEADER.size:
            if count and self._begin:
                self._buffer[:count] = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, count
            added = self._connection.recv_into(self._buffer[count:])
            if added == 0:
                raise WorkerDiedError("the peer closed the connection")
            self._end += added
        size = _size(self._buffer, self._begin)
        begin = self._begin + HEADER.size
        end = begin + size
        if end <= self._end:
            self._begin = end
            return bytes(self._buffer[begin:end])
        body = bytearray(size)
        count = self._end - begin
        body[:count] = self._buffer[begin : self._end]
        self._begin = self._end = 0
        receive_into(self._connection, memoryview(body)[count:])
        return bytes(body)
