"""Times of attention, products and draws, with cold caches: the part `timings` of the proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from ...errors import ConfigError
from ...workers.attention import KVCache, KVShape
from ...workers.ops import PagedStep, prompt_library
from ...workers.ops.protocol import AttentionSpec
from ...workers.verify.device_settings import DeviceSettings
from .checks import LIBRARIES, LIMITS, REFERENCE, SPECS, float8_products, latent_heads
from .inputs import float8_weight, random_tree, step_of, weight_of
from .machine import Case, Machine, Row

_BLOCK_SIZE = 16
_MAX_CACHE_BYTES = 16 << 30


def _contexts(batch: int, name: str, *, is_dry: bool) -> list[int]:
    """Of each sequence; skewed: one long context among short ones."""
    short, long = (20, 70) if is_dry else (1024, 32768)
    if name == "skewed":
        return [long, *[short] * (batch - 1)]
    return [long if name == "32k" else short] * batch


def _flash(
    query: Tensor,  # [batch, query_len, num_heads, head_dim]
    keys: Tensor,  # [batch, key_len, num_kv_heads, head_dim]
    values: Tensor,
    lengths: Tensor,  # [batch] int32, keys of each sequence
) -> Callable[[], object] | None:
    """FlashAttention over dense keys, causal, without a tree's mask; None: it is not installed."""
    for name in ("flash_attn_interface", "flash_attn"):
        try:
            attend: Any = import_module(name).flash_attn_with_kvcache
        except ImportError:
            continue
        return partial(attend, query, keys, values, cache_seqlens=lengths, causal=True)
    return None


def attention(machine: Machine, num_nodes: int, batch: int, name: str) -> Row:
    """One layer with its preparation, beside attention alone over keys that lie dense."""
    size, device, rng = machine.size, machine.device, np.random.default_rng(0)
    heads, kv_heads, dim = size.num_heads, size.num_kv_heads, size.head_dim
    contexts = _contexts(batch, name, is_dry=machine.is_dry)
    per_key = 2 * kv_heads * dim * machine.dtype.itemsize
    if per_key * batch * max(contexts) > _MAX_CACHE_BYTES:
        return {"skipped": f"a cache above {_MAX_CACHE_BYTES >> 30} GiB"}
    trees = [random_tree(rng, num_nodes) for _ in contexts]
    step, num_blocks = step_of(rng, [(context, 1) for context in contexts], trees, _BLOCK_SIZE)
    spec = AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5)
    cache = KVCache([KVShape(kv_heads, dim, dim)], num_blocks, _BLOCK_SIZE, machine.dtype, device)
    for storage in cache._storages:
        storage.normal_()
    plan = machine.ops.plan(step, cache)
    joined = machine.random(plan.num_tokens, spec.joined_width)
    run = partial(machine.ops.rope_store_attend, joined, None, None, plan, cache, 0, spec)
    ours_us = machine.captured_us(run)
    num_bytes = per_key * sum(contexts)
    row: Row = {
        "us": ours_us,
        "of the copy's bandwidth": num_bytes / machine.copied_bytes_per_s / ours_us * 1e6,
    }
    row |= _with_contexts_by_a_library(machine, joined, plan, cache, spec)
    del cache, joined
    query_len, longest = 1 + num_nodes, max(contexts) + 1 + num_nodes
    keys, values = machine.random(2, batch, longest, kv_heads, dim).unbind(0)
    query = machine.random(batch, query_len, heads, dim)
    if name != "skewed":
        dense = [each.transpose(1, 2) for each in (query, keys, values)]
        row["torch, us"] = machine.captured_us(
            partial(scaled_dot_product_attention, dense[0], dense[1], dense[2], enable_gqa=True)
        )
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device) + query_len
    flash = _flash(query, keys, values, lengths)
    if flash is not None:
        row["flash, us"] = machine.captured_us(flash)
    return row


def _with_contexts_by_a_library(
    machine: Machine, joined: Tensor, plan: PagedStep, cache: KVCache, spec: AttentionSpec
) -> Row:
    """The same, with contexts by FlashAttention 3, where it takes them."""
    from ...workers.ops.cuda.library import MIN_ROWS
    from ...workers.ops.cuda.ops import CudaOps

    if plan.max_query_len * (spec.num_heads // spec.num_kv_heads) < MIN_ROWS:
        return {}
    try:
        library = prompt_library("flash_attn_3", machine.device, machine.dtype)
    except ConfigError as error:
        return {"flash_attn_3": error.message}
    ops = CudaOps(machine.device, library=library)
    run = partial(ops.rope_store_attend, joined, None, None, plan, cache, 0, spec)
    return {"contexts by flash_attn_3, us": machine.captured_us(run)}


def prompts(machine: Machine, context: int, rows: int) -> Row:
    """A chunk's attention by our kernel and by libraries, which gather its keys first."""
    size, device, rng = machine.size, machine.device, np.random.default_rng(0)
    heads, kv_heads, dim = size.num_heads, size.num_kv_heads, size.head_dim
    step, num_blocks = step_of(rng, [(context, rows)], [[]], _BLOCK_SIZE)
    spec = AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5)
    plan = REFERENCE.plan(step, KVCache([], num_blocks, _BLOCK_SIZE, machine.dtype, device))
    keys, values = machine.random(2, num_blocks * _BLOCK_SIZE, kv_heads, dim).unbind(0)
    read = (machine.random(rows, heads, dim), keys, values, plan, spec)
    row: Row = {"us": machine.time_ms(partial(own_attention(machine), *read)) * 1e3}
    for name in LIBRARIES:
        try:
            library = prompt_library(name, device, machine.dtype)
        except ConfigError as error:
            row[name] = error.message
            continue
        assert library is not None, name
        if library.takes(plan, spec, machine.dtype):
            row[f"{name}, us"] = machine.time_ms(partial(library.attend, *read)) * 1e3
    return row


def own_attention(machine: Machine) -> Callable[..., Tensor]:
    """Our kernel, whatever library is there."""
    from ...workers.ops.cuda.ops import CudaOps

    return CudaOps(machine.device).attend


def prompts_over_latents(machine: Machine, context: int, rows: int) -> Row:
    """A chunk's attention over latents, and with heads expanded from them; without the products
    that absorb and expand a row's heads, which both have alike."""
    spec, rng = SPECS["latent"], np.random.default_rng(0)
    step, num_blocks = step_of(rng, [(context, rows)], [[]], _BLOCK_SIZE)
    cache = KVCache(
        [KVShape(1, 576, 0)], num_blocks, _BLOCK_SIZE, machine.dtype, machine.device
    )  # fmt: skip
    cache._storages[0].normal_()
    plan, ops = machine.ops.plan(step, cache), machine.ops
    joined, latent = machine.random(rows, spec.joined_width), machine.random(rows, 576)
    query, heads = machine.random(rows, 16, 192), latent_heads(machine, 16)
    turned = ops.rotation(plan.positions, torch.ones(32, device=machine.device), 1.0)
    step_of_layer = (turned, None, plan, cache, 0, spec)
    expanded = partial(ops.expand_attend, query, latent, *step_of_layer, heads)
    return {
        "us": machine.time_ms(partial(ops.rope_store_attend, joined, *step_of_layer)) * 1e3,
        "expanded, us": machine.time_ms(expanded) * 1e3,
    }


def _float8_products(machine: Machine, out: int, depth: int, states: Tensor) -> Row:
    """Weights and inputs in float8, by scales of rows and of groups: the quantisation of the inputs
    and the product, and the first alone."""
    from ...workers.ops.cuda.float8 import quantise

    row: Row = {}
    for group, name in ((0, "rows"), (128, "groups")):
        weight = float8_weight((out, depth), torch.bfloat16, group, machine.device)
        product = float8_products(machine).pack(weight, None)
        if product is not None:
            inputs = states.bfloat16()
            run = partial(quantise, inputs, product.group)
            row[f"float8 inputs by {name}, us"] = machine.captured_us(partial(product, inputs))
            row[f"of these to quantise by {name}, us"] = machine.captured_us(run)
    return row


def products(machine: Machine, out: int, depth: int, rows: int) -> Row:
    """One product of a layer by every kind of weight."""
    from ...workers.ops.cuda.linear import TiledProduct

    states = machine.random(rows, depth) * depth**0.5
    plain = machine.random(out, depth)
    row: Row = {"bf16, us": machine.captured_us(partial(linear, states, plain))}
    row |= _float8_products(machine, out, depth, states)
    for kind in ("fp8", "int4"):
        weight = weight_of(kind, (out, depth), machine.dtype, 128).to(machine.device)
        run = TiledProduct(weight, None, machine.num_processors, fixed_rows=False)
        row[f"{kind}, us"] = machine.captured_us(partial(run, states))
    num_bytes = plain.numel() * plain.element_size()
    row["bf16 of the copy's bandwidth"] = (
        num_bytes / machine.copied_bytes_per_s / row["bf16, us"] * 1e6
    )
    return row


def draws(machine: Machine, rows: int) -> Row:
    """Draws from rows of a vocabulary: by temperature alone, and with every kind of cut."""
    vocab, device = machine.size.vocab, machine.device
    logits = torch.randn(rows, vocab, device=device) * 3
    positions = torch.arange(rows, device=device, dtype=torch.int32)
    seeds, ones = positions.long(), torch.ones(rows, device=device)

    def settings(heat: float, top_k: int, top_p: float, min_p: float) -> DeviceSettings:
        return DeviceSettings(
            seeds, ones * heat, torch.full_like(positions, top_k), ones * top_p, ones * min_p
        )

    plain = settings(0.6, 0, 1.0, 0.0)
    argmax = partial(machine.ops.gumbel_argmax_on_device, logits, positions, plain, 0)
    row: Row = {"temperature, us": machine.captured_us(argmax)}
    for name, limits in LIMITS.items():
        draw = partial(machine.ops.draw_on_device, logits, positions, settings(*limits))
        row[f"{name}, us"] = machine.captured_us(draw)
    return row


def cases(machine: Machine) -> Iterator[Case]:
    """The part `timings` of the proof; what matters most comes first."""
    size, is_dry = machine.size, machine.is_dry
    for rows in (1,) if is_dry else (1, 5, 64, 320):
        yield f"draws of {rows} rows", partial(draws, machine, rows)
    for batch in (1, 2) if is_dry else (1, 8, 64):
        contexts = ("skewed",) if is_dry else ("1k", "32k", "skewed")[: 2 if batch == 1 else 3]
        for name in contexts:
            for num_nodes in (7,) if is_dry else (0, 7, 32):
                title = f"attention, {1 + num_nodes} tokens x {batch}, context {name}"
                yield title, partial(attention, machine, num_nodes, batch, name)
    for context, rows in ((20, 70),) if is_dry else ((0, 2048), (16384, 2048), (16384, 256)):
        yield f"prompt, {rows} rows behind {context}", partial(prompts, machine, context, rows)
        rows = 5 if is_dry else rows
        title = f"prompt over latents, {rows} rows behind {context}"
        yield title, partial(prompts_over_latents, machine, context, rows)
    joined = (size.num_heads + 2 * size.num_kv_heads) * size.head_dim
    shapes = ((joined, size.hidden), (2 * size.inner, size.hidden), (size.hidden, size.inner))
    for out, depth in shapes:
        for rows in (1,) if is_dry else (1, 8, 64, 320):
            title = f"product {out} x {depth}, {rows} rows"
            yield title, partial(products, machine, out, depth, rows)
