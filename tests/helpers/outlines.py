"""Checkpoints of full size that hold no weights: sparse files with the real names and shapes.

Whatever reads headers and shapes alone, as `outrider check` does, takes them for the real ones. A
file of 700 GB takes some MB of disk.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from outrider.tests.helpers.files import ROOT

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Names, with safetensors' name of the dtype, and the shape."""
_SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "BOOL": 1}
_SHARD_BYTES = 4 << 30
_BLOCK = 128  # rows and columns of an FP8 scale


def write_sparse(file: Path, shapes: Shapes) -> None:
    """A safetensors file of these tensors, of which only the header is written."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        size = _SIZES[dtype] * math.prod(shape)
        header[name] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]
        }  # fmt: skip
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + offset)


def bf16(module: nn.Module, prefix: str = "") -> Shapes:
    """The tensors of a module on the meta device, without those that only repeat another's."""
    seen: set[int] = set()
    found: Shapes = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[prefix + name] = ("BF16", tuple(tensor.shape))
    return found


def unstacked(shapes: Shapes) -> Shapes:
    """With a tensor per expert and projection, as checkpoints store stacked experts."""
    found: Shapes = {}
    for name, (dtype, shape) in shapes.items():
        stem, _, leaf = name.rpartition(".")
        if len(shape) != 3:
            found[name] = dtype, shape
            continue
        for expert in range(shape[0]):
            at = f"{stem}.{expert}"
            if leaf == "gate_up_proj":
                half = shape[1] // 2, shape[2]
                found[f"{at}.gate_proj.weight"] = found[f"{at}.up_proj.weight"] = dtype, half
            else:
                found[f"{at}.{leaf}.weight"] = dtype, shape[1:]
    return found


def in_fp8(shapes: Shapes) -> Shapes:
    """Linears of layers in FP8, with their blocks' scales; routers stay as they are."""
    found: Shapes = {}
    for name, (dtype, shape) in shapes.items():
        is_linear = name.endswith("_proj.weight") or "_proj_with_mqa.weight" in name
        is_linear = is_linear or ("_b_proj" in name and name.endswith(".weight"))
        if len(shape) != 2 or not is_linear or name.endswith("eh_proj.weight"):
            found[name] = dtype, shape
            continue
        found[name] = "F8_E4M3", shape
        found[f"{name}_scale_inv"] = "F32", (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))
    return found


def meta_model(config: Any) -> Any:
    """Transformers' model, without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def write_model(folder: Path, config: Any, shapes: Shapes, **keys: Any) -> Path:
    """The checkpoint, with the demo's tokenizer."""
    folder.mkdir(parents=True)
    data = {**config.to_dict(), "torch_dtype": "bfloat16", **keys}
    (folder / "config.json").write_text(json.dumps(data, default=str))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "demo" / "models" / "target" / name, folder)
    shards: list[Shapes] = [{}]
    held = 0
    for name, each in shapes.items():  # as published: what is mapped at once is bounded
        if held > _SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = each
        held += _num_bytes({name: each})
    places = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        write_sparse(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def _num_bytes(shapes: Shapes) -> int:
    return sum(_SIZES[dtype] * math.prod(shape) for dtype, shape in shapes.values())


def deepseek_r1(folder: Path) -> Path:
    """DeepSeek-R1: FP8 in blocks, and one MTP module behind the last layer."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "deepseek_v3", num_attention_heads=128, num_key_value_heads=128,
        architectures=["DeepseekV3ForCausalLM"], max_position_embeddings=163840,
    )  # fmt: skip
    shapes = unstacked(bf16(meta_model(config)))
    last = f"model.layers.{config.num_hidden_layers - 1}."
    module = last.replace("60", "61")
    beside = {
        module + name.removeprefix(last): each
        for name, each in shapes.items()
        if name.startswith(last)
    }
    hidden = config.hidden_size
    for name, shape in (
        ("enorm.weight", (hidden,)),
        ("hnorm.weight", (hidden,)),
        ("shared_head.norm.weight", (hidden,)),
        ("eh_proj.weight", (hidden, 2 * hidden)),
        ("embed_tokens.weight", (config.vocab_size, hidden)),
        ("shared_head.head.weight", (config.vocab_size, hidden)),
    ):
        beside[module + name] = "BF16", shape
    quantised = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
    }  # fmt: skip
    return write_model(
        folder, config, in_fp8(shapes | beside),
        quantization_config=quantised, num_nextn_predict_layers=1,
    )  # fmt: skip


def llama3(folder: Path, hidden: int, layers: int, heads: int, wide: int, **keys: Any) -> Path:
    """A Llama 3 of these sizes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama", vocab_size=128256, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, intermediate_size=wide,
        max_position_embeddings=131072, architectures=["LlamaForCausalLM"], **keys,
    )  # fmt: skip
    return write_model(folder, config, bf16(meta_model(config)))


def llama4_maverick(folder: Path) -> Path:
    """The text model of Llama-4 Maverick."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "llama4_text", num_local_experts=128, interleave_moe_layer_step=2,
        num_hidden_layers=48, max_position_embeddings=1048576,
        architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    return write_model(folder, config, bf16(meta_model(config)))


def llama4_eagle3(folder: Path) -> Path:
    """An EAGLE-3 head of it, with a vocabulary of its own."""
    hidden, heads, kv_heads, dim, wide, vocab, own = 5120, 40, 8, 128, 32768, 202048, 64000
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
        "intermediate_size": wide, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "vocab_size": vocab, "draft_vocab_size": own, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * dim, 2 * hidden),
        "self_attn.k_proj": (kv_heads * dim, 2 * hidden),
        "self_attn.v_proj": (kv_heads * dim, 2 * hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    shapes: Shapes = {f"midlayer.{name}.weight": ("BF16", shape) for name, shape in layer.items()}
    shapes |= {
        "fc.weight": ("BF16", (hidden, 3 * hidden)),
        "norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (own, hidden)),
    }
    # Ids are read, not only their shapes: the first `own` tokens are the draft's.
    shapes["d2t"] = "I64", (own,)
    write_sparse(folder / "model.safetensors", shapes)
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "DeepSeek-R1": deepseek_r1,
    "Llama-3.1-8B-Instruct": lambda folder: llama3(folder, 4096, 32, 32, 14336),
    "Llama-3.1-405B-Instruct": lambda folder: llama3(folder, 16384, 126, 128, 53248),
    "Llama-3.2-1B-Instruct": lambda folder: llama3(
        folder, 2048, 16, 32, 8192, tie_word_embeddings=True
    ),
    "Llama-3.3-70B-Instruct": lambda folder: llama3(folder, 8192, 80, 64, 28672),
    "Llama-4-Maverick-17B-128E-Instruct": llama4_maverick,
    "Llama-4-Maverick-17B-128E-Eagle3": llama4_eagle3,
}
"""By the folder's name in the examples."""
