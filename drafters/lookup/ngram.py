"""NGram and PromptLookup: what followed the longest known tail of the sequence.

NGram has the semantics of `tensorrt_llm/_torch/speculative/ngram.py` (after Saxena 2023, prompt
lookup decoding): keys are all n-grams up to `max_matching_ngram_size`, values the next at most
`max_draft_len` tokens; the longest tail of the sequence that is a key gives the draft. A pool is
private to its request, or shared (`pool_scope`): by a tenant's requests, by a whole engine's, or
by a tenant's in all engines, which a `PoolLink` keeps up to date.

A private pool is an index of the request's own text (`base.py`). A shared one stores what each
pattern gave; a pattern is stored when all of its match is known, and until then only its own
request finds it.

PromptLookup has the semantics of transformers' `PromptLookupCandidateGenerator`: n-grams from
`max_matching_ngram_size` down to one token; of the first size that matches anywhere with a
continuation, the leftmost match; its continuation up to `max_draft_len` tokens, cut before an end
token.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from ...config import NGramConfig, PromptLookupConfig
from ...scheduler.types import Batch, IntArray, Request, Verdict
from ..protocol import DraftFault
from .base import (
    INT32,
    FirstSeen,
    LookupDrafter,
    Memory,
    NewestSeen,
    factors_of,
    num_agreeing,
    tail_keys,
)
from .pool import PoolLink

Tokens = tuple[int, ...]
_MAX_MATCHES = 256  # kept per pattern where the newest is wanted
_MAX_STORED = 1600  # patterns that shared pools learn in a step
_STORED_AT_ONCE = 16  # of these, per request that emitted something
_PUBLISH_EVERY = 32  # tokens of one request
_MAX_WINDOW = 512  # tokens published together; prompts that begin alike have windows in common


class NGramPool:
    """Patterns, by hash, and their matches; the one learnt or found longest ago goes first.

    In TensorRT-LLM a match longer than the first stored one always replaces the whole set, whatever
    `is_keep_all` is, so that option has no effect there and is not one here. The oldest match is
    therefore the first of the longest, for which one match per pattern is enough.
    """

    def __init__(self, config: NGramConfig) -> None:
        self.max_draft_len = config.draft_len
        self.max_size = config.max_matching_ngram_size
        self._min_size = config.min_matching_ngram_size
        self._oldest = config.is_use_oldest
        self._factors = factors_of(self.max_size)
        self._matches: OrderedDict[int, Tokens] = OrderedDict()  # the one that counts
        # Of patterns with several, where the newest counts: all, oldest first and none longer
        # than one before it.
        self._all: dict[int, dict[Tokens, None]] = {}

    def __len__(self) -> int:
        return len(self._matches)

    @property
    def num_overlap(self) -> int:
        """Tokens before a new one whose patterns it can still make longer."""
        return self.max_draft_len + self.max_size - 1

    def learn(
        self, tokens: array[int] | IntArray, begin: int, end: int, *, is_over: bool = True
    ) -> None:
        """Learns a text's patterns up to `end`, of which what is before `begin` was learnt before.

        Matches that `end` cuts short are left for the next call, unless the text is over.
        """
        start = max(0, begin - self.num_overlap)
        window = tokens[start:end].tolist()
        length, longest, factors = self.max_draft_len, self.max_size, self._factors
        matches, store = self._matches, None if self._oldest else self._store_newest
        touch = matches.move_to_end
        stop = len(window) if is_over else len(window) - length + 1
        for place in range(max(1, begin - start - length + 1), stop):
            match = tuple(window[place : place + length])
            for key in tail_keys(window[max(0, place - longest) : place], factors):
                if store is not None:
                    store(key, match)
                elif len(matches.setdefault(key, match)) < len(match):
                    matches[key] = match
                touch(key)

    def find(self, tail: Sequence[int]) -> tuple[int, Tokens]:
        """Size of the longest known suffix of `tail`, and what followed it; (0, ()) if none is."""
        keys = tail_keys(tail, self._factors)
        for size in range(len(keys), self._min_size - 1, -1):
            match = self._matches.get(keys[size - 1])
            if match is not None:
                self._matches.move_to_end(keys[size - 1])
                return size, match
        return 0, ()

    def evict(self, count: int) -> None:
        """Removes the patterns that were learnt, or found, longest ago."""
        for _ in range(count):
            key, _ = self._matches.popitem(last=False)
            self._all.pop(key, None)

    def _store_newest(self, key: int, match: Tokens) -> None:
        """A new match drops all that are shorter, so that those are the last ones stored."""
        newest = self._matches.setdefault(key, match)
        stored = self._all.get(key)
        if stored is None:
            if newest == match:
                return
            stored = {newest: None}
            if len(newest) >= len(match):
                self._all[key] = stored
        elif match in stored:
            return
        while stored and len(next(reversed(stored))) < len(match):
            stored.popitem()
        if len(stored) == _MAX_MATCHES:
            del stored[next(iter(stored))]
        stored[match] = None
        self._matches[key] = match


class PoolMemory(Memory):
    """A request's reading and writing of a shared pool."""

    __slots__ = ("_at_once", "_min_size", "_oldest", "num_published", "pool", "sharer")

    def __init__(self, request: Request, config: NGramConfig, pool: NGramPool, sharer: str) -> None:
        super().__init__(request)
        self.pool, self.sharer = pool, sharer
        self.num_published = 0  # tokens
        self._at_once = _STORED_AT_ONCE // config.max_matching_ngram_size
        self._min_size, self._oldest = config.min_matching_ngram_size, config.is_use_oldest

    def take(self, begin: int, end: int) -> None:
        self.pool.learn(self.tokens, begin, end, is_over=False)

    def learn(self, emitted: list[int]) -> int:
        self.tokens.extend(emitted)
        return self.index(self._at_once)

    def find(self, budget: int) -> array[int] | None:
        tail = self.tokens[-self.pool.max_size :]
        size, match = self.pool.find(tail)
        near_size, begin = self._near(tail)
        near_len = len(self.tokens) - begin
        if near_size >= max(size, self._min_size) and (
            near_size > size or not self._oldest or near_len > len(match)
        ):
            return self.tokens[begin:]
        return array(INT32, match) if size else None

    def _near(self, tail: array[int]) -> tuple[int, int]:
        """The longest tail among those whose match the end cuts short, and where that begins."""
        tokens, place = self.tokens, len(self.tokens)
        largest, begin, first = 0, place, max(0, place - self.pool.max_draft_len)
        if not tail or tail[-1] not in tokens[first:-1]:
            return largest, begin
        for end in range(first + 1, place):
            before = tokens[max(0, end - len(tail)) : end]
            size = num_agreeing(tail[::-1], before[::-1])
            if size > largest or (size == largest and not self._oldest):
                largest, begin = size, end
        return largest, begin


class SharedNGram(LookupDrafter[PoolMemory]):
    """NGram with shared pools: those by who shares them, and the texts still to be learnt.

    All pools together hold at most `pool_max_patterns`; the sharers that were served longest ago
    lose theirs first, and of theirs those learnt or found longest ago.
    """

    most_put_off = 1  # pools are cut to their bound after every step

    def __init__(self, config: NGramConfig, link: PoolLink | None) -> None:
        max_indexed = max(1, _MAX_STORED // config.max_matching_ngram_size)
        super().__init__("ngram", self._pool_memory, max_indexed=max_indexed)
        self._config, self._link = config, link
        self._pools: OrderedDict[str, NGramPool] = OrderedDict()  # served longest ago first
        # Sharer, text, and how much of it was learnt.
        self._backlog: deque[tuple[str, array[int] | IntArray, int]] = deque()
        self._num_backlog = 0  # tokens in it

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + self._num_backlog

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Also learns what waits and what others published.

        Raises:
            DraftFault: the link failed; the pools are as they were.
        """
        super().observe(batch, verdict)
        sharing = [memory for memory in self._memories.values() if not memory.is_isolated]
        sharers = {memory.sharer for memory in sharing}
        if self._link is not None:
            for memory in sharing:
                self._publish(self._link, memory, _PUBLISH_EVERY)
            for sharer in sharers if not self._backlog else ():
                for window in self._link.poll(sharer):
                    self._postpone(sharer, window)
        num_left = self._num_spare
        while self._backlog and num_left > 0:
            sharer, text, begin = self._backlog.popleft()
            end = min(len(text), begin + num_left)
            self._pool(sharer).learn(text, begin, end, is_over=end == len(text))
            if end < len(text):
                self._backlog.appendleft((sharer, text, end))
            self._num_backlog -= end - begin
            num_left -= max(1, end - begin)
        self._evict(sharers)
        fault = None if self._link is None else self._link.take_fault()
        if fault is not None:
            raise DraftFault("the shared pool failed; its text is missing for a while") from fault

    def shutdown(self) -> None:
        super().shutdown()
        self._pools.clear()
        self._backlog.clear()
        self._num_backlog = 0
        if self._link is not None:
            self._link.shutdown()

    def _closed(self, memory: PoolMemory) -> None:
        if memory.is_isolated:
            return
        if self._link is not None:
            self._publish(self._link, memory, 1)
        self._postpone(memory.sharer, memory.tokens, memory.num_indexed)

    def _pool_memory(self, request: Request) -> PoolMemory:
        sharer = request.adapter if self._config.pool_scope == "replica" else request.sharer
        if request.speculation.isolated:
            return PoolMemory(request, self._config, NGramPool(self._config), sharer)
        pool = self._pool(sharer)
        self._pools.move_to_end(sharer)
        return PoolMemory(request, self._config, pool, sharer)

    def _pool(self, sharer: str) -> NGramPool:
        if sharer not in self._pools:
            self._pools[sharer] = NGramPool(self._config)
        return self._pools[sharer]

    def _publish(self, link: PoolLink, memory: PoolMemory, at_least: int) -> None:
        """Sends what the others do not have yet, in windows that overlap by a pattern's reach."""
        begin, end = memory.num_published, len(memory.tokens)
        if end - begin >= at_least:
            for start in range(begin, end, _MAX_WINDOW):
                first = max(0, start - memory.pool.num_overlap)
                window = memory.tokens[first : min(end, start + _MAX_WINDOW)]
                link.publish(memory.sharer, np.array(window, dtype=np.int32))
            memory.num_published = end

    def _postpone(self, sharer: str, text: array[int] | IntArray, num_learnt: int = 0) -> None:
        """A text to be learnt when there is time; too much, and the oldest is dropped."""
        self._backlog.append((sharer, text, num_learnt))
        self._num_backlog += len(text) - num_learnt
        while self._num_backlog > self._config.pool_max_patterns:
            _, dropped, begin = self._backlog.popleft()
            self._num_backlog -= len(dropped) - begin

    def _evict(self, in_use: set[str]) -> None:
        excess = sum(map(len, self._pools.values())) - self._config.pool_max_patterns
        for sharer in list(self._pools) if excess > 0 else ():
            pool = self._pools[sharer]
            count = min(excess, len(pool))
            pool.evict(count)
            excess -= count
            if not len(pool) and sharer not in in_use:
                del self._pools[sharer]
            if excess == 0:
                return


def ngram(
    config: NGramConfig, link: PoolLink | None = None
) -> LookupDrafter[FirstSeen] | SharedNGram:
    """The drafter of TensorRT-LLM's semantics; `link` connects its shared pool to others'."""
    if config.pool_scope != "request":
        return SharedNGram(config, link)
    size, least = config.max_matching_ngram_size, config.min_matching_ngram_size
    kind = FirstSeen if config.is_use_oldest else NewestSeen
    return LookupDrafter("ngram", lambda request: kind(request, config, size, least))


def prompt_lookup(config: PromptLookupConfig) -> LookupDrafter[FirstSeen]:
    """The drafter of transformers' semantics."""

    def memory(request: Request) -> FirstSeen:
        sampling = request.sampling
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(request.eos_token_ids)
        return FirstSeen(request, config, config.max_matching_ngram_size, ends=frozenset(ends))

    return LookupDrafter("prompt_lookup", memory)
