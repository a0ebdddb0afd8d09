"""An engine keeps nothing of requests that have ended, and its tables stay within their bounds."""

from __future__ import annotations

import gc
import random

import pytest

from outrider.drafters.lookup.ngram import _MAX_STORED, SharedNGram
from outrider.errors import OutriderError
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.types import Request, ints

from ..helpers.engines import Box, engine_of

NUM_REQUESTS = 60
MAX_PATTERNS = 1024
DRAFTERS = {
    "decoding_type": "Compose",
    "members": [
        {
            "decoding_type": "NGram",
            "max_draft_len": 3,
            "pool_scope": "tenant",
            "pool_max_patterns": MAX_PATTERNS,
        },
        {"decoding_type": "Suffix", "max_cached_requests": 8},
    ],
}


def mixed(index: int, rng: random.Random) -> Request:
    sampling = SamplingParams(
        max_tokens=rng.choice((1, 8, 40)),
        temperature=rng.choice((0.0, 1.0)),
        logprobs=rng.choice((None, 2)),
        presence_penalty=rng.choice((0.0, 0.5)),
        allowed_token_ids=rng.choice((None, tuple(range(2, 30)))),
        ignore_eos=True,
    )
    prompt = ints([rng.randrange(2, 96) for _ in range(rng.randrange(1, 60))])
    tenant, timeout_s = rng.choice("abc"), rng.choice((None, None, 0.0))
    return Request(f"left-{index}", prompt, sampling, index, tenant=tenant, timeout_s=timeout_s)


@pytest.mark.parametrize("overlaps", [False, True])
def test_nothing_is_left_of_requests_that_have_ended(tiny, overlaps):
    rng, waiting = random.Random(7), []
    with engine_of(tiny.target, DRAFTERS, overlap_scheduling=overlaps) as engine:
        for index in range(NUM_REQUESTS):
            request, box = mixed(index, rng), Box()
            try:
                engine.submit(request, box)
            except OutriderError:
                continue
            waiting.append(box)
            if rng.random() < 0.4:
                engine.abort(request.id)
            while len(waiting) > 12:
                waiting.pop(0).last()
        for box in waiting:
            box.last()
        del waiting, request, box
        engine.abort("left-0")
        scheduler = engine._loop.scheduler
        assert engine.stats()["running"] + engine.stats()["waiting"] == 0
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        gc.collect()
        names = [f"left-{index}" for index in range(NUM_REQUESTS)]
        tables = [each for each in gc.get_objects() if issubclass(type(each), dict)]
        left = [table for table in tables if any(name in table for name in names)]
        assert not left, [list(table)[:3] for table in left]
        requests = [each for each in gc.get_objects() if type(each) is Request]
        assert not [each.id for each in requests if each.id in names]
        pools = [each for each in gc.get_objects() if type(each) is SharedNGram]
        assert pools
        for each in pools:  # evicted behind every step, which learns `_MAX_STORED` at most
            assert sum(map(len, each._pools.values())) <= MAX_PATTERNS + _MAX_STORED
