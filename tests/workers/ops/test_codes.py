"""Products by weights in codes, against those by the weights that the codes stand for."""

from __future__ import annotations

import pytest
import torch

from outrider.tests.helpers.quantised.formats import write_pair
from outrider.tests.helpers.quantised.scaled import BLOCKS, rewrite
from outrider.workers.model.checkpoint import quantised as quantised_sources
from outrider.workers.model.checkpoint.quantised import CodedSource
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.fit import bytes_of_coded
from outrider.workers.ops.cpu import CodedProjection, CpuOps, PanelProjection, kernel_codes
from outrider.workers.ops.invariant import InvariantOps
from outrider.workers.ops.quantised import Codes, QuantisedTensor

KINDS = {  # bits, columns of a group, offset, minima
    "Q4_0": (4, 32, 8, False),
    "Q4_K": (4, 32, 0, True),
    "Q8_0": (8, 32, 0, False),
    "Q6_K": (8, 16, 0, False),
    "Q5_K": (8, 32, 0, True),
    "cut": (4, 4, 8, False),
}


def quantised(kind: str, rows: int, columns: int) -> QuantisedTensor:
    """Random codes."""
    bits, group, offset, has_minima = KINDS[kind]
    shape = (rows, columns // group)
    if bits == 4:
        values = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    else:
        values = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales, minima = (torch.randn(shape).half() / 100 for _ in range(2))
    codes = Codes(values, scales, None, group, columns, offset, minima if has_minima else None)
    return QuantisedTensor(codes.packed() if bits == 4 else codes, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_weight_the_codes_stand_for(kind):
    torch.manual_seed(0)
    weight = quantised(kind, 200, 4480)  # more than a section of units
    codes = kernel_codes(weight)
    bias, states = torch.randn(200).bfloat16(), torch.randn(40, 4480).bfloat16()
    for shift in (bias, None):
        wide = PanelProjection(weight.codes.wide().bfloat16(), shift)
        product = CodedProjection(codes, shift)
        for count in (1, 2, 3, 5, 7, 12, 13, 40):  # every tile, and what is unpacked for all rows
            assert torch.equal(product(states[:count]), wide(states[:count])), count
    exact = states.double() @ weight.codes.wide().bfloat16().double().t()
    assert torch.allclose(product(states).double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("ops", [CpuOps, InvariantOps])
def test_what_the_kernel_does_not_take_is_widened(ops):
    torch.manual_seed(2)
    weight = quantised("Q8_0", 64, 64)
    scales = weight.codes.scales.float() * 1.0001  # none of float16
    odd = QuantisedTensor(Codes(weight.codes.values, scales, None, 32, 64), torch.bfloat16)
    assert kernel_codes(odd) is None
    states = torch.randn(4, 64).bfloat16()
    found = ops(torch.bfloat16).pack(odd, None)
    assert not isinstance(found, CodedProjection)
    assert torch.equal(found(states), ops(torch.bfloat16).pack(odd.wide(), None)(states))
    assert isinstance(ops(torch.bfloat16).pack(weight, None), CodedProjection)


def test_rows_of_different_codes_are_joined_without_being_widened():
    parts = [quantised(kind, 32, 64) for kind in ("Q4_K", "Q6_K", "Q4_0")]
    joined = torch.cat(parts)
    assert isinstance(joined, QuantisedTensor)
    assert joined.codes.group == 16
    wanted = torch.cat([each.codes.wide() for each in parts])
    assert torch.equal(joined.codes.wide(), wanted)
    assert kernel_codes(joined) is not None
    sources = {
        f"model.layers.0.self_attn.{name}_proj.weight": CodedSource(
            (32, 64), *KINDS[kind], lambda rows: None
        )
        for name, kind in zip("qkv", ("Q4_K", "Q6_K", "Q4_0"), strict=True)
    }
    assert set(bytes_of_coded(sources).values()) == {joined.num_bytes / joined.numel()}
    del sources["model.layers.0.self_attn.k_proj.weight"]  # which is not quantised
    assert not bytes_of_coded(sources)


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq symmetric", "gptq v2, 8 bits", "packed"])
def test_a_checkpoints_integers_are_read_as_the_kernel_does(kind, tmp_path, monkeypatch):
    """Zeros become minima of float16; none where all of them are in the middle."""
    monkeypatch.setattr(quantised_sources, "FEWEST_CODED", 0)
    plain, coded = write_pair(kind, tmp_path)
    wide, stored = Checkpoint(plain), Checkpoint(coded, keeps_codes=True)
    name = "model.layers.1.mlp.down_proj.weight"
    box = tuple((0, size) for size in wide.source(name).shape)
    exact, weight = wide.source(name).read(box), stored.source(name).read(box).bfloat16()
    codes = kernel_codes(weight)
    assert (codes.minima is None) == (kind in ("gptq symmetric", "packed"))
    if codes.minima is None:
        assert torch.equal(codes.wide(), exact)
    else:
        most = codes.minima.float().abs().max() * 2**-11
        assert 0 < (codes.wide() - exact).abs().max() <= most
    states = torch.randn(9, exact.shape[1]).bfloat16()
    product = CpuOps(torch.bfloat16).pack(weight, None)
    assert isinstance(product, CodedProjection)
    assert torch.equal(product(states), PanelProjection(codes.wide().bfloat16(), None)(states))


def test_few_weights_floats_and_orders_of_columns_are_not_kept(tmp_path, monkeypatch):
    _, coded = write_pair("gptq desc_act", tmp_path)
    assert not Checkpoint(coded, keeps_codes=True).keeps
    monkeypatch.setattr(quantised_sources, "FEWEST_CODED", 0)
    assert Checkpoint(coded, keeps_codes=True).keeps
    source = Checkpoint(coded, keeps_codes=True).source("model.layers.1.mlp.down_proj.weight")
    assert not isinstance(source.read(((0, 96), (0, 288))), QuantisedTensor)
    rewrite(coded, BLOCKS)
    assert not Checkpoint(coded, keeps_codes=True).keeps
