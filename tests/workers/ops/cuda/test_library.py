"""Prompts by a library, which a function of torch with the same signature stands for."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from outrider.bench.gpu.inputs import step_of
from outrider.errors import ConfigError
from outrider.tests.helpers.steps import assert_close, flash_attn_with_kvcache
from outrider.workers.attention import KV_FORMATS, KVCache, KVCode, KVShape
from outrider.workers.ops import ReferenceOps, make_ops, prompt_library
from outrider.workers.ops.protocol import AttentionSpec

pytest.importorskip("triton")
from outrider.workers.ops.cuda import library as module
from outrider.workers.ops.cuda.library import AttentionLibrary

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFERENCE = ReferenceOps()
SPEC = AttentionSpec(4, 2, 16, 16, 0.3)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """As `torch.nn.attention.varlen.varlen_attn`, whose last row is aligned with the last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert key.shape == value.shape
    assert (block_table, return_aux) == (None, None)
    out = torch.empty_like(query)
    lens = [torch.diff(each).tolist() for each in (cu_seq_q, cu_seq_k)]
    assert [max(each) for each in lens] == [max_q, max_k]
    assert [sum(each) for each in lens] == [len(query), len(key)]
    for index, (rows, keys) in enumerate(zip(*lens)):
        own, read = slice(*cu_seq_q[index : index + 2]), slice(*cu_seq_k[index : index + 2])
        behind = (torch.arange(rows) + keys - rows)[:, None] - torch.arange(keys)
        left, right = (keys if size < 0 else size for size in window_size)
        parts = (each.transpose(0, 1) for each in (query[own], key[read], value[read]))
        out[own] = scaled_dot_product_attention(
            *parts, (behind <= left) & (behind >= -right), scale=scale, enable_gqa=enable_gqa
        ).transpose(0, 1)
    return out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    """As FlashAttention 3's, of a release that also returns log-sums."""
    assert causal
    rows = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size[0], 0)
    return varlen_attn(*rows, scale=softmax_scale, window_size=window, enable_gqa=True), None


@pytest.fixture(params=["varlen", "flash_attn_3"])
def wished(request, monkeypatch):
    """A library by its name, on a GPU that suits it."""
    kind = SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache, __spec__=object(),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "flash_attn_interface", kind)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return AttentionLibrary.of(request.param, CUDA)


@pytest.mark.parametrize("form", [None, "fp8_e4m3"])
@pytest.mark.parametrize("window", [None, 7, 50])
def test_prompts(wished, window, form):
    """Chunks behind contexts in blocks, a chain and a token beside them, also over codes."""
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 16, 16, 0.3, window=window)
    code = None if form is None else KVCode(KV_FORMATS[form], 0.25, 0.5)
    lengths = [(21, 70), (0, 66), (40, 1), (9, 1)], [[], [], [-1, 0, 1], []]
    step, num_blocks = step_of(np.random.default_rng(0), *lengths, 16)
    shape = KVShape(2, 16, 16, format=code and code.format)
    cache = KVCache([shape], num_blocks, 16, torch.bfloat16, CPU, codes=[code])
    for storage in cache._storages:
        values = torch.randn(storage.shape)
        storage.copy_(values if code is None else code.format.encode(values, code.key_scale))
    plan = REFERENCE.plan(step, cache)
    query = torch.randn(plan.num_tokens, 4, 16).bfloat16()
    assert wished.takes(plan, spec, torch.bfloat16)
    rows = (query, cache.keys[0], cache.values[0], plan, spec, code)
    found = wished.attend(*rows)
    assert_close(found, REFERENCE.attend(*rows), 2.0)
    assert torch.equal(found, wished.attend(*rows))


def test_contexts_that_are_left_to_our_kernel(monkeypatch, wished):
    def taken(context, nodes, spec=SPEC, dtype=torch.bfloat16):
        step, num_blocks = step_of(np.random.default_rng(0), [(context, 1)], [[-1] * nodes], 16)
        cache = KVCache([KVShape(2, 16, 16)], num_blocks, 16, dtype, CPU)
        query = torch.zeros(1 + nodes, spec.num_heads, 16, dtype=dtype)
        plan = REFERENCE.plan(step, cache)
        return wished.context_of(query, cache.keys[0], cache.values[0], plan, spec) is not None

    wide = AttentionSpec(12, 2, 16, 16, 0.3)
    assert taken(40, 10, wide) == (wished.name == "flash_attn_3")
    assert not taken(40, 9, wide), "60 queries of a key: they fit into a tile"
    assert not taken(40, 10, replace(wide, window=100)), "not all rows see all of it"
    assert not taken(40, 10, replace(wide, softcap=9.0))
    assert not taken(40, 10, wide, torch.float32)
    assert AttentionLibrary.of("auto", CUDA).context is None, "lengths decide whether it pays"


def test_what_is_left_to_our_kernel(wished):
    def takes(lengths, trees, spec=SPEC, dtype=torch.bfloat16):
        step, _ = step_of(np.random.default_rng(0), lengths, trees, 16)
        plan = REFERENCE.plan(step, KVCache([], 1, 16, torch.bfloat16, CPU))
        return wished.takes(plan, spec, dtype)

    long = [(21, 70)], [[]]
    assert takes(*long)
    assert not takes([(21, 64)], [[]])
    assert not takes([(21, 70), (9, 1)], [[], [-1, -1]]), "a tree"
    assert not takes(*long, dtype=torch.float32)
    assert not takes(*long, AttentionSpec(4, 2, 16, 16, 0.3, softcap=30.0))


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (SPEC, torch.float32, "no float32, only bfloat16 and float16"),
        (AttentionSpec(4, 2, 260, 260, 0.3), torch.float16, "no heads of 260"),
        (AttentionSpec(4, 4, 192, 128, 0.3), torch.float16, "192 and values of 128"),
        (AttentionSpec(4, 1, 576, 512, 0.3, shared_values=True), torch.float16, "no latent"),
        (AttentionSpec(4, 2, 16, 16, 0.3, chunk=64), torch.float16, "attention in chunks"),
        (AttentionSpec(4, 2, 16, 16, 0.3, softcap=9.0), torch.float16, "a soft cap"),
        (AttentionSpec(4, 2, 16, 16, 0.3, sinks=torch.ones(4)), torch.float16, "sinks"),
    ],
)
def test_layers_that_it_does_not_serve(wished, spec, dtype, reason):
    """By its name, an error; with `auto`, those layers are ours."""
    with pytest.raises(ConfigError, match=f"prompt_attention: '{wished.name}' .*{reason}"):
        wished.check([SPEC, spec], dtype, CPU, REFERENCE.attend)
    wished.is_wished = False
    assert wished.check([SPEC, spec], dtype, CPU, REFERENCE.attend) == ""


def test_it_is_compared_with_our_kernel_before_the_first_request(wished, caplog):
    assert wished.check([SPEC], torch.bfloat16, CPU, REFERENCE.attend) == ""
    right = wished.call

    def first_aligned(query, keys, values, begin, _, longest, __, **given):  # as torch's own are
        rows = (query, keys[:longest], values[:longest], begin, begin, longest, longest)
        return right(*rows, **given)

    def failing(*_, **__):
        raise RuntimeError("no kernel image")

    for call, reason in ((failing, "it failed: no kernel image"), (first_aligned, "")):
        wished.call, wished.is_wished = call, True
        with pytest.raises(ConfigError, match=f"prompt_attention: .*{reason}"):
            wished.check([SPEC], torch.bfloat16, CPU, REFERENCE.attend)
        wished.is_wished = False
        assert reason in wished.check([SPEC], torch.bfloat16, CPU, REFERENCE.attend)
        assert "prompts are left to our kernel" in caplog.text


@pytest.mark.parametrize("wished", ["flash_attn_3"], indirect=True)
def test_contexts_are_compared_before_the_first_request(wished):
    right = wished.context
    assert wished.check([SPEC], torch.bfloat16, CPU, REFERENCE.attend, 8) == ""

    def one_key_less(query, keys, values, plan, scale):
        plan = replace(plan, context_lens=(plan.context_lens - 1).clamp(min=0))
        return right(query, keys, values, plan, scale)

    def other_base(*rows):  # of the logarithm
        out, logs = right(*rows)
        return out, logs / np.log(2.0)

    for wrong in (one_key_less, other_base):
        wished.context = wrong
        with pytest.raises(ConfigError, match=r"prompt_attention: .* its results are .* off"):
            wished.check([SPEC], torch.bfloat16, CPU, REFERENCE.attend, 8)


@pytest.mark.parametrize("window", [64, 512, 4096])
def test_a_window_that_is_wrong_is_found(wished, window):
    """Also one that is longer than what is tried, ignored or off by one."""
    spec, right = replace(SPEC, window=window), wished.call
    assert wished.check([spec], torch.bfloat16, CPU, REFERENCE.attend) == ""
    wished.is_wished = False
    for wrong in (lambda _: -1, lambda reach: reach + 1):
        wished.call = lambda *rows, scale, reach, wrong=wrong: right(
            *rows, scale=scale, reach=wrong(reach)
        )
        assert "off" in wished.check([spec], torch.bfloat16, CPU, REFERENCE.attend)


@pytest.mark.parametrize(
    ("wish", "capability", "found"),
    [
        ("auto", (9, 0), None), ("auto", (8, 0), "varlen"), ("auto", (12, 0), None),
        ("own", (8, 0), None), ("varlen", (10, 0), "varlen"),
        ("varlen", (7, 5), "needs compute capability 8.0, not 7.5"),
        ("flash_attn_3", (9, 0), "flash_attn_interface .* is not installed"),
    ],
)  # fmt: skip
def test_the_gpu_and_what_is_installed_decide(monkeypatch, wish, capability, found):
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if found is not None and " " in found:
        with pytest.raises(ConfigError, match=f"prompt_attention: '{wish}' .*{found}"):
            AttentionLibrary.of(wish, CUDA)
    else:
        made = AttentionLibrary.of(wish, CUDA)
        assert (None if made is None else made.name) == found


def test_flash_attn_3_where_it_is_installed(wished, monkeypatch):
    assert AttentionLibrary.of("auto", CUDA).name == "flash_attn_3"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ConfigError, match=r"needs compute capability 9.0, not 8.6"):
        AttentionLibrary.of("flash_attn_3", CUDA)


def test_without_a_gpu_it_is_refused():
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ConfigError, match="prompt_attention: 'varlen' is not available"):
            make_ops(CPU, dtype, "varlen")
        assert make_ops(CPU, dtype, "own").name == make_ops(CPU, dtype).name
    assert prompt_library("auto", CPU, None) is None
