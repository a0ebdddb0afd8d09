"""What listens for clients: a shared port, HTTPS, slow and deaf clients as raw sockets see them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from pydantic import ValidationError
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.cluster.serve import front_door
from outrider.cluster.serve.args import ServeConfig
from outrider.cluster.serve.front_door import (
    FrontDoor,
    check_certificate,
    check_port,
    guarded,
)
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.config import EngineConfig
from outrider.engine.frontend import Frontend
from outrider.errors import ConfigError, EngineDeadError
from outrider.tests.helpers.ports import (
    completion,
    connect,
    dribble,
    free_port,
    rest,
    wait_for,
)

LIMITS = ServeConfig(header_timeout_s=0.5, write_timeout_s=0.5)


@pytest.fixture(params=[AutoHTTPProtocol, H11Protocol], ids=["httptools", "h11"])
def server(
    request: pytest.FixtureRequest,
    make_engine: Callable[..., Any],
    config: EngineConfig,
    limits: Any,
    monkeypatch: pytest.MonkeyPatch,
    end_server: Any,
) -> Iterator[tuple[Any, int]]:
    """An engine and its port."""
    monkeypatch.setattr(front_door, "MAX_HEADER_BYTES", 4096)
    monkeypatch.setattr(front_door, "SEND_BUFFER_BYTES", 16384)
    engine = make_engine()
    limits.max_model_len = 100_000
    edge = Edge(EngineClient(engine), Frontend(config, limits), EdgeMetrics("tiny"))
    limits.max_model_len = 256
    listener = socket.create_server(("127.0.0.1", 0))
    protocol = guarded(request.param, LIMITS)
    settings = uvicorn.Config(build_http(edge), log_level="critical", http=protocol)
    running = uvicorn.Server(settings)
    thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
    thread.start()
    yield engine, listener.getsockname()[1]
    engine.shutdown()
    end_server(running, thread)


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


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with its root path, after a pause where the path asks for one."""
    if "slow" in scope["path"]:
        await asyncio.sleep(0.3)
    body = scope.get("root_path", "").encode() + b"|" + scope["path"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def _section(port: int, **more: Any) -> ServeConfig:
    return ServeConfig(port=port, graceful_shutdown_timeout_s=5, **more)


def test_siblings_share_a_port_and_nobody_else_does() -> None:
    async def main() -> None:
        port = free_port()
        doors = [FrontDoor(_app, _section(port), "cluster app") for _ in range(2)]
        await asyncio.gather(*(door.open() for door in doors))
        with pytest.raises(ConfigError, match="port: cannot listen"):
            check_port("127.0.0.1", port)
        stranger = FrontDoor(_app, _section(port), "cluster another")
        with pytest.raises(ConfigError, match="port: cannot listen") as caught:
            await stranger.open()
        assert caught.value.field == "port"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/-/healthz")).text == "success"
            assert (await http.get("/-/nothing")).status_code == 404
            assert (await http.get("/v1/models")).text == "|/v1/models"
            slow = asyncio.ensure_future(http.get("/slow"))
            await asyncio.sleep(0.1)
            await asyncio.gather(*(door.close() for door in doors))
            assert (await slow).text == "|/slow", "what runs may end"
            with pytest.raises(httpx.ConnectError):
                await httpx.AsyncClient().get(f"http://127.0.0.1:{port}/v1/models")
        with pytest.raises(EngineDeadError, match="no longer listens"):
            doors[0].check()
        await stranger.open()  # the port is free again
        await stranger.close()

    asyncio.run(main())


def test_a_port_that_something_else_uses_is_named(busy_port: int) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="choose another with --port") as caught:
            await FrontDoor(_app, _section(busy_port), "cluster app").open()
        assert caught.value.field == "port"

    asyncio.run(main())


@pytest.fixture
def busy_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server that speaks no HTTP."""
    monkeypatch.setattr("outrider.cluster.serve.front_door._CLAIM_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_paths_begin_with_the_route_prefix() -> None:
    async def main() -> None:
        port = free_port()
        door = FrontDoor(_app, _section(port, route_prefix="/llm/"), "cluster app")
        await door.open()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/llm/v1/models")).text == "/llm|/llm/v1/models"
            assert (await http.get("/v1/models")).status_code == 404
            assert (await http.get("/llmx")).status_code == 404
            assert (await http.get("/-/healthz")).text == "success"
        await door.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    files = {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", files["ssl_certfile"], "-keyout", files["ssl_keyfile"]],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def test_https(certificate: dict[str, str]) -> None:
    async def main() -> None:
        port = free_port()
        doors = [FrontDoor(_app, _section(port, **certificate), "cluster app") for _ in range(2)]
        for door in doors:
            await door.open()
        trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        async with httpx.AsyncClient(verify=trust) as http:
            assert (await http.get(f"https://127.0.0.1:{port}/v1/x")).text == "|/v1/x"
        for door in doors:
            await door.close()

    asyncio.run(main())


def test_a_certificate_that_is_none_is_named(certificate: dict[str, str], tmp_path: Path) -> None:
    check_certificate(ServeConfig(**certificate))
    (tmp_path / "bad.pem").write_text("no certificate")
    key = certificate["ssl_keyfile"]
    for given in (
        {"ssl_certfile": str(tmp_path / "none.pem")},
        {"ssl_certfile": str(tmp_path / "bad.pem"), "ssl_keyfile": key},
        {"ssl_certfile": certificate["ssl_certfile"], "ssl_keyfile": str(tmp_path / "none.pem")},
        {"ssl_certfile": certificate["ssl_certfile"]},  # without the key
    ):
        with pytest.raises(ConfigError, match="ssl_certfile: no certificate with its key"):
            check_certificate(ServeConfig(**given))
    with pytest.raises(ValidationError, match="needs ssl_certfile"):
        ServeConfig(ssl_keyfile=key)


def test_an_address_of_another_machine_is_no_matter_of_ports():
    with pytest.raises(ConfigError) as caught:
        check_port("192.0.2.1", 18431)  # for documentation only, RFC 5737
    assert caught.value.field == "host"
    assert "no address of this machine" in caught.value.message
    assert "another" not in caught.value.message
