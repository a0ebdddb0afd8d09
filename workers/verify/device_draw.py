"""`sample.draw` for settings that are tensors: nothing is read on the host.

The device step draws with it where no kernel does. Every row is sorted, whatever its settings are,
because rows cannot be told apart without a look at them; tokens equal those of `sample.draw`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise
from .process import masses
from .settings import GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """Sampling settings per row of logits, on their device."""

    seeds: Tensor  # [num_rows] int64
    temperature: Tensor  # [num_rows] float32, 0 is greedy
    top_k: Tensor  # [num_rows] int32, 0 is off
    top_p: Tensor  # [num_rows] float32, 1 is off
    min_p: Tensor  # [num_rows] float32, 0 is off


def draw(
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Tensor,  # [num_rows], index of the drawn token in prompt + output
    settings: DeviceSettings,
) -> Tensor:  # [num_rows] int32
    """One token per row, with the target's noise; temperature 0 is the argmax."""
    greedy = settings.temperature < GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, settings.temperature)[:, None]
    cut = scaled.masked_fill(~_kept(scaled, settings), -torch.inf)
    row_keys = noise.keys(settings.seeds, positions)
    perturbed = noise.gumbel(row_keys, logits.shape[1]) + cut
    return torch.where(greedy[:, None], logits, perturbed).argmax(1).to(torch.int32)


def contest(
    logits: Tensor,  # [num_rows, width], of any part of the vocabulary
    positions: Tensor,  # [num_rows], index of the drawn token in prompt + output
    settings: DeviceSettings,  # by temperature alone
    tokens: Tensor | int,  # [width], of the columns, or of the first of neighbours
) -> tuple[Tensor, Tensor]:  # each [num_rows]: float32, int32
    """The best score of every row and its first column.

    The best of all parts' scores is what `draw` draws where no cut is on: no score depends on the
    other tokens.
    """
    num_rows, width = logits.shape
    if not width:
        return logits.new_full((num_rows,), -torch.inf, dtype=torch.float32), torch.zeros_like(
            positions, dtype=torch.int32
        )
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, tokens + width, device=logits.device)
    greedy = (settings.temperature < GREEDY_BELOW)[:, None]
    logits = logits.float()
    scaled = logits / torch.where(greedy, 1.0, settings.temperature[:, None])
    row_keys = noise.keys(settings.seeds, positions)
    scores = torch.where(greedy, logits, noise.gumbel(row_keys, tokens[None]) + scaled)
    best = scores.argmax(1, keepdim=True)  # of equal ones the first
    return scores.gather(1, best)[:, 0], best[:, 0].to(torch.int32)


def _kept(
    scaled: Tensor,  # [num_rows, vocab], divided by the temperature
    settings: DeviceSettings,
) -> Tensor:  # [num_rows, vocab] bool
    """What top-k, then top-p, then min-p keep: each a prefix of the ranking."""
    vocab = scaled.shape[1]
    values, order = scaled.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scaled.device)
    most = torch.where(settings.top_k > 0, settings.top_k, vocab)[:, None]
    kept = (ranks < most) & (values > -torch.inf)
    mass = masses(values) * kept
    before = (mass.cumsum(1) - mass).double()
    top_p = settings.top_p.double()[:, None]
    # Rank 0 is kept even if `top_p` is so small that it is 0 in float32.
    kept &= (before < top_p * mass.sum(1, keepdim=True)) | (top_p >= 1) | (ranks == 0)
    # As `process` rounds it: the logarithm in float64, then to float32.
    kept &= values >= values[:, :1] + settings.min_p.double().log().float()[:, None]
    return torch.zeros_like(kept).scatter(1, order, kept)
