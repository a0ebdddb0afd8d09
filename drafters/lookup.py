"""What drafters that look tokens up share: a memory per request, and its walk through a step.

Called by `Drafting`; the memories are in the drafters' own files. This is a hot path (tens of
requests, thousands of tokens each, every step): tokens are Python's compact arrays, a slice's
bytes are a key, and nothing is looked at twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from ..scheduler import tree
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .protocol import Needs

INT32 = "i"
_CHAIN = np.arange(-1, 4095, dtype=np.int32)  # parents of every chain; never written to


def tokens_of(*parts: IntArray) -> array[int]:
    """Tokens as a compact array."""
    tokens = array(INT32)
    for part in parts:
        tokens.frombytes(np.ascontiguousarray(part, dtype=np.int32).tobytes())
    return tokens


def chain(tokens: array[int], source: str) -> Draft:
    """`tree.chain` without its copies."""
    ids: IntArray = np.frombuffer(tokens, dtype=np.int32)
    return Draft(ids, _CHAIN[: len(ids)], None, source)


class Memory:
    """One request's tokens, and what a drafter knows of them."""

    __slots__ = ("drafted", "tokens")

    def __init__(self, request: Request) -> None:
        self.tokens = tokens_of(request.prompt, request.emitted)
        self.drafted: array[int] | None = None  # in the step that runs

    def find(self, budget: int) -> array[int] | None:
        """The tokens that may follow; None or empty if there is no guess. May be too long."""
        raise NotImplementedError

    def learn(self, emitted: list[int]) -> None:
        """The target's tokens, which come next."""
        self.tokens.extend(emitted)

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """What became of the draft. `learn` follows."""

    def draft(self, budget: int, least: int, source: str) -> Draft:
        """A chain of at most `budget` tokens; EMPTY if fewer than `least` are found."""
        found = self.find(budget)
        if not found:
            return tree.EMPTY
        if len(found) > budget:
            found = found[:budget]
        if len(found) < least:
            return tree.EMPTY
        self.drafted = found
        return chain(found, source)

    def observe(self, emitted: list[int]) -> None:
        """Judges the draft by what came instead of it, then learns that."""
        drafted = self.drafted
        if drafted is not None:
            self.drafted = None
            num_accepted = 0
            # Counted here and not read from the verdict: another drafter's draft may have been
            # verified in the place of this one.
            for guess, token in zip(drafted, emitted):
                if guess != token:
                    break
                num_accepted += 1
            self.judge(len(drafted), num_accepted)
        self.learn(emitted)


Kept = TypeVar("Kept", bound=Memory)


class LookupDrafter(Generic[Kept]):
    """Opens, asks and tells one memory per request."""

    name = "lookup"
    needs = Needs()

    def __init__(self, draft_min: int = 0) -> None:
        self._draft_min = draft_min
        self._memories: dict[str, Kept] = {}

    def remember(self, request: Request) -> Kept | None:
        """The memory of a new request; None: it goes without drafts."""
        raise NotImplementedError

    def forget(self, memory: Kept) -> None:
        """The request is done."""

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            memory = self.remember(request)
            if memory is not None:
                self._memories[request.id] = memory

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        memories, least, name = self._memories, self._draft_min, self.name
        drafts = [tree.EMPTY] * batch.num_seqs
        for row, (request_id, budget) in enumerate(zip(batch.request_ids, budgets.tolist())):
            memory = memories.get(request_id)
            if memory is not None:
                memory.drafted = None  # a step that came to nothing left it
                if budget > 0:
                    drafts[row] = memory.draft(budget, least, name)
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        emitted, starts = verdict.emitted.tolist(), verdict.emitted_start.tolist()
        memories = self._memories
        for row, request_id in enumerate(batch.request_ids):
            begin, end = starts[row], starts[row + 1]
            if begin < end and (memory := memories.get(request_id)) is not None:
                memory.observe(emitted[begin:end])

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            memory = self._memories.pop(request_id, None)
            if memory is not None:
                self.forget(memory)

    def shutdown(self) -> None:
        self._memories.clear()
