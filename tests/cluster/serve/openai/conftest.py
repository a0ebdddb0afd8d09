"""A real HTTP edge over a fake engine, on a socket of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi.testclient import TestClient

from outrider.cluster.serve.metrics import EdgeMetrics
from outrider.cluster.serve.openai.calls import Edge
from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.routes import build_http
from outrider.config import EngineConfig
from outrider.engine.frontend import Frontend

TEXT = "the cat sat on the mat. "
# Renders everything that a template may be given.
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}{{ t.function.parameters | tojson }}"
    "{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}{{ m.tool_call_id or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
COMPLETION = {"model": "tiny", "prompt": "a"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


@dataclass
class Server:
    """A running edge over a fake engine."""

    engine: Any
    url: str
    http: httpx.Client

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.engine.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.engine.stats()["running"] == 0


@pytest.fixture
def start(
    make_engine: Callable[..., Any], config: EngineConfig, limits: Any, end_server: Any
) -> Iterator[Callable[..., Server]]:
    servers = []

    def start(text: str = TEXT, *, eos: bool = False, **options: Any) -> Server:
        engine = make_engine(text, eos=eos)
        served = EngineConfig.load(
            {**config.model_dump(exclude_unset=True), **options.pop("config", {})}
        )
        client = EngineClient(engine, options.pop("store", None))
        edge = Edge(client, Frontend(served, limits), EdgeMetrics("tiny"), **options)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(build_http(edge), log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        servers.append((server, thread, engine))
        # without TLS, whose certificates take longer to read than a test
        return Server(engine, url, httpx.Client(base_url=url, timeout=30, verify=False))

    yield start
    for server, thread, engine in servers:
        engine.shutdown()
        end_server(server, thread)


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def connect(
    tokenizer_path: Path, make_engine: Callable[..., Any], limits: Any
) -> Iterator[Callable[..., tuple[openai.OpenAI, Any]]]:
    """A client of an edge whose engine writes a text, and that engine."""
    with ExitStack() as stack:

        def connect(text: str, **options: Any) -> tuple[openai.OpenAI, Any]:
            config = EngineConfig.load(
                {
                    "model": str(tokenizer_path),
                    "served_model_name": "tiny",
                    "executor": "local",
                    "chat_template": TEMPLATE,
                    **options,
                }
            )
            engine = make_engine(text, eos=True)
            limits.max_model_len = 2048
            edge = Edge(EngineClient(engine), Frontend(config, limits), EdgeMetrics("tiny"))
            http = stack.enter_context(TestClient(build_http(edge)))
            client = openai.OpenAI(
                base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
            )
            return client, engine

        yield connect
        limits.max_model_len = 256
