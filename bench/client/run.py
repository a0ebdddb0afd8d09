"""One run against a server: warm-up, the load, and the report as a dictionary with vLLM's keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import OutriderError
from ..measure import Acceptance, Arrival, Load, Trace, add_acceptance
from .datasets import Loaded, Sample, Tokens
from .load import CHATS, Answer, Endpoint, negotiate, parse, send_all
from .scores import draft_scores, gained, latency_scores, num_good, peaks, read_counters

_FIRST_TOKENS = 16  # of the request that tries the server
_NEWER_LIMIT = "max_completion_tokens"  # OpenAI's name for chats; others know the older one
_NO_COUNTS = (
    "The server counts no tokens: one is assumed for each event. --tokenizer counts those of the "
    "texts."
)


class NothingAnsweredError(OutriderError):
    """The server answered no request of a run, or not the first."""


@dataclass(frozen=True)
class Plan:
    """What is sent, and what is reported of it."""

    endpoint: Endpoint
    dataset: Loaded
    load: Load
    num_warmups: int
    metrics: Sequence[str]
    percents: Sequence[float]
    goodput: Mapping[str, float]
    tokens: Tokens | None = None
    counters: Callable[[], str] = str  # the server's `/metrics`; empty: it has none


@dataclass(frozen=True)
class Outcome:
    """A run's figures, the answers behind them, and what to know of both."""

    scores: dict[str, Any]
    answers: list[Answer]
    notes: tuple[str, ...]

    @property
    def traces(self) -> list[Trace]:
        return [each.trace for each in self.answers if each.trace is not None]

    @property
    def failures(self) -> list[str]:
        return [each.failure for each in self.answers if each.failure is not None]


def measure(plan: Plan, on_answer: Callable[[], None] = lambda: None) -> Outcome:
    """Runs the plan once.

    Args:
        on_answer: called after each request of the run itself.

    Raises:
        NothingAnsweredError: the server refuses the first request, or answers none.
    """
    samples = plan.dataset.samples
    endpoint, limit = _try(plan.endpoint, samples[0])
    if plan.num_warmups:
        warmups = [_altered(samples[at % len(samples)], at) for at in range(plan.num_warmups)]
        streams = plan.load.streams or plan.num_warmups
        send_all(endpoint, [_body(each, endpoint, limit) for each in warmups], Load(streams))
    bodies = [_body(sample, endpoint, limit) for sample in samples]
    before = read_counters(plan.counters())
    exchanges, wall_s = send_all(endpoint, bodies, plan.load, on_answer)
    after = read_counters(plan.counters())
    answers = [parse(index, exchange) for index, exchange in enumerate(exchanges)]
    notes = list(plan.dataset.notes)
    if not all(each.is_counted for each in answers if each.trace is not None):
        if plan.tokens is None:
            notes.append(_NO_COUNTS)
        else:
            answers = [_counted(each, samples, plan.tokens) for each in answers]
    late_ms = [(each.submitted_s - each.due_s) * 1e3 for each in exchanges]
    outcome = Outcome({}, answers, tuple(notes))
    if not outcome.traces:
        raise NothingAnsweredError(
            f"none of {len(answers)} requests was answered; the first: {outcome.failures[0]}"
        )
    drafts = _drafts(before, after, answers)
    return replace(outcome, scores=_scores(plan, outcome, wall_s, late_ms) | drafts)


def _try(endpoint: Endpoint, sample: Sample) -> tuple[Endpoint, str]:
    """The endpoint as the server takes it, and its name of the limit of tokens.

    Raises:
        NothingAnsweredError: it takes none.
    """
    first = replace(_altered(sample, 0), output_len=min(sample.output_len, _FIRST_TOKENS))
    limit = "max_tokens"
    found, failure = negotiate(endpoint, _body(first, endpoint, limit))
    if failure is not None and _NEWER_LIMIT in failure:
        limit = _NEWER_LIMIT
        found, failure = negotiate(endpoint, _body(first, endpoint, limit))
    if failure is not None:
        raise NothingAnsweredError(f"the first request failed: {failure}")
    return found, limit


def _altered(sample: Sample, index: int) -> Sample:
    """The sample with another beginning: no prefix cache has what the run will ask for."""
    mark = f"{index} "
    return replace(sample, prompt=mark + sample.prompt[len(mark) :])


def _body(sample: Sample, endpoint: Endpoint, limit: str) -> dict[str, Any]:
    asked: dict[str, Any] = {limit: sample.output_len}
    if endpoint.path.endswith(CHATS.removeprefix("/v1")):
        return {"messages": [{"role": "user", "content": sample.prompt}], **asked}
    return {"prompt": sample.prompt, **asked}


def _counted(answer: Answer, samples: Sequence[Sample], tokens: Tokens) -> Answer:
    """The answer with tokens counted by the tokenizer, over its events in even parts."""
    trace = answer.trace
    if trace is None or answer.is_counted:
        return answer
    total = max(len(tokens.encode(str(trace.output))), 1)
    num_events = len(trace.arrivals)
    ends = [max(round(total * place / num_events), 1) for place in range(1, num_events + 1)]
    arrivals = tuple(
        Arrival(arrival.at_s, end - begin)
        for arrival, begin, end in zip(trace.arrivals, [0, *ends], ends)
        if end > begin
    )
    num_prompt_tokens = len(tokens.encode(samples[trace.prompt_index].prompt))
    made = replace(trace, arrivals=arrivals, num_prompt_tokens=num_prompt_tokens)
    return replace(answer, trace=made)


def _drafts(
    before: tuple[str, Acceptance] | None,
    after: tuple[str, Acceptance] | None,
    answers: Sequence[Answer],
) -> dict[str, Any]:
    """How drafts fared: by the server's counters, else by what it says with each answer."""
    if before is not None and after is not None and before[0] == after[0]:
        found = gained(before[1], after[1])
        return {} if found is None else draft_scores(found, after[0])
    parts = [each.acceptance for each in answers if each.acceptance is not None]
    total = add_acceptance(parts)
    return draft_scores(total, "usage") if total.num_draft_tokens else {}


def _scores(
    plan: Plan, outcome: Outcome, wall_s: float, late_ms: Sequence[float]
) -> dict[str, Any]:
    traces, load = outcome.traces, plan.load
    num_input = sum(trace.num_prompt_tokens for trace in traces)
    num_output = sum(trace.num_tokens for trace in traces)
    rate = math.inf if load.rate is None else load.rate
    scores: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": plan.endpoint.model,
        "num_prompts": len(outcome.answers),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.streams,
        "duration": wall_s,
        "completed": len(traces),
        "failed": len(outcome.failures),
        "first_error": next(iter(outcome.failures), None),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(traces) / wall_s,
        "output_throughput": num_output / wall_s,
        "total_token_throughput": (num_input + num_output) / wall_s,
        **peaks(traces),
    }
    if plan.goodput:
        scores["request_goodput"] = num_good(traces, plan.goodput) / wall_s
    scores |= latency_scores(traces, plan.metrics, plan.percents)
    if not math.isinf(rate):
        scores["max_late_ms"] = max(late_ms)
    return scores


def details(outcome: Outcome) -> dict[str, list[Any]]:
    """Values of each request, in order, as vLLM's `--save-detailed` has them; times in seconds."""
    made: dict[str, list[Any]] = {}
    for each in outcome.answers:
        trace = each.trace
        row = {
            "input_lens": trace.num_prompt_tokens if trace else 0,
            "output_lens": trace.num_tokens if trace else 0,
            "start_times": trace.submitted_s if trace else None,
            "ttfts": trace.ttft_ms / 1e3 if trace else 0.0,
            "itls": [gap / 1e3 for gap in trace.gap_ms] if trace else [],
            "generated_texts": str(trace.output) if trace else "",
            "errors": each.failure or "",
        }
        for name, value in row.items():
            made.setdefault(name, []).append(value)
    return made
