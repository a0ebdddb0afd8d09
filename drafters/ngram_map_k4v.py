"""NGramMapK4V: up to four continuations per n-gram, counted; a dominant one is the draft.

Semantics of llama.cpp's `ngram-map-k4v`, on the table of `ngram_map_k.py`. Of each key's
occurrences the m tokens that followed are counted, the first four distinct ones only; counters
stop at 16380. A key drafts from its `min_hits`-th look-up on, and only if the most frequent
continuation has at least twice the count of the others together; then as many of its tokens as
were accepted of them the last time, m at first.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..config import NGramMapK4VConfig
from ..scheduler.types import Request
from .lookup import LookupDrafter
from .ngram_map_k import MapMemory

_MAX_VALUES = 4
_MAX_COUNT = 16380


@dataclass(slots=True)
class _Value:
    """One continuation of a key."""

    tokens: array[int]  # m of them
    limit: int  # tokens worth drafting
    count: int = 0


@dataclass(slots=True)
class _Key:
    """What followed one n-gram so far."""

    occurrences: list[int]  # counted already up to `num_counted`
    num_counted: int = 0
    num_hits: int = 0
    values: list[_Value] = field(default_factory=list)


class MapK4VMemory(MapMemory):
    """The continuations of keys that were looked up or occur again."""

    __slots__ = ("_keys", "_last", "_min_hits")

    def __init__(self, request: Request, config: NGramMapK4VConfig) -> None:
        self._keys: dict[int, _Key] = {}  # by the n-gram's first index
        self._min_hits = config.min_hits
        self._last: _Value | None = None  # drafted
        super().__init__(request, config)

    def repeated(self, first: int, index: int) -> None:
        tokens, n = self.tokens, self._n
        if tokens[first : first + n] == tokens[index : index + n]:
            self._key(first).occurrences.append(index)

    def after(self, match: int) -> array[int] | None:
        key = self._key(match)
        key.num_hits = min(key.num_hits + 1, _MAX_COUNT)
        if key.num_hits < self._min_hits:
            return None
        self._count(key)
        best = max(key.values, key=lambda value: value.count)
        others = sum(value.count for value in key.values) - best.count
        if best.count < 2 * others:
            return None
        self._last = best
        return best.tokens[: best.limit]

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        assert self._last is not None, "a draft has its continuation"
        self._last.limit = num_accepted

    def _key(self, first: int) -> _Key:
        key = self._keys.get(first)
        if key is None:
            key = self._keys[first] = _Key([first])
        return key

    def _count(self, key: _Key) -> None:
        m = self._m
        for index in key.occurrences[key.num_counted :]:
            begin = index + self._n
            follows = self.tokens[begin : begin + m]
            for value in key.values:
                if value.tokens == follows:
                    break
            else:
                if len(key.values) == _MAX_VALUES:
                    continue
                value = _Value(follows, m)
                key.values.append(value)
            value.count = min(value.count + 1, _MAX_COUNT)
        key.num_counted = len(key.occurrences)


class NGramMapK4V(LookupDrafter[MapK4VMemory]):
    """Drafts what nearly always followed the same n tokens."""

    name = "ngram_map_k4v"

    def __init__(self, config: NGramMapK4VConfig) -> None:
        super().__init__(config.draft_min)
        self._config = config

    def remember(self, request: Request) -> MapK4VMemory:
        return MapK4VMemory(request, self._config)
