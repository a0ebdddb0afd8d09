"""`Ops` on a GPU: Triton kernels, and torch's own products (cuBLAS).

`plan` is made on the host like everywhere; every other verb can be captured in a CUDA graph.

Two kernels edit logits of the device step (biases, forbidden ends, penalties; as
`workers/verify/process.py` does) and take log-probabilities. A program whose row's request asks for
none of them ends after a few loads, so that a captured step can always contain both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention import KVCache, KVCode, KVFormat
from ...verify import device_settings as words_of
from ...verify.device_settings import (
    MAX_BIASES,
    MAX_ENDS,
    MAX_TOP,
    NUM_WORDS,
    PROMPT,
    DeviceEdits,
    DeviceSettings,
    Settled,
)
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
from .attention import FIXED, attend, prepares, warm_up
from .draw import counts_of, draw, gumbel_argmax, num_parts, share
from .experts import CudaMixture
from .float8 import Float8Products
from .library import AttentionLibrary
from .linear import INTERPRETED, TiledProduct
from .prepare import can_prepare, prepare_and_store
from .step_rows import draft_level, draft_slots, keep, lay_out, move, settle

_BLOCK = 1024
_REPETITION = tl.constexpr(words_of.REPETITION)
_FREQUENCY = tl.constexpr(words_of.FREQUENCY)
_PRESENCE = tl.constexpr(words_of.PRESENCE)
_MIN_LEN = tl.constexpr(words_of.MIN_LEN)
_NUM_LOGPROBS = tl.constexpr(words_of.NUM_LOGPROBS)
_NUM_BIASES = tl.constexpr(words_of.NUM_BIASES)
_NUM_ENDS = tl.constexpr(words_of.NUM_ENDS)
_WORDS = tl.constexpr(NUM_WORDS)
_BIASES = tl.constexpr(MAX_BIASES)
_ENDS = tl.constexpr(MAX_ENDS)
_TOP = tl.constexpr(MAX_TOP)
_BITS = tl.constexpr(words_of.WORD_BITS)
_PROMPT = tl.constexpr(PROMPT)
_MASK_BITS = tl.constexpr(words_of.MASK_BITS)


@triton.jit
def _double(word):  # pointer to two int32 words -> float64
    low = tl.load(word).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(word + 1).to(tl.int64) << 32
    return (high | low).to(tl.float64, bitcast=True)


@triton.jit
def _edit_kernel(
    logits,  # [num_rows, vocab] float32, written
    seats,  # [num_rows] int64
    positions,  # [num_rows] int32
    first_rows,  # [num_rows] int32
    lanes,  # [num_rows] int32
    ancestors,  # [num_rows, WORDS] int64
    masked,  # [num_rows] int32, row of `masks`; -1 is none
    token_ids,  # of the step's rows, int32
    words,  # [num_seats, _WORDS] int32
    bias_ids,  # [num_seats, _BIASES] int32
    biases,  # [num_seats, _BIASES] float32
    ends,  # [num_seats, _ENDS] int32
    counts,  # [num_seats, vocab] int32
    masks,  # [max_rows, words of a mask] int32
    vocab,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat, lane = tl.load(seats + row), tl.load(lanes + row)
    nodes = token_ids + tl.load(first_rows + row) + 1
    own = words + seat * _WORDS
    num_biases = tl.load(own + _NUM_BIASES)
    num_ends = tl.load(own + _NUM_ENDS)
    if tl.load(own + _MIN_LEN) <= tl.load(positions + row) + 1:
        num_ends = 0
    repetition, frequency = _double(own + _REPETITION), _double(own + _FREQUENCY)
    presence = _double(own + _PRESENCE)
    penalised = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    mask = tl.load(masked + row).to(tl.int64)
    if (num_biases + num_ends > 0) | penalised | (mask >= 0):
        first, end = share(part, vocab, PARTS, BLOCK)
        for begin in range(first, end, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            inside = token < vocab
            value = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
            for index in range(num_biases):
                bias = tl.load(biases + seat * _BIASES + index)
                chosen = token == tl.load(bias_ids + seat * _BIASES + index)
                value = tl.where(chosen, value + bias, value)
            for index in range(num_ends):
                chosen = token == tl.load(ends + seat * _ENDS + index)
                value = tl.where(chosen, float("-inf"), value)
            if penalised:
                held = tl.load(counts + seat * vocab + token, mask=inside, other=0)
                count = held & (_PROMPT - 1)
                for word in range(WORDS):
                    path = tl.load(ancestors + row * WORDS + word)
                    for node in range(word * _BITS, tl.minimum((word + 1) * _BITS, lane)):
                        on_path = ((path >> (node - word * _BITS)) & 1) != 0
                        chosen = on_path & (token == tl.load(nodes + node))
                        count += chosen.to(tl.int32)
                seen = (held > 0) | (count > 0)
                factor = tl.where(seen, repetition, 1.0).to(tl.float32)
                less = frequency * count.to(tl.float64) + tl.where(count > 0, presence, 0.0)
                scaled = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
                value = scaled - less.to(tl.float32)
            if mask >= 0:
                place = masks + mask * tl.cdiv(vocab, _MASK_BITS) + token // _MASK_BITS
                word = tl.load(place, mask=inside, other=0)
                value = tl.where(((word >> (token % _MASK_BITS)) & 1) != 0, value, float("-inf"))
            tl.store(logits + row * vocab + token, value, mask=inside)


@triton.jit
def _block(logits, begin, vocab, BLOCK: tl.constexpr):
    """Ids of neighbouring tokens, and a row's logits of them in float32."""
    token = begin + tl.arange(0, BLOCK)
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    return token, value.to(tl.float32)


@triton.jit
def _logprobs_kernel(
    logits,  # [num_rows, vocab]
    tokens,  # [num_rows] int32
    seats,  # [num_rows] int64
    words,  # [num_seats, _WORDS] int32
    values,  # [num_rows, 1 + _TOP] float32, written
    ids,  # [num_rows, 1 + _TOP] int32, written: the token's rank first
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_top = tl.load(words + tl.load(seats + row) * _WORDS + _NUM_LOGPROBS)
    if num_top >= 0:
        logits += row * vocab
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, vocab, BLOCK):
            peaks = tl.maximum(peaks, _block(logits, begin, vocab, BLOCK)[1])
        peak = tl.max(peaks, axis=0)
        chosen = tl.load(tokens + row)
        own = tl.load(logits + chosen).to(tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        ahead = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, vocab, BLOCK):
            token, value = _block(logits, begin, vocab, BLOCK)
            sums += tl.exp(value - peak)
            is_ahead = (value > own) | ((value == own) & (token < chosen))
            ahead += (is_ahead & (token < vocab)).to(tl.int32)
        log_sum = tl.log(tl.sum(sums, axis=0))
        tl.store(ids + row * (1 + _TOP), 1 + tl.sum(ahead, axis=0))
        tl.store(values + row * (1 + _TOP), own - peak - log_sum)
        last, last_id = float("inf"), -1  # the ranking so far: by value, then lower id
        for index in range(tl.minimum(num_top, vocab)):
            best = tl.full([], float("-inf"), tl.float32)
            best_id = vocab
            for begin in range(0, vocab, BLOCK):
                token, value = _block(logits, begin, vocab, BLOCK)
                behind = (value < last) | ((value == last) & (token > last_id))
                value = tl.where(behind & (token < vocab), value, float("-inf"))
                top, lane = tl.max(value, axis=0, return_indices=True)
                best_id = tl.where(top > best, begin + lane, best_id)
                best = tl.maximum(best, top)
            tl.store(values + row * (1 + _TOP) + 1 + index, best - peak - log_sum)
            tl.store(ids + row * (1 + _TOP) + 1 + index, tl.minimum(best_id, vocab - 1))
            last, last_id = best, best_id


def edit(logits: Tensor, edits: DeviceEdits, num_processors: int) -> None:
    """Implements `DeviceOps.edit_on_device`."""
    num_rows, vocab = logits.shape
    tables = edits.tables
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    parts = num_parts(num_rows, triton.cdiv(vocab, block), num_processors)
    _edit_kernel[(num_rows, parts)](
        logits, edits.seats, edits.positions, edits.first, edits.lanes, edits.ancestors,
        edits.masks, edits.token_ids, tables.words, tables.bias_ids,
        tables.biases.view(torch.float32), tables.ends, tables.counts, tables.masks, vocab,
        edits.ancestors.shape[1], parts, block,
        enable_fp_fusion=False,  # products are rounded before they are added, as on the host
    )  # fmt: skip


def logprobs(logits: Tensor, tokens: Tensor, edits: DeviceEdits) -> tuple[Tensor, Tensor]:
    """Implements `DeviceOps.logprobs_on_device`; rows without a request are undefined."""
    num_rows, vocab = logits.shape
    values = torch.empty((num_rows, 1 + MAX_TOP), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, 1 + MAX_TOP), dtype=torch.int32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _logprobs_kernel[(num_rows,)](
        logits.contiguous(), tokens, edits.seats, edits.tables.words, values, ids, vocab,
        block,
    )  # fmt: skip
    return values, ids


log = logging.getLogger(__name__)

INTERPRETED_PROCESSORS = 4  # stands in for a device's where kernels run under the interpreter


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
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    frequency = tl.load(frequencies + row * to_row + column, mask=mask, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    tl.store(cos + row * SIZE + column, tl.cos(angle) * scale, mask=mask)
    tl.store(sin + row * SIZE + column, tl.sin(angle) * scale, mask=mask)


class CudaOps(ReferenceOps):
    """`Ops` for one device. Verbs that are not overridden use torch, without host reads."""

    name = "triton"
    reads_device_only = True
    keeps_quantised = True
    expands_latents = True

    def __init__(
        self,
        device: torch.device,
        splits: int | None = None,
        library: AttentionLibrary | None = None,
    ) -> None:
        """`splits`: parts that every context is cut into; None: chosen from each step's shape.
        `library`: of prompts' attention; None: our own kernel's."""
        self._splits, self._device, self.library = splits, device, library
        self._is_library_checked = False
        self.num_processors, self.has_e4m3 = INTERPRETED_PROCESSORS, True
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self.num_processors = found.multi_processor_count
            self.has_e4m3 = torch.version.hip is not None or (found.major, found.minor) >= (8, 9)
        self.float8 = Float8Products.of(device, self.num_processors)
        self._counts = counts_of(device)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if not isinstance(weight, QuantisedTensor):
            return super().pack(weight, bias)
        if (product := self.float8.pack(weight, bias)) is not None:
            self.name = f"{type(self).name}, float8 inputs"
            return product
        return TiledProduct(weight, bias, self.num_processors, fixed_rows=False)

    @contextmanager
    def plain_inputs(self) -> Iterator[None]:
        self.float8.are_plain = True
        try:
            yield
        finally:
            self.float8.are_plain = False

    def pack_experts(self, experts: Experts) -> Mixture:
        return CudaMixture(experts)

    def _read_as(self, form: KVFormat) -> torch.dtype:
        """Returns the type of codes for Triton: e4m3 if the device converts it, else bits."""
        is_known = self.has_e4m3 or form.dtype != torch.float8_e4m3fn
        return form.dtype if is_known else torch.uint8

    def _merges(self, dtype: torch.dtype, form: KVFormat | None) -> Callable[[AttentionSpec], bool]:
        """Returns a function that tells for which layers a library computes the contexts."""
        if self.library is None or form is not None:
            return lambda _: False
        return partial(self.library.merges, dtype=dtype)

    def warm_up(
        self, specs: Iterable[AttentionSpec], dtype: torch.dtype, block_size: int,
        form: KVFormat | None = None, *, shows_progress: bool = False,
    ) -> bool:  # fmt: skip
        specs = dict.fromkeys(specs)
        if self.library and not self._is_library_checked:  # by the target's layers, which are first
            self._is_library_checked = True
            if self.library.check(specs, dtype, self._device, self.attend, block_size):
                self.library = None
        if INTERPRETED.value:  # there is nothing to compile
            return False
        begin, is_fixed = time.perf_counter(), self._splits == FIXED
        stored, bits = (dtype, 0) if form is None else (self._read_as(form), form.mantissa_bits)
        count = warm_up(
            specs, dtype, stored, block_size, bits,
            is_fixed=is_fixed, shows_progress=shows_progress, merges=self._merges(dtype, form),
        )  # fmt: skip
        spent_s = time.perf_counter() - begin
        log.info("%d kernels of attention are compiled, in %.1f s", count, spent_s)
        return True

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

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        return elementwise.norm(states, norm)

    def add_norm(
        self, residual: Tensor, update: Tensor | None, after: Norm | None, scale: float,
        before: Norm | None, kept: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if update is None and kept is None:
            return residual if before is None else elementwise.norm(residual, before)
        return elementwise.add_norm(residual, update, after, scale, before, kept)

    def enter(
        self, embedded: Tensor, embedding_norm: Norm | None, feature: Tensor,
        feature_norm: Norm | None, *, is_residual_normed: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        parts = (embedded, embedding_norm, feature, feature_norm)
        return elementwise.enter(*parts, is_residual_normed=is_residual_normed)

    def rope_store_attend(
        self, joined: Tensor, rotation: Rotation | None, temperature: Tensor | None,
        plan: PagedStep, cache: KVCache, layer: int, spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        keys, values, code = cache.keys[layer], cache.values[layer], cache.codes[layer]
        beside = None
        if prepares(spec, plan.max_query_len, joined.element_size(), self._splits):
            query, beside = joined.contiguous(), (rotation, temperature)
            if rotation is None and spec.rotary_dim:
                spec = replace(spec, rotary_dim=0)
        elif can_prepare(spec):
            query = prepare_and_store(joined, rotation, temperature, plan, keys, values, spec, code)
        else:
            query, key, value = prepared_heads(joined, rotation, temperature, spec)
            query = query.contiguous()
            cache.write(layer, plan.slots.long(), key, None if spec.shared_values else value)
        if self.library is not None and self.library.takes(plan, spec, query.dtype):
            return self.library.attend(query, keys, values, plan, spec, code).flatten(1)
        context = None
        if self.library is not None and code is None and beside is None:
            context = self.library.context_of(query, keys, values, plan, spec)
        if code is not None:
            kept = self._read_as(code.format)
            keys, values = keys.view(kept), values.view(kept)
        programs = (self.num_processors, self._splits)
        rows = (query, keys, values, plan, spec, *programs, code, beside, context)
        return attend(*rows).flatten(1)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedStep, spec: AttentionSpec,
        code: KVCode | None = None,
    ) -> Tensor:  # fmt: skip
        programs = (self.num_processors, self._splits)
        return attend(query.contiguous(), keys, values, plan, spec, *programs, code)

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        return elementwise.gate(gate_up, gate)

    def edit_on_device(self, logits: Tensor, edits: DeviceEdits) -> None:
        edit(logits, edits, self.num_processors)

    logprobs_on_device = staticmethod(logprobs)

    def gumbel_argmax_on_device(
        self, logits: Tensor, positions: Tensor, settings: DeviceSettings, tokens: Tensor | int,
        ahead: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        programs = (self.num_processors, self._counts)
        return gumbel_argmax(logits, positions, settings, tokens, *programs, ahead)

    def draw_on_device(
        self, logits: Tensor, positions: Tensor, settings: DeviceSettings,
        tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return draw(logits, positions, settings, tokens, self.num_processors, self._counts)

    lay_out_on_device = staticmethod(lay_out)
    settle_on_device = staticmethod(settle)

    def move_on_device(
        self, cache: KVCache, places: Tensor, settled: Settled, query_start: Tensor, query_len: int,
    ) -> None:  # fmt: skip
        move(places, settled, query_start, query_len)

    keep_on_device = staticmethod(keep)
    draft_slots_on_device = staticmethod(draft_slots)
    draft_level_on_device = staticmethod(draft_level)


class InvariantCudaOps(CudaOps):
    """`CudaOps` whose result for a row does not depend on other rows of the step.

    Products have tiles of a fixed size, and parts of the depth that depend on the weight's shape;
    cuBLAS would choose both by the number of rows (`linear.py`). Attention is cut at keys whose
    index is a multiple of a fixed number, and its parts are added in order (`attention.py`).
    Experts' blocks have one size, and choices are added in order; near ties go to the lower expert.
    """

    name = "triton, batch-invariant"
    is_invariant = True
    expands_latents = False  # whether they would be depends on the rows beside

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, FIXED)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return TiledProduct(weight, bias, self.num_processors, fixed_rows=True)

    def pack_heads(self, weight: Tensor) -> HeadProjection:
        return TiledProduct(weight, None, self.num_processors, fixed_rows=True)

    def pack_experts(self, experts: Experts) -> Mixture:
        return CudaMixture(experts, fixed_rows=True)

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        if logits.device.type == "cpu":  # under the interpreter, where vectors have a scalar rest
            return route_by_row(logits, partial(route, router=router, stable=True))
        return route(logits, router, stable=True)
