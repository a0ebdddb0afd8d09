"""Packed linears multiply as before, whoever packs them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.workers.model.target import pack_linears
from outrider.workers.ops import make_ops
from outrider.workers.ops.cpu import PanelProjection
from outrider.workers.ops.table import VARIABLE

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["onednn", "ops"])
def test_same_products(dtype, own):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(512, 640), nn.Linear(640, 8)).to(dtype)
    states = torch.randn(2, 3, 512).to(dtype)
    with torch.inference_mode():
        expected = module(states)
        assert pack_linears(module, CPU, make_ops(CPU, dtype) if own else None) == 1
        found = module(states)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    assert module[0].weight.stride() == (0, 0), "the plain weight is not held beside the packed"


def test_the_kernel_multiplies_bfloat16_where_onednn_does_not_pack_it(monkeypatch):
    """As on a CPU with neither AVX-512 nor avx_ne_convert."""
    monkeypatch.setenv(VARIABLE, "avx2")
    module = nn.Linear(512, 640).to(torch.bfloat16)
    states = torch.randn(3, 512).to(torch.bfloat16)
    with torch.inference_mode():
        expected = module(states)
        assert pack_linears(module, CPU) == 1
        torch.testing.assert_close(module(states), expected, atol=2e-2, rtol=2e-2)
    assert isinstance(module.forward.project, PanelProjection)
