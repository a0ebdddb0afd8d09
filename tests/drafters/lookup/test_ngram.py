"""NGram's pool against a slow reading of its definition, incremental against at once."""

from __future__ import annotations

import random
from array import array

import pytest

from outrider.config import NGramConfig
from outrider.drafters.drafting import Drafting
from outrider.drafters.lookup.base import FirstSeen, NewestSeen
from outrider.drafters.lookup.ngram import NGramPool, ngram
from outrider.tests.helpers import lookups
from outrider.tests.helpers.lookups import growing

from ...helpers.toy import VOCAB, continuation


def learn_slowly(config: NGramConfig, windows: list[list[int]], keep_all: bool = True) -> dict:
    """Every (pattern, match) pair of every window, stored as TensorRT-LLM's code stores them.

    `keep_all` is its `is_keep_all`, which changes nothing that is drafted.
    """
    pool: dict[tuple, list[tuple]] = {}
    for tokens in windows:
        for size in range(min(config.max_matching_ngram_size, len(tokens) - 1), 0, -1):
            for begin in range(len(tokens) - size):
                pattern = tuple(tokens[begin : begin + size])
                match = tuple(tokens[begin + size : begin + size + config.max_draft_len])
                if pattern not in pool or (not keep_all and len(match) > len(pool[pattern][0])):
                    pool[pattern] = [match]
                elif match not in pool[pattern]:
                    longer = [m for m in pool[pattern] if len(m) >= len(match)]
                    pool[pattern] = [*longer, match]
    return pool


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("oldest", [True, False])
def test_pool_follows_its_definition(keep_all, oldest):
    config = NGramConfig(max_draft_len=3, max_matching_ngram_size=3, is_use_oldest=oldest)
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(60)]
    windows = [tokens[:20], tokens[15:33], tokens[28:60]]
    pool = NGramPool(config)
    for window in windows:
        pool.learn(array("i", window), 0, len(window))
    slow = learn_slowly(config, windows, keep_all)
    for _ in range(300):
        tail = tuple(rng.randrange(4) for _ in range(3))
        wanted: tuple[int, ...] = ()
        for size in (3, 2, 1):
            matches = slow.get(tail[3 - size :])
            if matches:
                wanted = matches[0] if oldest else matches[-1]
                break
        assert pool.find(tail)[1] == wanted


def test_shorter_patterns_than_the_minimum_are_not_matched():
    pool = NGramPool(NGramConfig(min_matching_ngram_size=2, max_matching_ngram_size=3))
    pool.learn(array("i", [1, 2, 3, 1, 2]), 0, 5)
    assert pool.find((9, 1, 2)) == (2, (3, 1, 2))
    assert pool.find((9, 9, 2)) == (0, ())


@pytest.mark.parametrize("keep_all", [True, False])
@pytest.mark.parametrize("sizes", [(4, 3), (5, 1), (1, 1), (6, 2), (2, 5)])
def test_an_index_is_a_pool_that_learnt_the_text_at_once(sizes, keep_all):
    largest, length = sizes
    config = NGramConfig(max_matching_ngram_size=largest, max_draft_len=length)
    rng = random.Random(2)
    for vocab in (1, 2, 4, 8):
        request, text = lookups.request_of("a", []), array("i")
        oldest, newest = (kind(request, config, largest) for kind in (FirstSeen, NewestSeen))
        for _ in range(30):
            begin = len(text)
            new = growing(rng, text.tolist(), rng.randrange(1, 9), vocab)
            for tokens in (text, oldest.tokens, newest.tokens):
                tokens.extend(new)
            cut = rng.randrange(begin, len(text) + 1)
            slow = learn_slowly(config, [text.tolist()], keep_all)
            for index, which in ((oldest, 0), (newest, -1)):
                index.take(begin, cut)
                if rng.random() < 0.5:
                    index.match()  # what is asked in between changes nothing
                index.take(cut, len(text))
                tails = [tuple(text[-size:]) for size in range(min(largest, len(text)), 0, -1)]
                known = next((tail for tail in tails if tail in slow), ())
                size, place = index.match()
                assert size == len(known)
                if known:
                    assert tuple(text[place : place + length]) == slow[known][which]


@pytest.mark.parametrize("oldest", [True, False])
def test_what_was_learnt_before_may_be_skipped(oldest):
    config = NGramConfig(max_draft_len=3, max_matching_ngram_size=3, is_use_oldest=oldest)
    rng = random.Random(3)
    tokens = array("i", [rng.randrange(3) for _ in range(200)])
    whole, skipping = NGramPool(config), NGramPool(config)
    at = 0
    while at < len(tokens):
        start, end = max(0, at - whole.num_overlap), min(at + rng.randrange(1, 9), len(tokens))
        whole.learn(tokens[start:end], 0, end - start)
        skipping.learn(tokens, at, end)
        at = end
        tail = tuple(tokens[max(0, end - 3) : end])
        assert whole.find(tail) == skipping.find(tail)


@pytest.mark.parametrize("oldest", [True, False])
def test_a_pool_may_learn_a_text_in_pieces(oldest):
    config = NGramConfig(max_draft_len=4, max_matching_ngram_size=3, is_use_oldest=oldest)
    rng = random.Random(4)
    for length in (1, 2, 5, 60):
        text, pool = array("i", growing(rng, [], length, 3)), NGramPool(config)
        at = 0
        while at < length:
            end = min(length, at + rng.randrange(1, 9))
            pool.learn(text, at, end, is_over=end == length)
            at = end
        for pattern, matches in learn_slowly(config, [text.tolist()]).items():
            assert pool.find(pattern) == (len(pattern), matches[0 if oldest else -1])


@pytest.mark.parametrize("oldest", [True, False])
def test_a_pool_forgets_what_was_learnt_or_found_longest_ago(oldest):
    config = NGramConfig(max_matching_ngram_size=1, max_draft_len=1, is_use_oldest=oldest)
    pool = NGramPool(config)
    pool.learn(array("i", [1, 2, 3, 4, 5]), 0, 5)
    assert pool.find((1,))[1] == (2,)
    pool.learn(array("i", [2, 3]), 0, 2)  # again
    pool.evict(2)  # 3 and 4; 1 was found, 2 learnt again
    assert len(pool) == 2
    assert [pool.find((token,))[1] for token in (1, 2, 3, 4)] == [(2,), (3,), (), ()]
    pool.find((1,))
    pool.evict(1)
    assert [pool.find((token,))[1] for token in (1, 2)] == [(2,), ()]


@pytest.mark.parametrize("oldest", [True, False])
@pytest.mark.parametrize("scope", ["request", "tenant", "replica"])
def test_greedy_output_is_that_of_no_drafter(make_loop, request_of, drive, scope, oldest):
    config = NGramConfig(pool_scope=scope, is_use_oldest=oldest, max_draft_len=6)
    drafting = Drafting(ngram(config), VOCAB)
    loop = make_loop(200, drafting=drafting)
    wanted = {}
    for index in range(12):
        prompt = tuple(range(index % 3, index % 3 + 5)) * 3
        wanted[str(index)] = continuation(prompt, 40)
        loop.add(request_of(str(index), prompt, 40))
    assert drive(loop) == wanted
    assert drafting.stats.faults == 0
    if scope != "request":  # the ninth request is what the first was
        assert drafting.stats.num_acc_tokens > 0


def test_a_long_prompt_is_learnt_in_pieces(make_loop, request_of, drive):
    drafting = Drafting(ngram(NGramConfig(pool_scope="tenant", max_draft_len=6)), VOCAB)
    loop = make_loop(800, max_model_len=3000, drafting=drafting, max_num_batched_tokens=2500)
    rng = random.Random(1)
    prompt = tuple(rng.randrange(VOCAB) for _ in range(2000))
    loop.add(request_of("a", prompt, 60))
    assert drive(loop) == {"a": continuation(prompt, 60)}
    again = continuation(prompt, 60)
    loop.add(request_of("b", prompt, 60))
    before = drafting.stats.num_acc_tokens
    assert drive(loop) == {"b": again}
    assert drafting.stats.num_acc_tokens - before > 20
    assert drafting.stats.faults == 0


def test_tenants_do_not_share(make_loop, request_of, drive):
    drafting = Drafting(ngram(NGramConfig(pool_scope="tenant", max_draft_len=6)), VOCAB)
    loop = make_loop(200, drafting=drafting)
    gained = []
    for name, tenant in (("a", "x"), ("b", "y"), ("c", "x")):
        before = drafting.stats.num_acc_tokens
        loop.add(request_of(name, (1, 2, 3), 40, tenant=tenant))
        drive(loop)
        gained.append(drafting.stats.num_acc_tokens - before)
    assert gained[0] == gained[1] < gained[2]
