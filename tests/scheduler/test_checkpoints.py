"""Checkpoints of recurrent states: each is in one place, and none that is read is written over."""

from __future__ import annotations

import numpy as np

from outrider.scheduler.blocks import StateCheckpoints


def test_the_longest_prefix_with_a_checkpoint():
    checkpoints = StateCheckpoints(2)
    hashes = [b"a", b"b", b"c"]
    assert checkpoints.longest(hashes) == 0
    checkpoints.put(checkpoints.take(), b"b")
    assert checkpoints.longest(hashes) == 2
    assert checkpoints.longest(hashes[:1]) == 0
    checkpoints.put(checkpoints.take(), b"b")  # written twice: kept once
    checkpoints.check()


def test_what_is_read_is_not_written_over():
    checkpoints = StateCheckpoints(2)
    for value in (b"a", b"b"):
        checkpoints.put(checkpoints.take(), value)
    old = checkpoints.acquire(b"a")
    assert checkpoints.take() != old  # b, although a was used less recently before
    assert checkpoints.take() is None
    assert checkpoints.longest([b"b"]) == 0
    checkpoints.release(old)
    assert checkpoints.take() == old
    checkpoints.check()


def test_any_order_of_calls_keeps_the_books():
    rng = np.random.default_rng(0)
    checkpoints = StateCheckpoints(5)
    written, read = [], []
    for _ in range(3000):
        match int(rng.integers(6)):
            case 0 if (number := checkpoints.take()) is not None:
                assert number not in (*written, *read)
                written.append(number)
            case 1 if written:
                checkpoints.put(written.pop(), rng.bytes(1)[:1])
            case 2 if written:
                checkpoints.give_back(written.pop())
            case 3 if checkpoints.longest([value := rng.bytes(1)]):
                read.append(checkpoints.acquire(value))
            case 4 if read:
                checkpoints.release(read.pop(int(rng.integers(len(read)))))
            case 5 if rng.random() < 0.02:
                checkpoints.clear()
        checkpoints.check()
