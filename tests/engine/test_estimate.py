"""Estimates of memory against what loading takes, and what each placement adds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import outrider
from outrider.config import EngineConfig
from outrider.drafters.heads.block import materialise_constants
from outrider.engine.estimate import estimate
from outrider.tests.helpers.head_files import eagle_tensors, write_eagle
from outrider.tests.helpers.mtp import Made
from outrider.workers.device_step.seats import BYTES_PER_GRAPH
from outrider.workers.model.bridge import build_meta, tp_hints
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.info import model_heads, read_model
from outrider.workers.model.sharding import ShardPlan, plan_shards, plan_vocabulary
from outrider.workers.model.target import load_weights, tied_names

MODELS = Path(outrider.__file__).resolve().parent / "demo" / "models"
CPU = torch.device("cpu")


def config(**keys) -> EngineConfig:
    return EngineConfig.load({"model": str(MODELS / "target"), "device": "cpu", **keys})


def head(name: str, method: str, **keys) -> dict:
    folder = str(MODELS / name)
    return {"decoding_type": method, "speculative_model": folder, "max_draft_len": 3, **keys}


def loaded_bytes(folder: Path, size: int, rank: int) -> int:
    """Of the weights that a rank has after loading."""
    model_config, info = read_model(folder, size)
    model = build_meta(model_config, info.dtype, trust_remote_code=False)
    heads, plan = model_heads(model_config, rank, size), ShardPlan()
    if size > 1:
        plan = plan_shards(model, heads, tp_hints(model))
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        plan_vocabulary(plan, model, *ends, rank, size)
    materialise_constants(model, CPU)
    load_weights(model, Checkpoint(folder), plan, CPU, rank)
    tied = tied_names(model)
    state = model.state_dict().items()
    return sum(each.numel() * each.element_size() for name, each in state if name not in tied)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_are_what_a_rank_loads(size):
    (group,) = estimate(config(tensor_parallel_size=size), num_gpus=0)
    for rank in range(size):
        assert group.bytes_of(rank).weights == loaded_bytes(MODELS / "target", size, rank)


def test_the_cache_holds_as_many_full_sequences_as_may_run():
    (group,) = estimate(config(max_model_len=100, max_num_seqs=3, block_size=16), num_gpus=0)
    assert (group.rank.min_tokens, group.rank.max_tokens) == (112, 336)
    assert group.rank.kv_on_cpu == 336 * group.rank.kv_per_token
    (fixed,) = estimate(config(num_kv_blocks=20, block_size=16, max_model_len=100), num_gpus=0)
    assert fixed.rank.kv_on_cpu == 320 * group.rank.kv_per_token


def test_a_colocated_draft_model_is_in_the_target_s_ranks():
    (alone,) = estimate(config(num_kv_blocks=20), num_gpus=0)
    section = head("draft", "DraftTarget", placement="colocated", num_kv_blocks=20)
    (both,) = estimate(config(num_kv_blocks=20, speculative_config=section), num_gpus=0)
    assert both.rank.weights - alone.rank.weights == loaded_bytes(MODELS / "draft", 1, 0)
    extra = both.rank.kv_per_token - alone.rank.kv_per_token
    assert both.rank.fixed_kv_bytes == 320 * (alone.rank.kv_per_token + extra)


def test_a_draft_model_s_graphs_are_where_it_is():
    gpu = {"device": "cuda", "max_num_seqs": 8}
    (alone,) = estimate(config(**gpu), num_gpus=1)

    def graphs(**keys) -> list[int]:
        section = head("draft", "DraftTarget", **keys)
        return [each.rank.graphs for each in estimate(config(speculative_config=section, **gpu), 2)]

    (both,) = graphs(placement="colocated")
    target, draft = graphs(placement="separate")
    assert (both - target, target) == (draft, alone.rank.graphs)
    assert draft > 20 * BYTES_PER_GRAPH
    assert graphs(placement="separate", verification="rejection") == [target, 0]


def test_a_separate_draft_model_is_a_group():
    section = head("draft", "DraftTarget", placement="separate", draft_tensor_parallel_size=2)
    target, draft = estimate(config(speculative_config=section), num_gpus=0)
    assert (target.role, draft.role, draft.size, draft.drafts) == ("target", "draft model", 2, True)
    assert draft.rank.weights == loaded_bytes(MODELS / "draft", 2, 0)
    assert draft.field == "speculative_config.draft_tensor_parallel_size"


def test_a_head_is_on_rank_0_with_the_whole_ends_unless_steps_are_the_device_s():
    section = head("eagle3", "Eagle3")
    (alone,) = estimate(config(tensor_parallel_size=2), num_gpus=0)
    (group,) = estimate(config(tensor_parallel_size=2, speculative_config=section), num_gpus=0)
    assert (group.bytes_of(1), group.bytes_of(1).heads) == (alone.rank, 0)
    assert group.bytes_of(0).heads > 0
    assert group.bytes_of(0).kv_per_token > alone.rank.kv_per_token
    on_gpu = config(tensor_parallel_size=2, speculative_config=section, device="cuda")
    (every,) = estimate(on_gpu, num_gpus=2)
    assert every.first is None
    assert every.rank.graphs > 0
    assert 0 < every.rank.heads < group.bytes_of(0).heads  # no copies of what is sharded


def test_a_separate_head_has_the_ends_to_itself():
    section = head("mtp", "MTP", placement="separate")
    target, apart = estimate(config(device="cuda", speculative_config=section), num_gpus=2)
    (alone,) = estimate(config(device="cuda"), num_gpus=2)
    states = target.rank.graphs - alone.rank.graphs  # which steps leave for it
    assert 0 < states < alone.rank.graphs // 10
    assert apart.follows_target
    assert apart.drafts
    assert apart.rank.heads > loaded_bytes(MODELS / "target", 1, 0) // 20
    assert apart.rank.kv_per_token > 0


def test_heads_over_latents_keep_latents(tmp_path):
    """As their ranks do: expanded where the operations do not share them among heads."""
    made = Made(tmp_path / "made", "deepseek", 2)
    for keys, of_modules in (({}, 2 * 24), ({"deterministic": True}, 2 * 4 * (16 + 12))):
        options = {"model": made.folder, "device": "cpu", "dtype": "bfloat16", **keys}
        (alone,) = estimate(EngineConfig.load(options), num_gpus=0)
        section = {"decoding_type": "MTP", "max_draft_len": 2}
        (both,) = estimate(EngineConfig.load({**options, "speculative_config": section}), 0)
        wanted = of_modules + 32  # and the first one's feature
        assert both.rank.kv_per_token - alone.rank.kv_per_token == 2 * wanted
    config, tensors = eagle_tensors(made.folder, 3, query_rank=32)
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 1]
    section = {"speculative_model": write_eagle(tmp_path / "head", config, tensors)}
    options = {"model": made.folder, "device": "cpu", "dtype": "bfloat16"}
    (alone,) = estimate(EngineConfig.load(options), num_gpus=0)
    with_head = {**options, "speculative_config": {"decoding_type": "Eagle3", **section}}
    (both,) = estimate(EngineConfig.load(with_head), num_gpus=0)
    assert both.rank.kv_per_token - alone.rank.kv_per_token == 2 * (32 + 8)


@pytest.mark.parametrize("kind", ["glm", "qwen", "ernie"])
def test_modules_with_experts_in_float32_take_twice_the_bytes(kind, tmp_path):
    """Their layer is run without weights, on a device that multiplies experts in bfloat16 alone."""
    (tmp_path / "made").mkdir()
    section = {"decoding_type": "MTP", "max_draft_len": 1}
    options = {"model": Made(tmp_path / "made", kind, 1).folder, "device": "cpu"}
    narrow, wide = [
        estimate(EngineConfig.load({**options, "dtype": dtype, "speculative_config": section}), 0)[
            0
        ].rank.kv_per_token
        for dtype in ("bfloat16", "float32")
    ]
    assert wide == 2 * narrow > 0


@pytest.mark.parametrize("size", [1, 2])
def test_stages_hold_the_model_together(size):
    """Each its layers; the embedding is the first stage's, the output layer the last one's."""
    (whole,) = estimate(config(tensor_parallel_size=size), num_gpus=0)
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": 2}
    (group,) = estimate(config(**sizes), num_gpus=0)
    assert (group.size, group.num_stages, group.field) == (2 * size, 2, "pipeline_parallel_size")
    last, first = group.bytes_of(0), group.bytes_of(2 * size - 1)
    assert first == group.bytes_of(size)
    assert last == group.bytes_of(size - 1)
    assert last.kv_per_token + first.kv_per_token == whole.rank.kv_per_token
    model_config, info = read_model(MODELS / "target", size)
    twice = 4 * info.hidden_size  # the final norm, and perhaps a tied embedding, are in both
    if model_config.tie_word_embeddings:
        twice += info.vocab_size * info.hidden_size * info.dtype.itemsize // size
    extra = last.weights + first.weights - whole.rank.weights
    assert 0 < extra <= twice


def test_a_head_is_on_the_last_stage():
    section = head("eagle3", "Eagle3")
    options = {"pipeline_parallel_size": 2, "device": "cuda", "speculative_config": section}
    (group,) = estimate(config(**options), num_gpus=2)
    assert group.bytes_of(0).heads > 0
    assert group.bytes_of(1).heads == 0
    assert group.bytes_of(0).graphs == group.bytes_of(1).graphs == 0  # no device step
