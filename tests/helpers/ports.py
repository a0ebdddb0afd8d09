"""Ports for servers that tests start, and raw sockets to them."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    """One that nobody has, and that no outgoing connection or Ray's own servers are given."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def connect(port: int, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    return connection


def completion(body: dict[str, Any], **headers: str) -> bytes:
    """The bytes of a request for a completion."""
    data = json.dumps(body).encode()
    fields = {"host": "x", "content-length": str(len(data)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data


def rest(connection: socket.socket) -> bytes:
    """Everything up to the end that the server makes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def wait_for(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def dribble(connection: socket.socket, piece: bytes, pause_s: float = 0.05) -> bytes:
    """Sends `piece` over and over until the server ends it; what the server said."""
    begun_s = time.monotonic()
    connection.settimeout(pause_s)
    answer = b""
    while time.monotonic() < begun_s + 30:
        try:
            connection.sendall(piece)
            part = connection.recv(4096)
        except TimeoutError:
            continue
        except OSError:
            return answer
        if not part:
            return answer
        answer += part
    raise AssertionError("the connection is still open")
