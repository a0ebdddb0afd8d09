"""Kills of the processes that a test has started."""

from __future__ import annotations

import os
import signal
from pathlib import Path


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
