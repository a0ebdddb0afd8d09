"""Restarts a drafter's workers in the background, with growing pauses between attempts."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from ..errors import OutriderError

log = logging.getLogger(__name__)
BACKOFF_S = (0.0, 1.0, 5.0, 15.0, 60.0)
_JOIN_S = 10.0


class Restartable(Protocol):
    """The part of `WorkerGroup` that a restart needs."""

    @property
    def alive(self) -> bool: ...

    def restart(self) -> None: ...

    def shutdown(self) -> None: ...


class Backoff:
    """Pause before each attempt; `reset` after a success."""

    def __init__(self) -> None:
        self._num_tries = 0
        self._not_before = 0.0  # monotonic clock

    def next_pause_s(self) -> float:
        """Returns the pause before the next attempt and counts the attempt."""
        pause_s = BACKOFF_S[min(self._num_tries, len(BACKOFF_S) - 1)]
        self._num_tries += 1
        return pause_s

    def try_due(self) -> bool:
        """Whether an attempt may be made now; if so, counts it."""
        if time.monotonic() < self._not_before:
            return False
        self.next_pause_s()
        self._not_before = time.monotonic() + BACKOFF_S[min(self._num_tries, len(BACKOFF_S) - 1)]
        return True

    def reset(self) -> None:
        self._num_tries, self._not_before = 0, 0.0


class RestartPolicy:
    """Restarts a group that died.

    Args:
        owned: whether the drafter owns the group, and so restarts it and shuts it down.
    """

    def __init__(self, group: Restartable, *, owned: bool) -> None:
        self._group = group
        self._owned = owned
        self._backoff = Backoff()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def poll(self) -> bool:
        """Whether the group is up; if not, starts its restart unless one is running."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._group.alive:
            return True
        if self._owned:
            self._thread = threading.Thread(target=self._restart, daemon=True)
            self._thread.start()
        return False

    def succeeded(self) -> None:
        """Resets the pauses after the group has answered."""
        self._backoff.reset()

    def end(self) -> None:
        """Shuts the group down if the drafter owns it."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_S)  # a slower restart shuts down its own group
        if self._owned:
            self._group.shutdown()

    def _restart(self) -> None:
        if self._closed.wait(self._backoff.next_pause_s()):
            return
        try:
            self._group.restart()
        except OutriderError as error:
            log.warning("restart of the draft workers failed: %s", error.message)
        if self._closed.is_set():
            self._group.shutdown()
