"""AWQ, GPTQ and compressed-tensors' formats against compressed-tensors' own decompression."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from outrider.config import EngineConfig
from outrider.engine.preflight import check_quantization
from outrider.errors import CheckpointError
from outrider.tests.helpers.quantised.formats import AWQ, GPTQ, KINDS, compressed, write_pair
from outrider.workers.collective import Collective
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.fit import check_weights
from outrider.workers.model.info import describe
from outrider.workers.model.target import load_model
from outrider.workers.ops.quantised import QuantisedTensor

CPU = torch.device("cpu")


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    return write_pair(request.param, tmp_path)


def test_every_part_is_what_the_library_reads(pair):
    plain, coded = Checkpoint(pair[0]), Checkpoint(pair[1])
    kept = Checkpoint(pair[1], keeps_quantised=True)
    assert coded.names == plain.names
    for name, boxes in (
        ("model.layers.1.mlp.down_proj.weight", [((0, 96), (0, 288)), ((13, 61), (144, 288))]),
        ("model.layers.0.mlp.up_proj.weight", [((96, 192), (0, 96)), ((7, 9), (20, 84))]),
    ):
        for box in boxes:
            wanted = plain.source(name).read(box)
            assert torch.equal(coded.source(name).read(box), wanted)
            found = kept.source(name).read(box)
            if isinstance(found, QuantisedTensor):
                assert found.num_bytes < wanted.numel() * 2
                found = found.wide()
            assert torch.equal(found, wanted)


def test_a_quantised_model_is_its_dequantised_one(pair, run_ranks, part, build_step, caplog):
    step = build_step([part(list(range(3, 14)), 0, [2, 0, 3])], 4)

    def logits(folder, collective):
        model = load_model(folder, dtype=torch.float32, device=CPU, collective=collective)
        with torch.inference_mode():
            return model.forward(step, model.new_cache(4, 4))

    wanted = logits(pair[0], Collective.single())
    torch.testing.assert_close(logits(pair[1], Collective.single()), wanted)
    for found in run_ranks(2, lambda collective: logits(pair[1], collective)):
        torch.testing.assert_close(found, wanted)
    assert check_weights(pair[1])[0] == check_weights(pair[0])[0]
    method = json.loads((pair[1] / "config.json").read_text())["quantization_config"]
    keys = {"model": str(pair[1]), "quantization": method["quant_method"], "device": "cpu"}
    check_quantization(EngineConfig.load(keys))
    assert "dequantised at load" in caplog.text


def test_what_is_missing_or_does_not_fit_is_named(pair):
    tensors = load_file(pair[1] / "model.safetensors")
    stem = "model.layers.0.self_attn.q_proj."
    leaf = "weight_scale" if f"{stem}weight_scale" in tensors else "scales"
    save_file({**tensors, stem + leaf: torch.ones(3, 5)}, pair[1] / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"scales of tensor '{stem}weight'"):
        check_weights(pair[1])
    del tensors[stem + leaf]
    save_file(tensors, pair[1] / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'{stem}{leaf}' is missing"):
        check_weights(pair[1])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({**AWQ, "bits": 3}, "bits is 3"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
        ({**GPTQ, "bits": 2}, "bits is 2"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method is 'modelopt'"),
        ({"quant_method": "quark"}, "quant_method is 'quark'"),
        ({**compressed(4, "group"), "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (compressed(2, "group"), "group_0.weights.num_bits is 2"),
        (compressed(4, "tensor_group"), "weights.strategy is 'tensor_group'"),
        (compressed(4, "group", type="float"), "weights.type is 'float'"),
    ],
)
def test_other_kinds_are_refused_by_name_and_field(tmp_path, settings, field):
    LlamaConfig(vocab_size=90, hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"quantization_config.*{field}") as error:
        describe(tmp_path)
    assert error.value.field == "model"


def test_an_export_of_model_optimizer_is_refused_without_a_section_too(tmp_path):
    LlamaConfig(vocab_size=90, hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    made = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(made))
    with pytest.raises(CheckpointError, match="hf_quant_config.json.*quant_algo 'NVFP4'"):
        describe(tmp_path)
