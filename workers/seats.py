"""A rank's rows of running requests: tokens, block tables and sampling settings, by seat.

The scheduler's sequences are authoritative. Seats are a copy that each `StepPlan` updates, so that
no message carries a context. Their arrays grow with the number of seats and the contexts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..scheduler import tree
from ..scheduler.types import (
    NO_INTS,
    NO_MOVES,
    NO_SAVES,
    Bias,
    Draft,
    DraftProbs,
    IntArray,
    JoinedDrafts,
    Masks,
    Opening,
    Penalties,
    SamplingRows,
    SeatSettings,
    StepInput,
    StepPlan,
    Verdict,
    ints,
    starts_of,
)

if TYPE_CHECKING:
    from .device_step.seats import DeviceSeats

_NO_ROW = np.iinfo(np.int32).max  # greater than any number of tokens


def gather(
    drafts: Sequence[Draft],  # [num_seqs]
    samples: NDArray[np.bool_],  # [num_seqs]
) -> JoinedDrafts | None:
    """Concatenates the drafts of a step's sequences; returns None if they are all empty."""
    given = [draft for draft in drafts if draft is not tree.EMPTY]
    if not given:  # the common case of a step without a drafter
        return None
    counts, windows, has_masks, has_probs = [], [], False, False
    for draft in drafts:
        counts.append(len(draft.tokens))
        windows.append(draft.num_window)
        has_masks |= draft.masks is not None
        has_probs |= draft.probs is not None
    masks = _join_masks(drafts, samples) if has_masks else None
    if masks is None and not any(counts):
        return None
    has_branches = False
    for draft in drafts:
        has_branches |= not tree.is_chain(draft.parents)
    return JoinedDrafts(
        tokens=np.concatenate([draft.tokens for draft in drafts]),
        num_nodes=ints(counts),
        parents=np.concatenate([draft.parents for draft in drafts]) if has_branches else None,
        probs=_join_probs(drafts) if has_probs else None,
        num_window=ints(windows) if any(windows) else None,
        masks=masks,
    )


def part_of(
    plan: StepPlan,
    chosen: NDArray[np.bool_],  # [num_seqs]
    samples: NDArray[np.bool_],  # [num_seqs], of the whole plan
) -> StepPlan:
    """Returns the chosen sequences of an applied plan, without its changes to seats."""
    drafts = plan.drafts
    if drafts is not None:
        of_node = chosen.repeat(drafts.num_nodes)
        of_row = chosen.repeat(np.where(samples, drafts.num_nodes + 1, 0))
        probs, masks = drafts.probs, drafts.masks
        if masks is not None:
            kept, numbers = of_row[masks.rows], np.cumsum(of_row) - 1
            masks = Masks(ints(numbers[masks.rows[kept]]), masks.bits[kept])
        drafts = JoinedDrafts(
            tokens=drafts.tokens[of_node],
            num_nodes=drafts.num_nodes[chosen],
            parents=None if drafts.parents is None else drafts.parents[of_node],
            probs=None if probs is None else DraftProbs(probs.ids[of_node], probs.probs[of_node]),
            num_window=None if drafts.num_window is None else drafts.num_window[chosen],
            masks=masks if masks is not None and len(masks.rows) else None,
        )
    return replace(
        plan,
        seats=plan.seats[chosen],
        context_lens=plan.context_lens[chosen],
        chunk_lens=plan.chunk_lens[chosen],
        max_nodes=plan.max_nodes[chosen],
        tokens=NO_INTS,
        blocks=plan.blocks[:0],
        kv_moves=NO_MOVES,
        openings=(),
        closings=NO_INTS,
        drafts=drafts,
        thinking=None if plan.thinking is None else plan.thinking[chosen],
    )


def lay_out(
    *,
    token_ids: IntArray,  # [num_tokens], known
    query_start: IntArray,  # [num_seqs + 1], of the known tokens
    context_lens: IntArray,  # [num_seqs]
    block_tables: IntArray,  # [num_seqs, max_blocks]
    samples: NDArray[np.bool_],  # [num_seqs]
    max_nodes: IntArray,  # [num_seqs]
    sampling: SamplingRows,
    drafts: JoinedDrafts | None,
    block_size: int,
    step: int = 0,
    kv_moves: IntArray = NO_MOVES,  # [num_moves, 2]
    next_tokens: IntArray | None = None,  # [num_seqs]
    adapters: IntArray | None = None,  # [num_seqs]
    seats: IntArray | None = None,  # [num_seqs]
    state_loads: IntArray = NO_MOVES,  # [num_loads, 2]
    state_saves: IntArray = NO_SAVES,  # [num_saves, 3]
) -> StepInput:
    """Returns a step of known tokens, joined with the draft nodes.

    It uses numpy over the flat tokens of all sequences: no Python statement runs per sequence.
    """
    num_seqs, query_lens = len(context_lens), query_start[1:] - query_start[:-1]
    known_lens = context_lens + query_lens
    draft_start = np.zeros(num_seqs + 1, dtype=np.int32)
    if drafts is not None:
        num_nodes = drafts.num_nodes
        assert (num_nodes <= max_nodes).all(), (num_nodes, max_nodes)
        query_lens = query_lens + num_nodes
        query_start, draft_start = starts_of(query_lens), starts_of(num_nodes)
    total = int(query_start[-1])
    owner, index = np.arange(num_seqs), context_lens
    if total != num_seqs:  # not one token each
        owner = owner.repeat(query_lens)
        index = np.arange(total, dtype=np.int32) + (context_lens - query_start[:-1])[owner]
    block = index // block_size
    slots = block_tables[owner, block] * block_size + (index - block * block_size)
    tokens, positions, parents = token_ids, index, NO_INTS
    if drafts is not None and total > len(tokens):
        parents = tree.chains(num_nodes) if drafts.parents is None else drafts.parents
        tokens = np.empty(total, dtype=np.int32)
        is_node = index >= known_lens[owner]
        tokens[~is_node], tokens[is_node] = token_ids, drafts.tokens
        if drafts.parents is not None:
            positions, roots = index.copy(), (known_lens - 1).repeat(num_nodes)
            positions[is_node] = roots + tree.flat_depths(parents, draft_start, num_nodes)
    # The chunk's last token (the root) and the nodes are sampled.
    from_root = index >= np.where(samples, known_lens - 1, _NO_ROW)[owner]
    return StepInput(
        step=step,
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=block_tables,
        samples=samples,
        draft_tokens=NO_INTS if drafts is None else drafts.tokens,
        draft_parents=parents,
        draft_start=draft_start,
        draft_probs=None if drafts is None else drafts.probs,
        rows=from_root.nonzero()[0].astype(np.int32),
        kv_moves=kv_moves,
        sampling=sampling,
        num_window=None if drafts is None else drafts.num_window,
        max_nodes=max_nodes,
        next_tokens=next_tokens,
        masks=None if drafts is None else drafts.masks,
        adapters=adapters,
        seats=seats,
        state_loads=state_loads,
        state_saves=state_saves,
    )


def sample_step(
    tokens: Sequence[int],
    context_len: int,
    table: Sequence[int],
    draft: Draft = tree.EMPTY,
    block_size: int = 1,
) -> StepInput:
    """Returns a step of one greedy sequence that computes every row's logits."""
    zeros, ones = np.zeros(1, np.float32), np.ones(1, np.float32)
    none = ints([0])
    samples = np.ones(1, np.bool_)
    step = lay_out(
        token_ids=ints(tokens),
        query_start=ints([0, len(tokens)]),
        context_lens=ints([context_len]),
        block_tables=ints([table]),
        samples=samples,
        max_nodes=ints([draft.num_nodes]),
        sampling=SamplingRows(
            zeros, none, ones, zeros, np.zeros(1, np.int64), none, none - np.int32(1)
        ),
        drafts=gather([draft], samples),
        block_size=block_size,
    )
    return replace(step, rows=ints(np.arange(len(step.token_ids))))


def _join_masks(drafts: Sequence[Draft], samples: NDArray[np.bool_]) -> Masks | None:
    """Joins the masks of sampled sequences, by logit row of the step."""
    parts: list[Masks] = []
    num_rows = 0
    for draft, sampled in zip(drafts, samples.tolist(), strict=True):
        if sampled and draft.masks is not None:
            parts.append(Masks(draft.masks.rows + num_rows, draft.masks.bits))
        num_rows += (draft.num_nodes + 1) * sampled
    if not parts:
        return None
    rows = np.concatenate([part.rows for part in parts])
    return Masks(ints(rows), np.concatenate([part.bits for part in parts]))


def _join_probs(drafts: Sequence[Draft]) -> DraftProbs | None:
    """Joins the drafts' probabilities, padded to one width; zeros for deterministic nodes."""
    widths = [draft.probs.ids.shape[1] for draft in drafts if draft.probs is not None]
    width = max(widths)
    if width == 0:
        return None
    total = sum(draft.num_nodes for draft in drafts)
    ids = np.zeros((total, width), dtype=np.int32)
    probs = np.zeros((total, width), dtype=np.float32)
    begin = 0
    for draft in drafts:
        if draft.probs is not None:
            top = draft.probs.ids.shape[1]
            ids[begin : begin + draft.num_nodes, :top] = draft.probs.ids
            probs[begin : begin + draft.num_nodes, :top] = draft.probs.probs
        begin += draft.num_nodes
    return DraftProbs(ids, probs)


_COLUMNS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.int64),
        ("num_logprobs", np.int32),
        ("num_prompt_logprobs", np.int32),
        ("min_tokens", np.int32),
        ("pools", np.bool_),
        ("min_prob", np.float32),
        ("num_prompt", np.int32),  # of the opening; the others are of its settings
    ]
)


class _History:
    """Token counts of a request with penalties."""

    def __init__(self, prompt: IntArray, output: IntArray) -> None:
        self.prompt_ids = np.unique(prompt)
        self._counts: dict[int, int] = {}
        self.extend(output)

    def extend(self, tokens: IntArray) -> None:
        for token in tokens.tolist():
            self._counts[token] = self._counts.get(token, 0) + 1

    def penalties(self, row: int, settings: SeatSettings) -> Penalties:
        return Penalties(
            row=row,
            repetition=settings.repetition_penalty,
            presence=settings.presence_penalty,
            frequency=settings.frequency_penalty,
            prompt_ids=self.prompt_ids,
            output_ids=ints(list(self._counts)),
            output_counts=ints(list(self._counts.values())),
        )


class Seats:
    """Sequence data with one row per seat.

    Args:
        block_size: tokens in a KV block.
        mirror: a copy on a device, which receives every change.
        adapters: numbers (from 1) of the model's adapters, by name.
    """

    def __init__(
        self,
        block_size: int,
        mirror: DeviceSeats | None = None,
        adapters: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._block_size = block_size
        self._mirror, self._numbers = mirror, adapters
        self._tokens = np.zeros((1, 64), dtype=np.int32)  # [num_seats, max_tokens]
        self._tables = np.zeros((1, 4), dtype=np.int32)  # [num_seats, max_blocks]
        self._num_tokens = np.zeros(1, dtype=np.int32)  # [num_seats]
        self._columns = np.zeros(1, dtype=_COLUMNS)  # [num_seats]
        self._adapters = np.zeros(1, dtype=np.int32)  # [num_seats]; 0: no adapter
        self._settings: dict[int, SeatSettings] = {}  # of occupied seats
        self._histories: dict[int, _History] = {}  # of seats with penalties
        self._packed: tuple[bytes, SamplingRows] | None = None  # settings of the last step's seats

    def expand(self, plan: StepPlan) -> StepInput:
        """Applies a plan's changes and returns its step."""
        self.apply(plan)
        return self.lay_out(plan)

    def lay_out(self, plan: StepPlan) -> StepInput:
        """Returns the step of an applied plan."""
        seats, context_lens, chunk_lens = plan.seats, plan.context_lens, plan.chunk_lens
        ahead = context_lens < 0
        if np.count_nonzero(ahead):
            context_lens = np.where(ahead, self._num_tokens[seats] - 1, context_lens)
        ends, query_start = context_lens + chunk_lens, starts_of(chunk_lens)
        if query_start[-1] == len(seats):  # one token each
            tokens = self._tokens[seats, context_lens]
        else:
            begins = (context_lens - query_start[:-1]).repeat(chunk_lens)
            index = np.arange(query_start[-1]) + begins
            tokens = self._tokens[seats.repeat(chunk_lens), index]
        samples = ends == self._num_tokens[seats]
        following = np.full(len(seats), -1, dtype=np.int32)
        if np.count_nonzero(samples) < len(seats):
            partial = ~samples
            following[partial] = self._tokens[seats[partial], ends[partial]]
        longest = int((ends + plan.max_nodes).max(initial=0))
        width = min(-(-longest // self._block_size), self._tables.shape[1])
        return lay_out(
            token_ids=tokens,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._tables[seats, :width],
            samples=samples,
            max_nodes=plan.max_nodes,
            sampling=self._sampling(plan),
            drafts=plan.drafts,
            block_size=self._block_size,
            step=plan.step,
            kv_moves=plan.kv_moves,
            next_tokens=following,
            adapters=self._adapters_of(seats) if self._numbers else None,
            seats=seats,
            state_loads=plan.state_loads,
            state_saves=plan.state_saves,
        )

    def _adapters_of(self, seats: IntArray) -> IntArray | None:  # [num_seqs], alike
        found: IntArray = self._adapters[seats]
        return found if found.any() else None

    def samples(self, plan: StepPlan) -> NDArray[np.bool_]:  # [num_seqs]
        """Returns which sequences emit: those whose chunks end with the last known token."""
        known = self._num_tokens[plan.seats]
        ends: NDArray[np.bool_] = plan.context_lens + plan.chunk_lens == known
        return ends | (plan.context_lens < 0)

    def tokens(self, seat: int, begin: int, end: int) -> IntArray:  # [num_tokens]
        """Returns the known tokens [begin, end) of a seat."""
        return self._tokens[seat, begin:end]

    def tables(self, seats: IntArray, num_tokens: int) -> IntArray:  # [num_seqs, max_blocks]
        """Returns block tables up to this number of tokens; missing blocks are undefined."""
        return self._tables[seats, : -(-num_tokens // self._block_size)]

    def known_lens(self, plan: StepPlan) -> IntArray:  # [num_seqs]
        """Returns the number of known tokens of the plan's seats."""
        return self._num_tokens[plan.seats]

    def append(self, plan: StepPlan, verdict: Verdict, *, is_mirrored: bool = False) -> None:
        """Appends the tokens that a step emitted; `is_mirrored`: the mirror already has them."""
        mirror = None if is_mirrored else self._mirror
        self._extend(plan.seats, verdict.num_emitted, verdict.emitted, mirror)

    def apply(self, plan: StepPlan) -> None:
        """Applies a plan's changes."""
        for seat in plan.closings.tolist():
            self._settings.pop(seat, None)
            self._histories.pop(seat, None)
        for opening in plan.openings:
            self._open(opening)
        if len(plan.blocks):
            seats, index, blocks = plan.blocks.T
            self._tables = _room_for(self._tables, 0, int(index.max()) + 1)
            self._tables[seats, index] = blocks
            if self._mirror is not None:
                self._mirror.set_blocks(plan.blocks)
        if len(plan.tokens):  # tokens that became known since the seats' last plan
            ends = plan.context_lens + plan.chunk_lens
            counts: IntArray = np.maximum(ends - self._num_tokens[plan.seats], 0)
            self._extend(plan.seats, counts, plan.tokens, self._mirror)

    def _open(self, opening: Opening) -> None:
        seat, settings, num_tokens = opening.seat, opening.settings, len(opening.tokens)
        self._tokens = _room_for(self._tokens, seat + 1, num_tokens)
        self._tables = _room_for(self._tables, seat + 1, 0)
        self._num_tokens = _room_for(self._num_tokens, seat + 1)
        self._columns = _room_for(self._columns, seat + 1)
        self._adapters = _room_for(self._adapters, seat + 1)
        self._tokens[seat, :num_tokens] = opening.tokens
        self._num_tokens[seat] = num_tokens
        *names, _ = _COLUMNS.names or ()
        columns = [getattr(settings, name) for name in names]
        self._columns[seat] = (*columns, opening.num_prompt)
        self._settings[seat] = settings
        self._adapters[seat] = self._numbers[settings.adapter] if settings.adapter else 0
        self._histories.pop(seat, None)
        if settings.has_penalties:
            prompt, output = np.split(opening.tokens, [opening.num_prompt])
            self._histories[seat] = _History(prompt, output)
        self._packed = None
        if self._mirror is not None:
            self._mirror.open(opening)

    def _extend(
        self,
        seats: IntArray,  # [num_seqs]
        counts: IntArray,  # [num_seqs]
        tokens: IntArray,  # [sum of counts]
        mirror: DeviceSeats | None,
    ) -> None:
        old, starts = self._num_tokens[seats], starts_of(counts)
        assert starts[-1] == len(tokens), (counts, len(tokens))
        ends = old + counts
        if (longest := int(ends.max())) > self._tokens.shape[1]:
            self._tokens = _room_for(self._tokens, 0, longest)
        rows, index = seats, old
        if not len(tokens) == np.count_nonzero(counts) == len(seats):  # not one token each
            rows = seats.repeat(counts)
            index = np.arange(len(tokens), dtype=np.int32) + (old - starts[:-1]).repeat(counts)
        self._tokens[rows, index] = tokens
        self._num_tokens[seats] = ends
        if mirror is not None:
            mirror.extend(seats, old, counts, tokens)
        if self._histories:
            for row, seat in enumerate(seats.tolist()):
                if seat in self._histories:
                    self._histories[seat].extend(tokens[starts[row] : starts[row + 1]])

    def _sampling(self, plan: StepPlan) -> SamplingRows:
        """Returns settings by row, reused while requests stay and none depends on its history."""
        key = plan.seats.tobytes()
        if self._packed is not None and self._packed[0] == key and plan.thinking is None:
            return self._packed[1]
        seats = plan.seats.tolist()
        columns = self._columns[plan.seats]
        num_output = self._num_tokens[plan.seats] - columns["num_prompt"]
        owed: IntArray = np.maximum(columns["min_tokens"] - num_output, 0)
        scores = np.where(num_output > 0, np.int32(-1), columns["num_prompt_logprobs"])
        scored = bool((scores >= 0).any())
        settings = [self._settings[seat] for seat in seats]
        histories = [(row, seat) for row, seat in enumerate(seats) if settings[row].has_penalties]
        names = ("temperature", "top_k", "top_p", "min_p", "num_logprobs")
        plain: dict[str, Any] = {name: np.ascontiguousarray(columns[name]) for name in names}
        biased = [(row, each) for row, each in enumerate(settings) if len(each.bias_ids)]
        rows = SamplingRows(
            **plain,
            seeds=np.ascontiguousarray(columns["seed"]),
            min_new_tokens=owed,
            ends=tuple([each.ends for each in settings]) if owed.any() else (),
            penalties=tuple(
                [self._histories[seat].penalties(row, settings[row]) for row, seat in histories]
            ),
            biases=tuple([Bias(row, each.bias_ids, each.bias_values) for row, each in biased]),
            thinking=plan.thinking,
            num_prompt_logprobs=scores if scored else None,
            pools=columns["pools"].copy() if columns["pools"].any() else None,
            min_probs=columns["min_prob"].copy() if (columns["min_prob"] >= 0).any() else None,
        )
        fixed = not (histories or rows.ends or scored or plan.thinking is not None)
        self._packed = (key, rows) if fixed else None
        return rows


def _room_for(array: NDArray, num_rows: int, num_columns: int = 0) -> NDArray:  # type: ignore[type-arg]
    """Returns `array`, or a copy with at least twice the rows or columns if it has too few."""
    if num_rows <= array.shape[0] and (array.ndim == 1 or num_columns <= array.shape[1]):
        return array
    wanted = [num_rows, num_columns][: array.ndim]
    shape = [
        held if size <= held else max(size, 2 * held)
        for size, held in zip(wanted, array.shape, strict=True)
    ]
    larger = np.zeros(shape, dtype=array.dtype)
    larger[tuple(slice(held) for held in array.shape)] = array
    return larger
