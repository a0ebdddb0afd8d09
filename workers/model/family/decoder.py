"""The forward: flat rows in, logits out, over the operations of `workers/ops/`.

A layer is two blocks around a residual stream. A block reads a normed copy of the stream and
returns an update, which the next `add_norm` adds: so a layer is eight operations. Weights are
packed products, described per layer by the frozen classes below; `load.py` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...attention import KVCache, KVShape
from ...ops import Ops, PagedStep
from ...ops.protocol import AttentionSpec, Norm, Projection, Rotation
from ..parallel import ShardedOutput
from .builder import Reduce, elementwise
from .rope import Rope
from .spec import FamilySpec


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer of one step reads."""

    plan: PagedStep
    cache: KVCache
    rotations: tuple[Rotation, ...]  # per kind of frequencies
    temperature: Tensor | None  # [num_tokens]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Attention, from the normed stream to the update."""

    joined: Projection  # [num_tokens, hidden_size] to [num_tokens, spec.joined_width]
    output: Projection
    reduce: Reduce
    spec: AttentionSpec
    rope: int | None  # index into the step's rotations; None: not rotated
    tempered: bool
    gate: Projection | None = None  # to [num_tokens, num_heads * value_dim]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer on this rank. Norms that the architecture has not are None."""

    before_attention: Norm | None
    attention: AttentionBlock
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Callable[[Tensor], Tensor]
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerStack:
    """Layers and the norm behind the last: of a target, or of a head; `run` is collective."""

    ops: Ops
    spec: FamilySpec
    layers: Sequence[Layer]
    ropes: tuple[Rope, ...]
    norm: Norm

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer stores for one token."""
        return tuple(_kv_shape(layer.attention.spec) for layer in self.layers)

    def run(
        self,
        residual: Tensor,  # [num_tokens, hidden_size], written: becomes the last layer's output
        step: StepContext,
        first: int = 0,  # the first layer's index in the cache
        capture: Container[int] = (),
        *,
        normed: bool = True,
    ) -> tuple[Tensor, list[Tensor]]:  # [num_tokens, hidden_size], and each of the captured
        """The output of the final norm, or `residual` without `normed`; inputs of layers `capture`.

        The former may lie in a buffer that the next norm overwrites.
        """
        ops, spec = self.ops, self.spec
        update: Tensor | None = None
        after: Norm | None = None
        captured: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            states = ops.add_norm(
                residual, update, after, spec.residual_scale, layer.before_attention
            )
            if index in capture:
                captured.append(residual.clone())
            update = self._attend(states, layer.attention, first + index, step)
            states = ops.add_norm(
                residual, update, layer.after_attention, spec.residual_scale, layer.before_mlp
            )
            update, after = layer.mlp(states), layer.after_mlp
        norm = self.norm if normed else None
        return ops.add_norm(residual, update, after, spec.residual_scale, norm), captured

    def context(self, plan: PagedStep, cache: KVCache) -> StepContext:
        """What is computed once for all layers."""
        rotations = tuple(rope.rotation(self.ops, plan) for rope in self.ropes)
        return StepContext(plan, cache, rotations, self._temperature(plan))

    def _attend(
        self, states: Tensor, block: AttentionBlock, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size]
        gate = None if block.gate is None else block.gate(states)
        out = self.ops.rope_store_attend(
            block.joined(states),
            None if block.rope is None else step.rotations[block.rope],
            step.temperature if block.tempered else None,
            step.plan,
            step.cache,
            layer,
            block.spec,
        )
        if gate is not None:
            out = out * elementwise(self.ops, torch.sigmoid, gate)
        return block.reduce(block.output(out))

    def _temperature(self, plan: PagedStep) -> Tensor | None:  # [num_tokens] float32
        tuning = self.spec.temperature
        if tuning is None:
            return None
        spans = torch.floor((plan.positions.float() + 1) / tuning.floor)
        return elementwise(self.ops, torch.log1p, spans) * tuning.scale + 1


@dataclass(frozen=True, slots=True, eq=False)
class FamilyModel(LayerStack):
    """One rank's shard: the layers between the embedding and the output layer."""

    embed: Callable[[Tensor], Tensor]  # [num_tokens] to [num_tokens, hidden_size]
    unembed: Callable[[Tensor], Tensor]  # [num_rows, hidden_size] to [num_rows, vocab]
    output: ShardedOutput | None = None  # the same, where every rank has a part of the vocabulary

    def forward(
        self,
        plan: PagedStep,
        cache: KVCache,
        rows: Tensor | None,  # [num_rows]; None: every row
        capture: Sequence[int] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        """Logits of `rows`, and the inputs of layers `capture`.

        The input of the layer after the last one is the output of the final norm.
        """
        return self.compute(self.context(plan, cache), rows, capture)

    def compute(
        self,
        step: StepContext,
        rows: Tensor | None,  # [num_rows]
        capture: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        """`forward` of a step, or of a part of one (`parts.py`)."""
        states, captured = self.states(step, rows, capture)
        return self.logits(states), captured

    def states(
        self,
        step: StepContext,
        rows: Tensor | None,  # [num_rows]
        capture: Sequence[int],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # each [num_rows, hidden_size], [num_tokens, ...]
        """What the output layer reads, and the inputs of layers `capture`."""
        residual = self.embed(step.plan.token_ids)
        if self.spec.embedding_scale != 1.0:
            residual = residual * self.spec.embedding_scale
        wanted = set(capture)
        last = len(self.layers) in wanted
        states, captured = self.run(residual, step, 0, wanted, normed=last)
        if last:
            captured.append(states.clone())
        if rows is not None:
            states = states.index_select(0, rows)
        return states if last else self.ops.norm(states, self.norm), tuple(captured)

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        """Logits of normed states."""
        return self._finished(self.unembed(states))

    @property
    def first_token(self) -> int:
        """Of this rank's part of the vocabulary."""
        return 0 if self.output is None else self.output.first

    def part_of_logits(
        self, states: Tensor
    ) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, width]
        """Logits of this rank's part of the vocabulary."""
        if self.output is None:
            return self.logits(states)
        return self._finished(self.output.part(states))

    def logits_of_own_rows(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size]
        """Logits of this rank's even share of the rows, [num_rows / size, vocab]."""
        if self.output is None:
            return self.logits(states)
        return self._finished(self.output.own_rows(states))

    def _finished(self, logits: Tensor) -> Tensor:  # [num_rows, vocab], alike
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:
            logits = elementwise(self.ops, torch.tanh, logits / cap) * cap
        return logits


def _kv_shape(spec: AttentionSpec) -> KVShape:
    value_dim = 0 if spec.shared_values else spec.value_dim
    return KVShape(spec.num_kv_heads, spec.head_dim, value_dim)
