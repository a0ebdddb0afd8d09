"""NGram's pool against a slow reading of its definition, incremental against at once."""

from __future__ import annotations

import random

import pytest

from outrider.config import NGramConfig
from outrider.drafters.ngram import NGramPool


def learn_slowly(config: NGramConfig, windows: list[list[int]]) -> dict:
    """Every (pattern, match) pair of every window, stored by the published rules."""
    pool: dict[tuple, list[tuple]] = {}
    for tokens in windows:
        for size in range(min(config.max_matching_ngram_size, len(tokens) - 1), 0, -1):
            for begin in range(len(tokens) - size):
                pattern = tuple(tokens[begin : begin + size])
                match = tuple(tokens[begin + size : begin + size + config.max_draft_len])
                if pattern not in pool or (
                    not config.is_keep_all and len(match) > len(pool[pattern][0])
                ):
                    pool[pattern] = [match]
                elif match not in pool[pattern]:
                    longer = [m for m in pool[pattern] if len(m) >= len(match)]
                    pool[pattern] = [*longer, match]
    return pool


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("oldest", [True, False])
def test_pool_follows_its_definition(keep_all, oldest):
    config = NGramConfig(
        max_draft_len=3, max_matching_ngram_size=3, is_keep_all=keep_all, is_use_oldest=oldest
    )
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(60)]
    windows = [tokens[:20], tokens[15:33], tokens[28:60]]
    pool = NGramPool(config)
    for window in windows:
        pool.update(window)
    slow = learn_slowly(config, windows)
    for _ in range(300):
        tail = tuple(rng.randrange(4) for _ in range(3))
        wanted: tuple[int, ...] = ()
        for size in (3, 2, 1):
            matches = slow.get(tail[3 - size :])
            if matches:
                wanted = matches[0] if oldest else matches[-1]
                break
        assert pool.find(tail) == wanted


def test_shorter_patterns_than_the_minimum_are_not_matched():
    pool = NGramPool(NGramConfig(min_matching_ngram_size=2, max_matching_ngram_size=3))
    pool.update([1, 2, 3, 1, 2])
    assert pool.find((9, 1, 2)) == (3, 1, 2)
    assert pool.find((9, 9, 2)) == ()
