"""Compiled loops: kept on disk where that works, and there all the same where it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
from numba.core import caching

from outrider.drafters import compiled, suffix_loops

CODE = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
from outrider.drafters import registry
print("numba" in sys.modules)
from outrider.drafters import suffix_guess
print(sum(sum(f.stats.cache_hits.values()) for f in vars(suffix_guess).values()
          if hasattr(f, "stats")))
"""


def double(number: int) -> int:
    return 2 * number


def test_where_nothing_can_be_kept(monkeypatch):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    made = compiled.compiled(compiled.INT, compiled.INT)(double)
    assert made(21) == 42
    assert len(made.signatures) == 1  # compiled already


def test_nothing_is_compiled_in_a_step():
    assert isinstance(suffix_loops.extend, numba.core.registry.CPUDispatcher)
    assert not suffix_loops.extend._can_compile


def test_kept_for_the_next_process_and_loaded_only_when_wanted(tmp_path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": "generic"}
    hits = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True
        )
        assert "numba" not in done.stderr
        was_loaded, num_hits = done.stdout.split()
        assert was_loaded == "False"
        hits.append(int(num_hits))
    assert hits[0] == 0 < hits[1]
