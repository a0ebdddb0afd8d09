"""NGramMod: one hash pool from n tokens to the next, of constant size and cost.

Semantics of llama.cpp's `ngram-mod`. 4 * 1024 * 1024 int32 slots hold nothing but a successor; no
key is compared and the last writer wins. The slot is the n-gram's 64-bit LCG hash modulo the size,
a power of two, so that 22 bits of every term are enough. A draft rolls the newest n tokens through
the pool until a slot is empty, up to `max_draft_len` (n_max), and is dropped below `n_min`.

A pool is shared by the requests of a tenant, never between tenants. There are at most `max_pools`;
the one that idled longest gives way to a new tenant, and while all are in use a further tenant's
requests go without drafts.

All pools are one array, so that one call rolls through all of them.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from ...config import NGramModConfig
from ...scheduler import tree
from ...scheduler.types import Batch, Draft, IntArray, Request
from .base import LookupDrafter, Memory, chain_of, num_agreeing
from .index import powers_of, slots_of
from .kernels.ngrams import EPOCH, FACTOR, roll

log = logging.getLogger(__name__)
Slots = NDArray[np.uint32]

NUM_SLOTS = 4 * 1024 * 1024
_EPOCH = np.uint32(EPOCH)
_MAX_LAG = 32  # n-grams are indexed when the oldest missing one begins further back than this
_MAX_OCCUPANCY = 0.25  # after a prompt; above it the pool is wiped
_LOW_FRACTION, _MAX_LOW = 0.25, 5  # so many drafts in a row accepted less than this: wiped
_ADVISED_N = 16  # llama.cpp's advice: shorter n-grams match by chance
_FIXED = 4096  # tokens that a step indexes whatever its forward takes


class ModPools:
    """All pools, in one array that takes up memory as they fill.

    A slot holds a token and, above it, the pool's epoch; of another epoch it is empty, so that a
    pool is wiped by a new one.
    """

    def __init__(self, max_pools: int, n_match: int) -> None:
        self.slots = np.zeros((max_pools, NUM_SLOTS), dtype=np.uint32)
        self.epochs = np.zeros(max_pools, dtype=np.uint32)
        self.powers = powers_of(FACTOR, n_match, NUM_SLOTS)


class ModPool:
    """A tenant's slots."""

    def __init__(self, pools: ModPools, number: int) -> None:
        self.number = number
        self.n_match = len(pools.powers)
        self.num_requests = 0
        self._epochs, self._powers = pools.epochs, pools.powers
        self._slots = pools.slots[number]
        self.wipe()

    def add(self, tokens: IntArray) -> None:
        """Learns what follows every n-gram of `tokens` ([any])."""
        size, slots, epoch = len(self._powers), self._slots, self._epochs[self.number]
        if len(tokens) <= size:
            return
        where = slots_of(tokens[:-1], self._powers, NUM_SLOTS)
        fresh = where[slots[where] ^ epoch >= _EPOCH]
        if len(fresh):  # of those that share a slot, the last to come leaves its mark
            marks = np.arange(len(fresh), dtype=np.uint32)
            slots[fresh] = marks
            self.used += int(np.count_nonzero(slots[fresh] == marks))
        slots[where] = tokens[size:].view(np.uint32) | epoch  # the last of equals stays

    def wipe(self) -> None:
        self.used = 0
        epoch = (int(self._epochs[self.number]) + int(_EPOCH)) % 2**32
        if not epoch:  # all epochs have been
            self._slots.fill(0)
            epoch = int(_EPOCH)
        self._epochs[self.number] = epoch


class ModMemory(Memory):
    """One request: how far its n-grams are in the pool, and its run of bad drafts.

    `num_indexed` counts tokens of the text that it opened with; later ones are indexed when it
    drafts, and count at once.
    """

    __slots__ = ("_num_low", "drafted", "is_opening", "num_grams", "num_opening", "pool")

    def __init__(self, request: Request, pool: ModPool) -> None:
        super().__init__(request)
        self.pool = pool
        self.num_opening = len(self.tokens)
        self.is_opening = True  # those are not indexed to the end
        self.num_grams = 0  # indexed
        self.drafted: list[int] = []
        self._num_low = 0

    def index(self, max_tokens: int) -> int:
        """Indexes n-grams whose successor is known: of the tokens that it opened with all, of
        later ones all but the newest."""
        begin, n = self.num_grams, self.pool.n_match
        known = max(len(self.tokens) - 1, self.num_opening)
        end = min(known, begin + n + max_tokens)
        if begin + n < end:
            self.pool.add(np.array(self.tokens[begin:end], dtype=np.int32))
            self.num_grams = end - n
        if self.is_opening and self.num_grams + n >= known:
            self.is_opening = False
            if self.pool.used > _MAX_OCCUPANCY * NUM_SLOTS:
                self.pool.wipe()
        self.num_indexed = self.num_grams if self.is_opening else len(self.tokens)
        return self.num_grams - begin

    def learn(self, emitted: list[int]) -> int:
        if self.drafted:
            self._judge(emitted)
        self.tokens.extend(emitted)
        if not self.is_opening:
            self.num_indexed = len(self.tokens)
        return 0

    def _judge(self, emitted: list[int]) -> None:
        num_accepted = num_agreeing(self.drafted, emitted)
        is_low = num_accepted < _LOW_FRACTION * len(self.drafted)
        self.drafted = []
        self._num_low = self._num_low + 1 if is_low else 0
        if self._num_low == _MAX_LOW:
            self._num_low = 0
            self.pool.wipe()
            self.num_grams = 0  # indexed again before the next draft, with this step's tokens


class NGramMod(LookupDrafter[ModMemory]):
    """Drafts by rolling through the pools of the requests' tenants, all requests at once."""

    def __init__(self, config: NGramModConfig) -> None:
        super().__init__("ngram_mod", self._mod_memory, config.n_min, max_indexed=_FIXED)
        self._config = config
        if config.n_match < _ADVISED_N:
            log.warning("n_match is %d; below %d drafts are poor", config.n_match, _ADVISED_N)
        self._slots = ModPools(config.max_pools, config.n_match)
        self._pools: dict[str, ModPool] = {}  # by tenant, least recently opened first

    def propose(self, batch: Batch, budgets: IntArray) -> list[Draft]:
        drafts = [tree.EMPTY] * batch.num_seqs
        n = self._config.n_match
        asked: list[tuple[int, int, ModMemory]] = []
        for row, (request_id, budget) in enumerate(zip(batch.request_ids, budgets.tolist())):
            memory = self._memories.get(request_id)
            if memory is None:
                continue
            memory.drafted = []
            if budget <= 0 or len(memory.tokens) <= n:
                continue
            if memory.is_opening or len(memory.tokens) - 1 > memory.num_grams + _MAX_LAG:
                self._index(memory)
            asked.append((row, budget, memory))
        if asked:
            self._roll(asked, drafts)
        self._allowance.forward_begins()
        return drafts

    def shutdown(self) -> None:
        super().shutdown()
        self._pools.clear()

    def _mod_memory(self, request: Request) -> ModMemory | None:
        pool = self._pool(request.tenant)
        if pool is None:
            return None
        pool.num_requests += 1
        return ModMemory(request, pool)

    def _closed(self, memory: ModMemory) -> None:
        memory.pool.num_requests -= 1

    def _index(self, memory: ModMemory) -> None:
        """What waits of one request, as far as the step's allowance goes."""
        while num_tokens := self._allowance.tokens():
            num_indexed = memory.index(num_tokens)
            self._allowance.spend(num_indexed)
            if not num_indexed:
                return

    def _pool(self, tenant: str) -> ModPool | None:
        pool = self._pools.pop(tenant, None)
        if pool is None:
            number = len(self._pools)
            if number >= self._config.max_pools:
                idle = next((t for t, p in self._pools.items() if p.num_requests == 0), None)
                if idle is None:
                    return None
                number = self._pools.pop(idle).number
            pool = ModPool(self._slots, number)
        self._pools[tenant] = pool
        return pool

    def _roll(self, asked: list[tuple[int, int, ModMemory]], drafts: list[Draft]) -> None:
        """Drafts for the rows that asked."""
        n, n_min = self._config.n_match, self._draft_min
        tails: IntArray = np.empty((len(asked), n), dtype=np.int32)
        for index, (_, _, memory) in enumerate(asked):
            tails[index] = memory.tokens[-n:]
        numbers: IntArray = np.array([each.pool.number for _, _, each in asked], dtype=np.int32)
        longest = max(max(budget for _, budget, _ in asked), n_min)
        num_steps = min(longest, self._config.draft_len)
        found: IntArray = np.empty((len(asked), num_steps), dtype=np.int32)
        lengths: IntArray = np.empty(len(asked), dtype=np.int32)
        roll(self._slots.slots, self._slots.epochs, tails, numbers, num_steps, found, lengths)
        for index, length in enumerate(lengths.tolist()):
            row, budget, memory = asked[index]
            if length and length >= n_min:
                tokens = found[index, : min(length, budget)]
                drafts[row] = chain_of(tokens, self.name)
                memory.drafted = tokens.tolist()
