"""The small parts that are timed: what is compared does the same work."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.measure import Pair, timed
from outrider.bench.micro.host import host
from outrider.bench.micro.operations import operations, preparation, rewinds


@pytest.mark.slow
def test_operations_agree_with_what_they_are_compared_with():
    pairs = [pair for pair in operations(torch.float32) if "64 rows" not in pair.case]
    assert {pair.part.split()[0] for pair in pairs} == {"product", "add", "norm", "gated"}
    pairs += preparation(torch.float32)
    for pair in pairs:
        found, expected = pair.ours(), pair.reference()
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_state_is_the_same_by_replay_and_by_a_checkpoint():
    pairs = [pair for pair in rewinds() if "batch 1, 2 of 4" in pair.case]
    assert len(pairs) == 2
    for pair in pairs:
        for _ in range(2):
            assert torch.equal(pair.ours(), pair.reference())


def test_every_part_of_the_host_runs():
    parts = set()
    with torch.inference_mode():
        for pair in host():
            if not pair.case.startswith("batch 32"):
                pair.ours()
                pair.reference()
            parts.add(pair.part.split(" (")[0])
    assert {"block manager", "tree layout", "attention plan", "coupled draw"} <= parts
    assert {"scheduler's plan and commit", "channel's round trip"} <= parts


def test_a_ratio_is_to_the_reference():
    found = timed(Pair("sum", "case", lambda: None, lambda: sum(range(20000))), 3)
    assert 0 <= found.ratio < 1
