"""Free memory between blocks in use is given back; what imports leave is not looked through."""

from __future__ import annotations

import gc
import os
import time

import pytest

from outrider.cluster.process import keep_trimmed, trim, without_collecting


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_gaps_are_given_back():
    trim()
    blocks = [bytes(64 * 1024 + 1) for _ in range(1600)]  # 100 MB, each of many pages
    blocks = [bytes([1]) * len(each) for each in blocks]
    del blocks[::2]  # every second one: the heap cannot shrink
    full = resident_mb()
    if not trim():
        pytest.skip("this C library does not trim")
    assert full - resident_mb() > 25
    assert len(blocks) == 800


def test_it_happens_by_itself(monkeypatch):
    calls = []
    monkeypatch.setattr("outrider.cluster.process.trim", lambda: calls.append(1))
    monkeypatch.setattr("outrider.cluster.process._EVERY_S", 0.01)
    keep_trimmed()
    deadline = time.monotonic() + 20
    while len(calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(calls) >= 2


def test_what_imports_make_is_not_looked_through():
    num_frozen = gc.get_freeze_count()
    try:
        with without_collecting():
            assert not gc.isenabled()
            kept = [[index] for index in range(100)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= num_frozen + len(kept)
    finally:
        if not num_frozen:
            gc.unfreeze()
