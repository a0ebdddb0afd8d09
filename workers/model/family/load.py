"""Converts the bridge's loaded modules to the family's packed weights, layer by layer.

Every layer's tensors are joined, packed, and then dropped from the bridge's module, so that no
more than one layer is in memory twice. A forward of the bridge shows which heads a rank has and the
arguments of its attention. The bridge's shard plan shows which blocks end in a sum over ranks.

Layers that are not one mixer followed by an MLP have their blocks here too: a single block
(Nemotron-H), and attention beside a state (Falcon-H1). Nemotron-H's MLPs and experts have no gates:
their activation is the squared ReLU. Falcon-H1 multiplies the outputs of its products by constants
of its configuration, as transformers does; the weights are unchanged, quantised or adapted.

Facts relied on (transformers 5.23): the names of the modules' children and of their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from ...collective import Collective
from ...ops import Ops
from ...ops.protocol import AttentionSpec, Projection, Router
from ..info import Range
from ..sharding import ShardedOutput, ShardPlan, own_choices
from .adapted import Adapters, without_adapters
from .decoder import (
    AttentionBlock,
    Builder,
    FamilyModel,
    GatedUnit,
    Layer,
    MixtureBlock,
    PromptAttention,
    Reduce,
    Rope,
    StateBlock,
    StepContext,
    as_is,
    build_mlp,
    build_shared,
    halves,
    joined_weight,
    read_ropes,
)
from .latent import build_latent, selected
from .recurrent import MambaBlock, build_delta, build_mamba
from .spec import FamilySpec, Placement


def build_family(
    model: Any,
    spec: FamilySpec,
    observed: Sequence[AttentionSpec],  # per layer that is here
    ops: Ops,
    plan: ShardPlan,
    collective: Collective,
    adapters: Adapters | None = None,
) -> FamilyModel:
    """Builds the family's model; the bridge's `model` loses its layers.

    Raises:
        AttributeError, ValueError: the modules are not those that `spec` describes.
    """
    base = getattr(model, model.base_model_prefix, None) or model.model
    prefix = next(name for name, module in model.named_modules() if module is base)
    builder = Builder(spec, ops, plan, collective, adapters)
    rotary = getattr(base, "rotary_emb", None)  # None: no rotation
    ropes = {} if rotary is None else read_ropes(rotary, spec.rope_kinds)
    adapted = layers = build_layers(builder, base, f"{prefix}.", observed, ropes)
    if adapters is not None:
        adapters.finish()
        layers = [without_adapters(each) for each in adapted]
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    last = next(child for key in _LAST if (child := getattr(base, key, None)) is not None)
    norm, whole = builder.norm(last), output.forward
    shard = whole if isinstance(whole, ShardedOutput) else None
    unembed = getattr(output.forward, "project", output)  # rows are flat: no wrapper
    ends = (embedding, unembed, shard)
    return FamilyModel(ops, spec, layers, tuple(ropes.values()), norm, *ends, adapters, adapted)


def build_layers(
    builder: Builder,
    base: Any,
    prefix: str,
    observed: Sequence[AttentionSpec],  # per layer that is here
    ropes: dict[str, Rope],  # by kind
) -> list[Layer]:
    """Builds the layers of `base`, which loses them; layers of other stages are skipped.

    Raises as `build_family` does.

    Args:
        prefix: prefix of the names of `base`'s modules in the shard plan.
    """
    spec, kinds = builder.spec, list(ropes)
    names = {id(module): name for name, module in base.named_modules()}
    layers: list[Layer] = []
    for index, module in enumerate(base.layers):
        if getattr(module, "is_elsewhere", False):
            continue
        name = f"{prefix}{names[id(module)]}"
        kind = spec.rope_kinds[index] if spec.rope_kinds else ""
        rotated = spec.rotated is None or spec.rotated[index]
        rope = (kinds.index(kind), ropes[kind]) if rotated else None
        seen = observed[len(layers)]
        if hasattr(module, "mixer"):
            attend = partial(build_attention, builder, observed=seen, rope=rope)
            layers.append(build_alone(builder, module, name, attend))
        elif (state := _state_block(builder, module, name)) is not None:
            layers.append(_layer(builder, module, name, state))
        else:
            attention = build_attention(builder, module.self_attn, f"{name}.self_attn", seen, rope)
            layers.append(_layer(builder, module, name, attention))
        base.layers[index] = nn.Identity()
    return layers


def _state_block(builder: Builder, module: Any, name: str) -> StateBlock | None:
    """Returns the block that replaces attention in the layer, if there is one."""
    if (mixer := getattr(module, "linear_attn", None)) is not None:
        return build_delta(builder, mixer, f"{name}.linear_attn")
    mixer = getattr(module, "mamba", None)
    if mixer is None or getattr(module, "self_attn", None) is not None:
        return None
    return build_mamba(builder, mixer)


_LAST = ("norm", "final_layernorm", "norm_f")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_NORMS: dict[Placement, tuple[str | None, ...]] = {
    Placement.BEFORE: ("input_layernorm", None, "post_attention_layernorm", None),
    Placement.AFTER: (None, _AFTER[0], None, _AFTER[1]),
    Placement.AROUND: ("input_layernorm", _AFTER[0], "pre_feedforward_layernorm", _AFTER[1]),
}
"""Names of the norms before and after attention, and before and after the MLP."""


def _layer(
    builder: Builder, module: Any, name: str, attention: AttentionBlock | StateBlock
) -> Layer:
    mlp: GatedUnit | MixtureBlock
    if hasattr(module, "shared_mlp"):
        mlp = build_shared(builder, module, name)
    else:
        leaf = "feed_forward" if hasattr(module, "feed_forward") else "mlp"
        mlp = build_mlp(builder, getattr(module, leaf), f"{name}.{leaf}")
    norms = [
        None if each is None else builder.norm_or_none(module, each)
        for each in _NORMS[builder.spec.placement]
    ]
    before_mlp = norms[2] or builder.norm_or_none(module, "pre_ff_layernorm")
    is_beside = getattr(module, "mamba", None) is not None
    if is_beside and isinstance(attention, AttentionBlock):
        assert isinstance(mlp, GatedUnit), name
        attention, mlp = build_beside(builder, module, attention, mlp)
    return Layer(norms[0], attention, norms[1], before_mlp, mlp, norms[3])


def build_attention(
    builder: Builder, module: Any, name: str, observed: AttentionSpec, rope: tuple[int, Rope] | None
) -> AttentionBlock:
    """Builds one layer's attention block."""
    rotary_dim = 0 if rope is None else rope[1].rotary_dim
    latent = hasattr(module, "kv_b_proj")
    spec = replace(
        observed,
        rotary_begin=observed.head_dim - rotary_dim if latent else 0,
        rotary_dim=rotary_dim,
    )
    joined: Projection
    output = builder.pack(module.o_proj)
    gate: Projection | None = None
    prompts: PromptAttention | None = None
    if latent:
        spec, joined, output, prompts = build_latent(builder, module, spec, output)
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
        prompts=prompts,
    )


def _with_norms(builder: Builder, module: Any, spec: AttentionSpec) -> AttentionSpec:
    unit = getattr(module, "qk_norm", None)  # Llama-4's has no weights
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
    """Packs the joined product, and the gate of attention's output if there is one."""
    fused = getattr(module, "qkv_proj", None)
    linears = (module.q_proj, module.k_proj, module.v_proj) if fused is None else (fused,)
    weight, bias = joined_weight(linears)

    def product(rows: Tensor | None) -> Projection:
        parts = (weight, bias) if rows is None else selected(weight, bias, rows)
        return builder.adapted(builder.ops.pack(*parts), linears, rows)

    rows: Tensor | None = None  # None: all, in order
    gate: Projection | None = None
    if builder.spec.gated_attention:
        every = torch.arange(weight.shape[0])
        pairs = every[: 2 * spec.key_begin].view(spec.num_heads, 2, spec.head_dim)
        gate = product(pairs[:, 1].flatten())
        rows = torch.cat([pairs[:, 0].flatten(), every[2 * spec.key_begin :]])
    num_rows = weight.shape[0] if rows is None else len(rows)
    if num_rows != spec.joined_width:
        raise ValueError(f"{num_rows} joined rows, expected {spec.joined_width}")
    if builder.spec.neighbours and spec.rotary_dim:
        order = _joined_order(spec)
        rows = order if rows is None else rows[order]
    return product(rows), gate


def _joined_order(spec: AttentionSpec) -> Tensor:  # [spec.joined_width]
    """Returns rows of a joined weight in an order where rotated pairs are half a rotation apart."""
    rows = torch.arange(spec.joined_width)
    turned, kept = rows[: spec.value_begin], rows[spec.value_begin :]
    heads = turned.view(-1, spec.head_dim)
    return torch.cat([halves(heads, spec.rotary_begin, spec.rotary_dim).flatten(), kept])


# -- layers of one block


@dataclass(frozen=True, slots=True, eq=False)
class AloneBlock:
    """An MLP or a mixture in place of attention; it keeps nothing per sequence."""

    block: Callable[[Tensor], Tensor]
    state: None = None

    def __call__(
        self, states: Tensor, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size], alike
        return self.block(states)


def nothing(states: Tensor) -> None:
    """Stands in for a missing second block: there is no update."""


def build_alone(
    builder: Builder, module: Any, name: str, attention: Callable[[Any, str], AttentionBlock]
) -> Layer:
    """Builds the layer of Nemotron-H's `module`; `attention` builds attention mixers."""
    mixer, path = module.mixer, f"{name}.mixer"
    block: AttentionBlock | MambaBlock | AloneBlock
    if hasattr(mixer, "A_log"):
        block = build_mamba(builder, mixer)
    elif hasattr(mixer, "o_proj"):
        block = attention(mixer, path)
    elif hasattr(mixer, "experts"):
        block = AloneBlock(_mixture(builder, mixer, path))
    else:
        block = AloneBlock(_squared(builder, mixer, builder.reduce(f"{path}.down_proj")))
    return Layer(builder.norm(module.norm), block, None, None, nothing, None)


@dataclass(frozen=True, slots=True, eq=False)
class SquaredUnit:
    """`down(relu(up) ** 2)`."""

    up: Projection
    down: Projection
    reduce: Reduce

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, in], alike
        return self.reduce(self.down(relu(self.up(states)).square()))


def _squared(builder: Builder, module: Any, reduce: Reduce) -> SquaredUnit:
    return SquaredUnit(builder.pack(module.up_proj), builder.pack(module.down_proj), reduce)


@dataclass(frozen=True, slots=True, eq=False)
class SquaredMixture:
    """Routed experts without gates, and a shared one.

    It runs one product per chosen expert; the host reads which rows these are.
    """

    ops: Ops
    router: Router
    logits: Projection  # in float32
    inner: Projection | None  # to the experts' width if it differs
    experts: Sequence[SquaredUnit]
    outer: Projection | None  # back to hidden_size
    shared: SquaredUnit
    reduce: Reduce
    own: Range | None = None  # numbers of the experts; None: all

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, hidden_size], alike
        chosen, scores = self.ops.route(self.logits(states.float()), self.router)
        if self.own is not None:
            chosen = own_choices(chosen, self.own)
        inputs = states if self.inner is None else self.inner(states)
        out = torch.zeros_like(inputs, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            if expert < 0:  # another rank's expert
                continue
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            update = self.experts[expert](inputs.index_select(0, rows)).float()
            out.index_add_(0, rows, update * scores[rows, places].float()[:, None])
        routed = out.to(states.dtype)
        routed = routed if self.outer is None else self.outer(routed)
        return self.reduce(routed + self.shared(states))


def _mixture(builder: Builder, module: Any, name: str) -> SquaredMixture:
    assert builder.spec.router is not None, "read with the configuration"
    gate, experts, pack = module.gate, module.experts, builder.ops.pack
    correction = gate.e_score_correction_bias.detach().float().clone()
    pairs = zip(experts.up_proj.detach(), experts.down_proj.detach(), strict=True)
    units = [SquaredUnit(pack(up, None), pack(down, None), as_is) for up, down in pairs]
    experts._parameters.clear()
    is_narrow = isinstance(module.fc1_latent_proj, torch.nn.Linear)
    return SquaredMixture(
        builder.ops,
        replace(builder.spec.router, correction=correction),
        pack(gate.weight.detach().float(), None),
        builder.pack(module.fc1_latent_proj) if is_narrow else None,
        units,
        builder.pack(module.fc2_latent_proj) if is_narrow else None,
        _squared(builder, module.shared_experts, as_is),
        builder.reduce(f"{name}.experts"),
        builder.own_experts(f"{name}.experts"),
    )


# -- attention beside a state


@dataclass(frozen=True, slots=True, eq=False)
class ScaledProjection:
    """A product whose outputs are multiplied by constants."""

    plain: Projection
    factors: Tensor  # [out_features], or one for all outputs

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, in] -> [num_tokens, out]
        return self.plain(states) * self.factors


def build_beside(
    builder: Builder, module: Any, attention: AttentionBlock, mlp: GatedUnit
) -> tuple[AttentionBlock, GatedUnit]:
    """Builds Falcon-H1's attention with the state beside it, and the MLP, both scaled."""
    dtype = module.mamba.in_proj.weight.dtype

    def scaled(product: Projection, factors: Tensor | float) -> Projection:
        return ScaledProjection(product, torch.as_tensor(factors, dtype=dtype))

    own, spec = module.mamba, attention.spec
    state = build_mamba(builder, own)
    inner = own.mup_vector.flatten().float() * own.ssm_in_multiplier
    width, size = own.intermediate_size, own.n_groups * own.ssm_state_size
    gate, values, keys, reads, steps = inner.split([width, width, size, size, own.num_heads])
    order = torch.cat([reads, keys, values, gate, steps])
    state = replace(
        state,
        joined=scaled(state.joined, order.to(dtype)),
        output=scaled(state.output, module.ssm_out_multiplier),
    )
    columns = torch.full((spec.joined_width,), float(module.attention_in_multiplier))
    columns[spec.key_begin : spec.value_begin] *= module.self_attn.key_multiplier
    attention = replace(
        attention,
        joined=scaled(attention.joined, columns.to(own.mup_vector.device)),
        output=scaled(attention.output, module.attn_out_multiplier),
        beside=state,
        state=state.state,
    )
    gates, out = module.feed_forward.gate_multiplier, module.feed_forward.down_multiplier
    half = module.feed_forward.gate_proj.weight.shape[0]
    columns = own.mup_vector.new_ones(2 * half)
    columns[:half] = gates
    return attention, replace(mlp, gate_up=scaled(mlp.gate_up, columns), down=scaled(mlp.down, out))
