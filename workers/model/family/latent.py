"""Attention over latents (DeepSeek's MLA, arXiv:2405.04434, section 2.1), kept in one of two forms.

Absorbed: the cache has a token's latent and the rotated part of its key, once for all heads. The
weights that would expand latents to keys are applied to the queries, and those that would expand
them to values are applied to attention's output; both are products per head. Expanded: the cache
has one key and one value per query head, with the rotated part copied to each. The operations
decide (`Ops.max_latent_heads`); the bridge, which every load is compared with, expands. Over a
cache of latents, steps of many rows may expand them as well (`Ops.expands_latents`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...ops import Ops, PagedStep
from ...ops.protocol import (
    AttentionSpec,
    HeadProjection,
    LatentHeads,
    Norm,
    Projection,
    Rotation,
)
from .decoder import Builder, PromptAttention, StepContext, halves, joined_weight


@dataclass(frozen=True, slots=True, eq=False)
class _Compressed:
    """Projects the layer's input to queries, latents and rotated parts of keys."""

    ops: Ops
    compress: Projection  # to query (or its latent), key and value latent, rotated part of keys
    widths: tuple[int, int, int]
    query_norm: Norm | None  # None: queries are not compressed
    expand_query: Projection | None
    latent_norm: Norm

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # each [num_tokens, ...]
        query, latent, turned = self.compress(states).split(self.widths, dim=1)
        if self.query_norm is not None and self.expand_query is not None:
            query = self.expand_query(self.ops.norm(query, self.query_norm))
        return query, self.ops.norm(latent, self.latent_norm), turned


@dataclass(frozen=True, slots=True, eq=False)
class _Absorbed:
    """Projects the layer's input to joined rows of queries and one key."""

    compressed: _Compressed
    absorb: HeadProjection  # from the unrotated part of a query to the width of a latent
    num_heads: int
    plain_dim: int  # unrotated dimensions of a query

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, spec.joined_width]
        query, latent, turned = self.compressed(states)
        heads = query.unflatten(1, (self.num_heads, -1))
        absorbed = self.absorb(heads[..., : self.plain_dim])
        queries = torch.cat([absorbed, heads[..., self.plain_dim :]], dim=2)
        return torch.cat([queries.flatten(1), latent, turned], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class _FromLatents:
    """Projects weighted latents per head to the layer's output."""

    expand: HeadProjection
    output: Projection
    num_heads: int

    def __call__(self, latents: Tensor) -> Tensor:  # [num_tokens, ...] -> [num_tokens, hidden_size]
        values = self.expand(latents.unflatten(1, (self.num_heads, -1)))
        return self.output(values.flatten(1))


@dataclass(frozen=True, slots=True, eq=False)
class _Expanded:
    """Projects the layer's input to joined rows with one key and one value per query head."""

    compressed: _Compressed
    spec: AttentionSpec
    expand: Projection  # to the unrotated parts of all heads' keys, then all heads' values

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, spec.joined_width]
        spec = self.spec
        query, latent, turned = self.compressed(states)
        expanded = self.expand(latent)
        width = spec.num_kv_heads * spec.rotary_begin
        plain = expanded[:, :width].unflatten(1, (spec.num_kv_heads, spec.rotary_begin))
        shared = turned[:, None].expand(-1, spec.num_kv_heads, -1)
        keys = torch.cat([plain, shared], dim=2).flatten(1)
        return torch.cat([query, keys, expanded[:, width:]], dim=1)


_MOST_HEADS = 8  # expanded at a time
_MOST_BYTES = 512 << 20  # of the expanded keys and values


@dataclass(frozen=True, slots=True, eq=False)
class _Expanding:
    """Computes the layer over cached latents, which are expanded in the step that reads them.

    A pair of query and key costs less with expanded heads than with latents (about 3.4 times in
    DeepSeek's models), but every latent of a context costs an expansion. So long chunks of prompts,
    and all chunks without context, take fewer multiplications this way. Heads are independent, so
    some are expanded at a time.
    """

    compressed: _Compressed
    latents: AttentionSpec
    heads: LatentHeads
    output: Projection

    @property
    def spec(self) -> AttentionSpec:
        return self.heads.spec

    def takes(self, plan: PagedStep) -> bool:
        if plan.host is None:
            return False
        each, width = self.spec, self.latents.value_dim
        sizes = (_Expanding, each.head_dim, each.value_dim, each.num_heads, width)
        if sizes not in plan.derived:
            contexts, rows = (lens.astype(int) for lens in (plan.host.context_lens,
                                                            plan.host.query_lens))  # fmt: skip
            pairs = int((rows * contexts + rows * (rows + 1) // 2).sum())
            saved = self.latents.head_dim + width - each.head_dim - each.value_dim
            expansion = width * (each.rotary_begin + each.value_dim)
            num_keys = int((contexts + rows + plan.block_size - 1).sum())
            num_bytes = num_keys * each.num_heads * (each.head_dim + each.value_dim)
            num_bytes *= self.heads.keys.element_size()
            is_less = pairs * saved > int(contexts.sum()) * expansion
            plan.derived[sizes] = is_less and num_bytes <= _MOST_BYTES
        return bool(plan.derived[sizes])

    def __call__(
        self, states: Tensor, rotation: Rotation | None, temperature: Tensor | None,
        step: StepContext, layer: int,
    ) -> Tensor:  # fmt: skip
        query, latent, turned = self.compressed(states)
        heads = query.unflatten(1, (len(self.heads.keys), -1))
        values = self.compressed.ops.expand_attend(
            heads, torch.cat([latent, turned], dim=1), rotation, temperature, step.plan, step.cache,
            layer, self.latents, self.heads,
        )  # fmt: skip
        return self.output(values)


def build_latent(
    builder: Builder,
    module: Any,
    spec: AttentionSpec,  # of expanded heads
    output: Projection,  # of all heads' values
) -> tuple[AttentionSpec, Projection, Projection, PromptAttention | None]:
    """Builds the attention of transformers' `module` for the operations.

    Returns the spec, the products before and after attention, and the alternative for prompts.
    """
    ops, begin = builder.ops, spec.rotary_begin
    compressed = _compressed(builder, module, spec)
    expand = module.kv_b_proj.weight.detach().unflatten(0, (spec.num_kv_heads, -1))
    to_keys, to_values = expand[:, :begin], expand[:, begin:]  # [num_heads, ..., latent]
    if spec.num_heads != spec.num_kv_heads or spec.num_heads > ops.max_latent_heads:
        joined = torch.cat([to_keys.flatten(0, 1), to_values.flatten(0, 1)])
        return spec, _Expanded(compressed, spec, ops.pack(joined, None)), output, None
    latent_width = compressed.widths[1]
    absorbed = replace(
        spec,
        num_kv_heads=1,
        head_dim=latent_width + spec.rotary_dim,
        value_dim=latent_width,
        rotary_begin=latent_width,
        shared_values=True,
    )
    # In the layout of `pack_heads`, so that both ways share memory.
    keys, values = to_keys.contiguous(), to_values.transpose(1, 2).contiguous()
    prompts: PromptAttention | None = None
    if ops.expands_latents and spec.sinks is None:
        most = min(_MOST_HEADS, spec.num_heads)
        count = next(each for each in range(most, 0, -1) if spec.num_heads % each == 0)
        each = replace(spec, num_heads=count, num_kv_heads=count, is_prepared=True)
        prompts = _Expanding(compressed, absorbed, LatentHeads(keys, values, each), output)
    return (
        absorbed,
        _Absorbed(compressed, ops.pack_heads(keys.transpose(1, 2)), spec.num_heads, begin),
        _FromLatents(ops.pack_heads(values.transpose(1, 2)), output, spec.num_heads),
        prompts,
    )


def _compressed(builder: Builder, module: Any, spec: AttentionSpec) -> _Compressed:
    neighbours, begin, dim = builder.spec.neighbours, spec.rotary_begin, spec.rotary_dim

    def ordered(weight: Tensor, head_dim: int, first: int) -> Tensor:
        if not neighbours:
            return weight
        rows = torch.arange(weight.shape[0]).view(-1, head_dim)
        return weight.index_select(0, halves(rows, first, dim).flatten().to(weight.device))

    own = getattr(module, "q_a_proj", None)
    source = module.q_proj if own is None else own
    weight, bias = joined_weight((source, module.kv_a_proj_with_mqa))
    query_width = source.weight.shape[0]
    latent_width = weight.shape[0] - query_width - dim
    rows = torch.arange(weight.shape[0])
    if neighbours:
        last = rows[-dim:]
        rows = torch.cat([rows[:-dim], last[0::2], last[1::2]])
        if own is None:
            heads = halves(rows[:query_width].view(-1, spec.head_dim), begin, dim)
            rows = torch.cat([heads.flatten(), rows[query_width:]])
        weight, bias = selected(weight, bias, rows)
    expand_query = None
    if own is not None:
        expand_query = builder.ops.pack(
            ordered(module.q_b_proj.weight.detach(), spec.head_dim, begin), None
        )
    return _Compressed(
        builder.ops,
        builder.ops.pack(weight, bias),
        (query_width, latent_width, dim),
        None if own is None else builder.norm(module.q_a_layernorm),
        expand_query,
        builder.norm(module.kv_a_layernorm),
    )


def selected(
    weight: Tensor,  # [num_rows, in_features]
    bias: Tensor | None,  # [num_rows]
    rows: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Returns some rows of a weight and its bias."""
    rows = rows.to(weight.device)
    return weight.index_select(0, rows), None if bias is None else bias.index_select(0, rows)
