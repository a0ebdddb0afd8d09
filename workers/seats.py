"""A rank's rows of running requests: tokens, block tables and sampling settings, by seat.

The scheduler's sequences are the truth; seats are a copy of them that each `StepPlan` brings up to
date, so that no message carries a context. They grow as seats and contexts do. Used by the target
and by draft models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..scheduler import joining, tree
from ..scheduler.plan import JoinedDrafts, Opening, SeatSettings, StepPlan
from ..scheduler.types import (
    Bias,
    Draft,
    IntArray,
    KnownTokens,
    NextDrafts,
    Penalties,
    SamplingRows,
    StepInput,
    Verdict,
    ints,
    starts_of,
)

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
        ("num_prompt", np.int32),
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
    """One row per seat.

    Args:
        block_size: tokens in a KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((1, 64), dtype=np.int32)  # [num_seats, max_tokens]
        self._tables = np.zeros((1, 4), dtype=np.int32)  # [num_seats, max_blocks]
        self._num_tokens = np.zeros(1, dtype=np.int32)  # [num_seats]
        self._columns = np.zeros(1, dtype=_COLUMNS)  # [num_seats]
        self._settings: dict[int, SeatSettings] = {}  # of taken seats
        self._histories: dict[int, _History] = {}  # of seats with penalties
        self._packed: tuple[bytes, SamplingRows] | None = None  # settings of the last step's seats
        self._drafts: dict[int, Draft] = {}  # by seat, of a head in this rank

    def expand(self, plan: StepPlan) -> StepInput:
        """Takes in what `plan` changes, and lays the step out."""
        self.apply(plan)
        return self.lay_out(plan)

    def lay_out(self, plan: StepPlan) -> StepInput:
        """The step of a plan that was applied."""
        drafts = self._own_drafts(plan) if plan.own_drafts else plan.drafts
        return joining.join(self._known(plan), drafts, self._block_size)

    def keep_drafts(self, plan: StepPlan, drafts: NextDrafts | None) -> None:
        """Replaces the drafts of the plan's seats by what a head made for the next step."""
        for row, seat in enumerate(plan.seats.tolist()):
            self._drafts.pop(seat, None)
            if drafts is not None:
                span = slice(drafts.start[row], drafts.start[row + 1])
                self._drafts[seat] = Draft(drafts.tokens[span], drafts.parents[span])

    def _own_drafts(self, plan: StepPlan) -> JoinedDrafts | None:
        pairs = zip(plan.seats.tolist(), plan.max_nodes.tolist(), strict=True)
        kept = [tree.truncate(self._drafts.get(seat, tree.EMPTY), room) for seat, room in pairs]
        return joining.gather(kept, np.ones(len(kept), dtype=np.bool_))

    def append(self, plan: StepPlan, verdict: Verdict) -> None:
        """Appends what a step emitted."""
        self._extend(plan.seats, verdict.num_emitted, verdict.emitted)

    def apply(self, plan: StepPlan) -> None:
        """Takes in what `plan` changes."""
        for seat in plan.closings.tolist():
            self._settings.pop(seat, None)
            self._histories.pop(seat, None)
        for opening in plan.openings:
            self._open(opening)
        if len(plan.blocks):
            seats, index, blocks = plan.blocks.T
            self._tables = _room_for(self._tables, 0, int(index.max()) + 1)
            self._tables[seats, index] = blocks
        if len(plan.tokens):
            self._append(plan)

    def _open(self, opening: Opening) -> None:
        seat, settings, num_tokens = opening.seat, opening.settings, len(opening.tokens)
        self._tokens = _room_for(self._tokens, seat + 1, num_tokens)
        self._tables = _room_for(self._tables, seat + 1, 0)
        self._num_tokens = _room_for(self._num_tokens, seat + 1)
        self._columns = _room_for(self._columns, seat + 1)
        self._tokens[seat, :num_tokens] = opening.tokens
        self._num_tokens[seat] = num_tokens
        self._columns[seat] = (
            settings.temperature,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.seed,
            settings.num_logprobs,
            settings.num_prompt_logprobs,
            settings.min_tokens,
            opening.num_prompt,
        )
        self._settings[seat] = settings
        self._histories.pop(seat, None)
        if settings.has_penalties:
            prompt, output = np.split(opening.tokens, [opening.num_prompt])
            self._histories[seat] = _History(prompt, output)
        self._packed = None

    def _append(self, plan: StepPlan) -> None:
        """The tokens that became known since the seats' last plan."""
        old = self._num_tokens[plan.seats]
        counts: IntArray = np.maximum(plan.context_lens + plan.chunk_lens - old, 0)
        self._extend(plan.seats, counts, plan.tokens)

    def _extend(
        self,
        seats: IntArray,  # [num_seqs]
        counts: IntArray,  # [num_seqs]
        tokens: IntArray,  # [sum of counts]
    ) -> None:
        old, starts = self._num_tokens[seats], starts_of(counts)
        assert starts[-1] == len(tokens), (counts, len(tokens))
        ends = old + counts
        self._tokens = _room_for(self._tokens, 0, int(ends.max()))
        rows, index = seats, old
        if not len(tokens) == np.count_nonzero(counts) == len(seats):  # not a token each
            rows = seats.repeat(counts)
            index = np.arange(len(tokens), dtype=np.int32) + (old - starts[:-1]).repeat(counts)
        self._tokens[rows, index] = tokens
        self._num_tokens[seats] = ends
        if self._histories:
            for row, seat in enumerate(seats.tolist()):
                if seat in self._histories:
                    self._histories[seat].extend(tokens[starts[row] : starts[row + 1]])

    def _known(self, plan: StepPlan) -> KnownTokens:
        seats, context_lens, chunk_lens = plan.seats, plan.context_lens, plan.chunk_lens
        ahead = context_lens < 0
        if np.count_nonzero(ahead):
            context_lens = np.where(ahead, self._num_tokens[seats] - 1, context_lens)
        ends, query_start = context_lens + chunk_lens, starts_of(chunk_lens)
        if query_start[-1] == len(seats):  # a token each
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
        return KnownTokens(
            step=plan.step,
            token_ids=tokens,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=self._tables[seats, :width],
            samples=samples,
            max_nodes=plan.max_nodes,
            kv_moves=plan.kv_moves,
            sampling=self._sampling(plan),
            next_tokens=following,
        )

    def _sampling(self, plan: StepPlan) -> SamplingRows:
        """Settings by row; kept while the same requests run and none depends on its history."""
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
        rows = SamplingRows(
            temperature=_column(columns, "temperature"),
            top_k=_column(columns, "top_k"),
            top_p=_column(columns, "top_p"),
            min_p=_column(columns, "min_p"),
            seeds=_column(columns, "seed"),
            min_new_tokens=owed,
            num_logprobs=_column(columns, "num_logprobs"),
            ends=tuple([each.ends for each in settings]) if owed.any() else (),
            penalties=tuple(
                [self._histories[seat].penalties(row, settings[row]) for row, seat in histories]
            ),
            biases=tuple(
                [
                    Bias(row, each.bias_ids, each.bias_values)
                    for row, each in enumerate(settings)
                    if len(each.bias_ids)
                ]
            ),
            thinking=plan.thinking,
            num_prompt_logprobs=scores if scored else None,
        )
        fixed = not (histories or rows.ends or scored or plan.thinking is not None)
        self._packed = (key, rows) if fixed else None
        return rows


def _room_for(array: NDArray, num_rows: int, num_columns: int = 0) -> NDArray:  # type: ignore[type-arg]
    """`array`, or a copy with at least twice the rows or columns if it has too few."""
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


def _column(columns: NDArray[np.void], name: str) -> NDArray:  # type: ignore[type-arg]
    return np.ascontiguousarray(columns[name])
