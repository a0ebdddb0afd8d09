"""Tiny random checkpoints, one per architecture, saved by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.workers.model.checkpoint.weights import Checkpoint

BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 8,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "tied": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, **MOE},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"model_type": "phi3"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2", "tie_word_embeddings": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
        **MOE,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "head_dim": 8,
        "attention_bias": True,
        "layer_types": ["full_attention", "full_attention"],
        "shared_expert_intermediate_size": 24,
        **MOE,
    },
    "qwen3_next_hybrid": {
        "model_type": "qwen3_next",
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 24,
        **MOE,
        **DELTA,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **DELTA,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 24,
        **MOE,
        **DELTA,
        "linear_conv_kernel_dim": 3,
    },
    "bamba": {
        "model_type": "bamba",
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        **MAMBA,
    },
    "granite4": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "shared_intermediate_size": 24,
        "num_local_experts": 0,
        "mamba_proj_bias": True,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.0,
        "embedding_multiplier": 3.0,
        **MAMBA,
    },
    "granite4_moe": {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "position_embedding_type": "rope",
        **MAMBA,
        "mamba_n_groups": 1,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "head_dim": 8,
        **NEMOTRON,
    },
    "nemotron_h_moe": {
        "model_type": "nemotron_h",
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 20,
        "routed_scaling_factor": 1.5,
        "use_bias": True,
        **NEMOTRON,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "mlp_multipliers": [0.7, 1.3],
        "key_multiplier": 0.6,
        "attention_out_multiplier": 0.9,
        "attention_in_multiplier": 1.2,
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.85,
        **MAMBA,
    },
    "falcon_h1_norm": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "attention_bias": True,
        "tie_word_embeddings": True,
        **MAMBA,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 8, "use_bias": True},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 2,
        "moe_norm_min": 0.6,
        "tie_word_embeddings": True,
    },
    "granite": {"model_type": "granite", "logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere2": {"model_type": "cohere2", "sliding_window": 6, "head_dim": 8},
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 8,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "llama4_all_moe": {
        "model_type": "llama4_text",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "no_rope_layers": [0, 1],
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 3,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_bias": True,
    },
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "phi3_longrope": {
        "model_type": "phi3",
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "sliding_window": 7,
        "original_max_position_embeddings": 1,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 3.0],
            "attention_factor": 1.3,
            "original_max_position_embeddings": 1,
        },
    },
    "qwen3_yarn": {
        "model_type": "qwen3",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gemma3_two_ropes": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 3.0,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}


def write(
    folder: Path, name: str, *, max_shard_size: str = "5GB", **overrides: Any
) -> tuple[Path, Any]:
    torch.manual_seed(0)
    settings = {**BASE, **VARIANTS[name], **overrides}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).float().eval()
    for key, parameter in model.named_parameters():
        if key.endswith(("bias", "sinks")) or parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in key else 0.0, 0.2)
    model.save_pretrained(folder / name, max_shard_size=max_shard_size)
    return folder / name, model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`checkpoint(name, **overrides)`: the folder, and transformers' own model as the oracle."""
    return partial(write, tmp_path)


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """`stored(name)`: the same, written once, for tests that change neither folder nor model."""
    return cache(partial(write, tmp_path_factory.mktemp("stored")))


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def elements_read(monkeypatch) -> dict[Checkpoint, int]:
    """How many elements have been read of the files of each checkpoint; of others there is none."""
    found: dict[Checkpoint, int] = {}
    piece = Checkpoint._piece

    class Counting:
        def __init__(self, owner, source) -> None:
            self._owner, self._source, self.shape = owner, source, source.shape
            self.num_bytes = source.num_bytes

        def read(self, box):
            tensor = self._source.read(box)
            found[self._owner] = found.get(self._owner, 0) + tensor.numel()
            return tensor

    monkeypatch.setattr(Checkpoint, "_piece", lambda self, name: Counting(self, piece(self, name)))
    return found
