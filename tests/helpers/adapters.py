"""Random LoRA adapters in PEFT's layout, and the checkpoints that they make merged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)


def write_adapter(
    folder: Path,
    target: str,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    **config: Any,
) -> str:
    """An adapter of `target` with noise in both matrices; keys of `config` are added to its own."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets or not isinstance(module, torch.nn.Linear):
            continue
        ranks = config.get("rank_pattern", {})
        own = next((value for key, value in ranks.items() if name.endswith(f".{key}")), rank)
        shapes = {"A": (own, module.in_features), "B": (module.out_features, own)}
        for key, shape in shapes.items():
            noise = torch.randn(shape, generator=generator) * 0.15
            tensors[f"base_model.model.{name}.lora_{key}.weight"] = noise
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    data = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha,
        "target_modules": list(targets), "bias": "none", "lora_dropout": 0.05, **config,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(data))
    return str(folder)


def merged(folder: Path, target: str, adapter: str) -> str:
    """A checkpoint with the adapter's products added to the weights, in float32."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    alphas = config.get("alpha_pattern", {})
    for name, down in tensors.items():
        module, _, rest = name.removeprefix("base_model.model.").partition(".lora_A")
        if not rest:
            continue
        up, rank = tensors[name.replace("lora_A", "lora_B")], down.shape[0]
        own = [value for key, value in alphas.items() if module.endswith(f".{key}")]
        alpha = (*own, config["lora_alpha"])[0]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        with torch.no_grad():
            modules[module].weight += scale * up @ down
    model.save_pretrained(folder)
    return str(folder)
