"""`Ingress`: the Serve deployment that speaks HTTP for one model or several."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from ...config import parse
from ...config.access import AccessConfig
from ...engine.checkpoints import load_tokenizer, resolved
from ...engine.frontend import Frontend
from ...engine.statistics import EngineInfo
from ..process import keep_trimmed, start_watchdog, without_torch
from .access.access import Access
from .args import ServeConfig
from .connections import install
from .edge import EdgeListener
from .metrics import EdgeMetrics
from .models import HeldCheck, ServedModel
from .openai.resuming import ResumePolicy
from .openai.routes import Edge, build_http
from .relay import IngressRelay
from .serve_client import ServeClient
from .telemetry import Tracing, configure_logging

INGRESS = "Ingress"


def _load_tokenizer(model: ServedModel) -> Any:
    return load_tokenizer(resolved(model.config))


class Ingress:
    """HTTP, tokenizers and detokenizers; several of them share the engines."""

    def __init__(
        self,
        engines: dict[str, DeploymentHandle[Any]],
        models: list[dict[str, Any]],
        section: dict[str, Any],
    ) -> None:
        """`engines` are the handles by model name, `models` the settings of each."""
        keep_trimmed()
        self._engines = engines
        self._models = [ServedModel.load(each) for each in models]
        self._section = ServeConfig(**section)
        start_watchdog(self._section.hung_after_s)
        install(self._section.connection_limits)  # where Serve has replicas listen themselves
        self._access = Access(self._section.access, self._section.num_ingresses)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._metrics = {each.name: EdgeMetrics(each.name, self._name) for each in self._models}
        configure_logging(self._models[0].config.log_format)
        endpoint = self._section.otlp_endpoint
        self._tracing = None if endpoint is None else Tracing.to(endpoint)
        self._listener: EdgeListener | None = None
        self._health = HeldCheck(self._section.health_hold_s)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, in the replica's event loop; it waits for all engines to be up."""
        handles = [self._engines[each.name] for each in self._models]
        loading = asyncio.create_task(self._tokenizers())
        infos: list[EngineInfo] = await asyncio.gather(*(each.info.remote() for each in handles))
        tokenizers = await loading
        self._listener = EdgeListener(
            self._name,
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            asyncio.get_running_loop(),
        )
        siblings = serve.get_deployment_handle(INGRESS, serve.get_replica_context().app_name)
        edges = []
        for model, engines, *found in zip(self._models, handles, infos, tokenizers, strict=True):
            replayed = self._metrics[model.name].replayed
            client = ServeClient(engines, siblings, self._listener, replayed)
            frontend = await asyncio.to_thread(Frontend, model.config, *found)
            edges.append(self._edge(model, client, frontend))
        app = build_http(*edges)
        app.add_middleware(IngressRelay, node=ray.get_runtime_context().get_node_id())
        return app

    async def _tokenizers(self) -> list[Any]:
        """Of the models, loaded while the engines start."""
        own_code = any(each.config.trust_remote_code for each in self._models)
        with without_torch(unless=own_code):
            return [await asyncio.to_thread(_load_tokenizer, each) for each in self._models]

    def _edge(self, model: ServedModel, client: ServeClient, frontend: Frontend) -> Edge:
        rule, section = model.config.speculative_config, self._section
        return Edge(
            tracing=self._tracing,
            client=client,
            frontend=frontend,
            metrics=self._metrics[model.name],
            max_body_bytes=section.max_body_bytes,
            request_timeout_s=section.request_timeout_s,
            body_timeout_s=section.body_timeout_s,
            max_completions=model.max_completions,
            access=self._access,
            resuming=ResumePolicy(
                enabled=section.resume_window_s > 0,
                coupled=rule.verification == "coupled",
                lossless=not rule.lossy,
            ),
        )

    async def check_health(self) -> None:
        """Serve calls this."""
        await self._health.hold()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls this when the ingress's `user_config` changes: an `access` section."""
        self._access.reconfigure(parse(AccessConfig, user_config))

    async def edge_families(self) -> list[Any]:
        """This edge's metrics, for the edge that collects those of all."""
        return [family for each in self._metrics.values() for family in each.families()]

    def __del__(self) -> None:
        listener = getattr(self, "_listener", None)
        if listener is not None:
            listener.shutdown()
