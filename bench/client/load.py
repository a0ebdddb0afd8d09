"""The load generator: streamed completions and chats over HTTP, at a rate or in a closed loop.

While requests run, bytes are only stored with the time at which they came; events are parsed
afterwards, so that the generator takes little of a machine that it shares with the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from ..measure import Acceptance, Arrival, Load, Trace

NO_TEXT = "an answer without text"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_CONNECT_TIMEOUT_S = 10.0
# What a stream is asked to tell of its tokens, the most telling first.
_STREAM_OPTIONS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
_REFUSED_OPTION = ("status 400", "status 422")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where answers are asked for, and with which fields beside prompt and sampling."""

    url: str  # the server's, without /v1
    model: str
    fields: dict[str, Any]
    timeout_s: float = 600.0  # of one request
    path: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=dict)
    verify: bool = True  # whether an HTTPS server's certificate has to be a trusted one


@dataclass(slots=True)
class Exchange:
    """One request and the bytes of its answer."""

    submitted_s: float
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None
    due_s: float = 0.0  # when it was to be sent; the limit of requests in flight may delay it


@dataclass(frozen=True, slots=True)
class Answer:
    """What an exchange says, once parsed."""

    trace: Trace | None
    failure: str | None
    acceptance: Acceptance | None = None
    is_counted: bool = False  # the server counted the tokens


def send_all(
    endpoint: Endpoint,
    bodies: Sequence[dict[str, Any]],
    load: Load,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[list[Exchange], float]:
    """Sends every body once; the exchanges in order, and the seconds that it took.

    Args:
        on_answer: called after each request.
    """
    return asyncio.run(_send_all(endpoint, bodies, load, on_answer))


def negotiate(endpoint: Endpoint, body: dict[str, Any]) -> tuple[Endpoint, str | None]:
    """The endpoint with the stream options that the server takes, and why none is taken."""
    failure: str | None = None
    for options in _STREAM_OPTIONS:
        asked = replace(endpoint, fields={**endpoint.fields, **options})
        (exchange,), _ = send_all(asked, [body], Load(streams=1))
        failure = parse(0, exchange).failure
        if failure in (None, NO_TEXT):  # a few tokens need not be a character
            return asked, None
        if not failure.startswith(_REFUSED_OPTION):
            break
    return endpoint, failure


def parse(index: int, exchange: Exchange) -> Answer:
    """The trace of an exchange, or why it failed."""
    if exchange.failure is not None:
        return Answer(None, exchange.failure)
    texts: list[tuple[float, str, int | None]] = []  # time, text, tokens so far if the server says
    usage: dict[str, Any] = {}
    done = False
    for at_s, data in _events(exchange.chunks):
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return Answer(None, f"an event that is not JSON: {data[:80]!r}")
        if not isinstance(event, dict):
            return Answer(None, f"an event that is no object: {data[:80]!r}")
        if "error" in event:
            return Answer(None, f"an error event: {_message(event)}")
        usage = event.get("usage") or usage
        text = "".join(map(_text, event.get("choices") or []))
        if text:
            texts.append((at_s, text, (event.get("usage") or {}).get("completion_tokens")))
    if not done:
        return Answer(None, "the stream ended before [DONE]")
    arrivals = _arrivals(texts, usage.get("completion_tokens"))
    if not arrivals:
        return Answer(None, NO_TEXT)
    trace = Trace(
        prompt_index=index,
        submitted_s=exchange.submitted_s,
        arrivals=arrivals,
        output="".join(text for _, text, _ in texts),
        num_prompt_tokens=usage.get("prompt_tokens", 0),
    )
    is_counted = usage.get("completion_tokens") is not None
    return Answer(trace, None, _acceptance(usage.get("speculation")), is_counted)


async def _send_all(
    endpoint: Endpoint,
    bodies: Sequence[dict[str, Any]],
    load: Load,
    on_answer: Callable[[], None],
) -> tuple[list[Exchange], float]:
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, ssl=endpoint.verify)
    exchanges: dict[int, Exchange] = {}
    times = load.times_s(len(bodies))
    limit = nullcontext() if load.streams is None else asyncio.Semaphore(load.streams)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=endpoint.headers
    ) as session:
        start = time.perf_counter()

        async def arrive(index: int) -> None:
            await asyncio.sleep(max(start + times[index] - time.perf_counter(), 0.0))
            async with limit:
                exchange = await _send(session, endpoint, bodies[index], start)
            exchange.due_s = times[index]
            exchanges[index] = exchange
            on_answer()

        await asyncio.gather(*(arrive(index) for index in range(len(bodies))))
        wall_s = time.perf_counter() - start
    return [exchanges[index] for index in range(len(bodies))], wall_s


async def _send(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: dict[str, Any], start: float
) -> Exchange:
    exchange = Exchange(time.perf_counter() - start)
    whole = {"model": endpoint.model, "stream": True, **endpoint.fields, **body}
    try:
        async with session.post(f"{endpoint.url}{endpoint.path}", json=whole) as response:
            if response.status != 200:
                text = await response.text()
                exchange.failure = f"status {response.status}: {_reason(text)}"
                return exchange
            async for data in response.content.iter_any():
                exchange.chunks.append((time.perf_counter() - start, data))
    except TimeoutError:
        exchange.failure = f"not answered within {endpoint.timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        exchange.failure = f"{type(error).__name__}: {error}"
    return exchange


def _text(choice: dict[str, Any]) -> str:
    """What a choice of an event adds: text, or an answer's content and what is thought before."""
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return (choice.get("text") or "") + thought + (delta.get("content") or "")


def _events(chunks: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Data of the server-sent events, each with the time at which its line was complete."""
    found = []
    rest = b""
    for at_s, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                found.append((at_s, line[5:].strip()))
    return found


def _arrivals(
    texts: Sequence[tuple[float, str, int | None]], num_tokens: int | None
) -> tuple[Arrival, ...]:
    """Tokens by time: as the server counts them, or the total in proportion to the text's length.

    The first event is given at least one token: it ends the wait for the first token.
    """
    total_chars = sum(len(text) for _, text, _ in texts)
    found: list[Arrival] = []
    num_before = num_chars = 0
    for place, (at_s, text, counted) in enumerate(texts):
        num_chars += len(text)
        if counted is not None:
            so_far = counted
        elif num_tokens is None:
            so_far = place + 1  # no usage at all: one token an event
        else:
            so_far = max(round(num_tokens * num_chars / total_chars), 1)
        if place == len(texts) - 1 and num_tokens is not None:
            so_far = num_tokens  # those that have no text of their own come with the last
        if so_far > num_before:
            found.append(Arrival(at_s, so_far - num_before))
            num_before = so_far
    return tuple(found)


def _acceptance(speculation: dict[str, Any] | None) -> Acceptance | None:
    if speculation is None:
        return None
    return Acceptance(
        num_steps=speculation["num_steps"],
        num_draft_tokens=speculation["num_draft_tokens"],
        num_accepted=speculation["num_accepted_tokens"],
    )


def _reason(text: str) -> str:
    try:
        return _message(json.loads(text))
    except (ValueError, AttributeError, RecursionError):
        return text[:200]


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
