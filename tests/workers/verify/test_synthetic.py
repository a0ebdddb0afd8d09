"""Synthetic acceptance: the exact law over all coins, the rate of real coins, and repeatability."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch

from outrider.scheduler import tree
from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.verification import assert_fits, make_step, paths, sampling_rows
from outrider.workers.verify import make_rule, verify
from outrider.workers.verify import rules as layouts

VOCAB = 7
SHAPES = {"chain": [-1, 0, 1, 2], "tree": [-1, -1, 0, 0, 1, 2, -1]}


def draft_of(parents: list[int]) -> Draft:
    seen: dict[int, int] = defaultdict(int)
    tokens = []
    for parent in parents:
        tokens.append(seen[parent])
        seen[parent] += 1
    return Draft(ints(tokens), ints(parents))


def law_of(draft: Draft, rate: float) -> dict[tuple[int, ...], float]:
    """Chance of every accepted path: each node on it passes, all earlier siblings on it fail."""
    parents = draft.parents.tolist()
    ended: dict[tuple[int, ...], float] = {}
    for path in ([], *paths(draft)):
        chance = 1.0
        for node in path:
            earlier = [at for at in range(node) if parents[at] == parents[node]]
            chance *= rate * (1 - rate) ** len(earlier)
        leaf = path[-1] if path else -1
        ended[tuple(path)] = chance * (1 - rate) ** parents.count(leaf)
    return ended


@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_of_accepted_paths_by_enumerating_coins(shape):
    rate, draft = 0.3, draft_of(SHAPES[shape])
    rows = layouts.rows_of(make_step([draft]))
    children = layouts.child_table(rows)
    exists = children >= 0
    places = np.argwhere(exists)
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for fallen in itertools.product([True, False], repeat=len(places)):
        heads = np.zeros(exists.shape, dtype=bool)
        heads[tuple(places.T)] = fallen
        choice = layouts.Choice(
            layouts.first_taken(rows, children, exists & heads), ints(np.zeros(rows.num_rows))
        )
        path = layouts.verdict(0, rows, choice, layouts.walk(rows, choice)).nodes(0)
        law[tuple(path.tolist())] += rate ** sum(fallen) * (1 - rate) ** (len(fallen) - sum(fallen))
    wanted = law_of(draft, rate)
    assert set(law) == set(wanted)
    assert all(abs(law[path] - wanted[path]) < 1e-12 for path in law)
    assert abs(sum(wanted.values()) - 1) < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
def test_coins_have_the_rate_and_the_last_token_is_the_targets(shape, temperature):
    num_seqs, rate, draft = 3000, 0.6, draft_of(SHAPES[shape])
    seeds = np.arange(num_seqs) * 7919 - 5
    sampling = sampling_rows(num_seqs, temperature=temperature, seeds=seeds)
    step = make_step([draft] * num_seqs, sampling, lengths=np.arange(num_seqs) % 50 + 1)
    logits = torch.from_numpy(
        np.random.default_rng(3).standard_normal((len(step.rows), VOCAB), dtype=np.float32)
    )
    result = verify(make_rule("synthetic", rate=rate), step, logits)
    law = law_of(draft, rate)
    order = list(law)
    counts = np.zeros(len(order))
    per_seq = draft.num_nodes + 1
    drawn = verify(
        make_rule("synthetic", rate=0.0), step, logits
    )  # nothing accepted: the roots' own draws
    for seq in range(num_seqs):
        path = result.nodes(seq).tolist()
        counts[order.index(tuple(path))] += 1
        assert result.tokens(seq)[:-1].tolist() == draft.tokens[path].tolist()
        if temperature == 0:
            row = seq * per_seq + (path[-1] + 1 if path else 0)
            assert result.tokens(seq)[-1] == logits[row].argmax()
        elif not path:
            assert result.tokens(seq)[-1] == drawn.tokens(seq)[-1]
    assert_fits(counts, np.asarray([law[path] for path in order]))


def test_coins_depend_on_seed_and_position_only():
    draft = draft_of(SHAPES["tree"])
    rule = make_rule("synthetic", rate=0.5)
    rng = np.random.default_rng(0)

    def run(seeds: list[int]) -> list[list[int]]:
        step = make_step([draft] * len(seeds), sampling_rows(len(seeds), seeds=seeds), lengths=9)
        logits = torch.from_numpy(rng.standard_normal((len(step.rows), VOCAB), dtype=np.float32))
        result = verify(rule, step, logits)
        return [result.nodes(seq).tolist() for seq in range(len(seeds))]

    together = run(list(range(40)))
    assert together == [run([seed])[0] for seed in range(40)]
    assert len({tuple(path) for path in together}) > 3


def test_rates_0_and_1_and_excluded_tokens():
    draft = draft_of(SHAPES["chain"])
    step = make_step([draft, tree.EMPTY, draft])
    logits = torch.zeros(len(step.rows), VOCAB)
    logits[2, 0] = -torch.inf  # the first sequence's third node has token 0
    every = verify(make_rule("synthetic", rate=1.0), step, logits)
    assert [every.nodes(seq).tolist() for seq in range(3)] == [[0, 1], [], [0, 1, 2, 3]]
    none = verify(make_rule("synthetic", rate=0.0), step, logits)
    assert [len(none.tokens(seq)) for seq in range(3)] == [1, 1, 1]
