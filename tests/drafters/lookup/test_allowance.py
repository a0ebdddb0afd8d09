"""What of a prompt a step indexes: a fixed part, the prefill's, and a share of the forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.drafters.lookup.base import Allowance
from outrider.tests.helpers.lookups import batch_of, drafter_of, ints, propose, request_of

SECTIONS = [
    {"decoding_type": "NGram"},
    {"decoding_type": "PromptLookup"},
    {"decoding_type": "NGramSimple"},
    {"decoding_type": "NGramMapK"},
    {"decoding_type": "NGramMod"},
    {"decoding_type": "NGramCache"},
    {"decoding_type": "Suffix"},
]


class Clock:
    """Each look at it costs a millisecond."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def test_a_slow_forward_pays_for_more():
    clock = Clock()
    allowance = Allowance(64, clock)
    allowance.forward_begins()
    clock.now_s += 0.1
    allowance.forward_ended(0, 64)
    assert allowance.tokens() == 8, "an eighth is for what waits"
    allowance.spend(8)
    num_tokens = 0
    while more := allowance.tokens():
        allowance.spend(more)
        num_tokens += more
    assert num_tokens >= 20 * 128
    assert allowance.renew() == 8
    assert allowance.tokens() == 64


def test_without_a_forward_only_the_fixed_part():
    allowance = Allowance(64)
    allowance.spend(64)
    assert allowance.tokens() == 0


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: each["decoding_type"])
def test_a_long_prompt_is_indexed_when_its_prefill_is_done(section):
    drafter = drafter_of(section, 50_000)
    num_tokens, chunk = 40_000, 2048
    prompt = np.arange(num_tokens) % 20_011
    drafter.open([request_of("a", prompt)])
    for begin in range(0, num_tokens, chunk):
        plan = replace(batch_of([], []).plan, chunk_lens=ints([len(prompt[begin : begin + chunk])]))
        batch = replace(batch_of([], []), plan=plan)
        drafter.observe(batch, _nothing())
    assert drafter.num_waiting == 0
    (draft,) = propose(drafter, ["a"], [8])
    first = (num_tokens - 1) % 20_011 + 1
    assert draft.tokens.tolist()[:8] == list(range(first, first + draft.num_nodes))
    assert draft.num_nodes


def _nothing():
    from outrider.scheduler.types import Verdict

    return Verdict(0, ints([]), ints([0]), ints([]), ints([0]))
