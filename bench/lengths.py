"""Plain decoding, fixed draft lengths and measured ones, in turns in one process.

    python -m outrider.bench.lengths [--drafters NGram Eagle3 DraftTarget] [--streams 1 8 32] ...
    python -m outrider.bench.lengths --deciding 64

Every contender answers the same prompts in every round, in an order that changes with the round;
a ratio is taken within a round, and the median over rounds is reported with its quartiles. A second
plain engine shows what a ratio is worth: it computes what the first does. Clocks are read by the
process, on a CPU that should be otherwise idle. With `--deciding`, nothing is
computed: steps of so many made-up requests show what it takes to decide on their lengths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..config import EngineConfig
from ..scheduler.budget import DraftBudget
from ..scheduler.sampling import SamplingParams
from ..scheduler.sequence import Sequence
from ..scheduler.types import Request, ints
from .contenders import EngineContender
from .drafters import MODELS, SECTIONS
from .measure import Load, Rows
from .suite.workloads import load_prompts

PLAIN, AGAIN, MEASURED = "plain", "plain again", "measured"
# Texts: the least and the most acceptance of a request's nodes, and milliseconds that a row costs.
TEXTS = {"mixed": (0.2, 0.95, 0.05), "poor": (0.0, 0.1, 0.2), "good": (0.9, 0.99, 0.0)}


def sections(drafter: str, fixed: list[int]) -> dict[str, dict[str, Any] | None]:
    """The configurations that are compared, by name; a fixed length of 0 is the configured one."""
    section = SECTIONS[drafter]
    if drafter == "DraftTarget":
        section = {**section, "placement": "colocated"}
    lengths = {
        f"fixed {each or section['max_draft_len']}": {
            **section,
            "adaptive_draft_len": False,
            "max_draft_len": each or section["max_draft_len"],
        }
        for each in fixed
    }
    measured = {**section, "adaptive_draft_len": True}
    return {PLAIN: None, AGAIN: None, **lengths, MEASURED: measured}


def contender(name: str, section: dict[str, Any] | None, options: argparse.Namespace) -> Any:
    """A running engine in this process."""
    settings = {"model": options.model, "dtype": options.dtype, "executor": "local"}
    config = EngineConfig.load({**settings, "speculative_config": section, "max_num_seqs": 64})
    found = EngineContender(name, config)
    found.start()
    return found


def measure(
    contenders: list[EngineContender], streams: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per second of every round, by contender."""
    prompts = load_prompts(options.prompts, 64)
    num_prompts = max(streams, options.num_prompts)
    sampling = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    speeds: dict[str, list[float]] = {each.name: [] for each in contenders}
    for turn in range(-options.warmup, options.rounds):
        first = (turn * num_prompts) % len(prompts)
        chosen = [prompts[(first + each) % len(prompts)] for each in range(num_prompts)]
        shift = turn % len(contenders)
        for each in contenders[shift:] + contenders[:shift]:
            run = each.run(chosen, sampling, Load(streams=streams))
            tokens = sum(trace.num_tokens for trace in run.traces)
            if turn >= 0:
                speeds[each.name].append(tokens / run.wall_s)
    return speeds


def cells_of(speeds: dict[str, list[float]]) -> list[str]:
    """Of the table: median tokens per second, and ratios to plain."""
    cells = []
    for each, values in speeds.items():
        ratios = sorted(one / plain for one, plain in zip(values, speeds[PLAIN], strict=True))
        median = f"{statistics.median(values):.0f}"
        if each != PLAIN:
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            median = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        cells.append(median)
    others = [statistics.median(each) for name, each in speeds.items() if "fixed" in name]
    best = f"{statistics.median(speeds[MEASURED]) / max(others):.2f}" if others else "-"
    return [*cells, best]


def deciding_us(text: str, num_requests: int, num_steps: int = 6000) -> tuple[list[float], float]:
    """Microseconds of each decision after the first half of the steps; nodes granted, on the mean.

    Choices of a price and what they learn from are part of the decisions that wait for them.
    """
    least, most, row_ms = TEXTS[text]
    section = {"decoding_type": "NGram", "max_draft_len": 8, "adaptive_draft_len": True}
    config = EngineConfig.load({"model": "none", "speculative_config": section})
    budget = DraftBudget(config.speculative_config, 4096, tree_drafts=False)
    prompt, sampling = ints(np.arange(100)), SamplingParams(max_tokens=1000)
    requests = [Request(f"request-{each}", prompt, sampling, each) for each in range(num_requests)]
    sequences = [Sequence(each, place, limit=1100) for place, each in enumerate(requests)]
    rng, spent_us, num_granted = np.random.default_rng(0), list[float](), 0
    rates = rng.uniform(least, most, num_requests)
    runs, noise = rng.geometric(1 - rates, (64, num_requests)) - 1, rng.lognormal(0, 0.05, 64)
    drafts = [SimpleNamespace(num_nodes=each, chances=None) for each in range(9)]
    for step in range(num_steps):
        start = time.perf_counter()
        wishes = {} if budget.rests(num_requests) else budget.wishes(sequences, num_requests)
        spent_us.append((time.perf_counter() - start) * 1e6)
        granted = np.array([wishes.get(each, 0) for each in sequences])
        ends = np.cumsum([0, *np.minimum(runs[step % 64], granted)])
        num_rows = num_requests + int(granted.sum())
        num_granted += num_rows - num_requests
        batch: Any = SimpleNamespace(
            request_ids=[each.id for each in requests], max_nodes=granted,
            num_tokens=num_requests, num_seqs=num_requests,
            samples=np.ones(num_requests, dtype=np.bool_), drafter_nodes=None,
        )  # fmt: skip
        verdict: Any = SimpleNamespace(path_start=ends)
        step_ms = (5 + 0.02 * num_rows + row_ms * max(num_rows - 100, 0)) * noise[step % 64]
        drafted: Any = [drafts[each] for each in granted.tolist()]
        budget.end_step(batch, drafted, verdict, step_ms)
    return spent_us[num_steps // 2 :], num_granted / num_steps / num_requests


def show_deciding(num_requests: int, rounds: int) -> None:
    """Prints a row per text: of the quickest round, as other work only adds to a time."""
    table = Rows("text", "requests", "nodes granted", "mean us", "median us")
    for text in TEXTS:
        found = [deciding_us(text, num_requests) for _ in range(rounds)]
        spent_us, granted = min(found, key=lambda each: sum(each[0]))
        times = statistics.mean(spent_us), statistics.median(spent_us)
        table.add(text, num_requests, f"{granted:.1f}", *(f"{each:.1f}" for each in times))


def main() -> None:
    """Prints a row per drafter and number of streams."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.lengths")
    parser.add_argument("--model", default=str(MODELS / "target"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", nargs="+", default=["NGram", "Eagle3", "DraftTarget"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--fixed", type=int, nargs="*", default=[0], help="0: as configured")
    parser.add_argument("--prompts", type=Path, help="a file of prompts; the demo's held-out ones")
    parser.add_argument("--num-prompts", type=int, default=8, help="a round, or the streams")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--stats", action="store_true", help="what the lengths are based on")
    parser.add_argument("--deciding", type=int, help="requests; what it takes to decide for them")
    options = parser.parse_args()
    out = sys.stdout
    if options.deciding is not None:
        if options.deciding < 1:
            parser.error("--deciding must be at least 1")
        show_deciding(options.deciding, options.rounds)
        return
    for drafter in options.drafters:
        named = sections(drafter, options.fixed)
        engines = [contender(name, section, options) for name, section in named.items()]
        out.write("\n")
        table = Rows("drafter", "streams", *named, "measured / best fixed")
        for streams in options.streams:
            start = time.perf_counter()
            speeds = measure(engines, streams, options)
            table.add(drafter, streams, *cells_of(speeds))
            if options.stats:
                spent_s, found = time.perf_counter() - start, engines[-1]._running.stats()
                out.write(f"{found['speculation']} ({spent_s:.0f} s)\n")
        for each in engines:
            each.close()


if __name__ == "__main__":
    main()
