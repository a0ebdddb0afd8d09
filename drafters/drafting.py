"""The one place that calls drafters: counted, timed, and never allowed to hurt a request.

A drafter that raises loses its tokens for that step; a draft that is malformed or larger than it
was asked to be is lost alone. A fault is counted, and logged with its traceback the first time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..scheduler import tree
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .protocol import Composite, Drafter, DrafterStats, DraftFault

log = logging.getLogger(__name__)


class Guard:
    """One drafter, counted, timed and checked. Has the verbs of `Drafter` and never raises."""

    def __init__(self, drafter: Drafter, vocab_size: int, name: str | None = None) -> None:
        self.drafter = drafter
        self.name = name or drafter.name
        self.stats = DrafterStats()
        self._vocab_size = vocab_size
        self._step = 0  # the step that `_drafted` is of
        self._drafted: list[Draft] = []

    def open(self, requests: Sequence[Request]) -> None:
        start = time.perf_counter()
        self.stats.num_calls[0] += len(requests)
        self._attempt(lambda: self.drafter.open(requests))
        self.stats.begin_ms += _ms_since(start)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        self._step, self._drafted = batch.step, [tree.EMPTY] * batch.num_seqs
        asked = int((budgets > 0).sum())
        if asked == 0:
            return self._drafted
        start = time.perf_counter()
        self.stats.num_calls[1] += asked
        drafts = self._attempt(lambda: self.drafter.propose(batch, budgets))
        if drafts is not None:
            drafts = self._attempt(lambda: self._checked(drafts, budgets))
        if drafts is not None:
            self._drafted = drafts
            for draft in drafts:
                self.stats.num_gen_drafts += draft.num_nodes > 0
                self.stats.num_gen_tokens += draft.num_nodes
        self.stats.gen_ms += _ms_since(start)
        return self._drafted

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        start = time.perf_counter()
        if batch.step == self._step:
            ends = verdict.path_start.tolist()
            for row, draft in enumerate(self._drafted):
                if draft.num_nodes:
                    self.stats.num_calls[2] += 1
                    self.stats.count_accepted(ends[row + 1] - ends[row])
        self._attempt(lambda: self.drafter.observe(batch, verdict))
        self.stats.acc_ms += _ms_since(start)

    def close(self, request_ids: Sequence[str]) -> None:
        self._attempt(lambda: self.drafter.close(request_ids))

    def shutdown(self) -> None:
        self._attempt(self.drafter.shutdown)

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """The call's result; None, or what is left of it, if it raised."""
        try:
            return call()
        except Exception as error:
            self.stats.faults += 1
            level = logging.ERROR if self.stats.faults == 1 else logging.DEBUG
            log.log(level, "drafter %s failed; going on without", self.name, exc_info=True)
            return error.drafts if isinstance(error, DraftFault) else None

    def _checked(self, drafts: list[Draft], budgets: IntArray) -> list[Draft]:
        """`drafts`, if all are sound.

        Raises:
            DraftFault: some are not; it has the others.
        """
        if len(drafts) != len(budgets):
            raise ValueError(f"{len(drafts)} drafts for {len(budgets)} rows")
        if _sound_chains(drafts, budgets, self._vocab_size):
            return drafts
        sound, first = list(drafts), ""
        for row, draft in enumerate(drafts):
            reason = _problem(draft, int(budgets[row]), self._vocab_size)
            if reason is not None:
                sound[row] = tree.EMPTY
                first = first or f"row {row}: {reason}"
        if first:
            raise DraftFault(first, sound)
        return sound


class Drafting:
    """A drafter behind the loop's protocol (`scheduler/loop.py`)."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._guard = Guard(drafter, vocab_size)

    @property
    def drafter(self) -> Drafter:
        return self._guard.drafter

    @property
    def stats(self) -> DrafterStats:
        return self._guard.stats

    def open(self, requests: Sequence[Request]) -> None:
        self._guard.open(requests)

    def propose(self, batch: Batch) -> list[Draft]:
        return self._guard.propose(batch, batch.max_nodes)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self._guard.observe(batch, verdict)

    def close(self, request_ids: Sequence[str]) -> None:
        self._guard.close(request_ids)

    def all_stats(self) -> dict[str, DrafterStats]:
        """Statistics by drafter."""
        if isinstance(self.drafter, Composite):
            return self.drafter.all_stats()
        return {self.drafter.name: self.stats}

    def shutdown(self) -> None:
        self._guard.shutdown()


def _sound_chains(drafts: list[Draft], budgets: IntArray, vocab_size: int) -> bool:
    """Whether all are well-formed deterministic chains; told at once for the whole batch."""
    if any(type(draft) is not Draft or draft.probs is not None for draft in drafts):
        return False
    tokens, parents = [d.tokens for d in drafts], [d.parents for d in drafts]
    if any(type(part) is not np.ndarray or part.ndim != 1 for part in (*tokens, *parents)):
        return False
    counts = np.array([len(part) for part in tokens])
    if (counts > budgets).any() or any(draft.num_window for draft in drafts):
        return False
    flat, above = np.concatenate(tokens), np.concatenate(parents)
    if flat.dtype != np.int32 or above.dtype != np.int32 or len(flat) != len(above):
        return False
    order = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    known = (flat >= 0) & (flat < vocab_size)
    return bool(known.all() and (above == order - 1).all())


def _problem(draft: Any, budget: int, vocab_size: int) -> str | None:
    """Why `draft` cannot be used, whatever it is; None if it can."""
    if not isinstance(draft, Draft):
        return f"a draft is wanted, not {draft!r}"
    for name, part in (("tokens", draft.tokens), ("parents", draft.parents)):
        if not isinstance(part, np.ndarray) or part.ndim != 1 or part.dtype.kind != "i":
            return f"{name} must be a row of int32, not {part!r}"
    if draft.num_nodes > budget:
        return f"{draft.num_nodes} nodes where {budget} were asked"
    probs = draft.probs
    if probs is not None:
        if probs.ids.ndim != 2 or probs.ids.shape != probs.probs.shape:
            return f"probabilities of shape {probs.probs.shape} for ids of {probs.ids.shape}"
        if not (np.isfinite(probs.probs).all() and (probs.probs >= 0).all()):
            return "a probability is negative or not a number"
        if ((probs.ids < 0) | (probs.ids >= vocab_size)).any():
            return f"probabilities of tokens outside the vocabulary of {vocab_size}"
    return tree.problem(draft, vocab_size)


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
