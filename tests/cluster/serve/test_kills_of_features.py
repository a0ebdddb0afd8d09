"""Kills while requests of every kind run: grammars, tools, several completions, scored prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.client import ResumingTransport, stream_events

from ...helpers.ports import free_port, wait_for
from ...helpers.serving.kills import kill_all

DEMO = Path(__file__).parents[3] / "demo" / "models"
ARGS: dict[str, Any] = {
    "model": str(DEMO / "target"),
    "served_model_name": "demo",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "kv_cpu_bytes": 2**27,
    "max_restarts": 1000,
    "tool_call_parser": "hermes",
    "resources": {"spare_workers": False},
    "serve": {"graceful_shutdown_timeout_s": 240.0, "port": None},
    "speculative_config": {
        "decoding_type": "DraftTarget",
        "speculative_model": str(DEMO / "draft"),
        "max_draft_len": 3,
    },
}
PREFIX = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n" * 6
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 300, "maxLength": 300}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
STREAM: dict[str, Any] = {"stream": True, "resumable": True}
# Of one path each; a stream's events and a whole answer are compared alike.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("completions", {"prompt": "def main(", "max_tokens": 300, "ignore_eos": True}),
    "grammar": (
        "completions",
        {"prompt": "def main(", "max_tokens": 300, "guided_regex": "([a-z]{3} [0-9]){60}"},
    ),
    "several": (
        "completions",
        {"prompt": "import os\n", "n": 4, "seed": 3, "max_tokens": 300, "ignore_eos": True},
    ),
    "shared": ("completions", {"prompt": PREFIX, "max_tokens": 250, "ignore_eos": True}),
    "shared too": (
        "completions",
        {"prompt": PREFIX + "#", "max_tokens": 250, "ignore_eos": True, "logprobs": 1},
    ),
    "tools": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "Note something."}],
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 800,
        },
    ),
}
NUM_COMPLETIONS = sum(body.get("n", 1) for _, body in REQUESTS.values())
SCORED: dict[str, Any] = {
    "prompt": PREFIX * 2, "prompt_logprobs": 1, "max_tokens": 200, "ignore_eos": True
}  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    import ray
    from ray import serve

    from outrider.cluster.app import build_app

    port = free_port()
    ray.init("local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        serve.run(build_app({**ARGS, "serve": {**ARGS["serve"], "port": port}}), name="test")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.shutdown()
        ray.shutdown()


def read(url: str, path: str, body: dict[str, Any], begun: threading.Event) -> dict[str, Any]:
    """What a stream's events add up to: texts, calls and log-probabilities of every choice."""
    found: dict[str, Any] = {"ends": 0}
    with httpx.Client(transport=ResumingTransport(resume_for_s=300.0), timeout=300) as http:
        for count, event in enumerate(stream_events(http, f"{url}/{path}", {**body, **STREAM})):
            assert "error" not in event, event
            for choice in event["choices"]:
                name, delta = str(choice["index"]), choice.get("delta", {})
                text = choice.get("text") or delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    text += call["function"].get("name") or ""
                    text += call["function"].get("arguments") or ""
                found[name] = found.get(name, "") + text
                logprobs = choice.get("logprobs") or {}
                found["scores"] = [*found.get("scores", []), *logprobs.get("token_logprobs", [])]
                found["ends"] += choice["finish_reason"] is not None
            if count == 4:
                begun.set()
    return found


def score(url: str) -> dict[str, Any]:
    """An answer that is not streamed: it survives what is behind its ingress."""
    answer = httpx.post(f"{url}/completions", json={**SCORED, "temperature": 0}, timeout=300)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {"text": choice["text"], "prompt": choice["prompt_logprobs"]}


def num_running(url: str) -> int:
    stats = httpx.get(f"{url.removesuffix('/v1')}/stats", timeout=60).json()
    return int(stats["running"])


def run(url: str, disturb: Callable[[], None], *, scored: bool) -> dict[str, Any]:
    """Answers of all requests at once; `disturb` is called while every one is in progress."""
    begun = [threading.Event() for _ in REQUESTS]
    with ThreadPoolExecutor(len(REQUESTS) + 1) as threads:
        streams = {
            name: threads.submit(read, url, path, {"temperature": 0, **body}, event)
            for (name, (path, body)), event in zip(REQUESTS.items(), begun, strict=True)
        }
        answer = threads.submit(score, url) if scored else None
        for event in begun:
            assert event.wait(200)
        wait_for(lambda: num_running(url) == NUM_COMPLETIONS + scored, 30.0)
        disturb()
        found = {name: stream.result() for name, stream in streams.items()}
        return {**found, "scored": answer.result()} if answer is not None else found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, one in found.items():
        wanted = dict(expected[name])
        assert one.pop("scores", []) == pytest.approx(wanted.pop("scores", []), abs=1e-4), name
        if name == "scored":
            one, wanted = {"text": one["text"]}, {"text": wanted["text"]}
        assert one == wanted, name


@pytest.fixture(scope="module")
def expected(url: str) -> dict[str, Any]:
    """What is answered where nothing is killed."""
    return run(url, lambda: None, scored=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_loses_or_repeats_a_token(url: str, expected: dict[str, Any]) -> None:
    assert expected["several"]["ends"] == 4
    assert len(json.loads(expected["tools"]["0"].removeprefix("note"))["text"]) == 300

    behind: dict[str, tuple[str, ...]] = {
        "ranks and drafters": ("ray::Rank",),
        "engine": ("test:Engine",),
        "engine and ranks": ("test:Engine", "ray::Rank"),
    }
    before = {
        "ingress and ranks": ("test:Ingress", "ray::Rank"),
        "ingress and engine": ("test:Ingress", "test:Engine"),
    }
    for scored, cases in ((True, behind), (False, before)):
        for name, processes in cases.items():

            def disturb(names: tuple[str, ...] = processes) -> None:
                for each in names:
                    kill_all(each)

            found = run(url, disturb, scored=scored)
            try:
                check(found, expected)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_may_die_during_a_graceful_shutdown(url: str, expected: dict[str, Any]) -> None:
    """The last test: nothing is served behind it."""
    from ray import serve

    def end() -> None:
        serve.delete("test", _blocking=False)
        kill_all("ray::Rank")

    check(run(url, end, scored=True), expected)
