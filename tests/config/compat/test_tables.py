"""Every entry of every dialect: what is accepted changes the section, what is refused is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import outrider
from outrider.config import SECTIONS, EngineConfig
from outrider.config.compat import table
from outrider.config.compat.table import DIALECTS, ENGINE, INTERIM, Ignored, Only, Refused, To
from outrider.config.compat.translate import fields_of, own_name, translate_engine
from outrider.config.strict import read_yaml
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
    assert entry.refused in message
    assert entry.nearest in message


@pytest.mark.parametrize(("dialect", "name", "entry"), NAMES)
def test_every_name_of_a_drafter(dialect, name, entry):
    section = {dialect.selectors[0]: name}
    if isinstance(entry, Refused):
        field, message = refused(section)
        assert field == f"speculative_config.{dialect.selectors[0]}"
        assert repr(name) in message
        assert entry.refused in message
        return
    if "speculative_model" in fields_of(entry.to):
        section["speculative_model"] = "folder"
    if entry.to == "User":
        section["drafter"] = "module:Class"
    assert load(section).decoding_type == entry.to


@pytest.mark.parametrize(("key", "entry"), ONLY)
def test_only_what_holds_anyway_is_accepted(key, entry):
    for value in entry.only:
        assert load({"decoding_type": "NGram", key: value}) == load({"decoding_type": "NGram"})
    field, message = refused({"decoding_type": "NGram", key: "something else"})
    assert field == f"speculative_config.{key}"
    assert entry.why in message


@pytest.mark.parametrize("file", sorted(Path(table.__file__).parent.glob("*.yaml")), ids=str)
def test_no_row_is_given_twice(file):
    data = read_yaml(file.read_text(encoding="utf-8"), "table", file.name)
    names = [name for names in data["keys"] for name in names.split(", ")]
    with pytest.raises(ValueError, match=f"{names[0]} is given twice"):
        table.Dialect.model_validate({**data, "keys": {**data["keys"], f"new, {names[0]}": "seed"}})


def test_a_row_is_of_one_kind():
    data = {"name": "x", "selectors": ["x"], "methods": {}}
    for row in ({"to": "seed", "refused": "why"}, {"only": [1]}, {"to": "seed", "why": "why"}, {}):
        with pytest.raises(ValueError, match="keys"):
            table.Dialect.model_validate({**data, "keys": {"key": row}})


def test_every_translated_key_is_one_of_ours():
    known = {key for kind in SECTIONS for key in fields_of(kind)} | INTERIM
    for dialect in DIALECTS:
        for key, entry in dialect.keys.items():
            if isinstance(entry, To):
                names = {own_name(kind, entry.to) for kind in SECTIONS}
                assert names & known, key
    engine = set(EngineConfig.model_fields) | {"num_kv_tokens"}
    entries = [entry for dialect in DIALECTS for table in (dialect.engine, dialect.kv_cache)
               for entry in table.values()]  # fmt: skip
    assert {entry.to for entry in entries if isinstance(entry, To)} <= engine


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
    # vLLM
    "look-ups have no model": (
        {"method": "ngram", "model": "/models/m", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3},
    ),
    "another vocabulary": (
        {"method": "draft_model", "model": "d", "num_speculative_tokens": 5,
         "use_heterogeneous_vocab": True},
        {"decoding_type": "DraftTarget", "speculative_model": "d", "max_draft_len": 5,
         "use_heterogeneous_vocab": True},
    ),
    "masks for all tokens": (
        {"method": "draft_model", "model": "d", "num_speculative_tokens": 5,
         "parallel_drafting": True},
        {"decoding_type": "PARD", "speculative_model": "d", "max_draft_len": 5},
    ),
    "a block": (
        {"method": "dflash", "model": "h", "num_speculative_tokens": 5},
        {**EAGLE, "decoding_type": "DFlash", "max_draft_len": 5},
    ),
    "SGLang's block": (
        {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "h",
         "speculative_dflash_block_size": 6, "speculative_dflash_draft_window_size": 512},
        {**EAGLE, "decoding_type": "DSpark", "max_draft_len": 5, "draft_window": 512},
    ),
    "SGLang's block by its nodes": (
        {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "h",
         "speculative_num_draft_tokens": 8},
        {**EAGLE, "decoding_type": "DFlash", "max_draft_len": 7},
    ),
    "a head's masks": (
        {"method": "eagle3", "model": "h", "num_speculative_tokens": 5, "parallel_drafting": True},
        {**EAGLE, "decoding_type": "PEagle", "max_draft_len": 5},
    ),
    # llama.cpp
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
        ('{"speculators_model_type": "peagle"}', "h", "PEagle"),
        ('{"architectures": ["PeagleLlamaForCausalLM"]}', "h", "PEagle"),
        ('{"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 5}', "h", "PEagle"),
        ('{"speculators_model_type": "dflash"}', "h", "DFlash"),
        ('{"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}', "h", "DFlash"),
        ('{"model_type": "qwen3", "dflash_config": {}, "mask_token_id": 5}', "h", "DFlash"),
        ('{"speculators_model_type": "dspark"}', "h", "DSpark"),
        ('{"model_type": "medusa", "medusa_num_heads": 5}', "h", "Medusa"),
        ('{"model_type": "deepseek_mtp"}', "h", "MTP"),
        ('{"architectures": ["LlamaForCausalLM"]}', "EAGLE3-LLaMA3.1-8B", "Eagle3"),
        ('{"architectures": ["LlamaForCausalLM"]}', "EAGLE-Vicuna-7B", "Eagle"),
        ('{"architectures": ["LlamaForCausalLM"]}', "llama-68m", "DraftTarget"),
        ('{"architectures": ["LlamaForCausalLM"], "pard_token": 5}', "PARD-1B", "PARD"),
        ('{"model_type": "qwen3", "pard_token": 5, "pard2": true}', "h", "PARD2"),
        ('{"model_type": "llama", "pard_token": 5, "spd_type": "pard2"}', "h", "PARD2"),
        ("not JSON", "h", "DraftTarget"),
    ],
)
def test_a_checkpoint_tells_the_method(tmp_path, config, folder, kind):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(config)
    section = load({"model": str(tmp_path / folder), "num_speculative_tokens": 2})
    assert (section.decoding_type, section.draft_len) == (kind, 2)


def test_a_checkpoint_of_another_drafter_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"speculators_model_type": "gumiho"}')
    field, message = refused({"model": str(tmp_path)})
    assert field == "speculative_config.model"
    assert "gumiho" in message


BAD = [
    ({"method": "medusa", "model": "h", "parallel_drafting": True}, "parallel_drafting", "Medusa"),
    ({**NGRAM, "use_heterogeneous_vocab": True}, "use_heterogeneous_vocab", "DraftTarget"),
    ({"method": "draft_model", "model": "d", "parallel_drafting": True,
      "use_heterogeneous_vocab": True}, "use_heterogeneous_vocab", "DraftTarget"),
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
     "speculative_ngram_min_bfs_breadth", "allowed: 1; nearest: min_token_prob (got 2)"),
    ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d",
      "speculative_num_steps": "3", "speculative_num_draft_tokens": 4},
     "speculative_num_steps", "whole number"),
    ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "d",
      "speculative_eagle_topk": "2"}, "speculative_eagle_topk", "whole number"),
    ({"method": "ngram", "speculative_algorithm": "NGRAM"}, "speculative_algorithm", "one of"),
    ({"decoding_type": "Compose", "members": [{**NGRAM, "draft_len_schedule": {2: 2}}]},
     "members.0.draft_len_schedule", "beside `members`"),
    ({**NGRAM, "draft_len_schedule": {0: 2}}, "draft_len_schedule", "at least 1"),
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


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NGRAM", "DFLASH"])
def test_sglangs_defaults_may_be_written(algorithm):
    keys = {"speculative_algorithm": algorithm}
    if algorithm != "NGRAM":
        keys["speculative_draft_model_path"] = "d"
    none = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    written = {**keys, **dict.fromkeys(none)}
    sections = [EngineConfig.load({"model": "m", **each}).speculative_config
                for each in (keys, written)]  # fmt: skip
    assert sections[0] == sections[1]


def test_a_number_of_kv_tokens_is_one_of_tensorrt_llms_section():
    data = {"model": "m", "kv_cache_config": {"max_tokens": None}}
    assert EngineConfig.load(data).num_kv_blocks is None
    with pytest.raises(ConfigError, match="^num_kv_tokens: unknown key"):
        EngineConfig.load({"model": "m", "num_kv_tokens": "3"})


def test_sglangs_number_of_steps_prevails_in_a_chain(caplog):
    section = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "h",
               "speculative_num_steps": 4, "speculative_num_draft_tokens": 9}  # fmt: skip
    assert load(section).draft_len == 4
    assert "speculative_num_draft_tokens: 9 is taken as 5" in caplog.text


def test_engine_keys():
    given = {"kv_cache_config": {"max_tokens": 100, "tokens_per_block": 32, "dtype": "auto"},
             "pp_size": 2, "backend": "pytorch",
             "disable_overlap_scheduler": True}  # fmt: skip
    config = EngineConfig.load({"model": "m", **given})
    assert (config.num_kv_blocks, config.block_size) == (4, 32)
    assert config.pipeline_parallel_size == 2
    for key, value in (("nnodes", 2), ("hf_overrides", {"a": 1}),
                       ("lora", "x"), ("enable_dp_attention", True)):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            translate_engine({"model": "m", key: value})
        assert caught.value.field == key


def test_what_a_checkpoint_gives_may_be_overridden():
    given = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True,
             "architectures": ["Qwen3ForSequenceClassification"]}  # fmt: skip
    config = EngineConfig.load({"model": "m", "hf_overrides": given})
    assert config.hf_overrides.given() == {"classifier_from_token": ["no", "yes"]}
    for wrong, field in (
        ({"rope_theta": 1}, "hf_overrides"),
        ({**given, "architectures": ["LlamaForCausalLM"]}, "hf_overrides"),
        ({"classifier_from_token": ["no"]}, "hf_overrides.classifier_from_token"),
        ({"matryoshka_dimensions": [0]}, "hf_overrides.matryoshka_dimensions"),
        ("yes", "hf_overrides"),
    ):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.load({"model": "m", "hf_overrides": wrong})
        assert caught.value.field.startswith(field), (wrong, caught.value)


def test_a_schedule_follows_the_load():
    section = load({**NGRAM, "max_draft_len": 8, "draft_len_schedule": {4: 8, 8: 2, 32: 1}})
    assert [section.nodes_at(size, 8) for size in (1, 4, 5, 8, 9, 32, 33)] == [8, 8, 2, 2, 1, 1, 0]
    assert load({**NGRAM, "max_concurrency": 2}).nodes_at(3, 4) == 0


NO_EFFECT = [
    (kind, key, entry)
    for dialect in DIALECTS
    for kind, table in (("", dialect.engine), ("speculative_config.", dialect.keys),
                        ("kv_cache_config.", dialect.kv_cache))
    for key, entry in table.items()
    if isinstance(entry, Ignored)
]  # fmt: skip


@pytest.mark.parametrize(("at", "key", "entry"), NO_EFFECT)
def test_what_changes_nothing_is_accepted_with_one_line_of_warning(at, key, entry, caplog):
    plain = {"model": "m", "speculative_config": {"method": "ngram"}}
    for value in (True, "on", {"a": 1}):
        data = {**plain, key: value}
        if at:
            section = at.removesuffix(".")
            data = {**plain, section: {**plain.get(section, {}), key: value}}
        caplog.clear()
        assert EngineConfig.load(data) == EngineConfig.load(plain)
        (said,) = caplog.messages
        assert said.startswith(f"{at}{key} has no effect here: {entry.ignored}")
        assert "\n" not in said


def test_a_key_of_ours_is_never_taken_for_one_without_effect():
    ours = set(EngineConfig.model_fields)
    assert not ours & {key for key, entry in ENGINE.items() if isinstance(entry, Ignored)}
    known = {key for kind in SECTIONS for key in fields_of(kind)}
    for dialect in DIALECTS:
        assert not known & {key for key, row in dialect.keys.items() if isinstance(row, Ignored)}


@pytest.mark.parametrize(
    ("key", "entry"),
    [(key, row) for key, row in ENGINE.items() if isinstance(row, Refused | Only)],
)
def test_what_would_change_results_is_refused_with_the_reason(key, entry):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", key: "something else"})
    assert caught.value.field == key
    assert (entry.refused if isinstance(entry, Refused) else entry.why) in caught.value.message
    assert entry.nearest in caught.value.message


@pytest.mark.parametrize(
    ("name", "kind", "keys"),
    [
        ("NGram", "NGram", {"max_draft_len": 3, "max_matching_ngram_size": 4,
                            "is_public_pool": True}),
        ("Eagle", "Eagle", {"max_draft_len": 3, "speculative_model": "d",
                            "eagle3_one_model": False}),
        ("Eagle3", "Eagle3", {"max_draft_len": 3, "speculative_model": "d"}),
        ("MTP", "MTP", {"max_draft_len": 3, "num_nextn_predict_layers": 3}),
        ("DraftTarget", "DraftTarget", {"max_draft_len": 3, "speculative_model_dir": "d"}),
        ("Medusa", "Medusa", {"speculative_model": "d", "medusa_choices": [[0], [0, 0]]}),
        ("Lookahead", "Lookahead", {"max_window_size": 3, "max_ngram_size": 3,
                                    "max_verification_set_size": 2}),
        ("UserProvided", "User_Provided", {"max_draft_len": 3, "drafter": "module:Class"}),
    ],
)  # fmt: skip
def test_tensorrt_llms_classes_are_their_sections(name, kind, keys):
    made = getattr(outrider, f"{name}DecodingConfig")(**keys)
    engine = EngineConfig.load({"model": "m"}, speculative_config=made)
    section = {"decoding_type": kind, **keys}
    same = EngineConfig.load({"model": "m", "speculative_config": section})
    assert engine.speculative_config == same.speculative_config == made
    with pytest.raises(ConfigError) as caught:
        getattr(outrider, f"{name}DecodingConfig")(**keys, max_draft_length=3)
    assert caught.value.field == "max_draft_length"
