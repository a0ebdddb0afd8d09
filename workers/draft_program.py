"""A draft model's chains: lanes, the token translation, and the CPU program that draws them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scheduler.types import IntArray, StepInput, ints
from .attention import KVCache
from .head_program import panels_of_linear, table_of
from .model.family import FamilyModel, FamilyRunner
from .model.paged import PagedModel
from .ops.cpu import PanelProjection
from .ops.kernels import LANES
from .ops.kernels.prepare import NUM_STEP_FIELDS
from .ops.kernels.program import NUM_VARIABLES
from .ops.plan import PagedStep
from .ops.program import (
    CACHES,
    CHOSEN,
    CHOSEN_ROWS,
    LOGITS,
    NORMED,
    PICKED,
    RESIDUAL,
    ROTATIONS,
    ROWS,
    STEP,
    UPDATE,
    Draw,
    LevelsProgram,
    Phases,
    Program,
)


class Lanes:
    """Token sequences to extend by a chain each: sequences, or outcomes of sequences."""

    def __init__(
        self,
        first: StepInput,  # known tokens and masks
        budgets: IntArray,  # [num_lanes], tokens to draw
        owner: NDArray[np.signedinteger],  # [num_lanes], row of the sampling settings
    ) -> None:
        self.first, self.budgets, self.owner = first, budgets, owner
        # [num_lanes], tokens before the first drawn token
        self.lens = first.context_lens + first.query_lens - first.num_nodes


class Translated:
    """Maps the target's token ids to those of a model with another vocabulary.

    The distribution is the model's, restricted to the tokens that both have. It is known before a
    token is drawn and covers every drawn token, so every verification rule stays exact.

    Args:
        table: as in `Translation`.
    """

    def __init__(self, table: bytes, device: torch.device) -> None:
        given = np.frombuffer(table, dtype=np.int32)
        self._tokens = ints(np.where(given < 0, -1 - given, given))  # [target_vocab]
        self._columns = torch.from_numpy(self._tokens).to(device)
        self._unshared = torch.from_numpy(given < 0).to(device)

    def read(self, tokens: IntArray) -> IntArray:
        """Returns the model's tokens for the target's."""
        return self._tokens[tokens]

    def own(self, tokens: Tensor) -> Tensor:  # [num_tokens] int32, alike
        """`read`, on the model's device."""
        return self._columns.index_select(0, tokens)

    def step(self, step: StepInput) -> StepInput:
        return replace(step, token_ids=self.read(step.token_ids))

    def logits(
        self,
        logits: Tensor,  # [num_rows, draft_vocab]
    ) -> Tensor:  # [num_rows, target_vocab]
        """Returns logits by the target's ids; -inf where the model has no such token."""
        return logits.index_select(1, self._columns).masked_fill_(self._unshared, -torch.inf)


class ChainProgram(LevelsProgram):
    """A model's forward of known tokens, followed by a chain's levels.

    Its rows' results equal those of forwards that are called one by one. Its variables follow those
    of the layers' caches: the known token ids, then for each level its number of rows, its step,
    its tokens, and cosines and sines of every kind.
    """

    def __init__(
        self,
        model: FamilyModel,
        program: Program,
        table: Tensor,  # [vocab, hidden_size], embeddings
        output: PanelProjection,
    ) -> None:
        super().__init__(program.reserving(output))
        self._model, self._table, self._output = model, table, output
        self._ids = CACHES + 2 * len(program.layers)
        self._width = 3 + 2 * len(model.ropes)  # variables of a level
        self._num_rows = self._num_lanes = 0

    @staticmethod
    def of(model: PagedModel) -> ChainProgram | None:
        """Returns the model's program; None if a part of it has no kernel."""
        runner = getattr(model, "runner", None)
        if not isinstance(runner, FamilyRunner):
            return None
        family, (embedding, output) = runner.model, model.ends
        spec, program = family.spec, family.program
        if program is None:
            return None
        is_plain = spec.embedding_scale == spec.logit_scale == 1.0
        if not is_plain or spec.logit_softcap is not None or spec.temperature is not None:
            return None
        table = table_of(embedding, program.ops.dtype, program.hidden_size)
        product = panels_of_linear(output, program.ops)
        if table is None or product is None or product.columns < LANES:
            return None
        return ChainProgram(family, program, table, product)

    def plan(self, first: StepInput, depth: int, cache: KVCache) -> PagedStep | None:
        """Returns the plan of the known tokens; None if the program does not support the step."""
        if self._level(depth) > NUM_VARIABLES:
            return None
        plan = self._program.ops.plan(first, cache)
        return plan if self._program.takes(plan) else None

    def run(
        self,
        first: StepInput,
        plan: PagedStep,  # of `first`
        rows: IntArray,  # [num_lanes], lanes that draft, in descending order of budgets
        lanes: Lanes,
        depth: int,  # of the longest chain
        cache: KVCache,
        draw: Draw | None,  # None: the likeliest tokens
    ) -> IntArray:  # [depth, num_lanes]; a prefix of each column is valid
        """Computes the known tokens and draws a chain behind each of `rows`."""
        num_lanes, variables = len(rows), self._variables
        self._reserve(len(first.token_ids), num_lanes)
        tokens = np.zeros((depth, num_lanes), dtype=np.int32)
        counts = (lanes.budgets[rows] > np.arange(depth)[:, None]).sum(1)
        num_layers = len(self._program.layers)
        places = variables[CACHES : self._ids]
        places[::2] = [each.data_ptr() for each in cache.keys[:num_layers]]
        places[1::2] = [each.data_ptr() for each in cache.values[:num_layers]]
        chosen = first.query_start[1:][rows] - 1
        assert plan.integers is not None, "`plan` made it"
        variables[ROWS], variables[CHOSEN_ROWS] = len(first.token_ids), num_lanes
        variables[STEP], variables[CHOSEN] = plan.integers.ctypes.data, chosen.ctypes.data
        variables[self._ids] = first.token_ids.ctypes.data
        kept = self._lay_out(first, rows, lanes, cache.block_size, tokens)
        levels = variables[self._level(0) : self._level(depth)].reshape(depth, self._width)
        levels[:, 0] = counts
        self._compute(tokens, counts.tolist(), draw)
        del kept
        return tokens

    def _level(self, level: int) -> int:
        """Returns the first variable of a level."""
        return self._ids + 1 + self._width * level

    def _lay_out(
        self, first: StepInput, rows: IntArray, lanes: Lanes, block_size: int, tokens: IntArray
    ) -> Any:
        """Sets the variables of known tokens and levels; returns arrays that must be kept alive.

        Level 0 has no rows of its own: it is drawn from the last known tokens' logits.
        """
        depth, num_lanes = tokens.shape
        num_known, count = len(first.token_ids), (depth - 1) * num_lanes
        tables = np.ascontiguousarray(first.block_tables[rows])
        sizes = (num_known + count, count, count, count, num_lanes + 1, 2 * num_lanes)
        begins = [0, *accumulate(sizes)]
        numbers = np.zeros(begins[-1], dtype=np.int32)
        positions, slots, index, ends, starts, _ = (
            numbers[begin:end] for begin, end in pairwise(begins)
        )
        start = numbers.ctypes.data
        at_positions, at_slots, at_index, at_ends, at_starts, at_bits, _ = (
            start + 4 * begin for begin in begins
        )
        levels = np.arange(depth - 1, dtype=np.int32)[:, None]
        by_level = index.reshape(-1, num_lanes)
        by_level[:] = lanes.lens[rows] + levels
        positions[:num_known], positions[num_known:] = first.positions, index
        block = np.minimum(by_level // block_size, tables.shape[1] - 1)  # of lanes that have ended
        found = tables[np.arange(num_lanes), block] * block_size + by_level % block_size
        slots.reshape(found.shape)[:] = found
        np.add(index, 1, out=ends)
        starts[:] = np.arange(num_lanes + 1)
        ops, behind = self._program.ops, 4 * num_lanes * np.arange(depth - 1)
        steps = np.zeros((max(depth - 1, 1), NUM_STEP_FIELDS), dtype=np.int64)
        steps[:] = (
            num_lanes, num_lanes, tables.shape[1], 1, block_size, 0, 0, 0, at_starts, 0, 0,
            tables.ctypes.data, at_bits, ops.alignment_of(block_size),
        )  # fmt: skip
        variables = self._variables
        places = variables[self._level(0) : self._level(depth)].reshape(depth, self._width)
        places[:, 2] = tokens.ctypes.data + 4 * num_lanes * np.arange(depth)
        if depth > 1:
            counts = (lanes.budgets[rows] > 1 + levels).sum(1)
            steps[:, 0] = steps[:, 1] = counts
            steps[:, 5] = at_positions + 4 * num_known + behind
            steps[:, 6], steps[:, 10] = at_slots + behind, at_ends + behind
            steps[:, 7] = steps[:, 9] = at_index + behind
            places[1:, 1] = steps.ctypes.data + 8 * NUM_STEP_FIELDS * np.arange(depth - 1)
        angles = self._rotate(torch.from_numpy(positions), num_known, places[1:], behind)
        return numbers, steps, tables, angles

    def _rotate(
        self,
        positions: Tensor,  # [num_known + (depth - 1) * num_lanes]
        num_known: int,
        places: NDArray[np.int64],  # [depth - 1, variables of a level], written
        behind: NDArray[np.int64],  # [depth - 1], bytes from the first level's rows
    ) -> list[Any]:
        """Computes every row's cosines and sines; returns the tensors that must be kept alive."""
        kept: list[Any] = []
        for index, rope in enumerate(self._model.ropes):
            angles = self._program.ops.rotation(positions, rope.frequencies, rope.scale)
            kept.append(angles)
            for half, each in enumerate(angles):
                begin, size = each.data_ptr(), each.shape[1]
                self._variables[ROTATIONS + 2 * index + half] = begin
                places[:, 3 + 2 * index + half] = begin + size * (4 * num_known + behind)
        return kept

    def _reserve(self, num_rows: int, num_lanes: int) -> None:
        """Allocates memory for this number of known tokens and lanes."""
        if num_rows <= self._num_rows and num_lanes <= self._num_lanes:
            return
        self._num_rows = max(num_rows, min(2 * self._num_rows, self._num_rows + 256))
        self._num_lanes = max(num_lanes, self._num_lanes)
        program = self._program
        widths = program.widths | {RESIDUAL: program.hidden_size, LOGITS: self._output.columns}
        of_lanes = {name: widths.pop(name) for name in (PICKED, NORMED, LOGITS)}
        self._make(of_lanes, self._num_lanes)
        self._make(widths, max(self._num_rows, self._num_lanes))

    def _level_phases(self, level: int, *, best: bool) -> list[list[int]]:
        program, place = self._program, self._level(level)
        assert program.norm is not None, "a model with an output layer has it"
        rows, step, rotations = (place, place + 1, place + 3) if level else (ROWS, STEP, ROTATIONS)
        phases = Phases(
            program.ops, program.hidden_size, program.scale, rows=rows, step=step,
            rotations=rotations,
        )  # fmt: skip
        ids = self._level(level - 1) + 2 if level else self._ids
        phases.copy(self._table.data_ptr(), RESIDUAL, rows, ids)
        update, after = 0, None
        for index, layer in enumerate(program.layers):
            phases.add_norm(update, after, layer.before_attention)
            phases.layer(layer, CACHES + 2 * index, phases.states)
            update, after = UPDATE, layer.after_mlp
        if level:
            phases.add_norm(update, after, program.norm)
            phases.product(self._output, phases.states, LOGITS, rows)
        else:
            phases.add_norm(update, after, None)
            phases.copy(RESIDUAL, PICKED, CHOSEN_ROWS, CHOSEN)
            phases.norm(PICKED, NORMED, program.norm, CHOSEN_ROWS)
            phases.product(self._output, NORMED, LOGITS, CHOSEN_ROWS)
        if best:
            count = rows if level else CHOSEN_ROWS
            phases.best(LOGITS, place + 2, self._output.columns, 0, count)
        return phases.rows
