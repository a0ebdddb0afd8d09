"""llama.cpp's options in a section: every name of its `--help`, lists of types, contradictions."""

from __future__ import annotations

import itertools

import pytest

from outrider.config import EngineConfig
from outrider.errors import ConfigError

SIMPLE, MAP_K, K4V, MOD = "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"
OPTIONS = [  # type, option, our key
    *(
        (kind, f"spec_{kind.replace('-', '_')}_{end}", key)
        for kind in (SIMPLE, MAP_K, K4V)
        for end, key in (
            ("size_n", "ngram_size_n"),
            ("size_m", "ngram_size_m"),
        )
    ),
    *(
        (kind, option, "min_hits")
        for kind in (MAP_K, K4V)
        for option in (
            f"spec_{kind.replace('-', '_')}_min_hits",
            "spec_ngram_min_hits",
            "ngram_min_hits",
        )
    ),
    (MOD, "spec_ngram_mod_n_match", "n_match"),
    (MOD, "spec_ngram_mod_n_min", "n_min"),
    (MOD, "spec_ngram_mod_n_max", "max_draft_len"),
    # older, and of every type
    *(
        (kind, option, key)
        for kind in (SIMPLE, MAP_K, K4V)
        for option, key in (
            ("spec_ngram_size_n", "ngram_size_n"),
            ("spec_ngram_size_m", "ngram_size_m"),
            ("spec_ngram_check_rate", "check_rate"),
            ("draft_n_min", "draft_min"),
            ("spec_draft_n_min", "draft_min"),
        )
    ),
    (MOD, "spec_ngram_size_n", "n_match"),
    (MOD, "draft_min", "n_min"),
    (MOD, "spec_draft_n_min", "n_min"),
    ("ngram-cache", "draft_n_min", "draft_min"),
    *(
        (kind, option, "max_draft_len")
        for kind in (SIMPLE, MAP_K, K4V, MOD, "ngram-cache")
        for option in ("draft", "draft_n", "draft_max", "draft_n_max", "n_max", "spec_draft_n_max")
    ),
]
# Values that are no default and contradict none.
VALUES = {"ngram_size_n": 7, "ngram_size_m": 49, "min_hits": 3, "check_rate": 2, "draft_min": 5,
          "n_match": 20, "n_min": 5, "max_draft_len": 60}  # fmt: skip


def load(section):
    return EngineConfig.load({"model": "m", "speculative_config": section}).speculative_config


def refused(section):
    with pytest.raises(ConfigError) as caught:
        load(section)
    return caught.value.field.removeprefix("speculative_config."), caught.value.message


@pytest.mark.parametrize(("kind", "option", "key"), OPTIONS)
def test_every_option_is_a_key(kind, option, key):
    config = load({"method": kind, option: VALUES[key]})
    assert getattr(config, key) == VALUES[key]
    assert config == load({"decoding_type": config.decoding_type, key: VALUES[key]})
    if option != key:
        again = {"method": kind, key: VALUES[key], option: VALUES[key]}
        assert refused(again) == (
            option,
            f"speculative_config.{option}: given twice; {key} means the same",
        )


@pytest.mark.parametrize("kinds", itertools.permutations([MOD, SIMPLE, K4V]))
def test_a_list_is_asked_in_llama_cpps_order(kinds):
    config = load({"spec_type": ",".join(kinds)})
    assert (config.decoding_type, config.mode) == ("Compose", "precedence")
    assert [each.decoding_type for each in config.members] == [
        "NGramSimple",
        "NGramMapK4V",
        "NGramMod",
    ]


def test_a_lists_options_go_to_their_own_members():
    config = load(
        {
            "method": "draft-simple, ngram-mod,suffix,ngram-map-k4v,ngram-mod",
            "model": "d",
            "draft_max": 60,
            "draft_min": 2,
            "spec_ngram_size_n": 20,
            "spec_ngram_mod_n_max": 64,
            "spec_ngram_map_k4v_size_m": 30,
            "spec_ngram_map_k4v_size_n": 8,
            "verification": "rejection",
            "disable_by_batch_size": 4,
        }
    )
    rule = {"verification": "rejection"}
    assert config == load(
        {
            "decoding_type": "Compose",
            **rule,
            "max_concurrency": 4,
            "members": [
                {"decoding_type": "NGramMapK4V", "ngram_size_n": 8, "ngram_size_m": 30,
                 "draft_min": 2, "max_draft_len": 60},
                {"decoding_type": "NGramMod", "n_match": 20, "n_min": 2, "max_draft_len": 64},
                {"decoding_type": "Suffix", "max_draft_len": 60},
                {"decoding_type": "DraftTarget", "speculative_model": "d", "max_draft_len": 60,
                 "draft_min": 2},
            ],
        }
    )  # fmt: skip


def test_a_model_beside_drafters_that_need_none_is_asked_after_them():
    config = load({"spec_type": SIMPLE, "draft_model": "d"})
    assert [each.decoding_type for each in config.members] == ["NGramSimple", "DraftTarget"]
    assert config.members[1].speculative_model == "d"
    head = load({"spec_type": "ngram-mod,draft-eagle3", "model_draft": "h"})
    assert [each.decoding_type for each in head.members] == ["NGramMod", "Eagle3"]
    assert load({"method": "mtp", "model": "h"}).speculative_model == "h"


BAD = [
    ({"spec_type": "ngram-mod,"}, "spec_type", "unknown drafter ''"),
    ({"spec_type": "ngram-mod,telepathy"}, "spec_type", "'telepathy'"),
    ({"spec_type": "ngram-mod,Compose"}, "spec_type", "Compose goes with no other"),
    ({"spec_type": "ngram-mod,none"}, "spec_type", "none goes with no other"),
    ({"method": ["ngram-mod", "ngram-simple"]}, "method", "commas"),
    ({"method": SIMPLE, "spec_type": MOD}, "spec_type", "method says it"),
    ({"method": SIMPLE, "spec_ngram_mod_n_match": 9}, "spec_ngram_mod_n_match", "NGramMod"),
    (
        {"method": "ngram-simple,ngram-map-k", "spec_ngram_mod_n_match": 9},
        "spec_ngram_mod_n_match",
        "NGramMod",
    ),
    ({"method": "ngram-simple,ngram-mod", "n_matsch": 9}, "n_matsch", "did you mean 'n_match'"),
    ({"method": "draft-simple,medusa", "model": "d"}, "model", "want one each"),
    (
        {"method": "ngram-simple,ngram-map-k", "size_n": 9, "spec_ngram_size_n": 9},
        "spec_ngram_size_n",
        "size_n means the same",
    ),
    ({"method": "ngram-simple,ngram-map-k", "size_m": 5}, "members.0.ngram_size_m", "at least"),
    ({"method": "ngram", "draft_min": 3}, "draft_min", "it is an option of NGramSimple"),
]


@pytest.mark.parametrize(("section", "field", "words"), BAD)
def test_mistakes_name_the_key(section, field, words):
    named, message = refused(section)
    assert named == field
    assert words in message
