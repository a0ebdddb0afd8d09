"""One step of the target as torch operations between fixed addresses, without a host's look.

It reads the seats, computes the forward, draws, accepts, compacts, appends, and leaves its outcome
in a fixed buffer. What it launches depends on its `StepShape` alone, so it can be captured in a
CUDA graph (`capture.py`). Called by `service.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import IntArray, NextDrafts, Verdict, ints, starts_of
from ..attention import KVCache
from ..collective import Collective
from ..model.family.decoder import FamilyModel
from ..verify.device_draw import DeviceSettings
from ..verify.device_edits import DeviceEdits
from .accept import Accepted, accept, compact, update
from .contest import Share, best_of_ranks, draw_part, rows_of
from .draft import DeviceDrafts, DeviceHead
from .edits import LOGPROB_WORDS
from .layout import DeviceLayout, lay_out, row_settings
from .seats import DeviceSeats
from .shape import Sampler, StepShape

ALONE = Collective.single()


class DeviceStep:
    """The step of one rank's model, cache and seats, and of the head that drafts there."""

    def __init__(
        self,
        model: FamilyModel,
        cache: KVCache,
        seats: DeviceSeats,
        head: DeviceHead | None = None,
    ) -> None:
        self.model, self.cache, self.seats, self.head = model, cache, seats, head
        self._collective = ALONE if model.output is None else model.output.collective
        width = seats.sizes.num_draft_nodes
        most = max(outcome_words(*size, width) for size in seats.sizes.step_sizes)
        self.outcome = torch.zeros(most, dtype=torch.int32, device=seats.device)
        rows = max(num_seqs * query_len for num_seqs, query_len in seats.sizes.step_sizes)
        most = rows * LOGPROB_WORDS if seats.sizes.has_edits else 0
        self.logprobs = torch.zeros(most, dtype=torch.int32, device=seats.device)

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
        model, ops = self.model, self.model.ops
        positions, settings = layout.plan.positions + 1, row_settings(self.seats, layout, shape)
        if shape.sampler is not Sampler.PLAIN:
            share = Share.of(shape, self._collective)
            return self._draw_whole(states, layout, positions, settings, share)
        part = draw_part(ops, model.part_of_logits(states), positions, settings, model.first_token)
        return best_of_ranks(part, self._collective)

    def _draw_whole(
        self,
        states: Tensor,  # [num_rows, hidden_size]
        layout: DeviceLayout,
        positions: Tensor,  # [num_rows], of the drawn tokens
        settings: DeviceSettings,  # of the rows
        share: Share,
    ) -> Tensor:  # [num_rows] int32
        """From all logits of a row, which are on every rank or on one."""
        model, ops, tables = self.model, self.model.ops, self.seats.edits
        logits = model.logits_of_own_rows(states) if share.is_part else model.logits(states)
        positions, settings = positions[share.rows], rows_of(settings, share.rows)
        if tables is None:
            chosen = ops.draw_on_device(logits.float(), positions, settings)
            return self._collective.all_gather(chosen, dim=0) if share.is_part else chosen
        edits = DeviceEdits(
            tables,
            layout.seats[share.seqs],
            layout.plan.positions[share.rows],
            layout.plan.ancestors[share.rows],
            layout.nodes[share.seqs],
        )
        edited = logits.to(torch.float32, copy=True)
        ops.edit_on_device(edited, edits)
        chosen = ops.draw_on_device(edited, positions, settings)
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
        if drafts is not None:
            parts += [drafts.counts, drafts.tokens, drafts.parents]
        flat = torch.cat([part.to(torch.int32).view(-1) for part in parts])
        self.outcome[: len(flat)].copy_(flat)


def outcome_words(num_seqs: int, query_len: int, draft_width: int = 0) -> int:
    """Size of an outcome: counts, emitted tokens and lanes of the path.

    Steps with nodes add the next drafts of a head: their sizes, tokens and parents.
    """
    drafted = 1 + 2 * draft_width if draft_width and query_len > 1 else 0
    return num_seqs * (1 + 2 * query_len + drafted)


def read_outcome(
    step: int,
    num_seqs: int,  # without padding
    shape: StepShape,
    words: NDArray[np.int32],  # [outcome_words]
) -> Verdict:
    """The outcome on the host, as the host path would give it."""
    counts, emitted, path = _columns(words, num_seqs, shape, (1, shape.query_len, shape.query_len))
    counts = counts[:, 0]
    lanes = np.arange(shape.query_len)
    inside = lanes < counts[:, None]
    return Verdict(
        step=step,
        emitted=emitted[inside],
        emitted_start=starts_of(counts),
        path=ints(path[inside & (lanes > 0)] - 1),
        path_start=starts_of(counts - 1),
        compacted=True,
    )


def read_drafts(
    lens: IntArray,  # [num_seqs], known tokens after the step
    shape: StepShape,
    words: NDArray[np.int32],  # [outcome_words], with drafts
    draft_width: int,
) -> NextDrafts:
    """The head's drafts on the host, as the host path would give them."""
    first = outcome_words(shape.num_seqs, shape.query_len)
    widths = (1, draft_width, draft_width)
    counts, tokens, parents = _columns(words[first:], len(lens), shape, widths)
    kept = np.arange(draft_width) < counts
    lens = np.where(counts[:, 0] > 0, lens, 0)
    return NextDrafts(tokens[kept], parents[kept], starts_of(counts[:, 0]), lens)


def _columns(
    words: NDArray[np.int32], num_seqs: int, shape: StepShape, widths: tuple[int, ...]
) -> list[NDArray[np.int32]]:  # each [num_seqs, width]
    """The parts of an outcome, one after the other, without padding sequences."""
    ends = np.cumsum([shape.num_seqs * width for width in widths])
    parts = np.split(words[: ends[-1]], ends[:-1])
    return [part.reshape(shape.num_seqs, -1)[:num_seqs] for part in parts]
