"""Tiny hybrid targets, and a drafter whose random trees often hold what they say next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.drafters.protocol import Drafter, Needs
from outrider.scheduler.types import Draft, ints

VOCAB = 96
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "model_type": "qwen3_next",
        "mlp_only_layers": [0],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "granite4": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_d_head": 8,
        "attention_multiplier": 0.25,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 12,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 12,
        "mamba_d_head": 8,
        "key_multiplier": 0.8,
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    },
}


def write_hybrid(folder: Path, kind: str) -> str:
    """A random target whose next token depends on the last one, and on the states behind it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    keys: dict[str, Any] = {"num_hidden_layers": 4}
    if kind not in ("nemotron_h", "falcon_h1"):  # which say themselves what their layers are
        names = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
        keys["layer_types"] = names
    if kind.startswith("qwen"):
        keys |= {"head_dim": 16, **DELTA}
    if kind == "nemotron_h":
        keys = {"head_dim": 16}
    config = AutoConfig.for_model(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        **keys,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        **KINDS[kind],
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
        for name, weight in model.named_parameters():
            if name.endswith("dt_bias"):
                weight.uniform_(-4, 0)  # of which many remember long
            elif weight.dim() == 1 and "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return str(folder)


def greedy_texts(folder: str, prompts: list[list[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """What transformers' own `generate` says next."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


class RandomTrees(Drafter):
    """Draws trees and chains in which a node is right as often as not.

    Args:
        texts: a file with whole texts, as lists of tokens.
    """

    name = "random trees"
    needs = Needs(shape="tree")

    def __init__(self, texts: str, seed: int = 0) -> None:
        self._texts = json.loads(Path(texts).read_text())
        self._rng = np.random.default_rng(seed)
        self._known: dict[str, list[int]] = {}

    def open(self, requests):
        for each in requests:
            self._known[each.id] = [*each.prompt.tolist(), *each.emitted.tolist()]

    def observe(self, batch, verdict):
        for row, name in enumerate(batch.request_ids):
            self._known[name] += verdict.tokens(row).tolist()

    def close(self, request_ids):
        for name in request_ids:
            self._known.pop(name, None)

    def propose(self, batch, budgets):
        return [
            self._draw(self._known[name], int(budget))
            for name, budget in zip(batch.request_ids, budgets, strict=True)
        ]

    def _draw(self, known: list[int], budget: int) -> Draft:
        rng, size = self._rng, len(known)
        text = next((text for text in self._texts if text[:size] == known), known)
        count = int(rng.integers(0, budget + 1))
        is_chain, parents, tokens, right = rng.random() < 0.3, [], [], []
        for node in range(count):
            parent = node - 1 if is_chain else int(rng.integers(-1, node))
            depth = size if parent < 0 else right[parent][1] + 1
            siblings = [tokens[i] for i, other in enumerate(parents) if other == parent]
            token, is_right = int(rng.integers(0, VOCAB)), False
            if (parent < 0 or right[parent][0]) and depth < len(text) and rng.random() < 0.7:
                token, is_right = text[depth], True
            while token in siblings:
                token, is_right = int(rng.integers(0, VOCAB)), False
            parents.append(parent)
            tokens.append(token)
            right.append((is_right, depth))
        return Draft(ints(tokens), ints(parents), source=self.name)
