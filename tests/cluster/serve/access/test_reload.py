"""API keys of a running Serve application are replaced in place, and streams go on."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.config.access import hash_of

MODEL = Path(__file__).parents[4] / "demo" / "models" / "target"
ARGS: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "demo",
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cpu_bytes": 2**26,
    "max_num_seqs": 2,
    "serve": {"port": None},
}
PROMPT = [5, 6, 7]
BODY = {"model": "demo", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
NUM_STREAMS = 2  # per key
REVOKED, KEPT, NEW, ADMIN = "revoked-key", "kept-key", "new-key", "admin-key"


def apply(port: int, *keys: str) -> None:
    """A Serve configuration file with these keys, as `serve deploy` applies it."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    listed = [{"hash": hash_of(key), "tenant": "all"} for key in keys]
    access = {"keys": listed, "admin_keys": [hash_of(ADMIN)]}
    application = {
        "name": "test",
        "route_prefix": "/",
        "import_path": "outrider.cluster.app:build_app",
        "args": ARGS,
        "deployments": [{"name": "Ingress", "user_config": access}],
    }
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }
    _get_global_client().deploy_apps(ServeDeploySchema(**config))


def replicas() -> set[str]:
    """Names of the application's replicas, which are new where one was replaced."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    found = {each["name"] for each in named if each["name"].startswith("SERVE_REPLICA::test#")}
    assert len(found) == 3, named  # an engine and two ingresses
    return found


def status(http: httpx.Client, key: str) -> int:
    """What the key gets, also while the engine is busy."""
    return http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


def is_everywhere(http: httpx.Client, key: str, wanted: int) -> bool:
    """Whether both ingresses answer so, as far as a number of requests can tell."""
    return all(status(http, key) == wanted for _ in range(12))


def until(condition: Any) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def read(url: str, key: str) -> tuple[str, str]:
    """A long stream's text, and why it ended."""
    text, reason = "", ""
    body = {**BODY, "max_tokens": 960, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(timeout=300, headers=headers) as http,
        http.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_keys_change_while_streams_run(serve_port: int) -> None:
    """A stream that a revoked key began goes on to its end, as does every other."""
    url = f"http://127.0.0.1:{serve_port}"
    apply(serve_port, REVOKED, KEPT)
    keys = (REVOKED, KEPT) * NUM_STREAMS
    admin = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(len(keys)) as threads:
        until(lambda: status(http, KEPT) == 200)
        assert [status(http, key) for key in (REVOKED, KEPT, NEW)] == [200, 200, 401]
        before = replicas()
        # More of them than run at once: the last are read after the change.
        streams = [threads.submit(read, url, key) for key in keys]

        def all_are_accepted() -> bool:
            metrics = http.get("/metrics", headers=admin).text
            counts = re.findall(r"outrider:prompt_tokens_total{.* (.+)", metrics)
            return sum(map(float, counts)) == len(keys) * len(PROMPT)

        until(all_are_accepted)
        # The engine is full, and has a full batch waiting.
        assert http.get("/health").status_code == 200
        (engine,) = http.get("/stats", headers=admin).json()["engines"]
        assert engine["running"] + engine["waiting"] > 0
        apply(serve_port, KEPT, NEW)
        until(lambda: is_everywhere(http, NEW, 200))
        is_over = [stream.done() for stream in streams]
        assert not all(is_over[::2]), "no stream of the revoked key was left"
        assert [status(http, key) for key in (REVOKED, KEPT)] == [401, 200]
        found = [stream.result(timeout=300) for stream in streams]
        assert {why for _, why in found} == {"length"}
        assert len({text for text, _ in found}) == 1
        assert replicas() == before, "no replica was replaced"
