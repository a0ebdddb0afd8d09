"""The arithmetic of benchmarks, on made-up numbers."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.bench.compare import Plan, compare, equality, summarise
from outrider.bench.measure import (
    Acceptance,
    Arrival,
    Run,
    Trace,
    add_acceptance,
    differing,
    percentile,
    percentiles,
    ratio_of_rounds,
)
from outrider.bench.overhead import between, budget_ms
from outrider.bench.prompts import load_prompts
from outrider.errors import ConfigError
from outrider.scheduler.sampling import SamplingParams


def trace(*arrivals: tuple[float, int], submitted_s: float = 0.0, first_id: int = 0) -> Trace:
    num_tokens = sum(count for _, count in arrivals)
    return Trace(
        submitted_s,
        tuple(Arrival(*arrival) for arrival in arrivals),
        tuple(range(first_id, first_id + num_tokens)),
        num_prompt_tokens=5,
    )


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_percentile_is_numpys(percent, size):
    values = np.random.default_rng(size).normal(size=size).tolist()
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_percentiles():
    assert percentile([], 50) == 0.0
    assert percentiles(list(range(101))) == {"p50": 50, "p90": 90, "p99": 99}


def test_trace_times():
    found = trace((1.5, 1), (1.7, 2), (2.0, 1), submitted_s=1.0)
    assert found.ttft_ms == pytest.approx(500)
    assert found.e2e_ms == pytest.approx(1000)
    assert found.gap_ms == pytest.approx([200, 300])
    # Two tokens came after 200 ms: 100 each. One value per token after the first arrival.
    assert found.inter_token_ms == pytest.approx([100, 100, 300])
    assert sum(found.inter_token_ms) == pytest.approx(found.e2e_ms - found.ttft_ms)


def test_ratio_is_taken_within_rounds():
    ratio = ratio_of_rounds([20.0, 10.0, 45.0], [10.0, 10.0, 15.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    assert str(ratio) == "2.00 (1.00 to 3.00)"


def test_acceptance():
    found = Acceptance(10, num_drafts=8, num_draft_tokens=32, num_accepted=12)
    assert found.rate == 12 / 32
    assert found.mean_accepted_len == 1.2
    assert Acceptance().rate == Acceptance().mean_accepted_len == 0.0
    total = add_acceptance(
        [Acceptance(4, 2, 6, 5, (2, 2, 1)), Acceptance(3, 2, 4, 1, (1,)), Acceptance()]
    )
    assert total == Acceptance(7, 4, 10, 6, (3, 2, 1))
    assert total.rate_per_pos == [0.75, 0.5, 0.25]


def test_differing():
    same = trace((1.0, 4))
    longer = trace((1.0, 5))
    other = trace((1.0, 4), first_id=1)
    assert differing([same, same, same], [same, longer, other]) == [(1, 4), (2, 0)]


class Fake:
    """A contender with a fixed speed, which notes who ran when."""

    def __init__(self, name: str, tokens_per_s: float, log: list, most: int | None = None) -> None:
        self.name, self.max_batch_size = name, most
        self._tokens_per_s, self._log = tokens_per_s, log

    def run(self, prompts, sampling, batch_size) -> Run:
        self._log.append((self.name, batch_size, len(prompts), sampling.max_tokens))
        wall_s = sampling.max_tokens * len(prompts) / self._tokens_per_s
        traces = tuple(trace((wall_s / 2, 1), (wall_s, sampling.max_tokens - 1)) for _ in prompts)
        return Run(self.name, batch_size, wall_s, traces, num_steps=2)

    def close(self) -> None: ...


def test_rounds_turn_and_ratios_hold():
    log: list = []
    contenders = [Fake("plain", 10, log), Fake("fast", 25, log), Fake("single", 5, log, most=1)]
    plan = Plan(["a", "b", "c"], SamplingParams(max_tokens=20), (1, 2), num_rounds=2)
    runs = compare(contenders, plan, lambda _: None)
    assert log[:5] == [
        ("plain", 1, 1, 8),
        ("plain", 2, 2, 8),
        ("fast", 1, 1, 8),
        ("fast", 2, 2, 8),
        ("single", 1, 1, 8),
    ]
    first = [(name, size) for name, size, *_ in log[5:10]]
    second = [(name, size) for name, size, *_ in log[10:]]
    assert first == [("plain", 1), ("fast", 1), ("single", 1), ("plain", 2), ("fast", 2)]
    assert second == [("fast", 1), ("single", 1), ("plain", 1), ("fast", 2), ("plain", 2)]
    rows = {(row["contender"], row["batch_size"]): row for row in summarise(runs, "plain")}
    assert rows["fast", 1]["ratio"]["median"] == pytest.approx(2.5)
    assert rows["single", 1]["ratio"]["median"] == pytest.approx(0.5)
    assert rows["plain", 2]["tokens_per_s"] == pytest.approx(10)
    assert rows["plain", 2]["tokens_per_step"] == 30
    assert [row["num_differing"] for row in equality(runs, "plain")] == [0] * 5


def test_overhead_is_a_difference_per_step():
    names = ("num_tokens", "schedule_ms", "propose_ms", "verify_ms", "forward_ms", "commit_ms")
    before = dict.fromkeys(("num_steps", "observe_ms", *names), 10.0)
    after = {**before, "num_steps": 14, "num_tokens": 18, "verify_ms": 30.0, "forward_ms": 26.0}
    after["commit_ms"] = 12.0
    found = between(before, after)
    assert (found.num_steps, found.tokens_per_step) == (4, 2.0)
    assert (found.forward_ms, found.channel_ms, found.commit_ms) == (4.0, 1.0, 0.5)
    assert found.outside_ms == 1.5
    assert budget_ms(25) == 1.0


def test_prompts(tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\nthree\n")
    assert load_prompts(lines, 2) == ["one", "two"]
    records = tmp_path / "prompts.jsonl"
    records.write_text('{"text": "one"}\n{"prompt": "two"}\n{"neither": 1}\n')
    assert load_prompts(records, 2) == ["one", "two"]
    with pytest.raises(ConfigError, match="line 3"):
        load_prompts(records, 3)
    assert len(load_prompts(None, 4)) == 4, "the demo's own"
