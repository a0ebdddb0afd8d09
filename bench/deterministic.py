"""What `deterministic: true` costs a forward on a CPU: both kinds of operations, in turns.

python -m outrider.bench.deterministic --model demo/models/target --threads 1
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ..scheduler.types import Draft, StepInput, ints
from ..workers.collective import Collective
from ..workers.model.family.compare import sample_step
from ..workers.model.target import load_model

_BLOCK = 16
log = logging.getLogger("outrider.bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reports medians per step and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(given.threads)
    for name, plain, invariant in measure(given.model, given.rounds):
        ratio = invariant / plain
        log.info("%s: %.2f ms, deterministic %.2f ms (%.2f x)", name, plain, invariant, ratio)


def measure(model: Path, num_rounds: int) -> Iterator[tuple[str, float, float]]:
    """Every step's name, and its milliseconds without and with."""
    device, single = torch.device("cpu"), Collective.single()
    models = [
        load_model(
            model,
            dtype=torch.bfloat16,
            device=device,
            collective=single,
            forward="family",
            deterministic=deterministic,
        )
        for deterministic in (False, True)
    ]
    caches = [each.new_cache(64, _BLOCK) for each in models]
    for name, step in _steps(models[0].info.vocab_size).items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(num_rounds):
            for each, cache, taken in zip(models, caches, times, strict=True):
                begin = time.perf_counter()
                with torch.inference_mode():
                    each.forward_capturing(step, cache, ())
                taken.append((time.perf_counter() - begin) * 1e3)
        yield name, statistics.median(times[0]), statistics.median(times[1])


def _steps(vocab_size: int) -> dict[str, StepInput]:
    table, prompt = list(range(64)), [index % vocab_size for index in range(512)]
    steps = {"prompt of 512": sample_step(prompt, 0, table, block_size=_BLOCK)}
    for num_rows in (1, 8, 64):
        nodes = num_rows - 1
        draft = Draft(ints(np.arange(nodes)), ints(np.arange(nodes) - 1))
        name = f"{num_rows} rows after 200 tokens"
        steps[name] = sample_step([5], 200, table, draft, block_size=_BLOCK)
    return steps


if __name__ == "__main__":
    main()
