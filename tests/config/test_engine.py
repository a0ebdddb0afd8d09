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
  is_keep_all: true
  is_public_pool: true
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
        pool_scope="tenant",
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


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"ep_size": 2}, True),
        ({"moe_expert_parallel_size": 2}, True),
        ({"enable_expert_parallel": True}, True),
        ({"ep_size": 1}, False),
        ({"moe_expert_parallel_size": -1}, False),
    ],
)
def test_ranks_that_share_out_experts(keys, wanted):
    config = EngineConfig.load({"model": "m", "tp_size": 2, **keys})
    assert config.enable_expert_parallel is wanted


NGRAM = {"decoding_type": "NGram"}
BAD = [
    ({}, "model", "required"),
    ({"tensor_paralel_size": 2}, "tensor_paralel_size", "did you mean 'tensor_parallel_size'"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size", "got 0"),
    ({"resources": {"cpus": 1}}, "resources.cpus", "cpus_per_worker"),
    ({"ep_size": 4, "tp_size": 2}, "enable_expert_parallel", "all 2 of tensor_parallel_size"),
    ({"kv_cache_config": {"dtype": "nvfp4"}}, "kv_cache_dtype", "fp8_e4m3"),
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
        "speculative_config.min_matching_ngram_size",
        "must not exceed",
    ),
    (
        {"speculative_config": {"decoding_type": "DraftTarget"}},
        "speculative_config.speculative_model",
        "required",
    ),
    (
        {
            "speculative_config": {
                "decoding_type": "Eagle",
                "speculative_model": "x",
                "eagle_choices": [[[]]],
            }
        },
        "speculative_config.eagle_choices.0.0",
        "an integer",
    ),
    ({"speculative_config": "x" * 5000}, "speculative_config", "expected a mapping"),
    ({"step_timeout_s": float("inf")}, "step_timeout_s", "a finite number"),
    ({"heartbeat_timeout_s": 1e300}, "heartbeat_timeout_s", "at most 1e+08 seconds"),
    ({"step_timeout_s": 1e-320}, "step_timeout_s", "at least 1e-06 seconds"),
    ({"resources": {"cpus_per_worker": float("inf")}}, "resources.cpus_per_worker", "finite"),
    ({"resources": {"threads_per_worker": 2**31}}, "resources.threads_per_worker", "at most 4096"),
    ({"max_num_batched_tokens": 3, "speculative_config": NGRAM}, "max_num_batched_tokens", "of 5 "),
    ({"kv_cache_config": 5}, "kv_cache_config", "mapping"),
    ({"speculative_config": {"method": ["ngram"]}}, "speculative_config.method", "['ngram']"),
    ({"speculative_config": {"method": {}}}, "speculative_config.method", "a name"),
    ({"speculative_config": {"spec_type": 5}}, "speculative_config.spec_type", "a name"),
    (
        {"speculative_config": {**NGRAM, "method": "ngram"}},
        "speculative_config.method",
        "decoding_type says it",
    ),
    (
        {"speculative_config": {"decoding_type": ["NGram"]}},
        "speculative_config.decoding_type",
        "unknown drafter",
    ),
    (
        {"speculative_config": {"decoding_type": "Compose", "members": [NGRAM, {}]}},
        "speculative_config.members.1.decoding_type",
        "required",
    ),
]


@pytest.mark.parametrize(("data", "field", "words"), BAD)
def test_mistakes_name_the_key_and_what_is_allowed(data, field, words):
    base = {} if field == "model" else {"model": "m"}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({**base, **data})
    assert caught.value.field == field
    assert words in caught.value.message


HEAD = {"decoding_type": "Eagle", "speculative_model": "h"}
PAIRS = [  # two keys of a section that do not go together, and which of them is named
    ({**NGRAM, "lossy": True}, "lossy"),
    ({**NGRAM, "posterior_alpha": 0.5}, "posterior_alpha"),
    ({**NGRAM, "pool_scope": "cluster", "is_public_pool": True}, "is_public_pool"),
    ({**NGRAM, "pool_snapshot": "x"}, "pool_snapshot"),
    ({"decoding_type": "NGramSimple", "ngram_size_n": 9, "ngram_size_m": 8}, "ngram_size_m"),
    ({"decoding_type": "NGramMapK4V", "max_draft_len": 4, "draft_min": 5}, "draft_min"),
    ({"decoding_type": "NGramCache", "draft_min": 9}, "draft_min"),
    ({"decoding_type": "NGramMod", "max_draft_len": 40}, "n_min"),
    ({"decoding_type": "Lookahead", "max_draft_len": 3}, "max_draft_len"),
    (
        {
            "decoding_type": "DraftTarget",
            "speculative_model": "m",
            "placement": "colocated",
            "draft_tensor_parallel_size": 2,
        },
        "draft_tensor_parallel_size",
    ),
    ({**HEAD, "draft_timeout_s": 3.0}, "draft_timeout_s"),
    ({**HEAD, "eagle_choices": [[0]], "use_dynamic_tree": True}, "eagle_choices"),
    ({**HEAD, "eagle_choices": [[0], [0, 0], [1, 0]]}, "eagle_choices"),
    ({**HEAD, "max_total_draft_tokens": 5}, "max_total_draft_tokens"),
    ({**HEAD, "decoding_type": "Medusa", "num_medusa_heads": 2, "max_draft_len": 3},
     "max_draft_len"),
    ({**HEAD, "decoding_type": "ReDrafter", "redrafter_num_beams": 3, "beam_width": 3},
     "beam_width"),
    ({"decoding_type": "Compose", "members": [NGRAM], "mode": "merge", "keep_order": True},
     "keep_order"),
    ({"decoding_type": "Compose", "members": [{**NGRAM, "max_concurrency": 2}]},
     "members.0.max_concurrency"),
    ({"decoding_type": "Compose", "members": [{"decoding_type": "NGramMod", "n_min": 65}]},
     "members.0.n_min"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "key"), PAIRS)
def test_keys_that_contradict_are_named(section, key):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", "speculative_config": section})
    assert caught.value.field == f"speculative_config.{key}"
    assert caught.value.message.startswith(f"speculative_config.{key}")


@pytest.mark.parametrize("text", [b"- a", b"a: [", b"\xff\xfe", b"model: !!timestamp 5", None])
def test_unreadable_files(tmp_path, text):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match="config"):
        EngineConfig.load(path)


def test_adapters_are_named_in_several_forms():
    given = ["a=/x", {"name": "b", "path": "/y"}, '{"name": "c", "path": "org/z"}']
    config = EngineConfig.load({"model": "m", "lora_modules": given, "max_loras": 2})
    assert [(each.name, each.path) for each in config.lora_modules] == [
        ("a", "/x"), ("b", "/y"), ("c", "org/z"),
    ]  # fmt: skip
    assert config.takes_adapters
    assert EngineConfig.load({"model": "m", "enable_lora": True}).takes_adapters
    assert not EngineConfig.load({"model": "m", "enable_lora": False}).takes_adapters


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"lora_modules": ["a"]}, r"lora_modules.0: expected name=path, or JSON"),
        ({"lora_modules": [{"name": "a"}]}, "lora_modules.0.path: this key is required"),
        ({"lora_modules": ["m=/x"]}, "lora_modules: the model has the name 'm'"),
        ({"lora_modules": ["a=/x", "a=/y"]}, "lora_modules: a second adapter has the name 'a'"),
        ({"lora_modules": ["a=/x"], "enable_lora": False}, "enable_lora: false, and there are"),
        ({"lora_modules": ["a=/x"], "forward": "bridge"}, "lora_modules: not available with"),
        ({"enable_lora": True, "forward": "bridge"}, "enable_lora: not available with forward"),
        ({"max_lora_rank": 0}, "max_lora_rank: at least 1"),
        ({"lora_dtype": "float16"}, "lora_dtype: adapters have the model's dtype"),
    ],
)
def test_adapters_that_cannot_be_are_refused(keys, match):
    with pytest.raises(ConfigError, match=f"^{match}"):
        EngineConfig.load({"model": "m", **keys})
