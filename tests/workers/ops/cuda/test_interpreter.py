"""Runs the other tests of this folder under Triton's interpreter, each file in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def run(name, marker):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-m", marker, str(HERE / name)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    "name",
    ["test_attention.py", "test_draw.py", "test_elementwise.py", "test_edit.py", "test_experts.py",
     pytest.param("test_decoder.py", marks=pytest.mark.slow),
     pytest.param("test_linear.py", marks=pytest.mark.slow),
     pytest.param("test_quantised.py", marks=pytest.mark.slow),
     pytest.param("test_invariant.py", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.timeout(600)
def test_kernels_equal_the_reference(name):
    run(name, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_triples_of_settings_of_attention():
    run("test_attention.py", "slow")
