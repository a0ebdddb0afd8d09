"""Types outside the family: all that we claim equal transformers, others are compared at load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.equality import TEXTS, script
from outrider.tests.helpers.models import BLOCK, CPU, full_logits
from outrider.workers.collective import Collective
from outrider.workers.model.family import spec
from outrider.workers.model.info import TESTED, check_type
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
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},
    {"layer_types": None},
)


def configurations(kind: str) -> Iterator[Any]:
    """Tiny ones; which of them a type accepts is for it to say."""
    usual = AutoConfig.for_model(kind).get_text_config(decoder=True)
    known = usual.to_dict()
    small = {name: value for name, value in SMALL.items() if name in known}
    if kinds := list(dict.fromkeys(known.get("layer_types") or ())):
        num_layers = max(2, len(kinds))
        small |= {"num_hidden_layers": num_layers, "layer_types": (kinds * 2)[:num_layers]}
    for change in CHANGES:
        keys = {**small, **{key: value for key, value in change.items() if key in small}}
        yield type(usual), {key: value for key, value in keys.items() if value is not None}


def write(kind: str, folder: Path) -> Any:
    """A random checkpoint of the type, and transformers' model of it."""
    fault: Exception | None = None
    for cls, keys in configurations(kind):
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
    """`check(kind, size)`: every kind of step equals transformers' forward."""

    def check(kind, size):
        oracle = write(kind, tmp_path)
        steps = script(TEXTS, part, build_step)

        def work(collective):
            model = load_model(tmp_path, device=CPU, collective=collective)
            cache = model.new_cache(num_blocks=24, block_size=BLOCK)
            return [model.forward(step, cache) for step, _ in steps]

        for logits in run_ranks(size, work):
            for mine, (_, expected) in zip(logits, steps, strict=True):
                wanted = torch.stack([full_logits(oracle, text)[row] for text, row in expected])
                torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-3)

    return check


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", sorted(TESTED - spec._READERS.keys()))
def test_every_type_that_is_claimed(check, kind, size):
    check(kind, size)


@pytest.mark.parametrize("kind", ["glm4", "olmo3", "laguna"])
def test_some_types(check, kind):
    """The last one is compared when it is loaded."""
    check(kind, 1)


def test_the_family_is_tested_by_its_own_tests():
    assert spec._READERS.keys() <= TESTED
    assert all(kind in CONFIG_MAPPING for kind in TESTED)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("camembert", "are not those of transformers' own forward"),  # sees what follows
        ("diffllama", "are not those of transformers' own forward"),  # two softmaxes
        ("olmo_hybrid", "keep a state other than keys and values"),
        ("falcon", "its attention cannot be replaced"),
        ("stablelm", "is not a causal language model that can be served"),
    ],
)
def test_a_type_whose_forward_would_be_wrong_is_refused(tmp_path, kind, why):
    write(kind, tmp_path)
    with pytest.raises(CheckpointError, match=why):
        load_model(tmp_path, device=CPU, collective=Collective.single())


def test_several_ranks_of_a_type_without_a_test_are_refused():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 2 ranks of a 'laguna' model"):
        check_type("laguna", 2)
    check_type("laguna", 1)
    check_type("llama", 2)
    check_type("of_its_own_code", 2)
