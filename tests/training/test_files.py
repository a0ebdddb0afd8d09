"""What every method writes: the names, shapes and keys that engines' loaders ask for, and modes.

The lists are written from those loaders, not from the code: vLLM's `medusa`, `llama_eagle`,
`llama_eagle3`, `deepseek_mtp`, `qwen3_dflash` and `qwen3_dspark`, SGLang's `llama_eagle` and
`llama_eagle3`, and the references.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.config import EagleConfig, parse
from outrider.drafters.heads.eagle import read_eagle
from outrider.training.options import METHODS

from .conftest import VOCAB_SIZE

HIDDEN, WIDE, HALF, DRAFT = 32, 48, 16, 20  # the target's; HALF: its keys' width
ATTENTION = {
    "self_attn.q_proj.weight": HIDDEN,
    "self_attn.k_proj.weight": HALF,
    "self_attn.v_proj.weight": HALF,
}
MLP = {
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (WIDE, HIDDEN),
    "mlp.up_proj.weight": (WIDE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, WIDE),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def layer(stem: str, input_size: int) -> dict[str, tuple[int, ...]]:
    rows = {name: (width, input_size) for name, width in ATTENTION.items()} | MLP
    return {stem + name: shape for name, shape in rows.items()}


EAGLE = {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer("layers.0.", HIDDEN)}
EAGLE3 = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    **layer("midlayer.", 2 * HIDDEN),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
}
MEDUSA = {
    f"blocks.{head}.layers.0.{kind}": shape
    for head in range(2)
    for kind, shape in (("weight", (HIDDEN, HIDDEN)), ("bias", (HIDDEN,)))
}
OUTPUTS = [f"lm_heads.{head}.weight" for head in range(2)]
MTP = {
    **layer("model.layers.2.", HIDDEN),
    "model.layers.2.input_layernorm.weight": (HIDDEN,),
    "model.layers.2.enorm.weight": (HIDDEN,),
    "model.layers.2.hnorm.weight": (HIDDEN,),
    "model.layers.2.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
    "model.layers.2.shared_head.norm.weight": (HIDDEN,),
}
BLOCK = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    **layer("layers.0.", HIDDEN),
    "layers.0.input_layernorm.weight": (HIDDEN,),
    "layers.0.self_attn.q_norm.weight": (8,),
    "layers.0.self_attn.k_norm.weight": (8,),
    "hidden_norm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
}
SIZES = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "attention_bias": False,
    "bias": False, "torch_dtype": "float32",
}  # fmt: skip
LAYER_KEYS = {key: value for key, value in SIZES.items() if key != "bias"}
TWO = {"num_heads": 2}
LAYERS = {"layers": (0, 1, 1)}
ONE = {"layers": (0, 1), "num_layers": 1}
PARTIAL = {"draft_vocab_size": DRAFT}
CASES = {
    "medusa": (
        "medusa", TWO, "model", MEDUSA | dict.fromkeys(OUTPUTS, (VOCAB_SIZE, HIDDEN)),
        {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 2,
         "num_hidden_layers": 1, "medusa_fc_bias": True, "hidden_size": HIDDEN,
         "vocab_size": VOCAB_SIZE, "truncated_vocab_size": None},
    ),
    "medusa, a part": (
        "medusa", TWO | PARTIAL, "model",
        MEDUSA | dict.fromkeys(OUTPUTS, (DRAFT, HIDDEN)) | {"token_map": (DRAFT,)},
        {"truncated_vocab_size": DRAFT, "vocab_size": VOCAB_SIZE},
    ),
    "medusa, reference": (
        "medusa", TWO | {"layout": "reference"}, "medusa_lm_head",
        {"0.0.linear.weight": (HIDDEN, HIDDEN), "0.0.linear.bias": (HIDDEN,),
         "0.1.weight": (VOCAB_SIZE, HIDDEN), "1.0.linear.weight": (HIDDEN, HIDDEN),
         "1.0.linear.bias": (HIDDEN,), "1.1.weight": (VOCAB_SIZE, HIDDEN)},
        {"medusa_num_heads": 2, "medusa_num_layers": 1},
    ),
    "redrafter": (
        "redrafter", {"rnn": True, "exit_dim": 40}, "model",
        {"input_proj.weight": (40, 64), "input_proj.bias": (40,),
         "lm_head.0.linear.weight": (40, 40), "lm_head.0.linear.bias": (40,),
         "lm_head.1.weight": (VOCAB_SIZE, 40), "rnn_u.weight": (HIDDEN, HIDDEN),
         "rnn_u.bias": (HIDDEN,), "rnn_w.weight": (HIDDEN, HIDDEN)},
        {"model_type": "recurrent_drafting_drafter", "vocab_size": VOCAB_SIZE, "exit_dim": 40,
         "hidden_size": HIDDEN, "num_draft_layers": 1, "rnn": True},
    ),
    "eagle": ("eagle", {}, "model", EAGLE, SIZES | {"architectures": ["LlamaForCausalLM"]}),
    "eagle, sglang": (
        "eagle", {"layout": "sglang"}, "model", EAGLE | {"fc.bias": (HIDDEN,)},
        SIZES | {"architectures": ["LlamaForCausalLMEagle"]},
    ),
    "eagle3": (
        "eagle3", LAYERS, "model", EAGLE3 | {"lm_head.weight": (VOCAB_SIZE, HIDDEN)},
        SIZES | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB_SIZE,
                 "norm_before_residual": False, "target_hidden_size": HIDDEN,
                 "num_aux_hidden_states": 3, "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
                 "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 0],
                                  "use_aux_hidden_state": True}},
    ),
    "eagle3, a part": (
        "eagle3", LAYERS | PARTIAL, "model",
        EAGLE3 | {"lm_head.weight": (DRAFT, HIDDEN), "d2t": (DRAFT,), "t2d": (VOCAB_SIZE,)},
        {"draft_vocab_size": DRAFT, "vocab_size": VOCAB_SIZE},
    ),
    "peagle": (
        "peagle", {"layers": (0, 1, 1)}, "model",
        EAGLE3 | {"lm_head.weight": (VOCAB_SIZE, HIDDEN), "mask_hidden": (1, 1, 3 * HIDDEN)},
        {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 35},
    ),
    "dflash": (
        "dflash", ONE, "model", BLOCK,
        LAYER_KEYS
        | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8,
           "num_target_layers": 2, "layer_types": ["full_attention"],
           "dflash_config": {"mask_token_id": 35, "target_layer_ids": [-1, 0]}},
    ),
    "dflash, speculators": (
        "dflash", ONE | PARTIAL | {"layout": "speculators"}, "model",
        BLOCK | {"lm_head.weight": (DRAFT, HIDDEN), "d2t": (DRAFT,), "t2d": (VOCAB_SIZE,)},
        {"speculators_model_type": "dflash", "mask_token_id": 35, "block_size": 8,
         "draft_vocab_size": DRAFT, "aux_hidden_state_layer_ids": [0, 1]},
    ),
    "dspark": (
        "dspark", ONE | {"markov_rank": 6}, "model",
        BLOCK | {"markov_head.markov_w1.weight": (VOCAB_SIZE, 6),
                 "markov_head.markov_w2.weight": (VOCAB_SIZE, 6),
                 "confidence_head.proj.weight": (1, HIDDEN + 6), "confidence_head.proj.bias": (1,)},
        {"speculators_model_type": "dspark", "markov_head_type": "vanilla", "markov_rank": 6,
         "sample_from_anchor": True, "aux_hidden_state_layer_ids": [0, 1]},
    ),
    "mtp": ("mtp", {}, "model", MTP, {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}),
    "mtp, copies": (
        "mtp", {"copies": True}, "model",
        MTP | {"model.layers.2.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
               "model.layers.2.shared_head.head.weight": (VOCAB_SIZE, HIDDEN)},
        {"num_nextn_predict_layers": 1},
    ),
    "draft": (
        "draft", {"hidden_size": 16, "num_layers": 1}, "model", None,
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
         "num_hidden_layers": 1, "vocab_size": VOCAB_SIZE, "dtype": "float32"},
    ),
    "pard": (
        "pard", {"hidden_size": 16, "num_layers": 1}, "model", None,
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "pard_token": 35},
    ),
    "pard2": (
        "pard2", {"hidden_size": 16, "num_layers": 1}, "warp_model",
        {"target_proj.weight": (16, HIDDEN)},
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "pard_token": 35,
         "spd_type": "pard2", "pard2_target_layers": [2]},
    ),
}  # fmt: skip


@pytest.fixture
def exported(target, tmp_path):
    """`exported(case)`: folder, tensors and configuration of a case."""

    def call(case: str) -> tuple[Path, dict[str, torch.Tensor], dict]:
        name, options, stem, _, _ = CASES[case]
        method = METHODS[name].build(METHODS[name].options(**options), target)
        method.prepare(torch.arange(VOCAB_SIZE) % 7)
        method.export(tmp_path / "out")
        tensors = load_file(tmp_path / "out" / f"{stem}.safetensors")
        return tmp_path / "out", tensors, json.loads((tmp_path / "out" / "config.json").read_text())

    return call


@pytest.mark.parametrize("case", CASES)
def test_files_are_what_loaders_ask_for(exported, case):
    _, tensors, config = exported(case)
    wanted, keys = CASES[case][3:]
    if wanted is not None:
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == wanted
    kinds = {name: t.dtype for name, t in tensors.items() if t.dtype != torch.float32}
    maps = {"d2t": torch.int64, "t2d": torch.bool, "token_map": torch.int64}
    assert kinds == {name: kind for name, kind in maps.items() if name in tensors}
    assert {key: config.get(key) for key in keys} == keys


def test_the_map_of_a_draft_vocabulary(exported):
    """Offsets, in ascending order, and a mask that says the same."""
    _, tensors, _ = exported("eagle3, a part")
    ids = torch.arange(DRAFT) + tensors["d2t"]
    assert bool((ids.diff() > 0).all())
    assert ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    counts = torch.arange(VOCAB_SIZE) % 7
    assert counts[tensors["t2d"]].min() >= counts[~tensors["t2d"]].max()


def test_a_bias_that_is_there_for_an_engine_adds_nothing(exported, target):
    folder, tensors, _ = exported("eagle, sglang")
    assert not bool(tensors["fc.bias"].any())
    found = read_eagle(parse(EagleConfig, {"speculative_model": str(folder)}), target.facts)
    assert torch.equal(found.module.state_dict()["fc.weight"], tensors["fc.weight"])


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(0o027)
    yield 0o640
    os.umask(before)


@pytest.mark.parametrize("case", ["medusa", "eagle3, a part", "mtp", "pard2", "redrafter"])
def test_files_have_ordinary_permissions(exported, umask, case):
    folder, _, _ = exported(case)
    exported(case)  # over the old ones
    files = [path for path in folder.iterdir() if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {umask}
    assert not [path.name for path in folder.iterdir() if "partial" in path.name]
    assert all(path.suffix in (".safetensors", ".json", ".jinja") for path in files)
