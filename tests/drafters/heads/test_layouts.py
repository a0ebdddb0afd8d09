"""Less common layouts of published checkpoints: read, or refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from outrider.config import MedusaConfig, MTPConfig
from outrider.drafters.heads.eagle_head import _own_name
from outrider.drafters.heads.medusa import load_medusa
from outrider.drafters.heads.mtp import _find
from outrider.drafters.heads.protocol import TargetFacts
from outrider.errors import CheckpointError

HIDDEN, VOCAB = 4, 9
FACTS = TargetFacts(
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    num_layers=2,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def medusa(folder, tensors):
    blocks = {f"blocks.{head}.layers.0.weight": torch.randn(HIDDEN, HIDDEN) for head in range(2)}
    save_file({**blocks, **tensors}, folder / "model.safetensors")
    return load_medusa(MedusaConfig(speculative_model=str(folder)), FACTS)


def test_one_output_layer_for_all_medusa_heads(tmp_path):
    """vLLM's `original_lm_head`."""
    output = torch.randn(VOCAB, HIDDEN)
    head = medusa(tmp_path, {"lm_heads.0.weight": output})
    states = [head.module.states(index, torch.ones(HIDDEN)) for index in range(2)]
    for ours, state in zip(head.module(torch.ones(HIDDEN)), states, strict=True):
        assert torch.allclose(ours, output @ state)


def test_a_token_map_cuts_full_size_output_layers(tmp_path):
    outputs = {f"lm_heads.{head}.weight": torch.randn(VOCAB, HIDDEN) for head in range(2)}
    kept = torch.tensor([1, 4, 7])
    head = medusa(tmp_path, {**outputs, "token_map": kept})
    for index, linear in enumerate(head.module.lm_heads):
        assert torch.equal(linear.weight, outputs[f"lm_heads.{index}.weight"][kept])


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("transformer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("draft_id_to_target_id", "d2t"),
        ("model.draft_id_to_target_id", "d2t"),
        ("fusion_fc.weight", "fc.weight"),
    ],
)
def test_older_names_of_eagle_tensors(stored, ours):
    assert _own_name(stored) == ours


@pytest.mark.parametrize(
    "name",
    [
        "mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.token_layernorm.weight",
        "model.mtp_block.0.mlp.up_proj.weight",
    ],
)
def test_other_layouts_of_mtp_modules_are_named(tmp_path, name):
    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
    config = MTPConfig(speculative_model=str(tmp_path))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        _find(config, 2, torch.device("cpu"))


def test_modules_of_qwen3_next_have_a_layer_each(tmp_path):
    names = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight")
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    _, places = _find(MTPConfig(speculative_model=str(tmp_path)), 2, torch.device("cpu"))
    assert [place.layer for place in places] == ["mtp.layers.0.", "mtp.layers.1."]
