"""PromptLookup: what followed the leftmost match of the longest tail (Saxena 2023).

Semantics of transformers' `PromptLookupCandidateGenerator`: n-grams from
`max_matching_ngram_size` down to one token; of the first size that matches anywhere with a
continuation, the leftmost match; its continuation up to `max_draft_len` tokens, cut before an end
token. Instead of scanning, every n-gram's leftmost continuation is kept as the tokens come.
"""

from __future__ import annotations

from array import array

from ..config import PromptLookupConfig
from ..scheduler.types import Request
from .lookup import LookupDrafter, Memory


class PromptMemory(Memory):
    """Where each n-gram's first continuation begins. A new tail has none yet, so is not in it."""

    __slots__ = ("_ends", "_first")

    def __init__(self, request: Request, max_size: int) -> None:
        super().__init__(request)
        sampling = request.sampling
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(request.eos_token_ids)
        self._ends = frozenset(ends)
        tokens = self.tokens.tolist()
        self._first: list[dict[object, int]] = []  # by size - 1
        for size in range(1, max_size + 1):
            # Backwards, so that of equal keys the leftmost is written last.
            columns = [tokens[offset:][: max(0, len(tokens) - size)] for offset in range(size)]
            keys = reversed(columns[0]) if size == 1 else reversed([*zip(*columns)])
            self._first.append(dict(zip(keys, range(len(tokens) - 1, size - 1, -1))))

    def find(self, budget: int) -> array[int] | None:
        tokens = self.tokens
        for size in range(min(len(self._first), len(tokens) - 1), 0, -1):
            key = tokens[-1] if size == 1 else tuple(tokens[-size:])
            begin = self._first[size - 1].get(key)
            if begin is not None:
                return self._cut(tokens[begin : begin + budget])
        return None

    def learn(self, emitted: list[int]) -> None:
        tokens = self.tokens
        begin = len(tokens)
        tokens.extend(emitted)
        # An n-gram counts once something follows it.
        for size, first in enumerate(self._first, 1):
            for end in range(max(begin, size), len(tokens)):
                key = tokens[end - 1] if size == 1 else tuple(tokens[end - size : end])
                first.setdefault(key, end)

    def _cut(self, found: array[int]) -> array[int]:
        if not self._ends.isdisjoint(found):
            for index, token in enumerate(found):
                if token in self._ends:
                    return found[:index]
        return found


class PromptLookup(LookupDrafter[PromptMemory]):
    """Drafts what followed the same words the first time."""

    name = "prompt_lookup"

    def __init__(self, config: PromptLookupConfig) -> None:
        super().__init__()
        self._config = config

    def remember(self, request: Request) -> PromptMemory:
        return PromptMemory(request, self._config.max_matching_ngram_size)
