"""Checkpoints in AWQ, GPTQ and pack-quantized form, made by hand, with the plain one that each
stands for: as compressed-tensors reads it, or for GPTQ by its formula."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

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


def group_of(weight) -> int:
    """`GROUP`, or a smaller size that divides the columns."""
    return math.gcd(GROUP, weight.shape[1])


def awq(weight):
    group = group_of(weight)
    codes, scales, zeros = codes_of(weight, 4, group, symmetric=False)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    stored = {
        "qweight": words(codes.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().half().contiguous(),
    }
    tensors = {f"x.{name}": tensor.clone() for name, tensor in stored.items()}
    made = AutoAWQConverter.from_autoawq_config({**AWQ, "group_size": group}).process(tensors)
    wide = unpacked(made["x.weight_packed"], 4, group, made, symmetric=False)
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
    group = group_of(weight)
    codes, scales, zeros = codes_of(weight, bits, group, symmetric=symmetric)
    index = torch.arange(weight.shape[1]) // group
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
    group = group and group_of(weight)
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


def write_pair(kind: str, folder: Path) -> tuple[Path, Path]:
    """A plain folder, and the quantised one that stands for it."""
    settings, quantise = KINDS[kind]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=90, hidden_size=96, intermediate_size=COLUMNS, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.2,
        )
    )  # fmt: skip
    folders = folder / "plain", folder / "packed"
    model.save_pretrained(folders[0])
    write_coded(folders[0], folders[1], settings, quantise)
    return folders


def write_coded(plain: Path, coded: Path, settings, quantise) -> None:
    """Quantises the projections of `plain` into the folder `coded`; `plain` gets their values."""
    shutil.copytree(plain, coded)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, tensor in list(tensors.items()):
        if "_proj.weight" not in name or "eh_proj" in name:
            stored[name] = tensor
            continue
        parts, tensors[name] = quantise(tensor)
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{leaf}": part.contiguous() for leaf, part in parts.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, coded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"] = settings
    (coded / "config.json").write_text(json.dumps(config))
