"""The front door: an ingress's HTTP listener.

All ingresses of a node listen on the same port (SO_REUSEPORT). The kernel distributes connections
over them, and the death of an ingress breaks only its own connections. They are served by uvicorn,
with limits for headers that never end and clients that never read; bodies that never end are
handled by the ingress (`read_body`). A client whose machine or network is gone never closes its
connection, so the kernel probes it and closes the connection if nobody answers. A client that is
cut off is treated like one that has disconnected: its request is aborted, and its KV blocks are
free before the engine's next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any, cast

from starlette.responses import PlainTextResponse

from ...errors import ConfigError, EngineDeadError
from ...workers.transport import framing
from .args import ServeConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)
_OWN = "/-/"  # prefix of the paths that are answered here
_HEALTH, _WHO = "/-/healthz", "/-/front-door"
MAX_HEADER_BYTES = 64 * 2**10
SEND_BUFFER_BYTES = 256 * 2**10  # in the kernel; the process buffers as much again
_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # of a connection without a request
_CLAIM_S = 10.0  # until another ingress that has just opened the port identifies itself
_CLAIM_POLL_S = 0.1
_NOTHING = PlainTextResponse("there is nothing here", 404)
_TIMEOUT_ANSWER = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE_ANSWER = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


def check_port(host: str, port: int) -> None:
    """Raises `ConfigError`, which names the field, if the port cannot be opened now."""
    _bind(host, port).close()


def check_certificate(section: ServeConfig) -> None:
    """Raises `ConfigError`, which names the field, if the certificate cannot be used."""
    if section.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            section.ssl_certfile, section.ssl_keyfile, password=lambda: b""
        )
    except (OSError, ssl.SSLError) as error:  # the error does not name the file
        reason = f"no certificate with its key in {section.ssl_certfile}"
        beside = f" and {section.ssl_keyfile}" if section.ssl_keyfile else ""
        raise ConfigError.at("ssl_certfile", f"{reason}{beside}: {error}") from None


def _bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Binds the port, exclusively or together with other sockets that share it."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError.at("host", f"{host!r} is no address: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    # Allows binding while connections of a previous listener remain.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    try:
        bound.bind(place)
        if not shared:
            bound.listen()  # otherwise a listening socket with SO_REUSEADDR is not detected
    except OSError as error:
        bound.close()
        reason = f"cannot listen on {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError.at(
                "host",
                f"{reason}; it is no address of this machine (0.0.0.0: all of its addresses)",
            ) from None
        if error.errno == errno.EADDRINUSE:
            reason += "; stop what uses it or choose another with --port"
        if error.errno == errno.EACCES:
            reason += "; ports below 1024 need a privilege"
        raise ConfigError.at("port", reason) from None
    return bound


class FrontDoor:
    """Serves `app` on the section's port.

    Args:
        owner: identifies cluster and application; ingresses with the same owner share the port.
    """

    def __init__(self, app: ASGIApp, section: ServeConfig, owner: str) -> None:
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        self._app, self._section, self._owner = app, section, owner
        self._prefix = section.route_prefix.rstrip("/")
        config = uvicorn.Config(
            self._answer,
            http=guarded(AutoHTTPProtocol, section),
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(section.graceful_shutdown_timeout_s),
            ssl_certfile=section.ssl_certfile,
            ssl_keyfile=section.ssl_keyfile,
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Starts listening.

        Raises:
            ConfigError: the port is in use, or the certificate is missing; names the field.
        """
        host, port = self._section.host, self._section.port
        assert port is not None
        check_certificate(self._section)
        listener = await self._claim(host, port)
        self._task = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        self.check()

    def check(self) -> None:
        """Raises `EngineDeadError` if the server no longer listens."""
        if self._task is not None and self._task.done():
            reason = None if self._task.cancelled() else self._task.exception()
            raise EngineDeadError(f"the ingress no longer listens: {reason or 'it was stopped'}")

    async def close(self) -> None:
        """Stops accepting connections; running requests may finish within the section's timeout."""
        if self._task is not None:
            self._server.should_exit = True
            with contextlib.suppress(Exception):
                await self._task

    async def _claim(self, host: str, port: int) -> socket.socket:
        """Binds the port, which must be free or a sibling's; several ingresses may try at once."""
        deadline = asyncio.get_running_loop().time() + _CLAIM_S
        is_ours = False
        while True:
            try:
                if not is_ours:
                    check_port(host, port)
                return _bind(host, port, shared=True)
            except ConfigError as error:
                owner = await self._owner_of(host, port)
                is_ours = owner == self._owner
                is_late = asyncio.get_running_loop().time() > deadline
                if error.field != "port" or is_late or not (is_ours or owner is None):
                    raise
            await asyncio.sleep(_CLAIM_POLL_S)

    async def _owner_of(self, host: str, port: int) -> str | None:
        """Returns the owner that listens there; empty: another program; None: no response."""
        import httpx

        scheme = "http" if self._section.ssl_certfile is None else "https"
        here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        try:
            async with httpx.AsyncClient(verify=False, timeout=1.0, trust_env=False) as client:
                answer = await client.get(f"{scheme}://{here}:{port}{_WHO}")
        except httpx.TransportError:
            return None
        return answer.text if answer.is_success else ""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(_OWN):
            known = {_HEALTH: "success", _WHO: self._owner}
            answer = PlainTextResponse(known[path]) if path in known else _NOTHING
            await answer(scope, receive, send)
        elif not self._prefix:
            await self._app(scope, receive, send)
        elif path == self._prefix or path.startswith(f"{self._prefix}/"):
            await self._app({**scope, "root_path": self._prefix}, receive, send)
        else:
            await _NOTHING(scope, receive, send)


def guarded(base: type[asyncio.Protocol], section: ServeConfig) -> type[asyncio.Protocol]:
    """Derives a class from uvicorn's protocol class `base`, with the limits of a section."""
    return cast(
        "type[asyncio.Protocol]", type("GuardedProtocol", (_Guarded, base), {"section": section})
    )


class _Guarded(asyncio.Protocol):
    """Wraps one of uvicorn's protocols, whose `cycle` is the request that is being answered."""

    section: ServeConfig
    _transport: asyncio.Transport
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                size = SEND_BUFFER_BYTES // 2  # the kernel doubles it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
                framing.end_without_answers(connection, self.section.write_timeout_s)
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
            self._write_timer = _later(self.section.write_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _expect_headers(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE_ANSWER)
        elif self._header_timer is None:
            self._header_timer = _later(
                self.section.header_timeout_s, lambda: self._refuse(_TIMEOUT_ANSWER)
            )

    def _refuse(self, answer: bytes) -> None:
        self._cancel_header_timer()
        if not self._transport.is_closing():
            self._transport.write(answer)
            self._transport.close()

    def _cut_off(self) -> None:
        self._write_timer = None
        limit_s = self.section.write_timeout_s
        log.info("a client has not read for %g s; its connection is cut off", limit_s)
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
