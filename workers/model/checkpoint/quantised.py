"""Quantised weights as `TensorSource`s: a part of a weight is read with the scales of its groups.

A part reads as float32, or as a `QuantisedTensor` if the rank keeps weights quantised. Groups
that are divided by a cut become smaller groups with the same scale, so ranks may cut anywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....errors import CheckpointError
from ...ops.quantised import Codes, QuantisedTensor
from .quantised_formats import BLOCK_SCALES, BLOCKS, MXFP4_GROUP, PackLayout, WeightFormat

Box = tuple[tuple[int, int], ...]
Piece = Callable[[str], Any]
"""Returns the `TensorSource` of a stored tensor."""

_T = TypeVar("_T")
WORD = 32  # bits of a packed integer
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of its columns (AutoAWQ's "gemm" packing)."""
KEPT_TYPES = (torch.float8_e4m3fn, torch.int8, torch.uint8)
FEWEST_CODED = 1 << 25
"""Number of weights from which a model on a CPU keeps its codes.

Dequantised, they take 64 MiB. Weights that stay in the caches are multiplied faster without
unpacking.
"""

_BESIDE = {
    "qzeros": "zeros",
    "weight_zero_point": "zeros",
    "g_idx": "g_idx",
    "weight_g_idx": "g_idx",
}
"""Tensors that a weight may have besides codes and scales, by last component of the name."""


def make_source(
    name: str, kind: WeightFormat, names: Container[str], piece: Piece, path: Path, *, keeps: bool
) -> QuantisedSource | Mxfp4Source:
    """Returns the source of stored weight `name`; with `keeps`, it reads as `QuantisedTensor`.

    Raises:
        CheckpointError: a tensor that belongs to it is missing or of another shape; names it.
    """
    stem = name.rpartition(".")[0]
    stored = kind.stored_name(name, names)
    assert stored is not None, name
    needed = [kind.scale_name(name, names) or f"{stem}.weight_scale"]
    if kind.layout is PackLayout.GPTQ:
        needed.append(f"{stem}.qzeros")
    for each in needed:
        if each not in names:
            raise CheckpointError(
                f"tensor {stored!r} of {str(path)!r} is quantised, and {each!r} is missing beside "
                "it"
            )
    beside = {
        key: piece(f"{stem}.{leaf}") for leaf, key in _BESIDE.items() if f"{stem}.{leaf}" in names
    }
    if kind.layout is PackLayout.MXFP4:
        return Mxfp4Source(name, piece(stored), piece(needed[0]), path)
    make = _ScaledSource if kind.layout is PackLayout.SCALED else _PackedSource
    return make(name, kind, piece(stored), piece(needed[0]), beside, path, keeps)


class QuantisedSource(ABC):
    """A quantised weight of shape [rows, columns]."""

    def __init__(
        self,
        name: str,
        form: WeightFormat,
        codes: Any,  # TensorSource, as `scales` and the values of `beside`
        scales: Any,
        beside: dict[str, Any],
        path: Path,
        keeps: bool,
    ) -> None:
        self._name, self._path, self._keeps = name, path, keeps
        self._format, self._codes, self._scales, self._beside = form, codes, scales, beside
        self.shape: tuple[int, ...] = self._find_shape()

    @abstractmethod
    def _find_shape(self) -> tuple[int, ...]:
        """Finds the weight's shape; raises `CheckpointError` if the scales do not fit it."""

    @property
    def num_bytes(self) -> int:
        stored = (self._codes, self._scales, *self._beside.values())
        return sum(int(each.num_bytes) for each in stored)

    @abstractmethod
    def part(self, box: Box) -> Codes: ...

    def read(self, box: Box) -> Tensor:  # float32
        codes = self.part(box)
        if not self._keeps or codes.group == 1 or codes.values.dtype not in KEPT_TYPES:
            return codes.wide()
        if codes.values.dtype == torch.uint8 and _fits_nibbles(codes):
            codes = codes.packed()
        return QuantisedTensor(codes.map(Tensor.contiguous), torch.float32)

    def _unfit(self, shape: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"the scales of tensor {self._name!r} of {str(self._path)!r} have shape "
            f"{list(self._scales.shape)}, which does not fit its shape {list(shape)}"
        )


def _fits_nibbles(codes: Codes) -> bool:
    return codes.num_columns % 2 == 0 and codes.offset <= 8 and int(codes.values.max()) < 16


class _ScaledSource(QuantisedSource):
    """A stored value times the scale of its block."""

    def _find_shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._codes.shape
        known, flat = self._format.block, self._scales.shape
        flat = (1, 1) if not flat or flat == (1,) else flat
        flat = (*flat, 1) if len(flat) == 1 else flat
        if len(shape) != 2 or len(flat) != 2 or 0 in (*shape, *flat):
            raise self._unfit(shape)
        if known is None and (shape[0] % flat[0] or shape[1] % flat[1]):
            raise self._unfit(shape)
        self._block = known or (shape[0] // flat[0], shape[1] // flat[1])  # values per scale
        if any(-(-size // step) != count for size, step, count in zip(shape, self._block, flat)):
            raise self._unfit(shape)
        return shape

    def part(self, box: Box) -> Codes:
        (top, bottom), (left, right) = box
        rows, columns = self._block
        whole = tuple((0, size) for size in self._scales.shape)
        scales = self._scales.read(whole).reshape(-(-self.shape[0] // rows), -1)
        begin, end = top // rows, -(-bottom // rows)
        tall = scales[begin:end].repeat_interleave(rows, 0)
        tall = tall[top - begin * rows : bottom - begin * rows]
        values = self._codes.read(box)
        group, scales = _cut(tall, columns, left, right)
        inputs = self._format.input_group
        return Codes(values, scales, None, group, right - left, input_group=inputs)


class _PackedSource(QuantisedSource):
    """Unsigned codes packed into integers, with a scale per row and group of columns.

    AWQ and GPTQ store tensors of the transposed weight. AWQ packs codes along the weight's rows,
    the others along its columns; zeros are always packed along its rows.
    """

    def _find_shape(self) -> tuple[int, ...]:
        layout = self._format.layout
        self._is_transposed = layout is not PackLayout.PACKED
        self._packed_dim = 0 if layout is PackLayout.AWQ else 1
        self._order = _AWQ_ORDER if layout is PackLayout.AWQ else None
        self._per_word = WORD // self._format.bits
        rows, columns = self._oriented(self._codes.shape)
        if self._packed_dim == 0:
            rows *= self._per_word
        else:
            columns *= self._per_word
        scales = self._oriented(self._scales.shape)
        if len(scales) != 2 or scales[0] != rows or not scales[1] or columns % scales[1]:
            raise self._unfit((rows, columns))
        self._num_groups, self._group = scales[1], columns // scales[1]
        return rows, columns

    def _oriented(self, sizes: Sequence[_T]) -> Sequence[_T]:
        """Converts a sequence per stored dimension to one per dimension of the weight, and back."""
        return sizes[::-1] if self._is_transposed else sizes

    def part(self, box: Box) -> Codes:
        rows, columns = box
        groups = (0, self._num_groups)
        values = self._unpacked(self._codes, box, self._packed_dim)
        scales = self._read(self._scales, (rows, groups))
        zeros = None
        if (points := self._beside.get("zeros")) is not None:
            zeros = self._unpacked(points, (rows, groups), 0)
            if self._format.adds_one:
                zeros = (zeros + 1) & ((1 << self._format.bits) - 1)
        offset = 0 if zeros is not None else 1 << (self._format.bits - 1)
        return self._grouped(values, scales, zeros, offset, columns)

    def _read(self, source: Any, box: Box) -> Tensor:  # [rows, columns]
        stored: Tensor = source.read(tuple(self._oriented(box)))
        return stored.t() if self._is_transposed else stored

    def _unpacked(self, source: Any, box: Box, dim: int) -> Tensor:  # [rows, columns] uint8
        """Returns a part of a tensor whose values are packed along the weight's dimension `dim`."""
        (begin, end), per, bits = box[dim], self._per_word, self._format.bits
        first = begin // per
        words = self._read(source, (*box[:dim], (first, -(-end // per)), *box[dim + 1 :]))
        places = torch.tensor(self._order or range(per), dtype=torch.int32) * bits
        shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
        values = (words.unsqueeze(dim + 1) >> places.view(shape)) & ((1 << bits) - 1)
        wide = values.to(torch.uint8).flatten(dim, dim + 1)
        return wide.narrow(dim, begin - first * per, end - begin)

    def _grouped(
        self,
        values: Tensor,  # [rows, columns of `span`] uint8
        scales: Tensor,  # [rows, num_groups]
        zeros: Tensor | None,  # [rows, num_groups] uint8
        offset: int,
        span: tuple[int, int],
    ) -> Codes:
        """Returns codes with the groups of columns `span`: in order, or per column from `g_idx`."""
        num_columns = span[1] - span[0]
        if (index := self._beside.get("g_idx")) is not None:
            of_column = index.read((span,)).long()
            in_order = torch.arange(*span) // self._group
            if not torch.equal(of_column, in_order):
                scales = scales.index_select(1, of_column)
                zeros = None if zeros is None else zeros.index_select(1, of_column)
                return Codes(values, scales, zeros, 1, num_columns, offset)
        group, scales = _cut(scales, self._group, *span)
        if zeros is not None:
            _, zeros = _cut(zeros, self._group, *span)
        return Codes(values, scales, zeros, group, num_columns, offset)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1's codes."""
_E8M0_BIAS, _E8M0_NAN = 127, 255


class Mxfp4Source:
    """A parameter of experts, [num_experts, inputs, outputs], in MXFP4; reads as bfloat16.

    bfloat16 represents each value exactly: two bits and a power of two. Stored per expert and
    output are groups of inputs: codes [num_experts, outputs, num_groups, 16], with the earlier of
    two inputs in a byte's lower half, and powers of two [num_experts, outputs, num_groups]. Experts
    are dequantised one by one, so little memory is needed besides the result.
    """

    def __init__(self, name: str, codes: Any, scales: Any, path: Path) -> None:
        self._name, self._codes, self._scales, self._path = name, codes, scales, path
        shape, per_byte = tuple(codes.shape), 2
        if len(shape) != 4 or shape[3] * per_byte != MXFP4_GROUP or 0 in shape:
            raise CheckpointError(
                f"tensor {name + BLOCKS!r} of {str(path)!r} has shape {list(shape)}; expected "
                f"[experts, outputs, groups, {MXFP4_GROUP // per_byte}]"
            )
        if tuple(scales.shape) != shape[:3]:
            raise CheckpointError(
                f"tensor {name + BLOCK_SCALES!r} of {str(path)!r} has shape "
                f"{list(scales.shape)}; expected {list(shape[:3])}, one for each group of "
                f"{name + BLOCKS!r}"
            )
        self.shape = (shape[0], shape[2] * MXFP4_GROUP, shape[1])
        values = torch.tensor(_FP4, dtype=torch.bfloat16)
        low, high = values.repeat(16), values.repeat_interleave(16)
        self._pairs = torch.stack([low, high], 1).view(torch.int32).flatten()  # by byte
        powers = torch.arange(_E8M0_NAN + 1, dtype=torch.float64) - _E8M0_BIAS
        self._powers = powers.exp2().bfloat16()

    @property
    def num_bytes(self) -> int:
        return int(self._codes.num_bytes + self._scales.num_bytes)

    def read(self, box: Box) -> Tensor:  # bfloat16
        experts, inputs, outputs = box
        groups = (inputs[0] // MXFP4_GROUP, -(-inputs[1] // MXFP4_GROUP))
        begin = groups[0] * MXFP4_GROUP
        sizes = [end - start for start, end in box]
        found = torch.empty(sizes, dtype=torch.bfloat16)
        for place, expert in enumerate(range(*experts)):
            at = ((expert, expert + 1), outputs, groups)
            codes = self._bytes(BLOCKS, self._codes, (*at, (0, self._codes.shape[3])))
            scales = self._bytes(BLOCK_SCALES, self._scales, at)
            if (scales == _E8M0_NAN).any():
                raise CheckpointError(
                    f"tensor {self._name + BLOCK_SCALES!r} of {str(self._path)!r} holds "
                    f"{_E8M0_NAN}, which is no number, as a scale of expert {expert}"
                )
            pairs = self._pairs.index_select(0, codes.flatten().int()).view(torch.bfloat16)
            powers = self._powers.index_select(0, scales.flatten().int())
            wide = pairs.view(-1, MXFP4_GROUP).mul_(powers.unsqueeze(1)).view(sizes[2], -1)
            found[place] = wide[:, inputs[0] - begin : inputs[1] - begin].t()
        return found

    def _bytes(self, ending: str, source: Any, box: Box) -> Tensor:
        stored: Tensor = source.read(box)
        if stored.dtype != torch.uint8:
            raise CheckpointError(
                f"tensor {self._name + ending!r} of {str(self._path)!r} is of type "
                f"{stored.dtype}; expected uint8"
            )
        return stored


@dataclass(frozen=True, slots=True)
class CodedSource:
    """A weight in a GGUF file's codes, with scales and minima in float16; reads in this form."""

    shape: tuple[int, int]
    bits: int  # per code: 4 or 8
    group: int
    offset: int  # of codes of four bits
    has_minima: bool
    codes_of: Callable[[slice], tuple[Tensor, Tensor, Tensor | None]]  # `gguf.read_codes`, of rows

    @property
    def bytes_per_weight(self) -> float:
        """Includes scales and minima."""
        return self.bits / 8 + (4 if self.has_minima else 2) / self.group

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape) * self.bytes_per_weight)

    def beside(self, others: Sequence[CodedSource]) -> CodedSource:
        """Converts to codes that several weights can share in a joined product (`Codes.signed`)."""
        kinds = {(each.bits, each.group, each.offset, each.has_minima) for each in others}
        if len(kinds) == 1:
            return self
        group = math.gcd(*(each.group for each in others))
        has_minima = any(each.has_minima for each in others)
        return replace(self, bits=8, group=group, offset=0, has_minima=has_minima)

    def read(self, box: Box) -> QuantisedTensor:
        (top, bottom), (left, right) = box
        values, scales, minima = self.codes_of(slice(top, bottom))
        group, scales = _cut(scales, self.group, left, right)
        if minima is not None:
            minima = _cut(minima, self.group, left, right)[1].half()
        values = values[:, left:right]
        codes = Codes(values, scales.half(), None, group, right - left, self.offset, minima)
        if values.dtype == torch.uint8 and codes.num_columns % 2 == 0:
            codes = codes.packed()
        return QuantisedTensor(codes.map(Tensor.contiguous), torch.float32)


def are_many(sources: Iterable[Any]) -> bool:
    """Returns True if a CPU keeps the codes of these sources, which are all of a model."""
    return sum(math.prod(each.shape) for each in sources) >= FEWEST_CODED


def _cut(groups: Tensor, size: int, left: int, right: int) -> tuple[int, Tensor]:
    """Regroups [rows, num_groups] for columns [left, right); returns the group size and groups."""
    if groups.shape[1] == 1:
        return right - left, groups
    step = math.gcd(size, left) if left % size else size
    first = torch.arange(left, right, step) // size
    return step, groups.index_select(1, first)
