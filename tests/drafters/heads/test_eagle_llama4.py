"""EAGLE heads of both generations over a served Llama-4; what no head is run with."""

from __future__ import annotations

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from outrider.config import EagleConfig, parse
from outrider.drafters.heads.eagle import read_eagle
from outrider.drafters.heads.protocol import TargetFacts
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle import LLAMA4, LLAMA4_ONE, PROMPTS, SHAPES, Reference, section
from outrider.tests.helpers.head_files import eagle_tensors, joined_first, write_eagle

from ...helpers.engines import complete, engine_of, random_prompts

TEXTS = [list(range(2, 14)) + prompt for prompt in random_prompts(8, 96, longest=16)]


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> str:
    """Chunks of eight tokens, layers without rotary positions, experts in every other layer."""
    folder = tmp_path_factory.mktemp("four") / "target"
    torch.manual_seed(1)
    model = Llama4ForCausalLM(
        Llama4TextConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=48,
            intermediate_size_mlp=96,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 1, 0, 1, 1, 0],
            attention_chunk_size=8,
            floor_scale=4,
            attn_scale=0.5,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=None,
            initializer_range=0.15,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            for name, weight in layer.feed_forward.named_parameters():
                if "down_proj" in name:
                    weight.mul_(0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def heads(four, tmp_path_factory):
    """By generation: folder, reference."""
    folder = tmp_path_factory.mktemp("heads")
    one, stored = eagle_tensors(four, 1, **LLAMA4_ONE)
    named = {name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in stored.items()}
    three, tensors = eagle_tensors(four, 3, config={"model_type": "llama4_text"})
    tensors = joined_first(tensors)
    told = one | {"rope_layout": "interleaved"}
    return {
        "one": (write_eagle(folder / "one", one, named), Reference(four, told, stored, 1)),
        "three": (
            write_eagle(folder / "three", three, tensors),
            Reference(four, three | {"rope_theta": 500_000.0}, tensors, 3, (2, 3, 3)),
        ),
    }


@pytest.fixture(scope="module")
def plain(four):
    """What is emitted without a drafter, greedy and sampled."""
    with engine_of(four) as engine:
        greedy, _ = complete(engine, TEXTS, max_tokens=20)
        return greedy, complete(engine, TEXTS, max_tokens=20, temperature=0.8)[0]


@pytest.mark.parametrize("generation", ["one", "three"])
def test_chains_follow_the_equations(four, heads, generation, monkeypatch):
    folder, reference = heads[generation]
    seen, _ = drafts_seen(
        monkeypatch,
        four,
        section(folder, max_draft_len=3),
        PROMPTS,
        max_tokens=20,
        max_num_batched_tokens=9,
        block_size=4,
    )
    for text, tokens, _ in seen:
        assert tokens == reference.chain(text, len(tokens))


@pytest.mark.parametrize(
    ("generation", "shape", "tensor_parallel_size"),
    [
        ("one", "dynamic", 1),
        ("three", "chain", 1),
        ("one", "dynamic", 2),
        pytest.param("three", "chain", 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_a_drafter(
    four, heads, plain, generation, shape, tensor_parallel_size
):
    """Alone and eight at once, across chunks of attention, preempted, with prefix hits."""
    greedy, sampled = plain
    options = {"max_num_batched_tokens": 32, "block_size": 4, "num_kv_blocks": 18}
    options |= {"tensor_parallel_size": tensor_parallel_size, "max_model_len": 64}
    with engine_of(four, section(heads[generation][0], **SHAPES[shape]), **options) as engine:
        assert complete(engine, TEXTS, max_tokens=20)[0] == greedy
        hot = complete(engine, TEXTS, at_once=1, max_tokens=20, temperature=0.8)[0]
        assert hot == sampled
        stats = engine.stats()
    assert stats["drafters"]["eagle"]["faults"] == 0
    assert stats["drafters"]["eagle"]["num_acc_tokens"] > 0
    assert stats["requests"]["num_hit_tokens"] > 0
    assert stats["requests"]["num_preemptions"] > 0


def test_what_a_head_is_not_run_with_is_named(four, tmp_path):
    config, tensors = eagle_tensors(four, 1, **LLAMA4_ONE)
    asked = {
        "moe_layers": [0],
        "yoco_global_kv_layer": 3,
        "yoco_local_kv_layer": 0,
        "no_rope_layers": 4,
        "floor_scale": 0,
    }
    for key, value in asked.items():
        still = {"no_rope_layers": [0]} if key == "floor_scale" else {}
        folder = write_eagle(tmp_path / key, config | still | {key: value}, tensors)
        with pytest.raises(CheckpointError, match=f"{key} of .* is .*{value!r}".replace("[", ".")):
            engine_of(four, section(folder)).__enter__()
    mixture = tensors | {"layers.0.feed_forward.router.weight": torch.ones(4, 64)}
    folder = write_eagle(tmp_path / "moe", config, mixture)
    with pytest.raises(CheckpointError, match=r"'layers\.0\.mlp\.router.*mixture of experts"):
        engine_of(four, section(folder)).__enter__()


def test_choices_that_a_head_has_no_place_for_are_named(four, tmp_path):
    plain = write_eagle(tmp_path / "one", *eagle_tensors(four, 1))
    config, tensors = eagle_tensors(four, 3)
    joined = write_eagle(tmp_path / "joined", config, joined_first(tensors))
    for folder, fields in [
        (plain, {"recycle": "post_norm"}),
        (plain, {"norm_before_residual": False}),
        (joined, {"norm_before_residual": True}),
    ]:
        key = next(iter(fields))
        with pytest.raises(ConfigError, match=rf"speculative_config\.{key}: .* no meaning") as info:
            engine_of(four, section(folder, **fields)).__enter__()
        assert info.value.field == f"speculative_config.{key}"
    with pytest.raises(ConfigError, match="rope_layout"):
        parse(EagleConfig, {"speculative_model": "h", "rope_layout": "neox"})


def test_layers_without_rotary_positions_are_every_fourth_where_nothing_is_said(four, tmp_path):
    unsaid = {key: value for key, value in LLAMA4.items() if key != "no_rope_layers"}
    options = LLAMA4_ONE | {"num_layers": 4, "config": unsaid}
    folder = write_eagle(tmp_path / "deep", *eagle_tensors(four, 1, **options))
    facts = TargetFacts(64, 96, 6, torch.float32, torch.device("cpu"))
    module = read_eagle(parse(EagleConfig, section(folder)), facts).module
    assert module.no_rope_layers == (3,)
