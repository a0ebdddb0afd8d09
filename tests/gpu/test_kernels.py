"""On a CUDA device: compiled kernels against the reference, and a captured forward on new data."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from outrider.tests.helpers.steps import random_tree, step_of
from outrider.workers.attention import KVCache, KVShape
from outrider.workers.ops import PagedStep, ReferenceOps, make_ops
from outrider.workers.ops.protocol import AttentionSpec, Experts, Gate, GateKind, Norm
from outrider.workers.verify.process import DrawSettings
from outrider.workers.verify.sample import draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REFERENCE = ReferenceOps()
SPECS = {
    "llama": AttentionSpec(32, 8, 128, 128, 0.09, rotary_dim=128),
    "qwen": AttentionSpec(28, 4, 128, 128, 0.09, rotary_dim=128),
    "window": AttentionSpec(8, 2, 96, 80, 0.1, rotary_dim=48, window=100),
    "chunk": AttentionSpec(8, 2, 64, 64, 0.1, rotary_dim=64, chunk=64),
    "cap": AttentionSpec(8, 4, 256, 256, 0.06, rotary_dim=256, softcap=30.0),
    "latent": AttentionSpec(
        16, 1, 576, 512, 0.04, rotary_begin=512, rotary_dim=64, shared_values=True
    ),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda")


def close(found, expected):
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=limit, atol=limit)


def caches_of(spec, dtype, num_blocks, page, device, count=2):
    shape = KVShape(spec.num_kv_heads, spec.head_dim, 0 if spec.shared_values else spec.value_dim)
    caches = [KVCache([shape], num_blocks, page, dtype, device) for _ in range(count)]
    for storages in zip(*(cache._storages for cache in caches)):
        storages[0].normal_()
        for other in storages[1:]:
            other.copy_(storages[0])
    return caches


def lengths_and_trees(name, rng):
    return {
        "decode": ([(1, 1), (700, 1), (3000, 1)], [[], [], []]),
        "trees": ([(333, 1), (90, 2)], [random_tree(rng, 70), random_tree(rng, 5)]),
        "mixed": ([(60, 200), (1500, 1), (0, 77)], [[], random_tree(rng, 8), []]),
    }[name]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("kind", ["decode", "trees", "mixed"])
@pytest.mark.parametrize("name", SPECS)
def test_attention(name, kind, page, dtype, device):
    torch.manual_seed(0)
    rng, spec = np.random.default_rng(0), SPECS[name]
    step, num_blocks = step_of(rng, *lengths_and_trees(kind, rng), page)
    caches = caches_of(spec, dtype, num_blocks, page, device)
    joined = torch.randn(len(step.token_ids), spec.joined_width, device=device).to(dtype)
    results = []
    for ops, cache in zip((make_ops(device, dtype), REFERENCE), caches):
        plan = ops.plan(step, cache)
        frequencies = 0.5 ** torch.arange(spec.rotary_dim // 2, device=device)
        turned = ops.rotation(plan.positions, frequencies, 1.0)
        results.append(ops.rope_store_attend(joined.clone(), turned, None, plan, cache, 0, spec))
    close(*results)


def normed_layer(ops, norm, joined, plan, cache):
    """What a layer does around its products."""
    turned = ops.rotation(plan.positions, torch.ones(64, device=cache.device), 1.0)
    states = ops.norm(joined, norm)
    return ops.rope_store_attend(states, turned, None, plan, cache, 0, SPECS["llama"])


def arrays_of(plan):
    values = {field.name: getattr(plan, field.name) for field in fields(PagedStep)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_a_captured_layer_is_replayed_on_new_data(device):
    """The same graph serves other lengths, trees and tokens of one shape."""
    torch.manual_seed(0)
    rng, spec, dtype = np.random.default_rng(0), SPECS["llama"], torch.bfloat16
    ops, norm = make_ops(device, dtype), Norm(torch.ones(spec.joined_width, device=device), 1e-6)
    mine, theirs = caches_of(spec, dtype, 400, 16, device)
    steps = []
    for contexts in ((700, 90), (20, 1300), (3, 4)):
        trees = [random_tree(rng, 6), random_tree(rng, 6)]
        step, _ = step_of(rng, [(length, 1) for length in contexts], trees, 16)
        arrays = arrays_of(REFERENCE.plan(step, theirs))
        table = torch.zeros((2, 100), dtype=torch.int32, device=device)
        table[:, : step.block_tables.shape[1]] = arrays["block_tables"]
        steps.append((step, {**arrays, "block_tables": table}))
    bounds = {"block_size": 16, "max_query_len": 7, "max_key_len": 1600}
    kept = PagedStep(**{name: each.clone() for name, each in steps[0][1].items()}, **bounds)
    joined = torch.zeros(14, spec.joined_width, device=device, dtype=dtype)
    normed_layer(ops, norm, joined, kept, mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = normed_layer(ops, norm, joined, kept, mine)
    for step, arrays in steps:
        for name, value in arrays.items():
            getattr(kept, name).copy_(value)
        for one, other in zip(mine._storages, theirs._storages):
            one.copy_(other)
        joined.normal_()
        graph.replay()
        plan = REFERENCE.plan(step, theirs)
        close(out, normed_layer(REFERENCE, norm, joined, plan, theirs))


@pytest.mark.parametrize("num_tokens", [1, 8, 300])
def test_experts(num_tokens, device):
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16}
    experts = Experts(
        torch.randn(32, 2 * 256, 512, **options) / 22, torch.randn(32, 512, 256, **options) / 16,
        Gate(GateKind.SILU),
    )  # fmt: skip
    states = torch.randn(num_tokens, 512, **options)
    chosen = torch.rand(num_tokens, 32, device=device).topk(4).indices
    scores = torch.rand(num_tokens, 4, device=device)
    ops = make_ops(device, torch.bfloat16)
    mine = ops.pack_experts(experts)(states, chosen, scores)
    close(mine, REFERENCE.pack_experts(experts)(states, chosen, scores))


@pytest.mark.parametrize("limits", [(0.0, 0, 1.0, 0.0), (0.9, 0, 1.0, 0.05), (1.0, 40, 0.9, 0.0)])
def test_draws_are_those_of_the_cpu(limits, device):
    torch.manual_seed(0)
    logits = torch.randn(5, 50_000) * 3
    heat, top_k, top_p, min_p = limits
    settings = DrawSettings(
        torch.arange(5), np.full(5, heat, np.float32), np.full(5, top_k, np.int32),
        np.full(5, top_p, np.float32), np.full(5, min_p, np.float32),
    )  # fmt: skip
    positions = np.arange(5, dtype=np.int32)
    mine = make_ops(device, torch.bfloat16).draw(logits.to(device), positions, settings)
    assert torch.equal(mine.cpu(), draw(logits, positions, settings))
