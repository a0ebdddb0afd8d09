"""The arithmetic of benchmarks, on made-up numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.bench.compare import (
    Comparison,
    Plan,
    Workload,
    compare,
    equality,
    over_http,
    summarise,
)
from outrider.bench.measure import (
    Acceptance,
    Arrival,
    Load,
    Run,
    Trace,
    add_acceptance,
    differing,
    percentile,
    percentiles,
    ratio_of_rounds,
)
from outrider.bench.overhead import between, budget_ms
from outrider.bench.suite.workloads import load_prompts
from outrider.errors import ConfigError, OutriderError
from outrider.scheduler.sampling import SamplingParams


def trace(
    *arrivals: tuple[float, int], submitted_s: float = 0.0, first_id: int = 0, index: int = 0
) -> Trace:
    num_tokens = sum(count for _, count in arrivals)
    return Trace(
        index,
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
    assert ratio_of_rounds([], []) is None


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
    same = [trace((1.0, 4), index=index) for index in range(3)]
    longer = trace((1.0, 5), index=1)
    other = trace((1.0, 4), first_id=1, index=2)
    assert differing(same, [same[0], longer, other]) == [(1, 4), (2, 0)]
    assert differing(same, [other]) == [(2, 0)], "prompts that one of them did not answer"
    text = replace(same[0], output="abc")
    assert differing([text], [replace(text, output="abd")]) == [(0, 2)]
    assert differing([text], same) == [], "a text and token ids"


class Fake:
    """A contender with a fixed speed, which notes who ran when."""

    def __init__(
        self, name: str, tokens_per_s: float, log: list, most: int = 99, dies_at: int = 99
    ) -> None:
        self.name = name
        self._tokens_per_s, self._log, self._most, self._dies_at = tokens_per_s, log, most, dies_at

    def start(self) -> None:
        self._log.append(("start", self.name))
        if not self._tokens_per_s:
            raise OutriderError("no such model")

    def takes(self, load: Load) -> bool:
        return load.streams is not None and load.streams <= self._most

    def run(self, prompts, sampling, load) -> Run:
        self._log.append((self.name, load.streams, len(prompts), sampling.max_tokens))
        self._dies_at -= 1
        if self._dies_at == 0:
            raise OutriderError("died")
        wall_s = sampling.max_tokens * len(prompts) / self._tokens_per_s
        traces = tuple(
            trace((wall_s / 2, 1), (wall_s, sampling.max_tokens - 1), index=index)
            for index in range(len(prompts))
        )
        return Run(self.name, load, wall_s, traces, num_steps=2)

    def close(self) -> None:
        self._log.append(("close", self.name))


def plan(num_rounds: int = 2, **options) -> Plan:
    def prompts(salt: str, count: int) -> list[str]:
        return [f"{salt} {index}" for index in range(count)]

    loads = [Load(streams=1), Load(streams=2)]
    sampling = SamplingParams(max_tokens=20)
    return Plan([Workload("w", prompts)], sampling, loads, num_rounds, 3, pause_s=0, **options)


def test_rounds_turn_and_ratios_hold():
    log: list = []
    contenders = [Fake("plain", 10, log), Fake("fast", 25, log), Fake("single", 5, log, most=1)]
    num_saved: list[int] = []

    def after(found: Comparison) -> None:
        num_saved.append(len(found.runs["plain", "w", Load(streams=1)]))

    found = compare(contenders, plan(), lambda _: None, after)
    assert num_saved == [1, 2], "what there was after each round"
    assert log[:8] == [
        ("start", "plain"),
        ("plain", 1, 1, 8),
        ("plain", 2, 2, 8),
        ("start", "fast"),
        ("fast", 1, 1, 8),
        ("fast", 2, 2, 8),
        ("start", "single"),
        ("single", 1, 1, 8),
    ]
    first = [(name, size) for name, size, *_ in log[8:13]]
    second = [(name, size) for name, size, *_ in log[13:18]]
    assert first == [("plain", 1), ("fast", 1), ("single", 1), ("plain", 2), ("fast", 2)]
    assert second == [("fast", 1), ("plain", 1), ("single", 1), ("fast", 2), ("plain", 2)]
    assert [name for name, _ in log[18:]] == ["close"] * 3
    rows = {(row["contender"], row["streams"]): row for row in summarise(found, "plain")}
    assert rows["fast", 1]["ratio"]["median"] == pytest.approx(2.5)
    assert rows["single", 1]["ratio"]["median"] == pytest.approx(0.5)
    assert rows["plain", 2]["tokens_per_s"] == pytest.approx(10)
    assert rows["plain", 2]["tokens_per_step"] == 30
    assert [row["num_differing"] for row in equality(found, "plain")] == [0] * 5
    several = compare(contenders[:1], plan(prompts_per_stream=2), lambda _: None)
    num_prompts = [len(runs[0].traces) for runs in several.runs.values()]
    assert num_prompts == [3, 4], "at least so many for every stream"


def test_alone_means_that_nobody_else_is_up():
    log: list = []
    compare([Fake("a", 1, log), Fake("b", 1, log)], plan(alone=True), lambda _: None)
    assert [each for each in log if len(each) == 2] == [
        *(("start", "a"), ("close", "a"), ("start", "b"), ("close", "b")),
        *(("start", "b"), ("close", "b"), ("start", "a"), ("close", "a")),
    ]


def test_what_http_adds():
    log: list = []
    contenders = [Fake("http", 100, log), Fake("engine", 200, log, most=1)]
    found = compare(contenders, plan(), lambda _: None)
    (row,) = over_http(found, "http", "engine")
    assert (row["streams"], row["num_rounds"]) == (1, 2)
    assert row["framework_us_per_token"] == pytest.approx(5000)
    assert row["first_token_ms_more"] == pytest.approx(150)  # halves of 60 tokens' 600 and 300 ms
    assert over_http(found, "http", "nobody") == []


def test_who_cannot_run_is_excluded_with_the_reason():
    log: list = []
    # After its warm-ups of two loads, `mortal` makes three runs and dies in the fourth.
    contenders = [Fake("plain", 10, log), Fake("mortal", 20, log, dies_at=6), Fake("none", 0, log)]
    found = compare(contenders, plan(num_rounds=3), lambda _: None)
    assert found.excluded == {"mortal": "died", "none": "no such model"}
    rows = {(row["contender"], row["streams"]): row for row in summarise(found, "plain")}
    assert len(rows["plain", 1]["rounds"]) == 3
    assert [each["round"] for each in rows["mortal", 1]["rounds"]] == [0, 1]
    assert [each["round"] for each in rows["mortal", 2]["rounds"]] == [0]
    assert rows["mortal", 2]["ratio"]["median"] == pytest.approx(2.0), "of rounds that both ran"
    alone = compare([Fake("plain", 10, log), Fake("none", 0, log)], plan(alone=True), str)
    assert alone.excluded == {"none": "no such model"}
    assert log.count(("start", "none")) == 2, "once in either mode"


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
