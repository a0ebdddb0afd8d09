"""Keys, tenants, limits, deadlines and CORS, over a real socket."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cluster.serve.access.access import Access, route_below
from outrider.config.access import AccessConfig, hash_of

from .conftest import ADMIN, ALICE, BOB, access_config, bearer

Start = Callable[..., Any]


def error_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert error["type"]
    return answer.status_code, error["code"], error["param"]


def test_without_keys_everything_is_open_and_the_request_names_its_tenant(start: Start) -> None:
    server = start()
    for path in ("/health", "/stats", "/metrics", "/v1/models"):
        assert server.get(path).status_code == 200
    assert server.complete(cache_salt="mine", priority=-3).status_code == 200
    assert (server.engine.submitted[0].tenant, server.engine.submitted[0].priority) == ("mine", -3)


def test_keys(start: Start) -> None:
    server = start(access_config())
    assert server.get("/health").status_code == 200
    for key in (None, "wrong", ALICE[:-1], ALICE + "x"):
        for answer in (server.complete(key), server.get("/v1/models", key)):
            assert error_of(answer) == (401, "invalid_api_key", None)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    basic = {"Authorization": f"Basic {ALICE}"}
    assert error_of(server.complete(headers=basic))[0] == 401
    assert server.get(f"/v1/models?api_key={ALICE}").status_code == 401
    assert not server.engine.submitted
    for key in (ALICE, BOB, ADMIN):
        assert server.complete(key).status_code == 200
        assert server.get("/v1/models", key).status_code == 200
    assert [request.tenant for request in server.engine.submitted] == ["alice", "bob", ""]
    for path in ("/", "/page/app.js", "/docs", "/openapi.json", "/ping", "/version"):
        assert server.get(path).status_code == 200
    assert server.http.post("/ping").status_code == 200
    for key, status in ((None, 401), (ALICE, 403), (ADMIN, 200)):
        assert server.http.post("/reset_prefix_cache", headers=bearer(key)).status_code == status
    for path in ("/stats", "/metrics", "/load", "/what/may/come"):
        assert error_of(server.get(path, ALICE)) == (403, "permission_denied", None)
        assert server.get(path).status_code == 401
        assert server.get(path, ADMIN).status_code == (404 if "may" in path else 200)


def test_the_only_key_monitors_where_nobody_administers(start: Start) -> None:
    (first, second), admins = access_config().keys, access_config().admin_keys
    server = start(AccessConfig(keys=[first]))
    for path in ("/stats", "/metrics", "/load"):
        assert server.get(path, ALICE).status_code == 200
        assert server.get(path).status_code == 401
    assert server.get("/what/may/come", ALICE).status_code == 403
    assert server.http.post("/reset_prefix_cache", headers=bearer(ALICE)).status_code == 403
    for config in (
        AccessConfig(keys=[first, second]),
        AccessConfig(keys=[first], admin_keys=admins),
    ):
        server.access.reconfigure(config)
        assert server.get("/metrics", ALICE).status_code == 403


def test_the_key_decides_tenant_and_priority(start: Start) -> None:
    server = start(access_config(min_priority=-2))
    for field, value, key in (
        ("cache_salt", "bob", ALICE),
        ("priority", -3, ALICE),
        ("priority", -1, BOB),
    ):
        answer = server.complete(key, **{field: value})
        assert error_of(answer) == (403, "permission_denied", field)
    assert server.complete(ALICE, tenant="bob").status_code == 400  # no field at all
    assert server.complete(ALICE, priority=-2).status_code == 200
    # Also where the body is read in a thread.
    assert server.complete(ALICE, stop=["x" * 3000]).status_code == 200
    assert {request.tenant for request in server.engine.submitted} == {"alice"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rates(start: Start) -> None:
    clock = Clock()
    access = Access(access_config(requests_per_minute=2, tokens_per_minute=40), clock=clock)
    server = start(access)
    body = {"prompt": [65] * 10, "max_tokens": 20, "stop_token_ids": list(range(300))}
    assert server.complete(ALICE, **body).status_code == 200  # ends at once: 11 tokens are used
    assert server.complete(ALICE, prompt=[65], max_tokens=28).status_code == 200
    answer = server.complete(ALICE)
    assert error_of(answer) == (429, "rate_limit_exceeded", None)
    assert answer.headers["Retry-After"] == "30"
    assert "requests_per_minute" in answer.text
    assert server.complete(BOB).status_code == 200
    clock.now = 30.0  # one request, and 20 tokens
    answer = server.complete(ALICE, prompt=[65] * 10, max_tokens=20)
    assert error_of(answer) == (429, "rate_limit_exceeded", None)
    assert answer.headers["Retry-After"] == "15"
    assert "tokens_per_minute" in answer.text
    answer = server.complete(ALICE, prompt=[65] * 10, max_tokens=50)
    assert answer.status_code == 429  # of requests: the refused one counts
    clock.now = 120.0
    answer = server.complete(ALICE, prompt=[65] * 10, max_tokens=50)
    assert error_of(answer) == (400, None, "max_tokens")


def test_sizes(start: Start) -> None:
    server = start(access_config(max_request_tokens=30, max_body_bytes=2000))
    assert error_of(server.complete(ALICE, max_tokens=29)) == (400, None, "max_tokens")
    assert error_of(server.complete(ALICE, stop="x" * 2000))[0] == 413
    assert server.complete(BOB, stop="x" * 2000).status_code == 200
    messages = [{"role": "user", "content": "cat"}]
    answer = server.http.post(
        "/v1/chat/completions", json={"messages": messages}, headers=bearer(ALICE)
    )
    assert answer.json()["usage"]["total_tokens"] == 30  # what is left open is what is allowed


def test_requests_at_once_and_a_stream_that_is_dropped(start: Start) -> None:
    server = start(access_config(max_concurrent_requests=1))
    body = {"prompt": "a", "max_tokens": 200, "stream": True}
    server.engine.pause_s = 0.2
    with server.http.stream("POST", "/v1/completions", json=body, headers=bearer(ALICE)) as first:
        parts = first.iter_bytes()  # kept: it closes the stream when it is gone
        next(parts)
        answer = server.complete(ALICE)
        assert error_of(answer) == (429, "rate_limit_exceeded", None)
        assert answer.headers["Retry-After"] == "1"
        assert server.get("/v1/models", ALICE).status_code == 200
    server.engine.pause_s = 0.0
    server.wait_idle()
    assert server.complete(ALICE).status_code == 200


def test_reconfigured_while_a_stream_runs(start: Start, tmp_path: Path) -> None:
    clock = Clock()
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [{"hash": hash_of("carol"), "tenant": "carol"}]}))
    config = AccessConfig(keys_file=str(file))
    server = start(Access(config, clock=clock))
    assert server.complete("carol").status_code == 200
    body = {"prompt": "a", "max_tokens": 200, "stream": True}
    server.engine.pause_s = 0.01
    with server.http.stream("POST", "/v1/completions", json=body, headers=bearer("carol")) as first:
        lines = first.iter_lines()
        next(lines)
        file.write_text("keys: []\nadmin_keys: [nothing]")
        clock.now = 2.0
        assert server.complete("carol").status_code == 200  # a wrong file changes nothing
        file.write_text(json.dumps({"keys": [{"hash": hash_of("dave")}]}))
        clock.now = 4.0
        assert server.complete("carol").status_code == 401
        server.access.reconfigure(access_config())
        assert server.complete("dave").status_code == 401
        assert server.complete(ALICE).status_code == 200
        assert list(lines)[-2] == "data: [DONE]"
    assert server.engine.submitted[0].tenant == "carol"


def test_limits_are_kept_when_they_are_changed(start: Start) -> None:
    clock = Clock()
    server = start(Access(access_config(requests_per_minute=2), clock=clock))
    assert [server.complete(ALICE).status_code for _ in range(3)] == [200, 200, 429]
    server.access.reconfigure(access_config(requests_per_minute=4))
    assert [server.complete(ALICE).status_code for _ in range(3)] == [200, 200, 429]


def test_timeout_of_a_request(start: Start) -> None:
    server = start(request_timeout_s=60.0)
    assert server.complete(timeout=30.5).status_code == 200
    assert 30.0 < server.engine.submitted[0].timeout_s < 30.5
    assert server.complete(headers={"X-Request-Timeout-Seconds": "20"}).status_code == 200
    assert 19.0 < server.engine.submitted[1].timeout_s < 19.95  # before Serve's proxy answers
    assert server.complete(headers={"X-Request-Timeout-Seconds": "0"}).status_code == 200
    assert 59.0 < server.engine.submitted[2].timeout_s < 60
    server.engine.gate.clear()
    for given in ({"timeout": 0.2}, {"headers": {"X-Request-Timeout-Seconds": "0.2"}}):
        assert error_of(server.complete(**given)) == (504, None, "timeout")
    server.engine.gate.set()
    server.wait_idle()
    assert len(server.engine.aborted) == 2
    for wrong in (0, -1, "soon"):
        assert error_of(server.complete(timeout=wrong)) == (400, None, "timeout")
    answer = server.complete(headers={"X-Request-Timeout-Seconds": "soon"})
    assert error_of(answer) == (400, None, "x-request-timeout-seconds")


def test_browsers_are_refused_unless_their_page_is_allowed(start: Start) -> None:
    page = {"Origin": "https://chat.example"}
    asks = {**page, "Access-Control-Request-Method": "POST"}
    server = start(access_config())
    assert "access-control-allow-origin" not in server.complete(ALICE, headers=page).headers
    assert server.http.options("/v1/completions", headers=asks).status_code == 401
    allowed = access_config().model_copy(update={"cors_allowed_origins": [page["Origin"]]})
    server.access.reconfigure(allowed)
    for key, status in ((ALICE, 200), ("wrong", 401)):
        answer = server.complete(key, headers=page)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == page["Origin"]
    assert server.http.options("/v1/completions", headers=asks).status_code == 200
    other = {**asks, "Origin": "https://other.example"}
    refused = server.http.options("/v1/completions", headers=other)
    assert "access-control-allow-origin" not in refused.headers


def test_what_pages_post_without_asking_is_refused(start: Start) -> None:
    server = start()

    def reset(**headers: str) -> int:
        headers = {"Origin": "https://other.example", **headers}
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return int(server.http.post("/reset_prefix_cache", headers=names).status_code)

    own = str(server.http.base_url).rstrip("/")
    assert reset() == reset(Origin="null", Sec_Fetch_Site="cross-site") == 403
    assert reset(Content_Type="Text/Plain; charset=utf-8") == 403
    assert reset(Origin=own) == reset(Sec_Fetch_Site="same-origin") == 200
    assert reset(Content_Type="application/json") == 200  # browsers ask before they send it
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert server.http.get("/stats", headers={"Origin": "https://other.example"}).status_code == 200
    for origin in ("*", "https://other.example"):
        server.access.reconfigure(AccessConfig(cors_allowed_origins=[origin]))
        assert reset() == 200


@pytest.mark.parametrize("logged", [False, True])
def test_keys_and_prompts_in_logs(
    start: Start, caplog: pytest.LogCaptureFixture, logged: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    config = access_config(requests_per_minute=5).model_copy(update={"log_prompts": logged})
    server = start(config)
    secret = "zebra 42"
    for key in (ALICE, "or-wrong-key"):
        for body in ({}, {"max_tokens": 10**6}, {"guided_regex": secret}, {"prompt": [secret, 3]}):
            server.complete(key, **{"prompt": secret, **body})
    messages = [{"role": "user", "content": secret}]
    server.engine.error = "the step failed"
    server.complete(ALICE, prompt=secret)
    server.engine.dead = True
    server.http.post("/v1/chat/completions", json={"messages": messages}, headers=bearer(ALICE))
    for key in (ALICE, "or-wrong-key", hash_of(ALICE)):
        assert key not in caplog.text
    assert (secret in caplog.text) == logged


@pytest.mark.parametrize(
    ("path", "root", "below"),
    [
        ("/stats", "", "/stats"),
        ("/llm/stats", "/llm", "/stats"),
        ("/llm", "/llm", "/"),
        ("/llm/", "/llm/", "/"),
        ("/llmhealth", "/llm", "/llmhealth"),
    ],
)
def test_the_path_below_a_route_prefix(path: str, root: str, below: str) -> None:
    assert route_below({"path": path, "root_path": root}) == below
