"""Memory that is free inside a process goes back to the system, now and then.

Tensors of ever different sizes leave gaps in glibc's heap, which grows for hours although what is
in use does not. Called by the processes of a server when they start.
"""

from __future__ import annotations

import ctypes
import threading
import time

_EVERY_S = 30.0


def trim() -> bool:
    """Gives back whole free pages; whether there were any. Other libraries than glibc: False."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0)))
    except AttributeError:
        return False


def keep_trimmed(every_s: float = _EVERY_S) -> None:
    """Trims from a thread until the process ends; none of the other threads waits for it."""

    def run() -> None:
        while True:
            time.sleep(every_s)
            trim()

    threading.Thread(target=run, name="outrider-trim", daemon=True).start()
