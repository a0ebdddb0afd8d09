"""`outrider chat` with a model that thinks: reasoning is shown, and is no part of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from outrider.cli.chat import Local
from outrider.cli.options import SamplingOptions
from outrider.cluster.backend import LLM

from ..helpers.browser import serving

THOUGHT, ANSWER = ["The user ", "says hello."], ["Good ", "day."]


@pytest.fixture
def thinking() -> tuple[FastAPI, list[Any]]:
    """A server that thinks before it answers, and the bodies of its requests."""
    app, bodies = FastAPI(), []

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "thinker"}]}

    @app.post("/v1/chat/completions")
    def answer(body: dict[str, Any]) -> StreamingResponse:
        bodies.append(body)
        older = len(bodies) > 1  # servers that have only the older name
        name = "reasoning_content" if older else "reasoning"
        deltas = [{name: each} for each in THOUGHT] + [{"content": each} for each in ANSWER]
        events = [f"data: {json.dumps({'choices': [{'delta': each}]})}\n\n" for each in deltas]
        return StreamingResponse([*events, "data: [DONE]\n\n"], media_type="text/event-stream")

    return app, bodies


def test_reasoning_of_a_server(outrider_cli, thinking):
    app, bodies = thinking
    with serving(app) as url:
        result = outrider_cli("chat", "--url", url, input="hello\nand now\n")
        assert result.exit_code == 0, result.stderr
        assert result.stdout == "Good day.\n" * 2
        assert result.stderr == "The user says hello.\n\n" * 2
        assert [each["content"] for each in bodies[1]["messages"]] == [
            "hello",
            "Good day.",
            "and now",
        ]
        hidden = outrider_cli("chat", "--url", url, "--hide-reasoning", input="hello\n")
    assert (hidden.stdout, hidden.stderr) == ("Good day.\n", "")


def test_what_ends_early_or_is_no_list_of_models_is_an_error(outrider_cli):
    app, listed = FastAPI(), {"data": [{"id": "a"}]}

    @app.get("/v1/models")
    def models() -> Any:
        return listed

    @app.post("/v1/chat/completions")
    def answer(body: dict[str, Any]) -> StreamingResponse:
        event = {"choices": [{"delta": {"content": "Good "}}]}
        return StreamingResponse([f"data: {json.dumps(event)}\n\n"])

    with serving(app) as url:
        cut = outrider_cli("chat", "--url", url, input="hello\n")
        assert (cut.exit_code, cut.stdout) == (1, "Good \n")
        assert "in the middle of the answer" in cut.stderr
        for other in ([], {"data": []}):
            listed = other
            result = outrider_cli("chat", "--url", url, input="hello\n")
            assert result.exit_code == 1
            assert "model" in result.stderr


def test_reasoning_of_a_model_in_this_process(model: Path) -> None:
    """The prompt opens the block, and the model never closes it: all of it is reasoning."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    options: dict[str, Any] = {"executor": "local", "dtype": "float32", "num_kv_blocks": 64}
    with LLM(str(model), chat_template=template, reasoning_parser="qwen3", **options) as llm:
        partner = Local(llm, SamplingOptions(max_tokens=6), raw=False)
        pieces = list(partner.answer([{"role": "user", "content": "import os"}]))
        raw = Local(llm, SamplingOptions(max_tokens=6), raw=True)
        unread = list(raw.answer([{"role": "user", "content": "import os"}]))
    assert pieces
    assert all(is_reasoning for _, is_reasoning in pieces)
    assert not any(is_reasoning for _, is_reasoning in unread)
