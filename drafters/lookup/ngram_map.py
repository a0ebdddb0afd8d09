"""NGramSimple, NGramMapK and NGramMapK4V: what followed the newest n tokens, in llama.cpp's ways.

Their history is all tokens but the newest ("sampled"), and index 0 means "no match" to all of
them. Instead of scanning backwards, n-grams are indexed as the tokens come.

- `ngram-simple`: the last earlier match gives the m tokens after it. A draft needs a history of
  more than n + m + 1 tokens; the match must begin at index 1 or later and end before the history's
  last token; if fewer than n tokens follow it, there is no draft.
- `ngram-map-k` (`common/ngram-map.cpp`): a hash table from n-grams to where they were. A draft
  needs a history of 2n + m tokens at least, and a match that begins at length - n - m - 1 at most,
  so that its m tokens are there. The table has 2^18 slots: of the prompt's n-grams the last one
  keeps a slot, of later ones the last of a look-up's new ones, and only a slot that is free. Keys
  are compared on a hit, and an n-gram that lost its slot is found only while it is not yet indexed.
  A key drafts as many tokens as were accepted of its last draft, m at first: one total rejection
  silences it. With `min_hits` above 1 it drafts only if the same m tokens have followed it so
  often, as llama.cpp's documentation has it (its code reads the option for the next type alone).
- `ngram-map-k4v`: up to four continuations per n-gram, counted; a dominant one is the draft. On the
  same table, but the first of equal n-grams stands for all of them. Of each key's occurrences the m
  tokens that followed are counted, the first four distinct ones only; counters stop at 16380. A key
  drafts from its `min_hits`-th look-up on, and only if the most frequent continuation has at least
  twice the count of the others together; then as many of its tokens as were accepted of them the
  last time, m at first.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...config import NGramMapK4VConfig, NGramMapKConfig, NGramSimpleConfig
from ...scheduler.types import Draft, Request
from .base import INT32, Memory, num_agreeing, powers_of, slots_of

_FACTOR = 2654435761
_MASK = 2**18 - 1  # the hash has 32 bits, but its low ones never depend on the high ones
_FEW = 64  # tokens that are hashed without numpy
_MAX_VALUES = 4
_MAX_COUNT = 16380


class SimpleMemory(Memory):
    """Where each n-gram was last, by its hash; a match is compared, so that it is one."""

    __slots__ = ("_check_rate", "_checked", "_m", "_n", "_next", "_shortest", "_table")

    def __init__(
        self, request: Request, config: NGramSimpleConfig | NGramMapKConfig | NGramMapK4VConfig
    ) -> None:
        super().__init__(request)
        self._n, self._m = config.ngram_size_n, config.ngram_size_m
        self._shortest = self._n + self._m + 2  # history that is looked up
        self._check_rate = config.check_rate
        self._checked = 0  # history's length at the last look-up
        self._table: dict[int, int] = {}  # hash or slot -> index of the n-gram
        self._next = 1  # the first n-gram that is not in the table; index 0 means "no match"

    def find(self, budget: int) -> array[int] | None:
        length = len(self.tokens) - 1
        if length < self._shortest or 0 < length - self._checked < self._check_rate:
            return None
        self._checked = length
        key = self.tokens[-self._n :]
        match = self.locate(key)
        return None if match is None else self.after(match)

    def locate(self, key: array[int]) -> int | None:
        """Where the n-gram was."""
        match = self._table.get(hash(key.tobytes()))
        return match if self._is_at(key, match) else None

    def after(self, match: int) -> array[int] | None:
        """The draft where the newest n-gram was found at `match`."""
        begin, length = match + self._n, len(self.tokens) - 1
        if length - begin < min(self._n, self._m):
            return None
        return self.tokens[begin : min(begin + self._m, length)]

    def take(self, begin: int, end: int) -> None:
        """Indexes what has become old enough: n-grams that end before the history's last token."""
        end -= 1 + self._n
        if end <= self._next:
            return
        n, last, width = self._n, self._table, self.tokens.itemsize
        data = self.tokens[self._next : end + n - 1].tobytes()
        for offset, index in enumerate(range(self._next, end)):
            last[hash(data[offset * width : (offset + n) * width])] = index
        self._next = end

    def _is_at(self, key: array[int], index: int | None) -> bool:
        return index is not None and self.tokens[index : index + self._n] == key


class MapKMemory(SimpleMemory):
    """The table of one request; a dict, as few of the slots are ever taken."""

    __slots__ = (
        *("_drafted", "_factor_n", "_key", "_limits", "_min_hits", "_num_opening", "_slots"),
    )

    def __init__(self, request: Request, config: NGramMapKConfig | NGramMapK4VConfig) -> None:
        super().__init__(request, config)
        self._shortest = 2 * self._n + self._m
        self._num_opening = len(self.tokens)
        self._factor_n = pow(_FACTOR, self._n, _MASK + 1)
        self._slots = array(INT32)  # of the n-gram that begins at each index
        self._drafted: list[int] = []  # in the step that runs
        self._key: Hashable = None  # of the last draft
        self._limits: dict[Hashable, int] = {}  # key -> tokens accepted of its last draft
        self._min_hits = config.min_hits

    def draft(self, budget: int, least: int, source: str) -> Draft:
        draft = super().draft(budget, least, source)
        self._drafted = draft.tokens.tolist()
        return draft

    def find(self, budget: int) -> array[int] | None:
        # What waits to be indexed is not to be scanned.
        return None if self.num_indexed < len(self.tokens) else super().find(budget)

    def locate(self, key: array[int]) -> int | None:
        end = self._end(len(self.tokens))
        match = self._table.get(self._slots[-1])
        if not self._is_at(key, match):
            match = next((index for index in self._waiting(end) if self._is_at(key, index)), None)
        self._enter(end)
        return match

    def after(self, match: int) -> array[int] | None:
        if self._min_hits > 1 and self._num_hits(match) < self._min_hits:
            return None
        begin = match + self._n
        self._key = self.tokens[match:begin].tobytes()
        return self.tokens[begin : begin + self._limits.get(self._key, self._m)]

    def _num_hits(self, match: int) -> int:
        """How often the m tokens after the n-gram at `match` have followed it."""
        end = max(self._end(len(self.tokens)), match + 1)
        slots = np.frombuffer(self._slots, dtype=np.int32)[:end]
        (places,) = np.nonzero(slots[1:] == slots[match])
        tokens = np.frombuffer(self.tokens, dtype=np.int32)
        windows = sliding_window_view(tokens, self._n + self._m)
        return int((windows[places + 1] == windows[match]).all(axis=1).sum())

    def learn(self, emitted: list[int]) -> int:
        """New n-grams get their slots; they enter the table when something is looked up."""
        if self._drafted:
            self._limits[self._key] = num_agreeing(self._drafted, emitted)
            self._drafted = []
        return super().learn(emitted)

    def index(self, max_tokens: int) -> int:
        num_indexed = super().index(max_tokens)
        self._enter(self._end(self.num_indexed + 1))  # a token will follow: the newest
        return num_indexed

    def take(self, begin: int, end: int) -> None:
        """The slots of n-grams up to token `end`: h = h * factor + token, from the left."""
        tokens, n, slots = self.tokens, self._n, self._slots
        if slots and end - begin <= _FEW:
            slot, factor, factor_n = slots[-1], _FACTOR & _MASK, self._factor_n
            for place in range(begin, end):
                slot = (slot * factor + tokens[place] - tokens[place - n] * factor_n) & _MASK
                slots.append(slot)
        elif end - n >= len(slots):
            ids = np.array(tokens[len(slots) : end], dtype=np.int32)
            found = slots_of(ids, powers_of(_FACTOR, n, _MASK + 1), _MASK + 1)
            slots.frombytes(found.view(np.int32).tobytes())

    def _end(self, num_tokens: int) -> int:
        """Where n-grams begin that are not old enough to be matched in so many tokens."""
        return num_tokens - 1 - self._n - self._m

    def _waiting(self, end: int) -> range:
        """N-grams before `end` that are not in the table, in the order of preference."""
        return range(end - 1, self._next - 1, -1)

    def _enter(self, end: int) -> None:
        """Enters the n-grams that begin before `end`."""
        table, slots = self._table, self._slots
        prompt = max(self._next, min(end, self._end(self._num_opening + 1)))
        table.update(zip(slots[self._next : prompt], range(self._next, prompt)))
        for index in range(end - 1, prompt - 1, -1):
            table.setdefault(slots[index], index)
        self._next = max(self._next, end)


@dataclass(slots=True)
class _Key:
    """What followed one n-gram so far."""

    counted: int = 0  # the last occurrence that is counted
    num_hits: int = 0
    counts: dict[bytes, int] = field(default_factory=dict)  # by the m tokens


class MapK4VMemory(MapKMemory):
    """Where n-grams occur again, and the continuations of those that were looked up."""

    __slots__ = ("_again", "_keys", "_newest")

    def __init__(self, request: Request, config: NGramMapK4VConfig) -> None:
        super().__init__(request, config)
        self._again: dict[int, int] = {}  # index of an n-gram -> where it occurs next
        self._newest: dict[int, int] = {}  # the n-gram's first index -> its last
        self._keys: dict[int, _Key] = {}  # by the n-gram's first index

    def after(self, match: int) -> array[int] | None:
        key = self._keys.setdefault(match, _Key())
        key.num_hits = min(key.num_hits + 1, _MAX_COUNT)
        if key.num_hits < self._min_hits:
            return None
        self._count(key, match)
        best, count = max(key.counts.items(), key=lambda item: item[1])
        if count < 2 * (sum(key.counts.values()) - count):
            return None
        self._key = (match, best)
        return array(INT32, best)[: self._limits.get(self._key, self._m)]

    def _count(self, key: _Key, first: int) -> None:
        """Counts the occurrences of the n-gram, first at index `first`, that are not yet."""
        counts = key.counts
        index = self._again.get(key.counted) if counts else first
        while index is not None:
            key.counted, begin = index, index + self._n
            follows = self.tokens[begin : begin + self._m].tobytes()
            if follows in counts or len(counts) < _MAX_VALUES:
                counts[follows] = min(counts.get(follows, 0) + 1, _MAX_COUNT)
            index = self._again.get(index)

    def _waiting(self, end: int) -> range:
        return range(self._next, end)

    def _enter(self, end: int) -> None:
        """Enters the n-grams that begin before `end`; the first one keeps a slot for all."""
        tokens, n, table, slots = self.tokens, self._n, self._table, self._slots
        for index in range(self._next, end):
            first = table.setdefault(slots[index], index)
            if first != index and tokens[first : first + n] == tokens[index : index + n]:
                self._again[self._newest.get(first, first)] = index
                self._newest[first] = index
        self._next = max(self._next, end)
