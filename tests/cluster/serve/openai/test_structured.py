"""Structured output over HTTP: the official client, vLLM's names, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Literal

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.engine.frontend import Frontend
from outrider.tests.helpers.engines import engine_of
from outrider.tests.helpers.models import write_models


class Cat(BaseModel):
    """What the model is asked for."""

    name: str = Field(max_length=4)
    colour: Literal["red", "green"]


@pytest.fixture(scope="module")
def http(tokenizer_path, tmp_path_factory):
    models = write_models(tokenizer_path, tmp_path_factory.mktemp("structured"))
    section = {"decoding_type": "NGram", "max_draft_len": 4}
    with engine_of(models["target"], section, served_model_name="tiny") as engine:
        frontend = Frontend(engine._config, engine.info)
        edge = Edge(EngineClient(engine), frontend, EdgeMetrics("tiny"))
        with TestClient(build_http(edge)) as client:
            yield client


@pytest.fixture
def client(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
    )


MESSAGES = [{"role": "user", "content": "a cat"}]


def test_response_format(client):
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Cat, max_tokens=100, seed=1
    )
    (choice,) = parsed.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Cat)
    assert parsed.usage.model_dump()["speculation"]["num_accepted_tokens"] > 0
    schema = {"name": "cat", "schema": Cat.model_json_schema(), "strict": True}
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=100,
        seed=1,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == choice.message.content
    beside = {"type": "json_object", "schema": Cat.model_json_schema()}  # llama-server's form
    same = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=beside, max_tokens=100, seed=1
    )
    assert same.choices[0].message.content == text
    either = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format={"type": "json_object", "schema": None},
        max_tokens=3,
    )
    assert either.choices[0].message.content.startswith("{")
    free = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "text"}, max_tokens=3
    )
    assert free.choices[0].finish_reason


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_regex": r"[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["cat", "mat"]}, "cat|mat"),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"guided_json": {"const": 7}, "guided_whitespace_pattern": " "}, "7"),
        ({"guided_json": '{"enum": [1, 2]}', "guided_decoding_backend": "auto"}, "1|2"),
        ({"structured_outputs": {"regex": "c{2,4}"}}, "c{2,4}"),
        ({"structured_outputs": {"choice": ["cat"], "json": None}}, "cat"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_vllms_names(http, client, body, pattern):
    answer = client.completions.create(
        model="tiny", prompt="the cat", max_tokens=20, n=2, extra_body=body
    )
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason == "stop"


SCHEMA_FIELD = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "strin"}},
                }
            },
            SCHEMA_FIELD,
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "strin"}}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": "a"}}, "response_format.schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a" * 2**17}, "guided_regex"),
        ({"guided_regex": "a{10000}"}, "guided_regex"),
        ({"guided_grammar": "start: start"}, "guided_grammar"),  # only the engine finds it
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_is_refused(http, body, param):
    for path, rest in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        answer = http.post(path, json={**rest, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert error["message"].startswith(param)
        assert len(error["message"]) < 500
