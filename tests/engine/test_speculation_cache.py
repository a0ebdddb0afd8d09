"""Engines whose draft model prepares the next round: the same tokens, drafts from the cache."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig
from outrider.errors import ConfigError

from ..helpers.engines import complete, engine_of, random_prompts

PROMPTS = random_prompts(6, 96)
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
CACHE = {"outcomes": 12, "adaptive": False}


def section_of(draft: str, kind: str = "DraftTarget", **options) -> dict:
    options = {"max_draft_len": 3, "speculation_cache": CACHE, **options}
    return {"decoding_type": kind, "speculative_model": draft, **options}


@pytest.fixture(scope="module")
def plain(tiny):
    with engine_of(tiny.target) as engine:
        return [complete(engine, PROMPTS, at_once=1, **each)[0] for each in ({}, SAMPLED)]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["DraftTarget", "PARD"])
def test_the_plain_tokens_with_prepared_drafts(tiny, plain, kind, size):
    masks = {"mask_token_id": 9} if kind == "PARD" else {}
    section = section_of(tiny.draft, kind, **masks, draft_tensor_parallel_size=size)
    with engine_of(tiny.target, section) as engine:
        for at_once in (1, 6):
            for sampling, wanted in zip(({}, SAMPLED), plain):
                assert complete(engine, PROMPTS, at_once=at_once, **sampling)[0] == wanted
        (stats,) = engine.stats()["drafters"].values()
        cache = stats["speculation_cache"]
        assert stats["faults"] == 0
        assert cache["num_hits"] > 0.5 * cache["num_lookups"]
        # A verdict that comes later than the engine's message begins nothing: on a busy machine,
        # one run may have only such verdicts.
        for _ in range(20):
            (stats,) = engine.stats()["drafters"].values()
            if size > 1 or stats["speculation_cache"]["num_begun"]:
                break
            assert complete(engine, PROMPTS, at_once=6, **SAMPLED)[0] == plain[1]
    assert (stats["speculation_cache"]["num_begun"] > 0) == (size == 1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_prepared_draft_is_the_one_that_is_drawn_after_the_verdict(tiny, rule):
    """With its distributions: these rules emit other tokens for another draft or another row."""
    found = []
    for cache in (None, {**CACHE, "on_miss": "draft"}):
        section = section_of(tiny.draft, verification=rule, speculation_cache=cache)
        with engine_of(tiny.target, section) as engine:
            found.append(complete(engine, PROMPTS, at_once=6, **SAMPLED)[0])
            (stats,) = engine.stats()["drafters"].values()
    assert found[0] == found[1]
    assert stats["speculation_cache"]["num_hits"] > 0
    assert stats["faults"] == 0


def test_what_the_cache_cannot_do_is_refused(tiny):
    for wrong, message in (
        ({"placement": "colocated"}, "speculation_cache belongs to placement 'separate'"),
        ({"speculation_cache": {"depth": 4}}, r"speculation_cache\.depth \(4\) must not exceed"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.load(
                {"model": tiny.target, "speculative_config": section_of(tiny.draft, **wrong)}
            )


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(tiny):
    with (
        pytest.raises(ConfigError, match="vocabulary") as caught,
        engine_of(tiny.target, section_of(tiny.other_vocabulary)),
    ):
        pass
    assert caught.value.field == "speculative_config.speculative_model"
