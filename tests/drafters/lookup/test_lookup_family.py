"""Every drafter that looks tokens up: emits what no drafter emits, keeps to its options."""

from __future__ import annotations

import random

import pytest

from outrider.config import EngineConfig
from outrider.drafters.drafting import Drafting
from outrider.errors import ConfigError
from outrider.scheduler.types import Request, SpeculationOptions, ints
from outrider.tests.helpers.lookups import (
    batch_of,
    drafter_of,
    growing,
    observe,
    propose,
    request_of,
)

from ...helpers import toy
from ...helpers.engines import complete, engine_of
from ...helpers.toy import VOCAB

SMALL_MAP = {"ngram_size_n": 3, "ngram_size_m": 4}
SECTIONS = {
    "PromptLookup": {},
    "NGramSimple": {"ngram_size_n": 3, "ngram_size_m": 6},
    "NGramMapK": SMALL_MAP,
    "NGramMapK4V": SMALL_MAP,
    "NGramMod": {"n_match": 3, "n_min": 2, "max_draft_len": 12},
    "NGramCache": {},
    "Suffix": {"max_draft_len": 12},
    "Suffix, tree": {"max_draft_len": 12, "shape": "tree", "min_token_prob": 0.01},
}
EVERY = pytest.mark.parametrize("name", SECTIONS)


def section_of(name: str) -> dict:
    return {"decoding_type": name.partition(",")[0], **SECTIONS[name]}


def looping(prefix: tuple[int, ...]) -> int:
    """A language that repeats itself with a little variation."""
    place = len(prefix)
    return place % 9 if place % 40 < 37 else (place * 7) % VOCAB


@EVERY
def test_toy_loop_emits_the_same(make_loop, request_of, drive, monkeypatch, name):
    monkeypatch.setattr(toy, "next_token", looping)
    rng = random.Random(2)
    section = section_of(name)
    config = EngineConfig.load({"model": "m", "speculative_config": section})
    drafting = Drafting(drafter_of(section, VOCAB), VOCAB)
    loop = make_loop(128, drafting=drafting, max_draft_len=config.speculative_config.draft_len)
    wanted = {}
    for index in range(10):
        prompt = tuple(at % 9 for at in range(rng.randrange(1, 60)))
        wanted[str(index)] = toy.continuation(prompt, 80)
        loop.add(request_of(str(index), prompt, 80))
    assert drive(loop) == wanted
    stats = drafting.stats
    assert stats.faults == 0
    assert stats.num_acc_tokens > 0.2 * sum(map(len, wanted.values())), stats


@EVERY
def test_hash_language_emits_the_same(make_loop, request_of, drive, name):
    """No repetition beyond chance: drafts are rare and mostly wrong."""
    drafting = Drafting(drafter_of(section_of(name), VOCAB), VOCAB)
    loop = make_loop(40, drafting=drafting, max_draft_len=12)
    rng, wanted = random.Random(7), {}
    for index in range(8):
        prompt = tuple(rng.randrange(6) for _ in range(rng.randrange(1, 50)))
        wanted[str(index)] = toy.continuation(prompt, 30)
        loop.add(request_of(str(index), prompt, 30))
    assert drive(loop) == wanted
    assert drafting.stats.faults == 0


SHARING = {
    "Suffix": {"max_draft_len": 12},
    "NGram": {"max_draft_len": 4, "pool_scope": "tenant"},
    "NGramMod": {"n_match": 3, "n_min": 2, "max_draft_len": 12},
    "NGramCache": {},
}


@pytest.mark.parametrize("first", [False, True], ids=["shared", "isolated"])
@pytest.mark.parametrize("second", [False, True], ids=["shared", "isolated"])
@pytest.mark.parametrize("name", SHARING)
def test_isolated_requests_and_adapters_neither_leave_text_nor_find_any(name, first, second):
    """No token of prompt and output occurs twice, so only another request's text gives drafts."""
    drafter = drafter_of({"decoding_type": name, **SHARING[name]}, 200)
    output = list(range(10, 130))

    def serve(request_id: str, isolated: bool, adapter: str = "") -> int:
        options = SpeculationOptions(isolated=isolated)
        fields = {"speculation": options, "adapter": adapter}
        drafter.open([request_of(request_id, list(range(10)), "", **fields)])
        num_drafted = 0
        for begin in range(0, len(output), 4):
            (draft,) = propose(drafter, [request_id], [4])
            num_drafted += draft.num_nodes
            observe(drafter, [request_id], [output[begin : begin + 4]])
        drafter.close([request_id])
        observe(drafter, [], [])
        return num_drafted

    assert serve("first", first) == 0
    for index in range(4):  # NGramCache goes by what occurred several times
        assert first <= (serve(f"again {index}", first) == 0)
    assert (serve("second", second) > 0) == (not first and not second)
    assert serve("third", True) == 0
    assert serve("fourth", second, "lora") == 0, "an adapter's texts are not the target's"
    assert (serve("fifth", second, "lora") > 0) == (not second and name != "NGramCache")


PROMPTS = [[5, 6, 7, 8, 9, 10] * 6, [11, 12] * 15, list(range(2, 40)) * 2, [3]]


@pytest.fixture(scope="module")
def undrafted(tiny):
    with engine_of(tiny.target) as engine:
        return {
            temperature: complete(engine, PROMPTS, temperature=temperature, max_tokens=48)[0]
            for temperature in (0.0, 0.3)
        }


@EVERY
def test_a_model_emits_the_same(tiny, undrafted, name):
    with engine_of(tiny.target, section_of(name)) as engine:
        for temperature, wanted in undrafted.items():
            assert complete(engine, PROMPTS, temperature=temperature, max_tokens=48)[0] == wanted
            # Once more, now that finished requests have left something behind.
            assert complete(engine, PROMPTS, temperature=temperature, max_tokens=48)[0] == wanted


@EVERY
def test_budgets_are_kept(name):
    rng = random.Random(1)
    drafter = drafter_of(section_of(name), 5)
    drafter.open([request_of(str(index), [0, 1, 2, 3] * 30) for index in range(4)])
    for _ in range(20):
        budgets = [rng.randrange(4) for _ in range(4)]
        drafts = propose(drafter, ["0", "1", "2", "unknown"], budgets)
        assert all(draft.num_nodes <= budget for draft, budget in zip(drafts, budgets))
        assert drafts[3].num_nodes == 0
    drafter.close(["0", "1", "2", "3", "unknown"])
    drafter.shutdown()


@EVERY
def test_a_replayed_request_starts_from_what_was_emitted(name):
    """As after a restart: the same tokens, some of them emitted already."""
    prompt, emitted = [1, 2, 3, 4, 5] * 8, [1, 2, 3, 4, 5] * 2
    whole, parts = drafter_of(section_of(name)), drafter_of(section_of(name))
    whole.open([request_of("a", prompt + emitted)])
    request: Request = request_of("a", prompt, emitted=request_of("", emitted).prompt)
    parts.open([request])
    (one,), (two,) = propose(whole, ["a"], [6]), propose(parts, ["a"], [6])
    assert one.tokens.tolist() == two.tokens.tolist()


CONTINUING = {
    **{name: part for name, part in SECTIONS.items() if "Map" not in name and "Simple" not in name},
    "NGram": {"max_draft_len": 4},
    "NGram, newest": {"is_use_oldest": False},
    "NGram, shared": {"pool_scope": "tenant"},
}


@pytest.mark.parametrize("name", CONTINUING)
def test_what_follows_a_chain_is_looked_up_and_leaves_no_trace(name):
    """As if the chain were the text's end; the next drafts are those of one that was not asked."""
    config = {"decoding_type": name.partition(",")[0], **CONTINUING[name]}
    rng = random.Random(8)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3
    asked, other = drafter_of(config), drafter_of(config)
    for each in (asked, other):
        each.open([request_of("a", [*text, 11, 12])])
        observe(each, ["a"], [[13]])
    chain, room = [1, 2, 3, 4, 5], ints([3])
    (draft,) = asked.extend(batch_of(["a"], [3]), [chain], room)
    assert draft.tokens.tolist()[:3] == [6, 7, 8]
    assert asked.extend(batch_of(["b"], [3]), [chain], room)[0].num_nodes == 0
    num_found = 0
    for _ in range(300):
        size = rng.randrange(1, 4)
        asked.extend(batch_of(["a"], [3]), [rng.choices(range(1, 12), k=size)], room)
        emitted = rng.choices(range(1, 12), k=rng.randrange(1, 4))
        if rng.random() < 0.5:
            begin = rng.randrange(len(text) - 4)
            emitted = text[begin : begin + 4]
        drafts = []
        for each in (asked, other):
            observe(each, ["a"], [emitted])
            drafts += propose(each, ["a"], [4])
        assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
        num_found += drafts[0].num_nodes
    assert num_found > 100


BAD = [
    ({"decoding_type": "NGramSimple", "ngram_size_n": 0}, "ngram_size_n", "got 0"),
    ({"decoding_type": "NGramSimple", "ngram_size_m": 1025}, "ngram_size_m", "got 1025"),
    (
        {"decoding_type": "NGramSimple", "ngram_size_m": 11},
        "ngram_size_m",
        "at least ngram_size_n (12)",
    ),
    ({"decoding_type": "NGramMapK", "check_rate": 0}, "check_rate", "got 0"),
    ({"decoding_type": "NGramMapK", "ngram_size": 3}, "ngram_size", "did you mean 'ngram_size_"),
    ({"decoding_type": "NGramMapK4V", "min_hits": 0}, "min_hits", "got 0"),
    (
        {"decoding_type": "NGramMapK4V", "draft_min": 49},
        "draft_min",
        "draft_min (49) must not exceed",
    ),
    ({"decoding_type": "NGramMod", "n_match": 0}, "n_match", "got 0"),
    ({"decoding_type": "NGramMod", "n_min": 65}, "n_min", "n_min (65) must not exceed"),
    ({"decoding_type": "NGramMod", "n_match": 3, "ngram_size_n": 3}, "ngram_size_n", "given twice"),
    ({"decoding_type": "NGramCache", "lookup_cache_static": ""}, "lookup_cache_static", "file"),
    ({"decoding_type": "PromptLookup", "max_draft_len": 1025}, "max_draft_len", "got 1025"),
    ({"decoding_type": "Suffix", "min_token_prob": 1.5}, "min_token_prob", "got 1.5"),
    ({"decoding_type": "Suffix", "max_tree_depth": 0}, "max_tree_depth", "got 0"),
    ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max", "NGram/PromptLookup"),
]


@pytest.mark.parametrize(("section", "key", "words"), BAD)
def test_mistakes_name_the_key(section, key, words):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load({"model": "m", "speculative_config": section})
    assert caught.value.field == f"speculative_config.{key}"
    assert words in caught.value.message


SPELLINGS = [
    (
        {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_tree_depth": 30,
         "suffix_decoding_max_cached_requests": 7, "suffix_decoding_max_spec_factor": 2.0,
         "suffix_decoding_min_token_prob": 0.2},
        {"decoding_type": "Suffix", "max_draft_len": 32, "max_tree_depth": 30,
         "max_cached_requests": 7, "max_spec_factor": 2.0, "min_token_prob": 0.2},
    ),
    (
        {"method": "ngram-mod", "ngram_size_n": 16, "draft_min": 8, "draft_max": 32},
        {"decoding_type": "NGramMod", "n_match": 16, "n_min": 8, "max_draft_len": 32},
    ),
    (
        {"decoding_type": "NGramMod", "n_max": 50},
        {"decoding_type": "NGramMod", "max_draft_len": 50},
    ),
    ({"method": "ngram-map-k4v"}, {"decoding_type": "NGramMapK4V"}),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), SPELLINGS)
def test_other_engines_spellings(theirs, ours):
    def load(section):
        return EngineConfig.load({"model": "m", "speculative_config": section}).speculative_config

    assert load(theirs) == load(ours)


LEARNERS = {**SECTIONS, "NGram": {}, "NGram, newest": {"is_use_oldest": False}}


@pytest.mark.parametrize("name", LEARNERS)
def test_what_was_learnt_together_drafts_as_what_was_learnt_in_turn(name):
    """Of two drafters with the same text one is asked in every step, for a request of its own."""
    section = {"decoding_type": name.partition(",")[0], **LEARNERS[name]}
    drafters = [drafter_of(section, 50) for _ in range(2)]
    rng, texts = random.Random(3), {"a": [1, 2, 3] * 5, "b": [4, 5, 6, 7] * 4}
    for drafter in drafters:
        drafter.open([request_of(each, text, "of a text") for each, text in texts.items()])
        drafter.open([request_of("asked", [9], "another")])
    for step in range(120):
        emitted = {each: growing(rng, text, rng.randrange(4), 50) for each, text in texts.items()}
        for each, text in texts.items():
            text += emitted[each]
        pieces = [*emitted.values(), []]
        for drafter, is_asked in zip(drafters, (True, False), strict=True):
            if is_asked:
                propose(drafter, ["asked"], [1])
            observe(drafter, [*texts, "asked"], pieces)
        if step % 23 == 22:
            first, second = (propose(each, list(texts), [4, 4]) for each in drafters)
            assert [each.tokens.tolist() for each in first] == [
                each.tokens.tolist() for each in second
            ]
            observe(drafters[0], [], [])
            observe(drafters[1], [], [])
    for drafter in drafters:
        observe(drafter, ["a"], [[7]])
        drafter.close(["a", "b", "asked"])
        assert not drafter._put_off
