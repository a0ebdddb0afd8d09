"""Norms, residual updates and gates against the reference, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from outrider.tests.helpers.steps import assert_close, assert_norms
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.ops.protocol import Gate, GateKind, Norm
from outrider.workers.ops.reference import ReferenceOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE = ReferenceOps()
OPS = CudaOps(torch.device("cpu"))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float32), (40, torch.bfloat16), (64, torch.float16), (320, torch.float32),
     (320, torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_norms(size, dtype):
    assert_norms(OPS, dtype, size, 4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GateKind)
def test_gates(dtype, kind):
    torch.manual_seed(0)
    gate = Gate(kind, limit=2.0, alpha=1.702)
    for width in (8, 40, 1100):
        rows = (torch.randn(3, 2 * width) * 4).to(dtype)
        rows[0, :2] = torch.tensor([80.0, -80.0])
        assert_close(OPS.gate(rows, gate), REFERENCE.gate(rows, gate), 4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("normed", [True, False])
def test_entrances_of_heads(dtype, rows, normed):
    """Sizes that are no powers of two, with and without weights; rows of a wider tensor."""
    torch.manual_seed(0)
    embedded = torch.randn(rows, 40).to(dtype)
    feature = (torch.randn(rows, 320) * 4).to(dtype)[:, 20:]
    norms = [Norm(torch.randn(size), 1e-5) for size in (40, 300)]
    for first, second in (norms, (None, Norm(None, 1e-6)), (None, None), (norms[0], None)):
        parts = (embedded, first, feature, second)
        made = OPS.enter(*parts, is_residual_normed=normed)
        for one, other in zip(made, REFERENCE.enter(*parts, is_residual_normed=normed)):
            assert one.is_contiguous()
            assert_close(one, other, 4.0)
        assert made[1].data_ptr() != feature.data_ptr()


def test_no_rows():
    none = torch.empty(0, 8)
    parts = OPS.enter(none, None, none, None, is_residual_normed=False)
    assert [part.shape for part in parts] == [(0, 16), (0, 8)]
    assert OPS.norm(torch.empty(0, 8), Norm(None, 1e-5)).shape == (0, 8)
    assert OPS.gate(torch.empty(0, 8), Gate(GateKind.SILU)).shape == (0, 4)
