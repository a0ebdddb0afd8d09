"""The CPU's operations against the reference, over shapes, trees, windows, sinks, page sizes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.bench.gpu.inputs import random_tree, step_of
from outrider.scheduler.types import ints
from outrider.tests.helpers.steps import assert_close, assert_norms
from outrider.workers.attention import KV_FORMATS, KVCache, KVCode, KVShape
from outrider.workers.ops import make_ops
from outrider.workers.ops.cpu import CpuOps, PackedProjection, PanelProjection
from outrider.workers.ops.protocol import AttentionSpec, Gate, GateKind, Norm
from outrider.workers.ops.reference import ReferenceOps, TorchOps
from outrider.workers.ops.table import LARGE_WEIGHT, ONEDNN, SMALL, capability, way

DTYPES = (torch.float32, torch.bfloat16)
REFERENCE = ReferenceOps()


def attend_both(
    spec, dtype, step, num_blocks, block_size, seed, temperature=None, code=None, make=CpuOps
):
    """(kernel's, reference's) output, and the two caches."""
    torch.manual_seed(seed)
    value_dim = 0 if spec.shared_values else spec.value_dim
    form = None if code is None else code.format
    shape = KVShape(spec.num_kv_heads, spec.head_dim, value_dim, format=form)
    device, codes = torch.device("cpu"), (code, code)
    caches = [
        KVCache([shape] * 2, num_blocks, block_size, dtype, device, codes=codes) for _ in range(2)
    ]
    for mine, theirs in zip(caches[0]._storages, caches[1]._storages):
        filled = torch.randn(mine.shape)
        mine.copy_(filled if form is None else form.encode(filled, 1.0))
        theirs.copy_(mine)
    joined = torch.randn(len(step.token_ids), spec.joined_width).to(dtype)
    results = []
    for ops, cache in zip((make(dtype), REFERENCE), caches):
        plan = ops.plan(step, cache)
        turned = None
        if spec.rotary_dim:
            frequencies = 0.5 ** torch.arange(spec.rotary_dim // 2)
            turned = ops.rotation(plan.positions, frequencies, 1.1)
        out = ops.rope_store_attend(joined.clone(), turned, temperature, plan, cache, 1, spec)
        results.append(out.clone())
    return results, caches


LAYERS = {
    "plain": AttentionSpec(4, 2, 16, 16, 0.25, rotary_dim=16),
    "demo": AttentionSpec(8, 2, 40, 40, 40**-0.5, rotary_dim=40),
    "partial rotation": AttentionSpec(6, 3, 24, 24, 0.2, rotary_begin=8, rotary_dim=12),
    "no rotation": AttentionSpec(4, 4, 32, 32, 0.2),
    "narrow values": AttentionSpec(4, 4, 48, 20, 0.2, rotary_begin=32, rotary_dim=16),
    "no whole quads": AttentionSpec(4, 2, 12, 36, 0.3, rotary_dim=12),
    "no kernel in bfloat16": AttentionSpec(4, 2, 7, 9, 0.3, rotary_dim=6),
    "wide": AttentionSpec(8, 1, 128, 128, 0.1, rotary_dim=128),
    "wider": AttentionSpec(2, 2, 256, 256, 0.06, rotary_dim=256),
    "window": AttentionSpec(4, 2, 16, 16, 0.25, rotary_dim=16, window=7),
    "peaked": AttentionSpec(4, 2, 16, 16, 4.0, rotary_dim=16),
    "wide window": AttentionSpec(4, 2, 16, 16, 0.25, rotary_dim=16, window=150),
    "chunk": AttentionSpec(4, 2, 16, 16, 0.25, rotary_dim=16, chunk=13),
    "soft cap": AttentionSpec(4, 2, 16, 16, 2.0, rotary_dim=16, softcap=5.0, window=40),
    "sinks": AttentionSpec(4, 2, 64, 64, 0.1, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]), window=9),
    "norms": AttentionSpec(
        4, 2, 24, 24, 0.2, rotary_dim=24,
        query_norm=Norm(torch.linspace(0.5, 1.5, 24), 1e-6), key_norm=Norm(None, 1e-3),
    ),
    "norms of all heads": AttentionSpec(
        4, 2, 16, 16, 0.25, rotary_dim=16, norms_all_heads=True,
        query_norm=Norm(torch.linspace(0.5, 1.5, 64), 1e-6),
        key_norm=Norm(torch.linspace(1.5, 0.5, 32), 1e-6),
    ),
    "norms after rotation": AttentionSpec(
        4, 2, 16, 16, 0.25, rotary_dim=16, norms_after_rotation=True,
        query_norm=Norm(None, 1e-6), key_norm=Norm(None, 1e-6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_attention(name, dtype):
    rng = np.random.default_rng(len(name))
    cases = [
        ([(0, 1)], [[]]),
        ([(37, 1)], [[-1, 0, 1]]),
        ([(140, 3), (0, 20), (129, 1), (300, 1)], [[], [], random_tree(rng, 5), [-1, -1, 0, 0, 2]]),
        ([(5, 1), (61, 2)], [random_tree(rng, 70), random_tree(rng, 64)]),
        ([(130, 90)], [[]]),
        ([(0, 70), (37, 33), (150, 40)], [[], [], random_tree(rng, 5)]),
    ]
    for number, (lengths, trees) in enumerate(cases):
        for block_size in (16, 1, 6, 256)[: 1 + 3 * (number in (2, 5))]:
            step, num_blocks = step_of(rng, lengths, trees, block_size)
            (mine, theirs), caches = attend_both(
                LAYERS[name], dtype, step, num_blocks, block_size, number
            )
            assert_close(mine, theirs)
            for kept, expected in zip(caches[0]._storages, caches[1]._storages):
                assert_close(kept, expected)


def test_scores_far_from_that_of_the_first_key():
    """Hundreds of powers of two apart, with and without a sink, in whole and in cut tiles."""
    rng, sinks = np.random.default_rng(0), torch.tensor([900.0, -900.0, 0.0, 100.0])
    for spec in (AttentionSpec(4, 2, 16, 16, 40.0), AttentionSpec(4, 2, 16, 16, 40.0, sinks=sinks)):
        for lengths, trees in (
            ([(0, 300)], [[]]),
            ([(400, 1), (290, 40)], [random_tree(rng, 5), []]),
        ):
            step, num_blocks = step_of(rng, lengths, trees, 16)
            (mine, theirs), _ = attend_both(spec, torch.bfloat16, step, num_blocks, 16, 0)
            assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KV_FORMATS)
def test_codes_round_as_torch_does(name, dtype):
    """Every bfloat16, and products of floats that lie between the codes."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.cat([values[~values.isnan()], torch.linspace(-0.03, 0.03, 9999)]).to(dtype)
    num_rows = len(values) // 32
    spec, code = AttentionSpec(1, 1, 16, 16, 0.25), KVCode(KV_FORMATS[name], 0.37, 1.0)
    step, num_blocks = step_of(np.random.default_rng(0), [(0, num_rows)], [[]], 16)
    shape = KVShape(1, 16, 16, format=code.format)
    caches = [
        KVCache([shape], num_blocks, 16, dtype, torch.device("cpu"), codes=[code]) for _ in range(2)
    ]
    joined = torch.zeros(num_rows, 48, dtype=dtype)
    joined[:, 16:] = values[: num_rows * 32].view(num_rows, 32)
    for ops, cache in zip((CpuOps(dtype), REFERENCE), caches):
        plan = ops.plan(step, cache)
        if ops is REFERENCE:
            key, value = (
                joined[:, 16:32].unflatten(1, (1, 16)),
                joined[:, 32:].unflatten(1, (1, 16)),
            )
            cache.write(0, plan.slots.long(), key, value)
        else:
            ops.rope_store_attend(joined.clone(), None, None, plan, cache, 0, spec)
    for kept, expected in zip(caches[0]._storages, caches[1]._storages):
        assert torch.equal(kept, expected)


CODED = {name: LAYERS[name] for name in ("demo", "narrow values", "no whole quads", "window")} | {
    "no kernel in bfloat16": LAYERS["no kernel in bfloat16"],
    "latents": AttentionSpec(8, 1, 80, 64, 0.1, shared_values=True),
    "sinks": LAYERS["sinks"],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("form", KV_FORMATS)
def test_attention_over_codes(form, name, dtype):
    """Rows of the same step are read as they are kept, in prompts, chains and trees."""
    rng, spec = np.random.default_rng(len(name)), replace(CODED[name], rotary_dim=0)
    scales = (0.25, 0.25) if spec.shared_values else (0.25, 1.7)
    code = KVCode(KV_FORMATS[form], *scales)
    makers = [CpuOps] if spec.shared_values else [CpuOps, lambda dtype: TorchOps()]
    for lengths, trees in (
        ([(140, 3), (0, 20), (300, 1)], [[], [], random_tree(rng, 5)]),
        ([(5, 1), (61, 2)], [[-1, 0, 1], random_tree(rng, 64)]),
        ([(290, 1)], [[]]),
        ([(0, 70)], [[]]),
    ):
        step, num_blocks = step_of(rng, lengths, trees, 6)
        for make in makers:
            (mine, theirs), caches = attend_both(
                spec, dtype, step, num_blocks, 6, 0, code=code, make=make
            )
            assert_close(mine, theirs)
            for kept, expected in zip(caches[0]._storages, caches[1]._storages):
                assert torch.equal(kept, expected)


def test_rotations_are_read_from_tables_that_grow():
    """Of each kind of frequencies; far positions, which have no table, are computed."""
    ops = CpuOps(torch.float32)
    kinds = [(0.5 ** torch.arange(size), scale) for size, scale in ((8, 1.0), (8, 1.0), (16, 1.3))]
    for rows in ([3], [], [0, 1023, 7], [1024], [70_000, 2], [5000, 5000, 1]):
        for dtype, (frequencies, scale) in itertools.product((torch.int32, torch.int64), kinds):
            positions = torch.tensor(rows, dtype=dtype)
            found = ops.rotation(positions, frequencies, scale)
            wanted = REFERENCE.rotation(positions, frequencies, scale)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert [len(cos) for cos, _ in ops._rotations.values()] == [8192] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_temperature_of_queries(dtype):
    rng = np.random.default_rng(0)
    step, num_blocks = step_of(rng, [(9, 4), (30, 1)], [[], [-1, -1]], 8)
    factors = torch.rand(len(step.token_ids)) * 3
    (mine, theirs), _ = attend_both(LAYERS["demo"], dtype, step, num_blocks, 8, 0, factors)
    assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["demo", "narrow values", "partial rotation"])
def test_a_row_does_not_depend_on_what_is_beside_it(name, dtype):
    """Verification of a chain gives the bits that decoding gives: panels, and none for one row."""
    rng, spec = np.random.default_rng(3), LAYERS[name]
    ops, shape = CpuOps(dtype), KVShape(spec.num_kv_heads, spec.head_dim, spec.value_dim)
    step, num_blocks = step_of(rng, [(150, 1)], [[-1, 0, 1, 2]], 16)
    joined = torch.randn(5, spec.joined_width).to(dtype)
    device = torch.device("cpu")

    def run(part, cache, rows):
        plan = ops.plan(part, cache)
        turned = ops.rotation(plan.positions, torch.ones(spec.rotary_dim // 2), 1.0)
        return ops.rope_store_attend(rows.clone(), turned, None, plan, cache, 0, spec).clone()

    caches = [KVCache([shape], num_blocks, 16, dtype, device) for _ in range(2)]
    torch.manual_seed(1)
    for one, other in zip(*(cache._storages for cache in caches)):
        other.copy_(one.normal_())
    together = run(step, caches[0], joined)
    for row in range(5):
        alone = replace(
            step,
            token_ids=step.token_ids[row : row + 1],
            positions=step.positions[row : row + 1],
            slot_mapping=step.slot_mapping[row : row + 1],
            query_start=ints([0, 1]),
            context_lens=ints([150 + row]),
            draft_tokens=ints([]),
            draft_parents=ints([]),
            draft_start=ints([0, 0]),
        )
        assert torch.equal(run(alone, caches[1], joined[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_products(dtype, bias):
    torch.manual_seed(0)
    ops = CpuOps(dtype)
    sizes = [(1, 96, 64), (5, 7, 40), (8, 133, 100), (17, 12, 31), (1, 200, 9000), (50, 70, 9001)]
    sizes += [(7, 100, 64), (10, 32, 40), (11, 33, 31), (12, 65, 64), (19, 64, 9000)]
    sizes += [
        (16, 48, 320),
        (17, 80, 96),
        (33, 70, 96),
        (47, 130, 64),
        (64, 16, 32),
        (70, 96, 4160),
        (150, 80, 3072),  # rows in parts
    ]
    for rows, columns, length in sizes:
        weight = torch.randn(columns, length).to(dtype)
        shift = torch.randn(columns).to(dtype) if bias else None
        project = ops.pack(weight, shift)
        wide = torch.randn(rows, length + 3).to(dtype)
        states = wide[:, :length]
        assert_close(project(states), REFERENCE.pack(weight, shift)(states), length**0.5)
        assert project(torch.empty(0, length, dtype=dtype)).shape == (0, columns)
        alone = torch.cat([project(states[row : row + 1]) for row in range(rows)])
        assert torch.equal(alone, project(states)), "rows are computed one like another"


def test_a_router_in_float32_beside_bfloat16():
    weight, states = torch.randn(8, 40), torch.randn(3, 40)
    project = CpuOps(torch.bfloat16).pack(weight, None)
    assert_close(project(states), REFERENCE.pack(weight, None)(states))
    norm = Norm(torch.randn(40), 1e-5)
    assert_close(CpuOps(torch.bfloat16).norm(states, norm), REFERENCE.norm(states, norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_product_is_packed(dtype):
    weight = torch.randn(SMALL[dtype] // 512 + 1, 512).to(dtype)
    project = CpuOps(dtype).pack(weight, None)
    by_onednn = way(dtype, LARGE_WEIGHT) == ONEDNN
    assert isinstance(project, PackedProjection if by_onednn else PanelProjection)
    states = torch.randn(3, 512).to(dtype)
    assert_close(project(states), REFERENCE.pack(weight, None)(states), 20.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_share_a_large_product_s_columns(dtype):
    torch.manual_seed(0)
    weight, bias = torch.randn(SMALL[dtype] // 512 + 70, 512).to(dtype), torch.randn(4166).to(dtype)
    project = PanelProjection(weight, bias[: len(weight)])
    before = torch.get_num_threads()
    for rows in (1, 5, 40):
        states = torch.randn(rows, 512).to(dtype)
        found = []
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                found.append(project(states))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(each, found[0]) for each in found)
    assert_close(found[0], REFERENCE.pack(weight, bias[: len(weight)])(states), 23.0)


def test_onednn_packs_what_it_can_lay_out():
    """The table leaves to oneDNN on this processor what the operation itself accepts."""
    for dtype in DTYPES:
        by_onednn = way(dtype, LARGE_WEIGHT) == ONEDNN
        try:
            torch.ops.mkldnn._reorder_linear_weight(torch.zeros(64, 64, dtype=dtype), None)
        except RuntimeError:
            assert not by_onednn
        else:
            assert by_onednn or (capability() == "amx" and dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 40, 64, 320])
def test_norms(dtype, size):
    assert_norms(CpuOps(dtype), dtype, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GateKind)
def test_gates(dtype, kind):
    torch.manual_seed(0)
    gate = Gate(kind, limit=2.0, alpha=1.702)
    for width in (8, 40, 96):
        rows = (torch.randn(3, 2 * width) * 4).to(dtype)
        rows[0, :2] = torch.tensor([100.0, -100.0])
        assert_close(CpuOps(dtype).gate(rows, gate), REFERENCE.gate(rows, gate), 4.0)


def test_nothing_is_compiled_in_a_step():
    from outrider.workers.ops.cpu import KERNEL_DTYPES, kernels_of

    for kernels in map(kernels_of, KERNEL_DTYPES):
        assert not any(kernel._can_compile for kernel in kernels[1:])


def test_who_gets_the_kernels():
    for dtype in DTYPES:
        assert type(make_ops(torch.device("cpu"), dtype)) is CpuOps
    assert type(make_ops(torch.device("cpu"), torch.float16)) is TorchOps
    assert type(make_ops(torch.device("meta"), torch.bfloat16)) is TorchOps


@pytest.mark.slow
def test_on_a_cpu_without_wide_vectors_and_where_nothing_can_be_kept(tmp_path):
    """What LLVM makes of the kernels for the oldest CPU, compiled anew because of a file."""
    (tmp_path / "file").touch()
    env = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CACHE_DIR": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-k", "demo or sinks or products or gates or (stand_for and (Q4_K or Q8_0))", __file__,
         str(Path(__file__).with_name("test_codes.py"))],
        env=env, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
