"""A one-layer head as a program (`ops/program.py`): a step's rows, then greedy chains.

Of a row that no draft starts from, only the key and the value are ever read, so its attention and
its MLP are not computed. A chain's first level is the last committed row. It is computed together
with the later levels: each is a query over the committed rows and the levels before it. Tokens are
chosen and embedded between levels, so a greedy round is one call. If tokens are sampled, each level
is one call. `drafters/heads/tree_drafting.py` computes the same drafts by operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..drafters.heads.protocol import FeatureModule, Frontier, Head, Verified
from ..drafters.heads.tree_drafting import next_tokens
from ..scheduler.types import IntArray, ints
from .attention import KVCache
from .head_layers import StackedLayers, committed, norm_of
from .model.family import LayerStack
from .model.family.decoder import Rope
from .model.target import MIN_ELEMENTS, product_of
from .ops.cpu import CpuOps, PanelProjection
from .ops.kernels import GROUP, LANES
from .ops.kernels.prepare import NUM_STEP_FIELDS
from .ops.kernels.program import NUM_VARIABLES
from .ops.program import (
    ATTENDED,
    CACHES,
    GATED,
    GATES,
    JOINED,
    LOGITS,
    RESIDUAL,
    STATES,
    TEAM,
    UPDATE,
    Draw,
    LayerParts,
    LevelsProgram,
    Phases,
    Program,
)
from .ops.protocol import AttentionSpec, Norm

# Indices of variables beside those of a layer's phases: sizes, then addresses. The layer's phases
# compute a level's rows.
(
    ALL_ROWS, DRAFTS, NEXT_IDS, STEP_OF_ROWS, LAST, FEATURES, FUSED, EMBEDDED, JOINT, JOINT_FEATURE,
    ENTERED, NORMED, STORED, LEVEL_EMBEDDED, LEVEL_JOINT, LEVEL_FEATURE,
) = range(200, 216)  # fmt: skip
_HIDDEN, _PARTS = 230, 240  # of each captured state: its address, and its place in `FEATURES`
MOST_STATES = 10
ROWS_ROTATION = 250  # cosines and sines
_LEVELS = 256  # four variables per level: its step, cosines, sines, and tokens
_MOST_LEVELS = (NUM_VARIABLES - _LEVELS) // 4


class _Ends(NamedTuple):
    """A head's parts outside its layer, in the form that phases take."""

    state_norms: Sequence[Norm]
    fused_norm: Norm | None
    fuse: PanelProjection | None
    embedding_norm: Norm | None
    feature_norm: Norm | None
    join: PanelProjection | None
    is_residual_normed: bool
    table: Tensor  # [vocab, embedding_size]
    output: PanelProjection


class _Shape:
    """Constants shared by all chains with the same number of drafts and levels."""

    def __init__(self, num_drafts: int, depth: int, room: int, num_slots: int) -> None:
        self.levels = np.arange(depth, dtype=np.int32)[:, None]
        self.drafts = np.arange(num_drafts)
        # Slots after those of the cache's blocks. Row 0 is overwritten by the blocks' slots of
        # level 0.
        own = num_slots - 1 + self.drafts * room + self.levels
        self.slots = ints(own)  # [depth, num_drafts]
        self.tokens = np.zeros((depth, num_drafts), dtype=np.int32)  # output
        self._starts = ints(np.arange(num_drafts + 1))  # starts of the drafts' queries
        self._ancestors = np.zeros(num_drafts, dtype=np.int64)  # a chain is causal
        # the step, then each level
        self.steps = np.zeros((depth + 1, NUM_STEP_FIELDS), dtype=np.int64)
        self.behind = 4 * num_drafts * np.arange(depth)  # byte offsets
        each = (self.slots, self.tokens, self._starts, self._ancestors, self.steps)
        at_slots, at_tokens, self.at_starts, self.at_bits, self.at_steps = (
            array.ctypes.data for array in each
        )
        self.steps[1:, 6] = at_slots + self.behind
        self.at_levels = self.at_steps + 8 * NUM_STEP_FIELDS * np.arange(1, depth + 1)
        self.at_tokens = at_tokens + self.behind


class StatesProgram(LevelsProgram):
    """Base of heads' programs, which begin by storing rows of a step's states."""

    def __init__(self, head: Head, program: Program, rope: Rope | None, states_size: int) -> None:
        super().__init__(program)
        self._head, self._rope, self._states_size = head, rope, states_size
        self._ops: CpuOps = self._program.ops
        self._entering = np.array(self._entering_phases(), dtype=np.int64)
        self._numbers = np.zeros(0, dtype=np.int32)
        self._alignment = self._ops.alignment_of(1)

    def _entering_phases(self) -> list[list[int]]:
        """Returns the phases from a step's states to its rows' keys and values."""
        raise NotImplementedError

    def _reserve(self, num_rows: int, num_drafts: int) -> None:
        """Allocates memory for this number of rows and drafts."""
        raise NotImplementedError

    def store(self, done: Verified, cache: KVCache, first: int) -> None:
        """Stores the rows of a step."""
        step, variables = done.step, self._variables
        hidden = self._begin(done, 0, cache, first)
        next_ids = next_tokens(step, done.verdict)
        numbers = np.zeros(NUM_STEP_FIELDS, dtype=np.int64)
        numbers[0] = len(next_ids)
        numbers[5], numbers[6] = step.positions.ctypes.data, step.slot_mapping.ctypes.data
        variables[NEXT_IDS], variables[STEP_OF_ROWS] = next_ids.ctypes.data, numbers.ctypes.data
        angles = self._rotate(step.positions, ROWS_ROTATION)
        TEAM.helpers.run(self._program, self._entering, variables)
        del hidden, angles

    def _begin(self, done: Verified, num_drafts: int, cache: KVCache, first: int) -> list[Tensor]:
        """Sets the inputs of a step's rows; returns the tensors that must be kept alive."""
        num_rows, variables = len(done.step.token_ids), self._variables
        self._reserve(num_rows, num_drafts)
        hidden = [done.hidden[layer].contiguous() for layer in self._head.capture]
        for index, states in enumerate(hidden):
            assert states.dtype == self._ops.dtype, states.dtype
            variables[_HIDDEN + index] = states.data_ptr()
        for index in range(len(self._head.layers)):
            variables[CACHES + 2 * index] = cache.keys[first + index].data_ptr()
            variables[CACHES + 2 * index + 1] = cache.values[first + index].data_ptr()
        variables[ALL_ROWS], variables[DRAFTS] = num_rows, num_drafts
        return hidden

    def _rotate(self, positions: IntArray, place: int) -> tuple[Tensor, Tensor] | None:
        """Sets the variables from `place` on to the positions' cosines and sines; returns these."""
        if (rope := self._rope) is None:
            return None
        angles = self._ops.rotation(torch.from_numpy(positions), rope.frequencies, rope.scale)
        self._variables[place : place + 2] = angles[0].data_ptr(), angles[1].data_ptr()
        return angles

    def _parts_of(self, sizes: Sequence[int]) -> list[IntArray]:
        """Returns arrays of these sizes, as consecutive parts of reused memory."""
        begins = [0, *accumulate(sizes)]
        if len(self._numbers) < begins[-1]:
            self._numbers = np.zeros(2 * begins[-1], dtype=np.int32)
        return [self._numbers[begin:end] for begin, end in pairwise(begins)]

    def _fuse(
        self,
        phases: Phases,
        by: PanelProjection,
        state_norms: Sequence[Norm] = (),
        fused_norm: Norm | None = None,
    ) -> None:
        """Adds the phases that concatenate the captured states and project them."""
        size, count = self._states_size, len(self._head.capture)
        if count == 1 and not state_norms and fused_norm is None:
            phases.product(by, _HIDDEN, FUSED, ALL_ROWS)
            return
        whole = {"size": size, "to_out": count * size}
        for index in range(count):
            place = FEATURES if index == 0 else _PARTS + index
            if state_norms:
                phases.norm(_HIDDEN + index, place, state_norms[index], ALL_ROWS, **whole)
            else:
                phases.copy(_HIDDEN + index, place, ALL_ROWS, **whole)
        if fused_norm is not None:
            phases.norm(FEATURES, FEATURES, fused_norm, ALL_ROWS, count * size)
        phases.product(by, FEATURES, FUSED, ALL_ROWS)

    def _place_parts(self) -> None:
        """Sets the place of each captured state in `FEATURES`, once that is allocated."""
        width = self._states_size * self._ops.dtype.itemsize
        for index in range(1, len(self._head.capture)):
            self._variables[_PARTS + index] = self._variables[FEATURES] + index * width


class HeadProgram(StatesProgram):
    """The phases of one head and their output buffers."""

    def __init__(self, head: Head, module: FeatureModule, stack: LayerStack, ends: _Ends) -> None:
        assert stack.program is not None, "the caller looked"
        self._module, self._ends = module, ends
        products = [each for each in (ends.fuse, ends.join, ends.output) if each is not None]
        program = stack.program.reserving(*products)
        layer = program.layers[0]
        self._layer: LayerParts = layer if layer.rope is None else layer._replace(rope=0)
        self._norm = stack.norm
        self._stored, self._first_stored = stored_of(layer.spec)
        self._num_rows = self._num_drafts = 0
        self._shapes: dict[tuple[int, int, int], _Shape] = {}
        count = len(head.capture)
        size = ends.fuse.length // count if ends.fuse else module.hidden_size
        super().__init__(
            head, program, None if layer.rope is None else stack.ropes[layer.rope], size
        )

    @staticmethod
    def of(head: Head, embedding: nn.Module, output: nn.Module) -> HeadProgram | None:
        """Returns the head's program; None if a part of it has no kernel.

        Args:
            embedding: the target's embedding.
            output: the layer from whose logits drafts are chosen.
        """
        module = head.only_module
        stacked = getattr(module, "decode", None)
        if module is None or not isinstance(stacked, StackedLayers):
            return None
        stack = stacked.stack
        if stack.program is None or not len(stack.layers) == len(head.layers) == 1:
            return None
        if stack.spec.temperature is not None or len(head.capture) > MOST_STATES:
            return None
        own = module.embed_tokens
        ends = _ends_of(module, stack.program, embedding if own is None else own, output)
        if ends is None or (module.norm_output and stack.norm is None):
            return None
        if head.room > _MOST_LEVELS:
            return None
        return HeadProgram(head, module, stack, ends)

    def run(
        self,
        done: Verified,
        ends: Frontier,
        depth: int,
        cache: KVCache,
        first: int,  # the head's layer in the cache
        draw: Draw | None,  # None: the likeliest tokens
    ) -> IntArray:  # [num_drafts, depth], the target's ids
        """Stores the rows of a step and drafts `depth` levels behind the sequences of `ends`."""
        num_drafts = len(ends.seqs)
        assert num_drafts > 0 < depth, (num_drafts, depth)
        hidden = self._begin(done, num_drafts, cache, first)
        shape = self._shapes.get((num_drafts, depth, cache.num_slots))
        if shape is None:
            sizes = (num_drafts, depth, self._head.room, cache.num_slots)
            shape = self._shapes[num_drafts, depth, cache.num_slots] = _Shape(*sizes)
        kept = self._lay_out(done, ends, shape, cache)
        self._compute(shape.tokens, [num_drafts] * depth, draw)
        del hidden, kept
        return shape.tokens.T

    def _lay_out(self, done: Verified, ends: Frontier, shape: _Shape, cache: KVCache) -> Any:
        """Sets the variables of the step and its levels; returns arrays that must be kept alive.

        Level 0 is the last committed row, in its own slot.
        """
        step, num_rows, num_drafts = done.step, len(done.step.token_ids), len(ends.seqs)
        room, depth = self._head.room, len(shape.tokens)
        places, known = committed(step, done.verdict, ends, cache.block_size, room)
        next_ids = next_tokens(step, done.verdict)
        num_levels, num_keys = depth * num_drafts, places.shape[1]
        # Positions of the step's rows and the levels', these rows' places, last rows, tree starts.
        sizes = (num_rows + num_levels, num_levels, num_drafts, num_drafts)
        positions, level_places, last, starts = self._parts_of(sizes)
        at = self._numbers.ctypes.data
        at_own = at + 4 * num_rows
        at_places = at_own + 4 * num_levels
        at_last = at_places + 4 * num_levels
        positions[:num_rows], last[:], starts[:] = step.positions, ends.rows, known + room
        index = level_places.reshape(depth, num_drafts)
        np.add(known - 1, shape.levels, out=index, casting="unsafe")
        own = positions[num_rows:].reshape(depth, num_drafts)
        np.add(step.positions[ends.rows], shape.levels, out=own)
        shape.slots[0] = step.slot_mapping[ends.rows]
        places[shape.drafts, index[1:]] = shape.slots[1:]
        steps, behind = shape.steps, shape.behind
        steps[0, 0], steps[0, 5], steps[0, 6] = num_rows, at, step.slot_mapping.ctypes.data
        steps[1:, :5] = num_drafts, num_drafts, num_keys, 1, 1
        steps[1:, 5] = at_own + behind
        steps[1:, 7] = steps[1:, 9] = at_places + behind
        steps[1:, 8] = shape.at_starts
        steps[1:, 10:] = (
            at_last + 4 * num_drafts, places.ctypes.data, shape.at_bits, self._alignment,
        )  # fmt: skip
        variables = self._variables
        variables[NEXT_IDS], variables[LAST] = next_ids.ctypes.data, at_last
        variables[STEP_OF_ROWS] = shape.at_steps
        of_levels = variables[_LEVELS : _LEVELS + 4 * depth].reshape(depth, 4)
        of_levels[:, 0], of_levels[:, 3] = shape.at_levels, shape.at_tokens
        if (angles := self._rotate(positions, ROWS_ROTATION)) is not None:
            to_row = angles[0].shape[1] * 4
            for column, each in enumerate(angles):
                first = each.data_ptr() + num_rows * to_row
                of_levels[:, 1 + column] = first + to_row // 4 * behind
        return places, next_ids, angles

    def _reserve(self, num_rows: int, num_drafts: int) -> None:
        """Allocates memory for this number of rows and drafts."""
        if num_rows > self._num_rows:
            self._num_rows = max(num_rows, min(2 * self._num_rows, self._num_rows + 256))
            self._make(self._row_widths, self._num_rows)
        if num_drafts > self._num_drafts:
            self._num_drafts = num_drafts
            self._make(self._draft_widths, num_drafts)
        width, size = self._ops.dtype.itemsize, self._module.embedding_size
        variables = self._variables
        variables[JOINT_FEATURE] = variables[JOINT] + size * width
        variables[LEVEL_FEATURE] = variables[LEVEL_JOINT] + size * width
        self._place_parts()

    @property
    def _row_widths(self) -> dict[int, int]:
        module = self._module
        embedding, hidden = module.embedding_size, module.hidden_size
        states = self._states_size * len(self._head.capture)
        stored = self._layer.spec.joined_width - self._first_stored
        return {
            FEATURES: states, FUSED: hidden, EMBEDDED: embedding, JOINT: embedding + hidden,
            ENTERED: hidden, NORMED: hidden, STORED: stored,
        }  # fmt: skip

    @property
    def _draft_widths(self) -> dict[int, int]:
        module = self._module
        embedding, hidden = module.embedding_size, module.hidden_size
        widths = {
            each: width
            for each, width in self._program.widths.items()
            if each in (STATES, JOINED, ATTENDED, UPDATE, GATES, GATED)
        }
        own = {LEVEL_EMBEDDED: embedding, LEVEL_JOINT: embedding + hidden, RESIDUAL: hidden}
        return widths | own | {LOGITS: self._ends.output.columns}

    # -- phases

    def _entering_phases(self) -> list[list[int]]:
        """Returns the phases from a step's states to its rows' keys and values."""
        ends, layer = self._ends, self._layer
        phases = Phases(
            self._ops, self._module.hidden_size, 1.0, rows=ALL_ROWS, step=STEP_OF_ROWS,
            rotations=ROWS_ROTATION,
        )  # fmt: skip
        feature = _HIDDEN
        if ends.fuse is not None:
            feature = FUSED
            self._fuse(phases, ends.fuse, ends.state_norms, ends.fused_norm)
        elif ends.state_norms:
            feature, size = FUSED, self._module.hidden_size
            phases.norm(_HIDDEN, FUSED, ends.state_norms[0], ALL_ROWS, size)
        self._join(phases, ALL_ROWS, NEXT_IDS, feature, EMBEDDED, JOINT, JOINT_FEATURE)
        source = JOINT
        if ends.join is not None:
            phases.product(ends.join, JOINT, ENTERED, ALL_ROWS)
            source = ENTERED
            if layer.before_attention is not None:
                phases.norm(ENTERED, NORMED, layer.before_attention, ALL_ROWS)
                source = NORMED
        phases.columns(layer.joined, self._first_stored, source, STORED, ALL_ROWS)
        rotates = layer.rope is not None
        phases.prepare(self._stored, STORED, CACHES, rotates=rotates, is_tempered=False)
        return phases.rows

    def _join(
        self,
        phases: Phases,
        rows: int,
        ids: int,
        feature: int,
        embedded: int,
        joint: int,
        half: int,
    ) -> None:
        """Adds the phases that concatenate embeddings of `ids` and features, each with its norm."""
        ends, size, hidden = self._ends, self._module.embedding_size, self._module.hidden_size
        table, width = ends.table.data_ptr(), size + hidden
        if ends.embedding_norm is None:
            phases.copy(table, joint, rows, ids, size, to_out=width)
        else:
            phases.copy(table, embedded, rows, ids, size)
            phases.norm(embedded, joint, ends.embedding_norm, rows, size, to_out=width)
        if ends.feature_norm is None:
            phases.copy(feature, half, rows, size=hidden, to_out=width)
        else:
            phases.norm(feature, half, ends.feature_norm, rows, hidden, to_out=width)

    def _level_phases(self, level: int, *, best: bool) -> list[list[int]]:
        place, ends, layer = _LEVELS + 4 * level, self._ends, self._layer
        phases = Phases(
            self._ops, self._module.hidden_size, self._program.scale, rows=DRAFTS, step=place,
            rotations=place + 1,
        )  # fmt: skip
        if level:
            self._begin_level(phases, place - 1)
        else:
            self._begin_first(phases)
        source = LEVEL_JOINT
        if ends.join is not None:
            phases.add_norm(0, None, layer.before_attention)
            source = phases.states
        phases.layer(layer, CACHES, source)
        phases.add_norm(UPDATE, layer.after_mlp, self._norm)
        phases.product(ends.output, phases.states, LOGITS, DRAFTS)
        if best:
            names, size = self._head.target_ids, ends.output.columns
            phases.best(LOGITS, place + 3, size, 0 if names is None else names.data_ptr(), DRAFTS)
        return phases.rows if level else self._entering_phases() + phases.rows

    def _begin_first(self, phases: Phases) -> None:
        """Adds the phases that copy the last committed rows' inputs to level 0."""
        ends, hidden = self._ends, self._module.hidden_size
        width = self._module.embedding_size + hidden
        if ends.join is not None:
            phases.copy(ENTERED, RESIDUAL, DRAFTS, LAST)
            return
        phases.copy(JOINT, LEVEL_JOINT, DRAFTS, LAST, width)
        if ends.is_residual_normed:
            phases.copy(LEVEL_FEATURE, RESIDUAL, DRAFTS, size=hidden, to_row=width)
        else:
            phases.copy(_HIDDEN if ends.fuse is None else FUSED, RESIDUAL, DRAFTS, LAST)

    def _begin_level(self, phases: Phases, ids: int) -> None:
        """Adds the phases that compute a level's inputs from the level above."""
        ends, hidden = self._ends, self._module.hidden_size
        feature = STATES if self._module.norm_output else RESIDUAL
        self._join(phases, DRAFTS, ids, feature, LEVEL_EMBEDDED, LEVEL_JOINT, LEVEL_FEATURE)
        if ends.join is not None:
            phases.product(ends.join, LEVEL_JOINT, RESIDUAL, DRAFTS)
        elif ends.is_residual_normed:
            width = self._module.embedding_size + hidden
            phases.copy(LEVEL_FEATURE, RESIDUAL, DRAFTS, size=hidden, to_row=width)
        elif feature != RESIDUAL:
            phases.copy(feature, RESIDUAL, DRAFTS)


def stored_of(spec: AttentionSpec) -> tuple[AttentionSpec, int]:
    """Returns a spec of keys and values only, if they begin a column group; and its column."""
    if not spec.key_begin or spec.key_begin % GROUP:
        return spec, 0
    return replace(spec, num_heads=0, query_norm=None), spec.key_begin


class _NoKernelError(Exception):
    """A part of a head has a form that phases do not support."""


def panels_of_linear(linear: Any, ops: CpuOps) -> PanelProjection | None:
    """Returns the product with a linear's weight, if phases support it."""
    found = product_of(linear)
    if found is None:
        weight, bias = linear.weight, getattr(linear, "bias", None)
        is_plain = type(linear) is nn.Linear and "forward" not in vars(linear)
        is_small = is_plain and weight.numel() < MIN_ELEMENTS[ops.dtype]
        if not is_small or weight.dtype != ops.dtype:
            return None
        found = ops.pack(weight.detach(), None if bias is None else bias.detach())
    if not isinstance(found, PanelProjection) or found.is_padded:
        return None
    return found


def table_of(embedding: Any, dtype: torch.dtype, size: int) -> Tensor | None:
    """Returns an embedding's rows, if phases support them; they are copied as rows of float32."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return None
    table = embedding.weight.detach()
    is_whole = table.is_contiguous() and size * dtype.itemsize % 4 == 0
    return table if is_whole and table.dtype == dtype and table.shape[1] == size else None


def _ends_of(
    module: FeatureModule, program: Program, embedding: Any, output: nn.Module
) -> _Ends | None:
    """Returns the parts outside the layer; None if one of them has no kernel."""
    parts, dtype = module.entrance(), program.ops.dtype

    def product(linear: Any) -> PanelProjection:
        if (found := panels_of_linear(linear, program.ops)) is None:
            raise _NoKernelError
        return found

    def norm(part: nn.Module) -> Norm:
        if (found := norm_of(part)) is None:
            raise _NoKernelError
        return found

    table = table_of(embedding, dtype, module.embedding_size)
    if table is None or module.hidden_size * dtype.itemsize % 4:
        return None
    try:
        ends = _Ends(
            [norm(each) for each in parts.state_norms],
            None if parts.fused_norm is None else norm(parts.fused_norm),
            None if parts.fuse is None else product(parts.fuse),
            None if parts.embedding_norm is None else norm(parts.embedding_norm),
            None if parts.feature_norm is None else norm(parts.feature_norm),
            None if parts.join is None else product(parts.join),
            parts.is_residual_normed,
            table,
            product(output),
        )
    except _NoKernelError:
        return None
    return ends if ends.output.columns >= LANES else None
