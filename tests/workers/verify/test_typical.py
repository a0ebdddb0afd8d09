"""Typical acceptance: the criterion on every node, the longest path, and greedy as ever."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.config import MedusaConfig, NGramConfig, parse
from outrider.errors import ConfigError
from outrider.scheduler import tree
from outrider.scheduler.types import Draft, ints
from outrider.tests.helpers.verification import make_step, paths, sampling_rows
from outrider.workers.verify import make_rule, verify
from outrider.workers.verify.lossy import Typical

VOCAB = 12


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_accepted_path_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    parents, tokens = [], []
    while len(tokens) < 12:
        parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(VOCAB))
        if (parent, token) not in set(zip(parents, tokens)):
            parents.append(parent)
            tokens.append(token)
    draft = Draft(ints(tokens), ints(parents))
    logits = torch.from_numpy(rng.standard_normal((13, VOCAB), dtype=np.float32) * 2)
    temperature = float(rng.choice([0.5, 1.0, 1.5]))
    step = make_step([draft], sampling_rows(1, temperature=[temperature]))
    result = verify(make_rule("typical"), step, logits)

    probs = (logits.double() / temperature).softmax(1).numpy()
    entropy = -(probs * np.log(probs + 1e-5)).sum(1)
    bound = np.minimum(0.09, 0.3 * np.exp(-entropy))
    best: tuple[float, list[int]] = (0.0, [])
    for path in paths(draft):
        rows = [parents[node] + 1 for node in path]
        chances = [probs[row, tokens[node]] for row, node in zip(rows, path)]
        passes = all(chance > bound[row] for chance, row in zip(chances, rows))
        score = float(np.log(chances).sum())
        if passes and (len(path), score) > (len(best[1]), best[0] if best[1] else -np.inf):
            best = (score, path)
    assert result.nodes(0).tolist() == best[1]
    assert result.tokens(0)[:-1].tolist() == [tokens[node] for node in best[1]]


def test_greedy_rows_and_chains_are_exact():
    rng = np.random.default_rng(1)
    draft = tree.chain([3, 4, 5], "t")
    logits = torch.from_numpy(rng.standard_normal((8, VOCAB), dtype=np.float32))
    logits[0, 3] = logits[1, 4] = 9.0
    step = make_step([draft] * 2, sampling_rows(2, temperature=[0.0, 0.0]))
    lossy, exact = (verify(make_rule(name), step, logits) for name in ("typical", "coupled"))
    assert lossy.emitted.tolist() == exact.emitted.tolist()
    assert lossy.nodes(0).tolist() == [0, 1]


def test_lossy_rules_have_to_be_asked_for():
    fields = {"speculative_model": "m", "verification": "typical"}
    with pytest.raises(ConfigError, match="lossy"):
        parse(MedusaConfig, fields)
    with pytest.raises(ConfigError, match="lossy"):
        parse(NGramConfig, {"lossy": True})
    assert parse(MedusaConfig, fields | {"lossy": True}).verification == "typical"


def test_its_bounds_can_be_set_and_belong_to_it():
    fields = {"verification": "typical", "lossy": True, "posterior_threshold": 0.5}
    config = parse(NGramConfig, fields | {"posterior_alpha": 0.7})
    assert config.rule_parameters == (("threshold", 0.5), ("alpha", 0.7))
    assert make_rule("typical", **dict(config.rule_parameters)) == Typical(0.5, 0.7)
    assert parse(NGramConfig, config.model_dump()) == config  # written out, and read again
    with pytest.raises(ConfigError, match="posterior_alpha belongs to verification 'typical'"):
        parse(NGramConfig, {"posterior_alpha": 0.7})
    with pytest.raises(ConfigError, match="posterior_threshold"):
        parse(NGramConfig, fields | {"posterior_threshold": 0})

    draft, step = tree.chain([3], "t"), sampling_rows(1, temperature=1.0)
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = 4.0
    strict, lax = make_rule("typical", threshold=0.5, alpha=9.0), make_rule("typical", alpha=1e-6)
    assert not len(verify(strict, make_step([draft], step), logits).nodes(0))
    assert verify(lax, make_step([draft], step), logits).nodes(0).tolist() == [0]
