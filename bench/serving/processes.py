"""The processes below a server: their titles, processor time and memory, from /proc (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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
