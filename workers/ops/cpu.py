"""The operations on a CPU: kernels compiled by numba, large products through oneDNN.

A kernel takes addresses, and its result is in a buffer that is reused from step to step, so a call
costs about a microsecond. `table.py` chooses the implementation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ...scheduler.types import StepInput
from ..attention import KVCache, KVCode
from .experts import PackedMixture, PanelMixture, fits_panels, route, routing_kernel
from .kernels import (
    FLOAT,
    GROUP,
    HAS_TILES,
    INT,
    LANES,
    STRIDE,
    UNIT,
    VOID,
    Kernel,
    Kind,
    Matrix,
    compiled,
    elementwise,
)
from .kernels.attend import attend_step
from .kernels.codes import (
    CENTRE,
    CENTRED,
    EIGHT,
    FOUR,
    PLAIN,
    SHIFTED,
    CodedShape,
    coded_rows,
    panels_of_codes,
    unpacked_bytes,
)
from .kernels.elementwise import Activation, RowNorm, add_norm_rows, gate_rows, norm_rows
from .kernels.panels import QUAD, SCRATCH_BYTES, SECTION, kind_of, panels_of, product_rows
from .kernels.prepare import (
    NUM_INTEGERS,
    Angles,
    Cache,
    Layer,
    Step,
    prepare_rows,
    read_layer,
    read_step,
)
from .kernels.tiles import BLOCK, MAX_QUERIES, TILE, most_keys, panel_bytes, whole_row
from .kernels.vector import Claims
from .plan import PagedStep, plan_step
from .protocol import (
    AttentionSpec,
    Experts,
    Gate,
    GateKind,
    HeadProjection,
    Mixture,
    Norm,
    Projection,
    Rotation,
    Router,
)
from .quantised import Codes, QuantisedTensor, widened
from .reference import TorchOps
from .table import (
    KERNEL,
    LARGE_WEIGHT,
    ONEDNN,
    SMALL,
    SMALL_WEIGHT,
    filled_rows,
    keeps_codes,
    way,
)

ALONE = (0, 0, 1, 0)  # one thread computes everything (`Claims`)
_FEWEST_ROTATIONS, _MOST_ROTATIONS = 1024, 1 << 16  # positions in a table
KERNEL_DTYPES = (torch.bfloat16, torch.float32)
GATE_KERNELS = {
    GateKind.SILU: elementwise.SILU,
    GateKind.GELU_TANH: elementwise.GELU_TANH,
    GateKind.RELU: elementwise.RELU,
    GateKind.CLAMPED_SILU: elementwise.CLAMPED_SILU,
}


class Buffers(threading.local):
    """The output buffers of a thread's calls."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, int], tuple[int, Tensor]] = {}  # with their numbers of rows
        self._scratch, self._num_bytes = torch.empty(0, dtype=torch.uint8), 0

    def scratch_of(self, num_bytes: int) -> int:
        """Returns the address of at least this much memory."""
        if num_bytes > self._num_bytes:
            self._scratch = torch.zeros(num_bytes, dtype=torch.uint8)
            self._num_bytes = num_bytes
        return self._scratch.data_ptr()


@dataclass(frozen=True, slots=True)
class DescribedLayer:
    """A layer's description in the form that kernels read."""

    integers: NDArray[np.int64]  # the first fields of `Layer`
    floats: NDArray[np.float64]  # its other fields
    kept: tuple[Tensor, ...]  # tensors whose addresses are in `integers`
    addresses: tuple[int, int]
    scratch_bytes: int
    joined_width: int
    has_kernel: bool


class CpuOps(TorchOps):
    """`Ops` for activations of one dtype, in the memory of one process."""

    name = "cpu"
    reuses_results = True
    takes_parts = True
    max_latent_heads = MAX_QUERIES

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kernels = kernels_of(dtype)
        self._own = Buffers()
        self._layers: dict[tuple[AttentionSpec, KVCode | None], DescribedLayer] = {}
        self._rotations: dict[tuple[Tensor, float], Rotation] = {}  # by frequencies and scale
        self.keeps_codes = keeps_codes(dtype)

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
            *[*map(Tensor.data_ptr, arrays), self.alignment_of(plan.block_size)],
        )
        return replace(plan, integers=np.array(read, dtype=np.int64), passes=(), spread=None)

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float) -> Rotation:
        """Returns rows of tables of the positions so far; a step computes none."""
        if (found := self._rotations.get((frequencies, scale))) is not None:
            with suppress(IndexError):  # a position that no earlier step had
                return found[0].index_select(0, positions), found[1].index_select(0, positions)
        size = max(int(positions.max()) + 1 if len(positions) else 0, _FEWEST_ROTATIONS)
        if size > _MOST_ROTATIONS:
            return super().rotation(positions, frequencies, scale)
        rows = torch.arange(1 << (size - 1).bit_length()).to(positions.dtype)
        cos, sin = super().rotation(rows, frequencies, scale)
        self._rotations[frequencies, scale] = cos, sin
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def alignment_of(self, block_size: int) -> int:
        """Returns the alignment, in keys, of the first tile of a row's attention."""
        size = most_keys(HAS_TILES and self.dtype == torch.bfloat16)
        if self.is_invariant and block_size <= size:
            return size // block_size * block_size
        return block_size

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.dtype != self.dtype:  # a router's in float32
            return super().pack(weight, bias)
        if isinstance(weight, QuantisedTensor):
            if (codes := kernel_codes(weight)) is not None:
                return CodedProjection(codes, bias)
            weight = weight.wide()
        what = SMALL_WEIGHT if weight.numel() <= SMALL[self.dtype] else LARGE_WEIGHT
        return pack_weight(weight, bias, what) or super().pack(weight, bias)

    def pack_heads(self, weight: Tensor) -> HeadProjection:
        if weight.dtype != self.dtype or weight.shape[2] * weight.itemsize % UNIT:
            return super().pack_heads(weight)
        return PanelHeads(weight, self._own.scratch_of)

    def pack_experts(self, experts: Experts) -> Mixture:
        if experts.down.dtype != self.dtype:
            return super().pack_experts(experts)
        routing_kernel()  # compiled at load, not in a step
        function = GATE_KERNELS.get(experts.gate.kind)
        is_small = experts.gate_up[0].numel() <= SMALL[self.dtype]
        if is_small:
            up, down = widened(experts.gate_up), widened(experts.down)
            experts = replace(experts, gate_up=up, down=down)
        if function is not None and is_small and fits_panels(experts):
            return PanelMixture(experts, function, self._own.scratch_of)
        return PackedMixture(experts, self.pack, self.gate)

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        return route(logits, router)

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        if states.dtype != self.dtype:
            return super().norm(states, norm)
        num_rows, size = states.shape
        assert states.stride(1) == 1, states.stride()
        out = self._buffer("norm", num_rows, size)
        width, weight = self._kernels.width, weight_address(norm)
        self._kernels.norm(
            states.data_ptr(), states.stride(0) * width, weight, out.data_ptr(), size * width,
            num_rows, size, norm.eps,
        )  # fmt: skip
        return out

    def add_norm(
        self, residual: Tensor, update: Tensor | None, after: Norm | None, scale: float,
        before: Norm | None, kept: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if update is None:
            return super().add_norm(residual, update, after, scale, before, kept)
        num_rows, size = residual.shape
        assert residual.is_contiguous(), residual.stride()
        assert update.is_contiguous(), update.stride()
        assert update.shape == residual.shape, (update.shape, residual.shape)
        out = residual if before is None else self._buffer("norm", num_rows, size)
        self._kernels.add_norm(
            residual.data_ptr(), update.data_ptr(), scale,
            after is not None, weight_address(after), 0.0 if after is None else after.eps,
            before is not None, weight_address(before), 0.0 if before is None else before.eps,
            out.data_ptr(), num_rows, size,
        )  # fmt: skip
        if kept is not None:
            kept.copy_(residual)
        return out

    def rope_store_attend(
        self, joined: Tensor, rotation: Rotation | None, temperature: Tensor | None,
        plan: PagedStep, cache: KVCache, layer: int, spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        found = self.described(spec, cache.codes[layer])
        if not found.has_kernel:
            return super().rope_store_attend(
                joined, rotation, temperature, plan, cache, layer, spec
            )
        assert plan.integers is not None, "`plan` or `adopt` made it"
        assert joined.is_contiguous(), joined.stride()
        num_rows = joined.shape[0]
        cos = sin = 0
        if rotation is not None and spec.rotary_dim:
            assert rotation[0].shape == (num_rows, spec.rotary_dim // 2), rotation[0].shape
            cos, sin = rotation[0].data_ptr(), rotation[1].data_ptr()
        assert joined.shape[1] == found.joined_width, (joined.shape, spec)
        integers, floats = found.addresses
        keys, values = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()
        start, step = joined.data_ptr(), plan.integers.ctypes.data
        factors = 0 if temperature is None else temperature.data_ptr()
        out = self._buffer("attend", num_rows, spec.num_heads * spec.value_dim)
        kernels = self._kernels
        kernels.prepare(start, cos, sin, factors, step, integers, floats, keys, values)
        if plan.turn is not None:
            plan.turn.stored()
        scratch = self._own.scratch_of(found.scratch_bytes)
        if plan.spread is not None:
            assert plan.spread.integers is not None, "`adopt` made it"
            step = plan.spread.integers.ctypes.data
        kernels.attend(start, keys, values, out.data_ptr(), scratch, step, integers, floats, *ALONE)
        return out

    def described(self, spec: AttentionSpec, code: KVCode | None = None) -> DescribedLayer:
        """Returns a layer's attention in the form that kernels read; cached.

        Args:
            code: code of its keys and values; None: they have the activations' dtype.
        """
        found = self._layers.get((spec, code))
        if found is None:
            found = self._layers[spec, code] = _describe(spec, code, self._kernels.width)
        return found

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        kind = GATE_KERNELS.get(gate.kind)
        if kind is None:
            return super().gate(gate_up, gate)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.is_contiguous(), gate_up.stride()
        out = self._buffer("gate", num_rows, size)
        self._kernels.gate(
            kind, gate_up.data_ptr(), out.data_ptr(), size * out.element_size(), num_rows, size,
            gate.limit, gate.alpha,
        )  # fmt: skip
        return out

    def _buffer(self, verb: str, num_rows: int, width: int) -> Tensor:  # [num_rows, width]
        """Returns a view of the verb's buffer, allocated with `filled_rows` rows if necessary."""
        buffers = self._own.buffers
        found = buffers.get((verb, width))
        if found is None or found[0] < num_rows:
            kept = torch.empty(filled_rows(num_rows), width, dtype=self.dtype)
            found = buffers[verb, width] = (kept.shape[0], kept)
        kept_rows, kept = found  # a tensor's own length takes a microsecond
        return kept if kept_rows == num_rows else kept[:num_rows]


def has_attention_kernel(spec: AttentionSpec, width: int) -> bool:
    """Returns True if keys are whole units of at least a quad, and query heads fit into a tile."""
    units, rest = divmod(spec.head_dim * width, UNIT)
    group = spec.num_heads // spec.num_kv_heads
    return rest == 0 and units >= QUAD and group <= MAX_QUERIES


def _describe(spec: AttentionSpec, code: KVCode | None, width: int) -> DescribedLayer:
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
        sinks=address(sinks),
        has_query_norm=spec.query_norm is not None,
        query_weight=address(kept[0]),
        has_key_norm=spec.key_norm is not None,
        key_weight=address(kept[1]),
        norms_all_heads=spec.norms_all_heads,
        norms_after_rotation=spec.norms_after_rotation,
        shared_values=spec.shared_values,
        code_bits=0 if code is None else code.format.mantissa_bits,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        query_eps=spec.query_norm.eps if spec.query_norm else 0.0,
        key_eps=spec.key_norm.eps if spec.key_norm else 0.0,
        key_scale=1.0 if code is None else code.key_scale,
        value_scale=1.0 if code is None else code.value_scale,
        largest=0.0 if code is None else code.format.largest,
    )
    integers = np.array(layer[:NUM_INTEGERS], dtype=np.int64)
    floats = np.array(layer[NUM_INTEGERS:], dtype=np.float64)
    padded = -(-spec.value_dim // 16) * 16 + 64
    query_bytes = whole_row(spec.head_dim * width)
    scratch_bytes = MAX_QUERIES * (query_bytes + (1 + LANES + padded) * 4) + BLOCK * TILE * 4
    scratch_bytes += panel_bytes(width, spec.head_dim, spec.value_dim)
    tensors = tuple(each for each in (*kept, sinks) if each is not None)
    addresses = (integers.ctypes.data, floats.ctypes.data)
    has_kernel = has_attention_kernel(spec, width)
    return DescribedLayer(
        integers, floats, tensors, addresses, scratch_bytes, spec.joined_width, has_kernel
    )


def weight_address(norm: Norm | None) -> int:
    if norm is None or norm.weight is None:
        return 0
    assert norm.weight.dtype == torch.float32, norm.weight.dtype
    return norm.weight.data_ptr()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# -- products with weights that are laid out at load: in panels for the kernel, or by oneDNN
#
# If oneDNN does not pack bfloat16, the kernel is used at every size. Measured with AVX2, one
# thread, in microseconds, kernel against torch's plain product:
# 1024x1024 113 against 850 at one row, 568 against 1848 at eight, 72590 against 171742 at 200;
# 512x8000 616 against 3130, 9377 against 20032, 225526 against 628921. A packed copy in float32 is
# faster at 200 rows (17244 and 96285) and slower at one (299 and 3036), and takes twice the memory.


class PanelProjection:
    """A product whose weight is laid out in groups of panels (`kernels/panels.py`).

    Its attributes are the operands of a program's phase: sizes, and the addresses `start` of the
    panels and `shift` of the bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.columns, self.length = weight.shape
        self._kernel, self._width = product_kernel(weight.dtype), weight.dtype.itemsize
        self._panels = panels_of(weight)  # [num_groups, units, 64, values of a unit]
        self.units = self._panels.shape[1]
        self.is_padded = self.units * self._panels.shape[3] != self.length
        self._bias = bias
        self.start = self._panels.data_ptr()
        self.shift = 0 if bias is None else bias.data_ptr()
        self._is_shared = weight.numel() > SMALL[weight.dtype]
        self._own = Buffers()

    def __call__(self, states: Tensor) -> Tensor:
        num_rows, length = states.shape
        assert length == self.length, (length, self.length)
        assert states.stride(1) == 1, states.stride()
        if self.is_padded:  # units are read whole
            states = pad(states, (0, 1))
        out = torch.empty(num_rows, self.columns, dtype=states.dtype)
        num_threads = torch.get_num_threads() if self._is_shared else 1
        if num_threads == 1:
            self._multiply(states, out, 0, self.columns)
            return out
        per_thread = -(-self.columns // (num_threads * GROUP)) * GROUP
        first, *others = range(0, self.columns, per_thread)
        pool = _column_threads(num_threads)
        shares = [pool.submit(self._multiply, states, out, each, per_thread) for each in others]
        self._multiply(states, out, first, per_thread)
        for share in shares:
            share.result()
        return out

    def _multiply(self, states: Tensor, out: Tensor, first: int, count: int) -> None:
        """Computes `count` columns from `first` on, which must begin a group."""
        offset, width = first * self._width, self._width
        scratch = self._own.scratch_of(SCRATCH_BYTES) if self.units > SECTION else 0
        self._kernel(
            states.data_ptr(), states.stride(0) * width,
            self.start + first // GROUP * self.units * STRIDE,
            self.shift + offset if self.shift else 0, out.data_ptr() + offset,
            self.columns * width, len(states), min(count, self.columns - first), self.units,
            scratch,
        )  # fmt: skip

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that a thread needs in a program."""
        return SCRATCH_BYTES


@cache
def _column_threads(num_threads: int) -> ThreadPoolExecutor:
    """Returns threads that share a large product's columns with their caller."""
    return ThreadPoolExecutor(num_threads - 1, "columns")


class CodedProjection(PanelProjection):
    """A product whose weight stays in codes (`kernels/codes.py`), from `kernel_codes`.

    Its result equals that of a `PanelProjection` with the dequantised weight, bit by bit.
    """

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        bits = 4 if codes.is_packed else 8
        self.columns, self.length = codes.values.shape[0], codes.num_columns
        self.is_padded, self._bias = False, bias
        self.kernel = coded_kernel(bits, codes.offset, codes.minima is not None)
        self._product = compiled.address_of(product_kernel(torch.bfloat16))
        values = codes.unpacked()
        self._panels, self.shape = panels_of_codes(values, codes.scales, codes.minima, bits)
        self.start = self._panels.data_ptr()
        self.shift = 0 if bias is None else bias.data_ptr()
        self._own = Buffers()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight."""
        return self._panels.numel()

    @property
    def scratch_bytes(self) -> int:
        return unpacked_bytes(self.length)

    def __call__(self, states: Tensor) -> Tensor:
        num_rows, length = states.shape
        assert length == self.length, (length, self.length)
        assert states.stride(1) == 1, states.stride()
        out = torch.empty(num_rows, self.columns, dtype=states.dtype)
        self.kernel(
            states.data_ptr(), states.stride(0) * 2, self.start, *self.shape, self.shift,
            out.data_ptr(), self.columns * 2, num_rows, self.columns, self._product,
            self._own.scratch_of(self.scratch_bytes),
        )  # fmt: skip
        return out


def kernel_codes(weight: QuantisedTensor) -> Codes | None:
    """Returns a weight's codes in the form that the kernel reads; None if it cannot.

    The kernel reads whole vectors of codes per group: four bits from 0 or `CENTRE` on, or signed
    bytes, with float16 scales. Zeros are converted to float16 minima of their groups, which are
    rounded unless all zeros are in the middle.
    """
    codes = weight.codes.in_whole_groups()
    scales = codes.scales.half()
    if (
        codes.group % 2
        or weight.dim() != 2
        or not torch.equal(scales.to(codes.scales.dtype), codes.scales)
    ):
        return None
    values, offset, zeros = codes.values, codes.offset, codes.zeros
    middle = CENTRE if codes.is_packed else 128
    if zeros is not None and bool((zeros == middle).all()):
        offset, zeros = middle, None
    if values.dtype == torch.uint8 and not codes.is_packed:  # signed, minus their middle
        values, offset = (values ^ 128).view(torch.int8), offset - middle
        zeros = None if zeros is None else zeros.float() - middle
    elif values.dtype not in (torch.uint8, torch.int8):
        return None
    minima = codes.minima
    if zeros is not None:
        minima, offset = (zeros.float() * scales).half(), 0
        if not torch.isfinite(minima).all():
            return None
    if offset not in ((0, CENTRE) if codes.is_packed else (0,)):
        return None
    return replace(codes, values=values, scales=scales, zeros=None, offset=offset, minima=minima)


class PanelHeads:
    """A product per head; rows of a weight are whole units."""

    def __init__(
        self,
        weight: Tensor,  # [num_heads, out, in]
        scratch_of: Callable[[int], int],
    ) -> None:
        self._kernel, self._shape = _heads_kernel(weight.dtype), weight.shape
        self._scratch_of = scratch_of
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
            self._scratch_of(SCRATCH_BYTES),
        )  # fmt: skip
        return out


def pack_weight(weight: Tensor, bias: Tensor | None, what: str) -> Projection | None:
    """Returns the product with a weight, by its class in the table; None: torch's plain one."""
    made: dict[str, Callable[[Tensor, Tensor | None], Projection]] = {
        KERNEL: PanelProjection, ONEDNN: PackedProjection,
    }  # fmt: skip
    name = way(weight.dtype, what)
    return made[name](weight, bias) if name in made else None


def pack_large(weight: Tensor, bias: Tensor | None) -> Projection | None:
    """Does the same as `pack_weight` for products on all threads, whatever the weight's size."""
    return pack_weight(weight, bias, LARGE_WEIGHT)


class PackedProjection:
    """A product whose weight oneDNN has laid out, for few numbers of rows (`filled_rows`)."""

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
    """Returns `states` with arbitrary rows behind it: existing memory, if it is large enough."""
    size = states.shape[1]
    end = states.storage_offset() + num_rows * size
    if states.is_contiguous() and end * states.itemsize <= states.untyped_storage().nbytes():
        return states.as_strided((num_rows, size), (size, 1))
    return pad(states, (0, 0, 0, num_rows - states.shape[0]))


# -- kernels as they are called, compiled for one type of values


class Kernels(NamedTuple):
    """The kernels for one type of values."""

    width: int  # bytes per value
    product: Kernel
    norm: Kernel
    add_norm: Kernel
    gate: Kernel
    prepare: Kernel
    attend: Kernel


@cache
def kernels_of(dtype: torch.dtype) -> Kernels:
    """Returns the kernels, compiled when the first operations of a dtype are made."""
    kind = kind_of(dtype)
    if compiled.is_taken("product"):  # another process compiles it: compile the rest
        _attention(kind)
    return Kernels(kind.width, product_kernel(dtype), *_elementwise(kind), *_attention(kind))


@cache
def product_kernel(dtype: torch.dtype) -> Kernel:
    """Returns the product's kernel, compiled when the first weight of a dtype is laid out."""
    kind = kind_of(dtype)

    @compiled(VOID, *[INT] * 10)
    def product(rows, to_row, weight, bias, out, to_out, num_rows, num_columns, length, scratch):
        """Computes out = rows @ weight.T + bias; a bias of 0 is none."""
        read, written = Matrix(rows, to_row), Matrix(out, to_out)
        product_rows(kind, read, num_rows, weight, bias, written, num_columns, length, scratch)

    return product


@cache
def coded_kernel(bits: int, offset: int, has_minima: bool) -> Kernel:
    """Returns the kernel for such codes, compiled when the first weight in them is laid out."""
    width = EIGHT if bits == 8 else CENTRED if offset else FOUR
    minima = SHIFTED if has_minima else PLAIN

    @compiled(VOID, *[INT] * 13)
    def coded_product(
        rows, to_row, weight, to_codes, num_groups, units, bias, out, to_out, num_rows, num_columns,
        product, scratch,
    ):  # fmt: skip
        """Computes out = rows @ weight.T + bias in bfloat16; a bias of 0 is none."""
        read, written = Matrix(rows, to_row), Matrix(out, to_out)
        shape = CodedShape(to_codes, num_groups, units)
        coded_rows(
            width, minima, read, num_rows, weight, shape, bias, written, num_columns, product,
            scratch,
        )  # fmt: skip

    return coded_product


@cache
def _heads_kernel(dtype: torch.dtype) -> Kernel:
    kind = kind_of(dtype)

    @compiled(VOID, *[INT] * 13)
    def product_of_heads(
        rows, to_row, to_head, weight, to_panels, out, to_out, to_out_head, num_rows, num_heads,
        num_columns, length, scratch,
    ):  # fmt: skip
        """Multiplies every head's part of rows by its own weight."""
        for head in range(num_heads):
            read = Matrix(rows + head * to_head, to_row)
            written = Matrix(out + head * to_out_head, to_out)
            panels = weight + head * to_panels
            product_rows(kind, read, num_rows, panels, 0, written, num_columns, length, scratch)

    return product_of_heads


def _elementwise(kind: Kind) -> tuple[Kernel, Kernel, Kernel]:
    @compiled(VOID, *[INT] * 7, FLOAT)
    def norm(rows, to_row, weight, out, to_out, num_rows, size, eps):
        """Computes RMSNorm of every row; a weight of 0 is none."""
        how = RowNorm(1, weight, eps)
        norm_rows(kind, Matrix(rows, to_row), how, Matrix(out, to_out), num_rows, size)

    @compiled(VOID, INT, INT, FLOAT, INT, INT, FLOAT, INT, INT, FLOAT, INT, INT, INT)
    def add_norm(
        residual, update, scale, has_after, after, after_eps, has_before, before, before_eps,
        out, num_rows, size,
    ):  # fmt: skip
        """Computes residual += scale * after(update); out = before(residual)."""
        first = RowNorm(has_after, after, after_eps)
        last = RowNorm(has_before, before, before_eps)
        add_norm_rows(kind, residual, update, scale, first, last, out, num_rows, size)

    @compiled(VOID, *[INT] * 6, FLOAT, FLOAT)
    def gate(function, rows, out, to_out, num_rows, size, limit, alpha):
        """Computes gated units of rows [gates, ups]."""
        activation = Activation(function, np.float32(limit), np.float32(alpha))
        gate_rows(kind, activation, rows, out, to_out, num_rows, size)

    return norm, add_norm, gate


def _attention(kind: Kind) -> tuple[Kernel, Kernel]:
    @compiled(VOID, *[INT] * 9)
    def prepare(joined, cos, sin, temperature, step, layer, floats, keys, values):
        """Prepares rows [queries, keys, values] in place; writes keys and values to the cache."""
        angles = Angles(cos, sin)
        cache = Cache(keys, values)
        prepare_rows(
            kind, joined, angles, temperature, read_step(step), read_layer(layer, floats), cache
        )

    @compiled(VOID, *[INT] * 12)
    def attend(
        joined, keys, values, out, scratch, step, layer, floats, counters, num_units, num_threads,
        member,
    ):  # fmt: skip
        """Computes attention of every row of a step; with `counters`, only this thread's share."""
        cache, claims = Cache(keys, values), Claims(counters, num_units, num_threads, member)
        facts = read_layer(layer, floats)
        attend_step(kind, joined, cache, out, scratch, read_step(step), facts, claims)

    return prepare, attend
