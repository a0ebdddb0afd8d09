"""`Ops` on a GPU: Triton kernels, and torch's own products (cuBLAS).

`plan` is made on the host like everywhere; every other verb can be captured in a CUDA graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention import KVCache
from ...verify.device_settings import DeviceEdits, DeviceSettings
from ..plan import PagedStep
from ..protocol import (
    AttentionSpec,
    Experts,
    Gate,
    HeadProjection,
    Mixture,
    Norm,
    Projection,
    Rotation,
    Router,
)
from ..quantised import QuantisedTensor
from ..reference import ReferenceOps, prepared_heads, route, route_by_row
from . import elementwise
from .attention import FIXED, attend, warm_up
from .draw import draw, gumbel_argmax
from .edit import edit, logprobs
from .experts import CudaMixture
from .linear import INTERPRETED, TiledProduct
from .prepare import can_prepare, prepare_and_store

log = logging.getLogger(__name__)

INTERPRETED_PROCESSORS = 4  # stands in for a device's where kernels run under the interpreter


class CudaOps(ReferenceOps):
    """`Ops` for one device. What is not overridden is torch's, without a host's look at values."""

    name = "triton"
    reads_device_only = True
    keeps_quantised = True

    def __init__(self, device: torch.device, splits: int | None = None) -> None:
        """`splits`: parts that every context is cut into; None: chosen from each step's shape."""
        self._splits = splits
        self.num_processors = INTERPRETED_PROCESSORS
        if device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if isinstance(weight, QuantisedTensor):
            return TiledProduct(weight, bias, self.num_processors, fixed_rows=False)
        return super().pack(weight, bias)

    def pack_experts(self, experts: Experts) -> Mixture:
        return CudaMixture(experts)

    def warm_up(self, specs: Iterable[AttentionSpec], dtype: torch.dtype, block_size: int) -> None:
        if INTERPRETED.value:  # there is nothing to compile
            return
        begin = time.perf_counter()
        count = warm_up(dict.fromkeys(specs), dtype, block_size, is_fixed=self._splits == FIXED)
        spent_s = time.perf_counter() - begin
        log.info("%d kernels of attention are compiled, in %.1f s", count, spent_s)

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        return elementwise.norm(states, norm)

    def add_norm(
        self,
        residual: Tensor,  # [num_tokens, hidden_size], written
        update: Tensor | None,  # [num_tokens, hidden_size]
        after: Norm | None,
        scale: float,
        before: Norm | None,
    ) -> Tensor:  # [num_tokens, hidden_size]
        if update is None:
            return residual if before is None else elementwise.norm(residual, before)
        return elementwise.add_norm(residual, update, after, scale, before)

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
        keys, values = cache.keys[layer], cache.values[layer]
        if can_prepare(spec):
            query = prepare_and_store(joined, rotation, temperature, plan, keys, values, spec)
        else:
            query, key, value = prepared_heads(joined, rotation, temperature, spec)
            query = query.contiguous()
            keys.index_copy_(0, plan.slots.long(), key)
            if not spec.shared_values:
                values.index_copy_(0, plan.slots.long(), value)
        out = attend(query, keys, values, plan, spec, self.num_processors, self._splits)
        return out.flatten(1)

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        return elementwise.gate(gate_up, gate)

    def edit_on_device(self, logits: Tensor, edits: DeviceEdits) -> None:
        edit(logits, edits, self.num_processors)

    def logprobs_on_device(
        self, logits: Tensor, tokens: Tensor, edits: DeviceEdits
    ) -> tuple[Tensor, Tensor]:
        return logprobs(logits, tokens, edits)

    def gumbel_argmax_on_device(
        self, logits: Tensor, positions: Tensor, settings: DeviceSettings, tokens: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        return gumbel_argmax(logits, positions, settings, tokens, self.num_processors)

    def draw_on_device(
        self,
        logits: Tensor,
        positions: Tensor,
        settings: DeviceSettings,
        tokens: Tensor | None = None,
    ) -> Tensor:
        return draw(logits, positions, settings, tokens, self.num_processors)


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
    """`CudaOps` whose result for a row does not depend on what is computed beside it.

    Products have tiles of a fixed size, and parts of the depth that follow from the weight's shape,
    where cuBLAS chooses both by the number of rows (`linear.py`). Attention is cut at keys whose
    index is a multiple of a fixed number, and its parts are added in order (`attention.py`).
    Experts' blocks have one size, and choices are added in order; near ties go to the lower expert.
    """

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
            return route_by_row(logits, partial(route, router=router, stable=True))
        return route(logits, router, stable=True)
