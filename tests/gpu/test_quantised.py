"""On a CUDA device: products with quantised weights, in captured graphs too, and a whole engine."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.gpu.inputs import KINDS, float8_weight, weight_of

from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.quantised.formats import write_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_products(kind):
    from outrider.workers.ops.cuda.linear import TiledProduct
    from outrider.workers.ops.quantised import QuantisedTensor

    torch.manual_seed(0)
    device = torch.device("cuda")
    weight = weight_of(kind, (4096, 2048), torch.bfloat16, 128).to(device)
    wide = weight.wide() if isinstance(weight, QuantisedTensor) else weight
    if isinstance(weight, QuantisedTensor):
        assert weight.num_bytes < 0.56 * wide.numel() * 2
    product = TiledProduct(weight, None, 132, fixed_rows=False)
    for rows in (1, 8, 100, 700):
        states = torch.randn(rows, 2048, device=device, dtype=torch.bfloat16)
        wanted = states.float() @ wide.float().t()
        torch.testing.assert_close(product(states).float(), wanted, rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(states)
        graph.replay()
        assert torch.equal(captured, product(states))


@pytest.mark.parametrize("group", [0, 128])
def test_products_by_inputs_in_float8(group):
    """Captured as launched; a token's codes are the same beside others."""
    from outrider.workers.ops.cuda.float8 import Float8Products, quantise

    torch.manual_seed(0)
    device = torch.device("cuda")
    product = Float8Products.of(device, 132).pack(
        float8_weight((4096, 2048), torch.bfloat16, group, device), None
    )
    if product is None:
        pytest.skip("no scaled_mm of this kind on the device")
    for rows in (1, 5, 8, 100, 700):
        states = torch.randn(rows, 2048, device=device, dtype=torch.bfloat16)
        found = product(states)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(states)
        graph.replay()
        assert torch.equal(captured, found)
        for part, alone in zip(
            quantise(states, product.group), quantise(states[:1], product.group)
        ):
            assert torch.equal(part[0].float(), alone[0].float())
        torch.testing.assert_close(product(states[:1]), found[:1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["awq", "gptq", "packed, zeros"])
def test_engines_emit_the_dequantised_models_tokens(kind, tmp_path):
    """With and without drafts, from captured graphs, in float32, where ties do not fall apart."""
    pair, prompts = write_pair(kind, tmp_path), random_prompts(6, 90)
    options = {"device": "cuda", "max_num_seqs": 8}
    with engine_of(str(pair[0]), **options) as engine:
        wanted = complete(engine, prompts)[0]
    for section in (None, {"decoding_type": "NGram", "max_draft_len": 5}):
        with engine_of(str(pair[1]), section, **options) as engine:
            assert engine.info.operations == "triton"
            assert complete(engine, prompts)[0] == wanted
