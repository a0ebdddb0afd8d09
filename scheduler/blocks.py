"""Paged-KV accounting and the prefix cache: who holds which block, and what it contains.

Blocks are accounted for once, here; every rank holds its own heads' slice of the same blocks, so
one table serves all shards. A block whose tokens are all computed gets a hash chained over
everything before it and salted with the tenant and the adapter (and over the token after it, if the
content of the block depends on that token: `PagedTokens`). A block without holders can be found by
its hash until it is allocated again; the least recently used one is allocated first. Of blocks with
equal contents, one without holders gives its hash to another one, so that the blocks of a text are
evicted in order.
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


class StateCheckpoints:
    """The recurrent states that the ranks keep, by the hash of the block that ends there.

    A checkpoint is free, being written by a step in flight, or found by its hash. The least
    recently used one is overwritten first, unless a step in flight reads it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._readers: dict[int, int] = {}
        self._num_written = 0  # by steps in flight

    def longest(self, hashes: Sequence[bytes]) -> int:
        """The length of the longest prefix of `hashes` that ends at a checkpoint, in blocks."""
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._by_hash:
                return count
        return 0

    def acquire(self, value: bytes) -> int:
        """Pins and returns the checkpoint with this hash, until `release`."""
        number = self._by_hash[value]
        self._by_hash.move_to_end(value)
        self._readers[number] = self._readers.get(number, 0) + 1
        return number

    def release(self, number: int) -> None:
        """Called when a step that reads the checkpoint has ended."""
        self._readers[number] -= 1
        if not self._readers[number]:
            del self._readers[number]
            if number not in self._hash_of:  # it lost its hash meanwhile
                self._free.append(number)

    def take(self) -> int | None:
        """Reserves a checkpoint to write; None if steps in flight use all of them."""
        if not self._free:
            oldest = (each for each in self._by_hash.items() if each[1] not in self._readers)
            value, number = next(oldest, (b"", -1))
            if number < 0:
                return None
            del self._by_hash[value], self._hash_of[number]
            self._free.append(number)
        self._num_written += 1
        return self._free.pop()

    def put(self, number: int, value: bytes) -> None:
        """Called when a checkpoint holds the state after the block with this hash."""
        self._num_written -= 1
        if value in self._by_hash:
            self._free.append(number)
        else:
            self._by_hash[value], self._hash_of[number] = number, value

    def give_back(self, number: int) -> None:
        """Returns a reserved checkpoint that was not written."""
        self._num_written -= 1
        self._free.append(number)

    def clear(self) -> None:
        """Forgets all written checkpoints."""
        self._free += [each for each in self._hash_of if each not in self._readers]
        self._by_hash.clear()
        self._hash_of.clear()

    def check(self) -> None:
        """Asserts that every checkpoint is in one place."""
        forgotten = [each for each in self._readers if each not in self._hash_of]
        held = len(self._by_hash) + self._num_written + len(forgotten)
        assert len(self._free) + held == self._count, (self._free, held, self._count)
        assert {each: value for value, each in self._by_hash.items()} == self._hash_of


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, reference-counted.

    Invariant (`check`): free + held = num_blocks, a block is free exactly when nobody holds it,
    and the hash table and the blocks' own hashes agree.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        # Set for targets with recurrent layers, which can use a cached prefix up to a checkpoint.
        self.checkpoints = checkpoints
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
        """Number of blocks that hold `num_tokens` tokens."""
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
        """Releases `blocks` from the last to the first, so that a prefix is evicted last."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, (block, "freed but not held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if not self._claim(block):
                    self._hashes[block] = None
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
        """Adds a full, computed block to the cache.

        If another block with the same contents has holders, this one is added when it is freed.
        """
        if self._caching and self._hashes[block] is None:
            self._hashes[block] = value
            self._claim(block)

    def clear_cache(self) -> None:
        """Empties the prefix cache, after the KV itself was lost."""
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
        if self.checkpoints is not None:
            self.checkpoints.clear()

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
        hashed = {block for block in free if self._hashes[block] is not None}
        assert hashed <= set(self._by_hash.values()), "a free block is not found by its hash"
        if self.checkpoints is not None:
            self.checkpoints.check()

    def _claim(self, block: int) -> bool:
        """Maps its hash to this block, unless it maps to another one with holders."""
        value = self._hashes[block]
        if value is None:
            return False
        other = self._by_hash.get(value, block)
        if other != block and self._holders[other] == 0:  # used longer ago
            self._hashes[other] = None
            self._free.move_to_end(other, last=False)
            other = block
        self._by_hash[value] = other
        return other == block

    def _forget(self, block: int) -> None:
        value = self._hashes[block]
        if value is not None:
            self._hashes[block] = None
            del self._by_hash[value]
