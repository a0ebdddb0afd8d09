"""gpt-oss checkpoints with experts in MXFP4, under the names of OpenAI's own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from .scaled import rewrite

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
GPT_OSS = GptOssConfig(
    vocab_size=90, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
    num_experts_per_tok=2, sliding_window=8, initializer_range=0.2, pad_token_id=0,
    max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A plain folder, and the quantised one that stands for it by transformers' conversion."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT_OSS).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.normal_(0.8, 0.2)
    plain, coded = folder / "plain", folder / "coded"
    model.save_pretrained(plain)
    shutil.copytree(plain, coded)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if not _EXPERTS.search(name):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, coded / "model.safetensors", {"format": "pt"})
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    rewrite(coded, MXFP4)
    return plain, coded
