"""A KV cache of one-byte floats: no drafter, batch or replay changes what a target says with it."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.config import EngineConfig
from outrider.engine.estimate import estimate
from outrider.errors import CheckpointError, ConfigError
from outrider.workers.attention import KV_FORMATS, KVCode, KVShape, coded_layers
from outrider.workers.collective import Collective
from outrider.workers.device_step.service import obstacle
from outrider.workers.model.checkpoint.weights import Checkpoint
from outrider.workers.model.target import load_model

from ..helpers.device_step.ops import TensorOps
from ..helpers.engines import complete, engine_of, random_prompts
from ..helpers.head_files import eagle_tensors, write_eagle
from ..helpers.hybrid import VOCAB, write_hybrid
from ..helpers.models import with_scales, write_guessable
from ..workers.model.conftest import checkpoint  # noqa: F401

PROMPTS = random_prompts(5, 90, longest=40)
PROMPTS.append([*PROMPTS[0][:16], 5, 7])  # a prefix hit
SMALL = {"block_size": 4, "num_kv_blocks": 44, "max_num_batched_tokens": 24}
FP8 = {"kv_cache_dtype": "fp8", "deterministic": True}
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 8}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder, and what it says with each format."""
    folder, texts = write_guessable(tmp_path_factory.mktemp("target"), 3, others=0.8), {}
    for name in ("auto", "fp8_e4m3", "fp8_e5m2"):
        with engine_of(folder, **{**FP8, "kv_cache_dtype": name}) as engine:
            texts[name] = complete(engine, PROMPTS, at_once=1)[0]
    return folder, texts


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    return write_eagle(tmp_path_factory.mktemp("head") / "head", *eagle_tensors(target[0], 3))


def test_it_is_another_cache(target):
    texts = list(target[1].values())
    assert len({json.dumps(text) for text in texts}) == 3


@pytest.mark.parametrize("form", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["lookup", "tree", "head", "head tree", "separate head", "model"])
def test_no_drafter_changes_what_is_said(target, head, name, form):
    """In chunks, with prefix hits, preemptions and replays."""
    folder, texts = target
    own = {"decoding_type": "Eagle", "speculative_model": str(head), "max_draft_len": 3}
    section = {
        "lookup": {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 1},
        "tree": {"decoding_type": "Suffix", "shape": "tree", "max_draft_len": 6},
        "head": own,
        "head tree": {**own, **TREE},
        "separate head": {**own, "placement": "separate"},
        "model": {"decoding_type": "DraftTarget", "speculative_model": folder, "max_draft_len": 3},
    }[name]
    with engine_of(folder, section, **{**FP8, "kv_cache_dtype": form, **SMALL}) as engine:
        found, last = complete(engine, PROMPTS)
        assert engine.stats()["requests"]["num_preemptions"] > 0
    assert found == texts[form]
    assert name == "head" or any(each.usage.num_accepted_tokens for each in last.values())


@pytest.mark.parametrize("form", ["fp8_e4m3", "fp8_e5m2"])
def test_the_bridge_and_other_batches_say_the_same(target, form):
    folder, texts = target
    for options in ({"forward": "bridge"}, {}, {"tensor_parallel_size": 2}):
        with engine_of(folder, kv_cache_dtype=form, **options) as engine:
            found = complete(engine, PROMPTS)[0]
        same = sum(found[key] == text for key, text in texts[form].items())
        assert same >= len(texts[form]) - 1  # a sum's last bit may move a number to the next code


def test_layers_beside_those_that_keep_states(tmp_path):
    folder = write_hybrid(tmp_path / "hybrid", "qwen3_next")
    prompts = random_prompts(4, VOCAB, seed=3)
    with engine_of(folder, **FP8) as engine:
        expected = complete(engine, prompts, at_once=1)[0]
    section = {"decoding_type": "Suffix", "shape": "tree", "max_draft_len": 6}
    with engine_of(folder, section, **FP8, **{**SMALL, "num_kv_blocks": 60}) as engine:
        assert complete(engine, prompts)[0] == expected


def test_bytes_of_a_token(target):
    """Of the workers, of the estimate, and where a draft model has the target's dtype."""
    folder, _ = target
    draft = {"decoding_type": "DraftTarget", "speculative_model": folder, "max_draft_len": 2,
             "placement": "colocated"}  # fmt: skip
    wanted = 3 * 2 * 2 * 8  # layers, keys and values, heads, their size
    blocks = []
    for name, itemsize in (("auto", 4), ("fp8", 1)):
        options = {"dtype": "float32", "kv_cache_dtype": name, "executor": "local"}
        data = {"model": folder, "speculative_config": draft, **options}
        group, *_ = estimate(EngineConfig.load(data), 0)
        assert group.rank.kv_per_token == wanted * (itemsize + 4)
        with engine_of(
            folder, draft, kv_cache_dtype=name, num_kv_blocks=None, kv_cpu_bytes=1 << 20,
            max_num_seqs=256,
        ) as engine:  # fmt: skip
            blocks.append(engine.stats()["kv"]["num_blocks"])
    assert blocks == [(1 << 20) // (16 * wanted * size) for size in (8, 5)]


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj__output_scale", "v_proj__output_scale"),
              ("attn__k_scale", "attn__v_scale"), ("k_proj__k_scale", "v_proj__v_scale")],
)  # fmt: skip
def test_scales_of_a_checkpoint_are_read(target, tmp_path, names):
    folder = with_scales(target[0], tmp_path / "scaled", **dict(zip(names, (0.02, [0.5]))))
    scales = Checkpoint(folder).kv_scales()
    assert scales == {1: (pytest.approx(0.02), 0.5)}
    with engine_of(str(folder), **{**FP8, "kv_cache_dtype": "auto"}) as engine:
        assert complete(engine, PROMPTS, at_once=1)[0] == target[1]["auto"]
    if names[0] != "k_scale":
        return
    with engine_of(str(folder), **FP8) as engine:
        assert complete(engine, PROMPTS, at_once=1)[0] != target[1]["fp8_e4m3"]


@pytest.mark.parametrize("scale", [0.0, float("nan"), [0.5, 0.5]])
def test_a_scale_that_is_none_is_refused(target, tmp_path, scale):
    folder = with_scales(target[0], tmp_path / "scaled", k_scale=scale)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_scale.*one number above 0"):
        Checkpoint(folder).kv_scales()


def test_codes_that_are_no_whole_words_have_no_device_step(checkpoint):  # noqa: F811
    """Drafts' nodes are moved in words of 4 bytes there."""
    model = load_model(
        checkpoint("llama")[0], device=torch.device("cpu"), collective=Collective.single(),
        ops=TensorOps(),
    )  # fmt: skip
    code = KVCode(KV_FORMATS["fp8_e4m3"])
    for head_dim, reason in ((8, ""), (7, "whole words of 4 bytes")):
        shape = KVShape(2, head_dim, 8)
        for codes in ([], [code]):
            model.kv_shapes = coded_layers([shape], codes)[0] if codes else (shape,)
            assert (reason if codes else "") in obstacle(model, "coupled")
            assert bool(obstacle(model, "coupled")) == bool(codes and reason)


def test_what_is_not_read_is_refused(target):
    for name in ("int8", "nvfp4", "bfloat16", 8):
        with pytest.raises(ConfigError, match=r"^kv_cache_dtype: .*fp8_e4m3"):
            EngineConfig.load({"model": target[0], "kv_cache_dtype": name})
    with pytest.raises(ConfigError, match=r"cache_type_k.*kv_cache_dtype: fp8"):
        EngineConfig.load({"model": target[0], "cache_type_k": "q8_0"})


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"kv_cache_dtype": "fp8"}, "fp8_e4m3"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_dtype": None}, "auto"),
        ({"kv_cache_config": {"dtype": "fp8"}}, "fp8_e4m3"),
        ({"kv_cache_config": {"dtype": "auto"}}, "auto"),
        ({}, "auto"),
    ],
)
def test_other_engines_names(given, ours):
    assert EngineConfig.load({"model": "m", **given}).kv_cache_dtype == ours
