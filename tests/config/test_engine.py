"""Configuration: three dialects in, one frozen object out; every mistake names its key."""

from __future__ import annotations

import pytest

from outrider.config import DraftTargetConfig, EngineConfig, NGramConfig, NoSpeculation
from outrider.errors import ConfigError

TENSORRT_LLM = """
tensor_parallel_size: 2
max_batch_size: 4
max_num_tokens: 256
max_seq_len: 512
kv_cache_config: {enable_block_reuse: false, tokens_per_block: 32}
speculative_config:
  decoding_type: NGram
  max_draft_len: 3
  max_matching_ngram_size: 4
  is_public_pool: true
  is_keep_all: false
  is_use_oldest: false
"""


def test_tensorrt_llms_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(TENSORRT_LLM)
    config = EngineConfig.load(path, model="m")
    assert (config.tensor_parallel_size, config.max_num_seqs, config.block_size) == (2, 4, 32)
    assert (config.max_num_batched_tokens, config.max_model_len) == (256, 512)
    assert not config.enable_prefix_caching
    assert config.speculative_config == NGramConfig(
        max_draft_len=3,
        max_matching_ngram_size=4,
        is_public_pool=True,
        is_keep_all=False,
        is_use_oldest=False,
    )


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 5,
                "prompt_lookup_min": 2,
            },
            NGramConfig(max_draft_len=3, max_matching_ngram_size=5, min_matching_ngram_size=2),
        ),
        (
            {"model": "d", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 2},
            DraftTargetConfig(speculative_model="d", max_draft_len=5, draft_tensor_parallel_size=2),
        ),
        (None, NoSpeculation()),
    ],
)
def test_vllms_json(section, wanted):
    config = EngineConfig.load({"model": "m", "speculative_config": section})
    assert config.speculative_config == wanted


NGRAM = {"decoding_type": "NGram"}
BAD = [
    ({}, "model", "required"),
    ({"tensor_paralel_size": 2}, "tensor_paralel_size", "did you mean 'tensor_parallel_size'"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size", "got 0"),
    ({"resources": {"cpus": 1}}, "resources.cpus", "cpus_per_worker"),
    ({"kv_cache_config": {"dtype": "fp8"}}, "kv_cache_config.dtype", "known keys"),
    ({"max_batch_size": 1, "max_num_seqs": 2}, "max_num_seqs", "given twice"),
    ({"speculative_config": "NGram"}, "speculative_config", "mapping"),
    ({"speculative_config": {}}, "speculative_config.decoding_type", "required"),
    (
        {"speculative_config": {"decoding_type": "NGrm"}},
        "speculative_config.decoding_type",
        "'NGram'",
    ),
    ({"speculative_config": {"method": "telepathy"}}, "speculative_config.method", "ngram"),
    (
        {"speculative_config": {**NGRAM, "max_draft_length": 3}},
        "speculative_config.max_draft_length",
        "did you mean 'max_draft_len'",
    ),
    (
        {"speculative_config": {**NGRAM, "max_draft_len": -1}},
        "speculative_config.max_draft_len",
        "got -1",
    ),
    (
        {"speculative_config": {**NGRAM, "min_matching_ngram_size": 9}},
        "speculative_config",
        "must not exceed",
    ),
    (
        {"speculative_config": {"decoding_type": "DraftTarget"}},
        "speculative_config.speculative_model",
        "required",
    ),
    ({"max_num_batched_tokens": 3, "speculative_config": NGRAM}, "EngineConfig", "of 5 tokens"),
]


@pytest.mark.parametrize(("data", "field", "words"), BAD)
def test_mistakes_name_the_key_and_what_is_allowed(data, field, words):
    base = {} if field == "model" else {"model": "m"}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({**base, **data})
    assert caught.value.field == field
    assert words in caught.value.message


@pytest.mark.parametrize("text", [b"- a", b"a: [", b"\xff\xfe", None])
def test_unreadable_files(tmp_path, text):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match="config"):
        EngineConfig.load(path)
