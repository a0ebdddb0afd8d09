"""Products of float8 weights with float8 inputs, which some checkpoints request: `scaled_mm`.

One kernel finds the scale of every row of the inputs, or of every 128 of its columns if weights
have blocks, and writes the row's codes. A scale depends only on its row. A weight uses such
products for all numbers of rows or for none: quantised inputs change results more than another
order of sums does, so a token must not meet both kinds.

Facts relied on (torch 2.13, `ScaledBlas.cpp`): inputs and the weight's rows are contiguous, in
multiples of 16; scales by rows use cuBLASLt or CUTLASS from compute capability 8.9 on; scales by
128 columns use cuBLASLt 12.9 on capability 9.0 only, laid out by columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..quantised import QuantisedTensor
from .linear import TiledProduct
from .prepare import coded

log = logging.getLogger(__name__)

GROUP = 128
_ALIGNED = 16
_ROWS_TOGETHER = 4  # 16 bytes of scales
_MAX_BLOCK = 16384
_TILE = 2048
_LARGEST = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-12)
_MAX_ERROR = 0.1  # of a product with inputs in float8, whose codes are about 0.03 off
_TRIED_ROWS = (1, 100)


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_kernel(
    states,  # [num_rows, SIZE], rows `to_row` elements apart
    codes,  # [rows of the grid, SIZE] uint8, written
    scales,  # [SIZE / GROUP, rows of the grid] float32, written
    num_rows, to_row,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale
    GROUPS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of groups). Rows from `num_rows` on are zero."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    first, column = group * GROUP, tl.arange(0, BLOCK)
    place, inside = first[:, None] + column[None, :], first < SIZE
    real = inside & (row + tl.zeros([GROUPS], tl.int64) < num_rows)
    states += row * to_row
    peak = tl.full([GROUPS], _LEAST, tl.float32)
    for begin in range(0, GROUP, BLOCK):
        mask = real[:, None] & (begin + column < GROUP)[None, :]
        wide = tl.load(states + begin + place, mask=mask, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(wide), axis=1))
    target = scales + group.to(tl.int64) * tl.num_programs(0) + row
    tl.store(target, tl.div_rn(peak, tl.full([GROUPS], _LARGEST, tl.float32)), mask=inside)
    factor = tl.div_rn(tl.full([GROUPS], _LARGEST, tl.float32), peak)
    codes += row * SIZE
    for begin in range(0, GROUP, BLOCK):  # once more, from the first cache
        mask = (begin + column < GROUP)[None, :]
        read = real[:, None] & mask
        wide = tl.load(states + begin + place, mask=read, other=0.0).to(tl.float32)
        wide = wide * factor[:, None]
        code = tl.where(wide == wide, coded(wide, 3), 0x7F)  # e4m3's of what is no number
        tl.store(codes + begin + place, code.to(tl.uint8), mask=inside[:, None] & mask)


def quantise(
    states: Tensor,  # [num_rows, size]
    group: int,  # columns that share a scale: `GROUP`, or all
) -> tuple[Tensor, Tensor]:  # [rows, size] float8; [rows, size / group] float32
    """Returns codes, and scales laid out by columns; rows are padded to a multiple of four."""
    num_rows, size = states.shape
    assert size % group == 0, (size, group)
    if states.stride(-1) != 1:
        states = states.contiguous()
    num_made = triton.cdiv(num_rows, _ROWS_TOGETHER) * _ROWS_TOGETHER
    codes = torch.empty((num_made, size), dtype=torch.float8_e4m3fn, device=states.device)
    scales = torch.empty((size // group, num_made), dtype=torch.float32, device=states.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(group))
    together = max(1, min(_TILE // block, triton.next_power_of_2(size // group)))
    _quantise_kernel[(num_made, triton.cdiv(size // group, together))](
        states, codes.view(torch.uint8), scales, num_rows, states.stride(0),
        size, group, together, block,
        num_warps=8 if block > 4096 else 4,
    )  # fmt: skip
    return codes, scales.t() if size > group else scales.view(-1, 1)


class _Unfit(Exception):
    """`scaled_mm` cannot be used here; has the reason."""


def missing(*_: Any, **__: Any) -> Tensor:
    """Replaces `scaled_mm` in a torch without it."""
    raise AssertionError("no product takes inputs in float8")


@dataclass(slots=True)
class Float8Products:
    """The float8 products of a device, and whether they are enabled at present."""

    groups: set[int]  # of inputs that `scaled_mm` takes: `GROUP`, and 0: a whole row
    num_processors: int
    multiply: Callable[..., Tensor]  # `scaled_mm`, or what stands in for it
    are_plain: bool = False  # inputs stay as they are

    @classmethod
    def of(cls, device: torch.device, num_processors: int) -> Float8Products:
        groups: set[int] = set()
        multiply = getattr(functional, "scaled_mm", missing)
        if device.type == "cuda" and torch.version.hip is None and multiply is not missing:
            capability = torch.cuda.get_device_capability(device)
            if capability >= (8, 9):
                groups.add(0)
            if capability[0] == 9 and _version(torch.version.cuda) >= (12, 9):
                groups.add(GROUP)
        return cls(groups, num_processors, multiply)

    def pack(self, weight: QuantisedTensor, bias: Tensor | None) -> Float8Product | None:
        """Returns the product; None: the weight's inputs are not quantised."""
        group = _group_of(weight)
        if group is None or group not in self.groups:
            return None
        made = Float8Product(weight, bias, group, self)
        if weight.device.type == "cuda":
            try:
                made.check()
            except (_Unfit, RuntimeError, ValueError) as error:
                self.groups.discard(group)
                log.warning("inputs of float8 weights stay as they are: %s", error)
                return None
        return made


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "0").split("."))


def _group_of(weight: QuantisedTensor) -> int | None:
    """Returns the columns per input scale, 0: a whole row; None: no float8 product fits."""
    codes, wanted = weight.codes, weight.codes.input_group
    if codes.values.dtype != torch.float8_e4m3fn or wanted is None or weight.dim() != 2:
        return None
    if weight.dtype != torch.bfloat16 or any(size % _ALIGNED for size in weight.shape):
        return None
    if codes.scales.shape[-1] == 1 and (wanted == 0 or wanted >= codes.num_columns):
        return 0
    is_grouped = codes.group == wanted == GROUP and codes.num_columns % GROUP == 0
    return GROUP if is_grouped else None


class Float8Product:
    """A weight [out_features, in_features] in float8, and its product with float8 inputs."""

    def __init__(
        self, weight: QuantisedTensor, bias: Tensor | None, group: int, products: Float8Products
    ) -> None:
        types: Any = functional.ScalingType
        codes, self._products = weight.codes, products
        self._recipe = types.BlockWise1x128 if group else types.RowWise
        self.group = group or codes.num_columns  # columns of the inputs that share a scale
        scales = codes.scales.float()
        if group:  # as `scaled_mm` reads them
            scales = scales.t().contiguous().t()
        self._scales = scales if group else scales.contiguous().view(1, -1)
        values = codes.values.contiguous()
        self._values = values.t()  # [in_features, out_features]
        self._weight = QuantisedTensor(replace(codes, values=values, scales=scales), weight.dtype)
        self._bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, states: Tensor) -> Tensor:  # [num_rows, in] -> [num_rows, out]
        if self._products.are_plain:
            return self.plain(states)
        num_rows = states.shape[0]
        if not num_rows:
            return states.new_empty(0, self._weight.shape[0])
        quantised, scales = quantise(states, self.group)
        out = self._products.multiply(
            quantised, self._values, scales, self._recipe, self._scales, self._recipe,
            bias=self._bias, output_dtype=self._weight.dtype,
        )  # fmt: skip
        return out[:num_rows]

    def plain(self, states: Tensor) -> Tensor:  # [num_rows, in] -> [num_rows, out]
        """Computes the product with inputs that are not quantised."""
        made = TiledProduct(
            self._weight, self._bias, self._products.num_processors, fixed_rows=False
        )
        return made(states)

    def check(self) -> None:
        """Raises if a product is wrong."""
        shape, device = tuple(self._weight.shape), self._weight.device
        for num_rows in _TRIED_ROWS:
            index = torch.arange(num_rows * shape[1], device=device)
            states = (index * 0.7).sin().view(num_rows, -1).to(self._weight.dtype)
            wanted = self.plain(states).float()
            error = float((self(states).float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
            if not error <= _MAX_ERROR:
                raise _Unfit(f"a product of {num_rows} rows with {list(shape)} is {error:.2g} off")
