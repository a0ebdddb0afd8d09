"""Processed distributions against slow loops over rows, nodes and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.scheduler.types import Bias, Draft, ints
from outrider.tests.helpers.verification import (
    make_step,
    mixed_settings,
    penalties_of,
    prefixes,
    sampling_rows,
    scaled_logits,
)
from outrider.workers.verify import process
from outrider.workers.verify.rules import rows_of


def edited_by_hand(logits, prompt, output, penalties, bias, ends, owed):
    """One row, token by token: biases, then CTRL's repetition, OpenAI's presence and frequency."""
    row = logits.astype(np.float64)
    for token, value in bias.items():
        row[token] += value
    if owed > 0:
        row[ends] = -np.inf
    for token in range(len(row)):
        count = output.count(token)
        if token in prompt or count:
            row[token] *= penalties.repetition if row[token] < 0 else 1 / penalties.repetition
        row[token] -= penalties.frequency * count + penalties.presence * (count > 0)
    return row


@pytest.mark.parametrize("seed", range(6))
def test_every_node_is_edited_by_its_own_path(seed):
    rng = np.random.default_rng(seed)
    vocab, num_seqs = 12, 4
    drafts, histories, penalties, biases = [], [], [], []
    for seq in range(num_seqs):
        num_nodes = int(rng.integers(0, 7))
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(num_nodes)]
        drafts.append(Draft(ints(rng.integers(0, vocab, num_nodes)), ints(parents)))
        prompt = rng.integers(0, vocab, 3).tolist()
        output = rng.integers(0, vocab, int(rng.integers(0, 6))).tolist()
        histories.append((prompt, output))
        factors = dict(zip(("repetition", "presence", "frequency"), rng.uniform(0.5, 2, 3)))
        factors["presence"] *= rng.choice([-1, 0, 1])
        penalties.append(penalties_of(seq, prompt, output, **factors))
        biases.append(Bias(seq, ints([1, 5, vocab + 3]), np.float32(rng.normal(size=3) * 9)))
    owed, ends = [0, 2, 1, 5], tuple(ints(rng.permutation(vocab)[:seq]) for seq in range(num_seqs))
    on = rng.permutation(num_seqs)[:3]  # one sequence has neither penalties nor biases
    sampling = sampling_rows(
        num_seqs,
        min_new_tokens=owed,
        ends=ends,
        penalties=tuple(penalties[seq] for seq in on),
        biases=tuple(biases[seq] for seq in on),
    )
    samples = np.arange(num_seqs) != seed % num_seqs  # one sequence is still in its prompt
    drafts[seed % num_seqs] = Draft(ints([]), ints([]))
    rows = rows_of(make_step(drafts, sampling, samples=samples))
    logits = torch.from_numpy(rng.standard_normal((rows.num_rows, vocab), dtype=np.float32) * 4)
    before = logits.clone()
    got = process.edit(rows, sampling, logits).numpy()
    assert torch.equal(logits, before)
    wanted = []
    for seq in np.flatnonzero(samples):
        prompt, output = histories[seq]
        plain = penalties_of(seq, [], [])
        bias = dict(zip(biases[seq].ids.tolist(), biases[seq].values.tolist()))
        bias.pop(vocab + 3)
        for path in prefixes((), drafts[seq]):
            args = (penalties[seq], bias) if seq in on else (plain, {})
            row = before[len(wanted)].numpy()
            left = owed[seq] - len(path)
            wanted.append(edited_by_hand(row, prompt, output + list(path), *args, ends[seq], left))
    np.testing.assert_allclose(got, np.stack(wanted), rtol=2e-6, atol=2e-6)


def test_nothing_to_edit_costs_nothing():
    sampling = sampling_rows(1, ends=(ints([3]),))
    logits = torch.randn(1, 5)
    assert process.edit(rows_of(make_step([Draft(ints([]), ints([]))])), sampling, logits) is logits


def kept_by_hand(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that survive, one after the other in order of rank; ties go to the lower id."""
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    order = [token for token in order if scaled[token] > -np.inf]
    order = order[:top_k] if top_k > 0 else order
    weights = {token: np.exp(np.float64(scaled[token]) - scaled[order[0]]) for token in order}
    total, ahead, kept = sum(weights.values()), 0.0, set()
    for token in order:
        if (ahead / total < top_p or not kept) and weights[token] >= min_p:
            kept.add(token)
        ahead += weights[token]
    return kept


def survivors(pool: process.CandidatePool) -> dict[int, set[int]]:
    found = {}
    for at, row in enumerate(pool.rows.tolist()):
        index = torch.nonzero(pool.logits[at] > -torch.inf)[:, 0]
        found[row] = set((index if pool.ids is None else pool.ids[at, index]).tolist())
    return found


@pytest.mark.parametrize("vocab", [7, 300, 3000])
def test_cuts_keep_what_the_ranking_keeps(vocab):
    num_rows = 120
    limits, logits = mixed_settings(num_rows, 1), scaled_logits(num_rows, vocab, 2)
    seen: set[int] = set()
    for pool in process.pools(logits, limits):
        seen.update(pool.rows.tolist())
        if pool.greedy:
            continue
        for row, kept in survivors(pool).items():
            scaled = (logits[row] / float(limits.temperature[row])).numpy()
            wanted = kept_by_hand(
                scaled, int(limits.top_k[row]), float(limits.top_p[row]), float(limits.min_p[row])
            )
            if limits.top_p[row] >= 1:
                wanted_open = kept_by_hand(scaled, int(limits.top_k[row]), 2.0, limits.min_p[row])
                wanted = wanted_open
            assert kept == wanted, (row, vocab)
    assert seen == set(range(num_rows))


def test_a_row_is_cut_alike_alone_and_in_any_batch():
    num_rows, vocab = 60, 3000
    limits, logits = mixed_settings(num_rows, 3), scaled_logits(num_rows, vocab, 4)
    together = {
        row: kept for pool in process.pools(logits, limits) for row, kept in survivors(pool).items()
    }
    for row in range(num_rows):
        (alone,) = process.pools(logits[row : row + 1], limits.take(np.asarray([row])))
        assert survivors(alone)[0] == together[row]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("num_values", [2, 40])
def test_the_likeliest_tokens_do_not_depend_on_how_many_others_are_asked_for(top, num_values):
    """Ties go to the lower id, at the cut as well; other requests of a step ask for more."""
    rng = np.random.default_rng(5)
    logits = rng.integers(0, num_values, (7, 300)).astype(np.float32)
    logits[3] = np.arange(300)  # without ties
    found = process.token_logprobs(torch.from_numpy(logits), np.arange(7), top)
    for row, values in enumerate(logits):
        order = sorted(range(300), key=lambda token: (-values[token], token))
        assert found.top_ids[row].tolist() == order[:top]
        assert found.ranks[row] == order.index(row) + 1
        expected = torch.from_numpy(values).log_softmax(0)[order[:top]]
        np.testing.assert_allclose(found.top[row], expected, rtol=1e-6)
