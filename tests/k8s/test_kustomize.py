"""The overlays are kustomize's: the renderer of the tests agrees with `kubectl`, and is strict."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.tests.helpers.kubernetes import crd, kustomize, manifests

K8S = manifests.ROOT / "k8s"
COMPONENTS = sorted(path.parent.name for path in K8S.glob("components/*/kustomization.yaml"))

every_component = pytest.mark.parametrize("name", COMPONENTS)


def by_kubectl(folder: Path) -> list[dict[str, Any]]:
    command = shutil.which("kubectl")
    if command is None:
        pytest.skip("kubectl is not installed: nothing to compare the tests' renderer with")
    printed = subprocess.run(
        [command, "kustomize", folder], check=True, capture_output=True, text=True, timeout=120
    )
    return crd.load_documents(printed.stdout)


def by_name(resources: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in resources}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of `k8s/` to spoil."""
    return Path(shutil.copytree(K8S, tmp_path / "k8s"))


def spoil(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize("path", [*manifests.PATHS, manifests.ALL], ids=lambda path: path.name)
def test_kubectl_renders_the_same(path: Path) -> None:
    assert by_name(by_kubectl(path)) == by_name(manifests.resources(path))


def with_components(copied: Path, overlay: str, *names: str) -> Path:
    """The overlay with more components."""
    file = copied / "overlays" / overlay / "kustomization.yaml"
    spec = yaml.safe_load(file.read_text())
    spec["components"] = [
        *spec.get("components", []), *(f"../../components/{name}" for name in names)
    ]  # fmt: skip
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    return file.parent


def composed(copied: Path, name: str) -> Path:
    """The smallest overlay, with a component and what that one needs."""
    needs = {
        "eight-gpus": ["gpu"],
        "incremental-upgrade": ["autoscaler"],
        "model-cache": ["gpu"],
        "pod-monitor-key": ["pod-monitor"],
        "rdma": ["gpu", "eight-gpus"],
    }.get(name, [])
    return with_components(copied, "cpu", *needs, name)


@every_component
def test_a_component_makes_a_difference_that_is_valid(
    name: str, copied: Path, schemas: dict[tuple[str, str], crd.Schema]
) -> None:
    folder = composed(copied, name)
    assert by_name(kustomize.build(folder)) != by_name(manifests.resources(manifests.DEMO))
    for found in kustomize.build(folder):
        assert crd.check(found, schemas[found["apiVersion"], found["kind"]]) == []
    assert manifests.refusals(manifests.load(folder)) == []


def test_a_suffix_reaches_the_claim_that_pods_mount(copied: Path) -> None:
    folder = with_components(copied, "single-gpu", "model-cache")
    (claim,) = [each for each in kustomize.build(folder) if each["kind"] == "PersistentVolumeClaim"]
    (group,) = manifests.workers(manifests.load(folder))
    assert claim["metadata"]["name"] == "models-single-gpu"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pod = group["template"]["spec"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == dict.fromkeys(["models", "cache"], claim["metadata"]["name"])
    (server,) = pod["containers"]
    (fetcher,) = pod["initContainers"]
    assert fetcher["image"] == server["image"]
    # The server writes nothing but the folder of compiled kernels, the fetcher everywhere.
    mounts = {each["name"]: each for each in server["volumeMounts"]}
    assert mounts["models"]["readOnly"] is True
    assert mounts["cache"]["subPath"] == ".cache"
    folders = {each["name"]: each["value"] for each in server["env"] if "CACHE_DIR" in each["name"]}
    assert set(folders) == {"TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"}
    for each in folders.values():
        assert each.startswith(mounts["cache"]["mountPath"] + "/")
    assert fetcher["volumeMounts"] == [{"name": "cache", "mountPath": "/models"}]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    fetched = {each["name"]: each for each in fetcher["env"]}
    (app,) = manifests.serve_config(manifests.load(folder))["applications"]
    names = [name.rsplit("/", 1)[1] for name in fetched["MODELS"]["value"].split()]
    args = app["args"]
    asked = [args["model"], args["speculative_config"]["speculative_model"]]
    assert [f"/models/{name}" for name in names] == asked


def test_the_fetcher_calls_the_hub_s_command_online(copied: Path, tmp_path: Path) -> None:
    """Its script, with a command of the same name that writes down how it is called."""
    folder = with_components(copied, "single-gpu", "model-cache")
    (group,) = manifests.workers(manifests.load(folder))
    (fetcher,) = group["template"]["spec"]["initContainers"]
    env = {each["name"]: each.get("value", "the token") for each in fetcher["env"]}
    calls, own = tmp_path / "calls", tmp_path / "bin"
    own.mkdir()
    (own / "hf").write_text(f'#!/bin/bash\necho "$HF_HUB_OFFLINE $HF_TOKEN $*" >> {calls}\n')
    (own / "hf").chmod(0o755)
    (script,) = (text.replace("/models", str(tmp_path / "models")) for text in fetcher["args"])
    subprocess.run(
        [*fetcher["command"], script], check=True, env={"PATH": f"{own}:/usr/bin:/bin", **env}
    )
    into = tmp_path / "models"
    assert calls.read_text().splitlines() == [
        f"0 the token download {name} --local-dir {into / name.rsplit('/', 1)[1]}"
        for name in env["MODELS"].split()
    ]
    assert (into / ".cache").is_dir()
    # The command itself takes these arguments, and no network where it is offline.
    command = Path(sys.executable).with_name("hf")
    shown = subprocess.run(
        [command, "download", "--help"], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert "REPO_ID" in shown
    assert "--local-dir" in shown


def test_the_chart_is_made_of_every_component() -> None:
    """But of one of two that exclude each other, and those of the overlay that it stands on."""
    (spec,) = crd.load_documents((K8S / "all" / "kustomization.yaml").read_text())
    below = manifests.OVERLAYS / "drafter-nodes" / "kustomization.yaml"
    (overlay,) = crd.load_documents(below.read_text())
    listed = [Path(name).name for name in [*overlay["components"], *spec["components"]]]
    assert sorted([*listed, "no-upgrade"]) == COMPONENTS


@every_component
def test_kubectl_composes_the_same(name: str, copied: Path) -> None:
    folder = composed(copied, name)
    assert by_name(by_kubectl(folder)) == by_name(kustomize.build(folder))


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("base/kustomization.yaml", "resources:", "resource:", "unknown fields"),
        ("overlays/tp8/kustomization.yaml", "components/gpu", "components/gpus", "no kustomiz"),
        ("overlays/tp8/kustomization.yaml", "nameSuffix", "nameSufix", "unknown fields"),
        ("overlays/tp8/kustomization.yaml", "[args.yaml]", "[arg.yaml]", "no file arg.yaml"),
        ("overlays/two-nodes/kustomization.yaml", "/replicas", "/replica", "there is no replica"),
        ("components/gpu/workers.yaml", "volumeMounts/-", "volumeMount/-", "no volumeMount"),
        ("components/gpu/workers.yaml", "op: copy", "op: duplicate", "no operation"),
        ("components/gpu/kustomization.yaml", "kind: RayService", "kind: RayServe", "nothing is"),
        ("components/eight-gpus/kustomization.yaml", "value:", "values:", "expected"),
        ("settings/serve-config.yaml", "data.engines", "data.engine", "there is no engine"),
        ("settings/serve-config.yaml", "index: 7", "index: 9", "not between two of"),
        ("settings/serve-config.yaml", "# args.yaml", "# arg.yaml", "not between two of"),
        ("base/rayservice.yaml", "name: outrider", "name: outrider\n  name: x", "given twice"),
    ],
)
def test_a_planted_mistake_is_found(
    file: str, old: str, new: str, complaint: str, copied: Path
) -> None:
    spoil(copied / file, old, new)
    overlay = copied / "overlays" / ("two-nodes" if "two-nodes" in file else "tp8")
    with pytest.raises((kustomize.KustomizeError, yaml.YAMLError), match=complaint):
        kustomize.build(overlay)


def test_a_mistake_in_a_patch_reaches_the_schemas(
    copied: Path, schemas: dict[tuple[str, str], crd.Schema]
) -> None:
    """What kustomize takes as it is, the schemas of KubeRay then refuse."""
    spoil(copied / "components/gpu/workers.yaml", "/tolerations", "/toleration")
    found = manifests.load(copied / "overlays" / "tp8")
    (complaint,) = crd.check(found, schemas[found["apiVersion"], found["kind"]])
    assert "spec.toleration: unknown field" in complaint


def test_numbers_of_settings_are_numbers(copied: Path) -> None:
    """They are written between quotes, with a tag."""
    overlay = copied / "overlays" / "cpu"
    spoil(
        overlay / "kustomization.yaml",
        "literals: [",
        "literals: [engines=3, ingresses=2, speculation=false, ",
    )
    (app,) = manifests.serve_config(manifests.load(overlay))["applications"]
    engine, ingress = app["deployments"]
    assert [engine["num_replicas"], ingress["num_replicas"]] == [3, 2]
    assert engine["user_config"] == {"enabled": False, "max_draft_len": 8}


def stacked(copied: Path) -> Path:
    own = copied / "overlays" / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [../tp8]\nnameSuffix: -own\ntransformers: [../../settings]\n"
        "configMapGenerator:\n  - {name: settings, behavior: merge, literals: [max_draft_len=4]}\n"
    )
    return own


def test_an_overlay_on_another_may_change_its_settings(copied: Path) -> None:
    found = manifests.load(stacked(copied))
    assert found["metadata"]["name"] == "outrider-tp8-own"
    (app,) = manifests.serve_config(found)["applications"]
    assert app["deployments"][0]["user_config"]["max_draft_len"] == 4


def test_kubectl_changes_the_same(copied: Path) -> None:
    own = stacked(copied)
    assert by_name(by_kubectl(own)) == by_name(kustomize.build(own))
