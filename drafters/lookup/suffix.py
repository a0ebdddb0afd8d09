"""Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): frequent continuations of long matches.

For every length L at which the newest L tokens occurred before, in the request or in past outputs
of its tenant, the continuation is guessed token by token: the most frequent one, whose probability
is its share of the occurrences. A guess has at most min(L * max_spec_factor + max_spec_offset,
max_tree_depth - L) nodes and continues while the product of probabilities is at least
`min_token_prob`. Its score is the sum of these products, the expected number of accepted tokens.
The guess with the best score is drafted; ties go to the longest match, and to the request before
past outputs before the corpora (files in which every request is looked up). For a tree, the most
probable nodes are taken one by one instead. Suffix automata count the occurrences.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from ...config import SuffixConfig
from ...scheduler import tree
from ...scheduler.types import Batch, Draft, IntArray, Request, Verdict
from ..protocol import Needs
from .base import LookupDrafter, Memory, chain_of
from .kernels import hashing
from .kernels import suffix as loops
from .kernels.hashing import MIN_ROWS, grown, larger, new_table
from .kernels.suffix import AT_END, AT_MATCH, NOWHERE, ROOT, guess

_MAX_SHARERS = 1024  # pairs of tenant and adapter whose past is kept
_MAX_LOOKS = 48 * 1024  # visits of suffixes per step, for outputs that wait to be indexed
_PIECE = 4096  # tokens of a corpus that are indexed at once


class SuffixIndex:
    """A suffix automaton that counts the occurrences of every string of up to `max_depth` tokens.

    Blumer et al. 1985, cut at a depth: a state represents all strings within `max_depth` that end
    at the same places; their lengths are (length[link], length]. A link leads to the longest suffix
    that ends in more places. A string of `max_depth` tokens is counted but not extended, so
    repeated text creates no new states.

    A token is appended in one walk over the suffixes of the text before it, longest first. The walk
    counts the extended suffix and updates the most frequent continuation of each suffix; ties go to
    the one seen last. The tables double when they are full. An index may cover several texts:
    `begin_text` starts the next one.
    """

    __slots__ = ("edges", "max_depth", "nodes", "size", "walk")

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.size = 0  # tokens of all texts
        self.nodes: IntArray = np.empty((MIN_ROWS, loops.NODE), dtype=np.int32)
        self.nodes[ROOT] = -1
        self.nodes[ROOT, [loops.LENGTH, loops.COUNT, loops.DEGREE, loops.SEEN]] = 0
        self.edges = new_table(loops.EDGE)
        self.walk: IntArray = np.zeros(loops.SUFFIXES + max_depth + 2, dtype=np.int32)
        self.walk[loops.NUM_STATES] = 1
        self.begin_text()

    def begin_text(self) -> None:
        """Starts a new text, which does not continue the one before."""
        self.walk[loops.NUM_SUFFIXES] = 1
        self.walk[loops.SUFFIXES] = ROOT

    def extend(self, tokens: IntArray) -> None:
        """Appends tokens to the current text."""
        self.size += len(tokens)
        while True:
            done = loops.extend(self.nodes, self.edges, self.walk, self.max_depth, tokens)
            if done == len(tokens):
                return
            tokens = tokens[done:]
            self._grow()

    def end(self) -> tuple[int, int]:
        """The match (state, length) of the text's longest suffix that occurred before."""
        state = self.walk[loops.SUFFIXES]
        if state != ROOT and self.nodes[state, loops.COUNT] == 1:
            state = self.walk[loops.SUFFIXES + 1]
        return int(state), min(int(self.nodes[state, loops.LENGTH]), self.max_depth - 1)

    def follow(self, matches: IntArray, row: int, tokens: IntArray) -> None:
        """Extends the match (state, length) in that row by tokens.

        The result is the longest suffix that occurs, shorter than `max_depth`.
        """
        loops.follow(self.nodes, self.edges, self.max_depth, matches, row, tokens)

    def _grow(self) -> None:
        """Makes room for at least one more token."""
        walk = self.walk
        if walk[loops.NUM_STATES] + 2 > len(self.nodes):
            self.nodes = larger(self.nodes, 2 * len(self.nodes))
        rows, _, used = self.edges
        needed = int(used[hashing.NUM_ROWS]) + int(walk[loops.MAX_DEGREE])
        needed += 2 * int(walk[loops.NUM_SUFFIXES])
        if needed > len(rows):
            self.edges = grown(self.edges, needed)


class Limits:
    """The configured limits of drafts, and buffers for guesses."""

    __slots__ = ("is_tree", "min_prob", "room", "table")

    def __init__(self, config: SuffixConfig) -> None:
        depth, factor = config.max_tree_depth, config.max_spec_factor
        most = [0] * depth  # largest number of nodes, by match length
        widest = [0] * depth  # the length up to L that allows the most nodes
        for size in range(1, depth):
            wanted = int(size * factor + config.max_spec_offset + 1e-6)
            most[size] = min(max(0, wanted), depth - size)
            widest[size] = size if most[size] >= most[widest[size - 1]] else widest[size - 1]
        self.table: IntArray = np.array([most, widest], dtype=np.int32)
        self.min_prob = config.min_token_prob
        self.is_tree = int(config.shape == "tree")
        self.room: IntArray = np.empty((2, 2, depth), dtype=np.int32)


class PastTexts:
    """Outputs of a tenant's finished requests, in two generations; the older one is dropped."""

    def __init__(self, max_depth: int) -> None:
        self.generations = [SuffixIndex(max_depth), SuffixIndex(max_depth)]  # newer first
        self.num_texts = 0  # texts in the newer one
        self.version = 0  # changes when matches have to be found again

    @property
    def size(self) -> int:
        return sum(index.size for index in self.generations)

    def turn(self) -> None:
        """Begins a new generation."""
        newer = self.generations[0]
        self.generations = [SuffixIndex(newer.max_depth), newer]
        self.num_texts = 0
        self.version += 1

    def extend(self, tokens: IntArray) -> None:
        """Indexes the next piece of a text."""
        self.generations[0].extend(tokens)

    def end_text(self) -> None:
        self.generations[0].begin_text()
        self.num_texts += 1
        self.version += 1


class SuffixMemory(Memory):
    """A request's own index, and the matches of its newest tokens in its tenant's past."""

    __slots__ = (
        "_corpus", "_index", "_limits", "_matches", "_min_prob", "_past", "_version", "num_prompt",
        "sharer",
    )  # fmt: skip

    def __init__(
        self, request: Request, past: PastTexts, corpus: SuffixIndex, limits: Limits
    ) -> None:
        super().__init__(request)
        self.sharer, self.num_prompt = request.sharer, len(request.prompt)
        self._past, self._corpus, self._limits = past, corpus, limits
        wish = request.speculation.min_prob
        self._min_prob = limits.min_prob if wish is None else float(wish)
        self._index = SuffixIndex(corpus.max_depth)
        self._version = -1  # version of the past to which `_matches` belongs
        self._matches: IntArray = np.zeros((4, 2), dtype=np.int32)

    def draft(self, budget: int, least: int, source: str) -> Draft:
        if budget <= 0:
            return tree.EMPTY
        if self._version != self._past.version:
            self._match()
        own_place = AT_END if self.num_indexed == len(self.tokens) else NOWHERE
        return self._guess(own_place, self._matches, budget, source)

    def draft_after(self, chain: Sequence[int], budget: int, source: str) -> Draft:
        if self._version != self._past.version:
            self._match()
        matches, tokens = self._matches.copy(), np.array(chain, dtype=np.int32)
        self._follow(matches, tokens)
        if self.num_indexed < len(self.tokens):
            return self._guess(NOWHERE, matches, budget, source)
        matches[loops.OWN] = self._index.end()
        self._index.follow(matches, loops.OWN, tokens)
        return self._guess(AT_MATCH, matches, budget, source)

    def _guess(self, own_place: int, matches: IntArray, budget: int, source: str) -> Draft:
        """The best draft from the request's text, its tenant's past and the corpora."""
        own, limits = self._index, self._limits
        newer, older = self._past.generations
        size = guess(
            own.nodes, own.edges[0], own.walk, newer.nodes, newer.edges[0],
            older.nodes, older.edges[0], self._corpus.nodes, self._corpus.edges[0],
            matches, own_place, budget, limits.table,
            self._min_prob, limits.is_tree, limits.room,
        )  # fmt: skip
        if not size:
            return tree.EMPTY
        if not limits.is_tree:
            return chain_of(limits.room[0, 0, :size].copy(), source)
        tokens, parents = limits.room[0, :, :size].copy()
        return Draft(tokens, parents, None, source)

    def take(self, begin: int, end: int) -> None:
        self._index.extend(self.ids(begin, end))

    def learn(self, emitted: list[int]) -> int:
        num_indexed = super().learn(emitted)
        if self._version == self._past.version:
            self._follow(self._matches, np.array(emitted, dtype=np.int32))
        return num_indexed

    def _match(self) -> None:
        """Finds the matches in a past that has changed."""
        self._version = self._past.version
        self._matches[:] = 0
        self._follow(self._matches, self.ids(-self._index.max_depth))

    def _follow(self, matches: IntArray, tokens: IntArray) -> None:
        """Extends the matches in the past and in the corpora by new tokens."""
        for row, index in enumerate(self._past.generations):
            if index.size:
                index.follow(matches, row, tokens)
        if self._corpus.size:
            self._corpus.follow(matches, loops.CORPUS, tokens)


class Suffix(LookupDrafter[SuffixMemory]):
    """Drafts the most frequent continuation of the newest tokens, as far as it is likely.

    Args:
        texts: texts of the corpora, which the constructor indexes.
    """

    takes_min_prob = True

    def __init__(self, config: SuffixConfig, texts: Iterable[IntArray] = ()) -> None:
        # A token visits each of the suffixes before it, `max_tree_depth` at most.
        max_indexed = max(64, _MAX_LOOKS // config.max_tree_depth)
        super().__init__("suffix", self._suffix_memory, max_indexed=max_indexed)
        self.needs = Needs(shape=config.shape)
        self._config = config
        self._limits = Limits(config)
        # By sharer, least recently used first.
        self._pasts: OrderedDict[str, PastTexts] = OrderedDict()
        self._waiting: deque[tuple[str, IntArray]] = deque()  # outputs to be indexed
        self._corpus = SuffixIndex(config.max_tree_depth)
        for text in texts:
            for begin in range(
                0, len(text), _PIECE
            ):  # in pieces, so that other threads run in between
                self._corpus.extend(text[begin : begin + _PIECE])
            self._corpus.begin_text()

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        super().observe(batch, verdict)
        if self._waiting:
            self.work(self._num_spare)

    def shutdown(self) -> None:
        super().shutdown()
        self._pasts.clear()
        self._waiting.clear()

    def work(self, num_tokens: int) -> None:
        """Indexes some tokens of waiting outputs, one output after the other."""
        while self._waiting and num_tokens > 0:
            sharer, output = self._waiting[0]
            past = self._past(sharer)
            piece, rest = output[:num_tokens], output[num_tokens:]
            num_tokens -= len(piece)
            past.extend(piece)
            self._waiting[0] = (sharer, rest)
            if not len(rest):
                self._waiting.popleft()
                past.end_text()
                self._shrink(past)

    def _suffix_memory(self, request: Request) -> SuffixMemory:
        has_past = self._config.max_cached_requests and not request.speculation.isolated
        past = self._past(request.sharer) if has_past else PastTexts(self._config.max_tree_depth)
        return SuffixMemory(request, past, self._corpus, self._limits)

    def _closed(self, memory: SuffixMemory) -> None:
        if memory.is_isolated or not self._config.max_cached_requests:
            return
        output = np.array(memory.tokens[memory.num_prompt :], dtype=np.int32)
        if len(output):
            self._waiting.append((memory.sharer, output))

    def _past(self, sharer: str) -> PastTexts:
        past = self._pasts.get(sharer)
        if past is None:
            if len(self._pasts) >= _MAX_SHARERS:
                self._pasts.popitem(last=False)
            past = self._pasts[sharer] = PastTexts(self._config.max_tree_depth)
        self._pasts.move_to_end(sharer)
        return past

    def _shrink(self, past: PastTexts) -> None:
        """Forgets the oldest outputs, of this tenant or of the least recently seen one."""
        config = self._config
        half = max(1, config.max_cached_requests // 2)
        if past.num_texts >= half or past.generations[0].size > config.max_cached_tokens // 2:
            past.turn()
        while sum(each.size for each in self._pasts.values()) > config.max_cached_tokens:
            oldest = next(iter(self._pasts.values()))
            oldest.turn()
            if oldest.size == 0 and len(self._pasts) > 1:
                self._pasts.popitem(last=False)
