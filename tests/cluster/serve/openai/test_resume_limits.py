"""A resumed stream that a limit refuses can be resumed later: its tokens are still kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.cluster.serve.access.access import Access
from outrider.cluster.serve.openai.resuming import ResumePolicy
from outrider.cluster.serve.resume_tokens import TokenStore
from outrider.config.access import AccessConfig, hash_of

KEY = "or-a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_refused_resumption_takes_no_tokens(start: Callable[..., Any]) -> None:
    clock, store = Clock(), TokenStore(600.0)
    keys = [{"hash": hash_of(KEY), "tenant": "t", "tokens_per_minute": 60}]
    access = Access(AccessConfig(keys=keys), clock=clock)  # type: ignore[arg-type]
    # The rule cannot repeat the tokens: once they are taken, the stream is lost.
    policy = ResumePolicy(enabled=True, coupled=False)
    server = start(resuming=policy, store=store, access=access)
    body = {"prompt": "a", "max_tokens": 30, "stream": True, "resumable": True}
    whole = server.http.post("/v1/completions", json=body, headers=HEADERS)
    assert whole.status_code == 200
    first_id = next(line[4:] for line in whole.text.splitlines() if line.startswith("id: "))
    stream_id = first_id.partition(":")[0]
    assert store.count(stream_id, hash_of(KEY)) == {0: 30}
    usage = access.identify(HEADERS["Authorization"]).usage
    usage.take_tokens(29)  # the stream has used 31
    resumed = {**HEADERS, "Last-Event-ID": first_id}
    answer = server.http.post("/v1/completions", json=body, headers=resumed)
    assert answer.status_code == 429, answer.text
    assert store.count(stream_id, hash_of(KEY)) == {0: 30}
    clock.now = 60.0
    answer = server.http.post("/v1/completions", json=body, headers=resumed)
    assert answer.status_code == 200
    assert store.count(stream_id, hash_of(KEY)) == {}
