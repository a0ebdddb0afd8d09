"""`deterministic: true` on whole engines: bf16 text that depends on neither drafts nor load."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from outrider.config import EngineConfig
from outrider.engine.preflight import check_trees
from outrider.errors import ConfigError

from ..helpers.engines import complete, engine_of, random_prompts

NGRAM = {"decoding_type": "NGram", "max_draft_len": 6, "max_matching_ngram_size": 1}
OPTIONS = {"dtype": "bfloat16", "deterministic": True}


def test_text_depends_on_no_other_request_draft_chunk_or_hit(tiny):
    prompts = random_prompts(6, 96, longest=60)
    with engine_of(tiny.target, **OPTIONS, max_num_batched_tokens=16) as engine:
        assert engine.info.operations == "cpu, batch-invariant"
        alone, _ = complete(engine, prompts, at_once=1)
        again, _ = complete(engine, prompts, at_once=6)  # after prefix hits
        assert engine.stats()["requests"]["num_hit_tokens"] > 0
    with engine_of(tiny.target, NGRAM, **OPTIONS) as engine:
        drafted, last = complete(engine, prompts, at_once=6)
        assert sum(delta.usage.num_accepted_tokens for delta in last.values()) > 0
    assert alone == again == drafted


DEMO = Path(__file__).resolve().parents[2] / "demo" / "models"
TALK = [[300, 20, 41, 300, 20], [77, 9, 300, 18, 4, 9], [301, 302, 303]]


@cache
def without_heads(size: int):
    """Texts on so many ranks."""
    with engine_of(str(DEMO / "target"), **OPTIONS, tensor_parallel_size=size) as engine:
        return complete(engine, TALK, at_once=1)[0]


@pytest.mark.parametrize(
    "section",
    [
        {"decoding_type": "Eagle3", "max_draft_len": 3},
        {"decoding_type": "MTP", "max_draft_len": 3},
        {"decoding_type": "Medusa"},
        {"decoding_type": "ReDrafter", "redrafter_num_beams": 1},
    ],
    ids=lambda section: section["decoding_type"],
)
def test_heads_as_chains_change_nothing(section):
    section = {**section, "speculative_model": str(DEMO / section["decoding_type"].lower())}
    with engine_of(str(DEMO / "target"), section, **OPTIONS) as engine:
        drafted, last = complete(engine, TALK, at_once=3)
        assert sum(delta.usage.num_draft_tokens for delta in last.values()) > 0
    assert drafted == without_heads(1)


@pytest.mark.parametrize(
    ("section", "is_chain"),
    [
        ({"decoding_type": "Eagle3", "max_draft_len": 3}, True),
        ({"decoding_type": "Eagle3", "use_dynamic_tree": True}, False),
        ({"decoding_type": "Eagle3", "use_dynamic_tree": True, "dynamic_tree_max_topK": 1}, True),
        ({"decoding_type": "Eagle3", "eagle_choices": [[0], [0, 0]]}, True),
        ({"decoding_type": "Eagle3", "eagle_choices": [[0], [1]]}, False),
        ({"decoding_type": "MTP", "num_nextn_predict_layers": 2}, True),
        ({"decoding_type": "Medusa"}, True),
        ({"decoding_type": "Medusa", "medusa_choices": [[0], [0, 1]]}, True),
        ({"decoding_type": "Medusa", "medusa_choices": [[0], [1], [0, 1]]}, False),
        ({"decoding_type": "ReDrafter"}, False),
        ({"decoding_type": "ReDrafter", "redrafter_num_beams": 1}, True),
    ],
)
def test_a_heads_shape_is_that_of_its_section(section, is_chain):
    config = EngineConfig.load(
        {"model": "m", "speculative_config": {"speculative_model": "h", **section}}
    )
    assert config.speculative_config.is_chain == is_chain


TREES = [
    {"decoding_type": "Eagle3", "use_dynamic_tree": True, "max_draft_len": 3},
    {"decoding_type": "Medusa", "medusa_choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0]]},
    {"decoding_type": "ReDrafter"},
    {"decoding_type": "Suffix", "shape": "tree"},
    {"decoding_type": "Lookahead"},
]


@pytest.mark.parametrize(
    ("section", "size"),
    [*((section, 1) for section in TREES), (TREES[0], 2), (TREES[3], 2)],
    ids=lambda each: each["decoding_type"] if isinstance(each, dict) else None,
)
def test_trees_change_nothing(section, size):
    """Nodes of a tree attend to their paths alone, in the order of a plain step."""
    if (folder := DEMO / section["decoding_type"].lower()).is_dir():
        section = {**section, "speculative_model": str(folder)}
    options = {**OPTIONS, "tensor_parallel_size": size}
    expected = without_heads(size)
    with engine_of(str(DEMO / "target"), section, **options) as engine:
        drafted, last = complete(engine, TALK, at_once=3)
        assert sum(delta.usage.num_accepted_tokens for delta in last.values()) > 0
    assert drafted == expected


def test_trees_want_whole_tiles(tiny):
    section = {"decoding_type": "Suffix", "shape": "tree"}
    with (
        pytest.raises(ConfigError, match="^block_size: 24 does not divide 256") as error,
        engine_of(tiny.target, section, **OPTIONS, block_size=24),
    ):
        pass
    assert error.value.field == "block_size"


def test_trees_are_refused_on_gpus(config):
    config = config.model_copy(update={"deterministic": True})
    with pytest.raises(ConfigError, match="^deterministic: drafts must be chains on GPUs"):
        check_trees(config, "triton, batch-invariant")
