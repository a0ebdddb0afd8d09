"""Connections that dribble and clients that never read, as raw sockets see it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.cluster.serve.connections import ConnectionLimits, guard, guarded
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.engine_client import LocalClient
from outrider.cluster.serve.openai.routes import Edge, build_http
from outrider.config import EngineConfig
from outrider.engine.frontend import Frontend
from outrider.errors import ConfigError
from outrider.tests.helpers.ports import completion, connect, dribble, rest, wait_for

LIMITS = ConnectionLimits(
    header_timeout_s=0.5, max_header_bytes=4096, write_timeout_s=0.5, send_buffer_bytes=16384
)


@pytest.fixture(params=[AutoHTTPProtocol, H11Protocol], ids=["httptools", "h11"])
def server(
    request: pytest.FixtureRequest,
    make_engine: Callable[..., Any],
    config: EngineConfig,
    limits: Any,
) -> Iterator[tuple[Any, int]]:
    """An engine and its port."""
    engine = make_engine()
    limits.max_model_len = 100_000
    edge = Edge(LocalClient(engine), Frontend(config, limits), EdgeMetrics("tiny"))
    limits.max_model_len = 256
    listener = socket.create_server(("127.0.0.1", 0))
    protocol = guarded(request.param, LIMITS)
    settings = uvicorn.Config(build_http(edge), log_level="critical", http=protocol)
    running = uvicorn.Server(settings)
    thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
    thread.start()
    yield engine, listener.getsockname()[1]
    engine.shutdown()
    running.should_exit = True
    thread.join(10)


def test_headers_that_never_end(server: tuple[Any, int]) -> None:
    """Silent, dribbled, and dribbled after a request that was in order."""
    _, port = server
    with connect(port) as silent, connect(port) as first, connect(port) as second:
        second.sendall(completion({"prompt": "a", "max_tokens": 2}))
        assert second.recv(65536).startswith(b"HTTP/1.1 200")
        for connection in (first, second):
            connection.sendall(b"GET /health HTTP/1.1\r\nx")
        for connection in (first, second):
            assert b"HTTP/1.1 408" in dribble(connection, b"x")
        assert rest(silent).startswith(b"HTTP/1.1 408")


def test_headers_without_bound(server: tuple[Any, int]) -> None:
    _, port = server
    with connect(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        answer = dribble(connection, b"x: " + b"y" * 1000 + b"\r\n", 0.001)
        assert not answer.startswith(b"HTTP/1.1 200")


def test_a_long_answer_and_a_slow_engine_are_no_reason(server: tuple[Any, int]) -> None:
    engine, port = server
    engine.pause_s = 0.4
    with connect(port) as connection:
        connection.sendall(completion({"prompt": "a", "max_tokens": 9, "stream": True}))
        answer = b""
        while b"[DONE]" not in answer:
            part = connection.recv(65536)
            assert part
            answer += part


def test_a_client_that_never_reads_is_cut_off_and_delays_nobody(server: tuple[Any, int]) -> None:
    engine, port = server
    engine.pause_s = 0.002  # its answer takes a minute: it is not over when the client is cut off
    with connect(port, 4096) as deaf, connect(port) as other:
        deaf.sendall(completion({"prompt": "a", "max_tokens": 90_000, "stream": True}))
        wait_for(lambda: bool(engine.submitted))
        other.sendall(completion({"prompt": "a", "max_tokens": 5}))
        assert other.recv(65536).startswith(b"HTTP/1.1 200")
        wait_for(lambda: bool(engine.aborted))
        assert engine.stats()["running"] == 0
        assert not rest(deaf).endswith(b"[DONE]\n\n")


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn.protocols.http import auto

    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)
    monkeypatch.setenv("OUTRIDER_WRITE_TIMEOUT_S", "7.5")
    monkeypatch.setenv("OUTRIDER_MAX_HEADER_BYTES", "1000")
    expected = ConnectionLimits(write_timeout_s=7.5, max_header_bytes=1000)
    assert ConnectionLimits.from_environment() == expected
    assert guard() == []
    assert auto.AutoHTTPProtocol.limits == expected  # type: ignore[attr-defined]
    once = auto.AutoHTTPProtocol
    guard()
    assert auto.AutoHTTPProtocol is once
    for wrong in ("0", "soon", "inf"):
        monkeypatch.setenv("OUTRIDER_WRITE_TIMEOUT_S", wrong)
        with pytest.raises(ConfigError, match="OUTRIDER_WRITE_TIMEOUT_S"):
            ConnectionLimits.from_environment()
