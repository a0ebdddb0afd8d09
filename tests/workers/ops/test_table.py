"""The table of kernels: what it says of a processor, and its ways against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.bench.gpu.inputs import random_tree, step_of
from outrider.errors import ConfigError
from outrider.tests.helpers.steps import assert_close
from outrider.workers.attention import KVCache, KVShape
from outrider.workers.ops import table
from outrider.workers.ops.cpu import CpuOps, PackedProjection
from outrider.workers.ops.protocol import AttentionSpec
from outrider.workers.ops.reference import ReferenceOps, TorchOps

DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
PLAIN = AttentionSpec(8, 2, 40, 40, 40**-0.5, rotary_dim=40)
LAYERS = {
    "plain": PLAIN,
    "a head per key": AttentionSpec(4, 4, 32, 32, 0.2, rotary_dim=32),
    "window": AttentionSpec(4, 2, 16, 16, 0.25, rotary_dim=16, window=50),
    "wide window": AttentionSpec(4, 2, 16, 16, 0.25, rotary_dim=16, window=500),
    "chunk": AttentionSpec(4, 2, 16, 16, 0.25, rotary_dim=16, chunk=70),
    "soft cap": AttentionSpec(4, 2, 16, 16, 2.0, rotary_dim=16, softcap=5.0),
    "sinks": AttentionSpec(4, 2, 64, 64, 0.1, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "narrow values": AttentionSpec(4, 4, 48, 20, 0.2),
}


def test_every_processor_has_every_entry():
    for name, kinds in table.TABLE.items():
        assert set(kinds) == set(DTYPES), name
        for classes in kinds.values():
            wanted = {table.SMALL_WEIGHT, table.LARGE_WEIGHT, table.CODES}
            assert set(classes) == wanted
            assert set(classes.values()) <= {table.KERNEL, table.ONEDNN, table.TORCH}


def processor(monkeypatch, limit: str, supports_bf16: bool, **flags: bool) -> str:
    """The table's name of a processor with these flags, and this limit of oneDNN's."""
    monkeypatch.delenv(table.VARIABLE, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supports_bf16)
    monkeypatch.setattr(table, "may_use_tiles", lambda: True)
    return table.capability()


def test_the_limit_of_onednn_counts(monkeypatch):
    every = {"amx_bf16": True, "avx512_bf16": True, "avx512_bw": True}
    assert processor(monkeypatch, "", True, **every) == "amx"
    assert processor(monkeypatch, "avx512_core_amx", True, **every) == "amx"
    assert processor(monkeypatch, "AVX512_CORE_BF16", True, **every) == "avx512_bf16"
    assert processor(monkeypatch, "AVX512_CORE", True, **every) == "avx512"
    assert processor(monkeypatch, "AVX2_VNNI_2", True, **every) == "avx_ne_convert"
    assert processor(monkeypatch, "AVX2", False, **every) == "avx2"
    assert processor(monkeypatch, "", True, avx512_bw=True) == "avx512"
    assert processor(monkeypatch, "", True) == "avx_ne_convert"
    assert processor(monkeypatch, "", False) == "avx2"
    monkeypatch.setattr(table, "may_use_tiles", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: every)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert table.capability() == "avx512_bf16", "where the system refuses tiles"


def test_the_variable_forces_entries(monkeypatch):
    monkeypatch.setenv(table.VARIABLE, "amx")
    assert table.way(torch.bfloat16, table.LARGE_WEIGHT) == table.KERNEL
    assert table.way(torch.float32, table.LARGE_WEIGHT) == table.ONEDNN
    assert table.describe(torch.bfloat16).startswith("amx; small weight: kernel; large weight: k")
    monkeypatch.setenv(table.VARIABLE, "amxx")
    with pytest.raises(ConfigError, match="OUTRIDER_CPU_TABLE=amxx: allowed: amx, avx512_bf16"):
        CpuOps(torch.bfloat16)


def test_few_numbers_of_rows_reach_onednn():
    """Each costs half a megabyte per shape; at most an eighth is filled up."""
    filled = [table.filled_rows(rows) for rows in range(1, 4097)]
    assert len(set(filled)) == 15 + 8 * 8 + 1
    assert all(rows <= found <= rows * 9 / 8 for rows, found in enumerate(filled, 1))
    assert [table.filled_rows(rows) for rows in (1, 2, 15, 17, 900)] == [1, 2, 15, 18, 960]


@pytest.mark.parametrize(
    "dtype",
    [each for each in DTYPES if table.way(each, table.LARGE_WEIGHT) == table.ONEDNN],
    ids=str,
)
@pytest.mark.parametrize("size", [(480, 320), (320, 864), (1536, 1024)], ids=str)
def test_rows_of_a_packed_product_do_not_depend_on_their_number(dtype, size):
    """Bit for bit, however they are filled up; one row of float32 has other sums.

    Of the types that it multiplies here: by AMX's tiles its sums depend on the number of rows.
    """
    torch.manual_seed(0)
    project = PackedProjection(torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype))
    states = torch.randn(1024, size[1]).to(dtype)
    expected = project(states)
    for rows in (2, 3, 5, 17, 33, 64, 100, 180, 900):
        assert torch.equal(project(states[:rows]), expected[:rows]), "more rows lie behind"
        assert torch.equal(project(states[:rows].clone()), expected[:rows])
        assert torch.equal(project(states[7 : 7 + rows]), expected[7 : 7 + rows])
    columns = torch.randn(19, size[1] + 8).to(dtype)[:, 8:]
    assert torch.equal(project(columns), project(columns.contiguous()))
    torch.testing.assert_close(project(states[:1]), expected[:1], atol=1e-3, rtol=1e-2)


STEPS = {
    "a prompt": ([(0, 150)], [[]]),
    "a chunk behind a prefix": ([(130, 90)], [[]]),
    "prompts beside decodes": (
        [(140, 3), (0, 70), (40, 64), (9, 1), (0, 63), (77, 200), (300, 1)],
        [[], [], [], [-1, 0, 0], [], [], [-1, -1, 0]],
    ),
    "a long tree": ([(33, 2), (0, 65)], [list(range(-1, 3)), [-1] * 70]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", STEPS)
def test_torch_s_attention(name, dtype, kind):
    spec, rng = LAYERS[name], np.random.default_rng(1)
    lengths, trees = STEPS[kind]
    trees = [random_tree(rng, len(tree)) if tree[:3] == [-1, -1, -1] else tree for tree in trees]
    step, num_blocks = step_of(rng, lengths, trees, 16)
    shape = KVShape(spec.num_kv_heads, spec.head_dim, spec.value_dim)
    own, oracle = TorchOps(), ReferenceOps()
    joined = torch.randn(len(step.token_ids), spec.joined_width).to(dtype)
    caches = [KVCache([shape], num_blocks, 16, dtype, CPU) for _ in range(2)]
    for one, other in zip(*(cache._storages for cache in caches)):
        other.copy_(one.normal_())
    results = []
    for ops, cache in zip((own, oracle), caches):
        plan = ops.plan(step, cache)
        turned = None
        if spec.rotary_dim:
            turned = ops.rotation(plan.positions, 0.5 ** torch.arange(spec.rotary_dim // 2), 1.1)
        for _ in range(2):  # the second finds the masks of the first
            out = ops.rope_store_attend(joined.clone(), turned, None, plan, cache, 0, spec)
        results.append(out.clone())
        if ops is own:
            assert len(plan.passes) == len(lengths)
    assert_close(*results)
