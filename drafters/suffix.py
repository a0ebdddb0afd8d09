"""Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): frequent continuations of long matches.

For every length L at which the newest L tokens occurred before, in the request or in past outputs
of its tenant, the continuation is guessed token by token: the most frequent one, whose probability
is its share of the occurrences. A guess has at most min(L * max_spec_factor, max_tree_depth - L)
nodes and goes on while the product of probabilities is at least `min_token_prob`; the sum of the
products, the expected number of accepted tokens, is its score, and the best score wins (of equals
the longest match, the request before the past). As a tree, the most probable nodes are taken one
by one instead.

Lengths with the same occurrences differ in the limit only, so that one look per state of a suffix
automaton (`suffix_index.py`) does; and a look that cannot beat the best score is not taken.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque

import numpy as np

from ..config import SuffixConfig
from ..scheduler import tree
from ..scheduler.types import Batch, Draft, IntArray, Request, Verdict
from .lookup import INT32, LookupDrafter, Memory, chain
from .protocol import Needs
from .suffix_index import ROOT, SuffixIndex

_ROUNDING = 1e-9  # of a probability
_MAX_TENANTS = 1024  # whose past is kept


class Speculator:
    """The best guess after a match, as the configuration limits it."""

    def __init__(self, config: SuffixConfig) -> None:
        self._min_prob = config.min_token_prob
        self._is_tree = config.shape == "tree"
        depth, factor = config.max_tree_depth, config.max_spec_factor
        limits = [min(int(size * factor + 1e-6), depth - size) for size in range(depth)]
        # Of the lengths up to L, the one that may draft most; of equals the longest.
        self._widest = [
            max(range(size + 1), key=lambda known: (limits[known], known)) for size in range(depth)
        ]
        self._limits = limits

    def best(
        self,
        index: SuffixIndex,
        state: int,  # of the longest match
        matched: int,  # its length
        own: int,  # occurrences that nothing follows: 1 in the request's own text
        budget: int,
        best: tuple[float, list[int], list[int]],
    ) -> tuple[float, list[int], list[int]]:
        """(score, tokens, parents): `best`, or what beats it here."""
        guess = self._tree if self._is_tree else self._chain
        while state > ROOT:
            widest = self._widest[matched]
            if min(budget, self._limits[widest]) <= best[0]:
                return best  # shorter matches may not draft more
            shorter = index.link[state]
            least = index.length[shorter] + 1
            size = widest if widest >= least else least
            limit = min(budget, self._limits[size])
            if limit > best[0]:
                found = guess(index, state, index.count[state] - own, limit)
                if found[0] > best[0]:
                    best = found
            state, matched = shorter, least - 1
        return best

    def _chain(
        self, index: SuffixIndex, state: int, total: int, limit: int
    ) -> tuple[float, list[int], list[int]]:
        counts, best, after_best = index.count, index.best, index.after_best
        prob, score = 1.0, 0.0
        tokens: list[int] = []
        take = tokens.append
        for _ in range(limit):
            token = best[state]
            if token < 0:
                break
            state = after_best[state]
            count = counts[state]
            if count != total:
                prob *= count / total
                if prob < self._min_prob:
                    break
                total = count
            score += prob
            take(token)
        return score, tokens, []

    def _tree(
        self, index: SuffixIndex, state: int, total: int, limit: int
    ) -> tuple[float, list[int], list[int]]:
        counts, others, least = index.count, index.others, self._min_prob
        best, after_best = index.best, index.after_best
        prob, score, parent, size = 1.0, 0.0, -1, 0
        tokens: list[int] = []
        parents: list[int] = []
        heap: list[tuple[float, int, int, int]] = []  # (-probability, parent, token, state)
        while size < limit:
            token, after = best[state], after_best[state]
            count = counts[after]
            share = prob * (count / total) if token >= 0 else -1.0  # none has more
            if share < least:
                pass
            elif state in others and prob - share > least - _ROUNDING:  # others may be likely
                for token, after in others[state].items():
                    share = prob * (counts[after] / total)
                    if share >= least:
                        heapq.heappush(heap, (-share, parent, token, after))
            elif heap and heap[0][0] <= -share:
                heapq.heappush(heap, (-share, parent, token, after))
            else:  # it would be taken next
                tokens.append(token)
                parents.append(parent)
                score += share
                prob, total, state, parent = share, count, after, size
                size += 1
                continue
            if not heap:
                break
            negative, node, token, state = heapq.heappop(heap)
            tokens.append(token)
            parents.append(node)
            score -= negative
            prob, total, parent = -negative, counts[state], size
            size += 1
        return score, tokens, parents


class Past:
    """Outputs of a tenant's finished requests: two generations, of which the older is dropped."""

    def __init__(self, max_depth: int) -> None:
        self.generations = [SuffixIndex(max_depth), SuffixIndex(max_depth)]  # newer first
        self.num_texts = 0  # in the newer

    @property
    def size(self) -> int:
        return sum(index.size for index in self.generations)

    def turn(self) -> None:
        """A new generation begins."""
        newer = self.generations[0]
        self.generations = [SuffixIndex(newer.max_depth), newer]
        self.num_texts = 0


class SuffixMemory(Memory):
    """A request's own index, and where its newest tokens match its tenant's past."""

    __slots__ = ("_index", "_matches", "_past", "_seen", "_speculator", "num_prompt", "tenant")

    def __init__(self, request: Request, past: Past | None, speculator: Speculator, depth: int):
        super().__init__(request)
        self.tenant, self.num_prompt = request.tenant, len(request.prompt)
        self._speculator, self._past = speculator, past
        self._index = SuffixIndex(depth)
        self._seen: list[SuffixIndex] = []  # the generations that `_matches` belongs to
        self._matches: list[tuple[int, int]] = []

    def guess(self, budget: int) -> tuple[list[int], list[int]]:
        """Tokens, and parents if they are a tree."""
        index, speculator = self._index, self._speculator
        best: tuple[float, list[int], list[int]] = (0.0, [], [])
        if self.num_indexed == len(self.tokens):
            state, matched = index.repeated()
            best = speculator.best(index, state, matched, 1, budget, best)
        if self._past is not None:
            if self._seen is not self._past.generations:
                self._follow(self._past, [])
            for index, (state, matched) in zip(self._seen, self._matches):
                if matched:
                    state, matched = index.within(state, min(matched, index.max_depth - 1))
                    best = speculator.best(index, state, matched, 0, budget, best)
        return best[1], best[2]

    def draft(self, budget: int, least: int, source: str) -> Draft:
        tokens, parents = self.guess(budget) if budget > 0 else ([], [])
        if not tokens:
            return tree.EMPTY
        if not parents:
            return chain(array(INT32, tokens), source)
        ids: IntArray = np.frombuffer(array(INT32, tokens), dtype=np.int32)
        return Draft(ids, np.frombuffer(array(INT32, parents), dtype=np.int32), None, source)

    def take(self, begin: int, end: int) -> None:
        self._index.extend(self.tokens[begin:end])

    def learn(self, emitted: list[int]) -> int:
        num_indexed = super().learn(emitted)
        if self._past is not None:
            self._follow(self._past, emitted)
        return num_indexed

    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :].tolist()

    def _follow(self, past: Past, emitted: list[int]) -> None:
        """Goes on in both generations, or finds its place in new ones."""
        if self._seen is not past.generations:
            self._seen = past.generations
            self._matches = [(ROOT, 0)] * len(self._seen)
            emitted = self.tokens[-self._index.max_depth :].tolist()
        for place, index in enumerate(self._seen):
            if index.size:
                self._matches[place] = index.follow(*self._matches[place], emitted)


class Suffix(LookupDrafter[SuffixMemory]):
    """Drafts what most often followed the newest tokens, as far as it is likely."""

    name = "suffix"
    max_indexed = 320

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__()
        self.needs = Needs(shape=config.shape)
        self._config = config
        self._speculator = Speculator(config)
        self._pasts: OrderedDict[str, Past] = OrderedDict()  # by tenant, least recently used first
        self._waiting: deque[tuple[str, deque[int]]] = deque()  # outputs to be indexed

    def remember(self, request: Request) -> SuffixMemory:
        past = self._past(request.tenant) if self._config.max_cached_requests else None
        return SuffixMemory(request, past, self._speculator, self._config.max_tree_depth)

    def forget(self, memory: SuffixMemory) -> None:
        output = memory.output()
        if output and self._config.max_cached_requests:
            self._waiting.append((memory.tenant, deque(output)))

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        super().observe(batch, verdict)
        if self._waiting:
            self.work(self.num_spare)

    def shutdown(self) -> None:
        super().shutdown()
        self._pasts.clear()
        self._waiting.clear()

    def work(self, num_tokens: int) -> None:
        """Indexes some tokens of outputs that wait, whole outputs one after the other."""
        while self._waiting and num_tokens > 0:
            tenant, output = self._waiting[0]
            past = self._past(tenant)
            piece = [output.popleft() for _ in range(min(num_tokens, len(output)))]
            num_tokens -= len(piece)
            past.generations[0].extend(piece)
            if not output:
                self._waiting.popleft()
                past.generations[0].begin_text()
                past.num_texts += 1
                self._shrink(past)

    def _past(self, tenant: str) -> Past:
        past = self._pasts.get(tenant)
        if past is None:
            if len(self._pasts) >= _MAX_TENANTS:
                self._pasts.popitem(last=False)
            past = self._pasts[tenant] = Past(self._config.max_tree_depth)
        self._pasts.move_to_end(tenant)
        return past

    def _shrink(self, past: Past) -> None:
        """Forgets the oldest outputs, of this tenant or of the one not seen for longest."""
        config = self._config
        half = max(1, config.max_cached_requests // 2)
        if past.num_texts >= half or past.generations[0].size > config.max_cached_tokens // 2:
            past.turn()
        while sum(each.size for each in self._pasts.values()) > config.max_cached_tokens:
            oldest = next(iter(self._pasts.values()))
            oldest.turn()
            if oldest.size == 0 and len(self._pasts) > 1:
                self._pasts.popitem(last=False)
