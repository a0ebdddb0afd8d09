"""Every overlay's `serveConfigV2` serves: on one Ray cluster of logical GPUs, with the demo's
models in place of the overlay's, and with sizes that they have.

`test_deploy.py` deploys the CPU overlay as it is, by KubeRay's commands.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from outrider import LLM, SamplingParams
from outrider.config.access import hash_of, new_key
from outrider.tests.helpers.kubernetes import manifests
from outrider.tests.helpers.ports import free_port

MODELS = manifests.ROOT / "demo" / "models"
DRAFTERS = {"DraftTarget": "draft", "MTP": "mtp", "Eagle3": "eagle3"}
GPUS = 2  # of a node here, for as many as a pod has
NODES: tuple[dict[str, float], ...] = (
    {"accelerator_type:H100": 1, "accelerator_type:H200": 1},
    {"accelerator_type:A100": 1},
    {"accelerator_type:L4": 1},
)
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return"
LEN = 32
PRODUCTION = manifests.OVERLAYS / "tp8-production"  # is `tp8` behind API keys
SERVED = [path for path in manifests.PATHS if path.name not in (manifests.DEMO.name, "tp8")]
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """The target's own tokens."""
    model = str(MODELS / "target")
    with LLM(model=model, executor="local", dtype="float32", num_kv_blocks=64) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=LEN, temperature=0.0))
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def proxies() -> Iterator[int]:
    """The port of the proxies of a Serve on nodes as the pods are; the head has no CPUs."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    port = free_port()
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
    try:
        for kinds in NODES:
            nodes.add_node(num_cpus=4, num_gpus=GPUS, resources=kinds)
        ray.init(nodes.address, log_to_driver=False, logging_level="warning")
        serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()


def shrunk(args: dict[str, Any], own: float) -> dict[str, Any]:
    """An engine's arguments for the demo's models, on nodes of `GPUS` for pods of `own`."""
    size = args.get("tensor_parallel_size", 1)
    found = args | {
        "model": str(MODELS / ("target" if "speculative_config" in args else "draft")),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 2,
        "num_kv_blocks": 64,
        "tensor_parallel_size": max(1, int(size * GPUS / own)) if own > 1 else size,
        "resources": args.get("resources", {})
        | {"gpus_per_worker": 1 if own > 1 else GPUS, "cpus_per_worker": 0},
    }
    if section := args.get("speculative_config"):
        name = DRAFTERS.get(section["decoding_type"])
        if name is not None and "drafter_group" not in section:
            section = section | {"speculative_model": str(MODELS / name)}
        if "num_kv_blocks" in section:
            section = section | {"num_kv_blocks": 64}
        found["speculative_config"] = section
    return found


def local(path: Path, keys_file: Path) -> dict[str, Any]:
    """An overlay's configuration for this cluster."""
    manifest = manifests.load(path)
    config = copy.deepcopy(manifests.serve_config(manifest))
    (app,) = config["applications"]
    own = [manifests.ray_resources(group)["GPU"] for group in manifests.workers(manifest)]
    section = app["args"].pop("serve") | {"host": "127.0.0.1", "port": free_port()}
    for group in section.get("drafter_groups", []):
        group |= shrunk(group, own[-1]) | {"num_kv_blocks": 256}  # engines share them
    if "access" in section:
        section["access"] = {"keys_file": str(keys_file)}
    app["args"] = shrunk(app["args"], own[0]) | {"serve": section}
    return config


def deploy(config: dict[str, Any]) -> None:
    """As Serve's REST API does; waits until it runs."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ApplicationStatus, ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    deadline = time.monotonic() + 240
    while True:
        (status,) = serve.status().applications.values()
        if status.status == ApplicationStatus.RUNNING:
            return
        messages = [status.message, *(each.message for each in status.deployments.values())]
        assert status.status != ApplicationStatus.DEPLOY_FAILED, "\n".join(messages)
        assert time.monotonic() < deadline, "\n".join(messages)
        time.sleep(0.1)


def streamed(url: str, body: dict[str, Any], headers: dict[str, str]) -> list[int]:
    """The tokens of a streamed completion."""
    answer = httpx.post(
        f"{url}/v1/completions",
        json={**body, "stream": True, "return_token_ids": True},
        headers=headers,
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
    return [token for choices in chunks for each in choices for token in each["token_ids"]]


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.name)
def test_an_overlay_s_configuration_streams_the_target_s_own_tokens(
    path: Path, proxies: int, plain: list[int], tmp_path: Path
) -> None:
    from ray import serve

    key, keys_file = new_key(), tmp_path / "keys.yaml"
    keys_file.write_text(yaml.safe_dump({"admin_keys": [hash_of(key)]}))
    config = local(path, keys_file)
    (app,) = config["applications"]
    args = app["args"]
    deploy(config)
    try:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": args["served_model_name"], "prompt": PROMPT, "max_tokens": LEN}
        for port in (args["serve"]["port"], proxies):
            url = f"http://127.0.0.1:{port}"
            assert streamed(url, body | {"temperature": 0}, headers) == plain
        (engine,) = httpx.get(f"{url}/stats", headers=headers, timeout=60).json()["engines"]
        ranks = [each for each in engine["workers"] if each["role"] == "target"]
        pods = manifests.num_pods(manifests.workers(manifests.load(path))[0])
        assert len({each["node"] for each in ranks}) == pods
        stages = args.get("pipeline_parallel_size", 1)
        assert engine["world_size"] == args["tensor_parallel_size"] * stages
        assert sum(each["num_gen_drafts"] for each in engine["drafters"].values()) > 0
        if args["serve"].get("access"):
            refused = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert refused.status_code == 401
    finally:
        serve.delete(app["name"])


def test_what_is_served_behind_keys_is_what_is_served_without() -> None:
    """So that one of the two has to be deployed."""
    keyed, plain = (
        manifests.serve_config(manifests.load(path))
        for path in (PRODUCTION, manifests.OVERLAYS / "tp8")
    )
    del keyed["applications"][0]["args"]["serve"]["access"]
    assert keyed == plain
