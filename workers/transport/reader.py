"""Frames of one connection, of which small ones take a single call of the kernel."""

from __future__ import annotations

import socket

from ...errors import WorkerDiedError
from .framing import HEADER, MAX_FRAME_BYTES, receive_into

_BUFFER_BYTES = 2**16


class FrameReader:
    """Reads everything that comes from `connection`, which nothing else may read meanwhile."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # of what is read and not yet returned

    @property
    def has_data(self) -> bool:
        """Whether the next frame has been read, or its beginning."""
        return self._begin < self._end

    def receive(self) -> bytes:
        """The next frame.

        Raises:
            WorkerDiedError: the peer closed the connection, or the frame is too large.
        """
        while self._end - self._begin < HEADER.size:
            self._read()
        (size,) = HEADER.unpack_from(self._buffer, self._begin)
        if size > MAX_FRAME_BYTES:
            raise WorkerDiedError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
        begin = self._begin + HEADER.size
        end = begin + size
        if end <= self._end:
            self._begin = end
            return bytes(self._buffer[begin:end])
        body = bytearray(size)
        count = self._end - begin
        body[:count] = self._buffer[begin : self._end]
        self._begin = self._end = 0
        receive_into(self._connection, memoryview(body)[count:])
        return bytes(body)

    def _read(self) -> None:
        count = self._end - self._begin
        if count and self._begin:
            self._buffer[:count] = bytes(self._buffer[self._begin : self._end])
        self._begin, self._end = 0, count
        added = self._connection.recv_into(self._buffer[count:])
        if added == 0:
            raise WorkerDiedError("the peer closed the connection")
        self._end += added
