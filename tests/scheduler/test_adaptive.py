"""Measured draft lengths: near the best fixed length, or none, on simulated machines and texts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.scheduler import tree
from outrider.scheduler.budget import likeliest
from outrider.scheduler.draft_lengths import DraftLengths
from outrider.scheduler.step_costs import SIZES, Lesson, StepCosts, lengths_of
from outrider.scheduler.types import Draft, DraftProbs, ints
from outrider.tests.helpers.verification import (
    RULES,
    distance_from_target,
    emission_law,
    random_target,
)


class Machine:
    """Steps of `num_requests` requests; a node is accepted at its request's rate.

    `step_ms(num_rows, num_nodes)` is the time of a step, which was measured before the first one.
    """

    def __init__(
        self, rates, most, step_ms, *, tree_drafts=False, hits=1.0, seed=0, taught=True,
        has_model=False,
    ):  # fmt: skip
        self.rates = dict(enumerate(rates))
        self.lengths = DraftLengths(most, tree_drafts=tree_drafts, has_model=has_model)
        for size in SIZES[:7] if taught else ():
            for length in lengths_of(most):
                log_ms = np.log(step_ms(size + size * length, size * length))
                self.lengths.teach(Lesson(size, length, log_ms, 6))
        self.step_ms, self.most, self.hits = step_ms, most, hits
        self.rng = np.random.default_rng(seed)
        self.deepest = most  # nodes of a draft that may be accepted
        self.num_prompt_tokens = 0  # in every step
        self.is_shared = False  # with other work, which makes some runs of steps slower
        self.slow_steps, self.slowness = 0, 1.0
        self.num_plans = 0

    def step(self, fixed=None):
        """Tokens, milliseconds and nodes of one step."""
        names = [str(each) for each in self.rates]
        if not self.lengths.rests():
            self.lengths.plan(names)
            self.num_plans += 1
        known, first = self.lengths.requests, self.lengths.granted_first
        granted = [known[name].granted if name in known else first for name in names]
        granted = granted if fixed is None else [fixed] * len(names)
        drafted = [each if self.rng.random() < self.hits else 0 for each in granted]
        misses = self.rng.random((len(names), self.most + 1)) >= [[r] for r in self.rates.values()]
        accepted = [
            min(int(np.argmax(row)) if row.any() else n, n, self.deepest)
            for row, n in zip(misses, drafted)
        ]
        elapsed_ms = self.step_ms(len(names) + sum(drafted), sum(drafted))
        batch = SimpleNamespace(
            request_ids=names,
            max_nodes=np.array(granted),
            num_tokens=len(names) + self.num_prompt_tokens,
            num_seqs=len(names),
            samples=np.ones(len(names), dtype=bool),
        )
        drafts = [SimpleNamespace(num_nodes=each, chances=None) for each in drafted]
        verdict = SimpleNamespace(
            path_start=np.cumsum([0, *accepted]), nodes=lambda row: np.arange(accepted[row])
        )
        noise = self.rng.lognormal(0, 0.1)
        if self.is_shared:
            if not self.slow_steps and self.rng.random() < 0.03:
                self.slow_steps = int(self.rng.integers(5, 60))
                self.slowness = self.rng.uniform(1.3, 2.5)
            if self.slow_steps:
                self.slow_steps -= 1
                noise *= self.slowness
        self.lengths.count(batch, drafts, verdict, elapsed_ms * noise)
        return sum(accepted) + len(names), elapsed_ms, granted

    def speed(self, num_steps, fixed=None):
        """Tokens per millisecond."""
        runs = [self.step(fixed)[:2] for _ in range(num_steps)]
        return sum(tokens for tokens, _ in runs) / sum(ms for _, ms in runs)


class Promising(Machine):
    """Half of the drafts are good and half are bad, and only their own estimates tell which."""

    def step(self, fixed=None):
        names, shape = [str(each) for each in self.rates], (len(self.rates), self.most)
        lengths, rng = self.lengths, self.rng
        if not lengths.rests():
            lengths.plan(names)
        known, first = lengths.requests, lengths.granted_first
        granted = np.array([known[n].granted if n in known else first for n in names])
        is_bad = rng.random((len(names), 1)) < 0.5
        chances = np.where(is_bad, rng.uniform(0.1, 0.5, shape), rng.uniform(0.8, 0.99, shape))
        room, drafted = granted, granted
        if lengths.ranks_choose:
            room = np.where(granted > 0, self.most, 0)
            drafts = [
                replace(tree.chain(range(n), "x"), chances=own[:n]) for own, n in zip(chances, room)
            ]
            drafted = np.array([each.num_nodes for each in likeliest(drafts, granted.sum())])
        accepted = (rng.random(shape) < chances).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(accepted, drafted)
        elapsed_ms = self.step_ms(len(names) + drafted.sum(), drafted.sum())
        batch = SimpleNamespace(
            request_ids=names, max_nodes=room, num_tokens=len(names), num_seqs=len(names),
            samples=np.ones(len(names), dtype=bool),
        )  # fmt: skip
        shown = [SimpleNamespace(num_nodes=int(each), chances=None) for each in drafted]
        verdict = SimpleNamespace(path_start=np.cumsum([0, *accepted]))
        lengths.count(batch, shown, verdict, elapsed_ms * rng.lognormal(0, 0.05))
        return accepted.sum() + len(names), elapsed_ms, granted


def test_ranks_that_choose_verify_what_is_promising():
    """As many nodes as are granted, the likeliest of all: faster than those of each request."""
    speeds = {}
    for chooses in False, True:
        machine = Promising([0.0] * 24, 7, lambda rows, _: 1 + 0.06 * rows, has_model=True)
        machine.lengths.ranks_choose = chooses
        machine.speed(300)
        speeds[chooses] = machine.speed(400)
    assert speeds[True] > 1.03 * speeds[False], speeds


def memory_bound(num_rows, num_nodes):
    return 10 + 0.02 * num_rows


def compute_bound(num_rows, num_nodes):
    return 1 + num_rows + (0.3 if num_nodes else 0)


def between(num_rows, num_nodes):
    return 5 + max(num_rows - 12, 0) * 0.4 + 0.2 * num_rows


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(
    ("num_requests", "step_ms"),
    [
        (4, between),
        *((count, each) for count in (1, 16) for each in (memory_bound, compute_bound, between)),
    ],
)
def test_close_to_the_best_fixed_length(step_ms, rate, num_requests):
    """On the mean of three texts: a text's luck depends on the last bits of a processor's noise."""
    rates, seeds = [rate] * num_requests, range(3)
    fixed = [
        np.mean([Machine(rates, 6, step_ms, seed=seed).speed(150, fixed=each) for seed in seeds])
        for each in range(7)
    ]
    found = []
    for seed in seeds:
        machine = Machine(rates, 6, step_ms, seed=seed)
        machine.speed(600)  # learns
        found.append(machine.speed(500))
    assert np.mean(found) > 0.88 * max(fixed), (found, fixed)


def test_nodes_go_where_they_are_accepted():
    machine = Machine([0.95, 0.0] * 4, 5, between)
    machine.speed(200)
    granted = np.mean([machine.step()[2] for _ in range(800)], axis=0)
    assert granted[::2].min() > 5 * granted[1::2].max(), granted


def test_a_change_of_the_text_is_noticed():
    machine = Machine([0.0] * 8, 5, between)
    machine.speed(400)
    assert np.mean([machine.step()[2] for _ in range(300)]) < 0.1
    machine.rates = dict.fromkeys(machine.rates, 0.95)
    machine.speed(1200)
    assert np.mean([machine.step()[2] for _ in range(300)]) > 0.4


def test_a_tree_is_cut_to_the_nodes_that_pay():
    """The whole where all is accepted, its beginning where no path goes deeper, or nothing."""

    def mean_grant(rate, deepest):
        machine = Machine([rate] * 8, 32, lambda rows, _: 8 + 0.3 * rows, tree_drafts=True)
        machine.deepest = deepest
        machine.speed(400)
        granted = [machine.step()[2] for _ in range(300)]
        assert {each for row in granted for each in row} <= {0, 8, 16, 24, 32}
        return np.mean(granted)

    assert mean_grant(0.999, 32) > 24
    assert 4 < mean_grant(0.999, 7) < 12
    assert mean_grant(0.1, 32) < 1


def test_drafts_that_are_rarely_there_cost_rarely():
    """Look-ups: what is granted is used now and then, and worth it then."""
    machine = Machine([0.9] * 4, 5, memory_bound, hits=0.3)
    machine.speed(100)
    assert np.mean([machine.step()[2] for _ in range(300)]) > 4


def test_short_requests_are_tried_too():
    """Poor ones first; the good ones after them end before a long rest would."""
    machine = Machine([0.0], 5, between)
    machine.speed(400)
    tokens = 0
    for turn in range(20):
        machine.rates = {turn: 0.95}
        tokens += sum(machine.step()[0] for _ in range(64))
    assert tokens > 20 * 64 * 2


def test_worthless_drafts_cost_little():
    machine = Machine([0.0] * 16, 6, compute_bound)
    machine.speed(150)
    plain = Machine([0.0] * 16, 6, compute_bound).speed(200, fixed=0)
    assert machine.speed(1000) > 0.96 * plain


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_other_work_on_the_machine_is_not_taken_for_the_cost_of_drafts(rate):
    """Nothing pays with the lower rate, some nodes pay with the higher one."""

    def speed(seed, fixed=None):
        machine = Machine([rate] * 16, 6, between, seed=seed)
        machine.is_shared = True
        machine.speed(150, fixed)
        return machine.speed(600, fixed)

    best = max(speed(0, each) for each in range(7))
    assert np.mean([speed(seed) for seed in range(6)]) > 0.95 * best


def test_nodes_go_where_the_text_is_predictable_now():
    """Each request copies for a while and is new for a while: better than any fixed length."""

    def speed(fixed=None):
        machine, tokens, elapsed_ms = Machine([0.0] * 8, 5, between), 0, 0.0
        for turn in range(60):
            machine.rates = {each: 0.95 if (each + turn) % 2 else 0.0 for each in range(8)}
            for _ in range(20):
                num_tokens, step_ms, _ = machine.step(fixed)
                if turn >= 20:
                    tokens, elapsed_ms = tokens + num_tokens, elapsed_ms + step_ms
        return tokens / elapsed_ms

    assert speed() > 1.01 * max(speed(each) for each in range(6))


@pytest.mark.parametrize("rate", [0.0, 0.95])
def test_a_new_request_begins_as_those_before_it_fared(rate):
    machine = Machine([rate] * 4, 5, between)
    machine.speed(300)
    granted = []
    for turn in range(80):  # with requests of one step each
        machine.rates = {4 * turn + each + 4: rate for each in range(4)}
        granted.append(np.mean(machine.step()[2]))
    later = np.mean(granted[40:])
    assert later > 1.5 if rate else later < 0.5


def test_a_tree_is_granted_for_several_steps():
    """A head drafts for the next step what it was granted in this one."""
    machine = Machine([0.95, 0.5] * 4, 30, between, tree_drafts=True)
    machine.speed(400)
    granted = [tuple(machine.step()[2]) for _ in range(400)]
    changes = [step for step in range(1, 400) if granted[step] != granted[step - 1]]
    assert changes
    assert np.diff(changes).min() >= 4


@pytest.mark.parametrize("has_model", [False, True])
def test_costs_are_what_was_measured(has_model):
    """Between what was measured as well, and beyond: a row costs as much with more requests."""
    rng, costs = np.random.default_rng(0), StepCosts(8, has_model=has_model)

    def log_ms(size, length):
        return np.log(2 + 0.3 * size * (1 + length) + (1.0 + 0.4 * length if has_model else 0.0))

    for size in (1, 8, 32):
        for length in (0, 1, 2, 4, 8):
            costs.learn(
                Lesson(size, length, log_ms(size, length) + rng.normal(0, 0.02), 9), apart=0
            )
    for size in (1, 3, 8, 20, 32, 64):
        lengths = np.array([0.0, 1.0, 3.0, 6.0, 8.0])
        found = costs.expect(size, lengths, lengths)
        wanted = [log_ms(size, each) for each in lengths]
        assert np.abs((found - found[0]) - (wanted - wanted[0])).max() < (
            0.12 if size <= 32 else 0.25
        ), size


def test_uneven_drafts_take_as_long_as_the_deepest_is_drafted():
    """Levels are drafted one after the other for all; rows of the target are few."""
    costs = StepCosts(4, has_model=True)
    for size in (1, 2, 4, 8, 16, 32, 64):
        for length in range(5):
            ms = 5 + 0.05 * size * (1 + length) + 2.0 * length
            costs.learn(Lesson(size, length, np.log(ms), 9), apart=0)
    even, uneven = np.exp(costs.expect(8, np.array([1.0, 1.0]), np.array([1.0, 4.0])))
    assert uneven - even == pytest.approx(6.0, rel=0.2)


def test_costs_follow_the_steps_that_serve():
    """Twice as much for drafts as was measured, on a machine that has become slower."""
    rng, costs = np.random.default_rng(0), StepCosts(4, has_model=False)
    for size in (1, 2, 4, 8, 16):
        for length in range(5):
            costs.learn(Lesson(size, length, np.log(4 + length), 9), apart=0)
    for turn in range(200):
        length = turn % 5
        log_ms = np.log(3 * (4 + 2 * length)) + rng.normal(0, 0.05)
        costs.learn(Lesson(8, length, log_ms, 16), apart=16)
        costs.forget(16)
    lengths = np.arange(5.0)
    found = np.exp(costs.expect(8, lengths, lengths))
    assert found == pytest.approx(3 * (4 + 2 * lengths), rel=0.1)
    _, covariance = costs.belief
    assert np.linalg.eigvalsh(covariance).min() > -1e-9
    known = np.diag(covariance).copy()
    costs.forget(200_000)
    assert (np.diag(costs.belief[1]) > known).mean() > 0.9


def test_other_drafters_begin_with_what_the_target_costs():
    """A row of a draft costs as much as a row without: nothing pays from the first choice on."""
    before = Machine([0.2] * 16, 4, compute_bound)
    before.speed(50)
    after = Machine([0.2] * 16, 6, compute_bound, taught=False)
    after.lengths.follow(before.lengths)
    plain = Machine([0.2] * 16, 6, compute_bound).speed(64, fixed=0)
    assert after.speed(64) > 0.95 * plain
    unscaled = DraftLengths(4, tree_drafts=False)
    DraftLengths(6, tree_drafts=False).follow(unscaled)


def test_a_worthless_drafter_costs_little_from_the_first_step():
    """Of an engine that knows what steps cost, and nothing about acceptance."""
    for num_requests in (8, 16, 64):
        machine = Machine([0.05] * num_requests, 6, compute_bound)
        plain = Machine([0.05] * num_requests, 6, compute_bound).speed(64, fixed=0)
        assert machine.speed(64) > 0.95 * plain, num_requests


def test_first_drafts_that_are_worse_than_later_ones_do_not_end_drafting():
    """As a block drafter's are behind short prompts: few nodes of the first ten are accepted."""

    def begun_once(num_rows, num_nodes):
        return 0.8 + 0.04 * num_rows + 0.6 * (num_nodes > 0) + 0.05 * num_nodes

    gains = []
    for seed in range(8):
        machine = Machine([0.3], 5, begun_once, has_model=True, seed=seed)
        machine.speed(10)
        machine.rates[0] = 0.75
        plain = Machine([0.75], 5, begun_once, seed=seed).speed(200, fixed=0)
        gains.append(machine.speed(200) / plain)
    assert np.median(gains) > 1.2


def test_costs_that_were_not_measured_are_learned():
    """Where a start measured nothing: rows are believed to be cheap until they were tried."""
    machine = Machine([0.1] * 16, 6, compute_bound, taught=False)
    machine.speed(300)
    plain = Machine([0.1] * 16, 6, compute_bound).speed(300, fixed=0)
    assert machine.speed(300) > 0.95 * plain


def test_steps_that_are_granted_nothing_are_not_planned_one_by_one():
    machine = Machine([0.0] * 4, 5, compute_bound)
    machine.speed(300)
    machine.num_plans = 0
    machine.speed(400)
    assert machine.num_plans < 150


def test_prompts_in_every_step_do_not_end_drafting():
    """No step without drafts can be measured then, and trials must not go on for ever."""
    machine = Machine([0.9] * 4, 5, memory_bound)
    for _ in range(20):
        machine.step()
    machine.num_prompt_tokens = 30
    machine.rates = dict.fromkeys(range(4, 24), 0.9)  # a number without a measurement
    assert np.mean([machine.step()[2] for _ in range(300)]) > 1
    fresh = Machine([0.9] * 4, 5, memory_bound)
    fresh.num_prompt_tokens = 30
    assert np.mean([fresh.step()[2] for _ in range(300)]) > 4


@pytest.mark.parametrize("num_output", [20, 5000])
def test_a_prompt_that_the_drafter_reads_too_must_pay(num_output):
    """Short answers to long prompts do not draft, where long ones do; nor does any trial."""
    machine = Machine([0.9] * 8, 4, memory_bound, has_model=True)
    machine.lengths.teach_opening(0.05)
    machine.speed(100)
    for turn in range(100):  # as requests do that end while others run
        machine.lengths.forget(str(turn), 1000, num_output)
        machine.rates[turn + 8] = machine.rates.pop(turn)
        machine.speed(5)
    granted = []
    for turn in range(100, 200):
        machine.lengths.forget(str(turn), 1000, num_output)
        machine.rates[turn + 8] = machine.rates.pop(turn)
        granted += [machine.step()[2] for _ in range(5)]
    assert np.mean(granted) > 3.5 if num_output == 5000 else np.mean(granted) < 0.05
    machine.speed(2000)  # the same eight, which outlive those before them by far
    assert np.mean([machine.step()[2] for _ in range(100)]) > 3.5


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("draft_cost", [0.05, 0.2, 0.6])
def test_the_closed_form_is_a_special_case(rate, draft_cost):
    """One request, tokens accepted alike: (1 - a^(n + 1)) / ((1 - a) (n c + 1)) tokens in a step's
    time (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8)."""
    machine = Machine([rate], 8, lambda num_rows, num_nodes: 5 * (1 + draft_cost * num_nodes))
    lengths = np.arange(9)
    speeds = (1 - rate ** (lengths + 1)) / ((1 - rate) * (lengths * draft_cost + 1))
    machine.speed(400)
    found = [machine.step() for _ in range(400)]
    granted = [sum(each[2]) for each in found]
    assert np.mean(speeds[granted]) > 0.94 * speeds.max(), (speeds, np.bincount(granted))
    tokens, ms = (sum(each[part] for each in found) for part in (0, 1))
    assert 5 * tokens / ms == pytest.approx(speeds.max(), rel=0.12)


def chain(chances):
    tokens = ints(range(len(chances)))
    return Draft(tokens, tree.chain_parents(len(tokens)), chances=np.array(chances, np.float32))


def verified(lengths, names, drafts, accepted):
    """A step of these drafts, of which so many nodes were accepted."""
    sizes = np.array([each.num_nodes for each in drafts])
    batch = SimpleNamespace(
        request_ids=names, max_nodes=sizes, num_tokens=len(names), num_seqs=len(names),
        samples=np.ones(len(names), dtype=bool),
    )  # fmt: skip
    verdict = SimpleNamespace(path_start=np.cumsum([0, *accepted]), nodes=None)
    lengths.count(batch, drafts, verdict, 0.0)


def test_drafts_end_where_the_drafters_own_estimates_say_so():
    """Products along a chain, against the price; without estimates, or as a trial, all is left."""
    lengths = DraftLengths(4, tree_drafts=False)
    lengths._price = 0.5
    names = list("abcdef")
    drafts = [
        chain([0.9, 0.8, 0.65, 0.9]), chain([0.4, 1.0]), chain([1.0] * 4), tree.EMPTY,
        Draft(ints([1, 2]), tree.chain_parents(2)), chain([0.4, 1.0]),
    ]  # fmt: skip
    lengths._tried = "f"
    left = lengths.shorten(names, drafts)
    assert [each.num_nodes for each in left] == [2, 0, 4, 0, 2, 2]
    assert [len(left[row].chances) for row in (0, 1, 2, 5)] == [2, 0, 4, 2]
    assert drafts[0].num_nodes == 4
    for price in (0.0, np.inf):
        lengths._price = price
        assert lengths.shorten(names, drafts) is drafts


def test_estimates_count_for_what_nodes_like_them_were_worth():
    """Of a drafter that promises 0.9 and keeps 0.3; and what was forgotten is believed again."""
    lengths, rng = DraftLengths(4, tree_drafts=False), np.random.default_rng(0)
    lengths.plan(["a"])
    for _ in range(300):
        misses = rng.random(4) >= 0.3
        accepted = int(misses.argmax()) if misses.any() else 4
        verified(lengths, ["a"], [chain([0.95] * 4)], [accepted])
    lengths._confidences.learn()
    assert lengths._confidences.believed(np.array([0.95]))[0] == pytest.approx(0.3, abs=0.06)
    assert lengths._confidences.believed(np.array([0.35]))[0] == pytest.approx(0.35)
    for _ in range(400):
        for _ in range(10):
            verified(lengths, ["a"], [chain([0.35])], [0])
        lengths._confidences.learn()
    assert lengths._confidences.believed(np.array([0.95]))[0] > 0.85


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_their_estimates_end_leave_the_law_alone(rule):
    """By enumeration: a node's estimate depends on the tokens above it, which were drawn."""
    vocab, sizes = 2, set()
    lengths = DraftLengths(2, tree_drafts=False)
    lengths._price = 0.5

    def drafter(prefix):
        """Chains of two tokens that are drawn, the second's law and estimates by the first."""
        first, drafted = np.array([0.3, 0.7]), []
        for one, other in itertools.product(range(vocab), repeat=2):
            second = np.array([0.6, 0.4]) if one else np.array([0.2, 0.8])
            probs = DraftProbs(ints([[0, 1], [0, 1]]), np.array([first, second], dtype=np.float32))
            chances = np.array([0.9, 0.9 if one else 0.3], dtype=np.float32)
            draft = Draft(ints([one, other]), tree.chain_parents(2), probs, chances=chances)
            if rule == "coupled":  # whose drafts are functions of the text and the noise
                draft = replace(draft, probs=None)
            (left,) = lengths.shorten(["a"], [draft])
            sizes.add(left.num_nodes)
            drafted.append((float(first[one] * second[other]), left))
        return drafted

    for seed in range(3):
        target = random_target(vocab, seed)
        law = emission_law(RULES[rule], target, drafter, length=3)
        assert distance_from_target(law, target, length=3) < 1e-6
    assert sizes == {1, 2}


def test_requests_come_and_go():
    machine = Machine([0.8] * 3, 4, between)
    for turn in range(300):
        machine.rates[turn + 3] = 0.8
        del machine.rates[turn]
        machine.step()
    assert len(machine.lengths._requests) == 3
    machine.rates = {}
    machine.lengths.plan([])


@pytest.mark.parametrize(("rate", "pays"), [(0.0, False), (0.9, True)])
def test_what_a_run_learned_serves_the_next_from_its_first_step(rate, pays):
    """Also under the load that the run before had: nothing is compared before it is known."""
    before = Machine([rate] * 16, 6, compute_bound if not pays else memory_bound)
    before.speed(600)
    after = Machine([rate] * 16, 6, before.step_ms, seed=1)
    assert after.lengths.recall(before.lengths.knowledge())
    granted = np.mean([after.step()[2] for _ in range(40)])
    assert granted > 4 if pays else granted < 0.1


def test_a_recalled_run_learns_on():
    """What another run learned is wrong here: the text is predictable now."""
    before = Machine([0.0] * 8, 5, between)
    before.speed(600)
    after = Machine([0.95] * 8, 5, between, seed=1)
    assert after.lengths.recall(before.lengths.knowledge())
    after.speed(1500)
    assert np.mean([after.step()[2] for _ in range(300)]) > 0.4


def test_what_cannot_have_been_learned_is_not_recalled():
    machine = Machine([0.5] * 4, 5, between)
    machine.speed(100)
    known = machine.lengths.knowledge()
    granted, drafted, accepted = known.accepted
    for wrong in (
        known._replace(accepted=known.accepted[:, :, :4]),
        known._replace(accepted=np.stack([granted, accepted - 1e-3, drafted])),
        known._replace(accepted=known.accepted - 1e3),
        known._replace(costs=np.full_like(known.costs, np.nan)),
        known._replace(costs=np.full_like(known.costs, 99.0)),
        known._replace(covariance=-known.covariance),
        known._replace(opening=np.full(3, -1.0)),
        known._replace(covariance=known.covariance[:5, :5]),
    ):
        assert not Machine([0.5] * 4, 5, between).lengths.recall(wrong)
    assert DraftLengths(5, tree_drafts=False).recall(known)
    assert not DraftLengths(6, tree_drafts=False).recall(known)


def test_the_price_is_chosen_anew_when_the_load_is_another():
    """Not only after the steps that the last load's price is still measured for."""
    machine = Machine([0.9], 6, compute_bound)
    machine.speed(600)
    machine.rates = dict.fromkeys(range(32), 0.0)
    machine.speed(600)
    machine.rates = {40: 0.9}
    machine.speed(30)
    machine.rates = dict.fromkeys(range(50, 82), 0.0)
    assert np.mean(machine.step()[2]) < 0.1
