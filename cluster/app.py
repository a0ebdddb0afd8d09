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
from .serve.args import ServeConfig, check_acceptance, read_args
from .serve.ingress import INGRESS, Ingress
from .serve.models import ENGINE, SETTLE_S, ServedModel
from .serve.ray_llm import read_llm_args
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


def application(config: EngineConfig, section: ServeConfig) -> Application:
    """The application of one model.

    Raises:
        ConfigError: as `assemble`.
    """
    return assemble([ServedModel(config, section.deployment)], section)


def assemble(models: Sequence[ServedModel], section: ServeConfig) -> Application:
    """The deployments, bound: engines for each model, and the ingress in front of them.

    Raises:
        ConfigError: as `check_acceptance`.
    """
    engines = {}
    for model in models:
        check_acceptance(model.config)
        deployment = serve.deployment(
            name=ENGINE if len(models) == 1 else model.deployment_name, **model.serve_options()
        )(EngineReplica)
        engines[model.name] = deployment.bind(
            model.config.model_dump(mode="json"),
            section.resume_window_s,
            section.resume_max_values,
            model.deployment.health_hold_s,
            model.deployment.hung_after_s,
            model.deployment.graceful_shutdown_timeout_s,
        )
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=section.num_ingresses,
        max_ongoing_requests=_MAX_HTTP_REQUESTS,
        graceful_shutdown_timeout_s=section.graceful_shutdown_timeout_s + SETTLE_S,
        health_check_period_s=section.health_check_period_s,
        health_check_timeout_s=section.health_check_timeout_s,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Ingress))
    dumped = [model.dump() for model in models]
    return ingress.bind(engines, dumped, section.model_dump(mode="json"))
