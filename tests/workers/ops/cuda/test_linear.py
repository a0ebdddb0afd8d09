"""Products with plain and quantised weights against those of the weights that they stand for."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.gpu.inputs import KINDS, weight_of, wide
from outrider.tests.helpers.steps import assert_close
from outrider.workers.ops.cuda.linear import TiledProduct
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.ops.protocol import Experts, Gate, GateKind
from outrider.workers.ops.quantised import QuantisedTensor
from outrider.workers.ops.reference import ReferenceOps

OPS, REFERENCE = CudaOps(torch.device("cpu")), ReferenceOps()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, dtype):
    torch.manual_seed(0)
    for rows, out, depth, processors in ((1, 70, 96, 1), (19, 130, 1100, 8), (70, 16, 48, 4)):
        weight, bias = weight_of(kind, (out, depth), dtype), torch.randn(out).to(dtype)
        states = torch.randn(rows, depth + 8).to(dtype)[:, 4:-4]
        wanted = torch.nn.functional.linear(states.float(), wide(weight).float(), bias.float())
        for fixed_rows in (False, True):
            found = TiledProduct(weight, bias, processors, fixed_rows=fixed_rows)(states)
            assert_close(found, wanted.to(dtype), 4.0)
    assert TiledProduct(weight, bias, 4, fixed_rows=True)(states[:0]).shape == (0, 16)


@pytest.mark.parametrize("group", [1, 7, 12, 16, 48, 64, 96, 128, 192, 1000])
def test_groups_of_any_size(group):
    """Smaller and larger than a tile, and such as tiles cut."""
    torch.manual_seed(0)
    for kind in ("fp8", "int4 zeros", "uint8 zeros"):
        weight = weight_of(kind, (70, 200), torch.bfloat16, group)
        states = torch.randn(3, 200).bfloat16()
        wanted = torch.nn.functional.linear(states.float(), wide(weight).float())
        found = TiledProduct(weight, None, 1, fixed_rows=False)(states)
        assert_close(found, wanted.bfloat16(), 4.0)


def test_products_per_head():
    torch.manual_seed(0)
    weight, states = torch.randn(3, 20, 24), torch.randn(70, 3, 40)[..., 8:32]
    found = TiledProduct(weight, None, 4, fixed_rows=True)(states)
    assert_close(found, torch.einsum("thi,hoi->tho", states, weight), 4.0)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_mixtures(kind):
    """Quantised experts, and those that they stand for."""
    torch.manual_seed(0)
    for dtype, scores_input in ((torch.bfloat16, False), (torch.float32, True)):
        gate_up = weight_of(kind, (5, 80, 64), dtype)
        down = weight_of(kind, (5, 64, 40), dtype, group=8)
        gate = Gate(GateKind.SILU)
        states, scores = torch.randn(9, 64).to(dtype), torch.rand(9, 2)
        chosen = torch.rand(9, 5).topk(2).indices
        coded = Experts(gate_up, down, gate, scores_input=scores_input)
        plain = Experts(wide(gate_up), wide(down), gate, scores_input=scores_input)
        found = OPS.pack_experts(coded)(states, chosen, scores)
        assert_close(found, REFERENCE.pack_experts(plain)(states, chosen, scores), 4.0)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_loading_does_to_a_weight_keeps_it_quantised(kind):
    """And everything else sees the wide one."""
    torch.manual_seed(0)
    one, two = (weight_of(kind, (6, 64), torch.bfloat16) for _ in range(2))
    rows = torch.tensor([5, 0, 3, 3])
    parameter = torch.nn.Parameter(one, requires_grad=False)
    kept = {
        "cut": (one[1:4], wide(one)[1:4]),
        "selected": (one.index_select(0, rows), wide(one)[rows]),
        "joined": (torch.cat([one, two]), torch.cat([wide(one), wide(two)])),
        "stacked": (torch.stack([one, two]), torch.stack([wide(one), wide(two)])),
        "one of them": (torch.stack([one, two])[1], wide(two)),
        "typed": (one.to(torch.device("cpu"), torch.float16), wide(one).half()),
        "parameter": (parameter.detach(), wide(one)),
    }
    for found, wanted in kept.values():
        assert isinstance(found, QuantisedTensor)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found.wide(), wanted, rtol=1e-2, atol=1e-3)
    states = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(torch.nn.functional.linear(states, one), states @ wide(one).t())
    mixed = torch.cat([one, wide(two)])
    assert not isinstance(mixed, QuantisedTensor)
    assert torch.equal(mixed, torch.cat([wide(one), wide(two)]))
