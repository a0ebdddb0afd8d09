"""The API's endpoints without HTTP, and `Calls`, through which Python callers use them.

A body is a mapping or a pydantic model, and is checked as over HTTP. Answers and chunks are the
JSON objects of the HTTP API; errors are raised.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel
from starlette.datastructures import Headers

from ....engine.frontend import Frontend
from ....errors import InvalidRequestError, ModelNotFoundError, shortened
from ..access.access import Access, Call, answering, current
from ..metrics import EdgeMetrics
from ..telemetry import Tracing
from . import chat, completions, messages, responses
from .engine_client import EngineClient
from .errors import BodyTooLargeError
from .generation import Generation
from .messages import CountBody, MessagesBody
from .parse import nested_too_deeply, parse
from .pooling import EmbeddingBody, Embeddings, PooledBody, Rerank, RerankBody, ScoreBody, Scores
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
from .streaming import Offload

_NO_HEADERS = Headers({})
Result = TypeVar("Result")


class Calls:
    """The endpoints of one model or several, by path."""

    def __init__(self, *edges: Edge) -> None:
        self._models = Models.of(*edges)

    async def answer(self, path: str, body: Any, key: str | None = None) -> dict[str, Any]:
        """Returns the whole answer to `body`.

        Args:
            path: path of the HTTP API, for example `/v1/completions`.
            key: an API key, if the server has keys.

        Raises:
            InvalidRequestError: a field is invalid, or a stream was requested.
            OutriderError: the same errors as over HTTP.
        """
        with self._admitted(key) as call:
            if path in TOKEN_ENDPOINTS:
                raw, prepare = encoded(body), partial(TOKEN_ENDPOINTS[path], self._models)
                with answering(call):
                    return await prepared(self._models, raw, prepare)
            opened = await self._opened(call, path, body)
            if opened.body.stream:
                raise InvalidRequestError.at(
                    "stream", "this call returns the whole answer; leave it out"
                )
            await opened.generation.finish()
            return await opened.whole()

    async def events(
        self, path: str, body: Any, key: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of the answer, or the whole answer if `stream` is not true.

        Closing the generator ends the request. Arguments and errors are those of `answer`.
        """
        if path in TOKEN_ENDPOINTS:
            yield await self.answer(path, body, key)
            return
        with self._admitted(key) as call:
            opened = await self._opened(call, path, body)
            if opened.body.stream:
                async with contextlib.aclosing(opened.events()) as events:
                    async for event in events:
                        yield event
            else:
                await opened.generation.finish()
                yield await opened.whole()

    @contextlib.contextmanager
    def _admitted(self, key: str | None) -> Iterator[Call]:
        """Identifies the key's holder and counts the request while it runs."""
        access = self._models.first.access
        identity = access.identify(None if key is None else f"Bearer {key}")
        identity.usage.begin()
        try:
            yield Call(identity, log_prompts=access.config.log_prompts)
        finally:
            identity.usage.end()

    async def _opened(self, call: Call, path: str, body: Any) -> OpenAnswer:
        if path not in ENDPOINTS:
            known = ", ".join([*ENDPOINTS, *TOKEN_ENDPOINTS])
            raise ModelNotFoundError(f"{path} is not served; there are {known}", field="url")
        raw = encoded(body)
        prepare = partial(ENDPOINTS[path].opened, self._models, _NO_HEADERS)
        with answering(call):  # the generation stores it
            largest = self._models.first.largest_body()
            if len(raw) > largest:
                raise BodyTooLargeError.at("body", f"more than {largest} bytes")
            return await prepared(self._models, raw, prepare)


@dataclass(frozen=True, slots=True)
class Edge:
    """A model, and the settings of the endpoint that serves it."""

    client: EngineClient
    frontend: Frontend
    metrics: EdgeMetrics
    max_body_bytes: int = 16 * 2**20
    request_timeout_s: float | None = None
    body_timeout_s: float | None = 60.0  # until the whole body has arrived
    max_completions: int | None = None  # per request; the queue's capacity
    tracing: Tracing | None = None
    offload: Offload = field(default_factory=Offload)
    access: Access = field(default_factory=Access)
    resuming: ResumePolicy = field(default_factory=ResumePolicy)
    adapter: str = ""  # name of a LoRA adapter that it serves; empty: none

    @property
    def model_name(self) -> str:
        return self.adapter or self.frontend.model_name

    def largest_body(self) -> int:
        """Returns the maximum size of the current request's body in bytes."""
        key = current().identity.key
        mine = None if key is None else key.max_body_bytes
        return self.max_body_bytes if mine is None else min(mine, self.max_body_bytes)

    def generation(self, headers: Headers) -> Generation:
        """Creates the generation of one HTTP request."""
        tracing, model = self.tracing, self.model_name
        return Generation(
            self.client,
            self.frontend,
            self.metrics,
            self.request_timeout_s,
            self.max_completions,
            self.adapter,
            None if tracing is None else partial(tracing.begin, headers, model=model),
        )


@dataclass(frozen=True, slots=True)
class Models:
    """The models and adapters behind one endpoint, by name."""

    by_name: Mapping[str, Edge]  # without adapters

    @classmethod
    def of(cls, *edges: Edge) -> Models:
        """The models of these edges, with their adapters."""
        return cls({edge.model_name: edge for edge in edges})

    @property
    def adapters(self) -> Mapping[str, Edge]:
        """The current adapters of all models."""
        edges = self.by_name.values()
        return {
            name: replace(edge, adapter=name) for edge in edges for name in edge.frontend.adapters
        }

    @property
    def names(self) -> list[str]:
        return list(self.by_name)

    @property
    def first(self) -> Edge:
        return next(iter(self.by_name.values()))

    def find(self, name: str | None) -> Edge:
        """Returns the model or adapter of that name; without a name, the only model.

        Raises:
            InvalidRequestError: there are several models, and no name was given.
            ModelNotFoundError: there is no such model.
        """
        if name is None:
            if len(self.by_name) > 1:
                raise InvalidRequestError.at(
                    "model", f"this server has several models; choose one of {self._listed()}"
                )
            return self.first
        found = self.by_name.get(name) or self.adapters.get(name)
        if found is not None:
            return found
        base, colon, adapter = name.rpartition(":")  # Ray Serve LLM's form of an adapter's name
        name = shortened(name)
        if colon and base in self.by_name:
            known = self.by_name[base].frontend.adapters
            if adapter in known:
                return self.adapters[adapter]
            has = ", ".join(map(repr, known)) or "none"
            raise ModelNotFoundError(
                f"The model {name!r} does not exist: {base!r} has no adapter "
                f"{shortened(adapter)!r}; it has {has}",
                field="model",
            )
        raise ModelNotFoundError(
            f"The model {name!r} does not exist; this server has {self._listed()}", field="model"
        )

    def _listed(self) -> str:
        return ", ".join(map(repr, [*self.by_name, *self.adapters]))


class Endpoint(NamedTuple):
    """A route that generates text."""

    kind: str  # prefix of the answers' ids
    body: type[GenerationBody | ResponsesBody | MessagesBody | PooledBody]
    work: ModuleType | type[Any]  # with `add`, `answer` and, if it streams, `events`
    named: bool = False  # events have names, and the last event ends the stream

    def opened(self, models: Models, headers: Headers, raw: bytes) -> OpenAnswer:
        """Checks a body and prepares its answer; nothing runs yet.

        Raises:
            InvalidRequestError, ModelNotFoundError: names the field.
        """
        own_id = self.kind + uuid.uuid4().hex  # a client's id may already be in use
        body = parse(self.body, raw)
        edge = models.find(body.model)
        options = None if isinstance(body, MessagesBody) else body.stream_options
        if options is not None and not body.stream:
            raise InvalidRequestError.at("stream_options", "only allowed with stream = true")
        generation = edge.generation(headers)
        if isinstance(body, PooledBody):
            generation.limit_time(body.timeout)
        if isinstance(body, GenerationBody):
            generation.limit_time(body.timeout)
            last_id = headers.get("last-event-id")
            kind, identity = self.kind.rstrip("-"), current().identity
            generation.stream = open_stream(kind, body, last_id, identity, edge.resuming)
        self.work.add(generation, body, own_id)
        answer_id = self.kind + body.request_id if body.request_id else own_id
        return OpenAnswer(self, body, generation, answer_id)


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """An answer that is ready to be generated."""

    endpoint: Endpoint
    body: Any
    generation: Generation
    id: str

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the answer's chunks as they are generated."""
        stream = self.generation.stream
        answer_id = self.id if stream is None else stream.id
        events: AsyncGenerator[dict[str, Any], None] = self.endpoint.work.events(
            self.generation, self.body, answer_id
        )
        return events

    async def whole(self) -> dict[str, Any]:
        """Returns the whole answer; requires that `generation.finish` has returned."""
        found: dict[str, Any] = await self.endpoint.work.answer(self.generation, self.body, self.id)
        return found


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/completions": Endpoint("cmpl-", CompletionBody, completions),
    "/v1/chat/completions": Endpoint("chatcmpl-", ChatBody, chat),
    "/v1/responses": Endpoint("resp_", ResponsesBody, responses, named=True),
    "/v1/messages": Endpoint("msg_", MessagesBody, messages, named=True),
    "/v1/embeddings": Endpoint("embd-", EmbeddingBody, Embeddings),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"), Endpoint("rerank-", RerankBody, Rerank)
    ),
    **dict.fromkeys(("/v1/score", "/score"), Endpoint("score-", ScoreBody, Scores)),
}


def _detokenized(models: Models, raw: bytes) -> dict[str, Any]:
    body = parse(DetokenizeBody, raw)
    frontend = models.find(body.model).frontend
    prompt = frontend.token_prompt(body.tokens, "tokens")
    return {"prompt": frontend.vocabulary.text(prompt.token_ids)}


def _counted(models: Models, raw: bytes) -> dict[str, Any]:
    body = parse(CountBody, raw)
    return {"input_tokens": messages.counted(models.find(body.model).frontend, body)}


def _tokenized(models: Models, raw: bytes) -> dict[str, Any]:
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
    return answer


TOKEN_ENDPOINTS: Mapping[str, Callable[[Models, bytes], dict[str, Any]]] = {
    "/tokenize": _tokenized,
    "/detokenize": _detokenized,
    "/v1/messages/count_tokens": _counted,
}


async def prepared(models: Models, raw: bytes, prepare: Callable[[bytes], Result]) -> Result:
    """Calls `prepare` on a body, in a thread if that may take long.

    Raises:
        OverloadedError, and any error of `prepare`.
    """

    def work() -> Result:
        try:
            return prepare(raw)
        except RecursionError:
            raise nested_too_deeply() from None

    return await models.first.offload.run(len(raw), work, may_be_slow=may_compile(raw))


def as_mapping(body: Any) -> dict[str, Any]:
    """Returns the fields of a body: those of a mapping, or those set in a pydantic model.

    Raises:
        InvalidRequestError: the body is neither.
    """
    if isinstance(body, BaseModel):
        return body.model_dump(mode="json", exclude_unset=True, by_alias=True)
    if not isinstance(body, Mapping):
        raise InvalidRequestError.at(
            "body", f"expected a mapping or a pydantic model, got {type(body).__name__}"
        )
    return dict(body)


def encoded(body: Any) -> bytes:
    """Encodes a body as JSON; raises `InvalidRequestError` if that is impossible."""
    fields = as_mapping(body)
    try:
        return json.dumps(fields, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError.at("body", f"it cannot be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Converts values for which JSON has no type."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (BaseModel, Mapping)):
        return as_mapping(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
