"""Less common layouts of published checkpoints: read, or refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.config import MedusaConfig, MTPConfig
from outrider.drafters.heads.eagle import _RENAMED
from outrider.drafters.heads.llama_files import own_name
from outrider.drafters.heads.medusa import load_medusa
from outrider.drafters.heads.mtp import _find, read_mtp
from outrider.drafters.heads.protocol import TargetFacts
from outrider.errors import CheckpointError
from outrider.tests.helpers.mtp import Made

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
    assert own_name(stored, _RENAMED) == ours


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("mtp_layers.0.input_proj.weight", "the speculators library's"),
        ("model.mtp.layers.0.pre_mlp_layernorm.weight", "MiMo-V2's"),
        ("model.mtp.layers.0.enorm.m.weight", "LongCat's"),
        ("model.mtp.layers.0.transformer_layer.mlp.up_proj.weight", "MiniMax-M3's"),
        ("language_model.model.mtp.layers.0.transformer_layer.mlp.w1.weight", "MiniMax-M3's"),
        ("mtp.layers.1.mixer.o_proj.weight", "Nemotron-H's"),
        ("model.layers.45.shared_head.output.weight", "Step-3.5's"),
        ("mtp.0.e_proj.weight", "DeepSeek-V4's"),
        ("pre_projection.weight", "Gemma 4's"),
    ],
)
def test_other_layouts_of_mtp_modules_are_named(tmp_path, name, whose):
    """Also where tensors lie beside it that a layout has which is read."""
    beside = {"mtp.fc.weight": torch.zeros(2), "model.layers.2.eh_proj.weight": torch.zeros(2)}
    save_file({name: torch.zeros(2), **beside}, tmp_path / "model.safetensors")
    config = MTPConfig(speculative_model=str(tmp_path))
    with pytest.raises(CheckpointError, match=re.escape(name) + f".*{whose} layout"):
        read_mtp(config, FACTS)


@pytest.fixture(scope="module")
def ernie(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("ernie"), "ernie", 1)


def module_of(folder, **keys):
    facts = replace(FACTS, hidden_size=32, vocab_size=96, num_layers=2)
    return read_mtp(MTPConfig(speculative_model=str(folder), **keys), facts)[0]


def test_a_projection_that_is_stored_transposed(ernie, tmp_path):
    """As in one of ERNIE 4.5's checkpoints."""
    name = "model.mtp_linear_proj.0.weight"
    tensors = ernie.extra | {name: ernie.extra[name].T.contiguous()}
    (tmp_path / "config.json").write_text((Path(ernie.alone) / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(module_of(tmp_path).eh_proj.weight, ernie.extra[name])
    save_file(tensors | {name: torch.zeros(32, 32)}, tmp_path / "model.safetensors")
    message = rf"{re.escape(name)}.*\[32, 32\], expected \[32, 64\]"
    with pytest.raises(CheckpointError, match=message):
        module_of(tmp_path)


@pytest.mark.parametrize("kind", ["ernie", "mimo", "qwen"])
def test_modules_are_written_as_they_were_read(kind, tmp_path):
    made = Made(tmp_path, kind, 1)
    final = {"model.norm.weight": made.target.model.norm.weight.detach()}
    found = module_of(made.folder, target_state="pre_norm").published()
    assert found.keys() == (final | made.extra).keys()
    for name, tensor in (final | made.extra).items():
        assert torch.equal(found[name], tensor), name


def test_the_targets_final_norm_that_modules_need(ernie, tmp_path):
    """In a folder of their own, and where it cannot be undone."""
    without = {name: each for name, each in ernie.extra.items() if name != "model.norm.weight"}
    (tmp_path / "config.json").write_text((Path(ernie.alone) / "config.json").read_text())
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor 'model\.norm\.weight'"):
        module_of(tmp_path)
    zero = {"model.norm.weight": torch.ones(32).index_fill(0, torch.tensor(3), 0)}
    save_file(without | zero, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*target_state: post_norm"):
        module_of(tmp_path)
    assert torch.equal(
        module_of(tmp_path, target_state="post_norm").norm.weight, zero["model.norm.weight"]
    )
    qwen = Made(tmp_path / "qwen", "qwen", 1)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight'.*\(target_state: pre_norm\)"):
        module_of(qwen.alone, target_state="pre_norm")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> tuple[dict, dict]:
    """Configuration and tensors of a small module of DeepSeek-V3."""
    made = Made(tmp_path_factory.mktemp("deepseek"), "deepseek", 1)
    return json.loads((Path(made.alone) / "config.json").read_text()), made.extra


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_modules_with_an_indexer_are_refused_by_it(deepseek, tmp_path, model_type):
    config, tensors = deepseek
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    indexer = {"model.layers.2.self_attn.indexer.k_norm.weight": torch.ones(4)}
    save_file(tensors | indexer, tmp_path / "model.safetensors")
    facts = replace(FACTS, hidden_size=32, vocab_size=96, num_layers=2)
    with pytest.raises(CheckpointError, match=r"chooses tokens by an indexer \(DSA\)") as caught:
        read_mtp(MTPConfig(speculative_model=str(tmp_path)), facts)
    assert (model_type if model_type != "deepseek_v3" else ".indexer.") in caught.value.message


def test_a_module_of_speculators_is_named_before_its_configuration(tmp_path):
    config = {"speculators_model_type": "mtp", "transformer_layer_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"mtp_layers.0.input_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtp_layers\.0\.input_proj.*speculators library's"):
        read_mtp(MTPConfig(speculative_model=str(tmp_path)), FACTS)


def test_modules_of_qwen3_next_have_a_layer_each(tmp_path):
    names = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight")
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    _, places = _find(MTPConfig(speculative_model=str(tmp_path)), 2, FACTS)
    assert [place.layer for place in places] == ["mtp.layers.0.", "mtp.layers.1."]
