"""Lines of JSON with request ids, one per completion, without the text of anybody."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from outrider.cluster.serve.access.access import Access
from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.cluster.serve.telemetry import ROOT, JsonFormatter, configure_logging
from outrider.config import EngineConfig
from outrider.config.access import AccessConfig
from outrider.engine.frontend import Frontend
from outrider.errors import ConfigError


@pytest.fixture
def restored() -> Any:
    logger = logging.getLogger(ROOT)
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def post(app: Any, body: dict[str, Any]) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/completions", json=body)

    return asyncio.run(call())


def test_a_completion_is_a_line_of_json(
    make_engine: Any, config: Any, limits: Any, capsys: pytest.CaptureFixture, restored: None
) -> None:
    configure_logging("json")
    app = build_http(
        Edge(EngineClient(make_engine()), Frontend(config, limits), EdgeMetrics("tiny"))
    )
    answer = post(app, {"prompt": "a very secret prompt", "max_tokens": 6})
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record["request_id"] == f"{answer.json()['id']}-0"
    assert (record["level"], record["logger"]) == ("info", "outrider.completions")
    assert (record["num_output_tokens"], record["finish_reason"]) == (6, "length")
    assert record["speculation"]["drafter"] == "fake"
    assert record["speculation"]["num_steps"] == 2
    assert "secret" not in line
    assert answer.headers["x-outrider-speculation"] == (
        'drafter="fake", steps=2, draft-tokens=6, accepted-tokens=4, mean-accepted-len=2.000'
    )


def test_errors_keep_their_traceback_on_one_line() -> None:
    try:
        raise ValueError("line\nbreak")
    except ValueError:
        record = logging.LogRecord("outrider.x", 40, "f", 1, "it %s", ("failed",), None)
        record.exc_info = __import__("sys").exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed"
    assert "ValueError: line" in json.loads(line)["exception"]


def test_prompts_are_logged_as_text_where_nobody_has_set_up_logging(
    make_engine: Any,
    config: Any,
    limits: Any,
    capsys: pytest.CaptureFixture,
    restored: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging("text")
    access = Access(AccessConfig(log_prompts=True))
    edge = Edge(
        EngineClient(make_engine()), Frontend(config, limits), EdgeMetrics("tiny"), access=access
    )
    assert post(build_http(edge), {"prompt": "a prompt", "max_tokens": 2}).status_code == 200
    assert "'a prompt'" in capsys.readouterr().err


def test_text_changes_nothing_and_other_formats_are_refused(restored: None) -> None:
    before = list(logging.getLogger(ROOT).handlers)
    configure_logging("text")
    assert logging.getLogger(ROOT).handlers == before
    with pytest.raises(ConfigError, match="log_format"):
        EngineConfig.load({"model": "m", "log_format": "xml"})
