"""Draws from parts of a vocabulary are those from the whole, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.tests.helpers.device_step.ops import TensorOps, draw_by_tensors
from outrider.workers.collective import Collective
from outrider.workers.device_step.seats import best_of_ranks
from outrider.workers.verify.device_settings import DeviceSettings

OPS, VOCAB, ROWS = TensorOps(), 97, 40


def drawn(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, DeviceSettings]:
    """Logits with many ties, positions, and greedy and drawn rows."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCAB)) * 2).round(decimals=1).to(dtype)
    logits[0], logits[1, 30:] = -torch.inf, -torch.inf
    logits[2] = 1.0
    ones = torch.ones(ROWS)
    settings = DeviceSettings(
        torch.from_numpy(rng.integers(-(1 << 62), 1 << 62, ROWS)),
        torch.from_numpy(rng.choice([0.0, 0.4, 1.3], ROWS).astype(np.float32)),
        torch.zeros(ROWS, dtype=torch.int32),
        ones,
        0 * ones,
    )
    return logits, torch.from_numpy(rng.integers(1, 9000, ROWS).astype(np.int32)), settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 60])
def test_parts_are_drawn_from_as_the_whole(size, dtype):
    """With 60 ranks the last ones have no tokens at all."""
    logits, positions, settings = drawn(size, dtype)
    wanted = draw_by_tensors(logits.float(), positions, settings)
    length = -(-VOCAB // size)
    firsts = [min(rank * length, VOCAB) for rank in range(size)]
    parts = [
        OPS.gumbel_argmax_on_device(logits[:, first : first + length], positions, settings, first)
        for first in firsts
    ]

    class Gathered(Collective):
        def all_gather(self, tensor, dim=-1):
            assert tensor.shape == (ROWS, 1, 2)
            columns = [torch.stack([scores.view(torch.int32), ids], 1) for scores, ids in parts]
            return torch.stack(columns, dim=1)

    found = best_of_ranks(parts[0], Gathered(0, size, object() if size > 1 else None))
    assert torch.equal(found, wanted)


def test_columns_may_be_any_tokens():
    """As a head's that drafts from a part of the vocabulary."""
    logits, positions, settings = drawn(7, torch.float32)
    tokens = torch.from_numpy(np.sort(np.random.default_rng(0).permutation(VOCAB)[:50]))
    whole = torch.full_like(logits, -torch.inf).index_copy_(1, tokens, logits[:, :50])
    whole[0, tokens[0]] = 1.0
    few = whole[:, tokens]
    _, found = OPS.gumbel_argmax_on_device(few, positions - 3, settings, tokens, 3)
    assert torch.equal(found, draw_by_tensors(whole, positions, settings))
