"""The one place that calls drafters: counted, timed, and never allowed to hurt a request.

A drafter that raises, or returns more than it was asked for, loses its tokens for that step; the
fault is counted, and logged with its traceback the first time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..scheduler import tree
from ..scheduler.types import Batch, Draft, Request, Verdict
from .protocol import Drafter, DrafterStats

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Drafting:
    """A drafter behind the loop's protocol (`scheduler/loop.py`)."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.stats = DrafterStats()
        self._vocab_size = vocab_size
        self._drafted: list[Draft] = []

    def open(self, requests: Sequence[Request]) -> None:
        self.stats.num_calls[0] += len(requests)
        _, self.stats.begin_ms = self._guarded(
            lambda: self.drafter.open(requests), self.stats.begin_ms
        )

    def propose(self, batch: Batch) -> list[Draft]:
        self._drafted = [tree.EMPTY] * batch.num_seqs
        asked = int((batch.max_nodes > 0).sum())
        if asked == 0:
            return self._drafted
        self.stats.num_calls[1] += asked
        drafts, self.stats.gen_ms = self._guarded(
            lambda: self._checked(batch, self.drafter.propose(batch, batch.max_nodes)),
            self.stats.gen_ms,
        )
        if drafts is not None:
            self._drafted = drafts
            for draft in drafts:
                self.stats.num_gen_drafts += draft.num_nodes > 0
                self.stats.num_gen_tokens += draft.num_nodes
        return self._drafted

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        for row, draft in enumerate(self._drafted):
            if draft.num_nodes:
                self.stats.num_calls[2] += 1
                self.stats.count_accepted(len(verdict.nodes(row)))
        _, self.stats.acc_ms = self._guarded(
            lambda: self.drafter.observe(batch, verdict), self.stats.acc_ms
        )

    def close(self, request_ids: Sequence[str]) -> None:
        self._guarded(lambda: self.drafter.close(request_ids), 0.0)

    def all_stats(self) -> dict[str, DrafterStats]:
        """Statistics by drafter."""
        return {self.drafter.name: self.stats}

    def shutdown(self) -> None:
        self._guarded(self.drafter.shutdown, 0.0)

    def _checked(self, batch: Batch, drafts: list[Draft]) -> list[Draft]:
        if len(drafts) != batch.num_seqs:
            raise ValueError(f"{len(drafts)} drafts for {batch.num_seqs} rows")
        for row, draft in enumerate(drafts):
            if draft.num_nodes > batch.max_nodes[row]:
                raise ValueError(f"{draft.num_nodes} nodes where {batch.max_nodes[row]} were asked")
            reason = tree.problem(draft, self._vocab_size)
            if reason is not None:
                raise ValueError(reason)
        return drafts

    def _guarded(self, call: Callable[[], Result], spent_ms: float) -> tuple[Result | None, float]:
        """The call's result, or None if it raised; and `spent_ms` with its time added."""
        start = time.perf_counter()
        result = None
        try:
            result = call()
        except Exception:
            self.stats.faults += 1
            level = logging.ERROR if self.stats.faults == 1 else logging.DEBUG
            log.log(level, "drafter %s failed; going on without", self.drafter.name, exc_info=True)
        return result, spent_ms + (time.perf_counter() - start) * 1e3
