"""Quantised weights as `TensorSource`s: a part of one is read with the scales of its groups.

A part reads as float32, or as a `QuantisedTensor` where the rank keeps weights quantised. Groups
that a cut divides become smaller groups with the same scale, so ranks may cut anywhere. Called by
`weights.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .....errors import CheckpointError
from ....ops.quantised import Codes, QuantisedTensor
from .formats import Layout, WeightFormat

Box = tuple[tuple[int, int], ...]
Piece = Callable[[str], Any]
"""The `TensorSource` of a stored tensor."""

WORD = 32  # bits of a packed integer
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds each of its columns (AutoAWQ's "gemm" packing)."""
KEPT_TYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class QuantisedSource:
    """A quantised weight of [rows, columns]."""

    name: str
    shape: tuple[int, ...]
    part: Callable[[Box], Codes]
    keeps: bool  # reads as `QuantisedTensor`

    def read(self, box: Box) -> Tensor:  # float32
        codes = self.part(box)
        if not self.keeps or codes.group == 1 or codes.values.dtype not in KEPT_TYPES:
            return codes.wide()
        if codes.values.dtype == torch.uint8 and _fits_nibbles(codes):
            codes = codes.packed()
        return QuantisedTensor(codes.map(Tensor.contiguous), torch.float32)


def _fits_nibbles(codes: Codes) -> bool:
    return codes.num_columns % 2 == 0 and codes.offset <= 8 and int(codes.values.max()) < 16


def make_source(
    name: str,
    kind: WeightFormat,
    names: Container[str],
    piece: Piece,
    path: Path,
    *,
    keeps: bool,
) -> QuantisedSource:
    """The source of weight `name`, whose codes are stored.

    Raises:
        CheckpointError: a tensor that belongs to it is missing or of another shape; names it.
    """
    stem = name.rpartition(".")[0]
    stored = kind.stored_name(name, names)
    assert stored is not None, name
    needed = [kind.scale_name(name, names) or f"{stem}.weight_scale"]
    if kind.layout is Layout.GPTQ:
        needed.append(f"{stem}.qzeros")
    for each in needed:
        if each not in names:
            raise CheckpointError(
                f"tensor {stored!r} of {str(path)!r} is quantised, and {each!r} is missing beside "
                "it",
                field="model",
            )
    found = _Stored(name, kind, piece(stored), piece(needed[0]), {}, path)
    for leaf in ("qzeros", "weight_zero_point", "g_idx", "weight_g_idx"):
        if f"{stem}.{leaf}" in names:
            found.others[leaf.removeprefix("weight_")] = piece(f"{stem}.{leaf}")
    reader = _READERS[kind.layout](found)
    return QuantisedSource(name, reader.shape, reader.part, keeps)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The tensors of one weight."""

    name: str
    format: WeightFormat
    codes: Any  # TensorSource
    scales: Any  # TensorSource
    others: dict[str, Any]
    path: Path

    def unfit(self, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"the scales of tensor {self.name!r} of {str(self.path)!r} have shape "
            f"{list(self.scales.shape)}, which does not fit its shape {list(shape)}",
            field="model",
        )


class _Scaled:
    """A stored value times the scale of its block."""

    def __init__(self, stored: _Stored) -> None:
        self._stored = stored
        self.shape: tuple[int, ...] = stored.codes.shape
        self._block = self._block_of()

    def _block_of(self) -> tuple[int, int]:
        """Rows and columns that share one scale."""
        shape, known = self.shape, self._stored.format.block
        flat = self._stored.scales.shape
        flat = (1, 1) if not flat or flat == (1,) else flat
        flat = (*flat, 1) if len(flat) == 1 else flat
        if len(shape) != 2 or len(flat) != 2 or 0 in (*shape, *flat):
            raise self._stored.unfit(shape)
        if known is None and (shape[0] % flat[0] or shape[1] % flat[1]):
            raise self._stored.unfit(shape)
        block = known or (shape[0] // flat[0], shape[1] // flat[1])
        if any(-(-size // step) != count for size, step, count in zip(shape, block, flat)):
            raise self._stored.unfit(shape)
        return block

    def part(self, box: Box) -> Codes:
        (top, bottom), (left, right) = box
        rows, columns = self._block
        scales = _whole(self._stored.scales).reshape(-(-self.shape[0] // rows), -1)
        begin, end = top // rows, -(-bottom // rows)
        tall = scales[begin:end].repeat_interleave(rows, 0)
        tall = tall[top - begin * rows : bottom - begin * rows]
        values = self._stored.codes.read(box)
        group, scales = _cut(tall, columns, left, right)
        return Codes(values, scales, None, group, right - left)


class _Packed:
    """compressed-tensors' pack-quantized: unsigned codes, packed along columns."""

    def __init__(self, stored: _Stored) -> None:
        self._stored, self._per_word = stored, WORD // stored.format.bits
        rows, words = stored.codes.shape
        scales = stored.scales.shape
        columns = words * self._per_word
        if len(scales) != 2 or scales[0] != rows or not scales[1] or columns % scales[1]:
            raise stored.unfit((rows, columns))
        self.shape = (rows, columns)
        self._group = columns // scales[1]

    def part(self, box: Box) -> Codes:
        (top, bottom), (left, right) = box
        stored, bits, per = self._stored, self._stored.format.bits, self._per_word
        first = left // per
        words = stored.codes.read(((top, bottom), (first, -(-right // per))))
        values = _unpacked(words, bits, 1)[:, left - first * per : right - first * per]
        scales = stored.scales.read(((top, bottom), (0, stored.scales.shape[1])))
        zeros = None
        if (point := stored.others.get("zero_point")) is not None:
            above = top // per
            read = point.read(((above, -(-bottom // per)), (0, point.shape[1])))
            zeros = _unpacked(read, bits, 0)[top - above * per : bottom - above * per]
        offset = 0 if zeros is not None else 1 << (bits - 1)
        return _grouped(stored, values, scales, zeros, offset, self._group, (left, right))


class _Transposed:
    """AWQ's and GPTQ's: tensors of the transposed weight."""

    def __init__(self, stored: _Stored) -> None:
        self._stored, self._per_word = stored, WORD // stored.format.bits
        height, width = stored.codes.shape
        self._along_rows = stored.format.layout is Layout.GPTQ
        columns = height * self._per_word if self._along_rows else height
        rows = width if self._along_rows else width * self._per_word
        scales = stored.scales.shape
        self.shape = (rows, columns)
        if len(scales) != 2 or scales[1] != rows or not scales[0] or columns % scales[0]:
            raise stored.unfit(self.shape)
        self._group = columns // scales[0]

    def part(self, box: Box) -> Codes:
        (top, bottom), (left, right) = box
        stored, per, form = self._stored, self._per_word, self._stored.format
        if self._along_rows:
            first = left // per
            words = stored.codes.read(((first, -(-right // per)), (top, bottom)))
            values = _unpacked(words, form.bits, 0)[left - first * per : right - first * per]
        else:
            values = self._wide_rows(stored.codes, (left, right), (top, bottom))
        num_groups = stored.scales.shape[0]
        scales = stored.scales.read(((0, num_groups), (top, bottom)))
        zeros = None
        if (points := stored.others.get("qzeros")) is not None:
            zeros = self._wide_rows(points, (0, num_groups), (top, bottom)).t()
            if form.adds_one:
                zeros = (zeros + 1) & ((1 << form.bits) - 1)
        offset = 0 if zeros is not None else 1 << (form.bits - 1)
        return _grouped(stored, values.t(), scales.t(), zeros, offset, self._group, (left, right))

    def _wide_rows(self, source: Any, span: tuple[int, int], rows: tuple[int, int]) -> Tensor:
        """Rows `span` of a tensor packed along the weight's rows, [length, rows of the weight]."""
        per = self._per_word
        first = rows[0] // per
        order = None if self._along_rows else _AWQ_ORDER
        words = source.read((span, (first, -(-rows[1] // per))))
        wide = _unpacked(words, self._stored.format.bits, 1, order)
        return wide[:, rows[0] - first * per : rows[1] - first * per]


_READERS: Mapping[Layout, Callable[[_Stored], Any]] = {
    Layout.SCALED: _Scaled,
    Layout.PACKED: _Packed,
    Layout.AWQ: _Transposed,
    Layout.GPTQ: _Transposed,
}


def _grouped(
    stored: _Stored,
    values: Tensor,  # [rows, columns of `span`] uint8
    scales: Tensor,  # [rows, num_groups]
    zeros: Tensor | None,  # [rows, num_groups] uint8
    offset: int,
    group: int,
    span: tuple[int, int],
) -> Codes:
    """With the groups of columns `span`: by order, or column by column from `g_idx`."""
    columns = span[1] - span[0]
    if (index := stored.others.get("g_idx")) is not None:
        of_column = index.read((span,)).long()
        in_order = torch.arange(span[0], span[1]) // group
        if not torch.equal(of_column, in_order):
            scales = scales.index_select(1, of_column)
            zeros = None if zeros is None else zeros.index_select(1, of_column)
            return Codes(values, scales, zeros, 1, columns, offset)
    cut, scales = _cut(scales, group, *span)
    if zeros is not None:
        _, zeros = _cut(zeros, group, *span)
    return Codes(values, scales, zeros, cut, columns, offset)


def _cut(groups: Tensor, size: int, left: int, right: int) -> tuple[int, Tensor]:
    """Of [rows, num_groups] for columns [left, right): the size of groups that fit, and these."""
    if groups.shape[1] == 1:
        return right - left, groups
    step = math.gcd(size, left) if left % size else size
    first = torch.arange(left, right, step) // size
    return step, groups.index_select(1, first)


def _unpacked(
    words: Tensor,  # [height, width] int32
    bits: int,
    dim: int,  # along which values are packed
    order: tuple[int, ...] | None = None,  # by value, its place in a word; None: in order
) -> Tensor:  # uint8, longer along `dim`
    places = torch.tensor(order or range(WORD // bits), dtype=torch.int32) * bits
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    values = (words.unsqueeze(dim + 1) >> places.view(shape)) & ((1 << bits) - 1)
    return values.to(torch.uint8).flatten(dim, dim + 1)


def _whole(source: Any) -> Tensor:
    tensor: Tensor = source.read(tuple((0, size) for size in source.shape))
    return tensor
