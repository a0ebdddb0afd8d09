"""Operations on a GPU whose result for a row does not depend on what is computed beside it.

What `workers/ops/invariant.py` is to a CPU. What differs from `CudaOps`:

- Products have tiles of a fixed size, and parts of the depth that follow from the weight's shape,
  where cuBLAS picks both by the number of rows (`linear.py`).
- Attention is cut at keys whose index is a multiple of a fixed number, whatever the batch, and its
  parts are added in order (`attention.py`).
- Experts' blocks have one size, and choices are added in order; near ties go to the lower expert.

Norms, gated units and the preparation of heads are programs of one row already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..protocol import (
    Experts,
    HeadProjection,
    Mixture,
    Projection,
    Rotation,
    Router,
)
from ..reference import route
from .attention import FIXED
from .experts import CudaMixture
from .linear import TiledProduct
from .ops import CudaOps


@triton.jit
def _rotation_kernel(
    positions,  # [num_rows] int32
    frequencies,  # [SIZE], or [num_rows, SIZE]
    to_row,  # 0: one set for all rows
    cos,  # [num_rows, SIZE], written
    sin,
    scale,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    frequency = tl.load(frequencies + row * to_row + column, mask=mask, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    tl.store(cos + row * SIZE + column, tl.cos(angle) * scale, mask=mask)
    tl.store(sin + row * SIZE + column, tl.sin(angle) * scale, mask=mask)


class InvariantCudaOps(CudaOps):
    """`CudaOps`, row by row the same bits."""

    name = "triton, batch-invariant"
    is_invariant = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, FIXED)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return TiledProduct(weight, bias, self.num_processors, fixed_rows=True)

    def pack_heads(self, weight: Tensor) -> HeadProjection:
        return TiledProduct(weight, None, self.num_processors, fixed_rows=True)

    def pack_experts(self, experts: Experts) -> Mixture:
        return CudaMixture(experts, fixed_rows=True)

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float) -> Rotation:
        num_rows, size = positions.shape[0], frequencies.shape[-1]
        cos, sin = (frequencies.new_empty(num_rows, size) for _ in range(2))
        if num_rows:
            to_row = frequencies.stride(0) if frequencies.dim() == 2 else 0
            _rotation_kernel[(num_rows,)](
                positions, frequencies, to_row, cos, sin, float(scale), size,
                triton.next_power_of_2(size),
            )  # fmt: skip
        return cos, sin

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        if logits.device.type == "cpu":  # under the interpreter, where vectors have a scalar rest
            rows = [route(row, router, stable=True) for row in logits.split(1)]
            return torch.cat([each for each, _ in rows]), torch.cat([each for _, each in rows])
        return route(logits, router, stable=True)
