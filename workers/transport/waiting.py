"""Waits for messages that come soon: awake, because a thread that sleeps is late.

A sleeping thread is woken 50 to 100 us after its message has come, with cold caches. So both ends
of the step channel look for a message again and again for a moment before they sleep (the bounded
spin of Karlin et al. 1991, doi:10.1145/121132.286599), and leave the core to whatever else can run
between two looks. On a single core nobody looks: the sender could not run meanwhile.
"""

from __future__ import annotations

import os
import select
import time

from ...cores import num_cores

Events = list[tuple[int, int]]

SPIN_S = 2e-3  # a step of 32 sequences is planned in less
_LEAD_S = 5e-4  # how long before the usual end of a wait to be awake
_FORGET = 0.2  # weight of the last wait


class Lookout:
    """Looks for events of `poll` for up to `spin_s` seconds, without sleeping."""

    def __init__(self, poll: select.poll, spin_s: float) -> None:
        self.spin_s = spin_s if num_cores() > 1 else 0.0
        self._poll = poll.poll

    def look(self, timeout_s: float) -> Events:
        """What comes within `timeout_s` and `spin_s`; looks once at least."""
        until_s = time.perf_counter() + min(self.spin_s, timeout_s)
        while not (found := self._poll(0)) and time.perf_counter() < until_s:
            os.sched_yield()
        return found


class UsualWait:
    """Waits of much the same length: asleep at first, awake from shortly before the usual end."""

    def __init__(self, poll: select.poll, spin_s: float) -> None:
        self._lookout = Lookout(poll, spin_s)
        self._poll = poll.poll
        self._usual_s = 0.0

    def wait(self, timeout_s: float) -> Events:
        """What comes within `timeout_s`."""
        if not self._lookout.spin_s:
            return self._poll(timeout_s * 1e3)
        begin_s = time.perf_counter()
        asleep_ms = int(min(self._usual_s - _LEAD_S, timeout_s) * 1e3)  # poll takes whole ones
        found = self._poll(asleep_ms) if asleep_ms > 0 else []
        if not found:
            found = self._lookout.look(timeout_s)
        if not found:
            left_s = begin_s + timeout_s - time.perf_counter()
            found = self._poll(max(0.0, left_s) * 1e3)
        self._usual_s += _FORGET * (time.perf_counter() - begin_s - self._usual_s)
        return found
