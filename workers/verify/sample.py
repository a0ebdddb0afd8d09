"""Draws from processed distributions, for the target's rules and for drafters.

`draw` uses the noise that the coupled rule verifies with, so that a drafter's draws agree with the
target's as often as shared noise allows (Daliri, Musco, Suresh 2024, arXiv:2408.07978).
`draw_siblings` uses a stream of its own, as exact rejection requires, and returns the truncated
distribution that it drew from.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import noise
from .noise import argmax
from .process import DrawSettings, Positions, pools


def draw(
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Positions,  # [num_rows], index of the drawn token in prompt + output
    settings: DrawSettings,  # of the rows
) -> Tensor:  # [num_rows], int32, on the device of `logits`
    """One token per row, with the target's noise; temperature 0 is the argmax."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    row_keys: Tensor | None = None
    for pool in pools(logits, settings):
        rows = torch.from_numpy(pool.rows).to(logits.device)
        if pool.greedy:
            drawn = argmax(pool.logits)
        else:
            if row_keys is None:
                row_keys = noise.keys(settings.seeds, positions).to(logits.device)
            own = row_keys if len(rows) == len(tokens) else row_keys[rows]
            drawn = noise.perturbed_argmax(pool.logits, own, pool.ids)
            if pool.ids is not None:
                drawn = pool.ids.gather(1, drawn[:, None])[:, 0]
        if len(rows) == len(tokens):
            return drawn.to(torch.int32)
        tokens[rows] = drawn.to(torch.int32)
    return tokens


def draw_siblings(
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Positions,  # [num_rows]
    settings: DrawSettings,  # of the rows
    top: int,
    num_siblings: int = 1,
    rounds: Positions | None = None,  # [num_rows]
) -> tuple[Tensor, Tensor, Tensor]:  # [num_rows, num_siblings], [num_rows, top], [num_rows, top]
    """Siblings per row, drawn in order without replacement, and what they were drawn from.

    Returns (tokens, ids, probs) of `DraftProbs`. The distribution is the processed one, truncated
    to its `top` most likely tokens and renormalised; ids beyond its support have probability 0.
    Greedy rows have all-zero probabilities, which mark deterministic nodes: their siblings are the
    most likely tokens. A token of -1 means that the support has no further token. `rounds` is the
    position of each round's first token, for rules that need fresh noise in every round; None draws
    by position only.

    The largest perturbed log-probabilities, in order, are such a sample (Kool, van Hoof, Welling
    2019, arXiv:1903.06059).
    """
    assert num_siblings <= top, (num_siblings, top)
    ids, best = _likeliest(logits, settings, top)
    stream: int | Tensor = noise.DRAFT
    if rounds is not None:
        stream = torch.as_tensor(rounds, dtype=torch.int64) + noise.ROUND_DRAFT
    row_keys = noise.keys(settings.seeds, positions, stream).to(logits.device)
    deterministic = torch.from_numpy(settings.greedy).to(logits.device)[:, None]
    scores = torch.where(deterministic, best, best + noise.gumbel(row_keys, ids))
    score, order = scores.topk(min(num_siblings, ids.shape[1]), dim=1)
    tokens = ids.gather(1, order).masked_fill(score == -torch.inf, -1)
    return tokens, ids, best.softmax(1).masked_fill(deterministic, 0.0)


_NUM_RANKED = 128  # tokens that noise may bring to the front


def rank_draws(
    logits: Tensor,  # [num_rows, vocab] float32
    positions: Positions,  # [num_rows]
    settings: DrawSettings,  # of the rows
    num_ranked: int,
    *,
    shares_noise: bool,
) -> tuple[Tensor, Tensor]:  # [num_rows, num_ranked] int32, alike float32
    """The tokens that another model with similar logits most likely draws, and their weights.

    Where it draws with the target's noise, the order is that of the perturbed log-probabilities;
    the first is this model's own draw. Weights sum to at most 1; a token of -1 has none.
    """
    greedy = settings.greedy
    settings = settings._replace(
        top_p=np.where(greedy, np.float32(1), settings.top_p),
        min_p=np.where(greedy, np.float32(0), settings.min_p),
    )
    ids, scores = _likeliest(logits, settings, max(num_ranked, _NUM_RANKED))
    if shares_noise and not greedy.all():
        row_keys = noise.keys(settings.seeds, positions).to(logits.device)
        deterministic = torch.from_numpy(greedy).to(logits.device)[:, None]
        scores = torch.where(deterministic, scores, scores + noise.gumbel(row_keys, ids))
    best, order = scores.softmax(1).topk(min(num_ranked, ids.shape[1]), dim=1)
    return ids.gather(1, order).masked_fill(best == 0, -1), best


def _likeliest(
    logits: Tensor,  # [num_rows, vocab] float32
    settings: DrawSettings,  # of the rows
    top: int,
) -> tuple[Tensor, Tensor]:  # [num_rows, top] int32, alike float32
    """The most likely tokens of every row and their processed logits, -inf where cut off.

    Greedy rows are processed as of temperature 1.
    """
    top, top_k = min(top, logits.shape[1]), settings.top_k
    cut = settings._replace(
        temperature=np.where(settings.greedy, np.float32(1), settings.temperature),
        top_k=np.where((top_k > 0) & (top_k < top), top_k, top).astype(np.int32),
    )
    shape, device = (len(logits), top), logits.device
    ids = torch.zeros(shape, dtype=torch.int32, device=device)
    best = torch.full(shape, -torch.inf, device=device)
    for pool in pools(logits, cut):
        rows = torch.from_numpy(pool.rows).to(device)
        width = min(top, pool.logits.shape[1])  # a small top-k leaves fewer candidates
        best[rows, :width], order = pool.logits.topk(width, dim=1)
        found = order if pool.ids is None else pool.ids.gather(1, order)
        ids[rows, :width] = found.to(torch.int32)
    return ids, best
