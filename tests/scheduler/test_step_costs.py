"""Times of steps fitted to noisy measurements, against the machine that they were drawn from."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.scheduler.budget import StepCosts

MOST = 8


def measured(step_ms, sizes, *, num_steps=600, noise=0.1, seed=0):
    """Costs after steps of random lengths; one in fifty takes long, without a reason."""
    costs, rng = StepCosts(MOST), np.random.default_rng(seed)
    for _ in range(num_steps):
        num_requests, longest = int(rng.choice(sizes)), int(rng.integers(0, MOST + 1))
        num_nodes = int(rng.integers(0, num_requests * longest + 1))
        ms = step_ms(num_requests, num_nodes, longest) * rng.lognormal(0, noise)
        costs.count(num_requests, num_nodes, longest, ms * (5 if rng.random() < 0.02 else 1))
        costs.learn()
    return costs


def compute_bound(num_requests, num_nodes, longest):
    return 1 + 0.3 * num_requests + 0.2 * num_nodes


def memory_bound(num_requests, num_nodes, longest):
    return 10 + 0.01 * (num_requests + num_nodes)


def bent(num_requests, num_nodes, longest):
    return 5 + 0.3 * max(num_requests + num_nodes - 24, 0)


def drafting(num_requests, num_nodes, longest):
    return 4 + 0.05 * (num_requests + num_nodes) + 0.2 * longest


@pytest.mark.parametrize("step_ms", [compute_bound, memory_bound, bent, drafting])
@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_close_to_the_machine(step_ms, num_requests):
    costs = measured(step_ms, [num_requests])
    longest = np.arange(MOST + 1.0)
    num_nodes = num_requests * longest / 2
    found = costs.step_ms(num_requests, num_nodes, longest)
    wanted = [step_ms(num_requests, *each) for each in zip(num_nodes, longest)]
    np.testing.assert_allclose(found, wanted, rtol=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_other_batches_do_not_blur_this_one(seed):
    """A row of one request's draft costs another time than that of another request."""

    def per_request(num_requests, num_nodes, longest):
        return 1 + num_requests + 0.02 * num_nodes

    costs = measured(per_request, [1, 16], seed=seed)
    for num_requests in (1, 16):
        num_nodes = np.array([0.0, 4.0, 8.0])
        found = costs.step_ms(num_requests, num_nodes, np.minimum(num_nodes, MOST))
        wanted = np.array([per_request(num_requests, each, 0) for each in num_nodes])
        np.testing.assert_allclose(found / found[0], wanted / wanted[0], rtol=0.2)


def test_more_rows_never_take_less_time():
    costs = measured(memory_bound, [1, 4, 9], noise=0.5)
    for num_requests in (1, 2, 4, 9, 40):
        found = costs.step_ms(num_requests, np.arange(200.0), np.full(200, 1.0))
        assert (np.diff(found) >= 0).all()
        assert found[0] > 0


def test_a_gap_is_tried():
    """Full drafts and none have been measured; what is between is taken to bend late."""
    costs = StepCosts(MOST)
    for _ in range(40):
        costs.count(4, 0, 0, 5.0)
        costs.count(4, 32, 8, 25.0)
    costs.learn()
    found = costs.step_ms(4, np.array([0.0, 8.0, 32.0]), np.array([0.0, 2.0, 8.0]))
    assert found[1] < 5 + (25 - 5) / 4 + 0.5
    assert found[2] == pytest.approx(25, rel=0.1)


def test_steps_without_drafts_are_known_nearby_and_for_a_while():
    costs = StepCosts(MOST)
    assert not costs.knows_any(drafts=False)
    assert not costs.knows_any(drafts=True)
    for _ in range(4):
        costs.count(8, 0, 0, 2.0)
    assert costs.knows_any(drafts=False)
    assert costs.knows_plain(8)
    assert costs.knows_plain(16)
    assert not costs.knows_plain(128)
    for _ in range(2000):
        costs.count(8, 64, 8, 4.0)
        costs.learn()
    assert costs.knows_any(drafts=True)
    assert not costs.knows_plain(8)
    assert costs.stats()["drafted"] == {"72": pytest.approx(4.0)}


def test_nothing_measured():
    costs = StepCosts(MOST)
    assert (costs.step_ms(3, np.zeros(4), np.zeros(4)) > 0).all()
