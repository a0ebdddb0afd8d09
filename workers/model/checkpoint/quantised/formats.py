"""Which quantised formats are read, from `config.json` alone; every other is refused by name.

- fp8 in blocks with `weight_scale_inv` (DeepSeek-V3's README_WEIGHTS.md, Qwen3's FP8 models).
- compressed-tensors' `float-quantized`, `int-quantized`, `naive-quantized` (a stored value times
  the scale of its block) and `pack-quantized` (`compressed_tensors/compressors/pack_quantized`).
- AWQ as AutoAWQ's "gemm" packing; GPTQ as AutoGPTQ and GPTQModel write it ("gptq", "gptq_v2").

Called by `workers/model/settings.py` and `engine/checks.py`; `sources.py` reads the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from .....errors import CheckpointError

_SCALED = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED_STRATEGIES = ("channel", "group")
_PACKED_BITS = (4, 8)
_GPTQ_FORMATS = ("gptq", "gptq_v2")


class Layout(Enum):
    """How the tensors of one weight are laid out in the files."""

    SCALED = auto()  # weight, and weight_scale or weight_scale_inv
    PACKED = auto()  # weight_packed along columns, weight_scale, weight_zero_point
    AWQ = auto()  # qweight of the transposed weight, packed along its columns; qzeros, scales
    GPTQ = auto()  # qweight of the transposed weight, packed along its rows; qzeros, scales


STORED = {
    Layout.SCALED: "weight",
    Layout.PACKED: "weight_packed",
    Layout.AWQ: "qweight",
    Layout.GPTQ: "qweight",
}
"""Last part of the name of a weight's codes."""
SCALES = ("weight_scale_inv", "weight_scale")
_BESIDE = {
    "weight": (*SCALES, "weight_zero_point", "input_scale", "activation_scale"),
    "weight_packed": (
        "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
    ),
    "qweight": ("qzeros", "scales", "g_idx"),
}  # fmt: skip
"""By it, last parts of names that are no weights of their own."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a checkpoint's weights are quantised."""

    method: str  # as in config.json: fp8, compressed-tensors, awq, gptq
    description: str
    block: tuple[int, int] | None = None  # rows and columns of a scale; None: the shapes tell
    layout: Layout = Layout.SCALED
    bits: int = 8
    adds_one: bool = False  # GPTQ's first format stores zeros less one

    def stored_name(self, name: str, names: Container[str]) -> str | None:
        """The codes of tensor `name`; None: it is stored as it is."""
        stem, _, leaf = name.rpartition(".")
        if leaf != "weight":
            return None
        if self.layout is Layout.SCALED:
            return name if self.scale_name(name, names) else None
        stored = f"{stem}.{STORED[self.layout]}"
        return stored if stored in names else None

    def scale_name(self, name: str, names: Container[str]) -> str | None:
        """The scale of weight `name`."""
        stem = name.rpartition(".")[0]
        if self.layout in (Layout.AWQ, Layout.GPTQ):
            return f"{stem}.scales"
        return next((f"{stem}.{each}" for each in SCALES if f"{stem}.{each}" in names), None)

    def weights(self, names: Mapping[str, str]) -> dict[str, str]:
        """Names of the weights that the stored tensors `names` make up, each with its codes'."""
        leaf = STORED[self.layout]
        hidden = _BESIDE[leaf]
        found = {}
        for name in names:
            stem, _, last = name.rpartition(".")
            if last == leaf:
                found[f"{stem}.weight"] = name
            elif last not in hidden or not (
                self.layout is Layout.SCALED or f"{stem}.{leaf}" in names
            ):
                found[name] = name
        return found


def find_format(path: Path) -> WeightFormat | None:
    """How the weights of `path` are quantised; None: not at all.

    Raises:
        CheckpointError: in a way that is not read; names the format and the field.
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reported by whoever reads the configuration
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    for each in (config, inner if isinstance(inner, dict) else {}):
        section = each.get("quantization_config") or each.get("compression_config")
        if section:
            return _read(section, path)
    return None


def _read(section: Any, path: Path) -> WeightFormat:
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method == "fp8":
        block = section.get("weight_block_size")
        if not _is_block(block):
            raise _refused(path, "weight_block_size", block, "two block lengths, as [128, 128]")
        return WeightFormat(
            "fp8", f"fp8 in blocks of {block[0]} x {block[1]}", (block[0], block[1])
        )
    if method == "compressed-tensors":
        return _read_compressed(section, path)
    if method == "awq":
        return _read_awq(section, path)
    if method == "gptq":
        return _read_gptq(section, path)
    allowed = "fp8 (in blocks), compressed-tensors, awq, gptq"
    raise _refused(path, "quant_method", method, allowed)


def _read_awq(section: Any, path: Path) -> WeightFormat:
    bits, group = section.get("bits", 4), section.get("group_size", 128)
    if bits != 4:
        raise _refused(path, "bits", bits, "4")
    if str(section.get("version", "gemm")).lower() != "gemm":
        raise _refused(path, "version", section["version"], "gemm")
    return WeightFormat("awq", f"4 bits in groups of {group}", layout=Layout.AWQ, bits=4)


def _read_gptq(section: Any, path: Path) -> WeightFormat:
    bits, group = section.get("bits"), section.get("group_size", -1)
    if bits not in (4, 8):
        raise _refused(path, "bits", bits, "4, 8")
    kind = section.get("checkpoint_format") or "gptq"
    if kind not in _GPTQ_FORMATS:
        raise _refused(path, "checkpoint_format", kind, ", ".join(_GPTQ_FORMATS))
    order = ", in the order of activations" if section.get("desc_act") else ""
    return WeightFormat(
        "gptq",
        f"{bits} bits in groups of {group}{order}",
        layout=Layout.GPTQ,
        bits=bits,
        adds_one=kind == "gptq",
    )


def _read_compressed(section: Any, path: Path) -> WeightFormat:
    kind = section.get("format")
    if kind not in (*_SCALED, _PACKED):
        raise _refused(path, "format", kind, ", ".join((*_SCALED, _PACKED)))
    if section.get("kv_cache_scheme") is not None:
        raise _refused(path, "kv_cache_scheme", section["kv_cache_scheme"], "null")
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(path, "config_groups", groups, "a mapping of groups")
    found, blocks, bits = [], [], 8
    for name, group in groups.items():
        weights = (group.get("weights") if isinstance(group, dict) else None) or {}
        bits = _check_group(weights, f"config_groups.{name}.weights", kind == _PACKED, path)
        found.append(f"{weights.get('type', 'int')}{bits} per {weights['strategy']}")
        blocks.append(weights.get("block_structure") if weights["strategy"] == "block" else None)
        if weights["strategy"] == "block" and not _is_block(blocks[-1]):
            where = f"config_groups.{name}.weights.block_structure"
            raise _refused(path, where, blocks[-1], "two block lengths, as [128, 128]")
    kinds = {text.split(" ")[0] for text in found}
    if len(kinds) > 1 or any(block != blocks[0] for block in blocks):
        raise _refused(path, "config_groups", ", ".join(found), "groups of one kind")
    block = None if blocks[0] is None else (blocks[0][0], blocks[0][1])
    layout = Layout.PACKED if kind == _PACKED else Layout.SCALED
    description = f"{kind}: {', '.join(found)}"
    return WeightFormat("compressed-tensors", description, block, layout=layout, bits=bits)


def _check_group(weights: Mapping[str, Any], where: str, packed: bool, path: Path) -> int:
    """The bits of a group of modules that is read."""
    bits: Any = weights.get("num_bits")
    allowed = _PACKED_BITS if packed else (8,)
    if bits not in allowed:
        raise _refused(path, f"{where}.num_bits", bits, ", ".join(map(str, allowed)))
    if packed and weights.get("type", "int") != "int":
        raise _refused(path, f"{where}.type", weights["type"], "int")
    if not packed and not weights.get("symmetric", True):
        raise _refused(path, f"{where}.symmetric", False, "true")
    if not packed and weights.get("actorder"):
        raise _refused(path, f"{where}.actorder", weights["actorder"], "null")
    strategies = _PACKED_STRATEGIES if packed else _STRATEGIES
    if weights.get("strategy") not in strategies:
        raise _refused(path, f"{where}.strategy", weights.get("strategy"), ", ".join(strategies))
    return int(bits)


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    )


def _refused(path: Path, field: str, value: Any, allowed: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is quantised in a way that is not read: quantization_config.{field} is "
        f"{value!r}, allowed: {allowed}; serve its unquantised original",
        field="model",
    )
