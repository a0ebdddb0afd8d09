"""Paged-KV accounting and the prefix cache: who holds which block, and what it contains.

Blocks are accounted for once, here; every rank holds its own heads' slice of the same blocks, so
one table serves all shards. A block whose tokens are all computed gets a hash chained over
everything before it and salted with the tenant and the adapter (and over the token after it, if the
content of the block depends on that token: `PagedTokens`). A block without holders stays findable
until it is allocated again, least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .types import IntArray


def root_hash(tenant: str, adapter: str = "") -> bytes:
    """The hash before a sequence's first block; neither tenants nor adapters share."""
    root = hashlib.blake2b(tenant.encode(), digest_size=16, person=b"outrider").digest()
    if not adapter:
        return root
    return hashlib.blake2b(adapter.encode(), digest_size=16, key=root, person=b"adapter").digest()


def chain_hash(parent: bytes, tokens: IntArray) -> bytes:
    """The hash of a full block, given its predecessor's. Collisions are cryptographically rare."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16, key=parent).digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, reference-counted.

    Invariant (`check`): free + held = num_blocks, a block is free exactly when nobody holds it,
    and the hash table and the blocks' own hashes agree.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = caching
        self._holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Free blocks, next to be taken first: empty ones at the front, cached ones by age.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks held once each, or None (and nothing changed) if too few are free."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Lets go of `blocks`, tail first, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, (block, "freed but not held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def acquire_cached(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of cached blocks for `hashes`, each now held once more."""
        found = []
        for value in hashes:
            block = self._by_hash.get(value)
            if block is None:
                break
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1
            found.append(block)
        return found

    def cache_block(self, block: int, value: bytes) -> None:
        """Makes a full, computed block findable; the first block with a hash keeps it."""
        if self._caching and value not in self._by_hash and self._hashes[block] is None:
            self._hashes[block] = value
            self._by_hash[value] = block

    def clear_cache(self) -> None:
        """Forgets every cached content (the KV itself was lost)."""
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Asserts the invariant against the block lists of all holders."""
        counts = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "holders and reference counts differ"
        free = {block for block, count in enumerate(counts) if count == 0}
        assert free == set(self._free), (len(free), len(self._free))
        for value, block in self._by_hash.items():
            assert self._hashes[block] == value, (block, "hash table and block differ")

    def _forget(self, block: int) -> None:
        value = self._hashes[block]
        if value is not None:
            self._hashes[block] = None
            del self._by_hash[value]
