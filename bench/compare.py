"""Contenders side by side: rounds in which each runs every workload and load, and what came of it.

The order turns and reverses from round to round, so that warm caches and a busy neighbour hit all
alike, and before every run there is a pause: threads of the contender before may spin for a while
after its last request (Intel's OpenMP, which vLLM loads, does so for 200 ms).
`compare` gives the runs, `summarise` the figures that are printed and written as JSON. A contender
that cannot start, or dies, is excluded with its reason; the others go on.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ..errors import OutriderError
from ..scheduler.sampling import SamplingParams
from .contenders import Contender
from .measure import Load, Run, Trace, add_acceptance, differing, percentiles, ratio_of_rounds

PAUSE_S = 1.0
_WARM_UP_TOKENS = 8
Progress = Callable[[str], None]


class Cell(NamedTuple):
    """One square of the table."""

    contender: str
    workload: str
    load: Load


class Workload(NamedTuple):
    """A kind of prompts.

    `prompts(salt, count)`: a salt makes them new to every cache, the same for all contenders.
    """

    name: str
    prompts: Callable[[str, int], list[str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every contender is asked to do."""

    workloads: Sequence[Workload]
    sampling: SamplingParams
    loads: Sequence[Load]
    num_rounds: int
    num_prompts: int
    prompts_per_stream: int = 1
    pause_s: float = field(default_factory=lambda: PAUSE_S)  # before every run
    alone: bool = False  # each is started for its part of a round, and is then closed

    def prompts(self, workload: Workload, load: Load, salt: str) -> list[str]:
        """Of one run: enough for every stream to have `prompts_per_stream`."""
        return workload.prompts(
            salt, max(self.num_prompts, self.prompts_per_stream * (load.streams or 1))
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs, by round, and those who could not go on."""

    runs: dict[Cell, dict[int, Run]] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)  # contender -> why


def compare(
    contenders: Sequence[Contender],
    plan: Plan,
    progress: Progress,
    after_round: Callable[[Comparison], None] = lambda _: None,
) -> Comparison:
    """Starts everyone, warms everyone up, then measures round by round.

    Args:
        after_round: is given what there is so far, so that a long run can be interrupted.
    """
    found = Comparison()
    with ExitStack() as stack:
        if not plan.alone:
            for contender in contenders:
                _start(contender, plan, found, stack, progress)
        for number in range(plan.num_rounds):
            turn = _turn(contenders, number)
            if plan.alone:
                for contender in turn:
                    with ExitStack() as own:
                        _start(contender, plan, found, own, progress)
                        _round(number, [contender], plan, found, progress)
            else:
                _round(number, turn, plan, found, progress)
            after_round(found)
    return found


def summarise(found: Comparison, reference: str) -> list[dict[str, Any]]:
    """One row per cell, in order; ratios are to `reference` in the same cell."""
    return [_row(found, cell, reference) for cell in found.runs]


def equality(found: Comparison, reference: str, same_prompts: bool = False) -> list[dict[str, Any]]:
    """Prompts whose output differs, in any round, from the reference's under that load.

    Args:
        same_prompts: no run has prompts of its own: all are compared with the reference's first.
    """
    firsts: dict[str, Run] = {}
    for cell, runs in found.runs.items():
        if same_prompts and cell.contender == reference:
            firsts.setdefault(cell.workload, next(iter(runs.values())))
    rows = []
    for cell, runs in found.runs.items():
        differences: dict[int, int] = {}
        num_prompts = 0
        for number, run in runs.items():
            rounds = found.runs.get(cell._replace(contender=reference), {})
            theirs = firsts.get(cell.workload, rounds.get(number))
            if theirs is not None:
                differences.update(differing(run.traces, theirs.traces))
                num_prompts = max(num_prompts, len(run.traces))
        rows.append(
            {
                **_name(cell),
                "num_prompts": num_prompts,
                "num_differing": len(differences),
                "first_difference": {str(prompt): place for prompt, place in differences.items()},
            }
        )
    return rows


def over_http(found: Comparison, server: str, engine: str) -> list[dict[str, Any]]:
    """What HTTP adds to the engine alone, by workload and load: medians over the rounds of both.

    `framework_us_per_token` is the difference of the wall time per output token. With several
    streams the server's other work overlaps with the engine's, unless they share the cores.
    """
    rows = []
    for cell, runs in found.runs.items():
        alone = found.runs.get(cell._replace(contender=engine), {})
        both = [number for number in runs if number in alone and runs[number].num_tokens]
        if cell.contender != server or not both:
            continue
        pairs = [(runs[number], alone[number]) for number in both]
        per_token = [1e6 / http.tokens_per_s - 1e6 / bare.tokens_per_s for http, bare in pairs]
        first = [_first_ms(http) - _first_ms(bare) for http, bare in pairs]
        rows.append(
            {
                **_name(cell),
                "framework_us_per_token": statistics.median(per_token),
                "first_token_ms_more": statistics.median(first),
                "num_rounds": len(both),
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


def _start(
    contender: Contender, plan: Plan, found: Comparison, stack: ExitStack, progress: Progress
) -> None:
    """Starts and warms up: every load with the first workload, the least load with the others."""
    if contender.name in found.excluded:
        return
    progress(f"starting {contender.name}")
    stack.callback(contender.close)
    short = plan.sampling.model_copy(update={"max_tokens": _WARM_UP_TOKENS})
    closed = [load for load in plan.loads if load.streams is not None] or [Load(streams=1)]
    try:
        contender.start()
        for load in filter(contender.takes, closed):
            for workload in plan.workloads if load is closed[0] else plan.workloads[:1]:
                progress(f"warming up {contender.name}, {workload.name}, load {load}")
                salt = f"warm-up {workload.name} {load}"
                prompts = plan.prompts(workload, load, salt)[: load.streams]
                contender.run(prompts, short, load)
    except OutriderError as error:
        found.excluded[contender.name] = error.message


def _turn(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a round: each begins one of them, and follows another one in the next."""
    first = number % len(contenders)
    turn = [*contenders[first:], *contenders[:first]]
    return turn if number % 2 == 0 else [turn[0], *turn[:0:-1]]


def _round(
    number: int, turn: Iterable[Contender], plan: Plan, found: Comparison, progress: Progress
) -> None:
    for workload in plan.workloads:
        for load in plan.loads:
            prompts = plan.prompts(workload, load, f"{number} {workload.name} {load}")
            for contender in turn:
                if contender.name in found.excluded or not contender.takes(load):
                    continue
                cell = Cell(contender.name, workload.name, load)
                progress(f"round {number + 1}, {cell.contender}, {cell.workload}, load {load}")
                time.sleep(plan.pause_s)
                try:
                    run = contender.run(prompts, plan.sampling, load)
                except OutriderError as error:
                    found.excluded[contender.name] = error.message
                else:
                    found.runs.setdefault(cell, {})[number] = run


def _row(found: Comparison, cell: Cell, reference: str) -> dict[str, Any]:
    runs = found.runs[cell]
    theirs = found.runs.get(cell._replace(contender=reference), {})
    both = [number for number in runs if number in theirs and theirs[number].num_tokens]
    each = list(runs.values())
    traces = [trace for run in each for trace in run.traces]
    num_tokens = sum(run.num_tokens for run in each)
    num_steps = sum(run.num_steps for run in each)
    parts = [run.acceptance for run in each if run.acceptance is not None]
    acceptance = add_acceptance(parts)
    ratio = ratio_of_rounds(
        [runs[number].tokens_per_s for number in both],
        [theirs[number].tokens_per_s for number in both],
    )
    return {
        **_name(cell),
        "tokens_per_s": statistics.median(run.tokens_per_s for run in each),
        "ratio": asdict(ratio) if ratio is not None else None,
        "num_steps": num_steps,
        "tokens_per_step": num_tokens / num_steps if num_steps else None,
        "tokens_per_request_step": (
            num_tokens / acceptance.num_steps if acceptance.num_steps else None
        ),
        **_latencies(traces),
        "acceptance": acceptance.as_dict() if acceptance.num_draft_tokens else None,
        "num_failures": sum(len(run.failures) for run in each),
        "failures": sorted({failure for run in each for failure in run.failures})[:5],
        "mean_prompt_tokens": (
            sum(trace.num_prompt_tokens for trace in traces) / len(traces) if traces else None
        ),
        "rounds": [
            {
                "round": number,
                "wall_s": run.wall_s,
                "num_tokens": run.num_tokens,
                "tokens_per_s": run.tokens_per_s,
            }
            for number, run in runs.items()
        ],
    }


def _first_ms(run: Run) -> float:
    return statistics.median(trace.ttft_ms for trace in run.traces)


def _name(cell: Cell) -> dict[str, Any]:
    return {
        "contender": cell.contender,
        "workload": cell.workload,
        "load": str(cell.load),
        "streams": cell.load.streams,
        "rate": cell.load.rate,
    }


def _latencies(traces: Sequence[Trace]) -> dict[str, dict[str, float]]:
    """Percentiles over the requests, or tokens, of all rounds together."""
    return {
        "ttft_ms": percentiles([trace.ttft_ms for trace in traces]),
        "inter_token_ms": percentiles([gap for trace in traces for gap in trace.inter_token_ms]),
        "gap_ms": percentiles([gap for trace in traces for gap in trace.gap_ms]),
        "e2e_ms": percentiles([trace.e2e_ms for trace in traces]),
    }
