"""The resuming transports against a server that hangs up in the middle of events."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from outrider.client import AsyncResumingTransport, ResumingTransport, stream_events

TOKENS = [f"t{index} " for index in range(12)]


class FlakyServer:
    """Streams `TOKENS`, and hangs up or answers 503 on the way."""

    def __init__(self) -> None:
        self.lasts: list[str | None] = []
        self.encodings: list[str] = []
        self.refuse_with: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(65536)
        head, _, body = head.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        while len(body) < int(fields["content-length"]):  # closing on unread bytes would reset
            body += connection.recv(65536)
        self.encodings.append(fields["accept-encoding"])
        last = fields.get("last-event-id")
        self.lasts.append(last)
        attempt = len(self.lasts)
        status = self.refuse_with if attempt > 1 else None
        if attempt == 2 and status is None:
            status = 503
        if status is not None:
            connection.sendall(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n".encode())
            return
        begin = 0 if last is None else int(last.partition(":")[2])
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        out = ""
        for count in range(begin, len(TOKENS)):
            choice = {"index": 0, "text": TOKENS[count], "finish_reason": None, "logprobs": None}
            event = {"id": "c", "object": "text_completion", "created": 1, "choices": [choice]}
            out += f"id: c:{count + 1}\ndata: {json.dumps(event | {'model': 'm'})}\n\n"
        out += "data: [DONE]\n\n"
        size = len(out) if attempt > 4 else len(out) // 2
        connection.sendall(out[:size].encode())


@pytest.fixture
def server() -> Iterator[FlakyServer]:
    server = FlakyServer()
    yield server
    server.close()


def test_httpx(server: FlakyServer) -> None:
    with httpx.Client(transport=ResumingTransport()) as http:
        events = list(stream_events(http, f"{server.url}/completions", {"prompt": "a"}))
    assert [event["choices"][0]["text"] for event in events] == TOKENS
    assert server.lasts[:3] == [None, "c:6", "c:6"]
    assert set(server.encodings) == {"identity"}  # ids are read from the events themselves


def test_openai(server: FlakyServer) -> None:
    http = httpx.Client(transport=ResumingTransport(), timeout=600)
    client = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, http_client=http)
    stream = client.completions.create(
        model="m", prompt="a", stream=True, extra_body={"resumable": True}
    )
    assert [chunk.choices[0].text for chunk in stream] == TOKENS


def test_async_openai(server: FlakyServer) -> None:
    async def read() -> list[str]:
        http = httpx.AsyncClient(transport=AsyncResumingTransport(), timeout=600)
        client = openai.AsyncOpenAI(
            base_url=server.url, api_key="k", max_retries=0, http_client=http
        )
        stream = await client.completions.create(
            model="m", prompt="a", stream=True, extra_body={"resumable": True}
        )
        return [chunk.choices[0].text async for chunk in stream]

    assert asyncio.run(read()) == TOKENS


def test_other_streams_and_refusals(server: FlakyServer) -> None:
    with httpx.Client(transport=ResumingTransport(resume_for_s=0.0)) as http:
        body = {"prompt": "a", "stream": True}
        answer = http.post(f"{server.url}/completions", json=body)
        assert "[DONE]" not in answer.text  # not resumable: as it came
        assert server.lasts == [None]
    server.lasts.clear()
    server.refuse_with = 410
    with httpx.Client(transport=ResumingTransport()) as http:
        stream = stream_events(http, f"{server.url}/completions", {"prompt": "a"})
        with pytest.raises(httpx.RemoteProtocolError, match="410"):
            list(stream)
    server.lasts.clear()
    server.refuse_with = 503
    with httpx.Client(transport=ResumingTransport(resume_for_s=0.1)) as http:
        stream = stream_events(http, f"{server.url}/completions", {"prompt": "a"})
        with pytest.raises(httpx.RemoteProtocolError, match=r"within 0\.1 s"):
            list(stream)


def test_a_compressed_stream_is_left_as_it_is() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
        return httpx.Response(200, headers=headers, content=gzip.compress(b"data: {}\n\n"))

    with httpx.Client(transport=ResumingTransport(httpx.MockTransport(answer))) as http:
        assert list(stream_events(http, "http://a/v1/completions", {})) == [{}]
