"""Runs the completions of one HTTP request and merges their results.

Endpoints only format chunks. This module implements timing, stop strings, aborts, usage, token ids,
traces and log-probabilities.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ....drafters.lookup.prediction import Alignment
from ....engine.chat.reader import Content, Event, Parser, Reasoning
from ....engine.frontend import Frontend, Prompt, RequestOptions
from ....engine.outputs import (
    Assembler,
    Chunk,
    Detokenizer,
    Vocabulary,
    add_usage,
    prompt_table,
    traced,
)
from ....errors import InvalidRequestError, RequestTimeoutError, WorkerError
from ....scheduler.sampling import SamplingParams
from ....scheduler.types import Delta, Request, SpeculationUsage, TokenLogprobs, record
from ..access.access import Call, current
from ..metrics import EdgeMetrics, Stopwatch
from ..telemetry import CompletionSpans, log_completion, log_prompt
from .answers import AnswerHead, CompletionLogprobs, Extras, PromptExtras, Usage
from .engine_client import EngineClient
from .protocol import CompletionBody, GenerationBody, StreamOptions
from .resuming import Mark, Part, ResumableStream

Result = TypeVar("Result")
_LONG_PROMPT = 512  # tokens; a longer prompt is described in a thread


@dataclass(frozen=True, slots=True)
class Job:
    """One completion of a prompt."""

    request: Request
    prompt: Prompt
    assembler: Assembler
    parser: Parser | None = None
    alignment: Alignment | None = None  # aligns the completion with its prediction

    @property
    def index(self) -> int:
        return self.assembler.index

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens so far whose text is reasoning."""
        offsets = self.assembler.offsets
        spans = self.parser.reader.reasoning if self.parser else ()
        return sum(bisect_left(offsets, end) - bisect_left(offsets, begin) for begin, end in spans)

    @property
    def num_prediction_tokens(self) -> tuple[int, int]:
        """Numbers of the prediction's tokens that the completion contains so far, and lacks."""
        if self.alignment is None:
            return 0, 0
        self.alignment.follow(self.assembler.token_ids)
        return self.alignment.num_accepted, self.alignment.num_rejected

    def read(self, text: str, *, last: bool, parallel: bool) -> list[Event]:
        """Returns the events that `text` adds; without `parallel`, only the first call."""
        if self.parser is None:
            return [Content(text)] if text else []
        events = self.parser.push(text)
        events += self.parser.finish() if last else []
        if parallel:
            return events
        return [each for each in events if isinstance(each, (Content, Reasoning)) or not each.index]

    @property
    def prompt_text(self) -> str:
        """The prompt as text, which `echo` puts before the completion."""
        text = self.prompt.text
        return self.assembler.vocabulary.text(self.prompt.token_ids) if text is None else text

    async def described(self, render: Callable[[], Result]) -> Result:
        """Calls `render`, in a thread if it describes a long prompt token by token."""
        if self.assembler.prompt_logprobs is None or len(self.prompt.token_ids) <= _LONG_PROMPT:
            return render()
        return await asyncio.to_thread(render)

    def extras(self, body: GenerationBody) -> Extras:
        """Returns the requested additional fields of a finished choice."""
        extras: Extras = {}
        if body.return_token_ids:
            extras["token_ids"] = list(self.assembler.token_ids)
        if self.request.speculation.trace:
            extras["speculation_trace"] = self.trace()
        if versions := self.assembler.weight_versions:
            extras["weight_versions"] = [
                {"version": version, "num_tokens": count} for version, count in versions
            ]
        return extras

    def prompt_extras(self, body: GenerationBody) -> PromptExtras:
        """Returns the requested fields about the prompt."""
        extras: PromptExtras = {}
        if body.return_token_ids:
            extras["prompt_token_ids"] = list(self.prompt.token_ids)
        if body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(body, self)
        return extras

    def chunk_extras(self, chunk: Chunk, *, with_ids: bool | None = False) -> Extras:
        """Returns the requested additional fields of a chunk."""
        extras: Extras = {}
        if chunk.trace is not None:
            extras["speculation_trace"] = [traced(chunk, self.assembler.vocabulary)]
        if with_ids:
            extras["token_ids"] = list(chunk.token_ids)
        return extras

    def trace(self) -> list[dict[str, Any]]:
        """Returns the `speculation_trace` of a finished choice, with every step."""
        return [traced(chunk, self.assembler.vocabulary) for chunk in self.assembler.traced]


@record
class Step:
    """The result of one delta of a job; the last one includes the job's statistics."""

    job: Job
    chunk: Chunk
    last: bool
    num_tokens: int  # of the job so far, including this step
    seen: bool = False  # the client received it before it reconnected


@dataclass
class Generation:
    """All completions of one HTTP request.

    Raises:
        InvalidRequestError: a prompt or a setting is invalid; nothing has been queued.
    """

    client: EngineClient
    frontend: Frontend
    metrics: EdgeMetrics
    timeout_s: float | None = None  # the server's timeout
    max_completions: int | None = None
    adapter: str = ""  # name of the LoRA adapter; empty: none
    begin_spans: Callable[[Request], CompletionSpans] | None = None
    jobs: list[Job] = field(default_factory=list)
    stream: ResumableStream | None = None
    created_at: int = field(default_factory=lambda: int(time.time()))
    _prompts: list[Prompt] = field(default_factory=list)
    _structured_field: str = ""  # the client's name of the field that the engine compiles
    _call: Call = field(default_factory=current)

    def __post_init__(self) -> None:
        self._deadline_s = self._call.deadline(self.timeout_s)

    def limit_time(self, timeout_s: float | None) -> None:
        """Sets the request's own timeout; the earlier deadline applies."""
        self._deadline_s = self._call.deadline(self.timeout_s, timeout_s)

    def check_count(self, num_prompts: int, n: int, name: str = "prompt") -> None:
        """Raises `InvalidRequestError` for more completions than the queue can ever hold."""
        if self.max_completions is not None and num_prompts * n > self.max_completions:
            raise InvalidRequestError(
                f"{name}: {num_prompts} prompts x n = {n} are more completions than the queue "
                f"holds (max_queued_requests = {self.max_completions}); send fewer at a time",
                field="n" if num_prompts == 1 else name,
            )

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions,
        field: str,
        parser_of: Callable[[], Parser | None] = lambda: None,
    ) -> None:
        """Adds a prompt with its `n` completions; `parser_of` creates the parser of each."""
        sampling = self.frontend.with_defaults(sampling)
        identity, num_prompt = self._call.identity, len(prompt.token_ids)
        sampling = identity.sampling(sampling, num_prompt, self.frontend.max_model_len)
        options = replace(identity.options(options), adapter=self.adapter)
        self._structured_field = options.structured_field
        if self.stream is not None and sampling.seed is None:
            seed = self.stream.seed(len(self.jobs))
            sampling = sampling.model_copy(update={"seed": seed})
        requests = self.frontend.requests(request_id, prompt, sampling, options, field=field)
        self._prompts.append(prompt)
        for request in requests:
            if self.stream is not None:
                request = replace(request, resume_key=self.stream.add(len(self.jobs)))
            parser = parser_of()
            shown_ids = self.frontend.chat.shown_ids if parser else frozenset[int]()
            assembler = self.frontend.assembler(prompt, sampling, len(self.jobs), shown_ids)
            alignment = Alignment(request.prediction) if request.prediction.size else None
            self.jobs.append(Job(request, prompt, assembler, parser, alignment))

    def mark(self, job: Job) -> Mark:
        """Returns the client's position in a completion."""
        return Mark() if self.stream is None else self.stream.mark(job.index)

    def begins(self, job: Job) -> None:
        """Records that the next event is a completion's first."""
        if self.stream is not None:
            self.stream.begin(job.index)

    def sends(self, step: Step, *, text: bool = False, end: bool = False) -> None:
        """Records that the next event covers a step, or is the last with text, or the last."""
        if self.stream is not None:
            self.stream.advance(step.job.index, step.num_tokens, text=text, end=end)

    async def finish(self) -> None:
        """Runs everything to its end."""
        async with self.running() as steps:
            async for _ in steps:
                pass

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[AsyncGenerator[Step, None], None]:
        """Runs the completions and yields their steps; on exit, aborts unfinished ones."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_known = 0  # tokens that were already counted when they were generated
        if self.stream is not None:
            self.stream.check_count(len(self.jobs))
            num_known = await self.stream.count_resumable(self.client)
        reserved = (
            num_prompt - num_known + sum(job.request.sampling.max_tokens or 0 for job in self.jobs)
        )
        usage = self._call.identity.usage
        usage.take_tokens(reserved)
        self.metrics.started(num_prompt)
        for job in self.jobs if self._call.log_prompts else ():
            log_prompt(job.request, self._call.identity.name, job.prompt_text)
        try:
            if self.stream is not None:
                await self.stream.find(self.client)
            steps = self._run(self.jobs[0]) if len(self.jobs) == 1 else self._merged()
            async with contextlib.aclosing(steps):
                yield steps
        finally:
            num_output = sum(len(job.assembler.token_ids) for job in self.jobs)
            usage.give_back_tokens(max(0, reserved - num_prompt - num_output + num_known))

    async def _merged(self) -> AsyncGenerator[Step, None]:
        """Yields the steps of several jobs in order of arrival."""
        merged: asyncio.Queue[Step | Job] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(job, merged)) for job in self.jobs]
        try:
            num_open = len(tasks)
            while num_open:
                item = await merged.get()
                if isinstance(item, Job):
                    num_open -= 1
                    await tasks[item.index]  # raises the job's error
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def head(self, answer_id: str) -> AnswerHead:
        """Returns the fields that every answer and every chunk begins with."""
        return {"id": answer_id, "created": self.created_at, "model": self.model_name}

    @property
    def model_name(self) -> str:
        """The requested name: of the adapter, or of the model."""
        return self.adapter or self.frontend.model_name

    def usage(self) -> Usage:
        """Returns OpenAI's usage object, extended by a summary of speculation."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_output = sum(len(job.assembler.token_ids) for job in self.jobs)
        cached: dict[int, int] = {}
        for job in self.jobs:
            key = id(job.prompt)
            cached[key] = max(cached.get(key, 0), job.assembler.num_cached_tokens)
        total = self._speculation()
        accepted, rejected = zip(*(job.num_prediction_tokens for job in self.jobs), strict=True)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": sum(job.num_reasoning_tokens for job in self.jobs),
                "accepted_prediction_tokens": sum(accepted),
                "rejected_prediction_tokens": sum(rejected),
            },
            "speculation": {
                "drafter": total.drafter,
                "num_draft_tokens": total.num_draft_tokens,
                "num_accepted_tokens": total.num_accepted_tokens,
                "mean_accepted_len": round(total.mean_accepted_len, 4),
                "num_steps": total.num_steps,
                "synthetic": total.synthetic,
            },
        }

    def headers(self) -> dict[str, str]:
        """Returns the summary of speculation as a structured header field (RFC 9651)."""
        total = self._speculation()
        drafter = total.drafter.encode("ascii", "replace").decode().replace('"', "'")
        summary = (
            f'drafter="{drafter}", steps={total.num_steps}, '
            f"draft-tokens={total.num_draft_tokens}, "
            f"accepted-tokens={total.num_accepted_tokens}, "
            f"mean-accepted-len={total.mean_accepted_len:.3f}"
            f"{', synthetic' if total.synthetic else ''}"
        )
        return {"x-outrider-speculation": summary}

    def _speculation(self) -> SpeculationUsage:
        return add_usage([job.assembler.speculation for job in self.jobs])

    async def _feed(self, job: Job, merged: asyncio.Queue[Step | Job]) -> None:
        try:
            async for step in self._run(job):
                merged.put_nowait(step)
        finally:
            merged.put_nowait(job)

    async def _run(self, job: Job) -> AsyncGenerator[Step, None]:
        """Yields the steps of one job that have tokens, and always the last one."""
        assembler = job.assembler
        times = Stopwatch(self.metrics)
        spans = self.begin_spans and self.begin_spans(job.request)
        unfinished = "abort"  # for example by the client
        try:
            async with contextlib.aclosing(self._parts(job)) as parts:
                while True:
                    given = await (anext(parts) if self._deadline_s is None else self._next(parts))
                    part = given if isinstance(given, Part) else None
                    delta = given.delta if isinstance(given, Part) else given
                    was_finished = assembler.finish_reason is not None
                    chunk = assembler.push(delta)
                    if delta.times is not None:
                        times.before_first(delta.times)
                        if spans is not None:
                            spans.first(delta.times)
                    if part is None or (part.live and not part.seen):
                        times.tokens(len(chunk.token_ids))
                    last = delta.finish_reason is not None
                    if assembler.finished and not (last or was_finished):  # a stop string was found
                        await self.client.abort(job.request.id)
                        if part is not None and not part.live:  # from the store: no more deltas
                            for step in _stopped(job, chunk, part):
                                yield step
                            return
                    if last or chunk.token_ids:
                        is_seen = part is not None and part.seen
                        yield Step(job, chunk, last, len(assembler.token_ids), is_seen)
                    if last:
                        return
        except Exception as error:
            unfinished = "error"  # rejected by the engine, or lost
            if isinstance(error, InvalidRequestError):
                raise self._named(error) from None
            raise
        finally:
            reason = assembler.finish_reason or unfinished
            times.finished(reason)
            log_completion(job.request, assembler, reason, times.elapsed_s)
            if spans is not None:
                spans.end(assembler, reason)

    def _parts(self, job: Job) -> AsyncGenerator[Delta | Part, None]:
        """Returns the deltas of a job; those of a resumable stream come as parts."""
        request = job.request
        if self._deadline_s is not None:
            request = replace(request, timeout_s=self._deadline_s - time.monotonic())
        if self.stream is not None:
            return self.stream.deltas(self.client, request)
        return self.client.generate(request)

    async def _next(self, deltas: AsyncGenerator[Delta | Part, None]) -> Delta | Part:
        """Returns the next delta; raises `RequestTimeoutError` once the deadline has passed."""
        assert self._deadline_s is not None
        remaining_s = self._deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise self._too_late()
        try:
            async with asyncio.timeout(remaining_s):  # `wait_for` would create a task
                return await anext(deltas)
        except TimeoutError:
            raise self._too_late() from None
        except WorkerError:
            if time.monotonic() < self._deadline_s:
                raise
            raise self._too_late() from None  # the engine's deadline was earlier

    def _named(self, error: InvalidRequestError) -> InvalidRequestError:
        """Renames the engine's error about a grammar to the client's name of the field."""
        field, mine = error.field or "", self._structured_field
        if not (mine and field.startswith("structured_outputs.")):
            return error
        return InvalidRequestError(error.message.replace(field, mine), field=mine)

    def _too_late(self) -> RequestTimeoutError:
        assert self._deadline_s is not None
        given = self._deadline_s - self._call.arrived_s
        return RequestTimeoutError(
            f"the request was not answered within {given:g} s (the request's timeout or the "
            "server's request_timeout_s)",
            field="timeout",
        )


def _stopped(job: Job, chunk: Chunk, part: Part) -> list[Step]:
    """Returns the last steps of a job whose stop string was found in stored tokens."""
    count = len(job.assembler.token_ids)
    if not part.seen:
        return [Step(job, chunk, True, count)]
    end = Step(job, Chunk("", ()), True, count, part.all_text_seen)
    return [Step(job, chunk, False, count, seen=True), end]


async def stream_events(
    generation: Generation,
    body: GenerationBody,
    request_id: str,
    kind: str,
    events_of: Callable[[Step], Awaitable[Iterable[dict[str, Any]]]],
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields chunks of type `kind` with the fields from `events_of`, and the requested usage.

    As in vLLM, chunks carry the usage so far only if usage is requested at all.
    """
    head: dict[str, Any] = {**generation.head(request_id), "object": kind}
    options = body.stream_options or StreamOptions()
    with_usage = options.include_usage
    continuous = with_usage and options.continuous_usage_stats
    if with_usage:
        head["usage"] = None
    async with generation.running() as steps:
        async for step in steps:
            for fields in await events_of(step):
                if continuous:
                    head["usage"] = generation.usage()
                yield {**head, **fields}
    if with_usage:
        yield {**head, "choices": [], "usage": generation.usage()}


# Log-probabilities in the forms of OpenAI's and vLLM's answers.


def _id_name(token_id: int) -> str:
    """Returns a token's name under `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    """Replaces minus infinity, which JSON cannot represent."""
    return max(logprob, -9999.0)


def token_logprobs(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    num_top: int,
    *,
    as_ids: bool | None = False,
) -> list[dict[str, Any]]:
    """Returns one entry per token with its top alternatives, in the form of chats and responses.

    Args:
        as_ids: as `return_tokens_as_token_ids`.
    """
    name = _id_name if as_ids else vocabulary.token_text

    def entry(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": name(token_id),
            "logprob": finite(value),
            "bytes": list(vocabulary.token_bytes(token_id)),
        }

    return [
        {
            **entry(token_id, row.chosen),
            "top_logprobs": [entry(id, value) for id, value in row.top[:num_top]],
        }
        for token_id, row in zip(ids, rows, strict=False)
    ]


def completion_logprobs(
    body: CompletionBody, job: Job, chunk: Chunk, *, echo: bool
) -> CompletionLogprobs:
    """Returns OpenAI's older form: parallel lists, with top alternatives by name.

    With `echo`, the prompt's tokens precede the chunk's; the first has no log-probability. Offsets
    count characters of the choice's whole text.
    """
    vocabulary = job.assembler.vocabulary
    name = _id_name if body.return_tokens_as_token_ids else vocabulary.token_name
    ids, rows = list(chunk.token_ids), list[TokenLogprobs | None](chunk.logprobs)
    offsets = list(chunk.offsets)
    if body.echo:
        text = job.prompt_text
        offsets = [len(text) + offset for offset in offsets]
        if echo:
            prompt = job.prompt.token_ids
            ids = [*prompt, *ids]
            rows = [None, *(job.assembler.prompt_logprobs or ()), *rows]
            offsets = prompt_offsets(vocabulary, prompt, text) + offsets
    tokens, tops = [name(token_id) for token_id in ids], list[dict[str, float] | None]()
    for token, row in zip(tokens, rows, strict=True):
        top = None
        if row is not None:
            top = {name(id): finite(value) for id, value in row.top[: body.logprobs or 0]}
            top.setdefault(token, finite(row.chosen))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [None if row is None else finite(row.chosen) for row in rows],
        "top_logprobs": tops if body.logprobs else None,
        "text_offset": offsets,
    }


def prompt_offsets(vocabulary: Vocabulary, token_ids: tuple[int, ...], text: str) -> list[int]:
    """Returns the offset in `text` at which each token of the prompt begins.

    Special tokens that the tokenizer adds have no characters in the text. If the tokenizer changes
    the text (case, white space), the offsets are approximate, but within the text.
    """
    for skipped in (False, True):
        detokenizer = Detokenizer(vocabulary, skip_special_tokens=skipped)
        offsets, pieces = [], []
        for token_id in token_ids:
            offsets.append(detokenizer.num_chars)
            pieces.append(detokenizer.push((token_id,)))
        if "".join(pieces) + detokenizer.finish() == text:
            break
    return [min(offset, len(text)) for offset in offsets]


def prompt_logprobs(body: GenerationBody, job: Job) -> list[Any] | None:
    """Returns vLLM's field: each prompt token's log-probability, and the most likely tokens."""
    table = prompt_table(job.assembler)
    if table is None or body.prompt_logprobs is None:
        return None
    shown: list[Any] = []
    for token_id, row in zip(job.prompt.token_ids, table, strict=True):
        # With `echo`, more alternatives may have been computed than this field requests.
        wanted = {} if row is None else {
            str(id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for id, entry in row.items()
            if id == token_id or (entry.rank or 0) <= body.prompt_logprobs
        }  # fmt: skip
        shown.append(None if row is None else wanted)
    return shown
