"""The benchmarks of two engines beside each other print their rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import outrider

MODEL = Path(outrider.__file__).resolve().parent / "demo" / "models" / "draft"


def printed(module: str, *options: str) -> str:
    command = [sys.executable, "-m", f"outrider.bench.{module}", "--model", str(MODEL)]
    command += ["--tokens", "4", "--rounds", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_overlapped_and_waiting():
    rows = printed("overlap", "--streams", "1", "2").splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| 1", "| 2"]


@pytest.mark.slow
def test_neighbours():
    assert "slower by" in printed("neighbours", "--threads", "1")
