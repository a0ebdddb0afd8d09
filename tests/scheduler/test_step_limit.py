"""Steps that run out of memory: smaller ones follow, and grow again."""

from __future__ import annotations

from outrider.scheduler.scheduler import StepLimit


def test_the_budget_halves_and_grows_back() -> None:
    limit = StepLimit(1000)
    assert limit.shrink(300)
    assert limit.num_tokens == 150
    steps = 0
    while limit.num_tokens < 1000:
        before = limit.num_tokens
        limit.count_step()
        steps += 1
        assert before <= limit.num_tokens <= 1.25 * before + 1
    assert steps % 64 == 0
    assert limit.shrink(1000)
    assert limit.num_tokens == 500
    assert limit.num_shrunk == 2


def test_a_budget_that_fails_again_grows_more_slowly() -> None:
    limit = StepLimit(64)
    assert limit.shrink(64)
    assert limit.shrink(32)
    for _ in range(127):
        limit.count_step()
    assert limit.num_tokens == 16
    limit.count_step()
    assert limit.num_tokens == 21


def test_nothing_is_smaller_than_one_token() -> None:
    limit = StepLimit(8)
    assert limit.shrink(2)
    assert limit.num_tokens == 1
    assert not limit.shrink(1)
    assert limit.num_tokens == 1
