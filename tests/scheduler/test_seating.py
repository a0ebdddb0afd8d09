"""Plans carry differences: what is known to the ranks is not sent again."""

from __future__ import annotations

import pytest

from outrider.scheduler.blocks import BlockPool
from outrider.scheduler.sequence import Row, Seating, Sequence
from outrider.scheduler.types import ints
from outrider.workers.transport import wire


@pytest.fixture
def sequence_of(request_of):
    def make(name: str, num_tokens: int, pool: BlockPool) -> Sequence:
        sequence = Sequence(request_of(name, tuple(range(num_tokens))), 0, num_tokens + 99)
        assert sequence.allocate(pool, num_tokens)
        return sequence

    return make


def emit(sequence: Sequence, count: int, pool: BlockPool) -> None:
    sequence.num_computed = sequence.num_tokens + count - 1
    sequence.tokens.extend(ints(range(count)))
    sequence.trim(pool)


def test_openings_once_then_new_tokens_and_blocks(sequence_of):
    pool, seating = BlockPool(64, 4), Seating()
    first, second = sequence_of("a", 6, pool), sequence_of("b", 3, pool)
    plan = seating.plan(1, [Row(first, 6, 2), Row(second, 3, 0)])
    assert [opening.seat for opening in plan.openings] == plan.seats.tolist() == [0, 1]
    assert [opening.tokens.tolist() for opening in plan.openings] == [[*range(6)], [*range(3)]]
    blocks = [(0, i, b) for i, b in enumerate(first.blocks)] + [(1, 0, second.blocks[0])]
    assert [tuple(row) for row in plan.blocks.tolist()] == blocks
    assert len(plan.tokens) == 0
    emit(first, 3, pool)
    assert first.allocate(pool, 9 + 4)  # three blocks, of which two are known, and one for nodes
    plan = seating.plan(2, [Row(first, 1, 4)], moves=[(5, 6)])
    assert (plan.openings, plan.tokens.tolist()) == ((), [0, 1, 2])
    assert plan.blocks.tolist() == [[0, 2, first.blocks[2]], [0, 3, first.blocks[3]]]
    assert plan.kv_moves.tolist() == [[5, 6]]
    emit(first, 1, pool)  # the node's block goes back; another takes its place later
    assert first.allocate(pool, 10 + 4)
    plan = seating.plan(3, [Row(first, 1, 4)])
    assert plan.blocks.tolist() == [[0, 3, first.blocks[3]]]


def test_seats_are_left_and_taken_again(sequence_of):
    pool, seating = BlockPool(64, 4), Seating()
    rows = [Row(sequence_of(name, 3, pool), 3, 0) for name in "abc"]
    assert seating.plan(1, rows).seats.tolist() == [0, 1, 2]
    for row in rows[:2]:
        seating.leave(row.sequence)
        seating.leave(row.sequence)  # it has none any more
    seating.plan(2, [])  # is not sent, so that it closes nothing
    plan = seating.plan(2, [Row(sequence_of("d", 2, pool), 2, 0)])
    assert (plan.seats.tolist(), plan.closings.tolist()) == ([0], [1])  # an opening closes, too
    assert seating.plan(3, [rows[0]]).seats.tolist() == [1]
    seating.reset(row.sequence for row in rows)
    assert sorted(seating.plan(4, rows).seats.tolist()) == [1, 2, 3]


@pytest.mark.parametrize("context_len", [10, 2000, 32000])
def test_a_decode_plan_is_small_at_any_context_length(sequence_of, context_len):
    """64 sequences, one of sixteen of which needs a new block: at most 2 KB."""
    pool, seating = BlockPool(64 * (context_len // 16 + 2), 16), Seating()
    rows = []
    for index in range(64):
        sequence = sequence_of(str(index), context_len + index % 16, pool)
        sequence.num_computed = sequence.num_tokens - 1
        rows.append(Row(sequence, 1, 0))
    seating.plan(1, rows)
    for row in rows:
        emit(row.sequence, 1, pool)
        assert row.sequence.allocate(pool, row.sequence.num_tokens)
    plan = seating.plan(2, rows)
    assert (len(plan.tokens), len(plan.blocks)) == (64, 4)
    assert len(wire.encode(plan)) <= 2048
