"""The target's part of a worker: one forward, then the verification rule on rank 0.

Where steps may be planned before a verdict is back, or a head runs on every rank, every rank judges
the step: noise and logits are the same on all of them.

Hidden states that heads read are passed to the head in this process and sent to separate heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ..scheduler.plan import StepPlan
from ..scheduler.types import IntArray, StepInput, Verdict, ints
from .device_step.seats import SeatSizes
from .device_step.service import DeviceStepService
from .device_step.shape import StepShape
from .feed import Feed
from .head import HeadService
from .model import PagedModel
from .prompt_rows import PromptRows
from .seats import Seats
from .transport.later import Later, finished
from .transport.links import OpenFeatures
from .verify import Rule, verify


class PostedVerdict(Later):
    """The verdict on a step that the device computes; None on ranks other than 0."""

    def __init__(self, service: DeviceStepService, collect: Callable[[], Verdict | None]) -> None:
        super().__init__()
        self._service, self._collect = service, collect

    @property
    def is_ready(self) -> bool:
        try:
            return self._is_settled or self._service.is_ready
        except RuntimeError:  # of the device: `result` raises it
            return True

    def _finish(self) -> Verdict | None:
        with torch.inference_mode():
            return self._collect()


def follows(plan: StepPlan) -> bool:
    """Whether a step can be given to the device before the verdict on the last one is known.

    Everything that it changes on the host must be independent of that verdict: no seat changes its
    owner, and no tokens or moves are sent.
    """
    moves = len(plan.tokens) or len(plan.kv_moves) or len(plan.closings)
    return not plan.openings and not moves


class TargetService:
    """A loaded target and its cache; rank 0 returns the verdict."""

    def __init__(
        self,
        model: PagedModel,
        num_blocks: int,
        block_size: int,
        rule: Rule,
        head: HeadService | None = None,
        device_step: SeatSizes | None = None,
    ) -> None:
        self._model = model
        num_spare = 0 if device_step is None else 1  # blocks that padding writes to
        extra_layers = head.kv_shapes if head else ()
        self._cache = model.new_cache(num_blocks + num_spare, block_size, extra_layers)
        self.device_step: DeviceStepService | None = None
        if device_step is not None:
            drafting = head if device_step.num_draft_nodes else None
            self.device_step = DeviceStepService(model, self._cache, device_step, drafting)
        self._seats = Seats(block_size)
        self._rule = rule
        self._head = head
        self._feeds: dict[int, Feed] = {}  # by link
        self._posted: PostedVerdict | None = None  # the last step that the device was given
        self._free_at = 0.0  # when the device had finished the step before, at the latest
        if head is not None:
            head.attach(self._cache)

    def verify(self, plan: StepPlan, rank: int) -> Verdict | None:
        """The verdict on a step; None on ranks other than 0."""
        verdict: Verdict | None = finished(self.post(plan, rank))
        return verdict

    def post(self, plan: StepPlan, rank: int) -> Verdict | PostedVerdict | None:
        """The verdict, or one that the device computes; results are taken in order."""
        start = time.perf_counter()
        if self._posted is not None and not follows(plan):
            self._posted.settle()
        self._seats.apply(plan)
        shape = self.device_step.shape_of(plan) if self.device_step else None
        if shape is not None:
            return self._post(plan, shape, rank, start)
        if self._posted is not None:
            self._posted.settle()
        step = self._seats.lay_out(plan)
        with torch.inference_mode():
            scored, last = PromptRows.of(step), self._model.info.num_layers
            capture = self._capture() if scored is None else self._capture(last)
            logits, hidden = self._model.forward_capturing(step, self._cache, capture)
            states = dict(zip(capture, hidden, strict=True))
            prompt = scored.logprobs(self._model, states[last]) if scored else None
            judges = plan.appends or (self._head is not None and self._head.on_every_rank)
            if rank != 0 and not judges:
                return None
            verdict = (
                verify(self._rule, step, logits)
                if len(step.rows)
                else Verdict.empty(step.step, step.num_seqs)
            )
            if rank == 0:
                for feed in self._feeds.values():
                    feed.push(step, verdict, states)
            if self._head is not None:
                own = tuple(states[layer] for layer in self._head.capture)
                verdict = self._head.draft(step, verdict, own)
            if plan.appends:
                verdict = self._appended(plan, step, verdict)
            if rank != 0:
                return None
        forward_ms = (time.perf_counter() - start) * 1e3
        return replace(verdict, forward_ms=forward_ms, prompt_logprobs=prompt)

    def _appended(self, plan: StepPlan, step: StepInput, verdict: Verdict) -> Verdict:
        """Brings the seats up to date, so that a step planned before this verdict can be next."""
        self._cache.apply_moves(moves_of(step, verdict))
        self._seats.append(plan, verdict)
        self._seats.keep_drafts(plan, verdict.next_drafts)
        if self.device_step is not None:
            self.device_step.append(plan, verdict)
        return replace(verdict, compacted=True)

    def _post(self, plan: StepPlan, shape: StepShape, rank: int, start: float) -> PostedVerdict:
        """Gives the device a step; the host's seats follow it when its verdict is taken."""
        assert self.device_step is not None
        before, service = self._posted, self.device_step
        with torch.inference_mode():
            self._cache.apply_moves(plan.kv_moves)  # of a step that took the host path
            posted = service.post(plan, shape)
        if before is not None:
            before.settle()  # while the device computes this one

        def collect() -> Verdict | None:
            verdict = service.collect(posted)
            if plan.appends:
                self._seats.append(plan, verdict)
                self._seats.keep_drafts(plan, verdict.next_drafts)
            begin, self._free_at = max(start, self._free_at), time.perf_counter()
            spent_ms = (self._free_at - begin) * 1e3
            return replace(verdict, forward_ms=spent_ms) if rank == 0 else None

        self._posted = PostedVerdict(service, collect)
        return self._posted

    def open_feed(self, message: OpenFeatures) -> None:
        """Sends the features of all later steps to a separate head, without waiting for it."""
        old = self._feeds.pop(message.link, None)
        if old is not None:
            old.close()
        self._feeds[message.link] = Feed(message, self._model.device)

    def close_feeds(self) -> None:
        """Closes the links to separate heads."""
        for feed in self._feeds.values():
            feed.close()
        for feed in self._feeds.values():
            feed.join()

    def _capture(self, *more: int) -> tuple[int, ...]:
        """Layers whose inputs any head reads, and `more`, ascending."""
        layers = {*more, *(self._head.capture if self._head else ())}
        for feed in self._feeds.values():
            layers.update(feed.capture)
        return tuple(sorted(layers))


def moves_of(step: StepInput, verdict: Verdict) -> IntArray:  # [num_moves, 2]
    """From the accepted nodes' slots to those that a chain of them would have."""
    counts = verdict.num_accepted
    roots = np.repeat(step.root_rows, counts)
    lanes = np.arange(len(roots)) - np.repeat(verdict.path_start[:-1], counts)
    moved = verdict.path != lanes
    rows = np.stack([verdict.path, lanes], axis=1)[moved] + roots[moved, None] + 1
    return ints(step.slot_mapping[rows])
