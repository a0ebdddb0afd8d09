"""Mixed traffic for a long time: does anything leak?

    python -m outrider.bench.soak --minutes 30

Starts a server over the demo models (`bench/serving/demo_server.py`) and sends random requests of
every kind (`traffic.py`): whole answers, streams, slow readers, clients that leave in the middle,
streams that break and are resumed. At the end every KV block has to be free. Reports requests by
outcome, and each process's own memory over time: its growth is measured from the end of the
warm-up.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from ..serving.demo_server import DemoServer, demo_server
from .traffic import Exchange, next_exchange

_TIMEOUT_S = 300.0
_SETTLE_S = 30.0
_SAMPLE_EVERY_S = 5.0
_SLOW_S = 0.02  # between two reads of a slow reader
_ROLES = ("rank", "engine", "ingress", "controller", "pool", "keeper")


class Traffic:
    """Clients in threads, until `stop`.

    Args:
        seed: of the first client; every client has its own generator.
    """

    def __init__(self, url: str, num_clients: int, seed: int) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()  # "kind outcome"
        self.faults: list[str] = []  # answers that the API does not promise
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),), daemon=True)
            for number in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Lets running exchanges end."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)

    def _run(self, rng: random.Random) -> None:
        with httpx.Client(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False) as http:
            while not self._stopped.is_set():
                exchange = next_exchange(rng)
                try:
                    outcome, fault = _run_one(http, exchange, rng)
                except httpx.HTTPError as error:
                    outcome, fault = "failed", f"{type(error).__name__}: {error}"
                with self._lock:
                    self.outcomes[f"{exchange.kind} {outcome}"] += 1
                    if fault:
                        self.faults.append(f"{exchange.kind}, {exchange.reading}: {fault}")


def _run_one(http: httpx.Client, exchange: Exchange, rng: random.Random) -> tuple[str, str]:
    """The outcome, and what is wrong with it."""
    if exchange.reading == "whole":
        answer = http.post(exchange.path, json=exchange.body)
        wrong = answer.status_code not in exchange.statuses
        return str(answer.status_code), answer.text[:300] if wrong else ""
    leaves = exchange.reading in ("abort", "resumable")
    last_id, whole, fault = _read(http, exchange, {}, rng.randrange(1, 30) if leaves else None, rng)
    if fault or exchange.reading == "abort":
        return "left", fault
    if exchange.reading == "resumable" and not whole and last_id:
        _, whole, fault = _read(http, exchange, {"Last-Event-ID": last_id}, None, rng)
    return "200", fault or ("" if whole else "the stream ended early")


def _read(
    http: httpx.Client,
    exchange: Exchange,
    headers: dict[str, str],
    num_lines: int | None,
    rng: random.Random,
) -> tuple[str, bool, str]:
    """Reads at most `num_lines` of a stream: the last event's id, whether it is whole, a fault."""
    last_id, whole = "", False
    with http.stream("POST", exchange.path, json=exchange.body, headers=headers) as answer:
        if answer.status_code != 200:
            return "", False, f"{answer.status_code} {answer.read().decode()[:300]}"
        for count, line in enumerate(answer.iter_lines()):
            if line.startswith("id: "):
                last_id = line[4:]
            if line.startswith('data: {"error"'):
                return last_id, True, line[:300]
            whole = whole or line == "data: [DONE]"
            if count == num_lines:
                break
            if exchange.reading == "slow" and rng.random() < 0.3:
                time.sleep(_SLOW_S)
    return last_id, whole, ""


class Memory:
    """Each process's own memory over time, in MB."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._samples: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._begun = time.monotonic()

    def sample(self, server: DemoServer) -> None:
        """Reads all processes."""
        at_s = time.monotonic() - self._begun
        for process in server.processes():
            if process.role in _ROLES:
                self._names[process.pid] = process.role
                self._samples[process.pid].append((at_s, process.own_bytes / 2**20))

    def rows(self, since_s: float) -> list[list[str]]:
        """By process: its memory at the start, at `since_s` and now, and the growth from there.

        The figures are medians of a tenth of the samples, the growth per minute is of a line
        through all of them.
        """
        rows = []
        for pid, samples in sorted(self._samples.items(), key=lambda item: self._names[item[0]]):
            late = [each for each in samples if each[0] >= since_s]
            if len(late) < 2:
                continue
            few = max(1, len(late) // 10)
            first, last = (
                statistics.median(size for _, size in part) for part in (late[:few], late[-few:])
            )
            slope = _slope(late) * 60
            figures = (samples[0][1], first, last, last - first)
            rows.append([self._names[pid], *(f"{each:.1f}" for each in figures), f"{slope:+.2f}"])
        return rows


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line of least squares."""
    times, sizes = zip(*points, strict=True)
    if len(set(times)) < 2:
        return 0.0
    return statistics.linear_regression(times, sizes).slope


def num_held_blocks(server: DemoServer, timeout_s: float) -> int:
    """KV blocks that are not free, once no request runs or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        engines = server.engines()
        held = sum(each["kv"]["num_blocks"] - each["kv"]["num_free_blocks"] for each in engines)
        running = sum(each["running"] + each["waiting"] for each in engines)
        if (engines and not held and not running) or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def soak(server: DemoServer, duration_s: float, num_clients: int, seed: int) -> bool:
    """Runs the traffic and prints the report; whether all is well."""
    memory, load = Memory(), os.getloadavg()[0]
    traffic = Traffic(server.url, num_clients, seed)
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        memory.sample(server)
        time.sleep(min(_SAMPLE_EVERY_S, duration_s / 20))
    traffic.stop()
    held = num_held_blocks(server, _SETTLE_S)
    memory.sample(server)
    outcomes = Table(title="Requests", title_justify="left")
    for name in ("kind", "answers", "outcomes"):
        outcomes.add_column(name)
    by_kind: dict[str, dict[str, int]] = defaultdict(dict)
    for key, count in traffic.outcomes.items():
        kind, _, outcome = key.partition(" ")
        by_kind[kind][outcome] = count
    for kind, counts in sorted(by_kind.items()):
        shown = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(counts.items()))
        outcomes.add_row(kind, str(sum(counts.values())), shown)
    sizes = Table(title="Own memory of each process, MB", title_justify="left")
    for name in ("process", "at start", "after warm-up", "at the end", "growth", "MB per minute"):
        sizes.add_column(name, justify="left" if name == "process" else "right")
    for row in memory.rows(duration_s * 0.3):
        sizes.add_row(*row)
    console = Console(width=120)
    console.print(outcomes)
    console.print(sizes)
    for fault in traffic.faults[:20]:
        sys.stdout.write(f"unexpected: {fault}\n")
    total = sum(traffic.outcomes.values())
    sys.stdout.write(
        f"{total} requests, {len(traffic.faults)} unexpected answers, {held} KV blocks held at the "
        f"end; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after\n"
    )
    return not held and not traffic.faults


def main() -> None:
    """Exits with 1 where a block is held or an answer was unexpected."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for the server's output")
    options = parser.parse_args()
    with demo_server(log=options.log) as server:
        is_well = soak(server, options.minutes * 60, options.clients, options.seed)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
