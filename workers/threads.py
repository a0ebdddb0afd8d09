"""Number of threads per step on the CPU, learned while serving.

Waking a second thread can cost a small step more than it saves; this depends on the model and on
the load of the machine. So nothing is measured at load. Steps are grouped by size. Most steps of a
size use the number of threads that was faster so far. From time to time, a step uses the other
number, and its time is compared with those of the steps before it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from ..scheduler.types import ThreadChoice
from .transport.socket_channel import num_cores

MANY_TOKENS = 16  # from this size on, rows can be divided, so all threads are the first guess
_SIZES = sorted({1, *(base * 2**power for base in (2, 3) for power in range(20))})
_FIXED_TOKENS = 8  # fixed cost of a step, in tokens
_NUM_RATIOS = 5
_NUM_TIMES = 3
_MAX_PAUSE = 512  # steps
_DRIFT = 1.5  # a change of step times by this factor triggers another comparison
_CREDIT = 10.0  # in usual steps
_CREDIT_PER_STEP = 0.03


class SizeChoice:
    """Chooses between one thread and all threads for steps of one size.

    A comparison is the time of a step that used the other number, divided by the median time of the
    last steps with the usual number. The median of the last comparisons decides. The pause between
    comparisons doubles while they confirm the choice; it ends when one does not, or when the times
    of usual steps change. The cost of comparisons is bounded by a credit, counted in usual steps.
    The credit grows by 3% of a step per step and pays for the excess time of comparisons.
    """

    def __init__(self, *, takes_all: bool) -> None:
        self.takes_all = takes_all
        self._times_s: deque[float] = deque(maxlen=_NUM_TIMES)  # usual steps, per token
        self._level_s = 0.0  # their median at the last comparison
        self._ratios: deque[float] = deque(maxlen=_NUM_RATIOS)  # all threads to one
        self._pause = 1
        self._wait = _NUM_TIMES  # usual steps before the next comparison
        self._credit = _CREDIT

    @property
    def compares(self) -> bool:
        """Whether the next step uses the other number of threads."""
        return self._wait <= 0 < self._credit

    def record(self, time_s: float, *, compared: bool) -> None:
        """Records a step's time per token; `compared`: it used the other number of threads."""
        if compared:
            self._compare(time_s)
            return
        self._times_s.append(time_s)
        self._wait -= 1
        self._credit = min(self._credit + _CREDIT_PER_STEP, _CREDIT)
        usual_s = median(self._times_s)
        full = len(self._times_s) == _NUM_TIMES
        if full and self._level_s and not 1 / _DRIFT < usual_s / self._level_s < _DRIFT:
            self._level_s, self._pause, self._wait = usual_s, 1, 0

    def times_s(self) -> tuple[float, float] | None:
        """Time per token with one thread and with all threads; None before the first comparison."""
        if not self._ratios:
            return None
        usual_s, ratio = median(self._times_s), median(self._ratios)
        return (usual_s / ratio, usual_s) if self.takes_all else (usual_s, usual_s * ratio)

    def _compare(self, other_s: float) -> None:
        usual_s = median(self._times_s)
        loss = other_s / usual_s
        self._credit -= max(0.0, loss - 1)
        self._level_s = usual_s
        self._ratios.append(1 / loss if self.takes_all else loss)
        changes = (median(self._ratios) < 1) != self.takes_all
        if changes:
            self.takes_all = not self.takes_all
            self._level_s = other_s
            self._times_s.clear()
            self._times_s.append(other_s)
        self._pause = min(2 * self._pause, _MAX_PAUSE) if loss > 1 and not changes else 1
        self._wait = self._pause


class Threads:
    """One rank's share of the node's cores.

    With several ranks, every step uses the whole share: ranks must compute the same results, and an
    experiment on one rank would delay the others.

    Args:
        fixed: number set in the configuration; None: learn.
        num_ranks: ranks that share the node.
        on_cpu: whether steps are computed on the CPU; otherwise, torch's number is unchanged.
    """

    def __init__(
        self,
        fixed: int | None,
        num_ranks: int,
        *,
        on_cpu: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_cpu = on_cpu
        self._all = fixed or max(1, num_cores() // num_ranks)
        self._learns = on_cpu and fixed is None and num_ranks == 1 and self._all > 1
        self._clock = clock
        self._choices: dict[int, SizeChoice] = {}  # by index of the smallest size
        self.has_news = False  # whether there was a comparison since the last call of `news`

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Sets the threads for a step and times it; torch stores the number per calling thread."""
        if not self._learns:
            if self._on_cpu:
                _set(self._all)
            yield
            return
        index = bisect_right(_SIZES, max(num_tokens, 1)) - 1
        choice = self._choices.get(index) or self._new_choice(index, num_tokens)
        compared = choice.compares
        _set(self._all if choice.takes_all != compared else 1)
        start_s = self._clock()
        yield  # a step that raises is not counted
        time_s = (self._clock() - start_s) / (num_tokens + _FIXED_TOKENS)
        choice.record(time_s, compared=compared)
        self.has_news |= compared

    def news(self) -> tuple[ThreadChoice, ...]:
        """Returns what has been learned for each size."""
        self.has_news = False
        found = []
        for index, choice in sorted(self._choices.items()):
            if (times_s := choice.times_s()) is not None:
                scale = (_SIZES[index] + _FIXED_TOKENS) * 1e3
                num_threads = self._all if choice.takes_all else 1
                one_ms, all_ms = (round(each * scale, 3) for each in times_s)
                found.append(ThreadChoice(_SIZES[index], num_threads, one_ms, all_ms))
        return tuple(found)

    def _new_choice(self, index: int, num_tokens: int) -> SizeChoice:
        """Returns a size's first choice, based on other sizes."""
        known = {
            each: choice.takes_all for each, choice in self._choices.items() if choice.times_s()
        }
        takes_all = num_tokens >= MANY_TOKENS
        if takes_all:
            takes_all = all(known[each] for each in known if each > index)
        else:
            takes_all = any(known[each] for each in known if each < index)
        choice = self._choices[index] = SizeChoice(takes_all=takes_all)
        return choice


def _set(num_threads: int) -> None:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
