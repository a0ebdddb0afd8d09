"""NGramCache against llama.cpp's rules spelt out over plain counts; tenants; the past."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.drafters.lookup.ngram_cache import CountTable, DynamicTables, NGramCache
from outrider.tests.helpers import lookups
from outrider.tests.helpers.lookups import (
    TextOracle,
    counts_of,
    drafter_of,
    observe,
    propose,
    request_of,
    walk,
)


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


LAX = {1: (2, 66), 2: (2, 50), 3: (1, 50), 4: (1, 50)}
STRICT = {1: (4, 75), 2: (3, 66), 3: (2, 66), 4: (2, 66)}


def counted(texts, order, key):
    """token -> [count, when it got there]; in the order of first sight."""
    counts: dict[int, list[int]] = {}
    for text in texts:
        for end in range(order, len(text)):
            if text[end - order : end] == key:
                entry = counts.setdefault(text[end], [0, 0])
                entry[0] += 1
                entry[1] = sum(each[0] for each in counts.values())
    return counts


class SlowCache(TextOracle):
    def __init__(self, corpus: list[int], past: list[list[int]]) -> None:
        super().__init__()
        self.corpus, self.past = corpus, past

    def one(self, name, tokens, budget):
        found: list[int] = []
        while len(found) < budget and len(tokens) >= 2:
            token = self.next(self.texts[name], tokens + found)
            if token is None:
                break
            found.append(token)
        return found

    def next(self, known, tail):
        static = counted([self.corpus], 2, tail[-2:])
        token = self.pick([known], tail, static, LAX)
        if token is None:
            token = self.pick(self.past, tail, static, STRICT)
        if token is None and static:
            best = min(static, key=lambda t: (-static[t][0], static[t][1]))
            total = sum(each[0] for each in static.values())
            if total >= 2 and 100 * static[best][0] >= 50 * total:
                token = best
        return token

    def pick(self, texts, tail, static, limits):
        for order in (4, 3, 2, 1):
            counts = counted(texts, order, tail[-order:]) if len(tail) >= order else {}
            if not counts:
                continue
            first = min(counts, key=lambda t: (-counts[t][0], counts[t][1]))
            weight = {t: 100 * static[t][0] if t in static else 1 for t in counts}
            order_of = [first, *(t for t in counts if t != first)]
            best = max(order_of, key=lambda t: counts[t][0] * weight[t])
            total = sum(each[0] for each in counts.values())
            least, percent = limits[order]
            if total >= least and 100 * counts[best][0] >= percent * total:
                return best
        return None


@pytest.mark.parametrize("with_corpus", [False, True])
@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_against_plain_counts(with_corpus, with_past, seed, monkeypatch):
    rng = random.Random(seed)
    corpus = lookups.growing(rng, [], 60, 8) if with_corpus else []
    past = [lookups.growing(rng, [], 60, 8)] if with_past else []

    def primed(section, vocab_size, tokenizer=None):
        drafter = drafter_of(section, vocab_size)
        assert isinstance(drafter, NGramCache)
        drafter._static.extend(np.array(corpus, dtype=np.int32), 0)
        for index, text in enumerate(past):
            drafter.open([request_of(f"past {index}", text)])
            drafter.close([f"past {index}"])
        drafter.dynamic.work()
        return drafter

    monkeypatch.setattr(lookups, "drafter_of", primed)
    section = {"decoding_type": "NGramCache", "max_draft_len": 6}
    assert walk(section, SlowCache(corpus, past), seed=seed, vocab=8, prompt_len=30, steps=25) > 50


def finish(drafter, name, text, tenant):
    drafter.open([request_of(name, text, tenant)])
    drafter.close([name])


def test_the_past_is_a_tenants_own():
    drafter = drafter_of({"decoding_type": "NGramCache"})
    finish(drafter, "1", [1, 2, 3, 4, 5] * 3, "x")
    for _ in range(3):
        observe(drafter, [], [])  # some entries a step
    drafter.open([request_of("a", [9, 1, 2], "x"), request_of("b", [9, 1, 2], "y")])
    drafts = propose(drafter, ["a", "b"], [3, 3])
    assert [draft.tokens.tolist() for draft in drafts] == [[3, 4, 5], []]


@pytest.mark.parametrize("max_entries", [1, 30, 100, 1000])
def test_the_past_is_bounded(max_entries):
    drafter = drafter_of({"decoding_type": "NGramCache", "max_dynamic_entries": max_entries})
    rng, dynamic = random.Random(0), drafter.dynamic
    for index in range(20):
        finish(drafter, str(index), [rng.randrange(50) for _ in range(50)], str(index % 3))
        dynamic.work()
        sizes = {tenant: past.num_keys for tenant, past in dynamic._pasts.items()}
        assert sum(sizes.values()) == dynamic.num_keys <= max_entries
        assert dynamic._sizes == {tenant: size for tenant, size in sizes.items() if size}
    assert dynamic.num_keys >= max_entries // 4


def test_what_is_counted_again_outlives_its_generation():
    dynamic = DynamicTables(200)
    rng, often = random.Random(1), ids([1, 2, 3, 1, 2, 4, 1, 2, 3])
    for _ in range(40):
        for text in (often, ids([rng.randrange(5, 500) for _ in range(8)])):
            table = CountTable()
            table.extend(text, 0)
            dynamic.join("x", table)
        dynamic.work()
    assert dynamic.num_keys <= 200
    (known,) = [counts_of(each) for each in dynamic.arrays() if each.keys.shape[1] == 2]
    assert known[1, 2] == {3: 80, 4: 40}


def test_a_file_that_fits_is_taken_in_whole():
    tables = []
    for tenant, length in (("b", 20), ("a", 150)):
        table = CountTable()
        table.extend(ids(np.random.default_rng(length).integers(0, 500, length)), 0)
        tables += table.arrays(tenant)
    dynamic = DynamicTables(sum(len(each.keys) for each in tables))
    dynamic.fill(tables)
    assert contents(dynamic.arrays()) == contents(tables)


def contents(tables):
    return {(each.tenant, each.keys.shape[1]): counts_of(each) for each in tables}
