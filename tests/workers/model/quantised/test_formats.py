"""AWQ, GPTQ and compressed-tensors' formats against compressed-tensors' own decompression."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.config import EngineConfig
from outrider.engine.checks import check_quantization
from outrider.errors import CheckpointError
from outrider.workers.collective import Collective
from outrider.workers.model import describe, load_model
from outrider.workers.model.fit import check_weights
from outrider.workers.model.weights import Checkpoint
from outrider.workers.ops.quantised import QuantisedTensor

CPU = torch.device("cpu")
COLUMNS, GROUP = 288, 96
"""Two ranks cut these columns in the middle of a group."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def words(values: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Codes [rows, columns] in int32 words along columns, one after the other."""
    per = 32 // bits
    out = torch.zeros(values.shape[0], values.shape[1] // per, dtype=torch.int64)
    for column in range(values.shape[1]):
        place = column % per if order is None else order[column % per]
        out[:, column // per] |= values[:, column].long() << (bits * place)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def codes_of(weight, bits, group, *, symmetric):
    """Unsigned codes [rows, columns], scales and zeros [rows, num_groups]."""
    grouped = weight.unflatten(1, (-1, group))
    top = (1 << bits) - 1
    if symmetric:
        scales = grouped.abs().amax(2) / (top // 2)
        zeros = torch.full_like(scales, (top + 1) // 2)
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    scales = scales.half().float()
    values = (grouped / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, top)
    return values.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8)


def awq(weight):
    codes, scales, zeros = codes_of(weight, 4, GROUP, symmetric=False)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    stored = {
        "qweight": words(codes.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().half().contiguous(),
    }
    tensors = {f"x.{name}": tensor.clone() for name, tensor in stored.items()}
    made = AutoAWQConverter.from_autoawq_config(AWQ).process(tensors)
    wide = unpacked(made["x.weight_packed"], 4, GROUP, made, symmetric=False)
    return stored, wide


def unpacked(packed, bits, group, tensors, *, symmetric):
    """What compressed-tensors reads."""
    state = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
    state["weight_scale"] = state["weight_scale"].float()
    kind = "group" if group else "channel"
    arguments = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy=kind, group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"].float()


def gptq(weight, bits=4, *, order=False, adds_one=True, symmetric=False):
    """As AutoGPTQ writes it; decoded here by its formula, element by element."""
    codes, scales, zeros = codes_of(weight, bits, GROUP, symmetric=symmetric)
    index = torch.arange(weight.shape[1]) // GROUP
    if order:  # columns belong to any group
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(3))]
    mask = (1 << bits) - 1
    written = (zeros.int() - int(adds_one)) & mask
    wide = torch.empty_like(weight)
    for column, group in enumerate(index.tolist()):
        difference = codes[:, column].float() - zeros[:, group].float()
        wide[:, column] = difference * scales[:, group]
    stored = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(written.t(), bits),
        "scales": scales.t().half().contiguous(),
        "g_idx": index.to(torch.int32),
    }
    return stored, wide


def packed(weight, bits=4, group=GROUP, *, symmetric=True):
    size = group or weight.shape[1]
    codes, scales, zeros = codes_of(weight, bits, size, symmetric=symmetric)
    stored = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    made = {f"x.{name}": tensor for name, tensor in stored.items()}
    return stored, unpacked(stored["weight_packed"], bits, group, made, symmetric=symmetric)


def compressed(bits, strategy, **weights):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"}
KINDS = {
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq symmetric": (GPTQ, lambda weight: gptq(weight, symmetric=True)),
    "gptq v2, 8 bits": (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 8, adds_one=False),
    ),
    "gptq desc_act": ({**GPTQ, "desc_act": True}, lambda weight: gptq(weight, order=True)),
    "packed": (compressed(4, "group", group_size=GROUP), packed),
    "packed, zeros": (
        compressed(4, "group", group_size=GROUP, symmetric=False),
        lambda weight: packed(weight, symmetric=False),
    ),
    "packed, 8 bits, channel": (
        compressed(8, "channel"), lambda weight: packed(weight, 8, None),
    ),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    """A quantised folder and a plain one of the weights that it stands for."""
    settings, quantise = KINDS[request.param]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=90, hidden_size=96, intermediate_size=COLUMNS, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.2,
        )
    )  # fmt: skip
    folders = tmp_path / "plain", tmp_path / "packed"
    for folder in folders:
        model.save_pretrained(folder)
    tensors = load_file(folders[0] / "model.safetensors")
    stored = {}
    for name, tensor in list(tensors.items()):
        if "_proj.weight" not in name:
            stored[name] = tensor
            continue
        parts, tensors[name] = quantise(tensor)
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{leaf}": part.contiguous() for leaf, part in parts.items()}
    save_file(tensors, folders[0] / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folders[1] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folders[1] / "config.json").read_text())
    config["quantization_config"] = settings
    (folders[1] / "config.json").write_text(json.dumps(config))
    return folders


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
