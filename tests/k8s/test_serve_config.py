"""`serveConfigV2`: Ray Serve's schema, strictly; Outrider's own; and whether it all finds room."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ray.serve._private.build_app import build_app as build_serve_app
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from outrider.cluster.serve.args import ServeConfig, read_args
from outrider.cluster.serve.drafters import DRAFTERS
from outrider.config import DraftModelConfig, EngineConfig
from outrider.errors import ConfigError
from outrider.tests.helpers.kubernetes import manifests

every_manifest = pytest.mark.parametrize("path", manifests.PATHS, ids=lambda path: path.name)
# Serve's schema drops keys that it does not know; these are its sections, by the key they are at.
SECTIONS: dict[str, type[BaseModel]] = {
    "http_options": HTTPOptionsSchema,
    "applications": ServeApplicationSchema,
    "deployments": DeploymentSchema,
    "ray_actor_options": RayActorOptionsSchema,
}


def unknown_keys(
    data: dict[str, Any], model: type[BaseModel] = ServeDeploySchema, path: str = ""
) -> list[str]:
    """Keys that Serve would drop in silence."""
    unknown = []
    for key, value in data.items():
        where = f"{path}.{key}"
        if key not in model.model_fields:
            unknown.append(where)
        elif key in SECTIONS:
            for item in value if isinstance(value, list) else [value]:
                unknown += unknown_keys(item, SECTIONS[key], where)
    return unknown


def application(path: Path) -> dict[str, Any]:
    """The one application of a manifest."""
    (found,) = manifests.serve_config(manifests.load(path))["applications"]
    return found


def settings(path: Path) -> tuple[EngineConfig, ServeConfig]:
    return read_args(application(path)["args"])


def deployments(path: Path) -> dict[str, dict[str, Any]]:
    """What each deployment asks for: the code's values, then the manifest's over them."""
    app = application(path)
    module, _, name = app["import_path"].partition(":")
    built = build_serve_app(getattr(importlib.import_module(module), name)(app["args"]), name="x")
    asked = {
        each.name: {
            "num_replicas": each.num_replicas,
            "max_replicas_per_node": None,
            **each.ray_actor_options,
        }
        for each in built.deployments
    }
    for override in app["deployments"]:
        assert override["name"] in asked, f"{override['name']} is none of {sorted(asked)}"
        own = asked[override["name"]]
        own.update({key: value for key, value in override.items() if key in own})
        own.update(override.get("ray_actor_options", {}))
    return asked


@every_manifest
def test_serve_accepts_every_key(path: Path) -> None:
    config = manifests.serve_config(manifests.load(path))
    assert unknown_keys(config) == []
    ServeDeploySchema.model_validate(config)


def test_a_misspelt_key_of_serve_is_found() -> None:
    config = manifests.serve_config(manifests.load(manifests.PATHS[0]))
    config["applications"][0]["deployments"][0]["ray_actor_options"]["num_cpu"] = 1
    ServeDeploySchema.model_validate(config)  # Serve itself does not mind
    assert unknown_keys(config) == [".applications.deployments.ray_actor_options.num_cpu"]


@every_manifest
def test_engine_settings_are_valid(path: Path) -> None:
    config, _ = settings(path)
    assert config.executor == "ray"
    assert config.served_model_name is not None


def test_a_misspelt_key_of_ours_is_found() -> None:
    args = application(manifests.PATHS[0])["args"]
    with pytest.raises(ConfigError, match=r"max_num_seq: unknown key; did you mean 'max_num_seqs'"):
        read_args({**args, "max_num_seq": 1})
    with pytest.raises(ConfigError, match=r"speculative_config\.max_draft_length"):
        read_args({**args, "speculative_config": {"decoding_type": "NGram", "max_draft_length": 1}})


@every_manifest
def test_import_path_resolves(path: Path) -> None:
    module, _, name = application(path)["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@every_manifest
def test_switches_are_within_the_configured_length(path: Path) -> None:
    config, _ = settings(path)
    (engine,) = [item for item in application(path)["deployments"] if item["name"] == "Engine"]
    assert set(engine["user_config"]) == {"enabled", "max_draft_len"}
    assert 0 <= engine["user_config"]["max_draft_len"] <= config.speculative_config.draft_len


@every_manifest
def test_every_worker_with_cpus_gets_an_ingress_and_the_head_nothing(path: Path) -> None:
    groups = manifests.serving(manifests.load(path))
    for group in groups:  # engines and ingresses do not follow pods: a group of them is fixed
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    asked = deployments(path)
    assert asked["Ingress"]["max_replicas_per_node"] == 1
    assert asked["Ingress"]["num_replicas"] == sum(map(manifests.num_pods, groups))
    for needs in asked.values():
        assert needs["num_cpus"] > 0


@dataclass
class Pod:
    """What Ray has left there."""

    cpus: float
    gpus: float

    def take(self, cpus: float, gpus: float) -> bool:
        fits = cpus <= self.cpus and gpus <= self.gpus
        if fits:
            self.cpus -= cpus
            self.gpus -= gpus
        return fits


def rank_needs(config: EngineConfig) -> list[tuple[float, float]]:
    """CPUs and GPUs of each rank's bundle, as the defaults of `ResourcesConfig` say."""
    assert config.device != "auto", "a manifest says which device it is for"
    on_gpu = config.device == "cuda"
    cpus, gpus = config.resources.cpus_per_worker, config.resources.gpus_per_worker
    bundle = (
        (0.0 if on_gpu else 1.0) if cpus is None else cpus,
        (1.0 if on_gpu else 0.0) if gpus is None else gpus,
    )
    num_ranks = config.num_ranks
    section = config.speculative_config
    if (
        isinstance(section, DraftModelConfig)
        and section.placement == "separate"
        and section.drafter_group is None  # whose members have places of their own
    ):
        num_ranks += section.draft_tensor_parallel_size or 1
    return [bundle] * num_ranks


def members_needs(section: ServeConfig, limit: str) -> list[tuple[float, float]]:
    """The same of drafter groups' members, with as few or as many as load decides between."""
    return [
        need
        for group in section.drafter_groups
        for _ in range(getattr(group, "min_members" if limit == "minReplicas" else "max_members"))
        for need in rank_needs(group.engine)
    ]


@pytest.mark.parametrize("limit", ["minReplicas", "maxReplicas"])
@every_manifest
def test_replicas_and_ranks_find_room(path: Path, limit: str) -> None:
    config, section = settings(path)
    pods = [
        Pod(offer["CPU"], offer["GPU"])
        for group in manifests.workers(manifests.load(path))
        for offer in [manifests.ray_resources(group)]
        for _ in range(manifests.num_pods(group, limit))
    ]
    asked = deployments(path)
    for pod in [each for each in pods if each.cpus]:
        assert pod.take(asked["Ingress"]["num_cpus"], 0), "an ingress on every worker with CPUs"
    beside = [asked[DRAFTERS]["num_cpus"]] if DRAFTERS in asked else []
    for cpus in beside:
        assert cpus > 0
        assert any(pod.take(cpus, 0) for pod in pods)
    engine = asked["Engine"]
    for _ in range(engine["num_replicas"]):
        needs = [(engine["num_cpus"], engine.get("num_gpus", 0)), *rank_needs(config)]
        for cpus, gpus in needs:
            assert any(pod.take(cpus, gpus) for pod in pods), f"no room for {cpus} CPU, {gpus} GPU"
    for cpus, gpus in members_needs(section, limit):
        assert any(pod.take(cpus, gpus) for pod in pods), "no room for a member"
    # A GPU that nobody uses is a mistake as well.
    assert all(pod.gpus == 0 for pod in pods)


@every_manifest
def test_torch_threads_fit_the_pod(path: Path) -> None:
    config, _ = settings(path)
    if config.device == "cpu":
        threads = config.resources.threads_per_worker
        assert threads is not None, "torch counts the node's cores, not the pod's"
        assert threads <= (config.resources.cpus_per_worker or 1)
