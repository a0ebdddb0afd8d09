"""A target's layer as a head's layer: transformers' own numbers, and the published names."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

from outrider.drafters.heads.block import DecoderBlock, materialise_constants, read_block_config
from outrider.drafters.heads.mtp import MTPModule
from outrider.drafters.heads.protocol import HeadLayer
from outrider.errors import CheckpointError
from outrider.tests.helpers.mtp import MOE, TARGETS, random_model, target_config

KINDS = {
    **{kind: {} for kind in TARGETS},
    "mistral": {"model_type": "mistral", "sliding_window": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "granite": {"model_type": "granite", "embedding_multiplier": 3.0},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, **MOE},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "pad_token_id": None},
}
LAST = {"gemma3": 0, "ernie": 0}  # the last layer that attends to everything, and is dense


def causal(layer, query, key, value, scale):
    rows, near, far = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = scaled_dot_product_attention(
        rows, near, far, is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_transformers_own(kind, tmp_path):
    config = target_config("llama", **KINDS[kind]) if kind not in TARGETS else target_config(kind)
    model = random_model(config, seed=3)
    model.save_pretrained(tmp_path)
    index = LAST.get(kind, 1)
    where = f"model.layers.{index}."
    stored = {
        name.removeprefix(where): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if name.startswith(where)
    }
    block = DecoderBlock(read_block_config(tmp_path))
    readers = {name: lambda tensor=tensor: tensor for name, tensor in stored.items()}
    block.load_state_dict(block.states_from(readers, where), assign=True)
    materialise_constants(block.whole, torch.device("cpu"))
    states, positions = torch.randn(9, config.hidden_size), torch.arange(4, 13)
    with torch.no_grad():
        got = block(states, positions, 0, causal)
        model.set_attn_implementation("eager")
        base = model.model
        kinds = ("full_attention",) if kind == "gemma3" else ()
        wanted = base.layers[index](
            states[None],
            attention_mask=torch.full((9, 9), -torch.inf).triu(1)[None, None],
            position_ids=positions[None],
            position_embeddings=base.rotary_emb(states[None], positions[None], *kinds),
        )
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(got, wanted.reshape(got.shape), rtol=1e-4, atol=1e-5)
    published = block.published()
    assert set(published) == set(stored)
    assert all(torch.equal(published[name], stored[name]) for name in stored)


def test_what_a_row_leaves_is_observed():
    assert empty(TARGETS["deepseek"]).kept() == HeadLayer(num_kv_heads=4, head_dim=16, value_dim=12)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama4_text"}, "temperatures"),
        ({"model_type": "gpt_neox"}, "no layers and norm"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 5.0}, "soft cap"),
    ],
)
def test_layers_that_heads_cannot_have_are_refused(changes, says):
    with pytest.raises(CheckpointError, match=says):
        empty(changes).kept()


def empty(changes):
    """A module with numbers of no meaning."""
    module = MTPModule(target_config("llama", **changes))
    module.to_empty(device="cpu")
    materialise_constants(module.block.whole, torch.device("cpu"))
    return module
