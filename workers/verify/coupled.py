"""The default rule: the target draws its own token, and a draft node is accepted if it is that.

The noise of a draw depends on (request seed, position, token) alone, so what is emitted is what
a run without speculation emits, token for token, whatever was drafted. A drafter that draws with
the same noise (`sample.draw`) agrees often: the chance of that under two distributions a
distance d apart is at least (1 - d) / (1 + d).

Source: Daliri, Musco, Suresh 2024, arXiv:2408.07978. At temperature 0 this is greedy matching
(Stern, Shazeer, Uszkoreit 2018, arXiv:1811.03115).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...scheduler.types import IntArray, SamplingRows
from .layout import Choice, Layout
from .process import settings
from .sample import draw


@dataclass(frozen=True, slots=True)
class Coupled:
    """Accept the draft node that is the target's own draw."""

    name: ClassVar[str] = "coupled"
    lossless: ClassVar[bool] = True

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
    """The target's own token at every row, brought to the CPU in one copy."""
    limits = settings(rows, sampling)
    drawn = draw(
        logits,
        rows.seeds,
        rows.positions,
        limits.temperature,
        limits.top_k,
        limits.top_p,
        limits.min_p,
    )
    return drawn.cpu().numpy()


def match(
    rows: Layout,
    drawn: IntArray,  # [num_rows]
) -> Choice:
    """Take the child that equals its parent's draw; siblings differ, so there is at most one."""
    agrees = (rows.tokens == drawn[rows.parent]) & ~rows.window
    return Choice(agrees | rows.is_root, drawn)
