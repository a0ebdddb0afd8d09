"""A block drafter as a program (`ops/program.py`): a step's rows, its blocks, and greedy chains.

If the likeliest tokens are drafted, a round is one call. It stores the context's keys and values of
every layer, runs the blocks' rows through the layers, and chooses tokens; a Markov head's
correction is applied between tokens. Drafts that are sampled or expanded into a tree start from the
output layer's inputs of the blocks' rows. A compiled loop builds the best tree of independent
positions (`best_trees`). `drafters/heads/dflash_head.py` computes the same drafts by operations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor, nn

from ..drafters.heads.dflash import BlockModule
from ..drafters.heads.dflash_head import BlockHead
from ..drafters.heads.protocol import Frontier, Head, Verified, last_emitted
from ..drafters.heads.tree_drafting import ranked
from ..scheduler.types import FloatArray, IntArray, ints
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
from .ops.kernels import LANES, VOID, compiled
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

# Indices of variables beside those of a layer's phases: sizes, then addresses. The layer's phases
# compute the blocks' rows.
BLOCK_ROWS, NUM_READ, STEP_OF_BLOCKS, FIRSTS, ZEROS, READS, EMBEDDED, BIAS = range(218, 226)
_BLOCKS_ROTATION = 252  # cosines and sines
# First variable of the levels: addresses of each level's logits and tokens.
_LEVELS = 257
_MOST_LEVELS = (NUM_VARIABLES - _LEVELS) // 2
_MOST_LAYERS = (200 - CACHES) // 2
_STATES, _LOGITS, _TOKENS = range(3)  # the last result that a round computes
_WORD = 63  # maximum rows of a block, so that their bits fit into one word


class _Ends(NamedTuple):
    """A block drafter's parts outside its layers, in the form that phases take."""

    fuse: PanelProjection
    fused_norm: Norm
    table: Tensor  # [vocab, hidden_size], embeddings
    mask: Tensor  # [hidden_size]
    output: PanelProjection
    markov: tuple[Tensor, PanelProjection] | None  # [vocab, rank], and the projection to logits


class _Shape:
    """Constants shared by all blocks with the same number of drafts and levels."""

    def __init__(
        self,
        num_drafts: int,
        depth: int,
        width: int,
        num_slots: int,
        *,
        anchored: bool,
        causal: bool,
    ) -> None:
        self.ahead = np.arange(width)
        self.drafts = np.arange(num_drafts)[:, None]
        levels = np.arange(depth)[:, None] + (0 if anchored else 1)
        # Slots behind those of the cache's blocks, [num_drafts, width].
        self.slots = ints(num_slots + self.drafts * width + self.ahead)
        self.tokens = np.zeros((depth, num_drafts), dtype=np.int32)  # output
        self._zeros = np.zeros(num_drafts * width, dtype=np.int32)
        self._reads = ints(levels + self.drafts.T * width)  # rows that are read, by level
        self._starts = ints(np.arange(num_drafts + 1) * width)  # starts of the blocks' queries
        bits = (2 << self.ahead) - 1 if causal else np.full(width, (1 << width) - 1)
        self._ancestors = np.tile(bits.astype(np.int64), num_drafts)
        own = (self._zeros, self._reads, self._starts, self._ancestors)
        self.at_zeros, self.at_reads, self.at_starts, self.at_bits = (
            each.ctypes.data for each in own
        )
        self.at_slots, self.at_tokens = self.slots.ctypes.data, self.tokens.ctypes.data


class BlockProgram(StatesProgram):
    """The phases of one block drafter and their output buffers."""

    def __init__(self, head: BlockHead, stack: LayerStack, ends: _Ends) -> None:
        assert stack.program is not None, "the caller looked"
        self.head, self._ends, self._norm = head, ends, stack.norm
        self._width, self._from_anchor = head.room, head.module.options.from_anchor
        self._hidden_size = head.module.sizes.hidden_size
        products = [ends.fuse, ends.output, *([ends.markov[1]] if ends.markov else [])]
        program = stack.program.reserving(*products)
        self._layers = [layer._replace(rope=0) for layer in program.layers]
        self._num_rows = self._num_drafts = 0
        self._of_drafts: dict[tuple[int, int], NDArray[np.int64]] = {}  # by depth and last result
        self._shapes: dict[tuple[int, int, int], _Shape] = {}
        # Of the step and of the blocks.
        self._steps = np.zeros((2, NUM_STEP_FIELDS), dtype=np.int64)
        start = self._steps.ctypes.data
        self._at_steps = (start, start + 8 * NUM_STEP_FIELDS)
        size = ends.fuse.length // len(head.capture)
        super().__init__(head, program, stack.ropes[0], size)
        self._confidence = _confidence_of(head.module)

    @staticmethod
    def of(head: Head, embedding: nn.Module, output: nn.Module) -> BlockProgram | None:
        """Returns the drafter's program; None if a part of it has no kernel.

        Args:
            embedding: the target's embedding.
            output: the layer from whose logits drafts are chosen.
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
        """Number of tokens that a block drafts."""
        return self._width if self._from_anchor else self._width - 1

    def chains(
        self, done: Verified, ends: Frontier, depth: int, cache: KVCache, first: int
    ) -> tuple[IntArray, FloatArray | None]:  # [num_drafts, depth] each
        """Returns the likeliest tokens as target ids, and their chances (see `Draft`)."""
        tokens = self._run(done, ends, depth, cache, first, _TOKENS)
        if self._confidence is None:
            return tokens.T, None
        by_state, by_token = self._confidence
        read = self._buffers[PICKED][: tokens.size].float() @ by_state  # by level
        if len(by_token) > 1:
            above = np.concatenate([last_emitted(done.verdict, ends)[None], tokens[:-1]])
            by_token = by_token[above]
        found = read.view(tokens.shape) + torch.from_numpy(by_token)
        return tokens.T, found.sigmoid().numpy().T

    def trees(
        self, done: Verified, ends: Frontier, max_nodes: int, cache: KVCache, first: int
    ) -> tuple[IntArray, IntArray]:  # [num_drafts, num_nodes] each
        """Returns the best trees of independent positions: target token ids, and parents."""
        module, ids = self.head.module, self._head.target_ids
        assert not module.is_sequential, "`read` begins what depends on tokens"
        self._run(done, ends, self.depth, cache, first, _LOGITS)
        num_drafts = len(ends.seqs)
        logits = module.scaled(self._buffers[LOGITS][: self.depth * num_drafts])
        logs, columns = ranked(logits, max_nodes)
        tokens = columns if ids is None else ids[columns]
        num_ranks = logs.shape[1]
        shape = (self.depth, num_drafts, num_ranks)
        num_nodes = most_nodes(self.depth, num_ranks, max_nodes)
        found, parents = (np.empty((num_drafts, num_nodes), dtype=np.int32) for _ in range(2))
        best_trees(logs.numpy().reshape(shape), tokens.numpy().reshape(shape), found, parents)
        return found, parents

    def read(
        self, done: Verified, ends: Frontier, depth: int, cache: KVCache, first: int
    ) -> Tensor:  # [num_drafts, depth, hidden_size]
        """Returns the output layer's inputs of the rows that draft."""
        self._run(done, ends, depth, cache, first, _STATES)
        rows = self._buffers[PICKED][: depth * len(ends.seqs)]
        return rows.unflatten(0, (depth, -1)).transpose(0, 1).contiguous()

    def _run(
        self,
        done: Verified,
        ends: Frontier,
        depth: int,
        cache: KVCache,
        first: int,  # the head's first layer in the cache
        until: int,
    ) -> IntArray:  # [depth, num_drafts]
        """Stores the rows of a step and computes blocks behind the sequences of `ends`."""
        num_drafts = len(ends.seqs)
        assert num_drafts > 0 < depth, (num_drafts, depth)
        hidden = self._begin(done, num_drafts, cache, first)
        shape = self._shapes.get((num_drafts, depth, cache.num_slots))
        if shape is None:
            options = self.head.module.options
            shape = self._shapes[num_drafts, depth, cache.num_slots] = _Shape(
                num_drafts, depth, self._width, cache.num_slots,
                anchored=self._from_anchor, causal=options.views[0].causal,
            )  # fmt: skip
        kept = self._lay_out(done, ends, shape, cache)
        phases = self._of_drafts.get((depth, until))
        if phases is None:
            rows = self._entering_phases() + self._block_phases(depth, until)
            phases = self._of_drafts[depth, until] = np.array(rows, dtype=np.int64)
        TEAM.helpers.run(self._program, phases, self._variables)
        del hidden, kept
        return shape.tokens

    def _lay_out(self, done: Verified, ends: Frontier, shape: _Shape, cache: KVCache) -> Any:
        """Sets the variables of the step and its blocks; returns arrays that must be kept alive."""
        step, num_rows, num_drafts = done.step, len(done.step.token_ids), len(ends.seqs)
        width, variables, depth = self._width, self._variables, len(shape.tokens)
        places, known = committed(step, done.verdict, ends, cache.block_size, width)
        num_own, num_keys = num_drafts * width, places.shape[1]
        # Positions of the step's rows and the blocks', these rows' places, first tokens, `known`.
        sizes = (num_rows + num_own, num_own, num_drafts, num_drafts)
        positions, own_places, firsts, lens = self._parts_of(sizes)
        at = self._numbers.ctypes.data
        at_own, at_places = at + 4 * num_rows, at + 4 * (num_rows + num_own)
        at_firsts = at_places + 4 * num_own
        at_known = at_firsts + 4 * num_drafts
        positions[:num_rows], firsts[:], lens[:] = (
            step.positions,
            last_emitted(done.verdict, ends),
            known,
        )
        index = own_places.reshape(num_drafts, width)
        np.add(known[:, None], shape.ahead, out=index, casting="unsafe")
        base = step.positions[ends.rows] + 1
        own = positions[num_rows:].reshape(num_drafts, width)
        np.add(base[:, None], shape.ahead, out=own, casting="unsafe")
        places[shape.drafts, index] = shape.slots
        steps = self._steps
        steps[0, 0], steps[0, 5], steps[0, 6] = num_rows, at, step.slot_mapping.ctypes.data
        steps[1] = (
            num_own, num_drafts, num_keys, 1, 1, at_own, shape.at_slots, at_places,
            shape.at_starts, at_known, at_known, places.ctypes.data, shape.at_bits,
            self._alignment,
        )  # fmt: skip
        variables[BLOCK_ROWS : READS + 1] = (
            num_own, depth * num_drafts, self._at_steps[1], at_firsts, shape.at_zeros,
            shape.at_reads,
        )  # fmt: skip
        variables[STEP_OF_ROWS] = self._at_steps[0]
        variables[_LEVELS - 1] = at_firsts
        to_level = num_drafts * self._ends.output.columns * self._ops.dtype.itemsize
        logits, of_tokens = int(variables[LOGITS]), shape.at_tokens
        for level in range(depth if self._ends.markov else 1):
            variables[_LEVELS + 2 * level : _LEVELS + 2 * level + 2] = logits, of_tokens
            logits, of_tokens = logits + to_level, of_tokens + 4 * num_drafts
        if (angles := self._rotate(positions, ROWS_ROTATION)) is not None:
            variables[_BLOCKS_ROTATION : _BLOCKS_ROTATION + 2] = [
                each.data_ptr() + num_rows * each.shape[1] * 4 for each in angles
            ]
        return places, angles

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
        """Returns the phases from a step's states to its rows' keys and values of every layer."""
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

    def _block_phases(self, depth: int, until: int) -> list[list[int]]:
        """Returns the phases from tokens and masks to the output layer's inputs and to tokens."""
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
        if until == _STATES:
            return phases.rows
        phases.product(ends.output, PICKED, LOGITS, NUM_READ)
        if until == _LOGITS:
            return phases.rows
        ids, size = self._head.target_ids, ends.output.columns
        names = 0 if ids is None else ids.data_ptr()
        if ends.markov is None:
            phases.best(LOGITS, _LEVELS + 1, size, names, NUM_READ)
            return phases.rows
        table, added = ends.markov
        for place in range(_LEVELS, _LEVELS + 2 * depth, 2):
            phases.copy(table.data_ptr(), EMBEDDED, DRAFTS, place - 1, table.shape[1])
            phases.product(added, EMBEDDED, BIAS, DRAFTS)
            phases.add(BIAS, place, size, DRAFTS)
            phases.best(place, place + 1, size, names, DRAFTS)
        return phases.rows


@torch.no_grad()
def _confidence_of(module: BlockModule) -> tuple[Tensor, FloatArray] | None:
    """Returns the parts of a confidence logit: weights [hidden_size], and a bias [vocab or 1]."""
    if (head := module.confidence_head) is None:
        return None
    hidden = module.sizes.hidden_size
    weight, bias = head.proj.weight[0].float(), head.proj.bias.float()
    if module.markov_head is not None and module.options.confidence_reads_markov:
        bias = bias + module.markov_head.markov_w1.weight.float() @ weight[hidden:]
    return weight[:hidden].contiguous(), bias.numpy()


def _ends_of(
    module: BlockModule, ops: CpuOps, embedding: Any, output: nn.Module, mask_token: int
) -> _Ends | None:
    """Returns the parts outside the layers; None if one of them has no kernel."""
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


_LOGS: Any = types.float32[:, :, ::1]
_IDS: Any = types.int64[:, :, ::1]
_NODES: Any = types.int32[:, ::1]


@compiled(VOID, _LOGS, _IDS, _NODES, _NODES)
def best_trees(
    logs: NDArray[np.float32],
    ids: NDArray[np.int64],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
) -> None:
    """Fills in trees by repeatedly taking the likeliest candidate node.

    The candidates after a node is taken are its next sibling and its first child
    (arXiv:2604.12989, Alg. 1). If two are equally likely, the older candidate is taken first.

    Args:
        logs: [num_levels, num_drafts, num_ranks], log-probabilities, best first.
        ids: same shape, the tokens.
        tokens: output, [num_drafts, num_nodes]; all entries are filled.
        parents: output, same shape; -1 is the root.
    """
    num_levels, num_drafts, num_ranks = logs.shape
    num_nodes = tokens.shape[1]
    # Of what may follow: its score, its parent's, the parent, level and rank.
    scores = np.empty((2 * num_nodes + 1, 2), dtype=np.float32)
    places = np.empty((2 * num_nodes + 1, 3), dtype=np.int64)
    for draft in range(num_drafts):
        scores[0, 0], scores[0, 1] = logs[0, draft, 0], 0.0
        places[0, 0], places[0, 1], places[0, 2] = -1, 0, 0
        size = 1
        for node in range(num_nodes):
            best = -1
            for other in range(size):
                if places[other, 2] < num_ranks and (
                    best < 0 or scores[other, 0] > scores[best, 0]
                ):
                    best = other
            score, above = scores[best, 0], scores[best, 1]
            parent, level, rank = places[best, 0], places[best, 1], places[best, 2]
            tokens[draft, node], parents[draft, node] = ids[level, draft, rank], parent
            places[best, 2] = rank + 1  # after the last there is none
            if rank + 1 < num_ranks:
                scores[best, 0] = above + logs[level, draft, rank + 1]
            if level + 1 < num_levels:
                scores[size, 0], scores[size, 1] = score + logs[level + 1, draft, 0], score
                places[size, 0], places[size, 1], places[size, 2] = node, level + 1, 0
                size += 1


def most_nodes(num_levels: int, num_ranks: int, limit: int) -> int:
    """Returns the number of nodes of the tree of all these tokens, but at most `limit`."""
    found, width = 0, 1
    for _ in range(num_levels):
        width *= num_ranks
        found += width
        if found >= limit:
            return limit
    return found
