"""Sharing a cluster's Serve with other applications, and why one does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.serve.args import ServeConfig
from outrider.cluster.serve.deployment import (
    RunningServe,
    check_room,
    deploy,
    start_serve,
    undeploy,
)
from outrider.cluster.serve.handle import RefusedError, RefusedPromptError
from outrider.config.access import hash_of
from outrider.errors import AuthenticationError, CheckpointError, ConfigError

MODEL = Path(__file__).parents[3] / "demo" / "models" / "target"
KEY = "or-key"
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

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
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


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_another_application_composes_with_the_ingress_by_its_handle():
    """Over Serve's handle, without a port: answers, refusals and keys are those of HTTP."""
    ray = pytest.importorskip("ray")
    from ray import serve

    from outrider.cluster.app import build_app

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Caller:
        async def __call__(self, path: str, body: dict[str, Any], key: str | None) -> Any:
            ingress = serve.get_deployment_handle("Ingress", "test")
            return await ingress.post.remote(path, body, key)

    args = {
        "model": str(MODEL),
        "served_model_name": "demo",
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cpu_bytes": 2**26,
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 4},
        "serve": {"port": None, "access": {"keys": [{"hash": hash_of(KEY), "tenant": "caller"}]}},
    }
    body = {"prompt": "def main(", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        start_serve()
        serve.run(build_app(args), name="test")
        call = serve.run(Caller.bind(), name="caller", route_prefix="/caller")
        answer = call.remote("/v1/completions", body, KEY).result()
        assert answer["status"] == 200
        (choice,) = answer["body"]["choices"]
        assert (
            answer["body"]["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == 8
        )
        assert choice["text"]
        again = call.remote("/v1/completions", body, KEY).result()
        assert again["body"]["choices"] == [choice]
        several = {"prompt": [body["prompt"]] * 3, "max_tokens": 1}
        assert len(call.remote("/v1/completions", several, KEY).result()["body"]["choices"]) == 3

        refused = call.remote("/v1/completions", {**body, "max_tokens": -1}, KEY).result()
        assert (refused["status"], refused["body"]["error"]["param"]) == (400, "max_tokens")
        assert call.remote("/v1/completions", body, None).result()["status"] == 401
        assert call.remote("/v1/nothing", body, KEY).result()["status"] == 404

        handle = serve.get_deployment_handle("Ingress", "test")
        assert handle.completions.remote(body, key=KEY).result()["choices"] == [choice]
        streaming = handle.options(stream=True)
        assert [each["choices"] for each in streaming.completions.remote(body, key=KEY)] == [
            [choice]
        ]
        chunks = list(streaming.completions.remote({**body, "stream": True}, key=KEY))
        assert "".join(each["choices"][0]["text"] for each in chunks) == choice["text"]
        assert len(chunks) > 1
        wrong = {**body, "max_tokens": -1}
        for method, given, kind, field in (
            (handle.completions, {**body, "stream": True}, RefusedError, "stream"),
            (handle.completions, wrong, RefusedError, "max_tokens"),
            (handle.chat, {"messages": []}, RefusedError, "messages"),
            (handle.generate, {"prompt": [0] * 999}, RefusedPromptError, "prompt"),
        ):
            with pytest.raises(kind) as caught:
                method.remote(given, key=KEY).result()
            assert caught.value.field == field
        with pytest.raises(RefusedError, match="max_tokens"):
            list(streaming.completions.remote(wrong, key=KEY))
        with pytest.raises(AuthenticationError):
            handle.completions.remote(body).result()
    finally:
        serve.shutdown()
        ray.shutdown()
