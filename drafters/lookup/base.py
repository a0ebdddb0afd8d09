"""The base of look-up drafters: a memory per request, and how it is updated in a step.

This is a hot path: tens of requests with thousands of tokens each, in every step. Tokens are kept
in Python's compact arrays, the bytes of a slice serve as a key, and no token is indexed twice.

A step indexes tokens in proportion to the time of its forward (`Allowance`), so that a long prompt
does not delay the batch: emitted tokens first, then the rest of prompts, in order of arrival. Until
its prompt is indexed completely, a request drafts from the indexed part, or not at all. While no
drafts are asked for, the tokens of several steps are indexed together.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...config import NGramConfig, PromptLookupConfig
from ...scheduler import tree
from ...scheduler.types import Batch, Draft, IntArray, Request, Verdict
from ..protocol import Drafter

_SHARE = 0.25  # share of the forward's time that indexing may take
_LONGEST_S = 0.2  # longer forwards count as this long, since they may be stalls
_PIECE = 128  # tokens indexed between two readings of the clock


class Allowance:
    """The number of tokens that one drafter may index in the current step.

    It is the sum of three parts: a fixed number; as many tokens as the target computed in the
    step, so that a prompt is indexed by the end of its prefill; and what can be indexed in a share
    of the forward's time, for prompts whose prefill was found in the prefix cache.

    Args:
        fixed: tokens per step; an eighth of them is reserved for prompts that wait.
    """

    def __init__(self, fixed: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._fixed, self._clock = fixed, clock
        self._num_left = fixed
        self._started_s: float | None = None  # when the forward began
        self._until_s = 0.0

    def forward_begins(self) -> None:
        """Called after drafts were proposed, before the target runs."""
        self._started_s = self._clock()

    def forward_ended(self, num_computed: int, num_indexed: int = 0) -> None:
        """Called after the target computed `num_computed` known tokens.

        `num_indexed` of the tokens that it emitted are indexed already.
        """
        self._num_left = max(self._num_left + num_computed - num_indexed, self._fixed // 8)
        if self._started_s is not None:
            now_s = self._clock()
            self._until_s = now_s + _SHARE * min(now_s - self._started_s, _LONGEST_S)
            self._started_s = None

    def spend(self, num_tokens: int) -> None:
        """Counts indexed tokens."""
        self._num_left -= num_tokens

    def tokens(self) -> int:
        """Number of tokens that may be indexed before the next call; 0: no more in this step."""
        if self._num_left > 0:
            return self._num_left
        return _PIECE if self._clock() < self._until_s else 0

    def renew(self) -> int:
        """Ends the step; returns the tokens that are left for work with less urgency."""
        num_spare = max(self._num_left, self._fixed // 8)
        self._num_left, self._until_s = self._fixed, 0.0
        return num_spare


INT32 = "i"


def chain_of(ids: IntArray, source: str) -> Draft:
    """As `tree.chain` without a copy; nothing else may refer to the tokens."""
    return Draft(ids, tree.chain_parents(len(ids)), None, source)


def num_agreeing(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """Number of leading tokens of a draft that were emitted.

    The verdict does not give it, since another drafter's draft may have been verified instead.
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
        self.is_isolated = request.speculation.isolated  # nothing of it is kept after the request
        self.tokens = array(INT32, request.prompt.tobytes() + request.emitted.tobytes())
        self.num_indexed = 0  # tokens

    def find(self, budget: int) -> array[int] | IntArray | None:
        """The tokens that may follow; None or empty without a guess. May exceed the budget."""
        raise NotImplementedError

    def ids(self, begin: int, end: int | None = None) -> IntArray:
        """A view of some tokens, which must be released before tokens are appended."""
        return np.frombuffer(self.tokens, np.int32)[begin:end]

    def take(self, begin: int, end: int) -> None:
        """Indexes the tokens of [begin, end), which are the first unindexed ones."""
        raise NotImplementedError

    def index(self, max_tokens: int) -> int:
        """Indexes up to `max_tokens` unindexed tokens; returns their number."""
        begin = self.num_indexed
        end = self.num_indexed = min(len(self.tokens), begin + max_tokens)
        if begin < end:
            self.take(begin, end)
        return end - begin

    def learn(self, emitted: list[int]) -> int:
        """Appends the target's tokens; returns the number that was indexed at once."""
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
        """At most `budget` tokens that may follow the text and `chain`; `chain` is not indexed."""
        self.tokens.extend(chain)
        found = self.find(budget)
        del self.tokens[-len(chain) :]
        if found is None or not len(found):
            return tree.EMPTY
        return chain_of(np.frombuffer(found, np.int32)[:budget], source)


Kept = TypeVar("Kept", bound=Memory)


class LookupDrafter(Drafter, Generic[Kept]):
    """Keeps one memory per request.

    `most_put_off` is the number of steps that are indexed together while no drafts are asked for.

    Args:
        name: in statistics.
        memory: returns the memory of a new request; None: the request gets no drafts.
        draft_min: shorter drafts are dropped.
        max_indexed: tokens of all requests that a step may index, whatever the time of its forward.
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
        self._behind: dict[str, Kept] = {}  # not completely indexed, in order of arrival
        self._allowance = Allowance(max_indexed)
        self._num_spare = 0  # tokens that `observe` left for other indexing
        self._was_asked = False  # whether drafts were asked for since the last `observe`
        # Steps that are not indexed yet: requests, emitted tokens, and offsets of each request's.
        self._put_off: list[tuple[Sequence[str], list[int], list[int]]] = []
        self._num_put_off = 0  # known tokens that the target computed in these steps

    @property
    def num_waiting(self) -> int:
        """Number of known tokens that are not indexed yet."""
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
        """Indexes the tokens of the postponed steps."""
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
        """Called with a finished request's memory, to keep what later requests use."""

    def _catch_up(self) -> None:
        """Indexes waiting tokens, as far as the step's allowance goes."""
        while self._behind and (num_tokens := self._allowance.tokens()) > 0:
            request_id, memory = next(iter(self._behind.items()))
            self._allowance.spend(memory.index(num_tokens))
            if memory.num_indexed == len(memory.tokens):
                del self._behind[request_id]


# -- rolling hashes of n-grams, and memories of where the longest known suffix occurred before
#
# `slots_of` hashes every n-gram of a text for a table of a fixed size: h = h * factor + token, from
# the left. `tail_keys` hashes the n-grams that end a text, each one token longer on the left than
# the one before, so that the keys of all sizes take one pass.


MASK = (1 << 61) - 1
FACTOR = 0x9E3779B97F4A7C15  # odd and without structure, so that short n-grams do not collide


@lru_cache(maxsize=64)
def powers_of(factor: int, size: int, num_slots: int) -> NDArray[np.uint32]:  # [size]
    """Factors of an n-gram's tokens, oldest first; `num_slots` is a power of two up to 2^32."""
    powers = [pow(factor, size - 1 - index, num_slots) for index in range(size)]
    return np.array(powers, dtype=np.uint32)


def slots_of(
    tokens: IntArray,  # [num_tokens], at least as many as `powers`
    powers: NDArray[np.uint32],  # [size]
    num_slots: int,
) -> NDArray[np.uint32]:  # [num_tokens - size + 1]
    """The slots of the n-grams that begin at each token."""
    return np.correlate(tokens.view(np.uint32), powers) & np.uint32(num_slots - 1)


def factors_of(size: int) -> list[int]:
    """Factors for `tail_keys` of n-grams of up to `size` tokens."""
    return [pow(FACTOR, index, MASK + 1) for index in range(size)]


def tail_keys(tail: Sequence[int], factors: Sequence[int]) -> list[int]:
    """Keys of the n-grams that end `tail`, shortest first."""
    key, keys = 0, []
    for token, factor in zip(reversed(tail), factors):
        key = (key + (token + 1) * factor) & MASK
        keys.append(key)
    return keys


_NOWHERE = (-1, 0, -1, -1)


class FirstSeen(Memory):
    """Drafts what followed the first occurrence of the longest known suffix.

    An n-gram gets an entry only if its shorter suffix is known already with another preceding
    token. A token therefore adds one entry at most, whatever the largest size, and repeated text
    adds none.

    Args:
        max_size: tokens of the longest n-gram that is indexed.
        ends: end tokens; a draft is cut before the first of them.
    """

    __slots__ = (
        "_after", "_ends", "_factors", "_max_len", "_max_size", "_min_size", "_same", "_walked",
    )  # fmt: skip
    tracks_sizes = False  # whether `_ended_before` is to be called

    def __init__(
        self,
        request: Request,
        config: NGramConfig | PromptLookupConfig,
        max_size: int,
        min_size: int = 1,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(request)
        self._max_size, self._min_size, self._max_len = max_size, min_size, config.draft_len
        self._ends = ends
        self._factors = factors_of(max_size)
        self._after: dict[int, int] = {}  # key -> first place
        self._same = -1  # the earlier place at which the newest place's longest known n-gram ended
        self._walked = _NOWHERE  # the last query of `_walk` and its result

    def find(self, budget: int) -> array[int] | None:
        size, begin = self.match()
        if size < self._min_size:
            return None
        found = self.tokens[begin : begin + min(budget, self._max_len)]
        if not self._ends.isdisjoint(found):
            return found[: next(index for index, token in enumerate(found) if token in self._ends)]
        return found

    def draft_after(self, chain: Sequence[int], budget: int, source: str) -> Draft:
        walked = self._walked
        draft = super().draft_after(chain, budget, source)
        self._walked = walked
        return draft

    def match(self) -> tuple[int, int]:
        """Size of the text's longest known suffix, and the place of its earlier continuation."""
        place = len(self.tokens)
        size, first, key = self._walk(place)
        self._walked = (place, size, first, key)
        return size, first

    def take(self, begin: int, end: int) -> None:
        """Indexes the n-grams that end at [begin, end), whose next tokens are known."""
        tokens, after, same, max_size = self.tokens, self._after, self._same, self._max_size
        walked, self._walked = self._walked, _NOWHERE
        for place in range(begin, end):
            if same >= 0 and tokens[same] == tokens[place - 1]:
                same, size = same + 1, max_size
            else:
                # The result of `match` is still valid if nothing was indexed since.
                size, first, key = walked[1:] if walked[0] == place == begin else self._walk(place)
                if key >= 0:
                    after[key] = place
                same = first if size == max_size else -1
            if self.tracks_sizes:
                self._ended_before(place, size)
        self._same = same

    def _ended_before(self, place: int, size: int) -> None:
        """Called with the size of the longest n-gram that ends at `place` and occurred before."""

    def _walk(self, place: int) -> tuple[int, int, int]:
        """The longest known n-gram that ends at `place`: its size and its first place.

        The third value is the key of the next longer n-gram, which has no entry; -1: there is none.
        """
        tokens, factors, after = self.tokens, self._factors, self._after
        first, key, limit = -1, 0, min(self._max_size, place)
        for size in range(limit):
            token = tokens[place - 1 - size]
            key = (key + (token + 1) * factors[size]) & MASK  # as `tail_keys`; may end early
            if first <= size or tokens[first - 1 - size] != token:
                found = after.get(key)
                if found is None:
                    return size, first, key
                first = found
        return limit, first, -1


class NewestSeen(FirstSeen):
    """Drafts what followed the last occurrence of the longest known suffix.

    If that continuation is cut short by the end of the text, it is drafted as it is; otherwise the
    draft is the continuation of full length that was completed last.
    """

    __slots__ = ("_newest", "_size", "_sizes")
    tracks_sizes = True

    def __init__(
        self, request: Request, config: NGramConfig, max_size: int, min_size: int = 1
    ) -> None:
        # A continuation followed an n-gram if both together, an n-gram of this size, were seen.
        super().__init__(request, config, max_size + config.draft_len, min_size)
        self._size = max_size
        self._sizes = array("H")  # place -> size of its longest n-gram that occurred before
        self._newest: dict[int, int] = {}  # key -> newest place, if it is not the first

    def match(self) -> tuple[int, int]:
        known, first = super().match()
        tokens, place, length = self.tokens, len(self.tokens), self._max_len
        size = min(known, self._size)
        if size == 0:
            return 0, -1
        if tokens[-1] in tokens[max(0, place - length - 1) : -1]:
            tail = tokens[-size:]
            for near in range(place - 1, max(size, place - length) - 1, -1):
                if tokens[near - size : near] == tail and (
                    near > place - length or known < size + length
                ):
                    return size, near
        return size, self._newest.get(self._keys(place, size)[-1], first)

    def _ended_before(self, place: int, size: int) -> None:
        sizes = self._sizes
        sizes.append(size)
        before = place - self._max_len
        if before > 0 and size < sizes[before] + self._max_len:
            longest = min(sizes[before], self._size)
            keys = self._keys(before, longest)
            for each in range(max(0, size - self._max_len), longest):
                self._newest[keys[each]] = before

    def _keys(self, place: int, size: int) -> list[int]:
        """Keys of the n-grams of up to `size` tokens that end at `place`."""
        return tail_keys(self.tokens[place - size : place], self._factors)
