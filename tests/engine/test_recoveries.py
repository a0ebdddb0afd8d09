"""Restarts that are counted for good, and the window that bounds them."""

from __future__ import annotations

import pytest

from outrider.engine import statistics
from outrider.errors import EngineDeadError, WorkerDiedError


def test_the_count_never_falls_and_the_window_forgets(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(statistics.time, "monotonic", lambda: clock[0])
    found = statistics.Recoveries(max_restarts=2, window_s=10.0)
    for number in range(1, 6):
        found.count(WorkerDiedError("a rank died"))
        assert found.stats()["num_restarts"] == number  # exported as a counter
        clock[0] += 6.0
    found.count(WorkerDiedError("a rank died"))
    with pytest.raises(EngineDeadError, match="3 times within 10 s"):
        found.count(WorkerDiedError("a rank died"))
