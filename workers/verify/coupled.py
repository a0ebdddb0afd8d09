"""The default rule: the target draws its own token; a draft node is accepted if it equals it.

The noise of a draw depends only on (request seed, position, token), so the emitted tokens equal
those of a run without speculation, whatever was drafted. A drafter that draws with the same noise
(`sample.draw`) agrees with probability at least (1 - d) / (1 + d), where d is the total variation
distance of the two distributions.

Source: Daliri, Musco, Suresh 2024, arXiv:2408.07978. At temperature 0 this is greedy matching
(Stern, Shazeer, Uszkoreit 2018, arXiv:1811.03115).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from ...scheduler.types import IntArray, SamplingRows
from .kernels import argmax
from .layout import Choice, Layout
from .sample import draw
from .settings import GREEDY_BELOW, DrawSettings


@dataclass(frozen=True, slots=True)
class Coupled:
    """Accepts the draft node that equals the target's own draw."""

    name: ClassVar[str] = "coupled"

    def choose(
        self,
        rows: Layout,
        sampling: SamplingRows,
        draft_probs: object,
        logits: Tensor,  # [num_rows, vocab] float32, edited
    ) -> Choice:
        return match(rows, draw_rows(rows, sampling, logits))


def draw_rows(
    rows: Layout,
    sampling: SamplingRows,
    logits: Tensor,  # [num_rows, vocab]
) -> IntArray:  # [num_rows]
    """The target's own token at every row, copied to the CPU at once."""
    if not np.count_nonzero(sampling.temperature >= GREEDY_BELOW):
        return argmax(logits).cpu().numpy().astype(np.int32)
    drawn = draw(logits, rows.positions, DrawSettings.of(sampling, rows.seq))
    return drawn.cpu().numpy()


def match(
    rows: Layout,
    drawn: IntArray,  # [num_rows]
) -> Choice:
    """Accepts the child that equals its parent's draw; siblings differ, so at most one does."""
    agrees = (rows.tokens == drawn[rows.parent]) & ~rows.window
    return Choice(agrees | rows.is_root, drawn)
