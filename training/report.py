"""Reports of a training run: progress bar, acceptance tables, plot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Score:
    """Draft quality on held-out text."""

    loss: float
    acceptance: tuple[float, ...]  # by position d: the first d + 1 drafted tokens are accepted

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per step by a chain of all positions, including the target's own."""
        return 1 + sum(self.acceptance)


Scores = Mapping[str, Score]  # by kind of text


def as_row(step: int, scores: Scores) -> dict[str, Any]:
    """Scores as a line of the log."""
    return {"step": step, "heldout": {kind: asdict(score) for kind, score in scores.items()}}


def from_row(row: Mapping[str, Any]) -> Scores:
    """The inverse of `as_row`."""
    return {
        kind: Score(found["loss"], tuple(found["acceptance"]))
        for kind, found in row["heldout"].items()
    }


def acceptance_table(title: str, scores: Scores) -> Table:
    """Held-out acceptance by position, one row per kind of text."""
    most = max((len(score.acceptance) for score in scores.values()), default=0)
    columns = [
        "held out",
        "loss",
        *(f"{position + 1}" for position in range(most)),
        "tokens per step",
    ]
    table = Table(title=title or None, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for kind, score in scores.items():
        shares = [f"{share:.1%}" for share in score.acceptance]
        table.add_row(kind, f"{score.loss:.3f}", *shares, f"{score.tokens_per_step:.2f}")
    return table


class Reporter:
    """Shows a run on the console; only in the first process."""

    def __init__(self, *, shown: bool) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=not shown)
        self._shown = shown

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar for counted items."""
        with self._bar() as bar:
            task = bar.add_task(what, total=total, status="")
            yield lambda count: bar.advance(task, count)

    @contextmanager
    def training(self, what: str, first: int, total: int) -> Iterator[Steps]:
        """A progress bar for steps."""
        with self._bar() as bar:
            yield Steps(bar, bar.add_task(what, total=total, completed=first, status=""))

    def scores(self, title: str, scores: Scores) -> None:
        """Prints a table above the bar."""
        self._console.print(acceptance_table(title, scores))

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._shown,
        )


class Steps:
    """The progress bar of a run's steps."""

    def __init__(self, bar: Progress, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._accepted = ""
        self._num_tokens = 0
        self._spent_s = 0.0
        self._since = time.perf_counter()

    @property
    def tokens_per_s(self) -> float:
        """Training throughput since this run was started or resumed, without evaluation."""
        return self._num_tokens / max(self._spent_s, 1e-9)

    def advance(self, loss: float, num_tokens: int) -> None:
        """Reports a finished step."""
        self._num_tokens += num_tokens
        self._spent_s += time.perf_counter() - self._since
        self._since = time.perf_counter()
        status = f"loss {loss:.3f}, {self.tokens_per_s:,.0f} tokens/s{self._accepted}"
        self._bar.update(self._task, advance=1, status=status)

    def evaluated(self, scores: Scores) -> None:
        """Reports a finished evaluation, whose time does not count as training."""
        best = list(scores.values())[-1]
        self._accepted = f", {best.tokens_per_step:.2f} tokens per step"
        self._since = time.perf_counter()


def plot_log(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plots a log: losses and held-out acceptance by position, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, accepted = figure.subplots(1, 2)
    steps = [row for row in rows if "loss" in row]
    judged = [(row["step"], from_row(row)) for row in rows if "heldout" in row]
    losses.plot([row["step"] for row in steps], [row["loss"] for row in steps], lw=0.8, alpha=0.6,
                color="0.5", label="training")  # fmt: skip
    kinds = list(judged[0][1]) if judged else []
    for kind, style in zip(kinds, ("--", "-"), strict=False):
        at = [step for step, _ in judged]
        losses.plot(at, [s[kind].loss for _, s in judged], style, color="C3",
                    label=f"held out: {kind}")  # fmt: skip
        for position in range(len(judged[0][1][kind].acceptance)):
            shares = [scores[kind].acceptance[position] for _, scores in judged]
            accepted.plot(at, shares, style, color=f"C{position % 10}",
                          label=f"{kind}, first {position + 1}")  # fmt: skip
    losses.set(xlabel="step", ylabel="loss", title=f"{title}: loss")
    accepted.set(xlabel="step", ylabel="accepted", ylim=(0, 1),
                 title="held out: greedy drafts accepted")  # fmt: skip
    losses.legend(fontsize=7)
    if judged:
        accepted.legend(fontsize=7, ncols=len(kinds))
    partial = path.with_name("." + path.name)
    figure.savefig(partial, format="png", dpi=110)
    partial.replace(path)
