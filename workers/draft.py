"""The draft model's part of a worker: computes the known tokens, then draws chains.

A chain is drawn token by token, or from one forward in which masks stand for its tokens (PARD). The
worker draws whole chains, so a round takes one message each way. With `coupled` verification,
the draws use the target's noise (Daliri, Musco, Suresh 2024, arXiv:2408.07978). With `rejection`
and `block`, the sparse distributions that they were drawn from are returned too.

A preparation draws the chains of the next round, behind its likely outcomes (`outcomes.py`), while
the target verifies this one. After the target's verdict, the worker draws chains behind outcomes
that were not prepared, and keeps them for the request that asks for them (`DraftService.go_on`).

A model of another vocabulary works on the target's token ids (`Translated`): it reads its own
tokens in their place, and draws from its distribution over the tokens that both have.

On a GPU, chains that are drawn token by token are one captured graph (`device_step/chains.py`). On
a CPU, the forward of the known tokens and those of a chain's levels are one program
(`ops/program.py`), which also embeds and chooses tokens. Greedy chains take one call; sampled
chains take one call per level.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.lookup.base import num_agreeing
from ..drafters.protocol import (
    Continuation,
    Drafted,
    DraftStep,
    Outcomes,
    Preparation,
    blocks_per_outcome,
)
from ..scheduler.types import (
    DraftProbs,
    FloatArray,
    IntArray,
    JoinedDrafts,
    StepInput,
    StepPlan,
    Verdict,
    ints,
    starts_of,
)
from .collective import Collective
from .device_step.chains import MAX_KNOWN, ChainService, ChainSizes
from .draft_program import ChainProgram, Lanes, Translated
from .model.paged import PagedModel
from .ops.program import Draw
from .outcomes import Round, choose_outcomes, lay_out_outcomes
from .seats import Seats, lay_out, part_of
from .spec import DeviceStepReport, Leased, OpenLease, WeightsAnswer, WorkerReport
from .verify.process import GREEDY_BELOW, DrawSettings, draw, draw_siblings


class DraftService:
    """A loaded draft model and its cache; all ranks use rank 0's draws.

    Args:
        num_scratch_blocks: blocks for chains behind outcomes, in addition to those of sequences.
        translation: for a model of another vocabulary, as in `ModelSpec`.
        chains: sizes of the device step that draws chains; None: the host reads every token.
    """

    def __init__(
        self,
        model: PagedModel,
        num_blocks: int,
        block_size: int,
        collective: Collective,
        num_scratch_blocks: int = 0,
        translation: bytes = b"",
        chains: ChainSizes | None = None,
    ) -> None:
        self._model = model
        self._translated = Translated(translation, model.device) if translation else None
        self._block_size = block_size
        self._first_scratch, self._num_scratch = num_blocks, num_scratch_blocks
        num_blocks += num_scratch_blocks
        self._cache = model.new_cache(num_blocks + (chains is not None), block_size)
        self.device_step: ChainService | None = None
        if chains is not None:
            self.device_step = ChainService(model, self._cache, chains, self._translated)
        # None: forwards are called one by one
        self._program = ChainProgram.of(model) if collective.size == 1 else None
        self._seats = Seats(block_size)
        self._collective = collective
        self._round: _Round | None = None  # the last prepared round, until its verdict arrives
        self._begun: _Begun | None = None  # chains that were drawn after its verdict
        self._begun_ms = 0.0

    def drop_program(self) -> None:
        """Calls forwards one by one from now on, for comparisons."""
        self._program = None

    def capture(self) -> DeviceStepReport | None:
        """Captures all shapes of the device step, if there is one, and returns its report."""
        if self.device_step is None:
            return None
        self.device_step.capture()
        return self.device_step.report

    def draft(self, step: DraftStep) -> Drafted:
        """Draws a chain of up to `max_nodes` tokens per sequence, in one batch.

        A preparation draws one chain per outcome.
        """
        start = time.perf_counter()
        begun, self._begun, self._round = self._begun, None, None
        with torch.inference_mode():
            if step.preparation is not None:
                drafted = self._prepare(step, step.preparation)
            else:
                self._seats.apply(step.plan)
                drafted = self._finished(step, begun)
        begun_ms, self._begun_ms = self._begun_ms, 0.0
        forward_ms = (time.perf_counter() - start) * 1e3
        return replace(drafted, forward_ms=forward_ms, begun_ms=begun_ms, step=step.plan.step)

    @property
    def awaits(self) -> int:
        """The target's step whose verdict lets chains be drawn; -1 if there is none."""
        return -1 if self._round is None else self._round.continuation.step

    def go_on(self, verdict: Verdict) -> None:
        """Draws the chains of a round that were not prepared, once its verdict arrives.

        They follow the tokens that the verdict emits and use blocks that are reserved for them. The
        engine's next request is processed afterwards, so it may reassign these blocks.
        """
        if verdict.step != self.awaits:
            return
        round_, self._round, start = self._round, None, time.perf_counter()
        assert round_ is not None, "a verdict is awaited"
        with torch.inference_mode():
            self._begun = self._begin(round_, verdict)
        self._begun_ms += (time.perf_counter() - start) * 1e3

    def _begin(self, round_: _Round, verdict: Verdict) -> _Begun | None:
        """Draws chains of sequences whose outcome was not prepared; None if they are too few."""
        going, known = round_.continuation, round_.known
        texts = [verdict.tokens(row).tolist() for row in going.rows.tolist()]
        accepted = [num_agreeing(*pair) for pair in zip(texts, round_.chains, strict=True)]
        counts = ints([len(text) for text in texts])
        prepared = [
            len(text) == count + 1 and (seq, count, text[-1]) in round_.outcomes
            for seq, (text, count) in enumerate(zip(texts, accepted, strict=True))
        ]
        misses = known.samples & (counts > 0) & (going.max_nodes > 0) & ~np.array(prepared, bool)
        budgets = np.minimum(going.max_nodes, going.room - counts)
        chosen = misses & (budgets > 0)
        if np.count_nonzero(misses) < going.least or not chosen.any():
            return None
        seqs = np.flatnonzero(chosen).tolist()
        step, budgets = _some_of(round_.step, chosen), ints(budgets[chosen])
        base = (known.context_lens + known.query_lens - known.num_nodes)[chosen]
        ends = base + counts[chosen]
        chunks = [texts[seq][accepted[seq] :] for seq in seqs]
        masks = self._masks_for(step, budgets)
        first = lay_out(
            token_ids=ints([token for chunk in chunks for token in chunk]),
            query_start=starts_of(ints([len(chunk) for chunk in chunks])),
            context_lens=ints(base + [accepted[seq] for seq in seqs]),
            block_tables=self._seats.tables(step.plan.seats, int((ends + budgets).max())),
            samples=np.ones(len(seqs), dtype=np.bool_),
            max_nodes=budgets,
            sampling=self._seats.lay_out(step.plan).sampling,
            drafts=masks,
            block_size=self._block_size,
        )
        chains = self._draw_by_graph(step, first, budgets)
        if chains is None:
            chains = self._draw_chains(step, Lanes(first, budgets, np.arange(len(seqs))))
        tables = first.block_tables
        ends_at = [(int(begin), texts[seq]) for begin, seq in zip(base, seqs, strict=True)]
        return _Begun(step.plan.seats.tolist(), ends_at, tables, budgets, chains)

    def _draw_by_graph(
        self,
        step: DraftStep,
        first: StepInput,
        budgets: IntArray,  # [num_seqs]
    ) -> _Chains | None:
        """Returns chains that the device draws behind `first`; None if it cannot draw them."""
        if self.device_step is None or step.probs_top or step.mask_token is not None:
            return None
        if (first.query_lens > MAX_KNOWN).any():
            return None
        shape = self.device_step.shape(first, budgets, ends_early=step.ends_early)
        if shape is None:
            return None
        least, chains = step.least_probs(np.arange(len(budgets))), _Chains(budgets, 0)
        tokens, chains.lengths[:] = self.device_step.draw(shape, first, budgets, least)
        chains.tokens[:] = tokens[:, : chains.depth]
        return chains

    def _finished(self, step: DraftStep, begun: _Begun | None) -> Drafted:
        """Returns the chains of an applied step: those that were begun, and newly drawn ones."""
        taken = np.full(len(step.plan.seats), -1)
        if begun is not None:
            taken = begun.rows(step.plan, self._seats)
        rest = taken < 0
        if begun is None or rest.all():
            return self._drawn(step).drafted()
        chains = _Chains(step.plan.max_nodes, step.probs_top)
        chains.take(ints(np.flatnonzero(~rest)), begun.chains, taken[~rest])
        if rest.any():
            chains.take(ints(np.flatnonzero(rest)), self._drawn(_some_of(step, rest)))
        return replace(chains.drafted(), num_begun=int(np.count_nonzero(~rest)))

    def _drawn(self, step: DraftStep) -> _Chains:
        """Draws the chains of an applied step."""
        chains = self._draw_on_device(step)
        return self._draw_chains(step, self._known(step)) if chains is None else chains

    def _known(self, step: DraftStep) -> Lanes:
        """Returns the known tokens of the sequences, and the chains' masks if they have any."""
        plan, budgets = step.plan, step.plan.max_nodes
        if (masks := self._masks_for(step, budgets)) is not None:
            plan = replace(plan, drafts=masks)
        return Lanes(self._seats.lay_out(plan), budgets, np.arange(len(budgets)))

    @staticmethod
    def _masks_for(
        step: DraftStep,
        budgets: IntArray,  # [num_seqs]
    ) -> JoinedDrafts | None:
        """Returns masks for all tokens of a chain except the first."""
        num_masks = ints(np.maximum(budgets - 1, 0))
        if step.mask_token is None or not num_masks.any():
            return None
        return JoinedDrafts(np.full(num_masks.sum(), step.mask_token, np.int32), num_masks)

    def _draw_on_device(self, step: DraftStep) -> _Chains | None:
        """Draws the chains of a step on the device; returns None and does nothing if it cannot.

        The host first computes missing tokens of sequences that exceed the rows of the graph.
        """
        plan, budgets = step.plan, step.plan.max_nodes
        if self.device_step is None or step.probs_top or step.mask_token is not None:
            return None
        drafts, ahead = budgets > 0, plan.chunk_lens
        chains = _Chains(budgets, 0)
        drawing = None
        if drafts.any():
            fits = plan.chunk_lens <= MAX_KNOWN
            ahead = np.where(drafts, np.where(fits, 0, plan.chunk_lens - 1), plan.chunk_lens)
            known = self._part(plan, drafts, ahead, plan.chunk_lens - ahead)
            own = budgets[drafts]
            shape = self.device_step.shape(known, own, ends_early=step.ends_early)
            if shape is None:
                return None
            least = step.least_probs(np.flatnonzero(drafts))
            drawing = shape, known, own, least
        if (ahead > 0).any():
            none = np.zeros_like(ahead)
            self._forward(self._part(plan, ahead > 0, none, ahead))
        if drawing is not None:
            tokens, chains.lengths[drafts] = self.device_step.draw(*drawing)
            chains.tokens[drafts] = tokens[:, : chains.depth]
        return chains

    def _part(
        self,
        plan: StepPlan,  # applied to the seats
        chosen: NDArray[np.bool_],  # [num_seqs]
        begin: IntArray,  # [num_seqs], of the chunk
        count: IntArray,  # [num_seqs]
    ) -> StepInput:
        """Returns the step that computes some tokens of the chunks of some sequences."""
        part = part_of(plan, chosen, chosen)
        context_lens, chunk_lens = ints(part.context_lens + begin[chosen]), ints(count[chosen])
        return self._seats.lay_out(replace(part, context_lens=context_lens, chunk_lens=chunk_lens))

    def _prepare(self, step: DraftStep, preparation: Preparation) -> Drafted:
        """Runs one forward of the round's chains, then draws chains behind their likely outcomes.

        Rejected nodes stay in their slots until known tokens overwrite them.
        """
        known = self._seats.expand(step.plan)
        logits = self._forward(known)
        outcomes, lens = choose_outcomes(preparation, Round.of(known), logits, self._collective)
        if step.continuation is not None:
            self._round = _Round.of(step, step.continuation, known, outcomes)
        if not len(outcomes.seqs):
            return replace(_Chains(ints([]), step.probs_top).drafted(), outcomes=outcomes)
        size = blocks_per_outcome(preparation.depth, self._block_size)
        assert len(outcomes.seqs) * size <= self._num_scratch, (len(outcomes.seqs), size)
        first = lay_out_outcomes(
            outcomes, lens, preparation.depth, known, self._block_size, self._first_scratch,
            step.mask_token,
        )  # fmt: skip
        chains = self._draw_chains(step, Lanes(first, lens, outcomes.seqs))
        return replace(chains.drafted(), outcomes=outcomes)

    def _forward(self, step: StepInput) -> Tensor:  # [num_rows, vocab], of the target's ids
        translated = self._translated
        if translated is None:
            return self._model.forward(step, self._cache)
        return translated.logits(self._model.forward(translated.step(step), self._cache))

    def _draw_chains(self, step: DraftStep, lanes: Lanes) -> _Chains:
        """Returns a chain behind every lane's tokens."""
        chains = _Chains(lanes.budgets, step.probs_top)
        if self._draw_by_program(step, lanes, chains):
            return chains
        logits = self._forward(lanes.first)
        if step.mask_token is None:
            self._draw_in_turn(step, lanes, logits, chains)
        else:
            self._draw_at_once(step, lanes, logits, chains)
        return chains

    def _draw_by_program(self, step: DraftStep, lanes: Lanes, chains: _Chains) -> bool:
        """Draws all chains by one program; returns False and draws nothing if it cannot."""
        program, first = self._program, lanes.first
        if program is None or step.mask_token is not None or step.ends_early:
            return False
        rows = ints(np.flatnonzero(first.samples & (lanes.budgets > 0)))
        if not len(rows):
            return False
        # Longer chains come first, so the lanes of a level are a prefix of the previous level's
        # lanes.
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
        # [depth, num_lanes], token ids of the model
        tokens = program.run(known, plan, rows, lanes, chains.depth, self._cache, draw)
        if draw is None:
            chains.tokens[rows] = tokens.T
        chains.lengths[rows] = lanes.budgets[rows]
        return True

    def _draw_in_turn(
        self,
        step: DraftStep,
        lanes: Lanes,
        logits: Tensor,  # [num_sampled, vocab]
        chains: _Chains,
    ) -> None:
        """Runs one forward for each level except the first."""
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
        lanes: Lanes,
        logits: Tensor,  # [num_rows, vocab], of the last known tokens and of masks
        chains: _Chains,
    ) -> None:
        """Draws all levels from one forward of the known tokens and masks for all but the first.

        The masks form a chain behind the known tokens; the last known token predicts the first
        drawn token. No distribution depends on a drawn token. Known tokens overwrite the masks'
        keys and values later.
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
        """Returns rows [num_rows] whose likeliest token is likely enough; rank 0 decides.

        The result depends only on the distribution and not on the drawn token, so every
        verification rule stays exact.
        """
        best = logits.float().softmax(-1).amax(-1) >= torch.from_numpy(least).to(logits.device)
        agreed = self._collective.broadcast(best.to(torch.int32).contiguous())
        return agreed.cpu().numpy().astype(np.bool_)

    def _draw(
        self,
        step: DraftStep,
        lanes: Lanes,
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


class SharedDrafts:
    """A draft model shared by several engines; each has its own seats and part of the cache.

    Args:
        make: creates a service from numbers of blocks and scratch blocks and a translation.
        report: the worker's report; its blocks are divided evenly.
        num_leases: maximum number of engines.
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
        self._busy_s: dict[int, float] = {}  # decaying sums over about one second, by lease
        self._counted_at = time.monotonic()

    def handle(self, message: Leased) -> Drafted | WorkerReport | WeightsAnswer | None:
        """Handles a message of one engine."""
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
            has = f"an engine's part of the group's cache has {self._num_blocks} KV blocks"
            if not message.num_scratch_blocks:
                return WeightsAnswer(
                    f"{has}, and one sequence may need {self._least}; give the group more blocks, "
                    "a lower max_model_len, or a lower max_engines",
                    "drafter_group",
                )
            return WeightsAnswer(
                f"{has}, of which its outcomes need {message.num_scratch_blocks}; one sequence "
                f"may need {self._least} more",
                "speculation_cache.budget",
            )
        self._services[lease] = self._make(
            num_blocks, message.num_scratch_blocks, message.translation
        )
        assert self._report.draft is not None, "a draft model is shared"
        return replace(self._report, draft=replace(self._report.draft, num_blocks=num_blocks))

    def _count(self, lease: int, start: float, now: float) -> float:
        """Counts a draft's time; returns the share of the last second that other engines used."""
        kept = math.exp(self._counted_at - now)
        self._busy_s = {each: busy * kept for each, busy in self._busy_s.items()}
        self._counted_at = now
        others = min(1.0, sum(self._busy_s.values()) - self._busy_s.get(lease, 0.0))
        self._busy_s[lease] = self._busy_s.get(lease, 0.0) + now - start
        return others


def _some_of(step: DraftStep, chosen: NDArray[np.bool_]) -> DraftStep:  # [num_seqs]
    """Returns an applied step restricted to the chosen sequences, whose chains are drawn now."""
    return replace(
        step,
        plan=part_of(step.plan, chosen, chosen),
        min_probs=None if step.min_probs is None else step.min_probs[chosen],
        preparation=None,
        continuation=None,
    )


@dataclass(frozen=True, slots=True)
class _Round:
    """A prepared round whose verdict has not arrived yet."""

    step: DraftStep
    continuation: Continuation
    known: StepInput
    chains: list[list[int]]  # the chains that the target verifies
    outcomes: set[tuple[int, int, int]]  # prepared: sequence, accepted nodes, bonus token

    @classmethod
    def of(
        cls, step: DraftStep, continuation: Continuation, known: StepInput, outcomes: Outcomes
    ) -> _Round:
        starts, tokens = known.draft_start.tolist(), known.draft_tokens.tolist()
        chains = [tokens[begin:end] for begin, end in pairwise(starts)]
        columns = (outcomes.seqs, outcomes.num_accepted, outcomes.bonus)
        table = zip(*(column.tolist() for column in columns), strict=True)
        return cls(step, continuation, known, chains, set(table))


@dataclass(frozen=True, slots=True)
class _Begun:
    """Chains that were drawn before they were requested, with their preceding tokens and blocks."""

    seats: list[int]
    texts: list[tuple[int, list[int]]]  # index of the verdict's first token, and its tokens
    tables: IntArray  # [num_chains, max_blocks]
    budgets: IntArray  # [num_chains]
    chains: _Chains

    def rows(self, plan: StepPlan, seats: Seats) -> IntArray:  # [num_seqs]
        """Returns every sequence's chain; -1 if none has the same tokens and blocks."""
        found = np.full(len(plan.seats), -1, dtype=np.int32)
        places = {seat: index for index, seat in enumerate(self.seats)}
        for opening in plan.openings:  # a seat opened anew has another text
            places.pop(opening.seat, None)
        ends = plan.context_lens + plan.chunk_lens
        for row, seat in enumerate(plan.seats.tolist()):
            index = places.get(seat)
            if index is None or plan.max_nodes[row] > self.budgets[index]:
                continue
            begin, text = self.texts[index]
            own = seats.tables(
                plan.seats[row : row + 1], begin + len(text) + int(self.budgets[index])
            )[0]
            table = self.tables[index, : len(own)]
            is_same = ends[row] == begin + len(text) and np.array_equal(own, table)
            if is_same and seats.tokens(seat, begin, int(ends[row])).tolist() == text:
                found[row] = index
        return found


class _Chains:
    """The chains of a step while they are drawn, with as many levels as the largest budget."""

    def __init__(self, budgets: IntArray, top: int) -> None:
        self._budgets, self.depth = budgets, int(budgets.max(initial=0))
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

    def take(
        self,
        rows: IntArray,
        other: _Chains,
        chosen: IntArray | None = None,  # [num_rows], rows of `other`
    ) -> None:
        """Copies chains of `other` to these rows, each up to its budget."""
        chosen = ints(np.arange(len(rows))) if chosen is None else chosen
        depth = min(self.depth, other.depth)
        self.tokens[rows, :depth] = other.tokens[chosen, :depth]
        self.lengths[rows] = np.minimum(self._budgets[rows], other.lengths[chosen])
        self._ids[rows, :depth] = other._ids[chosen, :depth]
        self._probs[rows, :depth] = other._probs[chosen, :depth]

    def drafted(self) -> Drafted:
        drawn = np.arange(self.depth) < self.lengths[:, None]
        probs: DraftProbs | None = None
        if self._ids.shape[2]:
            probs = DraftProbs(self._ids[drawn], self._probs[drawn])
        return Drafted(tokens=self.tokens[drawn], start=starts_of(self.lengths), probs=probs)


def _picked(logits: Tensor, keep: np.ndarray) -> Tensor:  # [num_rows, vocab], [num_rows]
    return logits if keep.all() else logits[torch.from_numpy(keep).to(logits.device)]


def _next_token(
    first: StepInput, rows: IntArray, tokens: IntArray, index: IntArray, block_size: int
) -> StepInput:
    """Returns a step of one token for each of `rows`, at position `index` of its lane."""
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
