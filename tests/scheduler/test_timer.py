"""Sums over steps, and histograms of their phases."""

from __future__ import annotations

import pytest

from outrider.scheduler.timer import Histogram


def test_a_value_at_a_bound_belongs_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.as_dict() == {"bounds": (1.0, 2.0), "counts": (2, 2, 1), "sum": 14.0}


def test_steps_are_counted(make_loop, request_of):
    loop = make_loop(max_num_batched_tokens=8)
    loop.add(request_of("a", tuple(range(20))))
    num_steps = num_deltas = num_granted = 0
    while loop.scheduler.has_work:
        num_deltas += len(loop.step())
        num_steps += 1
    times = loop.timer.times
    assert (times.num_steps, times.num_sequences) == (num_steps, num_steps)
    assert times.num_sampled == num_deltas < num_steps, "a prompt in chunks emits at its end"
    assert times.num_granted_nodes >= times.num_draft_nodes > 0
    assert times.num_tokens > 20 + num_granted
    histograms = loop.timer.histograms()
    assert set(histograms) == {"draft", "verify", "overhead"}
    assert all(sum(each["counts"]) == num_steps for each in histograms.values())
    sums = {"draft": times.propose_ms + times.observe_ms, "verify": times.verify_ms}
    for phase, total_ms in sums.items():
        assert histograms[phase]["sum"] * 1e3 == pytest.approx(total_ms)


def test_the_first_tokens_carry_the_times_before_them(make_loop, request_of):
    loop = make_loop(max_num_seqs=1)
    loop.add(request_of("a", (1, 2)))
    loop.add(request_of("b", (3, 4)))
    told: dict[str, list] = {"a": [], "b": []}
    while loop.scheduler.has_work:
        for delta in loop.step():
            told[delta.request_id].append(delta.times)
    for times in told.values():
        assert times[0].queue_s >= 0
        assert times[0].prefill_s > 0
        assert times[1:] == [None] * (len(times) - 1)
    assert told["b"][0].queue_s > told["a"][0].queue_s, "it waited for the only seat"
