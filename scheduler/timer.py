"""Counters of the engine: `SchedulerCounts` and `RequestTimer` for requests, `StepTimes` for steps.

`StepTimer` calls the loop's verbs and adds up their times. `TraceLog` collects steps and requests
one by one, for a simulation.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from .types import Batch, Draft, RequestTimes, ThreadChoice, Verdict, record


class Histogram:
    """A histogram of observed values, with Prometheus' semantics.

    Args:
        bounds: ascending; a value belongs to the first bound that is not below it, or to a last
            bucket without a bound.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def as_dict(self) -> dict[str, Any]:
        """Plain values; the counts are not cumulative."""
        return {"bounds": self._bounds, "counts": tuple(self._counts), "sum": self._total}


Clock = Callable[[], float]  # monotonic seconds; a simulation has its own
Verb = Literal["schedule_ms", "propose_ms", "verify_ms", "commit_ms", "observe_ms"]
_PHASES = ("draft", "verify", "overhead")
_BOUNDS_S = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    num_finished: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_looked_up_tokens: int = 0  # tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # found there


_LATENCIES_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_NUM_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@record
class RequestRecord:
    """A finished request in a trace of the engine."""

    id: str
    arrived_s: float  # by the scheduler's clock
    num_prompt: int  # tokens
    num_output: int


class RequestTimer:
    """Counts requests by how they end, and observes their times and sizes.

    A request that continues one of a lost engine has no first token here.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.on_end: Callable[[RequestRecord], None] | None = None  # called after every request
        self.num_ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # by finish reason
        self._times = {
            name: Histogram(_LATENCIES_S)
            for name in ("first_token", "queue", "prefill", "decode", "output_token", "whole")
        }
        self._sizes = {name: Histogram(_NUM_TOKENS) for name in ("prompt", "output")}

    def first(self, times: RequestTimes) -> None:
        """Records the time of a request's first token."""
        self._times["queue"].observe(times.queue_s)
        self._times["prefill"].observe(times.prefill_s)
        self._times["first_token"].observe(times.queue_s + times.prefill_s)

    def end(self, reason: str, ended: RequestRecord, first_s: float | None) -> None:
        """Records the end of a request.

        Args:
            first_s: time of its first token on the timer's clock; None: it emitted none.
        """
        now = self._clock()
        arrived_s, num_prompt, num_output = ended.arrived_s, ended.num_prompt, ended.num_output
        self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
        self._times["whole"].observe(now - arrived_s)
        self._sizes["prompt"].observe(num_prompt)
        self._sizes["output"].observe(num_output)
        if first_s is not None:
            self._times["decode"].observe(now - first_s)
            if num_output > 1:
                self._times["output_token"].observe((now - first_s) / (num_output - 1))
        if self.on_end is not None:
            self.on_end(ended)

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Seconds (`*_s`) and tokens (`*_tokens`) per request."""
        times = {f"{name}_s": each.as_dict() for name, each in self._times.items()}
        return times | {f"{name}_tokens": each.as_dict() for name, each in self._sizes.items()}


@dataclass(slots=True)
class StepTimes:
    """Totals of all steps so far, in milliseconds."""

    num_steps: int = 0
    num_tokens: int = 0  # computed in target forwards, drafts included
    num_sequences: int = 0  # summed over the steps' batches
    num_sampled: int = 0  # of these, sequences that emitted
    num_granted_nodes: int = 0  # draft nodes that the budget granted
    num_draft_nodes: int = 0  # draft nodes that were verified
    schedule_ms: float = 0.0
    propose_ms: float = 0.0
    verify_ms: float = 0.0
    forward_ms: float = 0.0  # part of `verify_ms` inside the model and the rule
    commit_ms: float = 0.0
    observe_ms: float = 0.0


@record
class StepRecord:
    """A step in a trace of the engine: its size, its time and the outcome of its drafts."""

    num_seqs: int
    num_tokens: int  # known tokens that it computed
    num_context: int  # tokens in the KV cache after it, of all its sequences
    num_asked: int  # sequences that were granted nodes
    longest: int  # nodes of the longest draft
    elapsed_ms: float  # since the step before, or since the engine had work again
    draft_ms: float  # of that, waiting for drafters
    num_nodes: int  # of all drafts
    # (request, nodes, accepted nodes), without drafts that were cut by the end of their request.
    drafts: tuple[tuple[str, int, int], ...]


class StepTimer:
    """Calls verbs and times them."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.times = StepTimes()
        self.on_step: Callable[[StepRecord], None] | None = None  # called after every step
        self._clock = clock
        self._begun_s: float | None = None  # of the step that runs; None: the engine had no work
        self._propose_ms = 0.0  # of `times`, up to the last step
        self.thread_choices: tuple[ThreadChoice, ...] = ()  # rank 0's latest
        self._histograms = [Histogram(_BOUNDS_S) for _ in _PHASES]
        self._seen_ms = (0.0, 0.0, 0.0)  # by phase, up to the last step counted

    def __call__(
        self, verb: Verb, call: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs
    ) -> Result:
        """Calls `call` and adds its time to `verb`, unless it raises."""
        start = self._clock()
        if self._begun_s is None:
            self._begun_s = start
        result = call(*args, **kwargs)
        elapsed_ms = (self._clock() - start) * 1e3
        setattr(self.times, verb, getattr(self.times, verb) + elapsed_ms)
        return result

    def count(self, batch: Batch, drafts: Sequence[Draft], verdict: Verdict) -> float:
        """Counts a committed step; returns milliseconds since the last one was counted.

        This is wall time, so it includes what happened between the verbs.
        """
        times, plan, num_nodes = self.times, batch.plan, 0
        for draft in drafts:
            num_nodes += len(draft.tokens)
        times.num_steps += 1
        # On arrays of this size, Python's sums are faster than numpy's.
        times.num_tokens += sum(plan.chunk_lens.tolist()) + num_nodes
        times.num_sequences += len(batch.request_ids)
        times.num_sampled += sum(batch.samples.tolist())
        num_granted = sum(plan.max_nodes.tolist())
        times.num_granted_nodes += num_granted if plan.num_kept < 0 else plan.num_kept
        times.num_draft_nodes += num_nodes
        times.forward_ms += verdict.forward_ms
        if verdict.thread_choices is not None:
            self.thread_choices = verdict.thread_choices
        totals_ms = (
            times.propose_ms + times.observe_ms,
            times.verify_ms,
            times.schedule_ms + times.commit_ms,
        )
        for histogram, total_ms, seen_ms in zip(
            self._histograms, totals_ms, self._seen_ms, strict=True
        ):
            histogram.observe((total_ms - seen_ms) / 1e3)
        now, begun = self._clock(), self._begun_s
        elapsed_ms = sum(totals_ms) - sum(self._seen_ms)
        if begun is not None:
            elapsed_ms = (now - begun) * 1e3
            if self.on_step is not None:
                draft_ms = times.propose_ms - self._propose_ms
                self.on_step(_recorded(batch, drafts, verdict, elapsed_ms, draft_ms))
        self._seen_ms, self._begun_s, self._propose_ms = totals_ms, now, times.propose_ms
        return elapsed_ms

    def rest(self) -> None:
        """Called when the engine has no work; idle time is not counted as part of a step."""
        self._begun_s = None

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Seconds per step, by phase."""
        return {
            phase: each.as_dict() for phase, each in zip(_PHASES, self._histograms, strict=True)
        }


def _recorded(
    batch: Batch, drafts: Sequence[Draft], verdict: Verdict, elapsed_ms: float, draft_ms: float
) -> StepRecord:
    asked = np.flatnonzero(batch.max_nodes).tolist()
    accepted = verdict.num_accepted.tolist()
    rooms, depths = batch.max_nodes.tolist(), batch.max_depth.tolist()
    known = batch.plan.context_lens + batch.plan.chunk_lens
    return StepRecord(
        num_seqs=batch.num_seqs,
        num_tokens=batch.num_tokens,
        num_context=int(known.sum()),
        num_asked=len(asked),
        longest=max((draft.num_nodes for draft in drafts), default=0),
        elapsed_ms=elapsed_ms,
        draft_ms=draft_ms,
        num_nodes=sum(draft.num_nodes for draft in drafts),
        drafts=tuple(
            (batch.request_ids[row], drafts[row].num_nodes, accepted[row])
            for row in asked
            if rooms[row] < depths[row]
        ),
    )


COLUMNS = ("num_seqs", "num_tokens", "num_context", "num_asked", "num_nodes", "longest",
           "elapsed_ms", "draft_ms")  # fmt: skip
"""Fields of `StepRecord` that a trace keeps for every step."""


class TraceLog:
    """Collects the steps of a live engine (`StepTimer.on_step`), and its requests
    (`RequestTimer.on_end`): numbers of tokens and times, and neither text nor names.

    Args:
        decoding_type: of the drafter.
        max_steps: how many steps, and how many requests, there may be; later ones are left out.
        clock: the scheduler's; requests that arrived before now are left out.
    """

    def __init__(
        self,
        name: str,
        decoding_type: str,
        max_steps: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name, self.decoding_type = name, decoding_type
        self._begun_s, self._max_steps = clock(), max_steps
        self._lock = threading.Lock()  # the loop's thread writes, another thread may read
        self._columns = array("d")  # [num_steps, num_columns], flat
        self._drafts: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
        self._requests: list[RequestRecord] = []

    @property
    def num_steps(self) -> int:
        return len(self._columns) // len(COLUMNS)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def is_full(self) -> bool:
        """Whether no more steps are recorded."""
        return self._max_steps is not None and self.num_steps >= self._max_steps

    def __call__(self, step: StepRecord) -> None:
        if self.is_full:
            return
        with self._lock:
            self._columns.extend([float(getattr(step, name)) for name in COLUMNS])
            for request_id, nodes, accepted in step.drafts:
                self._drafts[request_id][nodes, accepted] += 1

    def end(self, request: RequestRecord) -> None:
        """Adds a finished request, unless it has emitted nothing."""
        since = request.arrived_s >= self._begun_s and not self.is_full
        if since and request.num_output and self.num_requests != self._max_steps:
            with self._lock:
                self._requests.append(request)

    def run(self, *, warms_up: bool = False) -> dict[str, Any]:
        """The trace so far, as `TraceRun` in `bench/traces.py` reads it.

        Args:
            warms_up: whether to leave out requests with far fewer drafts than most.
        """
        with self._lock:
            table = np.array(self._columns).reshape(-1, len(COLUMNS))
            drafts = {name: sorted(each.items()) for name, each in self._drafts.items()}
            requests = sorted(self._requests, key=lambda each: each.arrived_s)
        totals = sorted(sum(count for _, count in each) for each in drafts.values())
        least = totals[len(totals) // 2] / 4 if totals and warms_up else 0
        kept = {
            name: [[*pair, count] for pair, count in each]
            for name, each in drafts.items()
            if sum(count for _, count in each) >= least
        }
        places = {name: place for place, name in enumerate(kept)}
        return {
            "name": self.name,
            "decoding_type": self.decoding_type,
            "columns": dict(zip(COLUMNS, table.T.round(4).tolist(), strict=True)),
            "drafts": [*kept.values()],
            "requests": [
                [
                    round(each.arrived_s - self._begun_s, 6),
                    each.num_prompt,
                    each.num_output,
                    places.get(each.id, -1),
                ]
                for each in requests
            ],
        }
