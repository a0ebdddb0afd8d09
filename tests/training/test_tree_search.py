"""The tree search: against every tree there is, and against walks counted by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from outrider.training.calibration import rank_table, search_tree, tokens_per_step, wide_tree


def every_tree(num_levels: int, num_ranks: int, num_nodes: int):
    """All trees of so many nodes in which no node hangs in the air."""
    nodes = [
        path
        for depth in range(1, num_levels + 1)
        for path in itertools.product(range(num_ranks), repeat=depth)
    ]
    for chosen in itertools.combinations(nodes, num_nodes):
        kept = set(chosen)
        if all(len(path) == 1 or path[:-1] in kept for path in kept):
            yield chosen


def chance(table, path) -> float:
    return float(np.prod([table[level, rank] for level, rank in enumerate(path)]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_no_tree_is_better(seed, num_nodes):
    table = np.random.default_rng(seed).dirichlet(np.ones(4), size=3)[:, :3]
    found = search_tree(table, num_nodes)
    best = max(sum(chance(table, path) for path in paths) for paths in every_tree(3, 3, num_nodes))
    assert found.tokens_per_step == pytest.approx(1 + best)
    assert len(found.choices) == num_nodes
    places = {path: index for index, path in enumerate(found.choices)}
    assert all(len(path) == 1 or places[path[:-1]] < places[path] for path in places)


def test_ranks_that_never_fitted_are_left_out():
    table = np.array([[0.5, 0.0], [0.25, 0.0]])
    assert search_tree(table, 10).choices == ((0,), (0, 0))


def test_table_counts_a_level_only_where_it_was_reached():
    walks = [(0, 1), (0,), (1,), ()]
    table = rank_table(walks, num_levels=3, num_ranks=2)
    np.testing.assert_allclose(table, [[0.5, 0.25], [0, 1 / 3], [0, 0]])
    assert tokens_per_step(walks, [(0,), (0, 1)]) == 1 + 3 / 4
    assert tokens_per_step([], [(0,)]) == 1.0


@pytest.mark.parametrize(("levels", "nodes", "width"), [(4, 256, 10), (1, 8, 4), (6, 1000, 10)])
def test_wide_tree_keeps_its_limits(levels, nodes, width):
    paths = wide_tree(levels, nodes, width)
    assert len(paths) <= nodes
    assert max(map(len, paths)) == levels
    assert max(max(path) for path in paths) < width
    assert all(len(path) == 1 or path[:-1] in set(paths) for path in paths)
