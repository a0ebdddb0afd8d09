"""The operations on a CPU: kernels compiled by numba, large products through oneDNN.

A kernel is given addresses, and what it returns lies in a buffer that is kept from step to step,
so that a call costs about a microsecond. Which implementation a product gets depends on its size
alone, never on a measurement: two starts of one model give the same bits.

Measured on an AVX-512 CPU with bfloat16 dots, one thread, in microseconds, kernel against packed
oneDNN: 768x320 13 against 29 at one row, 24 against 40 at eight, 1195 against 1319 at 512; 1728x320
22 against 42, 49 against 80 and 2625 against 2832; 1024x2816 112 against 173, 248 against 326 and
13674 against 14281.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ...scheduler.types import StepInput
from ..attention import KVCache
from .kernels import elementwise
from .kernels.entries import Kernels, bfloat16_kernels, float32_kernels
from .kernels.panels import GROUP, QUAD, UNIT
from .kernels.prepare import NUM_INTEGERS, Layer, Step
from .kernels.product import SCRATCH_BYTES, SECTION
from .kernels.tiles import TILE, panel_bytes
from .kernels.work import MAX_QUERIES
from .plan import PagedStep, plan_step
from .protocol import AttentionSpec, Gate, GateKind, Norm, Projection, Rotation
from .reference import ReferenceOps

SMALL = {torch.bfloat16: 1 << 21, torch.float32: 1 << 20}
"""Elements of a weight up to which the kernel multiplies, on one thread; beyond, oneDNN on all."""
_KINDS = {
    GateKind.SILU: elementwise.SILU,
    GateKind.GELU_TANH: elementwise.GELU_TANH,
    GateKind.RELU: elementwise.RELU,
    GateKind.CLAMPED_SILU: elementwise.CLAMPED_SILU,
}


KERNELS = {torch.bfloat16: bfloat16_kernels, torch.float32: float32_kernels}
"""By dtype; compiled when they are first asked for."""


@dataclass(frozen=True, slots=True)
class CpuStep(PagedStep):
    """A step's plan with the row of integers that kernels read."""

    row: NDArray[np.int64] | None = None  # the fields of `Step`
    address: int = 0  # of `row`


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's description as kernels read it."""

    integers: NDArray[np.int64]  # the first fields of `Layer`
    floats: NDArray[np.float64]  # its other fields
    kept: tuple[Tensor, ...]  # whose addresses are in `integers`
    addresses: tuple[int, int]
    scratch_bytes: int


class CpuOps(ReferenceOps):
    """`Ops` for activations of one dtype, in the memory of one process."""

    name = "cpu"
    reads_device_only = False
    takes_parts = True
    max_latent_heads = MAX_QUERIES

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kernels = KERNELS[dtype]()
        self._own = _Buffers()
        self._layers: dict[AttentionSpec, _Layer] = {}

    def plan(self, step: StepInput, cache: KVCache) -> PagedStep:
        return self.adopt(plan_step(step, cache.block_size, cache.device))

    def adopt(self, plan: PagedStep) -> PagedStep:
        arrays = (
            plan.positions, plan.slots, plan.row_index, plan.query_start, plan.context_lens,
            plan.tree_start, plan.block_tables, plan.ancestors,
        )  # fmt: skip
        read = Step(
            plan.num_tokens,
            plan.num_seqs,
            plan.block_tables.shape[1],
            plan.ancestors.shape[1],
            plan.block_size,
            *[*map(_address, arrays), self.tile_alignment(plan.block_size)],
        )
        row = np.array(read, dtype=np.int64)
        return CpuStep(
            **{name: getattr(plan, name) for name in PagedStep.__slots__},
            row=row,
            address=row.ctypes.data,
        )

    def tile_alignment(self, block_size: int) -> int:
        """Keys of which the first tile of a row's attention begins at a multiple."""
        return block_size

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.dtype != self._dtype:  # a router's in float32
            return super().pack(weight, bias)
        if weight.numel() <= SMALL[self._dtype]:
            return PanelProjection(weight, bias, self._kernels)
        if torch.backends.mkldnn.is_available():
            return _PackedProjection(weight, bias)
        return super().pack(weight, bias)

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        if states.dtype != self._dtype:
            return super().norm(states, norm)
        num_rows, size = states.shape
        assert states.stride(1) == 1, states.stride()
        out = self._buffer("norm", num_rows, size)
        width, weight = self._kernels.width, _weight(norm)
        self._kernels.norm(
            states.data_ptr(), states.stride(0) * width, weight, out.data_ptr(), size * width,
            num_rows, size, norm.eps,
        )  # fmt: skip
        return out

    def add_norm(
        self,
        residual: Tensor,  # [num_tokens, hidden_size], written
        update: Tensor | None,  # [num_tokens, hidden_size]
        after: Norm | None,
        scale: float,
        before: Norm | None,
    ) -> Tensor:  # [num_tokens, hidden_size]
        if update is None:
            return residual if before is None else self.norm(residual, before)
        num_rows, size = residual.shape
        assert residual.is_contiguous(), residual.stride()
        assert update.is_contiguous(), update.stride()
        assert update.shape == residual.shape, (update.shape, residual.shape)
        out = residual if before is None else self._buffer("norm", num_rows, size)
        self._kernels.add_norm(
            residual.data_ptr(), update.data_ptr(), scale,
            after is not None, _weight(after), 0.0 if after is None else after.eps,
            before is not None, _weight(before), 0.0 if before is None else before.eps,
            out.data_ptr(), num_rows, size,
        )  # fmt: skip
        return out

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
        if not self._has_attention_kernel(spec):
            return super().rope_store_attend(
                joined, rotation, temperature, plan, cache, layer, spec
            )
        assert isinstance(plan, CpuStep), type(plan)
        assert joined.is_contiguous(), joined.stride()
        num_rows = plan.num_tokens
        assert joined.shape == (num_rows, spec.joined_width), (joined.shape, spec)
        cos = sin = 0
        if rotation is not None and spec.rotary_dim:
            assert rotation[0].shape == (num_rows, spec.rotary_dim // 2), rotation[0].shape
            cos, sin = rotation[0].data_ptr(), rotation[1].data_ptr()
        found = self._layers.get(spec)
        if found is None:
            found = self._layers[spec] = _describe(spec, self._kernels.width)
        integers, floats = found.addresses
        keys, values = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()
        start, step = joined.data_ptr(), plan.address
        factors = 0 if temperature is None else temperature.data_ptr()
        out = self._buffer("attend", num_rows, spec.num_heads * spec.value_dim)
        kernels = self._kernels
        kernels.prepare(start, cos, sin, factors, step, integers, floats, keys, values)
        if plan.turn is not None:
            plan.turn.stored()
        scratch = self._own.scratch_of(found.scratch_bytes)
        kernels.attend(start, keys, values, out.data_ptr(), scratch, step, integers, floats)
        return out

    def _has_attention_kernel(self, spec: AttentionSpec) -> bool:
        """A key is whole units, at least one quad of them; its query heads fit into one tile."""
        units, rest = divmod(spec.head_dim * self._kernels.width, UNIT)
        group = spec.num_heads // spec.num_kv_heads
        return rest == 0 and units >= QUAD and group <= MAX_QUERIES

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        if not self.has_gate_kernel(gate):
            return super().gate(gate_up, gate)
        kind = _KINDS[gate.kind]
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.is_contiguous(), gate_up.stride()
        out = self._buffer("gate", num_rows, size)
        self._kernels.gate(
            kind, gate_up.data_ptr(), out.data_ptr(), num_rows, size, gate.limit, gate.alpha
        )
        return out

    def has_gate_kernel(self, gate: Gate) -> bool:
        return gate.kind in _KINDS

    def _buffer(self, verb: str, num_rows: int, width: int) -> Tensor:  # [num_rows, width]
        """What the verb's last call returned, if it was as large."""
        buffers = self._own.buffers
        found = buffers.get((verb, width))
        if found is None or found[0] < num_rows:
            found = buffers[verb, width] = (
                num_rows,
                torch.empty(num_rows, width, dtype=self._dtype),
            )
        kept_rows, kept = found  # a tensor's own length takes a microsecond
        return kept if kept_rows == num_rows else kept[:num_rows]


class _Buffers(threading.local):
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

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        self._columns, self._length = weight.shape
        self._kernel, self._width = kernels.product, kernels.width
        self._panels = panels_of(weight)  # [num_groups, units, 64, values of a unit]
        self._units = self._panels.shape[1]
        self._is_padded = self._units * self._panels.shape[3] != self._length
        self._bias = bias
        self._start = self._panels.data_ptr()
        self._shift = 0 if bias is None else bias.data_ptr()
        self._own = _Buffers()

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


def panels_of(
    weight: Tensor,  # [out_features, in_features]
) -> Tensor:  # [num_groups, units, 64, values of a unit]
    """The weight's copy in panels, filled up with zeros to whole units and groups."""
    per_unit = UNIT // weight.dtype.itemsize
    filled = pad(weight, (0, -weight.shape[1] % per_unit, 0, -weight.shape[0] % GROUP))
    shape = (-1, GROUP, filled.shape[1] // per_unit, per_unit)
    return filled.view(shape).permute(0, 2, 1, 3).contiguous()


class _PackedProjection:
    """A product whose weight oneDNN has laid out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, states: Tensor) -> Tensor:
        out: Tensor = self._linear(states, self._weight, self._bias, "none", [], "")
        return out


def _describe(spec: AttentionSpec, width: int) -> _Layer:
    kept = [
        None if norm is None or norm.weight is None else norm.weight.float().contiguous()
        for norm in (spec.query_norm, spec.key_norm)
    ]
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    layer = Layer(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        rotary_begin=spec.rotary_begin,
        rotary_dim=spec.rotary_dim,
        window=spec.window or 0,
        chunk=spec.chunk or 0,
        sinks=_address(sinks),
        has_query_norm=spec.query_norm is not None,
        query_weight=_address(kept[0]),
        has_key_norm=spec.key_norm is not None,
        key_weight=_address(kept[1]),
        norms_all_heads=spec.norms_all_heads,
        norms_after_rotation=spec.norms_after_rotation,
        shared_values=spec.shared_values,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        query_eps=spec.query_norm.eps if spec.query_norm else 0.0,
        key_eps=spec.key_norm.eps if spec.key_norm else 0.0,
    )
    integers = np.array(layer[:NUM_INTEGERS], dtype=np.int64)
    floats = np.array(layer[NUM_INTEGERS:], dtype=np.float64)
    padded = -(-spec.value_dim // 16) * 16 + 64
    scratch_bytes = MAX_QUERIES * (spec.head_dim * width + (TILE + 2 + padded) * 4)
    scratch_bytes += panel_bytes(width, spec.head_dim, spec.value_dim)
    tensors = tuple(each for each in (*kept, sinks) if each is not None)
    addresses = (integers.ctypes.data, floats.ctypes.data)
    return _Layer(integers, floats, tensors, addresses, scratch_bytes)


def _weight(norm: Norm | None) -> int:
    if norm is None or norm.weight is None:
        return 0
    assert norm.weight.dtype == torch.float32, norm.weight.dtype
    return norm.weight.data_ptr()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
