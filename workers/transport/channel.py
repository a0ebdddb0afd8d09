"""The step channel: one message to every rank of a group, one answer from rank 0.

`SocketChannel` connects processes, `ThreadChannel` is the equivalent within one. A rank that raises
answers with its error. Code that watches the processes may call `kill`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import StepMemoryError, WorkerError

Handler = Callable[[Any], Any]
Raised = tuple[bool, str]  # whether memory was lacking, and the traceback
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


class NoAnswerError(Exception):
    """No answer arrived within the timeout; it may still arrive."""


class Channel(Protocol):
    """The engine's end. With one rank several answers may be outstanding; they keep order."""

    def call(self, message: Any, timeout_s: float) -> Any:
        """Rank 0's answer.

        Raises:
            WorkerError: a rank raised; the others may be stuck in a collective.
            StepMemoryError: a rank ran out of memory; likewise.
            WorkerDiedError: a rank is gone, or did not answer in time.
        """
        ...

    def send(self, message: Any, timeout_s: float) -> None:
        """Sends `message` to all ranks (raises `WorkerDiedError`)."""
        ...

    def receive(self, timeout_s: float) -> Any:
        """Rank 0's answer to the oldest message (raises as `call` does).

        Raises:
            NoAnswerError: no answer within `timeout_s`.
        """
        ...

    def kill(self, reason: str) -> None:
        """Makes pending and later calls raise `WorkerDiedError`; from any thread."""
        ...

    def close(self) -> None:
        """Closes the connections to the ranks."""
        ...


def guarded(handler: Handler, message: Any) -> tuple[Any, Raised | None]:
    """The handler's answer, or what it raised."""
    try:
        return handler(message), None
    except Exception as error:  # noqa: BLE001 - whatever a model raises goes back to the engine
        return None, (_lacks_memory(error), traceback.format_exc(limit=-4))


def _lacks_memory(error: Exception) -> bool:
    """Whether an allocation failed: of Python, of CUDA, or of torch on a CPU, which has no type."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def error_of(lacks_memory: bool, text: str) -> WorkerError:
    return StepMemoryError(text) if lacks_memory else WorkerError(text)
