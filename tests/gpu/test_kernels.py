"""On a CUDA device: the kernel checks of `outrider bench gpu-proof`, in every type."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.gpu import checks
from outrider.bench.gpu.machine import SIZES, Machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [
    name for name, _ in checks.cases(Machine(torch.device("cpu"), torch.float32, SIZES["8b"], 1))
]


@pytest.mark.parametrize("name", NAMES)
def test_checks(name):
    machine = Machine(torch.device("cuda"), torch.bfloat16, SIZES["8b"], 1)
    row = dict(checks.cases(machine))[name]()
    if "skipped" in row:
        pytest.skip(row["skipped"])
    assert row["passed"], row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("kind", checks.STEPS)
@pytest.mark.parametrize("name", checks.SPECS)
def test_attention(name, kind, page, dtype):
    machine = Machine(torch.device("cuda"), dtype, SIZES["8b"], 1)
    row = checks.attention(machine, name, kind, page)
    assert row["passed"], row
