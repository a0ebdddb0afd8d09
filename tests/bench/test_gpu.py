"""The GPU's benchmark runs, on a CPU and a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from outrider.bench import gpu


@pytest.mark.slow
def test_a_tiny_model_on_a_cpu(capsys):
    gpu.main(["--device", "cpu", "--size", "tiny", "--dtype", "float32", "--context", "40",
              "--rounds", "2"])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert "operations: cpu" in lines[0]
    assert [line.split(":")[0] for line in lines[2:6]] == [
        "forward of 1", "attention of 1", "forward of 9", "attention of 9",
    ]  # fmt: skip
    assert lines[6].startswith("9 tokens cost ")


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--context", "0"], "--context"), (["--size", "9b"], "--size")]
)
def test_bad_options_are_named(arguments, named, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", *arguments])
    assert named in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", ["bench.gpu", "bench.micro.gpu_head"])
def test_dry_runs(module):
    """The GPU's kernels and every line but CUDA's own, in a process that interprets them."""
    done = subprocess.run(
        [sys.executable, "-m", f"outrider.{module}", "--dry-run"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "operations: triton" in done.stdout
