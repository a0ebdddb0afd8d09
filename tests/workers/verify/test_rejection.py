"""Rejection: chances and residuals by the definition, perfect drafts, and the law from logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.scheduler.types import Draft, DraftProbs, ints
from outrider.tests.helpers.verification import (
    assert_fits,
    law_of,
    make_step,
    random_target,
    rejection_outcomes,
    sampled_drafter,
    sampling_rows,
)
from outrider.workers.verify import DrawSettings, draw_siblings, make_rule, rejection, verify
from outrider.workers.verify.rules import rows_of

VOCAB = 6


def by_definition(target: np.ndarray, children: list[tuple[int, np.ndarray | None]]):
    """Chances of the children in order, then the residual: one token at a time, dense."""
    left, seen, chances = target.astype(float), [], []
    for token, drafter in children:
        one_hot = np.eye(len(target))[token]
        drawn_from = one_hot if drafter is None else drafter.astype(float)
        for earlier in seen:
            drawn_from = np.where(np.arange(len(target)) == earlier, 0.0, drawn_from)
        drawn_from = drawn_from / drawn_from.sum() if drawn_from[token] > 0 else one_hot
        chances.append(min(1.0, left[token] / drawn_from[token]))
        rest = np.maximum(left - drawn_from, 0.0)
        left = rest / rest.sum() if rest.sum() > 0 else left
        seen.append(token)
    return chances, left


@pytest.mark.parametrize("seed", range(40))
def test_chances_and_residuals_follow_the_definition(seed):
    """Siblings drawn without replacement, deterministic ones and mixtures, below one root."""
    rng = np.random.default_rng(seed)
    target = random_target(VOCAB, seed)(())
    num_children = int(rng.integers(1, 5))
    tokens = rng.permutation(VOCAB)[:num_children]
    ids = np.sort(rng.permutation(VOCAB)[: int(rng.integers(2, VOCAB + 1))])
    source = np.zeros(VOCAB, dtype=np.float32)
    source[ids] = rng.dirichlet(np.ones(len(ids))).astype(np.float32)
    fixed = rng.random(num_children) < 0.4
    stated = np.where(fixed[:, None], 0.0, source[ids]).astype(np.float32)
    probs = DraftProbs(ints(np.tile(ids, (num_children, 1))), stated)
    rows = rows_of(make_step([Draft(ints(tokens), ints([-1] * num_children), probs)]))
    family = rejection.siblings(rows, probs, np.zeros(rows.num_rows, dtype=bool))
    support = family.support[0]
    inside = np.where(support >= 0, target[support.clip(0)], 0.0)
    laws = np.tile(inside, (rows.num_rows, 1))
    chances = rejection.odds(family, laws, 1.0 - laws.sum(1))
    wanted, residual = by_definition(
        target, [(token, None if fixed[at] else source) for at, token in enumerate(tokens)]
    )
    np.testing.assert_allclose(chances.accept[0, :num_children], wanted, atol=1e-6)
    known = support >= 0
    scale = chances.residual[0].sum() + chances.outside[0]
    np.testing.assert_allclose(
        chances.residual[0][known] / scale, residual[support[known]], atol=1e-6
    )
    others = np.setdiff1d(np.arange(VOCAB), support)
    np.testing.assert_allclose(chances.outside[0] / scale, residual[others].sum(), atol=1e-6)


def test_a_perfect_drafter_is_always_accepted():
    target = random_target(4, seed=5, sharpness=0.5)
    for _, draft in sampled_drafter(4, [-1, 0, 1], target)(()):
        full = np.stack([target(tuple(draft.tokens[:at].tolist())) for at in range(3)])
        probs = DraftProbs(draft.probs.ids, full.astype(np.float32))
        law = rejection_outcomes(target, (), Draft(draft.tokens, draft.parents, probs))
        assert sum(chance for emitted, chance in law.items() if len(emitted) < 4) < 1e-6


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("sampled", [True, False])
def test_rejection_follows_the_target_through_the_whole_path(sampled, top_p):
    """From logits to tokens, over many seeds: first token, then second given the first."""
    num_seqs, vocab = 12_000, 6
    rng = np.random.default_rng(11)
    table = torch.from_numpy(rng.standard_normal((vocab + 1, vocab), dtype=np.float32) * 1.5)
    source = torch.from_numpy(rng.standard_normal((1, vocab), dtype=np.float32))
    plain = sampling_rows(num_seqs, temperature=0.9, top_p=top_p)
    settings = DrawSettings.of(plain, ints(range(num_seqs)))._replace(top_p=plain.top_p * 0 + 1)
    tokens, ids, probs = draw_siblings(
        source.expand(num_seqs, vocab), ints(np.ones(num_seqs)), settings, 4, 2
    )
    if not sampled:
        tokens = source.topk(2).indices.expand(num_seqs, 2)
    drafts = [
        Draft(
            ints(row),
            ints([-1, -1]),
            DraftProbs(np.tile(ids[seq].numpy(), (2, 1)), np.tile(probs[seq].numpy(), (2, 1)))
            if sampled
            else None,
        )
        for seq, row in enumerate(tokens.numpy())
    ]
    seen = np.column_stack([np.full(num_seqs, vocab), tokens.numpy()])
    step = make_step(drafts, plain)
    result = verify(make_rule("rejection"), step, table[torch.from_numpy(seen.ravel())])
    heads = result.emitted_start[:-1]
    first = result.emitted[heads]
    assert_fits(np.bincount(first, minlength=vocab), law_of(table[vocab], top_p))
    longer = np.diff(result.emitted_start) == 2
    assert longer.mean() > 0.3
    for token in range(vocab):
        second = result.emitted[heads[longer & (first == token)] + 1]
        if len(second) > 50:
            assert_fits(np.bincount(second, minlength=vocab), law_of(table[token], top_p))
