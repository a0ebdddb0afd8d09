"""Who is measured: anything that runs a list of prompts at a batch size.

`EngineContender` drives the engine as `LLM` does (tokenized prompts in, deltas through the
detokenizer), with as many requests in flight as the batch size says, and notes when tokens came.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..cluster.backend import backend_of
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.frontend import Frontend, Prompt, RequestOptions
from ..engine.outputs import Assembler
from ..errors import WorkerError
from ..scheduler.sampling import SamplingParams
from ..scheduler.timer import StepRecord
from ..scheduler.types import Delta
from .measure import Acceptance, Arrival, Load, Run, Trace

_POLL_S = 1.0  # how often a silent engine is asked whether it lives


class Contender(Protocol):
    """One side of a comparison; stays loaded between runs."""

    name: str

    def start(self) -> None:
        """Loads, and returns once it can run.

        Raises:
            OutriderError: it cannot; says why.
        """
        ...

    def takes(self, load: Load) -> bool:
        """Whether it can run under such a load."""
        ...

    def run(self, prompts: Sequence[str], sampling: SamplingParams, load: Load) -> Run:
        """All prompts once.

        Raises:
            OutriderError: it can run no more; says why. A request that fails alone is counted.
        """
        ...

    def close(self) -> None:
        """Frees everything; `start` may follow."""
        ...


class EngineContender:
    """Outrider with one configuration, without HTTP.

    Args:
        as_text: gives texts instead of token ids, to be compared with servers' answers.
        log: is given the engine's steps.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        as_text: bool = False,
        log: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.name = name
        self._as_text, self._log = as_text, log
        self._config = config
        self._running: Engine | None = None

    def start(self) -> None:
        self._running = Engine.start(self._config, backend_of(self._config))
        self._running.record_steps(self._log)
        self._frontend = Frontend(self._config, self._running.info)

    def takes(self, load: Load) -> bool:
        return load.streams is not None

    def run(self, prompts: Sequence[str], sampling: SamplingParams, load: Load) -> Run:
        assert load.streams is not None, load
        engine = self._running
        assert engine is not None, "started"
        parsed = [self._frontend.text_prompt(prompt) for prompt in prompts]
        before = engine.stats()
        flight = _Flight(engine, self._frontend, parsed, sampling)
        start = time.perf_counter()
        flight.fly(load.streams)
        wall_s = time.perf_counter() - start
        after = engine.stats()
        return Run(
            contender=self.name,
            load=load,
            wall_s=wall_s,
            traces=flight.traces(start, self._as_text),
            num_steps=after["steps"]["num_steps"] - before["steps"]["num_steps"],
            acceptance=_acceptance(before, after, flight.num_emitting_steps),
        )

    def close(self) -> None:
        engine, self._running = self._running, None
        if engine is not None:
            engine.shutdown()


class _Flight:
    """The requests of one run, and the sink that their deltas come to."""

    def __init__(
        self,
        engine: Engine,
        frontend: Frontend,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        run = uuid.uuid4().hex
        self._requests = []
        for index, prompt in enumerate(prompts):
            # A seed per prompt: the same text from every engine, also when sampling.
            seeded = sampling.model_copy(update={"seed": (sampling.seed or 0) + index})
            # A tenant per run: what one run wrote must not be what the next one drafts from.
            options = RequestOptions(tenant=run)
            self._requests += frontend.requests(f"{run}-{index}", prompt, seeded, options)
        self._index = {request.id: index for index, request in enumerate(self._requests)}
        self._assemblers = [
            Assembler(frontend.vocabulary, request.sampling, frontend.end_of_text(request.sampling))
            for request in self._requests
        ]
        self._inbox: queue.SimpleQueue[list[Delta]] = queue.SimpleQueue()
        self._submitted_s = [0.0] * len(prompts)
        self._arrivals: list[list[Arrival]] = [[] for _ in prompts]
        self._num_steps = [0] * len(prompts)

    @property
    def num_emitting_steps(self) -> int:
        """Target steps that emitted, summed over requests."""
        return sum(self._num_steps)

    def deliver(self, deltas: list[Delta]) -> None:
        """The engine's loop thread calls this."""
        self._inbox.put(deltas)

    def fly(self, batch_size: int) -> None:
        """Keeps `batch_size` requests in flight until all are done."""
        waiting = iter(range(len(self._requests)))
        num_running = 0
        for index in waiting:
            self._submit(index)
            num_running += 1
            if num_running == batch_size:
                break
        while num_running:
            for delta in self._next():
                if self._take(delta):
                    num_running -= 1
                    following = next(waiting, None)
                    if following is not None:
                        self._submit(following)
                        num_running += 1

    def traces(self, start_s: float, as_text: bool) -> tuple[Trace, ...]:
        """One per prompt, in order, on the run's clock."""
        return tuple(
            Trace(
                prompt_index=index,
                submitted_s=self._submitted_s[index] - start_s,
                arrivals=tuple(
                    Arrival(each.at_s - start_s, each.num_tokens) for each in self._arrivals[index]
                ),
                output=self._assemblers[index].output().text
                if as_text
                else tuple(self._assemblers[index].token_ids),
                num_prompt_tokens=len(prompt.token_ids),
            )
            for index, prompt in enumerate(self._prompts)
        )

    def _submit(self, index: int) -> None:
        self._submitted_s[index] = time.perf_counter()
        self._engine.submit(self._requests[index], self)

    def _take(self, delta: Delta) -> bool:
        """Counts a delta; whether it was its request's last."""
        index = self._index[delta.request_id]
        chunk = self._assemblers[index].push(delta)
        if chunk.token_ids:
            self._arrivals[index].append(Arrival(time.perf_counter(), len(chunk.token_ids)))
        if delta.finish_reason == "error":
            raise WorkerError(delta.error or "the step of this request failed")
        if delta.usage is not None:  # of the request so far
            self._num_steps[index] = delta.usage.num_steps
        return delta.finish_reason is not None

    def _next(self) -> list[Delta]:
        while True:
            try:
                return self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                self._engine.check()


def _acceptance(before: dict[str, Any], after: dict[str, Any], num_steps: int) -> Acceptance:
    """What the drafters did between two looks at the engine's counters."""
    num_drafts = num_draft_tokens = num_accepted = 0
    per_pos: list[int] = []
    for name, now in after["drafters"].items():
        was = before["drafters"][name]
        num_drafts += now["num_gen_drafts"] - was["num_gen_drafts"]
        num_draft_tokens += now["num_gen_tokens"] - was["num_gen_tokens"]
        num_accepted += now["num_acc_tokens"] - was["num_acc_tokens"]
        for place, count in enumerate(now["acc_tokens_per_pos"]):
            old = was["acc_tokens_per_pos"]
            per_pos += [0] * (place + 1 - len(per_pos))
            per_pos[place] += count - (old[place] if place < len(old) else 0)
    return Acceptance(num_steps, num_drafts, num_draft_tokens, num_accepted, tuple(per_pos))
