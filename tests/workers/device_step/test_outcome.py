"""Outcomes are read in order, each as its step left it, though the buffer is written again."""

from __future__ import annotations

import pytest
import torch

from outrider.workers.device_step.service import MAX_POSTED, OutcomeReader


def test_two_may_be_on_their_way_on_a_cpu():
    outcome = torch.zeros(4, dtype=torch.int32)
    reader = OutcomeReader(outcome)
    for step in range(MAX_POSTED):
        outcome.fill_(step)
        reader.post(3)
    assert reader.is_ready
    with pytest.raises(AssertionError):
        reader.post(3)
    assert [reader.collect().tolist() for _ in range(MAX_POSTED)] == [[0] * 3, [1] * 3]
