"""Quantised checkpoints, made here by hand, against models of their dequantised weights."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.config import EngineConfig
from outrider.engine.preflight import check_quantization
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.quantised.scaled import BLOCKS, quantise, rewrite
from outrider.workers.collective import Collective
from outrider.workers.model.checkpoint.quantised_formats import find_format
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.fit import check_weights
from outrider.workers.model.info import describe
from outrider.workers.model.target import load_model

CPU = torch.device("cpu")


def compressed(kind: str, strategy: str, **weights) -> dict:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


FORMATS = {
    "fp8 blocks": (BLOCKS, (128, 128), torch.float8_e4m3fn, "weight_scale_inv"),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        (None, None), torch.float8_e4m3fn, "weight_scale",
    ),
    "fp8 channel": (
        compressed("float-quantized", "channel", type="float"),
        (1, None), torch.float8_e4m3fn, "weight_scale",
    ),
    "int8 tensor": (
        compressed("int-quantized", "tensor"), (None, None), torch.int8, "weight_scale",
    ),
    "int8 group": (
        compressed("int-quantized", "group", group_size=24), (1, 24), torch.int8, "weight_scale",
    ),
}  # fmt: skip


@pytest.fixture(params=FORMATS)
def pair(request, tmp_path):
    """A quantised folder and a plain one of the weights that it stands for."""
    settings, block, dtype, leaf = FORMATS[request.param]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=90, hidden_size=144, intermediate_size=312, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.2,
        )
    )  # fmt: skip
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    model.save_pretrained(plain)
    model.save_pretrained(packed)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, tensor in list(tensors.items()):
        stored[name] = tensor
        if "_proj.weight" in name:
            stored[name], scale, tensors[name] = quantise(tensor, block, dtype)
            scale = scale.reshape(1) if block == (None, None) else scale
            stored[name.replace("weight", leaf)] = scale
        if settings.get("activation_scheme") == "static" and "_proj.weight" in name:
            stored[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    rewrite(packed, settings)
    return plain, packed


def test_a_quantised_model_is_its_dequantised_one(pair, run_ranks, part, build_step):
    step = build_step([part(list(range(3, 14)), 0, [2, 0, 3])], 4)

    def logits(folder, collective):
        model = load_model(folder, dtype=torch.float32, device=CPU, collective=collective)
        with torch.inference_mode():
            return model.forward(step, model.new_cache(4, 4))

    plain, packed = pair
    wanted = logits(plain, Collective.single())
    torch.testing.assert_close(logits(packed, Collective.single()), wanted)
    for found in run_ranks(2, lambda collective: logits(packed, collective)):
        torch.testing.assert_close(found, wanted)
    assert check_weights(packed)[0] == check_weights(plain)[0]


def test_slices_are_read_with_the_scales_of_their_blocks(pair):
    plain, packed = (Checkpoint(folder) for folder in pair)
    name = "model.layers.1.mlp.gate_proj.weight"
    assert packed.names == plain.names
    for box in (((0, 312), (0, 144)), ((100, 131), (7, 130)), ((311, 312), (143, 144))):
        assert torch.equal(packed.source(name).read(box), plain.source(name).read(box))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (compressed("marlin-24", "group", num_bits=4), "format is 'marlin-24'"),
        (compressed("int-quantized", "channel", num_bits=4), "group_0.weights.num_bits is 4"),
        (compressed("int-quantized", "channel", symmetric=False), "weights.symmetric is False"),
        (compressed("float-quantized", "block"), "weights.block_structure is None"),
    ],
)
def test_other_formats_are_refused_by_name_and_field(tmp_path, settings, field):
    LlamaConfig(vocab_size=90, hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    rewrite(tmp_path, settings)
    with pytest.raises(CheckpointError, match=f"quantization_config.*{field}") as error:
        describe(tmp_path)
    assert error.value.field == "model"


def test_scales_that_are_missing_or_do_not_fit_are_named(pair):
    _, packed = pair
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    scale = next(each for each in tensors if each.startswith(f"{name}_scale"))
    save_file({**tensors, scale: torch.ones(3, 5)}, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"scales of tensor '{name}'"):
        check_weights(packed)
    del tensors[scale]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'{name}'.*no scale"):
        check_weights(packed)


def test_the_key_names_the_format_and_a_warning_is_logged(pair, caplog):
    plain, packed = pair
    method = json.loads((packed / "config.json").read_text())["quantization_config"]["quant_method"]
    for wanted in ("auto", method):
        with caplog.at_level(logging.WARNING):
            check_quantization(EngineConfig.load({"model": str(packed), "quantization": wanted}))
        assert "dequantised at load" in caplog.text
    check_quantization(EngineConfig.load({"model": str(plain), "quantization": "none"}))
    for folder, wanted in ((packed, "none"), (plain, "fp8")):
        with pytest.raises(ConfigError, match="quantization") as error:
            check_quantization(EngineConfig.load({"model": str(folder), "quantization": wanted}))
        assert error.value.field == "quantization"


def inputs(*groups: dict | None) -> dict:
    """compressed-tensors' float8 weights, in groups of modules with such `input_activations`."""
    settings = compressed("float-quantized", "channel", type="float")
    first = settings["config_groups"].pop("group_0")
    for index, each in enumerate(groups):
        settings["config_groups"][f"group_{index}"] = {**first, "input_activations": each}
    return settings


FLOAT = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("settings", "group"),
    [
        (BLOCKS, 128),
        ({**BLOCKS, "activation_scheme": None}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 0),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 0),
        ({"quant_method": "fp8"}, None),
        (inputs(None), None),
        (inputs(FLOAT), 0),
        (inputs({**FLOAT, "dynamic": False, "strategy": "tensor"}, FLOAT), 0),
        (inputs({**FLOAT, "strategy": "group", "group_size": 128}), 128),
        (inputs({**FLOAT, "strategy": "group"}), None),
        (inputs({**FLOAT, "type": "int"}), None),
        (inputs({**FLOAT, "num_bits": 16}), None),
        (inputs(FLOAT, None), None),  # some modules' only
        (compressed("int-quantized", "channel"), None),
    ],
)
def test_what_a_configuration_asks_of_inputs(tmp_path, settings, group):
    LlamaConfig(vocab_size=90, hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path)
    rewrite(tmp_path, settings)
    assert find_format(tmp_path).input_group == group
