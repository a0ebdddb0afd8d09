"""`build_http(...)`: the ASGI application on the `EngineClient`s of one model or several."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .... import __version__
from ....drafters.lookup.corpus import corpora_of, with_corpora
from ....engine.weights import (
    DrafterChange,
    PauseMode,
    checked_mode,
    checked_sleep,
    checked_tags,
    sent_weights,
)
from ....errors import EngineDeadError, InvalidRequestError, ModelNotFoundError, shown_value
from ....workers.spec import TrainerLink
from .. import page
from ..access.access import AccessGate
from ..metrics import CONTENT_TYPE, exposition
from . import errors
from .calls import ENDPOINTS, TOKEN_ENDPOINTS, Edge, Endpoint, Models, prepared
from .engine_client import EngineClient, EngineVerb
from .openapi import QUERIES, document, html_page
from .parse import named, parse, query_of, require_no_body
from .protocol import (
    AdaptationBody,
    CorporaBody,
    DestroyGroupBody,
    DraftersBody,
    InitGroupBody,
    LoadAdapterBody,
    ModelBody,
    SentWeightsBody,
    TraceBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from .streaming import EventStream, read_body, until_disconnect


def state_routes(models: Models) -> list[Route]:
    """Returns the routes that describe the server: models, health, statistics, metrics, OpenAPI."""
    vocab_size = min(edge.frontend.vocab_size for edge in models.by_name.values())
    described = document(models.names, vocab_size, list(models.adapters))
    described_page = html_page(described)

    async def list_models(request: Request) -> Response:
        down = await _down(models)  # models that cannot answer are not listed
        served = {**models.by_name, **models.adapters}
        up = (name for name, edge in served.items() if edge.frontend.model_name not in down)
        data = [_card(served[name]) for name in up]
        return JSONResponse({"object": "list", "data": data})

    async def get_model(request: Request) -> Response:
        edge = models.find(request.path_params["name"])
        await edge.client.check()
        return JSONResponse(_card(edge))

    async def health(request: Request) -> Response:
        down = await _down(models)
        if not down:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "degraded", "down": down})

    async def stats(request: Request) -> Response:
        engines = _listed(await _stats(models))
        totals = {name: sum(each.get(name, 0) for each in engines) for name in _TOTALS}
        names = {"model": models.names[0], "models": models.names}
        return JSONResponse({**names, **totals, "engines": engines})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(request: Request) -> Response:
        engines = _listed(await _stats(models))
        busy = sum(each.get(name, 0) for each in engines for name in _TOTALS)
        return JSONResponse({"server_load": busy})

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    async def docs(request: Request) -> Response:
        return HTMLResponse(described_page, headers=_PAGE_HEADERS)

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
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version),
        Route("/load", load),
        Route("/stats", stats),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
        Route("/metrics", metrics),
    ]


def admin_routes(models: Models) -> list[Route]:
    """Returns the routes that change the engines' state."""
    # Adapters share the clients of their models.
    clients = list({id(each.client): each.client for each in models.by_name.values()}.values())

    def command(
        path: str, verb: EngineVerb, read: Callable[[QueryParams], Sequence[Any]] = lambda _: ()
    ) -> Route:
        """Returns a route that calls `verb` on every engine, with arguments from the query."""

        async def tell(request: Request) -> Response:
            arguments = read(query_of(request.query_params, QUERIES[path]))
            await _prepared(models, request, partial(require_no_body, path, QUERIES[path]))
            counts = await asyncio.gather(*(each.tell(verb, *arguments) for each in clients))
            return _counted(sum(counts))

        return Route(path, tell, methods=["POST"])

    def state(path: str, name: str, key: str) -> Route:
        """Returns a route that reports whether `key` of any engine's statistics is true."""

        async def is_true(request: Request) -> Response:
            engines = _listed(await _stats(models))
            return JSONResponse({name: any(each.get(key) for each in engines)})

        return Route(path, is_true)

    async def update_weights(request: Request) -> Response:
        body, edge = await _asked(models, request, UpdateWeightsBody)
        if body.path is None and body.drafter is None:
            raise InvalidRequestError.at("path", "neither a path nor that of a drafter")
        if body.path is None and body.weight_version is not None:
            raise InvalidRequestError.at(
                "weight_version", "it names the target's weights, which stay as they are"
            )
        _check_absolute("path", body.path)
        _check_absolute("drafter", body.drafter)
        paths = body.path or "", body.drafter or ""
        with named({"weights": "path"}):
            version = body.weight_version or ""
            return _counted(await edge.client.update_weights(*paths, body.mode, version))

    return [
        Route("/admin/update_weights", update_weights, methods=["POST"]),
        *_trainer_routes(models),
        *_drafter_routes(models),
        *_adaptation_routes(models),
        *_trace_routes(models),
        *_adapter_routes(models),
        command("/reset_prefix_cache", "reset_prefix_cache"),
        command("/pause", "pause", _pausing),
        command("/resume", "resume"),
        state("/is_paused", "is_paused", "paused"),
        command("/sleep", "sleep", _sleeping),
        command("/wake_up", "wake_up", _waking),
        state("/is_sleeping", "is_sleeping", "sleeping"),
    ]


def _trainer_routes(models: Models) -> list[Route]:
    """Returns the routes of weights from a trainer, under SGLang's and vLLM's names."""

    async def join(request: Request) -> Response:
        body, edge = await _asked(models, request, InitGroupBody)
        place = body.master_address, body.master_port, body.rank_offset, body.world_size
        link = TrainerLink(body.group_name, *place, body.backend, body.timeout_s)
        return done("joined", await edge.client.link_trainer(link))

    async def update(request: Request) -> Response:
        body, edge = await _asked(models, request, SentWeightsBody)
        sent = sent_weights(
            body.group_name, body.names, body.dtypes, body.shapes, body.weight_version or ""
        )
        mode: PauseMode = "abort" if body.abort_all_requests else body.mode
        return done("updated", await edge.client.take_weights(sent, mode))

    async def leave(request: Request) -> Response:
        body, edge = await _asked(models, request, DestroyGroupBody)
        return done("left", await edge.client.link_trainer(TrainerLink(body.group_name)))

    async def world_size(request: Request) -> Response:
        query = query_of(request.query_params, QUERIES["/get_world_size"])
        include_dp = query.get("include_dp", "true")
        if include_dp not in ("true", "false"):
            raise InvalidRequestError.at("include_dp", f"{shown_value(include_dp)}: true or false")
        engines = await models.find(query.get("model")).client.stats()
        sizes = [each.get("world_size", 0) for each in engines.values()]
        size = sum(sizes) if include_dp == "true" else max(sizes, default=0)
        return JSONResponse({"world_size": size})

    async def version(request: Request) -> Response:
        query = query_of(request.query_params, QUERIES["/get_weight_version"])
        engines = await models.find(query.get("model")).client.stats()
        found = {(each.get("weights") or {}).get("weight_version", "") for each in engines.values()}
        return JSONResponse({"weight_version": "+".join(sorted(found))})

    def done(what: str, count: int) -> Response:
        message = f"{count} engines: {what}"
        return JSONResponse({"success": True, "message": message, "num_engines": count})

    return [
        Route("/get_world_size", world_size),
        Route("/get_weight_version", version),
        Route("/init_weights_update_group", join, methods=["POST"]),
        Route("/update_weights_from_distributed", update, methods=["POST"]),
        Route("/destroy_weights_update_group", leave, methods=["POST"]),
    ]


def _pausing(query: QueryParams) -> tuple[PauseMode]:
    return (checked_mode(query.get("mode", "abort")),)


def _sleeping(query: QueryParams) -> tuple[int, PauseMode]:
    level = query.get("level", "1")
    return checked_sleep(int(level) if level in ("1", "2") else level), *_pausing(query)


def _waking(query: QueryParams) -> tuple[tuple[str, ...]]:
    return (checked_tags(query.getlist("tags") or None),)


def _adapter_routes(models: Models) -> list[Route]:
    """Returns the routes that add and remove LoRA adapters, under vLLM's names."""

    async def changed(edge: Edge, adapters: dict[str, str]) -> Response:
        count = await edge.client.change_adapters(adapters)
        edge.frontend.adapters = adapters
        return _counted(count)

    async def load(request: Request) -> Response:
        body, edge = await _asked(models, request, LoadAdapterBody)
        served = await edge.client.adapters()
        if body.lora_name in (*models.by_name, *models.adapters, *served):
            raise InvalidRequestError.at("lora_name", f"{body.lora_name!r} is served already")
        _check_absolute("lora_path", body.lora_path)
        with named({"lora_modules": "lora_path"}):
            return await changed(edge, served | {body.lora_name: body.lora_path})

    async def unload(request: Request) -> Response:
        body, edge = await _asked(models, request, UnloadAdapterBody)
        served = await edge.client.adapters()
        if body.lora_name not in served:
            known = ", ".join(map(repr, served)) or "none"
            raise ModelNotFoundError(
                f"lora_name: no adapter {shown_value(body.lora_name)} is served; there is {known}",
                field="lora_name",
            )
        return await changed(edge, {n: path for n, path in served.items() if n != body.lora_name})

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _drafter_routes(models: Models) -> list[Route]:
    """Returns the routes that change the drafters of running engines."""

    async def served() -> list[dict[str, Any]]:
        return _listed(await _by_edge(models, lambda client: client.drafters()))

    async def drafters(request: Request) -> Response:
        return JSONResponse({"engines": await served()})

    async def corpora(request: Request) -> Response:
        engines = [
            {
                "model": each["model"],
                "replica": each["replica"],
                "corpora": corpora_of(each["speculative_config"]),
            }
            for each in await served()
        ]
        return JSONResponse({"engines": engines})

    async def change_drafters(edge: Edge, change: DrafterChange) -> Response:
        count, names = await edge.client.change_drafters(change)
        edge.frontend.drafters = names
        return JSONResponse({"num_engines": count, "drafters": list(names)})

    async def load_drafter(request: Request) -> Response:
        body, edge = await _asked(models, request, DraftersBody)
        news = body.drafter, body.replaces or "", body.speculative_config, body.make_room
        return await change_drafters(edge, DrafterChange(*news))

    async def remove_drafter(request: Request) -> Response:
        query = query_of(request.query_params, QUERIES["/admin/drafters/{name}"])
        edge = models.find(query.get("model"))
        with named({"replaces": "name"}):
            return await change_drafters(edge, DrafterChange(replaces=request.path_params["name"]))

    async def change_corpora(request: Request) -> Response:
        body, edge = await _asked(models, request, CorporaBody)
        if not body.add and not body.remove:
            raise InvalidRequestError.at("add", "neither files that come nor files that go")
        for path in body.add:
            _check_absolute("add", path)
        has = next(iter((await edge.client.drafters()).values()))["speculative_config"]
        whole = with_corpora(has, body.add, body.remove)
        with named({r"speculative_config\.corpora": "add"}):
            count, _ = await edge.client.change_drafters(DrafterChange(whole=whole))
        return JSONResponse({"num_engines": count, "corpora": corpora_of(whole)})

    return [
        Route("/admin/drafters", drafters),
        Route("/admin/drafters", load_drafter, methods=["POST"]),
        Route("/admin/drafters/{name}", remove_drafter, methods=["DELETE"]),
        Route("/admin/corpora", corpora),
        Route("/admin/corpora", change_corpora, methods=["POST"]),
    ]


def _adaptation_routes(models: Models) -> list[Route]:
    """Returns the routes of online adaptation."""

    async def adaptation(request: Request) -> Response:
        keys = "model", "replica", "online_adaptation"
        engines = [
            {key: each[key] for key in keys}
            for each in _listed(await _stats(models))
            if each.get("online_adaptation") is not None
        ]
        return JSONResponse({"engines": engines})

    async def adapt(request: Request) -> Response:
        body, edge = await _asked(models, request, AdaptationBody)
        return _counted(await edge.client.tell("adapt", body.action))

    return [
        Route("/admin/adaptation", adaptation),
        Route("/admin/adaptation", adapt, methods=["POST"]),
    ]


def _trace_routes(models: Models) -> list[Route]:
    """Returns the routes that record steps and requests for `outrider simulate`."""

    async def record(request: Request) -> Response:
        body, edge = await _asked(models, request, TraceBody)
        num_steps = body.max_steps if body.action == "start" else 0
        return _counted(await edge.client.tell("record_trace", num_steps))

    async def trace(request: Request) -> Response:
        query = query_of(request.query_params, QUERIES["/admin/trace"])
        edge = models.find(query.get("model"))
        found = await edge.client.traces()
        runs = [{**run, "name": name} for name, each in found.items() for run in each["runs"]]
        if not runs:
            reason = 'no step was recorded; POST {"action": "start"} begins a trace'
            raise InvalidRequestError.at("trace", reason)
        machine = next(iter(found.values()))["machine"]
        whole = {"version": 1, "machine": machine, "model": edge.frontend.source, "runs": runs}
        # Encoding tens of thousands of numbers would block the event loop.
        body = await asyncio.to_thread(json.dumps, whole)
        return Response(body, media_type="application/json")

    return [Route("/admin/trace", trace), Route("/admin/trace", record, methods=["POST"])]


_TOTALS = ("running", "waiting")


def _card(edge: Edge) -> dict[str, Any]:
    parent: str | None = None
    root = edge.frontend.source
    if edge.adapter:
        modules = edge.frontend.lora_modules
        module = next((each for each in modules if each.name == edge.adapter), None)
        root = edge.frontend.adapters.get(edge.adapter) or edge.adapter
        parent = edge.frontend.model_name
        if module is not None:
            root, parent = module.path, module.base_model_name or parent
    return {
        "id": edge.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "outrider",
        "root": root,
        "parent": parent,
        "max_model_len": edge.frontend.max_model_len,
        "drafters": list(edge.frontend.drafters),
        "has_chat_template": edge.frontend.has_chat_template,
    }


ByEdge = list[tuple[Edge, dict[str, dict[str, Any]]]]


async def _by_edge(
    models: Models, ask: Callable[[EngineClient], Awaitable[dict[str, dict[str, Any]]]]
) -> ByEdge:
    """Calls `ask` for each model; returns the answers of its replicas by name."""
    edges = list(models.by_name.values())
    return list(zip(edges, await asyncio.gather(*(ask(edge.client) for edge in edges))))


async def _stats(models: Models) -> ByEdge:
    """Returns the statistics of each model's replicas."""
    return await _by_edge(models, lambda client: client.stats())


def _listed(found: ByEdge) -> list[dict[str, Any]]:
    """Flattens answers to a list, with the name of the model and of the replica."""
    return [
        {"model": edge.model_name, "replica": name, **each}
        for edge, replicas in found
        for name, each in replicas.items()
    ]


def _counted(num_engines: int) -> Response:
    """Returns a response with the number of engines."""
    return JSONResponse({"num_engines": num_engines})


def _check_absolute(field: str, path: str | None) -> None:
    """Raises `InvalidRequestError`, which names `field`, for a relative path."""
    if path is not None and not os.path.isabs(path):
        raise InvalidRequestError.at(field, f"{shown_value(path)} is not absolute")


async def _down(models: Models) -> dict[str, str]:
    """Returns why models cannot serve now, by name.

    Raises:
        EngineDeadError: no model can serve.
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
_PAGE_SUFFIXES = frozenset({".html", ".css", ".js", ".svg"})
# Only the server's own scripts, styles and connections; text is never parsed as HTML.
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
    """Returns the routes of the page at `/` and its files, which need no key and hold no data.

    The page gets its data from the API, with the key that the user enters there.
    """

    async def file(request: Request) -> Response:
        path = _PAGE / request.path_params["name"]
        # Compared with a listing, because opening an impossible file name raises.
        if path.suffix not in _PAGE_SUFFIXES or path not in _PAGE.iterdir():
            raise HTTPException(404, "Not Found")
        return FileResponse(path, headers=_PAGE_HEADERS)

    async def index(request: Request) -> Response:
        if not request.url.path.endswith("/"):  # relative links need the trailing slash
            return RedirectResponse(f"{request.url.path}/")
        request.path_params["name"] = "index.html"
        return await file(request)

    return [Route("/", index), Route("/page/{name}", file)]


Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=ModelBody)


def build_http(*edges: Edge) -> Starlette:
    """Builds the application for one edge per model; the first edge has the endpoint's settings."""
    models = Models.of(*edges)
    generating = [
        Route(path, _GenerationRoute(models, endpoint), methods=["POST"])
        for path, endpoint in ENDPOINTS.items()
    ]
    return Starlette(
        routes=[
            *generating,
            *_token_routes(models),
            *state_routes(models),
            *admin_routes(models),
            *page_routes(),
        ],
        middleware=[Middleware(AccessGate, access=models.first.access)],
        exception_handlers=errors.HANDLERS,
    )


class _GenerationRoute:
    """Serves an endpoint that generates text.

    It is an ASGI application, because Starlette wraps a function in a layer that every event of a
    stream would pass.
    """

    def __init__(self, models: Models, endpoint: Endpoint) -> None:
        self._models, self._endpoint = models, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._response(Request(scope, receive))
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        endpoint, models = self._endpoint, self._models
        opened = await _prepared(models, request, partial(endpoint.opened, models, request.headers))
        generation = opened.generation
        if opened.body.stream:
            return EventStream(
                opened.events,
                named=endpoint.named,
                event_id=None if generation.stream is None else generation.stream.event_id,
            )
        await until_disconnect(request.receive, generation.finish())
        return JSONResponse(await opened.whole(), headers=generation.headers())


def _token_routes(models: Models) -> list[Route]:
    def route(path: str, answer: Callable[[Models, bytes], dict[str, Any]]) -> Route:
        async def tokens(request: Request) -> Response:
            return JSONResponse(await _prepared(models, request, partial(answer, models)))

        return Route(path, tokens, methods=["POST"])

    return [route(path, answer) for path, answer in TOKEN_ENDPOINTS.items()]


async def _asked(models: Models, request: Request, kind: type[Asked]) -> tuple[Asked, Edge]:
    """Parses the body of a request; returns it with the edge of the model that it names."""
    body = await _prepared(models, request, partial(parse, kind))
    return body, models.find(body.model)


async def _prepared(models: Models, request: Request, prepare: Callable[[bytes], Result]) -> Result:
    """Reads the body of a request and calls `prepare` on it.

    Raises:
        BodyEncodingError, BodyTooLargeError, BodyTimeoutError, and as `prepared`.
    """
    edge = models.first
    raw = await read_body(request, edge.largest_body(), edge.body_timeout_s)
    return await prepared(models, raw, prepare)
