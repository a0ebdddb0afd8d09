"""Drafts under a grammar: the law of what is emitted is the masked target's, under every rule."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.structured.constraints import is_allowed
from outrider.engine.structured.drafting import constrained, forced_tokens
from outrider.scheduler import tree
from outrider.scheduler.types import Draft, DraftProbs, ints
from outrider.tests.helpers.verification import (
    RULES,
    distance_from_target,
    emission_law,
    fixed_drafter,
    random_target,
    sampled_drafter,
)


class TableConstraint:
    """A constraint that allows one to all tokens after each text, by a table."""

    def __init__(self, vocab: int, seed: int, prefix=()) -> None:
        self.vocab, self.seed = vocab, seed
        self.text = list(prefix)

    def tokens(self) -> list[int]:
        rng = np.random.default_rng([self.seed, 7, *self.text])
        return rng.permutation(self.vocab)[: rng.integers(1, self.vocab + 1)].tolist()

    def allowed(self):
        word = sum(1 << token for token in self.tokens())
        return np.array([word], dtype=np.uint32).view(np.int32)

    def forced(self) -> list[int]:
        return []

    def consume(self, token: int) -> None:
        assert token in self.tokens(), (token, self.text)
        self.text.append(token)

    def rewind(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.text)
        del self.text[len(self.text) - num_tokens :]


def masked(target, vocab: int, seed: int):
    """`target` with forbidden tokens at 0, renormalised."""

    def probs(prefix):
        kept = TableConstraint(vocab, seed, prefix).tokens()
        weights = np.zeros(vocab)
        weights[kept] = target(prefix)[kept] + 1e-3
        return weights / weights.sum()

    return probs


def held(drafter, vocab: int, seed: int, max_nodes: int = 4, max_depth: int = 4):
    """What a drafter's drafts become under the table."""

    def drafts(prefix):
        found = []
        for chance, draft in drafter(prefix):
            constraint = TableConstraint(vocab, seed, prefix)
            root = constraint.allowed()
            held = constrained(constraint, draft, root, frozenset(), max_nodes, max_depth)
            assert tuple(constraint.text) == tuple(prefix), "left where it was"
            assert held.num_nodes <= max_nodes
            assert tree.problem(held, vocab) is None
            found.append((chance, held))
        return found

    return drafts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1], [-1, -1, 0]], ids=str)
def test_the_law_is_the_masked_targets(rule, parents):
    vocab = 3
    for seed in range(4):
        target = masked(random_target(vocab, seed), vocab, seed)
        drafters = [fixed_drafter(vocab, parents, seed)]
        if rule != "coupled":
            source = random_target(vocab, seed + 50)
            drafters.append(sampled_drafter(vocab, parents, source))
        for drafter in drafters:
            law = emission_law(RULES[rule], target, held(drafter, vocab, seed), length=4)
            assert distance_from_target(law, target, length=4) < 1e-6  # drafts are float32


def test_only_allowed_guesses_are_left_and_every_row_has_its_mask():
    vocab, rng = 6, np.random.default_rng(0)
    for seed in range(60):
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(7)]
        taken: set[tuple[int, int]] = set()
        tokens: list[int] = []
        for parent in parents:
            free = [t for t in range(vocab) if (parent, t) not in taken]
            tokens.append(int(rng.choice(free)))
            taken.add((parent, tokens[-1]))
        constraint = TableConstraint(vocab, seed)
        ends = frozenset([0])
        draft = constrained(
            constraint, Draft(ints(tokens), ints(parents)), constraint.allowed(), ends, 9, 9
        )
        assert draft.masks is not None
        masks = dict(zip(draft.masks.rows.tolist(), draft.masks.bits))
        for node in range(-1, draft.num_nodes):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(draft.tokens[at]))
                at = int(draft.parents[at])
            if ends.intersection(path):
                assert path.index(0) == len(path) - 1, "nothing follows an end token"
                assert node + 1 not in masks
                continue
            here = TableConstraint(vocab, seed, path)
            assert masks[node + 1].tolist() == here.allowed().tolist()
            for child in np.flatnonzero(draft.parents == node):
                assert int(draft.tokens[child]) in here.tokens()


class Script(TableConstraint):
    """One text, then its end token."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(32, 0)
        self.script = script

    def tokens(self) -> list[int]:
        return [self.script[len(self.text)]]

    def forced(self) -> list[int]:
        return self.script[len(self.text) : -1]


def test_forced_tokens_take_the_place_of_worse_guesses():
    script, ends = [5, 6, 7, 31], frozenset([31])

    def verified(draft: Draft, max_nodes: int = 8, max_depth: int = 8) -> Draft:
        constraint = Script(script)
        held = constrained(constraint, draft, constraint.allowed(), ends, max_nodes, max_depth)
        assert constraint.text == []
        return held

    assert verified(tree.EMPTY).tokens.tolist() == script, "with the end token"
    assert verified(tree.chain([5, 9], "d")).tokens.tolist() == script
    assert verified(tree.chain([5, 9], "d")).source == "d"
    assert verified(tree.chain([5, 9], "d")).origins == ("grammar",) * 4
    assert verified(tree.chain([5, 6], "d"), max_nodes=2).origins == ()
    assert verified(tree.EMPTY, max_nodes=2).tokens.tolist() == script[:2]
    assert verified(tree.EMPTY, max_depth=3).tokens.tolist() == script[:3]
    assert verified(tree.EMPTY, max_nodes=0).num_nodes == 0
    drawn = DraftProbs(ints([[5, 9]]), np.array([[0.4, 0.6]], dtype=np.float32))
    held = verified(tree.chain([5], "d", drawn))
    assert held.tokens.tolist() == script, "whatever was drawn"
    assert held.probs is None
    assert held.masks is not None
    assert held.masks.rows.tolist() == [0, 1, 2, 3], "none after the end token"
    assert forced_tokens(Script(script), Script(script).allowed(), ends, 9) == script


def test_bits():
    bits = ints([-(2**31), 1])
    assert [token for token in range(70) if is_allowed(bits, token)] == [31, 32]
