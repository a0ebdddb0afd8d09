"""Engines whose steps overlap with the workers: the plain tokens, and equal seats on every rank."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.scheduler.budget import DraftBudget
from outrider.scheduler.loop import Loop, OverlapLoop
from outrider.workers.group import LocalGroup

from ..helpers.engines import complete, engine_of, random_prompts

PROMPTS = random_prompts(8, 96)
SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "logit_bias": {5: 1.5},
    "min_tokens": 4,
    "logprobs": 2,
}
SECTIONS = {
    "none": None,
    "look-up": {"decoding_type": "NGram", "max_draft_len": 4},
    "trees": {"decoding_type": "Suffix", "shape": "tree", "max_draft_len": 8},
    "draft model": {"decoding_type": "DraftTarget", "max_draft_len": 3},
}


@pytest.fixture(scope="module")
def plain(tiny):
    with engine_of(tiny.target) as engine:
        assert type(engine._loop) is Loop
        return [complete(engine, PROMPTS, at_once=1, **each)[0] for each in ({}, SAMPLED)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SECTIONS)
def test_the_plain_tokens_on_equal_ranks(tiny, plain, monkeypatch, size, name):
    """Drafters rest now and then: these steps are posted ahead, those with drafts are not."""
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    rng = random.Random(0)
    monkeypatch.setattr(DraftBudget, "rests", lambda self, num_running: rng.random() < 0.6)
    section = SECTIONS[name]
    if name == "draft model":
        section = {**section, "speculative_model": tiny.draft}
    with engine_of(tiny.target, section, tensor_parallel_size=size) as engine:
        assert type(engine._loop) is OverlapLoop
        for at_once in (1, 8) if size == 1 else (8,):
            for sampling, wanted in zip(({}, SAMPLED), plain):
                assert complete(engine, PROMPTS, at_once=at_once, **sampling)[0] == wanted
        seats = [worker._target._seats for worker in engine._host.target_group._workers]
    assert len(seats) == size
    for other in seats[1:]:  # every rank has appended what all of them emitted
        assert np.array_equal(other._tokens, seats[0]._tokens)
        assert np.array_equal(other._num_tokens, seats[0]._num_tokens)


def test_it_can_be_turned_off(tiny, monkeypatch):
    monkeypatch.setattr(LocalGroup, "is_concurrent", True)
    with engine_of(tiny.target, overlap_scheduling=False) as engine:
        assert type(engine._loop) is Loop
