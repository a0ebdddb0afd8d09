"""Tiny random head checkpoints, written in the layouts that are found in the wild."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def target_tensors(target: str) -> Tensors:
    return load_file(Path(target) / "model.safetensors")


def medusa_tensors(target: str, num_heads: int, num_layers: int = 1, seed: int = 0) -> Tensors:
    """Reference names. The output layers are the target's, disturbed: some guesses are right."""
    generator = torch.Generator().manual_seed(seed)
    stored = target_tensors(target)
    output = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    vocab, hidden = output.shape

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = noise(hidden, hidden)
            tensors[f"{head}.{layer}.linear.bias"] = noise(hidden)
        tensors[f"{head}.{num_layers}.weight"] = output + noise(vocab, hidden)
    return tensors


def write_medusa(folder: Path, tensors: Tensors, layout: str) -> str:
    """`tensors` (reference names) as a folder in one of the published layouts."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # wrong, as some published ones are
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "pt":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    elif layout == "safetensors":
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    elif layout == "whole":
        named = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
        rest = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4)}
        save_file(named | rest, folder / "model.safetensors")
    else:
        assert layout == "vllm", layout
        named = {}
        for name, tensor in tensors.items():
            parts = name.split(".")
            if parts[2] == "linear":
                named[f"medusa_heads.blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = tensor
            else:
                named[f"medusa_heads.lm_heads.{parts[0]}.weight"] = tensor
        save_file(named, folder / "model.safetensors")
    return str(folder)


def eagle_tensors(target: str, version: int, seed: int = 0, **options) -> tuple[dict, Tensors]:
    """Configuration and tensors of an EAGLE head that often guesses right.

    For a target whose next token hangs mostly on the last one: the embedding is let through, by
    `fc` in version 1 and in version 3 by an attention that finds its own row.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = target_tensors(target)
    output = stored["lm_head.weight"]
    vocab, width = output.shape
    hidden = options.get("hidden_size", width)
    heads, kv_heads, head_dim, wide = 4, 2, 32, 48

    def noise(*shape: int, scale: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def norm(size: int) -> torch.Tensor:
        return 1 + noise(size)

    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
    } | options.get("config", {})
    names = options.get("layer", "midlayer" if version == 3 else "layers.0")
    read = (options.get("embedding_size", hidden) + hidden) if version == 3 else hidden
    tensors: Tensors = {}
    num_layers = options.get("num_layers", 1)
    more = options.get("later", "layers.{}")
    for layer in range(num_layers):
        stem = more.format(layer - ("additional" in more)) if layer else names
        tensors |= {
            f"{stem}.self_attn.q_proj.weight": noise(heads * head_dim, hidden if layer else read),
            f"{stem}.self_attn.k_proj.weight": noise(
                kv_heads * head_dim, hidden if layer else read
            ),
            f"{stem}.self_attn.v_proj.weight": noise(
                kv_heads * head_dim, hidden if layer else read
            ),
            f"{stem}.self_attn.o_proj.weight": noise(hidden, heads * head_dim, scale=0.04),
            f"{stem}.mlp.gate_proj.weight": noise(wide, hidden),
            f"{stem}.mlp.up_proj.weight": noise(wide, hidden),
            f"{stem}.mlp.down_proj.weight": noise(hidden, wide, scale=0.04),
            f"{stem}.post_attention_layernorm.weight": norm(hidden),
        }
        if layer or options.get("input_norm"):
            norm_name = options.get("norm_name", "input_layernorm")
            tensors[f"{stem}.{norm_name}.weight"] = norm(hidden)
    if version == 1:
        tensors["fc.weight"] = noise(hidden, 2 * hidden, scale=0.05) + torch.cat(
            [0.8 * torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1
        )
        if options.get("fc_bias", True):
            tensors["fc.bias"] = noise(hidden)
        if options.get("para_norm"):
            tensors["embedding_layernorm.weight"] = norm(hidden)
            tensors["hidden_states_layernorm.weight"] = norm(hidden)
        tensors["embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        if options.get("final_norm"):
            tensors["norm.weight"] = norm(hidden)
        if options.get("draft_vocab"):
            tensors |= draft_vocabulary(output, options["draft_vocab"], generator)
        return config, tensors
    count = options.get("num_features", 3)
    tensors |= {
        f"{names}.hidden_norm.weight": norm(hidden),
        f"{names}.input_layernorm.weight": norm(read - hidden),
        "fc.weight": noise(hidden, count * width, scale=0.05),
        "norm.weight": norm(hidden),
    }
    if hidden == kv_heads * head_dim:
        own, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))
        parts = own.chunk(kv_heads)
        fold = heads // kv_heads
        seen = {
            "v": own,
            "k": 2 * own,
            "q": 2 * torch.cat([part for part in parts for _ in range(fold)]),
        }
        for part, rows in seen.items():
            tensors[f"{names}.self_attn.{part}_proj.weight"][:, :hidden] += rows
        out = torch.cat([part.T for part in parts for _ in range(fold)], dim=1)
        tensors[f"{names}.self_attn.o_proj.weight"] += 2 * out
    if "query_rank" in options:
        for layer in range(num_layers):
            stem = more.format(layer) if layer else names
            own = with_latents(stem, hidden if layer else read, hidden, options, generator)
            kept = {name: each for name, each in tensors.items() if f"{stem}.self_attn" not in name}
            tensors = kept | own
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(width) for index in range(count)}
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(count * width)
    if options.get("qk_norm"):
        tensors[f"{names}.self_attn.q_norm.weight"] = norm(head_dim)
        tensors[f"{names}.self_attn.k_norm.weight"] = norm(head_dim)
    if options.get("embed") or hidden != width:
        tensors["embed_tokens.weight"] = stored["model.embed_tokens.weight"][:, : read - hidden]
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].clone()
    draft_vocab = options.get("draft_vocab")
    if draft_vocab is None:
        rows = output if hidden == width else noise(vocab, hidden)
        tensors["lm_head.weight"] = rows + noise(vocab, hidden, scale=0.02)
    else:
        tensors |= draft_vocabulary(output, draft_vocab, generator)
    return config, tensors


def with_latents(
    stem: str, read: int, hidden: int, options: dict, generator: torch.Generator
) -> Tensors:
    """Attention over latents, of 4 heads, that finds its own row and lets the embedding through.

    `query_rank` is 0 or the size of the states; 8 dimensions of a head are rotated.
    """
    heads, rotary, part = 4, 8, hidden // 4

    def noise(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    own, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))
    latent = noise(hidden + rotary, read)
    latent[:hidden, :hidden] += own
    pick = torch.eye(hidden).view(heads, part, hidden)
    query = torch.cat([2 * pick, noise(heads, rotary, hidden)], dim=1).flatten(0, 1)
    expand = torch.cat([2 * pick, pick], dim=1).flatten(0, 1)
    tensors = {
        "kv_a_proj_with_mqa": latent,
        "kv_a_layernorm": 1 + noise(hidden),
        "kv_b_proj": expand + noise(2 * hidden, hidden),
        "o_proj": 2 * own.T + noise(hidden, hidden),
    }
    if options["query_rank"]:
        first = noise(hidden, read)
        first[:, :hidden] += own
        tensors |= {"q_a_proj": first, "q_a_layernorm": 1 + noise(hidden), "q_b_proj": query}
    else:
        tensors["q_proj"] = noise(len(query), read)
        tensors["q_proj"][:, :hidden] += query @ own
    return {f"{stem}.self_attn.{name}.weight": each for name, each in tensors.items()}


def draft_vocabulary(output: torch.Tensor, size: int, generator: torch.Generator) -> Tensors:
    """A part of the target's tokens, and the target's rows for them, disturbed."""
    vocab, hidden = output.shape
    ids = torch.randperm(vocab, generator=generator)[:size].sort().values
    noise = torch.randn(size, hidden, generator=generator) * 0.02
    return {
        "d2t": ids - torch.arange(size),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True),
        "lm_head.weight": output[ids] + noise,
    }


def joined_first(tensors: Tensors, seed: int = 0) -> Tensors:
    """A head of EAGLE-3 as one whose embedding and feature are joined before its first layer."""
    generator = torch.Generator().manual_seed(seed)
    hidden = tensors["norm.weight"].shape[0]
    changed = {name: tensor for name, tensor in tensors.items() if "input_layernorm" not in name}
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        changed[name] = tensors[name][:, :hidden].clone()
    changed["enorm.weight"] = tensors["midlayer.input_layernorm.weight"]
    eye = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    noise = torch.randn(hidden, 2 * hidden, generator=generator) * 0.05
    return changed | {"eh_proj.weight": eye + noise}


def write_eagle(folder: Path, config: dict, tensors: Tensors) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)
