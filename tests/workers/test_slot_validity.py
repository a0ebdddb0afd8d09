"""Which rows a head away from the target may read: against dictionaries that remember contents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.scheduler.types import Draft, ints
from outrider.workers.attention import KVCache, KVShape
from outrider.workers.remote_head import SlotValidity

SIZE = 4


def cache(num_blocks: int) -> KVCache:
    shapes = (KVShape(1, 2, 2),)
    return KVCache(shapes, num_blocks * SIZE, 1, torch.float32, torch.device("cpu"))


def test_lost_rows_are_left_out_and_the_rest_keeps_its_order(part, build_step):
    """Random histories of two sequences: steps told or lost, prefixes shared, slots moved."""
    rng = np.random.default_rng(0)
    num_blocks, hidden = 12, 0
    for _ in range(40):
        kv = cache(num_blocks)
        rows = SlotValidity(kv, SIZE)
        tables = rng.permutation(num_blocks).reshape(2, 6).tolist()
        lens = [0, 0]
        truth: dict[int, bool] = {}  # slot -> whether the head wrote it
        for _ in range(6):
            chunks = [int(rng.integers(1, 4)) for _ in lens]
            parts = [
                part([9] * chunk, length, table)
                for chunk, length, table in zip(chunks, lens, tables)
            ]
            moves = []
            if lens[0] > 2 and rng.random() < 0.5:
                slots = [tables[0][at // SIZE] * SIZE + at % SIZE for at in range(lens[0])]
                moves = [(slots[-1], slots[-2]), (slots[-2], slots[-3])]
                before = dict(truth)
                for source, destination in moves:
                    truth[destination] = before[source]
            step = build_step(parts, SIZE, moves)
            rows.apply_moves(step.kv_moves)
            view = rows.visible(step)
            for seq, table in enumerate(tables):
                slots = [table[at // SIZE] * SIZE + at % SIZE for at in range(lens[seq])]
                own = step.slot_mapping[step.query_start[seq] : step.query_start[seq + 1]]
                wanted = [slot for slot in slots if truth[slot]]
                hidden += len(slots) - len(wanted)
                assert view.context_lens[seq] == len(wanted)
                width = len(wanted) + len(own)
                assert view.block_tables[seq, :width].tolist() == [*wanted, *own.tolist()]
            told = rng.random() < 0.7
            rows.invalidate(step)
            if told:
                rows.mark_valid(step, ints(range(len(step.token_ids))))
            truth |= dict.fromkeys(step.slot_mapping.tolist(), told)
            lens = [length + chunk for length, chunk in zip(lens, chunks)]
    assert hidden > 50


def test_rejected_nodes_leave_no_row(part, build_step):
    draft = Draft(ints([20, 21, 22]), ints([-1, -1, 1]))
    step = build_step([part([10], 3, [2, 5], draft=draft)], SIZE)
    rows = SlotValidity(cache(8), SIZE)
    rows.valid[:] = True
    rows.invalidate(step)
    rows.mark_valid(step, ints([0, 2, 3]))  # the root, and the path over nodes 1 and 2
    assert rows.valid[step.slot_mapping].tolist() == [True, False, True, True]


def test_moves_take_contents_along():
    kv = cache(2)
    rows = SlotValidity(kv, SIZE)
    kv.keys[0][3] = 7.0
    rows.valid[3] = True
    rows.apply_moves(ints([[3, 5]]))
    assert rows.valid[5]
    assert torch.equal(kv.keys[0][5], kv.keys[0][3])


@pytest.mark.parametrize("chained", [False, True])
def test_rows_made_of_those_before_begin_anew_after_a_hole(part, build_step, chained):
    """Three sequences: one whole, one that lacks its last row, one that begins."""
    parts = [part([1, 2], 4, [0, 1]), part([3], 2, [2]), part([4, 5], 0, [3])]
    step = build_step(parts, SIZE)
    shapes = (KVShape(1, 2, 2), *[KVShape(1, 3, 0)] * chained)
    kv = KVCache(shapes, 4 * SIZE, 1, torch.float32, torch.device("cpu"))
    kv.keys[-1][:] = 5.0
    rows = SlotValidity(kv, SIZE)
    rows.valid[[0, 1, 2, 3, 8]] = True
    view = rows.visible(step)
    assert view.context_lens.tolist() == [4, 0 if chained else 1, 0]
    # What a head reads as left by the row before: of the first, that row's; of the others, zeros.
    last = np.maximum(view.context_lens - 1, 0)
    left = kv.keys[-1][view.block_tables[range(3), last]][:, 0, 0]
    assert left.tolist() == ([5.0, 0.0, 0.0] if chained else [5.0] * 3)
