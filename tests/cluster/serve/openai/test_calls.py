"""Calls without HTTP: the objects of the HTTP API, typed errors, keys and their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from openai.types.chat import ChatCompletion

from outrider.cluster.serve.access.access import Access, RateLimitError
from outrider.cluster.serve.ingress import (
    CompletionRequest,
    HandleMethods,
    RefusedError,
    RefusedPromptError,
)
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Calls, Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.errors import BodyTooLargeError
from outrider.cluster.serve.openai.routes import build_http
from outrider.config.access import AccessConfig, hash_of
from outrider.engine.frontend import Frontend
from outrider.errors import AuthenticationError, InvalidRequestError, ModelNotFoundError
from outrider.scheduler.sampling import SamplingParams

KEY = "or-key"
BODY = {"prompt": "a cat", "max_tokens": 6, "seed": 1}
CHANGING = {"id", "created"}  # from answer to answer


@pytest.fixture
def make_edge(make_engine: Callable[..., Any], config: Any, limits: Any) -> Callable[..., Edge]:
    def make(**options: Any) -> Edge:
        client = EngineClient(make_engine())
        return Edge(client, Frontend(config, limits), EdgeMetrics("tiny"), **options)

    return make


def over_http(edge: Edge, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async def post() -> Any:
        transport = httpx.ASGITransport(build_http(edge))
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
            return (await client.post(path, json=body)).json()

    return asyncio.run(post())


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return {**left, **dict.fromkeys(CHANGING)} == {**right, **dict.fromkeys(CHANGING)}


async def collected(events: Any) -> list[Any]:
    return [event async for event in events]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**BODY, "logprobs": 2, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
        ("/tokenize", {"prompt": "a cat"}),
        ("/detokenize", {"tokens": [65, 66]}),
    ],
)
def test_answers_are_those_of_http(make_edge, path, body):
    edge = make_edge()
    answer = asyncio.run(Calls(edge).answer(path, body))
    expected = over_http(edge, path, body)
    if path == "/v1/responses":
        assert answer["output"][0]["content"] == expected["output"][0]["content"]
    else:
        assert same(answer, expected)
    assert asyncio.run(collected(Calls(edge).events(path, body)))[0].keys() == answer.keys()


def test_streams_are_chunks_of_the_same_text(make_edge):
    edge, body = make_edge(), {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    whole = asyncio.run(Calls(edge).answer("/v1/completions", BODY))
    chunks = asyncio.run(collected(Calls(edge).events("/v1/completions", body)))
    assert (
        "".join(each["choices"][0]["text"] for each in chunks[:-1]) == whole["choices"][0]["text"]
    )
    assert len(chunks) > 2
    assert chunks[-1]["usage"] == whole["usage"]
    with pytest.raises(InvalidRequestError, match="stream: this call returns the whole answer"):
        asyncio.run(Calls(edge).answer("/v1/completions", body))


def test_leaving_a_stream_aborts_its_request(make_edge):
    edge = make_edge()
    engine = edge.client._engine

    async def leave() -> None:
        events = Calls(edge).events("/v1/completions", {**BODY, "max_tokens": 200, "stream": True})
        await anext(events)
        await events.aclose()
        while not engine.aborted:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 20))


def test_bodies_of_other_types(make_edge):
    calls = Calls(make_edge())
    ids = np.array([65, 66, 67])
    plain = asyncio.run(calls.answer("/v1/completions", {**BODY, "prompt": ids.tolist()}))
    model = CompletionRequest(**{**BODY, "prompt": ids.tolist()})
    for body in ({**BODY, "prompt": ids, "max_tokens": np.int64(6)}, model):
        assert same(asyncio.run(calls.answer("/v1/completions", body)), plain)
    for body, named in (("text", "expected a mapping"), ({"prompt": object()}, "written as JSON")):
        with pytest.raises(InvalidRequestError, match=f"^body: .*{named}"):
            asyncio.run(calls.answer("/v1/completions", body))


def test_errors_are_typed(make_edge):
    calls = Calls(make_edge(max_body_bytes=2048))
    for path, body, kind, field in (
        ("/v1/completions", {**BODY, "max_tokens": -1}, InvalidRequestError, "max_tokens"),
        ("/v1/completions", {**BODY, "max_token": 1}, InvalidRequestError, "max_token"),
        ("/v1/completions", {**BODY, "model": "other"}, ModelNotFoundError, "model"),
        ("/v1/completions", {**BODY, "prompt": "a" * 3000}, BodyTooLargeError, "body"),
        ("/v1/images", {"prompt": "a"}, ModelNotFoundError, "url"),
        ("/v1/embeddings", {"input": "a"}, InvalidRequestError, "model"),
    ):
        with pytest.raises(kind) as caught:
            asyncio.run(calls.answer(path, body))
        assert caught.value.field == field


def test_keys_and_their_limits_hold(make_edge):
    key = {"hash": hash_of(KEY), "tenant": "t", "requests_per_minute": 1}
    edge = make_edge(access=Access(AccessConfig(keys=[key])))
    calls = Calls(edge)
    with pytest.raises(AuthenticationError):
        asyncio.run(calls.answer("/v1/completions", BODY))
    asyncio.run(calls.answer("/v1/completions", BODY, KEY))
    assert edge.client._engine.submitted[0].tenant == "t"
    with pytest.raises(RateLimitError):
        asyncio.run(calls.answer("/v1/completions", BODY, KEY))


class Methods(HandleMethods):
    def __init__(self, edge: Edge) -> None:
        self._calls = Calls(edge)


def test_methods_of_a_handle(make_edge):
    """Without Serve around them, `stream` in the body decides; `test_deployment.py` has Serve."""
    edge = make_edge()
    methods = Methods(edge)
    message = [{"role": "user", "content": "a"}]
    answer = asyncio.run(methods.chat({"messages": message, "max_tokens": 4, "idx_in_batch": 3}))
    assert ChatCompletion.model_validate(answer).choices[0].message.content

    async def streamed() -> list[Any]:
        return await collected(await methods.chat({"messages": message, "stream": True}))

    assert asyncio.run(streamed())[0]["object"] == "chat.completion.chunk"
    settings = {"max_tokens": 3, "seed": 5}
    for prompt, given in (
        ("a", SamplingParams(**settings)),
        ([65], settings),
        ({"prompt": "a", "sampling_params": settings}, None),
    ):
        (choice,) = asyncio.run(methods.generate(prompt, given))["choices"]
        assert len(choice["token_ids"]) == 3
        assert edge.client._engine.submitted[-1].seed == 5


def test_refusals_of_a_handle_are_value_errors(make_edge):
    methods = Methods(make_edge())
    for call, body, field in (
        (methods.completions, {**BODY, "max_tokens": -1}, "max_tokens"),
        (methods.completions, "text", "body"),
        (methods.generate, {"prompt": "a", "sampling_params": 3}, "sampling_params"),
        (methods.embeddings, {"input": "a"}, "model"),
        (methods.score, {"queries": "a", "documents": "b"}, "model"),
        (methods.transcriptions, {"file": "a"}, "transcriptions"),
    ):
        with pytest.raises(RefusedError) as caught:
            asyncio.run(call(body))
        assert isinstance(caught.value, ValueError)
        assert caught.value.field == field
    with pytest.raises(RefusedPromptError, match="prompt"):
        asyncio.run(methods.completions({"prompt": [65] * 5000}))
