"""Length-prefixed frames over a socket, and listening sockets for them.

Unix sockets within a node, TCP with NODELAY across. Every connection opens with a shared secret,
so that a stray client on the network gets nothing. Called by the channel and by the edge.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import tempfile
import time
from pathlib import Path

from ...errors import WorkerDiedError

_HEADER = struct.Struct("<Q")
MAX_FRAME_BYTES = 2**31
Address = tuple[str, str, int]  # ("unix", path, 0) or ("tcp", host, port)


def listen(host: str | None) -> tuple[socket.socket, Address]:
    """A listening socket: TCP on `host` (a free port), or a Unix socket where it is None."""
    if host is None:
        path = Path(tempfile.mkdtemp(prefix="outrider-")) / "channel"
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


def accept(server: socket.socket, secret: bytes, timeout_s: float) -> socket.socket:
    """The next connection that knows the secret.

    Raises:
        TimeoutError: none came within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        server.settimeout(max(0.001, deadline - time.monotonic()))
        connection, _ = server.accept()
        connection.settimeout(5.0)
        with contextlib.suppress(OSError, WorkerDiedError):  # strangers hang up or send nonsense
            if hmac.compare_digest(receive(connection, max_bytes=len(secret)), secret):
                tune(connection)
                return connection
        connection.close()


def connect(address: Address, secret: bytes, timeout_s: float) -> socket.socket:
    """A connection to `address`, the secret already given."""
    kind, host, port = address
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        connection.connect(host)
    else:
        connection = socket.create_connection((host, port), timeout=timeout_s)
    tune(connection)
    send(connection, secret)
    return connection


def tune(connection: socket.socket) -> None:
    """Blocking, and without Nagle's delay on TCP."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(connection: socket.socket, body: bytes) -> None:
    """Writes one frame."""
    connection.sendall(_HEADER.pack(len(body)) + body)


def receive(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Reads one frame.

    Raises:
        WorkerDiedError: the peer hung up, or sent no frame of ours.
    """
    (size,) = _HEADER.unpack(_read(connection, _HEADER.size))
    if size > max_bytes:
        raise WorkerDiedError(f"a frame of {size} bytes exceeds {max_bytes}")
    return bytes(_read(connection, size))


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills `view` with bytes that follow a frame (raises `WorkerDiedError` at their end)."""
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise WorkerDiedError("the peer closed the connection")
        view = view[count:]


def _read(connection: socket.socket, size: int) -> bytearray:
    body = bytearray(size)
    receive_into(connection, memoryview(body))
    return body
