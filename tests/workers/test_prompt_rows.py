"""Rows that are scored: few numbers of them reach the output layer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from outrider.scheduler.types import ints
from outrider.workers.target import PromptRows


def test_any_number_of_rows():
    torch.manual_seed(0)
    weight, states = torch.randn(8, 40), torch.randn(300, 8)

    def logits(chosen):
        return chosen @ weight

    model = SimpleNamespace(info=SimpleNamespace(vocab_size=40), logits=logits)
    for count in range(1, 300, 7):
        rows = np.random.default_rng(count).permutation(300)[:count].astype(np.int32)
        tokens = ints(rows % 40)
        found = PromptRows(rows, tokens, top=2).logprobs(model, states)
        table = (states[rows] @ weight).log_softmax(1)
        wanted = table[torch.arange(count), torch.from_numpy(tokens).long()]
        np.testing.assert_allclose(found.chosen, wanted, rtol=1e-5, atol=1e-5)
        assert found.top_ids.shape == (count, 2)
