"""What proxy and ingress agree on: the marks of a relayed answer, and the parts of its stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# The scope's key, with plain values only: it reaches replicas of other applications, too.
ADDRESS = "outrider.relay"
RELAYED = "outrider.relayed"  # mark of a response's start: the body comes over the socket
_PART = struct.Struct("<QI")  # stream, number of bytes; none: the stream's end


def packed(number: int, part: bytes) -> tuple[bytes, bytes]:
    """A part of stream `number` as it goes into a frame."""
    return _PART.pack(number, len(part)), part


def parts(frame: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a frame, each with its stream."""
    begin = 0
    while begin < len(frame):
        number, size = _PART.unpack_from(frame, begin)
        begin += _PART.size
        yield number, frame[begin : begin + size]
        begin += size
