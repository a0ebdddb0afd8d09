"""What is measured, and the arithmetic on it: percentiles, acceptance, ratios of rounds.

Pure values in, pure values out; who produces them is in `contenders.py` and `hf_baseline.py`.
A ratio is taken within a round, where both sides saw the same machine, and the median over rounds
is reported with its extremes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of one request that came together."""

    at_s: float  # on the run's clock
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One request, from its submission to its last token."""

    submitted_s: float  # on the run's clock
    arrivals: tuple[Arrival, ...]
    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

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
    """All prompts once, through one contender, at one batch size."""

    contender: str
    batch_size: int
    wall_s: float
    traces: tuple[Trace, ...]
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
    """Linear between the nearest two, as numpy does it; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`{"p50": ..., "p90": ..., "p99": ...}`."""
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTS}


def ratio_of_rounds(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """`ours / theirs`, round by round; both sides of a round saw the same machine."""
    assert len(ours) == len(theirs) > 0, (len(ours), len(theirs))
    ratios = [mine / other for mine, other in zip(ours, theirs)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def differing(ours: Sequence[Trace], theirs: Sequence[Trace]) -> list[tuple[int, int]]:
    """Prompts whose tokens differ, each with the first differing position."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    found = []
    for prompt, (mine, other) in enumerate(zip(ours, theirs)):
        if mine.token_ids != other.token_ids:
            common = zip(mine.token_ids, other.token_ids)
            same = [one == two for one, two in common] + [False]
            found.append((prompt, same.index(False)))
    return found
