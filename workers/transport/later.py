"""A reply that a device still computes: the next message can be handled behind it.

A handler that returns one has given the device its work. `socket_channel.serve` takes the next
message in meanwhile, so that the device finds its next step waiting, and answers in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Later(ABC):
    """A reply in the making."""

    def __init__(self) -> None:
        self._result: Any = None
        self._error: Exception | None = None
        self._is_settled = False

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `result` would not wait."""

    @abstractmethod
    def _finish(self) -> Any:
        """Waits for the reply and returns it; called once."""

    def settle(self) -> None:
        """Waits; an exception is kept for `result`."""
        if self._is_settled:
            return
        self._is_settled = True
        try:
            self._result = self._finish()
        except Exception as error:  # noqa: BLE001 - raised by `result`, for whom it belongs to
            self._error = error

    def result(self) -> Any:
        """The reply; waits, and raises what computing it raised."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._result


def finished(reply: Any) -> Any:
    """`reply` itself, or what it becomes."""
    return reply.result() if isinstance(reply, Later) else reply
