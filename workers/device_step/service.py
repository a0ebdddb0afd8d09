"""The device step as the target's service uses it: it takes a plan and returns a verdict or None.

The seats on the device mirror the rank's, whichever path computes a step; a step without a shape
takes the host path.

CUDA graphs, one per shape, are captured before the first request. A graph launches all kernels of a
step at once. Graphs share one memory pool, since no two run at the same time; the largest is
captured first. Shapes that are not captured run eagerly.

Several ranks capture the same shapes or none: otherwise, a rank that failed would run other
collectives than the others. So no step waits for another rank before its graph exists. A shape is
first warmed up without collectives, which compiles its kernels and allocates its memory. Then its
collectives are executed alone, which opens connections. Then it is recorded, which executes no
collective. After each of these stages, the ranks agree whether to continue. Only a failure of the
collectives themselves ends the start, since nothing could be served without them.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.types import IntArray, NextDrafts, StepPlan, Verdict, ints, starts_of
from ..attention import KVCache, moves_whole_words
from ..collective import Agreement, Call, Collective
from ..head import HeadService
from ..model.family import FamilyRunner
from ..model.family.decoder import FamilyModel
from ..model.paged import PagedModel
from ..ops import DeviceLayout, DeviceOps
from ..spec import DeviceStepReport
from ..verify.device_settings import DeviceEdits, DeviceSettings
from ..verify.process import joined_logprobs
from .draft import DeviceHead
from .seats import (
    LOGPROB_WORDS,
    DeviceSeats,
    SeatSizes,
    Share,
    best_of_ranks,
    read_logprobs,
    walk_of,
)
from .shape import Sampler, StepShape, all_shapes

ALONE = Collective.single()


class DeviceStep:
    """The step of one rank's model, cache and seats, and of the head that drafts there.

    It consists of torch operations between fixed addresses, without host reads: it reads the seats,
    computes the forward, draws, accepts, compacts, appends, and leaves its outcome in a fixed
    buffer. Its launches depend only on its `StepShape`, so it can be captured in a CUDA graph.
    """

    def __init__(
        self,
        model: FamilyModel,
        cache: KVCache,
        seats: DeviceSeats,
        head: DeviceHead | None = None,
        features: Tensor | None = None,  # [max_rows, num_fed_layers, hidden_size], output
    ) -> None:
        self.model, self.cache, self.seats, self.head = model, cache, seats, head
        assert (features is None) == (not seats.sizes.fed_layers), seats.sizes
        self._features = features
        self._ops = cast(DeviceOps, model.ops)  # checked by `obstacle`
        self._collective = ALONE if model.output is None else model.output.collective
        shapes = (StepShape(*size, Sampler.PLAIN) for size in seats.sizes.step_sizes)
        num_words = max(outcome_words(shape, seats.sizes) for shape in shapes)
        num_scores = LOGPROB_WORDS * seats.sizes.max_rows if seats.sizes.has_edits else 0
        self._places = cache.places
        self.words = torch.zeros(num_words + num_scores, dtype=torch.int32, device=seats.device)
        self.outcome, self.logprobs = self.words[:num_words], self.words[num_words:]

    def run(self, shape: StepShape) -> None:
        """Computes the staged step."""
        chooses = self.seats.sizes.chooses and shape.num_nodes > 0
        if chooses:
            self.seats.place_rows(shape)
        layout = self._ops.lay_out_on_device(self.seats.staged(shape))
        head, model, fed = self.head, self.model, self.seats.sizes.fed_layers
        capture = tuple(sorted({*fed, *(head.capture if head else ())}))
        context = model.context(layout.plan, self.cache)
        states, captured = model.states(context, None, capture)
        hidden = dict(zip(capture, captured, strict=True))
        if self._features is not None:
            read = [hidden[layer] for layer in fed]
            torch.stack(read, dim=1, out=self._features[: shape.num_rows])
        drawn = self._draw(states, layout, shape)
        rows = head.rows(layout, drawn, hidden) if head else None
        sampled = shape.sampler is not Sampler.PLAIN  # such shapes include requests with penalties
        outcome, left = self.outcome[: shape.num_rows], self.outcome[shape.num_rows :]
        walk = walk_of(self.seats, layout, shape, outcome, counts_tokens=sampled)
        settled = self._ops.settle_on_device(drawn, walk)
        if shape.num_nodes:
            starts = layout.plan.query_start
            self._ops.move_on_device(self.cache, self._places, settled, starts, shape.query_len)
        if head and rows and shape.num_nodes:
            head.draft(layout, settled, rows, shape, left)
            if chooses:
                num_starts = shape.num_seqs + 1
                end = outcome_words(shape, self.seats.sizes)
                self.outcome[end - num_starts : end].copy_(layout.plan.query_start)
        elif head:
            head.drop(layout)

    def _draw(
        self,
        states: Tensor,  # [num_rows, hidden_size]
        layout: DeviceLayout,
        shape: StepShape,
    ) -> Tensor:  # [num_rows] int32
        model = self.model
        if shape.sampler is not Sampler.PLAIN:
            share = Share.of(shape.num_rows, self._collective, states.device)
            return self._draw_whole(states, layout, shape, share)
        logits, rows = model.part_of_logits(states), (layout.next_positions, layout.settings)
        part = self._ops.gumbel_argmax_on_device(logits, *rows, model.first_token)
        return best_of_ranks(part, self._collective)

    def _draw_whole(
        self,
        states: Tensor,  # [num_rows, hidden_size]
        layout: DeviceLayout,
        shape: StepShape,
        share: Share,
    ) -> Tensor:  # [num_rows] int32
        """Draws from all logits of a row, which are on every rank or on one."""
        model, ops, tables, plan = self.model, self._ops, self.seats.edits, layout.plan
        num_rows = len(states)
        logits = model.logits(states) if share.rows is None else model.logits_of_own_rows(states)
        next_positions = share.take(layout.next_positions)
        settings = DeviceSettings._make(share.take(each) for each in layout.settings)
        if tables is None:
            chosen = ops.draw_on_device(logits.float(), next_positions, settings)
            if share.rows is None:
                return chosen
            return self._collective.all_gather(chosen, dim=0)[:num_rows]
        first, row_seats = share.take(layout.first), share.take(layout.row_seats)
        positions, lanes = share.take(plan.positions), share.take(layout.lanes)
        rows = (share.take(plan.ancestors), share.take(self.seats.step_masks(shape)))
        sizes = (plan.token_ids, shape.num_nodes)
        edits = DeviceEdits(tables, first, row_seats, positions, lanes, *rows, *sizes)
        edited = logits.to(torch.float32, copy=True)
        ops.edit_on_device(edited, edits)
        chosen = ops.draw_on_device(edited, next_positions, settings)
        values, ids = ops.logprobs_on_device(logits, chosen, edits)
        values = values.view(torch.int32)
        if share.rows is not None:
            sent = torch.cat([chosen[:, None], values, ids], dim=1)
            every = self._collective.all_gather(sent, dim=0)[:num_rows]
            chosen, values, ids = every.split([1, values.shape[1], ids.shape[1]], dim=1)
            chosen = chosen[:, 0].contiguous()
        parts = [values.reshape(-1), ids.reshape(-1)]
        torch.cat(parts, out=self.logprobs[: num_rows * LOGPROB_WORDS])
        return chosen


def outcome_words(shape: StepShape, sizes: SeatSizes) -> int:
    """Returns the size of an outcome: the tokens drawn at the rows, `~token` if not emitted.

    Steps with nodes add the next drafts of a head, in columns of the widths `draft_parts`, and, if
    the device decides on them, the first rows of the sequences.
    """
    num_drafted = shape.num_seqs * sum(sizes.draft_parts) if shape.num_nodes else 0
    num_starts = shape.num_seqs + 1 if sizes.chooses and shape.num_nodes else 0
    return shape.num_rows + num_drafted + num_starts


def read_outcome(
    step: int,
    known_lens: IntArray,  # [num_seqs], tokens before the step
    shape: StepShape,
    starts: IntArray,  # [num_seqs of the shape + 1], first rows
    words: NDArray[np.int32],  # [outcome_words]
    draft_parts: tuple[int, ...] = (),  # as in `SeatSizes`
) -> tuple[Verdict, NextDrafts | None]:
    """Returns the outcome as the host path would; the second is None if no head drafted."""
    num_seqs = len(known_lens)
    first = starts[:num_seqs]
    drawn = words[: starts[num_seqs]]
    emits = drawn >= 0  # a node comes after its parent, so lanes ascend along a path
    lanes = np.arange(len(drawn)) - np.repeat(first, np.diff(starts[: num_seqs + 1]))
    counts = np.add.reduceat(emits, first, dtype=np.int32)
    verdict = Verdict(
        step=step,
        emitted=drawn[emits],
        emitted_start=starts_of(counts),
        path=ints(lanes[emits & (lanes > 0)] - 1),
        path_start=starts_of(counts - 1),
        compacted=True,
    )
    if not draft_parts or not shape.num_nodes:
        return verdict, None
    ends = shape.num_rows + shape.num_seqs * np.cumsum(draft_parts)
    num_nodes, tokens, parents, *more = [  # [num_seqs, width] each, without padding sequences
        part.reshape(shape.num_seqs, -1)[:num_seqs]
        for part in np.split(words[shape.num_rows : ends[-1]], ends[:-1] - shape.num_rows)
    ]
    kept, sizes = np.arange(tokens.shape[1]) < num_nodes, num_nodes[:, 0]
    lens = np.where(sizes > 0, ints(known_lens + counts), 0)
    chances = more[0][kept].view(np.float32) if more else None
    made = NextDrafts(tokens[kept], parents[kept], starts_of(sizes), lens, chances=chances)
    return verdict, made


def merged(
    one: Verdict,
    own: NDArray[np.bool_],  # [num_seqs], the sequences of `one`
    other: Verdict,  # of the other sequences
) -> Verdict:
    """Joins the verdicts on two parts of a step; both must be compacted."""
    rows = np.flatnonzero(own), np.flatnonzero(~own)
    parts = (one, other)
    emits, accepts = (
        [np.repeat(*each) for each in zip(rows, counts, strict=True)]
        for counts in ([p.num_emitted for p in parts], [p.num_accepted for p in parts])
    )
    by_token, by_node = (
        np.argsort(np.concatenate(each), kind="stable") for each in (emits, accepts)
    )
    logprobs, drafts = None, [part.next_drafts for part in parts]
    if one.logprobs is not None or other.logprobs is not None:
        counts = [len(each) for each in emits]
        logprobs = joined_logprobs([part.logprobs for part in parts], counts, by_token)
    return replace(
        other,
        emitted=np.concatenate([one.emitted, other.emitted])[by_token],
        emitted_start=starts_of(np.bincount(np.concatenate(emits), minlength=len(own))),
        path=np.concatenate([one.path, other.path])[by_node],
        path_start=starts_of(np.bincount(np.concatenate(accepts), minlength=len(own))),
        logprobs=logprobs,
        next_drafts=_merged_drafts(drafts, rows) if any(drafts) else None,
        pooled_rows=ints(rows[1][other.pooled_rows]),
    )


def _merged_drafts(
    parts: Sequence[NextDrafts | None], rows: Sequence[NDArray[np.intp]]
) -> NextDrafts:
    """Joins drafts; `rows` are the sequences of each part."""
    found = [
        NextDrafts.empty(len(own)) if part is None else part
        for part, own in zip(parts, rows, strict=True)
    ]
    counts = [np.diff(part.start) for part in found]
    owners = np.concatenate([np.repeat(*each) for each in zip(rows, counts, strict=True)])
    order, whole = np.argsort(owners, kind="stable"), np.concatenate(rows)
    by_row = np.argsort(whole)
    chances = None
    drafted = [part for part in found if len(part.tokens)]
    if drafted and all(part.chances is not None for part in drafted):
        none = np.zeros(0, dtype=np.float32)
        each = [none if part.chances is None else part.chances for part in found]
        chances = np.concatenate(each)[order]
    return NextDrafts(
        np.concatenate([part.tokens for part in found])[order],
        np.concatenate([part.parents for part in found])[order],
        starts_of(np.concatenate(counts)[by_row]),
        np.concatenate([part.lens for part in found])[by_row],
        error=found[0].error or found[1].error,
        chances=chances,
    )


log = logging.getLogger(__name__)

Work = Callable[[], None]
Result = TypeVar("Result")
Shape = TypeVar("Shape")


class CudaGraphs:
    """Records work on a device for replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        """Runs `work` where it will be recorded, to compile its kernels."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        """Records `work` and returns its replay; its collectives are not executed."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: NCCL's thread polls the events of earlier
        # collectives.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


class CaptureError(Exception):
    """A shape could not be captured on some rank; all ranks raise it with the same reason."""


class Captured(Generic[Shape]):
    """Runs shapes: captured ones by a replay, others eagerly.

    Args:
        collective: the ranks that run the same shapes.
    """

    def __init__(
        self, run: Callable[[Shape], None], collective: Collective, device: torch.device
    ) -> None:
        self._run = run
        self._collective = collective
        self._agreement = Agreement(collective, device)
        self._replays: dict[Shape, Work] = {}
        self._exercised: set[Call] = set()

    @property
    def num_captured(self) -> int:
        return len(self._replays)

    def capture(
        self,
        shapes: Iterable[Shape],  # largest first
        make_api: Callable[[], CudaGraphs],
        stage: Callable[[Shape], None],  # stages a step of padding only
        *,
        shows_progress: bool = False,
    ) -> None:
        """Captures every shape; if one fails on any rank, none is captured on any.

        Raises:
            CaptureError: a shape could not be captured.
        """
        from tqdm import tqdm

        bar = tqdm(list(shapes), "CUDA graphs", disable=not shows_progress, file=sys.stderr)
        try:
            api = self._together(make_api)
            for shape in bar:
                self._replays[shape] = self._captured(shape, api, stage)
        except BaseException:
            self._replays.clear()
            raise
        finally:
            bar.close()

    def _captured(self, shape: Shape, api: CudaGraphs, stage: Callable[[Shape], None]) -> Work:
        def work() -> None:
            self._run(shape)

        def warm_up() -> list[tuple[Call, Tensor]]:
            stage(shape)
            if self._collective.size == 1:
                api.warm_up(work)
                return []
            with self._collective.rehearsal() as called:
                api.warm_up(work)
            new = [call for call in dict.fromkeys(called) if call not in self._exercised]
            return [(call, call.operand()) for call in new]

        pairs = self._together(warm_up)
        calls, operands = [call for call, _ in pairs], [operand for _, operand in pairs]
        self._together(lambda: self._collective.exercise(calls, operands))
        self._exercised.update(calls)
        return self._together(lambda: api.capture(work))

    def _together(self, verb: Callable[[], Result]) -> Result:
        """Calls `verb()`; raises on every rank if it raises on one."""
        own, results = "", []
        try:
            results.append(verb())
        except Exception as error:  # raised by CUDA, Triton or a compiler: steps run without graphs
            reason = " ".join(str(error).split())[:300]
            own = f"{type(error).__name__}: {reason}"
            log.debug("a shape could not be captured", exc_info=True)
        problem = self._agreement.problem(own)
        if problem:
            raise CaptureError(problem)
        return results[0]

    def run(self, shape: Shape) -> None:
        """Computes the staged step."""
        replay = self._replays.get(shape)
        if replay is None:
            self._run(shape)
        else:
            replay()


RULE = "coupled"  # the only rule that the device step computes
MAX_POSTED = 2  # outcomes in flight: a step is started before the previous outcome is read


_Copy = tuple[Tensor, torch.cuda.Event]  # pinned memory [num_words], and its completion


class OutcomeReader:
    """Copies outcomes to the host in order, one copy each, on a separate stream.

    On a CPU, they are available at once.
    """

    def __init__(self, outcome: Tensor) -> None:
        self._outcome = outcome
        self._stream: torch.cuda.Stream | None = None
        self._free: deque[_Copy] = deque()
        self._posted: deque[tuple[_Copy | None, NDArray[np.int32]]] = deque()
        if outcome.device.type == "cuda":
            self._stream = torch.cuda.Stream(outcome.device)
            for _ in range(MAX_POSTED):
                pinned = torch.empty(outcome.shape, dtype=outcome.dtype, pin_memory=True)
                self._free.append((pinned, torch.cuda.Event()))

    def post(self, num_words: int) -> None:
        """Starts the copy of the first words, after all work that is queued so far."""
        assert len(self._posted) < MAX_POSTED, len(self._posted)
        if self._stream is None:
            self._posted.append((None, self._outcome[:num_words].numpy().copy()))
            return
        pinned, event = self._free.popleft()
        current = torch.cuda.current_stream(self._outcome.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            pinned[:num_words].copy_(self._outcome[:num_words], non_blocking=True)
            event.record(self._stream)
        current.wait_event(event)  # the next step writes to the same buffer
        self._posted.append(((pinned, event), pinned[:num_words].numpy()))

    @property
    def is_ready(self) -> bool:
        """Returns True if `collect` would not wait."""
        copy, _ = self._posted[0]
        return copy is None or copy[1].query()

    def collect(self) -> NDArray[np.int32]:  # [num_words]
        """Returns the words of the oldest outcome; waits for its copy."""
        copy, words = self._posted.popleft()
        if copy is None:
            return words
        copy[1].synchronize()
        self._free.append(copy)
        return words.copy()


def obstacle(model: PagedModel, rule: str) -> str:
    """Returns why the device step cannot serve the target on any device, heads aside; or ""."""
    runner = model.runner
    if not isinstance(runner, FamilyRunner):
        return "transformers' modules compute the target"
    if not runner.model.ops.reads_device_only:
        return f"the operations {runner.model.ops.name!r} plan steps on the host"
    if model.keeps_states:
        return "some of its layers keep a state, which the host's steps advance"
    if rule != RULE:
        return f"the rule is {rule!r}"
    if not all(map(moves_whole_words, model.kv_shapes)):
        return "a token's codes in a layer are no whole words of 4 bytes, as nodes are moved"
    return ""


@dataclass(frozen=True, slots=True)
class PostedStep:
    """A step that was given to the device."""

    plan: StepPlan
    shape: StepShape
    starts: IntArray  # [num_seqs of the shape + 1], first rows
    asked: IntArray | None  # [num_seqs], requested log-probabilities; None: no sequence


class DeviceStepService:
    """One rank's device step; `cache` has one block more than requests own."""

    def __init__(
        self, model: PagedModel, cache: KVCache, sizes: SeatSizes, head: HeadService | None = None
    ) -> None:
        assert cache.num_blocks == sizes.num_blocks + 1, (cache.num_blocks, sizes)
        assert (head is None) == (sizes.num_draft_nodes == 0), sizes
        assert isinstance(model.runner, FamilyRunner), type(model.runner)
        self._sizes, self._collective = sizes, model.collective
        # Features of the last posted step for separate heads: by layer, [max_rows, hidden_size].
        self.features: dict[int, Tensor] = {}
        self.seats = DeviceSeats(sizes, cache.device)
        drafter = None if head is None else DeviceHead(head, cache, self.seats)
        features = None
        if sizes.fed_layers:
            size = (sizes.max_rows, len(sizes.fed_layers), model.info.hidden_size)
            features = torch.zeros(size, dtype=model.info.dtype, device=cache.device)
            self.features = dict(zip(sizes.fed_layers, features.unbind(1), strict=True))
        self._step = DeviceStep(model.runner.model, cache, self.seats, drafter, features)
        self._captured = Captured(self._step.run, model.collective, cache.device)
        self._reader = OutcomeReader(self._step.words)
        self._capture_error = ""
        if sizes.edits_obstacle:
            log.info(
                "device step: requests with penalties, biases, min_tokens or log-probabilities "
                "take the host path: %s",
                sizes.edits_obstacle,
            )
        self.num_steps = 0

    def capture(self, api: CudaGraphs | None = None) -> None:
        """Captures every shape that a load can have, on all ranks, before the first step.

        A failure is logged; all ranks then launch steps kernel by kernel.
        """
        try:
            with torch.inference_mode():
                self._captured.capture(
                    self._shapes,
                    lambda: api or CudaGraphs(self.seats.device),
                    self._stage_padding,
                    shows_progress=self._collective.rank == 0,
                )
        except CaptureError as error:
            self._capture_error = str(error)
            log.warning("device step: not captured, it runs uncaptured: %s", self._capture_error)

    @property
    def report(self) -> DeviceStepReport:
        """Returns the report for `/stats`."""
        return DeviceStepReport(
            True,
            num_shapes=len(self._shapes),
            num_captured=self._captured.num_captured,
            capture_error=self._capture_error,
            drafts=self._sizes.num_draft_nodes > 0,
            chooses=self._sizes.chooses,
            host_edits=self._sizes.edits_obstacle,
        )

    @property
    def outcome(self) -> Tensor:  # [num_words] int32
        """The buffer of steps' outcomes."""
        return self._step.outcome

    @property
    def _shapes(self) -> list[StepShape]:
        return all_shapes(self._sizes.num_seats, self._sizes.num_draft_nodes)

    def shape_of(self, plan: StepPlan) -> StepShape | None:
        """Returns the shape of an applied plan; None if the host path computes it."""
        shape = self.seats.kinds.shape(plan)
        if shape is None:
            self.seats.flush()
        return shape

    def takes(self, plan: StepPlan) -> NDArray[np.bool_]:  # [num_seqs]
        """Returns the sequences of a plan without a shape that may have one without the others."""
        return self.seats.kinds.takes(plan)

    def post(self, plan: StepPlan, shape: StepShape) -> PostedStep:
        """Gives the device a step, behind the previous one; `collect` takes them in order."""
        starts = self._stage(plan, shape)
        self._captured.run(shape)
        asked = self.seats.kinds.num_logprobs(plan)
        has_scores = bool((asked >= 0).any())
        num_words = outcome_words(shape, self._sizes)
        if has_scores:
            num_words = len(self._step.outcome) + shape.num_rows * LOGPROB_WORDS
        self._reader.post(num_words)
        self.num_steps += 1
        return PostedStep(plan, shape, starts, asked if has_scores else None)

    @property
    def is_ready(self) -> bool:
        """Returns True if `collect` would not wait."""
        return self._reader.is_ready

    def collect(
        self,
        posted: PostedStep,
        known_lens: IntArray,  # [num_seqs], tokens before the step
    ) -> Verdict:
        """Returns the verdict on the oldest posted step; waits for it."""
        shape, starts, words = posted.shape, posted.starts, self._reader.collect()
        if self._sizes.chooses and shape.num_nodes:
            end = outcome_words(shape, self._sizes)
            starts = words[end - shape.num_seqs - 1 : end]
        verdict, drafts = read_outcome(
            posted.plan.step, known_lens, shape, starts, words, self._sizes.draft_parts
        )
        logprobs = None
        if posted.asked is not None:
            scores = words[len(self._step.outcome) :]
            rows = (starts, shape.num_rows)
            logprobs = read_logprobs(verdict, posted.asked, *rows, self._sizes.vocab_size, scores)
        return replace(verdict, logprobs=logprobs, next_drafts=drafts)

    def _stage(self, plan: StepPlan, shape: StepShape) -> IntArray:
        starts = self.seats.stage(plan, shape)
        self.seats.flush()
        return starts

    def _stage_padding(self, shape: StepShape) -> None:
        """Stages a step that changes nothing."""
        none = ints([])
        triples = none.reshape(0, 3)
        self._stage(StepPlan(0, none, none, none, none, none, triples, triples[:, :2]), shape)
