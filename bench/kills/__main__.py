"""What clients notice when processes of a server are killed.

    python -m outrider.bench.kills [--streams 8] [--what rank ingress+rank ...] [--stop]

Starts a server over the demo models: a target, a draft model in a worker of its own, and a pool of
n-grams shared by the cluster. For each kind of process, resumable streams (`outrider.client`) run,
and SIGKILL ends all processes of that kind, or the first of them with `--one`; kinds joined by `+`
die together. With `--stop`, SIGSTOP halts them. The tokens are
compared with those of an undisturbed run: half of the streams decode greedily, half sample with a
seed. Runs on Linux.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from ...client import ResumingTransport, stream_events
from ..serving.demo_server import DemoServer, demo_server

KINDS = (
    "rank", "drafter", "spare", "engine", "keeper", "pool", "ingress", "controller",
)  # fmt: skip
_PROMPTS = ("class Stack:\n", "def main(", "import os\n", "for line in lines:\n")
_NUM_BEFORE = 10  # events of every stream before the kill
_SETTLE_S = 600.0
_GIVE_UP_S = 300.0


@dataclass
class Stream:
    """What one client received."""

    body: dict[str, Any]
    started: threading.Event = field(default_factory=threading.Event)
    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)  # of every event, monotonic clock
    error: str = ""

    def read(self, url: str) -> None:
        """Reads to the end; an error is kept."""
        transport = ResumingTransport(resume_for_s=_GIVE_UP_S)
        try:
            with httpx.Client(transport=transport, timeout=_GIVE_UP_S) as http:
                for event in stream_events(http, f"{url}/v1/completions", self.body):
                    if "error" in event:
                        self.error = str(event["error"])
                        break
                    self.tokens += event["choices"][0].get("token_ids") or []
                    self.at_s.append(time.monotonic())
                    if len(self.at_s) == _NUM_BEFORE:
                        self.started.set()
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__}: {error}"
        self.started.set()

    def stall_s(self, since_s: float) -> float:
        """The longest time between two events, of those that end behind `since_s`."""
        pairs = zip(self.at_s, self.at_s[1:], strict=False)
        return max((late - early for early, late in pairs if late > since_s), default=0.0)


def bodies(num_streams: int, num_tokens: int) -> list[dict[str, Any]]:
    """Requests, greedy and sampled in turn."""
    found = []
    for index in range(num_streams):
        sampling = {"temperature": 1.0, "seed": index} if index % 2 else {"temperature": 0.0}
        prompt = f"# {index}\n{_PROMPTS[index % len(_PROMPTS)]}"
        found.append(
            {
                "prompt": prompt,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
                **sampling,
            }
        )
    return found


def stream_all(
    server: DemoServer, requests: list[dict[str, Any]], victims: list[int], number: int
) -> tuple[list[Stream], float]:
    """All streams, and when `victims` got the signal."""
    streams = [Stream(body) for body in requests]
    with ThreadPoolExecutor(len(streams)) as threads:
        reading = [threads.submit(stream.read, server.url) for stream in streams]
        for stream in streams:
            stream.started.wait()
        killed_s = time.monotonic()
        for victim in victims:
            os.kill(victim, number)
        for each in reading:
            each.result()
    return streams, killed_s


def num_wrong(found: list[int], expected: list[int]) -> int:
    """Tokens that differ, are missing, or are too many."""
    differing = sum(one != other for one, other in zip(found, expected, strict=False))
    return differing + abs(len(found) - len(expected))


def kill_once(
    server: DemoServer,
    kind: str,
    requests: list[dict[str, Any]],
    expected: list[list[int]],
    number: int = signal.SIGKILL,
    most: int | None = None,
) -> list[str]:
    """One row of the table; at most `most` processes of each kind joined in `kind`."""
    wanted = server.counts(KINDS)
    server.wait_until_whole(wanted, _SETTLE_S)
    victims = [pid for each in kind.split("+") for pid in server.pids(each)[:most]]
    if not victims:
        return [kind, "none runs", *[""] * 5]
    streams: list[Stream] = []
    killed_s = 0.0

    def run() -> None:
        nonlocal streams, killed_s
        streams, killed_s = stream_all(server, requests, victims, number)

    thread = threading.Thread(target=run)
    thread.start()
    while all(Path(f"/proc/{victim}").exists() for victim in victims) and thread.is_alive():
        time.sleep(0.02)
    for victim in victims:  # stopped, and nobody has replaced it
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    recovery_s = server.wait_until_whole(wanted, _SETTLE_S)
    thread.join()
    errors = [stream.error for stream in streams if stream.error]
    for error in errors:
        sys.stderr.write(f"{kind}: {error}\n")
    wrong = sum(
        num_wrong(stream.tokens, tokens) for stream, tokens in zip(streams, expected, strict=True)
    )
    stalls = [stream.stall_s(killed_s) for stream in streams]
    figures = [max(stalls), statistics.median(stalls), recovery_s]
    return [
        kind,
        str(len(victims)),
        str(len(streams)),
        str(len(errors)),
        str(wrong),
        *(f"{each:.1f}" for each in figures),
    ]


def _kinds(text: str) -> str:
    """A value of `--what`."""
    if not set(text.split("+")) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: any of {', '.join(KINDS)}, joined by +")
    return text


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.kills")
    parser.add_argument("--what", nargs="+", type=_kinds, default=KINDS, metavar="KIND[+KIND]")
    parser.add_argument("--one", action="store_true", help="of each kind, not all")
    parser.add_argument("--ingresses", type=int, default=1, help="HTTP processes of the server")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-spares", action="store_true", help="spare_workers: false")
    parser.add_argument(
        "--stop", action="store_true", help="SIGSTOP instead of SIGKILL, as a hung machine"
    )
    parser.add_argument("--log", type=Path, help="file for the server's output")
    options = parser.parse_args()
    table = Table(
        title=f"{'Stopped' if options.stop else 'Killed'} processes", title_justify="left"
    )
    columns = ("streams", "client errors", "wrong tokens", "longest stall s", "median stall s")
    for name in ("kind", "processes", *columns, "whole again s"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    begun = os.getloadavg()
    number = signal.SIGSTOP if options.stop else signal.SIGKILL
    settings = {
        "resources": {"spare_workers": not options.no_spares},
        "serve": {"num_ingress_replicas": options.ingresses},
    }
    most = 1 if options.one else None
    with demo_server(settings, log=options.log) as server:
        requests = bodies(options.streams, options.tokens)
        expected = [each.tokens for each in stream_all(server, requests, [], number)[0]]
        for _ in range(options.rounds):
            for kind in options.what:
                row = kill_once(server, kind, requests, expected, number, most)
                sys.stderr.write(" | ".join(row) + "\n")
                table.add_row(*row)
    Console(width=140).print(table)
    load = ", ".join(f"{each[0]:.1f}" for each in (begun, os.getloadavg()))
    sys.stdout.write(f"load average before and after: {load}; {os.cpu_count()} cores\n")


if __name__ == "__main__":
    main()
