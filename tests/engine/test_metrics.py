"""vLLM's metrics of an engine in Python's form, against what was generated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.engine.metrics import HELP, Counter, Gauge, Histogram, Metric, Vector

from ..helpers.ports import wait_for

DEMO = str(Path(__file__).resolve().parents[2] / "demo" / "models" / "target")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8], [1, 2, 3]]
OPTIONS: dict[str, Any] = {
    "executor": "local",
    "dtype": "float32",
    "num_kv_blocks": 64,
    "served_model_name": "mine",
    "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3},
}


def named(metrics: list[Metric]) -> dict[str, Any]:
    """By name without `vllm:`; those of several series by their other label, too."""
    found = {}
    for each in metrics:
        assert (each.labels["model_name"], each.labels["engine"]) == ("mine", "0")
        key = each.name.removeprefix("vllm:")
        assert key != each.name
        found[key, each.labels.get("finished_reason")] = each
    return found


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(DEMO, **OPTIONS) as llm:
        yield llm


def test_metrics_are_of_vllms_types_and_of_what_ran(llm: LLM) -> None:
    assert {each.name for each in llm.get_metrics()} == set(HELP)
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    stream = llm.stream([4, 4], SamplingParams(max_tokens=40, ignore_eos=True))
    num_streamed = len(next(iter(stream)).outputs[0].token_ids)
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: llm.stats()["running"] == 0)
    found = named(llm.get_metrics())

    def value(name: str, reason: str | None = None) -> Any:
        return found[name, reason].value

    assert type(found["num_requests_running", None]) is Gauge
    assert type(found["prompt_tokens", None]) is Counter
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 0
    assert value("prompt_tokens") == sum(map(len, PROMPTS)) + 2
    assert value("generation_tokens") >= 60 + num_streamed
    assert (value("request_success", "length"), value("request_success", "abort")) == (3, 1)
    assert value("request_success", "stop") == value("request_success", "error") == 0
    assert value("prefix_cache_queries") >= value("prompt_tokens")
    usages = [output.speculation for output in outputs]
    accepted = found["spec_decode_num_accepted_tokens_per_pos", None]
    assert type(accepted) is Vector
    assert sum(accepted.values) == value("spec_decode_num_accepted_tokens")
    assert accepted.values == sorted(accepted.values, reverse=True)
    assert value("spec_decode_num_drafts") >= sum(usage.num_drafts for usage in usages) > 0
    assert value("spec_decode_num_draft_tokens") >= sum(usage.num_draft_tokens for usage in usages)
    for name, count in (
        ("time_to_first_token_seconds", 4),
        ("request_queue_time_seconds", 4),
        ("request_prefill_time_seconds", 4),
        ("request_decode_time_seconds", 4),
        ("e2e_request_latency_seconds", 4),
        ("request_prompt_tokens", 4),
        ("request_generation_tokens", 4),
    ):
        histogram = found[name, None]
        assert type(histogram) is Histogram
        counts = [*histogram.buckets.values()]
        assert (histogram.count, counts[-1], [*histogram.buckets][-1]) == (count, count, "+Inf")
        assert counts == sorted(counts), name
    seconds = {name: found[name, None].sum for name, _ in found if name.endswith("_seconds")}
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds")
    first = sum(seconds[name] for name in parts)
    assert seconds["time_to_first_token_seconds"] == pytest.approx(first)
    whole = first + seconds["request_decode_time_seconds"]
    assert seconds["e2e_request_latency_seconds"] == pytest.approx(whole, abs=0.02)
    assert found["request_prompt_tokens", None].sum == value("prompt_tokens")


def test_an_event_loop_gets_the_same() -> None:
    async def main() -> None:
        async with AsyncLLM(DEMO, **OPTIONS) as llm:
            sampling = SamplingParams(max_tokens=5, ignore_eos=True)
            async for _ in llm.generate(PROMPTS[0], sampling):
                pass
            assert named(llm.get_metrics())["generation_tokens", None].value == 5

    asyncio.run(main())
