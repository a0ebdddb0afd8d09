"""Tokens of resumable streams, stored by the engine's replica.

A replica records the deltas of every request with a `ResumeKey`. After the request's call has ended
for any reason, the tokens are kept for `resume_window_s`. An ingress to which the client reconnects
takes them and sends the rest as a replay. Meanwhile, nothing runs and no KV block is held.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...scheduler.types import Delta, Request, ResumeKey, TokenLogprobs

_ENDS = ("stop", "length")
MAX_RECORDS = 2**16


@dataclass(slots=True)
class ResumeTokens:
    """The emitted tokens of one completion.

    Args:
        logprobs: of the last tokens; earlier tokens were emitted by another engine.
        finish_reason: None if the completion is unfinished.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class _Record:
    key: ResumeKey
    request_id: str
    tokens: ResumeTokens
    expires_s: float | None = None  # None while its call is pending
    size: int = 0  # values held

    @property
    def stream(self) -> tuple[str, str]:
        """The stream of the request, and the stream's owner."""
        return self.key.stream, self.key.owner


class TokenStore:
    """Records of resumable requests; used by the engine's thread and an event loop.

    The time of a call does not depend on the number of records. If there are too many values or
    records, records of ended calls are dropped first, the oldest before others, and then those of
    the oldest running requests.

    Args:
        window_s: how long a record is kept after its call; 0: nothing is recorded.
        max_values: maximum number of stored tokens and log-probabilities.
        max_records: maximum number of recorded requests.
    """

    def __init__(
        self,
        window_s: float = 0.0,
        max_values: int = 2_000_000,
        clock: Callable[[], float] = time.monotonic,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self._window_s = window_s
        self._max_values, self._max_records = max_values, max_records
        self._clock = clock
        self._lock = threading.Lock()
        # By request id: pending calls in order of arrival, and ended calls in order of expiry.
        self._running: OrderedDict[str, _Record] = OrderedDict()
        self._ended: OrderedDict[str, _Record] = OrderedDict()
        self._of_stream: dict[tuple[str, str], dict[str, _Record]] = {}  # by stream and owner
        self._num_values = 0
        self._num_taken = 0

    def begin(self, request: Request) -> None:
        """Records a request that is about to be submitted, if its client may resume it."""
        if request.resume_key is None or not self._window_s:
            return
        emitted = request.emitted.tolist()
        with self._lock:
            self._expire()
            before = self._find(request.id)
            if before is not None:
                self._drop(before)
            record = _Record(request.resume_key, request.id, ResumeTokens(emitted))
            self._running[request.id] = record
            self._of_stream.setdefault(record.stream, {})[request.id] = record
            self._grow(record, len(emitted))

    def record(self, deltas: Iterable[Delta]) -> None:
        """Adds the deltas of a step; those of other requests are ignored."""
        if not self._running and not self._ended:
            return
        with self._lock:
            for delta in deltas:
                record = self._find(delta.request_id)
                if record is None:
                    continue
                tokens = record.tokens
                tokens.token_ids += delta.token_ids
                tokens.logprobs += delta.logprobs
                if delta.finish_reason in _ENDS:
                    tokens.finish_reason = delta.finish_reason
                    tokens.stop_token_id = delta.stop_token_id
                rows = sum(1 + len(entry.top) for entry in delta.logprobs)
                self._grow(record, len(delta.token_ids) + rows)

    def release(self, request_id: str) -> None:
        """Marks the request's call as ended; its record starts to expire."""
        with self._lock:
            self._expire()
            record = self._running.pop(request_id, None)
            if record is not None:
                record.expires_s = self._clock() + self._window_s
                self._ended[request_id] = record

    def count(self, stream_id: str, owner: str) -> dict[int, int]:
        """Returns how many tokens `take` would return for each completion of a stream."""
        counts: dict[int, int] = {}
        with self._lock:
            self._expire()
            for record in self._of_stream.get((stream_id, owner), {}).values():
                index = record.key.index
                counts[index] = max(counts.get(index, 0), len(record.tokens.token_ids))
        return counts

    def take(self, stream_id: str, owner: str) -> tuple[dict[int, ResumeTokens], list[str]]:
        """Removes a stream; returns its completions by index, and requests that may still run."""
        taken: dict[int, ResumeTokens] = {}
        running = []
        with self._lock:
            self._expire()
            for record in list(self._of_stream.get((stream_id, owner), {}).values()):
                self._drop(record)
                if record.expires_s is None:
                    running.append(record.request_id)
                index = record.key.index
                taken[index] = longer(taken.get(index), record.tokens)
            self._num_taken += bool(taken)
        return taken, running

    def expire(self) -> None:
        """Drops expired records."""
        with self._lock:
            self._expire()

    def stats(self) -> dict[str, int]:
        """Returns counts for `/stats`."""
        with self._lock:
            self._expire()
            return {
                "num_requests": len(self._running) + len(self._ended),
                "num_waiting": len(self._ended),
                "num_values": self._num_values,
                "num_resumed": self._num_taken,
            }

    def _find(self, request_id: str) -> _Record | None:
        return self._running.get(request_id) or self._ended.get(request_id)

    def _expire(self) -> None:
        now = self._clock()
        while (record := _oldest(self._ended)) is not None:
            if record.expires_s is None or record.expires_s > now:
                return
            self._drop(record)

    def _grow(self, record: _Record, count: int) -> None:
        record.size += count
        self._num_values += count
        while (
            self._num_values > self._max_values
            or len(self._running) + len(self._ended) > self._max_records
        ):
            oldest = _oldest(self._ended) or _oldest(self._running)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, record: _Record) -> None:
        found = self._running.pop(record.request_id, None)
        if found is None and self._ended.pop(record.request_id, None) is None:
            return
        self._num_values -= record.size
        siblings = self._of_stream[record.stream]
        del siblings[record.request_id]
        if not siblings:
            del self._of_stream[record.stream]


def _oldest(records: OrderedDict[str, _Record]) -> _Record | None:
    return next(iter(records.values()), None)


def longer(one: ResumeTokens | None, other: ResumeTokens) -> ResumeTokens:
    """Returns the record with more tokens."""
    return other if one is None or len(other.token_ids) >= len(one.token_ids) else one
