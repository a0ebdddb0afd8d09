"""Attention over passes, against the mask written out row by row."""

from __future__ import annotations

import pytest
import torch

from outrider.training.methods.unroll import Unrolled

WINDOWS, LENGTH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 7, 4, 2, 8, 6


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(WINDOWS * LENGTH, *shape, dtype=torch.float64)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_rows_see_the_past_their_ancestors_and_themselves(num_layers):
    torch.manual_seed(0)
    attend, scale = Unrolled(LENGTH), 0.3
    keys: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(num_layers)}
    values: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(num_layers)}
    for index in range(4):
        if index:
            attend.advance()
        for layer in range(num_layers):
            query, key, value = drawn(HEADS, DIM), drawn(KV_HEADS, DIM), drawn(KV_HEADS, VALUE_DIM)
            keys[layer].append(key)
            values[layer].append(value)
            out = attend(layer, query, key, value, scale)
            for row in range(WINDOWS * LENGTH):
                begin = row - row % LENGTH
                seen = [(0, other) for other in range(begin, row + 1)]
                seen += [(later, row) for later in range(1, index + 1)]
                for head in range(HEADS):
                    kv = head // (HEADS // KV_HEADS)
                    near = torch.stack([keys[layer][k][at, kv] for k, at in seen])
                    far = torch.stack([values[layer][k][at, kv] for k, at in seen])
                    wanted = (near @ query[row, head] * scale).softmax(0) @ far
                    # The weights are rounded to float32.
                    torch.testing.assert_close(out[row, head], wanted, rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_pass():
    torch.manual_seed(0)
    attend = Unrolled(LENGTH)
    parts = [[drawn(heads, DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)]
             for _ in range(3)]  # fmt: skip
    for index, part in enumerate(parts):
        if index:
            attend.advance()
        out = attend(0, *part, 0.3)
    out.sum().backward()
    assert all(part[2].grad.abs().sum() > 0 for part in parts)
    assert parts[0][0].grad is None  # an earlier pass's queries are its own
