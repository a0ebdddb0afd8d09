"""The step channel: one message to every rank of a group, one answer from rank 0.

`SocketChannel` connects processes, `ThreadChannel` is the equivalent within one. A rank that raises
answers with its error. Code that watches the processes may call `kill`.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import StepMemoryError, WorkerDiedError, WorkerError
from .framing import Address

Handler = Callable[[Any], Any]
Raised = tuple[bool, str]  # whether memory was lacking, and the traceback
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


class NoAnswerError(Exception):
    """No answer arrived within the timeout; it may still arrive."""


class Channel(ABC):
    """The engine's end. Several answers may be outstanding; they keep order."""

    def __init__(self) -> None:
        self._dead: str | None = None  # why every further call raises `WorkerDiedError`
        self._num_owed = 0  # messages sent whose answer `receive` has not returned
        # The oldest of these answers, if they arrived before a call, with their sizes in bytes.
        self._early: deque[tuple[Any, int]] = deque()

    @property
    def dead(self) -> bool:
        """Whether every further call raises `WorkerDiedError`."""
        return self._dead is not None

    def call(self, message: Any, timeout_s: float) -> Any:
        """Returns rank 0's answer.

        Raises:
            WorkerError: a rank raised; the others may be stuck in a collective.
            StepMemoryError: a rank ran out of memory; the others may be stuck likewise.
            WorkerDiedError: a rank is gone, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        num_before = self._num_owed - len(self._early)
        self._send(message, timeout_s)
        try:
            for _ in range(num_before):  # answers to earlier messages
                answer = self._receive(max(0.0, deadline - time.monotonic()))
                self._early.append((answer, self.received_bytes))
            return self._receive(max(0.0, deadline - time.monotonic()))
        except NoAnswerError:
            self._dead = f"no answer within {timeout_s} s"
            raise WorkerDiedError(self._dead) from None

    # Sizes in bytes of the newest message to a rank and of the newest answer; 0: nothing was
    # encoded.
    sent_bytes = received_bytes = 0

    def send(self, message: Any, timeout_s: float) -> None:
        """Sends `message` to all ranks (raises `WorkerDiedError`)."""
        self._send(message, timeout_s)
        self._num_owed += 1

    def receive(self, timeout_s: float) -> Any:
        """Returns rank 0's answer to the oldest message (raises as `call` does).

        Raises:
            NoAnswerError: no answer within `timeout_s`.
        """
        if self._early:
            self._num_owed -= 1
            answer, self.received_bytes = self._early.popleft()
            return answer
        try:
            answer = self._receive(timeout_s)
        except WorkerError as error:  # counts as the answer to the message
            self._num_owed -= not isinstance(error, WorkerDiedError)
            raise
        self._num_owed -= 1
        return answer

    @abstractmethod
    def _send(self, message: Any, timeout_s: float) -> None:
        """Implements `send`."""

    @abstractmethod
    def _receive(self, timeout_s: float) -> Any:
        """Returns the answer to the oldest unanswered message; raises as `receive` does."""

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Makes pending and later calls raise `WorkerDiedError`; callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections to the ranks."""

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise WorkerDiedError(self._dead)


def guarded(handler: Handler, message: Any) -> tuple[Any, Raised | None]:
    """Returns the handler's answer, or what it raised."""
    try:
        return handler(message), None
    except Exception as error:  # noqa: BLE001 - any exception of a model is returned to the engine
        return None, (_lacks_memory(error), traceback.format_exc(limit=-4))


def _lacks_memory(error: Exception) -> bool:
    """Returns True if Python, CUDA, or torch on a CPU (without an own type) lacked memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def error_of(lacks_memory: bool, text: str) -> WorkerError:
    return StepMemoryError(text) if lacks_memory else WorkerError(text)


class Beside(Protocol):
    """Receives messages from other ranks beside the channel, without answering them."""

    wake: Callable[[], object]  # called by any thread when something has arrived

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that are readable when something has arrived."""

    def take_in(self) -> None:
        """Processes what has arrived, without waiting for more."""


class PendingReply(ABC):
    """A reply that a device still computes.

    A handler that returns one has given the device its work. `socket_channel.serve` then reads the
    next message, so that the device can queue its next step, and sends answers in order.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._error: Exception | None = None
        self._is_settled = False

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `result` would return without waiting."""

    @abstractmethod
    def _finish(self) -> Any:
        """Waits for the reply and returns it; called once."""

    def settle(self) -> None:
        """Waits for the reply; an exception is kept for `result`."""
        if self._is_settled:
            return
        self._is_settled = True
        try:
            self._result = self._finish()
        except Exception as error:  # noqa: BLE001 - `result` raises it in the right caller
            self._error = error

    def result(self) -> Any:
        """Waits for the reply and returns it; raises the exception of its computation."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._result


def finished(reply: Any) -> Any:
    """Returns `reply` itself, or its result if it is pending."""
    return reply.result() if isinstance(reply, PendingReply) else reply


# The step channel within one process.

_JOIN_S = 1.0
_BESIDE = object()  # put into an inbox if something arrived beside the channel


class ThreadChannel(Channel):
    """Ranks as threads of this process.

    Args:
        inline: a single rank's handler runs directly in `send`.
        beside: further messages of a single rank.
    """

    def __init__(
        self, handlers: Sequence[Handler], *, inline: bool = True, beside: Beside | None = None
    ) -> None:
        super().__init__()
        self._alone = handlers[0] if inline and len(handlers) == 1 else None
        self._num_ranks, self._beside = len(handlers), beside
        self._inboxes: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._replies: queue.SimpleQueue[tuple[int, Any, Raised | None]] = queue.SimpleQueue()
        self._num_answered = [0] * len(handlers)  # by rank, answers beyond those of all
        self._answers: deque[Any] = deque()  # rank 0's, until all ranks have answered
        if self._alone is None:
            for rank, handler in enumerate(handlers):
                inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._inboxes.append(inbox)
                name, work = f"outrider-rank-{rank}", (rank, handler, inbox)
                thread = threading.Thread(target=self._run, args=work, daemon=True, name=name)
                self._threads.append(thread)
                thread.start()
        if beside is not None and self._inboxes:
            beside.wake = lambda: self._inboxes[0].put(_BESIDE)

    def _send(self, message: Any, timeout_s: float) -> None:
        self._require_alive()
        if self._alone is not None:
            self._replies.put((0, *guarded(self._alone, message)))
        for inbox in self._inboxes:
            inbox.put(message)

    def _receive(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        self._require_alive()
        while not all(self._num_answered):  # waits for every rank, so that none falls behind
            left_s = max(0.0, deadline - time.monotonic())
            try:
                rank, reply, error = self._replies.get(timeout=left_s)
            except queue.Empty:
                raise NoAnswerError from None
            self._require_alive()
            if error is not None:
                if self._num_ranks > 1:
                    self._dead = error[1]  # the other ranks are stuck in a collective
                raise error_of(*error)
            self._num_answered[rank] += 1
            if rank == 0:
                self._answers.append(reply)
        for rank in range(self._num_ranks):
            self._num_answered[rank] -= 1
        return self._answers.popleft()

    def kill(self, reason: str) -> None:
        self._dead = reason
        self._replies.put((-1, None, (False, reason)))

    def close(self) -> None:
        self.kill(self._dead or "closed")
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:  # a thread stuck in a collective is abandoned
            thread.join(timeout=_JOIN_S)

    def _run(self, rank: int, handler: Handler, inbox: queue.SimpleQueue[Any]) -> None:
        while (message := inbox.get()) is not None:
            if message is not _BESIDE:
                reply, error = guarded(handler, message)
                self._replies.put((rank, reply, error))
            if self._beside is not None and inbox.empty():
                self._beside.take_in()


# -- messages that open a feature link, sent over the step channels
#
# The engine asks the head's worker to listen and passes its offer to the target's ranks; features
# (`features.py`) then go from worker to worker. Every link has its own address and secret, so data
# of an earlier link cannot be mistaken for data of this one.


@dataclass(frozen=True, slots=True)
class ListenFeatures:
    """To a drafter's worker: close the current link and listen for a new one."""

    here: bool  # the target's rank 0 is in the same process
    remote: bool  # it is on another node
    distributed: bool  # tensors go through a process group, not over the socket


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """The answer of the drafter's worker: where it listens."""

    queue: Any = None  # within one process: the `FeatureQueue` itself, never serialised
    address: Address | None = None
    secret: bytes = b""
    store: tuple[str, int] | None = None  # where the process group meets; None: no group


@dataclass(frozen=True, slots=True)
class OpenFeatures:
    """To the target's ranks: rank 0 sends the features of every later step to `offer`."""

    link: int  # index of the drafter; an earlier link of the same one is closed
    offer: LinkOffer | None  # None: the drafter is gone, and no other link replaces it
    # Layers whose inputs the head reads, ascending; empty: a draft model, which reads verdicts.
    capture: tuple[int, ...]
    timeout_s: float  # for connecting, and for writes to a peer that stops reading
