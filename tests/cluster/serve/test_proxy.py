"""The way through Serve's own proxy: hostile connections, keys, a full queue."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cluster.serve.access.keys import hash_of
from outrider.cluster.serve.connections import ConnectionLimits, sockets_folder
from outrider.tests.helpers.ports import completion, connect, dribble, rest, wait_for

from ...helpers.ports import free_port

MODEL = Path(__file__).parents[3] / "demo" / "models" / "target"
KEY, ADMIN = "or-key", "or-admin"
LIMITS = ConnectionLimits(header_timeout_s=2.0, write_timeout_s=0.5, send_buffer_bytes=16384)
ARGS: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "demo",
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_queued_requests": 8,
    "kv_cpu_bytes": 2**26,
    "serve": {
        "body_timeout_s": 2.0,
        "access": {
            "keys": [{"hash": hash_of(KEY), "tenant": "somebody"}],
            "admin_keys": [hash_of(ADMIN)],
        },
    },
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    import ray
    from ray import serve

    from outrider.cluster.app import build_app

    number = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LIMITS.variables().items():
            patch.setenv(name, value)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": number})
            serve.run(build_app(ARGS), name="test")
            yield number
        finally:
            serve.shutdown()
            ray.shutdown()


def send(connection: socket.socket, **body: Any) -> None:
    whole = {"model": "demo", "prompt": "def main(", "temperature": 0, **body}
    connection.sendall(completion(whole, authorization=f"Bearer {KEY}"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_through_the_proxy(port: int) -> None:
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
    user, admin = {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {ADMIN}"}

    def engine() -> dict[str, Any]:
        (only,) = http.get("/stats", headers=admin).json()["engines"]
        return dict(only)

    def is_free() -> bool:
        kv, waiting = engine()["kv"], engine()["waiting"]
        return waiting == 0 and kv["num_free_blocks"] == kv["num_blocks"]

    assert http.get("/health").status_code == 200
    assert http.get("/v1/models").status_code == 401
    assert http.get("/stats", headers=user).status_code == 403
    assert http.get("/v1/models", headers=user).status_code == 200

    with connect(port) as headers, connect(port) as body, ThreadPoolExecutor(2) as threads:
        headers.sendall(b"GET /health HTTP/1.1\r\nx")
        body.sendall(completion({"prompt": "a" * 1000}, authorization=f"Bearer {KEY}")[:-900])
        answers = threads.map(dribble, (headers, body), (b"x", b"x"))
        assert all(b"HTTP/1.1 408" in answer for answer in answers)

    before = engine()["requests"]["num_finished"]
    with connect(port, 4096) as deaf:
        send(deaf, max_tokens=1900, ignore_eos=True, stream=True, logprobs=5, n=8)
        wait_for(lambda: engine()["running"] > 0)
        body_of = {"model": "demo", "prompt": "a", "max_tokens": 4}
        assert http.post("/v1/completions", json=body_of, headers=user).status_code == 200
        wait_for(is_free)
        assert not rest(deaf).endswith(b"[DONE]\n\n")
    assert engine()["requests"]["num_finished"] < before + 8 + 1  # it was aborted
    assert _num_relay_connections() > 0  # streams did not go through Ray

    _a_full_queue(http, user)
    wait_for(is_free)


def _a_full_queue(http: httpx.Client, user: dict[str, str]) -> None:
    """Every request is answered: 200, or 429 with the time to wait."""
    body = {"model": "demo", "prompt": "a", "max_tokens": 400, "ignore_eos": True}

    def ask(_: int) -> httpx.Response:
        return http.post("/v1/completions", json=body, headers=user)

    with ThreadPoolExecutor(48) as threads:
        answers = list(threads.map(ask, range(96)))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    long = {**body, "max_tokens": 1900, "timeout": 0.05}
    late = http.post("/v1/completions", json=long, headers=user)
    assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout")


def _num_relay_connections() -> int:
    """Accepted connections of the proxy's Unix socket, which lies in Ray's folder."""
    rows = Path("/proc/net/unix").read_text().splitlines()
    folder = f"{sockets_folder()}/outrider-"
    return len([row for row in rows if folder in row and row.split()[5] == "03"])
