"""NGramMod: one hash pool from n tokens to the next, of constant size and cost.

Semantics of llama.cpp's `ngram-mod`. 4 * 1024 * 1024 int32 slots hold nothing but a successor; no
key is compared and the last writer wins. The slot is the n-gram's 64-bit LCG hash modulo the size,
a power of two, so that 22 bits of every term are enough. A draft rolls the newest n tokens through
the pool until a slot is empty, up to `max_draft_len` (n_max), and is dropped below `n_min`.

A pool is shared by the requests of a tenant, never between tenants; an isolated request has its
own. There are at most `max_pools`; a new one replaces the one that was idle longest. While all are
in use, requests of further tenants and isolated requests get no drafts.
"""

from __future__ import annotations

import logging

import numpy as np

from ...config import NGramModConfig
from ...scheduler.types import Batch, Draft, IntArray, Request
from .base import LookupDrafter, Memory, num_agreeing, powers_of, slots_of
from .kernels.ngrams import FACTOR, roll

log = logging.getLogger(__name__)

NUM_SLOTS = 4 * 1024 * 1024
_MAX_LAG = 32  # tokens that the oldest unindexed n-gram may lie behind before they are indexed
_MAX_OCCUPANCY = 0.25  # share of used slots after a prompt above which the pool is cleared
_LOW_FRACTION, _MAX_LOW = 0.25, 5  # cleared after so many drafts in a row with less accepted
_ADVISED_N = 16  # llama.cpp's advice: shorter n-grams match by chance
_FIXED = 4096  # tokens that a step may index, whatever the time of its forward


class ModPool:
    """A tenant's slots; a slot holds the successor plus one, or 0."""

    def __init__(self, n_match: int) -> None:
        self.n_match = n_match
        self.num_requests = 0
        self._powers = powers_of(FACTOR, n_match, NUM_SLOTS)
        self.wipe()

    def add(self, tokens: IntArray) -> None:
        """Stores the successor of every n-gram of `tokens` ([any])."""
        if len(tokens) <= self.n_match:
            return
        slots, where = self.slots, slots_of(tokens[:-1], self._powers, NUM_SLOTS)
        fresh = where[slots[where] == 0]
        if len(fresh):  # of n-grams with the same slot, the last one is stored
            marks = np.arange(len(fresh), dtype=np.int32)
            slots[fresh] = marks
            self.used += int(np.count_nonzero(slots[fresh] == marks))
        # Of equal indices, numpy stores the last.
        slots[where] = tokens[self.n_match :] + np.int32(1)

    def wipe(self) -> None:
        self.used = 0
        self.slots: IntArray = np.zeros(NUM_SLOTS, dtype=np.int32)  # memory is used as it fills


class ModMemory(Memory):
    """One request: its progress in indexing n-grams, and its run of bad drafts.

    `num_indexed` counts tokens of the text at opening. Later tokens are indexed when the request
    drafts, and are counted at once.
    """

    __slots__ = (
        "_drafted", "_min_len", "_num_low", "_room", "is_opening", "num_grams", "num_opening",
        "pool",
    )  # fmt: skip

    def __init__(self, request: Request, pool: ModPool, n_min: int, room: IntArray) -> None:
        super().__init__(request)
        self.pool = pool
        self.num_opening = len(self.tokens)
        self.is_opening = True  # the text at opening is not indexed completely
        self.num_grams = 0  # indexed n-grams
        self._min_len, self._room = n_min, room
        self._drafted: list[int] = []  # the draft of the step in flight
        self._num_low = 0

    def draft(self, budget: int, least: int, source: str) -> Draft:
        draft = super().draft(budget, least, source)
        self._drafted = draft.tokens.tolist()
        return draft

    def find(self, budget: int) -> IntArray | None:
        if len(self.tokens) <= self.pool.n_match:
            return None
        tokens, room, least = np.frombuffer(self.tokens, np.int32), self._room, self._min_len
        size = roll(self.pool.slots, tokens, self.pool.n_match, max(budget, least), room)
        return room[:size].copy() if size and size >= least else None

    def index(self, max_tokens: int) -> int:
        """Indexes n-grams whose successor is known.

        The newest of the later tokens is left for the next time.
        """
        begin, n = self.num_grams, self.pool.n_match
        known = max(len(self.tokens) - 1, self.num_opening)
        end = min(known, begin + n + max_tokens)
        if begin + n < end:
            self.pool.add(self.ids(begin, end))
            self.num_grams = end - n
        if self.is_opening and self.num_grams + n >= known:
            self.is_opening = False
            if self.pool.used > _MAX_OCCUPANCY * NUM_SLOTS:
                self.pool.wipe()
        self.num_indexed = self.num_grams if self.is_opening else len(self.tokens)
        return self.num_grams - begin

    def learn(self, emitted: list[int]) -> int:
        if self._drafted:
            self._judge(emitted)
        self.tokens.extend(emitted)
        if not self.is_opening:
            self.num_indexed = len(self.tokens)
        return 0

    def _judge(self, emitted: list[int]) -> None:
        num_accepted = num_agreeing(self._drafted, emitted)
        is_low = num_accepted < _LOW_FRACTION * len(self._drafted)
        self._num_low = self._num_low + 1 if is_low else 0
        if self._num_low == _MAX_LOW:
            self._num_low = 0
            self.pool.wipe()
            self.num_grams = 0  # to be indexed again before the next draft, with this step's tokens


_Owner = tuple[str, str]  # the sharer, and the id of an isolated request or ""


def _owner(request: Request) -> _Owner:
    return request.sharer, request.id if request.speculation.isolated else ""


class NGramMod(LookupDrafter[ModMemory]):
    """Drafts by rolling n-grams through the pools of the requests' tenants."""

    def __init__(self, config: NGramModConfig) -> None:
        super().__init__("ngram_mod", self._mod_memory, max_indexed=_FIXED)
        self._config = config
        if config.n_match < _ADVISED_N:
            log.warning("n_match is %d; below %d drafts are poor", config.n_match, _ADVISED_N)
        self._room: IntArray = np.empty(config.draft_len, dtype=np.int32)
        # By owner; least recently opened first.
        self._pools: dict[_Owner, ModPool] = {}

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        """Indexes all requests, then drafts."""
        self._catch_up_steps()
        for request_id, budget in zip(batch.request_ids, budgets.tolist()):
            memory = self._memories.get(request_id)
            if budget <= 0 or memory is None:
                continue
            if memory.is_opening or len(memory.tokens) - 1 > memory.num_grams + _MAX_LAG:
                self._index(memory)
        return super().propose(batch, budgets)

    def shutdown(self) -> None:
        super().shutdown()
        self._pools.clear()

    def _mod_memory(self, request: Request) -> ModMemory | None:
        pool = self._pool(_owner(request))
        if pool is None:
            return None
        pool.num_requests += 1
        return ModMemory(request, pool, self._config.n_min, self._room)

    def _closed(self, memory: ModMemory) -> None:
        memory.pool.num_requests -= 1
        if memory.is_isolated:
            self._pools = {
                key: pool for key, pool in self._pools.items() if pool is not memory.pool
            }

    def _index(self, memory: ModMemory) -> None:
        """Indexes one request's waiting tokens, as far as the step's allowance goes."""
        while num_tokens := self._allowance.tokens():
            num_indexed = memory.index(num_tokens)
            self._allowance.spend(num_indexed)
            if not num_indexed:
                return

    def _pool(self, owner: _Owner) -> ModPool | None:
        pool = self._pools.pop(owner, None)
        if pool is None:
            if len(self._pools) >= self._config.max_pools:
                idle = next((t for t, p in self._pools.items() if p.num_requests == 0), None)
                if idle is None:
                    return None
                del self._pools[idle]
            pool = ModPool(self._config.n_match)
        self._pools[owner] = pool
        return pool
