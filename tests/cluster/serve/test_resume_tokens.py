"""Tokens that are kept for resumable streams: how long, how many, for whom."""

from __future__ import annotations

from outrider.cluster.serve.resume_tokens import TokenStore
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Delta, Request, ResumeKey, TokenLogprobs, ints


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str, key: ResumeKey | None, emitted: tuple[int, ...] = ()) -> Request:
    return Request(name, ints([1]), SamplingParams(), 1, emitted=ints(emitted), resume_key=key)


def test_a_record_lives_as_long_as_its_call_and_the_window() -> None:
    clock = Clock()
    store = TokenStore(10.0, clock=clock)
    store.begin(request("a.0", ResumeKey("s", 0, "me"), (5, 6)))
    store.begin(request("b.0", None))
    store.record([Delta("a.0", (7,), logprobs=(TokenLogprobs(-1.0),)), Delta("b.0", (1,))])
    clock.now = 100.0
    assert store.take("s", "other") == ({}, [])
    assert store.stats()["num_requests"] == 1
    store.release("a.0")
    clock.now = 109.0
    taken, running = store.take("s", "me")
    assert (taken[0].token_ids, len(taken[0].logprobs), running) == ([5, 6, 7], 1, [])
    assert store.take("s", "me") == ({}, [])
    store.begin(request("a.1", ResumeKey("s", 0, "me")))
    assert store.take("s", "me")[1] == ["a.1"]  # it still runs
    store.begin(request("a.2", ResumeKey("s", 0, "me")))
    store.release("a.2")
    clock.now = 120.0
    assert store.take("s", "me") == ({}, [])
    assert store.stats()["num_values"] == 0


def test_memory_is_bounded() -> None:
    store = TokenStore(10.0, max_values=10)
    for name in ("running", "ended"):
        store.begin(request(name, ResumeKey(name, 0, "")))
        store.record([Delta(name, (1, 2, 3, 4))])
    store.release("ended")
    store.begin(request("new", ResumeKey("new", 0, "")))
    store.record([Delta("new", (1, 2, 3))])
    assert not store.take("ended", "")[0]
    store.record([Delta("new", (4, 5, 6, 7))])
    assert not store.take("running", "")[0]
    assert store.stats()["num_values"] == 7
    store.record([Delta("new", (0,) * 20)])
    assert store.stats() == {
        "num_requests": 0,
        "num_waiting": 0,
        "num_values": 0,
        "num_resumed": 0,
    }


def test_a_window_of_zero_keeps_nothing() -> None:
    store = TokenStore(0.0)
    store.begin(request("a", ResumeKey("s", 0, "")))
    assert store.stats()["num_requests"] == 0


def test_records_are_bounded_and_found_by_stream() -> None:
    store = TokenStore(10.0, max_records=3)
    for index in range(4):
        store.begin(request(f"s.{index}", ResumeKey("s", index, "me")))
        store.record([Delta(f"s.{index}", (index,) * (index + 1))])
    store.begin(request("other", ResumeKey("s", 0, "you"), (1,)))
    assert store.stats()["num_requests"] == 3
    assert store.count("s", "me") == {2: 3, 3: 4}
    assert store.count("s", "you") == {0: 1}
    assert sorted(store.take("s", "me")[0]) == [2, 3]
    assert store.count("s", "me") == {}
    store.begin(request("other", ResumeKey("t", 0, "you")))  # the same id once more
    assert store.count("s", "you") == {}
    assert store.stats()["num_values"] == 0
    store.take("t", "you")
    assert not store._of_stream
