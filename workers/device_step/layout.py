"""Between a device step's seats and its operations: settings, the walk, draws of several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..collective import Collective
from ..ops import DeviceLayout
from ..verify.device_settings import DeviceSettings, DeviceWalk
from .seats import DeviceSeats
from .shape import StepShape


def seat_settings(seats: DeviceSeats, who: Tensor) -> DeviceSettings:  # [num_rows] int64
    """Sampling settings of the seats `who`."""
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
    """What the walk reads, and the seats and the outcome that it writes."""
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
# Greedily, or by temperature alone, the token drawn has the highest score, and no score depends on
# the other tokens; so each rank draws from its own part, and two numbers a row cross between them.
# Ties go to the lower token, as they do over the whole vocabulary.
#
# Top-k, top-p, min-p, penalties and log-probabilities need all logits of a row. For them the ranks
# divide the rows: each gets whole rows of its share from the others, draws them, and sends the
# tokens round. That is exact whatever the settings are, and moves and computes a part of what
# a gathering of all rows on every rank would.


@dataclass(frozen=True, slots=True)
class Share:
    """The rows that this rank draws whole; as many on every rank, with the last row repeated."""

    rows: Tensor | None  # [num_rows] int64; None: all of them, on every rank

    @staticmethod
    def of(num_rows: int, collective: Collective, device: torch.device) -> Share:
        if collective.size == 1:
            return Share(None)
        count = -(-num_rows // collective.size)
        begin = collective.rank * count
        rows = torch.arange(begin, begin + count, device=device)
        return Share(rows.clamp(max=num_rows - 1))

    def take(self, values: Tensor) -> Tensor:  # [num_rows, ...] of all
        """Of its own rows."""
        return values if self.rows is None else values.index_select(0, self.rows)


Part = tuple[Tensor, Tensor]
"""Each row's best score of one rank, float32, and its token; each [num_rows]."""


def best_of_ranks(part: Part, collective: Collective) -> Tensor:  # [num_rows]
    """The best of all ranks' tokens; the same on every rank."""
    scores, tokens = part
    if collective.size == 1:
        return tokens
    own = torch.stack([scores.view(torch.int32), tokens.to(torch.int32)], dim=1)[:, None]
    every = collective.all_gather(own, dim=1)  # [num_rows, size, 2]
    best = every[:, :, 0].contiguous().view(torch.float32).argmax(1, keepdim=True)
    return every[:, :, 1].gather(1, best)[:, 0]
