"""The best column of every row, found by several programs a row and a small kernel after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MAX_PARTS = 64


def num_parts(num_rows: int, num_blocks: int, num_processors: int) -> int:
    """Programs for a row: a power of two, enough to fill the device."""
    most = max(1, min(4 * num_processors // num_rows, num_blocks, _MAX_PARTS))
    return 1 << (most.bit_length() - 1)


@triton.jit
def share(part, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a part: the first, and the end."""
    size = tl.cdiv(tl.cdiv(width, BLOCK), PARTS) * BLOCK
    return part * size, tl.minimum(part * size + size, width)


@triton.jit
def better(score, begin, highest, winner):
    """The best score so far and its column, after a block of scores."""
    top, index = tl.max(score, axis=0, return_indices=True)
    winner = tl.where(top > highest, begin + index, winner)
    return tl.maximum(highest, top), winner


@triton.jit
def _merge_kernel(
    best,  # [num_rows, PARTS] float32
    winners,  # [num_rows, PARTS] int32
    scores,  # [num_rows] float32, written
    columns,  # [num_rows] int32, written
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    top, index = tl.max(tl.load(best + row * PARTS + part), axis=0, return_indices=True)
    tl.store(scores + row, top)
    tl.store(columns + row, tl.load(winners + row * PARTS + index))


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the programs of a row leave their best score and its column."""

    best: Tensor  # [num_rows, num_parts] float32
    winners: Tensor  # [num_rows, num_parts] int32
    block: int  # columns that a program reads at once

    @staticmethod
    def of(logits: Tensor, num_processors: int) -> Parts:  # [num_rows, width]
        num_rows, width = logits.shape
        block = min(_BLOCK, triton.next_power_of_2(max(1, width)))
        parts = num_parts(num_rows, max(1, triton.cdiv(width, block)), num_processors)
        best = torch.empty((num_rows, parts), dtype=torch.float32, device=logits.device)
        return Parts(best, torch.empty_like(best, dtype=torch.int32), block)

    @property
    def num_parts(self) -> int:
        return self.best.shape[1]

    def merged(self) -> tuple[Tensor, Tensor]:  # each [num_rows]: float32, int32
        """Every row's best; of equal ones the first."""
        scores, columns = torch.empty_like(self.best[:, 0]), torch.empty_like(self.winners[:, 0])
        _merge_kernel[(len(scores),)](
            self.best, self.winners, scores, columns, self.num_parts, num_warps=1
        )
        return scores, columns
