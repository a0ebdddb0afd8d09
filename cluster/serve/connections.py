"""What is installed in Serve's proxies: guards on HTTP connections, and the relay of streams.

The guards: headers that never end, and clients that never read.

Ray Serve's proxy, whose uvicorn owns the clients' sockets, has neither. `guard` is Serve's callback
in every proxy process (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`); `outrider serve` sets it where
it starts Ray, with the settings as environment variables. A body that never ends is the ingress's
business (`read_body`).

A connection that is cut off looks to Serve like a client that has hung up: the request is aborted,
and its KV blocks are free before the engine's next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from ...errors import ConfigError
from ..process import silence_of_environment, start_watchdog

if TYPE_CHECKING:
    from starlette.middleware import Middleware

log = logging.getLogger(__name__)
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "outrider.cluster.serve.connections.guard"
_MAX_FOLDER_LEN = 75  # of 107 bytes that a Unix socket's path may have
_TIMEOUT_ANSWER = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE_ANSWER = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may take."""

    header_timeout_s: float = 10.0  # for all headers of a request to arrive
    max_header_bytes: int = 64 * 2**10
    write_timeout_s: float = 30.0  # without room for more of an answer: the client does not read
    send_buffer_bytes: int = 256 * 2**10  # of the kernel; as much again is kept by the process

    @classmethod
    def from_environment(cls) -> ConnectionLimits:
        """Limits as `OUTRIDER_HEADER_TIMEOUT_S` and so on give them; defaults for the others.

        Raises:
            ConfigError: a variable is no positive number.
        """
        given: dict[str, Any] = {}
        for field in fields(cls):
            variable = _variable(field.name)
            text = os.environ.get(variable)
            if text is None:
                continue
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not (math.isfinite(value) and value > 0):
                raise ConfigError.at(variable, f"a number above 0, got {text!r}")
            given[field.name] = value if field.name.endswith("_s") else int(value)
        return cls(**given)

    def variables(self) -> dict[str, str]:
        """Environment variables with these limits, and with Serve's callback, for its proxies."""
        limits = {_variable(field.name): str(getattr(self, field.name)) for field in fields(self)}
        return {**limits, CALLBACK_VARIABLE: CALLBACK}


def _variable(field: str) -> str:
    return f"OUTRIDER_{field.upper()}"


def guard() -> list[Middleware]:
    """Serve's callback: guards the proxy that is about to start.

    Returns the relay alone, and nothing outside Ray: sockets are below what a middleware sees.
    """
    import ray
    from starlette.middleware import Middleware

    from .relay import ProxyRelay

    install(ConnectionLimits.from_environment())
    silence_s = silence_of_environment()
    if not ray.is_initialized():
        return []
    start_watchdog(silence_s)
    return [
        Middleware(
            ProxyRelay,
            node=ray.get_runtime_context().get_node_id(),
            host=ray.util.get_node_ip_address(),
            folder=sockets_folder(),
        )
    ]


def sockets_folder() -> str | None:
    """Ray's folder for sockets, which is removed with its session; None where it is too deep."""
    import ray

    node = ray._private.worker._global_node
    folder = None if node is None else str(node.get_sockets_dir_path())
    return folder if folder is not None and len(folder) <= _MAX_FOLDER_LEN else None


def install(limits: ConnectionLimits) -> None:
    """Guards every HTTP server that this process starts from now on."""
    from uvicorn.protocols.http import auto

    if not issubclass(auto.AutoHTTPProtocol, _Guarded):
        auto.AutoHTTPProtocol = guarded(auto.AutoHTTPProtocol, limits)
        log.info("HTTP connections are guarded: %s", limits)


def guarded(base: type[asyncio.Protocol], limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol class `base`, with the limits."""
    return cast(
        "type[asyncio.Protocol]", type("GuardedProtocol", (_Guarded, base), {"limits": limits})
    )


class _Guarded(asyncio.Protocol):
    """In front of one of uvicorn's protocols, whose `cycle` is the request that is answered."""

    limits: ConnectionLimits
    _transport: asyncio.Transport
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                size = self.limits.send_buffer_bytes // 2  # the kernel doubles it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        super().connection_made(transport)
        self._expect_headers(0)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = getattr(self, "cycle", None)
        if cycle is not None and not cycle.response_complete:
            self._cancel_header_timer()
        else:
            self._expect_headers(len(data))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = _later(self.limits.write_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _expect_headers(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse(_TOO_LARGE_ANSWER)
        elif self._header_timer is None:
            self._header_timer = _later(
                self.limits.header_timeout_s, lambda: self._refuse(_TIMEOUT_ANSWER)
            )

    def _refuse(self, answer: bytes) -> None:
        self._cancel_header_timer()
        if not self._transport.is_closing():
            self._transport.write(answer)
            self._transport.close()

    def _cut_off(self) -> None:
        self._write_timer = None
        log.info(
            "a client has not read for %g s; its connection is cut off", self.limits.write_timeout_s
        )
        self._transport.abort()

    def _cancel_header_timer(self) -> None:
        self._num_header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _later(delay_s: float, call: Any) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, call)
