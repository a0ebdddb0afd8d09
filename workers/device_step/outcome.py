"""Brings steps' outcomes to the host: one copy each, on a stream of its own, awaited by an event.

Two may be on their way: a step is started before the outcome of the one before it is read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_POSTED = 2


@dataclass(frozen=True, slots=True)
class _Copy:
    """Where one outcome goes."""

    pinned: Tensor  # [num_words] int32
    event: torch.cuda.Event


class OutcomeReader:
    """Reads one device's outcome buffer, in order. On a CPU outcomes are there at once."""

    def __init__(self, outcome: Tensor) -> None:
        self._outcome = outcome
        self._stream: torch.cuda.Stream | None = None
        self._free: deque[_Copy] = deque()
        self._posted: deque[tuple[_Copy | None, NDArray[np.int32]]] = deque()
        if outcome.device.type == "cuda":
            self._stream = torch.cuda.Stream(outcome.device)
            for _ in range(MAX_POSTED):
                pinned = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
                self._free.append(_Copy(pinned, torch.cuda.Event()))

    def post(self, num_words: int) -> None:
        """Starts the copy of the first words, behind the work that is queued so far."""
        assert len(self._posted) < MAX_POSTED, len(self._posted)
        if self._stream is None:
            self._posted.append((None, self._outcome[:num_words].numpy().copy()))
            return
        copy, current = self._free.popleft(), torch.cuda.current_stream(self._outcome.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copy.pinned[:num_words].copy_(self._outcome[:num_words], non_blocking=True)
            copy.event.record(self._stream)
        current.wait_event(copy.event)  # the next step writes to the same buffer
        self._posted.append((copy, copy.pinned[:num_words].numpy()))

    @property
    def is_ready(self) -> bool:
        """Whether `collect` would not wait."""
        copy, _ = self._posted[0]
        return copy is None or copy.event.query()

    def collect(self) -> NDArray[np.int32]:  # [num_words]
        """The words of the oldest outcome; waits for its copy."""
        copy, words = self._posted.popleft()
        if copy is None:
            return words
        copy.event.synchronize()
        self._free.append(copy)
        return words.copy()
