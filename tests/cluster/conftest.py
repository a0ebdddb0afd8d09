"""Ray, and Serve on it, for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..helpers.ports import free_port


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
