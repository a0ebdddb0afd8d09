"""Products by a weight that is laid out at load: in panels for the kernel, or by oneDNN.

Where oneDNN does not pack bfloat16 the kernel multiplies at every size. Measured with AVX2, one
thread, in microseconds, kernel against torch's plain product:
1024x1024 113 against 850 at one row, 568 against 1848 at eight, 72590 against 171742 at 200;
512x8000 616 against 3130, 9377 against 20032, 225526 against 628921. A packed copy in float32 is
faster at 200 rows (17244 and 96285) and slower at one (299 and 3036), and takes twice the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kernels import INT, VOID, Kind, Matrix, compiled
from .kernels.panels import GROUP, SCRATCH_BYTES, SECTION, UNIT, product_rows
from .kernels.vector import FULL, HALF
from .protocol import Projection
from .table import KERNEL, LARGE_WEIGHT, ONEDNN, TORCH, filled_rows, ways

Kernel = Callable[..., None]


def kind_of(dtype: torch.dtype) -> Kind:
    """What kernels call a type of values."""
    return Kind(HALF, 2) if dtype == torch.bfloat16 else Kind(FULL, 4)


@cache
def product_kernel(dtype: torch.dtype) -> Kernel:
    """Compiled when the first weight of a dtype is laid out."""
    kind = kind_of(dtype)

    @compiled(VOID, *[INT] * 10)
    def product(rows, to_row, weight, bias, out, to_out, num_rows, num_columns, length, scratch):
        """out = rows @ weight.T + bias; a bias of 0 is none."""
        read, written = Matrix(rows, to_row), Matrix(out, to_out)
        product_rows(kind, read, num_rows, weight, bias, written, num_columns, length, scratch)

    return product


@cache
def _heads_kernel(dtype: torch.dtype) -> Kernel:
    kind = kind_of(dtype)

    @compiled(VOID, *[INT] * 13)
    def product_of_heads(
        rows, to_row, to_head, weight, to_panels, out, to_out, to_out_head, num_rows, num_heads,
        num_columns, length, scratch,
    ):  # fmt: skip
        """The product of every head's part of rows by its own weight."""
        for head in range(num_heads):
            read = Matrix(rows + head * to_head, to_row)
            written = Matrix(out + head * to_out_head, to_out)
            panels = weight + head * to_panels
            product_rows(kind, read, num_rows, panels, 0, written, num_columns, length, scratch)

    return product_of_heads


class Buffers(threading.local):
    """What a thread's calls write to."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, int], tuple[int, Tensor]] = {}  # with the number of rows
        self._scratch, self._num_bytes = torch.empty(0, dtype=torch.uint8), 0

    def scratch_of(self, num_bytes: int) -> int:
        """The address of so much memory."""
        if num_bytes > self._num_bytes:
            self._scratch = torch.zeros(num_bytes, dtype=torch.uint8)
            self._num_bytes = num_bytes
        return self._scratch.data_ptr()


class PanelProjection:
    """A product whose weight lies in groups of panels (`kernels/panels.py`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._columns, self._length = weight.shape
        self._kernel, self._width = product_kernel(weight.dtype), weight.dtype.itemsize
        self._panels = panels_of(weight)  # [num_groups, units, 64, values of a unit]
        self._units = self._panels.shape[1]
        self._is_padded = self._units * self._panels.shape[3] != self._length
        self._bias = bias
        self._start = self._panels.data_ptr()
        self._shift = 0 if bias is None else bias.data_ptr()
        self._own = Buffers()

    def __call__(self, states: Tensor) -> Tensor:
        num_rows, length = states.shape
        assert length == self._length, (length, self._length)
        assert states.stride(1) == 1, states.stride()
        if self._is_padded:  # a unit is read whole
            states = pad(states, (0, 1))
        out = torch.empty(num_rows, self._columns, dtype=states.dtype)
        scratch = self._own.scratch_of(SCRATCH_BYTES) if self._units > SECTION else 0
        self._kernel(
            states.data_ptr(), states.stride(0) * self._width, self._start, self._shift,
            out.data_ptr(), self._columns * self._width, num_rows, self._columns, self._units,
            scratch,
        )  # fmt: skip
        return out


class PanelHeads:
    """A product per head; rows of a weight are whole units."""

    def __init__(self, weight: Tensor, own: Buffers) -> None:  # [num_heads, out, in]
        self._kernel, self._shape, self._own = _heads_kernel(weight.dtype), weight.shape, own
        self._panels = torch.stack([panels_of(head) for head in weight])

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, num_heads, in] -> [..., out]
        num_heads, columns, length = self._shape
        num_rows, width = states.shape[0], states.itemsize
        assert states.shape[1:] == (num_heads, length), (states.shape, self._shape)
        assert states.stride(2) == 1, states.stride()
        out = torch.empty(num_rows, num_heads, columns, dtype=states.dtype)
        to_panels = self._panels.stride(0) * width
        self._kernel(
            states.data_ptr(), states.stride(0) * width, states.stride(1) * width,
            self._panels.data_ptr(), to_panels, out.data_ptr(), num_heads * columns * width,
            columns * width, num_rows, num_heads, columns, length * width // UNIT,
            self._own.scratch_of(SCRATCH_BYTES),
        )  # fmt: skip
        return out


def panels_of(
    weight: Tensor,  # [out_features, in_features]
) -> Tensor:  # [num_groups, units, 64, values of a unit]
    """The weight's copy in panels, filled up with zeros to whole units and groups."""
    per_unit = UNIT // weight.dtype.itemsize
    filled = pad(weight, (0, -weight.shape[1] % per_unit, 0, -weight.shape[0] % GROUP))
    shape = (-1, GROUP, filled.shape[1] // per_unit, per_unit)
    return filled.view(shape).permute(0, 2, 1, 3).contiguous()


def pack_weight(weight: Tensor, bias: Tensor | None, what: str) -> Projection | None:
    """The product by a weight of a class of the table; None: torch's plain one serves."""
    made: dict[str, Callable[[], Projection]] = {
        KERNEL: lambda: PanelProjection(weight, bias),
        ONEDNN: lambda: PackedProjection(weight, bias),
    }
    found = ways(weight.dtype, what)
    if found[0].name == TORCH:
        return None
    few = made[found[0].name]()
    return ProjectionByRows(few, made[found[1].name](), found[1].fewest_rows) if found[1:] else few


def pack_large(weight: Tensor, bias: Tensor | None) -> Projection | None:
    """`pack_weight` for whoever multiplies on all threads, whatever the weight's size."""
    return pack_weight(weight, bias, LARGE_WEIGHT)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionByRows:
    """A product with two layouts of its weight: one for few rows, one for many."""

    few: Projection
    many: Projection
    fewest_rows: int  # of `many`

    def __call__(self, states: Tensor) -> Tensor:
        return (self.few if states.shape[0] < self.fewest_rows else self.many)(states)


class PackedProjection:
    """A product whose weight oneDNN has laid out, by one of few numbers of rows (`filled_rows`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, states: Tensor) -> Tensor:
        num_rows = states.shape[0]
        filled = filled_rows(num_rows)
        if filled != num_rows:
            states = _with_more_rows(states, filled)
        out: Tensor = self._linear(states, self._weight, self._bias, "none", [], "")
        return out if filled == num_rows else out[:num_rows]


def _with_more_rows(states: Tensor, num_rows: int) -> Tensor:  # [num_rows, width]
    """`states` with anything behind them: what lies there, where there is as much memory."""
    size = states.shape[1]
    end = states.storage_offset() + num_rows * size
    if states.is_contiguous() and end * states.itemsize <= states.untyped_storage().nbytes():
        return states.as_strided((num_rows, size), (size, 1))
    return pad(states, (0, 0, 0, num_rows - states.shape[0]))
