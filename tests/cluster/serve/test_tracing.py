"""Spans of completions: under the caller's trace, in order, with speculation in them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.cluster.serve.args import read_args
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.cluster.serve.telemetry import Tracing
from outrider.engine.frontend import Frontend
from outrider.errors import ConfigError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def send(make_engine: Any, config: Any, limits: Any, exporter: InMemorySpanExporter) -> Any:
    """Sends a completion to an edge with tracing."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = make_engine()
    named = config.model_copy(update={"served_model_name": "another"})
    app = build_http(
        *(
            Edge(EngineClient(engine), frontend, EdgeMetrics("tiny"), tracing=Tracing(provider))
            for frontend in (Frontend(config, limits), Frontend(named, limits))
        )
    )

    def post(headers: dict[str, str], **body: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                given = {"model": "tiny", **body}
                return await client.post("/v1/completions", json=given, headers=headers)

        return asyncio.run(call())

    post.engine = engine  # type: ignore[attr-defined]
    return post


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_its_spans(send: Any, exporter: Any, stream: bool) -> None:
    assert send(HEADERS, prompt="a", max_tokens=9, stream=stream).status_code == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    root = spans["llm_request"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.attributes["gen_ai.usage.output_tokens"] == 9
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["gen_ai.latency.time_in_queue"] == 0.25
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {part.parent.span_id for part in parts} == {root.context.span_id}
    for part, following in pairwise(parts):
        assert part.end_time == following.start_time
    decode = spans["decode"].attributes
    assert decode["outrider.speculation.drafter"] == "fake"
    assert decode["outrider.speculation.num_steps"] == 3
    assert decode["outrider.speculation.mean_accepted_len"] == 2.0


def test_every_completion_of_a_request_is_traced_alone(send: Any, exporter: Any) -> None:
    send({}, prompt=["a", "b"], max_tokens=4)
    send({"traceparent": "nonsense"}, prompt="a", max_tokens=4, model="another")
    roots = [each for each in exporter.get_finished_spans() if each.name == "llm_request"]
    assert len(roots) == 3
    assert all(root.parent is None for root in roots)
    assert len({root.attributes["gen_ai.request.id"] for root in roots}) == 3
    models = [root.attributes["gen_ai.response.model"] for root in roots]
    assert models == ["tiny", "tiny", "another"]


def test_a_failure_is_an_error(send: Any, exporter: Any) -> None:
    send.engine.error = "a bad step"
    assert send(HEADERS, prompt="a", max_tokens=4).status_code == 500
    (root,) = exporter.get_finished_spans()
    assert (root.name, root.status.status_code.name) == ("llm_request", "ERROR")


def test_the_endpoint_is_configured_and_the_library_loaded_only_then(monkeypatch: Any) -> None:
    _, section = read_args({"model": "m", "serve": {"otlp_endpoint": "http://collector:4318"}})
    assert section.otlp_endpoint == "http://collector:4318"
    with pytest.raises(ConfigError, match=r"serve\.otlp_endpoint"):
        read_args({"model": "m", "serve": {"otlp_endpoint": "collector"}})
    code = (
        "import sys, outrider.cluster.serve.openai.routes\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"outrider\[otel\]"):
        Tracing.to("http://collector:4318")
