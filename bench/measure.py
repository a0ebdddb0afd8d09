"""What is measured, and the arithmetic on it: percentiles, acceptance, ratios of rounds.

Pure values in, pure values out; who produces them is in `contenders.py`, `hf_baseline.py` and
`suite/`.
A ratio is taken within a round, where both sides saw the same machine, and the median over rounds
is reported with its extremes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of one request that came together."""

    at_s: float  # on the run's clock
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: at random, `rate` a second, and at most `streams` in flight.

    Without a rate, or with an infinite one, all are there at once: with `streams` a closed loop.
    """

    streams: int | None = None
    rate: float | None = None
    burstiness: float = 1.0  # shape of the gaps: 1 is a Poisson process, more is more even
    seed: int = 20  # of the arrivals: the same for every contender and round

    def __post_init__(self) -> None:
        assert self.streams is not None or self.rate is not None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else str(self.streams)

    def times_s(self, num_requests: int) -> list[float]:
        """When each request comes; the first at once."""
        if self.rate is None:
            return [0.0] * num_requests
        return arrival_times_s(self.rate, num_requests, self.seed, self.burstiness)


@dataclass(frozen=True, slots=True)
class Trace:
    """One request that was answered in full, from its submission to its last token."""

    prompt_index: int  # among the run's prompts
    submitted_s: float  # on the run's clock
    arrivals: tuple[Arrival, ...]
    output: tuple[int, ...] | str  # token ids, or text where a server sends nothing else
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return (self.arrivals[0].at_s - self.submitted_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """Time to the last token."""
        return (self.arrivals[-1].at_s - self.submitted_s) * 1e3

    @property
    def inter_token_ms(self) -> list[float]:
        """One value per token after the first arrival: the gap, shared by those who ended it."""
        gaps: list[float] = []
        for before, after in zip(self.arrivals, self.arrivals[1:]):
            gap_ms = (after.at_s - before.at_s) * 1e3
            gaps += [gap_ms / after.num_tokens] * after.num_tokens
        return gaps

    @property
    def gap_ms(self) -> list[float]:
        """What a reader of the stream waits between two arrivals."""
        return [
            (after.at_s - before.at_s) * 1e3
            for before, after in zip(self.arrivals, self.arrivals[1:])
        ]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts fared, from differences of the engine's counters."""

    num_steps: int = 0  # target steps that emitted, summed over requests
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """Accepted of the drafted tokens."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_accepted_len(self) -> float:
        """Accepted tokens a request gets from a step; the target's own token comes on top."""
        return self.num_accepted / self.num_steps if self.num_steps else 0.0

    @property
    def rate_per_pos(self) -> list[float]:
        """Of all drafts, those accepted at least so far."""
        return [count / self.num_drafts for count in self.accepted_per_pos]

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "rate": self.rate,
            "mean_accepted_len": self.mean_accepted_len,
            "rate_per_pos": self.rate_per_pos,
        }


def add_acceptance(parts: Iterable[Acceptance]) -> Acceptance:
    """The sum."""
    parts = list(parts)
    width = max((len(part.accepted_per_pos) for part in parts), default=0)
    padded = [part.accepted_per_pos + (0,) * (width - len(part.accepted_per_pos)) for part in parts]
    return Acceptance(
        num_steps=sum(part.num_steps for part in parts),
        num_drafts=sum(part.num_drafts for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted=sum(part.num_accepted for part in parts),
        accepted_per_pos=tuple(sum(counts) for counts in zip(*padded)),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts once, through one contender, under one load."""

    contender: str
    load: Load
    wall_s: float
    traces: tuple[Trace, ...]
    failures: tuple[str, ...] = ()  # why the other requests were not answered
    num_steps: int = 0  # target forwards; 0: not known
    acceptance: Acceptance | None = None

    @property
    def num_tokens(self) -> int:
        return sum(trace.num_tokens for trace in self.traces)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two throughputs, round by round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest two; 0 for no values."""
    return float(np.percentile(values, percent)) if values else 0.0


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`{"p50": ..., "p90": ..., "p99": ...}`."""
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTS}


def arrival_times_s(
    rate: float, num_requests: int, seed: int, burstiness: float = 1.0
) -> list[float]:
    """When `rate` requests a second come at random; the first at once, the same ones for a seed.

    Gaps are Gamma-distributed with shape `burstiness`: with 1, the arrivals are a Poisson process.
    """
    count = max(num_requests - 1, 0)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return [0.0, *np.cumsum(gaps).tolist()][:num_requests]


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """`ours / theirs`, round by round; both sides of a round saw the same machine."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    ratios = [mine / other for mine, other in zip(ours, theirs)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def differing(ours: Sequence[Trace], theirs: Sequence[Trace]) -> list[tuple[int, int]]:
    """Prompts that both answered with different outputs, each with the first differing place.

    A place is a token's position, or a character's where the outputs are texts.
    """
    reference = {trace.prompt_index: trace.output for trace in theirs}
    found = []
    for trace in ours:
        mine, other = trace.output, reference.get(trace.prompt_index, trace.output)
        if isinstance(mine, str) != isinstance(other, str):
            continue  # a text and token ids: not comparable
        if mine != other:
            same = [one == two for one, two in zip(mine, other)] + [False]
            found.append((trace.prompt_index, same.index(False)))
    return found


# Calls timed in turn, so that they meet the same machine, and tables of what they took.

Call = Callable[[], object]


def in_turn(
    calls: Mapping[str, Call], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Milliseconds of every call in each of `rounds`; before them, each runs once."""
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if number:
                times_ms[name].append((clock() - start) * 1e3)
    return times_ms


class Rows:
    """A Markdown table, whose rows are written as they are measured."""

    def __init__(self, *columns: str) -> None:
        self.add(*columns)
        sys.stdout.write("|" + "---|" * len(columns) + "\n")

    def add(self, *cells: object) -> None:
        """A row."""
        sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Pair:
    """One part in one case."""

    part: str
    case: str
    ours: Call
    reference: Call
    waits: bool = False  # for another thread: the wall's clock counts, not this thread's


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds of the quickest call."""

    part: str
    case: str
    ours_us: float
    reference_us: float

    @property
    def ratio(self) -> float:
        return self.ours_us / self.reference_us


def timed(pair: Pair, rounds: int) -> Timed:
    """The quickest of `rounds` calls each, by the thread's time on a CPU if it never waits."""
    clock = time.perf_counter if pair.waits else time.thread_time
    times_ms = in_turn({"ours": pair.ours, "reference": pair.reference}, rounds, clock)
    return Timed(pair.part, pair.case, *(min(each) * 1e3 for each in times_ms.values()))


def show(pairs: Iterable[Pair], rounds: int, *columns: str) -> None:
    """A row for every pair: its part and case, microseconds of both, and their ratio."""
    table = Rows(*columns)
    for pair in pairs:
        found = timed(pair, rounds)
        times = (f"{found.ours_us:.1f}", f"{found.reference_us:.1f}", f"{found.ratio:.2f}")
        table.add(found.part, found.case, *times)
