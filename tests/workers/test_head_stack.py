"""MTP's layers on the family decoder: transformers' numbers, and its layers where they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.config import MTPConfig, parse
from outrider.drafters.heads.block import REFUSED, materialise_constants
from outrider.drafters.heads.mtp import MTPModule
from outrider.drafters.heads.protocol import HeadLayer
from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.mtp import GROUPED, MOE, TARGETS, Made, target_config
from outrider.workers import head_layers
from outrider.workers.attention import KVCache, KVShape
from outrider.workers.head_layers import PagedAttend, StackedLayers, stack_layers
from outrider.workers.model.family import spec
from outrider.workers.model.sharding import WHOLE, HeadShards
from outrider.workers.ops import PlannedOps, ReferenceOps, make_ops

CPU, FLOAT = torch.device("cpu"), torch.float32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.2, 2.3],
    "original_max_position_embeddings": 128,
}
LATENT = {
    key: value for key, value in TARGETS["deepseek"].items() if key not in ("model_type", *GROUPED)
}
KINDS = {
    "llama": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "rope_parameters": LONGROPE},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "attn_logit_softcapping": None},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "pad_token_id": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, **MOE},
    "qwen3_next": TARGETS["qwen"],
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_5_moe": {**TARGETS["qwen"], "model_type": "qwen3_5_moe_text"},
    "glm": TARGETS["glm"],
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 8, "use_bias": True},
    "ernie4_5_moe": TARGETS["ernie"],
    "deepseek_v2": {
        **LATENT,
        **GROUPED,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**TARGETS["deepseek"], "rope_parameters": YARN},
    "deepseek_v3-halves": {**TARGETS["deepseek"], "rope_interleave": False, "n_shared_experts": 2},
}
# gpt-oss: sinks; hybrids: no such modules are known
HYBRIDS = {"bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"}
NOT_OF_HEADS = {*REFUSED, "gpt_oss", *HYBRIDS} & set(spec._READERS)


def random_module(keys, **options) -> MTPModule:
    """Weights of which every row counts."""
    torch.manual_seed(0)
    module = MTPModule(target_config("llama", **keys), **options)
    module.to_empty(device="cpu")
    materialise_constants(module.block.whole, CPU)
    module.block.begin(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1))
    return module.eval().requires_grad_(False)


@pytest.fixture
def steps(part, build_step):
    """Chunks and trees of two sequences; the second step reads what the first one stored."""
    tables = [4, 2, 7], [1, 3, 8]
    return (
        build_step([part([0] * 6, 0, tables[0]), part([0] * 3, 0, tables[1])], 4),
        build_step(
            [
                part([0], 6, tables[0], Draft(ints([0] * 4), ints([-1, -1, 1, 2]))),
                part([0, 0], 3, tables[1]),
            ],
            4,
        ),
    )


def stacked(module, kept, planned, shards=WHOLE) -> HeadLayer:
    """What the rank keeps of the module's layer on the stack."""
    found = stack_layers(module, [kept] * (module.layer + 1), planned, FLOAT, shards)
    assert not isinstance(found, str), found
    return found[-1]


@torch.inference_mode()
def outputs(module, kept, steps, planned=None):
    """The module's features and normed outputs, over a cache of its own."""
    shape = KVShape(kept.num_kv_heads, kept.head_dim, kept.value_dim)
    cache = KVCache([shape] * (module.layer + 1), 10, 4, FLOAT, CPU)
    source, found = torch.Generator().manual_seed(1), []
    for step in steps:
        embedded, feature = torch.randn(2, len(step.token_ids), 32, generator=source)
        own = planned or PlannedOps(ReferenceOps())
        attend = PagedAttend(own, own.plan(step, cache), cache, 0)
        positions = torch.from_numpy(step.positions).long()
        found += module(embedded, feature, positions, attend)
    return found


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_familys_layer_is_transformers(kind, pre_norm, steps):
    module = random_module(KINDS[kind], layer=int(pre_norm), pre_norm=pre_norm)
    kept = module.kept()
    wanted = outputs(module, kept, steps)
    planned = PlannedOps(make_ops(CPU, FLOAT))
    assert isinstance(stacked(module, kept, planned), HeadLayer)
    assert isinstance(module.decode, StackedLayers)
    names = {name for name, _ in module.named_parameters()}
    assert names == {"eh_proj.weight", "enorm.weight", "hnorm.weight"}  # no second copy
    for got, want in zip(outputs(module, kept, steps, planned), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


CUT = ("llama", "olmo2", "mixtral", "glm", "qwen3_next", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("kind", CUT)
def test_ranks_divide_a_layer(kind, steps, run_ranks):
    """As those of the target are: weights and keys are halved, and outputs are the whole's."""
    modules = [random_module(KINDS[kind]) for _ in range(3)]
    kept = modules[0].kept()
    wanted = outputs(modules[0], kept, steps)

    def on_rank(group):
        module, planned = modules[1 + group.rank], PlannedOps(make_ops(CPU, FLOAT))
        own = stacked(module, kept, planned, HeadShards(group, 0))
        return own, outputs(module, own, steps, planned)

    for own, found in run_ranks(2, on_rank):
        if "deepseek" in kind:
            assert own.num_kv_heads == 1  # latents are every rank's
        else:
            assert own.num_kv_heads == kept.num_kv_heads // (1 if kind == "olmo2" else 2)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_a_layer_that_ranks_cannot_divide_stays_whole(steps, run_ranks):
    keys = {**KINDS["llama"], "intermediate_size": 47}
    module = random_module(keys)
    kept = module.kept()

    def on_rank(group):
        own, planned = random_module(keys), PlannedOps(make_ops(CPU, FLOAT))
        return stacked(own, kept, planned, HeadShards(group, 0))

    assert run_ranks(2, on_rank) == [kept, kept]


@pytest.mark.parametrize("case", ["differs", "unknown"])
def test_other_layers_stay_modules(case, head_drafts, tmp_path, monkeypatch, caplog):
    """The family has used the weights up where it differs: they are read again."""
    made = Made(tmp_path, "glm" if case == "differs" else "qwen2_moe")
    config = parse(MTPConfig, {"speculative_model": made.folder, "max_draft_len": 3})
    dense, wanted = head_drafts(made.folder, config, dense=True)
    assert dense.module_reason

    described = head_layers.describe

    def wrong(module):
        return replace(described(module), residual_scale=0.5)

    if case == "differs":
        monkeypatch.setattr(head_layers, "describe", wrong)
    head, found = head_drafts(made.folder, config)
    reasons = {
        "differs": "layer 0 differs from its module: relative error",
        "unknown": "'qwen2_moe' is not of the family",
    }
    assert reasons[case] in head.report().layers_reason
    assert head.report().layers == "modules"
    assert head.module_reason in caplog.text
    assert found == wanted
