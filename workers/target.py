"""The target's part of a worker: one forward, then the verification rule.

Normally, rank 0 alone computes the verdict. If steps may be planned before a verdict is back, or a
head runs on every rank, every rank computes it; noise and logits are the same on all of them.

Hidden states that heads read are passed to the head in this process and sent to separate heads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scheduler.types import (
    NO_MOVES,
    IntArray,
    Logprobs,
    StepInput,
    StepPlan,
    Verdict,
    ints,
    starts_of,
)
from .device_step.seats import SeatSizes
from .device_step.service import DeviceStepService, merged
from .device_step.shape import StepShape
from .head import HeadService
from .model.checkpoint.pooling import Pooler
from .model.paged import PagedModel
from .model.stages import Stage
from .seats import Seats, gather, part_of
from .transport.channel import OpenFeatures, PendingReply
from .transport.features import FeatureQueue, Features, FeatureSender, VerdictFeed
from .verify import Rule, verify
from .verify.process import token_logprobs

log = logging.getLogger(__name__)


class Feed:
    """The target's end of a feature link: queues what one separate head reads of each step.

    It never waits for the head: states are gathered (on a GPU, the copy is started) and queued. An
    error closes the link and never fails a step.
    """

    def __init__(self, message: OpenFeatures, device: torch.device) -> None:
        offer = message.offer
        assert offer is not None, "a link leads somewhere"
        self.capture = message.capture
        self._serial = 0
        self._moves = NO_MOVES  # applied by the target, not yet by the head
        self._queue: FeatureQueue = offer.queue or FeatureQueue()
        self._leaves_process = offer.queue is None
        self._leaves_device = self._leaves_process and offer.store is None
        self._sender: FeatureSender | None = None
        if self._leaves_process:
            self._sender = FeatureSender(self._queue, offer, device, message.timeout_s)

    def push(
        self,
        step: StepInput,
        verdict: Verdict,
        states: Mapping[int, Tensor],  # by captured layer, [num_tokens, hidden_size]
        places: IntArray | None = None,  # [num_tokens], row of each token in `states`
    ) -> None:
        """Queues the states of known tokens and accepted nodes, without those of rejected nodes.

        The head applies moves with the next step, regardless of when the target applies them.
        """
        if self._queue.closed:
            return
        if len(self._moves):
            step = replace(step, kv_moves=np.concatenate([self._moves, step.kv_moves]))
        self._moves = moves_of(step, verdict) if verdict.compacted else NO_MOVES
        try:
            self._queue.put(self._gathered(step, verdict, states, places))
        except Exception:  # most likely out of memory; costs drafts, must not fail requests
            log.warning("closing a feature link after an error", exc_info=True)
            self.close()
        self._serial += 1

    def close(self) -> None:
        """Closes the link without waiting."""
        self._queue.close()

    def join(self) -> None:
        """Waits for the sender to end, after `close`."""
        if self._sender is not None:
            self._sender.join()

    def _gathered(
        self,
        step: StepInput,
        verdict: Verdict,
        states: Mapping[int, Tensor],
        places: IntArray | None,
    ) -> Features:
        rows = kept_rows(step, verdict)
        hidden = [states[layer] for layer in self.capture]
        if places is not None or len(rows) < len(step.token_ids):
            taken = rows if places is None else places[rows]
            index = torch.from_numpy(taken).to(hidden[0].device)
            hidden = [each.index_select(0, index) for each in hidden]
        ready = None
        if hidden[0].is_cuda and self._leaves_process:
            if self._leaves_device:
                hidden = [_pinned(each) for each in hidden]
            ready = torch.cuda.Event()
            ready.record()
        hidden = [each.contiguous() for each in hidden]
        return Features(
            self._serial, _head_step(step), _head_verdict(verdict), rows, tuple(hidden), ready
        )


def kept_rows(step: StepInput, verdict: Verdict) -> IntArray:  # [num_rows], ascending
    """Returns flat rows that stay in the sequences: known tokens and accepted nodes."""
    last = np.repeat(step.root_rows, step.query_lens)
    kept: NDArray[np.bool_] = np.arange(len(step.token_ids)) <= last
    kept[verdict.accepted_rows(step)] = True
    return np.flatnonzero(kept).astype(np.int32)


def _pinned(states: Tensor) -> Tensor:  # [num_rows, hidden_size], same shape
    """Returns an asynchronous copy in pinned host memory."""
    copy = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    return copy.copy_(states, non_blocking=True)


def _head_step(step: StepInput) -> StepInput:
    """Returns `step` without the fields that only the verification rule reads."""
    sampling = replace(step.sampling, ends=(), penalties=(), biases=())
    return replace(step, draft_probs=None, masks=None, sampling=sampling)


def _head_verdict(verdict: Verdict) -> Verdict:
    """Returns `verdict` without the fields that no head reads."""
    return replace(
        verdict, logprobs=None, window=None, window_start=None, next_drafts=None, compacted=False
    )


_MAX_LOGITS = 2**24  # elements at a time: 64 MiB in float32


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt rows for which log-probabilities are requested; another known token follows each.

    Only these rows and the sampled ones get logits, a limited number at a time.
    """

    rows: IntArray  # [num_scored], in the flat query
    next_tokens: IntArray  # [num_scored], the token that each row scores
    top: int  # the largest number of alternatives that a sequence requests

    @classmethod
    def of(cls, step: StepInput) -> PromptRows | None:
        """Returns the rows that `step` must score; None if there are none."""
        wanted = step.sampling.num_prompt_logprobs
        if wanted is None:
            return None
        assert step.next_tokens is not None, "the scheduler's steps name the following tokens"
        rows: list[IntArray] = []
        tokens: list[IntArray] = []
        for seq in np.flatnonzero(wanted >= 0).tolist():
            begin, root = int(step.query_start[seq]), int(step.root_rows[seq])
            tokens.append(step.token_ids[begin + 1 : root + 1])
            rows.append(np.arange(begin, root, dtype=np.int32))
            if not step.samples[seq]:  # the chunk's last token is not the prompt's last
                rows.append(ints([root]))
                tokens.append(step.next_tokens[seq : seq + 1])
        found = ints(np.concatenate(rows))
        return cls(found, ints(np.concatenate(tokens)), int(wanted.max())) if len(found) else None

    def logprobs(
        self,
        model: PagedModel,
        states: Tensor,  # [num_tokens], after the final norm
    ) -> Logprobs:
        """Returns their log-probabilities; collective."""
        size = max(1, _MAX_LOGITS // model.info.vocab_size)
        parts = []
        for begin in range(0, len(self.rows), size):
            tokens = self.next_tokens[begin : begin + size]
            rows = self.rows[begin : begin + size]
            chosen = torch.from_numpy(rows).to(states.device, torch.int64)
            logits = model.logits(states.index_select(0, chosen))
            parts.append(token_logprobs(logits, tokens, self.top))
        columns = zip(*(part.columns for part in parts), strict=True)
        return Logprobs(*map(np.concatenate, columns))


class PostedVerdict(PendingReply):
    """The verdict on a step that the device computes; None on ranks other than 0."""

    def __init__(
        self,
        service: DeviceStepService,
        collect: Callable[[], Verdict | None],
        starts: IntArray,  # [num_seqs of its shape + 1], first rows
    ) -> None:
        super().__init__()
        self._service, self._collect, self.starts = service, collect, starts

    @property
    def is_ready(self) -> bool:
        try:
            return self._is_settled or self._service.is_ready
        except RuntimeError:  # raised by the device; `result` raises it
            return True

    def _finish(self) -> Verdict | None:
        with torch.inference_mode():
            return self._collect()


def follows(plan: StepPlan) -> bool:
    """Returns True if the device can be given a step before the verdict on the last one is known.

    Everything that the step changes on the host must be independent of that verdict: no seat
    changes its owner, and no tokens or moves are sent.
    """
    moves = len(plan.tokens) or len(plan.kv_moves) or len(plan.closings)
    return not plan.openings and not moves


class TargetService:
    """A loaded target and its cache; rank 0 returns the verdict.

    Args:
        stage: the pipeline stage; the last one's ranks verify.
    """

    def __init__(
        self,
        model: PagedModel,
        num_blocks: int,
        block_size: int,
        rule: Rule,
        head: HeadService | None = None,
        device_step: SeatSizes | None = None,
        max_num_seqs: int = 1,
        num_checkpoints: int = 0,
        stage: Stage | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        self._model, self._pooler = model, pooler
        self._passes_on = stage is not None and not stage.is_last
        self._passed: dict[int, tuple[int, ...]] = {}  # layers for the last stage, by link
        num_spare = 0 if device_step is None else 1  # blocks that padding writes to
        extra_layers = head.kv_shapes if head else ()
        self._cache = model.new_cache(
            num_blocks + num_spare, block_size, extra_layers, max_num_seqs, num_checkpoints
        )
        self.device_step: DeviceStepService | None = None
        if device_step is not None:
            drafting = head if device_step.num_draft_nodes else None
            self.device_step = DeviceStepService(model, self._cache, device_step, drafting)
        mirror = None if self.device_step is None else self.device_step.seats
        numbers = {} if model.adapters is None else model.adapters.numbers
        self._seats = Seats(block_size, mirror, numbers)
        self._rule = rule
        self._head = head
        self._feeds: dict[int, Feed] = {}  # by link
        self._told: dict[int, VerdictFeed] = {}  # by link: draft models, which read only verdicts
        self._fed: dict[int, tuple[int, ...]] = {}  # layers by link, the same on every rank
        if stage is not None:
            layers = (model.info.num_layers, model.device)
            self._passed[-1] = stage.capture_of_last(head.capture if head else (), *layers)
        self._capture = self._captured_layers()
        self.num_beside = 0  # steps of which the device step computed only a part
        self._posted: PostedVerdict | None = None  # the last step given to the device
        self._free_at = 0.0  # upper bound of the time at which the device finished the step before
        if head is not None:
            head.attach(self._cache)

    def post(self, plan: StepPlan, rank: int) -> Verdict | PostedVerdict | None:
        """Returns the verdict, possibly pending on the device; results are taken in order."""
        start = time.perf_counter()
        if self._posted is not None and not follows(plan):
            self._posted.settle()
        self._seats.apply(plan)
        shape = self._shape_of(plan)
        if shape is not None:
            return self._post(plan, shape, rank, start)
        if self._posted is not None:
            self._posted.settle()
        parts = self._parts(plan)
        if parts is not None:
            return self._post_beside(plan, *parts, rank, start)
        if plan.own_drafts:
            plan = self._with_own_drafts(plan)
        step = self._seats.lay_out(plan)
        if self._passes_on:
            self._model.forward_capturing(step, self._cache, self._capture)
            return None
        judges = rank == 0 or plan.appends
        judges |= self._head is not None and self._head.on_every_rank
        with torch.inference_mode():
            verdict, states = self._verify(step, rank, judges=judges)
            if verdict is None:
                return None
            if rank == 0:
                self._tell(verdict)
                told = replace(verdict, compacted=plan.appends)  # applied before the next step
                for feed in self._feeds.values():
                    feed.push(step, told, states)
            verdict = self._drafted(step, verdict, states)
            if plan.appends:
                verdict = self._appended(plan, step, verdict)
            if rank != 0:
                return None
        return replace(verdict, forward_ms=(time.perf_counter() - start) * 1e3)

    def _verify(
        self, step: StepInput, rank: int, *, judges: bool
    ) -> tuple[Verdict | None, dict[int, Tensor]]:
        """Runs the forward and the rule.

        Args:
            judges: False: no verdict is computed.

        Returns:
            The verdict, and the inputs of captured layers, [num_tokens, hidden_size].
        """
        scored, last, capture = None, self._model.info.num_layers, self._capture
        if step.sampling.num_prompt_logprobs is not None:
            scored = PromptRows.of(step)
        if scored is not None or step.sampling.pools is not None:
            capture = capture if last in capture else (*capture, last)
        logits, hidden = self._model.forward_capturing(step, self._cache, capture)
        states = dict(zip(capture, hidden, strict=True))
        prompt = scored.logprobs(self._model, states[last]) if scored else None
        if not judges:
            return None, states
        pooled: dict[str, Any] = {}
        if rank == 0 and step.sampling.pools is not None:
            pooled = self._pooled(step, states.get(last), logits, step.sampling.pools)
        verdict = (
            verify(self._rule, step, logits)
            if len(step.rows)
            else Verdict.empty(step.step, step.num_seqs)
        )
        return replace(verdict, prompt_logprobs=prompt, **pooled), states

    @torch.inference_mode()
    def _judged(
        self, plan: StepPlan, step: StepInput, rank: int, *, appends: bool
    ) -> tuple[Verdict, dict[int, Tensor]]:
        """Returns the compacted verdict with the next drafts, and states; runs on every rank."""
        verdict, states = self._verify(step, rank, judges=True)
        assert verdict is not None
        verdict = self._drafted(step, verdict, states)
        if appends:
            return self._appended(plan, step, verdict), states
        self._cache.apply_moves(moves_of(step, verdict))
        return replace(verdict, compacted=True), states

    def _drafted(self, step: StepInput, verdict: Verdict, states: dict[int, Tensor]) -> Verdict:
        """Returns `verdict` with the next drafts of a head in this rank."""
        if self._head is None:
            return verdict
        own = tuple(states[layer] for layer in self._head.capture)
        return self._head.draft(step, verdict, own)

    def _with_own_drafts(self, plan: StepPlan) -> StepPlan:
        """Returns `plan` with the nodes that only the ranks have; waits for the device."""
        if self.device_step is None or not plan.own_drafts:
            return plan
        made = self.device_step.seats.read_drafts(plan.seats, plan.max_nodes)
        drafts = gather(made, np.ones(len(made), dtype=np.bool_))
        return replace(plan, drafts=drafts, own_drafts=False)

    def _parts(self, plan: StepPlan) -> tuple[NDArray[np.bool_], StepPlan, StepShape] | None:
        """Finds the sequences of a plan without a shape that the device step can compute.

        Returns these sequences, their part of the plan, and its shape; None if there are none or if
        the device step cannot compute them together.
        """
        if self.device_step is None or not self._leaves_all:
            return None
        own = self.device_step.takes(plan)
        if not own.any() or own.all():
            return None
        part = part_of(plan, own, self._seats.samples(plan))
        shape = self.device_step.seats.kinds.shape(part)
        return None if shape is None else (own, part, shape)

    def _post_beside(
        self,
        plan: StepPlan,
        own: NDArray[np.bool_],  # [num_seqs]
        part: StepPlan,
        shape: StepShape,
        rank: int,
        start: float,
    ) -> Verdict | None:
        """Runs the device step of a part of the plan, and the other sequences beside it.

        The host launches the others' kernels while the device replays the graph, so prompts in the
        batch do not force its running requests onto the host path. Every rank computes the verdict,
        and both parts are compacted.
        """
        assert self.device_step is not None
        feeds = list(self._feeds.values())
        whole = self._seats.lay_out(plan) if feeds else None
        rest = self._with_own_drafts(part_of(plan, ~own, self._seats.samples(plan)))
        step = self._seats.lay_out(rest)
        posted = self._post(replace(part, kv_moves=plan.kv_moves), shape, rank, start, feeds=[])
        try:
            verdict, states = self._judged(rest, step, rank, appends=plan.appends)
        finally:
            posted.settle()
        first = posted.result()
        self.num_beside += 1
        if rank != 0 or first is None:
            return None
        verdict = merged(first, own, verdict)
        self._tell(verdict)
        if whole is not None:
            self._feed(feeds, whole, verdict, posted.starts, own, states)
        return replace(verdict, forward_ms=(time.perf_counter() - start) * 1e3)

    def _shape_of(self, plan: StepPlan) -> StepShape | None:
        """Returns the shape of an applied plan; None if the host path computes it."""
        if self.device_step is None:
            return None
        shape = self.device_step.shape_of(plan)
        if shape is not None and not self._leaves_all:
            self.device_step.seats.flush()
            return None
        return shape

    @property
    def _leaves_all(self) -> bool:
        """Whether device steps provide everything that separate heads read."""
        known = self.device_step.features.keys() if self.device_step else set()
        return all(known >= set(each) for each in self._fed.values())

    def _pooled(
        self,
        step: StepInput,
        states: Tensor | None,  # [num_tokens, hidden_size], behind the final norm
        logits: Tensor,  # [num_rows, vocab]
        pools: NDArray[np.bool_],  # [num_seqs]
    ) -> dict[str, Any]:
        """Returns the verdict's fields for embedding or score requests whose text is complete."""
        chosen = np.flatnonzero(pools & step.samples)
        if not len(chosen):
            return {}
        assert self._pooler is not None, "requests are checked for it"
        assert states is not None, "they are captured where they are asked for"
        rows = step.root_rows[chosen]
        own = torch.from_numpy(rows).to(states.device, torch.int64)
        at = torch.from_numpy(np.searchsorted(step.rows, rows)).to(logits.device, torch.int64)
        values = self._pooler.values(states.index_select(0, own), logits.index_select(0, at))
        return {"pooled": values, "pooled_rows": ints(chosen)}

    def _appended(self, plan: StepPlan, step: StepInput, verdict: Verdict) -> Verdict:
        """Updates the seats, so that a step planned before this verdict can be next."""
        self._cache.apply_moves(moves_of(step, verdict))
        self._seats.append(plan, verdict)
        if self.device_step is not None:
            self.device_step.seats.put_drafts(plan.seats, verdict.next_drafts)
            self.device_step.seats.flush()
        return replace(verdict, compacted=True)

    def _post(
        self,
        plan: StepPlan,
        shape: StepShape,
        rank: int,
        start: float,
        feeds: Sequence[Feed] | None = None,  # None: all feeds
    ) -> PostedVerdict:
        """Gives the device a step; the host's seats are updated when its verdict is taken."""
        assert self.device_step is not None
        before, service = self._posted, self.device_step
        if before is not None and self._feeds:
            before.settle()  # its output for them is read before this step overwrites it
        with torch.inference_mode():
            if self._head is not None:
                self._head.catch_up()  # for steps that took the host path
            self._cache.apply_moves(plan.kv_moves)  # likewise
            posted = service.post(plan, shape)
        if before is not None:
            before.settle()  # while the device computes this one
        is_whole = feeds is None
        feeds = list(self._feeds.values()) if feeds is None else feeds
        fed = self._seats.lay_out(plan) if feeds else None

        def collect() -> Verdict | None:
            verdict = service.collect(posted, self._seats.known_lens(plan))
            if is_whole:
                self._tell(verdict)
            if fed is not None:
                self._feed(feeds, fed, verdict, posted.starts)
            if plan.appends:
                self._seats.append(plan, verdict, is_mirrored=True)
            begin, self._free_at = max(start, self._free_at), time.perf_counter()
            spent_ms = (self._free_at - begin) * 1e3
            return replace(verdict, forward_ms=spent_ms) if rank == 0 else None

        self._posted = PostedVerdict(service, collect, posted.starts)
        return self._posted

    def _feed(
        self,
        feeds: Sequence[Feed],
        step: StepInput,
        verdict: Verdict,
        starts: IntArray,  # [num_seqs of the shape + 1], first rows on the device
        own: NDArray[np.bool_] | None = None,  # [num_seqs], computed there; None: all
        others: Mapping[int, Tensor] = MappingProxyType({}),  # by layer, the others' tokens' states
    ) -> None:
        """Sends the device step's features for separate heads, and those captured beside it."""
        assert self.device_step is not None
        states: dict[int, Tensor] = self.device_step.features
        lens = step.query_lens
        first = np.zeros(step.num_seqs, dtype=np.int32)
        if own is None:
            first[:] = starts[: step.num_seqs]
        else:
            num_rows = len(next(iter(states.values())))
            first[own] = starts[: np.count_nonzero(own)]
            first[~own] = num_rows + starts_of(lens[~own])[:-1]
            both = states.keys() & others.keys()
            states = {layer: torch.cat([states[layer], others[layer]]) for layer in both}
        lanes = np.arange(len(step.token_ids)) - step.query_start[:-1].repeat(lens)
        places = ints(first.repeat(lens) + lanes)
        for feed in feeds:
            feed.push(step, verdict, states, places)

    def _tell(self, verdict: Verdict) -> None:
        for told in self._told.values():
            told.push(verdict)

    def note_feed(self, message: OpenFeatures) -> None:
        """Records on every rank what a head reads; this may rule out the device step."""
        self._fed.pop(message.link, None)
        if message.offer is not None:
            self._fed[message.link] = message.capture
        if self.device_step is not None and not self.device_step.features.keys() >= set(
            message.capture
        ):
            log.warning(
                "device step: off while a head reads layers %s, of which it leaves %s",
                message.capture,
                tuple(self.device_step.features),
            )

    def open_feed(self, message: OpenFeatures) -> None:
        """Sends the features of all later steps to a separate head, without waiting for it.

        Without an offer, the head's link is closed and nothing is gathered for it any more. A
        receiver that reads no layer gets only the verdicts.
        """
        old = self._feeds.pop(message.link, None) or self._told.pop(message.link, None)
        if old is not None:
            old.close()
        if message.offer is not None and not message.capture:
            self._told[message.link] = VerdictFeed(message)
        elif message.offer is not None:
            self._feeds[message.link] = Feed(message, self._model.device)
        self._capture = self._captured_layers()

    def pass_on(self, message: OpenFeatures) -> None:
        """Passes what that head reads to the last stage; runs on other stages' peers of rank 0."""
        self._passed[message.link] = message.capture
        self._capture = self._captured_layers()

    def close_feeds(self) -> None:
        """Closes the links to separate drafters."""
        for told in self._told.values():
            told.close()
        for feed in self._feeds.values():
            feed.close()
        for feed in self._feeds.values():
            feed.join()

    def _captured_layers(self) -> tuple[int, ...]:
        """Returns layers whose inputs any head reads, ascending."""
        layers = set(self._head.capture if self._head else ())
        layers.update(*self._passed.values())
        for feed in self._feeds.values():
            layers.update(feed.capture)
        return tuple(sorted(layers))


def moves_of(step: StepInput, verdict: Verdict) -> IntArray:  # [num_moves, 2]
    """Returns moves from the accepted nodes' slots to the slots of a chain of them."""
    counts = verdict.num_accepted
    roots = np.repeat(step.root_rows, counts)
    lanes = np.arange(len(roots)) - np.repeat(verdict.path_start[:-1], counts)
    moved = verdict.path != lanes
    rows = np.stack([verdict.path, lanes], axis=1)[moved] + roots[moved, None] + 1
    return ints(step.slot_mapping[rows])
