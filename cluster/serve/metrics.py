"""Metrics: the engines' statistics, and times measured in the ingresses.

`/metrics` returns them as Prometheus text. Metrics with the prefix `outrider:` have the label
`replica` for engines and `ingress` for ingresses. The engines' metrics are also given under vLLM's
names, which `RayMetrics` reports to Ray. Nothing is registered globally.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, chain, repeat
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ...engine import metrics as vllm
from ...scheduler.timer import Histogram
from ...scheduler.types import RequestTimes

PREFIX = "outrider:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Metric families of `Engine.stats()` with their help. First the numbers that it contains, by key.
_GAUGES = {
    "running": ("num_requests_running", "Requests in the batch"),
    "waiting": ("num_requests_waiting", "Requests queued in the engine"),
}
_TOTALS = {
    "num_failed_steps": ("failed_steps", "Steps in which a worker raised"),
    "num_restarts": ("worker_restarts", "Restarts of the worker group"),
}
_REQUESTS = {
    "num_finished": ("requests_finished", "Requests that ran to their end"),
    "num_preemptions": ("num_preemptions", "Requests sent back to the queue for want of KV"),
    "num_prompt_tokens": ("engine_prompt_tokens", "Prompt tokens taken in"),
    "num_output_tokens": ("engine_generation_tokens", "Tokens emitted by the target"),
    "num_looked_up_tokens": ("prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "num_hit_tokens": ("prefix_cache_hits", "Tokens found in the prefix cache"),
}
_STEPS = {  # sums over steps
    "num_steps": ("engine_steps", "Steps of the loop"),
    "num_sequences": ("engine_step_sequences", "Sequences of all steps: batch sizes, summed"),
    "num_sampled": ("engine_step_sampled_sequences", "Of those, sequences that emitted"),
    "num_tokens": ("engine_step_tokens", "Tokens of target forwards, draft nodes included"),
    "num_granted_nodes": ("spec_decode_num_granted_nodes", "Draft nodes that the budget allowed"),
    "num_draft_nodes": ("spec_decode_num_verified_nodes", "Draft nodes that were verified"),
}
_DRAFTS = {  # per drafter
    "num_gen_drafts": ("spec_decode_num_drafts", "Drafts proposed"),
    "num_gen_tokens": ("spec_decode_num_draft_tokens", "Draft tokens proposed"),
    "num_acc_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens accepted"),
    "num_acc_drafts": ("spec_decode_num_accepted_drafts", "Drafts accepted at least in part"),
    "faults": ("spec_decode_faults", "Failures of the drafter; each cost one draft"),
}
_ADAPTATION = {  # only for engines with online adaptation
    "num_output_tokens": ("adaptation_tokens", "Output tokens taken in to learn from"),
    "num_excluded": ("adaptation_excluded_requests", "Requests whose text may not be learnt from"),
}
_CACHES = {  # per drafter with a speculation cache
    "num_lookups": ("spec_cache_lookups", "Drafts looked up among the prepared ones"),
    "num_hits": ("spec_cache_hits", "Drafts that were prepared"),
    "num_outcomes": ("spec_cache_outcomes", "Outcomes prepared"),
    "num_tokens": ("spec_cache_tokens", "Tokens prepared"),
    "num_used_tokens": ("spec_cache_used_tokens", "Prepared tokens that became drafts"),
    "num_begun": ("spec_cache_begun_drafts", "Drafts not prepared, begun on the target's verdict"),
    "num_dropped": ("spec_cache_dropped_answers", "Answers to none of the open requests"),
}
_CACHE_TIMES = {
    "draft_ms": "draft", "waited_ms": "waited", "missed_ms": "missed", "hidden_ms": "hidden",
    "saved_ms": "saved",
}  # fmt: skip
_VERBS = {"begin_ms": "begin", "gen_ms": "generate", "acc_ms": "accept"}
# Then the computed families: help, and labels in addition to model and replica.
_COMPUTED: dict[type[Metric], dict[str, tuple[str, ...]]] = {
    GaugeMetricFamily: {
        "kv_cache_usage_perc": ("KV blocks in use; 1 is all",),
        "num_spare_workers": ("Processes that wait to replace a lost worker",),
        "spec_decode_synthetic_acceptance_rate": (
            "Rate of the coins that accept drafts in place of the target; absent: the target does",
        ),
        "adaptation_accepted_tokens": (
            "Tokens of a draft accepted on held-out texts, in the last round that measured it",
            "head",
        ),
        "drafter_weights_behind": (
            "Updates of the target's weights that its drafters with weights have not had",
        ),
        "spec_decode_drafter_up": ("1: it drafts, or would; 0: late, down or disabled", "drafter"),
    },
    CounterMetricFamily: {
        "adaptation_rounds": ("Rounds of online adaptation, by what became of them", "outcome"),
        "step_seconds": ("Where the time of steps went; `forward` is a part of `verify`", "phase"),
        "spec_decode_num_accepted_tokens_per_pos": (
            "Draft tokens accepted, by their place in the draft",
            "drafter",
            "position",
        ),
        "spec_decode_seconds": ("Time in the drafter's verbs", "drafter", "verb"),
        "spec_cache_seconds": (
            "Drafting with a speculation cache: all of it, and what steps waited for",
            "drafter",
            "part",
        ),
    },
    HistogramMetricFamily: {
        "spec_link_seconds": (
            "From a request to a separate draft model to the answer that a step waited for, "
            "without the model's own time",
            "drafter",
        ),
        "spec_link_bytes": (
            "Size of a message to a separate draft model, or of its answer",
            "drafter",
            "direction",
        ),
        "worker_recovery_seconds": (
            "From the loss of the target's workers until new ones can compute",
        ),
        "step_phase_seconds": (
            "Time of a step in drafting, verification and the rest of the loop",
            "phase",
        ),
    },
}


def engine_families(engines: dict[str, dict[str, Any]], model: str) -> Iterator[Metric]:
    """Yields the engines' statistics as metrics, by replica and drafter."""
    families: dict[str, Any] = {}

    def declare(kind: type[Metric], name: str, text: str, *labels: str) -> None:
        families[name] = kind(PREFIX + name, text, labels=["model", "replica", *labels])  # type: ignore[call-arg]

    for row in _GAUGES.values():
        declare(GaugeMetricFamily, *row)
    for rows in (_TOTALS, _REQUESTS, _STEPS, _ADAPTATION):
        for row in rows.values():
            declare(CounterMetricFamily, *row)
    for row in (*_DRAFTS.values(), *_CACHES.values()):
        declare(CounterMetricFamily, *row, "drafter")
    for kind, table in _COMPUTED.items():
        for name, columns in table.items():
            declare(kind, name, *columns)
    for replica, stats in engines.items():
        for name, value, *labels in chain(_of_engine(stats), _of_drafters(stats)):
            if isinstance(value, dict):  # counts of a histogram by bucket
                families[name].add_metric([model, replica, *labels], *_cumulative(value))
            else:
                families[name].add_metric([model, replica, *labels], value)
    yield from families.values()


def _cumulative(histogram: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Converts `Histogram.as_dict` to Prometheus' cumulative buckets and sum."""
    bounds = [*(str(bound) for bound in histogram["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"]


def _of_engine(stats: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yields the samples of one replica as (name, value, further labels)."""
    steps = stats.get("steps") or {}
    for table, values in (
        (_GAUGES, stats),
        (_TOTALS, stats),
        (_REQUESTS, stats.get("requests") or {}),
        (_STEPS, steps),
    ):
        for key, (name, _) in table.items():
            yield name, values.get(key, 0)
    yield "kv_cache_usage_perc", vllm.kv_usage(stats)
    if stats.get("recovery_seconds"):
        yield "worker_recovery_seconds", stats["recovery_seconds"]
    states = [each["state"] for each in stats.get("workers") or ()]
    yield "num_spare_workers", states.count("spare")
    for key, value in steps.items():
        if key.endswith("_ms"):
            yield "step_seconds", value / 1e3, key.removesuffix("_ms")
    for phase, counted in (stats.get("histograms") or {}).items():
        yield "step_phase_seconds", counted, phase
    rate = (stats.get("speculation") or {}).get("synthetic_acceptance_rate")
    if rate is not None:
        yield "spec_decode_synthetic_acceptance_rate", rate
    yield "drafter_weights_behind", (stats.get("weights") or {}).get("num_behind", 0)
    adaptation = stats.get("online_adaptation")
    if adaptation is not None:
        yield from _of_adaptation(adaptation)


def _of_adaptation(stats: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yields the samples of a replica's online adaptation, as `_of_engine`."""
    for key, (name, _) in _ADAPTATION.items():
        yield name, stats[key]
    for outcome, count in stats["outcomes"].items():
        yield "adaptation_rounds", count, outcome
    measured = [each for each in stats["rounds"] if each["accepted_after"] is not None]
    for round_ in measured[-1:]:
        yield "adaptation_accepted_tokens", round_["accepted_before"], "present"
        yield "adaptation_accepted_tokens", round_["accepted_after"], "adapted"


def _of_drafters(stats: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yields the samples of a replica's drafters, as `_of_engine`."""
    for drafter, values in (stats.get("drafters") or {}).items():
        for key, (name, _) in _DRAFTS.items():
            yield name, values.get(key, 0), drafter
        for position, count in enumerate(values.get("acc_tokens_per_pos", ())):
            yield "spec_decode_num_accepted_tokens_per_pos", count, drafter, str(position)
        for key, verb in _VERBS.items():
            yield "spec_decode_seconds", values.get(key, 0.0) / 1e3, drafter, verb
        cache = values.get("speculation_cache")
        if cache is not None:
            for key, (name, _) in _CACHES.items():
                yield name, cache[key], drafter
            for key, part in _CACHE_TIMES.items():
                yield "spec_cache_seconds", cache[key] / 1e3, drafter, part
        link = values.get("link")
        if link is not None:
            yield "spec_link_seconds", link["link_s"], drafter
            for direction in ("sent", "received"):
                yield "spec_link_bytes", link[f"{direction}_bytes"], drafter, direction
        state = (values.get("health") or {}).get("state")
        if state is not None:
            yield "spec_decode_drafter_up", float(state in ("active", "idle")), drafter


def vllm_families(engines: dict[str, dict[str, Any]], model: str) -> Iterator[Metric]:
    """Yields the engines' statistics under vLLM's names; the label `engine` is the replica."""
    families: dict[str, Any] = {}
    for replica, stats in engines.items():
        for metric in vllm.engine_metrics(stats, model, replica):
            name, values = metric.name, [*metric.labels.values()]
            labels = [*metric.labels, *(["position"] if isinstance(metric, vllm.Vector) else [])]
            if name not in families:
                families[name] = _VLLM_KINDS[type(metric)](name, vllm.HELP[name], labels=labels)
            family = families[name]
            if isinstance(metric, vllm.Histogram):
                family.add_metric(values, [*metric.buckets.items()], metric.sum)
            elif isinstance(metric, vllm.Vector):
                for position, count in enumerate(metric.values):
                    family.add_metric([*values, str(position)], count)
            elif isinstance(metric, vllm.Counter | vllm.Gauge):
                family.add_metric(values, metric.value)
    yield from families.values()


_VLLM_KINDS: dict[type[vllm.Metric], Any] = {
    vllm.Gauge: GaugeMetricFamily,
    vllm.Counter: CounterMetricFamily,
    vllm.Vector: CounterMetricFamily,
    vllm.Histogram: HistogramMetricFamily,
}


class RayMetrics:
    """Reports an engine's metrics to Ray, for its exporter and the panels of its dashboard.

    Ray's names contain no colon, so they begin with `vllm_`; Ray's exporter adds `ray_`. The object
    must be created in a Serve replica; Serve adds the labels `deployment`, `replica` and
    `application`.
    """

    def __init__(self) -> None:
        from ray.serve import metrics

        self._ray = metrics
        self._families: dict[str, Any] = {}
        self._before: dict[tuple[str, ...], Any] = {}  # the reported state, by name and labels

    def report(self, metrics: Iterable[vllm.Metric]) -> None:
        """Reports `metrics`; for counters and histograms, the change since the last report."""
        for metric in metrics:
            if isinstance(metric, vllm.Gauge):
                self._family("Gauge", metric).set(metric.value, metric.labels)
            elif isinstance(metric, vllm.Counter):
                self._count(metric)
            elif isinstance(metric, vllm.Vector):
                for position, count in enumerate(metric.values):
                    labels = {**metric.labels, "position": str(position)}
                    self._count(vllm.Counter(metric.name, labels, count))
            elif isinstance(metric, vllm.Histogram):
                bounds = [float(each) for each in metric.buckets][:-1]
                family = self._family("Histogram", metric, boundaries=bounds)
                for value in _new_values(self._swap(metric), metric):
                    family.observe(value, metric.labels)

    def _count(self, metric: vllm.Counter) -> None:
        before = self._swap(metric)
        new = metric.value - (0 if before is None else before.value)
        if new > 0:
            self._family("Counter", metric).inc(new, metric.labels)

    def _swap(self, metric: Any) -> Any:
        """Stores `metric` as reported; returns the series as it was reported before, or None."""
        key = (metric.name, *metric.labels.values())
        before, self._before[key] = self._before.get(key), metric
        return before

    def _family(self, kind: str, metric: vllm.Metric, **options: Any) -> Any:
        if metric.name not in self._families:
            name, labels = metric.name.replace(":", "_"), tuple(metric.labels)
            made = getattr(self._ray, kind)(
                name, vllm.HELP[metric.name], tag_keys=labels, **options
            )
            self._families[metric.name] = made
        return self._families[metric.name]


def _new_values(before: vllm.Histogram | None, after: vllm.Histogram) -> Iterator[float]:
    """Yields a value for each new observation in `after`, in the middle of its bucket.

    Ray's agent does the same with the values that it receives, so its sums are approximate anyway.
    """
    counts = [0] * len(after.buckets) if before is None else before.buckets.values()
    new = [
        now - then for now, then in zip(after.buckets.values(), counts, strict=True)
    ]  # cumulative
    lower = 0.0
    for bound, count, below in zip(after.buckets, new, [0, *new], strict=False):
        upper = 2 * lower if bound == "+Inf" else float(bound)
        yield from repeat((lower + upper) / 2, count - below)
        lower = upper


_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 60.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 4.0)
_GAP = "inter_token_latency_seconds"
_TIMES = {  # histograms of an edge
    "time_to_first_token_seconds": "From the request to its first token",
    _GAP: "Between two tokens, drafts shared out",
    "e2e_request_latency_seconds": "From the request to its last token",
    "request_queue_time_seconds": "From the engine's queue to a seat",
    "request_prefill_time_seconds": "From the seat to the first token",
    "request_decode_time_seconds": "From the first token to the last",
    "request_replay_seconds": "From the loss of a request's engine to its next token elsewhere",
}


class EdgeMetrics:
    """The metrics measured by one ingress."""

    def __init__(self, model: str, ingress: str = "local") -> None:
        self._labels = {"model": model, "ingress": ingress}
        self._times = {
            name: Histogram(_GAP_SECONDS if name == _GAP else _SECONDS) for name in _TIMES
        }
        self._num_prompt = self._num_output = 0  # tokens
        self._num_ended: dict[str, int] = {}  # completions by finish reason

    def started(self, num_prompt_tokens: int) -> None:
        """Counts an accepted request."""
        self._num_prompt += num_prompt_tokens

    def tokens(self, count: int, gap_s: float | None) -> None:
        """Records `count` tokens, each `gap_s` after the one before; None for the first tokens.

        The registry of Prometheus' client is not used, because counting a token there would take as
        long as encoding it as JSON.
        """
        self._num_output += count
        if gap_s is not None:
            self._times[_GAP].observe(gap_s, count)

    def observe(self, name: str, seconds: float) -> None:
        """Adds a value to the histogram `name`."""
        self._times[name].observe(seconds)

    def replayed(self, pause_s: float) -> None:
        """Records a request whose engine was lost and that another engine has continued."""
        self.observe("request_replay_seconds", pause_s)

    def ended(self, reason: str) -> None:
        """Counts a completion that has ended."""
        self._num_ended[reason] = self._num_ended.get(reason, 0) + 1

    def families(self) -> list[Metric]:
        """Returns a snapshot that can be sent to another process."""
        names, values = [*self._labels], [*self._labels.values()]
        families: list[Metric] = []
        for name, text in _TIMES.items():
            times = HistogramMetricFamily(PREFIX + name, text, labels=names)
            times.add_metric(values, *_cumulative(self._times[name].as_dict()))
            families.append(times)
        for name, count, text in (
            ("prompt_tokens", self._num_prompt, "Prompt tokens of requests at this edge"),
            ("generation_tokens", self._num_output, "Tokens sent by this edge"),
        ):
            tokens = CounterMetricFamily(PREFIX + name, text, labels=names)
            tokens.add_metric(values, count)
            families.append(tokens)
        ended = CounterMetricFamily(
            f"{PREFIX}request_success",
            "Completions by how they ended",
            labels=[*names, "finished_reason"],
        )
        for reason, count in self._num_ended.items():
            ended.add_metric([*values, reason], count)
        return [*families, ended]


class Stopwatch:
    """Measures the times of one completion, starting now."""

    def __init__(self, metrics: EdgeMetrics) -> None:
        self._metrics = metrics
        self._start_s = self._last_s = time.perf_counter()
        self._first_s: float | None = None

    def tokens(self, count: int) -> None:
        """Records `count` tokens that arrived at once; the time is shared equally among them."""
        if count == 0:
            return
        now = time.perf_counter()
        if self._first_s is None:
            self._first_s = now
            self._metrics.observe("time_to_first_token_seconds", now - self._start_s)
            self._metrics.tokens(count, None)
        else:
            self._metrics.tokens(count, (now - self._last_s) / count)
        self._last_s = now

    def before_first(self, times: RequestTimes) -> None:
        """Records the engine's times before the first token."""
        self._metrics.observe("request_queue_time_seconds", times.queue_s)
        self._metrics.observe("request_prefill_time_seconds", times.prefill_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the completion's start."""
        return time.perf_counter() - self._start_s

    def finished(self, reason: str) -> None:
        """Records the completion's end."""
        metrics = self._metrics
        if self._first_s is not None:
            metrics.observe("request_decode_time_seconds", self._last_s - self._first_s)
        metrics.ended(reason)
        metrics.observe("e2e_request_latency_seconds", self.elapsed_s)


def exposition(edges: Iterable[Metric], engines: Mapping[str, dict[str, dict[str, Any]]]) -> bytes:
    """Returns Prometheus' text format for ingresses and engines; joins families of the same name.

    `engines` has `Engine.stats()` by model and replica.
    """
    joined: dict[str, Metric] = {}
    found = [
        made(replicas, model)
        for made in (engine_families, vllm_families)
        for model, replicas in engines.items()
    ]
    for family in chain(edges, *found):
        known = joined.setdefault(family.name, family)
        if known is not family:
            known.samples.extend(family.samples)
    return generate_latest(SimpleNamespace(collect=joined.values))
