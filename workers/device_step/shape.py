"""The bucket of a step: a pure function of the plans so far, so that all ranks choose the same.

A shape fixes every size in the device step and every branch that it takes. Steps are padded to one
of the `SIZES`; the padding is rows of the weights' products, which are free as long as reading the
weights is what a step costs. Larger steps, chunks of prompts and steps with settings that the
device step does not compute have no shape: they take the host path.

Where a head drafts on the device, steps have its drafts' size: `max_nodes` of the plan decides, not
the drafts, and a step without room for nodes does not draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ...scheduler.types import IntArray, Opening, SeatSettings, StepPlan
from ..verify.device_settings import MAX_BIASES, MAX_ENDS, MAX_TOP
from ..verify.process import GREEDY_BELOW

MAX_SHAPES = 40

SIZES = (
    *((num_seqs, 1) for num_seqs in (1, 2, 4, 8, 16, 32, 64, 256)),
    *((num_seqs, query_len) for query_len in (4, 8) for num_seqs in (1, 4, 16, 64)),
    *((num_seqs, 16) for num_seqs in (1, 8)),
    *((num_seqs, 64) for num_seqs in (1, 4)),
)
"""(num_seqs, query_len), the root and its nodes.

With two samplers each, 64 sequences have 38 shapes and 256 have all 40, so there is no room for
larger trees of look-ups. They take the host path, which gathers the logits of all their rows:
verifying so many rows costs arithmetic, and no longer only the reading of weights.
"""

MAX_NODES = 255  # of a head's drafts; of others, what `SIZES` has room for
_MOST_DRAFTED_ROWS = 512  # of a step with a head's drafts


class Sampler(IntEnum):
    """How a step's tokens are drawn; a step takes the highest of its seats'."""

    PLAIN = 0  # greedy, or by temperature alone
    SAMPLED = 1  # with cuts or edits: needs the logits of the whole vocabulary
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
    query_len: int
    sampler: Sampler

    @property
    def num_nodes(self) -> int:
        """Draft nodes that a sequence has room for."""
        return self.query_len - 1

    @property
    def num_rows(self) -> int:
        return self.num_seqs * self.query_len


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
        self, num_seats: int, num_draft_nodes: int = 0, *, has_edits: bool = False
    ) -> None:
        self.num_seats = num_seats  # steps with seats beyond these have no shape
        self._num_draft_nodes = num_draft_nodes  # of a head on the device; 0: there is none
        self._has_edits = has_edits
        self._samplers = np.zeros(num_seats, dtype=np.int8)
        self._least_lens = np.zeros(num_seats, dtype=np.int32)  # of known tokens, with a shape
        self._num_logprobs = np.full(num_seats, -1, dtype=np.int32)

    def open(self, opening: Opening) -> None:
        """Takes in the settings of a request that takes a seat."""
        seat, settings = opening.seat, opening.settings
        self._samplers[seat] = Sampler.of(settings, has_edits=self._has_edits)
        # The host computes the tokens known by now, and scores those of the prompt.
        scored = opening.num_prompt + 1 if settings.num_prompt_logprobs >= 0 else 0
        self._least_lens[seat] = max(len(opening.tokens), scored)
        self._num_logprobs[seat] = settings.num_logprobs

    def num_logprobs(self, plan: StepPlan) -> IntArray:  # [num_seqs]
        """Most likely tokens that each sequence reports; -1 is none, not even the emitted."""
        return self._num_logprobs[plan.seats]

    def shape(self, plan: StepPlan) -> StepShape | None:
        """The bucket of `plan`; None: it takes the host path. Its openings are taken in."""
        seats = plan.seats
        if not len(seats) or int(seats.max()) >= self.num_seats or (plan.chunk_lens != 1).any():
            return None
        is_last = plan.context_lens + 1 >= self._least_lens[seats]
        is_last |= plan.context_lens < 0
        sampler = Sampler(int(self._samplers[seats].max()))
        if not is_last.all() or sampler is Sampler.HOST:
            return None
        longest, drafts = 0, plan.drafts
        if drafts is not None:
            if drafts.masks is not None or drafts.num_window is not None:
                return None
            longest = int(drafts.num_nodes.max(initial=0))
        if self._num_draft_nodes:
            longest = int(plan.max_nodes.max(initial=0))
        size = smallest(len(seats), longest + 1, self.num_seats, self._num_draft_nodes)
        return size and StepShape(*size, sampler)


def smallest(
    num_seqs: int, query_len: int, max_num_seqs: int, num_draft_nodes: int = 0
) -> tuple[int, int] | None:
    """The size with the fewest rows that holds so many; None if none does."""
    known = sizes(max_num_seqs, num_draft_nodes)
    fitting = [size for size in known if size[0] >= num_seqs and size[1] >= query_len]
    return min(fitting, key=lambda size: (size[0] * size[1], size[1]), default=None)


def sizes(max_num_seqs: int, num_draft_nodes: int = 0) -> list[tuple[int, int]]:
    """Every size, of which the first of each query length that holds all sequences is the last.

    With drafts of a head, those have room for a whole draft or for half of one.
    """
    kept: list[tuple[int, int]] = []
    for num_seqs, query_len in _drafted_sizes(num_draft_nodes) if num_draft_nodes else SIZES:
        below = [size for size in kept if size[1] == query_len]
        if not below or below[-1][0] < max_num_seqs:
            kept.append((min(num_seqs, max_num_seqs), query_len))
    return kept


def _drafted_sizes(num_draft_nodes: int) -> list[tuple[int, int]]:
    """`SIZES` with other query lengths for steps with nodes."""
    whole, half = 1 + num_draft_nodes, 1 + -(-num_draft_nodes // 2)
    found = [size for size in SIZES if size[1] == 1]
    if half < whole:
        found += [(num_seqs, half) for num_seqs in (1, 4, 16, 64)]
    found += [(num_seqs, whole) for num_seqs in (1, 2, 4, 8, 16, 32, 64)]
    return [size for size in found if size[1] == 1 or size[0] * size[1] <= _MOST_DRAFTED_ROWS]


def all_shapes(max_num_seqs: int, num_draft_nodes: int = 0) -> list[StepShape]:
    """Every shape that a load can have, largest first: captures share the largest one's memory."""
    shapes = [
        StepShape(*size, sampler)
        for size in sizes(max_num_seqs, num_draft_nodes)
        for sampler in (Sampler.PLAIN, Sampler.SAMPLED)
    ]
    assert len(shapes) <= MAX_SHAPES, len(shapes)
    return sorted(shapes, key=lambda shape: shape.num_rows, reverse=True)
