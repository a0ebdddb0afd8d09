"""The quantised formats that are read, found from `config.json`; others are rejected by name.

- fp8 in blocks with `weight_scale_inv` (DeepSeek-V3's README_WEIGHTS.md, Qwen3's FP8 models), or
  with one `weight_scale` per tensor (AutoFP8).
- compressed-tensors' `float-quantized`, `int-quantized`, `naive-quantized` (a stored value times
  the scale of its block) and `pack-quantized` (`compressed_tensors/compressors/pack_quantized`).
- AWQ in AutoAWQ's "gemm" packing; GPTQ as AutoGPTQ and GPTQModel write it ("gptq", "gptq_v2").
- mxfp4 in the layout of gpt-oss's experts (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from ....config.files import stored_config
from ....errors import CheckpointError

_SCALED = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED_STRATEGIES = ("channel", "group")
_PACKED_BITS = (4, 8)
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_MODELOPT = "hf_quant_config.json"  # TensorRT Model Optimizer's file
MXFP4_GROUP = 32  # weights per scale


class PackLayout(Enum):
    """How the tensors of one weight are laid out in the files."""

    SCALED = auto()  # weight, and weight_scale or weight_scale_inv
    PACKED = auto()  # weight_packed along columns, weight_scale, weight_zero_point
    AWQ = auto()  # qweight of the transposed weight, packed along its columns; qzeros, scales
    GPTQ = auto()  # qweight of the transposed weight, packed along its rows; qzeros, scales
    MXFP4 = auto()  # x_blocks and x_scales of a parameter x of experts, each transposed


STORED = {
    PackLayout.SCALED: "weight",
    PackLayout.PACKED: "weight_packed",
    PackLayout.AWQ: "qweight",
    PackLayout.GPTQ: "qweight",
}
"""Last component of the name of a weight's codes, by layout."""
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"  # suffixes that mxfp4 adds to the name of a parameter
SCALES = ("weight_scale_inv", "weight_scale")
_BESIDE = {
    "weight": (
        *SCALES, "weight_zero_point", "input_scale", "activation_scale", "k_scale", "v_scale",
    ),
    "weight_packed": (
        "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
    ),
    "qweight": ("qzeros", "scales", "g_idx"),
}  # fmt: skip
"""Last components of names of tensors that belong to a weight, by layout."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a checkpoint's weights are quantised."""

    method: str  # as in config.json: fp8, compressed-tensors, awq, gptq, mxfp4
    description: str
    block: tuple[int, int] | None = None  # rows and columns per scale; None: from the shapes
    layout: PackLayout = PackLayout.SCALED
    bits: int = 8
    adds_one: bool = False  # GPTQ's first format stores zeros minus one
    is_float: bool = False  # stored values are not integers
    input_group: int | None = None  # as in `Codes`

    @property
    def is_kept(self) -> bool:
        """Whether there are products by its weights, so that they need not be dequantised."""
        return self.layout is not PackLayout.MXFP4

    def stored_name(self, name: str, names: Container[str]) -> str | None:
        """Returns the name of the codes of tensor `name`; None: it is stored unquantised."""
        if self.layout is PackLayout.MXFP4:
            return name + BLOCKS if name + BLOCKS in names else None
        stem, _, leaf = name.rpartition(".")
        if leaf != "weight":
            return None
        if self.layout is PackLayout.SCALED:
            return name if self.scale_name(name, names) else None
        stored = f"{stem}.{STORED[self.layout]}"
        return stored if stored in names else None

    def scale_name(self, name: str, names: Container[str]) -> str | None:
        """Returns the name of the scale of weight `name`."""
        if self.layout is PackLayout.MXFP4:
            return name + BLOCK_SCALES
        stem = name.rpartition(".")[0]
        if self.layout in (PackLayout.AWQ, PackLayout.GPTQ):
            return f"{stem}.scales"
        return next((f"{stem}.{each}" for each in SCALES if f"{stem}.{each}" in names), None)

    def weights(self, names: Mapping[str, str]) -> dict[str, str]:
        """Returns the weights in the stored tensors `names`, with the names of their codes."""
        if self.layout is PackLayout.MXFP4:
            coded = {name.removesuffix(BLOCKS): name for name in names if name.endswith(BLOCKS)}
            beside = {name + BLOCK_SCALES for name in coded}
            return coded | {
                name: name for name in names if name not in beside and not name.endswith(BLOCKS)
            }
        leaf = STORED[self.layout]
        hidden = _BESIDE[leaf]
        found = {}
        for name in names:
            stem, _, last = name.rpartition(".")
            if last == leaf:
                found[f"{stem}.weight"] = name
            elif last not in hidden or not (
                self.layout is PackLayout.SCALED or f"{stem}.{leaf}" in names
            ):
                found[name] = name
        return found


def find_format(path: Path) -> WeightFormat | None:
    """Returns how the weights of `path` are quantised; None: they are not.

    Raises:
        CheckpointError: the format is not supported; names the format and the field.
    """
    config = stored_config(path)
    inner = config.get("text_config")
    for each in (config, inner if isinstance(inner, dict) else {}):
        section = each.get("quantization_config") or each.get("compression_config")
        if section:
            return _read(section, path)
    # Older exports of ModelOpt have no section in config.json.
    section = stored_config(path, _MODELOPT).get("quantization")
    if isinstance(section, dict) and (found := section.get("quant_algo")):
        raise _refusal(path, f"{_MODELOPT} has quantization.quant_algo {found!r}")
    return None


def _read(section: Any, path: Path) -> WeightFormat:
    method = section.get("quant_method") if isinstance(section, dict) else None
    allowed = ", ".join(_READERS)
    known = isinstance(method, str) and method in _READERS
    _require(known, path, "quant_method", method, allowed)
    return _READERS[method](section, path)


def _read_fp8(section: Any, path: Path) -> WeightFormat:
    block, description = None, "fp8 with a scale per tensor"
    if section.get("weight_block_size") is not None:
        block = _block(section.get("weight_block_size"), path, "weight_block_size")
        description = f"fp8 in blocks of {block[0]} x {block[1]}"
    group = None
    if section.get("activation_scheme") in ("dynamic", "static"):
        group = 0 if block is None else block[1]
    return WeightFormat("fp8", description, block, is_float=True, input_group=group)


def _read_awq(section: Any, path: Path) -> WeightFormat:
    bits, group = section.get("bits", 4), section.get("group_size", 128)
    version = section.get("version", "gemm")
    _require(bits == 4, path, "bits", bits, "4")
    _require(str(version).lower() == "gemm", path, "version", version, "gemm")
    return WeightFormat("awq", f"4 bits in groups of {group}", layout=PackLayout.AWQ, bits=4)


def _read_gptq(section: Any, path: Path) -> WeightFormat:
    bits, group = section.get("bits"), section.get("group_size", -1)
    kind = section.get("checkpoint_format") or "gptq"
    _require(bits in (4, 8), path, "bits", bits, "4, 8")
    _require(kind in _GPTQ_FORMATS, path, "checkpoint_format", kind, ", ".join(_GPTQ_FORMATS))
    order = ", in the order of activations" if section.get("desc_act") else ""
    return WeightFormat(
        "gptq",
        f"{bits} bits in groups of {group}{order}",
        layout=PackLayout.GPTQ,
        bits=bits,
        adds_one=kind == "gptq",
    )


def _read_mxfp4(section: Any, path: Path) -> WeightFormat:
    text = f"4 bits in groups of {MXFP4_GROUP}, experts alone"
    return WeightFormat("mxfp4", text, layout=PackLayout.MXFP4, bits=4, is_float=True)


def _read_compressed(section: Any, path: Path) -> WeightFormat:
    kind, scheme = section.get("format"), section.get("kv_cache_scheme")
    groups, packed = section.get("config_groups"), kind == _PACKED
    _require(kind in (*_SCALED, _PACKED), path, "format", kind, ", ".join((*_SCALED, _PACKED)))
    if scheme is not None:  # describes the scales that `Checkpoint.kv_scales` reads
        held = scheme if isinstance(scheme, dict) else {}
        of_floats = held.get("num_bits") == 8 and held.get("type") == "float"
        known = of_floats and held.get("strategy") == "tensor" and not held.get("dynamic")
        _require(known, path, "kv_cache_scheme", scheme, "null, static float8 per tensor")
    has_groups = isinstance(groups, dict) and bool(groups)
    _require(has_groups, path, "config_groups", groups, "a mapping of groups")
    found, blocks, bits = [], [], 8
    for name, group in groups.items():
        weights = (group.get("weights") if isinstance(group, dict) else None) or {}
        where = f"config_groups.{name}.weights"
        bits = _check_group(weights, where, packed, path)
        found.append(f"{weights.get('type', 'int')}{bits} per {weights['strategy']}")
        block = None
        if weights["strategy"] == "block":
            block = _block(weights.get("block_structure"), path, f"{where}.block_structure")
        blocks.append(block)
    alike = len({text.split(" ")[0] for text in found}) == 1 and len(set(blocks)) == 1
    _require(alike, path, "config_groups", ", ".join(found), "groups of one kind")
    layout = PackLayout.PACKED if packed else PackLayout.SCALED
    is_float = not all(each.startswith("int") for each in found)
    inputs = {_input_group(each.get("input_activations")) for each in groups.values()}
    return WeightFormat(
        "compressed-tensors",
        f"{kind}: {', '.join(found)}",
        blocks[0],
        layout=layout,
        bits=bits,
        is_float=is_float,
        input_group=inputs.pop() if is_float and len(inputs) == 1 else None,
    )


def _input_group(inputs: Any) -> int | None:
    """Returns `Codes.input_group` from a group's `input_activations`; None for other kinds."""
    held = inputs if isinstance(inputs, dict) else {}
    if held.get("num_bits") != 8 or held.get("type") != "float":
        return None
    if held.get("strategy") in ("token", "tensor"):
        return 0
    size = held.get("group_size")
    return size if held.get("strategy") == "group" and type(size) is int and size > 0 else None


def _check_group(weights: Mapping[str, Any], where: str, packed: bool, path: Path) -> int:
    """Checks a group of modules and returns its bits."""
    allowed: dict[str, tuple[Any, ...]] = {
        "num_bits": _PACKED_BITS if packed else (8,),
        "strategy": _PACKED_STRATEGIES if packed else _STRATEGIES,
    }
    if packed and "type" in weights:
        allowed["type"] = ("int",)
    for key, values in allowed.items():
        value = weights.get(key)
        _require(value in values, path, f"{where}.{key}", value, ", ".join(map(str, values)))
    if not packed:
        symmetric, order = weights.get("symmetric", True), weights.get("actorder")
        _require(bool(symmetric), path, f"{where}.symmetric", False, "true")
        _require(not order, path, f"{where}.actorder", order, "null")
    return int(weights["num_bits"])


def _block(block: Any, path: Path, field: str) -> tuple[int, int]:
    """Returns the rows and columns that share a scale."""
    pair = block if isinstance(block, list) and len(block) == 2 else (0, 0)
    is_right = all(type(size) is int and size > 0 for size in pair)
    _require(is_right, path, field, block, "two block lengths, as [128, 128]")
    return pair[0], pair[1]


def _require(holds: bool, path: Path, field: str, value: Any, allowed: str) -> None:
    if not holds:
        raise _refusal(path, f"quantization_config.{field} is {value!r}, allowed: {allowed}")


def _refusal(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is quantised in a way that is not read: {what}; serve its unquantised "
        "original"
    )


_READERS: dict[Any, Callable[[Any, Path], WeightFormat]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}
