"""What live engines recorded, and the times that are fitted to it, for a simulation.

A trace has times, numbers of tokens and of accepted nodes (`TraceLog` in `scheduler/timer.py`), and
neither text nor names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ..config import Strict, parse
from ..errors import ConfigError
from ..scheduler.timer import COLUMNS
from .modelled import Curve, DraftTimes, Floats, TargetTimes

_Count = Annotated[int, Field(ge=0)]


class TraceRun(Strict):
    """The steps of one engine with one drafter, and the requests that ended meanwhile."""

    name: str
    """Of the contender, or of the engine."""
    decoding_type: str
    """Of its drafter."""
    columns: dict[str, tuple[float, ...]]
    """[num_steps] each, by the fields of `StepRecord`."""
    drafts: tuple[tuple[tuple[_Count, _Count, Annotated[int, Field(ge=1)]], ...], ...]
    """Of each request: nodes, accepted nodes, and how many such drafts."""
    requests: tuple[
        tuple[
            Annotated[float, Field(ge=0, allow_inf_nan=False)],
            Annotated[int, Field(ge=1)],
            Annotated[int, Field(ge=1)],
            Annotated[int, Field(ge=-1)],
        ],
        ...,
    ] = ()
    """Of each, as they came: second of its arrival, tokens of its prompt, tokens of its answer, and
    its place in `drafts`; -1: it had none."""

    @property
    def recorded(self) -> list[dict[tuple[int, int], int]]:
        """The drafts of each request."""
        return [{(nodes, right): count for nodes, right, count in each} for each in self.drafts]

    def check(self) -> None:
        """Raises `ConfigError` for columns or requests that do not fit together."""
        sizes = {len(self.columns.get(name, ())) for name in COLUMNS}
        if len(sizes) > 1 or sizes == {0}:
            raise ConfigError.at("trace", f"{self.name}: columns of {sorted(sizes)} steps")
        values = np.array([self.columns[name] for name in COLUMNS])
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ConfigError.at("trace", f"{self.name}: columns have negative or infinite values")
        if not (values[COLUMNS.index("num_seqs")] >= 1).all():
            raise ConfigError.at("trace", f"{self.name}: there are steps of no sequence")
        for nodes, right, _ in (pair for each in self.drafts for pair in each):
            if right > nodes:
                raise ConfigError.at("trace", f"{self.name}: {right} of {nodes} nodes accepted")
        if any(place >= len(self.drafts) for *_, place in self.requests):
            raise ConfigError.at("trace", f"{self.name}: a request has drafts that are not there")


class Trace(Strict):
    """What live engines recorded: `outrider bench --trace FILE`, or `GET /admin/trace`."""

    version: Literal[1] = Field(description="Of the form of traces.")
    machine: dict[str, Any] = Field(description="Where it was recorded.")
    model: str = Field(description="Its folder or name.")
    runs: tuple[TraceRun, ...] = Field(description="Of each engine and drafter.")

    @classmethod
    def read(cls, data: dict[str, Any]) -> Trace:
        """Raises `ConfigError` for what is no trace, or has no steps; names `trace`."""
        try:
            trace = parse(cls, data)
        except ConfigError as error:
            raise ConfigError.at("trace", f"not a trace of this version: {error.message}") from None
        for run in trace.runs:
            run.check()
        if not trace.runs:
            raise ConfigError.at("trace", "it has no steps")
        return trace

    def run_of(self, decoding_type: str) -> TraceRun:
        """The steps and drafts of all runs with this drafter, without their requests.

        Raises:
            ConfigError: there is none; says which there are.
        """
        runs = [run for run in self.runs if run.decoding_type == decoding_type]
        if not runs:
            there = ", ".join(sorted({run.decoding_type for run in self.runs}))
            raise ConfigError.at("trace", f"it has no drafts of {decoding_type}; it has {there}")
        return TraceRun(
            name=runs[0].name,
            decoding_type=decoding_type,
            columns={name: sum((run.columns[name] for run in runs), ()) for name in COLUMNS},
            drafts=sum((run.drafts for run in runs), ()),
        )

    def requests(self, decoding_type: str = "") -> list[TracedRequest]:
        """Of all runs, as they came.

        Args:
            decoding_type: of the drafter whose drafts, as `run_of` has them, they follow.

        Raises:
            ConfigError: there are none.
        """
        found, num_drafts = [], 0
        for run in self.runs:
            is_of = run.decoding_type == decoding_type
            for arrived_s, num_prompt, num_output, place in run.requests:
                at = num_drafts + place if is_of and place >= 0 else -1
                found.append(TracedRequest(arrived_s, num_prompt, num_output, at))
            num_drafts += len(run.drafts) if is_of else 0
        if not found:
            raise ConfigError.at(
                "trace", "it has no requests: record one of a server, by POST /admin/trace"
            )
        return sorted(found, key=lambda each: each.arrived_s)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace."""

    arrived_s: float
    num_prompt: int  # tokens
    num_output: int
    drafts: int = -1  # place of its drafts among those of the drafter; -1: it has none


_FAR = 5.0  # times the median of similar steps: warming up, or another process's work
_FEW = 3  # steps of a kind that is no point of a curve
_SMOOTH = 1e-3  # weight of a straight curve against the measured steps


def fit_target(runs: Sequence[TraceRun]) -> TargetTimes:
    """Least squares of relative errors: a curve over rows, and costs per sequence and context.

    Steps that took many times as long as similar ones are left out.
    """
    joined = {name: np.concatenate([_column(run, name) for run in runs]) for name in COLUMNS}
    rows, seqs = joined["num_tokens"] + joined["num_nodes"], joined["num_seqs"]
    ms = joined["elapsed_ms"] - joined["draft_ms"]
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, kind in enumerate(zip(_octaves(rows), _octaves(seqs), strict=True)):
        kinds.setdefault(kind, []).append(index)
    means = []  # rows, sequences, context, milliseconds, steps
    for members in kinds.values():
        near = [each for each in members if ms[each] <= _FAR * np.median(ms[members])]
        values = (rows, seqs, joined["num_context"], ms)
        means.append([*(float(each[near].mean()) for each in values), len(near)])
    table = np.array(means)
    common = table[table[:, 4] >= _FEW] if (table[:, 4] >= _FEW).sum() > 1 else table
    knots = np.unique(common[:, 0].round())
    hats = np.stack([np.interp(table[:, 0], knots, unit) for unit in np.eye(len(knots))], axis=1)
    beyond = np.maximum(table[:, 0] / knots[-1], 1.0)[:, None]
    rises = np.tri(len(knots))  # the curve from its first value and its rises, which are positive
    terms = np.column_stack([hats * beyond @ rises, table[:, 1], table[:, 2] / 1e3])
    weights = np.sqrt(table[:, 4]) / table[:, 3]
    bends = np.zeros((max(len(knots) - 2, 0), terms.shape[1]))
    for place in range(len(bends)):
        left, right = np.diff(knots[place : place + 3])
        bends[place, place : place + 3] = right, -left - right, left
        bends[place] /= left + right
    bends[:, : len(knots)] = bends[:, : len(knots)] @ rises
    stiffness = np.sqrt(_SMOOTH * table[:, 4].sum()) / table[:, 3].mean()
    found = _non_negative(
        np.vstack([terms * weights[:, None], bends * stiffness]),
        np.concatenate([table[:, 3] * weights, np.zeros(len(bends))]),
    )
    curve = found[: len(knots)].cumsum()
    return TargetTimes(
        Curve(tuple(knots.tolist()), tuple(curve.tolist())), float(found[-2]), float(found[-1])
    )


def fit_draft(run: TraceRun) -> DraftTimes:
    """A cost of a round, of each level and of each row, from the steps that asked the drafter."""
    asked = _column(run, "num_asked") > 0
    if not asked.any():
        return DraftTimes(Curve((1.0,), (0.0,)))
    levels = _column(run, "longest")[asked]
    rows = (_column(run, "num_tokens") + _column(run, "num_nodes"))[asked]
    ms = _column(run, "draft_ms")[asked]
    near = ms <= _FAR * np.median(ms)
    terms = np.column_stack([np.ones(near.sum()), levels[near], rows[near]])
    round_ms, level_ms, row_ms = _non_negative(terms, ms[near]).tolist()
    return DraftTimes(Curve((0.0, 1.0), (level_ms, level_ms + row_ms)), round_ms)


def _column(run: TraceRun, name: str) -> Floats:  # [num_steps]
    return np.array(run.columns[name])


def _octaves(values: Floats) -> list[int]:
    """Each value below 16, and quarters of an octave above."""
    large = 16 + 4 * np.log2(np.maximum(values, 16) / 16)
    found: list[int] = np.where(values < 16, values, large).astype(int).tolist()
    return found


def _non_negative(terms: Floats, values: Floats) -> Floats:
    """Least squares without the terms that would be negative."""
    used = np.ones(terms.shape[1], dtype=np.bool_)
    found = np.zeros(terms.shape[1])
    while used.any():
        solved = np.linalg.lstsq(terms[:, used], values, rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved
            break
        used[np.flatnonzero(used)[solved.argmin()]] = False
    return found
