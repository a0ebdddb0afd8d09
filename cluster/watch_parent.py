"""The program of a `Watchdog`'s child: `watch_parent.py PID SILENCE_S`.

It imports nothing of the package, so that it starts in milliseconds and takes a few megabytes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_LOOKS = 8  # in the time of a silence


def watch(parent: int, silence_s: float, source: int) -> bool:
    """Returns at the end of `source`, or when it was silent: whether it has killed the parent.

    A time in which this process did not run itself is no silence: the machine was suspended, or
    has no processor time left.
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
            if os.getppid() != parent:  # the number may be another process's by now
                return False
            os.kill(parent, signal.SIGKILL)
            return True


if __name__ == "__main__":
    pid, silence = int(sys.argv[1]), float(sys.argv[2])
    if watch(pid, silence, sys.stdin.fileno()):
        sys.stderr.write(f"process {pid} did not run for {silence:g} s and was killed\n")
