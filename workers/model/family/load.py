"""From the bridge's loaded modules to the family's packed weights, layer by layer.

Every layer's tensors are joined, packed, and then dropped from the bridge's module, so that no
more than one layer is in memory twice. Which heads a rank has, and what its attention is called
with, comes from a forward of the bridge (`AttentionFacts`); which blocks end in a sum over the
ranks comes from the bridge's shard plan. Called by `workers/model/target.py`, and for layers of
heads by `workers/head_family.py`.

Facts relied on (transformers 5.23): the names of the modules' children and of their attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...collective import Collective
from ...ops import Ops
from ...ops.protocol import AttentionSpec, Projection
from ..facts import AttentionFacts
from ..parallel import ShardedOutput
from ..sharding import ShardPlan
from .builder import Builder, halves, joined_weight
from .decoder import AttentionBlock, FamilyModel, Layer
from .latent import build_latent
from .mlp import build_mlp
from .rope import Rope, read_ropes
from .spec import FamilySpec, Placement


def build_family(
    model: Any,
    spec: FamilySpec,
    facts: Sequence[AttentionFacts],  # per layer
    ops: Ops,
    plan: ShardPlan,
    collective: Collective,
) -> FamilyModel:
    """The family's model; the bridge's `model` loses its layers.

    Raises:
        AttributeError, ValueError: the modules are not those that `spec` describes.
    """
    base = getattr(model, model.base_model_prefix, None) or model.model
    prefix = next(name for name, module in model.named_modules() if module is base)
    builder = Builder(spec, ops, plan, collective)
    layers, ropes = build_layers(builder, base, prefix, facts)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    norm, whole = builder.norm(base.norm), output.forward
    shard = whole if isinstance(whole, ShardedOutput) else None
    return FamilyModel(ops, spec, layers, ropes, norm, embedding, output, shard)


def build_layers(
    builder: Builder,
    base: Any,
    prefix: str,
    facts: Sequence[AttentionFacts],  # per layer
) -> tuple[list[Layer], tuple[Rope, ...]]:
    """The layers of transformers' model `base`, named `prefix`, which loses them; raises alike."""
    spec = builder.spec
    ropes = read_ropes(base.rotary_emb, spec.rope_kinds)
    kinds = list(ropes)
    names = {id(module): name for name, module in base.named_modules()}
    layers = []
    for index, module in enumerate(base.layers):
        name = f"{prefix}.{names[id(module)]}"
        kind = spec.rope_kinds[index] if spec.rope_kinds else ""
        rotated = spec.rotated is None or spec.rotated[index]
        attention = build_attention(
            builder,
            module.self_attn,
            f"{name}.self_attn",
            facts[index],
            (kinds.index(kind), ropes[kind]) if rotated else None,
        )
        layers.append(_layer(builder, module, name, attention))
        base.layers[index] = nn.Identity()
    return layers, tuple(ropes.values())


def _layer(builder: Builder, module: Any, name: str, attention: AttentionBlock) -> Layer:
    leaf = "feed_forward" if hasattr(module, "feed_forward") else "mlp"
    mlp = build_mlp(builder, getattr(module, leaf), f"{name}.{leaf}")
    placement, norm = builder.spec.placement, builder.norm
    if placement is Placement.AFTER:
        return Layer(
            None,
            attention,
            norm(module.post_attention_layernorm),
            None,
            mlp,
            norm(module.post_feedforward_layernorm),
        )
    before = norm(module.input_layernorm)
    if placement is Placement.BEFORE:
        return Layer(before, attention, None, norm(module.post_attention_layernorm), mlp, None)
    return Layer(
        before,
        attention,
        norm(module.post_attention_layernorm),
        norm(module.pre_feedforward_layernorm),
        mlp,
        norm(module.post_feedforward_layernorm),
    )


def build_attention(
    builder: Builder,
    module: Any,
    name: str,
    facts: AttentionFacts,
    rope: tuple[int, Rope] | None,
) -> AttentionBlock:
    """One layer's attention block."""
    rotary_dim = 0 if rope is None else rope[1].rotary_dim
    latent = hasattr(module, "kv_b_proj")
    spec = AttentionSpec(
        facts.num_heads,
        facts.num_kv_heads,
        facts.head_dim,
        facts.value_dim,
        facts.scale,
        rotary_begin=facts.head_dim - rotary_dim if latent else 0,
        rotary_dim=rotary_dim,
        window=facts.window,
        chunk=facts.chunk,
        softcap=facts.softcap,
        sinks=None if facts.sinks is None else facts.sinks.detach().float().clone(),
    )
    joined: Projection
    output = builder.pack(module.o_proj)
    gate: Projection | None = None
    if latent:
        spec, joined, output = build_latent(builder, module, spec, output)
    else:
        spec = _with_norms(builder, module, spec)
        joined, gate = _pack_joined(builder, module, spec)
    return AttentionBlock(
        joined,
        output,
        builder.reduce(f"{name}.o_proj"),
        spec,
        None if rope is None else rope[0],
        rope is None and builder.spec.temperature is not None,
        gate,
    )


def _with_norms(builder: Builder, module: Any, spec: AttentionSpec) -> AttentionSpec:
    unit = getattr(module, "qk_norm", None)  # Llama-4's: without weights
    if unit is not None:
        norm = builder.norm(unit)
        return replace(spec, query_norm=norm, key_norm=norm, norms_after_rotation=True)
    query_norm = builder.norm_or_none(module, "q_norm")
    if query_norm is None or query_norm.weight is None:
        return spec
    return replace(
        spec,
        query_norm=query_norm,
        key_norm=builder.norm_or_none(module, "k_norm"),
        norms_all_heads=query_norm.weight.numel() != spec.head_dim,
    )


def _pack_joined(
    builder: Builder, module: Any, spec: AttentionSpec
) -> tuple[Projection, Projection | None]:
    """The joined product, and the gate of what attention returns if there is one."""
    fused = getattr(module, "qkv_proj", None)
    linears = (module.q_proj, module.k_proj, module.v_proj) if fused is None else (fused,)
    weight, bias = joined_weight(linears)
    gate: Projection | None = None
    if builder.spec.gated_attention:
        rows = torch.arange(weight.shape[0])
        pairs = rows[: 2 * spec.key_begin].view(spec.num_heads, 2, spec.head_dim)
        gate = builder.ops.pack(*_selected(weight, bias, pairs[:, 1].flatten()))
        kept = torch.cat([pairs[:, 0].flatten(), rows[2 * spec.key_begin :]])
        weight, bias = _selected(weight, bias, kept)
    if builder.spec.neighbours and spec.rotary_dim:
        weight, bias = _selected(weight, bias, _joined_order(spec))
    if weight.shape[0] != spec.joined_width:
        raise ValueError(f"{weight.shape[0]} joined rows, expected {spec.joined_width}")
    return builder.ops.pack(weight, bias), gate


def _selected(
    weight: Tensor,  # [num_rows, in_features]
    bias: Tensor | None,  # [num_rows]
    rows: Tensor,
) -> tuple[Tensor, Tensor | None]:
    rows = rows.to(weight.device)
    return weight.index_select(0, rows), None if bias is None else bias.index_select(0, rows)


def _joined_order(spec: AttentionSpec) -> Tensor:  # [spec.joined_width]
    """Rows of a joined weight, with those that turn together half a rotation apart."""
    rows = torch.arange(spec.joined_width)
    turned, kept = rows[: spec.value_begin], rows[spec.value_begin :]
    heads = turned.view(-1, spec.head_dim)
    return torch.cat([halves(heads, spec.rotary_begin, spec.rotary_dim).flatten(), kept])
