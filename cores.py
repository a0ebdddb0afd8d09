"""Cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def num_cores() -> int:
    """The process's affinity, or the container's quota (cgroup v2) if lower."""
    cores = len(os.sched_getaffinity(0))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, _, period = quota.read_text().strip().partition(" ")
        if limit.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(limit) / int(period)))
    return max(1, cores)
