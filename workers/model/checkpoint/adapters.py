"""LoRA adapters in PEFT's layout: reading them, and checking that they fit a model.

An adapter adds `scale * up (down x)` to linears of the model, with matrices of low rank (Hu et al.
2021, arXiv:2106.09685). The scale is `alpha / rank`, or `alpha / sqrt(rank)` (Kalajdzievski 2023,
arXiv:2312.03732). A folder has `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from ....errors import CheckpointError, shown_value
from .hub import local_folder, read_mapping, unreadable
from .weights import Piece, TensorSource

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
FIELD = "lora_modules"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.[^.]+)?\.weight")
# Keys that change what an adapter computes, and why they are rejected if they are set.
_REFUSED = {
    "use_dora": "DoRA's magnitudes are not computed",
    "use_qalora": "QALoRA's pooled inputs are not computed",
    "modules_to_save": "whole modules beside the low-rank ones are not served",
    "trainable_token_indices": "embeddings are the model's",
    "target_parameters": "experts take no adapter",
    "layer_replication": "the layers are the model's",
    "alora_invocation_tokens": "an adapter holds for a whole text",
    "fan_in_fan_out": "weights are [out, in]",
    "lora_bias": "adapters have no biases",
    "megatron_config": "the model's linears are torch's",
    "arrow_config": "a request chooses one adapter",
}
# Keys that describe the training, or that are read below.
_KNOWN = frozenset(
    {
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "bias"),
        *("alpha_pattern", "target_modules", "init_lora_weights", "layers_to_transform"),
        *("layers_pattern", "exclude_modules", "auto_mapping", "base_model_name_or_path"),
        *("revision", "inference_mode", "lora_dropout", "loftq_config", "eva_config"),
        *("corda_config", "megatron_core", "runtime_config", "peft_version", "qalora_group_size"),
        *("lora_ga_config", "ensure_weight_tying"),
    }
)
_MOST = 2**31  # largest accepted number
# Initialisations that change the model's own weights, so that the folder alone is not the adapter.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The validated contents of `adapter_config.json`."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # by pattern of a module's name
    alphas: Mapping[str, float]  # likewise
    is_rank_stabilised: bool
    targets: str | tuple[str, ...]  # a regular expression, or suffixes of modules' names
    covers_all: bool  # whether every module of `targets` must have tensors

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Reads the configuration in `folder`.

        Raises:
            CheckpointError: it is missing, an option is not supported, or a value is invalid; names
                the key.
        """
        file = folder / CONFIG_NAME
        if not file.is_file():
            what = "has no " + CONFIG_NAME if folder.is_dir() else "does not exist"
            raise CheckpointError(f"{str(folder)!r} {what}")
        data = read_mapping(file)
        _refuse(data)
        targets = data.get("target_modules")
        if isinstance(targets, list) and all(isinstance(each, str) for each in targets):
            targets = tuple(targets)
        if not targets or not isinstance(targets, (str, tuple)):
            raise _at("target_modules", "expected names of modules or a regular expression")
        if isinstance(targets, str):
            _check_pattern("target_modules", targets)
        some = data.get("layers_to_transform") is not None or bool(data.get("exclude_modules"))
        return cls(
            _number(data, "r", int),
            _number(data, "lora_alpha", float),
            _patterns(data, "rank_pattern", int),
            _patterns(data, "alpha_pattern", float),
            bool(data.get("use_rslora", False)),
            targets,
            not some and targets != "all-linear",
        )

    @property
    def max_rank(self) -> int:
        return max((self.rank, *self.ranks.values()))

    def rank_of(self, module: str) -> int:
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = float(_matching(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def has_target(self, module: str) -> bool:
        """Returns True if the adapter applies to a module of this name."""
        if self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == each or module.endswith(f".{each}") for each in self.targets)


def _refuse(data: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for keys that request anything but low-rank linears."""
    if (kind := data.get("peft_type")) != "LORA":
        raise _at("peft_type", f"expected LORA, got {kind!r}")
    if (task := data.get("task_type")) not in (None, "CAUSAL_LM"):
        raise _at("task_type", f"expected CAUSAL_LM, got {task!r}")
    if (bias := data.get("bias", "none")) != "none":
        raise _at("bias", f"expected none, got {bias!r}: biases are the model's")
    start = data.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise _at(
            "init_lora_weights",
            f"{start!r} changes the model's own weights; convert the adapter to plain LoRA",
        )
    for key, value in data.items():
        if key in _REFUSED and value:
            raise _at(key, f"{value!r} is not supported: {_REFUSED[key]}")
        if key not in _REFUSED and key not in _KNOWN and value:
            raise _at(key, f"an unknown key, set to {value!r}")


def _at(key: str, why: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG_NAME}: {key}: {why}")


def _number(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data.get(key)
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < _MOST:
        wanted = "a whole number" if kind is int else "a number"
        raise _at(key, f"expected {wanted} above 0, got {shown_value(value)}")
    return kind(value)


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _at(key, f"{shown_value(pattern)} is no regular expression: {error}") from None


def _patterns(data: Mapping[str, Any], key: str, kind: type) -> dict[str, Any]:
    found = data.get(key) or {}
    if not isinstance(found, dict):
        raise _at(key, f"expected a mapping, got {found!r}")
    for pattern in found:
        _check_pattern(key, pattern)
    return {pattern: _number(found, pattern, kind) for pattern in found}


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Returns the value of the first pattern that matches the end of a module's name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices that an adapter adds to one linear: `scale * up (down x)`."""

    down: TensorSource  # [rank, in_features]
    up: TensorSource  # [out_features, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """The opened folder of one adapter; values are read later."""

    name: str  # the name in requests
    config: AdapterConfig
    parts: Mapping[str, LowRank]  # by name of the model's module

    @classmethod
    def open(cls, name: str, folder: Path) -> Adapter:
        """Opens the adapter in `folder`.

        Raises:
            CheckpointError: it is not readable, incomplete, or not limited to low-rank linears;
                names `lora_modules`, the adapter, and the key or tensor.
        """
        with _named(name):
            config = AdapterConfig.read(folder)
            return cls(name, config, _parts(folder, config))

    def fit(self, model: nn.Module) -> None:
        """Checks the tensors against the modules of `model`, which must be unsharded.

        Raises:
            CheckpointError: a tensor does not fit this model, or one is missing; names both.
        """
        linears, modules = adaptable(model), dict(model.named_modules())
        with _named(self.name):
            for module, part in self.parts.items():
                if module not in linears:
                    known = ", ".join(dict.fromkeys(each.rpartition(".")[2] for each in linears))
                    what = "takes no adapter" if module in modules else "is not in the model"
                    raise CheckpointError(
                        f"tensor '{module}.lora_A': the module {what}; those that take one are "
                        f"{known} of attention and MLPs"
                    )
                linear, rank = linears[module], self.config.rank_of(module)
                for key, found, wanted in (
                    ("A", part.down.shape, (rank, linear.in_features)),
                    ("B", part.up.shape, (linear.out_features, rank)),
                ):
                    if found != wanted:
                        raise CheckpointError(
                            f"tensor '{module}.lora_{key}' has shape {list(found)}, the model and "
                            f"r want {list(wanted)}"
                        )
            if self.config.covers_all:
                for module in linears:
                    if self.config.has_target(module) and module not in self.parts:
                        raise CheckpointError(
                            f"tensor '{module}.lora_A' is missing, and target_modules has it"
                        )


def adaptable(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns linears that the family's decoder can adapt, by name.

    These are linears of attention without latents, and of MLPs other than routed experts.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        leaves: Sequence[str] = ()
        if "o_proj" in children and "kv_b_proj" not in children:
            leaves = _ATTENTION
        elif "down_proj" in children and "experts" not in children:
            leaves = _MLP
        for leaf in leaves:
            if isinstance(child := children.get(leaf), nn.Linear):
                found[f"{name}.{leaf}"] = child
    return found


def placed(adapters: Sequence[tuple[str, str]] | None) -> list[tuple[str, str]] | None:
    """Returns adapters with their folders on this node."""
    if adapters is None:
        return None
    return [(name, local_folder(folder, FIELD)) for name, folder in adapters]


def open_adapters(modules: Sequence[tuple[str, str]], max_rank: int | None = None) -> list[Adapter]:
    """Opens adapters from (name, folder) pairs.

    Raises:
        CheckpointError: as in `Adapter.open`, or a rank is above `max_rank`.
    """
    adapters = [Adapter.open(name, Path(folder)) for name, folder in modules]
    for adapter in adapters:
        rank = adapter.config.max_rank
        if max_rank is not None and rank > max_rank:
            with _named(adapter.name):
                raise _at("r", f"{rank} is above max_lora_rank ({max_rank})")
    return adapters


def _parts(folder: Path, config: AdapterConfig) -> dict[str, LowRank]:
    file = folder / WEIGHTS_NAME
    if not file.is_file():
        pickled = any(folder.glob("adapter_model*.bin"))
        only = "; adapter_model.bin is pickled, and not read" if pickled else ""
        raise CheckpointError(f"{str(folder)!r} has no {WEIGHTS_NAME}{only}")
    try:
        opened = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(unreadable(file, error)) from None
    halves: dict[str, dict[str, Piece]] = {}
    for name in opened.keys():  # noqa: SIM118
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise CheckpointError(f"tensor {name!r} is no low-rank matrix of a linear")
        piece = opened.get_slice(name)
        halves.setdefault(found[1], {})[found[2]] = Piece(piece, tuple(piece.get_shape()))
    if not halves:
        raise CheckpointError(f"{file} holds no tensors")
    parts = {}
    for module, half in halves.items():
        for key in ("A", "B"):
            if key not in half:
                raise CheckpointError(f"tensor '{module}.lora_{key}' is missing")
        if not config.has_target(module):
            raise CheckpointError(f"tensor '{module}.lora_A' is not of target_modules")
        parts[module] = LowRank(half["A"], half["B"], config.scale_of(module))
    return parts


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefixes errors with the key and the adapter's name."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError.at(FIELD, f"{name!r}: {error.message}") from None
