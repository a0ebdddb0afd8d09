"""NGramMod against llama.cpp's pool, one look-up at a time; wiping; tenants."""

from __future__ import annotations

import pytest

from outrider.drafters.lookup import ngram_mod
from outrider.tests.helpers.lookups import (
    TextOracle,
    drafter_of,
    num_matching,
    observe,
    propose,
    request_of,
    walk,
)


class SlowPool(TextOracle):
    """All requests index before any drafts."""

    def __init__(self, n: int, n_min: int, n_max: int, slots: int) -> None:
        super().__init__()
        self.n, self.n_min, self.n_max, self.num_slots = n, n_min, n_max, slots
        self.slots: dict[int, int] = {}
        self.indexed: dict[str, int] = {}
        self.low: dict[str, int] = {}
        self.opened: dict[str, int] = {}
        self.num_wiped = 0

    def where(self, gram):
        value = 0
        for token in gram:
            value = (value * 6364136223846793005 + token) % 2**64
        return value % self.num_slots

    def index(self, name):
        history = self.texts[name][: max(len(self.texts[name]) - 1, self.opened[name])]
        for begin in range(self.indexed[name], len(history) - self.n):
            self.slots[self.where(history[begin : begin + self.n])] = history[begin + self.n]
        self.indexed[name] = max(self.indexed[name], len(history) - self.n)

    def open(self, name, tokens):
        super().open(name, tokens)
        self.indexed[name] = self.low[name] = 0
        self.opened[name] = len(tokens)
        self.index(name)
        if len(self.slots) > 0.25 * self.num_slots:
            self.slots.clear()
            self.num_wiped += 1

    def draft(self, budgets):
        for name, budget in budgets.items():
            length = len(self.texts[name]) - 1
            if budget and length >= self.n and length > self.indexed[name] + 32:
                self.index(name)
        return super().draft(budgets)

    def one(self, name, tokens, budget):
        if len(tokens) - 1 < self.n:
            return []
        window, found = tokens[-self.n :], []
        while len(found) < self.n_max and self.where(window) in self.slots:
            found.append(self.slots[self.where(window)])
            window = [*window[1:], found[-1]]
        return found[:budget] if len(found) >= self.n_min else []

    def observe(self, name, drafted, emitted):
        if drafted and emitted:
            if num_matching(drafted, emitted) < 0.25 * len(drafted):
                self.low[name] += 1
            else:
                self.low[name] = 0
            if self.low[name] == 5:
                self.slots.clear()
                self.num_wiped += 1
                self.low[name] = self.indexed[name] = 0
        super().observe(name, drafted, emitted)


@pytest.mark.parametrize(("n", "n_min", "n_max"), [(1, 0, 9), (3, 2, 20), (6, 4, 40)])
@pytest.mark.parametrize("bits", [22, 8])
def test_against_single_look_ups(n, n_min, n_max, bits, monkeypatch):
    monkeypatch.setattr(ngram_mod, "NUM_SLOTS", 2**bits)
    section = {
        "decoding_type": "NGramMod", "n_match": n, "n_min": n_min, "max_draft_len": n_max
    }  # fmt: skip
    oracle = SlowPool(n, n_min, n_max, 2**bits)
    assert walk(section, oracle, seed=n, vocab=30, steps=80, num_requests=4) > 50
    if bits == 8 and n > 1:
        assert oracle.num_wiped > 0


def rejected(drafter, name, times):
    for _ in range(times):
        (draft,) = propose(drafter, [name], [64])
        assert draft.num_nodes
        observe(drafter, [name], [[49, 1, 2, 3]])


def test_five_bad_drafts_in_a_row_wipe_the_pool():
    drafter = drafter_of({"decoding_type": "NGramMod", "n_match": 3, "n_min": 1})
    phrase = [1, 2, 3, 4, 5, 6, 7, 8]
    drafter.open([request_of("other", [11, 12, 13, 14, 15]), request_of("a", [*phrase, 1, 2, 3])])
    before = drafter._pools["", ""].used
    rejected(drafter, "a", 5)
    used = drafter._pools["", ""].used
    assert before == 8 + 2
    assert used == 0
    observe(drafter, ["a"], [list(range(20, 40))])
    assert not propose(drafter, ["other", "a"], [64, 64])[0].num_nodes
    assert drafter._memories["a"].num_grams > 20, "indexed again from the start"


def test_the_prompts_last_token_is_a_successor():
    drafter = drafter_of({"decoding_type": "NGramMod", "n_match": 16, "n_min": 14})
    drafter.open([request_of("a", list(range(100, 200)))])
    observe(drafter, ["a"], [list(range(170, 186))])
    assert propose(drafter, ["a"], [64])[0].tokens.tolist() == list(range(186, 200))


def test_a_wiped_pool_learns_the_steps_tokens():
    """As in llama.cpp, where a request indexes again when it drafts next."""
    drafter = drafter_of({"decoding_type": "NGramMod", "n_match": 3, "n_min": 1})
    drafter.open([request_of("a", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])])
    rejected(drafter, "a", 4)
    assert propose(drafter, ["a"], [64])[0].num_nodes
    observe(drafter, ["a"], [[49, *range(20, 40), 20, 21, 22]])  # the fifth
    assert propose(drafter, ["a"], [4])[0].tokens.tolist() == [23, 24, 25, 26]


def test_a_pool_is_shared_within_a_tenant_only():
    drafter = drafter_of({"decoding_type": "NGramMod", "n_match": 2, "n_min": 1, "max_pools": 2})
    drafter.open([request_of("a", [1, 2, 3, 4, 5, 6], "x")])
    drafter.open([request_of("b", [7, 8, 1, 2], "x"), request_of("c", [7, 8, 1, 2], "y")])
    drafts = propose(drafter, ["b", "c"], [3, 3])
    assert [draft.tokens.tolist() for draft in drafts] == [[3, 4, 5], []]


def test_pools_are_bounded():
    drafter = drafter_of({"decoding_type": "NGramMod", "n_match": 2, "n_min": 1, "max_pools": 1})
    drafter.open([request_of("a", [1, 2, 3, 4], "x"), request_of("b", [1, 2, 3, 4, 1, 2], "y")])
    assert set(drafter._pools) == {("x", "")}
    assert not propose(drafter, ["b"], [3])[0].num_nodes
    observe(drafter, ["b"], [[1]])
    drafter.close(["a", "b"])
    drafter.open([request_of("c", [1, 2, 3, 4, 5, 1, 2], "y")])
    assert set(drafter._pools) == {("y", "")}
    assert propose(drafter, ["c"], [2])[0].tokens.tolist() == [3, 4]
