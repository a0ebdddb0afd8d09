"""The Ray Serve application: an `Ingress` for HTTP and one or more `EngineReplica`s per model.

    serve run outrider.cluster.app:build_app model=/path

In a Serve configuration file, use `import_path: outrider.cluster.app:build_app`; `args:` takes the
engine's configuration and a `serve:` section. For several models behind one endpoint, with the
fields of Ray Serve LLM, use `import_path: outrider.serve_llm:build_openai_app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator
from ray import serve
from ray.serve import Application

from ..config import EngineConfig, Strict, parse
from ..config.strict import at_key, read_mapping
from ..errors import ConfigError, below
from .serve.args import DeploymentConfig, ServeConfig, check_acceptance, read_args
from .serve.drafters import DRAFTERS, DrafterGroups
from .serve.ingress import INGRESS, Ingress, LLMServer
from .serve.models import ENGINE, SETTLE_S, ServedModel
from .serve.replica import EngineReplica

_MAX_HTTP_REQUESTS = 16384  # per ingress; the ingress itself rejects excess requests with 429


def build_app(args: dict[str, Any]) -> Application:
    """Builds the application from the keys of `EngineConfig` and a `serve:` section.

    Raises:
        ConfigError: names the key.
    """
    return application(*read_args(args))


def build_openai_app(args: dict[str, Any]) -> Application:
    """Builds the application from Ray Serve LLM's `llm_configs`, with one model or several.

    Raises:
        ConfigError: names the key.
    """
    return assemble(*read_llm_args(args))


def build_llm_deployment(
    llm_config: Any,
    *,
    name_prefix: str | None = None,
    bind_kwargs: dict[str, Any] | None = None,
    override_serve_options: dict[str, Any] | None = None,
    deployment_cls: type | None = None,
) -> Application:
    """Builds one model from Ray Serve LLM's fields, to be bound into another application.

    Its handle has the methods of `HandleMethods`; no port is opened.

    Args:
        llm_config: an entry of `llm_configs`: a mapping, a pydantic model, or the path of a file.
        name_prefix: prefix of the deployment's name, before the model's; default: `LLMServer:`.
        override_serve_options: keys of `deployment_config` that replace those of the entry.

    Raises:
        ConfigError: names the key.
    """
    for name, given in (("bind_kwargs", bind_kwargs), ("deployment_cls", deployment_cls)):
        if given:
            raise ConfigError.at(name, "not supported: the deployment is Outrider's")
    models, section = read_llm_args(one_model(llm_config, override_serve_options or {}))
    prefix = f"{LLMServer.__name__}:" if name_prefix is None else name_prefix
    name = prefix + models[0].name.replace("/", "--").replace(".", "_")
    return assemble(models, section, name)


def application(config: EngineConfig, section: ServeConfig) -> Application:
    """Builds the application of one model.

    Raises:
        ConfigError: as `assemble`.
    """
    return assemble([ServedModel(config, section.deployment)], section)


def assemble(
    models: Sequence[ServedModel], section: ServeConfig, name: str | None = None
) -> Application:
    """Binds the deployments: the engines of each model, and the ingress in front of them.

    Args:
        name: name of the ingress if it is part of another application; it then opens no port.

    Raises:
        ConfigError: as `check_acceptance`.
    """
    engines, groups = {}, _drafter_groups(models, section)
    for model in models:
        check_acceptance(model.config)
        deployment = serve.deployment(
            name=ENGINE if len(models) == 1 and name is None else model.deployment_name,
            **model.serve_options(),
        )(EngineReplica)
        engines[model.name] = deployment.bind(
            model, section.resume_window_s, section.resume_max_values, groups
        )
    ingress = serve.deployment(
        name=INGRESS if name is None else name,
        num_replicas=section.num_ingresses,
        max_ongoing_requests=_MAX_HTTP_REQUESTS,
        graceful_shutdown_timeout_s=section.graceful_shutdown_timeout_s + SETTLE_S,
        health_check_period_s=section.health_check_period_s,
        health_check_timeout_s=section.health_check_timeout_s,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Ingress) if name is None else LLMServer)
    return ingress.bind(engines, list(models), section)


def _drafter_groups(models: Sequence[ServedModel], section: ServeConfig) -> dict[str, Application]:
    """Binds the deployment of the application's drafter groups; returns it by group name.

    Raises:
        ConfigError: more engines may use a group than its `max_engines` allows.
    """
    if not section.drafter_groups:
        return {}
    for index, group in enumerate(section.drafter_groups):
        most = sum(
            model.max_engines for model in models if group.name in model.config.drafter_groups
        )
        if most > group.max_engines:
            raise ConfigError.at(
                f"serve.drafter_groups.{index}.max_engines",
                f"{group.max_engines}, and the application may have {most} engines that draft with "
                f"{group.name!r}",
            )
    held = serve.deployment(
        name=DRAFTERS,
        num_replicas=1,
        health_check_period_s=section.health_check_period_s,
        health_check_timeout_s=section.health_check_timeout_s,
        ray_actor_options={"num_cpus": 0},
    )(DrafterGroups)
    bound = held.bind(list(section.drafter_groups))
    return {each.name: bound for each in section.drafter_groups}


# -- arguments with the fields of Ray Serve LLM: `llm_configs`, with one entry per model
#
# The application that is built from them is documented in `serve_llm.py`.

_ENTRY = "llm_configs"
# Further fields of Ray Serve LLM, each with the reason why it is rejected.
_REFUSED = {
    "lora_config": "adapters are loaded at start; name them in engine_kwargs.lora_modules",
    "accelerator_config": "a machine's accelerator is found at start; TPUs are not supported",
    "callback_config": "engines have no callbacks",
    "experimental_configs": "tokens are sent without batching delay; the number of ingress "
    "replicas is ingress_deployment_config.num_replicas",
    "server_cls": "the engine is Outrider's",
}
_NOTHING = {"lora_config": (None,)}  # accepted values without effect; for other keys, also {}

_OF_LOADING = {
    "model": "model_source",
    "served_model_name": "model_id",
    "tokenizer": "tokenizer_source",
}


class ModelLoading(Strict):
    """`model_loading_config`."""

    model_id: str = Field(min_length=1, description="Name by which clients choose the model.")
    model_source: str | None = None
    """Folder, Hugging Face id or address of the checkpoint; default: model_id."""
    tokenizer_source: str | None = None
    """Folder or id of another tokenizer; default: the model's."""

    @model_validator(mode="after")
    def _no_adapter(self) -> ModelLoading:
        if ":" in self.model_id:  # the form in which clients of Ray Serve LLM name adapters
            raise at_key("model_id", f"{self.model_id!r} has a colon, which marks a LoRA adapter")
        return self


class PlacementGroup(Strict):
    """`placement_group_config`."""

    bundles: list[dict[str, float]] | None = Field(None, description="One per rank, all alike.")
    bundle_per_worker: dict[str, float] | None = Field(None, description="CPU and GPU of a rank.")
    strategy: Literal["PACK", "STRICT_PACK"] = Field("PACK", description="Ray's strategy.")


class LLMArgs(Strict):
    """One entry of `llm_configs`."""

    model_loading_config: ModelLoading = Field(description="What is loaded, and its name.")
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keys of the engine, in our names or vLLM's."""
    deployment_config: DeploymentConfig = DeploymentConfig()
    """Serve's deployment options of the model's engines."""
    accelerator_type: str | None = Field(None, min_length=1)
    """Ray's name of the GPU that every rank needs."""
    placement_group_config: PlacementGroup | None = None
    """Resources that each rank requests from the cluster."""
    runtime_env: dict[str, Any] | None = None
    """Ray's runtime environment of the engines and their workers."""
    log_engine_metrics: Literal[True] | None = True
    """Engine metrics are always at /metrics."""
    llm_engine: Literal["outrider", "Outrider"] | None = None
    """The engine; there is one."""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key, reason in _REFUSED.items():
                if data.get(key) not in _NOTHING.get(key, (None, {})):
                    raise at_key(key, f"not supported: {reason}")
            return {key: value for key, value in data.items() if key not in _REFUSED}
        return data


class IngressDeployment(Strict):
    """`ingress_deployment_config`."""

    num_replicas: int = Field(1, ge=1, description="Processes that speak HTTP.")


class ServingArgs(Strict):
    """The arguments of `build_openai_app`."""

    llm_configs: list[dict[str, Any] | str] = Field(min_length=1)
    """The models; each an entry or the path of a YAML file of one."""
    ingress_deployment_config: IngressDeployment = IngressDeployment()
    """The deployment that speaks HTTP."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """Settings of the endpoint: access, timeouts, limits."""


def read_llm_args(args: dict[str, Any]) -> tuple[list[ServedModel], ServeConfig]:
    """Reads Ray Serve LLM's arguments; a single entry may be given without `llm_configs`.

    Raises:
        ConfigError: names the key.
    """
    alone = _ENTRY not in args and "model_loading_config" in args
    given = parse(ServingArgs, {_ENTRY: [args]} if alone else args)
    models: list[ServedModel] = []
    for index, entry in enumerate(given.llm_configs):
        with nullcontext() if alone else below(f"{_ENTRY}.{index}"):
            mapping = entry if isinstance(entry, dict) else read_mapping(Path(entry), entry)
            model = _served_model(mapping)
            known = [name for each in models for name in each.names]
            if model.name in known:
                field = "model_loading_config.model_id"
                raise ConfigError.at(field, f"a second model {model.name!r}")
            if second := next((name for name in model.names if name in known), None):
                field = "engine_kwargs.lora_modules"
                raise ConfigError.at(field, f"a second model or adapter {second!r}")
        models.append(model)
    return models, _endpoint(given)


def one_model(entry: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of one model from its entry; `overrides` go to `deployment_config`.

    Raises:
        ConfigError: the entry is neither a mapping, a pydantic model nor the path of a file.
    """
    if isinstance(entry, BaseModel):
        entry = entry.model_dump(mode="json", exclude_unset=True)
    elif isinstance(entry, (str, Path)):
        entry = read_mapping(Path(entry), str(entry))
    if not isinstance(entry, dict):
        raise ConfigError.at("llm_config", f"expected a mapping or a file, got {entry!r}")
    if "model_loading_config" not in entry:
        raise ConfigError.at("model_loading_config", "missing; it has the model's id and source")
    deployment = entry.get("deployment_config") or {}
    return {**entry, "deployment_config": {**deployment, **overrides}}


def _served_model(entry: dict[str, Any]) -> ServedModel:
    parsed = parse(LLMArgs, entry)
    loading, kwargs = parsed.model_loading_config, parsed.engine_kwargs
    for key, source in _OF_LOADING.items():
        if key in kwargs:
            raise ConfigError.at(
                f"engine_kwargs.{key}", f"give model_loading_config.{source} instead"
            )
    data: dict[str, Any] = {
        "model": loading.model_source or loading.model_id,
        "served_model_name": loading.model_id,
        **kwargs,
    }
    if loading.tokenizer_source is not None:
        data["tokenizer"] = loading.tokenizer_source
    resources = data.get("resources") or {}
    if parsed.placement_group_config is not None:
        resources = _resources(parsed.placement_group_config, kwargs)
    if parsed.accelerator_type is not None:
        resources = {**resources, "accelerator_type": parsed.accelerator_type}
    if resources:
        data["resources"] = resources
    deployment = parsed.deployment_config
    if parsed.runtime_env is not None:
        options = deployment.ray_actor_options
        if "runtime_env" in options:
            raise ConfigError.at("runtime_env", "deployment_config.ray_actor_options has one too")
        options = {**options, "runtime_env": parsed.runtime_env}
        deployment = deployment.model_copy(update={"ray_actor_options": options})
    with below("engine_kwargs"):
        return ServedModel(EngineConfig.load(data), deployment)


def _endpoint(given: ServingArgs) -> ServeConfig:
    """Reads the endpoint's settings; rejects engine settings, which belong to each model."""
    for key in given.serve:
        if key in DeploymentConfig.model_fields and key != "graceful_shutdown_timeout_s":
            raise ConfigError.at(
                f"serve.{key}", "belongs to a model; give it in its deployment_config"
            )
    if "num_ingress_replicas" in given.serve:
        raise ConfigError.at(
            "serve.num_ingress_replicas", "give ingress_deployment_config.num_replicas"
        )
    # Clients of Ray Serve LLM expect Serve's own proxy, so no port is opened unless one is given.
    replicas = given.ingress_deployment_config.num_replicas
    with below("serve"):
        return parse(ServeConfig, {"port": None, **given.serve, "num_ingress_replicas": replicas})


def _resources(group: PlacementGroup, engine: dict[str, Any]) -> dict[str, Any]:
    """Returns the resources of each rank; all bundles must be equal."""
    where = "placement_group_config"
    if (group.bundles is None) == (group.bundle_per_worker is None):
        raise ConfigError.at(where, "either bundles or bundle_per_worker")
    if "resources" in engine:
        raise ConfigError.at(where, "engine_kwargs.resources says the same")
    bundle = group.bundle_per_worker
    if group.bundles is not None:
        size = engine.get("tensor_parallel_size", engine.get("tp_size", 1))
        if str(len(group.bundles)) != str(size) or any(
            each != group.bundles[0] for each in group.bundles
        ):
            raise ConfigError.at(
                f"{where}.bundles",
                f"one per rank, all alike; got {len(group.bundles)} for "
                f"tensor_parallel_size = {size}",
            )
        bundle = group.bundles[0]
    assert bundle is not None
    unknown = set(bundle) - {"CPU", "GPU"}
    if unknown:
        raise ConfigError.at(where, f"only CPU and GPU, got {sorted(unknown)}")
    return {
        "cpus_per_worker": bundle.get("CPU", 0),
        "gpus_per_worker": bundle.get("GPU", 0),
        "placement_strategy": group.strategy,
    }
