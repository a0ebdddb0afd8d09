"""Draws with settings on the device equal those with settings on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.tests.helpers.device_step.ops import draw_by_tensors
from outrider.workers.verify.device_settings import DeviceSettings
from outrider.workers.verify.process import DrawSettings, draw


@pytest.mark.parametrize("vocab", [7, 300, 3000])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_hosts(vocab, seed):
    """Rows of every kind in one call; rounded logits have ties."""
    rng, num_rows = np.random.default_rng(seed), 64
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab)).astype(np.float32) * 3)
    logits = logits.round(decimals=1) if seed % 2 else logits
    logits[0, : vocab // 2] = -torch.inf
    positions = torch.from_numpy(rng.integers(1, 5000, num_rows).astype(np.int32))
    settings = DrawSettings(
        rng.integers(-(1 << 62), 1 << 62, num_rows),
        rng.choice([0.0, 0.3, 1.0, 1.7], num_rows).astype(np.float32),
        rng.choice([0, 1, 4, vocab, vocab + 5], num_rows).astype(np.int32),
        rng.choice([1e-9, 0.3, 0.95, 1.0], num_rows).astype(np.float32),
        rng.choice([0.0, 0.02, 0.5, 1.0], num_rows).astype(np.float32),
    )
    names = ("seeds", "temperature", "top_k", "top_p", "min_p")
    on_device = DeviceSettings(*(torch.from_numpy(getattr(settings, name)) for name in names))
    wanted = draw(logits, positions, settings)
    assert torch.equal(draw_by_tensors(logits, positions, on_device), wanted)
