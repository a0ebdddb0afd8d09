"""Edits and log-probabilities against `workers/verify/`, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from outrider.tests.helpers.device_step.edited import check_edits
from outrider.workers.ops.cuda import ops as fused
from outrider.workers.ops.cuda.ops import CudaOps


@pytest.mark.parametrize(
    ("num_nodes", "block"),
    [(0, 16), (3, 16), (5, 1024), pytest.param(70, 1024, marks=pytest.mark.slow)],
)
def test_equal_bits(num_nodes, block, monkeypatch):
    """Rows of one block and of several, which several programs share."""
    monkeypatch.setattr(fused, "_BLOCK", block)
    with torch.inference_mode():
        check_edits(CudaOps(torch.device("cpu")), num_nodes, num_nodes)
