"""The benchmark of heads on a GPU runs, on a CPU and a tiny model."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.gpu import SIZES, Machine
from outrider.bench.micro import gpu_head
from outrider.tests.helpers.device_step.ops import TensorOps


class InTorch(Machine):
    def ops(self):
        return TensorOps()


def test_a_tiny_model_on_a_cpu():
    machine = InTorch(torch.device("cpu"), torch.float32, rounds=1)
    lines = gpu_head.report(SIZES["tiny"], machine, [1, 2], 20, 4)
    assert "operations: reference" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == ["batch 1", "batch 2"]
    assert all("with the head" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--nodes", "64"], "--nodes"), (["--batch", "0"], "--batch")]
)
def test_bad_options_are_named(arguments, named, capsys):
    with pytest.raises(SystemExit):
        gpu_head.main(arguments)
    assert named in capsys.readouterr().err
