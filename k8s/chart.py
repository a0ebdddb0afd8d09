"""The Helm chart's templates, presets and dashboard, from what `kubectl kustomize` renders.

`python -m outrider.k8s.chart` writes them; a test fails where one is out of date.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
Render = Callable[[Path], list[Manifest]]

_K8S = Path(__file__).resolve().parent
CHART = _K8S / "chart"
_ALL = _K8S / "all"  # has every component: the templates are made of it
_HEAD = "{{- /* Written by chart.py from ../all. */ -}}\n"
_DASHBOARD = "dashboard.json"
_PODS = """{{- if gt (len .Release.Name) 47 }}
{{- fail "a release's name has at most 47 characters: KubeRay ignores a longer RayService" }}
{{- end }}
{{- $pods := 0 }}
{{- range .Values.workers }}
{{- if ne (toString (get . "ingress")) "false" }}
{{- $pods = add $pods (mul .replicas .hosts) }}
{{- end }}
{{- end }}
"""


@dataclass(frozen=True)
class Place:
    """What a template has at a path of the manifest."""

    value: str | None = None  # an expression for a number or a text
    block: str | None = None  # an expression for a mapping
    when: str | None = None  # the condition on which the path is there
    each: str | None = None  # the list of which every item is one like the manifest's first
    file: str | None = None  # a file of the chart, which is the text


@dataclass(frozen=True)
class Template:
    """A resource beside the RayService."""

    file: str
    when: str


def _given(key: str, default: str) -> str:
    """An expression: what a group of workers has at a key, which may be missing."""
    return f'ternary (get . "{key}") {default} (hasKey . "{key}")'


_GPU = 'hasKey .resources "nvidia.com/gpu"'
_RDMA = 'hasKey .resources "rdma/ib"'
_KEYS = "$.Values.apiKeysSecret"
_GROUPS = "spec/rayClusterConfig/workerGroupSpecs"
_GROUP = f"{_GROUPS}/target"  # the first
_POD = f"{_GROUP}/template/spec"
_WORKER = f"{_POD}/containers/ray-worker"
_FETCH = f"and $.Values.modelCache.models ({_GPU})"
_FETCHER = f"{_POD}/initContainers/fetch-models"
_CLAIM = Place(value="$.Values.modelsClaim")
_HEAD_POD = "spec/rayClusterConfig/headGroupSpec/template/spec"
_GCS = "spec/rayClusterConfig/gcsFaultToleranceOptions"
_APP = "applications/outrider"
_ENGINE = "the engine's"  # in `args`
_NAMES = ("name", "groupName")  # first, and in paths
_FIRST = (*_NAMES, "port")
_IMAGE = Place(value='printf "%s:%s" $.Values.image.repository $.Values.image.tag')
_PULL = Place(value="$.Values.image.pullPolicy")
_SECRET = "$.Values.image.pullSecret"
_TEMPLATES = {
    "ConfigMap": Template("grafana-dashboard.yaml", ".Values.grafanaDashboard"),
    "NetworkPolicy": Template("network-policy.yaml", ".Values.networkPolicy"),
    "PersistentVolumeClaim": Template("model-cache.yaml", ".Values.modelCache.size"),
    "PodMonitor": Template("pod-monitor.yaml", ".Values.prometheus.podMonitor"),
}
_SCRAPER_KEY = ".Values.prometheus.keySecret"
_INGRESSES = "PodMonitor/spec/podMetricsEndpoints/1"
_PLACES = {
    "metadata/name": Place(value=".Release.Name"),
    **{f"{kind}/metadata/name": Place(value=".Release.Name") for kind in _TEMPLATES},
    "ConfigMap/data/outrider.json": Place(file=_DASHBOARD),
    "NetworkPolicy/spec/ingress/3/from": Place(block=".Values.prometheus.from"),
    "PersistentVolumeClaim/metadata/name": _CLAIM,
    "PersistentVolumeClaim/spec/resources/requests/storage": Place(value=".Values.modelCache.size"),
    "PersistentVolumeClaim/spec/storageClassName": Place(
        value=".Values.modelCache.storageClass", when=".Values.modelCache.storageClass"
    ),
    "PodMonitor/metadata/labels": Place(block=".Values.prometheus.podMonitorLabels"),
    f"{_INGRESSES}/authorization": Place(when=_SCRAPER_KEY),
    f"{_INGRESSES}/authorization/credentials/name": Place(value=_SCRAPER_KEY),
    "spec/upgradeStrategy": Place(when=".Values.upgradeStrategy"),
    "spec/upgradeStrategy/type": Place(value=".Values.upgradeStrategy"),
    "spec/upgradeStrategy/clusterUpgradeOptions": Place(
        block=".Values.upgradeOptions",
        when='eq .Values.upgradeStrategy "NewClusterWithIncrementalUpgrade"',
    ),
    "spec/rayClusterDeletionDelaySeconds": Place(
        value=".Values.deletionDelaySeconds", when=".Values.deletionDelaySeconds"
    ),
    _GCS: Place(when=".Values.redis.address"),
    f"{_GCS}/redisAddress": Place(value=".Values.redis.address"),
    f"{_GCS}/redisPassword/valueFrom/secretKeyRef/name": Place(
        value=".Values.redis.passwordSecret"
    ),
    f"{_HEAD_POD}/imagePullSecrets": Place(when=_SECRET),
    f"{_HEAD_POD}/imagePullSecrets/outrider-registry/name": Place(value=_SECRET),
    f"{_HEAD_POD}/containers/ray-head/image": _IMAGE,
    f"{_HEAD_POD}/containers/ray-head/imagePullPolicy": _PULL,
    f"{_HEAD_POD}/containers/ray-head/resources": Place(block=".Values.head.resources"),
    "spec/rayClusterConfig/enableInTreeAutoscaling": Place(
        when=".Values.autoscaling", value="true"
    ),
    "spec/rayClusterConfig/autoscalerOptions": Place(when=".Values.autoscaling"),
    f"{_HEAD_POD}/volumes": Place(when=".Values.autoscaling"),
    _GROUPS: Place(each=".Values.workers"),
    f"{_GROUP}/groupName": Place(value=".name"),
    f"{_GROUP}/replicas": Place(value=".replicas"),
    f"{_GROUP}/minReplicas": Place(value=_given("minReplicas", ".replicas")),
    f"{_GROUP}/maxReplicas": Place(value=_given("maxReplicas", ".replicas")),
    f"{_GROUP}/numOfHosts": Place(value=".hosts"),
    f"{_GROUP}/idleTimeoutSeconds": Place(
        value=".idleTimeoutSeconds", when='hasKey . "idleTimeoutSeconds"'
    ),
    f"{_GROUP}/rayStartParams": Place(block=f"({_given('rayStartParams', '(dict)')})"),
    f"{_POD}/imagePullSecrets": Place(when=_SECRET),
    f"{_POD}/imagePullSecrets/outrider-registry/name": Place(value=_SECRET),
    f"{_POD}/nodeSelector": Place(block=".nodeSelector", when=".nodeSelector"),
    f"{_POD}/tolerations": Place(when=_GPU),
    f"{_WORKER}/ports": Place(when='ne (toString (get . "ingress")) "false"'),
    f"{_WORKER}/env": Place(when=_GPU),
    f"{_WORKER}/env/NCCL_NET": Place(when=_RDMA),
    f"{_WORKER}/image": _IMAGE,
    f"{_WORKER}/imagePullPolicy": _PULL,
    f"{_WORKER}/resources/limits": Place(block=".resources"),
    f"{_WORKER}/resources/requests": Place(block=".resources"),
    f"{_WORKER}/securityContext/capabilities/add": Place(when=_RDMA),
    f"{_WORKER}/volumeMounts/models": Place(when=_GPU),
    f"{_WORKER}/volumeMounts/cache": Place(when=_GPU),
    f"{_WORKER}/volumeMounts/api-keys": Place(when=_KEYS),
    f"{_POD}/volumes/shm/emptyDir/sizeLimit": Place(value=".shm"),
    f"{_POD}/volumes/models": Place(when=_GPU),
    f"{_POD}/volumes/models/persistentVolumeClaim/claimName": _CLAIM,
    f"{_POD}/volumes/cache": Place(when=_GPU),
    f"{_POD}/volumes/cache/emptyDir": Place(when="not $.Values.modelCache.models"),
    f"{_POD}/volumes/cache/persistentVolumeClaim": Place(when="$.Values.modelCache.models"),
    f"{_POD}/volumes/cache/persistentVolumeClaim/claimName": _CLAIM,
    f"{_WORKER}/volumeMounts/cache/subPath": Place(when="$.Values.modelCache.models"),
    f"{_WORKER}/env/NUMBA_CACHE_DIR": Place(when="$.Values.modelCache.models"),
    f"{_POD}/securityContext/fsGroup": Place(when=_FETCH),
    f"{_POD}/securityContext/fsGroupChangePolicy": Place(when=_FETCH),
    f"{_POD}/initContainers": Place(when=_FETCH),
    f"{_FETCHER}/image": _IMAGE,
    f"{_FETCHER}/imagePullPolicy": _PULL,
    f"{_FETCHER}/env/MODELS/value": Place(value='join " " $.Values.modelCache.models'),
    f"{_FETCHER}/env/HF_TOKEN/valueFrom/secretKeyRef/name": Place(
        value="$.Values.modelCache.tokenSecret"
    ),
    f"{_POD}/volumes/api-keys": Place(when=_KEYS),
    f"{_POD}/volumes/api-keys/secret/secretName": Place(value=_KEYS),
    # Of `serveConfigV2`.
    f"{_APP}/deployments/Engine/num_replicas": Place(value=".Values.engines"),
    f"{_APP}/deployments/Engine/user_config": Place(block=".Values.speculation"),
    f"{_APP}/deployments/Ingress/num_replicas": Place(value="$pods"),
    f"{_APP}/deployments/DrafterGroups": Place(when=".Values.drafterGroups"),
    f"{_APP}/args/serve/access": Place(when=_KEYS),
    f"{_APP}/args/serve/drafter_groups": Place(
        block=".Values.drafterGroups", when=".Values.drafterGroups"
    ),
    f"{_APP}/args/{_ENGINE}": Place(block=".Values.args"),
}


def files(render: Render) -> dict[Path, str]:
    """The text of every file that is written, by its path."""
    overlays = sorted(path.parent for path in _K8S.glob("overlays/*/kustomization.yaml"))
    rendered = {path.name: render(path) for path in overlays}
    written = {
        CHART / "presets" / f"{name}.yaml": f"# Written by chart.py from the overlay {name}.\n"
        + yaml.safe_dump(preset(manifests), sort_keys=False, width=1000)
        for name, manifests in rendered.items()
    }
    kinds = {each["kind"]: each for each in render(_ALL)}
    _with_cache(kinds, rendered)
    templates = CHART / "templates"
    written[templates / "rayservice.yaml"] = _HEAD + _rayservice(kinds.pop("RayService"))
    for kind, resource in kinds.items():
        text = "".join(f"{line}\n" for line in _mapping(resource, kind))
        template = _TEMPLATES[kind]
        written[templates / template.file] = (
            f"{_HEAD}{{{{- if {template.when} }}}}\n{text}{{{{- end }}}}\n"
        )
    (dashboard,) = kinds["ConfigMap"]["data"].values()
    written[CHART / _DASHBOARD] = json.dumps(json.loads(dashboard), separators=(",", ":")) + "\n"
    return written


def _with_cache(kinds: dict[str, Manifest], rendered: dict[str, list[Manifest]]) -> None:
    """Adds what pods have without the component `model-cache`, and what a claim may have."""
    claim = kinds["PersistentVolumeClaim"]
    claim["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    claim["spec"]["storageClassName"] = ""
    (service,) = [each for each in rendered["single-gpu"] if each["kind"] == "RayService"]
    (plain,), (cache, *_) = [
        [
            volume
            for group in each["spec"]["rayClusterConfig"]["workerGroupSpecs"]
            for volume in group["template"]["spec"]["volumes"]
            if volume["name"] == "cache"
        ]
        for each in (service, kinds["RayService"])
    ]
    cache["emptyDir"] = plain["emptyDir"]


def preset(manifests: list[Manifest]) -> Manifest:
    """The values with which the chart renders what an overlay does."""
    (service,) = [each for each in manifests if each["kind"] == "RayService"]
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    (app,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    engine = next(each for each in app["deployments"] if each["name"] == "Engine")
    pod = cluster["headGroupSpec"]["template"]["spec"]
    (container,) = pod["containers"]
    repository, tag = container["image"].split(":")
    secrets = pod.get("imagePullSecrets", [{"name": ""}])
    values: Manifest = {
        "image": {
            "repository": repository,
            "tag": tag,
            "pullPolicy": container["imagePullPolicy"],
            "pullSecret": secrets[0]["name"],
        },
        "args": {key: each for key, each in app["args"].items() if key != "serve"},
        "engines": engine["num_replicas"],
        "speculation": engine["user_config"],
        "drafterGroups": app["args"]["serve"].get("drafter_groups", []),
        "workers": [_workers(group) for group in cluster["workerGroupSpecs"]],
        "autoscaling": cluster.get("enableInTreeAutoscaling", False),
        "networkPolicy": any(each["kind"] == "NetworkPolicy" for each in manifests),
        "prometheus": _prometheus(manifests),
        "grafanaDashboard": any(each["kind"] == "ConfigMap" for each in manifests),
        "upgradeStrategy": spec.get("upgradeStrategy", {}).get("type", ""),
        "deletionDelaySeconds": spec.get("rayClusterDeletionDelaySeconds", 0),
    }
    for volume in cluster["workerGroupSpecs"][0]["template"]["spec"]["volumes"]:
        if "secret" in volume:
            values["apiKeysSecret"] = volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            values["modelsClaim"] = volume["persistentVolumeClaim"]["claimName"]
    if store := cluster.get("gcsFaultToleranceOptions"):
        secret = store["redisPassword"]["valueFrom"]["secretKeyRef"]["name"]
        values["redis"] = {"address": store["redisAddress"], "passwordSecret": secret}
    return values


def _prometheus(manifests: list[Manifest]) -> Manifest:
    monitors = [each["spec"] for each in manifests if each["kind"] == "PodMonitor"]
    values: Manifest = {"podMonitor": bool(monitors)}
    for endpoint in [each for spec in monitors for each in spec["podMetricsEndpoints"]]:
        if "authorization" in endpoint:
            values["keySecret"] = endpoint["authorization"]["credentials"]["name"]
    return values


def _workers(group: Manifest) -> Manifest:
    spec = group["template"]["spec"]
    (shm,) = [each["emptyDir"] for each in spec["volumes"] if each["name"] == "shm"]
    limits = {key: group[key] for key in ("minReplicas", "maxReplicas")}
    return {
        "name": group["groupName"],
        "replicas": group["replicas"],
        **({} if set(limits.values()) == {group["replicas"]} else limits),
        "hosts": group["numOfHosts"],
        **{key: group[key] for key in ("idleTimeoutSeconds",) if key in group},
        "ingress": "ports" in spec["containers"][0],
        "rayStartParams": group["rayStartParams"],
        "resources": spec["containers"][0]["resources"]["limits"],
        "shm": shm["sizeLimit"],
        "nodeSelector": spec.get("nodeSelector", {}),
    }


def _rayservice(service: Manifest) -> str:
    spec = dict(service["spec"])
    config = yaml.safe_load(spec.pop("serveConfigV2"))
    (app,) = config["applications"]
    app["args"] = {_ENGINE: {}, "serve": app["args"]["serve"]}
    groups = spec["rayClusterConfig"]["workerGroupSpecs"]
    group, _ = groups
    groups[:] = [group]
    group["template"]["spec"].setdefault("nodeSelector", {})
    group.setdefault("idleTimeoutSeconds", 0)
    lines = [*_mapping({**service, "spec": spec}), "  serveConfigV2: |", *_mapping(config, depth=4)]
    return _PODS + "".join(f"{line}\n" for line in lines)


def _mapping(mapping: Manifest, path: str = "", depth: int = 0) -> Iterator[str]:
    """Lines of a mapping, with expressions at the places of the table.

    Args:
        depth: spaces before each key.
    """
    for key in sorted(mapping, key=lambda key: (key not in _FIRST, key)):
        value, at, indent = mapping[key], f"{path}/{key}".removeprefix("/"), " " * depth
        place = _PLACES.get(at, Place())
        if place.when:
            yield f"{{{{- if {place.when} }}}}"
        if place.value:
            yield f"{indent}{key}: {{{{ toYaml ({place.value}) }}}}"
        elif place.block:
            if key != _ENGINE:  # whose keys are beside `serve`
                yield f"{indent}{key}:"
                depth += 2
            yield f"{indent}{{{{- toYaml {place.block} | nindent {depth} }}}}"
            depth = len(indent)
        elif place.file:
            yield f"{indent}{key}: |"
            yield f'{indent}  {{{{- .Files.Get "{place.file}" | nindent {depth + 2} }}}}'
        elif isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _mapping(value, at, depth + 2)
        elif isinstance(value, list) and value:
            yield f"{indent}{key}:"
            yield from _items(value, at, depth)
        else:
            yield f"{indent}{key}: {_scalar(value)}"
        if place.when:
            yield "{{- end }}"


def _items(items: list[Any], path: str, depth: int) -> Iterator[str]:
    each, indent = _PLACES.get(path, Place()).each, " " * depth
    if each:
        yield f"{{{{- range {each} }}}}"
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            yield f"{indent}- {_scalar(item)}"
            continue
        at = f"{path}/{next((item[key] for key in _NAMES if key in item), index)}"
        when = _PLACES.get(at, Place()).when
        if when:
            yield f"{{{{- if {when} }}}}"
        first, *rest = _mapping(item, at, depth + 2)
        assert not first.startswith("{{"), f"{at}: its first key has a condition"
        yield f"{indent}- {first.lstrip()}"
        yield from rest
        if when:
            yield "{{- end }}"
    if each:
        yield "{{- end }}"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).splitlines()[0]


def _by_kubectl(overlay: Path) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(overlay)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(printed.stdout))


if __name__ == "__main__":
    for path, text in files(_by_kubectl).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
