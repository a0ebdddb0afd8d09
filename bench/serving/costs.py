"""Servers and their processes: titles, processor time and memory, from /proc (Linux)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ..suite.servers import ServerContender, ServerSpec

TARGET = Path(__file__).resolve().parents[2] / "demo" / "models" / "target"
SERVER_COLUMNS = ("rank", "engine", "ingress", "proxy", "others")
COLUMNS = (*SERVER_COLUMNS, "client")
# This Outrider, as a command of `ServerSpec`.
THIS = (
    f"this={sys.executable} -m outrider serve {{model}} --dtype {{dtype}} --port {{port}} "
    "--address local"
)


# Parts of a process's title -> its role.
ROLES = (
    ("ray::Rank", "rank"),
    (":Engine", "engine"),
    (":Ingress", "ingress"),
    ("ray::ProxyActor", "proxy"),
    ("ray::ServeController", "controller"),
    ("ray::PoolStore", "pool"),
    ("ray::Keeper", "keeper"),
    ("raylet/raylet", "raylet"),
    ("gcs_server", "gcs"),
)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SETTLED = 0.8  # of what idling cost before


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was when it was read."""

    pid: int
    parent: int
    title: str
    cpu_s: float
    own_bytes: int  # resident and not shared with files

    @property
    def role(self) -> str:
        """One of `ROLES`, or `others`."""
        return next((role for part, role in ROLES if part in self.title), "others")


def below(root: int) -> list[Process]:
    """The process `root` and all its descendants that run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Behind the name, which may contain anything: state, parent, ..., utime, stime.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            pages = (folder / "statm").read_text().split()
        except OSError:  # it has ended
            continue
        if fields[0] == "Z":
            continue
        pid = int(folder.name)
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        own_bytes = (int(pages[1]) - int(pages[2])) * _PAGE_BYTES
        found[pid] = Process(pid, int(fields[1]), title, cpu_s, own_bytes)
    members = {root} & set(found)
    while more := {pid for pid, each in found.items() if each.parent in members} - members:
        members |= more
    return [found[pid] for pid in sorted(members)]


def cpu_s(root: int) -> dict[str, float]:
    """Processor seconds of the process `root` and its descendants so far, by column."""
    found: dict[str, float] = defaultdict(float)
    for process in below(root):
        found[process.role if process.role in COLUMNS else "others"] += process.cpu_s
    return found


def measure_idle(server: ServerContender, seconds: float) -> dict[str, float]:
    """Processor seconds per second of each column but the client's, without any request.

    A server has settled once it spends hardly less than in the `seconds` before: for a minute after
    its start, processes and programs are still being made.
    """
    before, last = cpu_s(server.pid), float("inf")
    while True:
        time.sleep(seconds)
        after = cpu_s(server.pid)
        spent = {name: (after[name] - before[name]) / seconds for name in SERVER_COLUMNS}
        total = sum(spent.values())
        if total >= _SETTLED * last:
            return spent
        before, last = after, total


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Which servers, and what they serve."""
    parser.add_argument("--model", default=str(TARGET))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--server",
        action="append",
        metavar="NAME=COMMAND",
        help="with {port}, {model} and {dtype}; default: this outrider",
    )


@contextmanager
def servers_of(options: argparse.Namespace) -> Iterator[list[ServerContender]]:
    """The servers of `add_server_options`, started; they end with the block.

    Raises:
        ConfigError: one is no command.
        ServerError: one does not start.
    """
    values = {"model": options.model, "dtype": options.dtype}
    with ExitStack() as stack:
        servers = []
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, text in enumerate(options.server or [THIS]):
            spec = ServerSpec.parse(text, values)
            if spec.command is None:
                raise ConfigError(f"server: {text!r} is no NAME=COMMAND", field="server")
            server = ServerContender(spec, logs / f"{number}.log")
            stack.callback(server.close)
            server.start()
            servers.append(server)
        yield servers
