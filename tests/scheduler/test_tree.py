"""What is derived from a tree's parents, against walks from node to root."""

from __future__ import annotations

import random

import numpy as np

from outrider.scheduler import tree
from outrider.scheduler.types import Draft, DraftProbs, ints

VOCAB = 500


def path(draft: Draft, node: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while node >= 0:
        tokens, node = (int(draft.tokens[node]), *tokens), int(draft.parents[node])
    return tokens


def random_draft(rng: random.Random) -> Draft:
    """Tokens are all different, so that a path names its node."""
    size, window = rng.randrange(1, 12), rng.randrange(4)
    parents = [rng.randrange(-1, node) for node in range(size)]
    parents += [rng.choice([-1, rng.randrange(size + at)]) for at in range(window)]
    tokens = rng.sample(range(VOCAB), len(parents))
    ids = np.arange(2 * len(parents)).reshape(-1, 2)
    probs = rng.choice([None, DraftProbs(ints(ids), ids.astype(np.float32))])
    return Draft(ints(tokens), ints(parents), probs, "random", window)


def test_pruning_keeps_the_paths_that_are_short_enough():
    rng = random.Random(4)
    num_cut = num_windows = 0
    for _ in range(500):
        draft, max_depth = random_draft(rng), rng.randrange(1, 7)
        pruned, kept = tree.prune(draft, max_depth)
        guesses, nodes = range(draft.num_guesses), range(draft.num_nodes)
        wanted = [node for node in guesses if len(path(draft, node)) <= max_depth]
        window = [node for node in nodes if node >= draft.num_guesses]
        orphans = [node for node in window if draft.num_guesses > draft.parents[node] >= 0]
        if all(int(draft.parents[node]) in wanted for node in orphans):
            wanted += window
        assert tree.problem(pruned, VOCAB) is None
        assert [path(pruned, node) for node in range(pruned.num_nodes)] == [
            path(draft, node) for node in wanted
        ]
        assert pruned.num_window == sum(node in window for node in wanted)
        assert pruned.source == draft.source
        if draft.probs is not None:
            assert pruned.probs.ids.tolist() == draft.probs.ids[wanted].tolist()
            assert pruned.probs.probs.tolist() == draft.probs.probs[wanted].tolist()
        assert (kept is None) == (len(wanted) == draft.num_nodes)
        if kept is not None:
            assert kept.tolist() == wanted
            num_cut, num_windows = num_cut + 1, num_windows + (pruned.num_window > 0)
    assert min(num_cut, num_windows) > 50
