"""The state that recurrent layers keep per sequence on one rank, and its update by a step.

A seat's state includes the known tokens of its sequence up to the last step's root. It never
includes a draft node, because a state cannot be rewound. Instead, the layer's inputs at a node are
kept by the slot of the node's keys. Nodes that were accepted and moved into place
(`KVCache.apply_moves`) are found by the slots of their positions, and the next step applies them
before its own tokens. Draft nodes start from their parent's state, which lives as long as the step.

Checkpoints are states at block boundaries; the scheduler assigns their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scheduler.types import IntArray, StepInput, ints, starts_of

MAX_SAVES = 2  # checkpoints of a sequence in one step


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state on this rank: a matrix per value head, and the inputs of a convolution."""

    num_key_heads: int  # each serves num_value_heads / num_key_heads neighbouring value heads
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees, above 1

    @property
    def conv_dim(self) -> int:
        """Columns of the convolution: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one sequence's state."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim
        return 4 * matrices + (self.kernel - 1) * self.conv_dim * dtype.itemsize


@dataclass(slots=True, eq=False)
class LayerStates:
    """One layer's tensors."""

    shape: StateShape
    matrices: Tensor  # [num_states, num_value_heads, key_dim, value_dim] float32
    tails: Tensor  # [num_states, kernel - 1, conv_dim], the newest last
    nodes: Tensor  # [num_seats * room, conv_dim], the convolution's inputs of nodes
    node_rates: Tensor  # [num_seats * room, 2, num_value_heads] float32: log decay, strength


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """The rows by which a step updates each sequence: first a line, then the nodes of a tree.

    Rows are those of nodes accepted since the last step, followed by the step's own.
    """

    order: IntArray  # [num_rows], rows by sequence
    starts: IntArray  # [num_seqs + 1], of `order`
    num_line: IntArray  # [num_seqs], rows of the line; the rest are nodes
    parents: IntArray  # [num_nodes], within the sequence; -1: the end of the line
    node_starts: IntArray  # [num_seqs + 1]
    seats: IntArray  # [num_seqs], states that are written
    sources: IntArray  # [num_seqs], states that are read; -1: zeros
    save_lens: IntArray  # [num_seqs, MAX_SAVES], rows of the line before a checkpoint, ascending
    saves: IntArray  # [num_seqs, MAX_SAVES], checkpoint that is written; -1: none


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentStep:
    """A step in the form that recurrent layers read; index tensors are int64.

    A layer's convolution reads a buffer: tails of all sequences, then the rows of `Lines`.
    """

    lines: Lines
    layers: dict[int, LayerStates]  # by index of the layer
    pending: Tensor  # [num_pending], rows of `LayerStates.nodes`
    sources: Tensor  # [num_seqs], states whose tails are read
    has_source: Tensor  # [num_seqs, 1, 1] bool
    history: Tensor  # [num_rows, kernel], places in the buffer, oldest first
    targets: Tensor  # [num_seqs + num_saves], states whose tails are written
    tails: Tensor  # [num_seqs + num_saves, kernel - 1], places in the buffer
    nodes: Tensor  # [num_nodes], the step's rows that are nodes
    node_places: Tensor  # [num_nodes], rows of `LayerStates.nodes`


@dataclass(frozen=True, slots=True)
class _Plan:
    """Counts of a step; arrays are [num_seqs] unless noted."""

    step: StepInput
    seats: IntArray
    held: IntArray  # tokens that the state includes
    lags: IntArray  # tokens in the KV cache that the state does not include: accepted nodes
    chunks: IntArray  # known tokens of the step
    node_rows: IntArray  # [num_nodes], rows of the step

    @property
    def num_pending(self) -> int:
        return int(self.lags.sum())

    def line(self, tail: int) -> tuple[IntArray, IntArray]:  # [num_in_lines], [num_seqs + 1]
        """Returns each sequence's tail, accepted nodes and known tokens as places in the buffer."""
        starts = starts_of(tail + self.lags + self.chunks)
        owner = np.arange(len(self.seats)).repeat(np.diff(starts))
        place = np.arange(starts[-1]) - starts[owner]
        first_row = len(self.seats) * tail
        pending = first_row + starts_of(self.lags)[owner] + place - tail
        known = first_row + self.num_pending + self.step.query_start[owner]
        known = known + place - tail - self.lags[owner]
        later = np.where(place < tail + self.lags[owner], pending, known)
        return ints(np.where(place < tail, owner * tail + place, later)), starts

    def order(self) -> IntArray:  # [num_rows]
        """Returns rows by sequence: accepted nodes, known tokens, nodes."""
        lens = self.lags + self.step.query_lens
        owner = np.arange(len(lens)).repeat(lens)
        place = np.arange(len(owner)) - starts_of(lens)[owner]
        own = self.num_pending + self.step.query_start[owner] + place - self.lags[owner]
        return ints(np.where(place < self.lags[owner], starts_of(self.lags)[owner] + place, own))

    def history(self, line: IntArray, starts: IntArray, kernel: int) -> NDArray[np.int64]:
        """Returns the places of tokens that each row's convolution sees, [num_rows, kernel]."""
        step, first_row = self.step, len(self.seats) * (kernel - 1)
        first_own = first_row + self.num_pending
        before = np.zeros(first_own + len(step.token_ids), dtype=np.int64)
        before[line[1:]] = line[:-1]
        before[line[starts[:-1]]] = line[starts[:-1]]  # not reached: a tail is long enough
        roots = step.root_rows.repeat(step.num_nodes)
        before[first_own + self.node_rows] = first_own + roots + 1 + step.draft_parents
        seen = np.empty((len(before) - first_row, kernel), dtype=np.int64)
        seen[:, -1] = np.arange(first_row, len(before))
        for column in range(kernel - 1, 0, -1):
            seen[:, column - 1] = before[seen[:, column]]
        return seen


class StateCache:
    """States of all recurrent layers, by seat. Seats are added when they are first used.

    Args:
        shapes: per layer; None: it is not recurrent.
        num_slots: slots of the KV cache.
        block_size: tokens in a KV block.
        num_seats: maximum number of concurrent sequences.
        num_checkpoints: states in addition to those of the seats.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape | None],
        num_slots: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_seats: int = 1,
        num_checkpoints: int = 0,
    ) -> None:
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self._num_checkpoints = num_checkpoints  # checkpoints are the first states
        self._room = 1  # maximum number of nodes per seat
        self._lens = np.zeros(0, dtype=np.int32)  # [num_seats], tokens that a state includes
        self._node_of = np.full(num_slots, -1, dtype=np.int32)  # row of `LayerStates.nodes`
        self._node_index = np.zeros(0, dtype=np.int32)  # [num_seats * room], index of the token
        self.layers = {
            layer: self._no_states(shape) for layer, shape in enumerate(shapes) if shape is not None
        }
        (self._kernel,) = {states.shape.kernel for states in self.layers.values()}
        self._reserve(num_seats, 1)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of states and of nodes' inputs."""
        return sum(
            tensor.numel() * tensor.element_size()
            for each in self.layers.values()
            for tensor in (each.matrices, each.tails, each.nodes, each.node_rates)
        )

    def apply_moves(self, kv_moves: IntArray) -> None:  # [num_moves, 2], (source, destination)
        """Moves nodes along with their keys from slot to slot."""
        self._node_of[kv_moves[:, 1]] = self._node_of[kv_moves[:, 0]]

    def begin(self, step: StepInput) -> RecurrentStep:
        """Returns what the step's layers read and write. Called once, before the first of them."""
        seats = ints(np.arange(step.num_seqs)) if step.seats is None else step.seats
        self._reserve(int(seats.max(initial=-1)) + 1, int(step.num_nodes.max(initial=0)))
        held = np.where(step.context_lens == 0, np.int32(0), self._lens[seats])
        sources = np.where(held == 0, np.int32(-1), seats + np.int32(self._num_checkpoints))
        for seq, checkpoint in step.state_loads.tolist():
            held[seq], sources[seq] = step.context_lens[seq], checkpoint
        is_node = np.arange(len(step.token_ids)) > step.root_rows.repeat(step.query_lens)
        plan = _Plan(
            step,
            seats,
            held,
            step.context_lens - held,
            step.query_lens - step.num_nodes,
            ints(np.flatnonzero(is_node)),
        )
        pending = self._pending(plan)
        found = self._step(plan, sources, pending)
        self._lens[seats] = step.context_lens + plan.chunks
        places = self._node_places(plan)
        self._node_of[step.slot_mapping[plan.node_rows]] = places
        self._node_index[places] = step.positions[plan.node_rows]
        return found

    def _step(self, plan: _Plan, sources: IntArray, pending: IntArray) -> RecurrentStep:
        step, tail, put = plan.step, self._kernel - 1, self._put
        line, starts = plan.line(tail)
        targets = plan.seats + np.int32(self._num_checkpoints)
        saves = np.full((step.num_seqs, MAX_SAVES), -1, dtype=np.int32)
        save_lens = np.zeros_like(saves)
        tails, tail_ends = [targets], [starts[1:]]
        for seq, num_tokens, checkpoint in step.state_saves.tolist():
            column = int((saves[seq] >= 0).sum())
            saves[seq, column] = checkpoint
            save_lens[seq, column] = num_tokens - plan.held[seq]
            assert 0 < save_lens[seq, column] <= plan.lags[seq] + plan.chunks[seq], step.state_saves
            tails.append(ints([checkpoint]))
            tail_ends.append(ints([starts[seq] + tail + save_lens[seq, column]]))
        lines = Lines(
            order=plan.order(),
            starts=starts_of(plan.lags + step.query_lens),
            num_line=plan.lags + plan.chunks,
            parents=step.draft_parents.copy(),
            node_starts=step.draft_start.copy(),
            seats=targets,
            sources=sources,
            save_lens=save_lens,
            saves=saves,
        )
        return RecurrentStep(
            lines=lines,
            layers=self.layers,
            pending=put(pending),
            sources=put(np.maximum(sources, 0)),
            has_source=put(sources >= 0)[:, None, None].bool(),
            history=put(plan.history(line, starts, self._kernel)),
            targets=put(np.concatenate(tails)),
            tails=put(line[np.concatenate(tail_ends)[:, None] + np.arange(-tail, 0)]),
            nodes=put(plan.node_rows),
            node_places=put(self._node_places(plan)),
        )

    def _pending(self, plan: _Plan) -> IntArray:  # [num_pending], rows of `LayerStates.nodes`
        """Returns the accepted nodes that states do not include yet."""
        assert (plan.lags >= 0).all(), (plan.lags, "a state is ahead of its sequence")
        starts, size = starts_of(plan.lags), self._block_size
        owner = np.arange(len(plan.lags)).repeat(plan.lags)
        index = np.arange(starts[-1]) + (plan.held - starts[:-1])[owner]
        blocks = plan.step.block_tables[owner, index // size]
        rows: IntArray = self._node_of[blocks * size + index % size]
        is_there = (rows >= 0) & (rows // self._room == plan.seats[owner])
        is_there &= self._node_index[rows] == index
        assert is_there.all(), (index, plan.seats, "what accepted nodes left is gone")
        return rows

    def _node_places(self, plan: _Plan) -> IntArray:  # [num_nodes], rows of `LayerStates.nodes`
        counts = plan.step.num_nodes
        number = np.arange(len(plan.node_rows)) - plan.step.draft_start[:-1].repeat(counts)
        return ints(plan.seats.repeat(counts) * self._room + number)

    def _reserve(self, num_seats: int, num_nodes: int) -> None:
        """Allocates memory for this number of seats and nodes per seat."""
        have, room = len(self._lens), self._room
        if num_seats <= have and num_nodes <= room:
            return
        seats, more = max(num_seats, have), max(num_nodes, room)
        if num_nodes > room:
            more = max(more, 2 * room)
        rows = np.flatnonzero(self._node_of >= 0)
        seat, number = np.divmod(self._node_of[rows], room)
        self._node_of[rows] = seat * more + number
        self._lens = np.concatenate([self._lens, np.zeros(seats - have, np.int32)])
        index = np.zeros((seats, more), dtype=np.int32)
        index[:have, :room] = self._node_index.reshape(have, room)
        self._node_index, self._room = index.reshape(-1), more
        for each in self.layers.values():
            each.matrices = _with_rows(each.matrices, self._num_checkpoints + seats)
            each.tails = _with_rows(each.tails, self._num_checkpoints + seats)
            each.nodes = _roomier(each.nodes, have, seats, more)
            each.node_rates = _roomier(each.node_rates, have, seats, more)

    def _no_states(self, shape: StateShape) -> LayerStates:
        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self._device)

        heads, conv_dim, dtype = shape.num_value_heads, shape.conv_dim, self._dtype
        return LayerStates(
            shape,
            zeros(0, heads, shape.key_dim, shape.value_dim),
            zeros(0, shape.kernel - 1, conv_dim, dtype=dtype),
            zeros(0, conv_dim, dtype=dtype),
            zeros(0, 2, heads),
        )

    def _put(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device, non_blocking=True)


def _with_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Returns `tensor` extended to this number of rows; new rows are zero."""
    if num_rows == len(tensor):
        return tensor
    return torch.cat([tensor, tensor.new_zeros(num_rows - len(tensor), *tensor.shape[1:])])


def _roomier(rows: Tensor, have: int, num_seats: int, room: int) -> Tensor:
    """Converts [have * old room, ...] to [num_seats * room, ...]."""
    larger = rows.new_zeros(num_seats, room, *rows.shape[1:])
    if have:
        old = rows.unflatten(0, (have, -1))
        larger[:have, : old.shape[1]] = old
    return larger.flatten(0, 1)
