"""Low-rank adapters beside the decoder's products: the rows that each serves, and the sums.

A product of several linears (`joined`, `gate_up`) has one pair of matrices per adapter: the down
matrices are stacked, and the up matrices form a block diagonal. With tensor parallelism, a rank has
its rows of the up matrix if the linear is cut by outputs, and its columns of the down matrix if it
is cut by inputs; the sum over ranks that follows then includes the adapter's part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from ....scheduler.types import IntArray
from ...ops import Ops
from ...ops.protocol import Projection
from ..checkpoint.adapters import Adapter, adaptable
from ..sharding import Shard, ShardPlan, read_part

Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class _Pair:
    """One linear's matrices on this rank; `up` includes the scale."""

    down: Tensor  # [rank, in_features]
    up: Tensor  # [out_features, rank]


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one adapter."""

    adapter: int
    rows: slice | Tensor | None  # [num_rows] int64; None: all


class _Active(threading.local):
    """The groups of the step, or of its part, that the current thread computes."""

    groups: tuple[_Group, ...] = ()


@dataclass(frozen=True, slots=True)
class _Linear:
    """One linear's part on this rank."""

    name: str
    width: int  # number of its outputs
    shard: Shard | None


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of several linears with one input, and two further products per adapter."""

    ops: Ops
    linears: tuple[_Linear, ...]
    rows: Tensor | None  # rows of the joined outputs; None: all, in order
    pairs: dict[int, tuple[Projection, Projection]]

    def add(self, number: int, pairs: Mapping[str, _Pair]) -> None:
        """Adds an adapter's matrices, by the linears' names."""
        parts = [pairs.get(each.name) for each in self.linears]
        downs = [part.down for part in parts if part is not None]
        if not downs:
            return
        up = torch.block_diag(
            *(
                downs[0].new_zeros(each.width, 0) if part is None else part.up
                for part, each in zip(parts, self.linears, strict=True)
            )
        )
        if self.rows is not None:
            up = up.index_select(0, self.rows.to(up.device))
        down = downs[0].contiguous() if len(downs) == 1 else torch.cat(downs)
        self.pairs[number] = (self.ops.pack(down, None), self.ops.pack(up.contiguous(), None))


class Adapters:
    """The adapters of one model on this rank; 0 is the model without an adapter.

    Args:
        model: transformers' modules, with this rank's shards.
        is_held: whether this stage holds a linear of that name.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        dtype: torch.dtype,
        device: torch.device,
        is_held: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.numbers: dict[str, int] = {}  # numbers by name
        self._is_held = is_held
        self._dtype, self._device = dtype, device
        self._active = _Active()
        self._products: list[_Product] = []
        self._linears = {
            module: _Linear(name, module.weight.shape[0], plan.shards.get(f"{name}.weight"))
            for name, module in adaptable(model).items()
        }

    def beside(
        self,
        ops: Ops,
        plain: Projection,
        linears: Sequence[Any],
        rows: Tensor | None = None,  # rows of the joined outputs; None: all, in order
    ) -> Projection:
        """Wraps `plain`, a product of `linears`, to add the adapters' results."""
        if not all(each in self._linears for each in linears):
            return plain
        held = tuple(self._linears[each] for each in linears)
        product = _Product(ops, held, rows, {})
        self._products.append(product)
        return AdaptedProjection(plain, product.pairs, self._active)

    def finish(self) -> None:
        """Drops references to the modules, once everything is packed."""
        self._linears.clear()

    def add(self, adapter: Adapter) -> None:
        """Starts to serve another adapter, which must fit the model.

        Raises:
            ValueError: a linear with an adapter is not among the decoder's products.
        """
        linears = {each.name: each for product in self._products for each in product.linears}
        parts = {name: part for name, part in adapter.parts.items() if self._is_held(name)}
        if missing := parts.keys() - linears.keys():
            raise ValueError(f"{min(missing)} is not among its products")
        pairs = {}
        for name, part in parts.items():
            shard = linears[name].shard
            down = read_part(part.down, shard, 1)
            up = read_part(part.up, shard, 0).float() * part.scale
            pairs[name] = _Pair(
                down.to(self._device, self._dtype), up.to(self._device, self._dtype)
            )
        number = max(self.numbers.values(), default=0) + 1
        for product in self._products:
            product.add(number, pairs)
        self.numbers[adapter.name] = number

    def remove(self, name: str) -> None:
        """Stops serving an adapter that no request uses."""
        number = self.numbers.pop(name)
        for product in self._products:
            product.pairs.pop(number, None)

    def begin(self, rows: IntArray) -> None:  # [num_tokens]
        """Sets the adapter of each row for this thread's next products."""
        self._active.groups = _groups(rows, self._device)


def _groups(rows: IntArray, device: torch.device) -> tuple[_Group, ...]:
    found = []
    for adapter in np.unique(rows[rows > 0]).tolist():
        where = np.flatnonzero(rows == adapter)
        begin, end = int(where[0]), int(where[-1]) + 1
        if len(where) == len(rows):
            found.append(_Group(adapter, None))
        elif end - begin == len(where):
            found.append(_Group(adapter, slice(begin, end)))
        else:
            found.append(_Group(adapter, torch.from_numpy(where).to(device)))
    return tuple(found)


class AdaptedProjection:
    """A product; for rows with an adapter, two further products are added."""

    def __init__(
        self, plain: Projection, pairs: Mapping[int, tuple[Projection, Projection]], active: _Active
    ) -> None:
        self.plain, self._pairs, self._active = plain, pairs, active

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, in] -> [num_tokens, out]
        out = self.plain(states)
        for group in self._active.groups:
            pair = self._pairs.get(group.adapter)
            if pair is None:
                continue
            down, up = pair
            if group.rows is None:
                out.add_(up(down(states)))
            elif isinstance(group.rows, slice):
                out[group.rows].add_(up(down(states[group.rows])))
            else:
                out.index_add_(0, group.rows, up(down(states.index_select(0, group.rows))))
        return out


def without_adapters(part: Block) -> Block:
    """Returns a block of the decoder, or a part of one, with the plain products.

    It serves steps whose rows have no adapters.
    """
    if isinstance(part, AdaptedProjection):
        return cast(Block, part.plain)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    held = {each.name: getattr(part, each.name) for each in fields(part)}
    plain = {name: without_adapters(value) for name, value in held.items()}
    changes = {name: value for name, value in plain.items() if value is not held[name]}
    return replace(part, **changes) if changes else part
