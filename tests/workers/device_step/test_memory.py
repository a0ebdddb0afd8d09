"""The memory that is set aside before the KV cache is sized."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.workers.device_step.seats import BYTES_PER_GRAPH, SeatSizes, reserved_bytes
from outrider.workers.device_step.shape import all_shapes


@pytest.mark.parametrize("num_seats", [1, 64, 256])
def test_holds_seats_logits_and_graphs(num_seats):
    info = SimpleNamespace(vocab_size=128_000, hidden_size=4096)
    short, long = (SeatSizes(num_seats, length, 1000, 16) for length in (4096, 32_768))
    shapes = all_shapes(num_seats)
    rows = max(shape.num_rows for shape in shapes)
    least = 4 * long.num_words + rows * info.vocab_size * 4 + len(shapes) * BYTES_PER_GRAPH
    assert least < reserved_bytes(long, info) < least + (4 << 30)
    grown = 4 * (num_seats + 1) * (32_768 - 4096) * (1 + 1 / 16)
    assert reserved_bytes(long, info) - reserved_bytes(short, info) == grown


def test_holds_counts_of_tokens():
    info = SimpleNamespace(vocab_size=128_000, hidden_size=4096)
    plain, counted = (SeatSizes(64, 4096, 1000, 16, vocab_size=size) for size in (0, 128_000))
    tables = 4 * (counted.num_words - plain.num_words)
    more = reserved_bytes(counted, info) - reserved_bytes(plain, info)
    masks = 512 * 4000 * 4
    assert more == tables + 65 * 128_000 * 4 + masks


def test_several_ranks_gather_logits():
    info = SimpleNamespace(vocab_size=128_000, hidden_size=4096)
    sizes = SeatSizes(64, 4096, 1000, 16)
    rows = max(shape.num_rows for shape in all_shapes(64))
    more = reserved_bytes(sizes, info, num_ranks=2) - reserved_bytes(sizes, info)
    assert more >= 2 * rows * info.vocab_size * 4  # the parts, and their join, in float32
