"""Runs the other tests of this folder under Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def run(marker, *names):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-m", marker, *(str(HERE / name) for name in names)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.timeout(600)
def test_kernels_equal_the_reference():
    """In one process: to start one takes longer than most of the files."""
    names = ("test_draw.py", "test_elementwise.py", "test_edit.py", "test_step_rows.py")
    run("not slow", *names, "test_attention.py::test_contexts_by_a_library[trees]")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_larger_kernels_equal_the_reference():
    """With all triples of settings of attention."""
    run(
        "slow or not slow",
        *("test_attention.py", "test_experts.py", "test_decoder.py", "test_linear.py"),
        *("test_quantised.py", "test_float8.py", "test_invariant.py"),
    )
