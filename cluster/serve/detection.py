"""How soon deaths are noticed by the Ray that `outrider serve` starts.

A Ray that runs already has what `ray start` was given; `docs/operations.md` lists the variables.
"""

from __future__ import annotations

import os

DETECTION = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",  # a proxy is replaced after three failures
}


def set_detection() -> None:
    """Sets what the environment does not set already, for processes that Ray starts."""
    for name, value in DETECTION.items():
        os.environ.setdefault(name, value)
