"""A block drafter as a program (`ops/program.py`): a step's rows, its blocks, and greedy chains.

A round is one call where the likeliest tokens are drafted: the context's keys and values of every
layer, the blocks' rows through the layers, and tokens, with a Markov head's correction between
them. What is drawn or grown as a tree begins with what the output layer reads of the blocks' rows.
`drafters/heads/dflash_head.py` computes the same drafts by operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..drafters.heads.dflash import BlockModule
from ..drafters.heads.dflash_head import BlockHead
from ..drafters.heads.protocol import Frontier, Head, Verified, last_emitted
from ..scheduler.types import IntArray
from .attention import KVCache
from .head_layers import BlockLayers, committed, norm_of
from .head_program import (
    ALL_ROWS,
    DRAFTS,
    FEATURES,
    FUSED,
    MOST_STATES,
    ROWS_ROTATION,
    STEP_OF_ROWS,
    STORED,
    StatesProgram,
    panels_of_linear,
    stored_of,
    table_of,
)
from .model.family import LayerStack
from .ops.cpu import CpuOps, PanelProjection
from .ops.kernels import LANES
from .ops.kernels.prepare import NUM_STEP_FIELDS
from .ops.kernels.program import NUM_VARIABLES
from .ops.program import (
    ATTENDED,
    CACHES,
    GATED,
    GATES,
    JOINED,
    LOGITS,
    NORMED,
    PICKED,
    RESIDUAL,
    STATES,
    TEAM,
    UPDATE,
    Phases,
)
from .ops.protocol import Norm

# Variables beside those of a layer's phases, which are of the blocks' rows: sizes, then addresses.
BLOCK_ROWS, NUM_READ, STEP_OF_BLOCKS, FIRSTS, ZEROS, READS, EMBEDDED, BIAS = range(218, 226)
_BLOCKS_ROTATION = 252  # cosines and sines
# Of each level its logits and its tokens, behind the tokens that blocks begin with.
_LEVELS = 257
_MOST_LEVELS = (NUM_VARIABLES - _LEVELS) // 2
_MOST_LAYERS = (200 - CACHES) // 2
_WORD = 63  # rows of a block that one word of bits has room for


class _Ends(NamedTuple):
    """A block drafter's parts around its layers, as phases take them."""

    fuse: PanelProjection
    fused_norm: Norm
    table: Tensor  # [vocab, hidden_size], embeddings
    mask: Tensor  # [hidden_size]
    output: PanelProjection
    markov: tuple[Tensor, PanelProjection] | None  # [vocab, rank], and to logits


class _Numbers(NamedTuple):
    """What kernels read of a step's rows and, behind them, of the blocks'."""

    positions: IntArray  # [num_rows + num_drafts * width]
    slots: IntArray  # alike
    places: IntArray  # [num_drafts * width], of a row in its sequence
    firsts: IntArray  # [num_drafts], the tokens that blocks begin with
    zeros: IntArray  # [num_drafts * width]
    reads: IntArray  # [depth * num_drafts], blocks' rows by level
    tokens: IntArray  # alike, written
    starts: IntArray  # [num_drafts + 1], of the blocks' queries
    known: IntArray  # [num_drafts]
    tables: IntArray  # [num_drafts * num_keys]


class BlockProgram(StatesProgram):
    """The phases of one block drafter, and what they write to."""

    def __init__(self, head: BlockHead, stack: LayerStack, ends: _Ends) -> None:
        assert stack.program is not None, "the caller looked"
        self.head, self._ends, self._norm = head, ends, stack.norm
        self._width, self._from_anchor = head.room, head.module.options.from_anchor
        self._hidden_size = head.module.sizes.hidden_size
        products = [ends.fuse, ends.output, *([ends.markov[1]] if ends.markov else [])]
        program = stack.program.reserving(*products)
        self._layers = [layer._replace(rope=0) for layer in program.layers]
        self._num_rows = self._num_drafts = 0
        self._of_drafts: dict[tuple[int, bool], NDArray[np.int64]] = {}
        size = ends.fuse.length // len(head.capture)
        super().__init__(head, program, stack.ropes[0], size)

    @staticmethod
    def of(head: Head, embedding: nn.Module, output: nn.Module) -> BlockProgram | None:
        """The drafter's program; None where a part of it has no kernel.

        Args:
            embedding: the target's.
            output: the layer that drafts are drawn from.
        """
        if not isinstance(head, BlockHead):
            return None
        module, stacked = head.module, getattr(head.module, "decode", None)
        if not isinstance(stacked, BlockLayers) or head.room > _WORD:
            return None
        stack = stacked.stack
        if stack.program is None or len(stack.layers) > _MOST_LAYERS or stack.norm is None:
            return None
        if len(head.capture) > MOST_STATES or head.room >= _MOST_LEVELS:
            return None
        own = module.embed_tokens
        ops, table = stack.program.ops, embedding if own is None else own
        ends = _ends_of(module, ops, table, output, head.mask_token)
        return None if ends is None else BlockProgram(head, stack, ends)

    @property
    def depth(self) -> int:
        """Tokens that a block drafts."""
        return self._width if self._from_anchor else self._width - 1

    def chains(
        self, done: Verified, ends: Frontier, depth: int, cache: KVCache, first: int
    ) -> tuple[IntArray, Tensor]:  # [num_drafts, depth], target's ids; [num_drafts, depth, hidden]
        """The likeliest tokens, and what the output layer reads of their rows."""
        tokens = self._run(done, ends, depth, cache, first, draws=True)
        return tokens.T, self._read(depth, len(ends.seqs))

    def read(
        self, done: Verified, ends: Frontier, depth: int, cache: KVCache, first: int
    ) -> Tensor:  # [num_drafts, depth, hidden_size]
        """What the output layer reads of the rows that draft."""
        self._run(done, ends, depth, cache, first, draws=False)
        return self._read(depth, len(ends.seqs))

    def _read(self, depth: int, num_drafts: int) -> Tensor:  # [num_drafts, depth, hidden_size]
        rows = self._buffers[PICKED][: depth * num_drafts]
        return rows.unflatten(0, (depth, num_drafts)).transpose(0, 1).contiguous()

    def _run(
        self,
        done: Verified,
        ends: Frontier,
        depth: int,
        cache: KVCache,
        first: int,  # the head's first layer in the cache
        *,
        draws: bool,
    ) -> IntArray:  # [depth, num_drafts]
        """Stores the rows of a step, and computes blocks behind those of `ends`."""
        num_drafts = len(ends.seqs)
        assert num_drafts > 0 < depth, (num_drafts, depth)
        hidden = self._begin(done, num_drafts, cache, first)
        tokens, kept = self._lay_out(done, ends, depth, cache)
        phases = self._of_drafts.get((depth, draws))
        if phases is None:
            rows = self._entering_phases() + self._block_phases(depth, draws=draws)
            phases = self._of_drafts[depth, draws] = np.array(rows, dtype=np.int64)
        TEAM.helpers.run(self._program, phases, self._variables)
        del hidden, kept
        return tokens

    def _lay_out(
        self, done: Verified, ends: Frontier, depth: int, cache: KVCache
    ) -> tuple[IntArray, Any]:  # [depth, num_drafts]
        """Fills in what the step and the blocks are; also returns what has to be kept."""
        step, num_rows, num_drafts = done.step, len(done.step.token_ids), len(ends.seqs)
        width, variables = self._width, self._variables
        places, known = committed(step, done.verdict, ends, cache.block_size, width)
        num_own, num_read, num_keys = num_drafts * width, depth * num_drafts, places.shape[1]
        num_all = num_rows + num_own
        sizes = (
            num_all, num_all, num_own, num_drafts, num_own, num_read, num_read, num_drafts + 1,
            num_drafts, num_drafts * num_keys,
        )  # fmt: skip
        numbers = _Numbers(*self._parts_of(sizes))
        at: Any = _Numbers(*[each.ctypes.data for each in numbers])  # type: ignore[arg-type]
        ahead, drafts = np.arange(width), np.arange(num_drafts)
        numbers.positions[:num_rows], numbers.slots[:num_rows] = step.positions, step.slot_mapping
        index = numbers.places.reshape(num_drafts, width)
        index[:] = known[:, None] + ahead
        own = numbers.positions[num_rows:].reshape(num_drafts, width)
        own[:] = step.positions[ends.rows][:, None] + 1 + ahead
        slots = numbers.slots[num_rows:]
        slots[:] = np.arange(cache.num_slots, cache.num_slots + num_own)
        numbers.firsts[:], numbers.zeros[:] = last_emitted(done.verdict, ends), 0
        levels = np.arange(depth)[:, None] + (0 if self._from_anchor else 1)
        numbers.reads.reshape(depth, num_drafts)[:] = levels + drafts * width
        numbers.starts[:], numbers.known[:] = np.arange(num_drafts + 1) * width, known
        table = numbers.tables.reshape(num_drafts, num_keys)
        table[:] = places
        table[drafts[:, None], index] = slots.reshape(num_drafts, width)
        is_causal = self.head.module.options.views[0].causal
        bits = (2 << ahead) - 1 if is_causal else np.full(width, (1 << width) - 1)
        ancestors = np.tile(bits.astype(np.int64), num_drafts)
        steps = np.zeros((2, NUM_STEP_FIELDS), dtype=np.int64)
        steps[0, 0], steps[0, 5], steps[0, 6] = num_rows, at.positions, at.slots
        steps[1] = (
            num_own, num_drafts, num_keys, 1, 1, at.positions + 4 * num_rows,
            at.slots + 4 * num_rows, at.places, at.starts, at.known, at.known, at.tables,
            ancestors.ctypes.data, self._ops.alignment_of(1),
        )  # fmt: skip
        variables[BLOCK_ROWS], variables[NUM_READ] = num_own, num_read
        variables[STEP_OF_ROWS] = steps.ctypes.data
        variables[STEP_OF_BLOCKS] = steps.ctypes.data + 8 * NUM_STEP_FIELDS
        variables[FIRSTS], variables[ZEROS], variables[READS] = at.firsts, at.zeros, at.reads
        to_level = num_drafts * self._ends.output.columns * self._ops.dtype.itemsize
        of_levels = variables[_LEVELS : _LEVELS + 2 * depth].reshape(depth, 2)
        order = np.arange(depth)
        of_levels[:, 0] = variables[LOGITS] + to_level * order
        of_levels[:, 1] = at.tokens + 4 * num_drafts * order
        variables[_LEVELS - 1] = at.firsts
        angles = self._rotate(numbers.positions, ROWS_ROTATION)
        if angles is not None:
            variables[_BLOCKS_ROTATION : _BLOCKS_ROTATION + 2] = [
                each.data_ptr() + num_rows * each.shape[1] * 4 for each in angles
            ]
        return numbers.tokens.reshape(depth, num_drafts), (steps, ancestors, angles)

    def _reserve(self, num_rows: int, num_drafts: int) -> None:
        hidden, ends = self._hidden_size, self._ends
        if num_rows > self._num_rows:
            self._num_rows = max(num_rows, min(2 * self._num_rows, self._num_rows + 256))
            count = len(self._head.capture)
            stored = max(each.spec.joined_width - stored_of(each.spec)[1] for each in self._layers)
            widths = {FEATURES: count * self._states_size, FUSED: hidden, STORED: stored}
            self._make(widths | {NORMED: hidden}, self._num_rows)
        if num_drafts > self._num_drafts:
            self._num_drafts = num_drafts
            names = (STATES, JOINED, ATTENDED, UPDATE, GATES, GATED)
            widths = {each: self._program.widths[each] for each in names}
            self._make(widths | {RESIDUAL: hidden}, num_drafts * self._width)
            read = {PICKED: hidden, LOGITS: ends.output.columns}
            self._make(read, num_drafts * self._width)
            if ends.markov is not None:
                rank = ends.markov[0].shape[1]
                self._make({EMBEDDED: rank, BIAS: ends.output.columns}, num_drafts)
        self._place_parts()

    # -- phases

    def _entering_phases(self) -> list[list[int]]:
        """From a step's states to its rows' keys and values of every layer."""
        phases = Phases(
            self._ops, self._hidden_size, 1.0, rows=ALL_ROWS, step=STEP_OF_ROWS,
            rotations=ROWS_ROTATION,
        )  # fmt: skip
        self._fuse(phases, self._ends.fuse)
        phases.norm(FUSED, NORMED, self._ends.fused_norm, ALL_ROWS)
        for index, layer in enumerate(self._layers):
            spec, first = stored_of(layer.spec)
            phases.columns(layer.joined, first, NORMED, STORED, ALL_ROWS)
            place = CACHES + 2 * index
            phases.prepare(spec, STORED, place, rotates=True, is_tempered=False)
        return phases.rows

    def _block_phases(self, depth: int, *, draws: bool) -> list[list[int]]:
        """From tokens and masks to what the output layer reads, and to tokens."""
        ends, hidden = self._ends, self._hidden_size
        phases = Phases(
            self._ops, hidden, self._program.scale, rows=BLOCK_ROWS, step=STEP_OF_BLOCKS,
            rotations=_BLOCKS_ROTATION,
        )  # fmt: skip
        phases.copy(ends.mask.data_ptr(), RESIDUAL, BLOCK_ROWS, ZEROS)
        to_block = self._width * hidden
        phases.copy(ends.table.data_ptr(), RESIDUAL, DRAFTS, FIRSTS, to_out=to_block)
        update, after = 0, None
        for index, layer in enumerate(self._layers):
            phases.add_norm(update, after, layer.before_attention)
            phases.layer(layer, CACHES + 2 * index, phases.states)
            update, after = UPDATE, layer.after_mlp
        phases.add_norm(update, after, self._norm)
        phases.copy(phases.states, PICKED, NUM_READ, READS)
        if not draws:
            return phases.rows
        phases.product(ends.output, PICKED, LOGITS, NUM_READ)
        ids, size = self._head.target_ids, ends.output.columns
        names = 0 if ids is None else ids.data_ptr()
        if ends.markov is None:
            phases.best(LOGITS, _LEVELS + 1, size, names, NUM_READ)
            return phases.rows
        for place in range(_LEVELS, _LEVELS + 2 * depth, 2):
            phases.copy(
                ends.markov[0].data_ptr(), EMBEDDED, DRAFTS, place - 1, ends.markov[0].shape[1]
            )
            phases.product(ends.markov[1], EMBEDDED, BIAS, DRAFTS)
            phases.add(BIAS, place, size, DRAFTS)
            phases.best(place, place + 1, size, names, DRAFTS)
        return phases.rows


def _ends_of(
    module: BlockModule, ops: CpuOps, embedding: Any, output: nn.Module, mask_token: int
) -> _Ends | None:
    """What is around the layers; None: a part of it has no kernel."""
    dtype, hidden = ops.dtype, module.sizes.hidden_size
    if module.options.embedding_scale != 1.0 or module.candidate_selector is not None:
        return None
    table = table_of(embedding, dtype, hidden)
    fused_norm, fuse = norm_of(module.hidden_norm), panels_of_linear(module.fc, ops)
    columns = panels_of_linear(output, ops)
    if table is None or fused_norm is None or fuse is None or columns is None:
        return None
    if columns.columns < LANES:
        return None
    mask = table[mask_token] if module.mask_embedding is None else module.mask_embedding.detach()
    markov = None
    if (head := module.markov_head) is not None:
        rows = table_of(head.markov_w1, dtype, head.markov_w1.embedding_dim)
        added = panels_of_linear(head.markov_w2, ops)
        if rows is None or added is None:
            return None
        markov = rows, added
    return _Ends(fuse, fused_norm, table, mask.to(dtype).contiguous(), columns, markov)
