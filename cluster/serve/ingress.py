"""`Ingress`: the Serve deployment that serves HTTP for one model or several.

Other Serve applications call its methods through its handle, like those of ray.serve.llm:

    answer = await handle.chat.remote({"messages": [...]})
    async for chunk in handle.options(stream=True).chat.remote({..., "stream": True}): ...

Bodies, answers and chunks are the JSON objects of the HTTP API.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from hashlib import sha256
from types import FrameType
from typing import Any

import httpx
import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from ...config import parse
from ...config.access import AccessConfig
from ...engine.checkpoints import load_tokenizer, resolved
from ...engine.frontend import Frontend
from ...engine.statistics import EngineInfo
from ...errors import InvalidRequestError, PromptTooLongError
from ...scheduler.sampling import SamplingParams
from ..process import keep_trimmed, start_watchdog, without_torch
from .access.access import Access
from .args import ServeConfig
from .engines import Engines, directory
from .front_door import FrontDoor
from .metrics import EdgeMetrics
from .models import HeldCheck, ServedModel, WeightsBoard
from .openai.calls import Calls, Edge, as_mapping
from .openai.resuming import ResumePolicy
from .openai.routes import build_http
from .serve_client import ServeClient
from .telemetry import Tracing, configure_logging

INGRESS = "Ingress"
# The field that `ray.data.llm` adds to every body of a batch.
_BATCH_FIELD = "idx_in_batch"


class RefusedError(InvalidRequestError, ValueError):
    """A body passed to a handle is invalid.

    It is also a ValueError, because `ray.data.llm` records a ValueError with its row, but ends the
    run on any other error.
    """


class RefusedPromptError(RefusedError, PromptTooLongError):
    """A prompt passed to a handle is too long."""


class HandleMethods:
    """The methods of a handle.

    A handle with `stream=True` returns a generator: of chunks if the body has `stream: true`,
    otherwise of a single answer. Every method takes an API key as `key`, if the server has keys.

    Raises:
        RefusedError: the body is invalid; names the field.
        OutriderError: the same types as over HTTP.
    """

    _calls: Calls

    async def chat(self, request: Any, *, key: str | None = None) -> Any:
        """Answers like `/v1/chat/completions`."""
        return await self._called("/v1/chat/completions", request, key)

    async def completions(self, request: Any, *, key: str | None = None) -> Any:
        """Answers like `/v1/completions`."""
        return await self._called("/v1/completions", request, key)

    async def responses(self, request: Any, *, key: str | None = None) -> Any:
        """Answers like `/v1/responses`."""
        return await self._called("/v1/responses", request, key)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> Any:
        """Returns the completion of a prompt as `completions` does, with its token ids.

        Args:
            prompt: a text, token ids, or a body of completions that may have `sampling_params`.
            sampling_params: settings by their names in `SamplingParams`; others keep the API's
                defaults.
        """
        body = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        for settings in (body.pop("sampling_params", None), sampling_params):
            if isinstance(settings, SamplingParams):
                settings = settings.model_dump(mode="json", exclude_unset=True)
            if settings is not None and not isinstance(settings, Mapping):
                raise RefusedError.at(
                    "sampling_params", f"SamplingParams or a mapping, got {settings!r}"
                )
            body |= settings or {}
        body.setdefault("return_token_ids", True)
        return await self._called("/v1/completions", body, key)

    async def tokenize(self, request: Any, *, key: str | None = None) -> Any:
        """Answers like `/tokenize`."""
        return await self._called("/tokenize", request, key)

    async def detokenize(self, request: Any, *, key: str | None = None) -> Any:
        """Answers like `/detokenize`."""
        return await self._called("/detokenize", request, key)

    async def embeddings(self, request: Any, *, key: str | None = None) -> Any:
        """Answers like `/v1/embeddings`."""
        return await self._called("/v1/embeddings", request, key)

    async def score(self, request: Any, *, key: str | None = None) -> Any:
        """Answers like `/v1/score`."""
        return await self._called("/v1/score", request, key)

    async def transcriptions(self, request: Any, *, key: str | None = None) -> Any:
        """Raises `RefusedError`, because engines only read text."""
        raise RefusedError.at("transcriptions", "not supported: this server generates text only")

    async def _called(self, path: str, request: Any, key: str | None) -> Any:
        try:
            body = as_mapping(request)
            body.pop(_BATCH_FIELD, None)
            if _is_streamed(body):
                return self._events(path, body, key)
            return await self._calls.answer(path, body, key)
        except InvalidRequestError as error:
            raise _refused(error) from None

    async def _events(
        self, path: str, body: dict[str, Any], key: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with aclosing(self._calls.events(path, body, key)) as events:
                async for event in events:
                    yield event
        except InvalidRequestError as error:
            raise _refused(error) from None


def _refused(error: InvalidRequestError) -> RefusedError:
    kind = RefusedPromptError if isinstance(error, PromptTooLongError) else RefusedError
    return kind(error.message, field=error.field)


# Functions of Serve that call a method, and whether their handle has `stream=True`.
_CALLERS = {"_call_generator_async": True, "call_user_method": False}


def _is_streamed(body: dict[str, Any]) -> bool:
    """Returns True if the calling handle has `stream=True`.

    Serve requires a generator only for such handles, and its request context does not contain the
    option. The functions that call the method differ, so the call stack tells.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _CALLERS.get(frame.f_code.co_name)
        if found is not None:
            return found
        frame = frame.f_back
    return bool(body.get("stream"))


class ChatCompletionRequest(BaseModel):
    """A body of `chat`, named as in ray.serve.llm; the server validates its fields."""

    model_config = ConfigDict(extra="allow")


class CompletionRequest(BaseModel):
    """A body of `completions`, named as in ray.serve.llm."""

    model_config = ConfigDict(extra="allow")


def _load_tokenizer(model: ServedModel) -> Any:
    return load_tokenizer(resolved(model.config))


class Ingress(HandleMethods):
    """Serves HTTP, tokenizes and detokenizes; all ingresses share the engines."""

    def __init__(
        self,
        engines: dict[str, DeploymentHandle[Any]],
        models: list[ServedModel],
        section: ServeConfig,
    ) -> None:
        """`engines` maps model names to handles."""
        keep_trimmed()
        self._engines = engines
        self._models, self._section = models, section
        start_watchdog(self._section.hung_after_s)
        self._access = Access(self._section.access, self._section.num_ingresses)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._metrics = {each.name: EdgeMetrics(each.name, self._name) for each in self._models}
        configure_logging(self._models[0].config.log_format)
        endpoint = self._section.otlp_endpoint
        self._tracing = None if endpoint is None else Tracing.to(endpoint)
        self._clients: list[Engines] = []
        self._boards: list[tuple[Frontend, WeightsBoard]] = []
        self._door: FrontDoor | None = None
        self._app: Starlette | None = None
        self._health = HeldCheck(self._section.health_hold_s)

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Called once by Serve in the replica's event loop; waits until all engines are up."""
        handles = [self._engines[each.name] for each in self._models]
        loading = asyncio.create_task(self._tokenizers())
        clients = [self._follow(*each) for each in zip(self._models, handles, strict=True)]
        infos: list[EngineInfo] = await asyncio.gather(*(each.info.remote() for each in handles))
        tokenizers = await loading
        edges = []
        for model, client, *found in zip(self._models, clients, infos, tokenizers, strict=True):
            frontend = await asyncio.to_thread(Frontend, model.config, *found)
            edges.append(self._edge(model, client, frontend))
            self._boards.append((frontend, client.board))
        self._app = app = build_http(*edges)
        self._calls = Calls(*edges)
        if self._section.port is not None:
            cluster = ray.get_runtime_context().gcs_address
            owner = f"{cluster} {serve.get_replica_context().app_name}"
            mark = f"outrider {sha256(owner.encode()).hexdigest()[:32]}"
            self._door = FrontDoor(app, self._section, mark)
            await self._door.open()
        return app

    def _follow(self, model: ServedModel, handle: DeploymentHandle[Any]) -> ServeClient:
        """Creates a client that follows the changing set of a model's engines."""
        engines = Engines(
            handle,
            ray.get_runtime_context().get_node_id(),
            max_each=model.max_each,
            max_waiting=model.max_waiting,
            slack=max(1, model.config.max_num_seqs // 4),
        )
        directory.follow(str(handle.deployment_id), engines)
        self._clients.append(engines)
        context = serve.get_replica_context()
        siblings = serve.get_deployment_handle(context.deployment, context.app_name)
        board = WeightsBoard(str(handle.deployment_id), model.settings)
        return ServeClient(engines, siblings, self._metrics[model.name].replayed, board)

    async def _tokenizers(self) -> list[Any]:
        """Loads the tokenizers of all models while the engines start."""
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
        """Called by Serve."""
        if self._door is not None:
            self._door.check()
        for frontend, board in self._boards:
            note = await asyncio.to_thread(board.read)
            if note is not None and note.drafters:  # another ingress may have changed them
                frontend.drafters = note.drafters
            if note is not None and note.adapters is not None:
                frontend.adapters = note.adapters
        await self._health.hold()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve when the ingress's `user_config` changes; it is an `access` section."""
        self._access.reconfigure(parse(AccessConfig, user_config))

    async def edge_families(self) -> list[Any]:
        """Returns this ingress's metrics to another ingress, which collects those of all."""
        return [family for each in self._metrics.values() for family in each.families()]

    async def post(
        self, path: str, body: dict[str, Any], key: str | None = None, method: str = "POST"
    ) -> dict[str, Any]:
        """Returns the JSON answer at `path` and its status, for applications that have a handle.

        Args:
            key: an API key, if the server has keys.
            method: the HTTP method; GET and DELETE send no body.

        Raises:
            InvalidRequestError: a stream was requested.
        """
        if body.get("stream"):
            raise RefusedError.at("stream", "`post` gets the whole answer; `chat` streams")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        assert self._app is not None
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://ingress", timeout=None
        ) as client:
            given = body if method == "POST" else None
            answer = await client.request(method, path, json=given, headers=headers)
        return {"status": answer.status_code, "body": answer.json()}

    async def __del__(self) -> None:
        """Called by Serve when the replica ends."""
        door: FrontDoor | None = getattr(self, "_door", None)
        if door is not None:
            await door.close()
        for engines in getattr(self, "_clients", []):
            engines.close()


class LLMServer(Ingress):
    """An ingress without a port, which is only called through its handle."""

    async def __init__(self, *arguments: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(*arguments)
        await self.__serve_build_asgi_app__()
