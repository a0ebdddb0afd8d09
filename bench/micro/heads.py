"""A head's draft round: as a program, by the target's operations, and as torch modules.

A draft model's likewise, as a program and by forwards that are called one by one.

    python -m outrider.bench.micro.heads [--rounds 50] [--dtype bfloat16 ...] [--length 400 ...]

The modules attend over the paged cache, as layers do that are not of the family. The demo target
and its heads, one sequence, one thread, CPU time of the thread. A round computes the rows of a
verified step of five nodes and drafts the next step's nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...config import Eagle3Config, EagleConfig, HeadConfig, MTPConfig, parse
from ...drafters.protocol import Drafted, DraftStep
from ...scheduler.blocks import BlockPool
from ...scheduler.sampling import SamplingParams
from ...scheduler.sequence import PagedTokens, Row, Seating
from ...scheduler.tree import EMPTY
from ...scheduler.types import Draft, Request, SeatSettings, StepInput, Verdict, ints
from ...workers.collective import Collective
from ...workers.draft import DraftService
from ...workers.head import HeadService
from ...workers.model.paged import PagedModel
from ...workers.model.target import load_model
from ...workers.seats import sample_step
from ..drafters import MODELS
from ..measure import Pair, show

BLOCK_SIZE = 16
CHUNK = 256
WAYS = PROGRAM, OPERATIONS, MODULES = "program", "operations", "modules"
CHAIN = {"max_draft_len": 4}
DYNAMIC = {
    "max_draft_len": 4,
    "use_dynamic_tree": True,
    "dynamic_tree_max_topK": 4,
    "max_total_draft_tokens": 16,
}
CASES: list[tuple[str, str, type[HeadConfig], dict[str, Any]]] = [
    ("eagle", "chain", EagleConfig, CHAIN),
    ("eagle3", "chain", Eagle3Config, CHAIN),
    ("eagle3", "dynamic tree", Eagle3Config, DYNAMIC),
    ("mtp", "chain", MTPConfig, CHAIN),
]


class _Round:
    """One head over the rows of a text, in a cache of its own."""

    def __init__(self, model: PagedModel, config: HeadConfig, length: int, way: str) -> None:
        self._model = model
        self._head = HeadService(config, model, MODELS / "target", fused=way != MODULES)
        if way != PROGRAM:
            self._head.drop_program()
        num_blocks = length // BLOCK_SIZE + 2
        self._cache = model.new_cache(num_blocks, BLOCK_SIZE, self._head.kv_shapes)
        self._head.attach(self._cache)
        self._table = list(range(num_blocks))
        tokens = np.random.default_rng(0).integers(5, 4000, length).tolist()
        for begin in range(0, length, CHUNK):
            step = self._step(tokens[begin : begin + CHUNK], begin)
            self._head.draft(step, _verdict(0), self._hidden(step))
        draft = Draft(ints([7, 8, 9, 10]), ints([-1, 0, 1, 2]))
        self._last = self._step([5], length, draft)
        self._states = self._hidden(self._last)

    def __call__(self) -> Verdict:
        return self._head.draft(self._last, _verdict(2), self._states)

    def _step(self, tokens: list[int], begin: int, draft: Draft = EMPTY) -> StepInput:
        return sample_step(tokens, begin, self._table, draft, BLOCK_SIZE)

    def _hidden(self, step: StepInput) -> tuple[Tensor, ...]:
        return self._model.forward_capturing(step, self._cache, self._head.capture)[1]


class _DraftModelRound:
    """Chains of four behind a few new tokens of each of some sequences."""

    def __init__(self, model: PagedModel, length: int, num_seqs: int, way: str) -> None:
        num_blocks = num_seqs * (length // BLOCK_SIZE + 2)
        self._service = DraftService(model, num_blocks, BLOCK_SIZE, model.collective)
        if way != PROGRAM:
            self._service.drop_program()
        rng, pool, seating = np.random.default_rng(0), BlockPool(num_blocks, BLOCK_SIZE), Seating()
        rows: list[Row] = []
        for index in range(num_seqs):
            prompt = ints(rng.integers(5, 4000, length))
            request = Request(str(index), prompt, SamplingParams(temperature=0.0), seed=0)
            sequence = PagedTokens(request, SeatSettings.for_drafting(request))
            assert sequence.allocate(pool, length + CHAIN["max_draft_len"]), "blocks for all"
            rows.append(Row(sequence, length, 0))
        self._service.draft(DraftStep(seating.plan(0, rows), probs_top=0))
        for row in rows:
            row.sequence.num_computed = length - 3
        rows = [Row(row.sequence, 3, CHAIN["max_draft_len"]) for row in rows]
        self._step = DraftStep(seating.plan(1, rows), probs_top=0)

    def __call__(self) -> Drafted:
        return self._service.draft(self._step)


def _verdict(num_accepted: int) -> Verdict:
    emitted = ints(range(10, 11 + num_accepted))
    path = ints(range(num_accepted))
    return Verdict(0, emitted, ints([0, len(emitted)]), path, ints([0, num_accepted]))


def rounds(dtype: torch.dtype, length: int) -> Iterator[Pair]:
    """Every head at one length of the text."""
    cpu, alone = torch.device("cpu"), Collective(0, 1, None)
    model = load_model(MODELS / "target", dtype=dtype, device=cpu, collective=alone)
    name = str(dtype).removeprefix("torch.")
    for head, shape, section, options in CASES:
        config = parse(section, {"speculative_model": str(MODELS / head), **options})
        for ways in pairwise(WAYS):
            ours, other = (_Round(model, config, length, way) for way in ways)
            part = f"{head}, {shape}, {' to '.join(ways)}"
            yield Pair(part, f"{name}, {length} tokens", ours, other)
    draft_model = load_model(MODELS / "draft", dtype=dtype, device=cpu, collective=alone)
    for num_seqs in (1, 8):
        one, two = (_DraftModelRound(draft_model, length, num_seqs, way) for way in WAYS[:2])
        part = f"draft model, {num_seqs} sequences, {' to '.join(WAYS[:2])}"
        yield Pair(part, f"{name}, {length} tokens", one, two)


@torch.inference_mode()
def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.micro.heads")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--length", nargs="+", type=int, default=[400, 1800])
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = product(options.dtype, options.length)
    pairs = (pair for dtype, length in kinds for pair in rounds(getattr(torch, dtype), length))
    show(pairs, options.rounds, "head", "case", "first, us", "second, us", "ratio")


if __name__ == "__main__":
    main()
