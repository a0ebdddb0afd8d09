"""The page of the official clients' transcripts: its code runs again, against a real engine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
import yaml

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.docs.scripts import transcripts
from outrider.engine.frontend import Frontend
from outrider.tests.helpers.engines import engine_of
from outrider.tests.helpers.pages import ROOT


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(ROOT)
    options = yaml.safe_load(transcripts.SETTINGS)
    model, section = options.pop("model"), options.pop("speculative_config")
    with engine_of(model, section, **options) as engine:
        frontend = Frontend(engine._config, engine.info)
        edge = Edge(EngineClient(engine), frontend, EdgeMetrics("demo"))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(build_http(edge), log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@pytest.mark.slow
def test_what_the_page_shows_is_sent_and_printed(url: str) -> None:
    written = transcripts.shapes(transcripts.PAGE.read_text())
    assert written == transcripts.shapes(transcripts.render(url)), (
        "run: python -m outrider.docs.scripts.transcripts URL"
    )


def chunk(text: str, **more: object) -> str:
    return json.dumps({"id": "chatcmpl-0", "type": "delta", "text": text, **more})


def block(*lines: str) -> str:
    return "\n".join(["```text", *lines, "```", "after"])


def test_shapes_are_of_keys_and_kinds_and_not_of_texts() -> None:
    page = transcripts.shapes(
        block("POST /v1", chunk("a"), "", chunk("b"), "... 3 more", chunk("c"))
    )
    assert page == transcripts.shapes(block("POST /v1", chunk("x"), "", chunk("y")))
    assert [line[:4] for line in page[1:5]] == ["POST", "{id:", "", "{id:"]
    for other in (
        block("POST /v2", chunk("a"), "", chunk("b")),
        block("POST /v1", chunk("a"), "", chunk("b", more=1)),
        block("POST /v1", chunk("a"), "", chunk("b", type="end")),
        block("POST /v1", chunk("a"), "", chunk("b"), chunk("b", stop=None)),
        block("POST /v1", chunk("a"), "", "NotFoundError: 404"),
    ):
        assert transcripts.shapes(other) != page


def test_json_is_broken_where_it_is_too_wide_and_stays_the_same() -> None:
    value = {"a": [{"b": "c" * 60}, {}, [1, None, True]], "d": {"e": "f" * 60}, "g": []}
    lines = list(transcripts._broken(value))
    assert json.loads("\n".join(lines)) == value
    assert lines[1].startswith('  "a": [')
    assert max(map(len, lines)) <= 100
    assert list(transcripts._broken({"a": 1})) == ['{"a": 1}']


def test_ids_and_times_have_placeholders() -> None:
    value = {"id": "chatcmpl-978a6d45650c4285", "created": 17, "completed_at": None, "text": "a-b"}
    wanted = {"id": "chatcmpl-0", "created": 0, "completed_at": None, "text": "a-b"}
    assert transcripts._placed(value) == wanted
