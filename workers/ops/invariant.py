"""Operations whose result for a row does not depend on what else is computed beside it.

With these a sequence has the same bits alone or in a batch, whatever the draft length, the cuts of
its prompt and the cached part of it (`deterministic: true`). What differs from `CpuOps`:

- Every product is the kernel's, at any number of rows and any size: oneDNN picks its
  implementation, and with it the order of additions, by the number of rows.
- All attention is the kernel's, whatever `table.py` says.
- Attention adds keys up in tiles whose bounds are multiples of a fixed number, not of the first
  visible key of the rows that happen to be computed together.
- What torch computes in vectors with a scalar rest (angles, activations, routing) is computed one
  row at a time, so that an element's place in its vector never changes.

Drafts must be chains: in a tree, siblings lie between a node and its ancestors, and with them the
tiles move. The engine refuses drafters of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...errors import ConfigError
from ..attention import KVCache
from .cpu import (
    GATE_KERNELS,
    KERNEL_DTYPES,
    CpuOps,
    PanelProjection,
    has_attention_kernel,
    kernels_of,
)
from .kernels.tiles import TILE
from .plan import PagedStep
from .protocol import AttentionSpec, Experts, Gate, Mixture, Projection, Rotation, Router
from .reference import route_by_row, sum_in_order


class InvariantOps(CpuOps):
    """`CpuOps`, row by row the same bits."""

    name = "cpu, batch-invariant"
    is_invariant = True
    max_latent_heads = 0  # products per head are torch's

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._prompt_rows = None  # whatever a chunk's length, the kernel attends
        self._angles: dict[int, _AngleTable] = {}

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.dtype not in KERNEL_DTYPES:
            raise refused(f"a weight of type {weight.dtype} has no invariant product")
        return PanelProjection(weight, bias, kernels_of(weight.dtype))

    def pack_experts(self, experts: Experts) -> Mixture:
        return _Mixture(self, experts)

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float) -> Rotation:
        if frequencies.dim() == 2:  # a set per row
            pairs = zip(positions.tolist(), frequencies, strict=True)
            return _stacked(_angles(position, row, scale) for position, row in pairs)
        key = id(frequencies)
        if key not in self._angles:
            self._angles[key] = _AngleTable(frequencies, scale)
        return self._angles[key].at(positions)

    def rope_store_attend(
        self,
        joined: Tensor,  # [num_tokens, spec.joined_width]
        rotation: Rotation | None,
        temperature: Tensor | None,  # [num_tokens] float32
        plan: PagedStep,
        cache: KVCache,
        layer: int,
        spec: AttentionSpec,
    ) -> Tensor:  # [num_tokens, num_heads * value_dim]
        if spec.shared_values or not has_attention_kernel(spec, self._kernels.width):
            raise refused("its attention (latents, tiny or odd heads, very many per key) varies")
        return super().rope_store_attend(joined, rotation, temperature, plan, cache, layer, spec)

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        if gate.kind in GATE_KERNELS:
            return super().gate(gate_up, gate)
        return by_row(lambda row: super(InvariantOps, self).gate(row, gate), gate_up)

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        return route_by_row(logits, lambda row: super(InvariantOps, self).route(row, router))

    def tile_alignment(self, block_size: int) -> int:
        return TILE // block_size * block_size if block_size <= TILE else block_size


class _AngleTable:
    """Cosines and sines of every position up to the largest one asked for."""

    def __init__(self, frequencies: Tensor, scale: float) -> None:
        self._frequencies = frequencies  # [rotary_dim / 2] float32; held, so that its id is its own
        self._scale = scale
        self._cos = self._sin = frequencies.new_empty(0, len(frequencies))

    def at(self, positions: Tensor) -> Rotation:  # [num_tokens] -> two [num_tokens, rotary_dim / 2]
        have, needed = len(self._cos), int(positions.max()) + 1 if len(positions) else 0
        if needed > have:
            needed = max(needed, min(2 * have, have + 1024))
            rows = (_angles(each, self._frequencies, self._scale) for each in range(have, needed))
            cos, sin = _stacked(rows)
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])
        rows_of = positions.long()
        return self._cos.index_select(0, rows_of), self._sin.index_select(0, rows_of)


class _Mixture:
    """A `Mixture`: experts one by one, a row's parts added in the order of its choices."""

    def __init__(self, ops: InvariantOps, experts: Experts) -> None:
        self._ops, self._gate, self._scores_input = ops, experts.gate, experts.scores_input
        self._gate_up = self._packed(experts.gate_up, experts.gate_up_bias)
        self._down = self._packed(experts.down, experts.down_bias)

    def _packed(self, weights: Tensor, biases: Tensor | None) -> list[Projection]:
        """One product per expert."""
        rows = [None] * len(weights) if biases is None else biases
        return [self._ops.pack(weight, bias) for weight, bias in zip(weights, rows, strict=True)]

    def __call__(self, states: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        given = states.new_zeros(*chosen.shape, states.shape[1], dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            score = scores[rows, place][:, None]
            read = states[rows]
            if self._scores_input:
                read = (read * score).to(states.dtype)
            inner = self._ops.gate(self._gate_up[expert](read), self._gate)
            part = self._down[expert](inner).float()
            given[rows, place] = part if self._scores_input else part * score
        return sum_in_order(given).to(states.dtype)


def _angles(position: int, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of one position; a new tensor each time, so that vectors fall alike."""
    angles = frequencies * float(position)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def _stacked(rows: Iterable[Rotation]) -> Rotation:  # [rotary_dim / 2] each
    cos, sin = zip(*rows, strict=True)
    return torch.stack(cos), torch.stack(sin)


def by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:  # [num_rows, ...]
    """`function` of every row alone."""
    if len(rows) <= 1:
        return function(rows)
    return torch.cat([function(row.contiguous()).clone() for row in rows.split(1)])


def refused(why: str) -> ConfigError:
    return ConfigError.at("deterministic", f"{why}; leave `deterministic` out")
