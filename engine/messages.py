"""What the engine's loop does for a message: adding requests, ending one.

Called by `Engine` in the loop's thread, between two steps. An unexpected exception costs the
message's own requests, with an `InternalError`, and no other.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

from ..errors import InternalError, OutriderError
from ..scheduler.loop import Loop
from ..scheduler.types import Delta, Request

if TYPE_CHECKING:
    from .engine import Sink

log = logging.getLogger(__name__)


def add_all(
    loop: Loop, sinks: MutableMapping[str, Sink], requests: Sequence[Request], sink: Sink
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
        sinks[request.id] = sink
    return None


def end(loop: Loop, request_id: str) -> list[Delta]:
    """Ends a request if it still runs; its last deltas."""
    try:
        return loop.abort(request_id)
    except Exception as error:
        log.exception("request %s was not ended", request_id, extra={"request_id": request_id})
        return [Delta(request_id, (), finish_reason="error", error=_fault(error).message)]


def _take_back(loop: Loop, sinks: MutableMapping[str, Sink], requests: Sequence[Request]) -> None:
    for request in requests:
        end(loop, request.id)
        sinks.pop(request.id, None)


def _fault(error: Exception) -> InternalError:
    return InternalError(f"the server failed to handle this request: {type(error).__name__}")
