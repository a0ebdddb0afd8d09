"""Ray, and Serve on it, for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from ..helpers.ports import free_port
from ..helpers.serving.forked import forked_workers


@pytest.fixture(scope="session", autouse=True)
def workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the slow suite, workers of a Ray that a test starts are forks; in the quick, Ray's own."""
    with forked_workers() if request.config.getoption("markexpr") == "slow" else nullcontext():
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray of four CPUs, whatever the machine has."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def serve_port(cluster: Any) -> Iterator[int]:
    """The port of Serve's proxy."""
    from ray import serve

    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
    finally:
        serve.shutdown()
