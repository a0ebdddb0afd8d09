"""`Engine.stats()`: counts and times of one engine as plain values, for `/stats` and `/metrics`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..drafters.drafting import WithPredictions
from ..errors import EngineDeadError, WorkerError
from ..scheduler.loop import Loop
from ..scheduler.sequence import Sequence
from ..scheduler.timer import Histogram

log = logging.getLogger(__name__)
LATE_S = 5.0
_BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Recoveries:
    """Counts restarts of the target's workers within a window, and times recoveries.

    Args:
        max_restarts: maximum number of restarts within `window_s` (configuration keys
            `max_restarts` and `restart_window_s`).
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._restarts: deque[float] = deque()  # times, within the window
        self._num_restarts = 0
        self._durations = Histogram(_BOUNDS_S)
        self._last_s: float | None = None
        self._begun = 0.0
        self.reason: str | None = None  # of the current recovery; None if there is none

    def begin(self, reason: str) -> None:
        """Records the loss of the workers."""
        self.reason, self._begun = reason, time.monotonic()

    @property
    def is_late(self) -> bool:
        """True if the current recovery takes longer than moving requests to other engines."""
        return self.reason is not None and time.monotonic() - self._begun >= LATE_S

    def end(self) -> None:
        """Records that the workers can compute again, or that the engine has ended."""
        self._last_s = time.monotonic() - self._begun
        self._durations.observe(self._last_s)
        self.reason = None

    def count(self, error: WorkerError) -> None:
        """Counts a restart.

        Raises:
            EngineDeadError: there were too many within the window.
        """
        now = time.monotonic()
        self._num_restarts += 1
        self._restarts.append(now)
        while self._restarts and self._restarts[0] < now - self._window_s:
            self._restarts.popleft()
        if len(self._restarts) > self._max_restarts:
            raise EngineDeadError(
                f"workers died {len(self._restarts)} times within {self._window_s:.0f} s "
                f"(max_restarts = {self._max_restarts}); the last time: {error.message}"
            )

    def stats(self) -> dict[str, Any]:
        """Plain values for `Engine.stats()`."""
        return {
            "num_restarts": self._num_restarts,
            "recovering": self.reason,
            "last_recovery_s": self._last_s,
            "recovery_seconds": self._durations.as_dict(),
        }


def recovery_of(stats: Mapping[str, Any]) -> str | None:
    """Returns why an engine with these statistics cannot step now, and how far its workers are.

    Returns None if nothing is being replaced.
    """
    if not stats.get("recovering"):
        return None
    loading = stats.get("loading")
    return f"the workers are being replaced: {stats['recovering']}" + f"; {loading}" * bool(loading)


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """A head, and which code computes its layers."""

    decoding_type: str
    placement: str
    layers: str  # "operations" like the target's, or "modules" of torch
    layers_reason: str  # why they are modules; otherwise empty


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a running engine, for the front end and the HTTP routes."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    drafter: str
    drafters: tuple[str, ...]  # names in the statistics; empty: plain decoding
    forward: str  # "family" or "bridge": which decoder computes the target
    forward_reason: str  # why it is not "family"; otherwise empty
    # Acceptance rate of the synthetic rule; None: the target decides.
    synthetic_acceptance_rate: float | None
    all_reduce: str  # how sums over the target's ranks are computed; empty for one rank
    operations: str  # "cpu", "triton", "torch", or the bridge's "transformers"
    heads: tuple[HeadInfo, ...] = ()


_MAX_SHOWN = 32
SYNTHETIC_WARNING = (
    "speculation is synthetic: coins accept drafted tokens at the rate %g and the text is not the "
    "model's; figures measure the machinery, not the drafter"
)


def statistics(info: EngineInfo, loop: Loop, drafting: WithPredictions) -> dict[str, Any]:
    """Returns everything that the engine counts, except its own failures."""
    scheduler, pool, budget = loop.scheduler, loop.scheduler.pool, loop.scheduler.budget
    health = drafting.all_health()
    now = time.monotonic()
    return {
        "model": info.model_name,
        "forward": info.forward,
        "forward_reason": info.forward_reason,
        "operations": info.operations,
        "all_reduce": info.all_reduce,
        "heads": [asdict(head) for head in info.heads],
        "running": len(scheduler.running),
        "waiting": scheduler.num_waiting,
        "kv": {
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free,
            "block_size": pool.block_size,
        },
        "requests": asdict(scheduler.counts),
        "requests_ended": dict(scheduler.timer.num_ended),
        "request_histograms": scheduler.timer.histograms(),
        "steps": asdict(loop.timer.times),
        "threads": [asdict(choice) for choice in loop.timer.thread_choices],
        "step_limit": {
            "num_tokens": scheduler.step_limit.num_tokens,
            "num_shrunk": scheduler.step_limit.num_shrunk,
        },
        "newest_requests": [
            _request(sequence, now) for sequence in scheduler.running[-_MAX_SHOWN:]
        ],
        "histograms": loop.timer.histograms(),
        "speculation": {
            "enabled": budget.enabled,
            "max_draft_len": budget.max_draft_len,
            "synthetic_acceptance_rate": info.synthetic_acceptance_rate,
            "adaptive": budget.stats(),
        },
        "drafters": {
            name: {**stats.as_dict(), "health": health.get(name)}
            for name, stats in drafting.all_stats().items()
        },
        "lines": statistics_lines(info, drafting),
    }


def _request(sequence: Sequence, now: float) -> dict[str, Any]:
    """Describes a running request by counts, without text or tokens."""
    return {
        "id": sequence.request.id,
        "age_s": round(now - sequence.arrived_s, 3),
        "num_prompt_tokens": sequence.num_prompt,
        "num_output_tokens": sequence.num_output,
        **asdict(sequence.usage),
    }


class StatisticsLog:
    """Logs the statistics lines at intervals, if they have changed."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._at, self._lines = time.monotonic(), [""]

    def write(self, info: EngineInfo, drafting: WithPredictions) -> None:
        """Logs the lines if the interval has passed; called after every step."""
        now = time.monotonic()
        if now - self._at < self._interval_s:
            return
        self._at, lines = now, statistics_lines(info, drafting)
        if lines != self._lines:
            self._lines = lines
            for line in lines:
                log.info(line)


def statistics_lines(info: EngineInfo, drafting: WithPredictions) -> list[str]:
    """Returns one block of statistics lines per drafter, in llama-server's format."""
    rate = info.synthetic_acceptance_rate
    lines = [] if rate is None else [SYNTHETIC_WARNING % rate]
    for name, stats in drafting.all_stats().items():
        lines += stats.lines(name)
    return lines
