"""Draws and cuts against `workers/verify/`, token for token, under Triton's interpreter."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from outrider.tests.helpers.device_step.ops import gumbel_argmax
from outrider.workers.ops.cuda.draw import cuts, num_parts
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.verify.device_settings import DeviceSettings
from outrider.workers.verify.process import DrawSettings, draw, pools

OPS = CudaOps(torch.device("cpu"))
INF = float("inf")


def settings_of(cases):
    """Columns of (temperature, top_k, top_p, min_p)."""
    heat, top_k, top_p, min_p = zip(*cases)
    return (
        np.array(heat, np.float32), np.array(top_k, np.int32), np.array(top_p, np.float32),
        np.array(min_p, np.float32),
    )  # fmt: skip


def check_tokens(logits, cases, seed=0):
    rng = np.random.default_rng(seed)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, len(logits)))
    positions = torch.from_numpy(rng.integers(0, 2**17, len(logits)).astype(np.int32))
    columns = settings_of(cases)
    wanted = draw(logits, positions, DrawSettings(seeds, *columns))
    settings = DeviceSettings(seeds, *(torch.from_numpy(column) for column in columns))
    assert torch.equal(OPS.draw_on_device(logits, positions, settings), wanted)


def shares_of(logits):
    """Probabilities over the likeliest token's."""
    peak = logits.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    return (logits - peak).exp()


def kept_by_kernel(logits, cases):
    """Which tokens top-k and top-p leave in each row."""
    _, top_k, top_p, _ = (torch.from_numpy(column) for column in settings_of(cases))
    levels, lasts = cuts(logits, shares_of(logits), top_k, top_p, 4)
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    tokens = torch.arange(logits.shape[1])
    ahead = (ranks == levels[:, None]) & (tokens <= lasts[:, None])
    return ((ranks > levels[:, None]) | ahead) & (logits > -INF)


def kept_by_process(logits, cases):
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    settings = DrawSettings(np.zeros(len(cases), np.int64), *settings_of(cases))
    for pool in pools(logits, settings):
        rows = torch.from_numpy(pool.rows)[:, None]
        ids = torch.arange(logits.shape[1])[None] if pool.ids is None else pool.ids
        kept[rows, ids] = pool.logits > -INF
    return kept


LIMITS = [
    (1.0, top_k, top_p, 0.0)
    for top_k, top_p in product((0, 1, 2, 3, 4, 7), (1.0, 0.0, 0.3, 0.5, 0.75, 0.999))
]


def check_cuts(cases):
    """`cases`: pairs of a row of logits and its limits."""
    logits = torch.tensor([row for row, _ in cases], dtype=torch.float32)
    settings = [limit for _, limit in cases]
    assert torch.equal(kept_by_kernel(logits, settings), kept_by_process(logits, settings))


def test_cuts_of_ties_of_three_tokens():
    rows = product((0.0, -0.0, 0.7, -INF), repeat=3)
    check_cuts(list(product(rows, LIMITS))[::97])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cuts_of_every_row_of_four_tokens():
    check_cuts(list(product(product((0.0, 0.7, -1.1, -INF), repeat=4), LIMITS)))


def test_cuts_of_a_vocabulary_in_several_blocks():
    torch.manual_seed(0)
    logits = torch.randn(4, 2600) * 3
    logits[2] = logits[2].round()  # many ties, in two parts
    logits[3, 10:] = -INF
    cases = [(1.0, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 700, 0.6, 0.0), (1.0, 20, 0.99, 0.0)]
    assert torch.equal(kept_by_kernel(logits, cases), kept_by_process(logits, cases))


def test_tokens_over_settings():
    """Temperatures, cuts and their combinations, beside greedy rows."""
    torch.manual_seed(1)
    cases = [
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (1.7, 0, 1.0, 0.1),
        (0.8, 5, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (0.6, 40, 0.9, 0.02), (1.0, 1, 1.0, 0.0),
        (5e-6, 3, 0.5, 0.5), (2.0, 10_000, 0.2, 0.0), (1.0, 0, 0.0, 0.0), (1.0, 0, 1.0, 1.0),
    ]  # fmt: skip
    check_tokens(torch.randn(len(cases), 1500) * 2, cases)
    check_tokens((torch.randn(len(cases), 300) * 2).round(), cases, seed=1)


@pytest.mark.parametrize("vocab", [1, 2, 129, 2600])
def test_tokens_of_plain_rows(vocab):
    """Neither top-k nor top-p: temperature, min-p and noise alone, in several parts."""
    torch.manual_seed(vocab)
    cases = [(heat, 0, 1.0, min_p) for heat in (0.0, 0.5, 1.0, 3.0) for min_p in (0.0, 0.2)]
    check_tokens(torch.randn(len(cases), vocab), cases, seed=vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_no_neighbours(dtype):
    """Columns of a wider tensor, in the model's dtype."""
    wide = (torch.randn(4, 2600, generator=torch.Generator().manual_seed(7)) * 3).to(dtype)
    cases = [(0.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.2, 30, 1.0, 0.1), (0.4, 0, 1.0, 0.3)]
    columns = settings_of(cases)
    seeds, positions = torch.arange(4), torch.arange(4).int()
    settings = DeviceSettings(seeds, *(torch.from_numpy(column) for column in columns))
    part = wide[:, 100:1501]
    wanted = draw(part.float(), positions, DrawSettings(seeds, *columns))
    assert torch.equal(OPS.draw_on_device(part, positions, settings), wanted)


def test_edges():
    """Rows with one candidate or none, masked tokens, equal tokens, huge logits."""
    logits = torch.full((6, 9), -INF)
    logits[1, 4] = -3.0
    logits[2] = 0.0
    logits[3, 2:5] = torch.tensor([1e30, 1e30, -1e30])
    logits[4, ::2] = 2.0
    logits[5] = torch.linspace(-1, 1, 9)
    for limit in ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.3), (1.0, 2, 0.5, 0.0), (0.5, 0, 0.9, 0.1)):
        check_tokens(logits, [limit] * 6)


def test_draws_over_a_part_of_the_vocabulary():
    """As over the whole, where the other tokens have no chance."""
    rng = np.random.default_rng(3)
    ids = torch.from_numpy(np.sort(rng.permutation(900)[:300]))
    logits = torch.from_numpy(rng.normal(size=(5, 300)) * 2).float().round(decimals=1)
    whole = torch.full((5, 900), -INF).index_copy_(1, ids, logits)
    columns = settings_of(
        [(heat, 0, 0.8, 0.0) for heat in (0.0, 0.7, 1.0)]
        + [(1.0, 7, 1.0, 0.0), (2.0, 500, 0.9, 0.1)]
    )
    seeds, positions = torch.from_numpy(rng.integers(0, 2**63, 5)), torch.arange(5).int()
    settings = DeviceSettings(seeds, *(torch.from_numpy(column) for column in columns))
    wanted = draw(whole, positions, DrawSettings(seeds, *columns))
    assert torch.equal(OPS.draw_on_device(logits, positions, settings, ids), wanted)


def test_ranks_order_floats():
    values = torch.tensor([-INF, -3.4e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3.4e38, INF])
    counts = torch.arange(1, len(values), dtype=torch.int32)
    logits = values.expand(len(counts), -1).contiguous()
    levels, lasts = cuts(logits, torch.zeros_like(logits), counts, torch.ones(len(counts)), 4)
    bits = values.flip(0)[: len(counts)].view(torch.int32)
    assert torch.equal(lasts, len(values) - counts)
    assert torch.equal(levels, torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long())


@pytest.mark.parametrize("vocab", [1, 129, 9000])
def test_contests(monkeypatch, vocab):
    """Of the whole and of a part whose rows are not neighbours; greedy rows, ties, bfloat16."""
    monkeypatch.setattr(OPS, "num_processors", 40)  # eight programs for a row
    rng, num_rows = np.random.default_rng(vocab), 9
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab)) * 3).round(decimals=1)
    logits[3] = -INF
    zeros = torch.zeros(num_rows)
    settings = DeviceSettings(
        torch.from_numpy(rng.integers(-(2**63), 2**63, num_rows)),
        torch.from_numpy(rng.choice([0.0, 0.5, 1.4], num_rows).astype(np.float32)),
        zeros.int(), zeros + 1, zeros,
    )  # fmt: skip
    positions = torch.from_numpy(rng.integers(0, 2**17, num_rows).astype(np.int32))
    ids = torch.from_numpy(np.sort(rng.permutation(2 * vocab)[:vocab]))
    for part, tokens in ((logits, 7), (logits, ids), (logits[:, : vocab // 2], 0)):
        for dtype in (torch.float32, torch.bfloat16):
            arguments = (part.to(dtype), positions, settings, tokens, 3)
            for found, wanted in zip(
                OPS.gumbel_argmax_on_device(*arguments), gumbel_argmax(*arguments), strict=True
            ):
                assert torch.equal(found, wanted)
    assert not OPS._counts.any()


def test_parts_follow_from_shapes():
    assert num_parts(1, 125, 132) == 64
    assert num_parts(64, 125, 132) == 8
    assert num_parts(1000, 125, 132) == 1
    assert num_parts(1, 1, 132) == 1
