"""The Ray Serve application: an `Ingress` for HTTP, and `EngineReplica`s of each model behind it.

    serve run outrider.cluster.app:build_app model=/path

or, in a Serve configuration file, `import_path: outrider.cluster.app:build_app` with the engine's
configuration, and a `serve:` section, under `args:`. Several models behind one endpoint, with the
fields of Ray Serve LLM: `import_path: outrider.serve_llm:build_openai_app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve import Application

from ..config import EngineConfig
from ..errors import ConfigError
from .serve.args import ServeConfig, check_acceptance, read_args
from .serve.ingress import INGRESS, Ingress, LLMServer
from .serve.models import ENGINE, SETTLE_S, ServedModel
from .serve.ray_llm import one_model, read_llm_args
from .serve.replica import EngineReplica

_MAX_HTTP_REQUESTS = 16384  # per ingress; what is too much is refused behind it, with a 429


def build_app(args: dict[str, Any]) -> Application:
    """The application for `EngineConfig`'s keys and a `serve:` section.

    Raises:
        ConfigError: names the key.
    """
    return application(*read_args(args))


def build_openai_app(args: dict[str, Any]) -> Application:
    """The application for Ray Serve LLM's `llm_configs`: one model or several.

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
    """One model of Ray Serve LLM's fields, to bind into an application of one's own: its handle
    has the methods of `HandleMethods`, and no port is opened.

    Args:
        llm_config: an entry of `llm_configs`, as a mapping, a model of pydantic, or a file's path.
        name_prefix: of the deployment's name, before the model's; default: `LLMServer:`.
        override_serve_options: keys of `deployment_config`, which they override.

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
    """The application of one model.

    Raises:
        ConfigError: as `assemble`.
    """
    return assemble([ServedModel(config, section.deployment)], section)


def assemble(
    models: Sequence[ServedModel], section: ServeConfig, name: str | None = None
) -> Application:
    """The deployments, bound: engines for each model, and the ingress in front of them.

    Args:
        name: of the ingress, where it is a part of another application; it has no port then.

    Raises:
        ConfigError: as `check_acceptance`.
    """
    engines = {}
    for model in models:
        check_acceptance(model.config)
        deployment = serve.deployment(
            name=ENGINE if len(models) == 1 and name is None else model.deployment_name,
            **model.serve_options(),
        )(EngineReplica)
        engines[model.name] = deployment.bind(
            model, section.resume_window_s, section.resume_max_values
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
