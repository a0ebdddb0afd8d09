"""Rolling hashes of n-grams, and memories of where the longest known tail of a text came before.

`slots_of` hashes every n-gram of a text for a table of a fixed size: h = h * factor + token, from
the left. `tail_keys` hashes the n-grams that end a text, each with one more token on the left than
the one before, so that the keys of all sizes take one pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...config import NGramConfig, PromptLookupConfig
from ...scheduler.types import Draft, IntArray, Request
from .base import Memory

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
    """The slot of the n-gram that begins at each token."""
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
    """Drafts what followed the first occurrence of the longest known tail.

    An n-gram has an entry only where it takes one to tell it from others: where its tail was known
    and the token before that is another one. So a token makes one entry at most, however long
    n-grams may be, and text that repeats none.

    Args:
        max_size: tokens of the longest n-gram that is indexed.
        ends: tokens before which a draft ends.
    """

    __slots__ = (
        "_after", "_ends", "_factors", "_max_len", "_max_size", "_min_size", "_same", "_walked",
    )  # fmt: skip
    tracks_sizes = False  # whether `_ended_before` is called

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
        self._same = -1  # where the longest n-gram that ends at the newest place ended too
        self._walked = _NOWHERE  # the place that was asked for last, and the answer

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
        """Size of the text's longest known tail, and where what followed it begins."""
        place = len(self.tokens)
        size, first, key = self._walk(place)
        self._walked = (place, size, first, key)
        return size, first

    def take(self, begin: int, end: int) -> None:
        """It is known what follows the n-grams that end at [begin, end)."""
        tokens, after, same, max_size = self.tokens, self._after, self._same, self._max_size
        walked, self._walked = self._walked, _NOWHERE
        for place in range(begin, end):
            if same >= 0 and tokens[same] == tokens[place - 1]:
                same, size = same + 1, max_size
            else:
                # What `match` found is still right if nothing was indexed since.
                size, first, key = walked[1:] if walked[0] == place == begin else self._walk(place)
                if key >= 0:
                    after[key] = place
                same = first if size == max_size else -1
            if self.tracks_sizes:
                self._ended_before(place, size)
        self._same = same

    def _ended_before(self, place: int, size: int) -> None:
        """The longest n-gram that ends at `place` and ended before has `size` tokens."""

    def _walk(self, place: int) -> tuple[int, int, int]:
        """The longest n-gram that ends at `place` and is known: its size and its first place.

        The third is the key under which the next longer one is missing; -1 if none is.
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
    """Drafts what followed the last occurrence of the longest known tail if the end of the text
    cuts that short, else the continuation of full length that came up last."""

    __slots__ = ("_newest", "_size", "_sizes")
    tracks_sizes = True

    def __init__(
        self, request: Request, config: NGramConfig, max_size: int, min_size: int = 1
    ) -> None:
        # An n-gram's continuation was seen if both together, an n-gram of this size, were.
        super().__init__(request, config, max_size + config.draft_len, min_size)
        self._size = max_size
        self._sizes = array("H")  # place -> size of the longest n-gram that ended before
        self._newest: dict[int, int] = {}  # key -> place, where it is not the first

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
