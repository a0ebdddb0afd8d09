"""`build_http(...)`: the ASGI application over the `EngineClient`s of one model or several."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from ....engine.frontend import Frontend
from ....errors import EngineDeadError, InvalidRequestError, ModelNotFoundError, OverloadedError
from .. import page
from ..access.access import Access, current
from ..access.gate import AccessGate
from ..metrics import CONTENT_TYPE, EdgeMetrics, exposition
from ..telemetry import Tracing, TracingMiddleware
from . import chat, completions, errors, responses
from .engine_client import EngineClient
from .generation import Generation
from .openapi import document
from .parse import nested_too_deeply, parse
from .protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    may_compile,
)
from .responses import ResponsesBody
from .resuming import ResumePolicy, open_stream
from .streaming import EventStream, read_body, until_disconnect


@dataclass(frozen=True, slots=True)
class Models:
    """What serves each model behind one endpoint, by the model's name."""

    by_name: Mapping[str, Edge]

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

    @property
    def first(self) -> Edge:
        return next(iter(self.by_name.values()))

    def find(self, name: str | None) -> Edge:
        """The model of that name; without a name, the only one.

        Raises:
            InvalidRequestError: there are several models, and no name.
            ModelNotFoundError: there is no such model.
        """
        if name is None:
            if len(self.by_name) > 1:
                raise InvalidRequestError.at(
                    "model", f"this server has several models; choose one of {self._listed()}"
                )
            return self.first
        if name in self.by_name:
            return self.by_name[name]
        base, colon, adapter = name.rpartition(":")
        if colon and base in self.by_name:
            raise ModelNotFoundError(
                f"The model {name!r} does not exist: LoRA adapters ({adapter!r}) are not "
                f"supported; ask for {base!r}",
                field="model",
            )
        raise ModelNotFoundError(
            f"The model {name!r} does not exist; this server has {self._listed()}", field="model"
        )

    def _listed(self) -> str:
        return ", ".join(map(repr, self.by_name))


def state_routes(models: Models) -> list[Route]:
    """What describes the server: models, health, statistics, metrics, OpenAPI."""
    cards = {name: _card(edge) for name, edge in models.by_name.items()}
    vocab_size = min(edge.frontend.vocab_size for edge in models.by_name.values())
    described = document(models.names, vocab_size)

    async def list_models(request: Request) -> Response:
        down = await _down(models)  # a model that cannot answer is not announced
        data = [card for name, card in cards.items() if name not in down]
        return JSONResponse({"object": "list", "data": data})

    async def get_model(request: Request) -> Response:
        edge = models.find(request.path_params["name"])
        await edge.client.check()
        return JSONResponse(cards[edge.model_name])

    async def health(request: Request) -> Response:
        down = await _down(models)
        if not down:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "degraded", "down": down})

    async def stats(request: Request) -> Response:
        engines = [
            {"model": edge.model_name, "replica": name, **each}
            for edge, replicas in await _stats(models)
            for name, each in replicas.items()
        ]
        totals = {name: sum(each.get(name, 0) for each in engines) for name in _TOTALS}
        names = {"model": models.names[0], "models": models.names}
        return JSONResponse({**names, **totals, "engines": engines})

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    async def metrics(request: Request) -> Response:
        families = await models.first.client.edge_metrics()  # of every model, at every ingress
        if not families:
            edges = models.by_name.values()
            families = [family for edge in edges for family in edge.metrics.families()]
        engines = {edge.model_name: replicas for edge, replicas in await _stats(models)}
        return Response(exposition(families, engines), media_type=CONTENT_TYPE)

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/health", health),
        Route("/stats", stats),
        Route("/openapi.json", openapi),
        Route("/metrics", metrics),
    ]


_TOTALS = ("running", "waiting")


def _card(edge: Edge) -> dict[str, Any]:
    return {
        "id": edge.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "outrider",
        "max_model_len": edge.frontend.max_model_len,
    }


async def _stats(models: Models) -> list[tuple[Edge, dict[str, dict[str, Any]]]]:
    """Statistics of each model's replicas."""
    edges = list(models.by_name.values())
    return list(zip(edges, await asyncio.gather(*(edge.client.stats() for edge in edges))))


async def _down(models: Models) -> dict[str, str]:
    """Why models cannot serve now, by name.

    Raises:
        EngineDeadError: none can.
    """

    async def reason(edge: Edge) -> EngineDeadError | None:
        try:
            await edge.client.check()
        except EngineDeadError as error:
            return error
        return None

    reasons = await asyncio.gather(*map(reason, models.by_name.values()))
    down = {name: error for name, error in zip(models.by_name, reasons) if error is not None}
    if len(down) == len(reasons):
        raise next(iter(down.values()))
    return {name: error.message for name, error in down.items()}


_PAGE = Path(next(iter(page.__path__)))
_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No script, style or connection but the server's own; no text is ever parsed as HTML.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """The page at `/` and its files, for everyone; read once, they hold no data of the server.

    What the page shows comes from the API, with the key that the user enters there.
    """
    files = {
        path.name: (path.read_bytes(), _PAGE_TYPES[path.suffix])
        for path in _PAGE.iterdir()
        if path.suffix in _PAGE_TYPES
    }

    def answer(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "Not Found")
        content, kind = files[name]
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    async def index(request: Request) -> Response:
        if not request.url.path.endswith("/"):  # a route prefix: relative links need the slash
            return RedirectResponse(f"{request.url.path}/")
        return answer("index.html")

    async def file(request: Request) -> Response:
        return answer(request.path_params["name"])

    return [Route("/", index), Route("/page/{name}", file)]


# -- work on request bodies away from the event loop: parsing, chat templates, tokenizing
#
# A small body is dealt with at once, which is quicker than a thread. Larger ones go to two pools
# of a few threads each, so that a body of megabytes delays none of kilobytes; how many may wait is
# bounded. What runs there has to release the interpreter lock often (`parse.load`,
# `Frontend.text_prompt`), or a thread of its own would not help the loop.

Result = TypeVar("Result")
_AT_ONCE_BYTES = 2 * 2**10
_LARGE_BYTES = 256 * 2**10
_NUM_LARGE_THREADS = 2
_MAX_SMALL, _MAX_LARGE = 1024, 32  # bodies in work or waiting, by pool


class Pool:
    """A few threads, and a bounded number of calls that run or wait."""

    def __init__(self, name: str, num_threads: int, max_calls: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_calls = max_calls
        self._num_calls = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`.

        Raises:
            OverloadedError: too many calls wait already.
        """
        if self._num_calls >= self._max_calls:
            raise OverloadedError(
                f"{self._num_calls} request bodies wait to be read and tokenized; try again later"
            )
        self._num_calls += 1
        # The thread has the request's context, and with it who sent it.
        future = self._threads.submit(contextvars.copy_context().run, work)
        loop = asyncio.get_running_loop()
        # Counted until the thread is done, also where nobody waits for the result any more.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._num_calls -= 1


class Offload:
    """The pools of one HTTP edge."""

    def __init__(self) -> None:
        num_threads = max(2, min(8, (os.cpu_count() or 2) // 2))
        self._small = Pool("outrider-body", num_threads, _MAX_SMALL)
        self._large = Pool("outrider-large-body", _NUM_LARGE_THREADS, _MAX_LARGE)

    async def run(
        self, num_bytes: int, work: Callable[[], Result], *, may_be_slow: bool = False
    ) -> Result:
        """The result of `work` on a body of `num_bytes` (raises as `Pool.run`, and as `work`).

        Work that may be slow goes to a thread whatever the body's size.
        """
        if num_bytes <= _AT_ONCE_BYTES and not may_be_slow:
            return work()
        pool = self._small if num_bytes <= _LARGE_BYTES else self._large
        return await pool.run(work)


@dataclass(frozen=True, slots=True)
class Edge:
    """One model, and the settings of the endpoint that serves it."""

    client: EngineClient
    frontend: Frontend
    metrics: EdgeMetrics
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float | None = None
    body_timeout_s: float | None = 60.0  # for the whole body to arrive
    max_completions: int | None = None  # of one request; what the queue holds
    tracing: Tracing | None = None
    offload: Offload = field(default_factory=Offload)
    access: Access = field(default_factory=Access)
    resuming: ResumePolicy = field(default_factory=ResumePolicy)

    @property
    def model_name(self) -> str:
        return self.frontend.model_name

    def generation(self) -> Generation:
        """A fresh one, for one HTTP request."""
        return Generation(
            self.client, self.frontend, self.metrics, self.request_timeout_s, self.max_completions
        )


def build_http(*edges: Edge) -> Starlette:
    """The application for an edge per model; the endpoint's settings are those of the first."""
    models = Models({each.model_name: each for each in edges})
    edge = models.first
    generating = [
        Route(path, _generation_route(models, endpoint), methods=["POST"])
        for path, endpoint in _ENDPOINTS.items()
    ]
    app = Starlette(
        routes=[*generating, *_token_routes(models), *state_routes(models), *page_routes()]
    )
    errors.install(app)
    if edge.tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=edge.tracing)
    app.add_middleware(AccessGate, access=edge.access)
    return app


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A route that generates text."""

    kind: str  # what its answers' ids begin with
    body: type[GenerationBody | ResponsesBody]
    add: Callable[[Generation, Any, str], None]
    answer: Callable[[Generation, Any, str], Awaitable[Mapping[str, Any]]]
    events: Callable[[Generation, Any, str], AsyncGenerator[dict[str, Any], None]]


_ENDPOINTS: Mapping[str, _Endpoint] = MappingProxyType(
    {
        "/v1/completions": _Endpoint(
            "cmpl-", CompletionBody, completions.add, completions.answer, completions.events
        ),
        "/v1/chat/completions": _Endpoint(
            "chatcmpl-", ChatBody, chat.add, chat.answer, chat.events
        ),
        "/v1/responses": _Endpoint(
            "resp_", ResponsesBody, responses.add, responses.answer, responses.events
        ),
    }
)


def _generation_route(
    models: Models, endpoint: _Endpoint
) -> Callable[[Request], Awaitable[Response]]:
    async def create(request: Request) -> Response:
        def prepare(raw: bytes) -> tuple[Any, Generation]:
            body = parse(endpoint.body, raw)
            edge = models.find(body.model)
            if body.stream_options is not None and not body.stream:
                raise InvalidRequestError.at("stream_options", "only allowed with stream = true")
            generation = edge.generation()
            if isinstance(body, GenerationBody):
                generation.limit_time(body.timeout)
                last_id = request.headers.get("last-event-id")
                kind, identity = endpoint.kind.rstrip("-"), current().identity
                generation.stream = open_stream(kind, body, last_id, identity, edge.resuming)
            endpoint.add(generation, body, own_id)
            return body, generation

        own_id = endpoint.kind + uuid.uuid4().hex  # a client's may be in use
        body, generation = await _prepared(models, request, prepare)
        answer_id = endpoint.kind + body.request_id if body.request_id else own_id
        if body.stream:
            stream = generation.stream
            return EventStream(
                lambda: endpoint.events(
                    generation, body, answer_id if stream is None else stream.id
                ),
                named=endpoint.body is ResponsesBody,
                event_id=None if stream is None else stream.event_id,
            )
        await until_disconnect(request.receive, generation.finish())
        answer = await endpoint.answer(generation, body, answer_id)
        return JSONResponse(answer, headers=generation.headers())

    return create


def _token_routes(models: Models) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        return await _prepared(models, request, lambda raw: _tokenized(models, raw))

    async def detokenize(request: Request) -> Response:
        def prepare(raw: bytes) -> Response:
            body = parse(DetokenizeBody, raw)
            edge = models.find(body.model)
            prompt = edge.frontend.token_prompt(body.tokens, "tokens")
            return JSONResponse({"prompt": edge.frontend.vocabulary.text(prompt.token_ids)})

        return await _prepared(models, request, prepare)

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _tokenized(models: Models, raw: bytes) -> Response:
    body = parse(TokenizeBody, raw)
    edge = models.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError.at("prompt", "either prompt or messages")
    if body.messages is not None:
        prompt = chat.rendered(edge.frontend, body, body.messages)
    else:
        prompt = edge.frontend.text_prompt(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
    answer: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": edge.frontend.max_model_len,
        "tokens": list(prompt.token_ids),
    }
    if body.return_token_strs:
        answer["token_strs"] = edge.frontend.tokenizer.convert_ids_to_tokens(answer["tokens"])
    return JSONResponse(answer)


def _max_body_bytes(edge: Edge) -> int:
    key = current().identity.key
    mine = None if key is None else key.max_body_bytes
    return edge.max_body_bytes if mine is None else min(mine, edge.max_body_bytes)


async def _prepared(models: Models, request: Request, prepare: Callable[[bytes], Result]) -> Result:
    """What `prepare` makes of the body; it runs in a thread where that may take long.

    Raises:
        BodyTooLargeError, BodyTimeoutError, OverloadedError, and whatever `prepare` raises.
    """
    edge = models.first
    raw = await read_body(request, _max_body_bytes(edge), edge.body_timeout_s)

    def work() -> Result:
        try:
            return prepare(raw)
        except RecursionError:
            raise nested_too_deeply() from None

    return await edge.offload.run(len(raw), work, may_be_slow=may_compile(raw))
