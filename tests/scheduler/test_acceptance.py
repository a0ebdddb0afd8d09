"""What drafts came to, by state of the request and position, against counts by hand."""

from __future__ import annotations

import numpy as np

from outrider.scheduler import draft_lengths
from outrider.scheduler.draft_lengths import NEW, NUM_STATES, Acceptance, Lately

DECAY, FIRST = draft_lengths._DECAY, draft_lengths._FIRST_DRAFTS


def test_a_request_is_as_good_as_its_latest_drafts():
    lately = Lately()
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
    lately, fresh = Lately(), Lately()
    lately.drafted(4, 3)
    level = lately.state
    for _ in range(draft_lengths._RESTED_STEPS - 1):
        lately.idle()
        fresh.idle()
    assert lately.state == level
    for _ in range(50):
        lately.idle()
        fresh.idle()
    assert lately.state not in (level, NEW)
    assert fresh.state == NEW
    lately.drafted(4, 4)
    assert lately.state < NEW


def test_a_long_draft_need_not_be_accepted_whole():
    """A tree's nodes are mostly siblings of what is accepted."""
    lately = Lately()
    lately.drafted(30, draft_lengths._GOOD)
    assert lately.state == draft_lengths._NUM_LEVELS - 1


def test_shares_by_state_and_group():
    sizes = np.array([1, 2])
    found, rng = Acceptance(sizes), np.random.default_rng(0)
    # By hand: granted, drafted, accepted of each state and group, decayed by each draft there.
    counts = np.array([FIRST * sizes] * NUM_STATES, dtype=float)
    wanted = np.stack([counts, counts, draft_lengths._FIRST_GUESS * counts])
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
    np.testing.assert_allclose(found._counts, wanted, rtol=0.05)
    drafted, accepted = found.per_granted()
    np.testing.assert_allclose(drafted[:, 0], wanted[1, :, 0] / wanted[0, :, 0], rtol=0.05)
    assert (np.diff(drafted) <= 0).all()
    assert (np.diff(accepted) <= 0).all()
    assert (accepted <= drafted).all()


def test_nodes_of_a_path_through_a_tree():
    found = Acceptance(np.array([2, 2, 4]))
    before = found._counts[:, 3].copy()
    found.count(3, 8, 6, 3, np.array([0, 3, 5]))
    found.count(3, 4, 4, 0, np.array([], dtype=int))
    found.learn()
    decays = DECAY ** np.array([2, 2, 1])
    new = found._counts[:, 3] - before * decays
    np.testing.assert_allclose(new, [[4, 4, 4], [4, 4, 2], [1, 1, 1]])


def test_what_is_never_granted_keeps_its_first_guess():
    found = Acceptance(np.ones(4, dtype=np.int64))
    for _ in range(3000):
        found.count(0, 1, 1, 1)
        found.learn()
    _, accepted = found.per_granted()
    np.testing.assert_allclose(accepted[0], [1.0] + [draft_lengths._FIRST_GUESS] * 3)
    assert np.isfinite(found._counts).all()
