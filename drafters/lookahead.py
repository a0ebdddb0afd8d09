"""Lookahead decoding: the target generates n-grams by Jacobi iteration and verifies them itself.

Fu et al. 2024, arXiv:2402.02057. Every target forward includes a window of N-1 levels and W
columns: cell (l, i) is at position l + i after the root and attends to the level-0 cells up to
column i and the cells above it in its column. The target's tokens after the deepest level complete
one n-gram per column; n-grams that begin with the current token are the next step's guesses.

The window is a part of the draft tree that is computed and never accepted: level-0 cells are a
chain from the root, and cell (l, i) is a child of (l-1, i). It needs neither a mask nor a forward
of its own.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from ..config import LookaheadConfig
from ..scheduler import tree
from ..scheduler.sequence import TokenBuffer
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict, ints
from .protocol import Drafter, Needs

Tokens = tuple[int, ...]


class GuessPool:
    """Per first token, the last `max_guesses` continuations of one length, newest last."""

    def __init__(self, max_guesses: int) -> None:
        self._max_guesses = max_guesses
        self._guesses: dict[int, OrderedDict[Tokens, None]] = {}

    def add(self, first: int, rest: Tokens) -> None:
        """Makes `rest` the newest continuation of `first`; evicts the oldest if full."""
        guesses = self._guesses.setdefault(first, OrderedDict())
        guesses[rest] = None
        guesses.move_to_end(rest)
        if len(guesses) > self._max_guesses:
            guesses.popitem(last=False)

    def learn(self, tokens: list[int], length: int) -> None:
        """Adds every n-gram of `tokens` with `length` tokens after its first."""
        for begin in range(len(tokens) - length):
            self.add(tokens[begin], tuple(tokens[begin + 1 : begin + 1 + length]))

    def newest(self, first: int) -> list[Tokens]:
        """Returns continuations of `first`, newest first."""
        return list(reversed(self._guesses.get(first, ())))


class Window:
    """One request's Jacobi window.

    `levels[0]` holds columns 1.. (column 0 is the root); deeper levels hold columns 0... The first
    N-2 steps add a level each; after that every step shifts the window by one token.
    """

    def __init__(self, config: LookaheadConfig, prompt: list[int], seed: int) -> None:
        self._num_levels = config.max_ngram_size - 1
        rng = random.Random(seed)
        width = config.max_window_size + config.max_ngram_size - 3
        self.levels: list[list[int]] = [[rng.choice(prompt) for _ in range(width)]]

    @property
    def full(self) -> bool:
        """Whether all levels are filled, so that steps complete n-grams."""
        return len(self.levels) == self._num_levels

    def nodes(self, first: int) -> tuple[list[int], list[int]]:
        """Returns tokens and parents of the cells, as nodes `first`... of a tree."""
        tokens: list[int] = []
        parents: list[int] = []
        above = [-1]  # nodes of the level above, column 0 first; of level 0 that is the root
        for depth, level in enumerate(self.levels):
            begin = first + len(tokens)
            row = list(range(begin, begin + len(level)))
            # Level 0 is a chain; every other cell is a child of the one above it in its column.
            parents += [-1, *row[:-1]][: len(row)] if depth == 0 else above[: len(level)]
            tokens += level
            above = [-1, *row] if depth == 0 else row
        return tokens, parents

    def advance(self, root: int, found: list[int]) -> list[tuple[int, Tokens]]:
        """Shifts the window by the target's tokens after each column of the deepest level.

        Returns:
            The completed n-grams, as (first token, the rest).
        """
        if not self.full:
            # The root advances by one token, and every column with it.
            self.levels = [level[1:] for level in [*self.levels, found]]
            return []
        heads = [root, *self.levels[0]]
        ngrams = [
            (heads[column], (*(level[column] for level in self.levels[1:]), token))
            for column, token in enumerate(found)
        ]
        self.levels = [*self.levels[1:], found]
        self.levels[0] = self.levels[0][1:]  # its column 0 is the new root
        return ngrams


class _Sequence:
    """One request's tokens, its pool of guesses, and the window that fills it."""

    __slots__ = ("has_window", "pool", "tokens", "window")

    def __init__(self, request: Request, config: LookaheadConfig) -> None:
        self.tokens = TokenBuffer(request.prompt, request.emitted)
        known = self.tokens.view.tolist()
        self.pool = GuessPool(config.max_verification_set_size)
        if config.pool_from_prompt:
            self.pool.learn(known, config.max_ngram_size - 1)
        self.window = Window(config, known, request.seed)
        self.has_window = False  # whether the window is in the current draft


class Lookahead(Drafter):
    """Drafts guesses from the pool, and the window that fills it."""

    name = "lookahead"
    needs = Needs(shape="tree")

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        self._sequences: dict[str, _Sequence] = {}

    def open(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._sequences[request.id] = _Sequence(request, self._config)

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        return [
            self._draft(self._sequences.get(request_id), budget)
            for request_id, budget in zip(batch.request_ids, budgets.tolist(), strict=True)
        ]

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        length = self._config.max_ngram_size - 1
        for row, request_id in enumerate(batch.request_ids):
            emitted = verdict.tokens(row)
            sequence = self._sequences.get(request_id)
            if sequence is None or not len(emitted):
                continue
            if sequence.has_window:
                self._advance(sequence, verdict, row)
            tokens = sequence.tokens
            start = max(0, len(tokens) - length)
            tokens.extend(emitted)
            sequence.pool.learn(tokens.view[start:].tolist(), length)

    def close(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._sequences.pop(request_id, None)

    def _draft(self, sequence: _Sequence | None, budget: int) -> Draft:
        if sequence is None:
            return tree.EMPTY
        sequence.has_window = False
        if budget <= 0:
            return tree.EMPTY
        window = sequence.window
        room = budget - sum(len(level) for level in window.levels)
        sequence.has_window = room >= 0  # near the end of a sequence only guesses fit
        trie = tree.Trie(room if sequence.has_window else budget)
        for guess in sequence.pool.newest(int(sequence.tokens.view[-1])):
            trie.add(guess)
        nodes, parents = trie.tokens, trie.parents
        cells, above = window.nodes(len(nodes)) if sequence.has_window else ([], [])
        return Draft(ints(nodes + cells), ints(parents + above), None, self.name, len(cells))

    def _advance(self, sequence: _Sequence, verdict: Verdict, row: int) -> None:
        window = sequence.window
        found = verdict.window_tokens(row).tolist()
        if len(found) < sum(len(level) for level in window.levels):
            return  # it did not fit next to other drafters' guesses
        root = int(sequence.tokens.view[-1])
        deepest = found[len(found) - len(window.levels[-1]) :]
        if len(window.levels) == 1:  # the root is column 0 of level 0
            deepest = [int(verdict.tokens(row)[0]), *deepest]
        for first, rest in window.advance(root, deepest):
            sequence.pool.add(first, rest)
