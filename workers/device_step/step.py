"""One step of the target as torch operations between fixed addresses, without a host's look.

It reads the seats, computes the forward, draws, accepts, compacts, appends, and leaves its outcome
in a fixed buffer. What it launches depends on its `StepShape` alone, so it can be captured in a
CUDA graph (`service.py`).
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import IntArray, NextDrafts, Verdict, ints, starts_of
from ..attention import KVCache
from ..collective import Collective
from ..model.family.decoder import FamilyModel
from ..ops import DeviceOps
from ..verify.device_settings import DeviceEdits, DeviceSettings
from .draft import DeviceDrafts, DeviceHead
from .layout import (
    Accepted,
    DeviceLayout,
    Share,
    accept,
    best_of_ranks,
    compact,
    draw_part,
    lay_out,
    seat_settings,
    update,
)
from .seats import LOGPROB_WORDS, DeviceSeats
from .shape import Sampler, StepShape

ALONE = Collective.single()


class DeviceStep:
    """The step of one rank's model, cache and seats, and of the head that drafts there."""

    def __init__(
        self, model: FamilyModel, cache: KVCache, seats: DeviceSeats, head: DeviceHead | None = None
    ) -> None:
        self.model, self.cache, self.seats, self.head = model, cache, seats, head
        self._ops = cast(DeviceOps, model.ops)  # `obstacle` has looked
        self._collective = ALONE if model.output is None else model.output.collective
        sizes, drafted = seats.sizes.step_sizes, seats.sizes.draft_parts
        num_words = max(outcome_words(*size, drafted) for size in sizes)
        num_scores = 0
        if seats.sizes.has_edits:
            num_scores = LOGPROB_WORDS * max(num_seqs * query_len for num_seqs, query_len in sizes)
        self.words = torch.zeros(num_words + num_scores, dtype=torch.int32, device=seats.device)
        self.outcome, self.logprobs = self.words[:num_words], self.words[num_words:]

    def run(self, shape: StepShape) -> None:
        """Computes the staged step."""
        layout = lay_out(self.seats, shape)
        head, capture = self.head, self.head.capture if self.head else ()
        model = self.model
        states, hidden = model.states(model.context(layout.plan, self.cache), None, capture)
        drawn = self._draw(states, layout, shape)
        accepted = accept(layout, drawn, shape)
        rows = head.rows(layout, drawn, hidden) if head else None
        if shape.num_nodes:
            compact(layout, accepted, self.cache)
        sampled = shape.sampler is not Sampler.PLAIN  # with it, requests that have penalties
        update(self.seats, layout, accepted, counts_tokens=sampled)
        drafts = None
        if head and rows and shape.num_nodes:
            drafts = head.draft(layout, accepted, rows, shape)
        elif head:
            head.drop(layout)
        self._report(accepted, drafts, shape)

    def _draw(
        self,
        states: Tensor,  # [num_rows, hidden_size]
        layout: DeviceLayout,
        shape: StepShape,
    ) -> Tensor:  # [num_rows] int32
        model, plan, rows_of = self.model, layout.plan, layout.seats.repeat_interleave
        settings = seat_settings(self.seats, rows_of(shape.query_len, output_size=shape.num_rows))
        if shape.sampler is not Sampler.PLAIN:
            return self._draw_whole(states, layout, settings, Share.of(shape, self._collective))
        logits, positions = model.part_of_logits(states), plan.positions + 1
        part = draw_part(self._ops, logits, positions, settings, model.first_token)
        return best_of_ranks(part, self._collective)

    def _draw_whole(
        self,
        states: Tensor,  # [num_rows, hidden_size]
        layout: DeviceLayout,
        settings: DeviceSettings,  # of the rows
        share: Share,
    ) -> Tensor:  # [num_rows] int32
        """From all logits of a row, which are on every rank or on one."""
        model, ops, tables = self.model, self._ops, self.seats.edits
        logits = model.logits_of_own_rows(states) if share.is_part else model.logits(states)
        own, settings = layout.plan.positions[share.rows], settings.take(share.rows)
        if tables is None:
            chosen = ops.draw_on_device(logits.float(), own + 1, settings)
            return self._collective.all_gather(chosen, dim=0) if share.is_part else chosen
        ancestors = layout.plan.ancestors[share.rows]
        edits = DeviceEdits(
            tables, layout.seats[share.seqs], own, ancestors, layout.nodes[share.seqs]
        )
        edited = logits.to(torch.float32, copy=True)
        ops.edit_on_device(edited, edits)
        chosen = ops.draw_on_device(edited, own + 1, settings)
        values, ids = ops.logprobs_on_device(logits, chosen, edits)
        values = values.view(torch.int32)
        if share.is_part:
            sent = torch.cat([chosen[:, None], values, ids], dim=1)
            every = self._collective.all_gather(sent, dim=0)
            chosen, values, ids = every.split([1, values.shape[1], ids.shape[1]], dim=1)
            chosen = chosen[:, 0].contiguous()
        parts = [values.reshape(-1), ids.reshape(-1)]
        torch.cat(parts, out=self.logprobs[: len(layout.plan.positions) * LOGPROB_WORDS])
        return chosen

    def _report(self, accepted: Accepted, drafts: DeviceDrafts | None, shape: StepShape) -> None:
        parts = [accepted.counts, accepted.emitted, accepted.path]
        parts += drafts or ()
        flat = torch.cat([part.to(torch.int32).view(-1) for part in parts])
        self.outcome[: len(flat)].copy_(flat)


def outcome_words(num_seqs: int, query_len: int, draft_parts: tuple[int, ...] = ()) -> int:
    """Size of an outcome: counts, emitted tokens and lanes of the path.

    Steps with nodes add the next drafts of a head, in columns of the widths `draft_parts`.
    """
    drafted = sum(draft_parts) if query_len > 1 else 0
    return num_seqs * (1 + 2 * query_len + drafted)


def read_outcome(
    step: int,
    known_lens: IntArray,  # [num_seqs], tokens before the step
    shape: StepShape,
    words: NDArray[np.int32],  # [outcome_words]
    draft_parts: tuple[int, ...] = (),  # as of `SeatSizes`
) -> tuple[Verdict, NextDrafts | None]:
    """The outcome on the host, as the host path would give it; None: there is no head's draft."""
    widths = [1, shape.query_len, shape.query_len]
    if drafts := bool(draft_parts) and shape.num_nodes > 0:
        widths += draft_parts
    ends = shape.num_seqs * np.cumsum(widths)
    columns = [  # [num_seqs, width] each, without padding sequences
        part.reshape(shape.num_seqs, -1)[: len(known_lens)]
        for part in np.split(words[: ends[-1]], ends[:-1])
    ]
    counts, emitted, path = columns[0][:, 0], *columns[1:3]
    lanes = np.arange(shape.query_len)
    inside = lanes < counts[:, None]
    verdict = Verdict(
        step=step,
        emitted=emitted[inside],
        emitted_start=starts_of(counts),
        path=ints(path[inside & (lanes > 0)] - 1),
        path_start=starts_of(counts - 1),
        compacted=True,
    )
    if not drafts:
        return verdict, None
    num_nodes, tokens, parents, *more = columns[3:]
    kept, sizes = np.arange(tokens.shape[1]) < num_nodes, num_nodes[:, 0]
    lens = np.where(sizes > 0, ints(known_lens + counts), 0)
    chances = more[0][kept].view(np.float32) if more else None
    made = NextDrafts(tokens[kept], parents[kept], starts_of(sizes), lens, chances=chances)
    return verdict, made
