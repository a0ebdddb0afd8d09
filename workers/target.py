"""The target's part of a worker: one forward, then the verification rule on rank 0.

Where steps may be planned before a verdict is back, or a head runs on every rank, every rank judges
the step: noise and logits are the same on all of them.

Hidden states that heads read are passed to the head in this process and sent to separate heads.
"""

from __future__ import annotations

import time
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
from .transport.links import OpenFeatures
from .verify import Rule, verify


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
        if head is not None:
            head.attach(self._cache)

    def verify(self, plan: StepPlan, rank: int) -> Verdict | None:
        """The verdict on a step; None on ranks other than 0."""
        start = time.perf_counter()
        self._seats.apply(plan)
        shape = self.device_step.shape_of(plan) if self.device_step else None
        if shape is not None:
            verdict = self._on_device(plan, shape)
            if rank != 0:
                return None
            return replace(verdict, forward_ms=(time.perf_counter() - start) * 1e3)
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

    def _on_device(self, plan: StepPlan, shape: StepShape) -> Verdict:
        """The verdict of the device step; the host's seats follow it."""
        assert self.device_step is not None
        with torch.inference_mode():
            self._cache.apply_moves(plan.kv_moves)  # of a step that took the host path
            verdict = self.device_step.verify(plan, shape)
        if plan.appends:
            self._seats.append(plan, verdict)
            self._seats.keep_drafts(plan, verdict.next_drafts)
        return verdict

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
