"""NGramCache: counted n-grams of the context, of past requests, and of a corpus.

Semantics of llama.cpp's `ngram-cache`. Token by token: the longest known n-gram of the context
(orders 4 to 1, lax thresholds), else of the tenant's past requests (the dynamic table, strict
ones), else the static table (order 2, lax). Within an n-gram, the token with the largest count
times its weight in the static table: 100 times its count after the newest two tokens, or 1.

A request's counts join its tenant's dynamic table when it ends, some entries a step. Tenants never
share one; the static table is everybody's.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..config import NGramCacheConfig
from ..scheduler.types import Batch, Request, Verdict
from .lookup import INT32, LookupDrafter, Memory
from .ngram_table import BITS, ONE, TOKEN, Arrays, Entry, Table, add, fingerprint, load, pairs, save

log = logging.getLogger(__name__)

ORDERS = 4
STATIC_ORDER = 2
_MASKS = tuple(2 ** (BITS * order) - 1 for order in range(1, ORDERS + 1))
# By order, the longest first: index, mask, least samples, least percent.
_LAX = tuple(zip((3, 2, 1, 0), reversed(_MASKS), (1, 1, 2, 2), (50, 50, 50, 66)))
_STRICT = tuple(zip((3, 2, 1, 0), reversed(_MASKS), (2, 2, 3, 4), (66, 66, 66, 75)))
_STATIC_LEAST, _STATIC_PERCENT = 2, 50
_STATIC_WEIGHT = 100
_MERGED_PER_STEP = 256  # entries of finished requests
_MAX_TENANTS = 1024  # from here on, tenants of whom nothing is known are dropped

Tables = tuple[Table, ...]  # by order - 1


def _best(entry: Entry, static: Entry | None) -> tuple[int, int, int]:
    """(token, its count, all counts); of equal products, the most counted before the others."""
    if isinstance(entry, int):
        count = entry >> BITS
        return entry & TOKEN, count, count
    if static is None:
        return entry.best, entry.best_count, entry.total
    weights = dict(pairs(static))
    token, count = entry.best, entry.best_count
    highest = count * (_STATIC_WEIGHT * weights.get(token, 0) or 1)
    for other, times in entry.by_token.items():
        product = times * (_STATIC_WEIGHT * weights.get(other, 0) or 1)
        if product > highest:
            token, count, highest = other, times, product
    return token, count, entry.total


def _draft(
    tables: Tables,
    limits: tuple[tuple[int, int, int, int], ...],
    tail: int,  # the newest tokens, packed
    known: int,  # how many tokens there are
    static: Entry | None,  # what followed the newest two in the corpus
) -> int:
    """The token that some order is sure enough of, the longest first; -1 if none is."""
    for index, mask, least, percent in limits if known >= ORDERS else limits[ORDERS - known :]:
        entry = tables[index].get(tail & mask)
        if entry is None:
            continue
        if isinstance(entry, int):
            if entry >> BITS >= least:
                return entry & TOKEN
            continue
        token, count, total = _best(entry, static)
        if total >= least and 100 * count >= percent * total:
            return token
    return -1


class CacheMemory(Memory):
    """The counts of one request."""

    __slots__ = ("_dynamic", "_masked", "_static", "_tail", "context", "tenant")

    def __init__(self, request: Request, dynamic: Tables, static: Table) -> None:
        super().__init__(request)
        self.tenant = request.tenant
        self._dynamic, self._static = dynamic, static
        self.context: Tables = ({}, {}, {}, {})
        self._masked = tuple(
            (table, table.setdefault, mask) for table, mask in zip(self.context, _MASKS)
        )
        self._tail = 0  # the newest tokens that are counted, packed

    def find(self, budget: int) -> array[int] | None:
        known, tail, static_table = len(self.tokens), self._tail, self._static
        if known < STATIC_ORDER:
            return None
        if self.num_indexed < known:
            tail = _packed(self.tokens[-ORDERS:])
        found = array(INT32)
        static, dynamic, context = None, self._dynamic, self.context
        has_past = bool(dynamic[0])  # whatever was counted was counted at order 1 too
        longest = context[-1].get
        for _ in range(budget):
            entry = longest(tail) if known >= ORDERS else None
            if type(entry) is int:  # what is mostly so: one token only followed four
                token = entry & TOKEN
            else:
                if static_table:
                    static = static_table.get(tail & _MASKS[STATIC_ORDER - 1])
                token = _draft(context, _LAX, tail, known, static)
                if token < 0 and has_past:
                    token = _draft(dynamic, _STRICT, tail, known, static)
                if token < 0 and static is not None:
                    token, count, total = _best(static, None)
                    if total < _STATIC_LEAST or 100 * count < _STATIC_PERCENT * total:
                        break
                if token < 0:
                    break
            found.append(token)
            tail, known = (tail << BITS | token) & _MASKS[-1], known + 1
        return found

    def take(self, begin: int, end: int) -> None:
        tail, tables = self._tail, self._masked
        for known, token in enumerate(self.tokens[begin:end], begin):
            first = token | ONE
            for table, setdefault, mask in tables if known >= ORDERS else tables[:known]:
                key = tail & mask
                entry = setdefault(key, first)
                if entry is first:
                    continue
                if type(entry) is int and entry & TOKEN == token:
                    table[key] = entry + ONE
                else:
                    add(table, key, token)
            tail = (tail << BITS | token) & _MASKS[-1]
        self._tail = tail


def _packed(tokens: Iterable[int]) -> int:
    """Tokens as a key."""
    key = 0
    for token in tokens:
        key = key << BITS | token
    return key


class DynamicTables:
    """What past requests counted, by tenant; beyond `max_entries` the oldest are forgotten."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._tables: dict[str, tuple[OrderedDict[int, Entry], ...]] = {}
        self._num_entries = 0
        self._joining: deque[tuple[str, Iterator[tuple[int, int, Entry]]]] = deque()

    def of(self, tenant: str) -> Tables:
        """The tenant's tables, which grow in place."""
        if tenant not in self._tables:
            if len(self._tables) >= _MAX_TENANTS:
                self._drop_empty()
            self._tables[tenant] = tuple(OrderedDict() for _ in range(ORDERS))
        return self._tables[tenant]

    def join(self, tenant: str, tables: Tables) -> None:
        """Takes these counts in, by and by."""
        if self._max_entries:
            self._joining.append((tenant, _entries(tables)))

    def work(self, num_entries: int | None = None) -> None:
        """Takes in some of what waits; all of it if no number is given."""
        while self._joining and (num_entries is None or num_entries > 0):
            tenant, entries = self._joining[0]
            tables = self.of(tenant)
            for order, key, entry in entries:
                before = len(tables[order])
                for token, count in pairs(entry):
                    add(tables[order], key, token, count)
                self._num_entries += len(tables[order]) - before
                if num_entries is not None:
                    num_entries -= 1
                    if num_entries <= 0:
                        break
            else:
                self._joining.popleft()
            self._shrink()

    def arrays(self) -> list[Arrays]:
        return [
            Arrays.of(tenant, order, table)
            for tenant, tables in self._tables.items()
            for order, table in enumerate(tables, 1)
            if table
        ]

    def fill(self, arrays: list[Arrays]) -> None:
        """Takes in what a file holds."""
        for each in arrays:
            self.join(each.tenant, _as_tables(each))
        self.work()

    def _drop_empty(self) -> None:
        for tenant in [name for name, tables in self._tables.items() if not any(tables)]:
            del self._tables[tenant]

    def _shrink(self) -> None:
        """Forgets the oldest entries of the tenant that has most."""
        while self._num_entries > self._max_entries:
            tables = max(self._tables.values(), key=lambda some: sum(map(len, some)))
            excess = self._num_entries - self._max_entries
            largest = max(tables, key=len)
            for _ in range(min(excess, max(1, len(largest) // 8))):
                largest.popitem(last=False)
                self._num_entries -= 1


def _entries(tables: Tables) -> Iterator[tuple[int, int, Entry]]:
    """Every entry, taken out: a table that goes at once would hold up a step."""
    for order, table in enumerate(tables):
        for key in list(table):
            yield order, key, table.pop(key)


def _as_tables(arrays: Arrays) -> Tables:
    tables: Tables = ({}, {}, {}, {})
    arrays.fill(tables[arrays.keys.shape[1] - 1])
    return tables


class NGramCache(LookupDrafter[CacheMemory]):
    """Drafts what was counted most, in the context, in the past, in a corpus."""

    name = "ngram_cache"

    def __init__(self, config: NGramCacheConfig, tokenizer: Path, vocab_size: int) -> None:
        super().__init__(config.draft_min)
        self._static: Table = {}
        self._fingerprint = ""
        self._file: Path | None = None
        self.dynamic = DynamicTables(config.max_dynamic_entries)
        if config.lookup_cache_static is not None or config.lookup_cache_dynamic is not None:
            self._fingerprint = fingerprint(tokenizer)
        if config.lookup_cache_static is not None:
            field = "speculative_config.lookup_cache_static"
            path = Path(config.lookup_cache_static)
            for arrays in load(path, field, self._fingerprint, vocab_size):
                if arrays.keys.shape[1] == STATIC_ORDER:
                    arrays.fill(self._static)
        if config.lookup_cache_dynamic is not None:
            field = "speculative_config.lookup_cache_dynamic"
            self._file = Path(config.lookup_cache_dynamic)
            if self._file.exists():
                self.dynamic.fill(load(self._file, field, self._fingerprint, vocab_size))

    def remember(self, request: Request) -> CacheMemory:
        return CacheMemory(request, self.dynamic.of(request.tenant), self._static)

    def forget(self, memory: CacheMemory) -> None:
        self.dynamic.join(memory.tenant, memory.context)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        super().observe(batch, verdict)
        self.dynamic.work(_MERGED_PER_STEP)

    def shutdown(self) -> None:
        super().shutdown()
        if self._file is not None:
            self.dynamic.work()
            save(self._file, self.dynamic.arrays(), self._fingerprint, {"kind": "dynamic"})
            log.info("n-gram cache saved to %s", self._file)
