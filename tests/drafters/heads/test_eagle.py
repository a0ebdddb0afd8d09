"""EAGLE: drafts against the equations written out, exactness, trees, files."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.config import Eagle3Config, EagleConfig, EngineConfig, parse
from outrider.drafters.heads.llama import Rope
from outrider.errors import CheckpointError, ConfigError
from outrider.tests.helpers.drafts import drafts_seen
from outrider.tests.helpers.eagle import LLAMA4_ONE, PROMPTS, SHAPES, Reference, section
from outrider.tests.helpers.head_files import eagle_tensors, joined_first, write_eagle
from outrider.tests.helpers.models import write_guessable
from outrider.tests.helpers.mtp import random_model, target_config

from ...helpers.engines import (
    check_plain_tokens,
    complete,
    engine_of,
    plain_outputs,
    random_prompts,
)

CAPTURE = (2, 3, 3)  # of six layers; two of them alike, as small targets have it
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "norm_before_residual": True,
    "norm_output": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
}
KIMI = {  # as a head for Kimi-K2 has it, EAGLE-3.1
    "norm_output": True,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "rope_theta": 50.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 0.5,
        "mscale_all_dim": 1.0,
    },
}
# Overrides of what a checkpoint says, by case; the reference obeys them too.
OVERRIDES = {
    "one-llama4-pre": {"recycle": "pre_norm", "rope_layout": "half", "rope_theta": 300.0},
    "three-interleaved": {"rope_layout": "interleaved", "rope_theta": 300.0},
    "three-recycled": {"recycle": "post_norm", "norm_before_residual": True},
}
CASES = {
    "one": (1, {}),
    "one-norms": (1, {"para_norm": True, "fc_bias": False, "num_layers": 2}),
    "three": (3, {}),
    "three-d2t": (3, {"draft_vocab": 80}),
    "three-norms": (
        3,
        {
            "fc_norm": True,
            "qk_norm": True,
            "layer": "layers.0",
            "config": {"norm_before_residual": True, "rope_theta": 500.0},
        },
    ),
    "three-deep": (3, {"num_layers": 2, "norm_before_fc": True, "layer": "layers.0"}),
    "three-narrow": (3, {"hidden_size": 32}),
    "one-llama4": (1, LLAMA4_ONE | {"draft_vocab": 80}),
    "one-llama4-deep": (1, LLAMA4_ONE | {"num_layers": 2}),
    "one-llama4-pre": (1, LLAMA4_ONE),
    "three-interleaved": (3, {"qk_norm": True}),
    "three-recycled": (3, {}),
    "three-additional": (
        3,
        {"num_layers": 2, "later": "additional_layers.{}", "norm_name": "hidden_norm"},
    ),
    "three-joined": (3, {"config": {"model_type": "llama4_text", "rope_theta": 10000.0}}),
    "three-latent": (3, {"query_rank": 64, "draft_vocab": 80, "fc_norm": True, "config": KIMI}),
    "three-latent-deep": (
        3,
        {
            "query_rank": 0,
            "num_layers": 2,
            "layer": "layers.0",
            "config": {"rope_interleave": False, "norm_before_residual": True},
        },
    ),
    "speculators": (3, {"layer": "layers.0", "embed": True, "config": SPECULATORS}),
}


@pytest.fixture(scope="session")
def six(tmp_path_factory) -> str:
    return write_guessable(
        tmp_path_factory.mktemp("six") / "target", bos_token_id=0, eos_token_id=1
    )


@pytest.fixture(scope="session")
def heads(six, tmp_path_factory):
    """By case: folder, reference."""
    made = {}
    for name, (version, options) in CASES.items():
        config, tensors = eagle_tensors(six, version, **options)
        capture = CAPTURE
        if name == "speculators":
            layer = {key: config[key] for key in list(config) if key not in SPECULATORS}
            config = SPECULATORS | {"transformer_layer_config": layer}
            capture = (1, 3, 5)
        if name == "three-joined":
            tensors = joined_first(tensors)
        folder = write_eagle(tmp_path_factory.mktemp("eagle") / name, config, tensors)
        told = as_told(name, config)
        made[name] = folder, Reference(six, told, tensors, version, capture)
    return made


def as_told(case: str, config: dict) -> dict:
    """What the reference is to compute: EAGLE-1's Llama-4 heads turn neighbours."""
    layout = {"rope_layout": "interleaved"} if case.startswith("one-llama4") else {}
    chosen = OVERRIDES.get(case, {})
    return {**config, **layout, **chosen, "norm_output": is_recycled_normed(config, chosen)}


def is_recycled_normed(config: dict, chosen: dict) -> bool:
    return config.get("norm_output", False) or chosen.get("recycle") == "post_norm"


def paths_of(tokens, parents):
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.mark.parametrize("case", CASES)
def test_chains_follow_the_equations(six, heads, case, monkeypatch):
    """Chunked prefill, batches and accepted nodes: the head's cache holds what it should."""
    folder, reference = heads[case]
    seen, _ = drafts_seen(
        monkeypatch,
        six,
        section(folder, max_draft_len=3, **OVERRIDES.get(case, {})),
        PROMPTS,
        max_tokens=20,
        max_num_batched_tokens=9,
        block_size=4,
    )
    for text, tokens, parents in seen:
        assert parents == list(range(-1, len(parents) - 1))
        assert tokens == reference.chain(text, len(tokens))


@pytest.mark.parametrize("case", ["one", "three-d2t"])
def test_fixed_trees_follow_the_equations(six, heads, case, monkeypatch):
    folder, reference = heads[case]
    choices = [[0, 0, 0], [0, 1], [1, 0], [2]]
    config = parse(EagleConfig, section(folder, eagle_choices=choices))
    seen, _ = drafts_seen(
        monkeypatch, six, section(folder, eagle_choices=choices), PROMPTS, max_tokens=20
    )
    for text, tokens, parents in seen:
        nodes = list(config.nodes)
        assert tokens == reference.fixed(text, nodes)[: len(tokens)]
        places = {node: index for index, node in enumerate(nodes)}
        assert parents == [places.get(node[:-1], -1) for node in nodes][: len(parents)]


@pytest.mark.parametrize("case", ["one", "three", "three-d2t", "three-latent"])
def test_dynamic_trees_follow_the_equations(six, heads, case, monkeypatch):
    folder, reference = heads[case]
    fields = {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": 3,
        "max_draft_len": 3,
        "max_total_draft_tokens": 9,
    }
    seen, stats = drafts_seen(monkeypatch, six, section(folder, **fields), PROMPTS, max_tokens=20)
    assert stats["drafters"]["eagle"]["num_acc_tokens"] > 0
    whole = [each for each in seen if len(each[1]) == 9]
    assert len(whole) > 5
    for text, tokens, parents in whole:
        assert paths_of(tokens, parents) == reference.dynamic(text, 3, 3, 9)


@pytest.mark.parametrize("case", ["one", "three"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_preempted_and_cached_sequences_keep_their_rows(six, heads, case, tree, monkeypatch):
    """Rows that moved, were computed again, or came with a cached prefix are the right ones."""
    folder, reference = heads[case]
    fields = {"use_dynamic_tree": tree, "max_draft_len": 2}
    if tree:
        fields |= {"dynamic_tree_max_topK": 4}
    prompts = [list(range(2, 11)) + prompt for prompt in PROMPTS] * 2
    small = {"block_size": 4, "num_kv_blocks": 15, "max_model_len": 60}
    seen, stats = drafts_seen(
        monkeypatch, six, section(folder, **fields), prompts, 20, max_num_batched_tokens=32, **small
    )
    assert stats["requests"]["num_hit_tokens"] > 0
    assert stats["requests"]["num_preemptions"] > 0
    assert stats["drafters"]["eagle"]["num_acc_tokens"] > 0
    for text, tokens, parents in seen:
        if not tree:
            assert tokens == reference.chain(text, len(tokens))
        elif len(tokens) == 20:
            assert paths_of(tokens, parents) == reference.dynamic(text, 4, 2, 20)


@pytest.mark.parametrize(
    ("case", "shape", "tensor_parallel_size"),
    [
        *((case, shape, 1) for case in ("one", "three-d2t", "three-latent") for shape in SHAPES),
        ("three-latent-deep", "chain", 2),
        pytest.param("one", "chain", 2, marks=pytest.mark.slow),
        pytest.param("three-d2t", "dynamic", 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_a_drafter(six, heads, case, shape, tensor_parallel_size):
    fields = section(heads[case][0], **SHAPES[shape])
    check_plain_tokens(six, fields, tensor_parallel_size=tensor_parallel_size)


def test_latents_of_target_and_head(tmp_path):
    """Both keep latents, in layers of one cache; ranks share the head's weights."""
    target = str(tmp_path / "target")
    random_model(target_config("deepseek"), seed=1).save_pretrained(target)
    config, tensors = eagle_tensors(target, 3, query_rank=32, config=KIMI)
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 1]
    folder = write_eagle(tmp_path / "head", config, tensors)
    prompts = random_prompts(6, 96, longest=16)
    (greedy,) = plain_outputs(target, prompts, {"max_tokens": 24})
    for size in (1, 2):
        fields = section(folder, max_draft_len=3)
        with engine_of(target, fields, tensor_parallel_size=size) as engine:
            assert complete(engine, prompts, max_tokens=24)[0] == greedy
            stats = engine.stats()
        (head,) = stats["heads"]
        assert head["layers"] == "operations", head
        assert stats["drafters"]["eagle"]["num_acc_tokens"] > 0


def test_yarn_is_that_of_transformers():
    section_ = {**KIMI["rope_scaling"], "rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0}
    for more in ({}, {"truncate": False}, {"mscale": None}, {"attention_factor": 0.9}):
        given = section_ | more
        config = LlamaConfig(head_dim=64, max_position_embeddings=8192, rope_parameters=given)
        wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        rope = Rope(64, 5e4, given)
        torch.testing.assert_close(rope.frequencies, wanted)
        assert rope.scale == pytest.approx(scale)


def test_with_rejection_greedy_stays_greedy(six, heads):
    fields = section(heads["three"][0], max_draft_len=3, verification="rejection")
    (wanted,) = plain_outputs(six, PROMPTS, {})
    with engine_of(six, fields) as engine:
        assert complete(engine, PROMPTS)[0] == wanted
        complete(engine, PROMPTS, temperature=0.9)
        assert engine.stats()["drafters"]["eagle"]["faults"] == 0


def test_what_is_wrong_with_a_file_is_named(six, tmp_path):
    config, tensors = eagle_tensors(six, 3, draft_vocab=40)
    d2t = tensors["d2t"]
    cases = {
        "missing": ("norm.weight", None, r"lacks tensor 'norm\.weight' of shape \[64\]"),
        "surplus": ("other.weight", torch.ones(2), r"does not have: other\.weight"),
        "fc": ("fc.weight", torch.ones(64, 128), r"\[64, 128\], expected \[64, 192\]"),
        "outside": ("d2t", d2t + 96, "'d2t'.*outside the target's 96"),
        "twice": ("d2t", d2t - torch.arange(40), "'d2t'"),
        "t2d": ("t2d", torch.ones(96, dtype=torch.bool), "'t2d' and 'd2t'"),
    }
    for name, (tensor, value, message) in cases.items():
        changed = {key: each for key, each in tensors.items() if key != tensor}
        if value is not None:
            changed[tensor] = value
        folder = write_eagle(tmp_path / name, config, changed)
        with pytest.raises(CheckpointError, match=message), engine_of(six, section(folder)):
            pass
    folder = write_eagle(tmp_path / "config", {}, tensors)
    with (
        pytest.raises(CheckpointError, match="num_attention_heads"),
        engine_of(six, section(folder)),
    ):
        pass
    one = write_eagle(tmp_path / "one", *eagle_tensors(six, 1))
    fields = section(one) | {"decoding_type": "Eagle3"}
    with pytest.raises(CheckpointError, match="EAGLE-1"), engine_of(six, fields):
        pass


def test_what_is_wrong_with_latents_is_named(six, tmp_path):
    config, tensors = eagle_tensors(six, 3, query_rank=64, config=KIMI)
    attention = "midlayer.self_attn."
    cases = {
        "kv_b_proj.weight": (None, r"lacks tensor 'midlayer\.self_attn\.kv_b_proj\.weight'"),
        "q_b_proj.weight": (torch.ones(90, 64), r"q_b_proj\.weight' \[90, 64\].*of 4 heads"),
        "kv_a_proj_with_mqa.weight": (torch.ones(64, 128), r"\[64, 128\].*do not fit together"),
        "kv_a_layernorm.weight": (torch.ones(3), r"kv_a_layernorm.*\[3\], expected \[64\]"),
        "q_a_proj.weight": (torch.ones(64, 64), r"q_a_proj.*\[64, 64\], expected \[64, 128\]"),
    }
    for name, (value, message) in cases.items():
        changed = {key: each for key, each in tensors.items() if key != attention + name}
        if value is not None:
            changed[attention + name] = value
        folder = write_eagle(tmp_path / name, config, changed)
        with pytest.raises(CheckpointError, match=message), engine_of(six, section(folder)):
            pass
    other = {"rope_scaling": KIMI["rope_scaling"] | {"factor": None}}
    folder = write_eagle(tmp_path / "factor", config | other, tensors)
    with pytest.raises(CheckpointError, match="factor"), engine_of(six, section(folder)):
        pass
    folder = write_eagle(tmp_path / "masks", config, tensors)
    fields = section(folder) | {"decoding_type": "PEagle"}
    with pytest.raises(CheckpointError, match=r"kv_a_proj_with_mqa.*only EAGLE-3 heads"):
        engine_of(six, fields).__enter__()


def test_layers_to_capture_outside_the_target_are_named(tiny, tmp_path):
    folder = write_eagle(tmp_path / "head", *eagle_tensors(tiny.target, 3))
    with (
        pytest.raises(CheckpointError, match="eagle3_layers_to_capture"),
        engine_of(tiny.target, section(folder)),
    ):
        pass


def test_other_spellings():
    vllm = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    config = EngineConfig.load({"model": "m", "speculative_config": vllm}).speculative_config
    assert isinstance(config, Eagle3Config)
    assert config.max_nodes == 3
    trtllm = {"speculative_model": "h", "max_draft_len": 3}
    assert parse(EagleConfig, trtllm).max_nodes == 3
    dynamic = {"speculative_model": "h", "use_dynamic_tree": True, "max_draft_len": 7}
    assert parse(EagleConfig, dynamic).max_nodes == 10 * 7
    assert parse(EagleConfig, dynamic | {"max_total_draft_tokens": 59}).max_nodes == 59


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"eagle_choices": [[0], [0, 0, 0]]}, r"path \[0, 0, 0\] has no parent"),
        ({"eagle_choices": [[0, 0, 0]], "max_draft_len": 2}, r"path \[0, 0, 0\] is 3 deep"),
        ({"eagle_choices": [[0]], "use_dynamic_tree": True}, "give one"),
        ({"max_total_draft_tokens": 5}, "use_dynamic_tree"),
        ({"use_dynamic_tree": True, "max_total_draft_tokens": 2}, "max_total_draft_tokens"),
    ],
)
def test_what_contradicts_is_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        parse(EagleConfig, {"speculative_model": "h", **fields})
