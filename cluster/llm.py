"""`LLM`: generation from Python, without a server.

Holds one `Engine`; prompts go in all at once, so that the scheduler can batch them, and outputs
come back in the order of the prompts.
"""

from __future__ import annotations

import queue
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import InvalidRequestError, WorkerError
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Delta, Request
from .frontend import Frontend, Message, Prompt, RequestOptions
from .outputs import Assembler, RequestOutput

if TYPE_CHECKING:
    from .engine import Engine

PromptLike = str | Sequence[int] | dict[str, Any]
_POLL_S = 1.0  # how often a silent engine is asked whether it lives


class LLM:
    """A model with its drafter, ready to generate.

    Args:
        model: folder of the checkpoint.
        speculative_config: as in the configuration file; None: no speculation.
        tensor_parallel_size: ranks of the target.
        executor: "ray" (an actor per rank) or "local" (in this process, one rank).
        options: any other key of `EngineConfig`.

    Raises:
        ConfigError, CheckpointError, ResourcesError: what is wrong, by field.
    """

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
    def from_config(cls, config: EngineConfig) -> LLM:
        """From a checked configuration."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        from .engine import Engine

        self._engine: Engine | None = None
        self._owns_ray = config.executor == "ray" and _start_ray()
        try:
            self._engine = Engine.start(config)
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
                list of those.
            sampling_params: one for all, or one per prompt.

        Raises:
            InvalidRequestError: a prompt or a setting is wrong; nothing has run then.
            WorkerError: a step failed. EngineDeadError: the engine is gone.
        """
        run = self._run(_as_list(prompts), sampling_params, options)
        with _Progress(len(run.jobs), enabled=use_tqdm) as progress:
            for job, delta in run.deltas():
                progress.count(delta, finished=job.finished)
        return [job.output() for job in run.jobs]

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
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several."""
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if single else messages
        prompts: list[PromptLike] = []
        for conversation in conversations:
            prompt = self.frontend.chat_prompt(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
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
        if self._owns_ray:
            import ray

            self._owns_ray = False
            ray.shutdown()

    def __enter__(self) -> LLM:
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
    ) -> _Run:
        """Everything checked, nothing queued yet."""
        run = _Run(
            self._alive(),
            self.frontend,
            [self._prompt(prompt) for prompt in prompts],
            _per_prompt(sampling, len(prompts)),
            self.config.max_queued_requests,
        )
        run.prepare(options)
        return run

    def _prompt(self, prompt: PromptLike) -> Prompt:
        if isinstance(prompt, str):
            return self.frontend.text_prompt(prompt)
        if isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidRequestError(
                    f"prompt: a dict has `prompt` or `prompt_token_ids`, got {sorted(prompt)}",
                    field="prompt",
                )
            if "prompt_token_ids" in prompt:
                parsed = self.frontend.token_prompt(prompt["prompt_token_ids"], "prompt_token_ids")
                return Prompt(parsed.token_ids, prompt.get("prompt"))
            return self._prompt(prompt["prompt"])
        return self.frontend.token_prompt(prompt)


class _Job:
    """One prompt of a run, with an assembler per completion."""

    def __init__(
        self, frontend: Frontend, prompt: Prompt, sampling: SamplingParams, requests: list[Request]
    ) -> None:
        self.id = requests[0].id
        self.prompt = prompt
        self.assemblers = [
            Assembler(frontend.vocabulary, sampling, request.eos_token_ids, index)
            for index, request in enumerate(requests)
        ]

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
        )


class _Run:
    """The requests of one call, and the sink that their deltas come to."""

    def __init__(
        self,
        engine: Engine,
        frontend: Frontend,
        prompts: list[Prompt],
        sampling: Sequence[SamplingParams],
        room: int,
    ) -> None:
        self._engine = engine
        self._frontend = frontend
        self._prompts = prompts
        self._sampling = sampling
        self._inbox: queue.SimpleQueue[list[Delta]] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._live: dict[str, tuple[_Job, Assembler]] = {}
        self._room = room
        self.jobs: list[_Job] = []

    def deliver(self, deltas: list[Delta]) -> None:
        """The engine's loop thread calls this."""
        self._inbox.put(deltas)

    def prepare(self, options: RequestOptions | None) -> None:
        """Checks every prompt before anything is queued."""
        for prompt, sampling in zip(self._prompts, self._sampling, strict=True):
            request_id = uuid.uuid4().hex
            requests = self._frontend.requests(request_id, prompt, sampling, options)
            job = _Job(self._frontend, prompt, sampling, requests)
            self.jobs.append(job)
            self._waiting.extend(requests)
            for request, assembler in zip(requests, job.assemblers, strict=True):
                self._live[request.id] = (job, assembler)

    def deltas(self) -> Iterator[tuple[_Job, Delta]]:
        """Runs everything; gives each delta once it has been taken into its job."""
        running: set[str] = set()
        try:
            while self._waiting or running:
                while self._waiting and len(running) < self._room:
                    request = self._waiting.popleft()
                    self._engine.submit(request, self)
                    running.add(request.id)
                for delta in self._next():
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

    def _next(self) -> list[Delta]:
        while True:
            try:
                return self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                self._engine.check()


class _Progress:
    """A bar over prompts, with tokens per second and accepted draft tokens per step."""

    def __init__(self, num_prompts: int, *, enabled: bool) -> None:
        self._bar: Any = None
        self._done: set[str] = set()
        self._num_tokens = self._num_steps = self._num_accepted = 0
        if enabled:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=num_prompts, desc="Prompts", dynamic_ncols=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def count(self, delta: Delta, *, finished: bool) -> None:
        """One delta; `finished`: its prompt has all its completions."""
        if self._bar is None:
            return
        self._num_tokens += len(delta.token_ids)
        self._num_accepted += delta.num_accepted
        self._num_steps += bool(delta.token_ids)
        if not finished or delta.finish_reason is None:
            return
        elapsed_s = max(1e-9, self._bar.format_dict["elapsed"])
        self._bar.set_postfix_str(
            f"{self._num_tokens / elapsed_s:.1f} tokens/s, "
            f"{self._num_accepted / max(1, self._num_steps):.2f} accepted/step",
            refresh=False,
        )
        self._bar.update(1)


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def _per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling is None:
        sampling = SamplingParams()
    if isinstance(sampling, SamplingParams):
        return [sampling] * num_prompts
    if len(sampling) != num_prompts:
        raise InvalidRequestError(
            f"sampling_params: {len(sampling)} for {num_prompts} prompts", field="sampling_params"
        )
    return list(sampling)


def _start_ray() -> bool:
    """Starts or joins Ray; whether it was this call that did it."""
    import ray

    if ray.is_initialized():
        return False
    ray.init(include_dashboard=False, log_to_driver=False)
    return True
