"""Ingresses that share a port: hostile clients, keys, a full queue, kills, and Serve's proxy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from outrider.client import ResumingTransport, stream_events
from outrider.config.access import hash_of

from ...helpers.ports import completion, connect, dribble, free_port, rest, wait_for
from ...helpers.serving.kills import below, kill, kill_all
from ...helpers.serving.metrics import num_aborted

MODEL = Path(__file__).parents[3] / "demo" / "models" / "target"
KEY, ADMIN = "or-key", "or-admin"
USER = {"Authorization": f"Bearer {KEY}"}
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN}"}
BODY: dict[str, Any] = {"prompt": "def main(", "max_tokens": 1200, "ignore_eos": True}
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Server:
    """Where the front door and Serve's proxy are."""

    port: int
    proxy_port: int

    def http(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120, **settings)

    def engine(self) -> dict[str, Any]:
        with self.http(headers=ADMIN_HEADERS) as http:
            (only,) = http.get("/stats").json()["engines"]
        return dict(only)

    def is_free(self) -> bool:
        kv, waiting = self.engine()["kv"], self.engine()["waiting"]
        return waiting == 0 and bool(kv["num_free_blocks"] == kv["num_blocks"])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two ingresses, one engine."""
    import ray
    from ray import serve

    from outrider.cluster.app import build_app

    found = Server(free_port(), free_port())
    section = {
        "port": found.port,
        "num_ingress_replicas": 2,
        "header_timeout_s": 2.0,
        "body_timeout_s": 2.0,
        "write_timeout_s": 0.5,
        "access": {
            "keys": [{"hash": hash_of(KEY), "tenant": "somebody"}],
            "admin_keys": [hash_of(ADMIN)],
        },
    }
    arguments = {
        "model": str(MODEL),
        "served_model_name": "demo",
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "max_queued_requests": 8,
        "kv_cpu_bytes": 2**26,
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 4},
        "resources": {"spare_workers": False},
        "serve": section,
    }
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": found.proxy_port})
        serve.run(build_app(arguments), name="test")
        yield found
    finally:
        serve.shutdown()
        ray.shutdown()


def test_keys_and_hostile_clients(server: Server) -> None:
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert http.get("/stats", headers=USER).status_code == 403
        assert http.get("/v1/models", headers=USER).status_code == 200
        with (
            connect(server.port) as headers,
            connect(server.port) as body,
            ThreadPoolExecutor(2) as threads,
        ):
            headers.sendall(b"GET /health HTTP/1.1\r\nx")
            body.sendall(completion({"prompt": "a" * 1000}, authorization=f"Bearer {KEY}")[:-900])
            answers = threads.map(dribble, (headers, body), (b"x", b"x"))
            assert all(b"HTTP/1.1 408" in answer for answer in answers)
        before = server.engine()["requests"]["num_finished"]
        with connect(server.port, 4096) as deaf:
            many = {"max_tokens": 1900, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 8}
            whole = {"model": "demo", "prompt": "def main(", "temperature": 0, **many}
            deaf.sendall(completion(whole, authorization=f"Bearer {KEY}"))
            wait_for(lambda: server.engine()["running"] > 0)
            short = {"model": "demo", "prompt": "a", "max_tokens": 4}
            assert http.post("/v1/completions", json=short, headers=USER).status_code == 200
            wait_for(server.is_free)
            assert not rest(deaf).endswith(b"[DONE]\n\n")
        assert server.engine()["requests"]["num_finished"] < before + 8 + 1  # it was aborted


def test_a_client_that_hangs_up_and_a_time_that_is_over(server: Server) -> None:
    body = {**BODY, "temperature": 1}

    def aborted() -> int:
        with server.http(headers=ADMIN_HEADERS) as http:
            return num_aborted(http.get("/metrics").text)

    with server.http(headers=USER) as http:
        late = http.post("/v1/completions", json={**body, "timeout": 0.05})
        assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout")
        before = aborted()
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            next(stream.iter_lines())
        wait_for(lambda: server.is_free() and aborted() == before + 1)
        # A half-closed connection is one that reads no more than what it has asked for.
        with connect(server.port) as half:
            short = {"prompt": "a", "max_tokens": 4}
            half.sendall(completion(short, authorization=f"Bearer {KEY}", connection="close"))
            half.shutdown(socket.SHUT_WR)
            rest(half)
        wait_for(server.is_free)


def test_a_full_queue(server: Server) -> None:
    """Every request is answered: 200, or 429 with the time to wait."""
    body = {"model": "demo", "prompt": "a", "max_tokens": 400, "ignore_eos": True}
    with server.http(headers=USER) as http:

        def ask(_: int) -> httpx.Response:
            return http.post("/v1/completions", json=body)

        with ThreadPoolExecutor(48) as threads:
            answers = list(threads.map(ask, range(96)))
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    wait_for(server.is_free)


def test_serves_proxy_has_the_same_routes(server: Server) -> None:
    url = f"http://127.0.0.1:{server.proxy_port}"
    body = {"model": "demo", "prompt": "def main(", "max_tokens": 8, "temperature": 0, "seed": 1}
    answers = [
        httpx.post(f"{base}/v1/completions", json=body, headers=USER, timeout=60).json()["choices"]
        for base in (url, f"http://127.0.0.1:{server.port}")
    ]
    assert answers[0] == answers[1]
    events = httpx.post(
        f"{url}/v1/completions", json={**body, "stream": True}, headers=USER, timeout=60
    ).text
    assert events.endswith("data: [DONE]\n\n")
    assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401


def test_a_killed_ingress_breaks_its_own_connections_alone(server: Server) -> None:
    """New connections are answered at once, while Serve replaces it."""
    ingresses = below("test:Ingress")
    assert len(ingresses) == 2
    with server.http(headers=USER) as other:
        other.get("/health")
        kill(ingresses[0])
        for _ in range(20):
            with server.http(headers=USER) as http:
                short = {"prompt": "a", "max_tokens": 2}
                assert http.post("/v1/completions", json=short).status_code == 200
    wait_for(lambda: len(below("test:Ingress")) == 2)


def test_serving_goes_on_without_serves_controller(server: Server) -> None:
    (controller,) = below("ray::ServeController")
    kill(controller)
    with server.http(headers=USER) as http:
        for _ in range(10):
            short = {"prompt": "a", "max_tokens": 2}
            assert http.post("/v1/completions", json=short).status_code == 200
        assert http.get("/health").status_code == 200
    wait_for(lambda: below("ray::ServeController"))


class SomeIngress(httpx.BaseTransport):
    """Sends requests for as long as nobody listens, and counts those that were taken."""

    def __init__(self, port: int) -> None:
        self._http = httpx.HTTPTransport()
        self._port = port
        self.num_requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        url = request.url.copy_with(port=self._port)
        again = httpx.Request(request.method, url, headers=request.headers, content=body)
        answer = self._http.handle_request(again)
        self.num_requests += 1
        return answer

    def close(self) -> None:
        self._http.close()


class Killing(Event):
    """Kills every ingress once it is set."""

    def set(self) -> None:
        if not self.is_set():
            kill_all("test:Ingress")
        super().set()


def read(transport: SomeIngress, started: Event) -> str:
    """A stream's text; sets `started` once there is some."""
    text = ""
    resuming = ResumingTransport(transport, resume_for_s=120.0)
    with httpx.Client(transport=resuming, timeout=120, headers=USER) as http:
        url = "http://127.0.0.1/v1/completions"
        for count, event in enumerate(stream_events(http, url, {**BODY, "temperature": 0})):
            text += event["choices"][0]["text"]
            if count == 10:
                started.set()
    return text


def test_a_stream_outlives_all_ingresses(server: Server) -> None:
    expected = read(SomeIngress(server.port), Event())
    transport = SomeIngress(server.port)
    while transport.num_requests < 2:  # until a stream was on the way when it broke
        wait_for(lambda: len(below("test:Ingress")) == 2)
        transport = SomeIngress(server.port)
        assert read(transport, Killing()) == expected


def test_engines_are_added_for_what_runs_and_waits(server: Server) -> None:
    """Of a second application: another comes while there is more than a batch; nobody notices."""
    from ray import serve

    from outrider.cluster.app import build_app

    port = free_port()
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2,
        "upscale_delay_s": 0.5, "look_back_period_s": 3.0, "metrics_interval_s": 0.5,
    }  # fmt: skip
    arguments = {
        "model": str(MODEL), "served_model_name": "demo", "max_num_seqs": 2, "kv_cpu_bytes": 2**26,
        "resources": {"spare_workers": False},
        "dtype": "float32",
        "serve": {
            "name": "scaled", "port": port, "num_ingress_replicas": 1,
            "autoscaling_config": scaling,
        },
    }  # fmt: skip
    serve.run(build_app(arguments), name="scaled", route_prefix="/scaled")
    try:
        is_scaled = Event()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
            body = {"prompt": "def main(", "max_tokens": 200, "ignore_eos": True}

            def ask(_: int) -> set[int]:
                """One request after the other, until one was sent to both engines."""
                found: set[int] = set()
                is_last = False
                while not is_last:
                    is_last = is_scaled.is_set()
                    found.add(http.post("/v1/completions", json=body).status_code)
                return found

            with ThreadPoolExecutor(12) as threads:
                answers = threads.map(ask, range(12))
                try:
                    wait_for(lambda: len(below("scaled:Engine")) == 2, 200)
                finally:
                    is_scaled.set()
                assert set().union(*answers) == {200}
    finally:
        serve.delete("scaled")
