"""`LLM`: generation from Python, without a server.

An `LLM` owns one `Engine`. Prompts are queued all at once, so that the scheduler can batch them;
outputs are returned in the order of the prompts.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from tqdm.auto import tqdm

from ..config import EngineConfig
from ..errors import (
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    OutriderError,
    OverloadedError,
    WorkerError,
    shown_value,
)
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Delta, FloatArray, Request
from .chat.template import Message
from .checkpoints import resolved
from .frontend import (
    POOLED,
    Frontend,
    LoRARequest,
    Prompt,
    PromptLike,
    RequestOptions,
    as_array,
    paired,
    per_prompt,
    prompt_list,
)
from .host import Backend, local_backend
from .metrics import Metric, engine_metrics
from .outputs import Assembler, Embedding, PooledOutput, RequestOutput, Score, prompt_table
from .preflight import preflight
from .upkeep import Upkeep
from .weights import SavedStates

if TYPE_CHECKING:
    from .engine import Engine

_POLL_S = 1.0  # without deltas, after which the engine is checked
_BUSY_S = 0.02  # pause before a queue that others have filled is retried

OnError = Literal["raise", "return"]
AdapterWish = LoRARequest | str | None


@dataclass(slots=True)
class PromptRun:
    """One prompt of a run, with an assembler per completion."""

    id: str
    prompt: Prompt
    assemblers: list[Assembler]
    error: OutriderError | None = None  # first error of its completions
    num_open: int = 0  # completions that have not ended
    _num_sent: int = 0
    _is_done: bool = False

    @property
    def finished(self) -> bool:
        return all(assembler.finished for assembler in self.assemblers)

    @property
    def vector(self) -> FloatArray:  # [width]
        """The embedding or score of a finished job; raises `WorkerError` if it was aborted."""
        found = self.assemblers[0].pooled
        if found is None:
            raise WorkerError(f"the request {self.id!r} was aborted")
        return found

    def pooled(self, found: Embedding | Score) -> PooledOutput:
        """Returns the output of a job for an embedding or a score."""
        cached = self.assemblers[0].num_cached_tokens
        return PooledOutput(self.id, found, list(self.prompt.token_ids), cached)

    def output(self, index: int | None = None) -> RequestOutput:
        """Returns the output so far; `index` prefixes the error if there are several prompts."""
        known = self.assemblers[:1]  # a refused prompt has none
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=[assembler.output() for assembler in self.assemblers],
            finished=self.finished,
            num_cached_tokens=max((each.num_cached_tokens for each in self.assemblers), default=0),
            prompt_logprobs=prompt_table(known[0]) if known else None,
            error=None if self.error is None else _of_prompt(self.error, index).message,
        )

    def news(self) -> RequestOutput | None:
        """Returns the output so far, or None if unchanged since the last call; raises its error."""
        if self.error is not None:
            raise self.error
        num_tokens = sum(len(assembler.token_ids) for assembler in self.assemblers)
        if num_tokens == self._num_sent and self._is_done == self.finished:
            return None
        self._num_sent, self._is_done = num_tokens, self.finished
        return self.output()


class Run:
    """The requests of one or more calls, and the sink for their deltas.

    A run never queues more requests than the engine accepts. If it ends early, it aborts the
    requests that are still running. A failed request fails only its own prompt (`PromptRun.error`).
    """

    def __init__(self, engine: Engine, frontend: Frontend, room: int) -> None:
        self._engine, self._frontend = engine, frontend
        self._inbox: queue.SimpleQueue[list[Delta]] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: set[str] = set()
        self._live: dict[str, tuple[PromptRun, Assembler]] = {}
        self._room = room
        self.jobs: list[PromptRun] = []
        self._num_ended = 0  # jobs

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions | None,
        request_id: str | None = None,
    ) -> PromptRun:
        """Adds a prompt; raises `InvalidRequestError` if the prompt or a setting is invalid."""
        request_id = request_id or uuid.uuid4().hex
        requests = self._frontend.requests(request_id, prompt, sampling, options)
        job = PromptRun(requests[0].id, prompt, [], num_open=len(requests))
        shown_ids = frozenset[int]() if options is None else options.shown_ids
        self.jobs.append(job)
        self._waiting.extend(requests)
        for index, request in enumerate(requests):
            assembler = self._frontend.assembler(prompt, sampling, index, shown_ids)
            job.assemblers.append(assembler)
            self._live[request.id] = (job, assembler)
        return job

    def refuse(self, prompt: Prompt, error: OutriderError) -> None:
        """Adds a prompt that failed its checks, with its error."""
        self.jobs.append(PromptRun(uuid.uuid4().hex, prompt, [], error))
        self._num_ended += 1

    def deliver(self, deltas: list[Delta]) -> None:
        """Receives deltas; called in the engine's thread."""
        self._inbox.put(deltas)

    def submit(self) -> None:
        """Queues as many requests as the engine has room for."""
        count = min(len(self._waiting), self._room - len(self._running))
        if count <= 0:
            return
        requests = [self._waiting.popleft() for _ in range(count)]
        try:
            self._engine.submit_all(requests, self)
        except OverloadedError:  # others have filled the queue
            self._waiting.extendleft(reversed(requests))
            if not self._running:
                time.sleep(_BUSY_S)
        except InvalidRequestError:  # one request is invalid, so none was queued
            for request in requests:
                try:
                    self._engine.submit(request, self)
                except InvalidRequestError as error:
                    self._fail(request.id, error)
                else:
                    self._running.add(request.id)
        else:
            self._running.update([request.id for request in requests])

    def deltas(self) -> Iterator[tuple[PromptRun, Delta]]:
        """Runs all requests; yields each delta after applying it to its job."""
        try:
            while self._waiting or self._running:
                if self._waiting:
                    self.submit()
                    if not self._running:  # all of them were refused
                        continue
                try:
                    deltas = self._inbox.get(timeout=_POLL_S)
                except queue.Empty:
                    self._engine.check()
                    continue
                for delta in deltas:
                    yield self.take(delta), delta
        finally:
            self.abort()

    def take(self, delta: Delta) -> PromptRun:
        """Applies a delta to its job, which is returned."""
        job, assembler = self._live[delta.request_id]
        was_finished = assembler.finished
        assembler.push(delta)
        if delta.finish_reason is not None:
            self._running.discard(delta.request_id)
            self._end(job)
        elif assembler.finished and not was_finished:
            self._engine.abort(delta.request_id)  # a stop string was found; one more delta follows
        if delta.finish_reason == "error":
            job.error = job.error or delta.failure
        return job

    def abort(self) -> None:
        """Aborts running requests and drops waiting ones."""
        self._waiting.clear()
        for request_id in self._running:
            self._engine.abort(request_id)

    def outputs(self) -> Iterator[RequestOutput]:
        """Yields the first job's output after every delta that changed it; raises its error."""
        for job, _ in self.deltas():
            if (output := job.news()) is not None:
                yield output

    def finish(self, *, use_tqdm: bool) -> EngineDeadError | None:
        """Runs all requests; a progress bar shows prompts, tokens per second and accepted tokens.

        Errors are stored in the jobs. If the engine dies, the error is returned and stored in all
        unfinished jobs.
        """
        num_tokens = num_accepted = num_steps = 0
        lost: EngineDeadError | None = None
        with tqdm(
            total=len(self.jobs), desc="Prompts", dynamic_ncols=True, disable=not use_tqdm
        ) as bar:
            try:
                for _, delta in self.deltas():
                    num_tokens += len(delta.token_ids)
                    num_accepted += delta.num_accepted
                    num_steps += bool(delta.token_ids)
                    if use_tqdm and self._num_ended > bar.n:
                        elapsed_s = max(1e-9, bar.format_dict["elapsed"])
                        bar.set_postfix_str(
                            f"{num_tokens / elapsed_s:.1f} tokens/s, "
                            f"{num_accepted / max(1, num_steps):.2f} accepted/step",
                            refresh=False,
                        )
                        bar.update(self._num_ended - bar.n)
            except EngineDeadError as error:
                lost = error
                self._lose(error)
            bar.update(self._num_ended - bar.n)
        return lost

    def _lose(self, error: EngineDeadError) -> None:
        """Applies the deltas that have arrived, and fails all unfinished jobs."""
        while not self._inbox.empty():
            for delta in self._inbox.get():
                self.take(delta)
        for request_id, (_, assembler) in self._live.items():
            if not assembler.finished:
                self._fail(request_id, error)

    def _fail(self, request_id: str, error: OutriderError) -> None:
        job, assembler = self._live[request_id]
        job.error = job.error or error
        assembler.finish_reason = "error"
        self._end(job)

    def _end(self, job: PromptRun) -> None:
        """Counts the end of one of the job's completions."""
        job.num_open -= 1
        self._num_ended += job.num_open == 0


def _finished(runs: Sequence[tuple[Run, OnError]], *, use_tqdm: bool) -> list[RequestOutput]:
    """Returns the outputs of all runs in order; raises the first error of runs with "raise"."""
    jobs, failed = list[PromptRun](), list[int]()
    lost: EngineDeadError | None = None
    try:
        for run, on_error in runs:
            error = run.finish(use_tqdm=use_tqdm)
            if on_error == "raise":
                lost = lost or error
                wrong = (index for index, job in enumerate(run.jobs) if job.error is not None)
                failed += [len(jobs) + index for index in wrong]
            jobs += run.jobs
    finally:
        for run, _ in runs:
            run.abort()
    outputs = [job.output(index if len(jobs) > 1 else None) for index, job in enumerate(jobs)]
    if lost is not None:
        lost.outputs = outputs
        raise lost
    if failed:
        reason = str(outputs[failed[0]].error)
        raise GenerationError.of(reason, len(failed), outputs)
    return outputs


class LLM(Upkeep):
    """A model with its drafter, ready to generate.

    Args:
        model: folder of the checkpoint.
        speculative_config: as in the configuration file; None: no speculation.
        tensor_parallel_size: ranks of the target.
        executor: "ray" (an actor per rank) or "local" (ranks as threads of this process).
        options: any other key of `EngineConfig`.

    Raises:
        ConfigError, CheckpointError, ResourcesError: the message names the field.
    """

    # Chooses the backend of a configuration; `outrider.LLM` supports all of them.
    _backend_of: Callable[[EngineConfig], Backend] = staticmethod(local_backend)

    def __init__(
        self,
        model: str,
        *,
        speculative_config: dict[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        executor: str = "ray",
        **options: Any,
    ) -> None:
        config = EngineConfig.load(
            {
                **options,
                "model": str(model),
                "speculative_config": speculative_config,
                "tensor_parallel_size": tensor_parallel_size,
                "executor": executor,
            }
        )
        self._start(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Creates an instance from a validated configuration."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        from .engine import Engine

        self._engine: Engine | None = None
        self._backend: Backend | None = None
        self._enqueued: list[tuple[Run, OnError]] = []
        self._states = SavedStates()
        self._adding = threading.Lock()
        config = resolved(config)
        preflight(config)
        backend = self._backend_of(config)
        backend.start(config)
        self._backend = backend
        try:
            self._engine = Engine.start(config, backend)
            self.frontend = Frontend(config, self._engine.info)
        except BaseException:
            self.close()
            raise
        self.config = config

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: AdapterWish | Sequence[AdapterWish] = None,
        priority: int | Sequence[int] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Completes every prompt; returns one output per prompt, in order.

        Args:
            prompts: a text, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a
                list of those. A one-dimensional array of integers is a list of token ids; a
                two-dimensional array has one prompt per row.
            sampling_params: one for all prompts, or one per prompt.
            lora_request: one of `lora_modules` for all prompts, or one per prompt; None: no
                adapter.
            priority: one for all prompts, or one per prompt, as in vLLM; lower runs first. None:
                the `priority` of `options`.
            options: one for all prompts, or one per prompt, for example with a `prediction` for
                each.
            on_error: with "return", a prompt that is refused or fails has its message in
                `RequestOutput.error`, and the other prompts run.

        Raises:
            InvalidRequestError: a prompt or a setting is invalid; nothing has run. With several
                prompts, the message begins with the prompt's index.
            GenerationError: a prompt failed while it ran; its `outputs` are those of all prompts.
            EngineDeadError: the engine is down. If it died during the call and `on_error` is
                "raise", its `outputs` are those of all prompts.
        """
        given = prompt_list(prompts)
        run = self._run(given, sampling_params, options, on_error, lora_request, priority)
        return _finished([(run, on_error)], use_tqdm=use_tqdm)

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: AdapterWish | Sequence[AdapterWish] = None,
        priority: int | Sequence[int] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        on_error: OnError = "raise",
    ) -> list[str]:
        """Queues prompts like `generate` and returns request ids; see `wait_for_completion`."""
        given = prompt_list(prompts)
        run = self._run(given, sampling_params, options, on_error, lora_request, priority)
        run.submit()
        self._enqueued.append((run, on_error))
        return [job.id for job in run.jobs]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Returns the outputs of all enqueued prompts, in order; raises as `generate`."""
        runs, self._enqueued = self._enqueued, []
        return _finished(runs, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: AdapterWish = None,
        options: RequestOptions | None = None,
    ) -> Iterator[RequestOutput]:
        """Yields the output so far after every step; closing the iterator aborts the request."""
        run = self._run([prompt], sampling_params, options, "raise", lora_request)
        return run.outputs()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        lora_request: AdapterWish | Sequence[AdapterWish] = None,
        priority: int | Sequence[int] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them; the template renders `tools`."""
        if isinstance(messages, (str, dict)) or not isinstance(messages, Sequence):
            raise InvalidRequestError.at(
                "messages", f"a list of messages, or of such lists, got {messages!r}"
            )
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if single else messages
        prompts: list[PromptLike | InvalidRequestError] = []
        for index, conversation in enumerate(conversations):
            try:
                prompt = self.frontend.chat_prompt(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    template_kwargs=template_kwargs,
                    tools=tools,
                )
            except InvalidRequestError as error:
                if on_error == "raise":
                    raise _of_prompt(error, index if len(conversations) > 1 else None) from None
                prompts.append(error)
            else:
                prompts.append(prompt)
        run = self._run(prompts, sampling_params, options, on_error, lora_request, priority)
        return _finished([(run, on_error)], use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: AdapterWish | Sequence[AdapterWish] = None,
        use_tqdm: bool = True,
    ) -> list[PooledOutput]:
        """Returns the embedding of every prompt, in order; needs a checkpoint for embeddings.

        Args:
            dimensions: size to which a Matryoshka model's embeddings are cut.
            truncate_prompt_tokens: keeps only this many of a prompt's last tokens; -1: as many as
                fit the context.

        Raises:
            InvalidRequestError: the model gives no embeddings, or a prompt or setting is invalid.
            GenerationError, EngineDeadError: as `generate`.
        """
        cut = self.frontend.cut_of(dimensions)
        given = [self.text_to_embed(each, truncate_prompt_tokens) for each in prompt_list(prompts)]
        jobs = self._pool(given, lora_request, use_tqdm=use_tqdm)
        return [job.pooled(Embedding(cut(job.vector).tolist())) for job in jobs]

    def text_to_embed(self, prompt: PromptLike, truncate_prompt_tokens: int | None) -> Prompt:
        """Returns the truncated tokens of a prompt for `embed`; raises `InvalidRequestError`."""
        limit = truncate_prompt_tokens
        if limit is not None and (type(limit) is not int or limit < -1 or limit == 0):
            raise InvalidRequestError.at(
                "truncate_prompt_tokens", f"a number above 0, or -1 (got {limit!r})"
            )
        return self.frontend.truncated(self.prompt(prompt), limit, POOLED)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        lora_request: AdapterWish | Sequence[AdapterWish] = None,
        use_tqdm: bool = True,
    ) -> list[PooledOutput]:
        """Returns the score of every document for its query; needs a checkpoint for scores.

        Args:
            queries: one for all documents, or one per document.
            instruction: the task, if the model's form of a pair includes one.

        Raises:
            InvalidRequestError, GenerationError, EngineDeadError: as `embed`.
        """
        pairs = paired(queries, documents)
        prompts = [self.frontend.pair_prompt(*pair, instruction) for pair in pairs]
        jobs = self._pool(prompts, lora_request, use_tqdm=use_tqdm)
        return [job.pooled(Score(float(job.vector[0]))) for job in jobs]

    def _pool(
        self,
        prompts: Sequence[Prompt],
        lora_request: AdapterWish | Sequence[AdapterWish],
        *,
        use_tqdm: bool,
    ) -> list[PromptRun]:
        """Runs requests for embeddings or scores and returns their jobs."""
        run = self._run(prompts, POOLED, RequestOptions(pools=True), "raise", lora_request)
        _finished([(run, "raise")], use_tqdm=use_tqdm)
        return run.jobs

    def get_tokenizer(self) -> Any:
        """Returns the target's transformers tokenizer."""
        return self.frontend.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes; running requests keep theirs. Always returns True, as in vLLM."""
        self.engine.reset_prefix_cache()
        return True

    def stats(self) -> dict[str, Any]:
        """Returns counts and times of the engine and its drafters."""
        return self.engine.stats()

    def get_metrics(self) -> list[Metric]:
        """Returns metrics as vLLM does; their classes are in `outrider.engine.metrics`."""
        return engine_metrics(self.stats(), self.frontend.model_name)

    def close(self) -> None:
        """Shuts down the engine, and Ray if this object started it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.stop()
        self._states.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The running engine; raises `RuntimeError` after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM has been closed")
        return self._engine

    def _run(
        self,
        prompts: Sequence[PromptLike | InvalidRequestError],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions | Sequence[RequestOptions] | None,
        on_error: OnError,
        lora_request: AdapterWish | Sequence[AdapterWish],
        priority: int | Sequence[int] | None = None,
    ) -> Run:
        """Checks all prompts and settings; returns a run with nothing queued yet."""
        if not isinstance(on_error, str) or on_error not in get_args(OnError):
            shown = shown_value(on_error)
            raise InvalidRequestError.at("on_error", f"'raise' or 'return', got {shown}")
        if sampling is None:
            sampling = self.frontend.with_defaults(SamplingParams())
        self.engine.check()
        run = Run(self.engine, self.frontend, self.config.max_queued_requests)
        settings = per_prompt("sampling_params", SamplingParams, sampling, len(prompts))
        options = RequestOptions() if options is None else options
        wishes = per_prompt("options", RequestOptions, options, len(prompts))
        wishes = self._adapted(wishes, lora_request)
        if priority is not None:
            ranks = per_prompt("priority", int, priority, len(prompts))
            wishes = [replace(each, priority=rank) for each, rank in zip(wishes, ranks)]
        for index, given in enumerate(prompts):
            prompt = Prompt(())
            try:
                if isinstance(given, InvalidRequestError):
                    raise given
                prompt = self.prompt(given)
                run.add(prompt, settings[index], wishes[index])
            except InvalidRequestError as error:
                if on_error == "raise":
                    raise _of_prompt(error, index if len(prompts) > 1 else None) from None
                run.refuse(prompt, error)
        return run

    def adapter_of(self, wish: AdapterWish) -> str:
        """Returns an adapter's name; with `enable_lora`, loads a folder that is not served yet.

        Raises:
            InvalidRequestError: the adapter is not served.
            CheckpointError: the folder does not hold an adapter of the target.
        """
        frontend, config = self.frontend, self.config
        if isinstance(wish, LoRARequest) and wish.lora_path and config.enable_lora:
            with self._adding:
                if wish.lora_name not in (config.model_name, *frontend.adapters):
                    self._add_adapter(wish.lora_name, wish.lora_path)
        return frontend.adapter_of(wish)

    def _adapted(
        self, options: list[RequestOptions], wish: AdapterWish | Sequence[AdapterWish]
    ) -> list[RequestOptions]:
        """Returns each prompt's options with the requested adapter."""
        if wish is None:
            return options
        wishes = wish if isinstance(wish, (list, tuple)) else [wish] * len(options)
        if len(wishes) != len(options):
            raise InvalidRequestError.at(
                "lora_request", f"{len(wishes)} for {len(options)} prompts"
            )
        names = map(self.adapter_of, wishes)
        return [replace(each, adapter=name) for each, name in zip(options, names, strict=True)]

    def prompt(self, prompt: PromptLike) -> Prompt:
        """Returns the tokens of a prompt in any form; raises `InvalidRequestError`."""
        prompt = as_array(prompt)
        if isinstance(prompt, Prompt):  # users can create one, so it is checked as well
            return Prompt(self.frontend.token_prompt(prompt.token_ids).token_ids, prompt.text)
        if isinstance(prompt, str):
            return self.frontend.text_prompt(prompt)
        if isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidRequestError.at(
                    "prompt", f"a dict has `prompt` or `prompt_token_ids`, got {sorted(prompt)}"
                )
            if "prompt_token_ids" in prompt:
                parsed = self.frontend.token_prompt(prompt["prompt_token_ids"], "prompt_token_ids")
                return Prompt(parsed.token_ids, prompt.get("prompt"))
            return self.prompt(prompt["prompt"])
        if isinstance(prompt, np.ndarray):
            if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
                raise InvalidRequestError.at(
                    "prompt",
                    "an array of token ids has one dimension of integers; got "
                    f"{prompt.dtype} of shape {prompt.shape}",
                )
            return self.frontend.token_prompt(prompt.tolist())
        return self.frontend.token_prompt(prompt)


def _of_prompt(error: OutriderError, index: int | None) -> OutriderError:
    """Prefixes an error with the index of its prompt; None: there is only one prompt."""
    if index is None:
        return error
    return type(error)(f"prompts[{index}]: {error.message}", field=error.field)
