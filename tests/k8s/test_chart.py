"""The Helm chart renders what the overlays do, with the presets that are made of them."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from outrider import __version__
from outrider.k8s import chart
from outrider.tests.helpers.kubernetes import crd, helm, manifests

every_overlay = pytest.mark.parametrize("path", manifests.PATHS, ids=lambda path: path.name)
_IN_PARTS = "NewClusterWithIncrementalUpgrade"
SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())


def preset(path: Path) -> dict[str, Any]:
    """The values of an overlay."""
    (values,) = crd.load_documents((chart.CHART / "presets" / f"{path.name}.yaml").read_text())
    return values


def comparable(resources: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind: without names, which a release has of its own; `serveConfigV2` as data."""
    found = {}
    for resource in copy.deepcopy(resources):
        if resource["kind"] == "RayService":
            resource["spec"]["serveConfigV2"] = manifests.serve_config(resource)
            config = resource["spec"]["serveConfigV2"]
            for app in config["applications"]:
                app["deployments"].sort(key=lambda each: each["name"])
        if resource["kind"] == "ConfigMap":
            resource["data"] = {key: json.loads(text) for key, text in resource["data"].items()}
        resource["metadata"].pop("name")
        assert resource["kind"] not in found
        found[resource["kind"]] = resource
    return found


def by_helm(*args: str | Path) -> list[dict[str, Any]]:
    command = shutil.which("helm")
    if command is None:
        pytest.skip("helm is not installed: nothing to compare the tests' renderer with")
    printed = subprocess.run(
        [command, "template", "own", chart.CHART, *args],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return [each for each in crd.load_documents(printed.stdout) if each is not None]


def test_templates_and_presets_are_up_to_date() -> None:
    written = chart.files(manifests.resources)
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, "python -m outrider.k8s.chart"
    here = {
        *chart.CHART.glob("templates/*"),
        *chart.CHART.glob("presets/*"),
        chart.CHART / "dashboard.json",
    }
    assert here == set(written)


@every_overlay
def test_the_chart_and_the_overlay_agree(
    path: Path, schemas: dict[tuple[str, str], crd.Schema]
) -> None:
    resources = helm.template(chart.CHART, "own", preset(path))
    for each in resources:
        assert crd.check(each, schemas[each["apiVersion"], each["kind"]]) == []
    assert comparable(resources) == comparable(manifests.resources(path))
    assert {each["metadata"]["name"] for each in resources} == {"own"}
    for each in resources:
        assert each["kind"] != "RayService" or manifests.refusals(each) == []


@every_overlay
def test_helm_renders_the_same(path: Path) -> None:
    file = chart.CHART / "presets" / f"{path.name}.yaml"
    assert comparable(by_helm("-f", file)) == comparable(manifests.resources(path))


@every_overlay
def test_a_preset_fits_the_schema(path: Path) -> None:
    values = preset(path)
    jsonschema.validate(values, SCHEMA)
    jsonschema.validate(helm.merge(yaml.safe_load(own_values()), values), SCHEMA)


def own_values() -> str:
    return (chart.CHART / "values.yaml").read_text(encoding="utf-8")


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    def keys(schema: dict[str, Any], values: dict[str, Any], path: str = "") -> None:
        for key, part in schema["properties"].items():
            assert key in values or key == "global", f"{path}.{key}"
            if part.get("additionalProperties") is False and "properties" in part:
                keys(part, values[key], f"{path}.{key}")

    (values,) = crd.load_documents(own_values())
    keys(SCHEMA, values)
    with pytest.raises(jsonschema.ValidationError, match="'model' is a required property"):
        jsonschema.validate(values, SCHEMA)  # a release starts from a preset
    values["args"] = {"model": "x"}
    jsonschema.validate(values, SCHEMA)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda values: values.update(engine=2), "'engine' was unexpected"),
        (lambda values: values["image"].update(tags="1"), "'tags' was unexpected"),
        (lambda values: values["workers"][0].update(gpus=1), "'gpus' was unexpected"),
        (lambda values: values["workers"][0].pop("shm"), "'shm' is a required property"),
        (lambda values: values["args"].update(serve={}), "False schema"),
        (lambda values: values["prometheus"].update(podmonitor=True), "'podmonitor' was"),
        (lambda values: values.update(workers=[]), "should be non-empty|too short"),
        (lambda values: values.update(engines="2"), "'2' is not of type 'integer'"),
        (lambda values: values["workers"][0]["resources"].update(cpu=4), "4 is not of type"),
        (lambda values: values["workers"][0].update(idleTimeoutSeconds=60), "False schema"),
        (lambda values: values.update(upgradeStrategy="Recreate"), "'Recreate' is not one of"),
        (
            lambda values: values.update(
                upgradeStrategy=_IN_PARTS, upgradeOptions={"gatewayClassName": "istio"}
            ),
            "True was expected",
        ),
        (
            lambda values: values.update(
                upgradeStrategy=_IN_PARTS, autoscaling=True, upgradeOptions={"gatewayClassName": ""}
            ),
            "should be non-empty|too short",
        ),
    ],
)
def test_a_misspelt_value_is_refused(
    spoil: Callable[[dict[str, Any]], Any], complaint: str
) -> None:
    values = preset(manifests.DEMO)
    spoil(values)
    with pytest.raises(jsonschema.ValidationError, match=complaint):
        jsonschema.validate(values, SCHEMA)


def test_values_reach_the_manifest(schemas: dict[tuple[str, str], crd.Schema]) -> None:
    values = {
        "image": {"repository": "registry.example/outrider", "pullSecret": "login"},
        "args": {"max_num_seqs": 4},
        "engines": 3,
        "apiKeysSecret": "keys",
        "redis": {"address": "redis:6379"},
        "upgradeStrategy": "None",
        "networkPolicy": True,
        "prometheus": {
            "podMonitor": True,
            "podMonitorLabels": {"team": "serving"},
            "keySecret": "scraper",
            "from": [{"namespaceSelector": {"matchLabels": {"name": "watch"}}}],
        },
        "grafanaDashboard": True,
    }
    own = preset(manifests.DEMO)
    own["workers"][0]["replicas"] = 2
    resources = helm.template(chart.CHART, "own", own, values)
    found = comparable(resources)
    service = found["RayService"]["spec"]
    (app,) = service["serveConfigV2"]["applications"]
    engine, ingress = app["deployments"]
    assert (engine["num_replicas"], ingress["num_replicas"]) == (3, 2)
    assert app["args"]["max_num_seqs"] == 4
    assert app["args"]["model"] == own["args"]["model"]
    assert app["args"]["serve"]["access"] == {"keys_file": "/etc/outrider/keys.yaml"}
    assert service["upgradeStrategy"] == {"type": "None"}
    assert service["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"
    for group in manifests.groups(found["RayService"]):
        spec = group["template"]["spec"]
        assert spec["containers"][0]["image"] == "registry.example/outrider:0.1.0"
        assert spec["imagePullSecrets"] == [{"name": "login"}]
    production = comparable(manifests.resources(manifests.OVERLAYS / "tp8-production"))
    policy = copy.deepcopy(production["NetworkPolicy"]["spec"])
    policy["ingress"][3]["from"] = [{"namespaceSelector": {"matchLabels": {"name": "watch"}}}]
    assert found["NetworkPolicy"]["spec"] == policy
    labels = found["PodMonitor"]["metadata"]["labels"]
    assert labels == {"release": "prometheus", "team": "serving"}
    (keyed,) = [
        each["authorization"]["credentials"]
        for each in found["PodMonitor"]["spec"]["podMetricsEndpoints"]
        if "authorization" in each
    ]
    assert keyed == {"name": "scraper", "key": "key"}
    assert found["ConfigMap"] == production["ConfigMap"]
    for each in resources:
        assert crd.check(each, schemas[each["apiVersion"], each["kind"]]) == []


def test_an_upgrade_in_parts_is_the_component_s(
    schemas: dict[tuple[str, str], crd.Schema],
) -> None:
    values = {
        "engines": 4,
        "autoscaling": True,
        "upgradeStrategy": _IN_PARTS,
        "upgradeOptions": {"gatewayClassName": "istio"},
        "deletionDelaySeconds": 600,
    }
    own = preset(manifests.OVERLAYS / "tp8")
    own["workers"][0].update(replicas=4, minReplicas=1, maxReplicas=4)
    jsonschema.validate(helm.merge(helm.merge(yaml.safe_load(own_values()), own), values), SCHEMA)
    (service,) = helm.template(chart.CHART, "own", own, values)
    assert crd.check(service, schemas[service["apiVersion"], service["kind"]]) == []
    assert manifests.refusals(service) == []
    whole = manifests.load(manifests.ALL)["spec"]
    for key in ("upgradeStrategy", "rayClusterDeletionDelaySeconds"):
        assert service["spec"][key] == whole[key]


@pytest.mark.parametrize(("length", "fits"), [(47, True), (48, False)])
def test_a_name_that_kuberay_ignores_is_refused(length: int, fits: bool) -> None:
    if fits:
        helm.template(chart.CHART, "a" * length, preset(manifests.DEMO))
        return
    with pytest.raises(helm.HelmError, match="at most 47 characters"):
        helm.template(chart.CHART, "a" * length, preset(manifests.DEMO))


def test_a_cache_of_models_is_the_component_s(schemas: dict[tuple[str, str], crd.Schema]) -> None:
    values = {"modelCache": {"models": ["org/a", "org/b.1"], "size": "2Ti", "storageClass": "nfs"}}
    own = preset(manifests.OVERLAYS / "drafter-nodes")
    resources = helm.template(chart.CHART, "own", own, values)
    for each in resources:
        assert crd.check(each, schemas[each["apiVersion"], each["kind"]]) == []
    jsonschema.validate(helm.merge(own, values), SCHEMA)
    (claim,) = [each for each in resources if each["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"
    assert claim["spec"]["storageClassName"] == "nfs"
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (service,) = [each for each in resources if each["kind"] == "RayService"]
    (whole,) = [each for each in manifests.resources(manifests.ALL) if each["kind"] == "RayService"]
    expected = manifests.workers(whole)[0]["template"]["spec"]
    for group in manifests.workers(service):
        pod = group["template"]["spec"]
        (fetcher,), (made,) = pod["initContainers"], expected["initContainers"]
        assert fetcher["env"][0] == {"name": "MODELS", "value": "org/a org/b.1"}
        assert fetcher["env"][1:] == made["env"][1:]
        assert fetcher["args"] == made["args"]
        assert pod["securityContext"] == expected["securityContext"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes["cache"] == {
            "name": "cache",
            "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]},
        }


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (".Values.engines", ".Values.engine", "there is no engine"),
        ("toYaml .Values.args", "toYml .Values.args", "no function toYml"),
        ("($pods)", "($pod)", "neither a variable"),
        ("{{- end }}", "", "without its end"),
        ("{{- if .nodeSelector }}", "{{- unless .nodeSelector }}", "an end of nothing"),
        ("(.name) }}", "(.name }}", "parenthesis"),
    ],
)
def test_a_mistake_in_a_template_is_found(
    old: str, new: str, complaint: str, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(chart.CHART, tmp_path / "chart"))
    file = copied / "templates" / "rayservice.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(helm.HelmError, match=complaint):
        helm.template(copied, "own", preset(manifests.DEMO))


def test_versions_are_the_project_s() -> None:
    (about,) = crd.load_documents((chart.CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == __version__
    (values,) = crd.load_documents(own_values())
    assert values["image"]["tag"] == __version__
