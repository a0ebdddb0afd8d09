"""Metrics under vLLM's names: in Prometheus' text as vLLM's load client reads it, and for Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.serve.metrics import EdgeMetrics, RayMetrics, Stopwatch, exposition
from outrider.drafters.protocol import Drafted, LinkCounts
from outrider.engine.metrics import HELP, engine_metrics
from outrider.scheduler.types import ints

from ...helpers.engines import complete, engine_of

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8]]


@pytest.fixture(scope="module")
def engine(tiny: Any) -> Any:
    with engine_of(tiny.target, {"decoding_type": "NGram", "max_draft_len": 3}) as engine:
        yield engine


def text_of(engine: Any, *replicas: str) -> str:
    edge = EdgeMetrics("mine")
    Stopwatch(edge).finished("stop")
    stats = engine.stats()
    return exposition(edge.families(), {"mine": dict.fromkeys(replicas, stats)}).decode()


def speculation(text: str) -> dict[str, Any]:
    """What `vllm bench serve` finds: sums over lines by what is in their names."""
    found = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    per_position: dict[int, int] = {}
    for line in text.splitlines():
        if not line.strip().startswith("vllm:spec_decode"):
            continue
        value = int(float(line.split()[-1]))
        if "num_drafts" in line:
            found["num_drafts"] += value
        elif "num_draft_tokens" in line:
            found["num_draft_tokens"] += value
        elif "num_accepted_tokens_per_pos" in line:
            position = int(line.partition('position="')[2].partition('"')[0])
            per_position[position] = per_position.get(position, 0) + value
        elif "num_accepted_tokens" in line:
            found["num_accepted_tokens"] += value
    return {**found, "per_position": per_position}


def test_vllms_load_client_finds_how_drafts_fare(engine: Any) -> None:
    before = text_of(engine, "a")
    assert "vllm:spec_decode" in before, "it compares with what is there before the first request"
    counts = engine.stats()["drafters"]["ngram"]
    complete(engine, PROMPTS, max_tokens=30)
    now = engine.stats()["drafters"]["ngram"]
    after = speculation(text_of(engine, "a"))
    old = speculation(before)
    for name, key in (
        ("num_drafts", "num_gen_drafts"),
        ("num_draft_tokens", "num_gen_tokens"),
        ("num_accepted_tokens", "num_acc_tokens"),
    ):
        assert after[name] - old[name] == now[key] - counts[key] > 0, name
    assert sum(after["per_position"].values()) == after["num_accepted_tokens"]


def test_series_have_vllms_names_and_labels(engine: Any) -> None:
    complete(engine, PROMPTS, max_tokens=5)
    text = text_of(engine, "a", "b")
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert set(HELP) <= set(families)
    for name in HELP:
        for sample in families[name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"] in "ab") == ("mine", True)
    assert "_created" not in text
    assert 'vllm:time_to_first_token_seconds_bucket{engine="a",le="+Inf",model_name="mine"}' in text
    assert 'vllm:request_success_total{engine="b",finished_reason="length"' in text
    assert 'vllm:generation_tokens_total{engine="a"' in text


def test_a_drafter_that_rests_counts_as_up(engine: Any) -> None:
    stats = engine.stats()
    for state, is_up in (("active", 1.0), ("idle", 1.0), ("late", 0.0), ("down", 0.0)):
        stats["drafters"]["ngram"]["health"] = {"state": state, "reason": ""}
        text = exposition([], {"mine": {"a": stats}}).decode()
        (line,) = [each for each in text.splitlines() if "drafter_up{" in each]
        assert float(line.split()[-1]) == is_up, state


def test_messages_to_a_draft_model_are_histograms(engine: Any) -> None:
    stats, counts = engine.stats(), LinkCounts()
    drafted = Drafted(ints([]), ints([0]), None, 1.0, sent_bytes=300, received_bytes=90)
    counts.count(drafted, 0.004)
    counts.count(drafted, None)
    stats["drafters"]["ngram"]["link"] = counts.as_dict()
    text = exposition([], {"mine": {"a": stats}}).decode()
    labels = 'drafter="ngram"'
    for line in (
        f'spec_link_bytes_sum{{direction="sent",{labels},model="mine",replica="a"}} 600.0',
        f'spec_link_bytes_count{{direction="received",{labels},model="mine",replica="a"}} 2.0',
        f'spec_link_seconds_count{{{labels},model="mine",replica="a"}} 1.0',
        f'spec_link_seconds_bucket{{{labels},le="0.005",model="mine",replica="a"}} 1.0',
    ):
        assert f"outrider:{line}" in text.splitlines(), line


def test_ray_gets_what_is_new(engine: Any) -> None:
    """Counters and histograms add up over reports, whenever these are made."""
    totals: dict[tuple[str, ...], float] = {}
    values: dict[str, list[float]] = {}

    class Recorder:
        def __init__(self, name: str, text: str, tag_keys: Any, boundaries: Any = None) -> None:
            assert ":" not in name, "Ray refuses it"
            self.name, self.keys = name, tag_keys

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0
            assert tuple(tags) == self.keys
            key = (self.name, *(tags[each] for each in self.keys[2:]))
            totals[key] = totals.get(key, 0) + value

        def set(self, value: float, tags: dict[str, str]) -> None:
            totals[self.name,] = value

        def observe(self, value: float, tags: dict[str, str]) -> None:
            values.setdefault(self.name, []).append(value)

    reports = RayMetrics()
    reports._ray = SimpleNamespace(Counter=Recorder, Gauge=Recorder, Histogram=Recorder)
    for _ in range(3):
        complete(engine, PROMPTS, max_tokens=20)
        reports.report(engine_metrics(engine.stats(), "mine"))
        reports.report(engine_metrics(engine.stats(), "mine"))
    stats = engine.stats()
    assert totals["vllm_generation_tokens",] == stats["requests"]["num_output_tokens"]
    assert totals["vllm_request_success", "length"] == stats["requests_ended"]["length"]
    assert totals["vllm_num_requests_running",] == 0
    for position, count in enumerate(stats["drafters"]["ngram"]["acc_tokens_per_pos"]):
        name = "vllm_spec_decode_num_accepted_tokens_per_pos"
        assert totals[name, str(position)] == count
    for name, key in (("time_to_first_token_seconds", "first_token_s"),
                      ("request_generation_tokens", "output_tokens")):  # fmt: skip
        counted = stats["request_histograms"][key]
        bounds = [0.0, *counted["bounds"], float("inf")]
        seen = values[f"vllm_{name}"]
        for lower, upper, count in zip(bounds, bounds[1:], counted["counts"], strict=False):
            assert sum(lower < value <= upper for value in seen) == count, (name, upper)
