"""Inputs in float8 and their products, against torch's conversion and products in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_mm
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.bench.gpu.inputs import (
    float8_inputs,
    float8_weight,
    scaled_mm_in_float32,
    weight_of,
)
from outrider.tests.helpers.quantised.formats import write_coded
from outrider.tests.helpers.quantised.scaled import BLOCKS, quantise
from outrider.tests.helpers.steps import assert_close
from outrider.workers.collective import Collective
from outrider.workers.model.target import load_model
from outrider.workers.ops.cuda import float8
from outrider.workers.ops.cuda.float8 import GROUP, Float8Product, Float8Products
from outrider.workers.ops.cuda.linear import TiledProduct
from outrider.workers.ops.cuda.ops import CudaOps, InvariantCudaOps
from outrider.workers.ops.quantised import QuantisedTensor

CPU = torch.device("cpu")


def ops_with(groups=(0, GROUP), multiply=scaled_mm_in_float32, kind=CudaOps):
    ops = kind(CPU)
    ops.float8 = Float8Products(set(groups), ops.num_processors, multiply)
    return ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("size", "group"), [(96, 96), (384, 384), (384, 128), (4096, 128), (1040, 1040)]
)
def test_codes_are_torchs(size, group, dtype, monkeypatch):
    """Of columns of a wider tensor too, and of rows that take several turns."""
    monkeypatch.setattr(float8, "_MAX_BLOCK", 512)
    torch.manual_seed(0)
    states = (torch.randn(6, size + 16) * torch.logspace(-3, 3, 6)[:, None]).to(dtype)[:, 8:-8]
    states[2], states[3, :8] = 0, torch.tensor([1e-6, 3e-5, -0.0, 400, -448, 449, 1, 0]).to(dtype)
    codes, scales = float8.quantise(states, group)
    wanted = float8_inputs(states, group)
    assert codes.shape == (8, size)
    assert scales.shape == (8, size // group)
    assert torch.equal(codes[:6].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scales[:6], wanted[1])
    assert not codes[6:].float().any()
    alone = float8.quantise(states[4:5], group)  # what a row becomes depends on that row alone
    assert torch.equal(alone[0][0].view(torch.uint8), codes[4].view(torch.uint8))
    assert torch.equal(alone[1][0], scales[4])


def test_what_is_no_number_stays_none():
    states = torch.randn(4, 256)
    states[1, 3], states[2, 200] = torch.nan, -torch.inf
    for group in (128, 256):
        codes, scales = float8.quantise(states, group)
        wide = codes.float() * scales.repeat_interleave(group, 1)
        assert wide[[0, 3]].isfinite().all()
        assert wide[1].isnan().any()
        assert wide[2].isnan().any()


@pytest.mark.parametrize("group", [0, GROUP])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(group, has_bias):
    """Those of the codes on both sides; with scales of rows also by torch's own product."""
    torch.manual_seed(0)
    weight = float8_weight((80, 384), torch.bfloat16, group)
    bias = torch.randn(80).bfloat16() if has_bias else None
    made = [ops_with().pack(weight, bias)]
    if not group:
        made.append(ops_with((0,), scaled_mm).pack(weight, bias))
    for rows in (1, 5):
        states = torch.randn(rows, 400).bfloat16()[:, 8:-8]
        codes, scales = float8_inputs(states, group or 384)
        inputs = codes.float() * scales.repeat_interleave(group or 384, 1)
        wide = weight.codes.wide()  # in float32
        wanted = torch.nn.functional.linear(inputs, wide, None if bias is None else bias.float())
        near = torch.nn.functional.linear(states, weight, bias).float()
        for product in made:
            assert isinstance(product, Float8Product)
            found = product(states)
            assert_close(found, wanted.bfloat16(), 4.0)
            assert 0.005 < (found.float() - near).norm() / near.norm() < 0.1
    assert made[0](states[:0]).shape == (0, 80)


def test_one_group_is_a_whole_row():
    weight, states = float8_weight((48, 128), torch.bfloat16, GROUP), torch.randn(3, 128).bfloat16()
    by_hand, by_torch = (ops_with((0,), each) for each in (scaled_mm_in_float32, scaled_mm))
    wanted = by_hand.pack(weight, None)(states)
    assert_close(by_torch.pack(weight, None)(states), wanted, 4.0)


def test_inputs_stay_as_they_are_for_a_comparison(monkeypatch):
    monkeypatch.setattr(float8, "_TRIED_ROWS", (1, 5))
    weight, ops = float8_weight((48, 256), torch.bfloat16, GROUP), ops_with()
    product, states = ops.pack(weight, None), torch.randn(3, 256).bfloat16()
    plain = TiledProduct(weight, None, ops.num_processors, fixed_rows=False)(states)
    with ops.plain_inputs():
        assert torch.equal(product(states), plain)
    assert not torch.equal(product(states), plain)
    product.check()
    ops.float8.multiply = lambda *args, **kwargs: 2 * scaled_mm_in_float32(*args, **kwargs)
    with pytest.raises(float8._Unfit, match="is 1 off"):
        product.check()


def with_inputs(weight, input_group):
    return QuantisedTensor(replace(weight.codes, input_group=input_group), weight.dtype)


def test_only_what_a_checkpoint_asks_for_and_a_product_takes():
    """Everything else has the kernel that widens weights, and its inputs as they are."""
    dtype, rows = torch.bfloat16, float8_weight((48, 256), torch.bfloat16, 0)
    blocks = float8_weight((48, 256), dtype, GROUP)
    for weight in (rows, blocks, with_inputs(rows, 256)):
        ops = ops_with()
        assert isinstance(ops.pack(weight, None), Float8Product)
        assert ops.name == "triton, float8 inputs"
    others = {
        "weights alone are quantised": with_inputs(rows, None),
        "weights have rows, inputs groups": with_inputs(rows, GROUP),
        "weights have blocks, inputs rows": with_inputs(blocks, 0),
        "blocks that a rank has cut": with_inputs(weight_of("fp8", (48, 256), dtype, 64), GROUP),
        "part of a block": float8_weight((48, 208), dtype, GROUP),
        "an odd number of rows": float8_weight((40, 256), dtype, 0),
        "an odd number of columns": float8_weight((48, 248), dtype, 0),
        "float16": float8_weight((48, 256), torch.float16, 0),
        "integers": with_inputs(weight_of("int8", (48, 256), dtype, 256), 0),
    }
    for weight in others.values():
        ops = ops_with()
        assert isinstance(ops.pack(weight, None), TiledProduct)
        assert ops.name == "triton"
    assert isinstance(ops_with((0,)).pack(blocks, None), TiledProduct)  # of the device
    assert isinstance(CudaOps(CPU).pack(rows, None), TiledProduct)
    assert isinstance(ops_with(kind=InvariantCudaOps).pack(rows, None), TiledProduct)


def test_rows_of_joined_weights_keep_the_wish():
    one, two = (float8_weight((32, 256), torch.bfloat16, GROUP) for _ in range(2))
    joined = torch.cat([one, two])
    product = ops_with().pack(joined.index_select(0, torch.arange(48)), None)
    assert isinstance(product, Float8Product)
    assert not isinstance(torch.cat([one, with_inputs(two, None)]), QuantisedTensor)


def fp8(weight):
    stored, scales, wide = quantise(weight, (128, 128), torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, wide


class Watching(CudaOps):
    """Notes the kinds of products."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.float8 = Float8Products({0, GROUP}, self.num_processors, scaled_mm_in_float32)
        self.packed: list[type] = []

    def pack(self, weight, bias):
        made = super().pack(weight, bias)
        if isinstance(weight, QuantisedTensor):
            self.packed.append(type(made))
        return made


def test_a_model_whose_configuration_asks_for_it(tmp_path, part, build_step):
    """It is compared with the bridge by inputs as they are; so are those of weights alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=256, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    alone = {key: value for key, value in BLOCKS.items() if key != "activation_scheme"}
    write_coded(tmp_path / "plain", tmp_path / "both", BLOCKS, fp8)
    write_coded(tmp_path / "plain", tmp_path / "weights", alone, fp8)
    step, found = build_step([part([5, 9, 30, 4, 7, 11], 0, [1, 0])], 4), {}
    for name in ("both", "weights"):
        ops = Watching()
        model = load_model(
            tmp_path / name, dtype=torch.bfloat16, device=CPU, collective=Collective.single(),
            ops=ops,
        )  # fmt: skip
        assert model.forward_choice.kind == "family", model.forward_choice
        assert set(ops.packed) == {Float8Product if name == "both" else TiledProduct}
        assert len(ops.packed) == 4
        assert model.forward_choice.operations == ops.name
        with torch.inference_mode():
            found[name] = model.forward(step, model.new_cache(2, 4)).float()
            with ops.plain_inputs():
                found[f"{name}, plain"] = model.forward(step, model.new_cache(2, 4)).float()
    wanted = found["weights"]
    assert torch.equal(found["weights, plain"], wanted)
    assert torch.equal(found["both, plain"], wanted)
    assert 0.005 < (found["both"] - wanted).norm() / wanted.norm() < 0.2
