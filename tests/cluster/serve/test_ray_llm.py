"""Ray Serve LLM's fields: what they become, what is refused, and the documented example."""

from __future__ import annotations

import ast
import pickle
import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

import outrider
from outrider.cluster.app import LLMArgs, ModelLoading, ServingArgs, read_llm_args
from outrider.config import NGramConfig
from outrider.errors import ConfigError

from ...helpers.ports import free_port

ROOT = Path(outrider.__file__).parent
EXAMPLE = ROOT / "docs" / "examples" / "two-models.yaml"
MODEL: dict[str, Any] = {
    "model_loading_config": {"model_id": "demo", "model_source": "/models/demo"},
    "engine_kwargs": {
        "tensor_parallel_size": 2,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.5,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    },
    "deployment_config": {"num_replicas": 2, "max_ongoing_requests": 16},
    "accelerator_type": "H100",
    "runtime_env": {"env_vars": {"A": "1"}},
    "placement_group_config": {"bundles": [{"CPU": 2, "GPU": 1}] * 2, "strategy": "STRICT_PACK"},
}


def small(name: str, **fields: Any) -> dict[str, Any]:
    return {"model_loading_config": {"model_id": name}, **fields}


def tuned(name: str) -> dict[str, Any]:
    """With an adapter x."""
    return small(name, engine_kwargs={"lora_modules": ["x=/x"]})


def test_fields_become_settings(tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(MODEL))
    for args in (MODEL, {"llm_configs": [MODEL]}, {"llm_configs": [str(file)]}):
        (model,), section = read_llm_args(args)
        config = model.config
        assert (config.model, config.model_name) == ("/models/demo", "demo")
        assert (config.max_num_seqs, config.kv_memory_fraction) == (8, 0.5)
        assert isinstance(config.speculative_config, NGramConfig)
        assert config.speculative_config.max_draft_len == 3
        assert config.resources.accelerator_type == "H100"
        assert (config.resources.cpus_per_worker, config.resources.gpus_per_worker) == (2, 1)
        assert config.resources.placement_strategy == "STRICT_PACK"
        options = model.serve_options()
        assert (options["num_replicas"], model.max_each) == (2, 16)
        assert options["ray_actor_options"]["runtime_env"] == {"env_vars": {"A": "1"}}
        assert section.num_ingress_replicas == 1
    assert pickle.loads(pickle.dumps(model)) == model


def fields_of_ray(file: str, name: str) -> set[str]:
    """Public fields of one of Ray's models; read from its source, since vLLM may be missing."""
    import ray

    path = Path(ray.__file__).parent / "llm" / "_internal" / "serve" / "core" / file
    (found,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    names = {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}
    return {each for each in names if not each.startswith("_")}


def test_every_field_of_ray_serve_llm_is_accepted_or_refused_with_a_reason():
    entry = fields_of_ray("configs/llm_config.py", "LLMConfig")
    assert {"lora_config", "server_cls"} <= entry - set(LLMArgs.model_fields)
    for key in entry - set(LLMArgs.model_fields):
        with pytest.raises(ConfigError, match="not supported") as caught:
            read_llm_args({"llm_configs": [small("a", **{key: {"kind": "x"}})]})
        assert caught.value.field == f"llm_configs.0.{key}"
    loading = fields_of_ray("configs/llm_config.py", "ModelLoadingConfig")
    assert loading == set(ModelLoading.model_fields)
    arguments = fields_of_ray("ingress/builder.py", "LLMServingArgs")
    assert arguments - set(ServingArgs.model_fields) == {"ingress_cls_config"}


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({}, "llm_configs"),
        ({"llm_configs": []}, "llm_configs"),
        ({"llm_configs": [small("a")], "ingress_cls_config": {}}, "ingress_cls_config"),
        ({"llm_configs": [small("a"), small("a")]}, "llm_configs.1.model_loading_config.model_id"),
        ({"llm_configs": [tuned("a"), small("x")]},
         "llm_configs.1.model_loading_config.model_id"),
        ({"llm_configs": [tuned("a"), tuned("b")]}, "llm_configs.1.engine_kwargs.lora_modules"),
        ({"llm_configs": [small("a:b")]}, "llm_configs.0.model_loading_config.model_id"),
        ({"llm_configs": [small("a"), small("b", lora_config={"max_num_adapters_per_replica": 1})]},
         "llm_configs.1.lora_config"),
        ({"llm_configs": [small("a")], "serve": {"num_replicas": 2}}, "serve.num_replicas"),
        ({"llm_configs": [small("a")], "serve": {"acces": {}}}, "serve.acces"),
        ({"llm_configs": ["/nowhere.yaml"]}, "llm_configs.0./nowhere.yaml"),
        (small("a", deployment_config={"version": "1"}), "deployment_config.version"),
        (small("a", deployment_config={"autoscaling_config": {"min_replica": 1}}),
         "deployment_config.autoscaling_config.min_replica"),
        (small("a", deployment_config={"autoscaling_config": {"min_replicas": -1}}),
         "deployment_config.autoscaling_config.min_replicas"),
        (small("a", engine_kwargs={"enable_lora": False, "lora_modules": ["x=/x"]}),
         "engine_kwargs.enable_lora"),
        (small("a", engine_kwargs={"cpu_offload_gb": 4}), "engine_kwargs.cpu_offload_gb"),
        (small("a", engine_kwargs={"model": "b"}), "engine_kwargs.model"),
        (small("a", placement_group_config={"bundles": [{"GPU": 1}] * 3}),
         "placement_group_config.bundles"),
        (small("a", engine_kwargs={"tensor_parallel_size": "two"},
               placement_group_config={"bundles": [{"GPU": 1}]}),
         "placement_group_config.bundles"),
        (small("a", placement_group_config={"strategy": "SPREAD"}),
         "placement_group_config.strategy"),
        (small("a", log_engine_metrics=False), "log_engine_metrics"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(args, field):
    with pytest.raises(ConfigError) as caught:
        read_llm_args(args)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize(
    ("deployment", "scaling"),
    [
        ({"autoscaling_config": {"max_replicas": 3}},
         {"max_replicas": 3, "target_ongoing_requests": 8}),
        ({"autoscaling_config": {"max_replicas": 3, "target_ongoing_requests": 5}},
         {"max_replicas": 3, "target_ongoing_requests": 5}),
        ({"num_replicas": "auto"},
         {"min_replicas": 1, "max_replicas": 100, "target_ongoing_requests": 8}),
    ],
)  # fmt: skip
def test_engines_are_added_when_a_batch_is_full(deployment, scaling):
    args = small("a", engine_kwargs={"max_num_seqs": 8}, deployment_config=deployment)
    (model,), _ = read_llm_args(args)
    options = model.serve_options()
    policy = {"policy_function": "outrider.cluster.serve.args:by_load"}
    assert options["autoscaling_config"] == {**scaling, "policy": policy}
    assert "num_replicas" not in options


def wait_until_running(name: str) -> None:
    from ray import serve

    deadline = time.monotonic() + 240
    while (status := serve.status().applications.get(name)) is None or status.status != "RUNNING":
        assert time.monotonic() < deadline, status
        assert status is None or status.status != "DEPLOY_FAILED", status
        time.sleep(0.5)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_documented_example(monkeypatch):
    """Two models behind one endpoint, deployed from the file as `serve deploy` does."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    text = EXAMPLE.read_text()
    assert text[text.index("applications") :] in (ROOT / "docs/ray-serve-llm.md").read_text()
    monkeypatch.chdir(ROOT)  # the file's paths are relative
    port = free_port()
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        schema = ServeDeploySchema(**yaml.safe_load(text))
        _get_global_client().deploy_apps(schema)
        wait_until_running("llm")
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        assert [each.id for each in client.models.list()] == ["demo", "demo-small"]
        answers = {
            name: client.completions.create(
                model=name, prompt="def main(", temperature=0, max_tokens=24
            )
            for name in ("demo", "demo-small")
        }
        texts = {name: each.choices[0].text for name, each in answers.items()}
        assert texts["demo"] != texts["demo-small"]
        used = {name: each.usage.model_dump()["speculation"] for name, each in answers.items()}
        assert used["demo"]["num_accepted_tokens"] > 0
        assert used["demo-small"]["num_draft_tokens"] == 0
        for name, match in (
            ("other", "'demo', 'demo-small'"),
            ("demo:tuned", "no adapter 'tuned'"),
        ):
            with pytest.raises(openai.NotFoundError, match=match):
                client.completions.create(model=name, prompt="a")
        stats = httpx.get(f"{url}/stats").json()
        assert [each["model"] for each in stats["engines"]] == ["demo", "demo-small"]
        metrics = httpx.get(f"{url}/metrics").text
        for name in texts:
            assert re.search(f'outrider:generation_tokens_total{{.*model="{name}"', metrics)
            assert re.search(f'outrider:engine_steps_total{{.*model="{name}"', metrics)
        assert set(serve.status().applications["llm"].deployments) == {
            "Engine:demo", "Engine:demo-small", "Ingress",
        }  # fmt: skip
    finally:
        serve.shutdown()
        ray.shutdown()
