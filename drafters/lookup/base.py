"""What drafters that look tokens up share: a memory per request, and its walk through a step.

Called by `Drafting`; the memories are in the drafters' own files. This is a hot path (tens of
requests, thousands of tokens each, every step): tokens are Python's compact arrays, a slice's
bytes are a key, and nothing is looked at twice.

A step indexes tokens in proportion to its forward (`allowance.py`), so that no prompt holds up the
batch: what was emitted first, then what waits of prompts, in order of arrival. Until its prompt is
indexed to the end, a request drafts from what is known of it, or not at all.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from ...scheduler import tree
from ...scheduler.plan import Batch
from ...scheduler.types import Draft, IntArray, Request, Verdict
from ..protocol import Needs
from .allowance import Allowance

INT32 = "i"
_INT32 = np.dtype(np.int32)


def tokens_of(*parts: IntArray) -> array[int]:
    """Tokens as a compact array."""
    tokens = array(INT32)
    for part in parts:
        tokens.frombytes(np.ascontiguousarray(part, dtype=np.int32).view(np.uint8).data)
    return tokens


def chain(tokens: array[int], source: str) -> Draft:
    """`tree.chain` without its copies."""
    return chain_of(np.frombuffer(tokens, _INT32), source)


def chain_of(ids: IntArray, source: str) -> Draft:
    """`tree.chain` of tokens that are nobody else's."""
    return Draft(ids, tree.chain_parents(len(ids)), None, source)


def num_agreeing(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """How many tokens of a draft were emitted.

    Not read from the verdict: another drafter's draft may have been verified in its place.
    """
    count = 0
    for guess, token in zip(drafted, emitted):
        if guess != token:
            break
        count += 1
    return count


class Memory:
    """One request's tokens, and what a drafter knows of them."""

    __slots__ = ("num_indexed", "tokens")

    def __init__(self, request: Request) -> None:
        self.tokens = tokens_of(request.prompt, request.emitted)
        self.num_indexed = 0  # tokens that were taken in

    def find(self, budget: int) -> array[int] | None:
        """The tokens that may follow; None or empty if there is no guess. May be too long."""
        raise NotImplementedError

    def take(self, begin: int, end: int) -> None:
        """Indexes the tokens of [begin, end), which are the next ones."""
        raise NotImplementedError

    def index(self, max_tokens: int) -> int:
        """Takes in what waits, up to so many tokens; how many it was."""
        begin = self.num_indexed
        end = self.num_indexed = min(len(self.tokens), begin + max_tokens)
        if begin < end:
            self.take(begin, end)
        return end - begin

    def learn(self, emitted: list[int]) -> int:
        """The target's tokens, which come next; how many are indexed at once."""
        begin = len(self.tokens)
        self.tokens.extend(emitted)
        if self.num_indexed != begin or not emitted:
            return 0
        self.num_indexed = begin + len(emitted)
        self.take(begin, self.num_indexed)
        return len(emitted)

    def pick(self, budget: int, least: int) -> array[int] | None:
        """At most `budget` tokens; None if fewer than `least` are found."""
        found = self.find(budget) if budget > 0 else None
        if not found:
            return None
        if len(found) > budget:
            found = found[:budget]
        return found if len(found) >= least else None

    def draft(self, budget: int, least: int, source: str) -> Draft:
        found = self.pick(budget, least)
        return tree.EMPTY if found is None else chain(found, source)

    def observe(self, emitted: list[int]) -> int:
        """The step's outcome; returns as `learn`."""
        return self.learn(emitted)


class JudgingMemory(Memory):
    """A memory that is told how good its drafts were."""

    __slots__ = ("drafted",)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.drafted: array[int] | None = None  # in the step that runs

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """What became of the draft. `learn` follows."""
        raise NotImplementedError

    def pick(self, budget: int, least: int) -> array[int] | None:
        self.drafted = super().pick(budget, least)  # what a step left that came to nothing is gone
        return self.drafted

    def observe(self, emitted: list[int]) -> int:
        drafted = self.drafted
        if drafted is not None:
            self.drafted = None
            self.judge(len(drafted), num_agreeing(drafted, emitted))
        return self.learn(emitted)


Kept = TypeVar("Kept", bound=Memory)


class LookupDrafter(Generic[Kept]):
    """Opens, asks and tells one memory per request."""

    name = "lookup"
    needs = Needs()
    max_indexed = 512  # tokens of all requests that a step indexes whatever its forward takes

    def __init__(self, draft_min: int = 0) -> None:
        self._draft_min = draft_min
        self._memories: dict[str, Kept] = {}
        self._behind: dict[str, Kept] = {}  # whose tokens are not all indexed, in order of arrival
        self._allowance = Allowance(self.max_indexed)
        self.num_spare = 0  # tokens that `observe` left for what else there is to index

    @property
    def num_waiting(self) -> int:
        """Tokens that are known and not indexed yet."""
        return sum(len(each.tokens) - each.num_indexed for each in self._behind.values())

    def remember(self, request: Request) -> Kept | None:
        """The memory of a new request; None: it goes without drafts."""
        raise NotImplementedError

    def forget(self, memory: Kept) -> None:
        """The request is done."""

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            memory = self.remember(request)
            if memory is not None:
                self._memories[request.id] = self._behind[request.id] = memory
        self._catch_up()

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        memories, least, name = self._memories, self._draft_min, self.name
        drafts = [tree.EMPTY] * batch.num_seqs
        for row, (request_id, budget) in enumerate(zip(batch.request_ids, budgets.tolist())):
            memory = memories.get(request_id)
            if memory is not None:
                drafts[row] = memory.draft(budget, least, name)
        self._allowance.forward_begins()
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        emitted, starts = verdict.emitted.tolist(), verdict.emitted_start.tolist()
        memories, behind, num_indexed = self._memories, self._behind, 0
        for row, request_id in enumerate(batch.request_ids):
            begin, end = starts[row], starts[row + 1]
            if begin < end and (memory := memories.get(request_id)) is not None:
                num_indexed += memory.observe(emitted[begin:end])
                if memory.num_indexed < len(memory.tokens):
                    behind[request_id] = memory
        self._allowance.forward_ended(batch.num_tokens, num_indexed)
        self._catch_up()
        self.num_spare = self._allowance.renew()

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._behind.pop(request_id, None)
            memory = self._memories.pop(request_id, None)
            if memory is not None:
                self.forget(memory)

    def shutdown(self) -> None:
        self._memories.clear()
        self._behind.clear()

    def _catch_up(self) -> None:
        """Indexes what waits, as far as the step's allowance goes."""
        while self._behind and (num_tokens := self._allowance.tokens()) > 0:
            request_id, memory = next(iter(self._behind.items()))
            self._allowance.spend(memory.index(num_tokens))
            if memory.num_indexed == len(memory.tokens):
                del self._behind[request_id]
