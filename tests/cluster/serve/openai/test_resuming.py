"""Resumable streams over a fake engine: broken at every event, continued, compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from outrider.cluster.serve.access.access import Access
from outrider.cluster.serve.openai.resuming import ResumePolicy
from outrider.cluster.serve.resume_tokens import TokenStore
from outrider.config.access import AccessConfig, hash_of

from .conftest import Server

TEXT = "naïve 日本語 the cat <tool_call> sat 👩‍👩‍👧 on the mat. "
ANY = ResumePolicy(enabled=True)
PROMPT = {"prompt": ["a", "the cat"], "max_tokens": 23}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 23}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("completions", {"prompt": "a", "max_tokens": 40}),
    "several": ("completions", {**PROMPT, "n": 2, "logprobs": 2, "echo": True}),
    "stop": ("completions", {**PROMPT, "stop": ["sat"], "return_token_ids": True}),
    "chat": ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "chat-stop": ("chat/completions", {**CHAT, "n": 2, "stop": ["on"]}),
}


def events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Every event before `[DONE]`: its id and what it carries."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if lines:
            found.append((lines["id"], lines["data"]))
    assert found.pop()[1] == "[DONE]"
    return [(name, json.loads(data)) for name, data in found]


def joined(stream: list[tuple[str, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """What the events of a stream amount to, by completion."""
    texts: dict[int, dict[str, Any]] = {}
    for _, event in stream:
        for choice in event["choices"]:
            mine = texts.setdefault(choice["index"], {"text": "", "roles": 0, "ends": []})
            delta = choice.get("delta", {})
            mine["text"] += choice.get("text", "") + (delta.get("content") or "")
            mine["roles"] += "role" in delta
            if choice["finish_reason"]:
                mine["ends"].append((choice["finish_reason"], choice["stop_reason"]))
            mine.setdefault("ids", []).extend(choice.get("token_ids", []))
            for name, values in (choice["logprobs"] or {}).items():
                if values is not None:
                    mine.setdefault(name, []).extend(values)
    return texts


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("lost", [False, True])
def test_broken_at_every_event(start: Callable[..., Server], kind: str, lost: bool) -> None:
    store = TokenStore(30.0)
    server = start(TEXT, resuming=ANY, store=store)
    path, body = BODIES[kind]
    body = {**body, "stream": True, "resumable": True, "stream_options": {"include_usage": True}}
    whole = events(server.post(f"/v1/{path}", **body))
    expected, usage = joined(whole), whole[-1][1]["usage"]
    plain = {**body, "resumable": False}
    assert "\nid: " not in server.post(f"/v1/{path}", **plain).text
    for cut in range(len(whole)):
        stream = events(server.post(f"/v1/{path}", **body))
        read = stream[: cut + 1]
        if lost:
            store.take(read[0][1]["id"], "")
        rest = server.http.post(f"/v1/{path}", json=body, headers={"Last-Event-ID": read[-1][0]})
        goes_on = events(rest)
        assert joined([*read, *goes_on]) == expected, cut
        assert {event["id"] for _, event in goes_on} == {read[0][1]["id"]}
        counted = goes_on[-1][1]["usage"]
        assert counted["completion_tokens"] == usage["completion_tokens"]
    server.wait_idle()


def test_only_the_end_was_lost(start: Callable[..., Server]) -> None:
    """No event is left, and the client does not know."""
    server = start(TEXT, resuming=ANY, store=TokenStore(30.0))
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "resumable": True}
    last_id, _ = events(server.post("/v1/completions", **body))[-1]
    rest = server.http.post("/v1/completions", json=body, headers={"Last-Event-ID": last_id})
    assert events(rest) == []


def test_a_broken_connection_frees_the_engine_and_keeps_the_tokens(
    start: Callable[..., Server],
) -> None:
    server = start(TEXT, resuming=ANY, store=TokenStore(30.0))
    body = {"prompt": "a", "max_tokens": 200, "stream": True, "resumable": True, "seed": 7}
    whole = joined(events(server.post("/v1/completions", **body)))
    server.engine.free_steps = 20
    read: list[tuple[str, dict[str, Any]]] = []
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        block: dict[str, str] = {}
        for line in answer.iter_lines():
            block.update([line.split(": ", 1)] if line else [])
            if not line:
                read.append((block["id"], json.loads(block["data"])))
            if len(read) == 5:
                break
    server.wait_idle()
    assert server.engine.aborted
    server.engine.gate.set()
    num_steps = len(server.engine.submitted)
    name, _, count = read[-1][0].partition(":")
    resume = {"request_id": name, "num_tokens": int(count)}
    rest = events(server.post("/v1/completions", **body, resume=resume))
    assert joined([*read, *rest]) == whole
    (again,) = server.engine.submitted[num_steps:]
    assert len(again.emitted) >= int(count)  # the kept tokens were not generated again


def test_only_its_key_resumes_a_stream(start: Callable[..., Server]) -> None:
    keys = [{"hash": hash_of(key), "tenant": "one"} for key in ("first", "second")]
    access = Access(AccessConfig.model_validate({"keys": keys}))
    store = TokenStore(30.0)
    server = start(TEXT, resuming=ANY, access=access, store=store)
    body = {"prompt": "a", "max_tokens": 9, "stream": True, "resumable": True}

    def post(key: str, last: str | None = None, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} | ({"Last-Event-ID": last} if last else {})
        return server.http.post("/v1/completions", json={**body, **fields}, headers=headers)

    whole = events(post("first"))
    last = whole[1][0]
    refused = post("second", last)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "resume")
    assert store.stats()["num_requests"] == 1
    other = post("first", last, prompt="b")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "resume")
    assert joined([*whole[:2], *events(post("first", last, timeout=9.0))]) == joined(whole)


def test_refusals(start: Callable[..., Server]) -> None:
    body: dict[str, Any] = {"prompt": "a", "stream": True, "resumable": True}

    def refused(server: Server, headers: dict[str, str] | None = None, **fields: Any) -> str:
        sent = {**body, **fields}
        answer = server.http.post("/v1/completions", json=sent, headers=headers or {})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["param"])

    server = start(resuming=ANY, store=TokenStore(30.0))
    assert refused(start()) == "resumable"
    assert refused(server, stream=False) == "resumable"
    assert refused(server, request_id="mine") == "request_id"
    assert refused(server, speculation={"trace": True}) == "speculation.trace"
    assert refused(server, n=17) == "resumable"
    here = {"request_id": "cmpl-1", "num_tokens": 3}
    assert refused(server, resumable=False, resume=here) == "resumable"
    assert refused(server, resume=here) == "resume"
    assert refused(server, resume={"request_id": "x", "num_tokens": -1}).startswith("resume.num")
    assert refused(server, {"Last-Event-ID": "x:1;2"}) == "Last-Event-ID"
    stream = events(server.post("/v1/completions", **body))
    several = {"request_id": stream[0][1]["id"], "num_tokens": [1, 2]}
    assert refused(server, resume=several) == "resume"


def test_what_cannot_be_repeated_is_gone(start: Callable[..., Server]) -> None:
    store = TokenStore(30.0)
    policy = ResumePolicy(enabled=True, coupled=False)
    server = start(resuming=policy, store=store)
    body = {"prompt": "a", "max_tokens": 20, "stream": True, "resumable": True}
    for temperature, status in ((1.0, 410), (0.0, 200)):
        stream = events(server.post("/v1/completions", **body, temperature=temperature))
        store.take(stream[0][1]["id"], "")
        headers = {"Last-Event-ID": stream[1][0]}
        sent = {**body, "temperature": temperature}
        answer = server.http.post("/v1/completions", json=sent, headers=headers)
        assert answer.status_code == status
