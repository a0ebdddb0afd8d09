"""Recurrences over the lines and trees of a step: the gated delta rule, and Mamba-2's.

A token with key k and value v updates a head's state S [key_dim, value_dim], and a query q reads
it:

    S <- exp(g) S;  u = beta (v - S'k);  S <- S + k u';  o = S'q

with the log decay g and the strength beta. q and k have length 1, and q is divided by the root of
its size (Yang et al. 2025, arXiv:2412.06464). Without the subtraction of S'k, it is the selective
state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): k, q, v and beta are its B, C, x and
step sizes.

On a CPU, a compiled scan processes the rows one by one, so bits do not depend on how a text is cut
into steps. Elsewhere, rows of a line are processed in chunks: within a chunk, each token's update
is the solution of a triangular system.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from ..states import MAX_SAVES, Lines, StateShape
from .kernels import compiled, inlined

CHUNK = 64
_EPS = 1e-6  # below the root of a key's length


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The variant of the recurrence."""

    shape: StateShape
    is_delta: bool = True  # False: nothing is subtracted, and queries and keys are not normalized


def convolve(
    buffer: Tensor,  # [num_places, conv_dim]
    history: Tensor,  # [num_rows, kernel] int64
    weight: Tensor,  # [kernel, conv_dim] float32
    bias: Tensor | None,  # [conv_dim] float32
) -> Tensor:  # [num_rows, conv_dim] float32
    """Computes the causal convolution of every column, along the path to each row."""
    total = buffer.index_select(0, history[:, 0]).float() * weight[0]
    for place in range(1, len(weight)):
        total += buffer.index_select(0, history[:, place]).float() * weight[place]
    return total if bias is None else total + bias


def recur(
    inputs: Tensor,  # [num_rows, conv_dim] float32: queries, keys, values, by head
    rates: Tensor,  # [num_rows, 2, num_value_heads] float32: g, beta
    matrices: Tensor,  # [num_states, num_value_heads, key_dim, value_dim] float32, updated
    lines: Lines,
    rule: Recurrence,
) -> Tensor:  # [num_rows, num_value_heads, value_dim] float32
    """Returns each row's output; updates the states after each line and at its checkpoints."""
    if inputs.device.type != "cpu":
        return recur_by_chunks(inputs, rates, matrices, lines, rule)
    shape = rule.shape
    out = inputs.new_empty(len(inputs), shape.num_value_heads, shape.value_dim)
    most = int((lines.node_starts[1:] - lines.node_starts[:-1]).max(initial=0))
    scratch = np.empty((most + 1, shape.key_dim, shape.value_dim), dtype=np.float32)
    scan_kernel()(
        inputs.contiguous().numpy(), rates.contiguous().numpy(), matrices.numpy(), out.numpy(),
        scratch, lines.order, lines.starts, lines.num_line, lines.parents, lines.node_starts,
        lines.seats, lines.sources, lines.save_lens, lines.saves, shape.num_key_heads,
        int(rule.is_delta),
    )  # fmt: skip
    return out


_ROWS: Any = types.float32[:, ::1]
_CUBES: Any = types.float32[:, :, ::1]
_INTS: Any = types.int32[::1]


@inlined
def _normed(inputs, row, begin, size, factor, is_delta, out):  # type: ignore[no-untyped-def]
    """Writes a query or a key; in the delta rule, with length `factor`."""
    if is_delta:
        squares = np.float32(0)
        for i in range(size):
            squares += inputs[row, begin + i] * inputs[row, begin + i]
        factor = factor / np.sqrt(squares + np.float32(1e-6))
    for i in range(size):
        out[i] = inputs[row, begin + i] * factor


@inlined
def _recall(state, key, decay, out):  # type: ignore[no-untyped-def]
    """Computes the decayed state's value for a key."""
    out[:] = np.float32(0)
    for i in range(len(key)):
        factor = key[i] * decay
        for j in range(len(out)):
            out[j] += state[i, j] * factor


@inlined
def _advance(state, key, query, decay, update, out):  # type: ignore[no-untyped-def]
    """Updates the state in place; unlike in `_branch`, the compiler knows that it is one array."""
    out[:] = np.float32(0)
    for i in range(len(key)):
        first, second = key[i], query[i]
        for j in range(len(out)):
            value = state[i, j] * decay + first * update[j]
            state[i, j] = value
            out[j] += value * second


@inlined
def _branch(state, new, key, query, decay, update, out):  # type: ignore[no-untyped-def]
    """Writes the updated state to another array."""
    out[:] = np.float32(0)
    for i in range(len(key)):
        first, second = key[i], query[i]
        for j in range(len(out)):
            value = state[i, j] * decay + first * update[j]
            new[i, j] = value
            out[j] += value * second


@cache
def scan_kernel() -> Any:
    """Returns the kernel, compiled when the first model with such layers is loaded."""

    @compiled(
        types.void, _ROWS, _CUBES, types.float32[:, :, :, ::1], _CUBES, _CUBES, *[_INTS] * 7,
        types.int32[:, ::1], types.int32[:, ::1], types.int64, types.int64,
    )  # fmt: skip
    def scan_rows(
        inputs: Any, rates: Any, matrices: Any, out: Any, scratch: Any, order: Any, starts: Any,
        num_line: Any, parents: Any, node_starts: Any, seats: Any, sources: Any, save_lens: Any,
        saves: Any, num_key_heads: Any, is_delta: Any,
    ) -> None:  # fmt: skip
        """Processes one head after the other, and its rows in order."""
        num_heads, key_dim, value_dim = matrices.shape[1:]
        group = num_heads // num_key_heads
        first_key, first_value = num_key_heads * key_dim, 2 * num_key_heads * key_dim
        query, key = np.empty(key_dim, np.float32), np.empty(key_dim, np.float32)
        update, read = np.empty(value_dim, np.float32), np.empty(value_dim, np.float32)
        query_factor = np.float32(1)
        if is_delta:
            query_factor = np.float32(1) / np.sqrt(np.float32(key_dim))
        for seq in range(len(seats)):
            begin, length = starts[seq], num_line[seq]
            for head in range(num_heads):
                line = matrices[seats[seq], head]
                if sources[seq] < 0:
                    line[:] = np.float32(0)
                elif sources[seq] != seats[seq]:
                    line[:] = matrices[sources[seq], head]
                for place in range(starts[seq + 1] - begin):
                    row, node = order[begin + place], place - length
                    state = line
                    if node >= 0 and parents[node_starts[seq] + node] >= 0:
                        state = scratch[parents[node_starts[seq] + node]]
                    first = head // group * key_dim
                    _normed(inputs, row, first, key_dim, query_factor, is_delta, query)
                    _normed(inputs, row, first_key + first, key_dim, np.float32(1), is_delta, key)
                    decay = np.float32(math.exp(rates[row, 0, head]))
                    update[:] = np.float32(0)
                    if is_delta:
                        _recall(state, key, decay, update)
                    first = first_value + head * value_dim
                    for j in range(value_dim):
                        update[j] = (inputs[row, first + j] - update[j]) * rates[row, 1, head]
                    if node < 0:
                        _advance(line, key, query, decay, update, read)
                    else:
                        _branch(state, scratch[node], key, query, decay, update, read)
                    out[row, head, :] = read
                    for column in range(saves.shape[1]):
                        if saves[seq, column] >= 0 and save_lens[seq, column] == place + 1:
                            matrices[saves[seq, column], head] = line

    return scan_rows


# -- the same in torch, by chunks of every sequence's line, then by levels of the trees


def recur_by_chunks(
    inputs: Tensor,  # [num_rows, conv_dim] float32
    rates: Tensor,  # [num_rows, 2, num_value_heads] float32
    matrices: Tensor,  # [num_states, num_value_heads, key_dim, value_dim] float32, updated
    lines: Lines,
    rule: Recurrence,
) -> Tensor:  # [num_rows, num_value_heads, value_dim] float32
    """Implements `recur` on any device."""
    device = inputs.device

    def put(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    # An additional row of padding neither decays nor adds.
    padding = len(inputs)
    heads = _heads(torch.cat([inputs, inputs.new_zeros(1, inputs.shape[1])]), rule)
    rates = torch.cat([rates, rates.new_zeros(1, *rates.shape[1:])])
    out = heads[2].new_zeros(heads[2].shape)
    states = matrices.index_select(0, put(np.maximum(lines.sources, 0)))
    states = states * put(lines.sources >= 0)[:, None, None, None]
    bounds = np.zeros((len(lines.seats), MAX_SAVES + 2), dtype=np.int32)
    for column in range(MAX_SAVES):
        cut = np.where(lines.saves[:, column] >= 0, lines.save_lens[:, column], 0)
        bounds[:, column + 1] = np.maximum(bounds[:, column], cut)
    bounds[:, -1] = lines.num_line
    for column in range(MAX_SAVES + 1):
        begins, ends = bounds[:, column], bounds[:, column + 1]
        for first in range(0, int((ends - begins).max(initial=0)), CHUNK):
            place = begins[:, None] + first + np.arange(CHUNK)
            flat = np.minimum(lines.starts[:-1, None] + place, len(lines.order) - 1)
            rows = put(np.where(place < ends[:, None], lines.order[flat], padding))
            query, key, value = (each[rows].transpose(1, 2) for each in heads)
            pair = rates[rows].permute(2, 0, 3, 1)
            read, states = _take_in(query, key, value, pair, states, rule)
            out[rows] = read.transpose(1, 2)
        if column < MAX_SAVES and (kept := np.flatnonzero(lines.saves[:, column] >= 0)).size:
            matrices[put(lines.saves[kept, column])] = states[put(kept)]
    matrices[put(lines.seats)] = states
    _tree(heads, rates, states, out, lines, rule, put)
    return out[:padding]


def _heads(inputs: Tensor, rule: Recurrence) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, each [num_rows, num_value_heads, ...]."""
    shape = rule.shape
    width = shape.num_key_heads * shape.key_dim
    query, key, value = inputs.split([width, width, inputs.shape[1] - 2 * width], dim=1)
    pair = [each.unflatten(1, (shape.num_key_heads, shape.key_dim)) for each in (query, key)]
    if rule.is_delta:
        pair = [each * torch.rsqrt(each.square().sum(-1, keepdim=True) + _EPS) for each in pair]
        pair[0] = pair[0] / math.sqrt(shape.key_dim)
    group = shape.num_value_heads // shape.num_key_heads
    query, key = (each.repeat_interleave(group, dim=1) for each in pair)
    return query, key, value.unflatten(1, (shape.num_value_heads, shape.value_dim))


def _take_in(
    query: Tensor,  # [num_seqs, num_heads, CHUNK, key_dim]
    key: Tensor,  # [num_seqs, num_heads, CHUNK, key_dim]
    value: Tensor,  # [num_seqs, num_heads, CHUNK, value_dim]
    rates: Tensor,  # [2, num_seqs, num_heads, CHUNK]
    states: Tensor,  # [num_seqs, num_heads, key_dim, value_dim]
    rule: Recurrence,
) -> tuple[Tensor, Tensor]:  # of `value`'s shape, of `states`'
    """Processes a chunk of every sequence; returns its queries' outputs and the states after it."""
    decays, strengths = rates[0].cumsum(-1), rates[1].unsqueeze(-1)
    between = decays.unsqueeze(-1) - decays.unsqueeze(-2)  # from the column's token to the row's
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    between = between.masked_fill(~lower, float("-inf")).exp()
    so_far = decays.exp().unsqueeze(-1)
    updates = value
    if rule.is_delta:
        updates = updates - so_far * (key @ states)
    updates = updates * strengths
    if rule.is_delta:
        system = strengths * (key @ key.transpose(-1, -2)) * between
        updates = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    read = so_far * (query @ states) + (query @ key.transpose(-1, -2) * between) @ updates
    left = (decays[..., -1:] - decays).exp().unsqueeze(-1)
    states = states * so_far[..., -1:, :] + (key * left).transpose(-1, -2) @ updates
    return read, states


def _tree(
    heads: tuple[Tensor, Tensor, Tensor],
    rates: Tensor,  # [num_rows + 1, 2, num_value_heads]
    states: Tensor,  # [num_seqs, num_value_heads, key_dim, value_dim]
    out: Tensor,  # [num_rows + 1, num_value_heads, value_dim], output
    lines: Lines,
    rule: Recurrence,
    put: Any,
) -> None:
    """Processes all nodes by depth, each from its parent's state."""
    counts = lines.node_starts[1:] - lines.node_starts[:-1]
    owner = np.arange(len(counts)).repeat(counts)
    if not len(owner):
        return
    number = np.arange(len(owner)) - lines.node_starts[owner]
    rows = lines.order[lines.starts[owner] + lines.num_line[owner] + number]
    # States by place: the lines', then the nodes'.
    of_node = len(counts) + lines.node_starts[owner] + lines.parents
    before = np.where(lines.parents < 0, owner, of_node)
    depths = np.zeros(len(owner), dtype=np.int64)
    for node, place in enumerate(before.tolist()):
        depths[node] = 0 if place < len(counts) else depths[place - len(counts)] + 1
    known = torch.cat([states, states.new_zeros(len(owner), *states.shape[1:])])
    for depth in range(int(depths.max()) + 1):
        level = np.flatnonzero(depths == depth)
        taken = put(rows[level])
        query, key, value = (each[taken] for each in heads)
        state = known[put(before[level])] * rates[taken, 0].exp()[..., None, None]
        update = value
        if rule.is_delta:
            update = update - (key.unsqueeze(-2) @ state).squeeze(-2)
        update = update * rates[taken, 1].unsqueeze(-1)
        state = state + key.unsqueeze(-1) * update.unsqueeze(-2)
        known[put(len(counts) + level)] = state
        out[taken] = (query.unsqueeze(-2) @ state).squeeze(-2)
