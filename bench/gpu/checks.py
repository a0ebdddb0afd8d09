"""Kernels at real sizes against the reference: the part `checks` of the proof, and of the tests.

A dry run has the same cases with shorter contexts and fewer columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ...scheduler.types import StepInput
from ...workers.attention import KV_FORMATS, KVCache, KVCode, KVShape
from ...workers.ops import Ops, PagedStep, ReferenceOps, prompt_library
from ...workers.ops.protocol import AttentionSpec, Experts, Gate, GateKind, LatentHeads, Norm
from ...workers.verify.device_settings import DeviceSettings
from ...workers.verify.process import DrawSettings, draw
from .inputs import (
    KINDS,
    float8_inputs,
    float8_weight,
    random_tree,
    scaled_mm_in_float32,
    step_of,
    weight_of,
    wide,
)
from .machine import Case, Machine, Row

if TYPE_CHECKING:
    from ...workers.ops.cuda.float8 import Float8Products

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
STEPS = ("decode", "trees", "mixed")
LIBRARIES = ("varlen", "flash_attn_3")  # of `prompt_attention`
LIMITS = {  # (temperature, top_k, top_p, min_p)
    "greedy": (0.0, 0, 1.0, 0.0),
    "min-p": (0.9, 0, 1.0, 0.05),
    "top-p": (0.6, 0, 0.9, 0.0),
    "top-k, top-p": (1.0, 40, 0.95, 0.0),
    "all": (1.3, 20, 0.8, 0.01),
}
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
REFERENCE = ReferenceOps()


def compared(found: Tensor, expected: Tensor) -> Row:
    """The largest difference as a share of what is tolerated."""
    limit = _TOLERANCE[found.dtype]
    found, expected = found.float(), expected.float()
    excess = (found - expected).abs() / (limit + limit * expected.abs())
    share = float(excess.max()) if found.isfinite().all() else float("inf")
    return {"of the tolerance": share, "passed": share <= 1}


def _equal(found: Tensor, expected: Tensor) -> Row:
    differ = int((found.cpu() != expected.cpu()).sum())
    return {"differing": differ, "passed": differ == 0}


def caches_of(
    spec: AttentionSpec,
    dtype: torch.dtype,
    num_blocks: int,
    page: int,
    device: torch.device,
    code: KVCode | None = None,
) -> list[KVCache]:
    """Two caches of one layer with the same random contents."""
    stored, form = (
        0 if spec.shared_values else spec.value_dim,
        None if code is None else code.format,
    )
    shape = KVShape(spec.num_kv_heads, spec.head_dim, stored, format=form)
    one, other = (KVCache([shape], num_blocks, page, dtype, device, codes=[code]) for _ in range(2))
    for kept, copied in zip(one._storages, other._storages, strict=True):
        values = torch.randn(kept.shape, device=device)
        kept.copy_(values if code is None else code.format.encode(values, code.key_scale))
        copied.copy_(kept)
    return [one, other]


def _step(name: str, rng: np.random.Generator, page: int, *, is_dry: bool) -> tuple[StepInput, int]:
    shorter = 16 if is_dry else 1
    found: dict[str, tuple[list[tuple[int, int]], list[list[int]]]] = {
        "decode": ([(1, 1), (700, 1), (3000, 1)], [[], [], []]),
        "trees": ([(333, 1), (90, 2)], [random_tree(rng, 70 // shorter), random_tree(rng, 5)]),
        "mixed": ([(60, 200 // shorter), (1500, 1), (0, 77 // shorter)],
                  [[], random_tree(rng, 8), []]),
    }  # fmt: skip
    lengths, trees = found[name]
    return step_of(rng, [(context // shorter, known) for context, known in lengths], trees, page)


def attention(machine: Machine, name: str, kind: str, page: int, code: KVCode | None = None) -> Row:
    """Preparation, storing and attention of a layer.

    Codes are without rotation, whose last bit may move a number to the next one.
    """
    torch.manual_seed(0)
    spec, device, dtype = SPECS[name], machine.device, machine.dtype
    step, num_blocks = _step(kind, np.random.default_rng(0), page, is_dry=machine.is_dry)
    joined = torch.randn(len(step.token_ids), spec.joined_width, device=device).to(dtype)
    results = []
    operations: tuple[Ops, Ops] = (machine.ops, REFERENCE)
    caches = caches_of(spec, dtype, num_blocks, page, device, code)
    for ops, cache in zip(operations, caches, strict=True):
        plan = ops.plan(step, cache)
        frequencies = 0.5 ** torch.arange(spec.rotary_dim // 2, device=device)
        turned = None if code is not None else ops.rotation(plan.positions, frequencies, 1.0)
        results.append(ops.rope_store_attend(joined.clone(), turned, None, plan, cache, 0, spec))
    return compared(*results)


def heads_of_latents(machine: Machine) -> Row:
    """A prompt's chunk and a token, with heads expanded from the latents of their contexts."""
    torch.manual_seed(0)
    spec, device, dtype = SPECS["latent"], machine.device, machine.dtype
    shorter = 16 if machine.is_dry else 1
    lengths = [(700 // shorter, 300 // shorter), (90, 1)]
    step, num_blocks = step_of(np.random.default_rng(0), lengths, [[], []], 16)
    heads = latent_heads(machine, 16)
    num_tokens = len(step.token_ids)
    query = torch.randn(num_tokens, 16, 192, device=device).to(dtype)
    latent = torch.randn(num_tokens, 576, device=device).to(dtype)
    results = []
    operations: tuple[Ops, Ops] = (machine.ops, REFERENCE)
    for ops, cache in zip(operations, caches_of(spec, dtype, num_blocks, 16, device), strict=True):
        plan = ops.plan(step, cache)
        turned = ops.rotation(plan.positions, 0.5 ** torch.arange(32, device=device), 1.0)
        results.append(ops.expand_attend(query, latent, turned, None, plan, cache, 0, spec, heads))
    return compared(*results)


def latent_heads(machine: Machine, num_heads: int) -> LatentHeads:
    """Random heads of DeepSeek's sizes, eight at a time."""
    each = AttentionSpec(8, 8, 192, 128, 0.07, rotary_begin=128, rotary_dim=64, is_prepared=True)
    keys = machine.random(num_heads, 128, 512)
    return LatentHeads(keys, machine.random(num_heads, 128, 512).mT.contiguous(), each)


def prompts_by(machine: Machine, name: str) -> Row:
    """Chunks behind contexts by a library, as `prompt_attention` chooses it."""
    try:
        library = prompt_library(name, machine.device, machine.dtype)
    except ConfigError as error:
        return {"skipped": error.message}
    assert library is not None, name
    torch.manual_seed(0)
    spec, device, dtype = SPECS["llama"], machine.device, machine.dtype
    if lack := library.lacks(spec, dtype):
        return {"skipped": f"{name} has {lack}"}
    library.check([spec], dtype, device, REFERENCE.attend)
    lengths = [(60, 200), (1500, 1), (0, 177), (900, 70)]
    step, num_blocks = step_of(np.random.default_rng(0), lengths, [[], [-1, 0], [], []], 16)
    cache = caches_of(spec, dtype, num_blocks, 16, device)[0]
    plan = REFERENCE.plan(step, cache)
    assert library.takes(plan, spec, dtype)
    query = torch.randn(plan.num_tokens, 32, 128, device=device).to(dtype)
    rows = (query, cache.keys[0], cache.values[0], plan, spec)
    return compared(library.attend(*rows), REFERENCE.attend(*rows))


def contexts_by(machine: Machine) -> Row:
    """Trees behind contexts that a library computes, and our kernel over their own keys."""
    from ...workers.ops.cuda.ops import CudaOps

    spec, device, dtype = SPECS["llama"], machine.device, machine.dtype
    try:
        library = prompt_library("flash_attn_3", device, dtype)
    except ConfigError as error:
        return {"skipped": error.message}
    assert library is not None
    if not library.merges(spec, dtype):
        return {"skipped": f"flash_attn_3 has {library.lacks(spec, dtype)}"}
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, num_nodes) for num_nodes in (32, 32, 5, 63)]
    step, num_blocks = step_of(rng, [(3000, 1), (0, 1), (70, 1), (900, 1)], trees, 16)
    joined = torch.randn(len(step.token_ids), spec.joined_width, device=device).to(dtype)
    results = []
    operations: tuple[Ops, Ops] = (CudaOps(device, library=library), REFERENCE)
    for ops, cache in zip(operations, caches_of(spec, dtype, num_blocks, 16, device), strict=True):
        plan = ops.plan(step, cache)
        results.append(ops.rope_store_attend(joined.clone(), None, None, plan, cache, 0, spec))
    return compared(*results)


def _normed_layer(ops: Ops, norm: Norm, joined: Tensor, plan: PagedStep, cache: KVCache) -> Tensor:
    """What a layer does around its products."""
    turned = ops.rotation(plan.positions, torch.ones(64, device=cache.device), 1.0)
    states = ops.norm(joined, norm)
    return ops.rope_store_attend(states, turned, None, plan, cache, 0, SPECS["llama"])


def replayed_layer(machine: Machine) -> Row:
    """A captured layer on lengths, trees and tokens that it was not captured with."""
    torch.manual_seed(0)
    rng, spec, device = np.random.default_rng(0), SPECS["llama"], machine.device
    norm = Norm(torch.ones(spec.joined_width, device=device), 1e-6)
    mine, theirs = caches_of(spec, machine.dtype, 400, 16, device)
    contexts = ((7, 9), (20, 13), (3, 4)) if machine.is_dry else ((700, 90), (20, 1300), (3, 4))
    steps = []
    for lengths in contexts:
        trees = [random_tree(rng, 6), random_tree(rng, 6)]
        step, _ = step_of(rng, [(length, 1) for length in lengths], trees, 16)
        plan = REFERENCE.plan(step, theirs)
        values = {field.name: getattr(plan, field.name) for field in fields(PagedStep)}
        arrays = {name: each for name, each in values.items() if isinstance(each, Tensor)}
        table = torch.zeros((2, 100), dtype=torch.int32, device=device)
        table[:, : step.block_tables.shape[1]] = arrays["block_tables"]
        steps.append((step, {**arrays, "block_tables": table}))
    own: dict[str, Any] = {name: each.clone() for name, each in steps[0][1].items()}
    kept = PagedStep(**own, block_size=16, max_query_len=7, max_key_len=1600)
    joined = torch.zeros(14, spec.joined_width, device=device, dtype=machine.dtype)
    results: list[Tensor] = []

    def run() -> None:
        plan = replace(kept, derived={})  # as every step makes its own
        results[:] = [_normed_layer(machine.ops, norm, joined, plan, mine)]

    replay, found = machine.captured(run), []
    for step, arrays in steps:
        for name, value in arrays.items():
            getattr(kept, name).copy_(value)
        for one, other in zip(mine._storages, theirs._storages, strict=True):
            one.copy_(other)
        joined.normal_()
        replay()
        plan = REFERENCE.plan(step, theirs)
        found.append(compared(results[0], _normed_layer(REFERENCE, norm, joined, plan, theirs)))
    return max(found, key=lambda row: float(row["of the tolerance"]))


def experts(machine: Machine, num_tokens: int) -> Row:
    """A mixture of 32 experts, of which a row takes four."""
    torch.manual_seed(0)
    hidden, width = (64, 32) if machine.is_dry else (2048, 768)
    weights = Experts(
        machine.random(32, 2 * width, hidden), machine.random(32, hidden, width),
        Gate(GateKind.SILU),
    )  # fmt: skip
    states = machine.random(num_tokens, hidden) * hidden**0.5
    chosen = torch.rand(num_tokens, 32, device=machine.device).topk(4).indices
    scores = torch.rand(num_tokens, 4, device=machine.device)
    found = machine.ops.pack_experts(weights)(states, chosen, scores)
    return compared(found, REFERENCE.pack_experts(weights)(states, chosen, scores))


def product(machine: Machine, kind: str) -> Row:
    """Weights of a kind at several numbers of rows, against the wide weight in float32."""
    from ...workers.ops.cuda.linear import TiledProduct

    torch.manual_seed(0)
    out, depth = (48, 160) if machine.is_dry else (4096, 2048)
    weight = weight_of(kind, (out, depth), machine.dtype, 128).to(machine.device)
    run = TiledProduct(weight, None, machine.num_processors, fixed_rows=False)
    found = []
    for rows in (1, 8, 40) if machine.is_dry else (1, 8, 100, 700):
        states = torch.randn(rows, depth, device=machine.device).to(machine.dtype)
        wanted = states.float() @ wide(weight).float().t()
        found.append(compared(run(states), wanted))
    return max(found, key=lambda row: float(row["of the tolerance"]))


def float8_products(machine: Machine) -> Float8Products:
    """The device's; in a dry run of both kinds, computed by hand."""
    from ...workers.ops.cuda.float8 import GROUP, Float8Products

    if machine.is_dry:
        return Float8Products({0, GROUP}, machine.num_processors, scaled_mm_in_float32)
    return Float8Products.of(machine.device, machine.num_processors)


def float8_product(machine: Machine, group: int) -> Row:
    """Inputs in float8 at several numbers of rows, against the same codes in float32."""
    torch.manual_seed(0)
    out, depth = (48, 256) if machine.is_dry else (4096, 2048)
    weight = float8_weight((out, depth), torch.bfloat16, group, machine.device)
    bias = machine.random(out).bfloat16()
    product = float8_products(machine).pack(weight, bias)
    if product is None:
        return {"skipped": "no scaled_mm of this kind on the device"}
    found = []
    for rows in (1, 8, 40) if machine.is_dry else (1, 5, 8, 100, 700):
        states = torch.randn(rows, depth, device=machine.device).bfloat16()
        codes, scales = float8_inputs(states, group or depth)
        inputs = codes.float() * scales.repeat_interleave(group or depth, 1)
        wanted = inputs @ weight.codes.wide().t() + bias.float()
        found.append(compared(product(states), wanted))
    return max(found, key=lambda row: float(row["of the tolerance"]))


def draws(machine: Machine, name: str, *, has_ties: bool) -> Row:
    """Tokens of rows of a vocabulary, against those of the host path on a CPU."""
    torch.manual_seed(0)
    rows, vocab = (3, 3000) if machine.is_dry else (20, machine.size.vocab)
    logits = torch.randn(rows, vocab) * 3
    if has_ties:
        logits = logits.bfloat16().float()
    heat, top_k, top_p, min_p = LIMITS[name]
    seeds = torch.arange(rows)
    columns = (
        np.full(rows, heat, np.float32), np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32), np.full(rows, min_p, np.float32),
    )  # fmt: skip
    positions = np.arange(rows, dtype=np.int32)
    settings = [torch.from_numpy(column).to(machine.device) for column in columns]
    found = machine.ops.draw_on_device(
        logits.to(machine.device), torch.from_numpy(positions).to(machine.device),
        DeviceSettings(seeds.to(machine.device), *settings),
    )  # fmt: skip
    return _equal(found, draw(logits, positions, DrawSettings(seeds, *columns)))


def elementwise(machine: Machine) -> Row:
    """Norms, residual updates and gates at a model's width."""
    torch.manual_seed(0)
    width, rows = machine.size.hidden, 3 if machine.is_dry else 33
    norm = Norm(torch.rand(width, device=machine.device), 1e-5)
    states, update, residual = (machine.random(rows, width) * width**0.5 for _ in range(3))
    gates = machine.random(rows, 2 * width) * width**0.5
    results = []
    operations: tuple[Ops, Ops] = (machine.ops, REFERENCE)
    for ops in operations:
        found = [ops.norm(states, norm), ops.add_norm(residual.clone(), update, None, 1.0, norm)]
        results.append(torch.cat([*found, ops.gate(gates, Gate(GateKind.SILU))]))
    return compared(*results)


def cases(machine: Machine) -> Iterator[Case]:
    """The part `checks` of the proof."""
    yield "norms, residuals, gates", partial(elementwise, machine)
    for kind in ("trees",) if machine.is_dry else STEPS:
        for name in SPECS if kind == "trees" else ("llama", "latent"):
            yield f"attention, {name}, {kind}", partial(attention, machine, name, kind, 16)
    yield "attention, llama, trees, blocks of 64", partial(attention, machine, "llama", "trees", 64)
    for form, each in KV_FORMATS.items():
        code, kind = KVCode(each, 0.125, 0.125), "mixed" if machine.is_dry else "trees"
        for name in ("llama", "latent"):
            run = partial(attention, machine, name, kind, 16, code)
            yield f"attention, {name}, {kind}, keys in {form}", run
    yield "attention, heads of latents", partial(heads_of_latents, machine)
    for name in LIBRARIES:
        yield f"attention, prompts by {name}", partial(prompts_by, machine, name)
    yield "attention, contexts by flash_attn_3", partial(contexts_by, machine)
    yield "a captured layer on new data", partial(replayed_layer, machine)
    for num_tokens in (1, 9) if machine.is_dry else (1, 8, 300):
        yield f"experts, {num_tokens} rows", partial(experts, machine, num_tokens)
    for kind in KINDS:
        yield f"products, {kind}", partial(product, machine, kind)
    for group in (0, 128):
        title = f"products, float8 inputs by {'groups' if group else 'rows'}"
        yield title, partial(float8_product, machine, group)
    for name in LIMITS:
        for has_ties in (True,) if machine.is_dry else (False, True):
            title = f"draws, {name}{', ties' if has_ties else ''}"
            yield title, partial(draws, machine, name, has_ties=has_ties)
