"""`verify` from logits to verdicts: the default rule against no drafts; mixed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.errors import ConfigError
from outrider.scheduler import tree
from outrider.scheduler.types import Bias, Draft, DraftProbs, ints
from outrider.tests.helpers.verification import (
    assert_fits,
    law_of,
    make_step,
    penalties_of,
    prefixes,
    sampling_rows,
)
from outrider.workers.verify import make_rule, noise, verify

VOCAB = 300


def model(prefix: tuple[int, ...]) -> np.ndarray:
    """Logits of a made-up model; peaked enough that tokens come back."""
    rng = np.random.default_rng(list(prefix[-3:]))
    return rng.standard_normal(VOCAB, dtype=np.float32) * 3 - np.arange(VOCAB, dtype=np.float32) / 9


def logits_of(histories, drafts) -> torch.Tensor:
    rows = [
        model(seen) for known, draft in zip(histories, drafts) for seen in prefixes(known, draft)
    ]
    return torch.from_numpy(np.stack(rows))


def settings_of(request: int, known: tuple[int, ...], row: int) -> dict:
    """Request number `request` has these settings, whatever else is in the batch."""
    rng = np.random.default_rng([request, 77])
    temperature, top_k = rng.choice([0, 0.7, 1.0, 1.5]), rng.choice([0, 0, 3, 20])
    top_p, min_p = rng.choice([1.0, 0.9]), rng.choice([0, 0.03])
    factors = {"repetition": rng.choice([1, 1.3]), "presence": rng.choice([0, 0.5])}
    prompt, output = known[:4], known[4:]
    return {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": request * 1_000_003,
        "min_new_tokens": max(0, 6 - len(output)),
        "ends": ints([0, 1]),
        "penalties": penalties_of(row, list(prompt), list(output), frequency=0.2, **factors),
        "biases": Bias(row, ints([2, 9]), np.float32([1.5, -4])),
    }


def batch_settings(requests, histories):
    per_row = [
        settings_of(request, known, row)
        for row, (request, known) in enumerate(zip(requests, histories))
    ]
    columns = {name: [row[name] for row in per_row] for name in per_row[0]}
    for name in ("ends", "penalties", "biases"):
        columns[name] = tuple(columns[name])
    return sampling_rows(len(per_row), **columns)


def emit(requests, histories, drafts) -> list[list[int]]:
    sampling = batch_settings(requests, histories)
    step = make_step(drafts, sampling, [len(known) for known in histories])
    result = verify(make_rule("coupled"), step, logits_of(histories, drafts))
    for row, draft in enumerate(drafts):  # the path is where the accepted tokens are
        accepted = result.tokens(row)[:-1].tolist()
        path = result.nodes(row)
        assert draft.tokens[path].tolist() == accepted
        assert [-1, *path.tolist()][:-1] == draft.parents[path].tolist()
    return [result.tokens(row).tolist() for row in range(len(requests))]


def random_tree(rng: np.random.Generator, truth: tuple[int, ...]) -> Draft:
    """A tree that often knows what comes next, among distractors."""
    tokens, parents, spine = [], [], {-1: 0}  # spine: node -> how much of the truth it repeats
    for node in range(int(rng.integers(0, 9))):
        parent = int(rng.integers(-1, node)) if node else -1
        depth = spine.get(parent)
        token = int(rng.integers(0, VOCAB))
        if depth is not None and depth < len(truth) and rng.random() < 0.8:
            token = truth[depth]
        if (token, parent) in zip(tokens, parents):
            token = next(t for t in range(VOCAB) if (t, parent) not in zip(tokens, parents))
        if depth is not None and depth < len(truth) and token == truth[depth]:
            spine[node] = depth + 1
        tokens.append(token)
        parents.append(parent)
    draft = Draft(ints(tokens), ints(parents))
    assert tree.problem(draft, VOCAB) is None
    return draft


def test_any_draft_in_any_batch_gives_the_plain_tokens():
    num_requests, num_tokens = 24, 14
    rng = np.random.default_rng(8)
    prompts = [tuple(rng.integers(0, VOCAB, 4).tolist()) for _ in range(num_requests)]
    plain = []
    for request, known in enumerate(prompts):
        while len(known) < 4 + num_tokens:
            known += tuple(emit([request], [known], [tree.EMPTY])[0])
        plain.append(known)
    known, num_steps = list(prompts), 0
    while waiting := [at for at in range(num_requests) if len(known[at]) < 4 + num_tokens]:
        requests = rng.permutation(waiting).tolist()
        drafts = [random_tree(rng, plain[at][len(known[at]) :]) for at in requests]
        for at, tokens in zip(requests, emit(requests, [known[at] for at in requests], drafts)):
            known[at] += tuple(tokens)
        num_steps += 1
    assert [tokens[: 4 + num_tokens] for tokens in known] == plain
    assert num_steps < num_tokens  # drafts were accepted


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_greedy_batches_never_touch_the_noise(rule, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("noise in a greedy batch")

    for name in ("keys", "uniform", "gumbel", "perturbed_argmax"):
        monkeypatch.setattr(noise, name, refuse)
    histories, truth = [(1, 2), (3, 4)], []
    for known in histories:
        for _ in range(3):
            known += (int(model(known).argmax()),)
        truth.append(list(known[2:]))
    drafts = [tree.chain(truth[0][:2], "test"), Draft(ints([5, truth[1][0]]), ints([-1, -1]))]
    step = make_step(drafts, lengths=2)
    result = verify(make_rule(rule), step, logits_of(histories, drafts))
    assert [result.tokens(0).tolist(), result.tokens(1).tolist()] == [truth[0], truth[1][:2]]
    assert [result.nodes(0).tolist(), result.nodes(1).tolist()] == [[0, 1], [1]]
    assert result.logprobs is None


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_a_window_bends_no_rule_on_the_whole_path(rule):
    """Over many seeds: likely cells below the root and below a guess are there, and never taken."""
    num_seqs, vocab = 12_000, 5
    table = torch.tensor(np.random.default_rng(2).standard_normal((vocab + 1, vocab)) * 1.5)
    guess = int(table[vocab].argsort()[-2])  # the best token is a cell, the next best a guess
    best, below = int(table[vocab].argmax()), int(table[guess].argmax())
    draft = Draft(ints([guess, best, below, guess]), ints([-1, -1, 0, 1]), num_window=3)
    seen = [vocab, *draft.tokens.tolist()]
    step = make_step([draft] * num_seqs, sampling_rows(num_seqs, temperature=0.9))
    result = verify(make_rule(rule), step, table[seen].float().repeat(num_seqs, 1))
    heads, sizes = result.emitted_start[:-1], np.diff(result.emitted_start)
    first = result.emitted[heads]
    assert_fits(np.bincount(first, minlength=vocab), law_of(table[vocab], 1.0))
    assert np.array_equal(sizes == 2, first == guess)  # a fixed guess is taken if it is emitted
    assert sizes.max() == 2
    assert not result.path.any()
    second = result.emitted[heads[sizes == 2] + 1]
    assert_fits(np.bincount(second, minlength=vocab), law_of(table[guess], 1.0))
    cells = table[seen[2:]].argmax(1).tolist()
    assert [result.window_tokens(row).tolist() for row in (0, num_seqs - 1)] == [cells, cells]


def test_rejection_mixes_greedy_sampled_and_undrafted_rows():
    """Greedy rows match greedily whatever probabilities their draft states."""
    histories = [(1,), (2,), (3,), (4,)]
    best = int(model((1,)).argmax())
    wrong = DraftProbs(ints([[best, 7]]), np.float32([[0.5, 0.5]]))
    drafts = [tree.chain([best], "a", wrong), tree.chain([7], "b", wrong), tree.EMPTY, tree.EMPTY]
    sampling = sampling_rows(4, temperature=[0, 0, 1, 0])
    step = make_step(drafts, sampling, samples=[True, True, True, False])
    logits = logits_of(histories[:3], drafts[:3])
    result = verify(make_rule("rejection"), step, logits)
    assert result.tokens(0).tolist() == [best, int(model((1, best)).argmax())]
    assert result.tokens(1).tolist() == [int(model((2,)).argmax())]
    assert result.emitted_start.tolist() == [0, 2, 3, 4, 4]
    plain = verify(make_rule("coupled"), step, logits)
    assert result.tokens(2).tolist() == plain.tokens(2).tolist()  # no draft: the same draw


def test_logprobs_are_of_the_models_own_distribution():
    histories, drafts = [(1,), (2,)], [tree.chain([int(model((1,)).argmax())], "a"), tree.EMPTY]
    sampling = sampling_rows(2, temperature=[0, 2.0], top_k=2, num_logprobs=[3, -1])
    step = make_step(drafts, sampling)
    result = verify(make_rule("coupled"), step, logits_of(histories, drafts))
    seen = [(1,), (1, int(result.tokens(0)[0]))]
    for at, prefix in enumerate(seen):
        own = torch.from_numpy(model(prefix)).log_softmax(0)
        assert result.logprobs.chosen[at] == own[result.emitted[at]]
        np.testing.assert_array_equal(result.logprobs.top[at], own.topk(3).values)
        np.testing.assert_array_equal(result.logprobs.top_ids[at], own.topk(3).indices)
        assert result.logprobs.ranks[at] == 1 + (own > own[result.emitted[at]]).sum()
    assert result.logprobs.chosen[2] == 0
    assert result.logprobs.top.shape == (3, 3)


def test_a_step_without_sampled_rows_and_a_row_without_candidates_do_no_harm():
    step = make_step([tree.EMPTY], samples=[False])
    result = verify(make_rule("rejection"), step, torch.empty(0, 9))
    assert result.emitted_start.tolist() == [0, 0]
    for value in (-torch.inf, torch.nan):
        for name in ("coupled", "rejection"):
            sampling = sampling_rows(3, temperature=[0, 1, 1], top_p=[1, 1, 0.5])
            step = make_step([tree.chain([4], "a")] * 3, sampling)
            result = verify(make_rule(name), step, torch.full((6, 5000), value))
            assert (result.emitted >= 0).all()
            assert (result.emitted < 5000).all()


def test_an_unknown_rule_is_named():
    with pytest.raises(ConfigError, match=r"'coupling' is not one of coupled, rejection"):
        make_rule("coupling")
