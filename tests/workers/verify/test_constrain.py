"""Masks of the logits: at every row of every sequence that has one, under every rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.scheduler import tree
from outrider.scheduler.types import Draft, DraftProbs, Masks, ints
from outrider.tests.helpers.verification import make_step, sampling_rows
from outrider.workers.target import _head_step
from outrider.workers.transport.wire import decode, encode
from outrider.workers.verify import make_rule, verify

VOCAB = 40  # no multiple of 32


def masks_of(allowed: np.ndarray) -> np.ndarray:  # [num_rows, vocab] bool -> [num_rows, words]
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, 24))), axis=1, bitorder="little")
    return packed.view(np.int32)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical", "relaxed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_rows_of_a_batch(rule, temperature):
    """A constrained tree between two free sequences, across the wire."""
    rng = np.random.default_rng(1)
    made = make_rule(rule)
    for seed in range(20):
        nodes = Draft(ints([3, 35, 3]), ints([-1, -1, 0]))
        allowed = rng.random((4, VOCAB)) < 0.2
        allowed[:, 20] = True
        held = replace(nodes, masks=Masks(ints([0, 1, 2, 3]), masks_of(allowed)))
        drafts = [tree.chain([1, 2], "d"), held, tree.EMPTY]
        sampling = sampling_rows(3, temperature=temperature, seeds=np.arange(3) + seed, top_p=0.9)
        step = decode(encode(make_step(drafts, sampling)))
        assert step.masks is not None
        assert _head_step(step).masks is None, "no head reads them"
        logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed))
        before = logits.clone()
        verdict = verify(made, step, logits)
        assert torch.equal(logits, before)
        by_hand = logits.clone()
        by_hand[3:7][torch.from_numpy(~allowed)] = -torch.inf
        expected = verify(made, make_step([drafts[0], nodes, drafts[2]], sampling), by_hand)
        assert verdict.emitted.tolist() == expected.emitted.tolist()
        assert verdict.path.tolist() == expected.path.tolist()
        row = 0
        for node, token in zip([*verdict.nodes(1).tolist(), None], verdict.tokens(1).tolist()):
            assert allowed[row, token]
            row = 0 if node is None else node + 1


def test_a_forbidden_guess_that_was_drawn_is_never_accepted():
    probs = DraftProbs(ints([[3, 4]]), np.array([[0.9, 0.1]], dtype=np.float32))
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, [4, 9]] = True
    draft = replace(tree.chain([3], "d", probs), masks=Masks(ints([0]), masks_of(allowed)))
    for rule in ("rejection", "block"):
        for seed in range(200):
            step = make_step([draft], sampling_rows(1, temperature=1.0, seeds=seed))
            verdict = verify(make_rule(rule), step, torch.zeros(2, VOCAB))
            assert verdict.num_accepted.tolist() == [0]
            assert verdict.emitted[0] in (4, 9)


def test_drafts_without_masks_make_a_step_without():
    assert make_step([tree.chain([1], "d")]).masks is None
