"""Predictions: the text that a client expects is a draft of its own, for its request alone.

OpenAI's predicted outputs. The output is followed through the predicted text token by token. Where
it departs, the place is found again by the newest tokens: the nearest occurrence of what three or
more of them match ahead of the last place that agreed, else behind it; one or two matching tokens
count close ahead only. A draft is four times as long as the match, which grows with every token
that agrees. Matches that come to nothing have the next one need more tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...scheduler.types import NO_INTS, IntArray, Request
from .base import LookupDrafter, Memory

_PER_MATCHED = 4  # drafted tokens per token that matches
_AT_START = 2  # matching tokens that the beginning counts as
_SURE = 3  # matching tokens that count wherever they are
_WITHIN = (0, 16, 64)  # tokens ahead, by the number of matching tokens below that
_MOST_MISSES = 6


class Alignment:
    """Where an output is in the text that was predicted; depends on the two texts alone."""

    def __init__(self, prediction: IntArray) -> None:
        self._tokens = prediction
        self.place = 0  # index of the token that comes next; -1: not known
        self.num_read = 0  # tokens of the output
        self._anchor = 0  # the last place that is certain
        self._matched = _AT_START  # tokens in a row before `place` that match
        self._agreed = 1  # of these, those that came after the place was found
        self._num_misses = 0  # places in a row where nothing agreed
        self._seen = bytearray(len(prediction))  # 1: this token is in the output

    @property
    def num_accepted(self) -> int:
        """Predicted tokens that the output has."""
        return self._seen.count(1)

    @property
    def num_rejected(self) -> int:
        """Predicted tokens that the output does not have."""
        return self._seen.count(0)

    def draft(self, budget: int) -> IntArray | None:
        """The tokens that are expected next, at most `budget`."""
        if self.place < 0:
            return None
        length = min(budget, _PER_MATCHED * self._matched)
        return self._tokens[self.place : self.place + length].copy()

    def follow(self, output: Sequence[int], end: int | None = None) -> None:
        """Reads what is new of `output`, up to `end`."""
        predicted = self._tokens
        for index in range(self.num_read, len(output) if end is None else end):
            place = self.place
            if 0 <= place < len(predicted) and predicted[place] == output[index]:
                self._agree(place)
                continue
            if 0 <= place < len(predicted):
                missed = not self._agreed
                self._num_misses = min(self._num_misses + 1, _MOST_MISSES) if missed else 0
            self.place = -1
            self._find(output, index + 1)
        self.num_read = max(self.num_read, len(output) if end is None else end)

    def _agree(self, place: int) -> None:
        """The predicted token came; what matched before it was no chance."""
        first = place if self._agreed else place - self._matched
        self._seen[first : place + 1] = b"\1" * (place + 1 - first)
        self._agreed += 1
        self._matched += 1
        self.place = self._anchor = place + 1

    def _find(self, output: Sequence[int], end: int) -> None:
        """Finds the place after `output[:end]`, if its last tokens are in the prediction."""
        places = np.flatnonzero(self._tokens == output[end - 1]) + 1
        if not len(places):
            return
        num_behind = int(np.searchsorted(places, self._anchor, side="right"))
        ahead, size = self._longest(places[num_behind:], output, end)
        if size < _SURE:
            ahead = ahead[ahead <= self._anchor + _WITHIN[size]]
        if len(ahead) and size > self._num_misses:
            self.place, self._matched, self._agreed = int(ahead[0]), size, 0
            return
        behind, size = self._longest(places[:num_behind], output, end)
        if size >= _SURE and size > self._num_misses:
            self.place, self._matched, self._agreed = int(behind[-1]), size, 0

    def _longest(
        self, places: NDArray[np.int64], output: Sequence[int], end: int
    ) -> tuple[NDArray[np.int64], int]:
        """Those of `places` before which most tokens match, as far as that counts; how many."""
        size, enough = min(1, len(places)), max(_SURE, 1 + self._num_misses)
        while 0 < size < min(enough, end):
            longer = places[places > size]
            longer = longer[self._tokens[longer - 1 - size] == output[end - 1 - size]]
            if not len(longer):
                break
            places, size = longer, size + 1
        return places, size


class PredictionMemory(Memory):
    """One request's output, and where it is in its prediction."""

    __slots__ = ("_alignment",)

    def __init__(self, request: Request) -> None:
        super().__init__(replace(request, prompt=NO_INTS))
        self._alignment = Alignment(request.prediction)

    def find(self, budget: int) -> IntArray | None:
        is_read = self.num_indexed == len(self.tokens)
        return self._alignment.draft(budget) if is_read else None

    def take(self, begin: int, end: int) -> None:
        self._alignment.follow(self.tokens, end)


def predictions() -> LookupDrafter[PredictionMemory]:
    """The drafter of all requests that bring a prediction."""
    return LookupDrafter("prediction", PredictionMemory)
