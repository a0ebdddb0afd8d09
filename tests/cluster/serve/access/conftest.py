"""A running edge over a fake engine, with whatever an `Edge` takes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from outrider.cluster.serve.access.access import Access
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.config import EngineConfig
from outrider.config.access import AccessConfig, hash_of
from outrider.engine.frontend import Frontend

ALICE, BOB, ADMIN = "or-alice-key", "or-bob-key", "or-admin-key"


def access_config(**changes: Any) -> AccessConfig:
    """Alice's and Bob's key, an administrator's; `changes` are of Alice's."""
    keys = [
        {"hash": hash_of(ALICE), "tenant": "alice", **changes},
        {"hash": hash_of(BOB), "tenant": "bob"},
    ]
    return AccessConfig(keys=keys, admin_keys=[hash_of(ADMIN)])  # type: ignore[arg-type]


@dataclass
class Server:
    """The edge, and a client of it."""

    engine: Any
    access: Access
    port: int
    http: httpx.Client

    def get(self, path: str, key: str | None = None, **headers: str) -> httpx.Response:
        return self.http.get(path, headers={**bearer(key), **headers})

    def complete(
        self, key: str | None = None, headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """A completion of five tokens."""
        return self.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "a cat", "max_tokens": 5, **body},
            headers={**bearer(key), **(headers or {})},
        )

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.engine.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.engine.stats()["running"] == 0


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture
def start(
    make_engine: Callable[..., Any], config: EngineConfig, limits: Any, end_server: Any
) -> Iterator[Callable[..., Server]]:
    running = []

    def start(access: AccessConfig | Access | None = None, **options: Any) -> Server:
        engine = make_engine()
        held = access if isinstance(access, Access) else Access(access)
        client = EngineClient(engine)
        metrics = EdgeMetrics("tiny")
        edge = Edge(client, Frontend(config, limits), metrics, access=held, **options)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(build_http(edge), log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        running.append((server, thread, engine))
        # without TLS, whose certificates take longer to read than a test
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False)
        return Server(engine, held, port, http)

    yield start
    for server, thread, engine in running:
        engine.shutdown()
        end_server(server, thread)
