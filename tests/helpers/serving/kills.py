"""Kills of the processes that a test has started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ..ports import wait_for


def below(name: str) -> list[int]:
    """Descendants of this process whose command line contains `name`."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            lines[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(folder.name)] = int(fields[1])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return [pid for pid in mine if name in lines.get(pid, "")]


def kill_all(name: str) -> None:
    """Kills every process of that name below this one; there is one at least."""
    victims = below(name)
    assert victims, name
    for victim in victims:
        os.kill(victim, signal.SIGKILL)


def kill(process: int) -> None:
    """Kills a process; it does nothing more when this returns, and its connections are closed."""
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: is_dead(process))


def stop(process: int) -> None:
    """Suspends a process; it does nothing more when this returns."""
    os.kill(process, signal.SIGSTOP)
    wait_for(lambda: _state(process)[0] == "T")


def is_dead(process: int) -> bool:
    """Whether all its threads have ended; its parent need not have noticed."""
    state, num_threads = _state(process)
    return state in "ZX" and num_threads <= 1


def _state(process: int) -> tuple[str, int]:
    """A letter, as in `/proc`, and the number of threads."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[17])
