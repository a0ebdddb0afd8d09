"""Frames come out whole, however they arrive."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from outrider.errors import WorkerDiedError
from outrider.workers.transport import framing
from outrider.workers.transport.framing import FrameReader


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_frames_in_pieces_and_in_heaps(ends) -> None:
    """Sizes around the buffer's, written in pieces that end anywhere, also in a header."""
    near, far = ends
    order = random.Random(5)
    sizes = [0, 1, 7, 2**16 - 9, 2**16 - 8, 2**16, 2**17 + 3] + [
        order.randrange(1, 3000) for _ in range(400)
    ]
    order.shuffle(sizes)
    bodies = [order.randbytes(size) for size in sizes]

    def write() -> None:
        stream = b"".join(map(framing.frame, bodies))
        begin = 0
        while begin < len(stream):
            end = begin + order.choice([1, 3, 8, 100, 5000, 70000])
            near.sendall(stream[begin:end])
            begin = end
        near.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    reader = FrameReader(far)
    assert [reader.receive() for _ in bodies] == bodies
    assert not reader.has_data
    with pytest.raises(WorkerDiedError, match="closed"):
        reader.receive()
    writer.join()


@pytest.mark.parametrize("left", [b"", b"\x05\0", framing.frame(b"hello")[:-1]])
def test_an_end_within_a_frame(ends, left) -> None:
    near, far = ends
    near.sendall(framing.frame(b"first") + left)
    near.close()
    reader = FrameReader(far)
    assert reader.receive() == b"first"
    assert reader.has_data == bool(left)
    with pytest.raises(WorkerDiedError, match="closed"):
        reader.receive()


def test_a_frame_that_is_too_large(ends) -> None:
    near, far = ends
    near.sendall(framing.HEADER.pack(framing.MAX_FRAME_BYTES + 1))
    with pytest.raises(WorkerDiedError, match="exceeds"):
        FrameReader(far).receive()
