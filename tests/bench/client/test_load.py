"""The load generator against a server that misbehaves on demand."""

from __future__ import annotations

import json

import httpx
import pytest

from outrider.bench.client.load import NO_TEXT, Endpoint, Exchange, parse, send_all
from outrider.bench.measure import Arrival, Load, arrival_times_s

from ...helpers import fake_server

USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture
def endpoint():
    servers = []

    def start(*words: str, timeout_s: float = 30.0) -> Endpoint:
        server = fake_server.serve(*words)
        servers.append(server)
        return Endpoint(f"http://127.0.0.1:{server.server_address[1]}", "m", USAGE, timeout_s)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def bodies(count: int, max_tokens: int = 6) -> list[dict]:
    return [{"prompt": f"{index}", "max_tokens": max_tokens} for index in range(count)]


def events(*items: dict | str) -> bytes:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    return b"".join(f"data: {line}\n\n".encode() for line in lines)


def text(value: str, tokens: int | None = None) -> dict:
    event = {"choices": [{"text": value}]}
    return event if tokens is None else {**event, "usage": {"completion_tokens": tokens}}


def test_closed_loop_keeps_its_streams_full(endpoint):
    at = endpoint("--together", "3")  # answers none of less than three
    exchanges, wall_s = send_all(at, bodies(9, 3), Load(streams=3))
    seen = httpx.get(f"{at.url}/seen").json()
    assert seen["most"] == 3
    assert sorted(body["prompt"] for body in seen["bodies"]) == [str(index) for index in range(9)]
    assert {body["model"] for body in seen["bodies"]} == {"m"}
    traces = [parse(index, each).trace for index, each in enumerate(exchanges)]
    assert [trace.num_tokens for trace in traces] == [3] * 9
    first_s = min(trace.arrivals[0].at_s for trace in traces)
    assert sum(exchange.submitted_s < first_s for exchange in exchanges) == 3
    assert wall_s >= max(trace.arrivals[-1].at_s for trace in traces)


def test_poisson_arrivals_are_those_of_the_seed(endpoint):
    at = endpoint("--delay-s", "0.03")
    times = arrival_times_s(100.0, 12, 20)
    exchanges, _ = send_all(at, bodies(12, 4), Load(rate=100.0))
    # No request waits for another's answer, and none is early.
    assert all(each.submitted_s >= due - 1e-3 for each, due in zip(exchanges, times))
    assert httpx.get(f"{at.url}/seen").json()["most"] > 1
    assert times == arrival_times_s(100.0, 12, 20) != arrival_times_s(100.0, 12, 21)
    many = arrival_times_s(50.0, 5000, 0)
    assert many[0] == 0.0
    assert many[-1] / 4999 == pytest.approx(1 / 50, rel=0.05)
    assert arrival_times_s(1.0, 0, 0) == []


def test_failures_are_counted_by_request(endpoint):
    at = endpoint("--fail-every", "3")
    exchanges, _ = send_all(at, bodies(9), Load(streams=1))
    answers = [parse(index, each) for index, each in enumerate(exchanges)]
    assert [answer.trace is None for answer in answers] == [False, False, True] * 3
    assert answers[2].failure == "status 500: a bad day"
    cut = endpoint("--cut")
    exchanges, _ = send_all(cut, bodies(1), Load(streams=1))
    assert parse(0, exchanges[0]).failure == "the stream ended before [DONE]"
    slow = endpoint("--delay-s", "5", timeout_s=0.2)
    exchanges, _ = send_all(slow, bodies(1), Load(streams=1))
    assert parse(0, exchanges[0]).failure == "not answered within 0.2 s"
    nobody = Endpoint("http://127.0.0.1:9", "m", {})
    exchanges, _ = send_all(nobody, bodies(2), Load(streams=2))
    assert all("Connect" in parse(0, each).failure for each in exchanges)


def test_tokens_are_the_servers_count_wherever_bytes_are_split():
    stream = events(text("ab", 1), text("cdef", 4), text("g", 5), "[DONE]")
    for split in range(1, len(stream)):
        exchange = Exchange(0.5, [(1.0, stream[:split]), (2.0, stream[split:])])
        trace = parse(3, exchange).trace
        assert (trace.num_tokens, trace.output, trace.prompt_index) == (5, "abcdefg", 3)
        first = stream.index(b"\n") + 1
        assert trace.arrivals[0].at_s == (1.0 if split >= first else 2.0)


def test_without_counts_the_total_is_shared_by_length():
    final = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 10}}
    chunks = [
        (1.0, events(text("a"))),
        (2.0, events(text(""))),
        (3.0, events(text("x" * 19))),
        (4.0, events(text("y" * 20))),
        (5.0, events(final, "[DONE]")),
    ]
    trace = parse(0, Exchange(0.0, chunks)).trace
    assert trace.arrivals == (Arrival(1.0, 1), Arrival(3.0, 4), Arrival(4.0, 5))
    assert trace.num_prompt_tokens == 7
    bare = [chunks[0], chunks[2], (5.0, events("[DONE]"))]
    assert parse(0, Exchange(0.0, bare)).trace.num_tokens == 2, "one token an event"


def test_speculation_is_read_from_usage():
    usage = {
        "completion_tokens": 8,
        "speculation": {"num_steps": 3, "num_draft_tokens": 9, "num_accepted_tokens": 5},
    }
    stream = events(text("a"), {"choices": [], "usage": usage}, "[DONE]")
    found = parse(0, Exchange(0.0, [(1.0, stream)])).acceptance
    assert (found.num_steps, found.num_draft_tokens, found.num_accepted) == (3, 9, 5)


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (events({"error": {"message": "no room"}}), "an error event: no room"),
        (events("{", "[DONE]"), "an event that is not JSON: b'{'"),
        (events("[1]", "[DONE]"), "an event that is no object: b'[1]'"),
        (events({"choices": []}, "[DONE]"), NO_TEXT),
        (b"", "the stream ended before [DONE]"),
    ],
)
def test_broken_answers(stream, failure):
    answer = parse(0, Exchange(0.0, [(1.0, stream)]))
    assert (answer.trace, answer.failure) == (None, failure)
