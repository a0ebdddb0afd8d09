"""Sharing a cluster's Serve with other applications, and why one does not start."""

from __future__ import annotations

import pytest

from outrider.cluster.serve.args import ServeConfig
from outrider.cluster.serve.deployment import (
    RunningServe,
    check_room,
    deploy,
    start_serve,
    undeploy,
)
from outrider.errors import CheckpointError, ConfigError

RUNNING = RunningServe(8000, {"outrider": "/", "other": "/other"})


@pytest.mark.parametrize(
    ("section", "port", "field", "named"),
    [
        ({}, 8001, "name", "'outrider' at /; give this one another --name, --port"),
        ({"name": "mine"}, 8001, "route_prefix", "the application 'outrider'"),
        ({"name": "mine", "route_prefix": "/mine"}, 8000, "port", "Serve's own proxies use 8000"),
    ],
)
def test_a_second_application_is_refused_by_the_name_of_the_first(section, port, field, named):
    with pytest.raises(ConfigError, match=named) as caught:
        check_room(RUNNING, ServeConfig(**section, port=port))
    assert caught.value.field == field


def test_a_second_application_of_its_own_name_and_route_has_room():
    section = ServeConfig(name="mine", route_prefix="/mine")
    check_room(RUNNING, section)


@pytest.mark.ray
def test_what_an_engine_raises_is_raised_here_and_others_go_on():
    ray = pytest.importorskip("ray")
    from ray import serve

    @serve.deployment
    class Fine:
        def __call__(self) -> str:
            return "fine"

    @serve.deployment(name="Engine")
    class Broken:
        def __init__(self) -> None:
            raise CheckpointError("model: /m: the file model.safetensors ends too early")

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        first = ServeConfig(name="first")
        start_serve()
        deploy(Fine.bind(), first)
        second = ServeConfig(name="second", route_prefix="/second", graceful_shutdown_timeout_s=0)
        with pytest.raises(CheckpointError, match="^model: /m: the file model.safetensors ends"):
            deploy(Broken.bind(), second)
        undeploy(second)
        assert set(serve.status().applications) == {"first"}
        assert serve.get_app_handle("first").remote().result() == "fine"
        undeploy(first)
        with pytest.raises(ValueError, match="Failed to look up actor"):
            ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    finally:
        ray.shutdown()
