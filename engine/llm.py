"""`LLM`: generation from Python, without a server.

Holds one `Engine`; prompts go in all at once, so that the scheduler can batch them, and outputs
come back in the order of the prompts.
"""

from __future__ import annotations

import queue
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ..config import EngineConfig
from ..errors import InvalidRequestError, WorkerError
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Delta, Request
from .chat.template import Message
from .checkpoints import resolved
from .frontend import Frontend, Prompt, RequestOptions
from .host import Backend, local_backend
from .outputs import Assembler, RequestOutput, prompt_table
from .preflight import preflight

if TYPE_CHECKING:
    from .engine import Engine

_POLL_S = 1.0  # interval at which a silent engine is checked


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One prompt of a run, with an assembler per completion."""

    id: str
    prompt: Prompt
    assemblers: list[Assembler]

    @property
    def finished(self) -> bool:
        return all(assembler.finished for assembler in self.assemblers)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=[assembler.output() for assembler in self.assemblers],
            finished=self.finished,
            num_cached_tokens=max(each.num_cached_tokens for each in self.assemblers),
            prompt_logprobs=prompt_table(self.assemblers[0]),
        )


class Run:
    """The requests of one call, and the sink that their deltas come to.

    It never queues more requests than the engine takes, and whatever ends it early aborts what
    still runs. Every prompt is checked before anything is queued.
    """

    def __init__(
        self,
        engine: Engine,
        frontend: Frontend,
        prompts: list[Prompt],
        sampling: Sequence[SamplingParams],
        options: RequestOptions | None,
        room: int,
    ) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[list[Delta]] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._live: dict[str, tuple[PromptRun, Assembler]] = {}
        self._room = room
        self.jobs: list[PromptRun] = []
        shown_ids = frozenset() if options is None else options.shown_ids
        for prompt, settings in zip(prompts, sampling, strict=True):
            requests = frontend.requests(uuid.uuid4().hex, prompt, settings, options)
            job = PromptRun(requests[0].id, prompt, [])
            self.jobs.append(job)
            self._waiting.extend(requests)
            for index, request in enumerate(requests):
                assembler = Assembler(
                    frontend.vocabulary,
                    settings,
                    frontend.end_of_text(settings),
                    index,
                    prompt.token_ids,
                    shown_ids=shown_ids,
                )
                job.assemblers.append(assembler)
                self._live[request.id] = (job, assembler)

    def deliver(self, deltas: list[Delta]) -> None:
        """Called in the engine's thread."""
        self._inbox.put(deltas)

    def deltas(self) -> Iterator[tuple[PromptRun, Delta]]:
        """Runs everything; gives each delta once it has been taken into its job."""
        running: set[str] = set()
        try:
            while self._waiting or running:
                count = min(len(self._waiting), self._room - len(running))
                if count > 0:
                    requests = [self._waiting.popleft() for _ in range(count)]
                    self._engine.submit_all(requests, self)
                    running.update([request.id for request in requests])
                try:
                    deltas = self._inbox.get(timeout=_POLL_S)
                except queue.Empty:
                    self._engine.check()
                    continue
                for delta in deltas:
                    job, assembler = self._live[delta.request_id]
                    was_finished = assembler.finished
                    assembler.push(delta)
                    if delta.finish_reason is not None:
                        running.discard(delta.request_id)
                    elif assembler.finished and not was_finished:
                        self._engine.abort(delta.request_id)  # a stop string; one delta follows
                    if delta.finish_reason == "error":
                        raise WorkerError(delta.error or "the step of this request failed")
                    yield job, delta
        finally:
            for request_id in running:
                self._engine.abort(request_id)

    def outputs(self) -> Iterator[RequestOutput]:
        """The first job's output after every delta that changed it."""
        num_sent, done = 0, False
        for job, _ in self.deltas():
            output = job.output()
            num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
            if num_tokens > num_sent or (output.finished and not done):
                num_sent, done = num_tokens, output.finished
                yield output

    def finish(self, *, use_tqdm: bool) -> list[RequestOutput]:
        """All jobs' outputs; a bar shows prompts, tokens per second and accepted tokens."""
        num_tokens = num_accepted = num_steps = 0
        with tqdm(
            total=len(self.jobs), desc="Prompts", dynamic_ncols=True, disable=not use_tqdm
        ) as bar:
            for job, delta in self.deltas():
                num_tokens += len(delta.token_ids)
                num_accepted += delta.num_accepted
                num_steps += bool(delta.token_ids)
                if use_tqdm and delta.finish_reason is not None and job.finished:
                    elapsed_s = max(1e-9, bar.format_dict["elapsed"])
                    bar.set_postfix_str(
                        f"{num_tokens / elapsed_s:.1f} tokens/s, "
                        f"{num_accepted / max(1, num_steps):.2f} accepted/step",
                        refresh=False,
                    )
                    bar.update(1)
        return [job.output() for job in self.jobs]


PromptLike = str | Sequence[int] | NDArray[np.integer] | dict[str, Any]


class LLM:
    """A model with its drafter, ready to generate.

    Args:
        model: folder of the checkpoint.
        speculative_config: as in the configuration file; None: no speculation.
        tensor_parallel_size: ranks of the target.
        executor: "ray" (an actor per rank) or "local" (ranks as threads of this process).
        options: any other key of `EngineConfig`.

    Raises:
        ConfigError, CheckpointError, ResourcesError: what is wrong, by field.
    """

    # Which backend a configuration runs on; `outrider.LLM` has them all.
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
        """From a checked configuration."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        from .engine import Engine

        self._engine: Engine | None = None
        self._backend: Backend | None = None
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
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt; one output per prompt, in order.

        Args:
            prompts: a text, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a
                list of those. An array of integers is a list of token ids, its rows are if it has
                two dimensions.
            sampling_params: one for all, or one per prompt.

        Raises:
            InvalidRequestError: a prompt or a setting is wrong; nothing has run then.
            WorkerError: a step failed. EngineDeadError: the engine is gone.
        """
        return self._run(_as_list(prompts), sampling_params, options).finish(use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> Iterator[RequestOutput]:
        """The output so far, after every step; closing the iterator aborts the request."""
        return self._run([prompt], sampling_params, options).outputs()

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
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several; `tools` are rendered by the template."""
        if isinstance(messages, (str, dict)):
            raise InvalidRequestError.at(
                "messages", f"a list of messages, or of such lists, got {messages!r}"
            )
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if single else messages
        prompts: list[PromptLike] = []
        for conversation in conversations:
            prompt = self.frontend.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
                tools=tools,
            )
            prompts.append({"prompt": prompt.text, "prompt_token_ids": prompt.token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stats(self) -> dict[str, Any]:
        """Counts and times of the engine and its drafters."""
        return self._alive().stats()

    def close(self) -> None:
        """Ends the engine, and Ray where this object started it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _alive(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM has been closed")
        return self._engine

    def _run(
        self,
        prompts: list[PromptLike],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions | None,
    ) -> Run:
        """Everything checked, nothing queued yet."""
        if sampling is None:
            sampling = self.frontend.with_defaults(SamplingParams())
        return Run(
            self._alive(),
            self.frontend,
            [self._prompt(prompt) for prompt in prompts],
            _per_prompt(sampling, len(prompts)),
            options,
            self.config.max_queued_requests,
        )

    def _prompt(self, prompt: PromptLike) -> Prompt:
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
            return self._prompt(prompt["prompt"])
        if isinstance(prompt, np.ndarray):
            if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
                raise InvalidRequestError.at(
                    "prompt",
                    "an array of token ids has one dimension of integers; got "
                    f"{prompt.dtype} of shape {prompt.shape}",
                )
            return self.frontend.token_prompt(prompt.tolist())
        return self.frontend.token_prompt(prompt)


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise InvalidRequestError.at(
            "prompts", f"a text, a list of token ids, a dict, or a list of those, got {prompts!r}"
        )
    if isinstance(prompts, np.ndarray):  # token ids of one prompt or a row per prompt, or texts
        texts = prompts.dtype.kind in "UO" and all(isinstance(item, str) for item in prompts.flat)
        allowed = (1,) if texts else (1, 2)
        if prompts.ndim not in allowed or not (texts or np.issubdtype(prompts.dtype, np.integer)):
            raise InvalidRequestError.at(
                "prompts",
                "an array has integers in one or two dimensions, or texts in one; got "
                f"{prompts.dtype} of shape {prompts.shape}",
            )
        rows: list[Any] = prompts.tolist()
        return rows if texts or prompts.ndim > 1 else [rows]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if not isinstance(sampling, (list, tuple)) or not all(
        isinstance(one, SamplingParams) for one in sampling
    ):
        raise InvalidRequestError.at(
            "sampling_params", f"one SamplingParams, or one per prompt, got {sampling!r}"
        )
    if len(sampling) != num_prompts:
        raise InvalidRequestError.at(
            "sampling_params", f"{len(sampling)} for {num_prompts} prompts"
        )
    return list(sampling)
