"""Layers as a program of `kernels/program.py`: one call per step, in which threads share the work.

If a small step's operations are called one by one, they take about as much time in Python as in
arithmetic, and threads that take turns with the interpreter do not help each other. `Program.of`
describes the layers; layers with unsupported operations have no program and are called one by one.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention import KVCache, KVCode
from .cpu import (
    GATE_KERNELS,
    CodedProjection,
    CpuOps,
    PanelProjection,
    address,
    kernels_of,
    weight_address,
)
from .kernels import GROUP, INT, LANES, PANEL, STRIDE, VOID, Kernel, Kind, compiled
from .kernels.panels import SCRATCH_BYTES, kind_of
from .kernels.prepare import item64
from .kernels.program import (
    ADD_NORM,
    ATTEND,
    BEST,
    CODED,
    COPY,
    GATE,
    GATE_BYTES,
    GATED_PRODUCT,
    INSIDE,
    NORM,
    NUM_OPERANDS,
    NUM_VARIABLES,
    PREPARE,
    PRODUCT,
    Functions,
    Team,
    run_phase,
)
from .kernels.vector import LINE, fetch_add, pause, peek
from .plan import PagedStep
from .protocol import AttentionSpec, Gate, Norm, Projection, Rotation

Ints = NDArray[np.int64]
Draw = Callable[[Tensor, int], NDArray[np.integer]]
"""Returns the tokens of a level from its logits [num_chains, vocab]."""


class LayerParts(NamedTuple):
    """A dense layer: attention and a gated unit around a residual stream."""

    before_attention: Norm | None
    joined: Projection
    spec: AttentionSpec
    rope: int | None  # index of the rotation; None: not rotated
    is_tempered: bool
    output: Projection
    after_attention: Norm | None
    before_mlp: Norm | None
    gate_up: Projection
    gate: Gate
    down: Projection
    after_mlp: Norm | None


class Tail(NamedTuple):
    """The phases after the last layer."""

    captured: tuple[int, ...] = ()  # layers whose inputs are kept; the number of layers: `normed`'s
    normed: bool = True
    has_logits: bool = False  # of chosen rows


(
    ROWS, CHOSEN_ROWS, STEP, FACTORS, RESIDUAL, READ, STATES, JOINED, ATTENDED, UPDATE, GATES,
    GATED, CHOSEN, PICKED, NORMED, LOGITS,
) = range(1, 17)  # fmt: skip
ROTATIONS, _CAPTURES, CACHES = 32, 64, 128  # first of two each, one each, two each
_MOST_LAYERS = (NUM_VARIABLES - CACHES) // 2
_BUFFERS = (STATES, JOINED, ATTENDED, UPDATE, GATES, GATED, PICKED, NORMED)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Phases of layers. Results equal those of operations called one by one, bit by bit."""

    ops: CpuOps
    layers: Sequence[LayerParts]
    scale: float  # of what is added to the residual stream
    norm: Norm | None
    unembed: PanelProjection | None  # None: the output layer has no kernel
    hidden_size: int
    scratch_bytes: int  # of a thread
    _made: dict[tuple[Tail, bool, tuple[KVCode | None, ...]], Ints] = field(default_factory=dict)
    _own: _Memory = field(default_factory=lambda: _Memory())

    @staticmethod
    def of(
        ops: object,
        layers: Sequence[LayerParts | None],
        scale: float,
        norm: Norm | None,
        unembed: object = None,
    ) -> Program | None:
        """Returns the program of the layers; None if an operation has no kernel."""
        if not isinstance(ops, CpuOps) or not 0 < len(layers) <= _MOST_LAYERS:
            return None
        found: list[LayerParts] = []
        scratch = SCRATCH_BYTES + GATE_BYTES
        for layer in layers:
            if layer is None or layer.gate.kind not in GATE_KERNELS:
                return None
            described = ops.described(layer.spec)
            if not described.has_kernel or layer.spec.shared_values:
                return None
            scratch = max(scratch, described.scratch_bytes)
            panels = []
            for each in (layer.joined, layer.output, layer.gate_up, layer.down):
                if not isinstance(each, PanelProjection) or each.is_padded:
                    return None
                panels.append(each)
            scratch = max(scratch, *(each.scratch_bytes for each in panels))
            joined, output, gate_up, down = panels
            parts = layer._replace(joined=joined, output=output, gate_up=gate_up, down=down)
            found.append(parts)
        last = unembed if isinstance(unembed, PanelProjection) and not unembed.is_padded else None
        _compiled_for(ops.dtype)  # at load, not in a step
        size = _panels(found[0].output).columns
        made = Program(ops, found, scale, norm, last, size, _rounded(scratch))
        return made if last is None else made.reserving(last)

    def reserving(self, *products: PanelProjection) -> Program:
        """Returns the same program with scratch memory for further products."""
        needed = max(self.scratch_bytes, *(each.scratch_bytes for each in products))
        return replace(self, scratch_bytes=_rounded(needed))

    def takes(self, plan: PagedStep) -> bool:
        """Returns True if it computes such a step."""
        return plan.turn is None and plan.spread is None and plan.adapters is None

    def run(
        self,
        residual: Tensor,  # [num_tokens, hidden_size], written
        read: Tensor | None,  # [num_tokens, input_size]; the first layer reads it
        plan: PagedStep,
        rotations: Sequence[Rotation],
        factors: Tensor | None,  # [num_tokens] float32, of queries
        cache: KVCache,
        first: int,  # the first layer's index in the cache
        tail: Tail,
        rows: Tensor | None = None,  # [num_rows]; None: every row
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the last phase's result, and the captured states, each [num_tokens, hidden_size].

        The result is logits [num_rows, vocab], or the norm's output, in a buffer that the next step
        overwrites, or `residual`.
        """
        assert plan.integers is not None, "`plan` or `adopt` made it"
        assert len(tail.captured) <= CACHES - _CAPTURES, tail
        num_rows, dtype = plan.num_tokens, residual.dtype
        assert residual.is_contiguous(), residual.stride()
        read = None if read is None else read.contiguous()
        rows = None if rows is None else rows.to(torch.int32)
        num_chosen = num_rows if rows is None else len(rows)
        own = self._own
        variables, buffers = own.of(self, num_rows, dtype)
        codes = tuple(cache.codes[first : first + len(self.layers)])
        phases = self._made.get((tail, read is not None, codes))
        if phases is None:
            phases = self._phases(tail, read, codes)
            self._made[tail, read is not None, codes] = phases
        captured: list[Tensor] = []
        if tail.captured:
            captured = list(torch.empty(len(tail.captured), *residual.shape, dtype=dtype))
        out = residual
        if tail.has_logits:
            assert self.unembed is not None, "`has_logits` asks for its product"
            out = torch.empty(num_chosen, self.unembed.columns, dtype=dtype)
        elif tail.normed and self.norm is not None:
            out = buffers[STATES][:num_rows]
        variables[ROWS : READ + 1] = (
            num_rows, num_chosen, plan.integers.ctypes.data, address(factors),
            residual.data_ptr(), address(read),
        )  # fmt: skip
        variables[CHOSEN], variables[LOGITS] = address(rows), out.data_ptr()
        for index, (cos, sin) in enumerate(rotations):
            place = ROTATIONS + 2 * index
            variables[place], variables[place + 1] = cos.data_ptr(), sin.data_ptr()
        for index, each in enumerate(captured):
            variables[_CAPTURES + index] = each.data_ptr()
        num_layers = len(self.layers)
        places = variables[CACHES : CACHES + 2 * num_layers]
        places[::2] = [*map(Tensor.data_ptr, cache.keys[first : first + num_layers])]
        places[1::2] = [*map(Tensor.data_ptr, cache.values[first : first + num_layers])]
        TEAM.helpers.run(self, phases, variables)
        return out, captured

    @property
    def widths(self) -> dict[int, int]:
        """Widths of the buffers, by variable."""
        joined = max(each.spec.joined_width for each in self.layers)
        attended = max(each.spec.num_heads * each.spec.value_dim for each in self.layers)
        inner = max(_panels(each.down).length for each in self.layers)
        products = [_panels(each.gate_up) for each in self.layers]
        gates = max((each.columns for each in products if not gates_at_once(each)), default=0)
        sizes = (self.hidden_size, joined, attended, self.hidden_size, gates, inner)
        return dict(zip(_BUFFERS, (*sizes, self.hidden_size, self.hidden_size), strict=True))

    def _phases(
        self, tail: Tail, read: Tensor | None, codes: Sequence[KVCode | None]
    ) -> Ints:  # [num_phases, NUM_OPERANDS]
        phases = Phases(self.ops, self.hidden_size, self.scale)
        update, after = 0, None
        for index, (layer, code) in enumerate(zip(self.layers, codes, strict=True)):
            phases.add_norm(update, after, layer.before_attention)
            if index in tail.captured:
                phases.copy(RESIDUAL, _CAPTURES + tail.captured.index(index))
            source = phases.states
            if index == 0 and read is not None:
                source = READ
            phases.layer(layer, CACHES + 2 * index, source, code)
            update, after = UPDATE, layer.after_mlp
        phases.add_norm(update, after, self.norm if tail.normed else None)
        if len(self.layers) in tail.captured:
            place = _CAPTURES + tail.captured.index(len(self.layers))
            phases.copy(STATES, place)
        if tail.has_logits:
            assert self.unembed is not None, "`has_logits` asks for its product"
            phases.copy(STATES if tail.normed else RESIDUAL, PICKED, CHOSEN_ROWS, CHOSEN)
            picked = PICKED
            if not tail.normed:
                assert self.norm is not None, "a model with an output layer has it"
                phases.norm(PICKED, NORMED, self.norm, CHOSEN_ROWS)
                picked = NORMED
            phases.product(self.unembed, picked, LOGITS, CHOSEN_ROWS)
        return np.array(phases.rows, dtype=np.int64)


class Phases:
    """Rows of operands, in order.

    Args:
        rows: variable of the layers' number of rows.
        step: variable of the address of the step's row of integers.
        rotations: variable of the first cosines; the sines follow.
    """

    def __init__(
        self,
        ops: CpuOps,
        hidden_size: int,
        scale: float,
        *,
        rows: int = ROWS,
        step: int = STEP,
        rotations: int = ROTATIONS,
    ) -> None:
        self.rows: list[list[int]] = []
        self.states = STATES  # what the last norm wrote
        self._ops, self._size, self._scale = ops, hidden_size, scale
        self._width = ops.dtype.itemsize
        self._num_rows, self._step, self._rotations = rows, step, rotations

    def add_norm(self, update: int, after: Norm | None, before: Norm | None) -> None:
        """Adds `Ops.add_norm` of the stream and the variable `update`; 0: nothing is added."""
        self.states = RESIDUAL if before is None else STATES
        if not update:
            if before is not None:
                self.norm(RESIDUAL, STATES, before, self._num_rows)
            return
        eps = 0.0 if before is None else before.eps
        after_eps = 0.0 if after is None else after.eps
        self._add(
            ADD_NORM, self._num_rows, RESIDUAL, self.states, self._size, weight_address(before),
            _bits(eps), update, _bits(self._scale), after is not None, weight_address(after),
            _bits(after_eps), before is not None,
        )  # fmt: skip

    def norm(
        self,
        source: int,
        out: int,
        norm: Norm,
        rows: int = ROWS,
        size: int = 0,  # 0: of the layers
        to_row: int = 0,  # values from a row that is read to the next; 0: `size`
        to_out: int = 0,  # likewise of those that are written
    ) -> None:
        size = size or self._size
        steps = [(each or size) * self._width for each in (to_row, to_out)]
        self._add(NORM, rows, source, out, size, weight_address(norm), _bits(norm.eps), *steps)

    def copy(
        self,
        source: int,
        out: int,
        rows: int = ROWS,
        chosen: int = 0,  # the variable of an array of int32, the rows that are read; 0: all
        size: int = 0,
        to_row: int = 0,
        to_out: int = 0,
    ) -> None:
        """Adds a copy of rows."""
        size = size or self._size
        steps = [(each or size) * self._width for each in (to_row, to_out)]
        self._add(COPY, rows, source, out, size * self._width, chosen, *steps)

    def product(self, by: Projection, source: int, out: int, rows: int = ROWS) -> None:
        self.columns(by, 0, source, out, rows)

    def columns(self, by: Projection, first: int, source: int, out: int, rows: int = ROWS) -> None:
        """Adds the product's columns from `first` on, which must begin a group."""
        by = _panels(by)
        assert first % GROUP == 0, first
        if isinstance(by, CodedProjection):
            start, count = by.start + first // GROUP * by.shape.to_codes, by.columns - first
            shift = by.shift + first * self._width if by.shift else 0
            self._add(
                CODED, rows, source, by.length * self._width, start, shift, out, count,
                by.shape.to_codes, count * self._width, by.shape.num_groups, by.shape.units,
                compiled.address_of(by.kernel),
            )  # fmt: skip
            return
        start = by.start + first // GROUP * by.units * STRIDE
        shift = by.shift + first * self._width if by.shift else 0
        count = by.columns - first
        self._add(
            PRODUCT, rows, source, by.length * self._width, start, shift, out, count, by.units,
            count * self._width,
        )  # fmt: skip

    def add(self, update: int, into: int, size: int, rows: int) -> None:
        """Adds rows of `size` values to others, in place."""
        self._add(
            ADD_NORM, rows, into, into, size, 0, _bits(0.0), update, _bits(1.0), False, 0,
            _bits(0.0), False,
        )  # fmt: skip

    def best(self, source: int, out: int, size: int, names: int, rows: int = ROWS) -> None:
        """Adds the choice of each row's first best value; `names`: address of their int64 ids."""
        assert size >= LANES, size
        self._add(BEST, rows, source, out, size, names)

    def prepare(
        self,
        spec: AttentionSpec,
        joined: int,
        cache: int,
        *,
        rotates: bool,
        is_tempered: bool,
        code: KVCode | None = None,  # of keys and values
    ) -> None:
        """Prepares rows [queries, keys, values] in place; writes keys and values to the cache."""
        integers, floats = self._ops.described(spec, code).addresses
        cos = sin = 0
        if rotates and spec.rotary_dim:
            cos, sin = self._rotations, self._rotations + 1
        self._add(
            PREPARE, self._num_rows, self._step, joined, cos, sin, FACTORS if is_tempered else 0,
            integers, floats, cache, cache + 1, spec.rotary_dim // 2 * 4,
            spec.joined_width * self._width,
        )  # fmt: skip

    def layer(self, layer: LayerParts, cache: int, source: int, code: KVCode | None = None) -> None:
        """Adds a layer, from the first product's input to the update of the second block."""
        spec, rows = layer.spec, self._num_rows
        self.product(layer.joined, source, JOINED, rows)
        own, self._rotations = self._rotations, self._rotations + 2 * (layer.rope or 0)
        rotates, is_tempered = layer.rope is not None, layer.is_tempered
        self.prepare(spec, JOINED, cache, rotates=rotates, is_tempered=is_tempered, code=code)
        self._rotations = own
        integers, floats = self._ops.described(spec, code).addresses
        self._add(ATTEND, rows, self._step, JOINED, cache, cache + 1, ATTENDED, integers, floats)
        self.product(layer.output, ATTENDED, UPDATE, rows)
        self.add_norm(UPDATE, layer.after_attention, layer.before_mlp)
        size, gate, by = _panels(layer.down).length, layer.gate, _panels(layer.gate_up)
        how = GATE_KERNELS[gate.kind], _bits(gate.limit), _bits(gate.alpha)
        if gates_at_once(by):
            self._add(
                GATED_PRODUCT, rows, self.states, by.length * self._width, by.start, by.shift,
                GATED, size, by.units, size * self._width, *how,
            )  # fmt: skip
        else:
            self.product(by, self.states, GATES, rows)
            self._add(GATE, rows, GATES, GATED, size, *how)
        self.product(layer.down, GATED, UPDATE, rows)

    def _add(self, *operands: int) -> None:
        self.rows.append([*map(int, operands), *[0] * (NUM_OPERANDS - len(operands))])


class _Memory(threading.local):
    """The memory to which a thread's steps write."""

    def __init__(self) -> None:
        self._variables = np.zeros(NUM_VARIABLES, dtype=np.int64)
        self._buffers: dict[int, Tensor] = {}
        self._num_rows = 0

    def of(
        self, program: Program, num_rows: int, dtype: torch.dtype
    ) -> tuple[Ints, dict[int, Tensor]]:
        """Returns the variables, and the buffers by variable, [at least num_rows, width]."""
        if num_rows > self._num_rows:
            self._num_rows = max(num_rows, min(2 * self._num_rows, self._num_rows + 256))
            for name, width in program.widths.items():
                self._buffers[name] = torch.empty(self._num_rows, width, dtype=dtype)
                self._variables[name] = self._buffers[name].data_ptr()
        return self._variables, self._buffers


class Helpers:
    """Threads that help their owner, for as long as it lives."""

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[tuple[Any, ...] | None]] = []
        self._gate = np.zeros(2 * LINE // 8, dtype=np.int64)
        self._counters = np.zeros(0, dtype=np.int64)
        self._scratch = np.zeros(0, dtype=np.uint8)
        self._steps = count(2, 2)  # the numbers between are those of steps that have ended

    def run(self, program: Program, phases: Ints, variables: Ints) -> None:
        """Runs all `phases`, which may differ from the program's.

        The number of threads is torch's setting.
        """
        num_threads = torch.get_num_threads()
        num_counters = len(phases) * (num_threads + 1) * LINE // 8
        if len(self._counters) < num_counters:
            self._counters = np.zeros(num_counters, dtype=np.int64)
        self._counters[:num_counters] = 0
        size = program.scratch_bytes
        if len(self._scratch) < num_threads * size + PANEL:
            self._scratch = np.zeros(num_threads * size + PANEL, dtype=np.uint8)
        kernel, functions, _ = _compiled_for(program.ops.dtype)
        step = next(self._steps)
        self._gate[0] = step
        scratch = -(-self._scratch.ctypes.data // PANEL) * PANEL  # vectors in whole lines
        common = (
            phases.ctypes.data, len(phases), variables.ctypes.data, functions.ctypes.data,
            self._counters.ctypes.data, self._gate.ctypes.data, step, num_threads,
        )  # fmt: skip
        while len(self._queues) < num_threads - 1:
            self._start()
        for index in range(1, num_threads):
            job = (kernel, self._gate, *common, index, scratch + index * size)
            self._queues[index - 1].put(job)
        kernel(*common, 0, scratch)

    def _start(self) -> None:
        queue: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._queues.append(queue)
        arguments = (queue, _cores_elsewhere())
        threading.Thread(target=_help, args=arguments, name="program", daemon=True).start()

    def __del__(self) -> None:
        for queue in self._queues:
            queue.put(None)


def _cores_elsewhere() -> set[int]:
    """Returns the cores that this process may use, except this thread's; known on Linux."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    return os.sched_getaffinity(0) - {ctypes.CDLL(None).sched_getcpu()}


class _Team(threading.local):
    """State of each calling thread."""

    def __init__(self) -> None:
        self.helpers = Helpers()


TEAM = _Team()


def _help(queue: SimpleQueue[tuple[Any, ...] | None], cores: set[int]) -> None:
    """Runs a helper, on other cores than its owner's, whose place it would take there.

    A job keeps its gate alive, which is read even after its step has ended.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    while (job := queue.get()) is not None:
        kernel, _, *arguments = job
        kernel(*arguments)


class LevelsProgram:
    """Chains of tokens, drawn level by level from a model's logits; for one thread at a time.

    If the likeliest tokens are drafted, all levels are one call.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._variables = np.zeros(NUM_VARIABLES, dtype=np.int64)
        self._buffers: dict[int, Tensor] = {}  # by variable
        self._made: dict[tuple[int, int, bool], Ints] = {}

    def _level_phases(self, level: int, *, best: bool) -> list[list[int]]:
        """Returns the phases from a level's inputs to its logits, and with `best` to its tokens."""
        raise NotImplementedError

    def _compute(
        self,
        tokens: NDArray[np.int32],  # [depth, num_chains], written
        counts: Sequence[int],  # chains of each level, the first so many
        draw: Draw | None,
    ) -> None:
        """Draws `tokens`, once the variables are set."""
        if draw is None:
            phases = self._phases(0, len(counts), best=True)
            TEAM.helpers.run(self._program, phases, self._variables)
            return
        for level, size in enumerate(counts):
            phases = self._phases(level, level + 1, best=False)
            TEAM.helpers.run(self._program, phases, self._variables)
            tokens[level, :size] = draw(self._buffers[LOGITS][:size], level)

    def _phases(self, begin: int, end: int, *, best: bool) -> Ints:  # [num_phases, NUM_OPERANDS]
        """Returns the phases of levels `[begin, end)`."""
        found = self._made.get((begin, end, best))
        if found is None:
            rows: list[list[int]] = []
            for level in range(begin, end):
                rows += self._level_phases(level, best=best)
            found = self._made[begin, end, best] = np.array(rows, dtype=np.int64)
        return found

    def _make(self, widths: Mapping[int, int], num_rows: int) -> None:
        """Allocates buffers of these widths, by variable."""
        for name, width in widths.items():
            self._buffers[name] = torch.empty(num_rows, width, dtype=self._program.ops.dtype)
            self._variables[name] = self._buffers[name].data_ptr()


class _Compiled(NamedTuple):
    """The program of a dtype, and the functions that it calls."""

    run: Kernel
    functions: Ints  # addresses
    kept: tuple[Kernel, ...]  # whose code is there: a function's goes with it


_COMPILED: dict[torch.dtype, _Compiled] = {}
_COMPILING = threading.Lock()


def _compiled_for(dtype: torch.dtype) -> _Compiled:
    """Returns it for a dtype; compiled once for all threads."""
    if (found := _COMPILED.get(dtype)) is not None:
        return found
    with _COMPILING:
        if dtype not in _COMPILED:
            made = kernels_of(dtype)
            let_run = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
            called = (made.norm, made.add_norm, made.product, made.prepare, made.attend, made.gate)
            functions = np.array([*map(compiled.address_of, called), let_run], dtype=np.int64)
            _COMPILED[dtype] = _Compiled(_program_kernel(kind_of(dtype)), functions, called)
    return _COMPILED[dtype]


def _program_kernel(kind: Kind) -> Kernel:
    """Returns the kernel of a program.

    `run(phases, num_phases, variables, functions, counters, gate, number, num_threads, member)`:
    `gate` is the address of the current step's number, followed after `INSIDE` bytes by the number
    of helpers inside. `member` 0 starts the step and returns when all have left it; others return
    at once if the step has ended.
    """

    @compiled(VOID, *[INT] * 10)
    def run(
        phases, num_phases, variables, functions, counters, gate, step, num_threads, member,
        scratch,
    ):  # fmt: skip
        if member:
            fetch_add(gate + INSIDE, 1)
        if peek(gate) == step:
            called = Functions(
                item64(functions, 0), item64(functions, 1), item64(functions, 2),
                item64(functions, 3), item64(functions, 4), item64(functions, 5),
                item64(functions, 6),
            )  # fmt: skip
            team = Team(num_threads, member, scratch)
            for index in range(num_phases):
                phase = phases + index * NUM_OPERANDS * 8
                own = counters + index * (num_threads + 1) * LINE
                run_phase(kind, phase, variables, called, own, team)
        if member:
            fetch_add(gate + INSIDE, -1)
        else:
            fetch_add(gate, 1)  # closed
            while peek(gate + INSIDE) > 0:
                pause()

    return run


def gates_at_once(gate_up: PanelProjection) -> bool:
    """Returns True if gates and ups each begin groups of panels, so one phase computes both."""
    return not isinstance(gate_up, CodedProjection) and gate_up.columns % (2 * GROUP) == 0


def _panels(product: Projection) -> PanelProjection:
    assert isinstance(product, PanelProjection), type(product)
    return product


def _rounded(size: int) -> int:
    return -(-size // 256) * 256


def _bits(number: float) -> int:
    """Returns a float64's bits as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
