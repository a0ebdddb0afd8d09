"""Reports of a training run: progress bar, acceptance tables, plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm


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
    scores = row["heldout"].items()
    return {kind: Score(one["loss"], tuple(one["acceptance"])) for kind, one in scores}


def acceptance_table(title: str, scores: Scores) -> Table:
    """Held-out acceptance by position, one row per kind of text."""
    most = max((len(score.acceptance) for score in scores.values()), default=0)
    table = Table("held out", title=title or None, title_justify="left")
    for name in ("loss", *map(str, range(1, most + 1)), "tokens per step"):
        table.add_column(name, justify="right")
    for kind, score in scores.items():
        shares = [f"{share:.1%}" for share in score.acceptance]
        table.add_row(kind, f"{score.loss:.3f}", *shares, f"{score.tokens_per_step:.2f}")
    return table


class Bar(tqdm):
    """A progress bar on the terminal, and the tables above it; only in the first process."""

    def __init__(self, what: str, total: int, first: int = 0, *, shown: bool) -> None:
        disable = None if shown else True  # None: unless there is no terminal
        super().__init__(desc=what, total=total, initial=first, disable=disable, dynamic_ncols=True)
        self._console = Console(stderr=True, highlight=False, quiet=not shown)
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
        self.set_postfix_str(status, refresh=False)
        self.update(1)

    def evaluated(self, step: int, scores: Scores) -> None:
        """Reports a finished evaluation, whose time does not count as training."""
        best = list(scores.values())[-1]
        self._accepted = f", {best.tokens_per_step:.2f} tokens per step"
        with self.external_write_mode(file=sys.stderr):
            self._console.print(acceptance_table(f"step {step}", scores))
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
