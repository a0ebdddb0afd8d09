"""`workers/seats.py` on the device: one tensor with a fixed address, and the views of it.

Everything that changes between steps is an int32 word of `memory`: tokens, block tables, lengths,
sampling settings, and the plan of the step at hand. A plan's differences are (address, value)
pairs, sent in one copy and written by one operation, so that nothing is allocated for a request and
a captured graph reads what is current.

The last row of every table belongs to no request. Sequences that pad a step to its shape sit
there, and whatever they write goes into a block that no request owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import Opening, StepPlan
from ...scheduler.types import IntArray, NextDrafts, Verdict, starts_of
from ..verify.device_edits import MAX_BIASES, MAX_ENDS, NUM_WORDS, EditTables, neutral_words
from .edits import TokenCounts, counts_obstacle, edit_rows
from .shape import SIZES, StepShape, node_offsets, sizes

NUM_SETTINGS = 6  # seed (two words), temperature, top_k, top_p, min_p
MAX_QUERY_LEN = max(query_len for _, query_len in SIZES)


@dataclass(frozen=True, slots=True)
class SeatSizes:
    """What the seats have room for."""

    num_seats: int
    max_model_len: int
    num_blocks: int  # that requests own; the block with this number is the padding's
    block_size: int
    num_draft_nodes: int = 0  # of a head that drafts on the device; 0: there is none
    vocab_size: int = 0  # of the counts of tokens; 0: there are none

    @property
    def edits_obstacle(self) -> str:
        """Why penalties, biases, `min_tokens` and log-probabilities are the host's, or nothing."""
        if not self.vocab_size:
            return "there are no counts of tokens"
        return counts_obstacle(self.num_rows, self.vocab_size)

    @property
    def has_edits(self) -> bool:
        return not self.edits_obstacle

    @property
    def step_sizes(self) -> list[tuple[int, int]]:
        """(num_seqs, query_len) of the steps that they take."""
        return sizes(self.num_seats, self.num_draft_nodes)

    @property
    def num_rows(self) -> int:
        """With that of the padding."""
        return self.num_seats + 1

    @property
    def width(self) -> int:
        """Tokens of a row, with room for a step's nodes."""
        # Of a posted step that goes beyond the end, and of the one that is planned behind it.
        return self.max_model_len + 2 * max(MAX_QUERY_LEN, 1 + self.num_draft_nodes)

    @property
    def num_columns(self) -> int:
        """Blocks of a row."""
        return -(-self.width // self.block_size)

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The views of the memory, in order."""
        max_seqs = max(num_seqs for num_seqs, _ in self.step_sizes)
        max_nodes = max(num_seqs * (query_len - 1) for num_seqs, query_len in self.step_sizes)
        return {
            "tokens": (self.num_rows, self.width),
            "tables": (self.num_rows, self.num_columns),
            "settings": (self.num_rows, NUM_SETTINGS),
            "lengths": (self.num_rows,),
            "draft_tokens": (self.num_rows, self.num_draft_nodes),
            "draft_parents": (self.num_rows, self.num_draft_nodes),
            "draft_counts": (self.num_rows,),
            **(self._edit_parts if self.has_edits else {}),
            "appends": (1,),
            "own_drafts": (1,),
            "seats": (max_seqs,),
            "num_nodes": (max_seqs,),
            "room": (max_seqs,),
            "node_tokens": (max_nodes,),
            "parents": (max_nodes,),
        }

    @property
    def _edit_parts(self) -> dict[str, tuple[int, ...]]:
        widths = {
            "edits": NUM_WORDS,
            "bias_ids": MAX_BIASES,
            "biases": MAX_BIASES,
            "ends": MAX_ENDS,
        }
        return {name: (self.num_rows, width) for name, width in widths.items()}

    @property
    def num_words(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.parts.values())


class DeviceSeats:
    """One row per seat, and one for padding."""

    def __init__(self, sizes: SeatSizes, device: torch.device) -> None:
        assert sizes.num_words < 1 << 31, sizes
        self.sizes, self.device = sizes, device
        self.memory = torch.zeros(sizes.num_words, dtype=torch.int32, device=device)
        self._begin: dict[str, int] = {}
        views: dict[str, Tensor] = {}
        begin = 0
        for name, shape in sizes.parts.items():
            size = int(np.prod(shape))
            views[name] = self.memory[begin : begin + size].view(shape)
            self._begin[name] = begin
            begin += size
        self.tokens = views["tokens"]  # [num_rows, width]
        self.tables = views["tables"]  # [num_rows, num_columns]
        self.settings = views["settings"]  # [num_rows, NUM_SETTINGS]
        self.lengths = views["lengths"]  # [num_rows], known tokens
        self.appends = views["appends"]  # [1], whether the step appends what it emits
        self._own_drafts = views["own_drafts"]  # [1], whether the nodes are the seats' drafts
        self._drafts = views["draft_tokens"], views["draft_parents"]  # [num_rows, num_draft_nodes]
        self._draft_counts = views["draft_counts"]  # [num_rows], the first so many are nodes
        self._seats, self._num_nodes = views["seats"], views["num_nodes"]
        self._room = views["room"]
        self._node_tokens, self._parents = views["node_tokens"], views["parents"]
        self.edits: EditTables | None = None
        self._counts: TokenCounts | None = None
        if sizes.has_edits:
            self._counts = TokenCounts(sizes.num_rows, sizes.vocab_size, device)
            self.edits = EditTables(
                words=views["edits"],
                bias_ids=views["bias_ids"],
                biases=views["biases"],
                ends=views["ends"],
                counts=self._counts.table,
            )
            self.edits.words.copy_(torch.tensor(neutral_words(), dtype=torch.int32))
        self.tables.fill_(sizes.num_blocks)
        self.lengths[-1:].fill_(1)
        self._lens = np.zeros(sizes.num_rows, dtype=np.int32)  # [num_seats seen], the host's copy
        self._writes: list[tuple[IntArray, IntArray]] = []  # (addresses, values)

    # -- the step at hand, as the device step reads it

    def step_seats(self, shape: StepShape) -> Tensor:  # [num_seqs] int32
        return self._seats[: shape.num_seqs]

    def step_room(self, shape: StepShape) -> Tensor:  # [num_seqs] int32
        """Nodes that a sequence has room for."""
        return self._room[: shape.num_seqs]

    def step_nodes(self, shape: StepShape) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers [num_seqs], tokens and parents [num_seqs, num_nodes], int32; -1 is the root."""
        size = (shape.num_seqs, shape.num_nodes)
        end = shape.num_seqs * shape.num_nodes
        counts = self._num_nodes[: shape.num_seqs]
        staged = self._node_tokens[:end].view(size), self._parents[:end].view(size)
        if not (self.sizes.num_draft_nodes and shape.num_nodes):
            return counts, *staged
        who, is_own = self.step_seats(shape).long(), self._own_drafts > 0
        kept = self._draft_counts.index_select(0, who).minimum(self.step_room(shape))
        tokens, parents = (
            torch.where(is_own, own[:, : shape.num_nodes].index_select(0, who), given)
            for own, given in zip(self._drafts, staged, strict=True)
        )
        return torch.where(is_own, kept, counts), tokens, parents

    def keep_drafts(
        self,
        who: Tensor,  # [num_seqs] int64
        counts: Tensor,  # [num_seqs] int32
        nodes: tuple[Tensor, Tensor] | None,  # tokens and parents [num_seqs, num_draft_nodes] int32
    ) -> None:
        """Replaces the drafts of the seats `who`; None: they have none."""
        self._draft_counts.index_copy_(0, who, counts)
        for own, made in zip(self._drafts, nodes or (), strict=nodes is not None):
            own.index_copy_(0, who, made)

    # -- what the host changes

    def apply(self, plan: StepPlan) -> None:
        """Queues what `plan` changes; every plan goes through here, whoever computes it."""
        for opening in plan.openings:
            if opening.seat >= len(self._lens):
                self._lens = np.pad(self._lens, (0, opening.seat + 1))
            self._lens[opening.seat] = len(opening.tokens)
            if opening.seat < self.sizes.num_seats:
                self._open(opening)
        if len(plan.blocks):
            seats, index, blocks = plan.blocks[plan.blocks[:, 0] < self.sizes.num_seats].T
            self._write("tables", seats * self.sizes.num_columns + index, blocks)
        if len(plan.tokens):
            ends = plan.context_lens + plan.chunk_lens
            counts: IntArray = np.maximum(ends - self._lens[plan.seats], 0)
            self._extend(plan.seats, counts, plan.tokens)

    def append(self, plan: StepPlan, verdict: Verdict, on_device: bool) -> None:
        """Appends what a step emitted; the device step has done so already on the device."""
        if on_device:
            self._lens[plan.seats] += verdict.num_emitted
        else:
            self._extend(plan.seats, verdict.num_emitted, verdict.emitted)

    def put_drafts(self, plan: StepPlan, drafts: NextDrafts | None) -> None:
        """Queues what a head drafted on the host path, in place of the seats' drafts."""
        width = self.sizes.num_draft_nodes
        known = plan.seats < self.sizes.num_seats
        if not width or not known.any():
            return
        counts = np.zeros(len(plan.seats), np.int32) if drafts is None else np.diff(drafts.start)
        self._write("draft_counts", plan.seats[known], np.minimum(counts, width)[known])
        if drafts is None:
            return
        node = node_offsets(counts)
        kept = known.repeat(counts) & (node < width)
        place = (plan.seats.repeat(counts) * width + node)[kept]
        self._write("draft_tokens", place, drafts.tokens[kept])
        self._write("draft_parents", place, drafts.parents[kept])

    def known_lens(self, plan: StepPlan) -> IntArray:  # [num_seqs]
        """Tokens of the plan's seats, as far as the host has them."""
        return self._lens[plan.seats]

    def stage(self, plan: StepPlan, shape: StepShape) -> None:
        """Queues the plan of a device step, padded to its shape."""
        num_seqs, drafts = len(plan.seats), plan.drafts
        size = (shape.num_seqs, shape.num_nodes)
        seats = np.full(shape.num_seqs, self.sizes.num_seats, dtype=np.int32)
        seats[:num_seqs] = plan.seats
        counts = np.zeros(shape.num_seqs, dtype=np.int32)
        tokens, parents = np.zeros(size, dtype=np.int32), np.full(size, -1, dtype=np.int32)
        if drafts is not None and len(drafts.tokens):
            counts[:num_seqs] = drafts.num_nodes
            index = node_offsets(drafts.num_nodes)
            owner = np.repeat(np.arange(num_seqs), drafts.num_nodes)
            tokens[owner, index] = drafts.tokens
            parents[owner, index] = index - 1 if drafts.parents is None else drafts.parents
        room = np.zeros_like(counts)
        room[:num_seqs] = plan.max_nodes
        self._stage(seats, counts, tokens, parents, room)
        self._set_flags(appends=plan.appends, own_drafts=plan.own_drafts)

    def stage_padding(self, shape: StepShape) -> None:
        """Queues a step that changes nothing."""
        size = (shape.num_seqs, shape.num_nodes)
        seats = np.full(shape.num_seqs, self.sizes.num_seats, dtype=np.int32)
        zeros = np.zeros(size, dtype=np.int32)
        none = np.zeros_like(seats)
        self._stage(seats, none, zeros, zeros - 1, none)
        self._set_flags(appends=False, own_drafts=False)

    def _stage(
        self,
        seats: IntArray,  # [num_seqs]
        counts: IntArray,  # [num_seqs]
        tokens: IntArray,  # [num_seqs, num_nodes]
        parents: IntArray,  # [num_seqs, num_nodes]
        room: IntArray,  # [num_seqs]
    ) -> None:
        for name, values in (
            ("seats", seats),
            ("num_nodes", counts),
            ("room", room),
            ("node_tokens", tokens.ravel()),
            ("parents", parents.ravel()),
        ):
            self._write(name, np.arange(len(values), dtype=np.int32), values)

    def _set_flags(self, **flags: bool) -> None:
        for name, value in flags.items():
            self._write(name, np.zeros(1, np.int32), np.full(1, value, np.int32))

    def flush(self) -> None:
        """Sends what is queued: one copy, one write."""
        if self._counts is not None:
            self._counts.flush()
        if not self._writes:
            return
        addresses, values = (np.concatenate(column) for column in zip(*self._writes, strict=True))
        self._writes.clear()
        # Later writes win, whatever the order in which a device takes them.
        _, last = np.unique(addresses[::-1], return_index=True)
        kept = len(addresses) - 1 - last
        packed = torch.from_numpy(np.stack([addresses[kept], values[kept]]))
        if self.device.type == "cuda":
            packed = packed.pin_memory().to(self.device, non_blocking=True)
        else:
            packed = packed.to(self.device)
        self.memory.index_copy_(0, packed[0].long(), packed[1])

    def _open(self, opening: Opening) -> None:
        seat, settings, num_tokens = opening.seat, opening.settings, len(opening.tokens)
        assert num_tokens <= self.sizes.width, (num_tokens, self.sizes)
        first = seat * self.sizes.width
        self._write("tokens", first + np.arange(num_tokens, dtype=np.int32), opening.tokens)
        self._write("lengths", np.full(1, seat), np.full(1, num_tokens))
        cuts = np.array([settings.temperature, settings.top_p, settings.min_p], np.float32)
        temperature, top_p, min_p = cuts.view(np.int32)
        words = np.empty(NUM_SETTINGS, dtype=np.int32)
        words[:2] = np.array([settings.seed], dtype=np.int64).view(np.int32)
        words[2:] = temperature, settings.top_k, top_p, min_p
        self._write("settings", seat * NUM_SETTINGS + np.arange(NUM_SETTINGS), words)
        if self._counts is not None:
            self._counts.open(opening)
            for name, row in edit_rows(opening, self.sizes.vocab_size).items():
                self._write(name, seat * len(row) + np.arange(len(row)), row)

    def _extend(
        self,
        seats: IntArray,  # [num_seqs]
        counts: IntArray,  # [num_seqs]
        tokens: IntArray,  # [sum of counts]
    ) -> None:
        old = self._lens[seats]
        self._lens[seats] = old + counts
        known = seats < self.sizes.num_seats
        if not known.all():
            tokens = tokens[np.repeat(known, counts)]
            seats, counts, old = seats[known], counts[known], old[known]
        if self._counts is not None:
            self._counts.extend(np.repeat(seats, counts), tokens)
        lane = np.arange(len(tokens)) - np.repeat(starts_of(counts)[:-1], counts)
        begin = seats * self.sizes.width + old
        self._write("tokens", np.repeat(begin, counts) + lane, tokens)
        self._write("lengths", seats, old + counts)

    def _write(self, name: str, index: NDArray[np.integer], values: NDArray[np.integer]) -> None:
        addresses = (index + self._begin[name]).astype(np.int32, copy=False)
        self._writes.append((addresses, values.astype(np.int32, copy=False)))
