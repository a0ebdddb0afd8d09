"""`AsyncLLM`: generation from an asyncio event loop, without a server.

Every request is an asyncio task of its own, as in a web application. The engine batches the
requests that run at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from ..config import EngineConfig
from ..errors import InvalidRequestError, OutriderError, OverloadedError
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Delta
from .chat.template import Message
from .frontend import POOLED, LoRARequest, Prompt, PromptLike, RequestOptions
from .llm import LLM, PromptRun, Run
from .metrics import Metric
from .outputs import Embedding, PooledOutput, RequestOutput, Score

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_BUSY_S = 0.05  # pause before a full queue is retried


class _AsyncRun(Run):
    """A run that delivers deltas to the event loop in which it was created."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.engine, llm.frontend, llm.config.max_queued_requests)
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[list[Delta]] = asyncio.Queue()

    def deliver(self, deltas: list[Delta]) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._news.put_nowait, deltas)

    async def begin(self) -> None:
        """Queues all requests; retries while the engine's queue is full."""
        requests = list(self._waiting)
        while True:
            added: asyncio.Future[OutriderError | None] = self._loop.create_future()

            def done(
                error: OutriderError | None, added: asyncio.Future[OutriderError | None] = added
            ) -> None:
                self._loop.call_soon_threadsafe(_settle, added, error)

            # `post` compiles grammars before it queues, so it runs in a thread.
            await asyncio.to_thread(self._engine.post, requests, self, done)
            error = await added
            if error is None:
                break
            if not isinstance(error, OverloadedError):
                raise error
            await asyncio.sleep(_BUSY_S)
        self._waiting.clear()
        self._running.update([request.id for request in requests])

    async def arriving(self) -> AsyncIterator[RequestOutput]:
        """Yields the output of the only job after every delta that changed it; raises its error."""
        while self._running:
            for delta in await self._news.get():
                output = self.take(delta).news()
                if output is not None:
                    yield output


def _settle(future: asyncio.Future[OutriderError | None], error: OutriderError | None) -> None:
    if not future.done():  # its task may have been cancelled
        future.set_result(error)


def _awaited(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Result]]:
    """Wraps a method of `LLM` in a coroutine that runs it in a thread."""

    @wraps(method)
    async def awaited(self: Any, /, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        return await asyncio.to_thread(method, self.llm, *args, **options)

    return awaited


class AsyncLLM:
    """A model with its drafter, for an asyncio event loop.

    Args:
        model, options: as for `LLM`.

    Raises:
        ConfigError, CheckpointError, ResourcesError: the message names the field.
    """

    _sync: ClassVar[type[LLM]] = LLM  # `outrider.AsyncLLM` sets a class with all executors

    def __init__(self, model: str, **options: Any) -> None:
        self._start(self._sync(model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Creates an instance from a validated configuration."""
        made = cls.__new__(cls)
        made._start(cls._sync.from_config(config))
        return made

    def _start(self, llm: LLM) -> None:
        self.llm = llm
        self._runs: dict[str, _AsyncRun] = {}  # keyed by request id

    @property
    def config(self) -> EngineConfig:
        return self.llm.config

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | str | None = None,
        priority: int | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output so far after every step. Leaving the loop aborts the request.

        Args:
            priority: as in vLLM, lower runs first; None: the `priority` of `options`.

        Raises:
            InvalidRequestError: the prompt or a setting is invalid, or the id is already in use.
            WorkerError: the request failed.
            EngineDeadError: the engine is down.
        """
        parsed = await asyncio.to_thread(self.llm.prompt, prompt)
        wish = await asyncio.to_thread(self._adapted, options, lora_request, priority)
        async for output in self._outputs(parsed, sampling_params, request_id, wish):
            yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        lora_request: LoRARequest | str | None = None,
        priority: int | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for the prompt that the chat template renders from the messages."""
        parsed = await asyncio.to_thread(
            self.llm.frontend.chat_prompt,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )
        wish = await asyncio.to_thread(self._adapted, options, lora_request, priority)
        async for output in self._outputs(parsed, sampling_params, request_id, wish):
            yield output

    async def embed(
        self,
        prompt: PromptLike,
        request_id: str | None = None,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> PooledOutput:
        """Returns the embedding of a prompt. Arguments and errors are those of `LLM.embed`."""
        cut = self.llm.frontend.cut_of(dimensions)
        parsed = await asyncio.to_thread(self.llm.text_to_embed, prompt, truncate_prompt_tokens)
        job = await self._pooled(parsed, request_id, lora_request)
        return job.pooled(Embedding(cut(job.vector).tolist()))

    async def score(
        self,
        query: str,
        document: str,
        request_id: str | None = None,
        *,
        instruction: str | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> PooledOutput:
        """Returns the score of a document for a query; arguments and errors as in `LLM.score`."""
        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise InvalidRequestError.at(name, f"a text, got {text!r}")
        pair = await asyncio.to_thread(
            self.llm.frontend.pair_prompt, query, document, instruction, "document"
        )
        job = await self._pooled(pair, request_id, lora_request)
        return job.pooled(Score(float(job.vector[0])))

    async def abort(self, request_id: str) -> None:
        """Ends a request if it is running; its last output has the finish reason "abort"."""
        run = self._runs.get(request_id)
        if run is not None:
            run.abort()

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine is not running."""
        self.llm.engine.check()

    # Coroutines of the methods of `LLM`.
    reset_prefix_cache = _awaited(LLM.reset_prefix_cache)
    update_weights = _awaited(LLM.update_weights)
    drafters = _awaited(LLM.drafters)
    load_drafter = _awaited(LLM.load_drafter)
    unload_drafter = _awaited(LLM.unload_drafter)
    replace_drafters = _awaited(LLM.replace_drafters)
    adapt = _awaited(LLM.adapt)
    pause_adaptation = _awaited(LLM.pause_adaptation)
    resume_adaptation = _awaited(LLM.resume_adaptation)
    init_weights_update_group = _awaited(LLM.init_weights_update_group)
    update_weights_from_distributed = _awaited(LLM.update_weights_from_distributed)
    destroy_weights_update_group = _awaited(LLM.destroy_weights_update_group)
    load_lora_adapter = _awaited(LLM.load_lora_adapter)
    unload_lora_adapter = _awaited(LLM.unload_lora_adapter)
    pause_generation = _awaited(LLM.pause_generation)
    resume_generation = _awaited(LLM.resume_generation)
    is_paused = _awaited(LLM.is_paused)
    sleep = _awaited(LLM.sleep)
    wake_up = _awaited(LLM.wake_up)
    is_sleeping = _awaited(LLM.is_sleeping)

    def get_tokenizer(self) -> Any:
        """Returns the target's transformers tokenizer."""
        return self.llm.get_tokenizer()

    def stats(self) -> dict[str, Any]:
        """Returns counts and times of the engine and its drafters."""
        return self.llm.stats()

    def get_metrics(self) -> list[Metric]:
        """Returns the metrics of `LLM.get_metrics`."""
        return self.llm.get_metrics()

    async def shutdown(self) -> None:
        """Shuts the engine down; running requests end with an error."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _adapted(
        self,
        options: RequestOptions | None,
        wish: LoRARequest | str | None,
        priority: int | None = None,
    ) -> RequestOptions | None:
        """Returns `options` with the requested adapter and priority."""
        if priority is not None:
            options = replace(options or RequestOptions(), priority=priority)
        if wish is None:
            return options
        adapter = self.llm.adapter_of(wish)
        return replace(options or RequestOptions(), adapter=adapter)

    async def _outputs(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions | None,
    ) -> AsyncIterator[RequestOutput]:
        if sampling is None:
            sampling = self.llm.frontend.with_defaults(SamplingParams())
        with self._running(prompt, sampling, request_id, options) as (run, _):
            await run.begin()
            async for output in run.arriving():
                yield output

    async def _pooled(
        self, prompt: Prompt, request_id: str | None, adapter: LoRARequest | str | None
    ) -> PromptRun:
        """Runs a request for an embedding or a score to its end, and returns it."""
        options = await asyncio.to_thread(self._adapted, RequestOptions(pools=True), adapter)
        with self._running(prompt, POOLED, request_id, options) as (run, job):
            await run.begin()
            async for _ in run.arriving():
                pass
        return job

    @contextmanager
    def _running(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        request_id: str | None,
        options: RequestOptions | None,
    ) -> Iterator[tuple[_AsyncRun, PromptRun]]:
        """Registers a run of one request under its id; aborts it on exit if it has not ended."""
        if request_id is not None and request_id in self._runs:
            raise InvalidRequestError.at("request_id", f"{request_id!r} runs already")
        run = _AsyncRun(self.llm)
        job = run.add(prompt, sampling, options, request_id)
        name = request_id or job.id
        self._runs[name] = run
        try:
            yield run, job
        finally:
            del self._runs[name]
            run.abort()
