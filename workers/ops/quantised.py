"""Weights that stay quantised in memory: a tensor that reads as the wide one it stands for.

A weight is its codes, minus zeros or a fixed offset, times the scale of its group: a run of
neighbouring columns of one row. Rows can be cut, selected and joined without widening anything,
which is what sharding and the family decoder do to weights before they pack them; every other torch
operation sees the wide tensor, made for that call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

NIBBLE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """What is stored of [..., rows, columns] weights."""

    values: Tensor  # [..., rows, columns], or [..., rows, columns / 2]: the even column's bits low
    scales: Tensor  # [..., rows, num_groups]
    zeros: Tensor | None  # [..., rows, num_groups] uint8; None: `offset`
    group: int  # columns that share a scale
    num_columns: int
    offset: int = 0  # of all codes

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.values.shape[-1] != self.num_columns

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.values, self.scales, *(() if self.zeros is None else (self.zeros,)))

    def map(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Every part changed alike."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, values=change(self.values), scales=change(self.scales), zeros=zeros)

    def packed(self) -> Codes:
        """With two codes of four bits in a byte."""
        low, high = self.values[..., 0::2], self.values[..., 1::2]
        return replace(self, values=low | (high << NIBBLE))

    def wide(self) -> Tensor:  # [..., rows, columns] float32
        values = self.values
        if self.is_packed:
            pair = torch.stack([values & 15, values >> NIBBLE], dim=-1)
            values = pair.flatten(-2)
        wide = values.float()
        if self.zeros is not None:
            wide = wide - self._per_column(self.zeros.float())
        elif self.offset:
            wide = wide - self.offset
        return wide * self._per_column(self.scales.float())

    def _per_column(self, groups: Tensor) -> Tensor:  # [..., rows, num_groups] -> [..., columns]
        return groups.repeat_interleave(self.group, dim=-1)[..., : self.num_columns]

    def joins(self, other: Codes) -> bool:
        """Whether both can be laid end to end."""
        return (
            (self.group, self.num_columns, self.offset, self.is_packed)
            == (other.group, other.num_columns, other.offset, other.is_packed)
            and [part.dtype for part in self.parts] == [part.dtype for part in other.parts]
            and self.scales.shape[-1] == other.scales.shape[-1]
        )


class QuantisedTensor(Tensor):
    """A wide tensor by its codes. Never written to."""

    codes: Codes

    @staticmethod
    def __new__(cls, codes: Codes, dtype: torch.dtype) -> QuantisedTensor:
        shape = (*codes.values.shape[:-1], codes.num_columns)
        made = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.values.device, requires_grad=False
        )
        assert isinstance(made, QuantisedTensor), type(made)
        made.codes = codes
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantisedTensor({tuple(self.shape)}, {self.dtype}, group={self.codes.group})"

    def wide(self) -> Tensor:
        """In plain values, rounded to its type."""
        return self.codes.wide().to(self.dtype)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.codes.parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            kept = rule(*args, **kwargs)
            if kept is not None:
                return kept
        assert not func._schema.is_mutable, f"{func} of a quantised tensor"
        # A view of a tensor that is none of inference mode's must not be one of them either.
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = tree_map(_widened, (tuple(args), kwargs))
            return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.wide() if isinstance(value, QuantisedTensor) else value


def _to_copy(
    tensor: QuantisedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> QuantisedTensor | None:
    wanted = tensor.dtype if dtype is None else dtype
    if not wanted.is_floating_point:
        return None
    codes = tensor.codes
    if device is not None:
        codes = codes.map(lambda part: part.to(device, non_blocking=non_blocking))
    return QuantisedTensor(codes, wanted)


def _slice(
    tensor: QuantisedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantisedTensor | None:
    if dim % tensor.dim() == tensor.dim() - 1:
        return None
    return _mapped(tensor, lambda part: torch.ops.aten.slice.Tensor(part, dim, start, end, step))


def _select(tensor: QuantisedTensor, dim: int, index: int) -> QuantisedTensor | None:
    if tensor.dim() < 3 or dim % tensor.dim() >= tensor.dim() - 2:
        return None
    return _mapped(tensor, lambda part: part.select(dim, index))


def _index_select(tensor: Any, dim: int, index: Tensor) -> QuantisedTensor | None:
    if not isinstance(tensor, QuantisedTensor) or dim % tensor.dim() == tensor.dim() - 1:
        return None
    return _mapped(tensor, lambda part: part.index_select(dim, index))


def _cat(tensors: Sequence[Any], dim: int = 0) -> QuantisedTensor | None:
    if dim % tensors[0].dim() == tensors[0].dim() - 1:
        return None
    return _joined(tensors, lambda parts: torch.cat(parts, dim))


def _stack(tensors: Sequence[Any], dim: int = 0) -> QuantisedTensor | None:
    return _joined(tensors, torch.stack) if dim == 0 else None


def _joined(
    tensors: Sequence[Any], join: Callable[[list[Tensor]], Tensor]
) -> QuantisedTensor | None:
    first = tensors[0]
    for each in tensors:
        if not isinstance(each, QuantisedTensor) or not first.codes.joins(each.codes):
            return None
    parts = [join(list(each)) for each in zip(*[each.codes.parts for each in tensors], strict=True)]
    zeros = parts[2] if len(parts) > 2 else None
    codes = replace(first.codes, values=parts[0], scales=parts[1], zeros=zeros)
    return QuantisedTensor(codes, first.dtype)


def _mapped(tensor: QuantisedTensor, change: Callable[[Tensor], Tensor]) -> QuantisedTensor:
    return QuantisedTensor(tensor.codes.map(change), tensor.dtype)


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., QuantisedTensor | None]] = {
    _aten.detach.default: lambda tensor: _mapped(tensor, lambda part: part),
    _aten.alias.default: lambda tensor: _mapped(tensor, lambda part: part),
    _aten.clone.default: lambda tensor, **_: _mapped(tensor, torch.clone),
    _aten._to_copy.default: _to_copy,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.index_select.default: _index_select,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
}
"""What keeps codes; a rule returns None for arguments that it does not cover."""
