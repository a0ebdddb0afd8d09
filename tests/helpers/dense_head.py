"""A head's attention over dense copies of the context; shares no kernel with the operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.drafters.heads.protocol import Attend, Frontier, on
from outrider.scheduler.types import StepInput, Verdict
from outrider.workers.head import HeadService
from outrider.workers.head_layers import PagedAttend, committed
from outrider.workers.ops import PlannedOps, ReferenceOps


def attend_densely(head: HeadService) -> None:
    """Replaces the attention of a head whose layers are modules."""

    def attention(step: StepInput) -> Attend:
        planned, cache = PlannedOps(ReferenceOps()), head._cache
        return PagedAttend(planned, planned.plan(step, cache), cache, head.first_layer)

    def draft_attention(step: StepInput, verdict: Verdict, ends: Frontier) -> DraftAttention:
        return DraftAttention(step, verdict, ends, head, head.head.room)

    assert head.module_reason
    head.attention, head.draft_attention = attention, draft_attention


@dataclass(frozen=True, slots=True)
class DenseAttend:
    """Implements `LevelAttend`."""

    attend: Attend
    positions: Tensor  # [num_rows]

    def __call__(self, *rows: Any) -> Tensor:
        return self.attend(*rows)


class DraftAttention:
    """Attention for one draft of each of `num_drafts` sequences."""

    def __init__(
        self,
        step: StepInput,
        verdict: Verdict,
        ends: Frontier,
        host: HeadService,
        room: int,  # rows that may be added
    ) -> None:
        self._base, self._depth = on(step.positions[ends.rows], host.target.device), 0
        slots, known = committed(step, verdict, ends, host.block_size, room)
        self._begin = slots.shape[1] - room
        device = host.target.device
        where = on(slots, device)
        pages = [host.cached(layer, where) for layer in range(len(host.head.layers))]
        self._keys = [keys for keys, _ in pages]
        self._values = [values for _, values in pages]
        index = torch.arange(self._begin, device=device)
        self._known = (index < on(known, device)[:, None])[:, None]  # [num_drafts, 1, key_len]
        self._seen = self._known.new_zeros(len(known), 1, 0)  # draft rows visible to the last level

    def level(self, above: Tensor) -> DenseAttend:  # [num_drafts, width], row of the last level
        """Attention of `width` new rows per sequence, each a child of a row of the last level."""
        num_drafts, width = above.shape
        seen = self._seen.gather(1, above[..., None].expand(-1, -1, self._seen.shape[2]))
        own = torch.eye(width, dtype=torch.bool, device=above.device).expand(num_drafts, -1, -1)
        self._seen = torch.cat([seen, own], dim=2)
        end = self._begin + self._seen.shape[2]
        mask = torch.cat([self._known.expand(-1, width, -1), self._seen], dim=2)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            fresh = slice(end - width, end)
            self._keys[layer][:, fresh] = key.unflatten(0, (num_drafts, width))
            self._values[layer][:, fresh] = value.unflatten(0, (num_drafts, width))
            near = self._keys[layer][:, :end].transpose(1, 2)
            far = self._values[layer][:, :end].transpose(1, 2)
            fold = query.shape[1] // key.shape[1]
            rows = query.unflatten(0, (num_drafts, width)).transpose(1, 2)
            rows = rows.reshape(num_drafts, key.shape[1], fold * width, -1)
            tiled = mask.repeat(1, fold, 1)[:, None]
            out = scaled_dot_product_attention(rows, near, far, tiled, scale=scale)
            out = out.reshape(num_drafts, query.shape[1], width, -1)
            return out.transpose(1, 2).flatten(0, 1)

        self._depth += 1
        positions = (self._base[:, None] + self._depth).expand(-1, width).flatten()
        return DenseAttend(attend, positions)

    def chain(self, width: int) -> DenseAttend:
        """A row that is the only child of the one before."""
        assert width == 1, width
        return self.level(self._base.new_zeros(len(self._base), 1))
