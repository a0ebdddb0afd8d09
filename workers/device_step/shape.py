"""The shape of a step: a pure function of the plans so far, so that all ranks choose the same.

A shape fixes every size in the device step and every branch that it takes. Steps are padded to one
of the numbers of `ROWS`, counted over all their sequences: at most 12% of the rows are padding from
8 rows on, however the nodes are distributed over the sequences. Larger steps, chunks of prompts and
steps with settings that the device step does not compute have no shape and take the host path.

If a head drafts on the device, it drafts equally many nodes for every sequence: a whole draft or
half of one. Usually, a step has rows for that many nodes of all sequences. For sequences with
different numbers of nodes, there are shapes of many sequences that draft whole, with rows for a
quarter or half of the nodes. The plan's `max_nodes` decides, not the drafts, and a step without
room for nodes does not draft.
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

The numbers are as sparse as padding of at most 12% allows, and include the powers of two. Larger
steps take the host path, which gathers the logits of all rows: verifying that many rows is bound by
arithmetic, and no longer by reading the weights.
"""

MAX_QUERY_LEN = 64  # rows per sequence: one word of ancestors; with a head, its drafts decide
MAX_NODES = 255  # of a head's drafts
_MOST_DRAFTING = 64  # maximum number of sequences for which a head drafts
_DRAFTING = (*range(1, 8), *(num for num in ROWS if num >= 8))
# The same for shapes with fewer rows than whole drafts have; few sequences have few rows anyway.
_UNEVEN = (16, 32, 64)
_ROWS_PER_DRAFTED = 0.125  # cost of a node that a head drafts, in rows of the target


class Sampler(IntEnum):
    """How a step's tokens are drawn; a step takes the highest value of its seats."""

    PLAIN = 0  # greedy, or by temperature alone
    SAMPLED = 1  # with cuts, edits or masks: needs the logits of the whole vocabulary
    HOST = 2  # needs logits, states or a history on the host, or an adapter

    @classmethod
    def of(cls, settings: SeatSettings, *, has_edits: bool = False) -> Sampler:
        """Returns the sampler of a request.

        With `has_edits`, the device computes penalties, biases, `min_tokens` and log-probabilities,
        so requests that use them are SAMPLED, at any temperature.
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
    query_len: int  # maximum rows per sequence
    num_rows: int  # total of all sequences
    sampler: Sampler

    @property
    def num_nodes(self) -> int:
        """Maximum number of draft nodes per sequence."""
        return self.query_len - 1


def fits(settings: SeatSettings) -> bool:
    """Returns True if the tables on the device have room for a request's settings."""
    return (
        len(settings.bias_ids) <= MAX_BIASES
        and (settings.min_tokens == 0 or len(settings.ends) <= MAX_ENDS)
        and settings.num_logprobs <= MAX_TOP
    )


class SeatKinds:
    """The properties of seats that determine a step's shape, collected from the plans' openings."""

    def __init__(
        self,
        num_seats: int,
        num_draft_nodes: int = 0,
        *,
        has_edits: bool = False,
        p_min: float = 0.0,
    ) -> None:
        self.num_seats = num_seats  # steps with further seats have no shape
        self._num_draft_nodes = num_draft_nodes  # of a head on the device; 0: there is no such head
        self._has_edits, self._p_min = has_edits, p_min
        self._samplers = np.zeros(num_seats, dtype=np.int8)
        self._least_lens = np.zeros(num_seats, dtype=np.int32)  # fewest known tokens for a shape
        self._num_logprobs = np.full(num_seats, -1, dtype=np.int32)

    def open(self, opening: Opening) -> None:
        """Records the settings of a request that takes a seat."""
        seat, settings = opening.seat, opening.settings
        sampler = Sampler.of(settings, has_edits=self._has_edits)
        if self._num_draft_nodes and self.least_prob(settings):
            sampler = max(sampler, Sampler.SAMPLED)  # needs the head's whole logits
        self._samplers[seat] = sampler
        # The host computes the tokens that are known now, and scores the prompt's tokens.
        scored = opening.num_prompt + 1 if settings.num_prompt_logprobs >= 0 else 0
        self._least_lens[seat] = max(len(opening.tokens), scored)
        self._num_logprobs[seat] = settings.num_logprobs

    def least_prob(self, settings: SeatSettings) -> float:
        """Returns the minimum probability of a head's drafted nodes."""
        return self._p_min if settings.min_prob < 0 else settings.min_prob

    def num_logprobs(self, plan: StepPlan) -> IntArray:  # [num_seqs]
        """Returns how many most likely tokens each sequence reports; -1: no log-probabilities."""
        return self._num_logprobs[plan.seats]

    def shape(self, plan: StepPlan) -> StepShape | None:
        """Returns the shape of `plan` after its openings; None if it takes the host path."""
        seats = plan.seats
        if not len(seats) or not self.takes(plan).all():
            return None
        sampler, drafts = Sampler(int(self._samplers[seats].max())), plan.drafts
        if drafts is not None and drafts.masks is not None:
            sampler = Sampler.SAMPLED
        lens = self.row_lens(plan)
        longest, num_rows = int(lens.max()), int(lens.sum())
        if self._num_draft_nodes:  # a head has as many rows as it drafts next
            longest = max(longest, 1 + int(plan.max_nodes.max()))
        if plan.num_kept >= 0 and plan.own_drafts:
            num_rows = min(num_rows, len(seats) + plan.num_kept)
        wanted = (len(seats), longest, num_rows)
        size = smallest(*wanted, self.num_seats, self._num_draft_nodes)
        return size and StepShape(*size, sampler)

    def takes(self, plan: StepPlan) -> NDArray[np.bool_]:  # [num_seqs]
        """Returns the sequences that a device step computes: those with a single known row."""
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
        """Returns the rows that each sequence of a step needs; a head may draft less than its room.

        If the ranks keep the likeliest nodes of all sequences, the host's drafts are those nodes.
        """
        if self._num_draft_nodes and (plan.own_drafts or plan.num_kept < 0):
            return ints(plan.max_nodes + 1)
        if plan.drafts is None:
            return np.ones(len(plan.seats), dtype=np.int32)
        return ints(plan.drafts.num_nodes + 1)


Size = tuple[int, int, int]
"""Size of a shape: num_seqs, query_len, num_rows."""


@lru_cache(maxsize=4096)
def smallest(
    num_seqs: int, query_len: int, num_rows: int, max_num_seqs: int, num_draft_nodes: int = 0
) -> Size | None:
    """Returns the sufficient size with the fewest rows and drafted nodes; None if there is none."""
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
    """Returns every size: those of steps without nodes, then those of steps with nodes.

    With drafts of a head, sequences have room for a whole draft or for half of one, or whole drafts
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
    """Returns ascending numbers up to the first that reaches `most`, which replaces it."""
    below = [number for number in numbers if number < most]
    return below + [min(most, number) for number in numbers[len(below) : len(below) + 1]]


def all_shapes(max_num_seqs: int, num_draft_nodes: int = 0) -> list[StepShape]:
    """Returns every shape that a load can have, largest first: captures share its memory."""
    shapes = [
        StepShape(*size, sampler)
        for size in sizes(max_num_seqs, num_draft_nodes)
        for sampler in (Sampler.PLAIN, Sampler.SAMPLED)
    ]
    assert len(shapes) <= MAX_SHAPES, len(shapes)
    return sorted(shapes, key=lambda shape: shape.num_rows, reverse=True)
