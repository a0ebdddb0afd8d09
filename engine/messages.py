"""What the engine's loop does for a message (adding requests, ending one), and where deltas go.

Called by `Engine` in the loop's thread, between two steps. An unexpected exception costs the
message's own requests, with an `InternalError`, and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ..errors import InternalError, OutriderError
from ..scheduler.loop import Loop
from ..scheduler.types import Delta, Request

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a request's deltas go."""

    def deliver(self, deltas: list[Delta]) -> None:
        """All of a step's deltas for this sink; must not block."""
        ...


class Sinks:
    """The sinks of requests that have not ended."""

    def __init__(self) -> None:
        self._by_request: dict[str, Sink] = {}

    def add(self, request_id: str, sink: Sink) -> None:
        """Deltas of this request go to `sink`."""
        self._by_request[request_id] = sink

    def remove(self, request_id: str) -> None:
        """The request was not added."""
        self._by_request.pop(request_id, None)

    def deliver(self, deltas: list[Delta]) -> None:
        """One call per sink; a request's last delta ends its entry."""
        by_sink: dict[int, tuple[Sink, list[Delta]]] = {}
        for delta in deltas:
            sink = self._by_request.get(delta.request_id)
            if sink is not None:
                by_sink.setdefault(id(sink), (sink, []))[1].append(delta)
                if delta.finish_reason:
                    del self._by_request[delta.request_id]
        for sink, batch in by_sink.values():
            try:
                sink.deliver(batch)
            except Exception:
                log.exception("a sink failed; what was meant for it is lost")

    def fail_all(self, message: str) -> None:
        """Every request ends with an error."""
        self.deliver(
            [Delta(each, (), finish_reason="error", error=message) for each in self._by_request]
        )


def add_all(
    loop: Loop, sinks: Sinks, requests: Sequence[Request], sink: Sink
) -> OutriderError | None:
    """Queues all requests, or none of them; what is wrong, if anything is."""
    for index, request in enumerate(requests):
        try:
            loop.add(request)
        except OutriderError as error:
            _take_back(loop, sinks, requests[:index])
            return error
        except Exception as error:
            log.exception("request %s was not added", request.id, extra={"request_id": request.id})
            _take_back(loop, sinks, requests[: index + 1])  # it may be there in part
            return _fault(error)
        sinks.add(request.id, sink)
    return None


def end(loop: Loop, request_id: str) -> list[Delta]:
    """Ends a request if it still runs; its last deltas."""
    try:
        return loop.abort(request_id)
    except Exception as error:
        log.exception("request %s was not ended", request_id, extra={"request_id": request_id})
        return [Delta(request_id, (), finish_reason="error", error=_fault(error).message)]


def _take_back(loop: Loop, sinks: Sinks, requests: Sequence[Request]) -> None:
    for request in requests:
        end(loop, request.id)
        sinks.remove(request.id)


def _fault(error: Exception) -> InternalError:
    return InternalError(f"the server failed to handle this request: {type(error).__name__}")
