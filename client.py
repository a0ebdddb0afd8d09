"""HTTP transports that resume streams: for `httpx`, and for clients that are built on it.

    with httpx.Client(transport=ResumingTransport()) as http:
        for event in stream_events(http, f"{url}/v1/completions", {"prompt": "...", ...}):
            ...

    openai.OpenAI(http_client=httpx.Client(transport=ResumingTransport(), timeout=600))

A request whose body has `"resumable": true` gets a stream whose events have ids. Where its
connection breaks, the transport sends the request again with the id of the last whole event; the
reader of the stream only notices the time that it takes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import httpx

# Before each further attempt: some ten seconds of short ones, then the last one repeats.
_PAUSES_S = (0.05, 0.1, 0.2, 0.3, *[0.5] * 20, 1.0, 2.0)
_RETRIED = (408, 429, 500, 502, 503, 504)  # what proxies and servers answer while they restart
_LAST = (b"data: [DONE]", b'data: {"error"')


class ResumingTransport(httpx.BaseTransport):
    """Resumes the streams of `inner`.

    Args:
        resume_for_s: how long a broken stream is tried again; the server keeps its tokens for
            `resume_window_s`.
    """

    def __init__(
        self, inner: httpx.BaseTransport | None = None, *, resume_for_s: float = 60.0
    ) -> None:
        self._inner = inner or httpx.HTTPTransport()
        self._resume_for_s = resume_for_s

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        progress = _Progress(request, self._resume_for_s) if _asks(request) else None
        return _answer(self._inner.handle_request(request), _Stream, self._inner, progress)

    def close(self) -> None:
        self._inner.close()


class AsyncResumingTransport(httpx.AsyncBaseTransport):
    """`ResumingTransport` for `httpx.AsyncClient` and `openai.AsyncOpenAI`."""

    def __init__(
        self, inner: httpx.AsyncBaseTransport | None = None, *, resume_for_s: float = 60.0
    ) -> None:
        self._inner = inner or httpx.AsyncHTTPTransport()
        self._resume_for_s = resume_for_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        progress = _Progress(request, self._resume_for_s) if _asks(request) else None
        response = await self._inner.handle_async_request(request)
        return _answer(response, _AsyncStream, self._inner, progress)

    async def aclose(self) -> None:
        await self._inner.aclose()


def stream_events(client: httpx.Client, url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a resumable stream, for a client over a `ResumingTransport`.

    Raises:
        httpx.HTTPStatusError: the server refused the request.
        httpx.TransportError: the stream broke and could not be resumed.
    """
    body = {**body, "stream": True, "resumable": True}
    with client.stream("POST", url, json=body) as response:
        if response.is_error:
            response.read()
            response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


def _asks(request: httpx.Request) -> bool:
    """Whether the request asks for a resumable stream, which then must not be compressed."""
    try:
        if b'"resumable"' not in request.content:  # other bodies may be large
            return False
        body = json.loads(request.content)
    except (httpx.RequestNotRead, ValueError):
        return False
    if not isinstance(body, dict) or body.get("resumable") is not True:
        return False
    request.headers["Accept-Encoding"] = "identity"
    return True


def _is_stream(response: httpx.Response) -> bool:
    """Whether events can be read from it: a proxy may compress what it was asked not to."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    encoding = response.headers.get("content-encoding", "identity")
    return response.is_success and kind == "text/event-stream" and encoding == "identity"


def _answer(
    response: httpx.Response,
    stream: type[_Resumed],
    inner: httpx.BaseTransport | httpx.AsyncBaseTransport,
    progress: _Progress | None,
) -> httpx.Response:
    """The response, with a body that is resumed where the request asked for that."""
    if progress is None or not _is_stream(response):
        return response
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=stream(inner, response, progress),  # type: ignore[arg-type]
        extensions=response.extensions,
    )


class _Progress:
    """Cuts what arrives into whole events and keeps the last id; paces the attempts."""

    def __init__(self, request: httpx.Request, resume_for_s: float) -> None:
        self.ended = False
        self._request = request
        self._resume_for_s = resume_for_s
        self._held = b""
        self._last_id = b""
        self._num_attempts = 0
        self._broken_s: float | None = None

    def whole_events(self, data: bytes) -> bytes:
        """What `data` completes."""
        whole, cut, rest = (self._held + data).rpartition(b"\n\n")
        self._held = rest
        for line in whole.split(b"\n"):
            if line.startswith(b"id: "):
                self._last_id = line[4:]
            elif line.startswith(_LAST):
                self.ended = True
        if cut:
            self._num_attempts, self._broken_s = 0, None
        return whole + cut

    def again(self) -> tuple[float, httpx.Request]:
        """After a break: how long to wait, and the request that continues.

        Raises:
            httpx.RemoteProtocolError: it has been tried for long enough.
        """
        self._held = b""
        now = time.monotonic()
        if self._broken_s is None:
            self._broken_s = now
        if now - self._broken_s > self._resume_for_s:
            raise httpx.RemoteProtocolError(
                f"the stream broke and could not be resumed within {self._resume_for_s:g} s",
                request=self._request,
            )
        pause_s = _PAUSES_S[min(self._num_attempts, len(_PAUSES_S) - 1)]
        self._num_attempts += 1
        first = self._request
        headers = first.headers.copy()
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id.decode("ascii")
        # A new connection: the old one may lead to the process that died.
        headers["Connection"] = "close"
        return pause_s, httpx.Request(
            first.method,
            first.url,
            headers=headers,
            content=first.content,
            extensions=first.extensions,
        )

    def check(self, response: httpx.Response, text: bytes) -> None:
        """Raises `httpx.RemoteProtocolError` for a refusal that will not change."""
        if response.status_code not in _RETRIED:
            raise httpx.RemoteProtocolError(
                f"the stream was not resumed: {response.status_code} "
                f"{text.decode('utf-8', 'replace')[:500]}",
                request=self._request,
            )


class _Resumed:
    """A body that goes on in further responses of `inner`."""

    def __init__(self, inner: Any, response: httpx.Response, progress: _Progress) -> None:
        self._inner = inner
        self._response: Any = response
        self._progress = progress


class _Stream(_Resumed, httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        while True:
            with suppress(httpx.TransportError):  # as for a stream that ends early
                for data in self._response.stream:
                    yield self._progress.whole_events(data)
            if self._progress.ended:
                return
            self._reconnect()

    def close(self) -> None:
        self._response.close()

    def _reconnect(self) -> None:
        while True:
            self.close()
            pause_s, request = self._progress.again()
            time.sleep(pause_s)
            try:
                self._response = self._inner.handle_request(request)
                if self._response.status_code == httpx.codes.OK:
                    return
                text = self._response.read()
            except httpx.TransportError:
                continue
            self._progress.check(self._response, text)


class _AsyncStream(_Resumed, httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            with suppress(httpx.TransportError):  # as for a stream that ends early
                async for data in self._response.stream:
                    yield self._progress.whole_events(data)
            if self._progress.ended:
                return
            await self._reconnect()

    async def aclose(self) -> None:
        await self._response.aclose()

    async def _reconnect(self) -> None:
        while True:
            await self.aclose()
            pause_s, request = self._progress.again()
            await asyncio.sleep(pause_s)
            try:
                self._response = await self._inner.handle_async_request(request)
                if self._response.status_code == httpx.codes.OK:
                    return
                text = await self._response.aread()
            except httpx.TransportError:
                continue
            self._progress.check(self._response, text)
