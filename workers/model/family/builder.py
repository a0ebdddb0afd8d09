"""What the parts of a layer are built with: packed products, norms, and the sum over ranks.

Called by `load.py` and the modules beside it, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...collective import Collective
from ...ops import Ops
from ...ops.invariant import by_row
from ...ops.protocol import Norm, Projection
from ..sharding import ShardPlan
from .spec import FamilySpec

Reduce = Callable[[Tensor], Tensor]
"""Sums over the ranks; where a block is not cut, returns its argument."""


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """What every layer is built with."""

    spec: FamilySpec
    ops: Ops
    plan: ShardPlan
    collective: Collective

    def reduce(self, name: str) -> Reduce:
        """The sum over ranks if module `name` returns a part of one."""
        if self.collective.size > 1 and name in self.plan.summed:
            return self.collective.all_reduce
        return as_is

    def pack(self, *linears: Any) -> Projection:
        """One product for linears of one input."""
        return self.ops.pack(*joined_weight(linears))

    def norm(self, module: Any) -> Norm:
        """A norm's weights as the operations take them."""
        eps = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if weight is not None:
            weight = weight.detach().float()
            weight = weight + 1 if self.spec.unit_offset else weight.clone()
        return Norm(weight, float(module.eps if eps is None else eps))

    def norm_or_none(self, module: Any, name: str) -> Norm | None:
        child = getattr(module, name, None)
        return None if child is None else self.norm(child)


def halves(
    heads: Tensor,  # [num_heads, head_dim]
    begin: int,
    dim: int,
) -> Tensor:  # alike
    """Columns `[begin, begin + dim)` as evens then odds: scores do not depend on their order."""
    first, turned, last = heads.split([begin, dim, heads.shape[1] - begin - dim], dim=1)
    return torch.cat([first, turned[:, 0::2], turned[:, 1::2], last], dim=1)


def joined_weight(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linears of one input, one below the other."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(bias is None for bias in biases):
        return weight, None
    filled = [
        bias.detach() if bias is not None else part.new_zeros(part.shape[0])
        for bias, part in zip(biases, weights, strict=True)
    ]
    return weight, torch.cat(filled)


def elementwise(ops: Ops, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """`function`, whose last bit may depend on an element's place in a CPU's vector register."""
    on_cpu = values.device.type == "cpu"
    return by_row(function, values) if ops.is_invariant and on_cpu else function(values)


def as_is(update: Tensor) -> Tensor:
    return update
