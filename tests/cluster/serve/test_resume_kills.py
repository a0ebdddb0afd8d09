"""Streams that continue after the death of every process on their way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from outrider.client import ResumingTransport, stream_events

from ...helpers.ports import free_port, wait_for
from ...helpers.serving.kills import below, kill_all

MODEL = Path(__file__).parents[3] / "demo" / "models" / "target"
ARGS: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "demo",
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cpu_bytes": 2**26,
    "speculative_config": {"decoding_type": "NGram", "max_draft_len": 4},
}
BODY: dict[str, Any] = {"prompt": "def main(", "ignore_eos": True, "logprobs": 1}


@dataclass
class Server:
    """The application, and the settings that it has last been given."""

    port: int
    proxy_port: int
    length: int = 4

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    def change(self) -> None:
        """Gives its engine another length of drafts, without waiting for it."""
        self.length = 6 - self.length
        deploy(self.port, self.proxy_port, {"max_draft_len": self.length})


@pytest.fixture(scope="module")
def server(serve_port: int) -> Server:
    started = Server(free_port(), serve_port)
    deploy(started.port, serve_port, {"max_draft_len": started.length})
    health = f"http://127.0.0.1:{started.port}/health"
    wait_for(lambda: is_healthy(health), timeout_s=240)
    return started


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(autouse=True)
def _all_are_there(server: Server) -> None:
    """What an earlier test has killed is back."""
    health = f"http://127.0.0.1:{server.port}/health"
    wait_for(lambda: len(below("test:Ingress")) == 2 and is_healthy(health), timeout_s=240)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def deploy(port: int, proxy_port: int, user_config: dict[str, Any]) -> None:
    """As `serve deploy` does: a change of `user_config` reaches replicas that run."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": "test",
        "route_prefix": "/",
        "import_path": "outrider.cluster.app:build_app",
        "args": {**ARGS, "serve": {"num_ingress_replicas": 2, "port": port}},
        "deployments": [{"name": "Engine", "user_config": user_config}],
    }
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": proxy_port},
        "applications": [application],
    }
    _get_global_client().deploy_apps(ServeDeploySchema(**config))


class CountingTransport(httpx.HTTPTransport):
    """Counts requests, also those that a transport above it repeats."""

    num_requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.num_requests += 1
        return super().handle_request(request)


@dataclass
class Stream:
    """What a client has read, and in how many requests."""

    text: str
    logprobs: list[float]
    num_requests: int


# More than any machine generates while all streams begin and processes are killed.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 1900},
    {"temperature": 1, "seed": 5, "max_tokens": 1200},
)


def read(url: str, fields: dict[str, Any], counting: CountingTransport, started: Event) -> Stream:
    """A stream's text and log-probabilities; sets `started` once there are some."""
    text, logprobs = "", []
    transport = ResumingTransport(counting, resume_for_s=300.0)
    with httpx.Client(transport=transport, timeout=300) as http:
        for count, event in enumerate(stream_events(http, url, {**BODY, **fields})):
            (choice,) = event["choices"]
            text += choice["text"]
            logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            if count == 10:
                started.set()
    return Stream(text, logprobs, counting.num_requests)


def read_all(
    url: str,
    kills: tuple[str, ...],
    victims: tuple[int, ...] = (),
    in_replay: tuple[str, ...] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """A stream per setting, all at once; `victims` and all named in `kills` die on their way.

    Args:
        in_replay: die as soon as every stream has been asked for again.
        meanwhile: called before the kills.
    """
    started, counting = [Event() for _ in SETTINGS], [CountingTransport() for _ in SETTINGS]
    with ThreadPoolExecutor(len(SETTINGS)) as threads:
        streams = threads.map(partial(read, url), SETTINGS, counting, started)
        for event in started:
            assert event.wait(120)
        meanwhile()
        for name in kills:
            kill_all(name)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        if in_replay:
            wait_for(lambda: all(each.num_requests > 1 for each in counting), timeout_s=120)
            for name in in_replay:
                kill_all(name)
        return list(streams)


@pytest.fixture(scope="module")
def expected(url: str) -> list[Stream]:
    """What is read where nothing dies."""
    return read_all(url, ())


def check(found: list[Stream], expected: list[Stream]) -> None:
    """The same texts and log-probabilities."""
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.text == wanted.text
        assert mine.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stream_continues_on_the_other_ingress(url: str, expected: list[Stream]) -> None:
    """Until the one that was killed had a stream; Serve chooses which of the two gets one."""
    num_resumed = 0
    while not num_resumed:
        deadline = time.monotonic() + 120
        while len(ingresses := below("test:Ingress")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        victim, survivor = ingresses[:2]
        found = read_all(url, (), (victim,))
        check(found, expected)
        num_resumed = sum(stream.num_requests > 1 for stream in found)
        assert survivor in below("test:Ingress")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_process_on_the_way_may_die(url: str, expected: list[Stream]) -> None:
    for kills in (("test:Ingress",), ("test:Ingress", "test:Engine")):
        found = read_all(url, kills)
        check(found, expected)
        assert all(stream.num_requests > 1 for stream in found), f"over before {kills} died"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_may_die_while_streams_are_replayed(url: str, expected: list[Stream]) -> None:
    check(read_all(url, ("test:Ingress",), in_replay=("ray::Rank",)), expected)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["test:Engine", "ray::Rank", "test:Ingress"])
def test_a_process_may_die_while_settings_change(
    server: Server, expected: list[Stream], name: str
) -> None:
    """The text stays the same, since the length of drafts does not change it."""
    check(read_all(server.url, (name,), meanwhile=server.change), expected)
