"""How many torch threads a step on the CPU gets: measured, not assumed.

A small model's step is a few hundred short operations; waking a second thread for each can cost
more than it computes. So the fastest number for one token is found by timing the loaded model;
steps of many tokens get every core that is this rank's. Called by `worker.py`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

MANY_TOKENS = 64  # from here on a step is bound by arithmetic, which threads share well
_NUM_RUNS = 7


def num_cores() -> int:
    """Cores that this process may use: its affinity, or a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().strip().partition(" ")
        if limit.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(limit) / int(period)))
    return max(1, cores)


class Threads:
    """One rank's share of the node's cores.

    Args:
        fixed: what the configuration says; None: measure.
        num_ranks: ranks that share the node.
    """

    def __init__(self, fixed: int | None, num_ranks: int) -> None:
        self._all = fixed or max(1, num_cores() // num_ranks)
        self._few = self._all
        self._measures = fixed is None and self._all > 1

    def measure(self, run_one_token: Callable[[], object]) -> None:
        """Times a one-token step with one thread and with all."""
        if not self._measures:
            return
        times_s = {}
        for count in (1, self._all):
            torch.set_num_threads(count)
            run_one_token()
            runs_s = []
            for _ in range(_NUM_RUNS):
                start_s = time.perf_counter()
                run_one_token()
                runs_s.append(time.perf_counter() - start_s)
            times_s[count] = sorted(runs_s)[_NUM_RUNS // 2]
        self._few = min(times_s, key=times_s.__getitem__)

    def use(self, num_tokens: int) -> None:
        """Sets the threads for a step; torch keeps the number per calling thread."""
        wanted = self._all if num_tokens >= MANY_TOKENS else self._few
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
