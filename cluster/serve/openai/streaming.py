"""Bodies of requests, read and worked on; and answers that end when the client hangs up.

A JSON answer and a stream of server-sent events both listen for the disconnect from the first
moment, also while nothing has been produced yet; the work is cancelled then, which aborts the
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
    """The whole body.

    Raises:
        BodyEncodingError: it is compressed.
        BodyTooLargeError: it has more than `max_bytes`.
        BodyTimeoutError: it did not arrive within `timeout_s`.
        ClientGoneError: it never came to its end.
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
    """The result of `work`, which is cancelled when the client hangs up.

    Raises:
        ClientGoneError: it did.
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
    """Server-sent events.

    The status is sent with the first event: an error before it is an ordinary error response, one
    after it is an event, and then the stream ends without `[DONE]`. With `named`, events carry
    their `type` as the event's name, and the last of them ends the stream. `event_id` returns the
    id of the event that was made last.
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
            if not begun:  # the client that resumes it has every event
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
        """An event, as the next part of the body."""
        head = "" if name is None else f"event: {name}\n"
        if self._event_id is not None:
            head += f"id: {self._event_id()}\n"
        body = b"%sdata: %s\n\n" % (head.encode(), data)
        return {"type": "http.response.body", "body": body, "more_body": True}


# -- work on request bodies away from the event loop: parsing, chat templates, tokenizing
#
# A small body is dealt with at once, which is quicker than a thread. Larger ones go to two pools
# of a few threads each, so that a body of megabytes delays none of kilobytes; how many may wait is
# bounded. What runs there has to release the interpreter lock often (`parse.load`,
# `Frontend.text_prompt`), or a thread of its own would not help the loop.

_AT_ONCE_BYTES = 2 * 2**10
_LARGE_BYTES = 256 * 2**10
_NUM_LARGE_THREADS = 2
_MAX_SMALL, _MAX_LARGE = 1024, 32  # bodies in work or waiting, by pool


class Pool:
    """A few threads, and a bounded number of calls that run or wait."""

    def __init__(self, name: str, num_threads: int, max_calls: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_calls = max_calls
        self._room = threading.Semaphore(max_calls)

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`.

        Raises:
            OverloadedError: too many calls wait already.
        """
        if not self._room.acquire(blocking=False):
            raise OverloadedError(
                f"{self._max_calls} request bodies wait to be read and tokenized; try again later"
            )
        # The thread has the request's context, and with it who sent it.
        future = self._threads.submit(contextvars.copy_context().run, work)
        # Counted until the thread is done, also where nobody waits for the result any more.
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)


class Offload:
    """The pools of one HTTP edge."""

    def __init__(self) -> None:
        num_threads = max(2, min(8, (os.cpu_count() or 2) // 2))
        self._small = Pool("outrider-body", num_threads, _MAX_SMALL)
        self._large = Pool("outrider-large-body", _NUM_LARGE_THREADS, _MAX_LARGE)

    async def run(
        self, num_bytes: int, work: Callable[[], Result], *, may_be_slow: bool = False
    ) -> Result:
        """The result of `work` on a body of `num_bytes` (raises as `Pool.run`, and as `work`).

        Work that may be slow goes to a thread whatever the body's size.
        """
        if num_bytes <= _AT_ONCE_BYTES and not may_be_slow:
            return work()
        pool = self._small if num_bytes <= _LARGE_BYTES else self._large
        return await pool.run(work)
