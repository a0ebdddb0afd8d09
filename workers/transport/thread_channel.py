"""The step channel within one process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from ...errors import WorkerDiedError
from .channel import Handler, NoAnswerError, Raised, error_of, guarded

_JOIN_S = 1.0


class ThreadChannel:
    """Ranks as threads of this process.

    Args:
        inline: a single rank's handler runs directly in `send`.
    """

    def __init__(self, handlers: Sequence[Handler], *, inline: bool = True) -> None:
        self._alone = handlers[0] if inline and len(handlers) == 1 else None
        self._num_ranks = len(handlers)
        self._inboxes: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._replies: queue.SimpleQueue[tuple[int, Any, Raised | None]] = queue.SimpleQueue()
        self._num_missing = 0  # ranks that have not answered the oldest message yet
        self._answer: Any = None  # rank 0's, until all ranks have answered
        self._dead: str | None = None
        if self._alone is None:
            for rank, handler in enumerate(handlers):
                inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._inboxes.append(inbox)
                thread = threading.Thread(
                    target=self._run,
                    args=(rank, handler, inbox),
                    daemon=True,
                    name=f"outrider-rank-{rank}",
                )
                self._threads.append(thread)
                thread.start()

    def call(self, message: Any, timeout_s: float) -> Any:
        self.send(message, timeout_s)
        try:
            return self.receive(timeout_s)
        except NoAnswerError:
            self._dead = f"no answer within {timeout_s} s"
            raise WorkerDiedError(self._dead) from None

    def send(self, message: Any, timeout_s: float) -> None:
        if self._dead is not None:
            raise WorkerDiedError(self._dead)
        if self._alone is not None:
            self._replies.put((0, *guarded(self._alone, message)))
        for inbox in self._inboxes:
            inbox.put(message)

    def receive(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        self._num_missing = self._num_missing or self._num_ranks
        while self._num_missing:  # waits for every rank, so that none lags behind
            if self._dead is not None:
                raise WorkerDiedError(self._dead)
            try:
                rank, reply, error = self._replies.get(
                    timeout=max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                raise NoAnswerError from None
            if self._dead is not None:
                raise WorkerDiedError(self._dead)
            self._num_missing -= 1
            if error is not None:
                self._num_missing = 0
                if self._num_ranks > 1:
                    self._dead = error[1]  # the other ranks are stuck in a collective
                raise error_of(*error)
            if rank == 0:
                self._answer = reply
        answer, self._answer = self._answer, None
        return answer

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
            reply, error = guarded(handler, message)
            self._replies.put((rank, reply, error))
