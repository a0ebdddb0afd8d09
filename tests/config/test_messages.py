"""Messages about wrong values and unknown names, of every key: they name it, and they help."""

from __future__ import annotations

import re

import pytest

from outrider.cluster.serve.args import ServeConfig, read_args
from outrider.config import SECTIONS, EngineConfig
from outrider.config.access import AccessConfig
from outrider.config.compat.table import DIALECTS, Refused
from outrider.config.engine import ResourcesConfig
from outrider.errors import ConfigError

VALUES = ["x", "", -1, 10**12, 1.5, [], {}, ["x"], {"x": 1}, [{}], float("nan"), "[[0], [0"]
NEEDED = {"drafter": "a:B", "speculative_model": "d", "members": [{"method": "ngram"}] * 2}


def section_of(kind):
    needed = (name for name, field in SECTIONS[kind].model_fields.items() if field.is_required())
    return {"decoding_type": kind, **{key: NEEDED[key] for key in needed if key in NEEDED}}


KEYS = [
    *(((), key) for key in EngineConfig.model_fields),
    *((("resources",), key) for key in ResourcesConfig.model_fields),
    *((("serve",), key) for key in ServeConfig.model_fields),
    *((("serve", "access"), key) for key in AccessConfig.model_fields),
    *((("speculative_config", kind), key) for kind, section in SECTIONS.items()
      for key in section.model_fields),
    *(((), key) for dialect in DIALECTS for key in dialect.engine),
    *((("kv_cache_config",), key) for dialect in DIALECTS for key in dialect.kv_cache),
    *((("speculative_config", kind), key) for dialect in DIALECTS for key in dialect.keys
      for kind in ("NGram", "NGramMod", "Eagle")),
    *((("speculative_config", "NGram"), each) for dialect in DIALECTS
      for each in dialect.selectors),
]  # fmt: skip
KEYS = list(dict.fromkeys(KEYS))


def error_of(where, key, value):
    """The error of a configuration with this value, if it is wrong."""
    data = {"model": "m"}
    held = data
    if where[:1] == ("speculative_config",):
        held = data["speculative_config"] = section_of(where[1])
        if any(key in dialect.selectors for dialect in DIALECTS):
            held.clear()
    else:
        for part in where:
            held[part] = {}
            held = held[part]
    held[key] = value
    try:
        read_args(data)
    except ConfigError as error:
        return error
    return None


def check(message):
    """Properties of every message."""
    assert len(message.splitlines()) == 1 or "is not YAML: " in message  # shows the place
    assert len(message) < 1500
    for poor in (
        r"(allowed|known keys|one of|known): *($|[;,(])",  # an empty list
        r"''\?|ends in ''",
        r"Value error|instance of|after validation|valid (dict|tuple)|Extra inputs|match pattern",
        r"NoneType|dict_keys|frozenset|Input should|Field required|unable to",
        r"(allowed:| or) +(or |$|[;(])",
        r"\(got \)",
    ):
        assert not re.search(poor, message), (poor, message)
    for names in re.findall(r"(?:allowed|known keys): ([^;()]*)", message):
        listed = names.split(", ")
        assert len(set(listed)) == len(listed), "a name is listed twice"
        assert not any(name.startswith("[") for name in listed if len(listed) > 3)
        refused = {name for each in DIALECTS for name, row in each.methods.items()
                   if isinstance(row, Refused)}  # fmt: skip
        assert not refused & set(listed), "a name is offered that is refused"


@pytest.mark.parametrize(("where", "key"), KEYS, ids=lambda part: str(part))
def test_wrong_values_are_named_with_what_is_allowed(where, key):
    for value in VALUES:
        error = error_of(where, key, value)
        if error is None:
            continue
        for each in (error, *error.others):
            assert each.field
            assert each.message.startswith(each.field), each.message
            check(each.message)


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ({"method": "ngram"}, "num_speculative_tokns", "num_speculative_tokens"),
        ({"method": "ngram"}, "prompt_lookup_maxx", "prompt_lookup_max"),
        ({"method": "suffix"}, "suffix_decoding_max_tre_depth", "suffix_decoding_max_tree_depth"),
        ({"decoding_type": "NGram"}, "max_draft_lenn", "max_draft_len"),
        ({"spec_type": "ngram-mod"}, "spec_ngram_mod_n_mach", "spec_ngram_mod_n_match"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_num_draft_token",
         "speculative_num_draft_tokens"),
        ({}, "metod", "method"),
        ({"num_speculative_tokens": 3}, "spec_typ", "spec_type"),
        ({"method": "eagle", "model": "h"}, "draft_tensor_parallel_sise",
         "draft_tensor_parallel_size"),
    ],
)  # fmt: skip
def test_a_misspelt_key_of_another_engines_section(section, key, meant):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", "speculative_config": {**section, key: 3}})
    assert caught.value.message == (
        f"speculative_config.{key}: unknown key; did you mean {meant!r}?"
    )


@pytest.mark.parametrize("key", ["max_draft_len", "decoding_type", "num-speculative-tokens"])
def test_a_key_of_the_section_beside_the_engines(key):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", key: 3})
    assert caught.value.message == (f"{key}: a key of speculative_config; put it into that section")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("gpu_memory_utilisation", "gpu_memory_utilization"), ("enforce_eagr", "enforce_eager"),
     ("max_num_seq", "max_num_seqs"), ("speculative_num_step", "speculative_num_steps")],
)  # fmt: skip
def test_a_misspelt_key_of_another_engine(key, meant):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", key: 3})
    assert caught.value.message == f"{key}: unknown key; did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("section", "field", "meant"),
    [
        ({"method": "egale3"}, "method", "eagle3"),
        ({"decoding_type": "eagle"}, "decoding_type", "Eagle"),
        ({"spec_type": "ngram-mod,draft-simpel"}, "spec_type", "draft-simple"),
        ({"speculative_algorithm": "EAGEL"}, "speculative_algorithm", "EAGLE"),
    ],
)
def test_a_misspelt_drafter(section, field, meant):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", "speculative_config": section})
    assert caught.value.field == f"speculative_config.{field}"
    assert f"did you mean {meant!r}? allowed: " in caught.value.message
    check(caught.value.message)


def test_another_drafters_key_says_whose_it_is():
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(
            {"model": "m", "speculative_config": {"decoding_type": "NGram", "ngram_size_n": 3}}
        )
    assert "it is an option of NGramSimple/NGramMapK" in caught.value.message


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"tp": -1}, "tp"),
        ({"tensor_parallel_size": -1}, "tensor_parallel_size"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": -1}},
            "speculative_config.num_speculative_tokens",
        ),
        (
            {"speculative_config": {"decoding_type": "NGram", "max_draft_len": -1}},
            "speculative_config.max_draft_len",
        ),
    ],
)
def test_a_wrong_value_is_told_under_the_users_own_key(data, field):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", **data})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: at ")


def test_every_error_has_the_users_own_key():
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", "max_num_seqs": 0}, gpu_memory_utilization=1.5)
    assert caught.value.field == "max_num_seqs"
    assert [each.field for each in caught.value.others] == ["gpu_memory_utilization"]


@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_is_no_number(value):
    """YAML reads `yes` and `on` as booleans."""
    for data, field in (
        ({"max_num_seqs": value}, "max_num_seqs"),
        ({"kv_memory_fraction": value}, "kv_memory_fraction"),
        ({"resources": {"threads_per_worker": value}}, "resources.threads_per_worker"),
        (
            {"speculative_config": {"decoding_type": "NGram", "max_draft_len": value}},
            "speculative_config.max_draft_len",
        ),
    ):
        with pytest.raises(ConfigError, match="a number") as caught:
            EngineConfig.load({"model": "m", **data})
        assert caught.value.field == field
