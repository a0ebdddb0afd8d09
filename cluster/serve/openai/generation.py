"""Runs the completions of one HTTP request and merges what they give.

Completions and chat differ only in how they print a chunk; both come here for the rest: timing,
stop strings, aborts, usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....engine.chat.reader import Parser
from ....engine.frontend import Frontend, Prompt, RequestOptions
from ....engine.outputs import Assembler, Chunk, add_usage
from ....errors import InvalidRequestError, RequestTimeoutError, WorkerError
from ....scheduler.sampling import SamplingParams
from ....scheduler.types import Delta, Request, SpeculationUsage
from ..access.identity import Call, current
from ..logs import log_completion, log_prompt
from ..metrics import EdgeMetrics
from ..tracing import begin_spans
from .client import EngineClient
from .protocol import GenerationBody
from .resuming import Mark, Part, ResumableStream


@dataclass(frozen=True, slots=True)
class Job:
    """One completion of one prompt."""

    request: Request
    prompt: Prompt
    assembler: Assembler
    parser: Parser | None = None

    @property
    def index(self) -> int:
        return self.assembler.index

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens so far whose text is reasoning."""
        offsets = self.assembler.offsets
        spans = self.parser.reasoning_spans if self.parser else ()
        return sum(bisect_left(offsets, end) - bisect_left(offsets, begin) for begin, end in spans)


@dataclass(frozen=True, slots=True)
class Step:
    """What one delta gave one job; with the last, its statistics are known."""

    job: Job
    chunk: Chunk
    last: bool
    num_tokens: int  # of the job, this step's included
    seen: bool = False  # the client has it from before it reconnected


class Generation:
    """All completions of one HTTP request.

    Raises:
        InvalidRequestError: a prompt or a setting is wrong; nothing has been queued.
    """

    def __init__(
        self,
        client: EngineClient,
        frontend: Frontend,
        metrics: EdgeMetrics,
        timeout_s: float | None = None,
        max_completions: int | None = None,
    ) -> None:
        self.max_completions = max_completions
        self.frontend = frontend
        self.jobs: list[Job] = []
        self._client = client
        self._metrics = metrics
        self._prompts: list[Prompt] = []
        self._structured_field = ""  # the client's name for what the engine compiles
        self._call: Call = current()
        self.stream: ResumableStream | None = None
        self._timeout_s = timeout_s  # the server's
        self._deadline_s = self._call.deadline(timeout_s)

    def limit_time(self, timeout_s: float | None) -> None:
        """The answer has to be there `timeout_s` after the request, if not earlier."""
        self._deadline_s = self._call.deadline(self._timeout_s, timeout_s)

    def check_count(self, num_prompts: int, n: int) -> None:
        """Raises `InvalidRequestError` for more completions than could ever be queued at once."""
        if self.max_completions is not None and num_prompts * n > self.max_completions:
            raise InvalidRequestError(
                f"prompt: {num_prompts} prompts x n = {n} are more completions than the queue "
                f"holds (max_queued_requests = {self.max_completions}); send fewer at a time",
                field="n" if num_prompts == 1 else "prompt",
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
        """Another prompt, with its `n` completions; `parser_of` makes what reads each of them."""
        sampling = self.frontend.with_defaults(sampling)
        identity, num_prompt = self._call.identity, len(prompt.token_ids)
        sampling = identity.sampling(sampling, num_prompt, self.frontend.max_model_len)
        options = identity.options(options)
        self._structured_field = options.structured_field
        if self.stream is not None and sampling.seed is None:
            seed = self.stream.seed(len(self.jobs))
            sampling = sampling.model_copy(update={"seed": seed})
        requests = self.frontend.requests(request_id, prompt, sampling, options, field=field)
        self._prompts.append(prompt)
        for request in requests:
            if self.stream is not None:
                request = replace(request, keep=self.stream.add(len(self.jobs)))
            parser = parser_of()
            assembler = Assembler(
                self.frontend.vocabulary,
                sampling,
                self.frontend.end_of_text(sampling),
                len(self.jobs),
                prompt.token_ids,
                shown_ids=self.frontend.chat.shown_ids if parser else frozenset(),
                with_offsets=parser is not None,
            )
            self.jobs.append(Job(request, prompt, assembler, parser))

    def mark(self, job: Job) -> Mark:
        """What the client has of a completion."""
        return Mark() if self.stream is None else self.stream.mark(job.index)

    def begins(self, job: Job) -> None:
        """The next event is the first of a completion."""
        if self.stream is not None:
            self.stream.begin(job.index)

    def sends(self, step: Step, *, text: bool = False, end: bool = False) -> None:
        """The next event has what a step gave; it may be the last with text, or the last of all."""
        if self.stream is not None:
            self.stream.advance(step.job.index, step.num_tokens, text=text, end=end)

    async def finish(self) -> None:
        """Runs everything to its end."""
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for _ in chunks:
                pass

    async def chunks(self) -> AsyncGenerator[Step, None]:
        """What comes, as it comes. Closing the generator aborts what still runs."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_known = 0  # tokens that were counted when they were generated
        if self.stream is not None:
            self.stream.check_count(len(self.jobs))
            num_known = await self.stream.count_kept(self._client)
        reserved = (
            num_prompt - num_known + sum(job.request.sampling.max_tokens or 0 for job in self.jobs)
        )
        usage = self._call.identity.usage
        usage.take_tokens(reserved)
        self._metrics.started(num_prompt)
        self._log_prompts()
        try:
            if self.stream is not None:
                await self.stream.find(self._client)
            async with contextlib.aclosing(self._merged()) as steps:
                async for step in steps:
                    yield step
        finally:
            num_output = sum(len(job.assembler.token_ids) for job in self.jobs)
            usage.give_back_tokens(max(0, reserved - num_prompt - num_output + num_known))

    def _log_prompts(self) -> None:
        if not self._call.log_prompts:
            return
        for job in self.jobs:
            text = job.prompt.text
            shown = self.frontend.vocabulary.text(job.prompt.token_ids) if text is None else text
            log_prompt(job.request, self._call.identity.name, shown)

    async def _merged(self) -> AsyncGenerator[Step, None]:
        if len(self.jobs) == 1:
            async with contextlib.aclosing(self._run(self.jobs[0])) as steps:
                async for step in steps:
                    yield step
            return
        merged: asyncio.Queue[Step | Job] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(job, merged)) for job in self.jobs]
        try:
            num_open = len(tasks)
            while num_open:
                item = await merged.get()
                if isinstance(item, Job):
                    num_open -= 1
                    await tasks[item.index]  # raises what the job raised
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage block, with one on speculation."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_output = sum(len(job.assembler.token_ids) for job in self.jobs)
        cached: dict[int, int] = {}
        for job in self.jobs:
            key = id(job.prompt)
            cached[key] = max(cached.get(key, 0), job.assembler.num_cached_tokens)
        total = self._speculation()
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": sum(job.num_reasoning_tokens for job in self.jobs)
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
        """The summary of speculation, as a structured header field (RFC 9651)."""
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
            async with contextlib.aclosing(self._run(job)) as steps:
                async for step in steps:
                    merged.put_nowait(step)
        finally:
            merged.put_nowait(job)

    async def _run(self, job: Job) -> AsyncGenerator[Step, None]:
        """One job's steps that have something to say, and always the last."""
        assembler = job.assembler
        times = self._metrics.stopwatch()
        spans = begin_spans(job.request, self.frontend.model_name)
        unfinished = "abort"  # by whoever asked
        try:
            async with contextlib.aclosing(self._parts(job)) as parts:
                while True:
                    part = await self._next(parts)
                    delta: Delta = part.delta
                    was_finished = assembler.finished
                    chunk = assembler.push(delta)
                    if delta.times is not None:
                        times.before_first(delta.times)
                        if spans is not None:
                            spans.first(delta.times)
                    if part.live and not part.seen:
                        times.tokens(len(chunk.token_ids))
                    last = delta.finish_reason is not None
                    if assembler.finished and not was_finished and not last:  # a stop string
                        await self._client.abort(job.request.id)
                        if not part.live:  # the engine has nothing to add
                            for step in _stopped(job, chunk, part):
                                yield step
                            return
                    if last or chunk.token_ids:
                        yield Step(job, chunk, last, len(assembler.token_ids), part.seen)
                    if last:
                        return
        except Exception:
            unfinished = "error"  # refused by the engine, or lost
            raise
        finally:
            reason = assembler.finish_reason or unfinished
            times.finished(reason)
            log_completion(job.request, assembler, reason, times.elapsed_s)
            if spans is not None:
                spans.end(assembler, reason)

    async def _parts(self, job: Job) -> AsyncGenerator[Part, None]:
        request = replace(job.request, timeout_s=self._remaining())
        if self.stream is not None:
            deltas = self.stream.deltas(self._client, request)
            async with contextlib.aclosing(deltas):
                async for part in deltas:
                    yield part
            return
        async with contextlib.aclosing(self._client.generate(request)) as plain:
            async for delta in plain:
                yield Part(delta)

    async def _next(self, deltas: AsyncGenerator[Any, None]) -> Any:
        try:
            if self._deadline_s is None:
                return await anext(deltas)
            return await asyncio.wait_for(anext(deltas), self._remaining())
        except asyncio.TimeoutError:
            if self._deadline_s is None:
                raise
            raise self._too_late() from None
        except WorkerError:
            if self._deadline_s is None or time.monotonic() < self._deadline_s:
                raise
            raise self._too_late() from None  # the engine's clock was quicker
        except InvalidRequestError as error:
            raise self._named(error) from None

    def _named(self, error: InvalidRequestError) -> InvalidRequestError:
        """The engine's complaint about a grammar, under the client's name for that."""
        field, mine = error.field or "", self._structured_field
        if not (mine and field.startswith("structured_outputs.")):
            return error
        return InvalidRequestError(error.message.replace(field, mine), field=mine)

    def _remaining(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def _too_late(self) -> RequestTimeoutError:
        assert self._deadline_s is not None
        given = self._deadline_s - self._call.arrived_s
        return RequestTimeoutError(
            f"the request was not answered within {given:g} s (the request's timeout or the "
            "server's request_timeout_s)",
            field="timeout",
        )


def _stopped(job: Job, chunk: Chunk, part: Part) -> list[Step]:
    """The last steps of a job whose stop string was found in kept tokens."""
    count = len(job.assembler.token_ids)
    if not part.seen:
        return [Step(job, chunk, True, count)]
    end = Step(job, Chunk("", ()), True, count, part.all_text_seen)
    return [Step(job, chunk, False, count, seen=True), end]


def continuous_usage(body: GenerationBody) -> bool:
    """Whether every chunk carries the usage so far; as in vLLM, only if usage is wanted at all."""
    options = body.stream_options
    return options is not None and options.include_usage and options.continuous_usage_stats


def shows_ids(body: GenerationBody) -> bool:
    """Whether the answer carries token ids beside the text."""
    return bool(body.return_token_ids)


def token_ids(job: Job, ids: Sequence[int], *, with_prompt: bool = False) -> dict[str, list[int]]:
    """`return_token_ids`' part of a choice; chat has the prompt's ids beside the choices."""
    shown = {"token_ids": list(ids)}
    if with_prompt:
        shown["prompt_token_ids"] = list(job.prompt.token_ids)
    return shown
