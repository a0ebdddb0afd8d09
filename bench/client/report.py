"""Results in files: read again, side by side, and drawn. vLLM's result files are read too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .run import Outcome
from .scores import METRICS, values_ms

Row = tuple[str, ...]
FORMATS = (".png", ".svg", ".pdf")
# What the figures of two results depend on: shown where it differs.
_CONDITIONS = (
    "model_id", "backend", "dataset_name", "num_prompts", "request_rate", "burstiness",
    "max_concurrency",
)  # fmt: skip
_MORE_IS_BETTER = {
    "completed": "requests answered",
    "request_throughput": "requests/s",
    "request_goodput": "good requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
    "spec_decode_acceptance_length": "tokens per draft",
    "spec_decode_acceptance_rate": "accepted, %",
}
_LESS_IS_BETTER = {"failed": "requests failed", "duration": "duration, s"}
_STATISTICS = ("mean", "median", "p")


@dataclass(frozen=True)
class Result:
    """A result file, or the run that has just ended."""

    name: str
    scores: dict[str, Any]


def read_result(path: Path) -> Result:
    """A result that `outrider bench serve` or `vllm bench serve` saved.

    Raises:
        ConfigError: it cannot be read, or is no such result.
    """
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.at("compare", f"cannot read {path}: {error}") from None
    if not isinstance(scores, dict) or not isinstance(scores.get("output_throughput"), int | float):
        raise ConfigError.at("compare", f"{path} is no result: it has no `output_throughput`")
    return Result(str(path), scores)


def comparison(results: Sequence[Result]) -> tuple[list[Row], list[str]]:
    """Rows of the figures that all have, and the conditions that differ.

    A row is the figure's name, its values, the ratio of the last to the first, and whether that is
    better.
    """
    rows: list[Row] = []
    for key, title, more_is_better in _figures_of(results[0].scores):
        values = [each.scores.get(key) for each in results]
        numbers = [float(each) for each in values if isinstance(each, int | float)]
        if len(numbers) < len(values):
            continue
        rows.append((title, *map(_short, numbers), *_change(numbers, more_is_better)))
    differing = []
    for key in _CONDITIONS:
        values = [each.scores.get(key) for each in results]
        if len({str(value) for value in values}) > 1:
            differing.append(f"{key}: " + ", ".join(str(value) for value in values))
    return rows, differing


def _figures_of(scores: dict[str, Any]) -> Iterable[tuple[str, str, bool]]:
    for key, title in _MORE_IS_BETTER.items():
        yield key, title, True
    for key, title in _LESS_IS_BETTER.items():
        yield key, title, False
    for metric in METRICS:
        for key in scores:
            statistic, _, rest = key.partition("_")
            if rest == f"{metric}_ms" and statistic.startswith(_STATISTICS):
                yield key, f"{metric.upper()}, ms: {statistic}", False


def _change(numbers: list[float], more_is_better: bool) -> Row:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return "1.00", ""
    if first == 0:
        return "-", "worse" if not more_is_better else "better"
    better = (last > first) == more_is_better
    return f"{last / first:.2f}", "better" if better else "worse"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def check_format(path: Path) -> None:
    """Before a long run.

    Raises:
        ConfigError: the suffix is no format that plots are drawn in.
    """
    if path.suffix not in FORMATS:
        raise ConfigError.at("plot", f"{path}: the suffix is none of {', '.join(FORMATS)}")


def plot_run(outcome: Outcome, path: Path) -> Path:
    """Draws the share of requests within each latency, and tokens and requests over time."""
    traces = outcome.traces
    made, axes = figure(2, 2)
    for axis, metric in zip((axes[0][0], axes[0][1], axes[1][0]), ("ttft", "tpot", "e2el")):
        values = sorted(values_ms(traces, metric)) or [0.0]
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axis.step([values[0], *values], [0.0, *shares], where="post", lw=1)
        axis.set(title=METRICS[metric], xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
    axis = axes[1][1]
    seconds: dict[int, int] = {}
    for trace in traces:
        for arrival in trace.arrivals:
            seconds[int(arrival.at_s)] = seconds.get(int(arrival.at_s), 0) + arrival.num_tokens
    places = range(max(seconds, default=0) + 1)
    axis.step(places, [seconds.get(place, 0) for place in places], where="post", lw=1)
    axis.set(title="Throughput", xlabel="s", ylabel="tokens in this second", ylim=(0, None))
    return save(made, path)


def plot_comparison(results: Sequence[Result], path: Path) -> Path:
    """Draws throughput and the latencies that all results have, a bar for each result."""
    shared = [
        metric
        for metric in METRICS
        if all(f"median_{metric}_ms" in each.scores for each in results)
    ]
    panels = [("Output", "tokens/s", ["output_throughput"])]
    for metric in shared:
        keys = [f"{name}_{metric}_ms" for name in ("median", "p90", "p95", "p99")]
        there = [key for key in keys if all(key in each.scores for each in results)]
        panels.append((METRICS[metric], "ms", there))
    made, axes = figure(1, len(panels))
    width = 0.8 / len(results)
    for axis, (title, unit, keys) in zip(axes[0], panels):
        for place, result in enumerate(results):
            at = [index + (place - (len(results) - 1) / 2) * width for index in range(len(keys))]
            axis.bar(at, [result.scores[key] for key in keys], width, label=result.name)
        labels = [key.partition("_")[0] if unit == "ms" else "" for key in keys]
        axis.set_xticks(range(len(keys)), labels)
        axis.set(title=title, ylabel=unit)
    axes[0][0].legend(fontsize=6)
    return save(made, path)


# Drawing by matplotlib, which is loaded when something is drawn.


def figure(num_rows: int, num_columns: int, width: float | None = None) -> tuple[Any, Any]:
    """A figure and its axes, by row and column.

    Args:
        width: in inches; default: by the number of columns.
    """
    # Not at the top: a run that cannot begin does not wait for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (width or 3.4 * num_columns + 0.6, 3.4 * num_rows)
    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    return made, made.subplots(num_rows, num_columns, squeeze=False)


def save(made: Any, path: Path) -> Path:
    """Writes a figure; the suffix of `path` is the format."""
    made.savefig(path, dpi=110)
    return path
