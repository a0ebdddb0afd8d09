"""`adaptive_draft_len` on whole engines: the plain tokens, whatever lengths are chosen."""

from __future__ import annotations

import pytest

from outrider.config.section import MEASURE_S
from outrider.scheduler.draft_lengths import DraftLengths
from outrider.workers.group import LocalGroup

from ..helpers.engines import complete, engine_of, random_prompts

PROMPTS = random_prompts(6, 96)
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
SECTIONS = {
    "chain": {"decoding_type": "NGram", "max_draft_len": 5, "max_matching_ngram_size": 1},
    "tree": {"decoding_type": "Suffix", "shape": "tree", "max_draft_len": 12},
    "both": {
        "decoding_type": "Compose",
        "mode": "merge",
        "members": [{"decoding_type": "NGram", "max_draft_len": 3}, {"decoding_type": "Suffix"}],
    },
}


@pytest.fixture(scope="module")
def plain(tiny):
    with engine_of(tiny.target) as engine:
        return [complete(engine, PROMPTS, at_once=1, **each)[0] for each in ({}, SAMPLED)]


@pytest.mark.parametrize("name", [*SECTIONS, "draft model"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_plain_tokens_at_any_length(tiny, plain, monkeypatch, name, overlaps):
    monkeypatch.setattr(LocalGroup, "is_concurrent", overlaps)
    granted = []
    grant = DraftLengths._grant

    def grant_and_note(self) -> None:
        grant(self)
        # Other lengths than any machine would choose, so that every run meets many.
        for index, lately in enumerate(self._requests.values()):
            lately.granted = (0, 1, 2, self._most)[(len(granted) // 8 + index) % 4]
        self._grants_any, self._plan_left = True, 1
        granted.append([each.granted for each in self._requests.values()])

    monkeypatch.setattr(DraftLengths, "_grant", grant_and_note)
    draft = {"decoding_type": "DraftTarget", "speculative_model": tiny.draft, "max_draft_len": 3}
    section = {**SECTIONS.get(name, draft), "adaptive_draft_len": True}
    with engine_of(tiny.target, section) as engine:
        for sampling, wanted in zip(({}, SAMPLED), plain):
            assert complete(engine, PROMPTS, at_once=6, **sampling)[0] == wanted
        stats = engine.stats()["speculation"]["adaptive"]
    lengths = {each for plan in granted for each in plan}
    assert {0, 1, 2} <= lengths
    assert stats["acceptance"][0] > 0


@pytest.mark.parametrize("seconds", ["0.01", "0"])
def test_on_unless_a_fixed_length_is_asked_for(tiny, monkeypatch, seconds):
    """And where lengths decide which of the right tokens a seed draws, or nothing is measured."""
    monkeypatch.setenv(MEASURE_S, seconds)
    for section, is_on in (
        ({}, seconds != "0"),
        ({"adaptive_draft_len": False}, False),
        ({"verification": "rejection"}, False),
        ({"verification": "rejection", "adaptive_draft_len": True}, True),
    ):
        with engine_of(
            tiny.target, {"adaptive_draft_len": None, **SECTIONS["chain"], **section}
        ) as engine:
            found = engine.stats()["speculation"]["adaptive"]
        assert (found and found["nodes"]) == ([1] * 5 if is_on else None), section


def test_a_window_among_the_drafters_is_whole_or_absent(tiny, plain):
    window = {"decoding_type": "Lookahead", "max_window_size": 3, "max_ngram_size": 3}
    members = [{"decoding_type": "NGram", "max_draft_len": 3}, window]
    for section in (window, {"decoding_type": "Compose", "mode": "merge", "members": members}):
        with engine_of(tiny.target, {"adaptive_draft_len": True, **section}) as engine:
            for sampling, wanted in zip(({}, SAMPLED), plain):
                assert complete(engine, PROMPTS, at_once=3, **sampling)[0] == wanted
            found = engine.stats()["speculation"]
        assert found["adaptive"]["nodes"] == [found["max_draft_len"]]
