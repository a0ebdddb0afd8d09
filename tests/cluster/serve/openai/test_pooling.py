"""Embeddings, reranking and scores over HTTP, by engines in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi.testclient import TestClient

from outrider import LLM
from outrider.cluster.serve.edge import FromEngine
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.scheduler.types import Delta
from outrider.tests.helpers import pooling as models

DOCUMENTS = ["the first of them", "another document", "none of that"]
Served = tuple[Any, LLM]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """A client of an edge over a model that `make` writes, and the model."""
    with ExitStack() as stack:

        def start(make: Callable[..., Path], **settings: Any) -> Served:
            folder = make(tmp_path_factory.mktemp("served") / "tiny", **settings)
            options = {"num_kv_blocks": 128, "device": "cpu", "dtype": "float32"}
            llm = stack.enter_context(LLM(str(folder), executor="local", **options))
            edge = Edge(EngineClient(llm.engine), llm.frontend, EdgeMetrics("tiny"))
            http = stack.enter_context(TestClient(build_http(edge)))
            return http, llm

        yield start


@pytest.fixture(scope="module")
def embedder(serve: Callable[..., Served]) -> Served:
    return serve(models.embedding_model, matryoshka_dimensions=[16, 32])


@pytest.fixture(scope="module")
def reranker(serve: Callable[..., Served]) -> Served:
    return serve(models.reranker)


def client_of(http: Any) -> openai.OpenAI:
    """OpenAI's client over the application."""

    def answer(request: httpx.Request) -> httpx.Response:
        found = http.post(request.url.path, content=request.content)
        kind = {"content-type": found.headers["content-type"]}
        return httpx.Response(found.status_code, content=found.content, headers=kind)

    return openai.OpenAI(
        base_url="http://testserver/v1",
        api_key="none",
        http_client=httpx.Client(transport=httpx.MockTransport(answer)),
        max_retries=0,
    )


def test_embeddings_in_all_forms(embedder: Served) -> None:
    http, llm = embedder
    texts = ["one", "two of them"]
    wanted = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    ids = [list(llm.frontend.text_prompt(text).token_ids) for text in texts]
    count = sum(map(len, ids))
    for given, expected in ((texts, wanted), (ids, wanted), (texts[0], wanted[:1]),
                            (ids[1], wanted[1:])):  # fmt: skip
        answer = http.post("/v1/embeddings", json={"model": "tiny", "input": given}).json()
        found = [row["embedding"] for row in answer["data"]]
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert [row["index"] for row in answer["data"]] == list(range(len(expected)))
        assert (answer["object"], answer["model"]) == ("list", "tiny")
    answer = http.post("/v1/embeddings", json={"input": texts, "dimensions": 16, "user": "me"})
    assert (
        answer.json()["usage"]["prompt_tokens"] == answer.json()["usage"]["total_tokens"] == count
    )
    short = np.array([row["embedding"] for row in answer.json()["data"]])
    assert short.shape == (2, 16)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)
    packed = http.post("/v1/embeddings", json={"input": "one", "encoding_format": "base64"}).json()
    assert isinstance(packed["data"][0]["embedding"], str)


def test_openais_client(embedder: Served) -> None:
    """It asks for base64, and gives numbers."""
    http, llm = embedder
    (wanted,) = llm.embed("one", use_tqdm=False)
    found = client_of(http).embeddings.create(model="tiny", input="one")
    np.testing.assert_allclose(found.data[0].embedding, wanted.outputs.embedding, atol=2e-5)
    assert found.usage.total_tokens == found.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [5000]}, "input"),
        ({"input": [7, "x"]}, "input"),
        ({"input": "x" * 20000}, "input"),
        ({"input": "x", "dimensions": 17}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "model": "other"}, "model"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({}, "input"),
    ],
)
def test_bad_embedding_bodies(embedder: Served, body: dict[str, Any], field: str) -> None:
    answer = embedder[0].post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].startswith(field), answer.text


def test_text_is_refused_where_there_is_no_output_layer(embedder: Served) -> None:
    http, _ = embedder
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/rerank", {"query": "q", "documents": ["d"]}),
        ("/v1/score", {"queries": "q", "documents": "d"}),
    ):
        answer = http.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
        assert "it gives embeddings" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_reranking(reranker: Served, path: str) -> None:
    http, llm = reranker
    scores = [each.outputs.score for each in llm.score("q", DOCUMENTS, use_tqdm=False)]
    best = sorted(range(3), key=lambda index: -scores[index])
    body = {"model": "tiny", "query": "q", "documents": DOCUMENTS}
    answer = http.post(path, json=body).json()
    assert [row["index"] for row in answer["results"]] == best
    assert [row["document"]["text"] for row in answer["results"]] == [DOCUMENTS[i] for i in best]
    found = [row["relevance_score"] for row in answer["results"]]
    np.testing.assert_allclose(found, sorted(scores, reverse=True), atol=2e-5)
    assert answer["usage"]["total_tokens"] > 0
    body |= {"documents": [{"text": text} for text in DOCUMENTS], "top_n": 2}
    answer = http.post(path, json=body | {"return_documents": False}).json()
    assert [row["index"] for row in answer["results"]] == best[:2]
    assert "document" not in answer["results"][0]
    (row,) = http.post(path, json=body | {"top_n": 1, "max_tokens_per_doc": 1}).json()["results"]
    assert len(row["document"]["text"]) > 5, "what is returned is not cut"


def test_scores(reranker: Served) -> None:
    http, llm = reranker
    wanted = [each.outputs.score for each in llm.score("q", DOCUMENTS, use_tqdm=False)]
    for body in (
        {"text_1": "q", "text_2": DOCUMENTS},
        {"queries": ["q"] * 3, "documents": DOCUMENTS},
    ):
        answer = http.post("/v1/score", json=body).json()
        found = [row["score"] for row in answer["data"]]
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        assert answer["data"][1]["index"] == 1
    task = http.post("/score", json={"text_1": "q", "text_2": "d", "instruction": "find"}).json()
    plain = http.post("/score", json={"text_1": "q", "text_2": "d"}).json()
    assert task["data"][0]["score"] != plain["data"][0]["score"]
    text = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert text.status_code == 200, "this checkpoint generates as well"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [1]}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["x" * 9000]}, "documents"),
        ("/v1/rerank", {"documents": ["d"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["d"], "top_n": 0}, "top_n"),
        ("/v1/score", {"text_1": "q"}, "text_2"),
        ("/v1/score", {"documents": ["d"]}, "queries"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1"),
        ("/v1/score", {"queries": "q", "text_2": "d"}, "text_2"),
        ("/v1/score", {"queries": "q", "documents": []}, "documents"),
        ("/v1/embeddings", {"input": "x"}, "model"),
    ],
)
def test_bad_pairs(reranker: Served, path: str, body: dict[str, Any], field: str) -> None:
    answer = reranker[0].post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field), answer.text


def test_a_vector_comes_whole_from_an_engine_elsewhere() -> None:
    """Over the socket between an engine and an ingress."""
    vector = np.arange(5, dtype=np.float32) / 7
    delta = Delta("a", (3,), finish_reason="length", pooled=vector)
    (found,) = FromEngine.decoded(FromEngine(0, [delta, Delta("b", (1,))]).encoded()).deltas[:1]
    assert found.pooled.tolist() == vector.tolist()
    assert found.pooled.dtype == np.float32
