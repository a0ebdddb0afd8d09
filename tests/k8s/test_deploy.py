"""Overlays on this machine, as KubeRay runs them: Ray nodes by the commands that it makes of
`rayStartParams`, with a token, and the application deployed over the dashboard.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.tests.helpers.kubernetes import manifests
from outrider.tests.helpers.ports import free_port

IN_IMAGE = "/opt/models"
TOKEN = secrets.token_hex(16)  # of `authOptions`, in the Secret that KubeRay makes
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
DEMO_MODELS = manifests.ROOT / "demo" / "models"
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return"
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass
class Cluster:
    """The nodes of a manifest; addresses by name: `dashboard`, and a node's agent and exporter."""

    dashboard: str
    agents: list[str]
    exporters: list[str]


@contextmanager
def node(params: dict[str, str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start`, as the container runs it; it ends with all that it started."""
    env = {
        **os.environ,
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            manifests.ray_command(params), env=env, start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield process
        except AssertionError:
            output.seek(0)
            sys.stderr.write(output.read()[-4000:])  # pytest shows it
            raise
        finally:
            process.send_signal(signal.SIGTERM)  # --block: ends the node's processes
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:  # it waits for workers that end in peace
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=10)


@contextmanager
def cluster(manifest: dict[str, Any]) -> Iterator[Cluster]:
    """A Ray node for the head and for every pod of the manifest."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short: sockets lie below
    head, *groups = manifests.groups(manifest)
    address = f"127.0.0.1:{free_port()}"
    found = Cluster(f"http://127.0.0.1:{free_port()}", [], [])
    pods = [(head, None)] + [
        (group, address) for group in groups for _ in range(manifests.num_pods(group))
    ]
    try:
        with ExitStack() as nodes:
            for group, joined in pods:
                agent, exporter = free_port(), free_port()
                params = manifests.ray_params(group, joined) | {
                    "dashboard-agent-listen-port": str(agent),
                    "metrics-export-port": str(exporter),
                    "node-ip-address": "127.0.0.1",
                    "object-store-memory": str(100 * 2**20),
                }
                if joined is None:
                    params |= {
                        "port": address.rsplit(":", 1)[1],
                        "dashboard-host": "127.0.0.1",
                        "dashboard-port": found.dashboard.rsplit(":", 1)[1],
                        "ray-client-server-port": str(free_port()),
                    }
                nodes.enter_context(node(params, folder))
                found.agents.append(f"http://127.0.0.1:{agent}")
                found.exporters.append(f"http://127.0.0.1:{exporter}")
                answer(f"{found.agents[-1]}/api/healthz")  # the liveness probe
            yield found
            ended = httpx.delete(
                f"{found.dashboard}/api/serve/applications/", headers=HEADERS, timeout=60
            )
            assert ended.status_code == 200
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def answer(url: str, timeout_s: float = 120.0) -> httpx.Response:
    """The first answer of 200."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            response = httpx.get(url, headers=HEADERS, timeout=10)
            if response.status_code == 200:
                return response
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, url
        time.sleep(0.2)


def deploy(dashboard: str, config: dict[str, Any]) -> dict[str, Any]:
    """Puts the configuration and waits until it runs; the application's status."""
    url = f"{dashboard}/api/serve/applications/"
    httpx.put(url, json=config, headers=HEADERS, timeout=60).raise_for_status()
    deadline = time.monotonic() + 240
    while True:
        applications = httpx.get(url, headers=HEADERS, timeout=10).json()["applications"]
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


def local(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The configuration at ports of this machine; URLs of Serve's proxies and the ingresses."""
    config = copy.deepcopy(config)
    (app,) = config["applications"]
    proxies, own = free_port(), free_port()
    assert proxies != own
    config["http_options"] = {"host": "127.0.0.1", "port": proxies}
    app["args"]["serve"] |= {"host": "127.0.0.1", "port": own}
    return config, [f"http://127.0.0.1:{port}" for port in (proxies, own)]


def completion(url: str, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_the_demo_answers_and_changes_its_switches_in_place() -> None:
    manifest = manifests.load(manifests.DEMO)
    config, urls = local(manifests.serve_config(manifest))
    (app,) = config["applications"]
    model = app["args"]["model"]
    assert model.startswith(IN_IMAGE)
    app["args"]["model"] = model.replace(IN_IMAGE, str(DEMO_MODELS), 1)
    name = app["args"]["served_model_name"]
    with cluster(manifest) as nodes:
        before = deploy(nodes.dashboard, config)
        assert [httpx.get(f"{url}/-/healthz", timeout=10).text for url in urls] == ["success"] * 2

        with_drafts = {completion(url, name) for url in urls}
        assert len(with_drafts) == 1
        assert with_drafts != {""}

        events = httpx.post(
            f"{urls[1]}/v1/completions", json=manifests.request_of_the_page(), timeout=60
        ).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        pieces = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2]]
        assert "".join(choice["text"] for choices in pieces for choice in choices).strip()

        # What the component `pod-monitor` has Prometheus scrape.
        assert "outrider:num_requests_running" in answer(f"{urls[1]}/metrics").text
        for exporter in nodes.exporters:
            assert "ray_" in answer(f"{exporter}/metrics").text

        (engine,) = [item for item in app["deployments"] if item["name"] == "Engine"]
        engine["user_config"] = {"enabled": False, "max_draft_len": 0}
        after = deploy(nodes.dashboard, config)
        assert replicas(after) == replicas(before)
        assert {completion(url, name) for url in urls} == with_drafts
