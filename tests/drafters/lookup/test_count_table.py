"""Counted n-grams against dicts of dicts: counting, merging, and into a file's arrays and back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.drafters.lookup.kernels import ngrams as loops
from outrider.drafters.lookup.ngram_cache import CountTable
from outrider.drafters.lookup.ngram_file import Arrays
from outrider.tests.helpers.lookups import counts_of, growing


def slow_counts(texts, order):
    """key -> token -> count, both in order of first sight."""
    counts: dict = {}
    for text in texts:
        for end in range(order, len(text)):
            some = counts.setdefault(tuple(text[end - order : end]), {})
            some[text[end]] = some.get(text[end], 0) + 1
    return counts


def likeliest(texts, key):
    """The token that reached the highest count first."""
    best, counts = -1, {-1: 0}
    for text in texts:
        for end in range(len(key), len(text)):
            if tuple(text[end - len(key) : end]) == key:
                counts[text[end]] = counts.get(text[end], 0) + 1
                if counts[text[end]] > counts[best]:
                    best = text[end]
    return best


def in_order(counts):
    return [(key, list(some.items())) for key, some in counts.items()]


def check(table, texts, *, is_exact=True):
    wanted = {order: slow_counts(texts, order) for order in range(1, 5)}
    found = {each.keys.shape[1]: counts_of(each) for each in table.arrays("t")}
    for order, counts in wanted.items():
        assert found.get(order, {}) == counts
        if is_exact:
            assert in_order(found.get(order, {})) == in_order(counts)
    assert table.num_keys == sum(map(len, wanted.values()))
    for row in table.rows[: table.num_rows]:
        if row[3] != loops.PAIR:
            key = tuple(int(token) for token in row[:4][::-1] if token >= 0)
            some = wanted[len(key)][key]
            assert row[loops.TOTAL] == sum(some.values())
            assert row[loops.BEST_COUNT] == max(some.values()) == some[row[loops.BEST]]
            if is_exact:
                assert row[loops.BEST] == likeliest(texts, key)


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


def table_of(*texts):
    table = CountTable()
    for text in texts:
        table.extend(ids(text), 0)
    return table


@pytest.mark.parametrize("vocab", [1, 3, 40, 2**31 - 1])
def test_counts(vocab):
    rng = random.Random(vocab)
    table, text = CountTable(), []
    for _ in range(12):
        begin = len(text)
        text += growing(rng, text, rng.randrange(30), vocab)
        table.extend(ids(text), begin)
        check(table, [text])


@pytest.mark.parametrize("vocab", [3, 40])
def test_merging_adds_and_brings_what_was_older(vocab):
    rng = random.Random(vocab)
    for _ in range(5):
        texts = [growing(rng, [], 60, vocab) for _ in range(3)]
        older, source = table_of(*texts[:2]), table_of(texts[2])
        whole = CountTable()
        middle = source.num_rows // 2
        whole.merge(source, 0, middle, older)
        whole.merge(source, middle, source.num_rows, older)
        for arrays in whole.arrays("t"):
            order = arrays.keys.shape[1]
            wanted = slow_counts(texts, order)
            known = slow_counts(texts[2:], order)
            assert counts_of(arrays) == {key: wanted[key] for key in known}
        whole.merge(older, 0, older.num_rows, CountTable(), is_only_new=True)
        check(whole, texts, is_exact=False)


def test_a_files_tables_come_back():
    rng = random.Random(0)
    text = growing(rng, [], 300, 9)
    table, copy = table_of(text), CountTable()
    for arrays in table.arrays("t"):
        copy.fill(arrays)
    check(copy, [text], is_exact=False)
    assert [counts_of(each) for each in copy.arrays("t")] == [
        counts_of(each) for each in table.arrays("t")
    ]


def test_counts_saturate():
    table, most = CountTable(), 2**31 - 1
    arrays = Arrays("", ids([[1]]), ids([2]), ids([[2, most], [3, most - 1]]))
    table.fill(arrays)
    table.fill(arrays)
    assert counts_of(table.arrays("")[0]) == {(1,): {2: most, 3: most}}
