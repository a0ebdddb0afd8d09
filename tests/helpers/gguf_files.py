"""GGUF files of checkpoints, written as llama.cpp's converter writes them.

Names come from the `gguf` library's own map; what the converter changes in values is stated here
once more, independently of the code that undoes it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

NAMES = {
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"},
    **{"mixtral": "llama", "gpt_oss": "gpt-oss"},
}
PERMUTED = ("llama", "mixtral", "granite", "smollm3")
ADDS_ONE = ("gemma", "gemma2", "gemma3_text")


def write_gguf(
    folder: str | Path,
    file: Path,
    kind: str = "F16",
    *,
    keys: dict[str, Any] | None = None,
    pre: str = "llama-bpe",
    max_tensors: int = 0,
) -> Path:
    """Writes the model of a checkpoint's folder.

    Args:
        kind: type of matrices; of vectors it is F32.
        keys: further metadata, or other values of it.
        pre: `tokenizer.ggml.pre`.
        max_tensors: of a part; 0: one file.

    Returns:
        The file, or the first part.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for each in sorted(folder.glob("*.safetensors")):
        weights |= load_file(each)
    name = NAMES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, name, split_max_tensors=max_tensors)
    _add_metadata(writer, config)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder, config, pre)
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(key, None)
        _add(writer, key, value)
    number = gguf.GGMLQuantizationType[kind]
    for tensor_name, tensor in tensors_of(config, weights).items():
        values = tensor.float().numpy()
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(tensor_name, values)
        else:
            quantised = gguf.quants.quantize(values, number)
            writer.add_tensor(tensor_name, quantised, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if file.is_file() else min(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Writes a key with the type that such a value has in files: u32 and f32 where they hold it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        kinds = (writer.add_int64, writer.add_uint32, writer.add_uint64)
        kinds[(value >= 0) + (value >= 2**32)](key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config["rope_parameters"]
    writer.add_name("a model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    width = (head_dim or hidden // heads) * rope.get("partial_rotary_factor", 1)
    writer.add_rope_dimension_count(int(width))
    base = rope.get("full_attention", rope)
    writer.add_rope_freq_base(base["rope_theta"])
    if base["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(base["rope_type"]))
        writer.add_rope_scaling_factor(base["factor"])
    if "original_max_position_embeddings" in base and base["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(base["original_max_position_embeddings"])
    for key, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("num_experts", writer.add_expert_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if key == "moe_intermediate_size" and writer.arch == "gpt-oss":
            add(config["intermediate_size"])
        elif config.get(key) is not None and not (
            key == "sliding_window" and "qwen" in writer.arch
        ):
            add(config[key])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], pre: str) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    size = config["vocab_size"]
    tokens, types = [f"[PAD{index}]" for index in range(size)], [5] * size
    for token, index in stored["model"]["vocab"].items():
        tokens[index], types[index] = token, 1
    for each in stored["added_tokens"]:
        tokens[each["id"]], types[each["id"]] = each["content"], 3 if each["special"] else 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = stored["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    for token in ("bos", "eos", "pad"):
        if (index := config.get(f"{token}_token_id")) is not None:
            getattr(writer, f"add_{token}_token_id")(index)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if template := settings.get("chat_template"):
        writer.add_chat_template(template)


def tensors_of(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file, from those of a checkpoint."""
    kind = config["model_type"]
    arch = next(
        number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == NAMES.get(kind, kind)
    )
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if kind == "gpt_oss" and (
            match := re.fullmatch(r"(.+)\.(gate_up|down)_proj(_bias)?", name)
        ):
            halves = {"down": tensor}
            if match[2] == "gate_up":
                halves = {"gate": tensor[..., ::2], "up": tensor[..., 1::2]}
            for half, part in halves.items():
                part = (part if match[3] else part.transpose(1, 2)).contiguous()
                ending = ".bias" if match[3] else ".weight"
                found[names.get_name(f"{match[1]}.{half}_proj") + ending] = part
            continue
        if name.endswith("sinks"):
            found[names.get_name(name) + ".weight"] = tensor
            continue
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
            continue
        if kind in PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
            key = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            heads = config[key]
            pairs = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
        if kind in ADDS_ONE and name.endswith("norm.weight"):
            tensor = tensor.float() + 1
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        found[names.get_name(name, (".weight", ".bias"))] = tensor
    for name, parts in experts.items():
        whole = torch.stack([parts[index] for index in sorted(parts)])
        name = name.replace("model.layers", "layers") if "block_sparse" in name else name
        name = name.replace("block_sparse_moe", "feed_forward")
        found[names.get_name(name, (".weight", ".bias"))] = whole
    return found | _rope_tensors(config)


def _rope_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{each}.weight": torch.tensor(rope[f"{each}_factor"])
            for each in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length, factors = rope["original_max_position_embeddings"], []
    for index in range(0, width, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (index / width)
        if wave < length / high:
            factors.append(1.0)
        elif wave > length / low:
            factors.append(rope["factor"])
        else:
            smooth = (length / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": torch.tensor(factors, dtype=torch.float32)}


def one_layer(
    file: Path,
    kind: str,
    raw: np.ndarray,
    writer: gguf.GGUFWriter | None = None,
    vocab_size: int = 32,
) -> Path:
    """A Llama with one layer 512 wide, of which one matrix [6, 512] has the given rows of bytes."""
    writer = writer or gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(6)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in (
        *(("token_embd", (vocab_size, 512)), ("output_norm", (512,)), ("blk.0.attn_norm", (512,))),
        *((f"blk.0.attn_{each}", (512, 512)) for each in ("q", "k", "v", "output")),
        *(("blk.0.ffn_norm", (512,)), ("blk.0.ffn_up", (6, 512)), ("blk.0.ffn_down", (512, 6))),
    ):
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("blk.0.ffn_gate.weight", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
