"""Steps that overlap with the workers against steps that wait for them: `overlap_scheduling`.

    python -m outrider.bench.overlap [--model FOLDER] [--streams 1 8 32] [--rounds 10]

Two engines over Ray, one of each kind, take turns on the same prompts, plain and greedy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from ..cluster.backend import LLM
from ..scheduler.sampling import SamplingParams

DEMO = Path(__file__).resolve().parent.parent / "demo" / "models" / "target"


def main() -> None:
    """Prints a row per number of streams."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.overlap")
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    sampling = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    engines = {
        overlaps: LLM(options.model, dtype=options.dtype, overlap_scheduling=overlaps)
        for overlaps in (True, False)
    }
    out = sys.stdout
    out.write("| streams | overlapped, ms/step | waiting, ms/step | overlapped / waiting |\n")
    out.write("|---|---|---|---|\n")
    for num_streams in options.streams:
        prompts = [[stream + 5] * 20 for stream in range(num_streams)]
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(options.rounds + 1):  # the first warms up
            for overlaps, engine in engines.items():
                start = time.perf_counter()
                engine.generate(prompts, sampling, use_tqdm=False)
                if turn:
                    times[overlaps].append((time.perf_counter() - start) * 1e3 / options.tokens)
        ratios = sorted(one / other for one, other in zip(times[True], times[False], strict=True))
        medians = [statistics.median(times[overlaps]) for overlaps in (True, False)]
        out.write(
            f"| {num_streams} | {medians[0]:.2f} | {medians[1]:.2f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |\n"
        )
        out.flush()
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
