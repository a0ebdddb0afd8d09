"""Torch threads: the faster number for every size of step, learned while serving."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.workers import threads
from outrider.workers.threads import MANY_TOKENS, Threads


class Machine:
    """A clock, and how long a step takes with which number of threads."""

    def __init__(self, one_ms: float, all_ms: float, noise: float = 0.0) -> None:
        self.now_s = 0.0
        self.one_ms, self.all_ms, self._noise = one_ms, all_ms, noise
        self._rng = random.Random(3)

    def clock(self) -> float:
        return self.now_s

    def run(self, share: Threads, num_steps: int, num_tokens: int) -> list[int]:
        """The number of threads of each of some steps."""
        taken = []
        for _ in range(num_steps):
            with share.step(num_tokens):
                taken.append(torch.get_num_threads())
                time_ms = self.one_ms if taken[-1] == 1 else self.all_ms
                late = self._rng.random() < 0.05  # now and then something else takes the core
                factor = 1 + self._rng.uniform(0, self._noise) + (10 * self._noise if late else 0)
                self.now_s += (num_tokens + 8) * time_ms * factor / 1e3
        return taken


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "num_cores", lambda: 4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("num_tokens", [1, 8, MANY_TOKENS, 1000])
@pytest.mark.parametrize(("one_ms", "all_ms", "wanted"), [(2, 1, 4), (1, 2, 1), (1, 10, 1)])
def test_the_faster_number_is_found_within_some_tens_of_steps(
    noise, num_tokens, one_ms, all_ms, wanted
):
    machine = Machine(one_ms, all_ms, noise)
    share = Threads(None, 1, clock=machine.clock)
    machine.run(share, 40, num_tokens)
    late = machine.run(share, 1000, num_tokens)
    assert late.count(wanted) > 900, late


def test_a_choice_that_was_right_is_corrected_when_the_machine_changes():
    machine = Machine(one_ms=2, all_ms=1)
    share = Threads(None, 1, clock=machine.clock)
    machine.run(share, 2000, 64)
    machine.one_ms, machine.all_ms = 2, 10  # a neighbour: threads wait for each other
    assert machine.run(share, 40, 64)[20:].count(1) >= 18
    machine.run(share, 2000, 64)
    machine.all_ms = 1  # it has gone, which steps with one thread do not show
    assert machine.run(share, 600, 64)[-20:].count(4) >= 18


def test_what_comparisons_cost_is_bounded():
    machine = Machine(one_ms=1, all_ms=10)
    share = Threads(None, 1, clock=machine.clock)
    machine.run(share, 200, 64)
    begin_s = machine.now_s
    for _ in range(50):  # times that change all the time ask for comparisons all the time
        for factor in (1, 4):
            machine.one_ms, machine.all_ms = factor, 10 * factor
            machine.run(share, 10, 64)
    usual_s = 50 * 10 * (64 + 8) * (1 + 4) / 1e3
    assert machine.now_s - begin_s < 1.1 * usual_s


def test_what_was_measured_is_reported_once():
    machine = Machine(one_ms=3, all_ms=1)
    share = Threads(None, 1, clock=machine.clock)
    assert not share.has_news
    machine.run(share, 50, 20)
    (choice,) = share.news()
    assert (choice.min_tokens, choice.num_threads) == (16, 4)
    assert (choice.one_ms, choice.all_ms) == (24 * 3, 24)
    assert not share.has_news


def test_a_step_that_fails_is_not_counted():
    readings = iter([0.0])
    with pytest.raises(MemoryError), Threads(None, 1, clock=lambda: next(readings)).step(3):
        raise MemoryError


def test_a_fixed_number_stays():
    share = Threads(3, 1, clock=lambda: pytest.fail("measured"))
    with share.step(1):
        assert torch.get_num_threads() == 3


def test_several_ranks_always_use_their_share():
    share = Threads(None, 2, clock=lambda: pytest.fail("measured"))
    for num_tokens in (1, 100):
        with share.step(num_tokens):
            assert torch.get_num_threads() == 2
    with Threads(None, 8).step(1):
        assert torch.get_num_threads() == 1
