"""The two n-gram maps against their definition, with a roomy table and with one full of clashes."""

from __future__ import annotations

import pytest

from outrider.drafters.lookup import ngram_map
from outrider.tests.helpers.lookups import (
    TextOracle,
    drafter_of,
    num_matching,
    observe,
    propose,
    request_of,
    walk,
)


class SlowMap(TextOracle):
    """Of the prompt the last n-gram keeps a slot, of what a look-up adds the last that finds it
    free."""

    keeps_first = False

    def __init__(self, n: int, m: int, slots: int = 2**18, rate: int = 1) -> None:
        super().__init__()
        self.n, self.m, self.slots, self.rate = n, m, slots, rate
        self.tables: dict[str, dict[int, int]] = {}
        self.indexed: dict[str, int] = {}
        self.checked: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.limits: dict[tuple, int] = {}
        self.last: dict[str, tuple] = {}

    def open(self, name, tokens):
        super().open(name, tokens)
        self.tables[name], self.indexed[name], self.checked[name] = {}, 1, 0
        self.prompts[name] = len(tokens)
        self.index(name, [*tokens, -1])  # the newest token is still to come

    def slot(self, gram):
        value = 0
        for token in gram:
            value = (value * 2654435761 + token) % 2**32
        return value % self.slots

    def index(self, name, tokens):
        table, waiting = self.tables[name], self.waiting(name, len(tokens) - 1)
        old = [begin for begin in waiting if begin <= self.prompts[name] - self.n - self.m - 1]
        if not self.keeps_first:
            for begin in old:
                table[self.slot(tokens[begin : begin + self.n])] = begin
            waiting = waiting[len(old) :][::-1]
        for begin in waiting:
            table.setdefault(self.slot(tokens[begin : begin + self.n]), begin)
        self.indexed[name] = max(self.indexed[name], len(tokens) - 1 - self.n - self.m)

    def waiting(self, name, length):
        """Where n-grams begin that are old enough and not in the table."""
        return list(range(self.indexed[name], length - self.n - self.m))

    def one(self, name, tokens, budget):
        n, m, length = self.n, self.m, len(tokens) - 1
        since = length - self.checked[name]
        if length < 2 * n + m or 0 < since < self.rate:
            return []
        self.checked[name] = length
        key = tokens[-n:]
        candidates = [self.tables[name].get(self.slot(key), -1)]
        waiting = self.waiting(name, length)
        candidates += waiting if self.keeps_first else waiting[::-1]
        match = next((c for c in candidates if c > 0 and tokens[c : c + n] == key), None)
        self.index(name, tokens)
        return [] if match is None else self.after(name, tokens, match)[:budget]

    def after(self, name, tokens, match):
        begin = match + self.n
        self.last[name] = (name, *tokens[match:begin])
        return tokens[begin : begin + min(self.m, self.limits.get(self.last[name], self.m))]

    def observe(self, name, drafted, emitted):
        if drafted and emitted:
            self.limits[self.last[name]] = num_matching(drafted, emitted)
        super().observe(name, drafted, emitted)


class SlowMap4(SlowMap):
    keeps_first = True

    def __init__(self, n: int, m: int, min_hits: int) -> None:
        super().__init__(n, m)
        self.min_hits, self.hits = min_hits, {}

    def after(self, name, tokens, match):
        n, m, length = self.n, self.m, len(tokens) - 1
        key = (name, *tokens[match : match + n])
        self.hits[key] = self.hits.get(key, 0) + 1
        if self.hits[key] < self.min_hits:
            return []
        counts: dict[tuple, int] = {}
        for begin in range(1, length - n - m):
            if tokens[begin : begin + n] == list(key[1:]):
                value = tuple(tokens[begin + n : begin + n + m])
                if value in counts or len(counts) < 4:
                    counts[value] = counts.get(value, 0) + 1
        best = max(counts, key=lambda value: counts[value])
        if counts[best] < 2 * (sum(counts.values()) - counts[best]):
            return []
        self.last[name] = (key, best)
        return list(best[: self.limits.get(self.last[name], m)])


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 10)])
@pytest.mark.parametrize("bits", [18, 5])
def test_map_k(n, m, bits, monkeypatch):
    monkeypatch.setattr(ngram_map, "_MASK", 2**bits - 1)
    section = {"decoding_type": "NGramMapK", "ngram_size_n": n, "ngram_size_m": m}
    assert walk(section, SlowMap(n, m, 2**bits), seed=n, vocab=6, steps=200) > 40


class SlowMapHits(SlowMap):
    """`SlowMap`, but what follows the match has to have followed the key as often as asked for."""

    def __init__(self, n: int, m: int, bits: int, min_hits: int) -> None:
        super().__init__(n, m, 2**bits)
        self.min_hits = min_hits

    def after(self, name, tokens, match):
        width = self.n + self.m
        wanted, last = tokens[match : match + width], max(len(tokens) - 1 - width, match + 1)
        num = sum(tokens[begin : begin + width] == wanted for begin in range(1, last))
        return super().after(name, tokens, match) if num >= self.min_hits else []


@pytest.mark.parametrize(("n", "m", "min_hits"), [(1, 1, 4), (2, 1, 2), (1, 3, 2)])
@pytest.mark.parametrize("bits", [18, 3])
def test_map_k_with_hits(n, m, min_hits, bits, monkeypatch):
    monkeypatch.setattr(ngram_map, "_MASK", 2**bits - 1)
    section = {
        "decoding_type": "NGramMapK", "ngram_size_n": n, "ngram_size_m": m, "min_hits": min_hits,
    }  # fmt: skip
    assert walk(section, SlowMapHits(n, m, bits, min_hits), seed=n, vocab=4, steps=200) > 3


def test_a_key_drafts_once_the_same_tokens_have_followed_it_often_enough():
    section = {"decoding_type": "NGramMapK", "ngram_size_n": 2, "ngram_size_m": 2, "min_hits": 2}
    text = [9, 1, 2, 3, 4, 5, 1, 2]
    for prompt, drafted in (
        (text, []),  # followed by 3, 4 once
        ([9, 1, 2, 3, 4, 8, 7, 1, 2, 3, 4, 6, 1, 2], [3, 4]),  # twice
        ([9, 1, 2, 3, 4, 8, 7, 1, 2, 3, 5, 6, 1, 2], []),  # twice, but not by the same
    ):
        drafter = drafter_of(section)
        drafter.open([request_of("a", prompt)])
        assert propose(drafter, ["a"], [8])[0].tokens.tolist() == drafted
    drafter = drafter_of({**section, "min_hits": 1})
    drafter.open([request_of("a", text)])
    assert propose(drafter, ["a"], [8])[0].tokens.tolist() == [3, 4]


@pytest.mark.parametrize(("n", "m", "min_hits"), [(1, 2, 1), (2, 3, 1), (2, 1, 3), (4, 6, 2)])
def test_map_k4v(n, m, min_hits):
    section = {
        "decoding_type": "NGramMapK4V", "ngram_size_n": n, "ngram_size_m": m, "min_hits": min_hits,
    }  # fmt: skip
    assert walk(section, SlowMap4(n, m, min_hits), seed=n, vocab=6, steps=200) > 20


def test_check_rate():
    section = {
        "decoding_type": "NGramMapK", "ngram_size_n": 2, "ngram_size_m": 3, "check_rate": 5
    }  # fmt: skip
    assert walk(section, SlowMap(2, 3, rate=5), seed=1, vocab=4, steps=200) > 20


def test_one_total_rejection_silences_a_key():
    section = {"decoding_type": "NGramMapK", "ngram_size_n": 2, "ngram_size_m": 3}
    drafter = drafter_of(section)
    drafter.open([request_of("a", [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2])])
    assert propose(drafter, ["a"], [8])[0].tokens.tolist() == [3, 4, 5]
    observe(drafter, ["a"], [[6, 1, 2]])
    assert propose(drafter, ["a"], [8])[0].num_nodes == 0


def test_the_last_occurrence_in_the_prompt_drafts():
    """A file's old and new version: what followed in the new one."""
    section = {"decoding_type": "NGramMapK", "ngram_size_n": 2, "ngram_size_m": 2}
    drafter = drafter_of(section)
    drafter.open([request_of("a", [10, 20, 30, 40, 10, 20, 50, 60, 10, 20])])
    assert propose(drafter, ["a"], [8])[0].tokens.tolist() == [50, 60]
    drafter.open([request_of("b", [9, 1, 2, 3, 4, 1, 2, 5, 6, 7, 8])])
    observe(drafter, ["b"], [[1, 2]])
    assert propose(drafter, ["b"], [8])[0].tokens.tolist() == [5, 6]
    # The last n-gram of the prompt whose continuation is all there, at the first look-up.
    drafter.open([request_of("c", [9, 10, 20, 30, 40, 1, 2, 10, 20, 50, 60, 10])])
    observe(drafter, ["c"], [[20]])
    assert propose(drafter, ["c"], [8])[0].tokens.tolist() == [50, 60]
