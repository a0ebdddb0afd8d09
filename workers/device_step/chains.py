"""A draft model's chains on the device: missing tokens and all levels behind them in one graph.

On the host path (`workers/draft.py`), every forward is launched separately, and each token is read
before the next one. Here, a chain is one sequence of kernels between fixed addresses. Its first
forward computes the one or two tokens that a sequence lacks after a verdict. Longer gaps, such as
prompts, are first computed on the host, up to their last token. The host plans what all levels'
rows read and write and sends it in one copy, since only the tokens are unknown there.

Drafted tokens are in the sequence's own blocks behind the known ones, as on the host path, and are
drawn with the same noise. Levels beyond a sequence's budget write to a block without an owner.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import NO_INTS, FloatArray, IntArray, StepInput
from ..attention import KVCache
from ..draft_program import Translated
from ..model.family import FamilyModel, FamilyRunner
from ..model.info import ModelInfo
from ..model.paged import PagedModel
from ..ops import DeviceOps, PagedStep
from ..spec import DeviceStepReport, ModelSpec, WorkerSpec
from ..verify.device_settings import DeviceSettings
from ..verify.process import GREEDY_BELOW
from .seats import (
    BYTES_PER_GATHERED_LOGIT,
    BYTES_PER_GRAPH,
    BYTES_PER_LOGIT,
    STATES_PER_ROW,
    best_of_ranks,
)
from .service import ALONE, RULE, Captured, CaptureError, CudaGraphs, OutcomeReader, obstacle
from .shape import MAX_NODES, Sampler

log = logging.getLogger(__name__)

MAX_KNOWN = 2  # rows of known tokens: the last token of a fully accepted chain, and the bonus token
_SAMPLERS = (Sampler.PLAIN, Sampler.SAMPLED)
_SEQS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of sequences that draft at once


def chain_obstacle(model: PagedModel, spec: WorkerSpec) -> str:
    """Returns why no chain of a draft model is drawn in one graph, on any device; or ""."""
    draft = spec.draft
    assert draft is not None, "there is a draft model"
    if spec.num_leases:
        return "several engines share the draft model"
    if not draft.max_draft_len:
        return "no chain is drawn token by token with the target's noise"
    if draft.max_draft_len > MAX_NODES:
        return f"a chain of {draft.max_draft_len} tokens is longer than a step's {MAX_NODES}"
    return obstacle(model, RULE).replace("the target", "the draft model")


@dataclass(frozen=True, slots=True)
class ChainShape:
    """Sizes and branches of one step."""

    num_seqs: int
    depth: int  # of a chain
    sampler: Sampler

    @property
    def num_rows(self) -> int:
        """Rows of known tokens; a level has `num_seqs` rows."""
        return MAX_KNOWN * self.num_seqs

    @property
    def parts(self) -> dict[str, int]:
        """Names of the staged arrays in order, with their 4-byte words; 8-byte types come first."""
        rows = dict.fromkeys(("token_ids", "positions", "slots", "row_index"), self.num_rows)
        seqs = dict.fromkeys(
            ("context_lens", "tree_start", "last", "known", "temperature", "top_k", "top_p",
             "min_p", "least", *(f"{name}{level}" for level in range(1, self.depth)
                                 for name in ("index", "end", "slot"))),
            self.num_seqs,
        )  # fmt: skip
        return {"ancestors": 2 * self.num_rows, "seeds": 2 * self.num_seqs, **rows, **seqs}

    @property
    def places(self) -> dict[str, slice]:
        """Places of the arrays among all words; each is aligned to 16 bytes, as kernels assume."""
        found: dict[str, slice] = {}
        begin = 0
        for name, size in self.parts.items():
            found[name] = slice(begin, begin + size)
            begin += -(-size // 4) * 4
        return found

    @property
    def num_words(self) -> int:
        return max(place.stop for place in self.places.values())

    @property
    def num_drawn(self) -> int:
        """Words of the outcome: every chain's size, then the tokens of every level."""
        return self.num_seqs * (1 + self.depth)


@dataclass(frozen=True, slots=True)
class ChainSizes:
    """The sizes for which memory is allocated."""

    max_num_seqs: int
    max_draft_len: int
    max_model_len: int
    num_blocks: int  # owned by sequences; the block with this number is for padding
    block_size: int
    samplers: tuple[Sampler, ...] = _SAMPLERS

    @classmethod
    def of(cls, spec: ModelSpec, info: ModelInfo, num_blocks: int) -> ChainSizes:
        """Returns the sizes of a draft model with this many blocks, plus those of outcomes."""
        longest = spec.longest(info.max_model_len)
        held = num_blocks + spec.num_scratch_blocks
        # Token ids of another vocabulary are not a range, so tokens are drawn from whole logits.
        samplers = _SAMPLERS[1:] if spec.translation else _SAMPLERS
        given = (spec.max_num_seqs, spec.max_draft_len, longest, held, spec.block_size)
        return cls(*given, samplers)

    @property
    def spare_slot(self) -> int:
        """First slot of the padding's block."""
        return self.num_blocks * self.block_size

    @property
    def num_columns(self) -> int:
        """Maximum number of blocks per sequence."""
        return -(-(self.max_model_len + self.max_draft_len) // self.block_size)

    @property
    def seqs(self) -> tuple[int, ...]:
        most = min(self.max_num_seqs, _SEQS[-1])
        return (*(num for num in _SEQS if num < most), most)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths of whole chains, and of half chains for small budgets."""
        return tuple(sorted({-(-self.max_draft_len // 2), self.max_draft_len}))

    @property
    def shapes(self) -> list[ChainShape]:
        """All shapes, largest first."""
        found = [ChainShape(*each) for each in product(self.seqs, self.depths, self.samplers)]
        return sorted(found, key=lambda shape: (shape.num_seqs, shape.depth), reverse=True)

    def shape(self, num_seqs: int, depth: int, sampler: Sampler) -> ChainShape | None:
        """Returns the smallest shape for this many sequences and levels; None if there is none."""
        seqs = next((num for num in self.seqs if num >= num_seqs), None)
        levels = next((num for num in self.depths if num >= depth), None)
        sampler = max(sampler, self.samplers[0])
        return None if seqs is None or levels is None else ChainShape(seqs, levels, sampler)


def chain_bytes(sizes: ChainSizes, info: ModelInfo, num_ranks: int = 1) -> int:
    """Returns an upper bound of the memory besides weights and KV cache, from sizes alone."""
    shapes = sizes.shapes
    largest = shapes[0]
    per_logit = BYTES_PER_LOGIT + (BYTES_PER_GATHERED_LOGIT if num_ranks > 1 else 0)
    staged = 4 * (largest.num_words + largest.num_drawn + largest.num_seqs * sizes.num_columns)
    logits = largest.num_seqs * info.vocab_size * per_logit
    states = largest.num_rows * STATES_PER_ROW * info.hidden_size * 4
    return staged + logits + states + len(shapes) * BYTES_PER_GRAPH


class ChainStep:
    """The kernels of a step between fixed addresses, without host reads, and its staged inputs."""

    def __init__(
        self,
        model: FamilyModel,
        cache: KVCache,
        sizes: ChainSizes,
        translated: Translated | None = None,
    ) -> None:
        assert cache.num_blocks == sizes.num_blocks + 1, (cache.num_blocks, sizes)
        self._model, self._cache, device = model, cache, cache.device
        self._sizes, self._translated = sizes, translated
        output = self._model.output
        self._collective = ALONE if output is None else output.collective
        shapes, most = sizes.shapes, sizes.seqs[-1]
        words = max(shape.num_words for shape in shapes)
        self.memory = torch.zeros(words, dtype=torch.int32, device=device)
        self.words = torch.zeros(shapes[0].num_drawn, dtype=torch.int32, device=device)
        size = (most, sizes.num_columns)
        self.tables = torch.full(size, sizes.num_blocks, dtype=torch.int32, device=device)
        self._seqs = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._starts = self._seqs * MAX_KNOWN
        self._row_seq = self._seqs[:most].repeat_interleave(MAX_KNOWN)
        self._no_bits = torch.zeros((most, 1), dtype=torch.int64, device=device)

    def stage(
        self,
        shape: ChainShape,
        known: StepInput | None,  # None: all is padding
        budgets: IntArray,  # [num_seqs]
        least: FloatArray,  # [num_seqs]
    ) -> None:
        """Sends the plan of all levels, padded to the shape."""
        words = np.zeros(shape.num_words, dtype=np.int32)
        parts = {name: words[place] for name, place in shape.places.items()}
        context, ends, room = (np.zeros(shape.num_seqs, dtype=np.int32) for _ in range(3))
        ends += 1
        tables = np.full((shape.num_seqs, 1), self._sizes.num_blocks, dtype=np.int32)
        parts["slots"][:] = self._sizes.spare_slot
        parts["top_p"].view(np.float32)[:] = 1
        if known is not None:
            if self._translated is not None:
                known = self._translated.step(known)
            num_seqs, rows = len(budgets), known.sampling
            context[:num_seqs], room[:num_seqs] = known.context_lens, budgets
            ends[:num_seqs] = known.context_lens + known.query_lens
            width = min(known.block_tables.shape[1], self._sizes.num_columns)
            tables = np.full((shape.num_seqs, width), self._sizes.num_blocks, dtype=np.int32)
            tables[:num_seqs] = known.block_tables[:, :width]
            owner = np.arange(num_seqs).repeat(known.query_lens)
            at = np.arange(len(owner)) + (MAX_KNOWN * owner - known.query_start[owner])
            parts["token_ids"][at], parts["slots"][at] = known.token_ids, known.slot_mapping
            parts["seeds"].view(np.int64)[:num_seqs] = rows.seeds
            parts["top_k"][:num_seqs] = rows.top_k
            reals = (rows.temperature, rows.top_p, rows.min_p, least)
            for name, values in zip(("temperature", "top_p", "min_p", "least"), reals, strict=True):
                parts[name].view(np.float32)[:num_seqs] = values
        lanes = np.arange(shape.num_rows, dtype=np.int32) % MAX_KNOWN
        count = ends - context  # known tokens' rows; rows behind them are leaves that no row sees
        is_known = lanes < count.repeat(MAX_KNOWN)
        parts["row_index"][:] = context.repeat(MAX_KNOWN) + lanes
        parts["positions"][:] = np.where(is_known, parts["row_index"], context.repeat(MAX_KNOWN))
        parts["ancestors"].view(np.int64)[:] = is_known & (lanes > 0)
        parts["context_lens"][:], parts["tree_start"][:] = context, context + 1
        parts["last"][:] = MAX_KNOWN * np.arange(shape.num_seqs) + count - 1
        parts["known"][:] = ends
        self._stage_levels(shape, parts, ends, room, tables)
        device = self.memory.device
        self.memory[: len(words)].copy_(_pinned(words, device), non_blocking=True)
        held = self.tables[: shape.num_seqs, : tables.shape[1]]
        held.copy_(_pinned(tables, device), non_blocking=True)

    def _stage_levels(
        self,
        shape: ChainShape,
        parts: dict[str, NDArray[np.int32]],  # output
        ends: IntArray,  # [num_seqs], known tokens
        room: IntArray,  # [num_seqs]
        tables: IntArray,  # [num_seqs, width]
    ) -> None:
        size, seqs = self._sizes.block_size, np.arange(shape.num_seqs)
        for level in range(1, shape.depth):
            index = ends + level - 1
            block = np.minimum(index // size, tables.shape[1] - 1)
            slots = tables[seqs, block] * size + index % size
            parts[f"index{level}"][:], parts[f"end{level}"][:] = index, index + 1
            parts[f"slot{level}"][:] = np.where(room > level, slots, self._sizes.spare_slot)

    def run(self, shape: ChainShape) -> None:
        """Computes the staged step."""
        model, num_seqs = self._model, shape.num_seqs
        views = {name: self.memory[place] for name, place in shape.places.items()}
        step = self._known(shape, views)
        rows: Tensor | None = views["last"].long()
        drawn: list[Tensor] = []  # by level, [num_seqs] int32
        fits: list[Tensor] = []  # by level, whether the likeliest token is likely enough
        for level in range(shape.depth):
            if level:
                last = drawn[-1] if self._translated is None else self._translated.own(drawn[-1])
                step = self._level(shape, views, level, last, step if level > 1 else None)
                rows = None
            states, _ = model.states(model.context(step, self._cache), rows, ())
            drawn.append(self._draw(states, shape, views, level, fits))
        sizes = torch.full((num_seqs,), shape.depth, dtype=torch.int32, device=states.device)
        if fits:
            sizes = torch.stack(fits).to(torch.int32).cumprod(0).sum(0, dtype=torch.int32)
        torch.cat([sizes, *drawn], out=self.words[: shape.num_drawn])

    def _known(self, shape: ChainShape, views: dict[str, Tensor]) -> PagedStep:
        """Plans every sequence's last tokens; of two, the second is a node below the first."""
        num_seqs, num_rows = shape.num_seqs, shape.num_rows
        return PagedStep(
            token_ids=views["token_ids"],
            positions=views["positions"],
            slots=views["slots"],
            row_seq=self._row_seq[:num_rows],
            row_index=views["row_index"],
            query_start=self._starts[: num_seqs + 1],
            context_lens=views["context_lens"],
            tree_start=views["tree_start"],
            block_tables=self.tables[:num_seqs],
            ancestors=views["ancestors"].view(torch.int64)[:, None],
            block_size=self._cache.block_size,
            max_query_len=MAX_KNOWN,
            max_key_len=self.tables.shape[1] * self._cache.block_size,
        )

    def _level(
        self,
        shape: ChainShape,
        views: dict[str, Tensor],
        level: int,
        tokens: Tensor,  # [num_seqs] int32, ids of the model, from the previous level
        like: PagedStep | None,  # the first step of this kind
    ) -> PagedStep:
        num_seqs, index = shape.num_seqs, views[f"index{level}"]
        step = PagedStep(
            token_ids=tokens,
            positions=index,
            slots=views[f"slot{level}"],
            row_seq=self._seqs[:num_seqs],
            row_index=index,
            query_start=self._seqs[: num_seqs + 1],
            context_lens=index,
            tree_start=views[f"end{level}"],
            block_tables=self.tables[:num_seqs],
            ancestors=self._no_bits[:num_seqs],
            block_size=self._cache.block_size,
            max_query_len=1,
            max_key_len=self.tables.shape[1] * self._cache.block_size,
        )
        return replace(step, like=step if like is None else like.like)

    def _draw(
        self,
        states: Tensor,  # [num_seqs, hidden_size]
        shape: ChainShape,
        views: dict[str, Tensor],
        level: int,
        fits: list[Tensor],  # extended by this level's result
    ) -> Tensor:  # [num_seqs] int32
        model, known = self._model, views["known"]
        ops: DeviceOps = model.ops  # type: ignore[assignment]  # checked by `chain_obstacle`
        temperature, top_p, min_p, least = (
            views[name].view(torch.float32) for name in ("temperature", "top_p", "min_p", "least")
        )
        seeds = views["seeds"].view(torch.int64)
        settings = DeviceSettings(seeds, temperature, views["top_k"], top_p, min_p)
        if shape.sampler is Sampler.PLAIN:
            logits = model.part_of_logits(states)
            part = ops.gumbel_argmax_on_device(logits, known, settings, model.first_token, level)
            return best_of_ranks(part, self._collective)
        logits = model.logits(states).float()
        if self._translated is not None:
            logits = self._translated.logits(logits)
        # As on the host path, so that chains end at the same tokens.
        fits.append(logits.softmax(-1).amax(-1) >= least)
        return ops.draw_on_device(logits, known + level, settings)


class ChainService:
    """The step for the draft model's service; `cache` has one block more than sequences own."""

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        sizes: ChainSizes,
        translated: Translated | None = None,
    ) -> None:
        assert isinstance(model.runner, FamilyRunner), type(model.runner)
        self._sizes, self._model = sizes, model
        self._step = ChainStep(model.runner.model, cache, sizes, translated)
        self._captured = Captured[ChainShape](self._step.run, model.collective, cache.device)
        self._reader = OutcomeReader(self._step.words)
        self._capture_error = ""
        self.num_steps = 0

    def capture(self, api: CudaGraphs | None = None) -> None:
        """Captures every shape, as `DeviceStepService.capture` does."""
        none = np.zeros(0, dtype=np.float32)
        try:
            with torch.inference_mode():
                self._captured.capture(
                    self._sizes.shapes,
                    lambda: api or CudaGraphs(self._step.memory.device),
                    lambda shape: self._step.stage(shape, None, NO_INTS, none),
                    shows_progress=self._model.collective.rank == 0,
                )
        except CaptureError as error:
            self._capture_error = str(error)
            log.warning(
                "device step of the draft model: not captured, it runs uncaptured: %s", error
            )

    @property
    def report(self) -> DeviceStepReport:
        """Returns the report for `/stats`."""
        return DeviceStepReport(
            True,
            num_shapes=len(self._sizes.shapes),
            num_captured=self._captured.num_captured,
            capture_error=self._capture_error,
            drafts=True,
        )

    def shape(
        self,
        known: StepInput,  # one or two tokens of each sequence
        budgets: IntArray,  # [num_seqs], above 0
        *,
        ends_early: bool,  # whether chains may end where the model is unsure
    ) -> ChainShape | None:
        """Returns the shape of a step; None if there is none for this many sequences."""
        rows = known.sampling
        has_cut = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        is_cut = bool((has_cut & (rows.temperature >= GREEDY_BELOW)).any())
        sampler = Sampler.SAMPLED if ends_early or is_cut else Sampler.PLAIN
        return self._sizes.shape(len(budgets), int(budgets.max()), sampler)

    def draw(
        self,
        shape: ChainShape,
        known: StepInput,
        budgets: IntArray,  # [num_seqs]
        least: FloatArray,  # [num_seqs], minimum probability of a chain's likeliest token
    ) -> tuple[IntArray, IntArray]:  # [num_seqs, depth], [num_seqs]
        """Returns the tokens of every chain, and how many of them are valid."""
        self._step.stage(shape, known, budgets, least)
        self._captured.run(shape)
        self._reader.post(shape.num_drawn)
        self.num_steps += 1
        sizes, *levels = self._reader.collect().reshape(-1, shape.num_seqs)[:, : len(budgets)]
        return np.stack(levels, axis=1), np.minimum(sizes, budgets)


def _pinned(values: IntArray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor
