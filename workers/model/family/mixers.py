"""Layers that are not one mixer and then an MLP: one block alone (Nemotron-H), and attention
beside a state (Falcon-H1).

Nemotron-H's MLPs and experts have no gates: their activation is the square of what is positive.
Falcon-H1 multiplies what its products return by constants of its configuration, as transformers
does: the weights stay as they are, quantised or adapted.

Facts relied on (transformers 5.23): the names of the modules' children and of their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

from ...ops import Ops
from ...ops.protocol import Projection, Router
from .decoder import AttentionBlock, Builder, GatedUnit, Layer, Reduce, StepContext, as_is
from .recurrent import MambaBlock, build_mamba

# -- one block alone


@dataclass(frozen=True, slots=True, eq=False)
class AloneBlock:
    """An MLP or a mixture in the place of attention: it keeps nothing of a sequence."""

    block: Callable[[Tensor], Tensor]
    state: None = None

    def __call__(
        self, states: Tensor, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size], alike
        return self.block(states)


def nothing(states: Tensor) -> None:
    """In the place of a second block: there is no update."""


def build_alone(
    builder: Builder,
    module: Any,
    name: str,
    attention: Callable[[Any, str], AttentionBlock],
) -> Layer:
    """The layer of Nemotron-H's `module`; `attention` makes the block of a mixer with attention."""
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
    """Routed experts without gates, beside a shared one; a product for each chosen expert, whose
    rows the host looks up."""

    ops: Ops
    router: Router
    logits: Projection  # in float32
    inner: Projection | None  # to the experts' width, where that is another
    experts: Sequence[SquaredUnit]
    outer: Projection | None  # back from it
    shared: SquaredUnit
    reduce: Reduce

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, hidden_size], alike
        chosen, scores = self.ops.route(self.logits(states.float()), self.router)
        inputs = states if self.inner is None else self.inner(states)
        out = torch.zeros_like(inputs, dtype=torch.float32)
        for expert in chosen.unique().tolist():
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
    )


# -- attention beside a state


@dataclass(frozen=True, slots=True, eq=False)
class ScaledProjection:
    """A product whose outputs are multiplied by constants."""

    plain: Projection
    factors: Tensor  # [out_features], or one for all

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, in] -> [num_tokens, out]
        return self.plain(states) * self.factors


def build_beside(
    builder: Builder, module: Any, attention: AttentionBlock, mlp: GatedUnit
) -> tuple[AttentionBlock, GatedUnit]:
    """Attention with the state of Falcon-H1's `module` beside it, and the MLP, both scaled."""
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
