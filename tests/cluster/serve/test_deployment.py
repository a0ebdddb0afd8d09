"""Sharing a cluster's Serve with other applications, and why one does not start."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.drafters import end_group, facts_of, find_group, group_names
from outrider.cluster.serve.args import ServeConfig
from outrider.cluster.serve.deployment import (
    RunningServe,
    check_room,
    deploy,
    start_serve,
    undeploy,
)
from outrider.cluster.serve.drafters import HeldGroup
from outrider.cluster.serve.ingress import RefusedError, RefusedPromptError
from outrider.cluster.serve.models import LoadingBoard, loading_lines
from outrider.config import DrafterGroupConfig, parse
from outrider.config.access import hash_of
from outrider.errors import AuthenticationError, CheckpointError, ConfigError, ResourcesError
from outrider.workers.model.checkpoint.progress import LOGGER

from ...helpers.ports import wait_for

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


@pytest.mark.slow
@pytest.mark.ray
def test_what_an_engine_raises_is_raised_here_and_others_go_on():
    ray = pytest.importorskip("ray")
    from ray import serve

    line = "weights: 1.0 of 2.0 GiB read, 0.20 GiB/s, about 5 s left"

    @serve.deployment
    class Fine:
        def __init__(self) -> None:
            with LoadingBoard("first", "replica"):
                logging.getLogger(LOGGER).info("%s", line)
                time.sleep(4.0)

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
        told: list[str] = []
        deploy(Fine.bind(), first, told.extend)
        assert told == [line]
        assert loading_lines("first") == []
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


SMALL = {
    "name": "small",
    "model": str(MODEL.parent / "draft"),
    "dtype": "float32",
    "kv_cpu_bytes": 2**26,
    "resources": {"cpus_per_worker": 0.25},
}


def check_held_group(args: dict[str, Any]) -> None:
    """Another application uses a group of the same settings, and is refused one of others."""

    def held(**keys: Any) -> HeldGroup:
        return HeldGroup(parse(DrafterGroupConfig, {**SMALL, **keys}), "here", "other")

    facts = facts_of(find_group("small", "name"))
    assert (facts.applications, facts.num_up) == (("test",), 1)
    scaling = {"max_members": 2}
    for wrong, message in (
        ({"max_engines": 3}, "max_engines is 4, not 3"),
        ({"dtype": "bfloat16"}, "dtype is 'float32', not 'bfloat16'"),
        ({"autoscaling_config": scaling}, "its number of members is 1, not"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            held(**wrong).hold()
        assert caught.value.field == "here.name"
    with pytest.raises(ConfigError, match="'/nowhere' does not exist") as caught:
        held(model="/nowhere")
    assert caught.value.field == "here.model"
    other = held()
    assert facts_of(other.hold()).applications == ("other", "test")
    other.release()
    assert facts_of(find_group("small", "name")).applications == ("test",)
    none = held(name="none", autoscaling_config={"min_members": 0, "max_members": 1})
    asleep = none.hold()
    none.wait(asleep)
    assert not facts_of(asleep).members
    none.release()
    new = held(name="new", resources={"cpus_per_worker": 99, "placement_timeout_s": 0.5})
    try:
        with pytest.raises(ResourcesError, match="here: .*tensor_parallel_size: 1 workers of"):
            new.wait(new.hold())
    finally:
        new.release()
    wait_for(lambda: group_names() == ["small"])


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
        "speculative_config": {"decoding_type": "DraftTarget", "drafter_group": "small"},
        "serve": {
            "port": None,
            "access": {"keys": [{"hash": hash_of(KEY), "tenant": "caller"}]},
            "drafter_groups": [SMALL],
        },
    }
    body = {"prompt": "def main(", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        start_serve()
        serve.run(build_app(args), name="test")
        check_held_group(args)
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

        def drafts() -> bool:
            longer = {**body, "max_tokens": 64}
            found = handle.completions.remote(longer, key=KEY).result()["usage"]["speculation"]
            return found["num_accepted_tokens"] > 0

        wait_for(drafts)
        end_group(find_group("small", "name"))
        wait_for(lambda: group_names() == ["small"] and drafts())  # its application has it again
        serve.delete("test")
        wait_for(lambda: not group_names())
    finally:
        serve.shutdown()
        ray.shutdown()
