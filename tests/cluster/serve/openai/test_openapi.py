"""The OpenAPI document is valid, complete, and true of what Schemathesis sends and gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import hypothesis
import pytest
import schemathesis
from starlette.applications import Starlette
from starlette.testclient import TestClient

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.openapi import COMMANDS, GETS, POSTS, document
from outrider.cluster.serve.openai.routes import build_http
from outrider.engine.frontend import Frontend

from ....helpers.frontend import FakeEngine


@pytest.fixture(scope="module")
def app(config: Any, limits: Any, tokenizer: Any) -> Iterator[Starlette]:
    engine = FakeEngine(limits, tokenizer.encode("the cat sat. "), 8)
    yield build_http(Edge(EngineClient(engine), Frontend(config, limits), EdgeMetrics("tiny")))
    engine.shutdown()


@pytest.fixture(scope="module")
def api(app: Starlette) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_route_is_described(app: Starlette, api: Any) -> None:
    described = {
        (path, method.upper())
        for path, methods in api.raw_schema["paths"].items()
        for method in methods
    }
    served = {
        (each.path.replace(":path", ""), method)
        for each in app.routes
        for method in each.methods - {"HEAD"}
        if each.path != "/" and not each.path.startswith("/page/")
    }
    assert described == served
    api.validate()


def test_the_page_shows_every_route_and_needs_nothing_from_elsewhere(app: Starlette) -> None:
    with TestClient(app) as http:
        answer = http.get("/docs")
        described = http.get("/openapi.json").json()
        names = re.findall(r'(?:href|src)="([^"#]+)"', answer.text)
        assert [http.get(f"/{name}").status_code for name in names] == [200] * len(names)
    assert answer.headers["content-type"].startswith("text/html")
    assert "<script" not in answer.text
    closed = re.sub(r"<(meta|link)([^>]*)>", r"<\1\2/>", answer.text.partition("\n")[2])
    parsed = ElementTree.fromstring(closed)
    titles = [each.text for each in parsed.iter("code")]
    anchors = {each.get("id") for each in parsed.iter("section")}
    for path, methods in described["paths"].items():
        assert all(f"{method.upper()} {path}" in titles for method in methods), path
    links = {each.get("href") for each in parsed.iter("a")}
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    for field in described["components"]["schemas"]["CompletionBody"]["properties"]:
        assert field in titles, field


def test_documents_of_several_servers_have_nothing_of_each_other() -> None:
    one, other = document(["one"], 10), document(["two", "three"], 20, ["adapter"])
    assert document(["one"], 10) == one
    models = [each["components"]["schemas"]["ChatBody"] for each in (one, other)]
    assert models[0]["properties"]["model"]["anyOf"][0] == {"const": "one"}
    assert models[1]["properties"]["model"] == {"enum": ["two", "three", "adapter"]}
    assert "model" not in models[0]["required"]
    assert "model" in models[1]["required"]


# A body may match the schema and still be refused: prompts with `max_tokens` beyond the context,
# grammars that do not compile, fields that exclude each other. JSON Schema cannot state these.
UNSTATED = [schemathesis.checks.positive_data_acceptance]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
def test_streams_are_as_the_document_says(api: Any, path: str, body: dict[str, Any]) -> None:
    case = api[path]["post"].Case(body={**body, "stream": True}, media_type="application/json")
    case.call_and_validate(excluded_checks=UNSTATED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path"),
    [
        (method, path)
        for method, paths in (("post", [*POSTS, *COMMANDS]), ("get", GETS))
        for path in paths
    ],
)
def test_schemathesis_finds_nothing(api: Any, method: str, path: str) -> None:
    """Valid and invalid requests, derived from the document, against every check but one."""
    operation = api[path][method]
    modes = list(schemathesis.GenerationMode)

    @hypothesis.given(
        case=hypothesis.strategies.one_of(
            *(operation.as_strategy(generation_mode=mode) for mode in modes)
        )
    )
    @hypothesis.settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(case: Any) -> None:
        given = case.body.get("timeout") if isinstance(case.body, dict) else None
        if isinstance(given, float) and 0 < given < 60:  # less than it takes is answered with 504
            case.body["timeout"] = 60.0
        case.call_and_validate(excluded_checks=UNSTATED)

    run()
