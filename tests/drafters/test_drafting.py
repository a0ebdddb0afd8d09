"""Whatever a drafter does, its requests go on; the fault is counted and logged once."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from outrider.drafters.drafting import Drafting
from outrider.drafters.protocol import DraftFault, NoDrafter
from outrider.scheduler import tree
from outrider.scheduler.types import Draft, DraftProbs, ints

from ..helpers.toy import VOCAB, continuation


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


def drawn(*rows: dict[int, float], token: int = 1, dtype=np.float32, **parts) -> Draft:
    """A chain of one token, with what it says it was drawn from."""
    ids, probs = [list(row) for row in rows], [list(row.values()) for row in rows]
    table = DraftProbs(np.array(ids, dtype=np.int32), np.array(probs, dtype=dtype))
    return Draft(ints([token]), ints([-1]), replace(table, **parts))


BAD = {
    "raises": raises,
    "returns None": lambda batch, budgets: None,
    "returns one draft": lambda batch, budgets: tree.EMPTY,
    "returns a generator": lambda batch, budgets: (tree.EMPTY for _ in budgets),
    "None for a row": repeat(None),
    "tokens alone": repeat([1, 2]),
    "a list of tokens": repeat(Draft([1], ints([-1]))),
    "floats": repeat(Draft(np.array([1.0]), ints([-1]))),
    "a table of tokens": repeat(Draft(ints([[1]]), ints([[-1]]))),
    "no dimension": repeat(Draft(np.array(1), ints([-1]))),
    "objects": repeat(Draft(np.array([None]), ints([-1]))),
    "masked": repeat(Draft(np.ma.masked_array([VOCAB], [True]), ints([-1]))),
    "parents of floats": repeat(Draft(ints([1]), np.array([np.nan]))),
    "parents out of order": repeat(Draft(ints([1, 2, 3]), ints([-1, 2, 0]))),
    "a parent before the root": repeat(Draft(ints([1]), ints([-2]))),
    "more window than nodes": repeat(Draft(ints([1]), ints([-1]), num_window=2)),
    "less window than none": repeat(Draft(ints([1]), ints([-1]), num_window=-1)),
    "a window of words": repeat(Draft(ints([1]), ints([-1]), num_window="one")),
    "no source": repeat(Draft(ints([1]), ints([-1]), source=None)),
    "probabilities of another type": repeat(Draft(ints([1]), ints([-1]), {1: 1.0})),
    "a list of probabilities": repeat(drawn({1: 1.0}, probs=[[1.0]])),
    "ids of floats": repeat(drawn({1: 1.0}, ids=np.array([[1.0]]))),
    "whole probabilities": repeat(drawn({1: 1}, dtype=np.int32)),
    "a row too many": repeat(drawn({1: 1.0}, {1: 1.0})),
    "flat probabilities": repeat(drawn({1: 1.0}, probs=np.float32([1.0]))),
    "a negative probability": repeat(drawn({1: 1.5, 2: -0.5})),
    "not a number": repeat(drawn({1: np.nan, 2: 1.0})),
    "an unknown id": repeat(drawn({1: 0.5, VOCAB: 0.5})),
    "less than one in all": repeat(drawn({1: 0.5, 2: 0.45})),
    "more than one in all": repeat(drawn({1: 0.9, 2: 0.2})),
    "not of its own distribution": repeat(drawn({2: 0.5, 3: 0.5})),
    "impossible by its own distribution": repeat(drawn({2: 1.0, 1: 0.0})),
    "a list of chances": repeat(Draft(ints([1]), ints([-1]), chances=[0.5])),
    "a chance too many": repeat(Draft(ints([1]), ints([-1]), chances=np.float32([0.5, 0.5]))),
    "a chance above one": repeat(Draft(ints([1]), ints([-1]), chances=np.float32([1.5]))),
    "a chance that is no number": repeat(
        Draft(ints([1]), ints([-1]), chances=np.float32([np.nan]))
    ),
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


def test_one_bad_row_costs_the_others_nothing(make_loop, request_of, drive):
    """A batch with distributions, too: the row at fault loses its draft, the rest is verified."""

    def mixed(batch, budgets):
        sound = drawn({1: 0.25, 2: 0.75})
        return [drawn({1: 0.25, 2: 0.5}) if name == "b" else sound for name in batch.request_ids]

    drafting = Drafting(Faulty(mixed), VOCAB)
    loop = make_loop(drafting=drafting)
    seen: list[tuple[str, int]] = []
    verify = loop.target.verify

    def spy(batch, drafts):
        seen.extend(zip(batch.request_ids, [draft.num_nodes for draft in drafts], strict=True))
        return verify(batch, drafts)

    loop.target.verify = spy
    for name in "abc":
        loop.add(request_of(name, (1, 2), 8))
    assert drive(loop) == dict.fromkeys("abc", continuation((1, 2), 8))
    assert {number for name, number in seen if name == "b"} == {0}
    assert sum(number for name, number in seen if name != "b") >= 14
    assert drafting.stats.num_gen_tokens == sum(number for _, number in seen)


SOUND = {
    "drawn": drawn({1: 0.25, 2: 0.75}),
    "padded": drawn({1: 0.25, 2: 0.75, 0: 0.0}),
    "fixed, told by zeros": drawn({1: 0.0, 2: 0.0}),
    "rounded": drawn({1: 1 / 3, 2: 1 / 3, 3: 1 / 3}),
    "in float64": drawn({1: 0.25, 2: 0.75}, dtype=np.float64),
    "in int64": Draft(np.array([1]), np.array([-1])),
    "a window's cell, of nothing": Draft(
        ints([1, 2]),
        ints([-1, 0]),
        DraftProbs(ints([[1], [0]]), np.float32([[1], [0]])),
        num_window=1,
    ),
}


@pytest.mark.parametrize("draft", SOUND.values(), ids=SOUND.keys())
def test_what_is_sound_is_verified(make_loop, request_of, drive, draft):
    drafting = Drafting(
        Faulty(lambda batch, budgets: [tree.truncate(draft, n) for n in budgets]), VOCAB
    )
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2), 20))
    assert drive(loop) == {"a": continuation((1, 2), 20)}
    assert drafting.stats.faults == 0
    assert drafting.stats.num_gen_tokens > 10


@pytest.mark.parametrize("verb", ["open", "observe", "close", "shutdown"])
def test_a_verb_that_raises_hurts_nobody(make_loop, request_of, drive, caplog, verb):
    def fail(*_):
        raise RuntimeError("no luck")

    drafter = Faulty(repeat(tree.EMPTY))
    setattr(drafter, verb, fail)
    drafting = Drafting(drafter, VOCAB)
    loop = make_loop(drafting=drafting)
    with caplog.at_level(logging.ERROR):
        for name in "ab":
            loop.add(request_of(name, (1, 2), 5))
        assert drive(loop) == dict.fromkeys("ab", continuation((1, 2), 5))
        drafting.shutdown()
    assert drafting.stats.faults == {"open": 2, "observe": 5, "close": 1, "shutdown": 1}[verb]
    (record,) = caplog.records
    assert verb in record.getMessage()
    assert record.exc_info[0] is RuntimeError


def test_each_kind_of_fault_is_logged_once(make_loop, request_of, drive, caplog):
    """By verb and exception; a later fault of another kind is not lost among the first's."""
    kinds = iter([KeyError, KeyError, ValueError, KeyError, None, ValueError, OSError, None])

    def vary(batch, budgets):
        kind = next(kinds, OSError)
        if kind is None:
            return None
        if kind is ValueError:
            raise DraftFault("told") from kind("why")
        raise kind("why")

    def fail(batch, verdict):
        raise KeyError("observe")

    drafter = Faulty(vary)
    drafter.observe = fail
    drafting = Drafting(drafter, VOCAB)
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2), 20))
    with caplog.at_level(logging.ERROR):
        assert drive(loop) == {"a": continuation((1, 2), 20)}
    logged = [
        (record.getMessage().split(" in ")[1].split(";")[0], record.exc_info[0])
        for record in caplog.records
    ]
    assert logged == [
        ("propose", KeyError),
        ("observe", KeyError),
        ("propose", DraftFault),
        ("propose", TypeError),
        ("propose", OSError),
    ]
    assert "propose must return a list" in caplog.text
    assert drafting.stats.faults == 39


def test_what_is_logged_is_bounded(make_loop, request_of, drive, caplog):
    def invent(batch, budgets):
        raise type(f"Error{batch.step}", (Exception,), {})("new every time")

    drafting = Drafting(Faulty(invent), VOCAB)
    loop = make_loop(drafting=drafting)
    loop.add(request_of("a", (1, 2), 60))
    with caplog.at_level(logging.ERROR):
        drive(loop)
    assert drafting.stats.faults == 59
    assert len(caplog.records) == 32


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
