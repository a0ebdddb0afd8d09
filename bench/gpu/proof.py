"""`outrider bench gpu-proof`: what a GPU computes and how fast, in parts that stand alone.

Each part runs in a process of its own, case by case. JSON and a page are written after every case,
so that a run that is cut off keeps what it found. A case that ends the process, as an illegal
address of a kernel does, or that takes too long, fails by itself: a new process goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .machine import Case, Machine, Row

log = logging.getLogger(__name__)
_MARK = "@proof "  # begins a line of a part's process that is a message
_MAX_STARTS = 6  # of one part: after a device is lost for good, every case would fail
_ERROR_LINES = 6
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the proof."""

    name: str
    title: str
    case_s: float  # limit of one case


PARTS = (
    Part("machine", "The machine", 120),
    Part("checks", "Kernels against the reference", 180),
    Part("timings", "Operations, with cold caches", 180),
    Part("steps", "Steps of random weights, captured", 300),
    Part("serve", "Servers under load", 600),
    Part("ranks", "Several GPUs", 600),
)


@dataclass(frozen=True, slots=True)
class ProofOptions:
    """What is run, and how."""

    out: Path
    size: str = "8b"
    minutes: float = 25.0
    rounds: int = 20
    parts: tuple[str, ...] = tuple(part.name for part in PARTS)
    model: Path | None = None  # that servers serve; None: the demo's
    is_dry: bool = False


def prove(
    options: ProofOptions, show: Callable[[str], None], command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Runs the parts; the report, which is in `options.out` after every case.

    Args:
        command: of a part's process, without its arguments; by default this module.
    """
    deadline = time.monotonic() + options.minutes * 60
    report: dict[str, Any] = {
        "size": options.size, "is_dry": options.is_dry, "cut_off": "", "parts": {},
    }  # fmt: skip
    command = command or (sys.executable, "-m", __spec__.name)
    for part in PARTS:
        if part.name not in options.parts:
            continue
        rows = report["parts"].setdefault(part.name, [])
        for row in _rows(part, options, deadline, command):
            rows.append(row)
            verdict = "failed" if failed(row) else "ok"
            show(f"{part.name}: {row['case']}: {verdict}")
            write(report, options.out)
        if time.monotonic() >= deadline:
            report["cut_off"] = f"after {options.minutes:g} minutes, in the part {part.name!r}"
            break
    write(report, options.out)
    return report


def failed(row: Row) -> bool:
    """Whether a case raised, or found a wrong result."""
    return "error" in row or not row.get("passed", True)


# -- the process of a part, seen from outside


class _Child:
    """A part's process and its messages."""

    def __init__(self, command: Sequence[str], log_path: Path, *, is_dry: bool) -> None:
        environment = dict(os.environ)
        if is_dry:
            environment["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        with log_path.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_MARK):
                self._messages.put(json.loads(line[len(_MARK) :]))
        self._messages.put(None)

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """The next; None: the process has ended.

        Raises:
            TimeoutError: there was none in time.
        """
        try:
            return self._messages.get(timeout=max(timeout_s, _POLL_S))
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Ends the process and those that it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("the process had ended")
        self.process.wait()
        self._reader.join()


def _rows(
    part: Part, options: ProofOptions, deadline: float, command: Sequence[str]
) -> Iterator[Row]:
    """The results of a part's cases, in order."""
    log_path = options.out / f"{part.name}.log"
    log_path.unlink(missing_ok=True)
    num_done = 0
    for _ in range(_MAX_STARTS):
        arguments = [part.name, str(num_done), options.size, str(options.rounds), str(options.out)]
        arguments += [str(options.model or ""), "dry" if options.is_dry else "real"]
        child = _Child([*command, *arguments], log_path, is_dry=options.is_dry)
        case, reason = "start", ""
        try:
            while True:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                message = child.message(min(part.case_s, left_s))
                if message is None:
                    reason = _tail(log_path)
                    break
                if message.get("end"):
                    return
                if "begin" in message:
                    case = message["begin"]
                    continue
                num_done += 1
                yield {"case": case, **message["row"]}
                case = ""
        except TimeoutError:
            if time.monotonic() >= deadline:
                return
            reason = f"no result within {part.case_s:g} s"
        finally:
            child.close()
        if not case:  # it ended by itself behind a result: the device was not usable any more
            continue
        num_done += case != "start"
        yield {"case": case, "error": reason}
        if case == "start":
            return
    yield {"case": "the rest", "error": f"given up after {_MAX_STARTS} processes"}


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "the process ended: " + " / ".join(lines[-_ERROR_LINES:])


# -- the report's files


def write(report: dict[str, Any], out: Path) -> None:
    """Writes the report as JSON and as a page."""
    for name, text in (("json", json.dumps(report, indent=1)), ("md", markdown(report))):
        path = out / f"proof.{name}"
        path.with_suffix(".new").write_text(text + "\n", encoding="utf-8")
        path.with_suffix(".new").replace(path)


def markdown(report: dict[str, Any]) -> str:
    """A section per part, with a table per kind of case; what failed comes first."""
    lines = ["# Proof on a GPU", ""]
    if report["is_dry"]:
        lines += ["A dry run on a CPU: kernels were interpreted, and times mean nothing.", ""]
    if report["cut_off"]:
        lines += [f"Cut off {report['cut_off']}.", ""]
    wrong = [(name, row) for name, rows in report["parts"].items() for row in rows if failed(row)]
    lines += [f"{len(wrong)} of {sum(map(len, report['parts'].values()))} cases failed.", ""]
    for name, row in wrong:
        lines.append(f"- {name}, {row['case']}: {_cell(row.get('error', 'wrong result'))}")
    if wrong:
        lines.append("")
    titles = {part.name: part.title for part in PARTS}
    for name, rows in report["parts"].items():
        lines += [f"## {titles[name]}", ""]
        tables: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            tables.setdefault(tuple(row), []).append(row)
        for columns, alike in tables.items():
            lines += [_line(columns), _line(["---"] * len(columns))]
            lines += [_line([_cell(row[column]) for column in columns]) for row in alike] + [""]
    return "\n".join(lines).rstrip()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", "<br>")


# -- the process of a part, from inside


def _machine(size: str, rounds: int, *, is_dry: bool) -> Machine:
    import torch

    from .machine import SIZES, Machine

    if is_dry:
        return Machine(torch.device("cpu"), torch.float32, SIZES["tiny"], 1, is_dry=True)
    return Machine(torch.device("cuda"), torch.bfloat16, SIZES[size], rounds)


def _cases(part: str, machine: Machine, out: Path, model: Path | None) -> Iterator[Case]:
    """Imports only what the part needs: one that cannot be imported fails alone."""
    if part == "machine":
        from .machine import facts

        return facts(machine)
    if part == "checks":
        from . import checks

        return checks.cases(machine)
    if part == "timings":
        from . import timings

        return timings.cases(machine)
    if part == "steps":
        from . import steps

        return steps.cases(machine, out)
    from . import serving

    return (serving.serve_cases if part == "serve" else serving.rank_cases)(machine, model)


def _say(**message: object) -> None:
    sys.stdout.write(_MARK + json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs the cases of a part, for `_rows`."""
    parser = argparse.ArgumentParser(description="A part of `outrider bench gpu-proof`.")
    for name in ("part", "skip", "size", "rounds", "out", "model", "mode"):
        parser.add_argument(name)
    given = parser.parse_args()
    import torch

    machine = _machine(given.size, int(given.rounds), is_dry=given.mode == "dry")
    model = Path(given.model) if given.model else None
    with torch.inference_mode():
        for index, (case, run) in enumerate(_cases(given.part, machine, Path(given.out), model)):
            if index < int(given.skip):
                continue
            _say(begin=case)
            try:
                row = run()
            except Exception as error:  # of CUDA, Triton, a compiler or a server
                log.warning("%s failed", case, exc_info=True)
                row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
            _say(row=row)
            if not machine.is_usable():
                sys.exit("the device is not usable after this case")
    _say(end=True)


if __name__ == "__main__":
    main()
