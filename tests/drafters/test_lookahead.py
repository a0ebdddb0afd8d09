"""Lookahead: the window against a Jacobi iteration written out by positions, and exactness."""

from __future__ import annotations

import pytest

from outrider.config import LookaheadConfig, parse
from outrider.drafters.drafting import Drafting
from outrider.drafters.lookahead import GuessPool, Lookahead, Window
from outrider.errors import ConfigError
from outrider.scheduler import tree
from outrider.scheduler.types import ints

from ..helpers.engines import complete, engine_of, plain_outputs, random_prompts
from ..helpers.toy import VOCAB, continuation, next_token

SHAPES = [(2, 2, 1), (4, 3, 4), (3, 5, 2), (7, 5, 7)]


def config(window: int, ngram: int, guesses: int) -> LookaheadConfig:
    return LookaheadConfig(
        max_window_size=window, max_ngram_size=ngram, max_verification_set_size=guesses
    )


def found_by_hand(prefix: list[int], levels: list[list[int]]) -> list[int]:
    """What a model finds below the deepest level, by the published mask: cell (l, i) sees the
    prefix, level-0 columns up to i, and the cells (1..l, i) of its own column."""
    width = len(levels[-1]) + (len(levels) == 1)  # the root is column 0 of level 0
    found = []
    for column in range(width):
        seen = [*prefix, *levels[0][:column], *(level[column] for level in levels[1:])]
        found.append(next_token(tuple(seen)))
    return found


@pytest.mark.parametrize(("window", "ngram", "guesses"), SHAPES)
def test_the_tree_is_the_published_window(window, ngram, guesses):
    shape = config(window, ngram, guesses)
    text = [1, 2, 3, *continuation((1, 2, 3), 40)]
    jacobi = Window(shape, text[:3], seed=5)
    for step in range(20):
        prefix = text[: 3 + step]
        cells, parents = jacobi.nodes(0)
        # Walking a cell's ancestors in the tree reads what the mask lets it see.
        after = []
        for node in range(len(cells)):
            path, at = [], node
            while at >= 0:
                path.append(cells[at])
                at = parents[at]
            after.append(next_token((*prefix, *reversed(path))))
        width = len(jacobi.levels[-1])
        found = after[len(after) - width :]
        if len(jacobi.levels) == 1:
            found = [next_token(tuple(prefix)), *found]
        assert found == found_by_hand(prefix, jacobi.levels)
        depths = tree.depths(ints(parents)).tolist()
        wanted = []
        for depth, level in enumerate(jacobi.levels):
            begin = 1 if depth == 0 else 0
            wanted += [depth + column for column in range(begin, begin + len(level))]
        assert depths == wanted
        ngrams = jacobi.advance(prefix[-1], found)
        if step >= ngram - 2:
            assert len(jacobi.levels[0]) == window - 1
            assert all(len(level) == window for level in jacobi.levels[1:])
            assert all(len(rest) == ngram - 1 for _, rest in ngrams)
            assert ngrams[0][0] == prefix[-1]
        else:
            assert ngrams == []


def test_the_pool_keeps_the_newest():
    pool = GuessPool(2)
    for rest in ((1,), (2,), (1,), (3,)):
        pool.add(7, rest)
    assert pool.newest(7) == [(3,), (1,)]
    assert pool.newest(8) == []


@pytest.mark.parametrize(("window", "ngram", "guesses"), SHAPES)
def test_the_toy_language_is_kept_and_guesses_are_accepted(
    make_loop, request_of, drive, window, ngram, guesses
):
    shape = config(window, ngram, guesses)
    drafting = Drafting(Lookahead(shape), VOCAB)
    loop = make_loop(
        200, drafting=drafting, max_draft_len=64, max_num_batched_tokens=400, max_model_len=150
    )
    loop.scheduler.budget.max_draft_len = shape.draft_len
    wanted = {}
    for index in range(5):
        prompt = tuple(range(index, index + 9))
        loop.add(request_of(str(index), prompt, 60))
        wanted[str(index)] = continuation(prompt, 60)
    assert drive(loop) == wanted
    assert drafting.stats.faults == 0


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_real_model_keeps_its_tokens(tiny, verification):
    prompts = random_prompts(6, 96)
    section = {
        "decoding_type": "Lookahead",
        "max_window_size": 5,
        "max_ngram_size": 4,
        "verification": verification,
    }
    hot = {"max_tokens": 48, "temperature": 0.7}
    greedy, sampled = plain_outputs(tiny.target, prompts, {"max_tokens": 48}, hot)
    with engine_of(tiny.target, section) as engine:
        assert complete(engine, prompts, max_tokens=48)[0] == greedy
        if verification == "coupled":
            assert complete(engine, prompts, **hot)[0] == sampled
        stats = engine.stats()["drafters"]["lookahead"]
    assert stats["faults"] == 0
    assert stats["num_acc_tokens"] > 0


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"max_window_size": 0}, "max_window_size"),
        ({"max_ngram_size": 0}, "max_ngram_size"),
        ({"max_draft_len": 5}, "max_draft_len"),
    ],
)
def test_sizes_out_of_range_are_named(data, field):
    with pytest.raises(ConfigError) as caught:
        parse(LookaheadConfig, data)
    assert caught.value.field == field
