"""`outrider chat` with a model that thinks: reasoning is shown, and is no part of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from typer.testing import CliRunner

from outrider.cli.app import app as cli
from outrider.cli.chat import Local, Painter
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


def test_options_of_a_model_loaded_here_are_refused_with_a_server(outrider_cli):
    """They would have no effect."""
    result = outrider_cli("chat", "--url", "http://127.0.0.1:1", "--spec-type", "suffix")
    assert result.stderr == "error: spec_type: only for a model loaded here, not with --url\n"


def test_a_server_is_also_named_as_for_the_benchmark(outrider_cli, thinking):
    app, bodies = thinking
    with serving(app) as url:
        by_name = [
            outrider_cli("chat", name, url, input="hello\n") for name in ("--url", "--base-url")
        ]
    assert [result.exit_code for result in by_name] == [0, 0]
    assert by_name[0].stdout == by_name[1].stdout != ""
    assert len(bodies) == 2


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
    app, listed, last = FastAPI(), {"data": [{"id": "a"}]}, ""

    @app.get("/v1/models")
    def models() -> Any:
        return listed

    @app.post("/v1/chat/completions")
    def answer(body: dict[str, Any]) -> StreamingResponse:
        event = {"choices": [{"delta": {"content": "Good "}}]}
        return StreamingResponse([f"data: {json.dumps(event)}\n\n", f"{last}\n\n"])

    with serving(app) as url:
        for event, said in (
            ("", "the server ended the stream in the middle of the answer"),
            ('data: {"choices": [{"delta": null}]}', "the server ended the stream in the middle"),
            ('data: {"error": {"message": "no room"}}', "no room"),
            ('data: {"error": "no room"}', "no room"),
            ("data: [1]", "the server sent what is no event: '[1]'"),
            ("data: {", "the server sent what is no event: '{'"),
        ):
            last = event
            cut = outrider_cli("chat", "--url", url, input="hello\n")
            assert (cut.exit_code, cut.stdout) == (1, "Good \n")
            assert cut.stderr.startswith(f"error: {said}")
        for other in ([], {"data": []}):
            listed = other
            result = outrider_cli("chat", "--url", url, input="hello\n")
            assert result.exit_code == 1
            assert "model" in result.stderr


def test_a_wrong_model_or_url_is_one_line_before_anything_is_read(outrider_cli, thinking):
    with serving(thinking[0]) as url:
        rows = [
            ((url, "-m", "other"), f"model: {url} serves thinker, not 'other'"),
            (
                (url, "--served-model-name", "x"),
                f"served_model_name: {url} serves thinker, not 'x'",
            ),
            ((f"{url}/api",), f"url: {url}/api/v1/models answered 404: "),
            ((" ",), "url: expected a server's URL, got ' '"),
        ]
        for args, message in rows:
            result = outrider_cli("chat", "--url", *args)  # nobody has written anything
            assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
            assert result.stderr.startswith(f"error: {message}")


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
    assert all(piece.is_reasoning for piece in pieces)
    assert not any(piece.is_reasoning for piece in unread)


def token(text: str, origin: str) -> dict[str, Any]:
    return {"text": text, "origin": origin}


def test_tokens_are_coloured_by_their_origins():
    """Of a server that traces; markup that its parser leaves out is no part of the answer."""
    app, bodies = FastAPI(), []
    told: dict[str, Any] = {"id": "m", "drafters": ["ngram"]}
    draft = [{"accepted": True}, {"accepted": False}]
    steps = [
        {"tokens": [token("<think>", "target")], "draft": []},
        {"tokens": [token("Goo", "ngram"), token("d ", "target")], "draft": draft},
        {"tokens": [token("day.", "target")], "draft": []},
    ]

    @app.get("/v1/models")
    def models() -> Any:
        return {"data": [told]}

    @app.post("/v1/chat/completions")
    def answer(body: dict[str, Any]) -> StreamingResponse:
        bodies.append(body)
        choices = [
            {"delta": {}, "speculation_trace": steps[:2]},
            {"delta": {"content": "Go"}},
            {"delta": {"content": "od "}},
            {"delta": {"content": "day."}, "speculation_trace": steps[2:]},
        ]
        if "speculation" not in body:
            choices = [{"delta": each["delta"]} for each in choices]
        events = [f"data: {json.dumps({'choices': [each]})}\n\n" for each in choices]
        return StreamingResponse([*events, "data: [DONE]\n\n"], media_type="text/event-stream")

    words = ("chat", "--url")
    with serving(app) as url:
        runner = CliRunner(env={"FORCE_COLOR": "1", "NO_COLOR": None, "TERM": "xterm"})
        shown = runner.invoke(cli, [*words, url, "--origins"], input="hello\n")
        piped = runner.invoke(cli, [*words, url], input="hello\n")
        told.pop("drafters")  # another maker's server refuses keys that it does not know
        other = runner.invoke(cli, [*words, url, "--origins"], input="hello\n")
    green = "\x1b[32m{}\x1b[0m".format
    assert shown.stdout == f"{green('Go')}{green('o')}d day.\n", shown.output
    assert "4 tokens in 3 steps, " in shown.stderr
    assert "accepted 1 of 2 drafted" in shown.stderr
    assert piped.stdout == other.stdout == "Good day.\n"
    assert [body.get("speculation") for body in bodies] == [{"trace": True}, None, None]


def test_a_local_answer_has_all_of_its_tokens_in_its_traces(model: Path) -> None:
    options: dict[str, Any] = {"executor": "local", "dtype": "float32", "num_kv_blocks": 64}
    options["speculative_config"] = {"decoding_type": "NGram", "max_draft_len": 3}
    with LLM(str(model), **options) as llm:
        partner = Local(llm, SamplingOptions(max_tokens=24), raw=True, traces=True)
        painter, text, runs = Painter(), "", []
        for piece in partner.answer([{"role": "user", "content": "import os\nimport os\n"}]):
            painter.take(piece.trace)
            text += piece.text
            runs += painter.runs(piece.text) if piece.text else []
    assert "".join(part for part, _ in runs) == text
    assert {"ngram", "target"} >= {origin for _, origin in runs}
    assert painter._num_tokens >= painter._num_steps > 0
