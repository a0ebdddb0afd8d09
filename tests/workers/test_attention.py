"""Attention against attention written out token by token, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.scheduler.tree import EMPTY, chain
from outrider.scheduler.types import Draft, ints
from outrider.workers.attention import KVCache, KVShape
from outrider.workers.ops import PlannedOps, ReferenceOps
from outrider.workers.ops.cpu import CpuOps
from outrider.workers.ops.protocol import AttentionSpec
from outrider.workers.ops.reference import TorchOps

CPU = torch.device("cpu")
BLOCK, BLOCKS = 4, 200


class Sequence:
    """A logical text: every key and value by index, and which indices each query sees."""

    def __init__(self, generator, table, context_len, chunk_len, parents, draft):
        self.table, self.context_len, self.chunk_len = table, context_len, chunk_len
        self.parents, self.draft = parents, draft
        self.total = context_len + chunk_len + len(parents)

    def slot(self, index):
        return self.table[index // BLOCK] * BLOCK + index % BLOCK

    def position(self, index):
        node = index - self.context_len - self.chunk_len
        root = self.context_len + self.chunk_len - 1
        depth = 0
        while node >= 0:
            node, depth = self.parents[node], depth + 1
        return root + depth if depth else index

    def seen(self, index):
        """Indices that the query at `index` sees: its ancestors, the chunk, the context."""
        known = self.context_len + self.chunk_len
        if index < known:
            return list(range(index + 1))
        node, path = index - known, []
        while node >= 0:
            path.append(known + node)
            node = self.parents[node]
        return list(range(known)) + sorted(path)


def oracle(seq, index, query, keys, values, scale, window, softcap, sinks, chunk):
    """One query token, all its heads: [num_heads, value_dim]."""
    seen = seq.seen(index)
    if window is not None:
        seen = [key for key in seen if seq.position(key) > seq.position(index) - window]
    if chunk is not None:
        own = seq.position(index) // chunk
        seen = [key for key in seen if seq.position(key) // chunk == own]
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    out = torch.zeros(num_heads, values.shape[2], dtype=torch.float64)
    for head in range(num_heads):
        group = head // (num_heads // num_kv_heads)
        scores = [float(query[head].double() @ keys[key, group].double()) * scale for key in seen]
        if softcap is not None:
            scores = [math.tanh(score / softcap) * softcap for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
        for key, weight in zip(seen, weights, strict=True):
            out[head] += weight / total * values[key, group].double()
    return out


def check(ops, generator, sequences, steps_of, *, heads=(4, 2, 8, 8), **kinds):
    num_heads, num_kv_heads, head_dim, value_dim = heads
    cache = KVCache(
        [KVShape(num_kv_heads, head_dim, value_dim)] * 2, BLOCKS, BLOCK, torch.float32, CPU
    )
    layer, texts = 1, []
    for seq in sequences:
        keys = torch.from_numpy(generator.normal(size=(seq.total, num_kv_heads, head_dim))).float()
        values = torch.from_numpy(
            generator.normal(size=(seq.total, num_kv_heads, value_dim))
        ).float()
        for index in range(seq.context_len):
            cache.keys[layer][seq.slot(index)] = keys[index]
            cache.values[layer][seq.slot(index)] = values[index]
        texts.append((keys, values))
    new_keys = torch.cat([keys[s.context_len :] for s, (keys, _) in zip(sequences, texts)])
    new_values = torch.cat([values[s.context_len :] for s, (_, values) in zip(sequences, texts)])
    query = torch.from_numpy(generator.normal(size=(len(new_keys), num_heads, head_dim))).float()
    kinds = {
        "scale": head_dim**-0.5,
        "window": None,
        "softcap": None,
        "sinks": None,
        "chunk": None,
    } | kinds
    planned = PlannedOps(ops)
    place = (planned.plan(steps_of, cache), cache, layer, AttentionSpec(*heads, **kinds))
    out = planned.attend(query, new_keys, new_values, *place)
    assert out.shape == (len(query), num_heads, value_dim)
    row = 0
    for seq, (keys, values) in zip(sequences, texts):
        for index in range(seq.context_len, seq.total):
            wanted = oracle(seq, index, query[row], keys, values, **kinds)
            torch.testing.assert_close(out[row].double(), wanted, rtol=1e-4, atol=1e-5)
            assert torch.equal(cache.keys[layer][seq.slot(index)], keys[index])
            row += 1


@pytest.fixture
def random_batch(part, build_step, random_tree):
    """Prefill chunks, decodes, chains and trees, in random blocks."""

    def make(generator, lens):
        free = generator.permutation(BLOCKS).tolist()
        sequences, parts = [], []
        for context_len, chunk_len, num_nodes, is_tree in lens:
            total = context_len + chunk_len + num_nodes
            table = [free.pop() for _ in range(-(-total // BLOCK))]
            draft = EMPTY
            if num_nodes:
                # Distinct tokens, so that no two siblings carry the same one.
                tokens = ints(np.arange(num_nodes))
                draft = chain(tokens, "test")
                if is_tree:
                    draft = Draft(tokens, random_tree(generator, num_nodes))
            parents = draft.parents.tolist()
            sequences.append(Sequence(generator, table, context_len, chunk_len, parents, draft))
            parts.append(part([1] * chunk_len, context_len, table, draft))
        return sequences, build_step(parts, BLOCK)

    return make


MIXED = [(13, 1, 0, False), (0, 9, 0, False), (6, 5, 0, False), (11, 1, 6, True), (30, 1, 4, False),
         (2, 3, 5, True), (40, 1, 0, False), (0, 1, 3, True)]  # fmt: skip
CASES = {
    "decode": [(12, 1, 0, False)],
    "fresh": [(0, 7, 0, False)],
    "chunk": [(8, 6, 0, False)],
    "tree": [(9, 1, 9, True)],
    "decodes": [(length, 1, 0, False) for length in (3, 9, 9, 14, 0)],
    "even": [(8, 1, 0, False)] * 3,
    "trees": [(length, 1, 5, True) for length in (3, 9, 12)],
    "mixed": MIXED,
    "wide": [(0, 9, 0, False), (6, 1, 70, False), (30, 1, 150, True), (5, 3, 7, True)],
    "long": [(0, 80, 0, False), (20, 70, 0, False), (150, 1, 0, False), (60, 1, 66, True)],
}
KINDS = {
    "plain": {},
    "window": {"window": 2},
    "chunk": {"chunk": 4},
    "chunk+window": {"chunk": 5, "window": 3},
    "softcap": {"softcap": 1.5},
    "softcap+chunk": {"softcap": 1.5, "chunk": 3},
    "softcap+window": {"softcap": 1.5, "window": 3},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "sinks+window": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 3},
    "softcap+sinks+window": {
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "window": 9,
    },
    "scale": {"scale": 0.7},
}


@pytest.fixture(params=["torch", "reference", "cpu"])
def ops(request):
    if request.param == "cpu":
        return CpuOps(torch.float32)
    return TorchOps() if request.param == "torch" else ReferenceOps()


# The oracle is slow; only the fused kernels treat long queries differently.
PAIRS = [
    (case, kind)
    for case in CASES
    for kind in KINDS
    if case not in ("long", "wide") or kind in ("plain", "window", "chunk", "softcap+sinks+window")
]


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_against_the_oracle(ops, random_batch, case, kind):
    generator = np.random.default_rng(11)
    sequences, step = random_batch(generator, CASES[case])
    check(ops, generator, sequences, step, **KINDS[kind])


@pytest.mark.parametrize("heads", [(2, 2, 8, 8), (4, 1, 8, 8), (4, 4, 12, 8)])
def test_head_shapes(ops, random_batch, heads):
    generator = np.random.default_rng(5)
    sequences, step = random_batch(generator, MIXED)
    check(ops, generator, sequences, step, heads=heads)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(ops, random_batch, seed):
    generator = np.random.default_rng(seed)
    lens = [
        (*(int(generator.integers(low, high)) for low, high in ((0, 40), (1, 8), (0, 9))), True)
        for _ in range(int(generator.integers(1, 9)))
    ]
    sequences, step = random_batch(generator, lens)
    check(ops, generator, sequences, step, window=[None, 2, 5][seed % 3])


def test_moves_read_before_they_write():
    cache = KVCache(
        [KVShape(1, 2, 2), KVShape(1, 2, 3), KVShape(1, 2, 2)], 2, 4, torch.float32, CPU
    )
    for layer in range(3):
        cache.keys[layer].copy_(torch.arange(8.0).view(8, 1, 1).expand(8, 1, 2) + 10 * layer)
        cache.values[layer].copy_(-cache.keys[layer][..., :1].expand_as(cache.values[layer]))
    cache.apply_moves(ints([[3, 2], [2, 5], [5, 1]]))
    for layer in range(3):
        wanted = torch.tensor([0.0, 5, 3, 3, 4, 2, 6, 7]) + 10 * layer
        assert torch.equal(cache.keys[layer][:, 0, 0], wanted)
        assert torch.equal(cache.values[layer][:, 0, -1], -wanted)
    cache.apply_moves(ints(np.zeros((0, 2))))
    assert cache.num_bytes == 8 * 4 * (4 + 5 + 4)
