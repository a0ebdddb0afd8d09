"""Types outside the family: all that we claim equal transformers, others are compared at load."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.equality import TEXTS, script
from outrider.tests.helpers.models import BLOCK, CPU, TABLES, full_logits
from outrider.workers.collective import Collective
from outrider.workers.model.family import spec
from outrider.workers.model.fit import check_weights
from outrider.workers.model.info import TESTED, TESTED_ALONE, check_numbers, check_type, describe
from outrider.workers.model.sharding import is_experts
from outrider.workers.model.target import load_model

# By the names that configurations have; a type takes those that it knows.
SMALL: dict[str, Any] = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    **{"head_dim": 8, "sliding_window": 6, "sliding_window_size": 6, "kv_channels": 8},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 16},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_num_shared_experts": 1},
    **{"n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 24},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "query_pre_attn_scalar": 8, "expert_layer_period": 1, "rotary_dim": 4},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
    **{"d_model": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
    **{"num_layers": 2, "num_heads": 4, "ffn_hidden_size": 48, "embed_dim": 32, "num_groups": 2},
    **{"seq_length": 128, "max_seq_len": 128, "max_sequence_length": 128},
}
_GEMMA: dict[str, Any] = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101},
    "num_kv_shared_layers": 2,
}
_INDEXED = {"num_key_value_heads": 4, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA = {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_expand": 2}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": {
        **_INDEXED,
        **{"num_hidden_layers": 3, "indexer_types": ["full", "shared", "shared"]},
    },
    "gemma3n_text": {
        **_GEMMA,
        **{
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.9] + [0.0] * 3,
        },
    },
    "gemma4_text": {**_GEMMA, "global_head_dim": 16, "num_global_key_value_heads": 1},
    "laguna": {
        **{"num_attention_heads_per_layer": [4, 8], "gating": "per-element"},
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {
        **_MAMBA,
        **{"mamba_dt_rank": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
    },
    "zamba2": {
        **_MAMBA,
        **{"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]},
        **{"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_headdim": 8, "chunk_size": 8},
        **{"num_mem_blocks": 1, "adapter_rank": 4},
    },
}
"""What a type's tiny configuration has beside, or in the place of, `SMALL`."""
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},
    {"layer_types": None},
)


def configurations(kind: str, **own: Any) -> Iterator[Any]:
    """Tiny ones; which of them a type accepts is for it to say."""
    usual = AutoConfig.for_model(kind).get_text_config(decoder=True)
    known = usual.to_dict()
    small = {name: value for name, value in SMALL.items() if name in known}
    if kinds := list(dict.fromkeys(known.get("layer_types") or ())):
        num_layers = max(2, len(kinds))
        small |= {"num_hidden_layers": num_layers, "layer_types": (kinds * 2)[:num_layers]}
    if own := {**OWN.get(kind, {}), **own}:
        if "layer_types" not in own:
            small.pop("layer_types", None)
        small |= own
    for change in CHANGES:
        keys = {**small, **{key: value for key, value in change.items() if key in small}}
        yield type(usual), {key: value for key, value in keys.items() if value is not None}


def write(kind: str, folder: Path, **own: Any) -> Any:
    """A random checkpoint of the type, and transformers' model of it."""
    fault: Exception | None = None
    for cls, keys in configurations(kind, **own):
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(cls(**keys)).float().eval()
            full_logits(model, [5, 6, 7])
        except Exception as error:  # noqa: BLE001, models raise anything; the next may do
            fault = error
            continue
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) or parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(folder)
        return model
    raise AssertionError(f"{kind}: no tiny model can be made") from fault


@pytest.fixture
def check(tmp_path, part, build_step, run_ranks):
    """`check(kind, size)`: every kind of step equals transformers' forward, and the cache is as
    large as was estimated; gives the model."""

    def check(kind, size, **options):
        oracle = write(kind, tmp_path)
        steps = script(TEXTS, part, build_step)

        def work(collective):
            model = load_model(tmp_path, device=CPU, collective=collective, **options)
            assert check_weights(tmp_path, size)[1] in (model.kv_bytes_per_token(), None)
            cache = model.new_cache(num_blocks=24, block_size=BLOCK)
            return [model.forward(step, cache) for step, _ in steps]

        for logits in run_ranks(size, work):
            for mine, (_, expected) in zip(logits, steps, strict=True):
                wanted = torch.stack([full_logits(oracle, text)[row] for text, row in expected])
                torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-3)
        return oracle

    return check


@pytest.fixture
def check_prompt(tmp_path, part, build_step):
    """`check_prompt(oracle)`: loads `tmp_path`; the logits of a prompt equal `oracle`'s."""

    def check(oracle):
        model = load_model(tmp_path, device=CPU, collective=Collective.single())
        step = build_step([part(TEXTS[0], 0, TABLES[0])], BLOCK)
        logits = model.forward(step, model.new_cache(num_blocks=24, block_size=BLOCK))
        wanted = full_logits(oracle, TEXTS[0])[-1:]
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
        return model

    return check


CLAIMED = [
    *itertools.product(sorted(TESTED - spec._READERS.keys()), (1, 2)),
    *((kind, 1) for kind in sorted(TESTED_ALONE)),
]
SOME = [
    ("glm4", 1),
    ("olmo3", 2),
    ("gpt_neox", 2),
    ("laguna", 1),
    ("gemma3n_text", 1),
    ("gemma4_text", 1),
]
"""Of these, in the fast tests."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [each for each in CLAIMED if each not in SOME],
)
def test_every_type_that_is_claimed(check, kind, size):
    """Of a mixture, two ranks also share out whole experts."""
    oracle = check(kind, size)
    if size > 1 and any(map(is_experts, oracle.modules())):
        check(kind, size, whole_experts=True)


@pytest.mark.parametrize(("kind", "size"), SOME)
def test_some_types(check, tmp_path, kind, size):
    """The last three are compared when they are loaded; OLMo's ranks have all heads each, and
    Gemma's layers share keys and values."""
    num_heads = check(kind, size).config.num_attention_heads
    held = num_heads if kind == "olmo3" else num_heads // size
    assert check_weights(tmp_path, size)[0].num_heads == held


@pytest.mark.parametrize(
    ("kind", "outer", "inner"),
    [
        ("gemma3_text", "gemma3", "language_model.model."),
        ("gemma3n_text", "gemma3n", "model.language_model."),
        ("gemma4_text", "gemma4", "model.language_model."),
        ("deepseek_v3", "kimi_k25", "language_model.model."),
    ],
)
def test_the_text_part_of_a_checkpoint_with_images(check_prompt, tmp_path, kind, outer, inner):
    oracle = write(kind, tmp_path)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    keys = {"model_type": outer, "text_config": json.loads(config.read_text())}
    config.write_text(json.dumps(keys))
    tensors = {f"{part}.patch.weight": torch.ones(4) for part in ("vision_tower", "mm_projector")}
    for name, tensor in load_file(file).items():
        name = name.replace("model.", inner, 1)
        is_inside = inner.startswith("language_model") and name.startswith("lm_head")
        tensors[f"language_model.{name}" if is_inside else name] = tensor
    save_file(tensors, file, {"format": "pt"})
    check_prompt(oracle)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_served_up_to_where_it_is_full(check, tmp_path, kind):
    check(kind, 1)
    path, topk = tmp_path, OWN[kind]["index_topk"]
    assert describe(path).max_model_len == topk < SMALL["max_position_embeddings"]
    check_numbers(path, 1, 1, topk)
    with pytest.raises(ConfigError, match=r"max_model_len: 65 exceeds 64, this model's index_topk"):
        check_numbers(path, 1, 1, topk + 1)
    known = load_model(path, device=CPU, collective=Collective.single()).forward_choice
    assert known.kind == "family"


def test_sparse_attention_is_full_up_to_its_limit_alone(tmp_path):
    """Why longer contexts are refused."""
    text = list(range(5, 25))
    sparse, full = [
        write("deepseek_v32", tmp_path / str(topk), index_topk=topk) for topk in (12, 64)
    ]
    found, wanted = full_logits(sparse, text), full_logits(full, text)
    torch.testing.assert_close(found[:12], wanted[:12])
    assert (found[12:] - wanted[12:]).abs().amax(1).min() > 1e-3


def test_kimi_k2_is_deepseek_v3_by_another_name(check_prompt, tmp_path):
    oracle = write("deepseek_v3", tmp_path, num_key_value_heads=4)
    file = tmp_path / "config.json"
    own = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own | {"model_type": "kimi_k2"}))
    assert check_prompt(oracle).forward_choice.kind == "family"


def test_the_family_is_tested_by_its_own_tests():
    assert spec._READERS.keys() <= TESTED
    assert all(kind in CONFIG_MAPPING for kind in TESTED | TESTED_ALONE)
    assert not TESTED & TESTED_ALONE


REFUSED = [
    ("camembert", "its attention cannot be replaced: a token attends to those that follow it"),
    ("bart", "its forward takes no positions"),
    ("big_bird", "its attention cannot be replaced: its modules compute it themselves"),
    ("minimax", "keep a state other than keys and values"),
    ("hy_v4", r"an indexer chooses \(index_topk\)"),
    ("diffllama", "are not those of transformers' own forward"),  # two softmaxes
    ("olmo_hybrid", "keep a state other than keys and values"),
    ("jamba", "of this JambaForCausalLM keep a state other than keys and values"),
    ("zamba2", "of this Zamba2ForCausalLM keep a state other than keys and values"),
    ("lfm2", "of this Lfm2ForCausalLM keep a state other than keys and values"),
    ("falcon", "its attention cannot be replaced"),
    ("stablelm", "its attention cannot be replaced: its layers pass on no arguments to it"),
    ("codegen", "its attention cannot be replaced: its modules compute it themselves"),
    ("axk2", r"its attention is sparse, to tokens that an indexer chooses \(index_topk\)"),
]
"""Types, and why they are refused."""


@pytest.mark.parametrize(("kind", "why"), REFUSED)
def test_a_type_whose_forward_would_be_wrong_is_refused(tmp_path, kind, why):
    write(kind, tmp_path)
    for fails in FINDERS:
        with pytest.raises(CheckpointError, match=why):
            fails(tmp_path)


FINDERS = (check_weights, partial(load_model, device=CPU, collective=Collective.single()))
"""What a check finds without a weight, and what a start finds with all."""
UNMADE = {
    *("bailing_hybrid", "bamba", "blt", "cohere_compass_text", "dbrx", "emu3", "gemma3n"),
    *("gemma4_assistant", "gpt_neo", "granitemoehybrid", "kimi_linear", "lfm2_moe", "mamba2"),
    *("mllama", "musicgen", "musicgen_melody", "phi4_multimodal", "plbart", "reformer"),
    *("whisper", "xmod", "zamba", "zaya"),
}
"""Types of which `SMALL` makes no model."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - UNMADE - dict(CLAIMED + REFUSED).keys()),
)
def test_a_check_accepts_what_starts(tmp_path, kind):
    """Of those that are claimed or refused, the tests above see both."""
    write(kind, tmp_path)
    refused = []
    for find in FINDERS:
        try:
            find(tmp_path)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) in (0, 2), refused


def test_several_ranks_of_a_type_without_a_test_are_refused():
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size: 2 ranks of a 'gemma4_text' model"
    ):
        check_type("gemma4_text", 2)
    check_type("gemma4_text", 1)
    check_type("llama", 2)
    check_type("of_its_own_code", 2)
