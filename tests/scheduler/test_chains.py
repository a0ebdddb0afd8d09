"""Chains of drafts: their shared parents, how a step joins them, and how tokens are appended."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.drafters.drafting import all_chains
from outrider.scheduler import tree
from outrider.scheduler.sequence import TokenBuffer
from outrider.scheduler.types import Draft, ints
from outrider.workers import seats

VOCAB = 50


@pytest.mark.parametrize("count", [0, 1, 5, 128, 129, 400])
def test_parents_of_a_chain_are_right_and_shared_ones_cannot_be_changed(count):
    parents = tree.chain_parents(count)
    assert parents.tolist() == list(range(-1, count - 1))
    if 0 < count <= 128:
        with pytest.raises(ValueError, match="read-only"):
            parents[0] = 3
        assert tree.chain_parents(count) is parents


def test_a_step_of_chains_sends_no_parents():
    shared, own = tree.chain([3, 4, 5], "a"), Draft(ints([7, 8]), ints([-1, 0]))
    branching = Draft(ints([1, 2]), ints([-1, -1]))
    samples = np.ones(3, dtype=np.bool_)
    joined = seats.gather([shared, tree.EMPTY, own], samples)
    assert joined is not None
    assert joined.parents is None
    assert joined.tokens.tolist() == [3, 4, 5, 7, 8]
    assert joined.num_nodes.tolist() == [3, 0, 2]
    joined = seats.gather([shared, tree.EMPTY, branching], samples)
    assert joined is not None
    assert joined.parents is not None
    assert joined.parents.tolist() == [-1, 0, 1, -1, -1]


@pytest.mark.parametrize(
    ("draft", "valid"),
    [
        (tree.chain([3, 4], "a"), True),
        (Draft(ints([3, 4]), ints([-1, 0])), True),
        (Draft(ints([3, 4]), ints([-1, -1])), False),  # a tree
        (Draft(ints([3, 4]), ints([-1])), False),
        (Draft(ints([3, 4]), tree.chain_parents(3)), False),
        (tree.chain([3, VOCAB], "a"), False),
        (tree.chain([3, -1], "a"), False),
        (tree.chain([3, 4, 5], "a"), False),  # over the budget
        (Draft([3, 4], tree.chain_parents(2)), False),  # type: ignore[arg-type]
        (Draft(ints([3, 4]), "ab"), False),  # type: ignore[arg-type]
        (Draft(np.array([3, 4]), tree.chain_parents(2)), False),  # type: ignore[arg-type]
    ],
)
def test_only_valid_chains_pass_together(draft, valid):
    drafts = [tree.chain([1, 2], "a"), tree.EMPTY, draft]
    assert all_chains(drafts, ints([2, 0, 2]), VOCAB) == valid


def test_few_and_many_tokens_are_appended_alike():
    buffer, expected = TokenBuffer(ints([9])), [9]
    for count in (1, 2, 8, 9, 200, 3):
        tokens = list(range(count))
        buffer.extend(tokens if count % 2 else ints(tokens))
        expected += tokens
        assert buffer.view.tolist() == expected
        assert buffer.part(1, len(buffer)).tolist() == expected[1:]
