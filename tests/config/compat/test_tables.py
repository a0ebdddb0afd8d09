"""Every entry of every dialect: what is accepted changes the section, what is refused is named."""

from __future__ import annotations

import pytest

from outrider.config import SECTIONS, EngineConfig
from outrider.config.compat import sglang, tensorrt_llm, vllm
from outrider.config.compat.table import Only, Refused, To
from outrider.config.compat.translate import DIALECTS, fields_of, own_name, translate_engine
from outrider.errors import ConfigError


def load(section, **engine):
    data = {"model": "m", "speculative_config": section, **engine}
    return EngineConfig.load(data).speculative_config


def refused(section, **engine):
    with pytest.raises(ConfigError) as caught:
        load(section, **engine)
    return caught.value.field, caught.value.message


REFUSED = [
    (dialect.name, key, entry)
    for dialect in DIALECTS
    for key, entry in dialect.keys.items()
    if isinstance(entry, Refused)
]
NAMES = [(dialect, name, entry) for dialect in DIALECTS for name, entry in dialect.methods.items()]
ONLY = [
    (key, entry)
    for dialect in DIALECTS
    for key, entry in dialect.keys.items()
    if isinstance(entry, Only)
]


@pytest.mark.parametrize(("dialect", "key", "entry"), REFUSED)
def test_what_is_refused_is_named_with_the_reason(dialect, key, entry):
    field, message = refused({"decoding_type": "NGram", key: "x"})
    assert field == f"speculative_config.{key}"
    assert entry.why in message
    assert entry.nearest in message


@pytest.mark.parametrize(("dialect", "name", "entry"), NAMES)
def test_every_name_of_a_drafter(dialect, name, entry):
    section = {dialect.selectors[0]: name}
    if isinstance(entry, Refused):
        field, message = refused(section)
        assert field == f"speculative_config.{dialect.selectors[0]}"
        assert repr(name) in message
        assert entry.why in message
        return
    if "speculative_model" in fields_of(entry.key):
        section["speculative_model"] = "folder"
    if entry.key == "User":
        section["drafter"] = "module:Class"
    assert load(section).decoding_type == entry.key


@pytest.mark.parametrize(("key", "entry"), ONLY)
def test_only_what_holds_anyway_is_accepted(key, entry):
    for value in entry.values:
        assert load({"decoding_type": "NGram", key: value}) == load({"decoding_type": "NGram"})
    field, message = refused({"decoding_type": "NGram", key: "something else"})
    assert field == f"speculative_config.{key}"
    assert entry.why in message


def test_every_translated_key_is_one_of_ours():
    known = {key for kind in SECTIONS for key in fields_of(kind)} | sglang.INTERIM
    for dialect in DIALECTS:
        for key, entry in dialect.keys.items():
            if isinstance(entry, To):
                names = {own_name(kind, entry.key) for kind in SECTIONS}
                assert names & known, key
    engine = set(EngineConfig.model_fields) | {"num_kv_tokens"}
    tables = {**tensorrt_llm.ENGINE, **tensorrt_llm.KV_CACHE, **vllm.ENGINE}
    assert {e.key for e in tables.values() if isinstance(e, To)} <= engine


NGRAM = {"decoding_type": "NGram"}
EAGLE = {"decoding_type": "Eagle", "speculative_model": "h"}
SAME = {
    # vLLM
    "one size is both": ({"method": "ngram", "prompt_lookup_max": 4},
                         {**NGRAM, "max_matching_ngram_size": 4, "min_matching_ngram_size": 4}),
    "the smaller alone too": ({"method": "ngram", "prompt_lookup_min": 5},
                              {**NGRAM, "max_matching_ngram_size": 5,
                               "min_matching_ngram_size": 5}),
    "no size is 5": ({"method": "ngram"},
                     {**NGRAM, "max_matching_ngram_size": 5, "min_matching_ngram_size": 5}),
    "a model called ngram": ({"model": "ngram", "num_speculative_tokens": 3},
                             {**NGRAM, "max_draft_len": 3, "max_matching_ngram_size": 5,
                              "min_matching_ngram_size": 5}),
    "in brackets": ({"model": "[ngram]"}, {**NGRAM, "max_matching_ngram_size": 5,
                                           "min_matching_ngram_size": 5}),
    "and a method": ({"method": "ngram", "model": "[ngram]"},
                     {**NGRAM, "max_matching_ngram_size": 5, "min_matching_ngram_size": 5}),
    "a rule": ({**NGRAM, "rejection_sample_method": "probabilistic"},
               {**NGRAM, "verification": "rejection"}),
    "an older rule": ({**NGRAM, "acceptance_method": "typical_acceptance_sampler"},
                      {**NGRAM, "verification": "typical", "lossy": True}),
    "a schedule of ranges": (
        {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 1]]},
        {**NGRAM, "draft_len_schedule": {4: 4, 16: 1}},
    ),
    "a tree as text": ({**EAGLE, "speculative_token_tree": "[(0,), (0, 0), (1,)]"},
                       {**EAGLE, "eagle_choices": [[0], [0, 0], [1]]}),
    # TensorRT-LLM
    "a folder": ({"decoding_type": "Eagle", "speculative_model_dir": "h"}, EAGLE),
    "paths as text, some twice": ({**EAGLE, "eagle_choices": "[[0], [0], [0, 0]]"},
                                  {**EAGLE, "eagle_choices": [[0], [0, 0]]}),
    "typical acceptance": ({**EAGLE, "greedy_sampling": False, "posterior_threshold": 0.2},
                           {**EAGLE, "verification": "typical", "lossy": True,
                            "posterior_threshold": 0.2}),
    "a linear tree": ({**NGRAM, "max_draft_len": 5, "max_total_draft_tokens": 5},
                      {**NGRAM, "max_draft_len": 5}),
    "a suffix automaton": (
        {"decoding_type": "SA", "max_draft_len": 6, "enable_global_pool": True},
        {**NGRAM, "max_draft_len": 6, "is_use_oldest": False, "max_matching_ngram_size": 64,
         "pool_scope": "tenant"},
    ),
    "of one size": (
        {"decoding_type": "SA", "max_matching_ngram_size": 3},
        {**NGRAM, "is_use_oldest": False, "max_matching_ngram_size": 3,
         "min_matching_ngram_size": 3},
    ),
    "before a head": (
        {**EAGLE, "max_draft_len": 4, "sa_config": {"threshold": 6}, "max_concurrency": 8},
        {"decoding_type": "Compose", "max_concurrency": 8, "members": [
            {**NGRAM, "min_matching_ngram_size": 6, "max_matching_ngram_size": 64,
             "is_use_oldest": False, "max_draft_len": 4},
            {**EAGLE, "max_draft_len": 4}]},
    ),
    "a head outside the target's worker": ({**EAGLE, "eagle3_one_model": False},
                                           {**EAGLE, "placement": "separate"}),
    "a head within it": ({**EAGLE, "eagle3_one_model": True}, EAGLE),
    "modules outside it": ({"decoding_type": "MTP", "mtp_eagle_one_model": False},
                           {"decoding_type": "MTP", "placement": "separate"}),
    # llama.cpp
    "one total of none": ({"spec_type": "ngram-mod,none"}, {"decoding_type": "None"}),
    "its switch": ({"spec_default": True}, {"decoding_type": "NGramMod"}),
    "a draft model's shortest": (
        {"method": "draft-simple", "draft_model": "d", "draft_max": 16, "draft_min": 5,
         "draft_p_min": 0.4},
        {"decoding_type": "DraftTarget", "speculative_model": "d", "max_draft_len": 16,
         "draft_min": 5, "p_min": 0.4},
    ),
    # SGLang
    "a chain": ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "h"},
                {**EAGLE, "decoding_type": "Eagle3", "max_draft_len": 3}),
    "a tree": (
        {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "h",
         "speculative_num_steps": 5, "speculative_eagle_topk": 8,
         "speculative_num_draft_tokens": 64},
        {**EAGLE, "use_dynamic_tree": True, "dynamic_tree_max_topK": 8, "max_draft_len": 5,
         "max_total_draft_tokens": 63},
    ),
    "steps of a chain": (
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "d",
         "speculative_num_steps": 4, "speculative_eagle_topk": 1,
         "speculative_num_draft_tokens": 5},
        {"decoding_type": "DraftTarget", "speculative_model": "d", "max_draft_len": 4},
    ),
    "look-ups": (
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16,
         "speculative_ngram_max_bfs_breadth": 1, "speculative_ngram_max_trie_depth": 12},
        {"decoding_type": "Suffix", "max_draft_len": 15, "max_tree_depth": 12, "shape": "chain"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_dialects_mean_what_they_mean_at_home(case):
    theirs, ours = SAME[case]
    assert load(theirs) == load(ours)


def test_lengths_without_a_length():
    deep = load({"method": "suffix", "suffix_decoding_max_tree_depth": 64})
    assert (deep.draft_len, load({"decoding_type": "Suffix"}).draft_len) == (64, 24)
    assert load({"method": "ngram-simple"}).draft_len == 48
    assert load({"method": "ngram-map-k", "size_m": 20}).draft_len == 20
    assert load({"method": "draft-simple", "model": "d"}).draft_len == 3
    assert load({"spec_type": "draft-eagle3", "model": "h"}).draft_len == 3
    tree = {**EAGLE, "use_dynamic_tree": True, "dynamic_tree_max_topK": 10, "max_draft_len": 4}
    assert load(tree).max_nodes == 40
    assert load({**tree, "max_total_draft_tokens": 59}).max_nodes == 59
    assert load({"decoding_type": "Lookahead", "max_ngram_size": 1}).draft_len == 0


@pytest.mark.parametrize(
    ("config", "folder", "kind"),
    [
        ('{"architectures": ["LlamaForCausalLMEagle3"]}', "h", "Eagle3"),
        ('{"architectures": ["EagleLlama4ForCausalLM"]}', "h", "Eagle"),
        ('{"speculators_model_type": "eagle3"}', "h", "Eagle3"),
        ('{"model_type": "medusa", "medusa_num_heads": 5}', "h", "Medusa"),
        ('{"model_type": "deepseek_mtp"}', "h", "MTP"),
        ('{"architectures": ["LlamaForCausalLM"]}', "EAGLE3-LLaMA3.1-8B", "Eagle3"),
        ('{"architectures": ["LlamaForCausalLM"]}', "EAGLE-Vicuna-7B", "Eagle"),
        ('{"architectures": ["LlamaForCausalLM"]}', "llama-68m", "DraftTarget"),
        ("not JSON", "h", "DraftTarget"),
    ],
)
def test_a_checkpoint_tells_the_method(tmp_path, config, folder, kind):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(config)
    section = load({"model": str(tmp_path / folder), "num_speculative_tokens": 2})
    assert (section.decoding_type, section.draft_len) == (kind, 2)


def test_a_checkpoint_of_another_drafter_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"speculators_model_type": "dflash"}')
    field, message = refused({"model": str(tmp_path)})
    assert field == "speculative_config.model"
    assert "dflash" in message


BAD = [
    ({**NGRAM, "rejection_sample_method": "fly"}, "rejection_sample_method", "fly"),
    ({**NGRAM, "rejection_sample_method": "synthetic"}, "synthetic_acceptance_rate", "requires"),
    ({**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]},
     "synthetic_acceptance_rates", "synthetic_acceptance_rate"),
    ({**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 4, 4], [6, 8, 1]]},
     "num_speculative_tokens_per_batch_size", "must begin at 5"),
    ({**NGRAM, "draft_len_schedule": {4: 4}, "max_concurrency": 3}, "max_concurrency", "one of"),
    ({**NGRAM, "acceptance_window": 5}, "acceptance_window", "belong together"),
    ({**NGRAM, "max_draft_len": 5, "max_total_draft_tokens": 6}, "max_total_draft_tokens", "twice"),
    ({**EAGLE, "eagle_choices": "[[0], [0"}, "eagle_choices", "list of paths"),
    ({**EAGLE, "sa_config": {"size": 3}}, "sa_config", "threshold"),
    ({"speculative_algorithm": "EAGLE4"}, "speculative_algorithm", "allowed: EAGLE"),
    ({"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "d",
      "speculative_eagle_topk": 4}, "speculative_eagle_topk", "chain"),
    ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 1},
     "speculative_num_draft_tokens", "at least 2"),
    ({"speculative_algorithm": "NGRAM", "speculative_ngram_min_bfs_breadth": 2},
     "speculative_ngram_min_bfs_breadth", "allowed: 1, not 2"),
    ({"method": "ngram", "speculative_algorithm": "NGRAM"}, "speculative_algorithm", "one of"),
    ({"decoding_type": "Compose", "members": [{**NGRAM, "draft_len_schedule": {2: 2}}]},
     "members.0.draft_len_schedule", "beside `members`"),
    ({**NGRAM, "draft_len_schedule": {0: 2}}, "draft_len_schedule", "greater than"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "field", "words"), BAD)
def test_mistakes_name_the_key(section, field, words):
    named, message = refused(section)
    assert named.startswith(f"speculative_config.{field}")
    assert words in message


def test_sglangs_keys_stand_at_the_top():
    data = {"model": "m", "speculative-algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
    section = EngineConfig.load(data).speculative_config
    assert (section.decoding_type, section.draft_len) == ("Suffix", 7)
    field, _ = refused({"decoding_type": "NGram"}, speculative_algorithm="EAGLE")
    assert field == "speculative_algorithm"


def test_sglangs_number_of_steps_prevails_in_a_chain(caplog):
    section = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "h",
               "speculative_num_steps": 4, "speculative_num_draft_tokens": 9}  # fmt: skip
    assert load(section).draft_len == 4
    assert "speculative_num_draft_tokens: 9 is taken as 5" in caplog.text


def test_engine_keys():
    given = {"kv_cache_config": {"max_tokens": 100, "tokens_per_block": 32, "dtype": "auto"},
             "enable_chunked_prefill": True, "pipeline_parallel_size": 1, "backend": "pytorch",
             "disable_overlap_scheduler": True, "cuda_graph_config": None}  # fmt: skip
    config = EngineConfig.load({"model": "m", **given})
    assert (config.num_kv_blocks, config.block_size) == (4, 32)
    for key, value in (("pipeline_parallel_size", 2), ("attn_backend", "TRTLLM"),
                       ("moe_config", {}), ("enable_chunked_prefill", False)):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            translate_engine({"model": "m", key: value})
        assert caught.value.field == key


def test_a_schedule_follows_the_load():
    section = load({**NGRAM, "max_draft_len": 8, "draft_len_schedule": {4: 8, 8: 2, 32: 1}})
    assert [section.nodes_at(size, 8) for size in (1, 4, 5, 8, 9, 32, 33)] == [8, 8, 2, 2, 1, 1, 0]
    assert load({**NGRAM, "max_concurrency": 2}).nodes_at(3, 4) == 0
