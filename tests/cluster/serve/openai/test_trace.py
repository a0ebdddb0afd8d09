"""`speculation_trace`: the tokens of every step by origin, and the guesses that were rejected."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.engine.frontend import Frontend

from ....helpers.frontend import WRONG
from ....helpers.sse import events

ASKED = {"prompt": "a", "max_tokens": 30, "seed": 1}
TRACED = {**ASKED, "speculation": {"trace": True}}


@pytest.fixture
def app(make_engine: Any, config: Any, limits: Any) -> Starlette:
    engine = make_engine("naïve 日本語 <b>. ")
    return build_http(Edge(EngineClient(engine), Frontend(config, limits), EdgeMetrics("tiny")))


def post(app: Starlette, path: str, body: dict[str, Any]) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body)

    return asyncio.run(send())


def check(steps: list[dict[str, Any]]) -> None:
    """The fake engine's steps: two accepted guesses, one rejected, one token of the target."""
    assert [step["step"] for step in steps] == list(range(10))
    for step in steps:
        assert [token["origin"] for token in step["tokens"]] == ["fake", "fake", "target"]
        assert [guess["accepted"] for guess in step["draft"]] == [True, True, False]
        assert [guess["parent"] for guess in step["draft"]] == [-1, 0, 1]
        assert [guess["id"] for guess in step["draft"][:2]] == [t["id"] for t in step["tokens"][:2]]
        assert (step["draft"][2]["id"], step["draft"][2]["text"]) == (WRONG, "<")


@pytest.mark.parametrize("chat", [False, True])
def test_every_token_has_an_origin_and_the_text_is_theirs(app: Starlette, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = dict(TRACED)
    if chat:
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
    (choice,) = post(app, path, asked).json()["choices"]
    text = choice["message"]["content"] if chat else choice["text"]
    check(choice["speculation_trace"])
    pieces = [token["text"] for step in choice["speculation_trace"] for token in step["tokens"]]
    # The last characters may be unfinished: they are told with the end of the text alone.
    assert text.rstrip("\ufffd") == "".join(pieces)

    streamed = events(post(app, path, {**asked, "stream": True}))
    parts = [event["choices"][0] for event in streamed]
    steps = [step for part in parts for step in part.get("speculation_trace", [])]
    assert steps == choice["speculation_trace"]
    if not chat:
        assert "".join(part["text"] for part in parts) == text


def test_a_trace_changes_nothing_else(app: Starlette) -> None:
    plain = (post(app, "/v1/completions", ASKED)).json()
    traced = (post(app, "/v1/completions", {**TRACED, "stop": ["zzz"]})).json()
    assert "speculation_trace" in traced["choices"][0]
    del traced["choices"][0]["speculation_trace"]
    assert traced["choices"] == plain["choices"]
    assert traced["usage"] == plain["usage"]
    refused = post(app, "/v1/completions", {**ASKED, "speculation": {"trace": 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation.trace"
