"""Drafters' draws: the stated distribution is the one drawn from."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from outrider.scheduler.types import ints
from outrider.tests.helpers.verification import (
    assert_fits,
    mixed_settings,
    sampling_rows,
    scaled_logits,
)
from outrider.workers.verify import DrawSettings, draw, draw_siblings


def columns(num_rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    rows = sampling_rows(num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return ints(np.full(num_rows, 40)), DrawSettings.of(rows, ints(range(num_rows)))


def test_a_draw_is_the_same_alone_and_in_any_batch():
    num_rows = 80
    limits, logits = mixed_settings(num_rows, 5), scaled_logits(num_rows, 3000, 6)
    positions = ints(np.arange(num_rows))

    def drawn(rows: np.ndarray) -> list[int]:
        return draw(logits[torch.from_numpy(rows)], positions[rows], limits.take(rows)).tolist()

    together = drawn(np.arange(num_rows))
    assert [drawn(np.asarray([row]))[0] for row in range(num_rows)] == together
    assert drawn(np.arange(num_rows)[::-1].copy()) == together[::-1]


def test_siblings_are_drawn_without_replacement_from_the_stated_distribution():
    num_rows = 40_000
    logits = torch.tensor([[1.0, 0.2, 2.0, -1.0, 0.0, 1.5]]).expand(num_rows, 6)
    tokens, ids, probs = draw_siblings(
        logits, *columns(num_rows, temperature=0.8), top=4, num_siblings=2
    )
    assert ids[0].tolist() == [2, 5, 0, 1]
    law = torch.zeros(6).scatter_(0, ids[0].long(), probs[0]).double().numpy()
    np.testing.assert_allclose(law[[2, 5, 0, 1]], (logits[0, ids[0].long()] / 0.8).softmax(0), 1e-6)
    pairs = np.zeros((6, 6))
    for first, second in itertools.permutations(range(6), 2):
        pairs[first, second] = law[first] * law[second] / (1 - law[first])
    drawn = (tokens[:, 0] * 6 + tokens[:, 1]).numpy()
    assert_fits(np.bincount(drawn, minlength=36), pairs.ravel())
    single, _, same = draw_siblings(logits, *columns(num_rows, temperature=0.8), top=4)
    single = single[:, 0]
    assert torch.equal(single, tokens[:, 0])
    assert torch.equal(same, probs)
    coupled = draw(logits, *columns(num_rows, temperature=0.8))
    agree = float((coupled == single).double().mean())  # independent noise: chance agreement
    assert agree < float(law.max()) + 0.02


def test_greedy_drafters_are_deterministic_and_a_short_support_ends():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    tokens, _, probs = draw_siblings(logits, *columns(1, temperature=0.0), top=3, num_siblings=3)
    assert tokens.tolist() == [[1, 3, 2]]
    assert not probs.any()
    tokens, ids, probs = draw_siblings(logits, *columns(1, top_k=2), top=3, num_siblings=3)
    assert sorted(tokens[0].tolist()) == [-1, 1, 3]
    assert tokens[0, 2] == -1
    assert probs[0, 2] == 0
    assert ids[0, :2].tolist() == [1, 3]


def test_a_top_k_far_below_the_width_of_what_is_shipped():
    logits = scaled_logits(3, 3000, 6)
    positions, settings = columns(3, top_k=[2, 5, 0])
    tokens, ids, probs = draw_siblings(logits, positions, settings, top=32)
    assert (probs > 0).sum(1).tolist() == [2, 5, 32]
    for row in range(3):
        assert int(tokens[row]) in ids[row][probs[row] > 0].tolist()
    alone, _, same = draw_siblings(logits[:1], positions[:1], settings.take(ints([0])), top=32)
    assert alone.tolist() == tokens[:1].tolist()
    assert torch.equal(same, probs[:1])
