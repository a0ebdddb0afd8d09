"""Readers of what the overlays of `k8s/` apply, shared by the tests of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from outrider.cluster.serve.args import ServeConfig, read_args
from outrider.tests.helpers.kubernetes import crd, kustomize

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = ROOT / "k8s" / "overlays"
PATHS = sorted(path.parent for path in OVERLAYS.glob("*/kustomization.yaml"))
DEMO = OVERLAYS / "cpu"
ALL = ROOT / "k8s" / "all"  # every component
AGENT_PORT = 52365  # of each node's dashboard agent, which probes ask: KubeRay's, too
METRICS_PORT = 8080  # of Ray's exporter in every pod: KubeRay's `metrics-export-port`
_SUFFIXES = {
    **{suffix: 1000**power for power, suffix in enumerate(["", "k", "M", "G", "T", "P", "E"])},
    **{f"{suffix}i": 1024**power for power, suffix in enumerate("KMGTPE", start=1)},
    "m": 1e-3,
}


def resources(path: Path) -> list[dict[str, Any]]:
    """All that an overlay applies."""
    return kustomize.build(path)


def load(path: Path) -> dict[str, Any]:
    """The one RayService of an overlay."""
    (found,) = [each for each in resources(path) if each["kind"] == "RayService"]
    return found


def request_of_the_page() -> dict[str, Any]:
    """The body of the completion that `k8s/README.md` asks for."""
    page = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"^  -d '(.*)'$", page, re.MULTILINE)
    return json.loads(body)


def serve_config(manifest: dict[str, Any]) -> dict[str, Any]:
    """`serveConfigV2`, keys unique."""
    return crd.load_documents(manifest["spec"]["serveConfigV2"])[0]


def serve_section(manifest: dict[str, Any]) -> ServeConfig:
    """The `serve` section of the one application's arguments."""
    (app,) = serve_config(manifest)["applications"]
    return read_args(app["args"])[1]


def groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's group, then the workers'."""
    cluster = manifest["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]


def workers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The worker groups."""
    return groups(manifest)[1:]


def num_pods(group: dict[str, Any], key: str = "replicas") -> int:
    """Pods of a worker group: a replica of several hosts is a pod on each.

    Args:
        key: or `minReplicas`, `maxReplicas`: as few or as many as the autoscaler makes.
    """
    count: int = group[key] * group.get("numOfHosts", 1)
    return count


def serving(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The worker groups that replicas are placed on: those that offer CPUs."""
    return [group for group in workers(manifest) if ray_resources(group)["CPU"]]


def ray_container(group: dict[str, Any]) -> dict[str, Any]:
    """The container that KubeRay starts Ray in: the first."""
    return group["template"]["spec"]["containers"][0]


def ports(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The ports of that container."""
    return ray_container(group).get("ports", [])


def quantity(text: str | int | float) -> float:
    """A Kubernetes quantity as a number."""
    text = str(text)
    digits = text.rstrip("kMGTPEim")
    return float(digits) * _SUFFIXES[text[len(digits) :]]


def ray_resources(group: dict[str, Any]) -> dict[str, float]:
    """What a pod of the group offers to Ray: KubeRay takes it from the limits and rounds up."""
    limits = ray_container(group)["resources"]["limits"]
    params = group["rayStartParams"]
    gpus = sum(quantity(value) for name, value in limits.items() if name.endswith("/gpu"))
    return {
        "CPU": float(params.get("num-cpus", math.ceil(quantity(limits["cpu"])))),
        "GPU": float(params.get("num-gpus", gpus)),
    }


def refusals(manifest: dict[str, Any]) -> list[str]:
    """What KubeRay 1.7's operator refuses of a RayService beyond its schema (validation.go), as far
    as it concerns fields that are used here, without its alpha features.
    """
    spec = manifest["spec"]
    cluster = spec["rayClusterConfig"]
    autoscaler = cluster.get("autoscalerOptions", {})
    scaling = cluster.get("enableInTreeAutoscaling", False)
    by_v2 = scaling and autoscaler.get("version") == "v2"
    found = []
    if not re.fullmatch("[a-z]([-a-z0-9]{0,45}[a-z0-9])?", manifest["metadata"]["name"]):
        found.append("name: not a label of at most 47 characters that begins with a letter")
    for group in cluster.get("workerGroupSpecs", []):
        name, limits = group["groupName"], (group.get("minReplicas"), group.get("maxReplicas"))
        if None in limits and not scaling:
            found.append(f"{name}: minReplicas and maxReplicas without the autoscaler")
        if None not in limits and not 0 <= limits[0] <= limits[1]:
            found.append(f"{name}: minReplicas above maxReplicas, or negative")
        found += [
            f"{name}: {key} without version v2 of the autoscaler"
            for key in ("idleTimeoutSeconds", "priority")
            if key in group and not by_v2
        ]
        if group.get("suspend") and scaling:
            found.append(f"{name}: suspend with the autoscaler")
    for group in groups(manifest):
        if "resources" in group and {"num-cpus", "num-gpus", "memory", "resources"} & {
            *group["rayStartParams"]
        }:
            found.append("resources beside those of rayStartParams")
        if "labels" in group["rayStartParams"]:
            found.append("rayStartParams.labels")
        if by_v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            found.append("restartPolicy with version v2 of the autoscaler")
    auth = cluster.get("authOptions", {})
    if auth.get("mode") == "token" and _version(cluster.get("rayVersion", "0")) < (2, 52, 0):
        found.append("authOptions: rayVersion below 2.52.0")
    if auth.get("enableK8sTokenAuth"):
        found.append("authOptions.enableK8sTokenAuth in a RayService")
    found += [f"{key}: alpha" for key in ("networkPolicy", "tlsOptions") if key in cluster]
    store = cluster.get("gcsFaultToleranceOptions", {})
    if store.get("backend", "redis") == "redis" and "storage" in store:
        found.append("gcsFaultToleranceOptions.storage without backend rocksdb")
    if store.get("backend") == "rocksdb" and {"redisAddress", "redisPassword"} & {*store}:
        found.append("gcsFaultToleranceOptions: a Redis with backend rocksdb")
    if "upgradeStrategy" in cluster:
        found.append("rayClusterConfig.upgradeStrategy")
    return found + _upgrade_refusals(spec.get("upgradeStrategy", {}), scaling)


def _upgrade_refusals(strategy: dict[str, Any], scaling: bool) -> list[str]:
    kind = strategy.get("type", "NewCluster")
    if kind in ("NewCluster", "None"):
        return []
    if kind != "NewClusterWithIncrementalUpgrade":
        return [f"upgradeStrategy: {kind}"]
    options = strategy.get("clusterUpgradeOptions", {})
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent", -1)
    faults = {
        "without the autoscaler": not scaling,
        "stepSizePercent not within maxSurgePercent": not 0 <= step <= surge <= 100,
        "intervalSeconds": options.get("intervalSeconds", 0) <= 0,
        "gatewayClassName": not options.get("gatewayClassName"),
    }
    return [f"upgradeStrategy: {fault}" for fault, is_one in faults.items() if is_one]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def ray_params(group: dict[str, Any], address: str | None) -> dict[str, str]:
    """`rayStartParams` as KubeRay completes them (setMissingRayStartParams and
    generateRayStartCommand in its pod.go).

    Args:
        address: of the head; None: this is the head.
    """
    params = dict(group["rayStartParams"])
    if address is None:
        params.setdefault("dashboard-host", "0.0.0.0")
    else:
        params.setdefault("address", address)
    params.setdefault("metrics-export-port", str(METRICS_PORT))
    params.setdefault("dashboard-agent-listen-port", str(AGENT_PORT))
    params["block"] = "true"
    offer = ray_resources(group)
    params.setdefault("num-cpus", f"{offer['CPU']:.0f}")
    limits = ray_container(group)["resources"]["limits"]
    params.setdefault("memory", f"{quantity(limits['memory']):.0f}")
    if offer["GPU"]:
        params.setdefault("num-gpus", f"{offer['GPU']:.0f}")
    return params


def ray_command(params: dict[str, str]) -> list[str]:
    """The command of the container: values go through a shell, and need its quotes."""
    head = [] if "address" in params else ["--head"]
    flags = [
        f"--{name}" if params[name] == "true" else f"--{name}={params[name]}"
        for name in sorted(params)
    ]
    start = " ".join(["ray start", *head, *flags])
    return ["/bin/bash", "-c", f"ulimit -n 65536; exec {start}"]
