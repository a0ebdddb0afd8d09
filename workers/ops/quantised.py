"""Weights that stay quantised in memory: a tensor that reads as its dequantised values.

A weight is its code, minus a zero or a fixed offset, times the scale of its group, minus the
group's minimum. A group is a run of adjacent columns of one row. Rows can be cut, selected and
joined without dequantisation, which is what sharding and the family decoder do to weights before
they pack them; every other torch operation gets the dequantised tensor, made for that call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

NIBBLE = 4
_BLOCK = 1 << 15  # weights that are widened at a time, below torch's threshold for several threads


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The stored parts of [..., rows, columns] weights."""

    values: Tensor  # [..., rows, columns], or [..., rows, columns / 2]: the even column's bits low
    scales: Tensor  # [..., rows, num_groups]
    zeros: Tensor | None  # [..., rows, num_groups] uint8; None: `offset`
    group: int  # columns per scale
    num_columns: int
    offset: int = 0  # subtracted from all codes
    minima: Tensor | None = None  # [..., rows, num_groups], subtracted after scaling
    input_group: int | None = None
    """Columns of a product's float8 input that share a scale; 0: a whole row.

    None if the checkpoint does not request inputs in float8.
    """

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.values.shape[-1] != self.num_columns

    @property
    def parts(self) -> tuple[Tensor, ...]:
        given = (self.values, self.scales, self.zeros, self.minima)
        return tuple(part for part in given if part is not None)

    def map(self, change: Callable[[Tensor], Tensor]) -> Codes:
        """Applies a function to every part."""
        return self.with_parts([change(part) for part in self.parts])

    def with_parts(self, parts: Sequence[Tensor]) -> Codes:
        """Replaces the parts."""
        values, scales, *rest = parts
        zeros = rest.pop(0) if self.zeros is not None else None
        minima = rest.pop(0) if self.minima is not None else None
        return replace(self, values=values, scales=scales, zeros=zeros, minima=minima)

    def packed(self) -> Codes:
        """Returns codes with two four-bit codes per byte."""
        low, high = self.values[..., 0::2], self.values[..., 1::2]
        return replace(self, values=low | (high << NIBBLE))

    def unpacked(self) -> Tensor:  # [..., rows, columns]
        """Returns one code per element."""
        if not self.is_packed:
            return self.values
        pairs = self.values.contiguous().to(torch.int16)
        return ((pairs | (pairs << NIBBLE)) & 0x0F0F).view(torch.uint8)

    def in_whole_groups(self) -> Codes:
        """Returns the same codes in smaller groups if a cut has divided a group."""
        group = math.gcd(self.group, self.num_columns)
        if group == self.group:
            return self
        times, count = self.group // group, self.num_columns // group
        given = (self.scales, self.zeros, self.minima)
        scales, zeros, minima = (
            None if part is None else part.repeat_interleave(times, dim=-1)[..., :count]
            for part in given
        )
        assert scales is not None
        return replace(self, scales=scales, zeros=zeros, minima=minima, group=group)

    def signed(self, group: int, *, has_minima: bool) -> Codes:
        """Returns the same weights in signed bytes without offset, in groups of `group` columns."""
        values = self.unpacked().to(torch.int8) - self.offset
        times = self.group // group
        scales = self.scales.repeat_interleave(times, dim=-1)
        minima = torch.zeros_like(scales) if has_minima else None
        if self.minima is not None:
            minima = self.minima.repeat_interleave(times, dim=-1)
        return Codes(values, scales, None, group, self.num_columns, 0, minima)

    def wide(self) -> Tensor:  # [..., rows, columns] float32
        wide = self.unpacked().float()
        if self.zeros is not None:
            wide = wide - self._per_column(self.zeros.float())
        elif self.offset:
            wide = wide - self.offset
        wide = wide * self._per_column(self.scales.float())
        return wide if self.minima is None else wide - self._per_column(self.minima.float())

    def _per_column(self, groups: Tensor) -> Tensor:  # [..., rows, num_groups] -> [..., columns]
        return groups.repeat_interleave(self.group, dim=-1)[..., : self.num_columns]

    def joins(self, other: Codes) -> bool:
        """Returns True if both can be concatenated."""
        return (
            (self.group, self.num_columns, self.offset, self.is_packed, self.input_group)
            == (other.group, other.num_columns, other.offset, other.is_packed, other.input_group)
            and [part.dtype for part in self.parts] == [part.dtype for part in other.parts]
            and (self.zeros is None) == (other.zeros is None)
            and self.scales.shape[-1] == other.scales.shape[-1]
        )


class QuantisedTensor(Tensor):
    """A tensor represented by its codes. Never written to."""

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
        """Returns plain values, rounded to its dtype."""
        codes = self.codes
        if self.dim() != 2 or self.device.type != "cpu":
            return codes.wide().to(self.dtype)
        out, rows = torch.empty(self.shape, dtype=self.dtype), max(1, _BLOCK // self.shape[1])
        for first in range(0, self.shape[0], rows):  # blocks that stay in the caches
            block = slice(first, first + rows)
            out[block] = codes.map(lambda part, block=block: part[block]).wide()  # type: ignore[misc]
        return out

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
        # A view of a tensor from outside of inference mode must not be an inference tensor either.
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = tree_map(widened, (tuple(args), kwargs))
            return func(*args, **kwargs)


def widened(value: Any) -> Any:
    """Returns a tensor in plain values; any other value unchanged."""
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
    if all(isinstance(each, QuantisedTensor) for each in tensors):
        tensors = _alike(tensors)
    first = tensors[0]
    for each in tensors:
        if not isinstance(each, QuantisedTensor) or not first.codes.joins(each.codes):
            return None
    parts = [join(list(each)) for each in zip(*[each.codes.parts for each in tensors], strict=True)]
    return QuantisedTensor(first.codes.with_parts(parts), first.dtype)


def _alike(tensors: Sequence[QuantisedTensor]) -> Sequence[QuantisedTensor]:
    """Returns codes of one kind, if all can be converted to signed bytes with minima."""
    kinds = [each.codes for each in tensors]
    if all(kinds[0].joins(each) for each in kinds):
        return tensors
    is_signed = all(
        each.zeros is None and each.scales.dtype == torch.float16
        and (each.values.dtype == torch.int8 or each.is_packed)
        for each in kinds
    )  # fmt: skip
    group = math.gcd(*(each.group for each in kinds))
    if not is_signed or any(each.num_columns % group for each in kinds):
        return tensors
    has_minima = any(each.minima is not None for each in kinds)
    return [
        QuantisedTensor(codes.signed(group, has_minima=has_minima), each.dtype)
        for codes, each in zip(kinds, tensors, strict=True)
    ]


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
"""Operations that keep codes; a rule returns None for arguments that it does not cover."""
