"""The family's decoder as a `Runner`: from a step's arrays to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ....scheduler.types import StepInput
from ...attention import AttentionBackend, KVCache, KVShape
from ...ops import PlannedOps
from ..info import ModelInfo
from .decoder import FamilyModel
from .parts import PartThreads, bounds_of


class FamilyRunner:
    """One rank's decoder over a paged cache."""

    def __init__(self, model: FamilyModel, info: ModelInfo, num_ranks: int = 1) -> None:
        self.model = model
        # Sums over ranks are taken in one order, which several threads would not keep.
        self._takes_parts = model.ops.takes_parts and num_ranks == 1
        self._threads = PartThreads(model)
        self._info = info
        self._planned = PlannedOps(model.ops)
        self.backend: AttentionBackend = self._planned
        self.kv_shapes: tuple[KVShape, ...] = model.kv_shapes

    def run(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        plan = self._planned.plan(step, cache)
        if self._takes_parts and (num_threads := torch.get_num_threads()) > 1:
            bounds = bounds_of(plan, num_threads, self._info.hidden_size)
            if len(bounds) > 2:
                context = self.model.context(plan, cache)
                return self._threads.forward(context, step.rows, capture, bounds)
        rows = None
        if len(step.rows) != len(step.token_ids):
            rows = torch.from_numpy(step.rows).to(cache.device, non_blocking=True)
        return self.model.forward(plan, cache, rows, capture)

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        return self.model.logits(states)
