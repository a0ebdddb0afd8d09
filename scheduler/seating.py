"""Who sits where: seats of running sequences at a model's ranks, and the plans sent to them.

Ranks keep what they were sent under the seat (`workers/seats.py`), so a plan carries differences
only.
"""

from __future__ import annotations

import heapq
from collections import abc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .sequence import PagedTokens
from .types import NO_MOVES, IntArray, Opening, StepPlan, ints


class Row(NamedTuple):
    """One sequence's part in a step: `num_chunk` known tokens, room for `max_nodes` nodes."""

    sequence: PagedTokens
    num_chunk: int
    max_nodes: int
    is_ahead: bool = False  # planned before the outcome of the step before: a token from the seat


class Seating:
    """Seats are numbered from 0, lowest free one first, so that ranks keep few rows.

    Args:
        ranks_append: whether ranks append to their seats what they emit.
    """

    def __init__(self, *, ranks_append: bool = False) -> None:
        self.ranks_append = ranks_append
        self._free: list[int] = []  # heap
        self._num_seats = 0  # ever taken
        self._closings: list[int] = []

    def plan(
        self,
        step: int,
        rows: abc.Sequence[Row],
        moves: abc.Sequence[tuple[int, int]] = (),
        thinking: NDArray[np.bool_] | None = None,  # [num_seqs]
        *,
        own_drafts: bool = False,
    ) -> StepPlan:
        """The message for `rows`; what it carries counts as known to the ranks."""
        openings: list[Opening] = []
        tokens: list[IntArray] = []
        blocks: list[tuple[int, int, int]] = []
        table: list[tuple[int, int, int, int]] = []
        for sequence, num_chunk, max_nodes, is_ahead in rows:
            if sequence.seat < 0:
                openings.append(self._open(sequence))
            begin, seat = -1 if is_ahead else sequence.num_computed, sequence.seat
            end, num_sent = begin + num_chunk, sequence.num_sent_tokens
            if end > num_sent:
                tokens.append(sequence.tokens.part(num_sent, end))
                sequence.num_sent_tokens = end
            num_blocks = len(sequence.blocks)
            if num_blocks != sequence.num_sent_blocks:
                for index in range(sequence.num_sent_blocks, num_blocks):
                    blocks.append((seat, index, sequence.blocks[index]))
                sequence.num_sent_blocks = num_blocks
            table.append((seat, begin, num_chunk, max_nodes))
        columns = ints(table).reshape(-1, 4).T.copy()
        closings: list[int] = []
        if self._closings:
            opened = {opening.seat for opening in openings}
            closings = [seat for seat in self._closings if seat not in opened]
            if rows:  # a plan without rows is never sent
                self._closings.clear()
        return StepPlan(
            step=step,
            seats=columns[0],
            context_lens=columns[1],
            chunk_lens=columns[2],
            max_nodes=columns[3],
            tokens=np.concatenate(tokens) if tokens else ints([]),
            blocks=ints(blocks).reshape(-1, 3),
            kv_moves=ints(moves) if moves else NO_MOVES,
            openings=tuple(openings),
            closings=ints(closings),
            thinking=thinking,
            own_drafts=own_drafts,
            appends=self.ranks_append,
        )

    def leave(self, sequence: PagedTokens) -> None:
        """Frees the seat of `sequence`, if it has one."""
        if sequence.seat >= 0:
            heapq.heappush(self._free, sequence.seat)
            self._closings.append(sequence.seat)
            sequence.seat = -1

    def reset(self, sequences: abc.Iterable[PagedTokens]) -> None:
        """All of `sequences` are opened anew: what the ranks keep of them is unknown."""
        for sequence in sequences:
            self.leave(sequence)

    def _open(self, sequence: PagedTokens) -> Opening:
        if self._free:
            sequence.seat = heapq.heappop(self._free)
        else:
            sequence.seat = self._num_seats
            self._num_seats += 1
        sequence.num_sent_tokens, sequence.num_sent_blocks = sequence.num_tokens, 0
        return Opening(sequence.seat, sequence.tokens.view, sequence.num_prompt, sequence.settings)
