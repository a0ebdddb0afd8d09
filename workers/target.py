"""The target's part of a worker: one forward, then the verification rule on rank 0."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from ..scheduler.types import StepInput, Verdict
from .head import HeadService
from .model import PagedModel
from .verify import Rule, verify


class TargetService:
    """A loaded target and its cache; only rank 0's verdict counts."""

    def __init__(
        self,
        model: PagedModel,
        num_blocks: int,
        block_size: int,
        rule: Rule,
        head: HeadService | None = None,
    ) -> None:
        self._model = model
        self._cache = model.new_cache(num_blocks, block_size, head.kv_shapes if head else ())
        self._rule = rule
        self._head = head
        if head is not None:
            head.attach(self._cache)

    def verify(self, step: StepInput, rank: int) -> Verdict | None:
        """The verdict on `step`; None on the ranks that only lend their shard."""
        start = time.perf_counter()
        with torch.inference_mode():
            capture = self._head.capture if self._head else ()
            logits, hidden = self._model.forward_capturing(step, self._cache, capture)
            if rank != 0:
                return None
            verdict = verify(self._rule, step, logits) if len(step.rows) else _nothing(step)
            if self._head is not None:
                verdict = self._head.draft(step, verdict, hidden)
        return replace(verdict, forward_ms=(time.perf_counter() - start) * 1e3)


def _nothing(step: StepInput) -> Verdict:
    """The verdict on a step that only fills the cache."""
    none = np.zeros(0, dtype=np.int32)
    starts = np.zeros(step.num_seqs + 1, dtype=np.int32)
    return Verdict(step.step, none, starts, none, starts)
