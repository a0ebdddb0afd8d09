"""What a decode step costs beside the forward: bytes to the ranks, and CPU time of engine and rank.

    python -m outrider.bench.micro.step_cost [--batch 1 8 64] [--tp 1 2] [--steps 60]

Before: steps planned on the host and posted after the last verdict (`device_step: off`,
`overlap_scheduling: false`). After: steps of the device, each posted before the last verdict is
back. Forward and draw are left out of both: the host path judges fixed logits, and the device
step's work is a replay that does nothing. So the figures hold on any machine without a GPU, but
for the launch of a graph and the copies, which are missing. Times are CPU time of this thread; the
ranks are called one after the other and their time is summed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...config import EngineConfig
from ...drafters.drafting import Drafting
from ...drafters.protocol import NoDrafter
from ...scheduler.loop import Loop, OverlapLoop
from ...scheduler.sampling import SamplingParams
from ...scheduler.scheduler import Scheduler
from ...scheduler.types import Batch, Draft, Request, StepInput, Verdict, ints
from ...workers import seats
from ...workers.attention import KVCache
from ...workers.collective import Collective
from ...workers.device_step.seats import SeatSizes
from ...workers.model.paged import PagedModel
from ...workers.model.target import load_model
from ...workers.ops import ReferenceOps
from ...workers.target import TargetService
from ...workers.transport import wire
from ...workers.transport.channel import finished
from ...workers.verify import make_rule
from ..drafters import MODELS
from ..measure import Rows

BLOCK_SIZE, PROMPT_LEN, MAX_LEN = 16, 64, 512


class NoGraphs:
    """In place of CUDA's: a replay computes nothing."""

    def warm_up(self, work: object) -> None:
        pass

    def capture(self, work: object) -> object:
        return lambda: None


@dataclass(slots=True)
class Cost:
    """Sums over steps."""

    num_steps: int = 0
    num_bytes: int = 0  # to all ranks
    rank_s: float = 0.0
    total_s: float = 0.0  # of engine and ranks


class TimedRanks:
    """A loop's target over ranks whose forward is left out."""

    def __init__(self, model: PagedModel, batch: int, size: int, *, on_device: bool) -> None:
        num_blocks = batch * MAX_LEN // BLOCK_SIZE
        vocab = model.info.vocab_size
        sizes = SeatSizes(batch, MAX_LEN, num_blocks, BLOCK_SIZE, vocab_size=vocab)
        self.cost, self._verdicts = Cost(), list[Verdict]()
        self._services = [
            TargetService(
                model,
                num_blocks,
                BLOCK_SIZE,
                make_rule("coupled"),
                device_step=sizes if on_device else None,
            )
            for _ in range(size)
        ]
        for service in self._services:
            if service.device_step is not None:
                service.device_step.capture(NoGraphs())  # type: ignore[arg-type]
                service.device_step.outcome.fill_(1)  # every sequence emits token 1

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        self.post(batch, drafts)
        return self.collect()

    def post(self, batch: Batch, drafts: Sequence[Draft]) -> None:
        message = wire.encode(replace(batch.plan, drafts=seats.gather(drafts, batch.samples)))
        self.cost.num_steps += 1
        self.cost.num_bytes += len(message) * len(self._services)
        start, found = time.thread_time(), []
        for rank, service in enumerate(self._services):
            found.append(finished(service.post(wire.decode(message), rank)))
        self.cost.rank_s += time.thread_time() - start
        assert found[0] is not None, "rank 0 answers"
        self._verdicts.append(found[0])

    def collect(self) -> Verdict:
        return self._verdicts.pop(0)


def without_forward(model: PagedModel) -> PagedModel:
    """`model` with fixed logits: token 1 is the likeliest."""
    logits = torch.zeros(4096, model.info.vocab_size)
    logits[:, 1] = 1.0

    def forward(
        step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        cache.apply_moves(step.kv_moves)
        return logits[: len(step.rows)], ()

    object.__setattr__(model, "forward_capturing", forward)
    return model


def measure(model: PagedModel, batch: int, size: int, num_steps: int, *, is_after: bool) -> Cost:
    """The cost of `num_steps` decode steps."""
    options = {"model": "m", "block_size": BLOCK_SIZE, "max_num_seqs": batch}
    config = EngineConfig.load({**options, "max_num_batched_tokens": batch * PROMPT_LEN})
    num_blocks = batch * MAX_LEN // BLOCK_SIZE
    scheduler = Scheduler(config, num_blocks, MAX_LEN, ranks_append=is_after)
    target = TimedRanks(model, batch, size, on_device=is_after)
    drafting = Drafting(NoDrafter(), model.info.vocab_size)
    loop = (OverlapLoop if is_after else Loop)(scheduler, target, drafting)
    sampling = SamplingParams(max_tokens=MAX_LEN - PROMPT_LEN - 1, temperature=0.0)
    for index in range(batch):
        prompt = ints([(7 * index + place) % 99 + 2 for place in range(PROMPT_LEN)])
        loop.add(Request(f"r{index}", prompt, sampling, seed=index))
    for _ in range(10):  # prompts, and a few steps to warm up
        loop.step()
    target.cost = Cost()
    start = time.thread_time()
    for _ in range(num_steps):
        loop.step()
    target.cost.total_s = time.thread_time() - start
    return target.cost


def cells_of(costs: Sequence[Cost], size: int) -> list[str]:
    """Of the table: before and after."""
    cells = []
    for cost in costs:
        engine_ms = (cost.total_s - cost.rank_s) * 1e3 / cost.num_steps
        rank_ms = cost.rank_s * 1e3 / cost.num_steps / size
        cells += [f"{cost.num_bytes / cost.num_steps:.0f}", f"{engine_ms:.3f}", f"{rank_ms:.3f}"]
    return cells


def main(arguments: list[str] | None = None) -> None:
    """Prints a row per batch and number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.micro.step_cost")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    if min(*options.batch, *options.tp, options.steps) < 1 or options.steps > 400:
        parser.error("--batch and --tp must be at least 1, --steps between 1 and 400")
    loaded = load_model(
        MODELS / "target",
        device=torch.device("cpu"),
        collective=Collective.single(),
        ops=ReferenceOps(),
    )
    model, each = without_forward(loaded), ("engine ms", "ms a rank")
    table = Rows("batch", "ranks", "bytes, before", *each, "bytes, after", *each)
    for batch in options.batch:
        for size in options.tp:
            costs = [
                measure(model, batch, size, options.steps, is_after=is_after)
                for is_after in (False, True)
            ]
            table.add(batch, size, *cells_of(costs, size))


if __name__ == "__main__":
    main()
