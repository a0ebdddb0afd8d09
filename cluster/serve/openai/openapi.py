"""The OpenAPI document: every route with its bodies, answers and errors.

FastAPI cannot describe the bodies, because `parse.parse` validates them. Ranges come from
`SamplingParams`. The page at `/` is not part of the API.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from html import escape
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from ....config.compat.table import REQUEST, Ignored, Only
from ....engine.weights import SLEEP_TAGS, PauseMode
from ....scheduler.sampling import SamplingParams
from ..metrics import CONTENT_TYPE
from . import answers
from .messages import CountBody, MessagesBody
from .parse import IGNORED, UNSUPPORTED
from .pooling import EmbeddingBody, RerankBody, ScoreBody
from .protocol import (
    AdaptationBody,
    ChatBody,
    CompletionBody,
    CorporaBody,
    DestroyGroupBody,
    DetokenizeBody,
    DraftersBody,
    InitGroupBody,
    LoadAdapterBody,
    SentWeightsBody,
    TokenizeBody,
    TraceBody,
    UnloadAdapterBody,
    UpdateWeightsBody,
)
from .responses import ResponsesBody
from .responses.body import NOTHING

_REF = "#/components/schemas/{model}"
_STREAMED: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, MessagesBody, ResponsesBody)
_ERRORS = {
    400: "A field is invalid; `param` names it.",
    401: "The API key is missing or unknown.",
    403: "The API key does not allow the route, or the field in `param`.",
    404: "An unknown model.",
    408: "The body did not arrive in time.",
    410: "The tokens of a resumable stream are lost.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue or a limit of the key is full; `Retry-After` says when to come back.",
    500: "A worker failed inside a step.",
    503: "No engine can run a step; `Retry-After` says when to come back.",
    504: "The request took longer than the server allows.",
}
_ERRORS_WITHOUT_BODY = (401, 403, 500, 503)


class Page(str):
    """HTML."""


POSTS: dict[str, tuple[type[BaseModel], Any, str]] = {
    "/v1/completions": (CompletionBody, answers.Completion, "Completes prompts."),
    "/v1/chat/completions": (ChatBody, answers.ChatCompletion, "Answers a conversation."),
    "/v1/responses": (ResponsesBody, answers.Response, "Answers an input; stores nothing."),
    "/v1/messages": (MessagesBody, answers.Message, "Anthropic's API: answers messages."),
    "/v1/messages/count_tokens": (CountBody, answers.MessageTokens, "Tokens of messages."),
    "/v1/embeddings": (EmbeddingBody, answers.EmbeddingList, "Embeddings of texts."),
    "/v1/rerank": (RerankBody, answers.Reranking, "Ranks documents by a query."),
    "/v2/rerank": (RerankBody, answers.Reranking, "As /v1/rerank; by Cohere's newer path."),
    "/rerank": (RerankBody, answers.Reranking, "As /v1/rerank."),
    "/v1/score": (ScoreBody, answers.ScoreList, "Scores of pairs of texts."),
    "/score": (ScoreBody, answers.ScoreList, "As /v1/score."),
    "/tokenize": (TokenizeBody, answers.Tokens, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeBody, answers.Text, "The text of token ids."),
    "/v1/load_lora_adapter": (LoadAdapterBody, answers.EngineCount, "Adds a LoRA adapter."),
    "/v1/unload_lora_adapter": (
        UnloadAdapterBody,
        answers.EngineCount,
        "Drops a LoRA adapter, once its requests have ended.",
    ),
    "/admin/update_weights": (
        UpdateWeightsBody,
        answers.EngineCount,
        "Serves other weights of the same model.",
    ),
    "/init_weights_update_group": (InitGroupBody, answers.Sent, "Joins a trainer's process group."),
    "/update_weights_from_distributed": (
        SentWeightsBody,
        answers.Sent,
        "Serves weights that a trainer sends now.",
    ),
    "/destroy_weights_update_group": (
        DestroyGroupBody,
        answers.Sent,
        "Leaves a trainer's process group.",
    ),
    "/admin/drafters": (
        DraftersBody,
        answers.DraftersUpdate,
        "Loads a drafter, or replaces one or all.",
    ),
    "/admin/corpora": (
        CorporaBody,
        answers.CorporaUpdate,
        "Adds files that look-ups search, and drops some.",
    ),
    "/admin/adaptation": (
        AdaptationBody,
        answers.EngineCount,
        "Begins a round of online adaptation, or pauses it.",
    ),
    "/admin/trace": (
        TraceBody,
        answers.EngineCount,
        "Begins a trace of steps and requests, or ends it.",
    ),
}
GETS: dict[str, tuple[Any, str]] = {
    "/v1/models": (answers.ModelList, "The models that can serve now."),
    "/v1/models/{name}": (answers.ModelCard, "A model by its name."),
    "/health": (answers.Health, "Whether an engine can run a step."),
    "/ping": (answers.Health, "As /health; by SageMaker's name."),
    "/version": (answers.Version, "The server's version."),
    "/load": (answers.Load, "How many requests run or wait."),
    "/admin/drafters": (answers.Drafters, "The drafters of every engine."),
    "/admin/corpora": (answers.Corpora, "The files that every engine's look-ups search."),
    "/admin/adaptation": (answers.Adaptations, "Online adaptation of every engine."),
    "/admin/trace": (answers.Trace, "The trace, for `outrider simulate`."),
    "/get_world_size": (answers.WorldSize, "How many ranks the engines have."),
    "/get_weight_version": (answers.WeightVersion, "By which outputs name the weights."),
    "/is_paused": (answers.Paused, "Whether an engine is paused."),
    "/is_sleeping": (answers.Sleeping, "Whether an engine sleeps."),
    "/stats": (answers.Stats, "Statistics of engines and drafters."),
    "/metrics": (str, "Prometheus metrics."),
    "/openapi.json": (dict, "This document."),
    "/docs": (Page, "This document as a page."),
}
# POST routes without a body.
COMMANDS: dict[str, tuple[Any, str]] = {
    "/ping": GETS["/ping"],
    "/reset_prefix_cache": (answers.EngineCount, "Forgets the stored prefixes."),
    "/pause": (answers.EngineCount, "Computes nothing until /resume."),
    "/resume": (answers.EngineCount, "Goes on after /pause."),
    "/sleep": (answers.EngineCount, "Gives memory back until /wake_up."),
    "/wake_up": (answers.EngineCount, "Takes memory again."),
}


DELETES: dict[str, tuple[Any, str]] = {
    "/admin/drafters/{name}": (answers.DraftersUpdate, "Removes a drafter.")
}
_MODE = {"enum": list(get_args(PauseMode)), "default": "abort"}
_TAGS = {"type": "array", "items": {"enum": list(SLEEP_TAGS)}, "minItems": 1}
# Allowed query parameters of routes without a body; others are rejected.
QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/reset_prefix_cache": {},
    "/pause": {"mode": _MODE},
    "/resume": {},
    "/sleep": {"level": {"enum": [1, 2], "default": 1}, "mode": _MODE},
    "/wake_up": {"tags": _TAGS},
    "/get_world_size": {
        "include_dp": {"type": "boolean", "default": True},
        "model": {"type": "string"},
    },
    "/get_weight_version": {"model": {"type": "string"}},
    "/admin/drafters/{name}": {"model": {"type": "string"}},
    "/admin/trace": {"model": {"type": "string"}},  # the GET route
}


def document(
    models: Sequence[str], vocab_size: int, adapters: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the OpenAPI document of a server with these models and adapters.

    Args:
        vocab_size: the smallest vocabulary of the models.
    """
    bodies = [body for body, _, _ in POSTS.values()]
    schemas = deepcopy(_shapes())
    for body in bodies:
        schema = schemas[body.__name__]
        _complete(schema, models, adapters, vocab_size, body in _STREAMED)
    ineffective = {name: {"enum": list(values)} for name, values in UNSUPPORTED.items()}
    ineffective |= {name: {} for name in sorted(IGNORED)}
    foreign = {name: {"enum": list(row.only)} for name, row in REQUEST.items()
               if isinstance(row, Only)}  # fmt: skip
    foreign |= {name: {} for name, row in REQUEST.items() if isinstance(row, Ignored)}
    ineffective |= foreign
    nothing = {name: {"enum": list(values)} for name, values in NOTHING.items()} | foreign
    for body, fields in zip(_STREAMED, (*[ineffective] * 3, nothing), strict=True):
        properties = schemas[body.__name__]["properties"]
        properties |= {name: each for name, each in fields.items() if name not in properties}
    paths: dict[str, Any] = {path: {"post": _operation(path, *row)} for path, row in POSTS.items()}
    for method, table in (("get", GETS), ("post", COMMANDS), ("delete", DELETES)):
        for path, row in table.items():
            paths.setdefault(path, {})[method] = _operation(path, None, *row, method=method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


@cache
def _shapes() -> dict[str, Any]:
    """Returns the JSON schemas of all bodies and answers by name; independent of the models."""
    bodies = [body for body, _, _ in POSTS.values()]
    shown = [answer for _, answer, _ in POSTS.values()] + [answer for answer, _ in GETS.values()]
    shown += [answer for table in (COMMANDS, DELETES) for answer, _ in table.values()]
    shapes = dict.fromkeys(each for each in [*bodies, *shown, answers.Error] if each not in _PLAIN)
    inputs: Any = [(each, "validation", TypeAdapter(each)) for each in shapes]
    _, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


@cache
def _sampling_ranges() -> dict[str, Any]:
    found: dict[str, Any] = SamplingParams.model_json_schema(mode="validation")["properties"]
    return found


def _complete(
    schema: dict[str, Any],
    models: Sequence[str],
    adapters: Sequence[str],
    vocab_size: int,
    generates: bool,
) -> None:
    """Adds ranges that the body leaves to `SamplingParams` and to the vocabulary."""
    properties = schema["properties"]
    if len(models) == 1:
        names = {"enum": [*models, *adapters]} if adapters else {"const": models[0]}
        properties["model"] = {"anyOf": [names, {"type": "null"}]}
    else:
        properties["model"] = {"enum": [*models, *adapters]}
        schema["required"] = [*schema.get("required", ()), "model"]
    token_id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids = {"type": "array", "items": token_id, "minItems": 1}
    lists = {"type": "array", "items": ids, "minItems": 1}
    if schema["title"] == CompletionBody.__name__:
        text = {"type": "string", "minLength": 1}
        texts = {"type": "array", "items": text, "minItems": 1}
        properties["prompt"] = {"anyOf": [text, texts, ids, lists]}
        properties["prompt_token_ids"] = {"anyOf": [ids, lists]}
        schema["oneOf"] = [{"required": ["prompt"]}, {"required": ["prompt_token_ids"]}]
    if "tokens" in properties:
        properties["tokens"] = {"type": "array", "items": token_id}
    if not generates:
        return
    for name, found in _sampling_ranges().items():
        simple = found.get("type") in ("number", "integer") or "anyOf" in found
        own = properties.get(name, {}).get("anyOf")
        if not simple or own is None:
            continue
        parts = found.get("anyOf") or [{key: found[key] for key in found if key in _RANGE}]
        parts = [part for part in parts if part.get("type") != "null"]
        kinds = {part.get("type") for part in own}
        if {part.get("type") for part in parts} <= kinds:
            properties[name]["anyOf"] = [*parts, {"type": "null"}]


_RANGE = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


# Answers other than JSON of a known type.
_PLAIN: dict[Any, Any] = {
    str: {CONTENT_TYPE.partition(";")[0]: {"schema": {"type": "string"}}},
    dict: {"application/json": {"schema": {"type": "object"}}},
    Page: {"text/html": {"schema": {"type": "string"}}},
}


def _json(model: Any) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _operation(
    path: str, body: type[BaseModel] | None, answer: Any, summary: str, method: str = "post"
) -> dict[str, Any]:
    """Describes the operation at a path, with or without a body."""
    content = _PLAIN.get(answer) or _json(answer)
    name = path.strip("/").translate(str.maketrans("/.", "__", "{}"))
    found: dict[str, Any] = {
        "summary": summary,
        "operationId": name if body else f"{method}_{name}",
    }
    query = QUERIES.get(path, {}) if body is None else {}
    parameters: list[dict[str, Any]] = [
        {"name": each, "in": "query", "schema": schema} for each, schema in query.items()
    ]
    codes: Iterable[int] = _ERRORS
    if body is not None:
        found["requestBody"] = {"required": True, "content": _json(body)}
    elif "{name}" in path:
        in_path = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        parameters.insert(0, in_path)
        codes = (*((400,) if method == "delete" else ()), 404, *_ERRORS_WITHOUT_BODY)
    elif path in QUERIES:
        codes = (*((400, 404) if method == "get" else (400, 408, 413, 415)), *_ERRORS_WITHOUT_BODY)
    else:
        codes = _ERRORS_WITHOUT_BODY
    if parameters:
        found["parameters"] = parameters
    if body in _STREAMED:
        # Without a type: readers of OpenAPI take the whole body for the value, or each event.
        events = {"description": "With `stream: true`: server-sent events."}
        content["text/event-stream"] = {"schema": events}
    found["responses"] = {"200": {"description": "Success.", "content": content}}
    for code in codes:
        shown = {"description": _ERRORS[code], "content": _json(answers.Error)}
        found["responses"][str(code)] = shown
    return found


# -- the document as an HTML page without scripts or external files


def html_page(described: Mapping[str, Any]) -> str:
    """Renders the result of `document` as HTML: all routes, then all types."""
    routes = [
        (path, method, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = described["components"]["schemas"]
    parts = [*(_route(*each) for each in routes), "<h2>Shapes</h2>"]
    parts += [_shape(name, schema) for name, schema in schemas.items()]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<title>Outrider API</title><link rel="stylesheet" href="page/style.css"></head>\n'
        '<body><header><h1>Outrider API</h1><span class="grow"></span>'
        f'<a href="openapi.json">openapi.json</a></header>\n<main>{"".join(parts)}</main>'
        "</body></html>\n"
    )


def _route(path: str, method: str, operation: Mapping[str, Any]) -> str:
    """Renders one route: its parameters, body and answers."""
    lines = [f"<p>{escape(operation['summary'])}</p>"]
    for each in operation.get("parameters", ()):
        lines.append(f"<p>In the {each['in']}: <code>{each['name']}</code>: "
                     f"{_kind(each['schema'])}</p>")  # fmt: skip
    if "requestBody" in operation:
        lines.append(f"<p>Body: {_contents(operation['requestBody'])}</p>")
    rows = [
        f"<tr><td>{code}</td><td>{escape(answer['description'])}</td>"
        f"<td>{_contents(answer)}</td></tr>"
        for code, answer in operation["responses"].items()
    ]
    lines.append(_table(("status", "meaning", "body"), rows))
    title = f"<code>{method.upper()} {escape(path)}</code>"
    return f'<section class="card"><h2>{title}</h2>{"".join(lines)}</section>\n'


def _shape(name: str, schema: Mapping[str, Any]) -> str:
    """Renders one schema: its fields, or its allowed values."""
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in required else ''}</td>"
        f"<td>{_kind(each)}</td><td>{escape(each.get('description', ''))}</td></tr>"
        for field, each in schema.get("properties", {}).items()
    ]
    head = f"<h2>{escape(name)}</h2><p>{escape(schema.get('description', ''))}</p>"
    fields = _table(("field", "type", "meaning"), rows) if rows else f"<p>{_kind(schema)}</p>"
    return f'<section class="card" id="{escape(name)}">{head}{fields}</section>\n'


def _table(columns: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{each}</th>" for each in columns)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _contents(part: Mapping[str, Any]) -> str:
    """Renders media types with their schemas."""
    return ", ".join(
        f"{escape(media)}: {_kind(each['schema'])}" for media, each in part["content"].items()
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """Renders a schema in one line; named types are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema and "properties" not in schema:
            return " or ".join(dict.fromkeys(_kind(each) for each in schema[key]))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(each))}</code>" for each in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(" ".join([str(schema.get("type", "any")), *_bounds(schema)]))


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for key, sign in signs.items():
        if key in schema:
            yield f"{sign} {schema[key]}"
