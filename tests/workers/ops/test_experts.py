"""Routing and mixtures of experts on a CPU against the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from outrider.tests.helpers.steps import assert_close
from outrider.workers.model.sharding import own_choices
from outrider.workers.ops import cpu
from outrider.workers.ops.cpu import CpuOps
from outrider.workers.ops.experts import PackedMixture, PanelMixture
from outrider.workers.ops.invariant import InvariantOps
from outrider.workers.ops.protocol import Experts, Gate, GateKind, Router, Scoring
from outrider.workers.ops.reference import ReferenceOps

DTYPES = (torch.float32, torch.bfloat16)
REFERENCE = ReferenceOps()
CASES = {  # rows, top, experts, hidden, width, biased, scores_input, kind
    "one row": (1, 2, 4, 32, 16, False, False, GateKind.SILU),
    "more rows than an expert takes at once": (250, 2, 3, 72, 24, False, False, GateKind.SILU),
    "biases": (33, 4, 8, 64, 48, True, False, GateKind.CLAMPED_SILU),
    "scores of the input": (9, 1, 4, 40, 24, False, True, GateKind.SILU),
    "many experts": (20, 8, 64, 48, 32, True, False, GateKind.GELU_TANH),
    "odd sizes": (5, 2, 4, 33, 7, False, False, GateKind.SILU),
    "torch's activation": (5, 2, 4, 32, 8, False, False, GateKind.GELU),
}


def one_by_one(experts, states, chosen, scores):
    """Of sizes that torch's grouped products refuse."""
    out = torch.zeros(states.shape)
    for row, (numbers, factors) in enumerate(zip(chosen.tolist(), scores, strict=True)):
        for expert, factor in zip(numbers, factors, strict=True):
            inner = REFERENCE.gate(states[row : row + 1] @ experts.gate_up[expert].T, experts.gate)
            out[row] += factor * (inner @ experts.down[expert].T)[0].float()
    return out.to(states.dtype)


def oracle(experts, name):
    return partial(one_by_one, experts) if name == "odd sizes" else REFERENCE.pack_experts(experts)


def mixture(name, dtype, seed=0):
    num_rows, top, num_experts, hidden, width, biased, scores_input, kind = CASES[name]
    torch.manual_seed(seed)
    experts = Experts(
        (torch.randn(num_experts, 2 * width, hidden) / hidden**0.5).to(dtype),
        (torch.randn(num_experts, hidden, width) / width**0.5).to(dtype),
        Gate(kind, 2.0, 1.702),
        torch.randn(num_experts, 2 * width).to(dtype) if biased else None,
        torch.randn(num_experts, hidden).to(dtype) if biased else None,
        scores_input,
    )
    states = torch.randn(num_rows, hidden).to(dtype)
    chosen = torch.rand(num_rows, num_experts).topk(top).indices
    return experts, (states, chosen, torch.rand(num_rows, top))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_mixtures(name, dtype, monkeypatch):
    experts, step = mixture(name, dtype)
    expected = oracle(experts, name)(*step)
    ops = CpuOps(dtype)
    packed = ops.pack_experts(experts)
    in_panels = dtype == torch.float32 or name != "odd sizes"
    assert isinstance(packed, PanelMixture) == (in_panels and name != "torch's activation")
    assert_close(packed(*step), expected, 4.0)
    assert_close(packed(*step), expected, 4.0)
    monkeypatch.setitem(cpu.SMALL, dtype, 100)
    large = ops.pack_experts(experts)
    assert isinstance(large, PackedMixture)
    assert_close(large(*step), expected, 4.0)


def parts(experts, chosen):
    """The experts of two ranks, and what each has to compute of the choices."""
    count = len(experts.down)
    for own in ((0, count // 3), (count // 3, count)):
        held = {
            name: None if (value := getattr(experts, name)) is None else value[slice(*own)]
            for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        }
        yield replace(experts, **held, is_part=True), own_choices(chosen, own)


@pytest.mark.parametrize("kernels", ["panels", "packed", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_share_out_experts(name, kernels, monkeypatch):
    """Their results add up, and a row that chose none of a rank's gets zeros there."""
    if kernels == "reference" and name == "odd sizes":
        return  # it has no product of such sizes
    experts, (states, chosen, scores) = mixture(name, torch.float32)
    monkeypatch.setitem(cpu.SMALL, torch.float32, 10**9 if kernels == "panels" else 100)
    ops = ReferenceOps() if kernels == "reference" else CpuOps(torch.float32)
    total = torch.zeros_like(states)
    for held, local in parts(experts, chosen):
        part = ops.pack_experts(held)(states, local, scores)
        assert not part[(local < 0).all(1)].any()
        total += part
    assert_close(total, oracle(experts, name)(states, chosen, scores), 4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_row_s_mixture_does_not_depend_on_the_others(name, dtype):
    experts, (states, chosen, scores) = mixture(name, dtype)
    packed = InvariantOps(dtype).pack_experts(experts)
    together = packed(states, chosen, scores)
    assert_close(together, oracle(experts, name)(states, chosen, scores), 4.0)
    for row in range(0, len(states), 7):
        alone = slice(row, row + 1)
        assert torch.equal(packed(states[alone], chosen[alone], scores[alone])[0], together[row])


ROUTERS = {
    "softmax": Router(3, Scoring.SOFTMAX),
    "normalised": Router(4, Scoring.SOFTMAX, normalise=True, scale=2.5),
    "normalised by more than the sum": Router(2, Scoring.SOFTMAX, normalise=True, norm_min=0.9),
    "sigmoid": Router(2, Scoring.SIGMOID),
    "softmax of the best": Router(4, Scoring.SOFTMAX_OF_TOP),
    "sigmoid of the best": Router(1, Scoring.SIGMOID_OF_TOP),
    "all": Router(24, Scoring.SOFTMAX),
    "groups": Router(4, Scoring.SOFTMAX, num_groups=4, top_groups=2),
    "corrected groups": Router(
        6, Scoring.SIGMOID, correction=torch.linspace(-1, 1, 24), num_groups=6, top_groups=3,
        group_top=2, normalise=True, scale=1.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_routing(name, dtype):
    torch.manual_seed(0)
    logits = torch.randn(40, 24).to(dtype).float() + torch.arange(24) * 1e-3  # no two are equal
    found = CpuOps(dtype).route(logits, ROUTERS[name])
    expected = REFERENCE.route(logits, ROUTERS[name])
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)
    narrow = logits.to(dtype)
    scores = CpuOps(dtype).route(narrow, ROUTERS[name])[1]
    torch.testing.assert_close(scores, REFERENCE.route(narrow, ROUTERS[name])[1])


def test_of_equal_experts_the_lower_is_chosen_and_no_number_is_no_address():
    ops = CpuOps(torch.float32)
    chosen, scores = ops.route(torch.zeros(3, 8), Router(3, Scoring.SOFTMAX))
    assert chosen.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(scores, torch.full((3, 3), 1 / 8))
    for each in ROUTERS.values():
        chosen, _ = ops.route(torch.full((2, 24), float("nan")), each)
        assert ((chosen >= 0) & (chosen < 24)).all()
        chosen, _ = ops.route(torch.full((2, 24), float("-inf")), each)
        assert ((chosen >= 0) & (chosen < 24)).all()
    assert ops.route(torch.zeros(0, 24), ROUTERS["groups"])[0].shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(4, 24, 8), (3, 70, 66), (2, 7, 5)], ids=str)
def test_products_of_heads(size, dtype):
    torch.manual_seed(0)
    weight = torch.randn(size).to(dtype)
    ops = CpuOps(dtype)
    for rows in (1, 5, 40):
        wide = torch.randn(rows, size[0], size[2] + 6).to(dtype)
        states = wide[..., : size[2]]
        expected = REFERENCE.pack_heads(weight)(states)
        assert_close(ops.pack_heads(weight)(states), expected, size[2] ** 0.5)
