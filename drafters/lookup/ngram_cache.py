"""NGramCache: counted n-grams of the context, of past requests, and of a corpus.

Semantics of llama.cpp's `ngram-cache`. Token by token: the longest known n-gram of the context
(orders 4 to 1, lax thresholds), else of the tenant's past requests (the dynamic table, strict
ones), else the static table (order 2, lax). Within an n-gram, the token with the largest count
times its weight in the static table: 100 times its count after the newest two tokens, or 1.

A request's counts join its tenant's dynamic table when it ends, some n-grams a step. Tenants never
share one; the static table is everybody's.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

import numpy as np

from ...config import NGramCacheConfig
from ...scheduler.types import Batch, IntArray, Request, Verdict
from .base import LookupDrafter, Memory
from .kernels import hashing
from .kernels import ngrams as loops
from .kernels.hashing import grown, new_table
from .kernels.ngrams import ORDERS, STATIC_ORDER, draft
from .ngram_file import Arrays, load_tables, save

log = logging.getLogger(__name__)

_ROWS_PER_TOKEN = 6  # of text that hardly repeats
_MERGED_PER_STEP = 2048  # rows of finished requests
_MARGIN = 256  # tokens that a request emits before its table has to grow
_MAX_TENANTS = 1024  # from here on, tenants of whom nothing is known are dropped


class CountTable:
    """N-grams of orders 1 to 4, what followed them, and how often."""

    __slots__ = ("hashed",)

    def __init__(self, num_tokens: int = 0) -> None:
        """With room for a text of so many tokens, of which it takes up what it needs."""
        self.hashed = new_table(loops.COLUMNS, 1, _ROWS_PER_TOKEN * num_tokens)

    @property
    def rows(self) -> IntArray:
        return self.hashed[0]

    @property
    def num_rows(self) -> int:
        return int(self.hashed[2][hashing.NUM_ROWS])

    @property
    def num_keys(self) -> int:
        return int(self.hashed[2][loops.NUM_KEYS])

    def extend(self, text: IntArray, begin: int) -> None:
        """Counts `text[begin:]` as what follows the tokens before it."""
        while (begin := loops.extend(self.hashed, text, begin)) < len(text):
            self._grow()

    def merge(
        self,
        source: CountTable,
        begin: int,
        end: int,
        older: CountTable,
        *,
        is_only_new: bool = False,
    ) -> None:
        """Adds the keys of some rows, or those alone that are not known here.

        Those that `older` has come over from there first.
        """
        while (
            begin := loops.merge(self.hashed, older.hashed, source.rows, begin, end, is_only_new)
        ) < end:
            self._grow()

    def fill(self, arrays: Arrays) -> None:
        """Adds all that a file holds in one table."""
        keys, counts, pairs = arrays.keys, arrays.counts, arrays.pairs
        firsts, begin = np.cumsum(counts, dtype=np.int64) - counts, 0
        while begin < len(keys):
            begin = loops.fill(self.hashed, keys, counts, pairs, begin, int(firsts[begin]))
            if begin < len(keys):
                self._grow()

    def arrays(self, tenant: str) -> list[Arrays]:
        """As a file holds it: a table for each order that has keys."""
        rows = self.rows[: self.num_rows]
        is_pair = rows[:, 3] == loops.PAIR
        is_single = ~is_pair & (rows[:, loops.LAST] < 0)
        orders = np.where(is_pair, 0, (rows[:, :ORDERS] >= 0).sum(axis=1))
        # Whose pair, which token, how often; in order of the keys and then of arrival.
        pairs = np.stack([rows[:, 0], rows[:, 1], rows[:, loops.COUNT]], axis=1)[is_pair]
        (single,) = np.nonzero(is_single)
        singles = np.stack([single, *rows[single][:, [loops.BEST, loops.BEST_COUNT]].T], axis=1)
        pairs = np.concatenate([pairs, singles])
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")].astype(np.int32)
        found = []
        for order in range(1, ORDERS + 1):
            (keys,) = np.nonzero(orders == order)
            if len(keys):
                own = pairs[orders[pairs[:, 0]] == order]
                counts = np.unique(own[:, 0], return_counts=True)[1].astype(np.int32)
                tokens = np.ascontiguousarray(rows[keys, :order][:, ::-1])
                found.append(Arrays(tenant, tokens, counts, np.ascontiguousarray(own[:, 1:])))
        return found

    def _grow(self) -> None:
        self.hashed = grown(self.hashed, len(self.rows))


_NOTHING = CountTable()  # never written to


class PastCounts:
    """What a tenant's finished requests counted, in two generations.

    An n-gram of the older one that is counted again moves to the newer one with all its counts;
    the others go with their generation.
    """

    def __init__(self) -> None:
        self.newer, self.older = CountTable(), _NOTHING

    @property
    def num_keys(self) -> int:
        return self.newer.num_keys + self.older.num_keys

    def merge(self, source: CountTable, begin: int, end: int) -> None:
        self.newer.merge(source, begin, end, self.older)

    def turn(self) -> None:
        """A new generation begins."""
        self.newer, self.older = CountTable(), self.newer

    def arrays(self, tenant: str) -> list[Arrays]:
        """Both generations together."""
        if not self.older.num_keys:
            return self.newer.arrays(tenant)
        whole = CountTable()
        whole.merge(self.newer, 0, self.newer.num_rows, _NOTHING)
        whole.merge(self.older, 0, self.older.num_rows, _NOTHING, is_only_new=True)
        return whole.arrays(tenant)


class CacheMemory(Memory):
    """The counts of one request."""

    __slots__ = ("_past", "_room", "_static", "context", "tenant")

    def __init__(
        self, request: Request, past: PastCounts, static: CountTable, room: IntArray
    ) -> None:
        super().__init__(request)
        self.tenant = request.sharer
        self._past, self._static, self._room = past, static, room
        self.context = CountTable(len(self.tokens) + _MARGIN)

    def find(self, budget: int) -> IntArray:
        past, room = self._past, self._room
        size = draft(
            self.context.hashed, past.newer.hashed, past.older.hashed, self._static.hashed,
            _NOTHING.hashed, self.ids(-ORDERS), min(budget, len(room)), room,
        )  # fmt: skip
        return room[:size].copy()

    def take(self, begin: int, end: int) -> None:
        first = max(0, begin - ORDERS)
        self.context.extend(self.ids(first, end), begin - first)


class DynamicTables:
    """What past requests counted, by tenant; at most `max_entries` n-grams, the oldest go first."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._pasts: dict[str, PastCounts] = {}
        self._sizes: dict[str, int] = {}  # n-grams of those that have any
        self.num_keys = 0
        self._joining: deque[tuple[str, CountTable, int]] = deque()  # and the next of its rows

    def of(self, tenant: str) -> PastCounts:
        """The tenant's counts, which grow in place."""
        if tenant not in self._pasts:
            if len(self._pasts) >= _MAX_TENANTS:
                self._pasts = {name: self._pasts[name] for name in self._sizes}
            self._pasts[tenant] = PastCounts()
        return self._pasts[tenant]

    def join(self, tenant: str, table: CountTable) -> None:
        """Takes these counts in, by and by."""
        if self._max_entries:
            self._joining.append((tenant, table, 0))

    def work(self, num_rows: int | None = None) -> None:
        """Takes in some of what waits; all of it if no number is given."""
        while self._joining and (num_rows is None or num_rows > 0):
            tenant, table, begin = self._joining.popleft()
            room = self._room(tenant) if num_rows is None else min(num_rows, self._room(tenant))
            end = min(table.num_rows, begin + room)
            self.of(tenant).merge(table, begin, end)
            if end < table.num_rows:
                self._joining.appendleft((tenant, table, end))
            if num_rows is not None:
                num_rows -= end - begin
            self._count(tenant)
            while self.num_keys > self._max_entries:
                largest = max(self._sizes.items(), key=lambda some: some[1])[0]
                self._pasts[largest].turn()
                self._count(largest)

    def _room(self, tenant: str) -> int:
        """N-grams that the tenant may add before older ones, its own or others', have to go."""
        past, share = self.of(tenant), self._max_entries // (2 * max(1, len(self._sizes)))
        if past.older.num_keys:
            return max(1, self._max_entries - self.num_keys)
        if past.newer.num_keys >= share > 0:
            past.turn()  # while that costs nothing
        return max(1, share - past.newer.num_keys)

    def _count(self, tenant: str) -> None:
        size = self._pasts[tenant].num_keys
        self.num_keys += size - self._sizes.pop(tenant, 0)
        if size:
            self._sizes[tenant] = size

    def arrays(self) -> list[Arrays]:
        return [each for tenant, past in self._pasts.items() for each in past.arrays(tenant)]

    def fill(self, arrays: list[Arrays]) -> None:
        """Takes in what a file holds."""
        for each in arrays:
            table = CountTable()
            table.fill(each)
            self.join(each.tenant, table)
        self.work()


class NGramCache(LookupDrafter[CacheMemory]):
    """Drafts what was counted most, in the context, in the past, in a corpus."""

    def __init__(self, config: NGramCacheConfig, tokenizer: Path, vocab_size: int) -> None:
        super().__init__("ngram_cache", self._cache_memory, config.draft_min, max_indexed=1024)
        static, dynamic, self._fingerprint = load_tables(config, tokenizer, vocab_size)
        self._static = CountTable()
        for arrays in static:
            if arrays.keys.shape[1] == STATIC_ORDER:
                self._static.fill(arrays)
        self.dynamic = DynamicTables(config.max_dynamic_entries)
        self.dynamic.fill(dynamic)
        self._file = config.lookup_cache_dynamic and Path(config.lookup_cache_dynamic)
        self._room: IntArray = np.empty(config.draft_len, dtype=np.int32)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        super().observe(batch, verdict)
        self.dynamic.work(_MERGED_PER_STEP)

    def shutdown(self) -> None:
        super().shutdown()
        if self._file:
            self.dynamic.work()
            save(self._file, self.dynamic.arrays(), self._fingerprint, {"kind": "dynamic"})
            log.info("n-gram cache saved to %s", self._file)

    def _cache_memory(self, request: Request) -> CacheMemory:
        isolated = request.speculation.isolated
        past = PastCounts() if isolated else self.dynamic.of(request.sharer)
        return CacheMemory(request, past, self._static, self._room)

    def _closed(self, memory: CacheMemory) -> None:
        if not memory.is_isolated:
            self.dynamic.join(memory.tenant, memory.context)
