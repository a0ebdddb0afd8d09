"""The flat plan, and a mixture of experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.bench.micro.host import ancestor_mask
from outrider.scheduler.tree import chain
from outrider.scheduler.types import Draft, ints
from outrider.workers.ops import ReferenceOps, plan_step

BLOCK = 4


@pytest.fixture
def step(part, build_step, random_tree):
    """A prompt, a decode, a chain, a tree of 150 nodes, a small tree with a chunk."""
    generator = np.random.default_rng(5)
    blocks = generator.permutation(200).tolist()

    def one(chunk, context, draft=None):
        count = -(-(context + chunk + (draft.num_nodes if draft else 0)) // BLOCK)
        table = [blocks.pop() for _ in range(count)]
        return part([1] * chunk, context, table, *([draft] if draft else []))

    def tree(num_nodes):
        parents = random_tree(generator, num_nodes)
        return Draft(ints(np.arange(num_nodes)), parents)

    parts = [
        one(9, 0),
        one(1, 17),
        one(1, 6, chain(list(range(70)), "test")),
        one(1, 30, tree(150)),
        one(3, 5, tree(7)),
    ]
    return build_step(parts, BLOCK)


def test_ancestor_bits(step):
    plan = plan_step(step, BLOCK, torch.device("cpu"))
    assert plan.ancestors.shape == (len(step.token_ids), 3)
    for seq in (3, 4):
        parents = step.draft_parents[step.draft_start[seq] : step.draft_start[seq + 1]]
        words = plan.ancestors.numpy().view(np.uint64)[
            step.query_start[seq + 1] - len(parents) : step.query_start[seq + 1]
        ]
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        np.testing.assert_array_equal(bits[:, : len(parents)] == 1, ancestor_mask(parents))
        assert not bits[:, len(parents) :].any()
    assert not plan.ancestors[: step.query_start[3]].any(), "chains need no bits"


def test_only_chosen_experts_are_computed():
    """What was not chosen is not read: its weights are no numbers here."""
    from outrider.workers.ops import make_ops
    from outrider.workers.ops.protocol import Experts, Gate, GateKind

    torch.manual_seed(0)
    gate_up, down = torch.randn(6, 2 * 12, 8), torch.randn(6, 8, 12)
    for unused in (0, 2, 5):
        gate_up[unused], down[unused] = float("nan"), float("nan")
    states, scores = torch.randn(3, 8), torch.rand(3, 2)
    chosen = torch.tensor([[1, 4], [3, 1], [4, 3]])
    for ops in (ReferenceOps(), make_ops(torch.device("cpu"), torch.float32)):
        mixture = ops.pack_experts(Experts(gate_up, down, Gate(GateKind.SILU)))
        out = mixture(states, chosen, scores)
        for row in range(3):
            wanted = torch.zeros(8)
            for expert, score in zip(chosen[row].tolist(), scores[row], strict=True):
                gate, up = (gate_up[expert] @ states[row]).chunk(2)
                wanted += score * (down[expert] @ (torch.nn.functional.silu(gate) * up))
            torch.testing.assert_close(out[row], wanted, rtol=1e-4, atol=1e-4)
