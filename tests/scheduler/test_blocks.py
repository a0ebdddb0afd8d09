"""Block accounting against a plain model: holders are counted, cached blocks leave by age."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.scheduler.blocks import BlockPool, chain_hash, root_hash
from outrider.scheduler.types import ints

NUM_BLOCKS = 12


class PlainPool:
    """What `BlockPool` promises, without its data structures."""

    def __init__(self) -> None:
        self.held: list[list[int]] = []  # one list per holder
        self.content: dict[int, bytes] = {}  # that is found
        self.copies: dict[int, bytes] = {}  # of what is found in another block
        self.freed_at: dict[int, int] = {}
        self.clock = 0

    @property
    def counts(self) -> Counter[int]:
        return Counter(block for blocks in self.held for block in blocks)

    @property
    def free(self) -> set[int]:
        return set(range(NUM_BLOCKS)) - set(self.counts)

    def check_taken(self, taken: list[int], free: set[int]) -> None:
        """Empty blocks are taken first, then those that were freed longest ago."""
        empty = {block for block in free if block not in self.content}
        by_age = sorted(free - empty, key=lambda block: self.freed_at[block])
        assert set(taken[: len(empty)]) <= empty
        assert taken[len(empty) :] == by_age[: max(0, len(taken) - len(empty))]

    def release(self, blocks: list[int]) -> None:
        self.held.remove(blocks)
        for block in reversed(blocks):  # the tail is the first to go
            self.clock += 1
            self.freed_at[block] = self.clock
            if block not in self.counts and block in self.copies:
                self.cache(block, self.copies.pop(block), is_freed=True)

    def cache(self, block: int, value: bytes, *, is_freed: bool = False) -> None:
        """A block with holders is found, and of others the one used last."""
        if block in self.content or block in self.copies:
            return
        others = [each for each, other in self.content.items() if other == value]
        if not self.counts.keys().isdisjoint(others):
            if not is_freed:
                self.copies[block] = value
            return
        for each in others:
            del self.content[each]
        self.content[block] = value

    def run_of(self, hashes: list[bytes]) -> list[int]:
        by_hash = {value: block for block, value in self.content.items()}
        found = []
        for value in hashes:
            if value not in by_hash:
                break
            found.append(by_hash[value])
        return found


@pytest.mark.parametrize("seed", range(8))
def test_any_calls_equal_the_plain_pool(seed):
    rng = random.Random(seed)
    pool, plain = BlockPool(NUM_BLOCKS, 4), PlainPool()
    chains = [[bytes([chain, at]) for at in range(5)] for chain in range(3)]
    evicted = hits = 0
    for _ in range(800):
        act = rng.choice(["allocate", "free", "acquire", "cache", "cache", "clear"])
        free = plain.free
        if act == "allocate":
            count = rng.randrange(1, 5)
            taken = pool.allocate(count)
            assert (taken is None) == (count > len(free))
            if taken is not None:
                plain.check_taken(taken, free)
                assert len(set(taken)) == count
                evicted += sum(plain.content.pop(block, None) is not None for block in taken)
                plain.held.append(taken)
        elif act == "free" and plain.held:
            blocks = rng.choice(plain.held)
            pool.free(blocks)
            plain.release(blocks)
        elif act == "acquire":
            hashes = rng.choice(chains)[: rng.randrange(1, 6)]
            wanted = plain.run_of(hashes)
            assert pool.acquire_cached(hashes) == wanted
            hits += len(wanted)
            if wanted:
                plain.held.append(wanted)
        elif act == "cache" and plain.held:
            blocks = rng.choice(plain.held)
            at = rng.randrange(min(5, len(blocks)))
            block, value = blocks[at], rng.choice(chains)[at]
            pool.cache_block(block, value)
            plain.cache(block, value)
        elif act == "clear" and rng.random() < 0.05:
            pool.clear_cache()
            plain.content.clear()
            plain.copies.clear()
        pool.check(plain.held)
        assert pool.num_free == len(plain.free)
    assert evicted > 0
    assert hits > 10


@pytest.mark.parametrize("is_held", [False, True])
def test_old_copies_do_not_break_a_text(is_held):
    """A block that is left of a text is emptied when the text is computed again."""
    pool, text = BlockPool(4, 4), [b"begin", b"middle", b"end"]
    left = pool.allocate(1)
    pool.cache_block(left[0], b"middle")
    if not is_held:
        pool.free(left)
    blocks = pool.allocate(3)
    for block, value in zip(blocks, text, strict=True):
        pool.cache_block(block, value)
    if is_held:
        pool.free(left)
    pool.free([*blocks, *pool.allocate(1)])
    other = pool.allocate(2)  # the end of the text leaves for it
    assert pool.acquire_cached(text) == blocks[:2]
    pool.check([blocks[:2], other])


def test_too_few_blocks_change_nothing():
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    assert pool.allocate(2) is None
    pool.check([held])
    assert pool.allocate(1) is not None


def test_without_caching_nothing_is_found():
    pool = BlockPool(3, 4, caching=False)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"text")
    assert pool.acquire_cached([b"text"]) == []


def test_a_block_that_nobody_holds_cannot_be_freed():
    pool = BlockPool(3, 4)
    held = pool.allocate(1)
    pool.free(held)
    with pytest.raises(AssertionError, match="not held"):
        pool.free(held)


def test_hashes_depend_on_tenant_adapter_order_and_all_that_precedes():
    texts = [(a, b) for a in range(4) for b in range(4)]
    seen = set()
    owners = [("",), ("a",), ("b",), ("", "a"), ("", "b"), ("a", "b"), ("b", "a")]
    for owner in owners:  # tenant and adapter
        root = root_hash(*owner)
        seen |= {root} | {chain_hash(root, ints(text)) for text in texts}
        seen |= {chain_hash(chain_hash(root, ints(text)), ints(text)) for text in texts}
    assert len(seen) == len(owners) * (1 + 16 + 16)
    assert chain_hash(root_hash("a"), ints([1, 2])) == chain_hash(root_hash("a"), ints([1, 2]))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert BlockPool(3, 4).blocks_for(tokens) == blocks
