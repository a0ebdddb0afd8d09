"""The page that users follow: its commands name what exists, its examples are valid."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ray.serve._private.utils import get_capacity_adjusted_num_replicas

from outrider.k8s import chart
from outrider.tests.helpers.kubernetes import crd, helm, manifests

TEXT = (manifests.ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
SHELL = re.sub(r"\\\n\s*", "", "".join(text for kind, text in BLOCKS if kind == "sh"))
COMMANDS = [shlex.split(line) for line in SHELL.splitlines()]
EXAMPLES = [crd.load_documents(text)[0] for kind, text in BLOCKS if kind == "yaml"]
DEMO = manifests.load(manifests.DEMO)


def commands(*start: str) -> list[list[str]]:
    found = [command for command in COMMANDS if command[: len(start)] == list(start)]
    assert found, f"the page has no command {' '.join(start)}"
    return found


def example(kind: str) -> dict[str, Any]:
    (found,) = [item for item in EXAMPLES if item.get("kind") == kind]
    return found


def overlay(tmp_path: Path, name: str, text: str) -> Path:
    """An overlay of the page in a copy of `k8s/`."""
    copied = shutil.copytree(manifests.ROOT / "k8s", tmp_path / "k8s") / "overlays" / name
    copied.mkdir(exist_ok=True)
    (copied / "kustomization.yaml").write_text(text, encoding="utf-8")
    return Path(copied)


def cluster_schema() -> crd.Schema:
    folder = os.environ.get("OUTRIDER_CRDS")
    if not folder:
        pytest.skip("OUTRIDER_CRDS is not set: no folder with KubeRay's CRDs to validate against")
    return crd.load_schemas(Path(folder))["ray.io/v1", "RayCluster"]["properties"]["spec"]


def pod_schema() -> crd.Schema:
    return cluster_schema()["properties"]


def rows(title: str) -> list[str]:
    """First cells of a table's rows."""
    table = TEXT.partition(f"| {title} |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


def test_the_tables_list_every_overlay_component_and_folder() -> None:
    assert sorted(rows("overlay")) == [path.name for path in manifests.PATHS]
    k8s = manifests.ROOT / "k8s"
    assert sorted(rows("component")) == sorted(
        path.parent.name for path in k8s.glob("components/*/kustomization.yaml")
    )
    folders = [path for path in k8s.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert sorted(rows("folder")) == sorted(f"{path.name}/" for path in folders)


def test_applied_overlays_exist() -> None:
    for command in commands("kubectl", "apply"):
        assert command[2] == "-k"
        assert (manifests.ROOT / command[3]) in manifests.PATHS


@pytest.mark.parametrize("verb", ["install", "upgrade"])
def test_releases_have_values_that_the_chart_takes(verb: str) -> None:
    releases = [each for each in commands("helm", verb) if "k8s/chart" in each]
    assert releases
    schema = json.loads((chart.CHART / "values.schema.json").read_text())
    for command in releases:
        given: dict[str, Any] = {}
        for option, value in zip(command[4::2], command[5::2], strict=True):
            if option == "-f":
                (preset,) = crd.load_documents((manifests.ROOT / value).read_text())
                given = helm.merge(given, preset)
                continue
            assert option == "--set"
            path, text = value.split("=")
            found = crd.load_documents(text)[0]  # numbers and booleans are read as such
            if isinstance(found, dict):  # {a,b} is a list
                found = list(found)
            for key in reversed(path.split(".")):
                found = {key: found}
            given = helm.merge(given, found)
        jsonschema.validate(given, schema)
        helm.template(chart.CHART, command[2], given)


def test_the_overlay_on_another_is_valid(tmp_path: Path) -> None:
    """Two engines, each in a pod of its own, with an ingress on both; keys; another image."""
    assert "`k8s/overlays/own/kustomization.yaml`" in TEXT
    (text,) = [text for kind, text in BLOCKS if kind == "yaml" and "nameSuffix: -own" in text]
    found = manifests.load(overlay(tmp_path, "own", text))
    assert crd.check(found["spec"]["rayClusterConfig"], cluster_schema()) == []
    (group,) = manifests.workers(found)
    (app,) = manifests.serve_config(found)["applications"]
    engine, ingress = app["deployments"]
    assert engine["num_replicas"] == ingress["num_replicas"] == manifests.num_pods(group) == 2
    assert group["minReplicas"] == group["maxReplicas"] == 2
    assert manifests.serve_section(found).access.keys_file == "/etc/outrider/keys.yaml"
    for each in manifests.groups(found):
        assert manifests.ray_container(each)["image"] == "registry.example/outrider:0.1.0-gpu"


def test_the_overlay_that_is_upgraded_in_parts_is_valid(tmp_path: Path) -> None:
    """A step of KubeRay's is an engine of four, as Serve counts, and a pod goes with it."""
    (text,) = [text for kind, text in BLOCKS if kind == "yaml" and "nameSuffix: -four" in text]
    found = manifests.load(overlay(tmp_path, "four", text))
    assert crd.check(found["spec"]["rayClusterConfig"], cluster_schema()) == []
    assert manifests.refusals(found) == []
    (group,) = manifests.workers(found)
    (app,) = manifests.serve_config(found)["applications"]
    engines = app["deployments"][0]["num_replicas"]
    assert [group[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [1, engines, 4]
    strategy = found["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    surge = strategy["maxSurgePercent"]
    for deployment in app["deployments"]:
        adjusted = [
            get_capacity_adjusted_num_replicas(deployment["num_replicas"], capacity)
            for capacity in range(surge, 101, surge)
        ]
        assert adjusted == [1, 2, 3, 4]
    assert f"`kubectl get gateway {found['metadata']['name']}-gateway`" in TEXT


def test_a_store_without_a_redis_is_valid(tmp_path: Path) -> None:
    (own,) = [text for kind, text in BLOCKS if kind == "yaml" and "backend: rocksdb" in text]
    (changed,) = crd.load_documents(own)
    text = (manifests.DEMO / "kustomization.yaml").read_text()
    (kustomization,) = crd.load_documents(text)
    assert "patches" not in kustomization
    found = manifests.load(overlay(tmp_path, "cpu", json.dumps({**kustomization, **changed})))
    assert crd.check(found["spec"]["rayClusterConfig"], cluster_schema()) == []
    assert manifests.refusals(found) == []
    head = manifests.groups(found)[0]["template"]["spec"]["securityContext"]
    assert head["fsGroup"] == head["runAsUser"]


def test_suspending_sets_a_field_that_kuberay_has(
    schemas: dict[tuple[str, str], crd.Schema],
) -> None:
    for command, value in zip(commands("kubectl", "patch"), (True, False), strict=True):
        assert command[2:4] == ["rayservice", DEMO["metadata"]["name"]]
        changed = copy.deepcopy(DEMO)
        patch = json.loads(command[command.index("-p") + 1])
        assert patch == {"spec": {"suspend": value}}
        changed["spec"].update(patch["spec"])
        assert crd.check(changed, schemas[changed["apiVersion"], changed["kind"]]) == []


def test_the_secret_with_keys_is_the_one_that_is_mounted() -> None:
    command, *_ = commands("kubectl", "create", "secret", "generic")
    production = manifests.load(manifests.OVERLAYS / "tp8-production")
    (group,) = manifests.workers(production)
    spec = group["template"]["spec"]
    (volume,) = [each for each in spec["volumes"] if "secret" in each]
    assert command[4:] == [volume["secret"]["secretName"], "--from-file=keys.yaml"]
    (mount,) = [
        each
        for each in manifests.ray_container(group)["volumeMounts"]
        if each["name"] == volume["name"]
    ]
    file = manifests.serve_section(production).access.keys_file
    assert file == f"{mount['mountPath']}/keys.yaml"


def test_names_are_the_manifest_s() -> None:
    name = DEMO["metadata"]["name"]
    (wait,) = commands("kubectl", "wait")
    assert wait[-1] == f"rayservice/{name}"
    (forward,) = commands("kubectl", "port-forward")
    port = manifests.serve_section(DEMO).port
    assert forward[2:] == [f"service/{name}-serve-svc", f"{port}:{port}"]


def test_the_request_is_a_stream_of_the_served_model() -> None:
    """`test_deploy.py` sends it."""
    (app,) = manifests.serve_config(DEMO)["applications"]
    body = manifests.request_of_the_page()
    assert body["model"] == app["args"]["served_model_name"]
    assert body["stream"] is True
    (curl,) = commands("curl")
    assert json.loads(curl[curl.index("-d") + 1]) == body


def test_images_are_built_as_the_dockerfile_says() -> None:
    dockerfile = (manifests.ROOT / "Dockerfile").read_text(encoding="utf-8")
    usage = re.sub(r"\s*\\\n#\s*", " ", dockerfile)
    for command in commands("docker", "build"):
        for argument in command:
            assert argument.split("=", 1)[-1] in usage
            if re.match("[A-Z_]+=", argument):
                assert f"ARG {argument.split('=')[0]}=" in dockerfile


def test_the_switches_are_accepted(tmp_path: Path) -> None:
    (switches,) = [item for item in EXAMPLES if "configMapGenerator" in item and len(item) == 1]
    (app,) = copy.deepcopy(manifests.serve_config(DEMO)["applications"])
    text = (manifests.DEMO / "kustomization.yaml").read_text()
    (kustomization,) = crd.load_documents(text)
    (own,) = kustomization["configMapGenerator"]
    (changed,) = switches["configMapGenerator"]
    assert {**changed, "literals": None} == {**own, "literals": None}
    text = json.dumps({**kustomization, **switches})
    (after,) = manifests.serve_config(manifests.load(overlay(tmp_path, "cpu", text)))[
        "applications"
    ]
    engine, before = after["deployments"][0], app["deployments"][0]
    assert engine["user_config"] == {"enabled": True, "max_draft_len": 4} != before["user_config"]
    assert app["args"]["speculative_config"]["max_draft_len"] >= 4
    engine["user_config"] = before["user_config"]
    assert after == app  # nothing else changes


def test_the_claim_is_the_one_that_is_mounted() -> None:
    claim = example("PersistentVolumeClaim")
    (group,) = manifests.workers(manifests.load(manifests.OVERLAYS / "single-gpu"))
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


def test_the_overlay_with_fetched_models_is_valid(tmp_path: Path) -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "yaml" and "nameSuffix: -fetched" in text]
    folder = overlay(tmp_path, "fetched", text)
    found = manifests.load(folder)
    assert crd.check(found["spec"]["rayClusterConfig"], cluster_schema()) == []
    (group,) = manifests.workers(found)
    (fetcher,) = group["template"]["spec"]["initContainers"]
    env = {each["name"]: each for each in fetcher["env"]}
    (app,) = manifests.serve_config(found)["applications"]
    assert app["args"]["model"] == f"/models/{env['MODELS']['value'].rsplit('/', 1)[1]}"
    (claim,) = [
        each for each in manifests.resources(folder) if each["kind"] == "PersistentVolumeClaim"
    ]
    assert claim["spec"]["storageClassName"] == "shared"
    _, command, _ = commands("kubectl", "create", "secret", "generic")
    secret = env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert command[4] == secret["name"]
    assert command[5].startswith(f"--from-literal={secret['key']}=")


def of_production(kind: str) -> dict[str, Any]:
    folder = manifests.OVERLAYS / "tp8-production"
    (found,) = [each for each in manifests.resources(folder) if each["kind"] == kind]
    return found


def test_the_policy_opens_ports_to_clients_the_operator_and_prometheus() -> None:
    policy = of_production("NetworkPolicy")["spec"]
    own, operator, clients, prometheus = policy["ingress"]
    assert "ports" not in own
    assert own["from"] == [{"podSelector": policy["podSelector"]}]
    head = {
        each["name"]: each["containerPort"] for each in manifests.ports(manifests.groups(DEMO)[0])
    }
    assert [each["port"] for each in operator["ports"]] == [head["dashboard"]]
    assert [each["port"] for each in clients["ports"]] == [head["serve"]]
    (client,) = clients["from"]
    ((label, value),) = client["podSelector"]["matchLabels"].items()
    assert f'`{label}: "{value}"`' in TEXT
    # Its port is in no manifest: KubeRay declares it, and has Ray listen on it.
    scraped = {"serve": head["serve"], "metrics": manifests.METRICS_PORT}
    monitor = of_production("PodMonitor")["spec"]
    assert {each["port"] for each in monitor["podMetricsEndpoints"]} == set(scraped)
    assert [each["port"] for each in prometheus["ports"]] == list(scraped.values())
    assert monitor["selector"] == policy["podSelector"]


def test_prometheus_is_let_in_from_where_the_page_says() -> None:
    (peer,) = of_production("NetworkPolicy")["spec"]["ingress"][3]["from"]
    (own,) = [text for kind, text in BLOCKS if kind == "yaml" and "/spec/ingress/3/from" in text]
    (patch,) = crd.load_documents(own)[0]["patches"]
    ((operation,),) = crd.load_documents(patch["patch"])
    (changed,) = operation["value"]
    assert set(changed) == set(peer) == {"namespaceSelector", "podSelector"}
    assert patch["target"] == {"kind": "NetworkPolicy"}


def test_the_key_of_prometheus_is_the_secret_that_the_page_makes() -> None:
    *_, command = commands("kubectl", "create", "secret", "generic")
    (endpoint,) = [
        each
        for each in of_production("PodMonitor")["spec"]["podMetricsEndpoints"]
        if "authorization" in each
    ]
    assert endpoint["port"] == "serve"
    credentials = endpoint["authorization"]["credentials"]
    assert command[4] == credentials["name"]
    assert command[5].startswith(f"--from-literal={credentials['key']}=")
