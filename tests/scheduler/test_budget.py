"""How many nodes a request may draft: tokens left bound the depth, not the size, of a tree."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from outrider.config import ComposeConfig, LookaheadConfig
from outrider.drafters.compose import Compose, Member
from outrider.drafters.drafting import Drafting
from outrider.drafters.lookahead import Lookahead
from outrider.drafters.protocol import Needs, NoDrafter
from outrider.scheduler import tree
from outrider.scheduler.types import Draft, ints
from outrider.workers.seats import Seats, gather

from ..helpers.toy import VOCAB, continuation, next_token

ROOMY = {"max_draft_len": 64, "max_num_batched_tokens": 600}


class Bushy(NoDrafter):
    """Three levels, depth first: siblings that are wrong, and the right tokens after them."""

    name, needs = "bushy", Needs(shape="tree")
    wrong = 6  # siblings of a right token

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.drafted: dict[str, Draft] = {}
        self.paths: list[bool] = []

    def open(self, requests):
        for request in requests:
            self.texts[request.id] = request.prompt.tolist()

    def propose(self, batch, budgets):
        for name, budget in zip(batch.request_ids, budgets.tolist(), strict=True):
            self.drafted[name] = tree.truncate(self.bush(self.texts[name]), budget)
        return [self.drafted[name] for name in batch.request_ids]

    def bush(self, text: list[int]) -> Draft:
        truth: list[int] = []
        for _ in range(3):
            truth.append(next_token((*text, *truth)))
        tokens, parents, at = [], [], -1
        for token in truth:
            others = [(token + 1 + each) % VOCAB for each in range(self.wrong)]
            below = [(other + 1) % VOCAB for other in others]  # a child of every wrong one
            for other, child in zip(others, below, strict=True):
                tokens += [other, child]
                parents += [at, len(parents)]
            tokens.append(token)
            parents.append(at)
            at = len(tokens) - 1
        return Draft(ints(tokens), ints(parents), source=self.name)

    def observe(self, batch, verdict):
        for row, name in enumerate(batch.request_ids):
            emitted = verdict.tokens(row).tolist()
            if emitted:
                nodes = verdict.nodes(row)
                self.paths.append(self.drafted[name].tokens[nodes].tolist() == emitted[:-1])
            self.texts[name] += emitted


class Seen(NamedTuple):
    """One sampled row of a step."""

    left: int  # tokens to emit
    max_nodes: int
    guesses: int
    window: int
    depth: int  # of the guesses
    last: int  # position


def watch(loop) -> list[Seen]:
    """What the target is given."""
    seen: list[Seen] = []
    verify, seats = loop.target.verify, Seats(loop.target.block_size)

    def spy(batch, drafts):
        step = seats.expand(replace(batch.plan, drafts=gather(drafts, batch.samples)))
        for row, draft in enumerate(drafts):
            if not batch.samples[row]:
                continue
            known = int(batch.known_lens[row])
            guesses = tree.depths(draft.parents[: draft.num_guesses])
            last = step.positions[step.query_start[row] : step.query_start[row + 1]].max()
            limit = loop.scheduler._sequences[batch.request_ids[row]].limit
            seen.append(
                Seen(
                    limit - known,
                    int(batch.max_nodes[row]),
                    draft.num_guesses,
                    draft.num_window,
                    int(guesses.max(initial=0)),
                    int(last),
                )
            )
        return verify(batch, drafts)

    loop.target.verify = spy
    return seen


def test_a_tree_keeps_its_width_to_the_last_token_and_loses_its_depth(make_loop, request_of, drive):
    bushy = Bushy()
    drafting = Drafting(bushy, VOCAB)
    loop = make_loop(200, drafting=drafting, **ROOMY)
    seen = watch(loop)
    wanted = {}
    for index, count in enumerate((1, 2, 3, 4, 5, 6, 7, 23)):
        wanted[str(index)] = continuation((index, 3), count)
        loop.add(request_of(str(index), (index, 3), count))
    assert drive(loop) == wanted
    whole = bushy.bush([1]).num_nodes
    for row in seen:
        assert row.max_nodes == (64 if row.left > 1 else 0)
        assert row.depth == min(row.left - 1, 4)
        assert row.guesses == {0: 0, 1: 7, 2: 20, 3: 33}.get(row.left - 1, whole)
    assert {row.left for row in seen} >= {1, 2, 3}
    # Every step emits all that it may: three levels and the bonus token.
    assert len(seen) == sum(-(-len(text) // 4) for text in wanted.values())
    assert all(bushy.paths)  # nodes of the verdict are those of the drafter's own tree
    assert drafting.stats.faults == 0
    assert drafting.stats.num_gen_tokens == sum(row.guesses for row in seen)


@pytest.mark.parametrize("mode", ["merge", "precedence"])
def test_members_are_pruned_alone_and_know_their_own_nodes(make_loop, request_of, drive, mode):
    zeros, bushy = Zeros(), Bushy()
    config = ComposeConfig(mode=mode, members=({"decoding_type": "NGram"},))
    members = [Member(bushy, 40, False), Member(zeros, 9, False)]
    loop = make_loop(200, drafting=Drafting(Compose(config, members, VOCAB), VOCAB), **ROOMY)
    seen = watch(loop)
    wanted = {str(count): continuation((count, 7), count) for count in (3, 6, 17)}
    for name, text in wanted.items():
        loop.add(request_of(name, (len(text), 7), len(text)))
    assert drive(loop) == wanted
    assert all(bushy.paths)
    assert all(row.depth <= row.left - 1 for row in seen)
    stats = loop.drafting.all_stats()
    assert [each.faults for each in stats.values()] == [0, 0]
    assert zeros.asked <= 9
    assert (zeros.asked > 0) == (mode == "merge")  # the other one always has a guess


class Zeros(NoDrafter):
    """A chain as long as it may be."""

    name = "zeros"
    asked = 0

    def propose(self, batch, budgets):
        assert (budgets <= batch.max_depth).all()
        self.asked = max(self.asked, int(budgets.max()))
        return [tree.chain([0] * budget, self.name) for budget in budgets.tolist()]


def test_a_chain_is_no_longer_than_what_is_left(make_loop, request_of, drive):
    loop = make_loop(200, drafting=Drafting(Zeros(), VOCAB), **ROOMY)
    seen = watch(loop)
    loop.add(request_of("a", (1, 2), 20))
    assert drive(loop) == {"a": continuation((1, 2), 20)}
    assert all(row.max_nodes == row.guesses == row.left - 1 for row in seen)


def test_a_window_rides_to_the_end(make_loop, request_of, drive):
    section = LookaheadConfig(max_window_size=15, max_ngram_size=5)
    drafting = Drafting(Lookahead(section), VOCAB)
    loop = make_loop(200, drafting=drafting, max_num_batched_tokens=600)
    loop.scheduler.budget.max_draft_len = section.draft_len
    seen = watch(loop)
    wanted = {}
    for index in range(3):
        wanted[str(index)] = continuation((index, 9), 32)
        loop.add(request_of(str(index), (index, 9), 32))
    assert drive(loop) == wanted
    full = (section.max_ngram_size - 1) * section.max_window_size - 1
    assert [row.window for row in seen].count(full) > 0.7 * len(seen)
    assert all(row.window > 0 for row in seen if row.left > 1)
    # A cell of the window is no guess: it is neither drafted nor rejected.
    guesses = sum(row.guesses for row in seen)
    assert drafting.stats.num_gen_tokens == guesses < 0.2 * full * len(seen)


def test_usage_leaves_the_window_out(make_loop, request_of):
    drafting = Drafting(Lookahead(LookaheadConfig()), VOCAB)
    loop = make_loop(200, drafting=drafting, **ROOMY)
    loop.add(request_of("a", (1, 2, 3), 20))
    last = None
    while loop.scheduler.has_work:
        (last,) = loop.step()
    stats = drafting.stats
    assert last.usage.num_draft_tokens == stats.num_gen_tokens
    assert last.usage.num_drafts == stats.num_gen_drafts == stats.num_calls[2]
    assert last.usage.num_accepted_tokens == stats.num_acc_tokens
    assert stats.num_calls[1] > stats.num_calls[2]  # steps with nothing but a window


def test_nothing_lies_beyond_the_models_last_position(make_loop, request_of, drive):
    for drafter in (Bushy(), Lookahead(LookaheadConfig(max_window_size=9, max_ngram_size=5))):
        loop = make_loop(200, drafting=Drafting(drafter, VOCAB), max_model_len=40, **ROOMY)
        seen = watch(loop)
        loop.add(request_of("a", (1, 2, 3), None))
        assert drive(loop) == {"a": continuation((1, 2, 3), 37)}
        assert max(row.last for row in seen) < 40
        assert all(row.max_nodes <= row.left for row in seen)


@pytest.mark.parametrize("num_blocks", [6, 7, 12])
def test_where_blocks_are_few_nodes_are_too_and_nothing_else(
    make_loop, request_of, drive, num_blocks
):
    drafting = Drafting(Bushy(), VOCAB)
    loop = make_loop(num_blocks, drafting=drafting, max_model_len=24, **ROOMY)
    seen = watch(loop)
    loop.add(request_of("a", (1, 2, 3, 4), None))
    assert drive(loop) == {"a": continuation((1, 2, 3, 4), 20)}
    assert loop.scheduler.counts.num_preemptions == 0
    assert all(row.max_nodes >= min(2, row.left - 1) for row in seen)
    assert all(row.max_nodes <= num_blocks * 4 - (24 - row.left) for row in seen)
