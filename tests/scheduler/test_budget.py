"""How many nodes a request may draft: tokens left bound the depth, not the size, of a tree."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from outrider.config import ComposeConfig, EngineConfig, LookaheadConfig
from outrider.drafters.compose import Compose, Member
from outrider.drafters.drafting import Drafting
from outrider.drafters.lookahead import Lookahead
from outrider.drafters.protocol import Needs, NoDrafter
from outrider.scheduler import tree
from outrider.scheduler.budget import DraftBudget, likeliest
from outrider.scheduler.draft_lengths import DraftLengths
from outrider.scheduler.sampling import SamplingParams
from outrider.scheduler.sequence import Sequence
from outrider.scheduler.types import Draft, Request, SpeculationOptions, ints
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


def plain_wishes(budget, sequences, num_running, *, granted=True):
    """What `DraftBudget.wishes` gives, from the grants that it leaves, request by request.

    Args:
        granted: False: of sequences that are granted any, all that they could be granted.
    """
    lengths, most = budget._lengths, budget._nodes_at(num_running)
    wishes = {}
    for each in sequences:
        request, num_tokens = each.request, each.num_tokens
        if not budget.enabled or not request.speculation.enabled or each.limit - num_tokens <= 1:
            continue
        nodes = [most]
        if lengths is not None:
            lately = lengths.requests.get(request.id)
            own = lengths.granted_first if lately is None else lately.granted
            nodes.append(own if granted or not own else most)
        if request.speculation.max_draft_len is not None:
            nodes.append(request.speculation.max_draft_len)
        longest = budget._max_model_len if budget._tree_drafts else each.limit - 1
        nodes.append(longest - num_tokens)
        if min(nodes) > 0:
            wishes[each] = min(nodes)
    return wishes


def made_up(index, rng):
    """A request of any kind."""
    wish = SpeculationOptions(
        enabled=bool(rng.random() < 0.9),
        max_draft_len=int(rng.integers(0, 9)) if rng.random() < 0.3 else None,
    )
    prompt = ints(np.arange(1, 10))
    prediction = prompt if rng.random() < 0.1 else ints([])
    sampling = SamplingParams(max_tokens=int(rng.integers(1, 40)))
    request = Request(str(index), prompt, sampling, index, speculation=wish, prediction=prediction)
    return Sequence(request, index, limit=9 + (sampling.max_tokens or 1))


@pytest.mark.parametrize("tree_drafts", [False, True])
@pytest.mark.parametrize(
    ("adaptive", "chooses"), [(False, False), (True, False), (True, True), (False, True)]
)
def test_wishes_are_the_least_of_what_bounds_them(adaptive, chooses, tree_drafts):
    """While requests come, emit and end, and settings and loads change."""
    rng = np.random.default_rng(3)
    section = {"decoding_type": "Suffix", "max_draft_len": 12, "adaptive_draft_len": adaptive}
    section |= {"draft_len_schedule": {1: 12, 5: 6, 9: 3}}
    config = EngineConfig.load({"model": "none", "speculative_config": section})
    budget = DraftBudget(config.speculative_config, 40, tree_drafts=tree_drafts)
    budget.let_ranks_choose(chooses)
    chooses = chooses and adaptive
    running, num_made, kinds = [], 0, set()
    for step in range(600):
        if len(running) < 10 and rng.random() < 0.5:
            running.append(made_up(num_made, rng))
            num_made += 1
        if step % 50 == 49:
            changed = {"enabled": step % 100 == 99, "max_draft_len": int(rng.integers(1, 13))}
            budget.reconfigure(changed)
        at_root = [each for each in running if rng.random() < 0.95]
        resting = budget.rests(len(running))
        wishes = {} if resting else budget.wishes(at_root, len(running))
        if not resting:
            plain = plain_wishes(budget, at_root, len(running))
            num_kept = sum(plain.values()) if chooses and plain else -1
            assert budget.num_kept == num_kept or not plain, step
            if chooses:
                plain = plain_wishes(budget, at_root, len(running), granted=False)
            assert list(wishes.items()) == list(plain.items()), step
        granted = [wishes.get(each, 0) for each in at_root]
        accepted = [int(rng.integers(0, each + 1)) for each in granted]
        kinds.update(granted)
        batch = SimpleNamespace(
            request_ids=[each.request.id for each in at_root], max_nodes=np.array(granted),
            num_tokens=len(at_root), num_seqs=len(at_root), drafter_nodes=None,
            samples=np.ones(len(at_root), dtype=bool),
        )  # fmt: skip
        drafts = [SimpleNamespace(num_nodes=each, chances=None) for each in granted]
        verdict = SimpleNamespace(path_start=np.cumsum([0, *accepted]), nodes=None)
        if tree_drafts:
            paths = [ints(range(each)) for each in accepted]
            verdict.nodes = paths.__getitem__
        if at_root:
            budget.end_step(batch, drafts, verdict, 1.0 + 0.01 * sum(granted))
        for each, count in zip(at_root, accepted, strict=True):
            each.tokens.extend([7] * min(count + 1, each.limit - each.num_tokens))
        for each in [each for each in running if each.num_tokens >= each.limit]:
            running.remove(each)
            budget.forget(each.request.id, 9, each.num_tokens - 9)
    assert num_made > 50, num_made
    assert len(kinds) > 4, kinds


def test_the_likeliest_nodes_are_chosen_one_after_another():
    """As from a queue of each draft's next node; drafts without estimates keep theirs."""
    rng = np.random.default_rng(2)
    for _ in range(40):
        drafts = [
            replace(tree.chain(range(n), "x"), chances=rng.choice([0.3, 0.5, 0.9, 1.0], n))
            for n in rng.integers(0, 6, 5).tolist()
        ]
        drafts.append(tree.chain(range(4), "y"))
        num_nodes, sizes = int(rng.integers(0, 20)), [0] * 5
        for _ in range(num_nodes):
            ready = [
                (-np.prod(drafts[row].chances[: size + 1]), size, row)
                for row, size in enumerate(sizes)
                if size < drafts[row].num_nodes
            ]
            if ready:
                sizes[min(ready)[2]] += 1
        assert [each.num_nodes for each in likeliest(drafts, num_nodes)] == [*sizes, 4]


def test_what_ranks_chose_counts_as_granted():
    """Requests whose nodes were all left out have drafted nothing."""
    lengths = DraftLengths(4, tree_drafts=False)
    lengths.ranks_choose = True
    lengths.plan(["a", "b"])
    batch = SimpleNamespace(
        request_ids=["a", "b"], max_nodes=ints([4, 4]), num_tokens=2, num_seqs=2,
        samples=np.ones(2, dtype=bool),
    )  # fmt: skip
    for nodes in (1, 1), (2, 0):
        drafts = [SimpleNamespace(num_nodes=each, chances=None) for each in nodes]
        lengths.count(batch, drafts, SimpleNamespace(path_start=ints([0, 1, 1])), 1.0)
    lengths._acceptance.learn()
    granted, drafted, accepted = lengths._acceptance.counts.sum(axis=1)
    assert granted.tolist() == drafted.tolist() == [3, 1, 0, 0]
    assert accepted.tolist() == [2, 0, 0, 0]
    assert [lengths.requests[name].num_idle for name in "ab"] == [0, 1]


def plain_price(lengths, num_by_state):
    """`DraftLengths._best_price`, a price after another."""
    worth = sorted({w for row in lengths._worth[num_by_state > 0] for w in row}, reverse=True)
    between = [np.sqrt(one * two) for one, two in pairwise(worth)]
    count, best = num_by_state.sum(), None
    for index, price in enumerate([lengths._price, np.inf, *between, 0.0]):
        drafted = accepted = drafting = deepest = 0.0
        for state in np.flatnonzero(num_by_state):
            pays = lengths._worth[state] >= price
            nodes = (pays * lengths._sizes).sum()
            drafting += num_by_state[state] * (nodes > 0)
            deepest = max(deepest, nodes)
            drafted += num_by_state[state] * (pays * lengths._hits[state] * lengths._sizes).sum()
            got = (pays * lengths._accepted[state] * lengths._sizes).sum()
            accepted += num_by_state[state] * got
        ms = np.exp(lengths._costs.expect(int(count), np.array([drafted / count]), deepest)[0])
        ms += (drafting + accepted) * lengths._opening_ms()
        score = np.log((count + accepted) / ms) - 0.01 * (price < np.inf) + 0.004 * (index == 0)
        if best is None or score > best[0] + 1e-12:
            best = score, price
    return best[1]


@pytest.mark.parametrize(
    ("tree_drafts", "has_model"), [(False, False), (False, True), (True, True)]
)
def test_the_price_is_the_best_of_all(tree_drafts, has_model):
    rng, found = np.random.default_rng(5), []
    for _ in range(60):
        lengths = DraftLengths(6, tree_drafts=tree_drafts, has_model=has_model)
        names = [str(each) for each in range(int(rng.integers(1, 40)))]
        lengths.teach_opening(float(rng.choice([0.0, 0.01])))
        lengths.forget("gone", 50, 20)
        lengths.plan(names)
        for _ in range(200):
            state, granted = int(rng.integers(0, 8)), int(rng.integers(0, 7))
            nodes = int(rng.integers(0, granted + 1))
            accepted = int(rng.binomial(nodes, [0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.5, 0.5][state]))
            path = ints(range(accepted)) if tree_drafts else None
            lengths._acceptance.count(state, granted, nodes, accepted, path)
        assert lengths._acceptance.learn()
        lengths._update()
        states = rng.choice(8, 4, replace=False)  # no more prices than are weighed
        num_by_state = np.bincount(rng.choice(states, len(names)), minlength=8).astype(float)
        lengths._price = float(rng.choice([0.0, 0.4, np.inf]))
        price = plain_price(lengths, num_by_state)
        assert lengths._best_price(num_by_state) == pytest.approx(price, rel=1e-12)
        found.append(price)
    assert len(set(found)) > 5, found
