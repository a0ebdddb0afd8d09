"""Models for comparisons: a random one of about 400M parameters, and the demo target rewritten.

    python -m outrider.bench.models random FOLDER
    python -m outrider.bench.models small FOLDER
    python -m outrider.bench.models mixture FOLDER
    python -m outrider.bench.models latent FOLDER
    python -m outrider.bench.models wide-heads FOLDER
    python -m outrider.bench.models padded FOLDER

*random* has the demo's tokenizer, so that every token is text; only figures without speculation
mean anything with it. *small* is random too, in the shape of SmolLM2-135M with its vocabulary of
49152, of which the demo's tokenizer names the first 4096. *mixture* and *latent* are random as
well, of 57M parameters: Qwen3-MoE, and DeepSeek-V3 with latent attention; 16 experts, of which a
row takes four. *wide-heads* is the demo target with heads of 64 instead of 40 dimensions, for
engines whose attention has no 40: the same function, up to rounding. Rotary pairs keep their
frequencies (theta to the power of 64/40), the added dimensions are zero, and the queries carry the
difference of the softmax scales. *padded* is the demo's target with 24 more layers and its draft
model with 4 more (`target/`, `draft/`), which compute as the others do and add nothing: the same
texts, with a draft that takes about half of a verification.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .drafters import MODELS

_TARGET = MODELS / "target"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_WIDE = 64


def random_model(
    folder: Path, num_layers: int = 22, hidden_size: int = 1280, **settings: Any
) -> int:
    """Writes a random Llama in bfloat16; its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 4096,  # the demo tokenizer's
        "intermediate_size": hidden_size * 11 // 4,
        "num_attention_heads": hidden_size // _WIDE,
        "num_key_value_heads": max(hidden_size // _WIDE // 4, 1),
        **settings,
    }
    config = LlamaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **shape,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    _copy_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _mixture(architecture: str, folder: Path, **settings: Any) -> int:
    """Writes a random model with experts in bfloat16; its number of parameters."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256,
        num_hidden_layers=8, num_attention_heads=8, num_experts_per_tok=4,
        max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True,
        dtype="bfloat16", **settings,
    )  # fmt: skip
    model: Any = getattr(transformers, f"{architecture}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    _copy_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def wide_heads(folder: Path) -> int:
    """Writes the demo target with heads of 64 dimensions; its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig.from_pretrained(_TARGET)
    source = LlamaForCausalLM.from_pretrained(_TARGET, dtype=torch.float32).state_dict()
    narrow = config.head_dim
    scale = math.sqrt(_WIDE / narrow)
    state = {}
    for name, weight in source.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            wide = _spread(weight, narrow, num_parts=2)
            state[name] = wide * scale if "q_proj" in name else wide
        elif name.endswith("v_proj.weight"):
            state[name] = _spread(weight, narrow, num_parts=1)
        elif name.endswith("o_proj.weight"):
            state[name] = _spread(weight.T, narrow, num_parts=1).T.contiguous()
        else:
            state[name] = weight
    config.head_dim = _WIDE
    rope = dict(config.rope_parameters)
    config.rope_parameters = {**rope, "rope_theta": rope["rope_theta"] ** (_WIDE / narrow)}
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return _written(model, folder)


def padded(folder: Path, target_layers: int = 24, draft_layers: int = 4) -> int:
    """Writes target and draft model with layers whose outputs are zero; the target's parameters."""
    _pad(_TARGET.with_name("draft"), folder / "draft", draft_layers)
    return _pad(_TARGET, folder / "target", target_layers)


def _pad(source: Path, folder: Path, num_layers: int) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig.from_pretrained(source)
    state = dict(LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict())
    first = config.num_hidden_layers
    for name, weight in list(state.items()):
        if name.startswith("model.layers.0."):
            is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
            for layer in range(first, first + num_layers):
                place = name.replace("layers.0.", f"layers.{layer}.")
                state[place] = torch.zeros_like(weight) if is_last else weight
    config.num_hidden_layers = first + num_layers
    config.layer_types = None
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return _written(model, folder)


def _written(model: Any, folder: Path) -> int:
    """Writes the model with the demo's tokenizer; the number of its parameters."""
    model.config.dtype = torch.bfloat16
    model.to(torch.bfloat16).save_pretrained(folder)
    _copy_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _spread(
    weight: Tensor,  # [num_heads * narrow, width]
    narrow: int,
    num_parts: int,
) -> Tensor:  # [num_heads * 64, width]
    """Every head's rows with zeros after each of its parts (rotary halves: two)."""
    width = weight.shape[1]
    parts = weight.reshape(-1, num_parts, narrow // num_parts, width)
    spread = parts.new_zeros(parts.shape[0], num_parts, _WIDE // num_parts, width)
    spread[:, :, : narrow // num_parts] = parts
    return spread.reshape(-1, width)


def _copy_tokenizer(folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        shutil.copy(_TARGET / name, folder / name)


def main() -> None:
    """Writes the model that is asked for."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m outrider.bench.models")
    kinds: dict[str, Callable[[Path], int]] = {
        "random": random_model,
        "small": partial(
            random_model, num_layers=30, hidden_size=576, intermediate_size=1536,
            num_key_value_heads=3, vocab_size=49152,
        ),
        "mixture": partial(
            _mixture, "Qwen3Moe", num_key_value_heads=2, head_dim=64, num_experts=16,
            norm_topk_prob=True,
        ),
        "latent": partial(
            _mixture, "DeepseekV3", num_key_value_heads=8, n_routed_experts=16,
            n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1,
            kv_lora_rank=128, q_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64,
            v_head_dim=64,
        ),
        "wide-heads": wide_heads,
        "padded": padded,
    }  # fmt: skip
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    build = kinds[options.kind]
    Console().print(f"{build(options.folder) / 1e6:.0f}M parameters in {options.folder}")


if __name__ == "__main__":
    main()
