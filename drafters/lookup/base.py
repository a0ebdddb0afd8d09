"""What drafters that look tokens up share: a memory per request, and its walk through a step.

This is a hot path (tens of requests, thousands of tokens each, every step): tokens are Python's
compact arrays, a slice's bytes are a key, and nothing is looked at twice.

A step indexes tokens in proportion to its forward (`Allowance`), so that no prompt holds up the
batch: what was emitted first, then what waits of prompts, in order of arrival. Until its prompt is
indexed to the end, a request drafts from the part that is, or not at all. Where nothing is asked,
what several steps emitted is learnt together.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from ...scheduler import tree
from ...scheduler.types import Batch, Draft, IntArray, Request, Verdict
from ..protocol import Drafter

_SHARE = 0.25  # of the forward's time
_LONGEST_S = 0.2  # a stall is no forward
_PIECE = 128  # tokens between two looks at the clock


class Allowance:
    """How many tokens one drafter may index in the current step.

    It has three parts: a fixed number of tokens; as many as the target computed in the step, so
    that a prompt is indexed when its prefill is done; and whatever can be indexed in a share of
    the forward's time, for prompts whose prefill was found in the prefix cache.

    Args:
        fixed: tokens of every step; an eighth of them are left for what waits, whatever is emitted.
    """

    def __init__(self, fixed: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._fixed, self._clock = fixed, clock
        self._num_left = fixed
        self._started_s: float | None = None  # when the forward began
        self._until_s = 0.0

    def forward_begins(self) -> None:
        """Drafts were proposed; the target runs next."""
        self._started_s = self._clock()

    def forward_ended(self, num_computed: int, num_indexed: int = 0) -> None:
        """The target computed `num_computed` known tokens in the step; of what it emitted,
        `num_indexed` are indexed already."""
        self._num_left = max(self._num_left + num_computed - num_indexed, self._fixed // 8)
        if self._started_s is not None:
            now_s = self._clock()
            self._until_s = now_s + _SHARE * min(now_s - self._started_s, _LONGEST_S)
            self._started_s = None

    def spend(self, num_tokens: int) -> None:
        """Counts indexed tokens."""
        self._num_left -= num_tokens

    def tokens(self) -> int:
        """How many may be indexed before this is asked again; 0: none in this step."""
        if self._num_left > 0:
            return self._num_left
        return _PIECE if self._clock() < self._until_s else 0

    def renew(self) -> int:
        """Ends the step; returns the tokens that are left for work which can wait."""
        num_spare = max(self._num_left, self._fixed // 8)
        self._num_left, self._until_s = self._fixed, 0.0
        return num_spare


INT32 = "i"


def chain_of(ids: IntArray, source: str) -> Draft:
    """`tree.chain` without its copy, of tokens that nothing else refers to."""
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
    """One request's tokens, and an index of them."""

    __slots__ = ("is_isolated", "num_indexed", "tokens")

    def __init__(self, request: Request) -> None:
        self.is_isolated = request.speculation.isolated  # nothing of it outlives the request
        self.tokens = array(INT32, request.prompt.tobytes() + request.emitted.tobytes())
        self.num_indexed = 0  # tokens

    def find(self, budget: int) -> array[int] | IntArray | None:
        """The tokens that may follow; None or empty if there is no guess. May be too long."""
        raise NotImplementedError

    def ids(self, begin: int, end: int | None = None) -> IntArray:
        """Some of the tokens; to be let go of before there are more."""
        return np.frombuffer(self.tokens, np.int32)[begin:end]

    def take(self, begin: int, end: int) -> None:
        """Indexes the tokens of [begin, end), which are the next ones."""
        raise NotImplementedError

    def index(self, max_tokens: int) -> int:
        """Indexes what waits, up to `max_tokens`; returns the number of tokens."""
        begin = self.num_indexed
        end = self.num_indexed = min(len(self.tokens), begin + max_tokens)
        if begin < end:
            self.take(begin, end)
        return end - begin

    def learn(self, emitted: list[int]) -> int:
        """Appends the target's tokens; returns how many are indexed at once."""
        begin = len(self.tokens)
        self.tokens.extend(emitted)
        if self.num_indexed != begin:
            return 0
        self.num_indexed = begin + len(emitted)
        self.take(begin, self.num_indexed)
        return len(emitted)

    def draft(self, budget: int, least: int, source: str) -> Draft:
        """At most `budget` tokens; `EMPTY` if fewer than `least` are found."""
        found = self.find(budget) if budget > 0 else None
        if found is None or min(len(found), budget) < max(1, least):
            return tree.EMPTY
        return chain_of(np.frombuffer(found, np.int32)[:budget], source)

    def draft_after(self, chain: Sequence[int], budget: int, source: str) -> Draft:
        """At most `budget` tokens that may follow the text and `chain`, which stays out of it."""
        self.tokens.extend(chain)
        found = self.find(budget)
        del self.tokens[-len(chain) :]
        if found is None or not len(found):
            return tree.EMPTY
        return chain_of(np.frombuffer(found, np.int32)[:budget], source)


Kept = TypeVar("Kept", bound=Memory)


class LookupDrafter(Drafter, Generic[Kept]):
    """Opens, asks and updates one memory per request.

    `most_put_off` is the number of steps that are learnt together where nothing was asked.

    Args:
        name: in statistics.
        memory: returns the memory of a new request; None: the request gets no drafts.
        draft_min: shorter drafts are dropped.
        max_indexed: tokens of all requests that a step indexes whatever its forward takes.
    """

    most_put_off = 16

    def __init__(
        self,
        name: str,
        memory: Callable[[Request], Kept | None],
        draft_min: int = 0,
        max_indexed: int = 512,
    ) -> None:
        self.name = name
        self._memory, self._draft_min = memory, draft_min
        self._memories: dict[str, Kept] = {}
        self._behind: dict[str, Kept] = {}  # whose tokens are not all indexed, in order of arrival
        self._allowance = Allowance(max_indexed)
        self._num_spare = 0  # tokens that `observe` left for what else there is to index
        self._was_asked = False  # since the last step was observed
        # Of steps that are not learnt yet: requests, emitted tokens, where each request's begin.
        self._put_off: list[tuple[Sequence[str], list[int], list[int]]] = []
        self._num_put_off = 0  # tokens that the target computed in them

    @property
    def num_waiting(self) -> int:
        """Tokens that are known and not indexed yet."""
        self._catch_up_steps()
        return sum(len(each.tokens) - each.num_indexed for each in self._behind.values())

    def open(self, requests: Sequence[Request]) -> None:
        self._catch_up_steps()
        for request in requests:
            memory = self._memory(request)
            if memory is not None:
                self._memories[request.id] = self._behind[request.id] = memory
        self._catch_up()

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        self._catch_up_steps()
        self._was_asked = True
        memories, least, name = self._memories, self._draft_min, self.name
        drafts = [tree.EMPTY] * batch.num_seqs
        for row, (request_id, budget) in enumerate(zip(batch.request_ids, budgets.tolist())):
            memory = memories.get(request_id)
            if memory is not None:
                drafts[row] = memory.draft(budget, least, name)
        self._allowance.forward_begins()
        return drafts

    def extend(
        self, batch: Batch, chains: Sequence[Sequence[int]], budgets: IntArray
    ) -> list[Draft]:
        self._catch_up_steps()
        self._was_asked = True
        drafts = [tree.EMPTY] * batch.num_seqs
        for row, (request_id, budget) in enumerate(zip(batch.request_ids, budgets.tolist())):
            memory = self._memories.get(request_id)
            if budget > 0 and memory is not None:
                drafts[row] = memory.draft_after(chains[row], budget, self.name)
        return drafts

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self._put_off.append(
            (batch.request_ids, verdict.emitted.tolist(), verdict.emitted_start.tolist())
        )
        self._num_put_off += batch.num_tokens
        can_wait = not self._was_asked and not self._behind
        if can_wait and len(self._put_off) < self.most_put_off:
            self._num_spare = self._allowance.renew()
            return
        self._was_asked = False
        self._catch_up_steps()

    def _catch_up_steps(self) -> None:
        """Learns what the steps that were put off emitted."""
        if not self._put_off:
            return
        steps, self._put_off = self._put_off, []
        num_computed, self._num_put_off = self._num_put_off, 0
        if len(steps) == 1:
            ids, emitted, starts = steps[0]
            told = [(each, emitted[starts[row] : starts[row + 1]]) for row, each in enumerate(ids)]
        else:
            texts: dict[str, list[int]] = {}
            for ids, emitted, starts in steps:
                for row, each in enumerate(ids):
                    texts.setdefault(each, []).extend(emitted[starts[row] : starts[row + 1]])
            told = list(texts.items())
        memories, behind, num_indexed = self._memories, self._behind, 0
        for request_id, text in told:
            if text and (memory := memories.get(request_id)) is not None:
                num_indexed += memory.learn(text)
                if memory.num_indexed < len(memory.tokens):
                    behind[request_id] = memory
        self._allowance.forward_ended(num_computed, num_indexed)
        if behind:
            self._catch_up()
        self._num_spare = self._allowance.renew()

    def close(self, request_ids: Sequence[str]) -> None:
        try:
            self._catch_up_steps()
        finally:
            for request_id in request_ids:
                self._behind.pop(request_id, None)
                memory = self._memories.pop(request_id, None)
                if memory is not None:
                    self._closed(memory)

    def shutdown(self) -> None:
        self._put_off.clear()
        self._memories.clear()
        self._behind.clear()

    def _closed(self, memory: Kept) -> None:
        """Takes from a finished request what outlives it; nothing by default."""

    def _catch_up(self) -> None:
        """Indexes what waits, as far as the step's allowance goes."""
        while self._behind and (num_tokens := self._allowance.tokens()) > 0:
            request_id, memory = next(iter(self._behind.items()))
            self._allowance.spend(memory.index(num_tokens))
            if memory.num_indexed == len(memory.tokens):
                del self._behind[request_id]
