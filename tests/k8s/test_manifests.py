"""Every overlay against KubeRay's schemas, and against what no schema says.

`OUTRIDER_CRDS` names a folder with the CustomResourceDefinitions as KubeRay ships them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.kuberay.node_provider import (
    IN_CLUSTER_CA_CERT_PATH,
    IN_CLUSTER_TOKEN_PATH,
)

from outrider import __version__
from outrider.cluster.serve.args import ServeConfig
from outrider.tests.helpers.kubernetes import crd, manifests

every_manifest = pytest.mark.parametrize(
    "path", [*manifests.PATHS, manifests.ALL], ids=lambda path: path.name
)


def complaints(manifest: dict[str, Any], schemas: dict[tuple[str, str], crd.Schema]) -> list[str]:
    return crd.check(manifest, schemas[manifest["apiVersion"], manifest["kind"]])


def test_there_are_manifests() -> None:
    assert {path.name for path in manifests.PATHS} >= {"cpu", "single-gpu", "deepseek-r1"}


@every_manifest
def test_manifests_fit_their_schemas(
    path: Path, schemas: dict[tuple[str, str], crd.Schema]
) -> None:
    for manifest in manifests.resources(path):
        assert complaints(manifest, schemas) == []


@every_manifest
def test_kuberay_refuses_nothing(path: Path) -> None:
    assert manifests.refusals(manifests.load(path)) == []


def _set(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(manifest: dict[str, Any]) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value

    return spoil


_CLUSTER = ("spec", "rayClusterConfig")
_TARGET = (*_CLUSTER, "workerGroupSpecs", 0)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_set("metadata", "name", value="a" * 48), "name: not a label"),
        (_set("metadata", "name", value="1a"), "name: not a label"),
        (_set(*_TARGET, "minReplicas", value=2), "target: minReplicas above maxReplicas"),
        (_set(*_CLUSTER, "autoscalerOptions", value={}), "drafter: idleTimeoutSeconds without"),
        (_set(*_TARGET, "suspend", value=True), "target: suspend with the autoscaler"),
        (_set(*_TARGET, "resources", value={"CPU": "1"}), "resources beside those"),
        (_set(*_TARGET, "template", "spec", "restartPolicy", value="Always"), "restartPolicy"),
        (_set(*_CLUSTER, "rayVersion", value="2.51.9"), "rayVersion below 2.52.0"),
        (_set(*_CLUSTER, "authOptions", "enableK8sTokenAuth", value=True), "enableK8sTokenAuth"),
        (_set(*_CLUSTER, "networkPolicy", value={"mode": "DenyAll"}), "networkPolicy: alpha"),
        (
            _set(*_CLUSTER, "gcsFaultToleranceOptions", value={"storage": {"size": "1Gi"}}),
            "storage without backend rocksdb",
        ),
        (_set(*_CLUSTER, "upgradeStrategy", value={"type": "None"}), "rayClusterConfig.upgrade"),
        (_set("spec", "upgradeStrategy", value={"type": "Recreate"}), "upgradeStrategy: Recreate"),
    ],
)
def test_what_kuberay_refuses_is_found(
    spoil: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    manifest = copy.deepcopy(manifests.load(manifests.OVERLAYS / "drafter-nodes"))
    spoil(manifest)
    (found,) = manifests.refusals(manifest)
    assert complaint in found


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stepSizePercent": 30}, "stepSizePercent not within maxSurgePercent"),
        ({"maxSurgePercent": 101}, "stepSizePercent not within maxSurgePercent"),
        ({"intervalSeconds": 0}, "intervalSeconds"),
        ({"gatewayClassName": ""}, "gatewayClassName"),
    ],
)
def test_faults_of_an_upgrade_in_parts_are_found(options: dict[str, Any], complaint: str) -> None:
    strategy = copy.deepcopy(manifests.load(manifests.ALL)["spec"]["upgradeStrategy"])
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    strategy["clusterUpgradeOptions"].update(options)
    manifest = copy.deepcopy(manifests.load(manifests.OVERLAYS / "drafter-nodes"))
    manifest["spec"]["upgradeStrategy"] = strategy
    assert manifests.refusals(manifest) == [f"upgradeStrategy: {complaint}"]
    manifest["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] = False
    assert "upgradeStrategy: without the autoscaler" in manifests.refusals(manifest)


def _misspell(manifest: dict[str, Any]) -> None:
    manifest["spec"]["serveConfigv2"] = manifest["spec"].pop("serveConfigV2")


def _misplace(manifest: dict[str, Any]) -> None:
    manifest["spec"]["rayClusterConfig"]["replicas"] = 1


def _misspell_probe(manifest: dict[str, Any]) -> None:
    probe = manifests.ray_container(manifests.workers(manifest)[0])["readinessProbe"]
    probe["timeoutSecond"] = probe.pop("timeoutSeconds")


def _number_for_string(manifest: dict[str, Any]) -> None:
    manifests.groups(manifest)[0]["rayStartParams"]["num-cpus"] = 0


def _bad_quantity(manifest: dict[str, Any]) -> None:
    manifests.ray_container(manifests.groups(manifest)[0])["resources"]["limits"]["cpu"] = "two"


def _no_group_name(manifest: dict[str, Any]) -> None:
    del manifests.workers(manifest)[0]["groupName"]


def _label_is_number(manifest: dict[str, Any]) -> None:
    manifest["metadata"]["labels"] = {"version": 1}


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_misspell, ".spec.serveConfigv2: unknown field"),
        (_misplace, ".spec.rayClusterConfig.replicas: unknown field"),
        (_misspell_probe, "readinessProbe.timeoutSecond: unknown field"),
        (_number_for_string, "rayStartParams.num-cpus: expected string, got 0"),
        (_bad_quantity, "limits.cpu: 'two' does not match"),
        (_no_group_name, "workerGroupSpecs[0].groupName: is required"),
        (_label_is_number, ".metadata.labels.version: expected string"),
    ],
)
def test_a_fault_is_found(
    spoil: Callable[[dict[str, Any]], None],
    complaint: str,
    schemas: dict[tuple[str, str], crd.Schema],
) -> None:
    manifest = copy.deepcopy(manifests.load(manifests.DEMO))
    spoil(manifest)
    errors = complaints(manifest, schemas)
    assert len(errors) == 1
    assert complaint in errors[0]


@every_manifest
def test_every_mount_has_its_volume(path: Path) -> None:
    cluster = manifests.load(path)["spec"]["rayClusterConfig"]
    for group in manifests.groups(manifests.load(path)):
        spec = group["template"]["spec"]
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        assert len(volumes) == len(set(volumes))
        mounted = [
            mount["name"]
            for container in [*spec["containers"], *spec.get("initContainers", [])]
            for mount in container.get("volumeMounts", [])
        ]
        if "groupName" not in group:  # the head, to which KubeRay adds the autoscaler
            options = cluster.get("autoscalerOptions", {})
            mounted += [mount["name"] for mount in options.get("volumeMounts", [])]
        assert set(mounted) == set(volumes)


@every_manifest
def test_requests_are_within_limits(path: Path) -> None:
    for group in manifests.groups(manifests.load(path)):
        resources = manifests.ray_container(group)["resources"]
        requests, limits = resources["requests"], resources["limits"]
        assert set(requests) == set(limits)
        for name, wanted in requests.items():
            assert manifests.quantity(wanted) <= manifests.quantity(limits[name])
            # Extended resources cannot be overcommitted.
            if "/" in name:
                assert wanted == limits[name]


@every_manifest
def test_containers_have_no_privileges(path: Path) -> None:
    for group in manifests.groups(manifests.load(path)):
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        assert not spec.get("hostNetwork")
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@every_manifest
def test_ray_wants_a_token(path: Path) -> None:
    assert manifests.load(path)["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


@every_manifest
def test_the_head_offers_no_cpus_and_gets_no_requests(path: Path) -> None:
    manifest = manifests.load(path)
    assert manifests.ray_resources(manifests.groups(manifest)[0]) == {"CPU": 0.0, "GPU": 0.0}
    assert manifest["spec"]["excludeHeadPodFromServeSvc"] is True


@every_manifest
def test_ports_are_those_that_ingresses_and_proxies_listen_on(path: Path) -> None:
    """On the head, too: the Service gets its ports from there."""
    manifest = manifests.load(path)
    own = manifests.serve_section(manifest)
    proxies = manifests.serve_config(manifest)["http_options"]
    assert own.host == proxies["host"] == "0.0.0.0"
    assert own.port != proxies["port"]
    idle = [each for each in manifests.workers(manifest) if each not in manifests.serving(manifest)]
    for group in idle:  # where nothing listens, Prometheus would look in vain
        assert manifests.ports(group) == []
    for group in [manifests.groups(manifest)[0], *manifests.serving(manifest)]:
        named = [(each["name"], each["containerPort"]) for each in manifests.ports(group)]
        assert len(dict(named)) == len({port for _, port in named}) == len(named)
        serving = {name: port for name, port in named if re.match("serve(-|$)", name)}
        assert serving == {"serve": own.port, "serve-proxy": proxies["port"]}


@every_manifest
def test_workers_are_ready_by_their_own_ingress(path: Path) -> None:
    manifest = manifests.load(path)
    own = manifests.serve_section(manifest)
    assert manifests.serve_config(manifest)["proxy_location"] == "EveryNode"
    for group in manifests.workers(manifest):
        container = manifests.ray_container(group)
        asked = {"path": "/-/healthz", "port": own.port}
        if own.ssl_certfile is not None:
            asked["scheme"] = "HTTPS"
        assert container["readinessProbe"]["httpGet"] == asked
        assert container["livenessProbe"]["httpGet"] == {
            "path": "/api/healthz",
            "port": manifests.AGENT_PORT,
        }


@every_manifest
def test_the_autoscaler_alone_has_a_token_and_groups_have_limits(path: Path) -> None:
    """What Ray's autoscaler reads of the manifest, with its own reader."""
    cluster = manifests.load(path)["spec"]["rayClusterConfig"]
    varying = [
        group
        for group in cluster["workerGroupSpecs"]
        if not group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    ]
    assert bool(varying) == cluster.get("enableInTreeAutoscaling", False)
    if not varying:
        return
    (volume,) = cluster["headGroupSpec"]["template"]["spec"]["volumes"]
    files = {
        source["serviceAccountToken"]["path"]
        if "serviceAccountToken" in source
        else source["configMap"]["items"][0]["path"]
        for source in volume["projected"]["sources"]
    }
    (mount,) = cluster["autoscalerOptions"]["volumeMounts"]
    folder = mount["mountPath"]
    assert {f"{folder}/{file}" for file in files} == {
        IN_CLUSTER_TOKEN_PATH,
        IN_CLUSTER_CA_CERT_PATH,
    }
    assert cluster["autoscalerOptions"]["version"] == "v2"
    resource = {"spec": cluster, "metadata": {"name": "x", "namespace": "y"}}
    types = _derive_autoscaling_config_from_ray_cr(resource)["available_node_types"]
    for group in varying:
        found = types[group["groupName"]]
        limits = (group["minReplicas"], group["maxReplicas"])
        assert (found["min_workers"], found["max_workers"]) == limits
        assert found["idle_timeout_s"] == group["idleTimeoutSeconds"] == 60
        assert found["resources"]["CPU"] == 0, "a replica that waits would bring a pod"
        assert found["resources"]["GPU"] == 1
        assert found["resources"]["accelerator_type:L4"] == 1


@every_manifest
def test_versions_are_the_image_s(path: Path) -> None:
    manifest = manifests.load(path)
    dockerfile = (manifests.ROOT / "Dockerfile").read_text(encoding="utf-8")
    ray_version = re.search(r"^ARG RAY_VERSION=(\S+)$", dockerfile, re.MULTILINE)
    user = re.search(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert ray_version is not None
    assert user is not None
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == ray_version[1]
    for group in manifests.groups(manifest):
        assert group["template"]["spec"]["securityContext"]["runAsUser"] == int(user[1])
        image = manifests.ray_container(group)["image"]
        assert re.fullmatch(rf"outrider:{re.escape(__version__)}(-gpu)?", image)
        assert image in dockerfile


@every_manifest
def test_settings_are_in_the_arguments_and_not_in_the_environment(path: Path) -> None:
    """What slow connections may take holds at the ingresses' port without a variable."""
    manifest = manifests.load(path)
    for group in manifests.groups(manifest):
        given = [each["name"] for each in manifests.ray_container(group).get("env", [])]
        assert [name for name in given if name.startswith(("OUTRIDER_", "RAY_SERVE_"))] == []
    limits, usual = manifests.serve_section(manifest), ServeConfig()
    assert limits.header_timeout_s == usual.header_timeout_s
    assert limits.write_timeout_s == usual.write_timeout_s
    assert 0 < limits.header_timeout_s < 60
    assert 0 < limits.write_timeout_s < 60
