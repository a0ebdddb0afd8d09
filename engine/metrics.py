"""An engine's metrics under vLLM's names, in the form of vLLM's `LLM.get_metrics`.

Python, `/metrics` and Ray's exporter share this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

PREFIX = "vllm:"
Stats = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series."""

    name: str  # includes `PREFIX`; counters omit the `_total` of Prometheus' text
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A value that only increases."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by position; Prometheus' text has one series per `position` label."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value that rises and falls."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A distribution of observed values."""

    count: int
    sum: float
    buckets: dict[str, int]  # cumulative, by upper bound; the last is `+Inf`


# Name: help, and the key of `Engine.stats()` or of one of its sections.
_GAUGES = {
    "num_requests_running": ("Requests in the batch", "running"),
    "num_requests_waiting": ("Requests queued in the engine", "waiting"),
}
_REQUESTS = {
    "prompt_tokens": ("Prompt tokens taken in", "num_prompt_tokens"),
    "generation_tokens": ("Tokens emitted", "num_output_tokens"),
    "num_preemptions": ("Requests sent back to the queue for want of KV", "num_preemptions"),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache", "num_looked_up_tokens"),
    "prefix_cache_hits": ("Tokens found in the prefix cache", "num_hit_tokens"),
}
_DRAFTERS = {  # summed over all drafters
    "spec_decode_num_drafts": ("Drafts proposed", "num_gen_drafts"),
    "spec_decode_num_draft_tokens": ("Draft tokens proposed", "num_gen_tokens"),
    "spec_decode_num_accepted_tokens": ("Draft tokens accepted", "num_acc_tokens"),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the queue to the first token", "first_token_s"),
    "request_time_per_output_token_seconds": ("Per token after the first", "output_token_s"),
    "e2e_request_latency_seconds": ("From the queue to the end", "whole_s"),
    "request_queue_time_seconds": ("From the queue to a seat", "queue_s"),
    "request_prefill_time_seconds": ("From the seat to the first token", "prefill_s"),
    "request_decode_time_seconds": ("From the first token to the end", "decode_s"),
    "request_prompt_tokens": ("Prompt tokens per request", "prompt_tokens"),
    "request_generation_tokens": ("Emitted tokens per request", "output_tokens"),
}
_USAGE, _ENDED = "kv_cache_usage_perc", "request_success"
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos"
HELP = {
    **{
        PREFIX + name: text
        for table in (_GAUGES, _REQUESTS, _DRAFTERS, _HISTOGRAMS)
        for name, (text, _) in table.items()
    },
    PREFIX + _USAGE: "KV blocks in use; 1 is all",
    PREFIX + _ENDED: "Requests by how they ended",
    PREFIX + _POSITIONS: "Draft tokens accepted, by their place in the draft",
}


def engine_metrics(stats: Stats, model: str, engine: str = "0") -> list[Metric]:
    """Converts `Engine.stats()` to metrics; `model` and `engine` become labels."""
    labels = {"model_name": model, "engine": engine}
    found: list[Metric] = [
        Gauge(PREFIX + name, labels, float(stats.get(key, 0))) for name, (_, key) in _GAUGES.items()
    ]
    found.append(Gauge(PREFIX + _USAGE, labels, kv_usage(stats)))
    requests, drafters = stats.get("requests", {}), stats.get("drafters", {}).values()
    for name, (_, key) in _REQUESTS.items():
        found.append(Counter(PREFIX + name, labels, requests.get(key, 0)))
    for reason, count in stats.get("requests_ended", {}).items():
        found.append(Counter(PREFIX + _ENDED, {**labels, "finished_reason": reason}, count))
    for name, (_, key) in _DRAFTERS.items():
        found.append(Counter(PREFIX + name, labels, sum(each[key] for each in drafters)))
    columns = zip_longest(*(each["acc_tokens_per_pos"] for each in drafters), fillvalue=0)
    found.append(Vector(PREFIX + _POSITIONS, labels, [sum(column) for column in columns]))
    histograms = stats.get("request_histograms", {})
    for name, (_, key) in _HISTOGRAMS.items():
        if key in histograms:
            found.append(_histogram(PREFIX + name, labels, histograms[key]))
    return found


def kv_usage(stats: Stats) -> float:
    """Returns the share of KV blocks in use."""
    kv = stats.get("kv") or {}
    total = kv.get("num_blocks", 0)
    return 1 - kv.get("num_free_blocks", 0) / total if total else 0.0


def _histogram(name: str, labels: dict[str, str], counted: Mapping[str, Any]) -> Histogram:
    bounds = [*map(str, counted["bounds"]), "+Inf"]
    buckets = dict(zip(bounds, accumulate(counted["counts"]), strict=True))
    return Histogram(name, labels, buckets["+Inf"], counted["sum"], buckets)
