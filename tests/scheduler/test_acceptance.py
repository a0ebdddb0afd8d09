"""What drafts came to, by state of the request and position, against counts by hand."""

from __future__ import annotations

import numpy as np

from outrider.scheduler import draft_lengths
from outrider.scheduler.draft_lengths import NEW, NUM_STATES, Acceptance, Lately

DECAY = draft_lengths._DECAY


def test_a_request_is_as_good_as_its_latest_drafts():
    lately = Lately(0)
    assert lately.state == NEW
    lately.drafted(4, 4)
    best = lately.state
    for _ in range(12):
        lately.drafted(4, 0)
    assert (lately.state, best) == (0, draft_lengths._NUM_LEVELS - 1)
    states = []
    for _ in range(12):
        lately.drafted(4, 4)
        states.append(lately.state)
    assert states == sorted(states)
    assert states[-1] == best


def test_a_level_is_forgotten_without_drafts():
    lately, fresh = Lately(0), Lately(0)
    lately.drafted(4, 3)
    level = lately.state
    for _ in range(draft_lengths._RESTED_STEPS - 1):
        lately.idle(1)
        fresh.idle(1)
    assert lately.state == level
    for _ in range(50):
        lately.idle(1)
        fresh.idle(1)
    assert lately.state not in (level, NEW)
    assert fresh.state == NEW
    lately.drafted(4, 4)
    assert lately.state < NEW


def test_a_level_does_not_depend_on_where_drafts_were_cut():
    """Nor is a tree's level low because its nodes are mostly siblings of what is accepted."""
    levels = []
    for most in (1, 4, 30):
        lately, rng = Lately(0), np.random.default_rng(0)
        found = []
        for _ in range(4000):
            misses = rng.random(40) > 0.8
            lately.drafted(most, min(int(misses.argmax()), most))
            found.append(lately.state)
        levels.append(np.mean(found))
    assert max(levels) - min(levels) < 0.6, levels


def test_counts_by_state_and_group():
    sizes = np.array([1, 2])
    found, rng = Acceptance(sizes, tree_drafts=False), np.random.default_rng(0)
    # By hand: granted, drafted, accepted of each state and group, decayed by each draft there.
    wanted = np.zeros((3, NUM_STATES, 2))
    for _ in range(40):
        for _ in range(int(rng.integers(0, 4))):  # a lesson of several drafts, or of none
            state, granted = int(rng.integers(0, NUM_STATES)), int(rng.integers(1, 4))
            drafted = int(rng.integers(0, granted + 1))
            accepted = int(rng.integers(0, drafted + 1))
            found.count(state, granted, drafted, accepted)
            wanted[:, state, 0] *= DECAY
            wanted[:, state, 0] += (granted > 0, drafted > 0, accepted > 0)
            if granted > 1:
                wanted[:, state, 1] *= DECAY
                wanted[:, state, 1] += [max(each - 1, 0) for each in (granted, drafted, accepted)]
        found.learn()
    # Drafts of one lesson are decayed together.
    np.testing.assert_allclose(found.counts, wanted, rtol=0.05)
    drafted, accepted = found.per_granted()
    assert (np.diff(drafted) <= 0).all()
    assert (np.diff(accepted) <= 0).all()
    assert (accepted <= drafted).all()


def test_what_a_node_is_worth():
    """Of requests that differ, by what their own drafts showed; of depths, by all of them."""
    found, rng = Acceptance(np.ones(4, dtype=np.int64), tree_drafts=False), np.random.default_rng(0)
    rates = {0: 0.2, 3: 0.6, 5: 0.9}
    for _ in range(600):
        for state, rate in rates.items():
            misses = rng.random(5) > rate
            misses[4] = True
            found.count(state, 4, 4, int(misses.argmax()))
        found.learn()
    _, accepted = found.per_granted()
    for state, rate in rates.items():
        wanted = rate ** np.arange(1, 5)
        assert np.abs(accepted[state] - wanted).max() < 0.12, (state, accepted[state])


def test_what_lies_behind_a_cut_is_guessed_from_what_lies_before_it():
    for rate in (0.3, 0.9):
        found = Acceptance(np.ones(6, dtype=np.int64), tree_drafts=False)
        rng = np.random.default_rng(0)
        for _ in range(400):
            found.count(2, 2, 2, int(np.array([*(rng.random(2) > rate), True]).argmax()))
            found.learn()
        _, accepted = found.per_granted()
        assert np.abs(accepted[2] - rate ** np.arange(1, 7)).max() < 0.15, accepted[2]
        assert np.abs(accepted[NEW] - rate ** np.arange(1, 7)).max() < 0.25, accepted[NEW]


def test_nodes_of_a_path_through_a_tree():
    found = Acceptance(np.array([2, 2, 4]), tree_drafts=True)
    found.count(3, 8, 6, 3, np.array([0, 3, 5]))
    found.count(3, 4, 4, 0, np.array([], dtype=int))
    found.learn()
    np.testing.assert_allclose(found.counts[:, 3], [[4, 4, 4], [4, 4, 2], [1, 1, 1]])
