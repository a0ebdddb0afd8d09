"""Figures of a run by hand, and counters of drafts under both names."""

from __future__ import annotations

import pytest

from outrider.bench.client.report import Result, comparison, read_result
from outrider.bench.client.scores import (
    draft_scores,
    gained,
    latency_scores,
    num_good,
    peaks,
    read_counters,
    read_goodput,
)
from outrider.bench.measure import Acceptance, Arrival, Trace
from outrider.errors import ConfigError


def trace(submitted_s: float, *arrivals: tuple[float, int]) -> Trace:
    return Trace(0, submitted_s, tuple(Arrival(*each) for each in arrivals), "", 3)


TRACES = [trace(0.0, (0.5, 1), (1.5, 2), (2.0, 1)), trace(1.0, (1.25, 1))]


def test_latencies_by_hand():
    found = latency_scores(TRACES, ["ttft", "tpot", "itl", "e2el"], [50, 99.9])
    assert found["mean_ttft_ms"] == pytest.approx((500 + 250) / 2)
    assert found["std_ttft_ms"] == pytest.approx(125)
    assert found["p99.9_ttft_ms"] == pytest.approx(250 + 250 * 0.999)
    assert found["mean_tpot_ms"] == pytest.approx(500), "one token has none after the first"
    assert found["mean_itl_ms"] == pytest.approx(750)
    assert found["median_e2el_ms"] == found["p50_e2el_ms"] == pytest.approx((2000 + 250) / 2)
    assert latency_scores([], ["ttft"], [99])["p99_ttft_ms"] == 0.0
    assert peaks(TRACES) == {"max_output_tokens_per_s": 3.0, "max_concurrent_requests": 2}


def test_goodput():
    assert num_good(TRACES, read_goodput(["ttft:500"])) == 2, "a limit is good itself"
    assert num_good(TRACES, read_goodput(["ttft:499"])) == 1
    assert num_good(TRACES, read_goodput(["ttft:500", "tpot:499.9"])) == 1
    assert num_good(TRACES, read_goodput(["e2el:1"])) == 0
    for wrong in (["ttft"], ["ttft:x"], ["itl:3"], ["ttft:-1"], ["ttft:nan"], ["ttft:1"] * 2):
        with pytest.raises(ConfigError) as caught:
            read_goodput(wrong)
        assert caught.value.field == "goodput"


def exposed(prefix: str, drafts: int, tokens: int, accepted: int, *positions: int) -> str:
    lines = [
        f'{prefix}spec_decode_num_drafts_total{{engine="0"}} {drafts - 1}',
        f'{prefix}spec_decode_num_drafts_total{{engine="1"}} 1.0',
        f'{prefix}spec_decode_num_drafts_created{{engine="1"}} 1e9',
        f"{prefix}spec_decode_num_draft_tokens_total {tokens}",
        f"{prefix}spec_decode_num_accepted_tokens_total {accepted}",
    ]
    name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{position="{at}"}} {count}' for at, count in enumerate(positions)]
    return "\n".join(["other_total 3", *lines, ""])


def test_counters_under_both_names():
    assert read_counters("") is None
    assert read_counters("# nothing of drafts\nvllm:prompt_tokens_total 3\n") is None
    assert read_counters("no { metrics } at all") is None
    wanted = Acceptance(0, 10, 30, 15, (9, 6))
    assert read_counters(exposed("outrider:", 10, 30, 15, 9, 6)) == ("outrider", wanted)
    both = exposed("outrider:", 99, 99, 99) + exposed("vllm:", 10, 30, 15, 9, 6)
    assert read_counters(both) == ("vllm", wanted)


def test_what_was_drafted_in_between():
    before = Acceptance(0, 10, 30, 15, (9, 6))
    found = gained(before, Acceptance(0, 14, 42, 22, (12, 8, 2)))
    assert found == Acceptance(0, 4, 12, 7, (3, 2, 2))
    scores = draft_scores(found, "vllm")
    assert scores["spec_decode_acceptance_rate"] == pytest.approx(100 * 7 / 12)
    assert scores["spec_decode_acceptance_length"] == pytest.approx(1 + 7 / 4)
    assert scores["spec_decode_per_position_acceptance_rates"] == [0.75, 0.5, 0.5]
    assert gained(before, before) is None
    assert gained(before, Acceptance(0, 4, 12, 7)) is None, "the server was started anew"


def test_comparison(tmp_path):
    first = {"output_throughput": 100.0, "p99_ttft_ms": 20.0, "request_rate": "inf", "failed": 0}
    second = {"output_throughput": 150.0, "p99_ttft_ms": 30.0, "request_rate": 4.0, "failed": 0,
              "mean_ttft_ms": 1.0}  # fmt: skip
    rows, differing = comparison([Result("a", first), Result("b", second)])
    assert rows == [
        ("output tokens/s", "100", "150", "1.50", "better"),
        ("requests failed", "0", "0", "1.00", ""),
        ("TTFT, ms: p99", "20", "30", "1.50", "worse"),
    ]
    assert differing == ["request_rate: inf, 4.0"]
    path = tmp_path / "a.json"
    for content in ("{", "[]", "{}", '{"output_throughput": "fast"}'):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"a\.json") as caught:
            read_result(path)
        assert caught.value.field == "compare"
