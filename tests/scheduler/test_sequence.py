"""What makes blocks findable: their tokens, and the one after them where that counts."""

from __future__ import annotations

import pytest

from outrider.config import EngineConfig
from outrider.scheduler.blocks import BlockPool
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.sequence import PagedTokens
from outrider.scheduler.types import Request, SeatSettings, ints

TEXT = (3, 1, 4, 1, 5, 9, 2, 6)  # two blocks


def paged(text, reach: int) -> PagedTokens:
    request = Request("a", ints(text), SamplingParams(), seed=0)
    return PagedTokens(request, SeatSettings(0), reach=reach)


def computed(pool: BlockPool, text: tuple[int, ...], num_computed: int, reach: int) -> PagedTokens:
    sequence = paged(text, reach)
    assert sequence.allocate(pool, len(text))
    sequence.num_computed = num_computed
    sequence.cache_blocks(pool)
    return sequence


@pytest.mark.parametrize("reach", [0, 1])
def test_blocks_are_shared_as_far_as_what_they_hold_reaches(reach):
    pool = BlockPool(16, 4)
    first = computed(pool, (*TEXT, 7), 8, reach)
    for following, wanted in ((7, 8), (8, 4 if reach else 8)):
        second = paged((*TEXT, following, 7), reach)
        assert second.acquire_cached(pool) == wanted
        second.free(pool)
    first.free(pool)
    first.tokens.extend(ints([1]))
    assert first.acquire_cached(pool) == 8  # computed again, after a preemption


@pytest.mark.parametrize("reach", [0, 1])
def test_a_block_waits_for_the_token_that_it_hangs_on(reach):
    pool = BlockPool(16, 4)
    ended = computed(pool, TEXT, 8, reach)  # cut by a limit, with its last token computed
    other = paged((*TEXT, 7), reach)
    assert other.acquire_cached(pool) == (4 if reach else 8)
    other.free(pool)
    ended.tokens.extend(ints([7]))
    ended.cache_blocks(pool)
    assert other.acquire_cached(pool) == 8


@pytest.mark.parametrize(
    ("section", "reach"),
    [
        ({"decoding_type": "NGram"}, 0),
        ({"decoding_type": "Medusa", "speculative_model": "h"}, 0),
        ({"decoding_type": "Eagle3", "speculative_model": "h"}, 1),
        ({"decoding_type": "MTP"}, 1),
        ({"decoding_type": "Compose", "members": [{"decoding_type": "MTP"}]}, 1),
    ],
)
def test_sections_say_how_far_it_is(section, reach):
    config = EngineConfig.load({"model": "m", "speculative_config": section})
    assert max(each.reach for each in config.speculative_config.sections) == reach
