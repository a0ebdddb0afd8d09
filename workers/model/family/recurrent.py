"""Layers with a state in place of keys and values: gated delta layers (Qwen3-Next and later), and
Mamba-2's (Granite 4, Bamba, Nemotron-H, Falcon-H1).

A product returns queries, keys and values, which a short convolution mixes with the previous
tokens, the gate of the output, and each head's decay and strength; in Mamba-2, both depend on one
step size. `workers/states.py` determines which rows a row continues and where states are;
`workers/ops/recurrent.py` has the arithmetic.

Facts relied on (transformers 5.23): the names of the modules' children, and the order of their
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ...ops import Ops
from ...ops.protocol import Norm, Projection
from ...ops.recurrent import Recurrence, convolve, recur
from ...states import LayerStates, RecurrentStep, StateShape
from .decoder import Builder, Reduce, StepContext, elementwise
from .latent import selected


@dataclass(frozen=True, slots=True, eq=False)
class _Advance:
    """Convolution and recurrence of a step."""

    ops: Ops
    rule: Recurrence
    conv: Tensor  # [kernel, conv_dim] float32
    bias: Tensor | None  # [conv_dim] float32

    def __call__(
        self,
        mixed: Tensor,  # [num_tokens, conv_dim]
        rates: Tensor,  # [num_tokens, 2, num_value_heads] float32
        taken: RecurrentStep,
        held: LayerStates,
    ) -> tuple[Tensor, Tensor]:  # [num_tokens, conv_dim], [num_tokens, num_value_heads, value_dim]
        """Returns the convolution's output of the step's rows, and what they read; both float32."""
        nodes = held.nodes.index_select(0, taken.pending)
        tails = held.tails.index_select(0, taken.sources) * taken.has_source
        buffer = torch.cat([tails.flatten(0, 1), nodes, mixed])
        all_rates = torch.cat([held.node_rates.index_select(0, taken.pending), rates])
        total = convolve(buffer, taken.history, self.conv, self.bias)
        inputs = elementwise(self.ops, silu, total)
        read = recur(inputs, all_rates, held.matrices, taken.lines, self.rule)
        held.tails[taken.targets] = buffer[taken.tails]
        held.nodes[taken.node_places] = mixed[taken.nodes]
        held.node_rates[taken.node_places] = rates[taken.nodes]
        return inputs[len(nodes) :], read[len(nodes) :]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBlock:
    """A gated delta layer, from the normed stream to the update."""

    ops: Ops
    joined: Projection  # to queries, keys, values, the gate; a strength and a decay of each head
    output: Projection
    reduce: Reduce
    state: StateShape
    conv: Tensor  # [kernel, conv_dim] float32
    decay: Tensor  # [num_value_heads] float32, below 0
    decay_bias: Tensor  # per head
    norm: Norm  # of each head

    def __call__(
        self, states: Tensor, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size]
        shape, taken = self.state, step.recurrent
        assert taken is not None, "the cache has states"
        heads = shape.num_value_heads
        widths = [shape.conv_dim, heads * shape.value_dim, heads, heads]
        mixed, gate, strength, decay = self.joined(states).split(widths, dim=1)
        ops = self.ops
        decay = self.decay * elementwise(ops, softplus, decay.float() + self.decay_bias)
        rates = torch.stack([decay, elementwise(ops, torch.sigmoid, strength.float())], dim=1)
        advance = _Advance(ops, Recurrence(shape), self.conv, None)
        _, read = advance(mixed, rates, taken, taken.layers[layer])
        own = read.to(states.dtype).view(-1, shape.value_dim)
        normed = ops.norm(own, self.norm).view(len(states), -1)
        gated = normed.float() * elementwise(ops, silu, gate.float())
        return self.reduce(self.output(gated.to(states.dtype)))


def build_delta(builder: Builder, module: Any, name: str) -> DeltaBlock:
    """Builds the block of transformers' `module`, with this rank's heads."""
    shape = StateShape(
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim,
        module.head_v_dim,
        module.conv1d.weight.shape[2],
    )
    norm = Norm(module.norm.weight.detach().float().clone(), module.norm.variance_epsilon)
    return DeltaBlock(
        builder.ops,
        _joined(builder, module, shape),
        builder.pack(module.out_proj),
        builder.reduce(f"{name}.out_proj"),
        shape,
        module.conv1d.weight.detach()[:, 0].T.float().contiguous(),
        -module.A_log.detach().float().exp(),
        module.dt_bias.detach().float().clone(),
        norm,
    )


def _joined(builder: Builder, module: Any, shape: StateShape) -> Projection:
    """Packs one product; Qwen3-Next orders outputs by key head, later models by kind."""
    if hasattr(module, "in_proj_qkv"):
        return builder.pack(
            module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
        )
    linears = (module.in_proj_qkvz, module.in_proj_ba)
    group, dim = shape.num_value_heads // shape.num_key_heads, shape.key_dim
    values = group * shape.value_dim
    first, second = (linear.weight.shape[0] for linear in linears)
    wide = torch.arange(first).view(shape.num_key_heads, -1)
    narrow = (first + torch.arange(second)).view(shape.num_key_heads, -1)
    parts = (*wide.split([dim, dim, values, values], dim=1), *narrow.split(group, dim=1))
    rows = torch.cat([part.flatten() for part in parts])
    weight = torch.cat([linear.weight.detach() for linear in linears])
    product = builder.ops.pack(weight.index_select(0, rows.to(weight.device)), None)
    return builder.adapted(product, linears, rows)


@dataclass(frozen=True, slots=True, eq=False)
class MambaBlock:
    """A Mamba-2 layer, from the normed stream to the update; whole on every rank."""

    ops: Ops
    joined: Projection  # to queries, keys, values (C, B, x), the gate, a step size of each head
    output: Projection
    state: StateShape
    conv: Tensor  # [kernel, conv_dim] float32
    conv_bias: Tensor | None  # [conv_dim] float32
    decay: Tensor  # [num_value_heads] float32, below 0
    size_bias: Tensor  # [num_value_heads] float32
    limits: tuple[float, float]  # of step sizes
    skip: Tensor  # [num_value_heads, 1] float32, factor of the values that bypass the state
    norm: Norm | None  # per group of heads, without weights; None: there is no norm
    weight: Tensor | None  # [width] float32, applied after the norm
    gates_last: bool = False  # whether the gate is applied after the norm

    def __call__(
        self, states: Tensor, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size]
        shape, taken, ops = self.state, step.recurrent, self.ops
        assert taken is not None, "the cache has states"
        heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim
        mixed, gate, sizes = self.joined(states).split([shape.conv_dim, width, heads], dim=1)
        sizes = elementwise(ops, softplus, sizes.float() + self.size_bias).clamp(*self.limits)
        rates = torch.stack([self.decay * sizes, sizes], dim=1)
        rule = Recurrence(shape, is_delta=False)
        advance = _Advance(ops, rule, self.conv, self.conv_bias)
        inputs, read = advance(mixed, rates, taken, taken.layers[layer])
        values = inputs[:, shape.conv_dim - width :].unflatten(1, (heads, shape.value_dim))
        out = (read + values * self.skip).flatten(1)
        opened = elementwise(ops, silu, gate.float())
        if not self.gates_last:
            out = out * opened
        if self.norm is not None and self.weight is not None:
            groups = out.to(states.dtype).view(len(states) * shape.num_key_heads, -1)
            out = ops.norm(groups, self.norm).view(len(states), -1).float() * self.weight
        if self.gates_last:
            out = out * opened
        return self.output(out.to(states.dtype))


def build_mamba(builder: Builder, module: Any) -> MambaBlock:
    """Builds the block of transformers' `module`."""
    groups, size, width = module.n_groups, module.ssm_state_size, module.intermediate_size
    shape = StateShape(
        groups, module.num_heads, size, module.head_dim, module.conv1d.weight.shape[2]
    )
    # The stored order is x, B, C; here it is C, B, x.
    every = torch.arange(shape.conv_dim)
    columns = torch.cat(
        [every[width + groups * size :], every[width : -groups * size], every[:width]]
    )
    last = width + shape.conv_dim
    rows = torch.cat([width + columns, torch.arange(width), last + torch.arange(module.num_heads)])
    linear, conv = module.in_proj, module.conv1d
    product = builder.ops.pack(*selected(linear.weight.detach(), linear.bias, rows))
    place, norm = columns.to(conv.weight.device), getattr(module.norm, "variance_epsilon", None)
    return MambaBlock(
        builder.ops,
        builder.adapted(product, (linear,), rows),
        builder.pack(module.out_proj),
        shape,
        conv.weight.detach()[place, 0].T.float().contiguous(),
        None if conv.bias is None else conv.bias.detach()[place].float(),
        -module.A_log.detach().float().exp(),
        module.dt_bias.detach().float().clone(),
        module.time_step_limit,
        module.D.detach().float()[:, None].clone(),
        None if norm is None else Norm(None, norm),
        None if norm is None else module.norm.weight.detach().float().clone(),
        getattr(module.norm, "norm_before_gate", False),
    )
