"""Whatever a drafter does, its requests go on; the fault is counted and logged once."""

from __future__ import annotations

import logging

import pytest

from outrider.drafters.drafting import Drafting
from outrider.drafters.none import NoDrafter
from outrider.scheduler import tree
from outrider.scheduler.types import Draft, DraftProbs, ints

from ..toy import VOCAB, continuation


class Faulty(NoDrafter):
    """Misbehaves in one way."""

    name = "faulty"

    def __init__(self, propose) -> None:
        self._propose = propose

    def propose(self, batch, budgets):
        return self._propose(batch, budgets)


def raises(batch, budgets):
    raise RuntimeError("no luck")


def repeat(*drafts: Draft):
    return lambda batch, budgets: [*drafts] * batch.num_seqs


BAD = {
    "raises": raises,
    "too few drafts": lambda batch, budgets: [],
    "too many nodes": lambda batch, budgets: [tree.chain(range(n + 1), "x") for n in budgets],
    "unknown token": repeat(tree.chain([VOCAB], "x")),
    "negative token": repeat(tree.chain([-1], "x")),
    "child before parent": repeat(Draft(ints([1, 2]), ints([1, -1]))),
    "its own parent": repeat(Draft(ints([1]), ints([0]))),
    "twin siblings": repeat(Draft(ints([1, 1]), ints([-1, -1]))),
    "uneven": repeat(Draft(ints([1, 2]), ints([-1]))),
    "uneven probabilities": repeat(
        Draft(ints([1]), ints([-1]), DraftProbs(ints([[1], [2]]), ints([[1], [1]])))
    ),
}


@pytest.mark.parametrize("propose", BAD.values(), ids=BAD.keys())
def test_a_bad_drafter_costs_nothing_but_speed(make_loop, request_of, drive, caplog, propose):
    drafting = Drafting(Faulty(propose), VOCAB)
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2), 20))
    loop.add(request_of("b", (3,), 20))
    with caplog.at_level(logging.ERROR):
        assert drive(loop) == {"a": continuation((1, 2), 20), "b": continuation((3,), 20)}
    assert drafting.stats.faults >= 19
    assert drafting.stats.num_gen_tokens == 0
    logged = [record for record in caplog.records if "faulty" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].exc_info is not None


def test_statistics_are_llama_cpps(make_loop, request_of, drive):
    class Known(NoDrafter):
        name = "known"

        def propose(self, batch, budgets):
            return [tree.chain([truth[done[0]], never, never][:n], "known") for n in budgets]

        def observe(self, batch, verdict):
            done[0] += len(verdict.tokens(0))

    truth, done = continuation((1, 2), 20), [0]
    never = next(token for token in range(VOCAB) if token not in truth)
    drafting = Drafting(Known(), VOCAB)
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2), 20))
    drive(loop)
    stats = drafting.stats
    # Ten steps of one accepted and one bonus token; the last has room for one node.
    assert stats.num_calls == [1, 10, 10]
    assert (stats.num_gen_drafts, stats.num_acc_drafts, stats.num_acc_tokens) == (10, 10, 10)
    assert stats.num_gen_tokens == 28
    assert stats.acc_tokens_per_pos == [10]
    rate, line = stats.lines("known")
    assert rate == "draft acceptance rate = 0.35714 (   10 accepted /    28 generated)"
    assert line.startswith(
        "statistics known: #calls(b,g,a) = 1 10 10, #gen drafts = 10, #acc drafts = 10, "
        "#gen tokens = 28, #acc tokens = 10, dur(b,g,a) = "
    )
