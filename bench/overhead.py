"""What a step costs outside the model's forward, against the budget of the design.

    python -m outrider.bench.overhead [--model FOLDER] [--tp 1 2] [--batch 1 8 32] ...

From differences of the engine's own `StepTimes` over a window in which every request of the batch
decodes; of several windows the quietest. The budget: 0.5 ms and 20 us per sequence on one core,
with one rank. `--clock thread` counts the loop thread's time on a CPU, which other processes
disturb less than the wall's; only for one rank in this process, which runs in that thread.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from ..cluster.backend import backend_of
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.frontend import Frontend
from ..errors import OutriderError
from ..scheduler.sampling import SamplingParams
from ..scheduler.types import Delta
from .drafters import MODELS
from .suite.workloads import load_prompts

DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"decoding_type": "NGram", "max_draft_len": 4},
}
_PROMPT_CHARS = 80  # short prompts: one chunk each, and the window begins soon
_VERBS = ("schedule", "propose", "channel", "commit", "observe")


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds per step, averaged over a window."""

    num_steps: int
    tokens_per_step: float
    forward_ms: float
    schedule_ms: float
    propose_ms: float
    channel_ms: float  # of the target's answer, what was not the forward
    commit_ms: float
    observe_ms: float

    @property
    def outside_ms(self) -> float:
        """Everything but the forward."""
        return (
            self.schedule_ms + self.propose_ms + self.channel_ms + self.commit_ms + self.observe_ms
        )


def budget_ms(batch_size: int) -> float:
    """What the design allows a step outside the forward."""
    return 0.5 + 0.02 * batch_size


def between(before: dict[str, Any], after: dict[str, Any]) -> Overhead:
    """The average step between two readings of `stats()["steps"]`."""
    passed = {name: after[name] - before[name] for name in after}
    steps = passed["num_steps"]
    assert steps > 0, "no step was made in the window"
    return Overhead(
        num_steps=steps,
        tokens_per_step=passed["num_tokens"] / steps,
        forward_ms=passed["forward_ms"] / steps,
        schedule_ms=passed["schedule_ms"] / steps,
        propose_ms=passed["propose_ms"] / steps,
        channel_ms=(passed["verify_ms"] - passed["forward_ms"]) / steps,
        commit_ms=passed["commit_ms"] / steps,
        observe_ms=passed["observe_ms"] / steps,
    )


class _Window:
    """A sink that reads the clocks once all requests decode, and again when the first ends.

    It does so in the loop's thread, between two steps, so that the readings are whole steps.
    """

    def __init__(self, engine: Engine, batch_size: int) -> None:
        self._engine = engine
        self._batch_size = batch_size
        self._started: set[str] = set()
        self._num_ended = 0
        self._error: str | None = None
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        self._ended = threading.Event()

    def deliver(self, deltas: list[Delta]) -> None:
        """The engine's loop thread calls this after every step."""
        for delta in deltas:
            self._started.add(delta.request_id)
            self._error = self._error or delta.error
            if delta.finish_reason is not None:
                self._after = self._after or self._engine.stats()["steps"]
                self._num_ended += 1
        if self._before is None and len(self._started) == self._batch_size:
            self._before = self._engine.stats()["steps"]
        if self._num_ended == self._batch_size:
            self._ended.set()

    def result(self, timeout_s: float = 600.0) -> Overhead:
        """Waits for every request to end.

        Raises:
            OutriderError: a step failed, or there were too few tokens for a window.
        """
        if not self._ended.wait(timeout_s) or self._error is not None:
            raise OutriderError(self._error or f"nothing came within {timeout_s:.0f} s")
        assert self._before is not None, "every request had deltas"
        assert self._after is not None, "every request ended"
        if self._after["num_steps"] <= self._before["num_steps"]:
            raise OutriderError("tokens: the first request ended before the last began; give more")
        return between(self._before, self._after)


def measure(engine: Engine, frontend: Frontend, batch_size: int, num_tokens: int) -> Overhead:
    """One window of `batch_size` requests of `num_tokens` tokens each."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    texts = load_prompts(None, batch_size)
    window = _Window(engine, batch_size)
    requests = []
    for index in range(batch_size):
        prompt = frontend.text_prompt(texts[index % len(texts)][:_PROMPT_CHARS])
        requests += frontend.requests(f"overhead-{index}", prompt, sampling)
    # `submit` waits for the step under way; together they all wait for the same one.
    with ThreadPoolExecutor(batch_size) as pool:
        list(pool.map(engine.submit, requests, [window] * batch_size))
    return window.result()


def quietest(
    engine: Engine, frontend: Frontend, batch_size: int, options: argparse.Namespace
) -> Overhead:
    """The window with the least overhead: what else runs on the machine only ever adds to it."""
    windows = [measure(engine, frontend, batch_size, options.tokens) for _ in range(options.repeat)]
    return min(windows, key=lambda window: window.outside_ms)


@contextmanager
def _engine(config: EngineConfig) -> Iterator[tuple[Engine, Frontend]]:
    engine = Engine.start(config, backend_of(config))
    try:
        yield engine, Frontend(config, engine.info)
    finally:
        engine.shutdown()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.overhead")
    parser.add_argument("--model", default=str(MODELS / "target"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--repeat", type=int, default=3, help="the quietest window counts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--executor", nargs="+", default=["local", "ray"])
    parser.add_argument("--drafter", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--clock", default="wall", choices=["wall", "thread"])
    return parser.parse_args()


def main() -> None:
    """Measures every combination and prints a table."""
    options = _arguments()
    if options.clock == "thread" and (options.executor, options.tp) != (["local"], [1]):
        raise SystemExit("--clock thread: only with --executor local --tp 1")
    # The loop's timer and the worker read one clock, so that it is replaced where both find it.
    clock = time.thread_time if options.clock == "thread" else time.perf_counter
    with patch.object(time, "perf_counter", clock):
        _run(options)


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    table = Table(title="Milliseconds per step outside the forward", title_justify="left")
    names = ("executor", "ranks", "drafter", "batch", *_VERBS, "outside", "budget", "forward")
    for name in names:
        table.add_column(name, justify="right")
    for executor in options.executor:
        for ranks in options.tp:
            for drafter in options.drafter:
                config = EngineConfig.load(
                    {"model": options.model, "dtype": options.dtype, "executor": executor},
                    tensor_parallel_size=ranks,
                    speculative_config=DRAFTERS[drafter],
                )
                with _ray(executor), _engine(config) as (engine, frontend):
                    measure(engine, frontend, 1, 8)  # warms up
                    for batch in options.batch:
                        found = quietest(engine, frontend, batch, options)
                        cells = [f"{getattr(found, f'{verb}_ms'):.3f}" for verb in _VERBS]
                        table.add_row(
                            executor,
                            str(ranks),
                            drafter,
                            str(batch),
                            *cells,
                            f"{found.outside_ms:.3f}",
                            f"{budget_ms(batch):.2f}",
                            f"{found.forward_ms:.2f}",
                        )
    console.print(table)


@contextmanager
def _ray(executor: str) -> Iterator[None]:
    """Ray, where it is asked for and does not run yet; it stays up for the next engine."""
    if executor == "ray":
        import ray

        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
    yield


if __name__ == "__main__":
    main()
