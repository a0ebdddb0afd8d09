"""Who is measured: anything that runs a list of prompts at a batch size.

`EngineContender` drives the engine as `LLM` does (tokenized prompts in, deltas through the
detokenizer), with as many requests in flight as the batch size says, and notes when tokens came.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..cluster.backend import backend_of
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.frontend import Frontend, RequestOptions
from ..engine.llm import Run as Prompts
from ..scheduler.sampling import SamplingParams
from ..scheduler.timer import StepRecord
from .measure import Acceptance, Arrival, Load, Run, Trace


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
        flight = _Flight(engine, self._frontend, load.streams)
        # A tenant per run: what one run wrote must not be what the next one drafts from.
        options = RequestOptions(tenant=uuid.uuid4().hex)
        for index, prompt in enumerate(prompts):
            # A seed per prompt: the same text from every engine, also when sampling.
            seeded = sampling.model_copy(update={"seed": (sampling.seed or 0) + index})
            flight.add(self._frontend.text_prompt(prompt), seeded, options)
        before = engine.stats()
        start = time.perf_counter()
        flight.fly()
        wall_s = time.perf_counter() - start
        after = engine.stats()
        steps = (job.assemblers[0].speculation.num_steps for job in flight.jobs)
        return Run(
            contender=self.name,
            load=load,
            wall_s=wall_s,
            traces=flight.traces(start, self._as_text),
            num_steps=after["steps"]["num_steps"] - before["steps"]["num_steps"],
            acceptance=_acceptance(before, after, sum(steps)),
        )

    def close(self) -> None:
        engine, self._running = self._running, None
        if engine is not None:
            engine.shutdown()


class _Flight(Prompts):
    """The prompts of one run, as many at once as there are streams, and when their tokens came."""

    def __init__(self, engine: Engine, frontend: Frontend, num_streams: int) -> None:
        super().__init__(engine, frontend, num_streams)
        self._submitted_s: list[float] = []  # in the prompts' order
        self._arrivals: dict[str, list[Arrival]] = defaultdict(list)  # by the job's id

    def submit(self) -> None:
        now_s, num_waiting = time.perf_counter(), len(self._waiting)
        super().submit()
        self._submitted_s += [now_s] * (num_waiting - len(self._waiting))

    def fly(self) -> None:
        """Runs everything; raises the first error."""
        for job, delta in self.deltas():
            if job.error is not None:
                raise job.error
            if delta.token_ids:
                arrival = Arrival(time.perf_counter(), len(delta.token_ids))
                self._arrivals[job.id].append(arrival)

    def traces(self, start_s: float, as_text: bool) -> tuple[Trace, ...]:
        """One per prompt, in order, on the run's clock."""
        return tuple(
            Trace(
                prompt_index=index,
                submitted_s=submitted_s - start_s,
                arrivals=tuple(
                    Arrival(each.at_s - start_s, each.num_tokens) for each in self._arrivals[job.id]
                ),
                output=job.assemblers[0].output().text
                if as_text
                else tuple(job.assemblers[0].token_ids),
                num_prompt_tokens=len(job.prompt.token_ids),
            )
            for index, (job, submitted_s) in enumerate(
                zip(self.jobs, self._submitted_s, strict=True)
            )
        )


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
