"""What n-grams are looked up in: a table of one sequence's positions, and a pool of several's text.

Called by `ngram.py`. The published rules (TensorRT-LLM, see there) come to less than they say: a
match longer than the first stored one always replaces the whole set, with or without
`is_keep_all`. So the oldest match is the first of the longest, and one match per pattern is enough;
in one sequence it is what follows the pattern's first occurrence.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from ..config import NGramConfig
from ..scheduler.sequence import TokenBuffer
from ..scheduler.types import IntArray

Tokens = tuple[int, ...]
_MASK = (1 << 61) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd and without structure, so that short n-grams do not collide
_FEW = 64  # tokens from which on numpy is worth its calls
_MAX_MATCHES = 256  # kept per pattern where the newest is wanted


class FirstSeen:
    """Where each n-gram of one sequence came first."""

    def __init__(self, config: NGramConfig, tokens: TokenBuffer) -> None:
        self.tokens = tokens
        self._max_draft_len = config.max_draft_len
        self._min_size = config.min_matching_ngram_size
        sizes = range(config.max_matching_ngram_size)
        self._powers = [pow(_FACTOR, size, _MASK + 1) for size in sizes]
        self._after: list[dict[int, int]] = [{} for _ in sizes]  # key -> index of what followed
        self._num_learnt = 0  # tokens known as what followed

    def learn(self, max_tokens: int) -> int:
        """Takes in what is new, up to so many tokens; how many it was."""
        begin = self._num_learnt
        count = min(max_tokens, len(self.tokens) - begin)
        if count > 0:
            self._num_learnt += count
            start = max(0, begin - len(self._powers))
            tokens = self.tokens.view[start : begin + count]
            index = self._index_few if count < _FEW else self._index_many
            index(tokens, start, begin)
        return max(0, count)

    def find(self) -> IntArray:
        """What followed the longest known tail before; empty if none is known."""
        tail = self.tokens.view[-len(self._powers) :].tolist()
        key, begin = 0, len(self.tokens)
        for size, (token, power, after) in enumerate(
            zip(reversed(tail), self._powers, self._after, strict=False), start=1
        ):
            key = (key + token * power) & _MASK
            found = after.get(key)
            if found is None:  # and so is no longer one
                break
            if size >= self._min_size:
                begin = found
        return self.tokens.view[begin : begin + self._max_draft_len]

    def _index_few(self, window: IntArray, start: int, begin: int) -> None:
        """The n-grams before every index from `begin` on; `window` begins at index `start`."""
        tokens, powers, tables = window.tolist(), self._powers, self._after
        longest = len(powers)
        for index in range(begin - start, len(tokens)):
            key = 0
            for size in range(min(longest, index)):
                key = (key + tokens[index - 1 - size] * powers[size]) & _MASK
                tables[size].setdefault(key, start + index)

    def _index_many(self, window: IntArray, start: int, begin: int) -> None:
        """As `_index_few`, at numpy's speed."""
        tokens, end = window.astype(np.uint64), start + len(window)
        keys, first = np.zeros(end - begin, dtype=np.uint64), begin  # keys of [first, end)
        for size, (power, table) in enumerate(zip(self._powers, self._after, strict=True), start=1):
            keys, first = keys[max(0, size - first) :], max(first, size)
            keys = keys + tokens[first - size - start : max(0, end - size - start)] * np.uint64(
                power
            )
            masked = (keys & np.uint64(_MASK)).tolist()
            deque(map(table.setdefault, masked, range(first, end)), maxlen=0)


class NGramPool:
    """Patterns and what followed them; the pattern used longest ago is first to go."""

    def __init__(self, config: NGramConfig) -> None:
        self._max_draft_len = config.max_draft_len
        self.max_size = config.max_matching_ngram_size
        self._min_size = config.min_matching_ngram_size
        self._oldest = config.is_use_oldest
        self._matches: OrderedDict[Tokens, Tokens] = OrderedDict()  # the one that counts
        # Where that is the newest: all matches, of patterns that have several, oldest first.
        self._all: dict[Tokens, dict[Tokens, None]] = {}
        self._cut_short: dict[Tokens, list[Tokens]] = {}  # of these, the matches cut short

    def __len__(self) -> int:
        return len(self._matches)

    @property
    def num_overlap(self) -> int:
        """Tokens before a new one whose patterns it can still make longer."""
        return self._max_draft_len + self.max_size - 1

    def update(self, tokens: Sequence[int], num_known: int = 0) -> None:
        """Learns every pattern of `tokens` (a window; matches may be cut short by its end).

        The first `num_known` were learnt before: matches that they fill alone are skipped.
        """
        window = tuple(tokens)
        store = self._store_longest if self._oldest else self._store_newest
        for end in range(max(1, num_known - self._max_draft_len + 1), len(window)):
            match = window[end : end + self._max_draft_len]
            for begin in range(end - 1, max(-1, end - 1 - self.max_size), -1):
                store(window[begin:end], match)

    def find(self, tail: Tokens) -> Tokens:
        """What followed the longest known suffix of `tail`; empty if none is known."""
        for size in range(len(tail), self._min_size - 1, -1):
            pattern = tail[len(tail) - size :]
            match = self._matches.get(pattern)
            if match is not None:
                self._matches.move_to_end(pattern)
                return match
        return ()

    def evict(self) -> None:
        """Forgets the pattern that was used longest ago."""
        pattern, _ = self._matches.popitem(last=False)
        self._all.pop(pattern, None)
        self._cut_short.pop(pattern, None)

    def _store_longest(self, pattern: Tokens, match: Tokens) -> None:
        stored = self._matches.get(pattern)
        if stored is None or len(stored) < len(match):
            self._matches[pattern] = match

    def _store_newest(self, pattern: Tokens, match: Tokens) -> None:
        newest = self._matches.get(pattern)
        if newest is None:
            self._matches[pattern] = match
            return
        stored, full = self._all.get(pattern), self._max_draft_len
        if stored is None:
            if len(newest) < len(match):
                self._matches[pattern] = match
            if len(newest) < len(match) or newest == match:
                return
            stored = self._all[pattern] = {newest: None}
            if len(newest) < full:
                self._cut_short[pattern] = [newest]
        elif match in stored:
            return
        short = self._cut_short.pop(pattern, [])
        for shorter in [key for key in short if len(key) < len(match)]:
            stored.pop(shorter, None)
        short = [key for key in short if len(key) >= len(match)]
        if len(match) < full:
            short.append(match)
        if short:
            self._cut_short[pattern] = short
        if len(stored) == _MAX_MATCHES:
            del stored[next(iter(stored))]
        stored[match] = None
        self._matches[pattern] = match
