"""A tensor-parallel group as the engine uses it, and its implementation within one process.

`LocalGroup` runs the ranks as threads; `cluster/backend.py` runs them as Ray actors. The loop
uses a group through `GroupTarget`, and drafters through the proxies of `drafter_ends.py`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import (
    CheckpointError,
    ConfigError,
    WorkerDiedError,
    WorkersReplacedError,
)
from ..scheduler.types import Batch, Draft, StepPlan, Verdict
from .model.checkpoint import progress
from .model.checkpoint.progress import watched
from .seats import gather
from .spec import (
    DeviceStepReport,
    ModelReport,
    NewAdapter,
    NewDrafters,
    NewWeights,
    RankLocation,
    Rest,
    SentWeights,
    TakeSent,
    TrainerLink,
    WeightsAnswer,
    WorkerReport,
    WorkerSpec,
)
from .transport.channel import (
    Channel,
    NoAnswerError,
    ThreadChannel,
)

if TYPE_CHECKING:
    from .collective import Collective
    from .worker import Worker

Result = TypeVar("Result")
log = logging.getLogger(__name__)
_UPDATE_TIMEOUT_S = 1800.0  # the same as for loading at the start


def agreed_blocks(reports: Sequence[WorkerReport]) -> tuple[int, int]:
    """Returns the KV blocks of the target and of the draft model that fit on every rank."""
    target = [report.target.num_blocks for report in reports if report.target]
    draft = [report.draft.num_blocks for report in reports if report.draft]
    return min(target, default=0), min(draft, default=0)


def with_device_steps(
    reports: Sequence[WorkerReport], steps: Sequence[DeviceStepReport]
) -> list[WorkerReport]:
    """Returns the ranks' reports, completed by what `allocate` returned."""
    pairs = zip(reports, steps, strict=True)
    return [replace(report, device_step=step) for report, step in pairs]


class WorkerGroup(ABC):
    """Ranks that load, step and fail as one unit; messages go over a channel to rank 0.

    The channel ends with the ranks.
    """

    is_concurrent: bool  # ranks compute while the caller of `send` continues

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._channel: Channel | None = None  # None: the ranks are down
        self.reports: list[WorkerReport] = []
        self.is_asleep = False
        self.loading = ""  # progress of a long load
        self._is_discarded = False
        self.on_restart: list[Callable[[], None]] = []  # called by the restarting thread
        self.on_death: list[Callable[[str], None]] = []  # called with the reason, in any thread

    @property
    def spec(self) -> WorkerSpec:
        """The specification of its ranks and of those that replace them."""
        return self._spec

    @property
    def alive(self) -> bool:
        """Whether the group can answer messages."""
        return self._channel is not None and not self._channel.dead

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Sizes of the newest message and the newest answer; 0 if they stay in this process."""
        channel = self._channel
        return (0, 0) if channel is None else (channel.sent_bytes, channel.received_bytes)

    @property
    def is_being_replaced(self) -> bool:
        """Whether its ranks were ended on purpose and their replacements are not up yet."""
        return self._is_discarded

    def spares(self) -> list[RankLocation]:
        """Spare processes that could take over now."""
        return []

    def call(self, message: Any) -> Any:
        """Returns rank 0's answer (raises as `Channel.call` does)."""
        return self._through(Channel.call, message, self._spec.timeout_s)

    def send(self, message: Any) -> None:
        """Sends a message, as the first half of a call (raises as `Channel.send` does)."""
        self._through(Channel.send, message, self._spec.timeout_s)

    def receive(self, timeout_s: float) -> Any:
        """Returns the answer, as the second half of a call (raises as `Channel.receive` does)."""
        return self._through(Channel.receive, timeout_s)

    def restart(self) -> None:
        """Discards all ranks and starts new ones, awake and with empty caches."""
        self._replace_ranks()
        self._is_discarded = False
        self._keep_blocks()
        self.is_asleep = False
        self._begin_anew()

    def check_weights(self, weights: NewWeights) -> None:
        """Makes every rank check new weights' names and shapes, without reading the weights.

        No message may be waiting for its answer.

        Raises:
            CheckpointError: they cannot replace the current weights; names `weights` or `drafter`.
            WorkerError: a rank died, or failed otherwise.
        """
        self._ask(replace(weights, only_checks=True), CheckpointError)

    def load_weights(self, weights: NewWeights) -> None:
        """Makes every rank and its later replacements load new weights, with empty caches.

        Raises:
            WorkerError: a rank died or failed. No rank serves any more; replacements will load the
                previous weights.
        """
        self._ask(weights, CheckpointError)
        self.respecify(weights.applied(self._spec, self.reports[0]))
        self._begin_anew()

    def link_trainer(self, link: TrainerLink) -> None:
        """Makes every rank join a trainer's process group, or leave it.

        Raises:
            ConfigError: they could not do so in time.
            WorkerError: a rank died, or failed.
        """
        self._ask(link, ConfigError, link.timeout_s)

    def take_weights(self, sent: SentWeights, timeout_s: float) -> None:
        """Makes every rank take the target's weights from a trainer, with empty caches.

        `sent.until` may limit this to checking or staging them. Ranks that replace these will not
        have the weights.

        Raises:
            ConfigError: they do not fit the target, or did not arrive; nothing has changed.
            WorkerError: a rank died or failed; no rank serves any more.
        """
        self._ask(sent, ConfigError, timeout_s)
        if sent.until == "take":
            self._begin_anew()

    def take_sent(self, sent_id: str) -> None:
        """Makes every rank serve the staged weights of that id; an empty id drops them.

        Ranks that serve them already accept the call.

        Raises:
            ConfigError: they are not staged; nothing has changed.
            WorkerError: a rank died or failed; no rank serves any more.
        """
        self._ask(TakeSent(sent_id), ConfigError)
        if sent_id:
            self._begin_anew()

    def sleep(self, level: int) -> None:
        """Makes every rank free memory as `Rest` describes (raises `WorkerError`)."""
        self.is_asleep = True
        self._ask(Rest(level))

    def wake(self, tags: Sequence[str]) -> None:
        """Makes every rank allocate memory again, with empty caches (raises `WorkerError`)."""
        self._ask(Rest(0, tuple(tags)))
        if "kv_cache" in tags:
            self.is_asleep = False
            self._begin_anew()

    def _tell_loading(self, line: str) -> None:
        """Records and logs the progress of loading, for `watched`."""
        self.loading = line
        if line:
            progress.log.info("%s", line)

    def _begin_anew(self) -> None:
        """Notifies drafters as after a restart, so that they start anew."""
        self.reports = [*self.reports]
        if not self.is_asleep:
            for callback in self.on_restart:
                callback()

    def add_adapter(self, adapter: NewAdapter) -> None:
        """Makes every rank and its later replacements add a LoRA adapter, or remove one.

        No message may be waiting for its answer.

        Raises:
            CheckpointError: it is not an adapter of the target; nothing has changed.
            WorkerError: a rank died, or failed otherwise.
        """
        for only_checks in (True, False) if adapter.path else (False,):
            self._ask(replace(adapter, only_checks=only_checks), CheckpointError)
        self.respecify(adapter.applied(self._spec))

    def check_drafters(self, drafters: NewDrafters) -> None:
        """Makes every rank check new drafters' names and shapes, without reading weights.

        Raises:
            CheckpointError: they cannot draft for the target.
            WorkerError: a rank died, or failed otherwise.
        """
        self._ask(replace(drafters, only_checks=True), CheckpointError)

    def change_drafters(self, drafters: NewDrafters) -> None:
        """Makes every rank and its later replacements use other drafters, with empty caches.

        Raises:
            CheckpointError: they cannot be loaded; nothing has changed.
            WorkerError: a rank died or failed. No rank serves any more; replacements will have the
                previous drafters.
        """
        report = self._ask(drafters, CheckpointError)
        assert isinstance(report, WorkerReport), type(report)
        self.respecify(drafters.applied(self._spec))
        self.reports = [
            replace(each, draft=report.draft, head=report.head, device_step=report.device_step)
            for each in self.reports
        ]
        self._keep_blocks()
        self._begin_anew()

    def _keep_blocks(self) -> None:
        """Fixes the number of KV blocks of replacing ranks, even if less memory is free then.

        The scheduler hands out these blocks.
        """
        counts = zip(("target", "draft"), agreed_blocks(self.reports), strict=True)
        parts = {
            name: replace(part, kept_blocks=count)
            for name, count in counts
            if count and (part := getattr(self._spec, name)) is not None
        }
        self.respecify(replace(self._spec, **parts))

    def _ask(
        self, message: Any, refusal: type[ConfigError] = ConfigError, timeout_s: float = 0.0
    ) -> Any:
        """Returns the ranks' answer to a message that changes them; raises `refusal` if they do.

        Args:
            timeout_s: additional time that may pass before they begin.
        """
        answer = self._through(Channel.call, message, timeout_s + _UPDATE_TIMEOUT_S)
        if isinstance(answer, WeightsAnswer) and answer.problem:
            raise refusal.at(answer.field, answer.problem.removeprefix(f"{answer.field}: "))
        return answer

    def respecify(self, spec: WorkerSpec) -> None:
        """Sets the specification of ranks that replace these."""
        self._spec = spec

    def discard(self) -> None:
        """Ends the ranks; their resources stay reserved for their replacements."""
        self._is_discarded = True
        self.drop()

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all ranks."""

    def drop(self) -> None:
        """Releases all ranks and the channel without waiting: one died, or does not answer."""
        self.shutdown()

    def _through(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `verb` of the channel and returns its result; releases the ranks if one died."""
        channel = self._channel
        if channel is None:
            if self.is_being_replaced:
                raise WorkersReplacedError("the workers are being replaced")
            raise WorkerDiedError("the workers are down")
        try:
            return verb(channel, *arguments)
        except WorkerDiedError:
            if self._channel is channel:
                self.drop()
            raise

    @abstractmethod
    def _replace_ranks(self) -> None:
        """Ends the ranks, if there are any, and starts new ones."""


class LocalGroup(WorkerGroup):
    """Ranks as threads of this process; threads do not die."""

    is_concurrent = False  # they share the interpreter with the engine, or run within `send`

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._workers: list[Worker] = []
        if spec.stages > 1:  # the stages compute steps of different requests
            self.is_concurrent = True
        self.restart()

    def _replace_ranks(self) -> None:
        # The import is deferred: an engine whose ranks are processes does not import model code.
        from .collective import Collective
        from .devices import pick_device
        from .worker import Worker

        self.shutdown()
        spec = self._spec
        device = pick_device(spec.device)
        members = Collective.threads(spec.size, spec.timeout_s)
        workers = [Worker(spec, member, device) for member in members]
        amounts = [worker.progress for worker in workers]
        with (
            watched(lambda: [each.amount for each in amounts], self._tell_loading),
            ThreadPoolExecutor(spec.size) as pool,
        ):
            self.reports = _together(pool, Worker.load, workers, members)
            blocks = agreed_blocks(self.reports)
            steps = _together(pool, lambda worker: worker.allocate(*blocks), workers, members)
        self.reports = with_device_steps(self.reports, steps)
        self._workers = workers
        # A target alone may run inline, since the loop waits for it; drafters have a deadline.
        handlers = [worker.handle for worker in workers]
        self._channel = ThreadChannel(
            handlers, inline=spec.target is not None, beside=workers[0].beside
        )

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.close_links()
        self._workers = []
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _together(
    pool: ThreadPoolExecutor,
    verb: Callable[[Worker], Result],
    workers: Sequence[Worker],
    members: Sequence[Collective],
) -> list[Result]:
    """Calls `verb` for every rank and returns the results.

    Raises the first exception of a rank. That rank leaves the group, so the others do not wait for
    it; their later exceptions are consequences.
    """
    failed: list[BaseException] = []

    def attempt(worker: Worker, member: Collective) -> Result:
        try:
            return verb(worker)
        except BaseException as error:
            failed.append(error)
            member.abort()
            raise

    futures = [pool.submit(attempt, *pair) for pair in zip(workers, members, strict=True)]
    wait(futures)
    if failed:
        raise failed[0]
    return [future.result() for future in futures]


def log_forward(what: str, report: ModelReport) -> None:
    """Logs which decoder computes a model; warns if it is the slower one."""
    forward = f"forward of the {what} {report.architecture}: {report.forward}"
    if report.forward_reason:
        log.warning("%s (%s)", forward, report.forward_reason)
    else:
        log.info("%s, operations: %s", forward, report.operations)


class GroupTarget:
    """The loop's target, backed by a worker group.

    Args:
        timeout_s: a group that does not answer within it counts as dead.
    """

    def __init__(self, group: WorkerGroup, timeout_s: float = 120.0) -> None:
        self._group = group
        self._timeout_s = timeout_s
        report = group.reports[0].target
        assert report is not None, "the group has no target"
        self.report: ModelReport = report
        log_forward("target", report)
        self.all_reduce = group.reports[0].all_reduce
        if self.all_reduce:
            log.info("all-reduce of the target: %s", self.all_reduce)
        self.ranks_draft = group.reports[0].device_step.drafts  # ranks keep a head's drafts, too
        self.ranks_choose = group.reports[0].device_step.chooses  # among its nodes
        self.num_blocks = agreed_blocks(group.reports)[0]
        targets = [each.target for each in group.reports if each.target is not None]
        self.keeps_states = any(each.state_bytes for each in targets)  # of any stage

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        return self._group.call(_plan(batch, drafts))

    def post(self, batch: Batch, drafts: Sequence[Draft]) -> None:
        self._group.send(_plan(batch, drafts))

    def collect(self) -> Verdict:
        try:
            return self._group.receive(self._timeout_s)
        except NoAnswerError:
            self._group.drop()
            raise WorkerDiedError(f"no answer within {self._timeout_s} s") from None


def _plan(batch: Batch, drafts: Sequence[Draft]) -> StepPlan:
    joined = gather(drafts, batch.samples)
    return batch.plan if joined is None else replace(batch.plan, drafts=joined)
