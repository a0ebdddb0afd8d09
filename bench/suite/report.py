"""A report's files: JSON, a table in Markdown, and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..client.report import figure, save

COLUMNS = (
    "contender",
    "load",
    "tokens/s",
    "to outrider",
    "first token",
    "inter-token",
    "end to end",
    "tokens/step",
    "failed",
    "differ",
)
_STYLES = ("-", "--", "-.", ":")


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """Writes `report.json`, `report.md` and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    table, figures = folder / "report.md", folder / "report.json"
    figures.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    table.write_text(markdown(report), encoding="utf-8")
    return [figures, table, *_plots(report, folder)]


def markdown(report: dict[str, Any]) -> str:
    """Conditions, then a table per workload; those that did not run come last, with the reason."""
    machine, settings = report["machine"], report["settings"]
    software = ", ".join(f"{name} {number}" for name, number in report["software"].items())
    engine, sampling = settings["engine"], settings["sampling"]
    lines = [
        "# Outrider and others, in one run",
        "",
        f"- Machine: {machine['num_cores']} cores ({machine['cpu_capability']}), "
        f"{machine['memory_gib']} GiB, {machine.get('gpu', 'no GPU')}; "
        f"load average at the end {machine['load_1m']:.1f}",
        f"- Software: {software}; commit {report['commit'] or 'unknown'}",
        f"- Work: {Path(engine['model']).name}, {engine['dtype']}, {settings['num_prompts']} "
        f"prompts x {sampling['max_tokens']} tokens (at least {settings['prompts_per_stream']} a "
        f"stream), "
        f"{_rounds(report)} of {settings['num_rounds']} rounds, "
        f"temperature {sampling['temperature']:g}, "
        f"threads {settings['threads'] or 'as each contender chooses'}, "
        f"{'one contender up at a time' if settings['alone'] else 'all contenders up'}",
        f"- Command: `{report['command']}`",
        "",
        "Load: streams in a closed loop, or Poisson arrivals a second. Milliseconds are p50 / p99.",
        "",
    ]
    for workload in settings["workloads"]:
        rows = list(table_rows(report, workload))
        if rows:
            lines += [f"## {workload}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
            lines += [_row(row) for row in rows] + [""]
    if report["http"]:
        lines += ["## What HTTP adds to the engine alone", ""]
        columns = ("workload", "load", "microseconds per token", "first token, ms")
        lines += [_row(columns), _row(["---"] * len(columns))]
        for row in report["http"]:
            per_token, first = row["framework_us_per_token"], row["first_token_ms_more"]
            lines.append(_row((row["workload"], row["load"], f"{per_token:.0f}", f"{first:.1f}")))
        lines.append("")
    missing = [each for each in report["contenders"] if each["excluded"]]
    if missing:
        lines += ["## Did not run, or not to the end", ""]
        lines += [f"- {each['name']}: {each['excluded']}" for each in missing] + [""]
    started = [each for each in report["contenders"] if each.get("command") or each.get("url")]
    if started:
        lines += ["## Servers", ""]
        for each in started:
            number = f" ({each['version']})" if each.get("version") else ""
            lines.append(f"- {each['name']}{number}: `{each['command'] or each['url']}`")
        lines.append("")
    return "\n".join(lines)


def _rounds(report: dict[str, Any]) -> int:
    """Those that have been run."""
    return max((len(row["rounds"]) for row in report["results"]), default=0)


def table_rows(report: dict[str, Any], workload: str) -> Iterable[tuple[str, ...]]:
    """Cells of one workload's table, by load and then by contender."""
    differing = {
        (row["contender"], row["workload"], row["load"]): row for row in report["equality"]
    }
    rows = [row for row in report["results"] if row["workload"] == workload]
    for load in report["settings"]["loads"]:
        for row in rows:
            if row["load"] != load:
                continue
            same = differing[row["contender"], workload, load]
            per_step = row["tokens_per_request_step"]
            yield (
                row["contender"],
                load,
                f"{row['tokens_per_s']:.1f}",
                _ratio(row["ratio"]),
                _pair(row["ttft_ms"]),
                _pair(row["inter_token_ms"]),
                _pair(row["e2e_ms"]),
                f"{per_step:.2f}" if per_step else "-",
                str(row["num_failures"] or "-"),
                f"{same['num_differing']} of {same['num_prompts']}" if same["num_prompts"] else "-",
            )


def _ratio(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _pair(values: dict[str, float]) -> str:
    return " / ".join(
        f"{values[name]:.1f}" if values[name] < 100 else f"{values[name]:.0f}"
        for name in ("p50", "p99")
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """Throughput against streams, latency percentiles against streams, tokens per step."""
    closed = [row for row in report["results"] if row["streams"] is not None]
    found = []
    if closed:
        found.append(_throughput(closed, folder / "throughput.png"))
        found.append(_latency(closed, folder / "latency.png"))
    stepped = [row for row in closed if row["tokens_per_request_step"]]
    if stepped:
        found.append(_steps(stepped, folder / "tokens_per_step.png"))
    return found


def _throughput(rows: list[dict[str, Any]], path: Path) -> Path:
    kinds = _unique(rows, "workload")
    made, axes = figure(1, len(kinds))
    for axis, kind in zip(axes[0], kinds):
        for name, style, points in _curves(rows, kind):
            streams = [row["streams"] for row in points]
            axis.plot(streams, [row["tokens_per_s"] for row in points], style, marker="o",
                      ms=3, lw=1, label=name)  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set(title=kind, xlabel="streams", ylabel="tokens per second", ylim=(0, None))
    axes[0][0].legend(fontsize=6)
    return save(made, path)


def _latency(rows: list[dict[str, Any]], path: Path) -> Path:
    kinds = _unique(rows, "workload")
    made, axes = figure(2, len(kinds))
    for column, kind in enumerate(kinds):
        for line, (key, title) in enumerate(
            (("ttft_ms", "time to first token"), ("inter_token_ms", "between tokens"))
        ):
            axis = axes[line][column]
            for name, style, points in _curves(rows, kind):
                streams = [row["streams"] for row in points]
                middle = [row[key]["p50"] for row in points]
                (drawn,) = axis.plot(streams, middle, style, lw=1, marker="o", ms=3, label=name)
                high = [row[key]["p99"] for row in points]
                axis.fill_between(streams, middle, high, alpha=0.08, color=drawn.get_color())
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set(title=f"{kind}: {title}", xlabel="streams", ylabel="ms, p50 to p99")
    axes[0][0].legend(fontsize=6)
    return save(made, path)


def _steps(rows: list[dict[str, Any]], path: Path) -> Path:
    """At the least load, a group of bars per workload."""
    least = min(row["streams"] for row in rows)
    rows = [row for row in rows if row["streams"] == least]
    kinds, names = _unique(rows, "workload"), _unique(rows, "contender")
    values = {(row["contender"], row["workload"]): row["tokens_per_request_step"] for row in rows}
    made, axes = figure(1, 1, width=max(6.0, 1.6 * len(kinds)))
    axis, width = axes[0][0], 0.8 / len(names)
    for place, name in enumerate(names):
        at = [index + (place - (len(names) - 1) / 2) * width for index in range(len(kinds))]
        axis.bar(at, [values.get((name, kind), 0.0) for kind in kinds], width, label=name)
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set(ylabel="tokens per step and request", title=f"{least} stream(s)")
    axis.legend(fontsize=6)
    return save(made, path)


def _curves(
    rows: list[dict[str, Any]], kind: str
) -> Iterable[tuple[str, str, list[dict[str, Any]]]]:
    """Per contender: its name, a line style, its rows by number of streams."""
    for place, name in enumerate(_unique(rows, "contender")):
        points = [row for row in rows if row["contender"] == name and row["workload"] == kind]
        style = _STYLES[place // 10 % len(_STYLES)]
        yield name, style, sorted(points, key=lambda row: int(row["streams"]))


def _unique(rows: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
