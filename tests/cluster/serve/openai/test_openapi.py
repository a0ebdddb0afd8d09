"""The OpenAPI document is valid, complete, and true of what Schemathesis sends and gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from starlette.applications import Starlette

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.engine_client import LocalClient
from outrider.cluster.serve.openai.openapi import GETS, POSTS
from outrider.cluster.serve.openai.routes import Edge, build_http
from outrider.engine.frontend import Frontend

from ....helpers.frontend import FakeEngine


@pytest.fixture(scope="module")
def app(config: Any, limits: Any, tokenizer: Any) -> Iterator[Starlette]:
    engine = FakeEngine(limits, tokenizer.encode("the cat sat. "), 8)
    yield build_http(Edge(LocalClient(engine), Frontend(config, limits), EdgeMetrics("tiny")))
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


# A body may match the schema and still be refused: prompts with `max_tokens` beyond the context,
# grammars that do not compile, fields that exclude each other. JSON Schema cannot state these.
UNSTATED = [schemathesis.checks.positive_data_acceptance]


@pytest.mark.slow
@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_schemathesis_finds_nothing(api: Any, path: str) -> None:
    """Valid and invalid requests, derived from the document, against every check but one."""
    operation = api[path]["post" if path in POSTS else "get"]
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
