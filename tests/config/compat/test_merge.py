"""Options on the command line refine a file's section: they win, and touch nothing else."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig
from outrider.config.compat.translate import merge
from outrider.errors import ConfigError

MOD = {"decoding_type": "NGramMod", "n_match": 24, "n_min": 8}
SIMPLE = {"decoding_type": "NGramSimple", "ngram_size_n": 8, "verification": "rejection"}
BOTH = {"decoding_type": "Compose", "members": [MOD, {"decoding_type": "Suffix"}]}
MODEL = {"decoding_type": "DraftTarget", "speculative_model": "d"}
MIXED = {
    "decoding_type": "Compose",
    "mode": "merge",
    "members": [{"decoding_type": "NGram", "max_draft_len": 8}, {"decoding_type": "Lookahead"}],
}
LIST = {"spec_type": "ngram-simple,ngram-map-k", "draft_max": 20}
CASES = {
    "an older name wins": (MOD, None, {"spec_ngram_size_n": 20}, {**MOD, "n_match": 20}),
    "a shared name wins": (MOD, None, {"spec_draft_n_min": 4}, {**MOD, "n_min": 4}),
    "a new name wins over another spelling": (
        {"method": "ngram-mod", "ngram_size_n": 24},
        None,
        {"spec_ngram_mod_n_match": 20},
        {"decoding_type": "NGramMod", "n_match": 20},
    ),
    "the same type is refined": (MOD, "ngram-mod", {"max_draft_len": 50},
                                 {**MOD, "max_draft_len": 50}),
    "another type starts afresh": (SIMPLE, "ngram-mod", {}, {"decoding_type": "NGramMod"}),
    "none is none": (MOD, "none", {}, {"decoding_type": "None"}),
    "a type in a list keeps what is said of it": (
        MOD,
        "ngram-mod,ngram-map-k",
        {"spec_ngram_map_k_size_n": 9},
        {"decoding_type": "Compose",
         "members": [{"decoding_type": "NGramMapK", "ngram_size_n": 9}, MOD]},
    ),
    "a model joins, the rule holds for both": (
        SIMPLE,
        None,
        {"speculative_model": "d"},
        {"decoding_type": "Compose", "verification": "rejection",
         "members": [{"decoding_type": "NGramSimple", "ngram_size_n": 8}, MODEL]},
    ),
    "a model replaces a model": (MODEL, None, {"speculative_model": "e"},
                                 {**MODEL, "speculative_model": "e"}),
    "a model and nothing else": ({}, None, {"speculative_model": "d"}, MODEL),
    "a model instead of nothing": ({"method": "none"}, None, {"speculative_model": "d"}, MODEL),
    "a table says what it is for": (
        {},
        None,
        {"lookup_cache_static": "t", "speculative_model": "d"},
        {"decoding_type": "Compose",
         "members": [{"decoding_type": "NGramCache", "lookup_cache_static": "t"}, MODEL]},
    ),
    "a member is refined": (
        BOTH,
        None,
        {"spec_ngram_mod_n_match": 30},
        {**BOTH, "members": [{**MOD, "n_match": 30}, {"decoding_type": "Suffix"}]},
    ),
    "a member alone": (BOTH, "ngram-mod", {}, MOD),
    "a composition is bounded as a whole": (MIXED, None, {"max_draft_len": 7},
                                            {**MIXED, "max_draft_len": 7}),
    "a list is bounded member by member": (
        LIST,
        None,
        {"max_draft_len": 30},
        {**LIST, "draft_max": 30},
    ),
    "a composition keeps its mode when a model joins": (
        MIXED,
        None,
        {"speculative_model": "d"},
        {**MIXED, "members": [*MIXED["members"], MODEL]},
    ),
}  # fmt: skip


def load(section):
    return EngineConfig.load({"model": "m", "speculative_config": section}).speculative_config


@pytest.mark.parametrize("case", CASES)
def test_options_win(case):
    section, spec_type, keys, wanted = CASES[case]
    assert load(merge(section, spec_type, keys)) == load(wanted)


@pytest.mark.parametrize(
    ("section", "spec_type", "keys", "field"),
    [
        (MOD, None, {"spec_ngram_size_n": 3, "spec_ngram_mod_n_match": 3}, "spec_ngram_mod_n"),
        (MOD, None, {"spec_ngram_simple_size_n": 3}, "spec_ngram_simple_size_n"),
        (MOD, None, {"lookup_cache_static": "t"}, "lookup_cache_static"),
        ({}, None, {"spec_ngram_size_n": 3}, "decoding_type"),
        ({"members": 5, "decoding_type": "Compose"}, "ngram-mod", {}, "members"),
        ({**MOD, "decoding_type": 5}, None, {"max_draft_len": 3}, "decoding_type"),
        ({"decoding_type": ["NGram"]}, "ngram-mod", {"max_draft_len": 3}, "decoding_type"),
        ({"decoding_type": "Compose", "members": [5]}, None, {"max_draft_len": 3}, "members"),
    ],
)  # fmt: skip
def test_each_source_is_checked(section, spec_type, keys, field):
    with pytest.raises(ConfigError) as caught:
        load(merge(section, spec_type, keys))
    assert caught.value.field.startswith(f"speculative_config.{field}")


def test_an_unknown_type_is_named():
    with pytest.raises(ConfigError, match="'telepathy'") as caught:
        merge(MOD, "ngram-mod,telepathy", {})
    assert caught.value.field == "spec_type"
