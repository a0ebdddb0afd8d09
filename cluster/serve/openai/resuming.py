"""Resumable streams: ids of streams and events, and the client's position.

The id of an event is `STREAM:MARKS`, with one mark per completion. A mark is `-` before the
completion's first event. Afterwards it is the number of tokens covered by the events so far,
followed by `t` once all of the text is sent, or by `e` once the finish reason is sent. A client
that reconnects sends the same body with the last id. Text is a function of the tokens. The ingress
therefore passes the tokens that the client has through the same detokenizer and parser without
sending them, and continues after them. The tokens come from the replica that kept them
(`resume_tokens.py`), or are generated again if the verification rule makes that exact.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from ....errors import InvalidRequestError, OutriderError, PermissionDeniedError
from ....scheduler.types import Delta, Request, ResumeKey, TokenLogprobs, ints
from ..access.access import Identity
from ..resume_tokens import ResumeTokens
from .engine_client import EngineClient
from .protocol import GenerationBody

MAX_COMPLETIONS = 16  # of one stream; every event's id has a mark for each
_NOT_IN_BODY = {"resume", "timeout"}  # fields that may differ when a stream is resumed
_NO_LOGPROBS = TokenLogprobs(0.0)  # placeholder for those that the client has
_ID = re.compile(r"(?P<stream>(?P<kind>[a-z]+)-[0-9a-f]{32})")
_MARK = re.compile(r"-|(?P<count>[0-9]{1,9})(?P<end>[te]?)")


class StreamLostError(OutriderError):
    """No replica has the stream's tokens, and they cannot be generated again."""

    status = 410
    kind = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Decides whether the engine's verification rule can generate the same tokens again."""

    enabled: bool = False
    coupled: bool = True
    lossless: bool = True

    def repeats(self, request: Request) -> bool:
        """Returns True if another run of the request emits the same tokens."""
        return self.coupled or (self.lossless and request.sampling.temperature == 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """The client's position in one completion."""

    num_tokens: int = 0
    begun: bool = False
    has_text: bool = False  # all of the text
    ended: bool = False

    def __str__(self) -> str:
        end = "e" if self.ended else "t" if self.has_text else ""
        return f"{self.num_tokens}{end}" if self.begun else "-"

    @classmethod
    def read(cls, text: str) -> Mark | None:
        """Parses a mark; returns None if it is invalid."""
        found = _MARK.fullmatch(text)
        if found is None or found["count"] is None:
            return None if found is None else cls()
        count, end = int(found["count"]), found["end"]
        return cls(count, begun=True, has_text=bool(end), ended=end == "e")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a delta of a completion that may have been resumed."""

    delta: Delta
    seen: bool = False  # the client has received it
    all_text_seen: bool = False  # the client has received the completion's last text
    live: bool = True  # comes from the engine, not from a replica's store


class ResumableStream:
    """The state of one resumable answer: its id and the client's position."""

    def __init__(
        self, stream_id: str, owner: str, policy: ResumePolicy, marks: list[Mark] | None = None
    ) -> None:
        self.id = stream_id
        self.owner = owner
        self.resumed = marks is not None
        self._policy = policy
        self._marks = marks or []
        self._tokens: dict[int, ResumeTokens] = {}

    def event_id(self) -> str:
        """Returns the id of the most recent event."""
        return f"{self.id}:{','.join(map(str, self._marks))}"

    def seed(self, prompt: int) -> int:
        """Returns the seed of a prompt that has none; it is the same after every resumption."""
        digest = hashlib.blake2b(f"{self.id}:{prompt}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def add(self, index: int) -> ResumeKey:
        """Adds a completion.

        Raises:
            InvalidRequestError: there are too many completions.
        """
        if index >= MAX_COMPLETIONS:
            raise InvalidRequestError.at(
                "resumable", f"at most {MAX_COMPLETIONS} completions in one stream"
            )
        if not self.resumed:
            self._marks.append(Mark())
        return ResumeKey(self.id, index, self.owner)

    def check_count(self, count: int) -> None:
        """Raises `InvalidRequestError` unless the client sent marks of `count` completions."""
        if len(self._marks) != count:
            raise InvalidRequestError.at(
                "resume", f"positions of {len(self._marks)} completions, but the stream has {count}"
            )

    def mark(self, index: int) -> Mark:
        return self._marks[index]

    def begin(self, index: int) -> None:
        """Records that the client gets the completion's first event."""
        self._marks[index] = replace(self._marks[index], begun=True)

    def advance(
        self, index: int, num_tokens: int, *, text: bool = False, end: bool = False
    ) -> None:
        """Records an event that covers `num_tokens`.

        Args:
            text: whether it is the last event with text.
            end: whether it is the event with the finish reason.
        """
        before = self._marks[index]
        self._marks[index] = Mark(
            max(num_tokens, before.num_tokens),
            begun=True,
            has_text=text or end or before.has_text,
            ended=end or before.ended,
        )

    async def count_resumable(self, client: EngineClient) -> int:
        """Returns how many tokens the replicas keep; limits may reject the request before `find`.

        The tokens that `find` takes would be lost for later attempts.
        """
        if not self.resumed:
            return 0
        return sum((await client.count_resumable(self.id, self.owner)).values())

    async def find(self, client: EngineClient) -> None:
        """Takes the tokens that the replicas keep."""
        if self.resumed:
            self._tokens = await client.take(self.id, self.owner)

    async def deltas(self, client: EngineClient, request: Request) -> AsyncGenerator[Part, None]:
        """Yields all deltas of a completion, from its first token.

        Raises:
            StreamLostError: the tokens are lost.
        """
        assert request.resume_key is not None
        mark = self._marks[request.resume_key.index] if self.resumed else Mark()
        stored = _usable(self._tokens.get(request.resume_key.index, ResumeTokens()), mark, request)
        num_stored = len(stored.token_ids)
        if num_stored < mark.num_tokens and not self._policy.repeats(request):
            raise StreamLostError.at(
                "resume",
                "the tokens of this stream are lost, and this server's verification rule does not "
                "give the same ones again",
            )
        left = mark.num_tokens
        if num_stored:
            for part in _split(_stored_delta(request, stored), left, mark):
                yield replace(part, live=False)
            left = max(0, left - num_stored)
            if stored.finish_reason is not None:
                return
        wanted = replace(request, emitted=ints(stored.token_ids))
        deltas = client.generate(wanted)
        try:
            async for delta in deltas:
                for part in _split(delta, left, mark):
                    yield part
                left = max(0, left - len(delta.token_ids))
        finally:
            await deltas.aclose()


def open_stream(
    kind: str,
    body: GenerationBody,
    last_event_id: str | None,
    identity: Identity,
    policy: ResumePolicy,
) -> ResumableStream | None:
    """Returns the stream that a body begins or resumes; None if it is not resumable.

    Raises:
        InvalidRequestError, PermissionDeniedError: it cannot begin or resume; names the field.
    """
    resumes = body.resume is not None or last_event_id is not None
    if not body.resumable:
        if resumes:
            raise InvalidRequestError.at(
                "resumable", "a stream is resumed with the body that began it, resumable = true"
            )
        return None
    _check_body(body, policy)
    owner = identity.name if identity.key is None else identity.key.hash
    check = _digest(owner) + _digest(repr(body.model_dump(exclude=_NOT_IN_BODY)))
    if not resumes:
        return ResumableStream(f"{kind}-{secrets.token_hex(8)}{check}", owner, policy)
    stream_id, marks = _position(body, last_event_id)
    found = _ID.fullmatch(stream_id)
    if found is None or found["kind"] != kind:
        raise InvalidRequestError.at("resume", f"{stream_id[:64]!r} is no stream of this endpoint")
    if stream_id[-16:-8] != check[:8]:
        raise PermissionDeniedError.at("resume", "this stream was begun with another API key")
    if stream_id[-8:] != check[8:]:
        raise InvalidRequestError.at("resume", "the body is not the one that began this stream")
    return ResumableStream(stream_id, owner, policy, marks)


def _check_body(body: GenerationBody, policy: ResumePolicy) -> None:
    refusals = (
        (not policy.enabled, "resumable", "this server keeps no streams (resume_window_s = 0)"),
        (not body.stream, "resumable", "only allowed with stream = true"),
        (body.request_id is not None, "request_id", "the server names resumable streams"),
        (body.speculation.trace, "speculation.trace", "not available with resumable = true"),
    )
    for refused, field, why in refusals:
        if refused:
            raise InvalidRequestError.at(field, why)


def _position(body: GenerationBody, last_event_id: str | None) -> tuple[str, list[Mark]]:
    """Returns the stream's id and the client's marks."""
    if body.resume is not None:
        counts = body.resume.num_tokens
        counts = [counts] if isinstance(counts, int) else counts
        return body.resume.request_id, [Mark(count, begun=count > 0) for count in counts]
    stream_id, _, marks = (last_event_id or "").partition(":")
    found = [Mark.read(mark) for mark in marks.split(",")]
    if None in found:
        raise InvalidRequestError.at(
            "Last-Event-ID", f"{str(last_event_id)[:64]!r} is the id of no event"
        )
    return stream_id, [each for each in found if each is not None]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def _usable(stored: ResumeTokens, mark: Mark, request: Request) -> ResumeTokens:
    """Returns the stored tokens that can be sent; drops them if requested log-probs are lost."""
    if request.sampling.prompt_logprobs is not None and not mark.begun:
        return ResumeTokens()  # the prompt's come only with the first token
    begin = len(stored.token_ids) - len(stored.logprobs)
    if request.sampling.logprobs is None or begin <= mark.num_tokens:
        return stored
    return ResumeTokens(stored.token_ids[: mark.num_tokens])


def _stored_delta(request: Request, stored: ResumeTokens) -> Delta:
    """Returns the stored tokens as one delta; log-probabilities that are not sent are blank."""
    missing = len(stored.token_ids) - len(stored.logprobs)
    blank = (_NO_LOGPROBS,) * missing if stored.logprobs else ()
    return Delta(
        request.id,
        tuple(stored.token_ids),
        finish_reason=stored.finish_reason,
        stop_token_id=stored.stop_token_id,
        logprobs=(*blank, *stored.logprobs),
    )


def _split(delta: Delta, left: int, mark: Mark) -> list[Part]:
    """Splits a delta into the tokens that the client has (at most `left`) and the others."""
    count = len(delta.token_ids)
    if mark.has_text or (left and count <= left):
        return [Part(delta, seen=True, all_text_seen=mark.has_text)]
    if not left:
        return [Part(delta, seen=False)]
    head = Delta(delta.request_id, delta.token_ids[:left], logprobs=delta.logprobs[:left])
    tail = replace(delta, token_ids=delta.token_ids[left:], logprobs=delta.logprobs[left:])
    return [Part(head, seen=True), Part(tail, seen=False)]
