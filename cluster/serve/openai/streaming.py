"""Reads and processes request bodies, and sends answers that end when the client disconnects.

JSON answers and streams of server-sent events both watch for the disconnect from the beginning,
even while nothing has been produced yet. On a disconnect the work is cancelled, which aborts the
engine's requests.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ....errors import OutriderError, OverloadedError
from .errors import (
    BodyEncodingError,
    BodyTimeoutError,
    BodyTooLargeError,
    ClientGoneError,
    error_body,
    error_response,
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")


async def read_body(request: Request, max_bytes: int, timeout_s: float | None = None) -> bytes:
    """Reads the whole body.

    Raises:
        BodyEncodingError: it is compressed.
        BodyTooLargeError: it has more than `max_bytes` bytes.
        BodyTimeoutError: it did not arrive within `timeout_s`.
        ClientGoneError: the client disconnected before its end.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise BodyEncodingError.at(
            "content-encoding", f"bodies are not decompressed here (got {encoding[:32]!r})"
        )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and len(announced) < 20 and int(announced) <= max_bytes:
        announced = ""
    parts: list[bytes] = []
    size = max_bytes + 1 if announced else 0
    try:
        async with asyncio.timeout(timeout_s):
            if size <= max_bytes:
                async for part in request.stream():
                    size += len(part)
                    if size > max_bytes:
                        break
                    parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError("the client hung up while sending") from None
    except TimeoutError:
        raise BodyTimeoutError.at(
            "body", f"{size} bytes and no end after {timeout_s} s (body_timeout_s)"
        ) from None
    if size > max_bytes:
        raise BodyTooLargeError.at("body", f"more than {max_bytes} bytes")
    return b"".join(parts)


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`; cancels it when the client disconnects.

    Raises:
        ClientGoneError: the client has disconnected.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_cancel_on_disconnect(receive, task))
    try:
        return await task
    except asyncio.CancelledError:
        if watch.done():
            raise ClientGoneError("the client has disconnected") from None
        raise
    finally:
        watch.cancel()


async def _cancel_on_disconnect(receive: Receive, task: asyncio.Future[Any]) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    finally:
        task.cancel()


class EventStream(Response):
    """Streams server-sent events.

    The status is sent with the first event. An error before the first event becomes an ordinary
    error response. A later error is sent as an event, and the stream then ends without `[DONE]`.

    Args:
        named: events carry their `type` as the event's name, and the last event ends the stream.
        event_id: returns the id of the most recent event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[dict[str, Any], None]],
        *,
        named: bool = False,
        event_id: Callable[[], str] | None = None,
    ) -> None:
        self._event_id = event_id
        self._events = events
        self._named = named
        self.background = None
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._stream(scope, receive, send))
        except (ClientGoneError, OSError):
            log.debug("the client has disconnected")

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self.raw_headers
        start = {"type": "http.response.start", "status": self.status_code, "headers": headers}
        begun = False
        events = self._events()
        try:
            async for event in events:
                if not begun:
                    begun = True
                    await send(start)
                name = str(event["type"]) if self._named else None
                await send(self._message(to_json(event), name))
            if not begun:  # the client resumes a stream of which it has every event
                await send(start)
            if not self._named:
                await send(self._message(b"[DONE]"))
        except OutriderError as error:
            if not begun:
                await error_response(error, scope["path"])(scope, receive, send)
                return
            await send(self._message(to_json(error_body(error))))
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _message(self, data: bytes, name: str | None = None) -> Message:
        """Encodes an event as the next part of the body."""
        head = "" if name is None else f"event: {name}\n"
        if self._event_id is not None:
            head += f"id: {self._event_id()}\n"
        body = b"%sdata: %s\n\n" % (head.encode(), data)
        return {"type": "http.response.body", "body": body, "more_body": True}


# -- processing request bodies outside the event loop: parsing, chat templates, tokenizing
#
# A small body is processed at once, which is faster than a thread. Larger bodies go to two pools of
# a few threads, so that a body of megabytes does not delay one of kilobytes. The number of waiting
# bodies is bounded. The work has to release the GIL often (`parse.load`, `Frontend.text_prompt`);
# otherwise a thread would not relieve the event loop.

_AT_ONCE_BYTES = 2 * 2**10
_LARGE_BYTES = 256 * 2**10
_NUM_LARGE_THREADS = 2
_MAX_SMALL, _MAX_LARGE = 1024, 32  # bodies that run or wait, by pool


class Pool:
    """A small thread pool with a bounded number of running and waiting calls."""

    def __init__(self, name: str, num_threads: int, max_calls: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_calls = max_calls
        self._room = threading.Semaphore(max_calls)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in the pool and returns its result.

        Raises:
            OverloadedError: too many calls are waiting.
        """
        if not self._room.acquire(blocking=False):
            raise OverloadedError(
                f"{self._max_calls} request bodies wait to be read and tokenized; try again later"
            )
        # The thread inherits the request's context, which includes its sender.
        future = self._threads.submit(contextvars.copy_context().run, work)
        # A call counts until its thread is done, even if nobody waits for the result.
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)


class Offload:
    """The thread pools of one ingress."""

    def __init__(self) -> None:
        num_threads = max(2, min(8, (os.cpu_count() or 2) // 2))
        self._small = Pool("outrider-body", num_threads, _MAX_SMALL)
        self._large = Pool("outrider-large-body", _NUM_LARGE_THREADS, _MAX_LARGE)

    async def run(
        self, num_bytes: int, work: Callable[[], Result], *, may_be_slow: bool = False
    ) -> Result:
        """Returns the result of `work` on a body of `num_bytes`; raises as `Pool.run` and `work`.

        Work that may be slow goes to a thread regardless of the body's size.
        """
        if num_bytes <= _AT_ONCE_BYTES and not may_be_slow:
            return work()
        pool = self._small if num_bytes <= _LARGE_BYTES else self._large
        return await pool.run(work)
