"""Preparation, storing and attention against the reference, under Triton's interpreter.

Every pair of settings occurs together; in the slow test every triple of those that differ in path.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from outrider.bench.gpu.inputs import random_tree, step_of
from outrider.tests.helpers.steps import assert_close, covering, flash_attn_with_kvcache
from outrider.workers.attention import KV_FORMATS, KVCache, KVCode, KVShape
from outrider.workers.ops import PagedStep
from outrider.workers.ops.cuda import attention, schedule
from outrider.workers.ops.cuda import ops as cuda
from outrider.workers.ops.cuda.attention import (
    FIXED,
    attend,
    most_parts,
    prepares,
    split_dim,
    tiles,
)
from outrider.workers.ops.cuda.library import AttentionLibrary
from outrider.workers.ops.cuda.ops import CudaOps
from outrider.workers.ops.cuda.prepare import prepare_and_store
from outrider.workers.ops.protocol import AttentionSpec, LatentHeads, Norm
from outrider.workers.ops.reference import ReferenceOps

CPU = torch.device("cpu")
REFERENCE = ReferenceOps()
AXES = {
    "heads": ((1, 1), (4, 2), (6, 2), (7, 1)),
    "step": ("decode", "chain", "tree", "large tree", "prompt", "mixed"),
    "reach": ("all", "window", "wide window", "chunk"),
    "cap": (None, 3.0),
    "sinks": (False, True),
    "dims": ((16, 16), (40, 40), (96, 64), (24, 20)),
    "latent": (False, True),
    "page": (16, 64, 256, 1),
    "splits": (1, 2, 5),
    "beside": (False, True),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
}

# Of the values that take one path, one.
OF_TRIPLES = {
    **AXES,
    "heads": ((4, 2), (7, 1)),
    "step": ("decode", "tree", "large tree", "mixed"),
    "reach": ("all", "window", "chunk"),
    "dims": ((96, 64), (24, 20)),
    "page": (16, 1),
    "splits": (1, 5),
    "dtype": (torch.float32, torch.bfloat16),
}


def lengths_and_trees(name, rng, page):
    """(context, chunk) per sequence, and each one's parents; one context is longer than a page."""
    chain = list(range(-1, 6))
    return {
        "decode": ([(0, 1), (37, 1), (max(140, page + 44), 1)], [[], [], []]),
        "chain": ([(29, 1), (64, 1)], [chain, chain[:2]]),
        "tree": ([(31, 1), (90, 2)], [random_tree(rng, 7), random_tree(rng, 3)]),
        "large tree": ([(17, 1)], [random_tree(rng, 66)]),
        "prompt": ([(0, 15), (21, 4)], [[], []]),
        "mixed": ([(60, 11), (75, 1), (5, 2)], [[], random_tree(rng, 4), []]),
    }[name]


def reach_of(name):
    return {
        "all": {},
        "window": {"window": 7},
        "wide window": {"window": 50},
        "chunk": {"chunk": 13},
    }[name]


def both(spec, dtype, step, num_blocks, page, splits=None, temperature=None, code=None,
         has_e4m3=True, beside=False):  # fmt: skip
    """(kernels', reference's) output, and the two caches' layer.

    With `beside`, a kernel of its own stands before attention, whatever the step is.
    """
    stored = 0 if spec.shared_values else spec.value_dim
    form = None if code is None else code.format
    shape = KVShape(spec.num_kv_heads, spec.head_dim, stored, format=form)
    caches = [KVCache([shape] * 2, num_blocks, page, dtype, CPU, codes=[code] * 2) for _ in "12"]
    for mine, theirs in zip(caches[0]._storages, caches[1]._storages):
        values = torch.randn(mine.shape)
        theirs.copy_(values if code is None else form.encode(values, code.key_scale))
        mine.copy_(theirs)
    joined = torch.randn(len(step.token_ids), spec.joined_width).to(dtype)
    results = []
    kernels = CudaOps(CPU, splits)
    kernels.has_e4m3 = has_e4m3
    for ops, cache in zip((kernels, REFERENCE), caches):
        plan = ops.plan(step, cache)
        turned = None
        if spec.rotary_dim:
            frequencies = 0.5 ** torch.arange(spec.rotary_dim // 2)
            turned = ops.rotation(plan.positions, frequencies, 1.1)
        with patch.object(cuda, "prepares", lambda *given: not beside and prepares(*given)):
            results.append(
                ops.rope_store_attend(joined.clone(), turned, temperature, plan, cache, 1, spec)
            )
    return results, caches


def check(case, number):
    torch.manual_seed(number)
    rng = np.random.default_rng(number)
    heads, kv_heads = case["heads"]
    head_dim, value_dim = case["dims"]
    latent = case["latent"]
    spec = AttentionSpec(
        heads, 1 if latent else kv_heads, head_dim, min(value_dim, 16) if latent else value_dim,
        head_dim**-0.5, rotary_begin=head_dim - 8 if latent else 0,
        rotary_dim=8 if latent else head_dim // 4 * 2, softcap=case["cap"],
        sinks=torch.randn(heads) if case["sinks"] else None, shared_values=latent,
        **reach_of(case["reach"]),
    )  # fmt: skip
    page = case["page"]
    step, num_blocks = step_of(rng, *lengths_and_trees(case["step"], rng, page), page)
    rows = (step, num_blocks, page, case["splits"])
    (mine, theirs), caches = both(spec, case["dtype"], *rows, beside=case["beside"])
    assert_close(mine, theirs, 2.0)  # weights are rounded to the values' dtype
    for kept, expected in zip(caches[0]._storages, caches[1]._storages):
        assert_close(kept, expected)


@pytest.mark.parametrize("number", range(6))
def test_pairs_of_settings(number):
    for index, case in enumerate(covering(AXES, 2)[number::6]):
        check(case, index)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_triples_of_settings(number):
    for index, case in enumerate(covering(OF_TRIPLES, 3, seed=1)[number::12]):
        check(case, index)


OF_CODES = {
    "form": tuple(KV_FORMATS),
    "has_e4m3": (True, False),
    "step": ("tree", "mixed"),
    "name": ("plain", "latent", "normed"),
    "dtype": AXES["dtype"],
    "splits": (1, 2),
    "beside": (False, True),
}


@pytest.mark.parametrize("case", covering(OF_CODES, 2), ids=str)
def test_codes(case):
    """The caches' codes are the reference's, bit by bit; also of rows of the same step. Scales that
    are no powers of two are rounded in the reference's values, which float32 does not show."""
    torch.manual_seed(0)
    scale = 0.037 if case["dtype"] == torch.float32 else 0.03125
    spec = {
        "plain": AttentionSpec(4, 2, 24, 20, 0.2, softcap=3.0),
        "latent": AttentionSpec(4, 1, 80, 64, 0.1, shared_values=True),
        "normed": AttentionSpec(4, 2, 24, 24, 0.2, **NORMS["all heads after rotation"]),
    }[case["name"]]
    code = KVCode(KV_FORMATS[case["form"]], scale, scale * (1 if spec.shared_values else 1.5))
    lengths = lengths_and_trees(case["step"], np.random.default_rng(0), 16)
    step, num_blocks = step_of(np.random.default_rng(1), *lengths, 16)
    (mine, theirs), caches = both(
        spec, case["dtype"], step, num_blocks, 16, case["splits"], code=code,
        has_e4m3=case["has_e4m3"], beside=case["beside"],
    )  # fmt: skip
    assert_close(mine, theirs, 2.0)
    for kept, expected in zip(caches[0]._storages, caches[1]._storages):
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("name", KV_FORMATS)
def test_codes_round_as_torch_does(name, dtype):
    """Every bfloat16, and floats that lie between the codes."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.cat([values[~values.isnan()], torch.linspace(-0.03, 0.03, 9999)]).to(dtype)
    heads = len(values) // 256
    code = KVCode(KV_FORMATS[name], 0.37, 1.0)
    spec = AttentionSpec(heads, heads, 128, 128, 0.25)
    step, num_blocks = step_of(np.random.default_rng(0), [(0, 1)], [[]], 1)
    shape = KVShape(heads, 128, 128, format=code.format)
    joined = torch.zeros(1, spec.joined_width, dtype=dtype)
    joined[:, spec.key_begin :] = values[: heads * 256]
    cache = KVCache([shape], num_blocks, 1, dtype, CPU, codes=[code])
    plan = REFERENCE.plan(step, cache)
    prepare_and_store(joined, None, None, plan, cache.keys[0], cache.values[0], spec, code)
    key, value = joined[0, spec.key_begin :].view(2, heads, 128)
    slot = int(plan.slots[0])
    assert torch.equal(cache.keys[0][slot], code.format.encode(key, code.key_scale))
    assert torch.equal(cache.values[0][slot], code.format.encode(value, code.value_scale))


NORMS = {
    "none": {},
    "each head": {
        "query_norm": Norm(torch.linspace(0.5, 1.5, 24), 1e-6), "key_norm": Norm(None, 1e-3),
    },
    "all heads": {
        "query_norm": Norm(torch.linspace(0.5, 1.5, 96), 1e-6), "norms_all_heads": True,
        "key_norm": Norm(torch.linspace(1.5, 0.5, 48), 1e-6),
    },
    "after rotation": {
        "query_norm": Norm(None, 1e-6), "key_norm": Norm(None, 1e-6), "norms_after_rotation": True,
    },
    "all heads after rotation": {
        "query_norm": Norm(None, 1e-6), "key_norm": Norm(None, 1e-6), "norms_after_rotation": True,
        "norms_all_heads": True,
    },
}  # fmt: skip


PLACES = {
    "name": tuple(NORMS),
    "rotary": ((0, 24), (8, 12), (0, 0)),
    "dtype": AXES["dtype"],
    "beside": (False, True),
}


@pytest.mark.parametrize("case", covering(PLACES, 2), ids=str)
def test_norms_and_rotations(case):
    name, rotary, dtype, beside = case.values()
    torch.manual_seed(0)
    spec = AttentionSpec(
        4, 2, 24, 24, 0.2, rotary_begin=rotary[0], rotary_dim=rotary[1], **NORMS[name]
    )
    step, num_blocks = step_of(np.random.default_rng(1), [(9, 2), (3, 1)], [[], [-1, -1]], 8)
    factors = torch.rand(len(step.token_ids)) * 3 if rotary[0] == 0 else None
    rows = (step, num_blocks, 8)
    (mine, theirs), caches = both(spec, dtype, *rows, temperature=factors, beside=beside)
    assert_close(mine, theirs, 2.0)
    for kept, expected in zip(caches[0]._storages, caches[1]._storages):
        assert_close(kept, expected, 2.0)


def test_a_latent_of_deepseek_size():
    """One tile serves as keys and values: 576 columns are 512 and 64."""
    torch.manual_seed(0)
    spec = AttentionSpec(
        16, 1, 576, 512, 576**-0.5, rotary_begin=512, rotary_dim=64, shared_values=True
    )
    step, num_blocks = step_of(np.random.default_rng(0), [(70, 1)], [[-1, -1, 0]], 64)
    (mine, theirs), _ = both(spec, torch.float32, step, num_blocks, 64, splits=2)
    assert_close(mine, theirs)


@pytest.mark.parametrize("form", [None, "fp8_e4m3"])
def test_heads_expanded_from_latents(form):
    """In groups, of a prompt and a tree behind contexts: the reference's, as absorbed."""
    torch.manual_seed(0)
    dtype, code = torch.float32, None if form is None else KVCode(KV_FORMATS[form], 0.25, 0.25)
    each = AttentionSpec(2, 2, 24, 20, 0.2, rotary_begin=16, rotary_dim=8, is_prepared=True)
    spec = AttentionSpec(4, 1, 40, 32, 0.2, rotary_begin=32, rotary_dim=8, shared_values=True)
    heads = LatentHeads(torch.randn(4, 16, 32) / 6, torch.randn(4, 32, 20) / 6, each)
    lengths = [(21, 70), (37, 1)], [[], [-1, -1, 0]]
    step, num_blocks = step_of(np.random.default_rng(0), *lengths, 16)
    query, latent = torch.randn(74, 4, 24), torch.randn(74, 40)
    shape, before, found = KVShape(1, 40, 0, format=code and code.format), None, []
    for ops in (CudaOps(CPU), REFERENCE):
        cache = KVCache([shape], num_blocks, 16, dtype, CPU, codes=[code])
        if before is None:
            values = torch.randn(cache.keys[0].shape)
            before = values if code is None else code.format.encode(values, code.key_scale)
        cache.keys[0].copy_(before)
        plan = REFERENCE.plan(step, cache)
        turned = REFERENCE.rotation(plan.positions, 0.5 ** torch.arange(4), 1.0)
        factors = torch.linspace(0.5, 2, 74)
        rows = (turned, factors, plan, cache, 0, spec)
        found.append(ops.expand_attend(query, latent, *rows, heads))
    absorbed = torch.einsum("thp,hpl->thl", query[..., :16], heads.keys)
    joined = torch.cat([torch.cat([absorbed, query[..., 16:]], 2).flatten(1), latent], dim=1)
    latents = REFERENCE.rope_store_attend(joined, *rows).unflatten(1, (4, 32))
    assert_close(found[0], found[1])
    assert_close(found[1], torch.einsum("thl,hlv->thv", latents, heads.values).flatten(1), 2.0)


def test_rows_without_a_slot_are_not_stored_and_empty_sequences_are_skipped():
    """What pads a captured step: slots below zero, sequences without rows."""
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 16, 16, 0.25)
    step, num_blocks = step_of(np.random.default_rng(0), [(20, 2), (7, 1)], [[], []], 16)
    cache = KVCache([KVShape(2, 16, 16)], num_blocks, 16, torch.float32, CPU)
    for storage in cache._storages:
        storage.normal_()
    before = cache.keys[0].clone()
    joined = torch.randn(3, spec.joined_width)
    ops = CudaOps(CPU, 2)
    plan = ops.plan(step, cache)
    wanted = ops.rope_store_attend(joined, None, None, plan, cache, 0, spec)
    fields = {name: getattr(plan, name) for name in PagedStep.__slots__}
    empty = torch.tensor([0], dtype=torch.int32)
    fields["query_start"] = torch.cat([plan.query_start[:1], plan.query_start])
    fields["block_tables"] = torch.cat([plan.block_tables[:1], plan.block_tables])
    for name in ("context_lens", "tree_start"):
        fields[name] = torch.cat([empty, getattr(plan, name)])
    fields["slots"] = torch.tensor([plan.slots[0], plan.slots[1], -1], dtype=torch.int32)
    cache.keys[0][plan.slots[2]] = before[plan.slots[2]]
    for max_query_len in (2, 40):  # one block a sequence, or as many as the rows could need
        fields["max_query_len"] = max_query_len
        out = ops.rope_store_attend(joined, None, None, PagedStep(**fields), cache, 0, spec)
        torch.testing.assert_close(out[:2], wanted[:2])
        assert torch.equal(cache.keys[0][plan.slots[2]], before[plan.slots[2]])


SKEWED = {
    "decode": ([(700, 1), *[(3, 1)] * 7], [[]] * 8),
    "chains": ([(5, 1), (900, 1), (2, 1)], [[-1, 0, 1]] * 3),
    "large trees": ([(610, 1), (40, 1)], [[-1] * 20, [-1] * 33]),
    "prompts": ([(0, 70), (650, 9)], [[], []]),
    "even": ([(300, 1)] * 4, [[]] * 4),
}


@pytest.mark.parametrize("name", SKEWED)
@pytest.mark.parametrize("window", [None, 100])
def test_work_is_cut_by_length(monkeypatch, name, window):
    """A long context among short ones is shared by many programs, and the short ones are whole."""
    monkeypatch.setattr(attention, "MIN_KEYS_PER_PART", 32)
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 16, 16, 0.25, window=window)
    step, num_blocks = step_of(np.random.default_rng(0), *SKEWED[name], 16)
    cache = KVCache([KVShape(2, 16, 16)], num_blocks, 16, torch.float32, CPU)
    for storage in cache._storages:
        storage.normal_()
    plan = REFERENCE.plan(step, cache)
    query = torch.randn(len(step.token_ids), 4, 16)
    out = attend(query, cache.keys[0], cache.values[0], plan, spec, 16)
    whole = attend(query, cache.keys[0], cache.values[0], plan, spec, 16, splits=1)
    torch.testing.assert_close(out, whole)
    (schedule,) = plan.derived.values()
    items = [tuple(item) for item in schedule.items.tolist() if item[0] >= 0]
    lens = step.context_lens + step.query_lens
    reach = lens if window is None else np.minimum(lens, window + step.query_lens)
    parts = {seq: count for seq, _, _, count in items}
    blocks = -(-2 * step.query_lens // tiles(spec, plan.max_query_len, 4).queries)
    assert items == [
        (seq, block, part, parts[seq])
        for seq in range(step.num_seqs)
        for block in range(blocks[seq])
        for part in range(parts[seq])
    ]
    most = most_parts(1, 2, 1000, 16)
    share = max(32, int((reach * blocks).sum()) / most + 64)
    assert all(count == 1 or keys / count <= share for keys, count in zip(reach, parts.values()))
    if name in ("decode", "chains") and window is None:
        assert max(parts.values()) > 5
        assert sorted(parts.values())[:-1] == [1] * (step.num_seqs - 1)
    assert attend(query, cache.keys[0], cache.values[0], plan, spec, 16).equal(out)
    assert list(plan.derived.values()) == [schedule], "layers share it"


@pytest.mark.parametrize("splits", [None, 3, FIXED])
def test_a_step_like_another_shares_its_list_of_work(monkeypatch, splits):
    """Levels of a draft: of as many rows, with a few keys more."""
    monkeypatch.setattr(attention, "MIN_KEYS_PER_PART", 32)
    monkeypatch.setattr(attention, "FIXED_KEYS", 64)
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 16, 16, 0.25)
    cache = KVCache([KVShape(2, 16, 16)], 20, 64, torch.float32, CPU)
    for storage in cache._storages:
        storage.normal_()
    query, plans = torch.randn(2, 4, 16), []
    for length in (511, 519):
        step, _ = step_of(np.random.default_rng(0), [(length, 1), (5, 1)], [[], []], 64)
        plans.append(REFERENCE.plan(step, cache))
    first, last = plans
    rows = (query, cache.keys[0], cache.values[0])
    attend(*rows, first, spec, 16, splits)
    whole = attend(*rows, last, spec, 16, splits=1)
    last.derived.clear()
    torch.testing.assert_close(attend(*rows, replace(last, like=first), spec, 16, splits), whole)
    assert bool(last.derived) == (splits == FIXED), "parts that begin at fixed keys are counted"


@pytest.mark.parametrize(
    ("group", "num_parts"),
    [(16, 1), (16, 2), (16, 16), (16, 17), (4, 16), (4, 17), (4, 33)]
    + [pytest.param(16, 257, marks=pytest.mark.slow)],
)
def test_parts_are_added_in_one_order_whoever_ends_last(monkeypatch, group, num_parts):
    """Groups that are full, have one part, or lie in groups of groups; of two sequences."""
    monkeypatch.setattr(schedule, "PARTS", tl.constexpr(group))
    spec = AttentionSpec(2, 1, 16, 16, 0.25, sinks=torch.randn(2))
    lengths, num_items = [(num_parts * tiles(spec, 1, 4).keys - 1, 1), (5, 1)], 2 * num_parts
    step, num_blocks = step_of(np.random.default_rng(0), lengths, [[], []], 64)
    results, place = [], interpreter_builder.set_grid_idx
    for order in (np.arange(num_items), np.random.default_rng(1).permutation(num_items)):

        def place_other(x, y, z, order=order):
            is_attention = interpreter_builder.grid_dim[0] == len(order)
            place(order[x] if is_attention else x, y, z)

        torch.manual_seed(0)
        with monkeypatch.context() as patched:
            patched.setattr(interpreter_builder, "set_grid_idx", place_other)
            (mine, theirs), _ = both(spec, torch.float32, step, num_blocks, 64, splits=num_parts)
        assert_close(mine, theirs)
        results.append(mine)
    assert torch.equal(*results)


@pytest.mark.parametrize("splits", [1, 3])
def test_slots_that_no_row_sees_may_hold_anything(splits):
    """Nodes that pad a draft to its shape read slots of requests that are gone."""
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 16, 16, 0.25)
    step, num_blocks = step_of(np.random.default_rng(0), [(20, 1), (7, 1)], [[-1, -1, 0]] * 2, 16)
    cache = KVCache([KVShape(2, 16, 16)], num_blocks, 16, torch.float32, CPU)
    for storage in cache._storages:
        storage.normal_()
    plan = CudaOps(CPU).plan(step, cache)
    plan.ancestors[3] = plan.ancestors[7] = 0  # the last nodes of both
    query = torch.randn(8, 4, 16)
    wanted = attend(query, cache.keys[0], cache.values[0], plan, spec, 4, splits)
    unseen = plan.slots[[3, 7]].long()
    cache.keys[0][unseen], cache.values[0][unseen] = torch.nan, torch.inf
    found = attend(query, cache.keys[0], cache.values[0], plan, spec, 4, splits)
    assert torch.equal(found, wanted)


TREE = [-1, -1, 0, 1, 1, 2, 0, 5, 3, 8, 8, 9, 7]  # with its root 14 rows of 5 heads a group


@pytest.mark.parametrize(
    ("lengths", "trees"),
    [
        ([(40, 1), (0, 1), (97, 1)], [TREE, TREE[:3], list(range(-1, 12))]),
        ([(33, 14), (0, 2)], [[], [-1, -1]]),  # known rows, beside a draft
    ],
    ids=["trees", "chains"],
)
def test_contexts_by_a_library(monkeypatch, lengths, trees):
    """Its context, and our kernel over the step's own keys, beside all of it in float32 and by our
    kernel; what a library leaves for an empty context, and spare slots, hold no numbers."""
    torch.manual_seed(0)
    calls = Mock(side_effect=flash_attn_with_kvcache)
    kind = SimpleNamespace(
        flash_attn_varlen_func=None, flash_attn_with_kvcache=calls, __spec__=object()
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", kind)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    library = AttentionLibrary.of("flash_attn_3", torch.device("cuda"))
    spec = AttentionSpec(10, 2, 24, 24, 0.3)
    step, num_blocks = step_of(np.random.default_rng(0), lengths, trees, 8)
    caches = [
        KVCache([KVShape(2, 24, 24, num_spare=3)], num_blocks, 8, dtype, CPU)
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
    ]
    for stored in zip(*(each._storages for each in caches), strict=True):
        stored[2].copy_(torch.randn(stored[2].shape).bfloat16())
        stored[2][:, num_blocks * 8 :] = torch.nan
        for each in stored[:2]:
            each.copy_(stored[2])
    joined = torch.randn(len(step.token_ids), spec.joined_width).bfloat16()
    found, alone, wanted = (
        ops.rope_store_attend(rows, None, None, ops.plan(step, cache), cache, 0, spec)
        for ops, rows, cache in zip(
            (CudaOps(CPU, library=library), CudaOps(CPU), REFERENCE),
            (joined, joined, joined.float()), caches,
        )
    )  # fmt: skip
    calls.assert_called_once()
    assert_close(found, wanted.bfloat16())
    assert_close(found, alone)


def test_shapes_decide_the_launch():
    assert split_dim(64) == (64, 0)
    assert split_dim(96) == (64, 32)
    assert split_dim(80) == (64, 16)
    assert split_dim(576) == (512, 64)
    assert split_dim(8) == (16, 0)
    assert most_parts(1, 8, 32768, 132) == most_parts(64, 8, 32768, 132) == 33
    assert most_parts(1, 8, 500, 132) == 0
    assert most_parts(300, 8, 32768, 132) == 0
    for head_dim, value_dim in ((64, 64), (128, 128), (256, 256), (192, 128), (576, 512)):
        for itemsize in (2, 4):
            spec = AttentionSpec(32, 8, head_dim, value_dim, 1.0)
            tile = tiles(spec, 1, itemsize)
            stored = (tile.dim_low + tile.dim_high + tile.values) * itemsize
            assert tile.keys == 16 or tile.keys * stored * tile.num_stages <= 96 << 10
            assert tiles(spec, 512, itemsize).queries >= 16
