"""The CPU overlay's application on a local Ray, deployed as KubeRay does: over the dashboard."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray._private.authentication.http_token_authentication import (
    get_auth_headers_if_auth_enabled as token_headers,
)

from outrider.tests.helpers.kubernetes import manifests
from outrider.tests.helpers.ports import free_port

IN_IMAGE = "/opt/models"
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return"


@pytest.fixture
def dashboard() -> Iterator[str]:
    """A Ray with the demo worker's CPUs; the address of its dashboard."""
    (group,) = manifests.workers(manifests.load(manifests.DEMO))
    context = ray.init(
        address="local",
        num_cpus=int(manifests.ray_resources(group)["CPU"]),
        num_gpus=0,
        include_dashboard=True,
        dashboard_port=free_port(),
        log_to_driver=False,
        namespace="outrider-k8s-test",
    )
    yield f"http://{context.dashboard_url}"
    serve.shutdown()
    ray.shutdown()


def deploy(dashboard: str, config: dict[str, Any]) -> dict[str, Any]:
    """Puts the configuration and waits until it runs; the application's status."""
    url = f"{dashboard}/api/serve/applications/"
    headers = token_headers({})  # as KubeRay has them from the cluster's secret
    answer = httpx.put(url, json=config, headers=headers, timeout=60)
    answer.raise_for_status()
    deadline = time.monotonic() + 240
    while True:
        applications = httpx.get(url, headers=headers, timeout=10).json()["applications"]
        (status,) = applications.values()
        healthy = all(each["status"] == "HEALTHY" for each in status["deployments"].values())
        if status["status"] == "RUNNING" and healthy:
            return status
        assert status["status"] not in ("DEPLOY_FAILED", "UNHEALTHY"), status["message"]
        assert time.monotonic() < deadline, json.dumps(status["deployments"])[:4000]
        time.sleep(0.2)


def replicas(status: dict[str, Any]) -> set[str]:
    return {
        replica["replica_id"]
        for deployment in status["deployments"].values()
        for replica in deployment["replicas"]
    }


@pytest.mark.ray
@pytest.mark.slow
def test_the_demo_answers_and_changes_its_switches_in_place(dashboard: str) -> None:
    config = copy.deepcopy(manifests.serve_config(manifests.load(manifests.DEMO)))
    (app,) = config["applications"]
    ports = [free_port(), free_port()]
    assert len(set(ports)) == 2
    config["http_options"] = {"host": "127.0.0.1", "port": ports[0]}
    app["args"]["serve"] |= {"host": "127.0.0.1", "port": ports[1]}
    model = app["args"]["model"]
    assert model.startswith(IN_IMAGE)
    app["args"]["model"] = model.replace(IN_IMAGE, str(manifests.ROOT / "demo" / "models"), 1)

    before = deploy(dashboard, config)
    urls = [f"http://127.0.0.1:{port}" for port in ports]  # Serve's proxy, the ingress itself
    assert [httpx.get(f"{url}/-/healthz", timeout=10).text for url in urls] == ["success"] * 2
    body = {
        "model": app["args"]["served_model_name"],
        "prompt": PROMPT,
        "max_tokens": 16,
        "temperature": 0,
    }

    def texts() -> set[str]:
        """What is answered at either port."""
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60) for url in urls]
        assert [answer.status_code for answer in answers] == [200, 200], answers[-1].text
        return {answer.json()["choices"][0]["text"] for answer in answers}

    with_drafts = texts()
    assert len(with_drafts) == 1
    assert with_drafts != {""}

    events = httpx.post(
        f"{urls[1]}/v1/completions", json=manifests.request_of_the_page(), timeout=60
    ).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2]]
    assert "".join(choice["text"] for choices in pieces for choice in choices).strip()

    (engine,) = [item for item in app["deployments"] if item["name"] == "Engine"]
    engine["user_config"] = {"enabled": False, "max_draft_len": 0}
    after = deploy(dashboard, config)
    assert replicas(after) == replicas(before)
    assert texts() == with_drafts
