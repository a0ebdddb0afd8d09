"""The page that users follow: its commands name what exists, its examples are valid."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from outrider.tests.helpers.kubernetes import crd, manifests

TEXT = (manifests.ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
SHELL = re.sub(r"\\\n\s*", "", "".join(text for kind, text in BLOCKS if kind == "sh"))
COMMANDS = [shlex.split(line) for line in SHELL.splitlines()]
EXAMPLES = [crd.load_documents(text)[0] for kind, text in BLOCKS if kind == "yaml"]
DEMO = manifests.load(manifests.ROOT / "k8s" / "demo-cpu.yaml")


def commands(*start: str) -> list[list[str]]:
    found = [command for command in COMMANDS if command[: len(start)] == list(start)]
    assert found, f"the page has no command {' '.join(start)}"
    return found


def example(kind: str) -> dict[str, Any]:
    (found,) = [item for item in EXAMPLES if item.get("kind") == kind]
    return found


def pod_schema() -> crd.Schema:
    folder = os.environ.get("OUTRIDER_CRDS")
    if not folder:
        pytest.skip("OUTRIDER_CRDS is not set: no folder with KubeRay's CRDs to validate against")
    schema = crd.load_schemas(Path(folder))["ray.io/v1", "RayCluster"]
    return schema["properties"]["spec"]["properties"]


def test_the_table_lists_every_manifest() -> None:
    assert sorted(re.findall(r"^\| `(\S+\.yaml)` \|", TEXT, re.MULTILINE)) == [
        path.name for path in manifests.PATHS
    ]


def test_applied_files_exist() -> None:
    for command in commands("kubectl", "apply"):
        assert (manifests.ROOT / command[-1]).is_file()


def test_names_are_the_manifest_s() -> None:
    name = DEMO["metadata"]["name"]
    (wait,) = commands("kubectl", "wait")
    assert wait[-1] == f"rayservice/{name}"
    (forward,) = commands("kubectl", "port-forward")
    port = manifests.serve_section(DEMO).port
    assert forward[2:] == [f"service/{name}-serve-svc", f"{port}:{port}"]


def test_the_request_is_for_the_served_model() -> None:
    (curl,) = commands("curl")
    (app,) = manifests.serve_config(DEMO)["applications"]
    body = json.loads(curl[curl.index("-d") + 1])
    assert body["model"] == app["args"]["served_model_name"]


def test_images_are_built_as_the_dockerfile_says() -> None:
    dockerfile = (manifests.ROOT / "Dockerfile").read_text(encoding="utf-8")
    usage = re.sub(r"\s*\\\n#\s*", " ", dockerfile)
    for command in commands("docker", "build"):
        for argument in command:
            assert argument.split("=", 1)[-1] in usage
            if re.match("[A-Z_]+=", argument):
                assert f"ARG {argument.split('=')[0]}=" in dockerfile


def test_the_switches_are_accepted() -> None:
    (switches,) = [item for item in EXAMPLES if "deployments" in item]
    (app,) = copy.deepcopy(manifests.serve_config(DEMO)["applications"])
    (changed,) = switches["deployments"]
    (engine,) = [item for item in app["deployments"] if item["name"] == changed["name"]]
    assert set(changed["user_config"]) == set(engine["user_config"])
    longest = app["args"]["speculative_config"]["max_draft_len"]
    assert 0 <= changed["user_config"]["max_draft_len"] <= longest


def test_the_claim_is_the_one_that_is_mounted() -> None:
    claim = example("PersistentVolumeClaim")
    (group,) = manifests.workers(manifests.load(manifests.ROOT / "k8s" / "single-gpu.yaml"))
    (mounted,) = [
        volume["persistentVolumeClaim"]
        for volume in group["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert mounted["claimName"] == claim["metadata"]["name"]
    volume = pod_schema()["headGroupSpec"]["properties"]["template"]["properties"]["spec"]
    volume = volume["properties"]["volumes"]["items"]["properties"]["ephemeral"]
    template = volume["properties"]["volumeClaimTemplate"]["properties"]["spec"]
    assert crd.check(claim["spec"], template) == []


def test_the_policy_is_valid() -> None:
    policy = example("NetworkPolicy")["spec"]
    assert set(policy) == {"podSelector", "policyTypes", "ingress"}
    # KubeRay's own rules have the shape of a NetworkPolicy's.
    rules = pod_schema()["networkPolicy"]["properties"]["head"]["properties"]["ingressRules"]
    assert crd.check(policy["ingress"], rules) == []


def test_the_policy_opens_the_ingresses_port_to_clients_and_the_dashboard_to_the_operator() -> None:
    own, operator, clients = example("NetworkPolicy")["spec"]["ingress"]
    assert "ports" not in own
    assert own["from"] == [{"podSelector": example("NetworkPolicy")["spec"]["podSelector"]}]
    head = {
        each["name"]: each["containerPort"] for each in manifests.ports(manifests.groups(DEMO)[0])
    }
    assert [each["port"] for each in operator["ports"]] == [head["dashboard"]]
    assert [each["port"] for each in clients["ports"]] == [head["serve"]]
