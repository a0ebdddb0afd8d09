"""Whole steps with and without a head run, on a CPU and a tiny model."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.gpu.machine import SIZES, Machine
from outrider.bench.gpu.steps import Bench, Work
from outrider.tests.helpers.device_step.ops import TensorOps


class InTorch(Machine):
    @property
    def ops(self):
        return TensorOps()


@pytest.fixture(scope="module")
def bench():
    machine = InTorch(torch.device("cpu"), torch.float32, SIZES["tiny"], rounds=1, is_dry=True)
    return Bench(machine)


@pytest.mark.parametrize("sampling", ["greedy", "0.6, top-p 0.9"])
def test_the_same_step_gives_the_same_outcome(bench, sampling):
    rows = {
        drafter: bench.run(Work(drafter, 2, num_nodes, sampling, 20))
        for drafter, num_nodes in (
            ("none", 0), ("look-up", 7), ("chain", 4), ("tree", 6), ("draft model", 4),
        )
    }  # fmt: skip
    assert all(row["passed"] for row in rows.values()), rows
    assert [row["rows"] for row in rows.values()] == [2, 16, 10, 14, 4]
    assert rows["chain"]["gain at 0.7 a level"] > 0
    assert "gain at 0.7 a level" not in rows["look-up"]


def test_steps_without_a_shape_are_skipped(bench):
    assert "no shape" in bench.run(Work("look-up", 2, 100, "greedy", 20))["skipped"]
    assert "no shape" in bench.run(Work("draft model", 65, 1, "greedy", 20))["skipped"]
