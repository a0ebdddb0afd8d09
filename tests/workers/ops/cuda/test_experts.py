"""Alignment and grouped products against the reference, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.tests.helpers.steps import assert_close
from outrider.workers.model.sharding import own_choices
from outrider.workers.ops.cuda.experts import align, block_rows
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.ops.protocol import Experts, Gate, GateKind
from outrider.workers.ops.reference import ReferenceOps

REFERENCE = ReferenceOps()
OPS = CudaOps(torch.device("cpu"))
CASES = {
    "few": (3, 2, 6, 8, 16, False, False, GateKind.SILU),
    "many": (40, 3, 5, 40, 24, False, False, GateKind.GELU_TANH),
    "biased": (9, 2, 4, 24, 72, True, False, GateKind.CLAMPED_SILU),
    "scored input": (5, 1, 8, 72, 16, False, True, GateKind.SILU),
    "one": (1, 4, 40, 16, 16, True, False, GateKind.SILU),
}


@pytest.mark.parametrize("num_experts", [1, 5, 40])
@pytest.mark.parametrize("rows", [16, 64])
def test_alignment(num_experts, rows):
    """Every pair once, in order, in blocks of its expert; the number of blocks is a bound."""
    generator = torch.Generator().manual_seed(num_experts)
    for num_tokens, top in ((1, 1), (7, 3), (300, 2)):
        chosen = torch.randint(num_experts, (num_tokens, top), generator=generator)
        if num_tokens == 7:
            chosen[:] = num_experts - 1
        aligned = align(chosen, num_experts, rows)
        used = int(aligned.num_used)
        assert used <= aligned.num_blocks
        blocks = aligned.pairs.view(-1, rows)[:used].tolist()
        found = {}
        for expert, block in zip(aligned.experts[:used].tolist(), blocks, strict=True):
            real = [pair for pair in block if pair < chosen.numel()]
            assert block == real + [chosen.numel()] * (rows - len(real))
            found.setdefault(expert, []).extend(real)
        pairs = chosen.flatten().tolist()
        wanted = {
            expert: [pair for pair, each in enumerate(pairs) if each == expert]
            for expert in set(pairs)
        }
        assert found == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_mixtures(name, dtype):
    num_tokens, top, num_experts, hidden, width, biased, scores_input, kind = CASES[name]
    torch.manual_seed(0)
    experts = Experts(
        (torch.randn(num_experts, 2 * width, hidden) / hidden**0.5).to(dtype),
        (torch.randn(num_experts, hidden, width) / width**0.5).to(dtype),
        Gate(kind, 2.0, 1.702),
        torch.randn(num_experts, 2 * width).to(dtype) if biased else None,
        torch.randn(num_experts, hidden).to(dtype) if biased else None,
        scores_input,
    )
    states = torch.randn(num_tokens, hidden).to(dtype)
    chosen = torch.rand(num_tokens, num_experts).topk(top).indices
    scores = torch.rand(num_tokens, top)
    mine = OPS.pack_experts(experts)(states, chosen, scores)
    assert_close(mine, REFERENCE.pack_experts(experts)(states, chosen, scores), 4.0)


@pytest.mark.parametrize("name", ["many", "scored input"])
def test_ranks_share_out_experts(name):
    """Their results add up, and a row that chose none of a rank's gets zeros there."""
    num_tokens, top, num_experts, hidden, width, _, scores_input, kind = CASES[name]
    torch.manual_seed(0)
    weights = torch.randn(num_experts, 2 * width, hidden), torch.randn(num_experts, hidden, width)
    whole = Experts(*weights, Gate(kind, 2.0, 1.702), scores_input=scores_input)
    states, scores = torch.randn(num_tokens, hidden), torch.rand(num_tokens, top)
    chosen, total = torch.rand(num_tokens, num_experts).topk(top).indices, 0
    for own in ((0, 1), (1, num_experts)):
        held = replace(
            whole, gate_up=weights[0][slice(*own)], down=weights[1][slice(*own)], is_part=True
        )
        local = own_choices(chosen, own)
        part = OPS.pack_experts(held)(states, local, scores)
        assert not part[(local < 0).all(1)].any()
        total = total + part
    assert_close(total, REFERENCE.pack_experts(whole)(states, chosen, scores), 8.0)


def test_many_pairs_in_ranges_of_columns(monkeypatch):
    """The results before their sum are bounded, and no bit depends on it."""
    from outrider.workers.ops.cuda import experts as module

    torch.manual_seed(0)
    weights = torch.randn(3, 80, 200), torch.randn(3, 200, 40), Gate(GateKind.SILU)
    experts = Experts(*weights, None, torch.randn(3, 200))
    states, scores = torch.randn(30, 200), torch.rand(30, 2)
    chosen = torch.rand(30, 3).topk(2).indices
    mixture = OPS.pack_experts(experts)
    whole, sizes, empty = mixture(states, chosen, scores), [], torch.empty
    monkeypatch.setattr(module, "_MAX_PAIR_BYTES", 4 * 60 * 70)
    monkeypatch.setattr(
        torch, "empty", lambda size, **kinds: sizes.append(size) or empty(size, **kinds)
    )
    assert torch.equal(mixture(states, chosen, scores), whole)
    assert sizes[-4:] == [(60, 64)] * 3 + [(60, 8)]


def test_experts_that_were_not_chosen_are_not_read():
    torch.manual_seed(0)
    gate_up, down = torch.randn(6, 24, 8), torch.randn(6, 8, 12)
    for unused in (0, 2, 5):
        gate_up[unused], down[unused] = float("nan"), float("nan")
    experts = Experts(gate_up, down, Gate(GateKind.SILU))
    states, scores = torch.randn(3, 8), torch.rand(3, 2)
    chosen = torch.tensor([[1, 4], [3, 1], [4, 3]])
    mine = OPS.pack_experts(experts)(states, chosen, scores)
    assert mine.isfinite().all()
    assert_close(mine, REFERENCE.pack_experts(experts)(states, chosen, scores))


def test_block_sizes_follow_from_shapes():
    assert block_rows(8, 128) == 16
    assert block_rows(4096, 128) == 32
    assert block_rows(1 << 20, 8) == 64
