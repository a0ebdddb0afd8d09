"""Contenders side by side: rounds in which each runs every batch size, and what came of it.

The order turns from round to round, so that warm caches and a busy neighbour hit all alike.
`compare` gives the runs, `summarise` the figures that are printed and written as JSON.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..scheduler.sampling import SamplingParams
from .contenders import Contender
from .measure import Run, Trace, add_acceptance, differing, percentiles, ratio_of_rounds

_WARM_UP_TOKENS = 8
Runs = dict[tuple[str, int], list[Run]]  # (contender, batch size) -> its runs, round by round


@dataclass(frozen=True, slots=True)
class Plan:
    """What every contender is asked to do."""

    prompts: Sequence[str]
    sampling: SamplingParams
    batch_sizes: Sequence[int]
    num_rounds: int


def compare(contenders: Sequence[Contender], plan: Plan, progress: Callable[[str], None]) -> Runs:
    """Warms everyone up, then measures round by round."""
    short = plan.sampling.model_copy(update={"max_tokens": _WARM_UP_TOKENS})
    for contender in contenders:
        for batch_size in _served(contender, plan):
            progress(f"warming up {contender.name}, batch {batch_size}")
            contender.run(plan.prompts[:batch_size], short, batch_size)
    runs: Runs = {}
    for number in range(plan.num_rounds):
        first = number % len(contenders)
        for batch_size in plan.batch_sizes:
            for contender in (*contenders[first:], *contenders[:first]):
                if batch_size not in _served(contender, plan):
                    continue
                progress(f"round {number + 1}, {contender.name}, batch {batch_size}")
                run = contender.run(plan.prompts, plan.sampling, batch_size)
                runs.setdefault((contender.name, batch_size), []).append(run)
    return runs


def summarise(runs: Runs, reference: str) -> list[dict[str, Any]]:
    """One row per contender and batch size; ratios are to `reference` at the same batch size."""
    return [_row(runs, name, batch_size, reference) for name, batch_size in runs]


def equality(runs: Runs, reference: str) -> list[dict[str, Any]]:
    """Prompts whose tokens differ, in any round, from the reference's first run."""
    truth = next(each[0] for (name, _), each in runs.items() if name == reference)
    rows = []
    for (name, batch_size), each in runs.items():
        found: dict[int, int] = {}
        for run in each:
            found.update(differing(run.traces, truth.traces))
        rows.append(
            {
                "contender": name,
                "batch_size": batch_size,
                "num_prompts": len(truth.traces),
                "num_differing": len(found),
                "first_difference": {str(prompt): place for prompt, place in found.items()},
            }
        )
    return rows


def machine() -> dict[str, Any]:
    """What the figures were taken on, without names."""
    import torch

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {
        "num_cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        "memory_gib": round(pages / 2**30),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _served(contender: Contender, plan: Plan) -> list[int]:
    most = contender.max_batch_size
    return [size for size in plan.batch_sizes if most is None or size <= most]


def _row(runs: Runs, name: str, batch_size: int, reference: str) -> dict[str, Any]:
    each = runs[name, batch_size]
    rates = [run.tokens_per_s for run in each]
    theirs = [run.tokens_per_s for run in runs.get((reference, batch_size), [])]
    traces = [trace for run in each for trace in run.traces]
    num_steps = sum(run.num_steps for run in each)
    drafted = [run.acceptance for run in each if run.acceptance is not None]
    acceptance = add_acceptance(drafted)
    return {
        "contender": name,
        "batch_size": batch_size,
        "tokens_per_s": statistics.median(rates),
        "ratio": asdict(ratio_of_rounds(rates, theirs)) if theirs else None,
        "num_steps": num_steps,
        "tokens_per_step": sum(run.num_tokens for run in each) / num_steps if num_steps else None,
        **_latencies(traces),
        "acceptance": acceptance.as_dict() if acceptance.num_drafts else None,
        "rounds": [
            {"wall_s": run.wall_s, "num_tokens": run.num_tokens, "tokens_per_s": run.tokens_per_s}
            for run in each
        ],
    }


def _latencies(traces: Sequence[Trace]) -> dict[str, dict[str, float]]:
    """Percentiles over the requests, or tokens, of all rounds together."""
    return {
        "ttft_ms": percentiles([trace.ttft_ms for trace in traces]),
        "inter_token_ms": percentiles([gap for trace in traces for gap in trace.inter_token_ms]),
        "gap_ms": percentiles([gap for trace in traces for gap in trace.gap_ms]),
        "e2e_ms": percentiles([trace.e2e_ms for trace in traces]),
    }
