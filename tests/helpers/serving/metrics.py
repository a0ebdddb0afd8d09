"""What tests read from a server's metrics."""

from __future__ import annotations

import re


def num_aborted(text: str) -> int:
    """Completions that were aborted, of all edges."""
    counts = re.findall(r'outrider:request_success_total{.*reason="abort".*} (.+)', text)
    return int(sum(map(float, counts)))
