"""What a client gets when the engine fails, and what the engine gets when a client hangs up."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from outrider.cluster.serve.openai.engine_client import EngineClient
from outrider.cluster.serve.openai.errors import error_body
from outrider.errors import InvalidRequestError, OverloadedError, WorkerError

from ....helpers.ports import completion, connect, wait_for
from .conftest import COMPLETION, Server


def test_a_dead_engine_is_not_announced(server: Server) -> None:
    assert server.http.get("/health").status_code == 200
    server.engine.dead = True
    for path in ("/health", "/v1/models", "/v1/models/tiny"):
        assert server.http.get(path).status_code == 503
    for stream in (False, True):
        answer = server.post("/v1/completions", **COMPLETION, stream=stream)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3"
        assert "engine is down" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_overload(server: Server, stream: bool) -> None:
    server.engine.refuse = OverloadedError("the queue is full")
    answer = server.post("/v1/completions", **COMPLETION, stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    with pytest.raises(openai.RateLimitError):
        server.openai.completions.create(model="tiny", prompt="a")
    assert _ends(server) == {"error"}
    assert server.post("/v1/completions", **COMPLETION, n=3).status_code == 429


def test_a_failed_step(server: Server) -> None:
    server.engine.error = "a worker raised"
    with pytest.raises(openai.InternalServerError, match="a worker raised"):
        server.openai.completions.create(model="tiny", prompt="a", n=2)


def test_an_error_in_mid_stream_is_an_event(server: Server) -> None:
    server.engine.free_steps = 1
    body = {**COMPLETION, "stream": True, "max_tokens": 200}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.engine.error = "a worker raised"
        server.engine.gate.set()
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == "a worker raised"


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_is_given_up_while_it_is_queued(fails: bool) -> None:
    """It is aborted where it was queued, and a refusal that nobody awaits is not logged."""
    begun, gate, unawaited = threading.Event(), threading.Event(), list[Any]()
    aborted = list[str]()

    def submit(request: Any, sink: Any) -> None:
        begun.set()
        gate.wait(10)
        if fails:
            raise InvalidRequestError("no")

    async def give_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, seen: unawaited.append(seen))
        client: Any = EngineClient(SimpleNamespace(submit=submit, abort=aborted.append))  # type: ignore[arg-type]
        request = SimpleNamespace(id="a", resume_key=None)
        asking = asyncio.create_task(anext(client.generate(request)))
        await asyncio.to_thread(begun.wait, 10)
        asking.cancel()
        await asyncio.wait([asking])
        gate.set()
        client._threads.shutdown()  # the submission has ended
        await asyncio.sleep(0.05)
        gc.collect()

    asyncio.run(give_up())
    assert (aborted, unawaited) == ([] if fails else ["a"], [])


@pytest.mark.parametrize("n", [1, 3])
def test_a_hang_up_aborts_a_stream(server: Server, n: int) -> None:
    server.engine.free_steps = 1
    body = {**COMPLETION, "stream": True, "max_tokens": 200, "n": n}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # dropping this iterator would already hang up
        next(lines)
        wait_for(lambda: server.engine.stats()["running"] == n)
    server.wait_idle()
    assert len(set(server.engine.aborted)) == n
    assert _ends(server) == {"abort"}


def _ends(server: Server) -> set[str]:
    """How completions have ended, by the metric."""
    text = server.http.get("/metrics").text
    return set(re.findall(r'request_success_total{.*finished_reason="(\w+)"', text))


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_before_the_first_token_aborts(server: Server, stream: bool) -> None:
    server.engine.gate.clear()
    with connect(int(server.url.rpartition(":")[2])) as client:
        client.sendall(completion({**COMPLETION, "max_tokens": 200, "stream": stream}))
        wait_for(lambda: bool(server.engine.submitted))
    wait_for(lambda: bool(server.engine.aborted))
    assert server.engine.aborted == [server.engine.submitted[0].id]
    server.engine.gate.set()
    server.wait_idle()


def test_a_request_out_of_time(start: Callable[..., Server]) -> None:
    server = start(request_timeout_s=0.2)
    server.engine.gate.clear()
    answer = server.post("/v1/completions", **COMPLETION)
    assert answer.status_code == 504
    server.engine.gate.set()
    server.wait_idle()


def test_a_workers_traceback_stays_in_the_log():
    error = WorkerError("rank 1 raised:\nTraceback (most recent call last):\n  f()\nValueError: b")
    assert error_body(error)["error"]["message"] == "ValueError: b"
    assert error_body(InvalidRequestError("two\nlines"))["error"]["message"] == "two\nlines"
