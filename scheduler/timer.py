"""What the engine counts: `SchedulerCounts` of requests, and `StepTimes` of steps.

`StepTimer` calls the loop's verbs and adds up their times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from .histogram import Histogram
from .plan import Batch
from .types import Draft, Verdict

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
    num_looked_up_tokens: int = 0  # asked of the prefix cache
    num_hit_tokens: int = 0  # found there


@dataclass(slots=True)
class StepTimes:
    """Totals of all steps so far, in milliseconds."""

    num_steps: int = 0
    num_tokens: int = 0  # computed in target forwards, drafts included
    num_sequences: int = 0  # summed over the steps' batches
    num_sampled: int = 0  # of those, that emitted
    num_granted_nodes: int = 0  # draft nodes that the budget allowed them
    num_draft_nodes: int = 0  # that were verified
    schedule_ms: float = 0.0
    propose_ms: float = 0.0
    verify_ms: float = 0.0
    forward_ms: float = 0.0  # of verify_ms, inside the model and the rule
    commit_ms: float = 0.0
    observe_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """What rank 0 measured on a CPU of steps of at least `min_tokens`, for one of that many."""

    min_tokens: int
    num_threads: int  # that most such steps take
    one_ms: float  # with one thread
    all_ms: float  # with all of the rank's


class StepTimer:
    """Calls verbs and times them."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.thread_choices: tuple[ThreadChoice, ...] = ()  # rank 0's latest
        self._histograms = [Histogram(_BOUNDS_S) for _ in _PHASES]
        self._seen_ms = (0.0, 0.0, 0.0)  # by phase, up to the last step counted

    def __call__(
        self,
        verb: Verb,
        call: Callable[Args, Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """`call`'s result; its time goes to `verb`, unless it raises."""
        start = time.perf_counter()
        result = call(*args, **kwargs)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        setattr(self.times, verb, getattr(self.times, verb) + elapsed_ms)
        return result

    def count(self, batch: Batch, drafts: Sequence[Draft], verdict: Verdict) -> float:
        """Counts a step that was committed; milliseconds since the one before was counted."""
        times, num_nodes = self.times, sum([len(draft.tokens) for draft in drafts])
        times.num_steps += 1
        times.num_tokens += batch.num_tokens + num_nodes
        times.num_sequences += batch.num_seqs
        # Numpy's own sums take longer on arrays of this size.
        times.num_sampled += sum(batch.samples.tolist())
        times.num_granted_nodes += sum(batch.max_nodes.tolist())
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
        elapsed_ms = sum(totals_ms) - sum(self._seen_ms)
        self._seen_ms = totals_ms
        return elapsed_ms

    def histograms(self) -> dict[str, dict[str, Any]]:
        """Seconds per step, by phase."""
        return {
            phase: each.as_dict() for phase, each in zip(_PHASES, self._histograms, strict=True)
        }
