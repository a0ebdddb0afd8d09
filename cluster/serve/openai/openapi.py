"""The OpenAPI document: every route with its bodies, answers and errors.

Bodies are parsed by hand (`parse.parse`), so FastAPI cannot describe them. Ranges come from
`SamplingParams`. The page at `/` is no part of the API.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ....scheduler.sampling import SamplingParams
from ..metrics import CONTENT_TYPE
from . import answers
from .parse import IGNORED, UNSUPPORTED
from .protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .responses import ResponsesBody
from .responses.body import NOTHING

_REF = "#/components/schemas/{model}"
_STREAMED: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, ResponsesBody)
_ERRORS = {
    400: "A field is invalid; `param` names it.",
    401: "The API key is missing or unknown.",
    403: "The API key does not allow the route, or the field in `param`.",
    404: "An unknown model.",
    408: "The body did not arrive in time.",
    410: "The tokens of a resumable stream are lost.",
    413: "The body is too large.",
    429: "The queue or a limit of the key is full; `Retry-After` says when to come back.",
    500: "A worker failed inside a step.",
    503: "No engine can run a step.",
    504: "The request took longer than the server allows.",
}
POSTS: dict[str, tuple[type[BaseModel], Any, str]] = {
    "/v1/completions": (CompletionBody, answers.Completion, "Completes prompts."),
    "/v1/chat/completions": (ChatBody, answers.ChatCompletion, "Answers a conversation."),
    "/v1/responses": (ResponsesBody, answers.Response, "Answers an input; stores nothing."),
    "/tokenize": (TokenizeBody, answers.Tokens, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeBody, answers.Text, "The text of token ids."),
}
GETS: dict[str, tuple[Any, str]] = {
    "/v1/models": (answers.ModelList, "The models that can serve now."),
    "/v1/models/{name}": (answers.ModelCard, "A model by its name."),
    "/health": (answers.Health, "Whether an engine can run a step."),
    "/stats": (answers.Stats, "Statistics of engines and drafters."),
    "/metrics": (None, "Prometheus metrics."),
    "/openapi.json": (None, "This document."),
}


def document(models: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """The OpenAPI document of a server of these models; `vocab_size` is the smallest."""
    bodies = [body for body, _, _ in POSTS.values()]
    shown = [answer for _, answer, _ in POSTS.values()] + [answer for answer, _ in GETS.values()]
    shapes = [*bodies, *shown, answers.Error]
    inputs: Any = [(each, "validation", TypeAdapter(each)) for each in shapes if each is not None]
    _, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    schemas = definitions["$defs"]
    for body in bodies:
        _complete(schemas[body.__name__], models, vocab_size, body in _STREAMED)
    ineffective = {name: {"enum": list(values)} for name, values in UNSUPPORTED.items()}
    ineffective |= {name: {} for name in sorted(IGNORED)}
    nothing = {name: {"enum": list(values)} for name, values in NOTHING.items()}
    for body, fields in zip(_STREAMED, (ineffective, ineffective, nothing), strict=True):
        properties = schemas[body.__name__]["properties"]
        properties |= {name: each for name, each in fields.items() if name not in properties}
    paths: dict[str, Any] = {path: {"post": _post(path)} for path in POSTS}
    paths |= {path: {"get": _get(path)} for path in GETS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _complete(
    schema: dict[str, Any], models: Sequence[str], vocab_size: int, generates: bool
) -> None:
    """Ranges that the body's own model leaves to `SamplingParams` and to the vocabulary."""
    properties = schema["properties"]
    if len(models) == 1:
        properties["model"] = {"anyOf": [{"const": models[0]}, {"type": "null"}]}
    else:
        properties["model"] = {"enum": list(models)}
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
    ranges = SamplingParams.model_json_schema(mode="validation")["properties"]
    for name, found in ranges.items():
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


def _json(model: Any) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def _post(path: str) -> dict[str, Any]:
    body, answer, summary = POSTS[path]
    content = _json(answer)
    if body in _STREAMED:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "With `stream: true`: server-sent events."}
        }
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_").replace(".", "_"),
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": {"description": "Success.", "content": content}, **_errors(_ERRORS)},
    }


def _get(path: str) -> dict[str, Any]:
    answer, summary = GETS[path]
    plain = {CONTENT_TYPE.partition(";")[0]: {"schema": {"type": "string"}}}
    if path == "/openapi.json":
        plain = {"application/json": {"schema": {"type": "object"}}}
    content = plain if answer is None else _json(answer)
    found: dict[str, Any] = {
        "summary": summary,
        "operationId": "get_" + path.strip("/").translate(str.maketrans("/.", "__", "{}")),
        "responses": {"200": {"description": "Success.", "content": content}},
    }
    codes: tuple[int, ...] = (401, 403, 500, 503)
    if "{name}" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [name]
        codes = (404, *codes)
    found["responses"] |= _errors(codes)
    return found


def _errors(codes: Iterable[int]) -> dict[str, Any]:
    content = _json(answers.Error)
    return {str(code): {"description": _ERRORS[code], "content": content} for code in codes}
