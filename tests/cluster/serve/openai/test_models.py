"""Several models behind one endpoint: routing by `model`, listing, and one that is down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.config import EngineConfig, LoraModule
from outrider.engine.frontend import Frontend
from outrider.errors import EngineDeadError


class Failing(EngineClient):
    """Over an engine that can be declared dead."""

    dead = False

    async def check(self) -> None:
        if self.dead:
            raise EngineDeadError("the workers died")
        await super().check()


@dataclass
class Site:
    http: TestClient
    clients: list[Failing]


@pytest.fixture
def site(make_engine: Callable[..., Any], config: EngineConfig, limits: Any) -> Iterator[Site]:
    texts = {"a": "the cat sat on the mat. ", "b": "a dog ran over the hill. "}
    engines = [make_engine(text) for text in texts.values()]
    clients = [Failing(engine) for engine in engines]
    edges = [
        Edge(client, Frontend(config.model_copy(update={"served_model_name": name}), limits),
             EdgeMetrics(name))
        for name, client in zip(texts, clients)
    ]  # fmt: skip
    with TestClient(build_http(*edges)) as http:
        yield Site(http, clients)
    for engine in engines:
        engine.shutdown()


def post(site: Site, path: str = "/v1/completions", **body: Any) -> Any:
    given = {"prompt": "x", "max_tokens": 6, "temperature": 0, **body}
    return site.http.post(path, json=given)


def test_the_model_field_chooses(site):
    texts = [post(site, model=name).json()["choices"][0]["text"] for name in ("a", "b")]
    assert texts[0].startswith("the cat"), texts
    assert texts[1].startswith("a dog"), texts
    assert [each["id"] for each in site.http.get("/v1/models").json()["data"]] == ["a", "b"]
    assert site.http.get("/v1/models/b").json()["id"] == "b"
    engines = site.http.get("/stats").json()["engines"]
    assert [each["model"] for each in engines] == ["a", "b"]
    text = site.http.get("/metrics").text
    for name in ("a", "b"):
        assert f'outrider:generation_tokens_total{{ingress="local",model="{name}"}} 6.0' in text
        assert f'outrider:num_requests_running{{model="{name}",replica="local"}}' in text


@pytest.mark.parametrize(
    ("model", "status", "match"),
    [
        (None, 400, "choose one of 'a', 'b'"),
        ("c", 404, "this server has 'a', 'b'"),
        ("a:tuned", 404, "'a' has no adapter 'tuned'; it has none"),
    ],
)
def test_a_name_that_chooses_none(site, model, status, match):
    body = {} if model is None else {"model": model}
    for path in ("/v1/completions", "/tokenize"):
        answer = site.http.post(path, json={"prompt": "x", **body})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert match in error["message"]
        assert error["param"] == "model"
    if model is not None:
        assert site.http.get(f"/v1/models/{model}").status_code == 404


def test_the_document_requires_the_name(site):
    schemas = site.http.get("/openapi.json").json()["components"]["schemas"]
    body = schemas["CompletionBody"]
    assert body["properties"]["model"] == {"enum": ["a", "b"]}
    assert "model" in body["required"]


def test_a_model_that_is_down_is_not_listed(site):
    site.clients[0].dead = True
    assert [each["id"] for each in site.http.get("/v1/models").json()["data"]] == ["b"]
    health = site.http.get("/health")
    assert (health.status_code, health.json()) == (
        200, {"status": "degraded", "down": {"a": "the workers died"}},
    )  # fmt: skip
    site.clients[1].dead = True
    assert site.http.get("/health").status_code == 503
    assert site.http.get("/v1/models").status_code == 503


@pytest.fixture
def adapted(make_engine: Callable[..., Any], config: EngineConfig, limits: Any) -> Iterator[Site]:
    """One model with two adapters."""
    modules = (LoraModule(name="sql", path="/x"),
               LoraModule(name="chat", path="/y", base_model_name="llama"))  # fmt: skip
    engine = make_engine("the cat sat on the mat. ")
    clients = [Failing(engine)]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    options = {"lora_modules": modules, "chat_template": template}
    frontend = Frontend(config.model_copy(update=options), limits)
    with TestClient(build_http(Edge(clients[0], frontend, EdgeMetrics("tiny")))) as http:
        yield Site(http, clients)


def test_the_model_field_chooses_an_adapter(adapted):
    engine = adapted.clients[0]._engine
    messages = [{"role": "user", "content": "a"}]
    for model, name in ((None, ""), ("tiny", ""), ("sql", "sql"), ("tiny:chat", "chat")):
        body = {} if model is None else {"model": model}
        asked = {"max_tokens": 6, **body}
        for path, given in (
            ("completions", {"prompt": "x", **asked}),
            ("chat/completions", {"messages": messages, **asked}),
            ("messages", {"messages": messages, **asked}),
            ("responses", {"input": "x", **body}),
        ):
            answer = adapted.http.post(f"/v1/{path}", json=given)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == (name or "tiny")
            assert engine.submitted[-1].adapter == name
    assert post(adapted, model="tiny:other").status_code == 404
    assert post(adapted, model="other").status_code == 404
    assert adapted.http.post("/tokenize", json={"model": "sql", "prompt": "a"}).status_code == 200
    text = adapted.http.get("/metrics").text
    assert 'model="tiny"' in text
    assert 'model="sql"' not in text


def test_adapters_are_listed_with_their_model(adapted):
    cards = adapted.http.get("/v1/models").json()["data"]
    found = [(each["id"], each["root"], each["parent"]) for each in cards]
    assert found[1:] == [("sql", "/x", "tiny"), ("chat", "/y", "llama")]
    assert (cards[0]["id"], cards[0]["parent"]) == ("tiny", None)
    assert adapted.http.get("/v1/models/chat").json()["root"] == "/y"
    schemas = adapted.http.get("/openapi.json").json()["components"]["schemas"]
    model = schemas["CompletionBody"]["properties"]["model"]
    assert model == {"anyOf": [{"enum": ["tiny", "sql", "chat"]}, {"type": "null"}]}
    adapted.clients[0].dead = True
    assert adapted.http.get("/v1/models").status_code == 503
