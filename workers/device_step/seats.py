"""`workers/seats.py` on the device: one tensor with a fixed address, and views of it.

Everything that changes between steps is an int32 word of `memory`: tokens, block tables, lengths,
sampling settings, and the plan of the current step. A plan's changes are (address, value) pairs,
sent in one copy and written by one operation. So nothing is allocated per request, and a captured
graph reads the current values.

The last row of every table belongs to no request. Sequences that pad a step to its shape use it,
and their writes go to a block that no request owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler import tree
from ...scheduler.types import (
    Draft,
    IntArray,
    JoinedDrafts,
    Logprobs,
    NextDrafts,
    Opening,
    StepPlan,
    Verdict,
    ints,
    starts_of,
)
from ..collective import Collective
from ..model.info import ModelInfo
from ..ops import DeviceLayout, StagedStep
from ..verify.device_settings import (
    EDIT_WORDS,
    MASK_BITS,
    MAX_BIASES,
    MAX_ENDS,
    MAX_TOP,
    NUM_WORDS,
    PROMPT,
    DeviceSettings,
    DeviceWalk,
    EditTables,
)
from ..verify.process import spread
from .shape import MAX_QUERY_LEN, Sampler, SeatKinds, Size, StepShape, all_shapes, fits, sizes

MAX_COUNT_BYTES = 1 << 30  # with a larger table, edits are computed on the host
LOGPROB_WORDS = 2 + 2 * MAX_TOP  # of a row: values of drawn and top tokens, rank, top ids


def edit_rows(opening: Opening, vocab: int) -> dict[str, IntArray]:
    """Returns the rows of a seat's tables, by name."""
    settings = opening.settings
    known = (settings.bias_ids >= 0) & (settings.bias_ids < vocab)
    bias_ids, values = settings.bias_ids[known], settings.bias_values[known]
    ends = settings.ends[(settings.ends >= 0) & (settings.ends < vocab)]
    if not fits(settings):  # takes the host path, so its rows are not read
        bias_ids, values, ends = bias_ids[:0], values[:0], ends[:0]
    penalties = (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty)
    least = opening.num_prompt + settings.min_tokens
    edits = (*penalties, least, settings.num_logprobs, len(bias_ids), len(ends))
    return {
        "edits": np.array([edits], EDIT_WORDS).view(np.int32),
        "bias_ids": _padded(bias_ids, MAX_BIASES),
        "biases": _padded(values.astype(np.float32).view(np.int32), MAX_BIASES),
        "ends": _padded(ends, MAX_ENDS),
    }


def _padded(values: NDArray[np.int32], width: int) -> IntArray:  # [width]
    return np.pad(values, (0, width - len(values)))


class TokenCounts:
    """The table of counts, with one row per seat and one column per token, and its queued changes.

    Counts of a request with penalties are set when it takes its seat. The device step adds the
    tokens that it emits, and the host adds all others. Other rows are undefined and unused.
    """

    def __init__(self, num_rows: int, vocab: int, device: torch.device) -> None:
        self.table = torch.zeros((num_rows, vocab), dtype=torch.int32, device=device)
        self._vocab = vocab
        self._counted = np.zeros(num_rows, dtype=np.bool_)  # [num_rows], seats with penalties
        self._opened: list[int] = []
        self._adds: list[tuple[NDArray[np.int64], IntArray]] = []  # (addresses, values)

    def open(self, opening: Opening) -> None:
        """Counts the tokens of a request that takes a seat, if it has penalties."""
        seat = opening.seat
        self._counted[seat] = opening.settings.has_penalties
        if not self._counted[seat]:
            return
        assert seat not in self._opened, (seat, "opened twice before a flush")
        self._opened.append(seat)
        prompt, output = np.split(opening.tokens, [opening.num_prompt])
        prompt = np.unique(prompt)
        self._add(np.full(len(prompt), seat), prompt, PROMPT)
        self._add(np.full(len(output), seat), output, 1)

    def extend(self, seats: IntArray, tokens: IntArray) -> None:  # each [num_tokens]
        """Counts output tokens that the device step has not counted."""
        counted = self._counted[seats]
        if counted.any():
            self._add(seats[counted], tokens[counted], 1)

    def flush(self) -> None:
        """Sends the queued changes."""
        table = self.table
        if self._opened:
            opened = np.array(self._opened, dtype=np.int64)
            table.index_fill_(0, _sent(opened, table.device), 0)
            self._opened.clear()
        if self._adds:
            addresses, values = (np.concatenate(part) for part in zip(*self._adds, strict=True))
            self._adds.clear()
            at = _sent(addresses, table.device)
            table.view(-1).index_add_(0, at, _sent(values, table.device))

    def _add(self, seats: NDArray[np.integer], tokens: IntArray, value: int) -> None:
        known = (tokens >= 0) & (tokens < self._vocab)
        addresses = seats[known].astype(np.int64) * self._vocab + tokens[known]
        self._adds.append((addresses, np.full(len(addresses), value, dtype=np.int32)))


def _sent(values: NDArray[np.integer], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def read_logprobs(
    verdict: Verdict,
    asked: IntArray,  # [num_seqs], number of log-probabilities; -1: none
    starts: IntArray,  # [num_seqs], first row of each sequence
    num_rows: int,
    vocab: int,
    words: NDArray[np.int32],  # [num_rows * LOGPROB_WORDS]: values of all rows, then ranks and ids
) -> Logprobs:
    """Returns the log-probabilities of the emitted tokens.

    There are columns for the largest requested number; a token has as many as its request asks for,
    and zeros beyond.
    """
    num_values = num_rows * (1 + MAX_TOP)
    values = words[:num_values].view(np.float32).reshape(num_rows, -1)
    ids = words[num_values:].reshape(num_rows, -1)
    owner = np.repeat(np.arange(len(asked)), verdict.num_emitted)
    rows = starts[owner]
    follows = np.ones(len(rows), dtype=np.bool_)
    follows[verdict.emitted_start[:-1]] = False  # a sequence's first token is drawn at its root
    rows[follows] += verdict.path + 1
    wanted, top = asked[owner] >= 0, min(int(asked.max()), vocab)
    taken = rows[wanted]
    inside = np.arange(top) < asked[owner[wanted], None]
    best = np.where(inside, values[taken, 1 : 1 + top], np.float32(0))
    top_ids = np.where(inside, ids[taken, 1 : 1 + top], np.int32(0))
    return spread(Logprobs(values[taken, 0], top_ids, best, ids[taken, 0]), wanted)


_SETTINGS = np.dtype("i8, f4, i4, f4, f4")  # seed, temperature, top_k, top_p, min_p
NUM_SETTINGS = _SETTINGS.itemsize // 4


@dataclass(frozen=True, slots=True)
class SeatSizes:
    """The sizes for which memory is allocated."""

    num_seats: int
    max_model_len: int
    num_blocks: int  # owned by requests; the block with this number is for padding
    block_size: int
    num_draft_nodes: int = 0  # of a head that drafts on the device; 0: there is no such head
    vocab_size: int = 0  # width of the table of counts; 0: there is no table
    has_chances: bool = False  # whether a head's drafts have probabilities
    fed_layers: tuple[int, ...] = ()  # layers whose inputs are kept for separate heads
    p_min: float = 0.0  # of the head: minimum probability of a drafted node

    @property
    def spare_slot(self) -> int:
        """First slot of the padding's block."""
        return self.num_blocks * self.block_size

    @property
    def draft_parts(self) -> tuple[int, ...]:
        """Widths of a head's drafts: sizes, tokens, parents and chances; () if there is no head."""
        width = self.num_draft_nodes
        return (1, *(width,) * (3 if self.has_chances else 2)) if width else ()

    @property
    def chooses(self) -> bool:
        """Whether the device decides which nodes of a head's drafts get rows.

        If separate heads read features, the host must know these rows, so it decides.
        """
        return self.has_chances and not self.fed_layers

    @property
    def edits_obstacle(self) -> str:
        """Why the host computes penalties, biases, `min_tokens` and log-probabilities, or ""."""
        if not self.vocab_size:
            return "there are no counts of tokens"
        if self.count_bytes <= MAX_COUNT_BYTES:
            return ""
        size, most = self.count_bytes >> 20, MAX_COUNT_BYTES >> 20
        return f"the counts of tokens would take {size} MiB, more than {most}"

    @property
    def count_bytes(self) -> int:
        return 4 * self.num_rows * self.vocab_size

    @property
    def mask_words(self) -> int:
        """Words of a row's mask."""
        return -(-self.vocab_size // MASK_BITS)

    @property
    def has_edits(self) -> bool:
        return not self.edits_obstacle

    @property
    def step_sizes(self) -> tuple[Size, ...]:
        """Sizes of all step shapes."""
        return sizes(self.num_seats, self.num_draft_nodes)

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a step."""
        return max(num_rows for _, _, num_rows in self.step_sizes)

    @property
    def num_rows(self) -> int:
        """Number of table rows, including the padding's."""
        return self.num_seats + 1

    @property
    def width(self) -> int:
        """Tokens of a row, with room for a step's nodes."""
        # Room for a posted step that exceeds the maximum length, and for the step planned behind
        # it.
        return self.max_model_len + 2 * max(MAX_QUERY_LEN, 1 + self.num_draft_nodes)

    @property
    def num_columns(self) -> int:
        """Blocks of a row."""
        return -(-self.width // self.block_size)

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The views of the memory, in order: those of seats, then those of the current step."""
        max_seqs = max(num_seqs for num_seqs, _, _ in self.step_sizes)
        max_rows = self.max_rows
        widths = {
            "tokens": self.width,
            "tables": self.num_columns,
            "settings": NUM_SETTINGS,
            "draft_tokens": self.num_draft_nodes,
            "draft_parents": self.num_draft_nodes,
            "least_probs": 1,
        }
        if self.has_edits:
            widths |= {
                "edits": NUM_WORDS,
                "bias_ids": MAX_BIASES,
                "biases": MAX_BIASES,
                "ends": MAX_ENDS,
            }
        masked = {"masks": (max_rows,)} if self.has_edits else {}
        return {
            **{name: (self.num_rows, width) for name, width in widths.items()},
            "lengths": (self.num_rows,),
            "draft_counts": (self.num_rows,),
            "appends": (1,),
            "own_drafts": (1,),
            "num_kept": (1,),
            "seats": (max_seqs,),
            "starts": (max_seqs + 1,),
            "num_nodes": (max_seqs,),
            "room": (max_seqs,),
            "row_seq": (max_rows,),
            **masked,
            "node_tokens": (max_rows,),
            "parents": (max_rows,),
        }

    @property
    def num_words(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.parts.values())


class DeviceSeats:
    """One row per seat, and one for padding: a mirror of the rank's `Seats`."""

    def __init__(self, sizes: SeatSizes, device: torch.device) -> None:
        assert sizes.num_words < 1 << 31, sizes
        self.sizes, self.device = sizes, device
        self.kinds = SeatKinds(
            sizes.num_seats, sizes.num_draft_nodes, has_edits=sizes.has_edits, p_min=sizes.p_min
        )
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
        self.appends = views["appends"]  # [1], whether the step appends the tokens that it emits
        # A head's drafts: tokens and parents [num_rows, num_draft_nodes], numbers [num_rows].
        self.drafts = views["draft_tokens"], views["draft_parents"]
        self.draft_counts = views["draft_counts"]
        self.least_probs = views["least_probs"].view(torch.float32)[:, 0]  # [num_rows], likewise
        self._views = views
        self.edits: EditTables | None = None
        self._counts: TokenCounts | None = None
        if sizes.has_edits:
            self._counts = TokenCounts(sizes.num_rows, sizes.vocab_size, device)
            names = ("edits", "bias_ids", "biases", "ends")
            words, bias_ids, biases, ends = (views[name] for name in names)
            masks = torch.zeros(
                (sizes.max_rows, sizes.mask_words), dtype=torch.int32, device=device
            )
            self.edits = EditTables(words, bias_ids, biases, ends, self._counts.table, masks)
            neutral = np.array([(1, 0, 0, 0, -1, 0, 0)], EDIT_WORDS).view(np.int32)
            self.edits.words.copy_(torch.from_numpy(neutral))
        self.tables.fill_(sizes.num_blocks)
        self.lengths[-1:].fill_(1)
        self._writes: list[tuple[IntArray, IntArray]] = []  # (addresses, values)
        self._masks: IntArray | None = None  # [num_masked, mask_words], of the staged step

    # -- the current step, as the device step reads it

    def staged(self, shape: StepShape) -> StagedStep:
        """Returns the step whose rows are to be laid out."""
        views, num_seqs, num_rows = self._views, shape.num_seqs, shape.num_rows
        return StagedStep(
            tokens=self.tokens,
            tables=self.tables,
            settings=self.settings,
            lengths=self.lengths,
            drafts=self.drafts,
            draft_counts=self.draft_counts,
            own_drafts=views["own_drafts"],
            seats=views["seats"][:num_seqs],
            query_start=views["starts"][: num_seqs + 1],
            num_nodes=views["num_nodes"][:num_seqs],
            room=self.step_room(shape),
            row_seq=views["row_seq"][:num_rows],
            nodes=(views["node_tokens"][:num_rows], views["parents"][:num_rows]),
            max_nodes=shape.num_nodes,
            block_size=self.sizes.block_size,
            spare_slot=self.sizes.spare_slot,
        )

    def place_rows(self, shape: StepShape) -> None:
        """Assigns rows to the seats' own drafts, in order, until the rows are used up."""
        views, num_seqs, query_len = self._views, shape.num_seqs, shape.query_len
        starts, row_seq = views["starts"][: num_seqs + 1], views["row_seq"][: shape.num_rows]
        held = self.draft_counts.index_select(0, views["seats"][:num_seqs].long())
        counts = held.minimum(self.step_room(shape)).long()
        left = shape.num_rows - num_seqs - (counts.cumsum(0) - counts)
        lens = 1 + counts.minimum(left.clamp(min=0))
        room = (query_len - lens).flip(0)  # for padding, as in `padding`
        left = shape.num_rows - lens.sum() - (room.cumsum(0) - room)
        lens = lens + left.clamp(min=0).minimum(room).flip(0)
        placed = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
        placed = torch.where(views["own_drafts"] > 0, placed, starts)
        owners = torch.searchsorted(
            placed[1:].contiguous(), torch.arange(shape.num_rows, device=self.device), right=True
        )
        starts.copy_(placed)
        row_seq.copy_(owners)

    @property
    def num_kept(self) -> Tensor:  # [1] int32
        """Number of nodes to keep among all drafts of the current step."""
        return self._views["num_kept"]

    def step_room(self, shape: StepShape) -> Tensor:  # [num_seqs] int32
        """Returns the maximum number of nodes per sequence."""
        return self._views["room"][: shape.num_seqs]

    def step_masks(self, shape: StepShape) -> Tensor:  # [num_rows] int32
        """Returns the index of each row's mask; -1: none."""
        return self._views["masks"][: shape.num_rows]

    # -- changes by the host

    def open(self, opening: Opening) -> None:
        """Queues the row of a request that takes a seat."""
        seat, settings, num_tokens = opening.seat, opening.settings, len(opening.tokens)
        if seat >= self.sizes.num_seats:
            return
        assert num_tokens <= self.sizes.width, (num_tokens, self.sizes)
        self.kinds.open(opening)
        cuts = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        rows = {
            "settings": np.array([(settings.seed, *cuts)], _SETTINGS).view(np.int32),
            "least_probs": np.array([self.kinds.least_prob(settings)], np.float32).view(np.int32),
        }
        if self._counts is not None:
            self._counts.open(opening)
            rows |= edit_rows(opening, self.sizes.vocab_size)
        for name, row in rows.items():
            self._write(name, seat * len(row) + np.arange(len(row)), row)
        first = seat * self.sizes.width
        self._write("tokens", first + np.arange(num_tokens), opening.tokens)
        self._write("lengths", np.full(1, seat), np.full(1, num_tokens))

    def set_blocks(self, blocks: IntArray) -> None:  # [num_blocks, 3]
        """Queues new entries of block tables: (seat, index, block)."""
        seats, index, values = blocks[blocks[:, 0] < self.sizes.num_seats].T
        self._write("tables", seats * self.sizes.num_columns + index, values)

    def extend(
        self,
        seats: IntArray,  # [num_seqs]
        old: IntArray,  # [num_seqs], number of tokens known before
        counts: IntArray,  # [num_seqs]
        tokens: IntArray,  # [sum of counts]
    ) -> None:
        """Queues tokens that became known."""
        known = seats < self.sizes.num_seats
        if not known.all():
            tokens = tokens[np.repeat(known, counts)]
            seats, counts, old = seats[known], counts[known], old[known]
        if self._counts is not None:
            self._counts.extend(np.repeat(seats, counts), tokens)
        begin = seats * self.sizes.width + old
        self._write("tokens", np.repeat(begin, counts) + tree.chains(counts) + 1, tokens)
        self._write("lengths", seats, old + counts)

    def put_drafts(self, seats: IntArray, drafts: NextDrafts | None) -> None:  # [num_seqs]
        """Queues what a head drafted on the host path, replacing the seats' drafts."""
        width = self.sizes.num_draft_nodes
        known = seats < self.sizes.num_seats
        if not width or not known.any():
            return
        counts = np.zeros(len(seats), np.int32) if drafts is None else np.diff(drafts.start)
        self._write("draft_counts", seats[known], np.minimum(counts, width)[known])
        if drafts is None:
            return
        node = tree.chains(counts) + 1
        kept = known.repeat(counts) & (node < width)
        place = (seats.repeat(counts) * width + node)[kept]
        self._write("draft_tokens", place, drafts.tokens[kept])
        self._write("draft_parents", place, drafts.parents[kept])

    def read_drafts(
        self,
        seats: IntArray,  # [num_seqs]
        room: IntArray,  # [num_seqs]
    ) -> list[Draft]:
        """Returns the drafts of the seats, each cut to its room; waits for the device."""
        who = _sent(seats.astype(np.int64), self.device)
        held = (self.draft_counts, *self.drafts)
        counts, tokens, parents = (each.index_select(0, who).cpu().numpy() for each in held)
        ends = np.minimum(counts, room).tolist()
        return [Draft(tokens[row, :end], parents[row, :end]) for row, end in enumerate(ends)]

    def stage(self, plan: StepPlan, shape: StepShape) -> IntArray:  # [num_seqs of the shape + 1]
        """Queues the plan of a device step, padded to its shape; returns the first rows."""
        num_seqs, drafts = len(plan.seats), plan.drafts
        seats = np.full(shape.num_seqs, self.sizes.num_seats, dtype=np.int32)
        counts, room, lens = np.zeros_like(seats), np.zeros_like(seats), np.zeros_like(seats)
        seats[:num_seqs], room[:num_seqs] = plan.seats, plan.max_nodes
        places_rows = plan.own_drafts and plan.num_kept >= 0  # the device does it
        lens[:num_seqs] = 1 if places_rows else self.kinds.row_lens(plan)
        starts = starts_of(lens + padding(lens, shape))
        parts: dict[str, NDArray[Any]] = {
            "seats": seats,
            "starts": starts,
            "room": room,
            "row_seq": np.repeat(np.arange(shape.num_seqs), np.diff(starts)),
            "appends": np.full(1, plan.appends),
            "own_drafts": np.full(1, plan.own_drafts),
            "num_kept": np.full(1, plan.num_kept if plan.num_kept >= 0 else self.sizes.num_words),
        }
        if drafts is not None and len(drafts.tokens):
            counts[:num_seqs] = drafts.num_nodes
            before = tree.chains(drafts.num_nodes)
            at = np.repeat(starts[:num_seqs], drafts.num_nodes) + before + 2
            self._write("node_tokens", at, drafts.tokens)
            parents = before if drafts.parents is None else drafts.parents
            self._write("parents", at, parents)
        if self.edits is not None and shape.sampler is Sampler.SAMPLED:
            parts["masks"] = self._masked_rows(drafts, starts[:num_seqs], shape.num_rows)
        for name, values in (parts | {"num_nodes": counts}).items():
            self._write(name, np.arange(len(values), dtype=np.int32), values)
        return starts

    def _masked_rows(
        self,
        drafts: JoinedDrafts | None,
        first: IntArray,  # [num_seqs], rows of the roots
        num_rows: int,
    ) -> IntArray:  # [num_rows]
        """Queues a step's masks; returns the index of each row's mask."""
        found = np.full(num_rows, -1, dtype=np.int32)
        if drafts is None or drafts.masks is None:
            return found
        lens = drafts.num_nodes + 1  # logit rows, which have no padding between them
        rows = np.repeat(first, lens) + tree.chains(lens) + 1
        masks = drafts.masks
        found[rows[masks.rows]] = np.arange(len(masks.rows))
        self._masks = masks.bits[:, : self.sizes.mask_words]
        return found

    def flush(self) -> None:
        """Sends all queued changes: one copy, one write, and another copy of masks."""
        if self._counts is not None:
            self._counts.flush()
        if self._masks is not None and self.edits is not None:
            held = self.edits.masks[: len(self._masks)]
            held.copy_(_sent(np.ascontiguousarray(self._masks), self.device))
            self._masks = None
        if not self._writes:
            return
        addresses, values = (np.concatenate(column) for column in zip(*self._writes, strict=True))
        self._writes.clear()
        # Later writes win, regardless of the order in which a device executes them.
        _, last = np.unique(addresses[::-1], return_index=True)
        kept = len(addresses) - 1 - last
        packed = _sent(np.stack([addresses[kept], values[kept]]), self.device)
        self.memory.index_copy_(0, packed[0].long(), packed[1])

    def _write(self, name: str, index: NDArray[np.integer], values: NDArray[Any]) -> None:
        addresses = (index + self._begin[name]).astype(np.int32, copy=False)
        self._writes.append((addresses, values.astype(np.int32, copy=False)))


def padding(
    lens: IntArray,  # [num_seqs of the shape], required rows
    shape: StepShape,
) -> IntArray:  # [num_seqs of the shape]
    """Returns the additional rows of each sequence that fill the shape.

    The last sequences get them first; these are padding if there is any.
    """
    room = shape.query_len - lens[::-1]
    left = shape.num_rows - int(lens.sum()) - (np.cumsum(room) - room)
    return ints(np.clip(left, 0, room)[::-1])


BYTES_PER_GRAPH = 8 << 20  # used by the driver for the launches of one captured shape
BYTES_PER_LOGIT = 28  # logits, edited and scaled logits, and probabilities, with a margin
BYTES_PER_GATHERED_LOGIT = 8  # the ranks' parts and their concatenation, at most in float32
STATES_PER_ROW = 32  # concurrent activations of a row, in units of the hidden size


def reserved_bytes(sizes: SeatSizes, info: ModelInfo, num_ranks: int = 1) -> int:
    """Returns an upper bound of the memory besides weights and KV cache, from sizes alone.

    It includes seats, counts of tokens, features for separate heads, the largest shape's
    activations, which all shapes share, and the graphs.
    """
    shapes = all_shapes(sizes.num_seats, sizes.num_draft_nodes)
    per_logit = BYTES_PER_LOGIT + (BYTES_PER_GATHERED_LOGIT if num_ranks > 1 else 0)
    per_row = info.vocab_size * per_logit + STATES_PER_ROW * info.hidden_size * 4
    counts = 0
    if sizes.has_edits:
        counts = sizes.count_bytes + 4 * sizes.max_rows * sizes.mask_words
    fed = 4 * sizes.max_rows * len(sizes.fed_layers) * info.hidden_size
    return (
        4 * sizes.num_words
        + counts
        + fed
        + shapes[0].num_rows * per_row
        + len(shapes) * BYTES_PER_GRAPH
    )


def seat_settings(seats: DeviceSeats, who: Tensor) -> DeviceSettings:  # [num_rows] int64
    """Returns the sampling settings of the seats `who`."""
    words = seats.settings.index_select(0, who)

    def real(column: int) -> Tensor:
        return words[:, column : column + 1].view(torch.float32)[:, 0].contiguous()

    return DeviceSettings(
        seeds=words[:, :2].view(torch.int64)[:, 0].contiguous(),
        temperature=real(2),
        top_k=words[:, 3].contiguous(),
        top_p=real(4),
        min_p=real(5),
    )


def walk_of(
    seats: DeviceSeats,
    layout: DeviceLayout,
    shape: StepShape,
    outcome: Tensor,  # [num_rows] int32
    *,
    counts_tokens: bool = False,
) -> DeviceWalk:
    """Returns the inputs of the walk, and the seats and the outcome that it writes."""
    plan, tables = layout.plan, seats.edits
    return DeviceWalk(
        token_ids=plan.token_ids,
        parents=layout.parents,
        ancestors=plan.ancestors,
        depths=layout.depths,
        slots=layout.slots,
        query_start=plan.query_start,
        context_lens=plan.context_lens,
        seats=layout.seats,
        appends=seats.appends,
        tokens=seats.tokens,
        lengths=seats.lengths,
        counts=tables.counts if counts_tokens and tables is not None else None,
        outcome=outcome,
        spare_slot=seats.sizes.spare_slot,
        query_len=shape.query_len,
    )


# -- draws over a vocabulary that is divided among ranks
#
# With greedy draws or temperature alone, the token with the highest score is drawn, and no score
# depends on the other tokens. So each rank draws from its own part, and the ranks exchange two
# numbers per row. Ties go to the lower token, as over the whole vocabulary.
#
# Top-k, top-p, min-p, penalties and log-probabilities need all logits of a row. For them, the
# ranks divide the rows: each receives whole rows of its share from the others, draws them, and
# sends the tokens to all. The result is exact for all settings, and every rank moves and computes
# only a part of what a gather of all rows on every rank would.


@dataclass(frozen=True, slots=True)
class Share:
    """The rows that this rank draws; equally many on every rank, with the last row repeated."""

    rows: Tensor | None  # [num_rows] int64; None: all rows, on every rank

    @staticmethod
    def of(num_rows: int, collective: Collective, device: torch.device) -> Share:
        if collective.size == 1:
            return Share(None)
        count = -(-num_rows // collective.size)
        begin = collective.rank * count
        rows = torch.arange(begin, begin + count, device=device)
        return Share(rows.clamp(max=num_rows - 1))

    def take(self, values: Tensor) -> Tensor:  # [num_rows, ...] of all
        """Returns the values of its own rows."""
        return values if self.rows is None else values.index_select(0, self.rows)


Part = tuple[Tensor, Tensor]
"""Each row's best score on one rank, float32, and its token; each [num_rows]."""


def best_of_ranks(part: Part, collective: Collective) -> Tensor:  # [num_rows]
    """Returns the best of all ranks' tokens; the same on every rank."""
    scores, tokens = part
    if collective.size == 1:
        return tokens
    own = torch.stack([scores.view(torch.int32), tokens.to(torch.int32)], dim=1)[:, None]
    every = collective.all_gather(own, dim=1)  # [num_rows, size, 2]
    best = every[:, :, 0].contiguous().view(torch.float32).argmax(1, keepdim=True)
    return every[:, :, 1].gather(1, best)[:, 0]
