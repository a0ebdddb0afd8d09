"""The draft model's part of a worker: compute the known tokens, then draw chains.

A chain is drawn token by token, or from one forward in which masks stand for its tokens (PARD). The
worker draws whole chains, so a round takes one message each way. With `coupled` verification
the draws use the target's noise (Daliri, Musco, Suresh 2024, arXiv:2408.07978); with `rejection`
and `block` the sparse distributions that they were drawn from are returned too.

A preparation draws the chains of the next round while the target verifies this one, behind its
likely outcomes (`outcomes.py`).

A model of another vocabulary works on the target's token ids (`Translated`): it reads its own
tokens in their place, and draws from its distribution over the tokens that both have.

On a CPU, the forward of the known tokens and those of a chain's levels are one program
(`ops/program.py`), with embedding and choice of tokens in between: a call where tokens are the
likeliest, a call per level where they are drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.protocol import Drafted, DraftStep, Preparation, blocks_per_outcome
from ..scheduler.types import (
    DraftProbs,
    FloatArray,
    IntArray,
    JoinedDrafts,
    StepInput,
    ints,
    starts_of,
)
from .attention import KVCache
from .collective import Collective
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
from .outcomes import Round, choose_outcomes, lay_out_outcomes
from .seats import Seats, lay_out
from .spec import Leased, OpenLease, WeightsAnswer, WorkerReport
from .verify.process import GREEDY_BELOW, DrawSettings, draw, draw_siblings


class DraftService:
    """A loaded draft model and its cache; all ranks use rank 0's draws.

    Args:
        num_scratch_blocks: blocks beside those of the sequences, for chains behind outcomes.
        translation: of a model of another vocabulary, as of `ModelSpec`.
    """

    def __init__(
        self,
        model: PagedModel,
        num_blocks: int,
        block_size: int,
        collective: Collective,
        num_scratch_blocks: int = 0,
        translation: bytes = b"",
    ) -> None:
        self._model = model
        self._translated = Translated(translation, model.device) if translation else None
        self._block_size = block_size
        self._first_scratch, self._num_scratch = num_blocks, num_scratch_blocks
        self._cache = model.new_cache(num_blocks + num_scratch_blocks, block_size)
        # None: forwards are called one by one
        self._program = ChainProgram.of(model) if collective.size == 1 else None
        self._seats = Seats(block_size)
        self._collective = collective

    def drop_program(self) -> None:
        """Has forwards called one by one from now on, for comparisons."""
        self._program = None

    def draft(self, step: DraftStep) -> Drafted:
        """Draws a chain of up to `max_nodes` tokens per sequence, in one batch.

        For a preparation it draws one per outcome.
        """
        start = time.perf_counter()
        with torch.inference_mode():
            if step.preparation is not None:
                drafted = self._prepare(step, step.preparation)
            else:
                lanes = self._known(step)
                drafted = self._draw_chains(step, lanes).drafted()
        return replace(drafted, forward_ms=(time.perf_counter() - start) * 1e3, step=step.plan.step)

    def _known(self, step: DraftStep) -> _Lanes:
        """The known tokens of the sequences, and masks behind them where chains have those."""
        plan, budgets = step.plan, step.plan.max_nodes
        num_masks: IntArray = np.maximum(budgets - 1, 0)
        if step.mask_token is not None and num_masks.any():
            masks = np.full(num_masks.sum(), step.mask_token, dtype=np.int32)
            plan = replace(plan, drafts=JoinedDrafts(masks, num_masks))
        return _Lanes(self._seats.expand(plan), budgets, np.arange(len(budgets)))

    def _prepare(self, step: DraftStep, preparation: Preparation) -> Drafted:
        """One forward of the round's chains, then chains behind their likely outcomes.

        Rejected nodes stay in their slots until known tokens take these.
        """
        known = self._seats.expand(step.plan)
        logits = self._forward(known)
        outcomes, lens = choose_outcomes(preparation, Round.of(known), logits, self._collective)
        if not len(outcomes.seqs):
            return replace(_Chains(ints([]), step.probs_top).drafted(), outcomes=outcomes)
        size = blocks_per_outcome(preparation.depth, self._block_size)
        assert len(outcomes.seqs) * size <= self._num_scratch, (len(outcomes.seqs), size)
        first = lay_out_outcomes(
            outcomes, lens, preparation.depth, known, self._block_size, self._first_scratch,
            step.mask_token,
        )  # fmt: skip
        chains = self._draw_chains(step, _Lanes(first, lens, outcomes.seqs))
        return replace(chains.drafted(), outcomes=outcomes)

    def _forward(self, step: StepInput) -> Tensor:  # [num_rows, vocab], of the target's ids
        translated = self._translated
        if translated is None:
            return self._model.forward(step, self._cache)
        return translated.logits(self._model.forward(translated.step(step), self._cache))

    def _draw_chains(self, step: DraftStep, lanes: _Lanes) -> _Chains:
        """A chain behind every lane's tokens."""
        chains = _Chains(lanes.budgets, step.probs_top)
        if self._draw_by_program(step, lanes, chains):
            return chains
        logits = self._forward(lanes.first)
        if step.mask_token is None:
            self._draw_in_turn(step, lanes, logits, chains)
        else:
            self._draw_at_once(step, lanes, logits, chains)
        return chains

    def _draw_by_program(self, step: DraftStep, lanes: _Lanes, chains: _Chains) -> bool:
        """Whether all is drawn by one program; if not, nothing is."""
        program, first = self._program, lanes.first
        if program is None or step.mask_token is not None or step.ends_early:
            return False
        rows = ints(np.flatnonzero(first.samples & (lanes.budgets > 0)))
        if not len(rows):
            return False
        # Those with longer chains come first, so that a level's lanes are the first of the last's.
        rows = rows[np.argsort(-lanes.budgets[rows], kind="stable")]
        plan = program.plan(first, chains.depth, self._cache)
        if plan is None:
            return False
        if len(first.kv_moves):
            self._cache.apply_moves(first.kv_moves)
        draw: Draw | None = None
        heat, translated = first.sampling.temperature[lanes.owner[rows]], self._translated
        if step.probs_top or translated is not None or not (heat < GREEDY_BELOW).all():

            def draw(logits: Tensor, level: int) -> IntArray:
                own, logits = rows[: len(logits)], logits.float()
                if translated is not None:
                    logits = translated.logits(logits)
                drawn = self._draw(step, lanes, own, logits, level)
                chains.put(own, level, drawn)
                return drawn[0] if translated is None else translated.read(drawn[0])

        known = first if translated is None else translated.step(first)
        # [depth, num_lanes], of the model
        tokens = program.run(known, plan, rows, lanes, chains.depth, self._cache, draw)
        if draw is None:
            chains.tokens[rows] = tokens.T
        chains.lengths[rows] = lanes.budgets[rows]
        return True

    def _draw_in_turn(
        self,
        step: DraftStep,
        lanes: _Lanes,
        logits: Tensor,  # [num_sampled, vocab]
        chains: _Chains,
    ) -> None:
        """A forward for each level but the first."""
        first, lens = lanes.first, lanes.lens
        rows = ints(np.flatnonzero(first.samples))
        keep = lanes.budgets[rows] > 0
        rows, logits = rows[keep], _picked(logits, keep)
        for level in range(chains.depth):
            if level:
                last, index = chains.tokens[rows, level - 1], lens[rows] + level - 1
                following = _next_token(first, rows, last, index, self._block_size)
                logits = self._forward(following)
            if step.ends_early:
                keep = self._likely(logits, step.least_probs(lanes.owner[rows]))
                rows, logits = rows[keep], _picked(logits, keep)
                if not len(rows):
                    break
            drawn = self._draw(step, lanes, rows, logits, level)
            chains.put(rows, level, drawn)
            chains.lengths[rows] += 1
            going = lanes.budgets[rows] > level + 1
            rows = rows[going]
            if not len(rows):
                break

    def _draw_at_once(
        self,
        step: DraftStep,
        lanes: _Lanes,
        logits: Tensor,  # [num_rows, vocab], of known tokens' ends and of masks
        chains: _Chains,
    ) -> None:
        """All levels from one forward of the known tokens and a mask for every token but the first.

        The masks are a chain behind the known tokens, whose last one predicts the first token. No
        distribution depends on a drawn token. The masks' keys and values are overwritten by those
        of known tokens.
        """
        counts = np.where(lanes.first.samples, 1 + lanes.first.num_nodes, 0)
        rows = ints(np.arange(len(counts)).repeat(counts))
        levels = ints(np.arange(len(rows)) - starts_of(counts)[rows])
        keep = levels < lanes.budgets[rows]
        rows, levels, logits = rows[keep], levels[keep], _picked(logits, keep)
        if not len(rows):
            return
        chains.put(rows, levels, self._draw(step, lanes, rows, logits, levels))
        fits = np.zeros((len(lanes.budgets), chains.depth + 1), dtype=np.bool_)
        fits[rows, levels] = True
        if step.ends_early:
            fits[rows, levels] = self._likely(logits, step.least_probs(lanes.owner[rows]))
        chains.lengths[:] = fits.argmin(1)

    def _likely(
        self,
        logits: Tensor,  # [num_rows, vocab]
        least: FloatArray,  # [num_rows]
    ) -> np.ndarray:
        """Rows [num_rows] whose likeliest token is likely enough; rank 0's answer.

        It depends on the distribution alone and not on what is drawn from it, so that every
        verification rule stays exact.
        """
        best = logits.float().softmax(-1).amax(-1) >= torch.from_numpy(least).to(logits.device)
        agreed = self._collective.broadcast(best.to(torch.int32).contiguous())
        return agreed.cpu().numpy().astype(np.bool_)

    def _draw(
        self,
        step: DraftStep,
        lanes: _Lanes,
        rows: IntArray,  # [num_rows], lanes
        logits: Tensor,  # [num_rows, vocab]
        level: int | IntArray,  # [num_rows], of each row, or of all
    ) -> tuple[np.ndarray, ...]:
        """Rank 0's tokens [num_rows], and ids and probs [num_rows, top] if requested."""
        first = lanes.lens[rows]  # position of the chain's first token
        positions = first + level
        settings = DrawSettings.of(lanes.first.sampling, lanes.owner[rows])
        if step.probs_top:
            rounds = first if step.salted else None
            drawn, ids, probs = draw_siblings(
                logits, positions, settings, step.probs_top, rounds=rounds
            )
            tokens = drawn[:, 0]
        else:
            tokens = draw(logits, positions, settings)
        tokens = self._collective.broadcast(tokens.contiguous())
        if not step.probs_top:
            return (tokens.cpu().numpy(),)
        return tokens.cpu().numpy(), ids.cpu().numpy(), probs.cpu().numpy()


class Translated:
    """The target's token ids in the place of those of a model of another vocabulary.

    The distribution is the model's over the tokens that both have. It is known before a token is
    drawn and covers what is drawn, so that every verification rule stays exact.

    Args:
        table: as of `Translation`.
    """

    def __init__(self, table: bytes, device: torch.device) -> None:
        given = np.frombuffer(table, dtype=np.int32)
        self._tokens = ints(np.where(given < 0, -1 - given, given))  # [target_vocab]
        self._columns = torch.from_numpy(self._tokens).to(device)
        self._unshared = torch.from_numpy(given < 0).to(device)

    def read(self, tokens: IntArray) -> IntArray:
        """The model's tokens in the place of the target's."""
        return self._tokens[tokens]

    def step(self, step: StepInput) -> StepInput:
        return replace(step, token_ids=self.read(step.token_ids))

    def logits(
        self,
        logits: Tensor,  # [num_rows, draft_vocab]
    ) -> Tensor:  # [num_rows, target_vocab]
        """By the target's ids; -inf where the model has no such token."""
        return logits.index_select(1, self._columns).masked_fill_(self._unshared, -torch.inf)


class SharedDrafts:
    """A draft model that several engines share: each has seats and a part of the cache of its own.

    Args:
        make: a service with so many blocks, scratch blocks and a translation.
        report: of the worker; its blocks are divided evenly.
        num_leases: engines at most.
    """

    def __init__(
        self,
        make: Callable[[int, int, bytes], DraftService],
        report: WorkerReport,
        num_leases: int,
    ) -> None:
        assert report.draft is not None, "a draft model is shared"
        self._make, self._report, self._num_leases = make, report, num_leases
        self._num_blocks = report.draft.num_blocks // num_leases
        self._least = -(-report.draft.max_model_len // report.draft.block_size)
        self._services: dict[int, DraftService] = {}
        self._busy_s: dict[int, float] = {}  # of the last second or so, by lease
        self._counted_at = time.monotonic()

    def handle(self, message: Leased) -> Drafted | WorkerReport | WeightsAnswer | None:
        """Answers one engine."""
        lease, inner = message.lease, message.message
        if inner is None:
            self._services.pop(lease, None)
            self._busy_s.pop(lease, None)
            return None
        if isinstance(inner, OpenLease):
            return self._open(lease, inner)
        start = time.monotonic()
        drafted = self._services[lease].draft(inner)
        return replace(drafted, load=self._count(lease, start, time.monotonic()))

    def _open(self, lease: int, message: OpenLease) -> WorkerReport | WeightsAnswer:
        if len(self._services) >= self._num_leases:
            return WeightsAnswer(
                f"{self._num_leases} engines share this drafter already (max_engines)",
                "drafter_group",
            )
        num_blocks = self._num_blocks - message.num_scratch_blocks
        if num_blocks < self._least:
            return WeightsAnswer(
                f"an engine's part has {self._num_blocks} KV blocks, of which its outcomes need "
                f"{message.num_scratch_blocks}; one sequence may need {self._least} more",
                "speculation_cache.budget",
            )
        self._services[lease] = self._make(
            num_blocks, message.num_scratch_blocks, message.translation
        )
        assert self._report.draft is not None, "a draft model is shared"
        return replace(self._report, draft=replace(self._report.draft, num_blocks=num_blocks))

    def _count(self, lease: int, start: float, now: float) -> float:
        """Counts a draft's time; the share of the last second that others had."""
        kept = math.exp(self._counted_at - now)
        self._busy_s = {each: busy * kept for each, busy in self._busy_s.items()}
        self._counted_at = now
        others = min(1.0, sum(self._busy_s.values()) - self._busy_s.get(lease, 0.0))
        self._busy_s[lease] = self._busy_s.get(lease, 0.0) + now - start
        return others


class _Lanes:
    """Tokens behind each of which a chain is drawn: sequences, or outcomes of sequences."""

    def __init__(
        self,
        first: StepInput,  # known tokens and masks
        budgets: IntArray,  # [num_lanes], tokens to draw
        owner: NDArray[np.signedinteger],  # [num_lanes], row of the sampling settings
    ) -> None:
        self.first, self.budgets, self.owner = first, budgets, owner
        # [num_lanes], tokens before the first that is drawn
        self.lens = first.context_lens + first.query_lens - first.num_nodes


class _Chains:
    """The chains of a step as they are drawn, with as many levels as the longest may have."""

    def __init__(self, budgets: IntArray, top: int) -> None:
        self.depth = int(budgets.max(initial=0))
        shape = (len(budgets), self.depth)
        self.tokens = np.zeros(shape, dtype=np.int32)
        self.lengths = np.zeros(len(budgets), dtype=np.int32)
        self._ids = np.zeros((*shape, top), dtype=np.int32)
        self._probs = np.zeros((*shape, top), dtype=np.float32)

    def put(
        self,
        rows: IntArray,  # [num_rows], lanes
        levels: int | IntArray,  # [num_rows], of each, or of all
        drawn: tuple[np.ndarray, ...],  # as `DraftService._draw` returns them
    ) -> None:
        self.tokens[rows, levels] = drawn[0]
        if len(drawn) > 1:
            width = drawn[1].shape[1]
            self._ids[rows, levels, :width], self._probs[rows, levels, :width] = drawn[1:]

    def drafted(self) -> Drafted:
        drawn = np.arange(self.depth) < self.lengths[:, None]
        probs: DraftProbs | None = None
        if self._ids.shape[2]:
            probs = DraftProbs(self._ids[drawn], self._probs[drawn])
        return Drafted(tokens=self.tokens[drawn], start=starts_of(self.lengths), probs=probs)


class ChainProgram(LevelsProgram):
    """A model's forward of known tokens, then a chain's levels.

    Its rows' results are those of forwards that are called one by one. Behind those of the layers'
    caches its variables are the known token ids, then those of each level: its number of rows, its
    step, its tokens, and cosines and sines of every kind.
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
        """The model's; None where a part of it has no kernel."""
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
        """The plan of the known tokens; None where it does not compute them and such levels."""
        if self._level(depth) > NUM_VARIABLES:
            return None
        plan = self._program.ops.plan(first, cache)
        return plan if self._program.takes(plan) else None

    def run(
        self,
        first: StepInput,
        plan: PagedStep,  # of `first`
        rows: IntArray,  # [num_lanes], of lanes that draft, those with most tokens first
        lanes: _Lanes,
        depth: int,  # of the longest
        cache: KVCache,
        draw: Draw | None,  # None: the best
    ) -> IntArray:  # [depth, num_lanes]; a lane's first tokens count
        """Computes the known tokens, and draws a chain behind those of `rows`."""
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
        """The first of its variables."""
        return self._ids + 1 + self._width * level

    def _lay_out(
        self, first: StepInput, rows: IntArray, lanes: _Lanes, block_size: int, tokens: IntArray
    ) -> Any:
        """Fills in what the known tokens and the levels are; returns what has to be kept.

        Level 0 has no rows of its own: it is drawn behind the known tokens.
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
        """Every row's cosines and sines."""
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
        """Memory for so many known tokens, and for so many lanes."""
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


def _picked(logits: Tensor, keep: np.ndarray) -> Tensor:  # [num_rows, vocab], [num_rows]
    return logits if keep.all() else logits[torch.from_numpy(keep).to(logits.device)]


def _next_token(
    first: StepInput, rows: IntArray, tokens: IntArray, index: IntArray, block_size: int
) -> StepInput:
    """A step of one token for each of `rows`, at position `index` of its lane."""
    return lay_out(
        token_ids=tokens,
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        context_lens=index.astype(np.int32),
        block_tables=first.block_tables[rows],
        samples=np.ones(len(rows), dtype=np.bool_),
        max_nodes=np.zeros(len(rows), dtype=np.int32),
        sampling=first.sampling,
        drafts=None,
        block_size=block_size,
    )
