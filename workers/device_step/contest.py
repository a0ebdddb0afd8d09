"""Draws over a vocabulary that is divided among ranks: two numbers a row cross between them.

Greedily, or by temperature alone, the token drawn has the highest score, and no score depends on
the other tokens; so each rank draws from its own part. Ties go to the lower token, as they do over
the whole vocabulary. Top-k, top-p and min-p need all logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collective import Collective
from ..ops import Ops
from ..verify.device_draw import DeviceSettings

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
