"""Ingresses that listen themselves, without Serve's proxy on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from outrider.client import ResumingTransport, stream_events
from outrider.cluster.serve.access.keys import hash_of
from outrider.cluster.serve.connections import ConnectionLimits

from ...helpers.ports import connect, dribble, free_port, wait_for
from ...helpers.serving.kills import kill_all
from ...helpers.serving.metrics import num_aborted

MODEL = Path(__file__).parents[3] / "demo" / "models" / "target"
KEY, ADMIN = "or-key", "or-admin"
LIMITS = ConnectionLimits(header_timeout_s=2.0, write_timeout_s=1.0, send_buffer_bytes=16384)
NUM_PORTS = 12
BODY: dict[str, Any] = {"prompt": "def main(", "max_tokens": 1200, "ignore_eos": True}
ARGS: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "demo",
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cpu_bytes": 2**26,
    "speculative_config": {"decoding_type": "NGram", "max_draft_len": 4},
    "serve": {
        "header_timeout_s": LIMITS.header_timeout_s,
        "write_timeout_s": LIMITS.write_timeout_s,
        "access": {
            "keys": [{"hash": hash_of(KEY), "tenant": "somebody"}],
            "admin_keys": [hash_of(ADMIN)],
        },
    },
}


@pytest.fixture(scope="module")
def ports() -> Iterator[range]:
    """The ports of the ingresses, and of those that replace them."""
    import ray
    from ray import serve

    from outrider.cluster.app import build_app

    first = free_port()
    variables = {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + NUM_PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
            serve.run(build_app(ARGS), name="test")
            yield range(first, first + NUM_PORTS)
        finally:
            serve.shutdown()
            ray.shutdown()


class AnyPort(httpx.BaseTransport):
    """Sends requests to the first port on which somebody listens, as a load balancer would."""

    def __init__(self, ports: range) -> None:
        self._ports = ports
        self._http = httpx.HTTPTransport()
        self.num_requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        for port in self._ports:
            url = request.url.copy_with(port=port)
            again = httpx.Request(request.method, url, headers=request.headers, content=body)
            try:
                answer = self._http.handle_request(again)
            except httpx.ConnectError:
                continue
            self.num_requests += 1
            return answer
        raise httpx.ConnectError("nobody listens")

    def close(self) -> None:
        self._http.close()


def listening(ports: range) -> list[int]:
    found = []
    for port in ports:
        try:
            connect(port).close()
            found.append(port)
        except OSError:
            continue
    return found


def read(transport: AnyPort, started: Event) -> str:
    """A stream's text; sets `started` once there is some."""
    text = ""
    resuming = ResumingTransport(transport, resume_for_s=120.0)
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(transport=resuming, timeout=120, headers=headers) as http:
        url = "http://127.0.0.1/v1/completions"
        for count, event in enumerate(stream_events(http, url, {**BODY, "temperature": 0})):
            text += event["choices"][0]["text"]
            if count == 10:
                started.set()
    return text


class Killing(Event):
    """Kills every ingress once it is set."""

    def set(self) -> None:
        if not self.is_set():
            kill_all("test:Ingress")
        super().set()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_the_proxy(ports: range) -> None:
    wait_for(lambda: len(listening(ports)) == 2)
    port = listening(ports)[0]
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    user, admin = {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {ADMIN}"}

    def is_free() -> bool:
        (only,) = http.get("/stats", headers=admin).json()["engines"]
        return bool(only["kv"]["num_free_blocks"] == only["kv"]["num_blocks"])

    assert http.get("/health").status_code == 200
    assert http.get("/v1/models").status_code == 401
    assert http.get("/stats", headers=user).status_code == 403

    def aborted() -> int:
        return num_aborted(http.get("/metrics", headers=admin).text)

    body = {**BODY, "temperature": 1}
    late = http.post("/v1/completions", json={**body, "timeout": 0.05}, headers=user)
    assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout")
    with connect(port) as headers:
        headers.sendall(b"GET /health HTTP/1.1\r\nx")
        assert b"HTTP/1.1 408" in dribble(headers, b"x")
    before = aborted()
    with http.stream(
        "POST", "/v1/completions", json={**body, "stream": True}, headers=user
    ) as stream:
        next(stream.iter_lines())
    wait_for(lambda: is_free() and aborted() == before + 1)

    expected = read(AnyPort(ports), Event())
    transport = AnyPort(ports)
    while transport.num_requests < 2:  # until a stream was on the way when it broke
        transport = AnyPort(ports)
        assert read(transport, Killing()) == expected
        deadline = time.monotonic() + 60
        while len(listening(ports)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
