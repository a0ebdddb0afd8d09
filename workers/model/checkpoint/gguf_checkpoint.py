"""A GGUF file's model as a checkpoint in Hugging Face's layout.

config.json is made from the metadata, transformers makes the tokenizer, and the `gguf` library
dequantises the weights; rows and names are converted to those of transformers' modules.

Source of the changes that the files' writers make to names and values: llama.cpp, conversion/.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ....errors import CheckpointError
from .gguf import CODED, PLAIN, WITH_MINIMA, Tensor, read_codes, read_files, read_rows
from .gguf_tokenizer import generation_config, write_tokenizer
from .progress import Progress, transfer

if TYPE_CHECKING:
    import torch

    from .quantised import CodedSource

log = logging.getLogger(__name__)

_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)\.(weight|bias)")
_CHUNK_ELEMENTS = 2**22  # number of elements dequantised at a time
_MAX_LAYERS = 4096
_STORED = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


# Architectures: how metadata and names of tensors map to transformers'.


@dataclass(frozen=True, slots=True)
class _Source:
    """The contents of the files; values of the metadata are checked when they are read."""

    data: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    name: str  # general.architecture
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(f"{self.name}.{key}")
        return self.data.get(f"{self.name}.{key}", default)

    def integer(self, key: str, default: int | None = None, most: int = 2**31) -> int:
        """Returns a positive number; an array with a value per layer must have equal values."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or not 0 < value <= most:
            raise self.wrong(key, value, f"an integer from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def has(self, name: str) -> bool:
        """Returns True if the first layer has such a tensor."""
        return f"blk.0.{name}" in self.tensors

    def values(self, name: str) -> np.ndarray | None:
        """Returns a small tensor's values; None if it is missing."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.num_elements > 65536 or tensor.kind not in PLAIN:
            raise CheckpointError(f"{name} has {tensor.num_elements:,} values of {tensor.kind}")
        return read_rows(tensor, slice(None)).ravel()

    def wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        shown = "missing" if value is None else repr(value)[:80]
        return CheckpointError(f"{self.name}.{key} is {shown}; expected {wanted}")


_Extra = Callable[[_Source, dict[str, Any]], dict[str, Any]]  # returns further keys
_DENSE = {
    "attn_norm": "input_layernorm",
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
}
_BESIDE: Final = "beside"  # marks a tensor that is joined with another one
_HEAD_NORMS = {f"attn_{each}_norm": f"self_attn.{each}_norm" for each in ("q", "k")}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{each}_exps": f"mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")},
}


@dataclass(frozen=True, slots=True)
class _Architecture:
    model_type: str
    class_name: str
    layer: Mapping[str, str] = field(
        default_factory=lambda: _DENSE
    )  # names of a layer's modules; {}: one per expert
    extra: _Extra = lambda source, config: {}
    is_permuted: bool = False  # rows of q and k are reordered from halves of a head to pairs
    adds_one: bool = False  # to the weights of norms
    joins_experts: bool = False  # in tensors [experts, in, out], with gate and up alternating


def _biases(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": source.has("attn_q.bias"),
        "mlp_bias": source.has("ffn_gate.bias"),
    }


def _moe(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": source.integer("expert_count", most=65536),
        "num_experts_per_tok": source.integer("expert_used_count", most=65536),
        "moe_intermediate_size": source.integer("expert_feed_forward_length"),
    }


def _qwen2_moe(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    shared = source.integer("expert_shared_feed_forward_length")
    return _moe(source, config) | {
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
    }


def _mixtral(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": source.integer("expert_count", most=65536),
        "num_experts_per_tok": source.integer("expert_used_count", most=65536),
        "sliding_window": None,
    }


def _granite(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    return _biases(source, config) | {
        "embedding_multiplier": source.number("embedding_scale", 1.0),
        "residual_multiplier": source.number("residual_scale", 1.0),
        "logits_scaling": source.number("logit_scale", 1.0),
        "attention_multiplier": source.number("attention.scale", config["head_dim"] ** -0.5),
    }


def _gpt_oss(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    config["rope_parameters"]["truncate"] = False
    return {
        "num_local_experts": source.integer("expert_count", most=65536),
        "num_experts_per_tok": source.integer("expert_used_count", most=65536),
        "intermediate_size": source.integer("expert_feed_forward_length"),
        "sliding_window": source.integer("attention.sliding_window"),
    }


def _gemma2(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    # The 27B models (46 or 62 layers) use hidden_size / num_attention_heads instead of head_dim.
    is_27b = config["num_hidden_layers"] in (46, 62)
    scale = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": scale if is_27b else config["head_dim"],
        "sliding_window": source.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": source.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": source.number("final_logit_softcapping", 30.0),
    }


def _olmo2(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    if window := source.get("attention.sliding_window"):  # OLMo 3
        raise source.wrong("attention.sliding_window", window, "none")
    return {}


def _gemma3(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    soft_cap = source.get("final_logit_softcapping")
    local = source.number("rope.freq_base_swa", 10_000.0)
    return _gemma2(source, config) | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": soft_cap,
        "sliding_window": source.integer("attention.sliding_window", 1024),
        "sliding_window_pattern": source.integer("attention.sliding_window_pattern", 6),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(source: _Source, config: dict[str, Any]) -> dict[str, Any]:
    width = config["head_dim"]
    length = config["max_position_embeddings"]
    original = source.integer("rope.scaling.original_context_length", length)
    window = source.get("attention.sliding_window") or None
    rope = config["rope_parameters"]
    rope["partial_rotary_factor"] = source.integer("rope.dimension_count", width) / width
    factors = [source.values(f"rope_factors_{each}.weight") for each in ("long", "short")]
    long, short = (None if each is None else each.tolist() for each in factors)
    if long is not None or short is not None:
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    source.get("rope.scaling.attn_factor")  # transformers computes it from the two lengths
    return {"original_max_position_embeddings": original, "sliding_window": window}


_MIXTRAL: Final = _Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _DENSE
    | {"ffn_gate_inp": "block_sparse_moe.gate"}
    | {
        f"ffn_{each}_exps": f"block_sparse_moe.experts.{{}}.{theirs}"
        for each, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    },
    _mixtral,
    is_permuted=True,
)
ARCHITECTURES: Final = {
    "llama": _Architecture("llama", "LlamaForCausalLM", extra=_biases, is_permuted=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": _Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _DENSE
        | _EXPERTS
        | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
        | {
            f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")
        },
        _qwen2_moe,
    ),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _DENSE | _HEAD_NORMS),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _DENSE | _HEAD_NORMS | _EXPERTS,
        lambda source, config: _moe(source, config) | {"norm_topk_prob": True},
    ),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", adds_one=True),
    "gemma2": _Architecture(
        "gemma2", "Gemma2ForCausalLM", _DENSE | _SANDWICH, _gemma2, adds_one=True
    ),
    "gemma3": _Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _DENSE | _HEAD_NORMS | _SANDWICH,
        _gemma3,
        adds_one=True,
    ),
    "phi3": _Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _DENSE | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        _phi3,
    ),
    "granite": _Architecture("granite", "GraniteForCausalLM", extra=_granite, is_permuted=True),
    "gpt-oss": _Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _DENSE
        | {
            **{"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
            **{"attn_sinks": "self_attn.sinks", "ffn_down_exps": "mlp.experts.down_proj"},
            **{"ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_up_exps": _BESIDE},
        },
        _gpt_oss,
        joins_experts=True,
    ),
    "smollm3": _Architecture("smollm3", "SmolLM3ForCausalLM", extra=_biases, is_permuted=True),
    "olmo2": _Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _DENSE
        | _HEAD_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _olmo2,
    ),
}
"""Supported architectures, by `general.architecture`."""


def architectures_of(model_type: str) -> tuple[str, ...]:
    """Returns the values of `general.architecture` that are read as models of `model_type`."""
    if model_type == _MIXTRAL.model_type:
        return ("llama",)
    return tuple(name for name, each in ARCHITECTURES.items() if each.model_type == model_type)


_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _make_config(source: _Source) -> tuple[_Architecture, dict[str, Any]]:
    """Returns the architecture and the contents of config.json.

    Raises:
        CheckpointError: the architecture is not supported, or a key is missing or out of range.
    """
    if (kind := source.data.get("general.type", "model")) != "model":
        raise CheckpointError(f"general.type is {kind!r}; models are read")
    found = ARCHITECTURES.get(source.name)
    if found is None:
        raise CheckpointError(
            f"general.architecture is {source.name!r}, which is not read; read: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if source.name == "llama" and source.get("expert_count"):
        found = _MIXTRAL
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in source.tensors:
            raise CheckpointError(f"it has no tensor {name}")
    rows, tokens = (
        source.tensors["token_embd.weight"].shape[0],
        source.data.get("tokenizer.ggml.tokens"),
    )
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CheckpointError(f"it has {len(tokens):,} tokens, and token_embd.weight {rows:,} rows")
    hidden, heads = source.integer("embedding_length"), source.integer("attention.head_count")
    head_dim = source.integer("attention.key_length", max(1, hidden // heads), most=65536)
    if source.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("keys and values have heads of different widths; that is not read")
    config: dict[str, Any] = {
        "architectures": [found.class_name],
        "model_type": found.model_type,
        "dtype": _dtype(source.tensors.values()),
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": source.integer("feed_forward_length"),
        "num_hidden_layers": source.integer("block_count", most=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": source.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": source.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "rope_parameters": _rope(source, head_dim),
    }
    config |= found.extra(source, config)
    rope = config["rope_parameters"]
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if source.integer("rope.dimension_count", rotated) != rotated:
        raise source.wrong(
            "rope.dimension_count", source.get("rope.dimension_count"), f"{head_dim}"
        )
    for token in ("bos", "eos", "pad"):
        key = "padding" if token == "pad" else token
        config[f"{token}_token_id"] = source.data.get(f"tokenizer.ggml.{key}_token_id")
    passed = {"vocab_size", "rope.scaling.finetuned"}
    unread = sorted(
        key
        for key in source.data
        if key.startswith(f"{source.name}.")
        and key not in source.read
        and key.removeprefix(f"{source.name}.") not in passed
    )
    if unread:
        log.warning("keys of the GGUF file that are not read: %s", ", ".join(unread))
    return found, config


def _dtype(tensors: Iterable[Tensor]) -> str:
    """Returns the dtype of the matrices: bfloat16 if any is quantised, else that of most values."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1:
            kind = PLAIN.get(tensor.kind, "")
            counts[kind] = counts.get(kind, 0) + tensor.num_elements
    return "bfloat16" if "" in counts or not counts else max(counts, key=lambda key: counts[key])


def _rope(source: _Source, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": source.number("rope.freq_base", 10_000.0),
    }
    kind = source.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": source.number("rope.scaling.factor")}
    elif kind not in ("none", "longrope"):
        raise source.wrong("rope.scaling.type", kind, "none, linear, yarn or longrope")
    if kind == "yarn":
        original = source.integer("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
        for key in ("beta_fast", "beta_slow"):
            if source.get(f"rope.scaling.yarn_{key}") is not None:
                rope[key] = source.number(f"rope.scaling.yarn_{key}")
    factors = source.values("rope_freqs.weight")
    return rope if factors is None else rope | _llama3(factors, rope["rope_theta"], head_dim)


def _llama3(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the configuration of Llama 3's rope from the stored divisors of its frequencies.

    Args:
        factors: [head_dim / 2].
    """
    if factors.shape == (head_dim // 2,):
        waves = 2 * math.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
        largest, low, high = float(factors.max()), 1.0, 4.0
        for length in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
            smooth = np.clip((length / waves - low) / (high - low), 0, 1)
            if np.allclose(factors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-3):
                if largest == 1:
                    return {}
                return {
                    "rope_type": "llama3",
                    "factor": largest,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
    raise CheckpointError("rope_freqs.weight has other values than Llama 3's; that is not read")


# Weights.


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the folder: rows of a file's tensor."""

    name: str
    tensor: Tensor
    begin: int = 0
    end: int | None = None  # last row, exclusive; None: all rows
    shape: tuple[int, ...] = ()  # (): the tensor's own
    order: np.ndarray | None = None  # rows of the file's tensor, in the folder's order
    shift: float = 0.0  # added to every value
    step: int | None = None  # rows that must be converted together; None: any number
    is_transposed: bool = False  # every `step` rows are transposed
    partner: Tensor | None = None  # its columns alternate with the tensor's, once transposed


def _parts(source: _Source, found: _Architecture, config: Mapping[str, Any]) -> list[_Part]:
    """Returns every tensor of the folder.

    Raises:
        CheckpointError: a tensor is not one of the architecture's, or missing in a layer.
    """
    parts: list[_Part] = []
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, tensor in source.tensors.items():
        shift = -1.0 if found.adds_one and name.endswith("norm.weight") else 0.0
        if name in _ENDS:
            parts.append(_Part(_ENDS[name], tensor, shift=shift))
            continue
        if name in _ROPE_TENSORS:
            continue
        match = _LAYER.fullmatch(name)
        theirs = None if match is None else found.layer.get(match[2])
        if match is None or theirs is None or int(match[1]) >= config["num_hidden_layers"]:
            raise CheckpointError(f"{name} is no tensor of {source.name!r} models that is read")
        layers.setdefault(int(match[1]), {})[f"{match[2]}.{match[3]}"] = tensor.shape
        prefix = f"model.layers.{int(match[1])}."
        if theirs == _BESIDE:
            continue
        if found.joins_experts and (match[2].endswith("_exps") or match[2] == "attn_sinks"):
            up = source.tensors.get(name.replace("gate", "up")) if "gate" in name else None
            parts.append(_joined(f"{prefix}{theirs}", tensor, up))
            continue
        if "{}" in theirs:
            parts += _experts(f"{prefix}{theirs}.{match[3]}", tensor)
            continue
        order, shape = None, tensor.shape
        if found.is_permuted and match[2] in ("attn_q", "attn_k"):
            heads = "attention" if match[2] == "attn_q" else "key_value"
            order = _halves(tensor, config[f"num_{heads}_heads"])
        if match[2] == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            shape = (1, *tensor.shape)
        parts.append(
            _Part(f"{prefix}{theirs}.{match[3]}", tensor, shape=shape, order=order, shift=shift)
        )
    for number in range(config["num_hidden_layers"]):
        own = layers.get(number, {})
        for name, shape in layers.get(0, own).items():
            if own.get(name) != shape:
                raise CheckpointError(
                    f"blk.{number}.{name} has the shape {own.get(name, 'of no tensor')}, and that "
                    f"of layer 0 {shape}"
                )
    if not layers:
        raise CheckpointError("it has no layers")
    return parts


def _experts(name: str, tensor: Tensor) -> Iterator[_Part]:
    """Yields a part for each expert of a tensor [experts, out, in]."""
    if len(tensor.shape) != 3:
        raise CheckpointError(f"{tensor.name} has {len(tensor.shape)} dimensions, not 3")
    count, rows, width = tensor.shape
    for each in range(count):
        yield _Part(name.format(each), tensor, each * rows, (each + 1) * rows, (rows, width))


def _joined(name: str, tensor: Tensor, partner: Tensor | None) -> _Part:
    """Returns gpt-oss's joined experts: [experts, in, out], and for biases, [experts, out]."""
    if partner is not None and partner.shape != tensor.shape:
        raise CheckpointError(f"{tensor.name} and {partner.name} have different shapes")
    twice = 1 if partner is None else 2
    if len(tensor.shape) != 3:
        name += "_bias" if tensor.name.endswith(".bias") else ""
        shape = (*tensor.shape[:-1], twice * tensor.shape[-1])
        return _Part(name, tensor, shape=shape, partner=partner)
    count, rows, width = tensor.shape
    shape = (count, width, twice * rows)
    return _Part(name, tensor, shape=shape, step=rows, is_transposed=True, partner=partner)


def _halves(tensor: Tensor, heads: int) -> np.ndarray:
    """Returns the order of rows with each head's even rows first, as transformers rotates them."""
    rows = tensor.shape[0]
    if rows % (2 * heads) or rows != tensor.num_rows:
        raise CheckpointError(f"{tensor.name} has {rows} rows for {heads} heads")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).ravel()


def _values(parts: list[_Part], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields the values of all parts, in order, some rows at a time; threads dequantise ahead."""
    import torch

    def convert(part: _Part, first: int, last: int) -> torch.Tensor:
        chosen = slice(first, last) if part.order is None else part.order[first:last]
        pair = [read_rows(each, chosen) for each in (part.tensor, part.partner) if each is not None]
        if part.is_transposed:
            pair = [each.T for each in pair]
        values = pair[0] if part.partner is None else np.stack(pair, -1).reshape(len(pair[0]), -1)
        if part.shift:
            values = values + np.float32(part.shift)
        return torch.from_numpy(values).to(dtype)

    count = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(count) as pool:
        waiting: deque[Future[torch.Tensor]] = deque()
        for part in parts:
            rows, width = part.tensor.num_rows, part.tensor.width
            step = part.step or max(1, _CHUNK_ELEMENTS // width)
            end = rows if part.end is None else part.end
            for first in range(part.begin, end, step):
                waiting.append(pool.submit(convert, part, first, min(first + step, end)))
                if len(waiting) > 2 * count:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# The checkpoint.


@dataclass(frozen=True, slots=True)
class GgufModel:
    """Facts about a model that are known before any weight is read."""

    files: list[Path]
    meta: Mapping[str, Any]
    config: dict[str, Any]  # contents of config.json
    parts: list[_Part]

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights after dequantisation."""
        size = 4 if self.dtype == "float32" else 2
        return size * sum(math.prod(part.shape or part.tensor.shape) for part in self.parts)

    @property
    def dtype(self) -> str:
        return str(self.config["dtype"])

    @property
    def kinds(self) -> str:
        """The types of the file's matrices, the most frequent first."""
        counts: dict[str, int] = {}
        for tensor in {part.tensor.name: part.tensor for part in self.parts}.values():
            if len(tensor.shape) > 1:
                counts[tensor.kind] = counts.get(tensor.kind, 0) + tensor.num_elements
        return ", ".join(sorted(counts, key=lambda kind: -counts[kind]))


def read_model(files: list[Path]) -> GgufModel:
    """Reads the headers of a model's files, in order.

    Raises:
        CheckpointError: a file is damaged, or its architecture or types are not supported.
    """
    meta, tensors = read_files(files)
    name = meta.get("general.architecture")
    source = _Source(meta, tensors, name if isinstance(name, str) else "")
    found, config = _make_config(source)
    return GgufModel(files, meta, config, _parts(source, found, config))


def coded_sources(files: list[Path]) -> dict[str, CodedSource]:
    """Returns sources that read an unpacked folder's weights as codes from its GGUF files.

    Keys are the folder's names. The sources are the weights of products, except experts. The
    embedding's codes are those of an output layer that shares its tensor. Empty if the files are
    gone, or the weights are few.
    """
    from .quantised import CodedSource, are_many

    if not files:
        return {}
    found, model = {}, read_model(files)
    for part in model.parts:
        tensor, name = part.tensor, part.name
        if name == _ENDS["token_embd.weight"]:
            if not model.config["tie_word_embeddings"]:
                continue
            name = _ENDS["output.weight"]
        is_plain = not (part.shift or part.step or part.partner or part.begin or part.end)
        if not is_plain or tensor.kind not in CODED or len(part.shape or tensor.shape) != 2:
            continue
        if name.endswith(".weight") and tensor.num_rows > 1:
            (bits, group), has_minima = CODED[tensor.kind], tensor.kind in WITH_MINIMA
            offset, read = 8 * (tensor.kind == "Q4_0"), partial(_codes_of, part)
            rows, width = tensor.shape
            found[name] = CodedSource((rows, width), bits, group, offset, has_minima, read)
    return found if are_many(found.values()) else {}


def _codes_of(part: _Part, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Does the same as `read_codes`, with rows in the folder's order."""
    import torch

    values, scales, minima = read_codes(
        part.tensor, rows if part.order is None else part.order[rows]
    )
    shifts = None if minima is None else torch.from_numpy(minima)
    return torch.from_numpy(values), torch.from_numpy(scales), shifts


def write_checkpoint(
    folder: Path, model: GgufModel, progress: Progress | None = None, *, needs_tokenizer: bool
) -> None:
    """Writes the files of a checkpoint; those whose creation may reject the model come first.

    Raises:
        CheckpointError: no tokenizer can be made, and one is needed.
        OSError: the disk is full, or the folder cannot be written to.
    """
    try:
        write_tokenizer(folder, model.files[0], model.meta)
    except CheckpointError as error:
        if needs_tokenizer:
            raise
        log.warning("%s", error.message)
    for name, content in (
        ("generation_config.json", generation_config(model.meta)),
        ("config.json", model.config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2), "utf-8")
    import torch

    dtype = getattr(torch, model.dtype)
    shapes = {part.name: part.shape or part.tensor.shape for part in model.parts}
    values = _values(model.parts, dtype)
    with transfer("unpacked", model.num_bytes, model.files[0].name, progress) as count:
        _write_tensors(folder / "model.safetensors", shapes, dtype, values, count)


def _write_tensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    values: Iterable[torch.Tensor],
    count: Callable[[int], None],
) -> None:
    """Writes a safetensors file without holding its tensors.

    Args:
        values: values of all tensors in the order of `shapes`, in pieces of any size.
        count: called with the bytes of each piece.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        place = {"shape": list(shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": _STORED[str(dtype)], **place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for piece in values:
            count(opened.write(piece.to(dtype).contiguous().view(torch.uint8).numpy().data))
        assert opened.tell() == 8 + len(text) + end, "values do not fill the shapes"
        opened.flush()
        os.fsync(opened.fileno())
