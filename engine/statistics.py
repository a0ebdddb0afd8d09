"""`Engine.stats()`: counts and times of one engine as plain values, for `/stats` and `/metrics`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ..drafters.drafting import Drafting
from ..scheduler.loop import Loop
from ..scheduler.sequence import Sequence
from .info import EngineInfo

_MAX_SHOWN = 32
SYNTHETIC_WARNING = (
    "speculation is synthetic: coins accept drafted tokens at the rate %g and the text is not the "
    "model's; figures measure the machinery, not the drafter"
)


def statistics(info: EngineInfo, loop: Loop, drafting: Drafting) -> dict[str, Any]:
    """Everything that the engine counts but its own failures."""
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
    """One running request; no text, and no tokens but their numbers."""
    return {
        "id": sequence.request.id,
        "age_s": round(now - sequence.arrived_s, 3),
        "num_prompt_tokens": sequence.num_prompt,
        "num_output_tokens": sequence.num_output,
        **asdict(sequence.usage),
    }


def statistics_lines(info: EngineInfo, drafting: Drafting) -> list[str]:
    """One block of statistics per drafter, as llama-server prints it."""
    rate = info.synthetic_acceptance_rate
    first = [] if rate is None else [SYNTHETIC_WARNING % rate]
    every = drafting.all_stats().items()
    return [*first, *(line for name, stats in every for line in stats.lines(name))]
