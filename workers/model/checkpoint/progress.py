"""Progress of reading or fetching weights; it is reported only if that takes long.

Nothing is reported within the first seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

LOGGER = "outrider.loading"
log = logging.getLogger(LOGGER)
log.setLevel(logging.INFO)  # lines are few, and users who wait for a server need them
_FIRST_S = 5.0  # before the first line
_EVERY_S = 5.0  # between lines at first; later, a tenth of the elapsed time
_SELDOM_S = 60.0  # at most
_POLL_S = 1.0
_VERBS = ("fetched", "unpacked", "read")


class Amount(NamedTuple):
    """Bytes that have arrived, and bytes in total."""

    verb: str = ""  # one of `_VERBS`; "": nothing is expected yet
    num_bytes: int = 0
    total_bytes: int = 0


class Progress:
    """Counts bytes in one thread; other threads may read `amount` at any time."""

    def __init__(self) -> None:
        self.amount = Amount()

    def expect(self, verb: str, num_bytes: int) -> None:
        """Adds to the expected bytes; a new verb starts from zero."""
        assert verb in _VERBS, verb
        old = self.amount if self.amount.verb == verb else Amount(verb)
        self.amount = old._replace(total_bytes=old.total_bytes + num_bytes)

    def add(self, num_bytes: int) -> None:
        """Adds to the bytes that have arrived."""
        self.amount = self.amount._replace(num_bytes=self.amount.num_bytes + num_bytes)


def joined(amounts: Sequence[Amount]) -> Amount:
    """Returns the sum over the workers that are furthest behind.

    One worker per node fetches or unpacks files for all, while the others wait for it.
    """
    for verb in _VERBS:
        found = [each for each in amounts if each.verb == verb]
        amount = Amount(
            verb, sum(each.num_bytes for each in found), sum(each.total_bytes for each in found)
        )
        if found and (verb == _VERBS[-1] or amount.num_bytes < amount.total_bytes):
            return amount
    return Amount()


@dataclass(slots=True)
class Teller:
    """Calls `tell` with a line at intervals, as long as bytes are missing."""

    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic  # seconds
    _verb: str = ""
    _begun_s: float = 0.0
    _had_bytes: int = 0  # bytes when it began
    _told_s: float | None = None

    def look(self, amount: Amount) -> None:
        """Reports `amount` if the last line is old enough, and the end if anything was reported."""
        now_s = self.clock()
        if amount.verb != self._verb:
            self._verb, self._told_s = amount.verb, None
            self._begun_s, self._had_bytes = now_s, amount.num_bytes
        elapsed_s = now_s - self._begun_s
        left = amount.total_bytes - amount.num_bytes
        if left <= 0:
            if self._told_s is not None:
                self._told_s = None
                size = _size(amount.total_bytes)
                self.tell(f"weights: {size} {amount.verb} in {elapsed_s:,.0f} s")
            return
        due_s = _FIRST_S
        if self._told_s is not None:
            had_s = self._told_s - self._begun_s
            due_s = had_s + min(max(_EVERY_S, had_s / 10), _SELDOM_S)
        if elapsed_s < due_s:
            return
        self._told_s = now_s
        per_s = (amount.num_bytes - self._had_bytes) / elapsed_s
        rest = f", about {left / per_s:,.0f} s left" if per_s else ""
        self.tell(
            f"weights: {_size(amount.num_bytes, amount.total_bytes)} of "
            f"{_size(amount.total_bytes)} {amount.verb}, {_rate(per_s)}{rest}"
        )


def _size(num_bytes: int, of_bytes: int | None = None) -> str:
    """Formats a size; for a part, returns only the number, in the unit of the whole."""
    whole = num_bytes if of_bytes is None else of_bytes
    unit, name = (2**30, "GiB") if whole >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:,.1f}" + (f" {name}" if of_bytes is None else "")


def _rate(per_s: float) -> str:  # bytes
    is_slow = per_s < 2**30 / 10
    return f"{per_s / 2**20:,.1f} MiB/s" if is_slow else f"{per_s / 2**30:,.2f} GiB/s"


@contextmanager
def watched(amounts: Callable[[], Sequence[Amount]], tell: Callable[[str], None]) -> Iterator[None]:
    """Reports the progress of workers that load in this context; reports "" at its end.

    Args:
        amounts: returns the workers' amounts; called from a thread.
    """
    ended, lines, telling = threading.Event(), list[str](), threading.Lock()

    def say(line: str) -> None:
        with telling:
            if not ended.is_set():
                lines.append(line)
                tell(line)

    def watch() -> None:
        teller = Teller(say)
        while not ended.wait(_POLL_S):
            teller.look(joined(amounts()))

    threading.Thread(target=watch, name="outrider-loading", daemon=True).start()
    try:
        yield
    finally:
        with telling:
            ended.set()
        if lines:
            tell("")


@contextmanager
def transfer(
    verb: str, num_bytes: int, name: str, progress: Progress | None
) -> Iterator[Callable[[int], None]]:
    """Counts fetched or unpacked bytes, and shows them by a bar on a terminal or by log lines.

    Args:
        progress: a counter whose owner reports it; None: reported here.
    """
    from tqdm.auto import tqdm

    counted, teller = progress or Progress(), Teller(lambda line: log.info("%s: %s", name, line))
    counted.expect(verb, num_bytes)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=name, disable=None) as bar:

        def add(more: int) -> None:
            counted.add(more)
            bar.update(more)
            if progress is None and bar.disable:
                teller.look(counted.amount)

        yield add
