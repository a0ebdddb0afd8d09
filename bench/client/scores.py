"""What a run's answers say: throughput, latencies, goodput and drafts, under vLLM's names.

Counters of drafts are read at `/metrics` before and after, under vLLM's names or Outrider's; a
server that has none may report them with each answer (`usage.speculation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from ...errors import ConfigError
from ..measure import Acceptance, Trace

# By name: what is measured of a request, in milliseconds.
METRICS: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "Time to first token",
        "tpot": "Time per output token after the first",
        "itl": "Time between events",
        "e2el": "End to end",
    }
)
GOODPUT = ("ttft", "tpot", "e2el")
_PREFIXES = ("vllm:", "outrider:")  # the first that is there: Outrider has both
_COUNTERS = MappingProxyType(
    {
        "spec_decode_num_drafts": "num_drafts",
        "spec_decode_num_draft_tokens": "num_draft_tokens",
        "spec_decode_num_accepted_tokens": "num_accepted",
    }
)
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos"


def read_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`KEY:MS` as limits by metric.

    Raises:
        ConfigError: not of this form, an unknown key or one given twice, or a negative limit.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT:
            raise ConfigError.at("goodput", f"{name!r} is none of {', '.join(GOODPUT)}")
        try:
            limit = float(text)
        except ValueError:
            raise ConfigError.at("goodput", f"expected KEY:MILLISECONDS, got {pair!r}") from None
        if not limit >= 0 or name in limits:
            reason = "given twice" if name in limits else f"at least 0, got {text}"
            raise ConfigError.at("goodput", f"{name}: {reason}")
        limits[name] = limit
    return limits


def values_ms(traces: Iterable[Trace], metric: str) -> list[float]:
    """One value a request, or, of `itl`, one a gap between events."""
    if metric == "itl":
        return [gap for trace in traces for gap in trace.gap_ms]
    least = 2 if metric == "tpot" else 1
    return [_one_ms(trace, metric) for trace in traces if trace.num_tokens >= least]


def latency_scores(
    traces: Sequence[Trace], metrics: Iterable[str], percents: Iterable[float]
) -> dict[str, float]:
    """`mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, `p99_ttft_ms` and so on."""
    scores: dict[str, float] = {}
    for metric in metrics:
        values = values_ms(traces, metric) or [0.0]
        scores[f"mean_{metric}_ms"] = float(np.mean(values))
        scores[f"median_{metric}_ms"] = float(np.median(values))
        scores[f"std_{metric}_ms"] = float(np.std(values))
        for percent in percents:
            scores[f"p{percent:g}_{metric}_ms"] = float(np.percentile(values, percent))
    return scores


def num_good(traces: Iterable[Trace], limits: Mapping[str, float]) -> int:
    """Requests within every limit."""
    return sum(
        all(_one_ms(trace, metric) <= limit for metric, limit in limits.items()) for trace in traces
    )


def peaks(traces: Sequence[Trace]) -> dict[str, float]:
    """The most tokens of one second, and the most requests in flight at once."""
    tokens: dict[int, int] = {}
    changes = []
    for trace in traces:
        for arrival in trace.arrivals:
            second = int(arrival.at_s)
            tokens[second] = tokens.get(second, 0) + arrival.num_tokens
        changes += [(trace.submitted_s, 1), (trace.arrivals[-1].at_s, -1)]
    in_flight = np.cumsum([change for _, change in sorted(changes)])
    return {
        "max_output_tokens_per_s": float(max(tokens.values(), default=0)),
        "max_concurrent_requests": int(max(in_flight, default=0)),
    }


def read_counters(text: str) -> tuple[str, Acceptance] | None:
    """Counters of drafts in Prometheus' text, and whose names they have; None if there are none."""
    sums: dict[str, dict[str, float]] = {prefix: {} for prefix in _PREFIXES}
    try:
        samples = [each for family in text_string_to_metric_families(text)
                   for each in family.samples]  # fmt: skip
    except ValueError:
        return None
    for sample in samples:
        prefix, colon, name = sample.name.removesuffix("_total").partition(":")
        found = sums.get(prefix + colon)
        if found is None or name not in (*_COUNTERS, _POSITIONS):
            continue
        key = f"{name} {sample.labels.get('position', '')}" if name == _POSITIONS else name
        found[key] = found.get(key, 0.0) + sample.value
    for prefix, found in sums.items():
        if _COUNTERS.keys() <= found.keys():
            return prefix.rstrip(":"), _acceptance(found)
    return None


def _acceptance(found: Mapping[str, float]) -> Acceptance:
    positions = {
        int(place): round(value)
        for key, value in found.items()
        for name, _, place in (key.partition(" "),)
        if name == _POSITIONS and place.isdecimal()
    }
    width = max(positions, default=-1) + 1
    return Acceptance(
        **{field: round(found[name]) for name, field in _COUNTERS.items()},
        accepted_per_pos=tuple(positions.get(place, 0) for place in range(width)),
    )


def gained(before: Acceptance, after: Acceptance) -> Acceptance | None:
    """What was counted in between; None where a counter began anew or nothing was drafted."""
    width = len(after.accepted_per_pos)
    earlier = (*before.accepted_per_pos, *[0] * width)
    made = Acceptance(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted=after.num_accepted - before.num_accepted,
        accepted_per_pos=tuple(
            now - then for now, then in zip(after.accepted_per_pos, earlier[:width])
        ),
    )
    counts = (made.num_drafts, made.num_draft_tokens, made.num_accepted, *made.accepted_per_pos)
    return made if min(counts) >= 0 and made.num_drafts else None


def draft_scores(drafts: Acceptance, source: str) -> dict[str, Any]:
    """`spec_decode_*`: the length is tokens per draft, with the target's own; the rate percent."""
    steps = drafts.num_drafts or drafts.num_steps
    return {
        "spec_decode_source": source,
        "spec_decode_acceptance_rate": 100 * drafts.rate,
        "spec_decode_acceptance_length": 1 + drafts.num_accepted / steps if steps else 1.0,
        "spec_decode_num_drafts": steps,
        "spec_decode_draft_tokens": drafts.num_draft_tokens,
        "spec_decode_accepted_tokens": drafts.num_accepted,
        "spec_decode_per_position_acceptance_rates": drafts.rate_per_pos,
    }


def _one_ms(trace: Trace, metric: str) -> float:
    """Of one request; 0 per token after the first where there is a single one."""
    if metric == "tpot":
        return (trace.e2e_ms - trace.ttft_ms) / max(trace.num_tokens - 1, 1)
    return trace.ttft_ms if metric == "ttft" else trace.e2e_ms
