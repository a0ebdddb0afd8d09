"""Draws over a vocabulary that is divided among ranks.

Greedily, or by temperature alone, the token drawn has the highest score, and no score depends on
the other tokens; so each rank draws from its own part, and two numbers a row cross between them.
Ties go to the lower token, as they do over the whole vocabulary.

Top-k, top-p, min-p, penalties and log-probabilities need all logits of a row. For them the ranks
divide the sequences: each gets whole rows of its share from the others, draws them, and sends the
tokens round. That is exact whatever the settings are, and moves and computes a part of what a
gathering of all rows on every rank would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..collective import Collective
from ..ops import Ops
from ..verify.device_draw import DeviceSettings
from .shape import StepShape


@dataclass(frozen=True, slots=True)
class Share:
    """The sequences whose whole rows this rank draws; the same number on every rank."""

    seqs: slice
    rows: slice
    is_part: bool  # False: all of them, on every rank

    @staticmethod
    def of(shape: StepShape, collective: Collective) -> Share:
        """All sequences where they cannot be divided evenly."""
        is_part = collective.size > 1 and shape.num_seqs % collective.size == 0
        count = shape.num_seqs // collective.size if is_part else shape.num_seqs
        begin = collective.rank * count if is_part else 0
        rows = slice(begin * shape.query_len, (begin + count) * shape.query_len)
        return Share(slice(begin, begin + count), rows, is_part)


def rows_of(settings: DeviceSettings, rows: slice) -> DeviceSettings:
    """Those of some rows."""
    return DeviceSettings(
        settings.seeds[rows],
        settings.temperature[rows],
        settings.top_k[rows],
        settings.top_p[rows],
        settings.min_p[rows],
    )


Part = tuple[Tensor, Tensor]
"""Each row's best score of one rank, float32, and its token, int32; each [num_rows]."""


def draw_part(
    ops: Ops,
    logits: Tensor,  # [num_rows, width]
    positions: Tensor,  # [num_rows], index of the drawn token in prompt + output
    settings: DeviceSettings,  # by temperature alone
    tokens: Tensor | int,  # [width], of the columns, or of the first of neighbours
) -> Part:
    """The best of this rank's tokens."""
    scores, columns = ops.contest_on_device(logits, positions, settings, tokens)
    if isinstance(tokens, int):
        return scores, columns + tokens
    if not len(tokens):
        return scores, columns
    return scores, tokens[columns.long()].to(torch.int32)


def best_of_ranks(part: Part, collective: Collective) -> Tensor:  # [num_rows] int32
    """The best of all ranks' tokens; the same on every rank."""
    scores, tokens = part
    if collective.size == 1:
        return tokens
    own = torch.stack([scores.view(torch.int32), tokens], dim=1)[:, None]
    every = collective.all_gather(own, dim=1)  # [num_rows, size, 2]
    best = every[:, :, 0].contiguous().view(torch.float32).argmax(1, keepdim=True)
    return every[:, :, 1].gather(1, best)[:, 0]
