"""The watchdog's child process: `watch_parent.py PID SILENCE_S [stopped]`.

It imports nothing from the package, so that it starts in milliseconds and takes a few megabytes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_LOOKS = 8  # checks per `silence_s`


def is_stopped(process: int) -> bool:
    """Returns True if all threads of the process are stopped, for example by SIGSTOP."""
    folder = f"/proc/{process}/task"
    try:
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/stat") as file:
                if not file.read().rpartition(")")[2].startswith(" T"):
                    return False
    except OSError:  # a thread that ended just now was running, and so was its process
        return False
    return True


def watch(parent: int, silence_s: float, source: int, *, only_stopped: bool = False) -> bool:
    """Watches `source`; returns True after killing the parent, False at the end of `source`.

    Time in which this process itself did not run does not count as silence, because the machine was
    suspended or has no processor time left.

    Args:
        only_stopped: kills a silent parent only if it is stopped.
    """
    last = looked = time.monotonic()
    while True:
        ready, _, _ = select.select([source], [], [], silence_s / _LOOKS)
        now = time.monotonic()
        if now - looked > silence_s / 2:
            last = now
        looked = now
        if ready:
            if not os.read(source, 4096):
                return False
            last = now
        elif now - last > silence_s:
            if os.getppid() != parent:  # the parent has ended; its id may belong to another process
                return False
            if only_stopped and not is_stopped(parent):
                continue
            os.kill(parent, signal.SIGKILL)
            return True


if __name__ == "__main__":
    pid, silence = int(sys.argv[1]), float(sys.argv[2])
    if watch(pid, silence, sys.stdin.fileno(), only_stopped=sys.argv[3:] == ["stopped"]):
        sys.stderr.write(f"process {pid} did not run for {silence:g} s and was killed\n")
