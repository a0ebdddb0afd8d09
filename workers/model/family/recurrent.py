"""Layers with a state in place of keys and values: gated delta layers (Qwen3-Next and later).

A product gives queries, keys and values, which a short convolution mixes with the tokens before,
the gate of what is read, and each head's decay and strength. Which rows a row continues, and where
states are, is the step's (`workers/states.py`); the arithmetic is `workers/ops/recurrent.py`'s.

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
from ...states import StateShape
from .decoder import Builder, Reduce, StepContext, elementwise


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
    decay_bias: Tensor  # [num_value_heads] float32
    norm: Norm  # of each head

    def __call__(
        self, states: Tensor, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size]
        shape, taken = self.state, step.recurrent
        assert taken is not None, "the cache has states"
        heads, held = shape.num_value_heads, taken.layers[layer]
        widths = [shape.conv_dim, heads * shape.value_dim, heads, heads]
        mixed, gate, strength, decay = self.joined(states).split(widths, dim=1)
        ops = self.ops
        decay = self.decay * elementwise(ops, softplus, decay.float() + self.decay_bias)
        rates = torch.stack([decay, elementwise(ops, torch.sigmoid, strength.float())], dim=1)
        nodes = held.nodes.index_select(0, taken.pending)
        tails = held.tails.index_select(0, taken.sources) * taken.has_source
        buffer = torch.cat([tails.flatten(0, 1), nodes, mixed])
        all_rates = torch.cat([held.node_rates.index_select(0, taken.pending), rates])
        inputs = elementwise(ops, silu, convolve(buffer, taken.history, self.conv, None))
        read = recur(inputs, all_rates, held.matrices, taken.lines, Recurrence(shape))
        held.tails[taken.targets] = buffer[taken.tails]
        held.nodes[taken.node_places] = mixed[taken.nodes]
        held.node_rates[taken.node_places] = rates[taken.nodes]
        own = read[len(nodes) :].to(states.dtype).view(-1, shape.value_dim)
        normed = ops.norm(own, self.norm).view(len(states), -1)
        gated = normed.float() * elementwise(ops, silu, gate.float())
        return self.reduce(self.output(gated.to(states.dtype)))


def build_delta(builder: Builder, module: Any, name: str) -> DeltaBlock:
    """The block of transformers' `module`, with this rank's heads."""
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
    """One product; Qwen3-Next has its outputs by key head, later models by kind."""
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
