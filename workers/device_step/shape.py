"""The bucket of a step: a pure function of the plans so far, so that all ranks choose the same.

A shape fixes every size in the device step and every branch that it takes. Steps are padded to one
of the numbers of `ROWS`, counted over all their sequences: at most 12% of the rows are padding from
8 rows on, however the nodes are spread over the sequences. Larger steps, chunks of prompts and
steps with settings that the device step does not compute have no shape: they take the host path.

Where a head drafts on the device, it drafts for every sequence as many nodes: a whole draft or half
of one. Mostly, a step has rows for so many sequences with as many nodes. For sequences of unequal
numbers, there are shapes of many sequences that draft whole, with rows for a quarter or half of the
nodes. `max_nodes` of the plan decides, not the drafts, and a step without room for nodes does not
draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from ...scheduler.types import IntArray, Opening, SeatSettings, StepPlan, ints
from ..verify.device_settings import MAX_BIASES, MAX_ENDS, MAX_TOP
from ..verify.process import GREEDY_BELOW

MAX_SHAPES = 172

ROWS = (
    1, 2, 4, 8, 10, 12, 14, 16, 19, 22, 25, 28, 32, 37, 43, 49, 56, 64, 72, 80, 88, 100, 112, 128,
    144, 160, 180, 204, 228, 256, 280, 316, 356, 404, 456, 512,
)  # fmt: skip
"""Rows of a step: roots and nodes of all sequences.

The steepest numbers whose padding is at most 12%, with the powers of two among them. Above, the
host path serves, which gathers the logits of all rows: verifying so many costs arithmetic, and no
longer only the reading of weights.
"""

MAX_QUERY_LEN = 64  # rows of a sequence: one word of ancestors; with a head, its drafts decide
MAX_NODES = 255  # of a head's drafts
_MOST_DRAFTING = 64  # sequences that a head drafts for
_DRAFTING = (*range(1, 8), *(num for num in ROWS if num >= 8))
# Alike, of shapes with fewer rows than whole drafts have; of fewer sequences, rows are few.
_UNEVEN = (16, 32, 64)
_ROWS_PER_DRAFTED = 0.125  # what a node that a head drafts costs, in rows of the target


class Sampler(IntEnum):
    """How a step's tokens are drawn; a step takes the highest of its seats'."""

    PLAIN = 0  # greedy, or by temperature alone
    SAMPLED = 1  # with cuts, edits or masks: needs the logits of the whole vocabulary
    HOST = 2  # needs logits, states or a history on the host, or an adapter

    @classmethod
    def of(cls, settings: SeatSettings, *, has_edits: bool = False) -> Sampler:
        """`has_edits`: penalties, biases, `min_tokens` and log-probabilities are computed, too.

        Such requests are SAMPLED, at any temperature.
        """
        if settings.adapter or settings.pools:
            return cls.HOST
        if (
            settings.has_penalties
            or settings.min_tokens > 0
            or settings.num_logprobs >= 0
            or len(settings.bias_ids)
        ):
            return cls.SAMPLED if has_edits and fits(settings) else cls.HOST
        if settings.num_prompt_logprobs >= 0 and not has_edits:
            return cls.HOST
        cuts = settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0
        return cls.SAMPLED if cuts and settings.temperature >= GREEDY_BELOW else cls.PLAIN


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Sizes and branches of one device step."""

    num_seqs: int
    query_len: int  # of a sequence, at most
    num_rows: int  # of all sequences
    sampler: Sampler

    @property
    def num_nodes(self) -> int:
        """Draft nodes that a sequence has room for."""
        return self.query_len - 1


def fits(settings: SeatSettings) -> bool:
    """Whether the tables on the device have room for what a request asks for."""
    return (
        len(settings.bias_ids) <= MAX_BIASES
        and (settings.min_tokens == 0 or len(settings.ends) <= MAX_ENDS)
        and settings.num_logprobs <= MAX_TOP
    )


class SeatKinds:
    """What the shape of a step depends on, by seat; kept from the openings of all plans."""

    def __init__(
        self,
        num_seats: int,
        num_draft_nodes: int = 0,
        *,
        has_edits: bool = False,
        p_min: float = 0.0,
    ) -> None:
        self.num_seats = num_seats  # steps with seats beyond these have no shape
        self._num_draft_nodes = num_draft_nodes  # of a head on the device; 0: there is none
        self._has_edits, self._p_min = has_edits, p_min
        self._samplers = np.zeros(num_seats, dtype=np.int8)
        self._least_lens = np.zeros(num_seats, dtype=np.int32)  # of known tokens, with a shape
        self._num_logprobs = np.full(num_seats, -1, dtype=np.int32)

    def open(self, opening: Opening) -> None:
        """Takes in the settings of a request that takes a seat."""
        seat, settings = opening.seat, opening.settings
        sampler = Sampler.of(settings, has_edits=self._has_edits)
        if self._num_draft_nodes and self.least_prob(settings):
            sampler = max(sampler, Sampler.SAMPLED)  # which has the head's whole logits
        self._samplers[seat] = sampler
        # The host computes the tokens known by now, and scores those of the prompt.
        scored = opening.num_prompt + 1 if settings.num_prompt_logprobs >= 0 else 0
        self._least_lens[seat] = max(len(opening.tokens), scored)
        self._num_logprobs[seat] = settings.num_logprobs

    def least_prob(self, settings: SeatSettings) -> float:
        """What a head's nodes need to be drafted."""
        return self._p_min if settings.min_prob < 0 else settings.min_prob

    def num_logprobs(self, plan: StepPlan) -> IntArray:  # [num_seqs]
        """Most likely tokens that each sequence reports; -1 is none, not even the emitted."""
        return self._num_logprobs[plan.seats]

    def shape(self, plan: StepPlan) -> StepShape | None:
        """The bucket of `plan`; None: it takes the host path. Its openings are taken in."""
        seats = plan.seats
        if not len(seats) or not self.takes(plan).all():
            return None
        sampler, drafts = Sampler(int(self._samplers[seats].max())), plan.drafts
        if drafts is not None and drafts.masks is not None:
            sampler = Sampler.SAMPLED
        lens = self.row_lens(plan)
        longest, num_rows = int(lens.max()), int(lens.sum())
        if self._num_draft_nodes:  # a head's rows are as many as it drafts next
            longest = max(longest, 1 + int(plan.max_nodes.max()))
        if plan.num_kept >= 0 and plan.own_drafts:
            num_rows = min(num_rows, len(seats) + plan.num_kept)
        wanted = (len(seats), longest, num_rows)
        size = smallest(*wanted, self.num_seats, self._num_draft_nodes)
        return size and StepShape(*size, sampler)

    def takes(self, plan: StepPlan) -> NDArray[np.bool_]:  # [num_seqs]
        """Sequences that a device step computes: those that draw from one row, or with nodes."""
        found = (plan.seats < self.num_seats) & (plan.chunk_lens == 1)
        drafts = plan.drafts
        if drafts is not None and (
            drafts.num_window is not None or (drafts.masks is not None and not self._has_edits)
        ):
            return np.zeros_like(found)
        seats = np.where(found, plan.seats, 0)
        is_last = (plan.context_lens < 0) | (plan.context_lens + 1 >= self._least_lens[seats])
        return found & is_last & (self._samplers[seats] < Sampler.HOST)

    def row_lens(self, plan: StepPlan) -> IntArray:  # [num_seqs]
        """Rows that each sequence of a step needs; a head may draft less than it has room for.

        Where the ranks keep the likeliest nodes of all sequences, the host's drafts are those.
        """
        if self._num_draft_nodes and (plan.own_drafts or plan.num_kept < 0):
            return ints(plan.max_nodes + 1)
        if plan.drafts is None:
            return np.ones(len(plan.seats), dtype=np.int32)
        return ints(plan.drafts.num_nodes + 1)


Size = tuple[int, int, int]
"""Of a shape: num_seqs, query_len, num_rows."""


@lru_cache(maxsize=4096)
def smallest(
    num_seqs: int, query_len: int, num_rows: int, max_num_seqs: int, num_draft_nodes: int = 0
) -> Size | None:
    """The size that holds so many for the fewest rows and drafted nodes; None if none does."""
    wanted = (num_seqs, query_len, num_rows)
    fitting = [
        size
        for size in sizes(max_num_seqs, num_draft_nodes)
        if all(held >= number for held, number in zip(size, wanted, strict=True))
    ]

    def cost(size: Size) -> tuple[float, int]:
        drafted = size[0] * (size[1] - 1) if num_draft_nodes else 0
        return size[2] + _ROWS_PER_DRAFTED * drafted, size[1]

    return min(fitting, key=cost, default=None)


@cache
def sizes(max_num_seqs: int, num_draft_nodes: int = 0) -> tuple[Size, ...]:
    """Every size: those of steps without nodes, then those of steps with nodes.

    With drafts of a head, sequences have room for a whole draft or for half of one, or whole ones
    share rows for a quarter or half of their nodes.
    """
    found = [(num, 1, num) for num in _up_to(max_num_seqs, ROWS)]
    if not num_draft_nodes:
        most = max_num_seqs * MAX_QUERY_LEN
        rows = [num for num in _up_to(most, ROWS) if num > 1]
        return (*found, *((min(num, max_num_seqs), MAX_QUERY_LEN, num) for num in rows))
    quarter, half = (1 + -(-num_draft_nodes // part) for part in (4, 2))
    whole = 1 + num_draft_nodes
    for query_len in sorted({half, whole}):
        most = min(max_num_seqs, _MOST_DRAFTING, ROWS[-1] // query_len)
        found += [(num, query_len, num * query_len) for num in _up_to(most, _DRAFTING)]
    for num in _up_to(min(max_num_seqs, _MOST_DRAFTING), _UNEVEN):
        rows = sorted({min(num * length, ROWS[-1]) for length in (quarter, half)})
        if whole > half and num >= _UNEVEN[0]:
            found += [(num, whole, each) for each in rows]
    return tuple(found)


def _up_to(most: int, numbers: Sequence[int]) -> list[int]:
    """Ascending numbers, of which the first that is not below `most` is the last, cut to it."""
    below = [number for number in numbers if number < most]
    return below + [min(most, number) for number in numbers[len(below) : len(below) + 1]]


def all_shapes(max_num_seqs: int, num_draft_nodes: int = 0) -> list[StepShape]:
    """Every shape that a load can have, largest first: captures share the largest one's memory."""
    shapes = [
        StepShape(*size, sampler)
        for size in sizes(max_num_seqs, num_draft_nodes)
        for sampler in (Sampler.PLAIN, Sampler.SAMPLED)
    ]
    assert len(shapes) <= MAX_SHAPES, len(shapes)
    return sorted(shapes, key=lambda shape: shape.num_rows, reverse=True)
