"""The device step as the target's service uses it: a plan in, a verdict out, or None.

Every plan goes through `shape_of`, whichever path computes it, so that the seats on the device are
current; a step without a shape is the host path's, and what it emitted goes through `append`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...scheduler.plan import StepPlan
from ...scheduler.types import IntArray, Verdict, ints
from ..attention import KVCache
from ..head import HeadService
from ..model import PagedModel
from ..model.family import FamilyRunner
from ..model.family.decoder import FamilyModel
from ..spec import DeviceStepReport
from .capture import Captured, CaptureError, CudaGraphs, GraphApi
from .draft import DeviceHead
from .edits import LOGPROB_WORDS, read_logprobs
from .outcome import OutcomeReader
from .seats import DeviceSeats, SeatSizes
from .shape import SeatKinds, StepShape, all_shapes
from .step import DeviceStep, outcome_words, read_drafts, read_outcome

log = logging.getLogger(__name__)

RULE = "coupled"  # the only one that the device step computes


def obstacle(model: PagedModel, rule: str) -> str:
    """Why the device step cannot serve the target on any device, or nothing; heads aside."""
    runner = model.runner
    if not isinstance(runner, FamilyRunner):
        return "transformers' modules compute the target"
    if not runner.model.ops.reads_device_only:
        return f"the operations {runner.model.ops.name!r} plan steps on the host"
    if rule != RULE:
        return f"the rule is {rule!r}"
    if any(rope.long_frequencies is not None for rope in runner.model.ropes):
        return "the rotary frequencies depend on the length of a draft"
    return ""


@dataclass(frozen=True, slots=True)
class PostedStep:
    """A step that the device has been given."""

    plan: StepPlan
    shape: StepShape
    asked: IntArray | None  # [num_seqs], log-probabilities of each sequence; None: of no one


class DeviceStepService:
    """One rank's device step; `cache` has one block more than requests own."""

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        sizes: SeatSizes,
        head: HeadService | None = None,
    ) -> None:
        assert cache.num_blocks == sizes.num_blocks + 1, (cache.num_blocks, sizes)
        assert (head is None) == (sizes.num_draft_nodes == 0), sizes
        self._sizes, self._collective = sizes, model.collective
        self._seats = DeviceSeats(sizes, cache.device)
        self._kinds = SeatKinds(sizes.num_seats, sizes.num_draft_nodes, has_edits=sizes.has_edits)
        drafter = None if head is None else DeviceHead(head, cache, self._seats)
        self._step = DeviceStep(_family(model), cache, self._seats, drafter)
        self._captured = Captured(self._step.run, model.collective, cache.device)
        self._reader = OutcomeReader(self._step.outcome)
        self._logprobs = OutcomeReader(self._step.logprobs)
        self._capture_error = ""
        if sizes.edits_obstacle:
            log.info(
                "device step: requests with penalties, biases, min_tokens or log-probabilities "
                "take the host path: %s",
                sizes.edits_obstacle,
            )
        self.num_steps = 0

    def capture(self, api: GraphApi | None = None) -> None:
        """Captures every shape that a load can have; before the first step, on all ranks.

        A failure is logged, and steps are launched kernel by kernel, on every rank.
        """
        try:
            with torch.inference_mode():
                self._captured.capture(
                    self._shapes,
                    lambda: api or CudaGraphs(self._seats.device),
                    self._stage_padding,
                    shows_progress=self._collective.rank == 0,
                )
        except CaptureError as error:
            self._capture_error = str(error)
            log.warning("device step: not captured, it runs uncaptured: %s", self._capture_error)

    @property
    def report(self) -> DeviceStepReport:
        """What `/stats` shows."""
        return DeviceStepReport(
            True,
            num_shapes=len(self._shapes),
            num_captured=self._captured.num_captured,
            capture_error=self._capture_error,
            drafts=self._sizes.num_draft_nodes > 0,
            host_edits=self._sizes.edits_obstacle,
        )

    @property
    def outcome(self) -> Tensor:  # [num_words] int32
        """The buffer in which steps leave their outcome."""
        return self._step.outcome

    @property
    def num_captured(self) -> int:
        return self._captured.num_captured

    @property
    def _draft_width(self) -> int:
        return self._sizes.num_draft_nodes

    @property
    def _shapes(self) -> list[StepShape]:
        return all_shapes(self._sizes.num_seats, self._sizes.num_draft_nodes)

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """Takes in what `plan` changes; None: the host path computes it."""
        self._kinds.apply(plan)
        self._seats.apply(plan)
        shape = self._kinds.shape(plan)
        if shape is None:
            self._seats.flush()
        return shape

    def verify(self, plan: StepPlan, shape: StepShape) -> Verdict:
        """The verdict on a step; waits for it."""
        return self.collect(self.post(plan, shape))

    def post(self, plan: StepPlan, shape: StepShape) -> PostedStep:
        """Gives the device a step, behind the one before; `collect` takes them in order."""
        self._seats.stage(plan, shape)
        self._seats.flush()
        self._captured.run(shape)
        self._reader.post(outcome_words(shape.num_seqs, shape.query_len, self._draft_width))
        asked = self._kinds.num_logprobs(plan)
        has_scores = bool((asked >= 0).any())
        if has_scores:
            self._logprobs.post(shape.num_rows * LOGPROB_WORDS)
        self.num_steps += 1
        return PostedStep(plan, shape, asked if has_scores else None)

    @property
    def is_ready(self) -> bool:
        """Whether `collect` would not wait."""
        return self._reader.is_ready

    def collect(self, posted: PostedStep) -> Verdict:
        """The verdict on the oldest posted step; waits for it."""
        plan, shape, asked = posted.plan, posted.shape, posted.asked
        words = self._reader.collect()
        verdict = read_outcome(plan.step, len(plan.seats), shape, words)
        if asked is not None:
            scores = self._logprobs.collect()
            logprobs = read_logprobs(verdict, asked, shape, self._sizes.vocab_size, scores)
            verdict = replace(verdict, logprobs=logprobs)
        if plan.appends:
            self._seats.append(plan, verdict, on_device=True)
        if self._draft_width and shape.num_nodes:
            lens = ints(plan.context_lens + 1 + verdict.num_emitted)
            if plan.appends:  # the plan need not have the contexts
                lens = self._seats.known_lens(plan)
            drafts = read_drafts(lens, shape, words, self._draft_width)
            verdict = replace(verdict, next_drafts=drafts)
        return verdict

    def append(self, plan: StepPlan, verdict: Verdict) -> None:
        """Appends what the host path emitted, and takes over what a head drafted there."""
        self._seats.append(plan, verdict, on_device=False)
        self._seats.put_drafts(plan, verdict.next_drafts)
        self._seats.flush()

    def _stage_padding(self, shape: StepShape) -> None:
        self._seats.stage_padding(shape)
        self._seats.flush()


def _family(model: PagedModel) -> FamilyModel:
    assert isinstance(model.runner, FamilyRunner), type(model.runner)
    return model.runner.model
