"""The compiled draw over a vocabulary equals the noise that `noise` defines, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.workers.verify import noise
from outrider.workers.verify.noise import _BOUNDS, gumbel_argmax


@pytest.mark.parametrize("vocab", [1, 5, 511, 512, 513, 4096, 33000])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 40.0])
def test_draws_are_those_of_the_noise(vocab, spread):
    torch.manual_seed(vocab)
    logits = torch.randn(24, vocab) * spread
    logits[:, 1::3] = -torch.inf  # what top-k, top-p or min-p cut off
    logits[0] = -torch.inf
    logits[1, :] = 1e30
    keys = noise.keys(np.arange(24, dtype=np.int64) * 7919 - 5, np.arange(24, dtype=np.int32))
    expected = (noise.gumbel(keys, vocab) + logits).numpy().argmax(1)
    assert noise.perturbed_argmax(logits, keys).tolist() == expected.tolist()
    assert noise.perturbed_argmax(logits.T.contiguous().T, keys).tolist() == expected.tolist()


def test_bounds_are_above_the_noise_of_their_hashes():
    hashes = np.random.default_rng(0).integers(-(2**31), 2**31, 1 << 20).astype(np.int32)
    hashes[:2] = 2**31 - 1, -(2**31)
    exact = noise._to_gumbel(torch.from_numpy(hashes)).numpy()
    assert (_BOUNDS[(hashes >> 22) + 512] > exact).all()


def test_nothing_is_compiled_in_a_step():
    assert not gumbel_argmax._can_compile
