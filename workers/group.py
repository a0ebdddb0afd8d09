"""A tensor-parallel group as the engine uses it, and the implementation within one process.

`LocalGroup` runs the ranks as threads; `cluster/backend.py` runs them as Ray actors. The loop
uses a group as `GroupTarget`, the draft model's drafter as `GroupDraftModel`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..drafters.protocol import Drafted, DraftStep, HeadAnswer, HeadAsk
from ..errors import (
    CheckpointError,
    ConfigError,
    OutriderError,
    WorkerDiedError,
    WorkerError,
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
    LinkOffer,
    ListenFeatures,
    NoAnswerError,
    OpenFeatures,
    ThreadChannel,
)

if TYPE_CHECKING:
    from .collective import Collective
    from .worker import Worker

Result = TypeVar("Result")
log = logging.getLogger(__name__)
_UPDATE_TIMEOUT_S = 1800.0  # as for loading at the start


def agreed_blocks(reports: Sequence[WorkerReport]) -> tuple[int, int]:
    """KV blocks of the target and of the draft model that fit on every rank."""
    target = [report.target.num_blocks for report in reports if report.target]
    draft = [report.draft.num_blocks for report in reports if report.draft]
    return min(target, default=0), min(draft, default=0)


def with_device_steps(
    reports: Sequence[WorkerReport], steps: Sequence[DeviceStepReport]
) -> list[WorkerReport]:
    """The ranks' reports with what became known as they allocated their memory."""
    pairs = zip(reports, steps, strict=True)
    return [replace(report, device_step=step) for report, step in pairs]


class WorkerGroup(ABC):
    """Ranks that load, step and fail as one unit; messages go over a channel to rank 0.

    The channel ends with the ranks.
    """

    is_concurrent: bool  # ranks compute while the caller of `send` goes on

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._channel: Channel | None = None  # none: the ranks are down
        self.reports: list[WorkerReport] = []
        self.is_asleep = False
        self.loading = ""  # how far that is, while it takes long
        self._is_discarded = False
        self.on_restart: list[Callable[[], None]] = []  # in the same thread, once new ranks are up
        self.on_death: list[Callable[[str], None]] = []  # with the reason, in any thread

    @property
    def spec(self) -> WorkerSpec:
        """What its ranks are, and what those that replace them will be."""
        return self._spec

    @property
    def alive(self) -> bool:
        """Whether messages can be answered."""
        return self._channel is not None and not self._channel.dead

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Of the newest message and the newest answer; 0 where they stay in this process."""
        channel = self._channel
        return (0, 0) if channel is None else (channel.sent_bytes, channel.received_bytes)

    @property
    def is_being_replaced(self) -> bool:
        """Whether its ranks were ended on purpose, and others are not there yet."""
        return self._is_discarded

    def spares(self) -> list[RankLocation]:
        """Processes that could take over now."""
        return []

    def call(self, message: Any) -> Any:
        """Rank 0's answer (raises as `Channel.call` does)."""
        return self._through(Channel.call, message, self._spec.timeout_s)

    def send(self, message: Any) -> None:
        """First half of a call (raises as `Channel.send` does)."""
        self._through(Channel.send, message, self._spec.timeout_s)

    def receive(self, timeout_s: float) -> Any:
        """Second half of a call (raises as `Channel.receive` does)."""
        return self._through(Channel.receive, timeout_s)

    def restart(self) -> None:
        """Discards all ranks and starts new ones, with empty caches; they are awake."""
        self._replace_ranks()
        self._is_discarded = False
        self._keep_blocks()
        self.is_asleep = False
        self._begin_anew()

    def check_weights(self, weights: NewWeights) -> None:
        """Every rank looks at other weights' names and shapes; none is read.

        No message is without its answer.

        Raises:
            CheckpointError: they cannot be served in place of these; names `weights` or `drafter`.
            WorkerError: a rank died, or failed otherwise.
        """
        self._ask(replace(weights, only_checks=True), CheckpointError)

    def load_weights(self, weights: NewWeights) -> None:
        """Every rank loads other weights, with empty caches; so will those that replace them.

        Raises:
            WorkerError: a rank died or failed. None serves anything now, and those that replace
                them will have the weights from before.
        """
        self._ask(weights, CheckpointError)
        self.respecify(weights.applied(self._spec, self.reports[0]))
        self._begin_anew()

    def link_trainer(self, link: TrainerLink) -> None:
        """Every rank joins a trainer's process group, or leaves it.

        Raises:
            ConfigError: they could not, within the time. WorkerError: a rank died, or failed.
        """
        self._ask(link, ConfigError, link.timeout_s)

    def take_weights(self, sent: SentWeights, timeout_s: float) -> None:
        """Every rank takes the target's weights from a trainer, with empty caches; or only checks
        or stages them, as `sent.until` says.

        Ranks that replace these will not have them.

        Raises:
            ConfigError: they are not those of the target, or did not arrive; nothing has changed.
            WorkerError: a rank died or failed; none serves anything now.
        """
        self._ask(sent, ConfigError, timeout_s)
        if sent.until == "take":
            self._begin_anew()

    def take_sent(self, sent_id: str) -> None:
        """Every rank serves the staged weights of that id, or does so already; "" drops them.

        Raises:
            ConfigError: they are not there; nothing has changed.
            WorkerError: a rank died or failed; none serves anything now.
        """
        self._ask(TakeSent(sent_id), ConfigError)
        if sent_id:
            self._begin_anew()

    def sleep(self, level: int) -> None:
        """Every rank gives memory back, as `Rest` says (raises `WorkerError`)."""
        self.is_asleep = True
        self._ask(Rest(level))

    def wake(self, tags: Sequence[str]) -> None:
        """Every rank takes memory again, with empty caches (raises `WorkerError`)."""
        self._ask(Rest(0, tuple(tags)))
        if "kv_cache" in tags:
            self.is_asleep = False
            self._begin_anew()

    def _tell_loading(self, line: str) -> None:
        """For `watched`."""
        self.loading = line
        if line:
            progress.log.info("%s", line)

    def _begin_anew(self) -> None:
        """As after a restart: drafters have to begin anew."""
        self.reports = [*self.reports]
        if not self.is_asleep:
            for callback in self.on_restart:
                callback()

    def add_adapter(self, adapter: NewAdapter) -> None:
        """Every rank serves another LoRA adapter, or one less; so will those that replace them.

        No message is without its answer.

        Raises:
            CheckpointError: it is no adapter of the target; nothing has changed.
            WorkerError: a rank died, or failed otherwise.
        """
        for only_checks in (True, False) if adapter.path else (False,):
            self._ask(replace(adapter, only_checks=only_checks), CheckpointError)
        self.respecify(adapter.applied(self._spec))

    def check_drafters(self, drafters: NewDrafters) -> None:
        """Every rank looks at other drafters' names and shapes; none is read.

        Raises:
            CheckpointError: they cannot draft for the target.
            WorkerError: a rank died, or failed otherwise.
        """
        self._ask(replace(drafters, only_checks=True), CheckpointError)

    def change_drafters(self, drafters: NewDrafters) -> None:
        """Every rank drafts otherwise, with empty caches; so will those that replace them.

        Raises:
            CheckpointError: they cannot be loaded; nothing has changed.
            WorkerError: a rank died or failed. None serves anything now, and those that replace
                them will have the drafters from before.
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
        """Ranks that replace these have as many KV blocks, also where less is left: who plans steps
        hands out these."""
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
        """The ranks' answer to what changes them; `refusal` where they refuse it.

        Args:
            timeout_s: what may pass before they begin.
        """
        answer = self._through(Channel.call, message, timeout_s + _UPDATE_TIMEOUT_S)
        if isinstance(answer, WeightsAnswer) and answer.problem:
            raise refusal.at(answer.field, answer.problem.removeprefix(f"{answer.field}: "))
        return answer

    def respecify(self, spec: WorkerSpec) -> None:
        """Ranks that replace these will be of `spec`."""
        self._spec = spec

    def discard(self) -> None:
        """Ends the ranks; their places remain for those that replace them."""
        self._is_discarded = True
        self._drop_ranks()

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all ranks."""

    def _through(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """What `verb` of the channel returns; ranks that died are let go of."""
        channel = self._channel
        if channel is None:
            if self.is_being_replaced:
                raise WorkersReplacedError("the workers are being replaced")
            raise WorkerDiedError("the workers are down")
        try:
            return verb(channel, *arguments)
        except WorkerDiedError:
            self._drop_ranks()
            raise

    @abstractmethod
    def _replace_ranks(self) -> None:
        """Ends the ranks, if there are any, and starts new ones."""

    def _drop_ranks(self) -> None:
        """Lets go of all ranks and the channel; one of them died."""
        self.shutdown()


class LocalGroup(WorkerGroup):
    """Ranks as threads of this process; threads do not die."""

    is_concurrent = False  # they share the interpreter with the engine, or run within `send`

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._workers: list[Worker] = []
        if spec.stages > 1:  # they compute steps of different requests
            self.is_concurrent = True
        self.restart()

    def _replace_ranks(self) -> None:
        # An engine whose ranks are processes of their own does not import what computes models.
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
        self._channel = ThreadChannel(handlers, inline=spec.target is not None)

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
    """What `verb` returns of every rank.

    Raises what it raised first on a rank; this rank leaves the group, so that the others do not
    wait for it, and what they raise then is its consequence.
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


def _log_forward(what: str, report: ModelReport) -> None:
    """Logs which decoder computes a model; a warning where it is the slower one."""
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
        _log_forward("target", report)
        self.all_reduce = group.reports[0].all_reduce
        if self.all_reduce:
            log.info("all-reduce of the target: %s", self.all_reduce)
        self.ranks_draft = group.reports[0].device_step.drafts  # keep a head's drafts, too
        self.num_blocks = agreed_blocks(group.reports)[0]
        targets = [each.target for each in group.reports if each.target is not None]
        self.keeps_states = any(each.state_bytes for each in targets)  # layers of any stage

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        return self._group.call(_plan(batch, drafts))

    def post(self, batch: Batch, drafts: Sequence[Draft]) -> None:
        self._group.send(_plan(batch, drafts))

    def collect(self) -> Verdict:
        try:
            return self._group.receive(self._timeout_s)
        except NoAnswerError:
            self._group.shutdown()
            raise WorkerDiedError(f"no answer within {self._timeout_s} s") from None


def _plan(batch: Batch, drafts: Sequence[Draft]) -> StepPlan:
    joined = gather(drafts, batch.samples)
    return batch.plan if joined is None else replace(batch.plan, drafts=joined)


class GroupDraftModel:
    """A drafter's draft model, in a group of its own or in the target's.

    Args:
        owned: whether the drafter owns the group, and so restarts it and shuts it down.
        timeout_s: a separate model that does not answer within it counts as dead.
    """

    def __init__(
        self,
        group: WorkerGroup,
        max_num_batched_tokens: int,
        *,
        owned: bool,
        timeout_s: float = 120.0,
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._step: DraftStep | None = None  # the request without an answer yet
        self._asked_at = 0.0  # monotonic clock
        self._sent_bytes = 0  # of that request
        self._owned = owned
        report = group.reports[0].draft
        assert report is not None, "the group has no draft model"
        _log_forward("draft model", report)
        self.vocab_size = report.vocab_size
        self.max_model_len = report.max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = agreed_blocks(group.reports)[1]
        self.block_size = report.block_size
        self._reports = group.reports  # a restarted group has new ones
        self._restart_policy = RestartPolicy(group, owned=owned)

    def ask(self, step: DraftStep) -> None:
        assert self._step is None, "one request at a time"
        if self._group.reports is not self._reports:
            raise WorkersReplacedError(
                "the draft model was restarted along with the target's workers"
            )
        if self._owned:
            self._group.send(step)
            self._sent_bytes = self._group.message_bytes[0]
        self._step, self._asked_at = step, time.monotonic()

    def answer(self, timeout_s: float) -> Drafted | None:
        step, self._step = self._step, None
        assert step is not None, "no request is outstanding"
        try:
            # In the target's workers no deadline applies: they cannot verify in the meantime.
            drafted = self._group.receive(timeout_s) if self._owned else self._group.call(step)
        except NoAnswerError:
            if time.monotonic() - self._asked_at < self._timeout_s:
                self._step = step
                return None
            self._group.shutdown()
            raise WorkerDiedError(f"no draft within {self._timeout_s} s") from None
        assert isinstance(drafted, Drafted), type(drafted)
        if drafted.step != step.plan.step:  # of an earlier request: this one is still open
            self._step = step
        self._restart_policy.succeeded()
        received = self._group.message_bytes[1]
        return replace(drafted, sent_bytes=self._sent_bytes, received_bytes=received)

    def revive(self) -> bool:
        """Whether the group is up; if not, it is restarted in the background with pauses."""
        if not self._restart_policy.poll():
            return False
        reports = self._group.reports
        if reports is not self._reports:
            self._check_fit(reports)
        self._step, self._reports = None, reports
        return True

    def _check_fit(self, reports: Sequence[WorkerReport]) -> None:
        """Raises `ConfigError` where what came back is not what the drafter was made for."""
        report = reports[0].draft
        assert report is not None, "the group has a draft model"
        for key, now, before in (
            ("num_kv_blocks", agreed_blocks(reports)[1], self.num_blocks),
            ("block_size", report.block_size, self.block_size),
            ("max_model_len", report.max_model_len, self.max_model_len),
        ):
            if now < before or (key == "block_size" and now != before):
                raise ConfigError.at(key, f"the draft model came back with {now}, not {before}")

    def shutdown(self) -> None:
        self._restart_policy.end()


BACKOFF_S = (0.0, 1.0, 5.0, 15.0, 60.0)
_JOIN_S = 10.0


class Backoff:
    """Pause before each attempt; `reset` after a success."""

    def __init__(self) -> None:
        self._num_tries = 0
        self._not_before = 0.0  # monotonic clock

    def next_pause_s(self) -> float:
        """Returns the pause before the next attempt and counts the attempt."""
        pause_s = BACKOFF_S[min(self._num_tries, len(BACKOFF_S) - 1)]
        self._num_tries += 1
        return pause_s

    def try_due(self) -> bool:
        """Whether an attempt may be made now; if so, counts it."""
        if time.monotonic() < self._not_before:
            return False
        self.next_pause_s()
        self._not_before = time.monotonic() + BACKOFF_S[min(self._num_tries, len(BACKOFF_S) - 1)]
        return True

    def reset(self) -> None:
        self._num_tries, self._not_before = 0, 0.0


class RestartPolicy:
    """Restarts a drafter's group that died, in the background, with growing pauses.

    Args:
        owned: whether the drafter owns the group, and so restarts it and shuts it down.
    """

    def __init__(self, group: WorkerGroup, *, owned: bool) -> None:
        self._group = group
        self._owned = owned
        self._backoff = Backoff()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def poll(self) -> bool:
        """Whether the group is up; if not, starts its restart unless one is running."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._group.alive:
            return True
        if self._owned:
            self._thread = threading.Thread(target=self._restart, daemon=True)
            self._thread.start()
        return False

    def succeeded(self) -> None:
        """Resets the pauses after the group has answered."""
        self._backoff.reset()

    def end(self) -> None:
        """Shuts the group down if the drafter owns it."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_S)  # a slower restart shuts down its own group
        if self._owned:
            self._group.shutdown()

    def _restart(self) -> None:
        if self._closed.wait(self._backoff.next_pause_s()):
            return
        try:
            self._group.restart()
        except OutriderError as error:
            log.warning("restart of the draft workers failed: %s", error.message)
        if self._closed.is_set():
            self._group.shutdown()


_LINK_TIMEOUT_S = 10.0
Transport = Literal["auto", "socket", "distributed"]


class GroupHead:
    """The engine's proxy of a separate head: its group, and its link to the target's.

    Features go from the target's rank 0 directly to the head; the engine only exchanges addresses
    (`transport/channel.py`), once per link. When either group restarts or the link breaks, a new
    link is opened and the head starts with an empty cache.

    Args:
        link: index of this head among those of the target.
        transport: how tensors travel between processes.
        timeout_s: a head that does not answer within it counts as dead.
    """

    def __init__(
        self,
        target: WorkerGroup,
        group: WorkerGroup,
        link: int,
        transport: Transport,
        timeout_s: float,
    ) -> None:
        self._target = target
        self._group = group
        self._link = link
        self._transport: Transport = transport
        self._groups_work = True  # whether "auto" may choose a process group for the tensors
        self._timeout_s = timeout_s
        self._restart_policy = RestartPolicy(group, owned=True)
        self._backoff = Backoff()  # between attempts to open a link while both groups are up
        self._linked = False
        self._asked_at: list[float] = []  # monotonic clock, per answer that is outstanding
        target.on_restart.append(self._open_again)
        self._open()

    @property
    def num_outstanding(self) -> int:
        return len(self._asked_at)

    def ask(self, ask: HeadAsk) -> None:
        """Requests the head's drafts after a step, whose features rank 0 sends.

        Raises:
            WorkersReplacedError: no link is open, as the head's workers are being replaced.
            WorkerDiedError: the head is gone, and with it all answers; or no link is open.
        """
        if not self._linked and self._group.is_being_replaced:
            raise WorkersReplacedError("the head's workers are being replaced")
        if not self._linked:
            raise WorkerDiedError("the head is not linked to the target")
        try:
            self._group.send(ask)
        except WorkerDiedError:
            self._asked_at.clear()
            raise
        self._asked_at.append(time.monotonic())

    def answer(self, timeout_s: float) -> HeadAnswer | None:
        """The head's answer to the oldest request; None if there is none yet.

        Raises:
            WorkerError: the head raised.
            WorkerDiedError: the head is gone, and with it all answers.
        """
        assert self._asked_at, "no request is outstanding"
        try:
            answer = self._group.receive(timeout_s)
        except NoAnswerError:
            if time.monotonic() - self._asked_at[0] < self._timeout_s:
                return None
            self._group.shutdown()
            self._asked_at.clear()
            raise WorkerDiedError(f"the head did not answer within {self._timeout_s} s") from None
        except WorkerDiedError:
            self._asked_at.clear()
            raise
        except WorkerError:
            del self._asked_at[0]
            raise
        del self._asked_at[0]
        assert isinstance(answer, HeadAnswer), type(answer)
        if answer.linked:
            self._restart_policy.succeeded()
            self._backoff.reset()
        else:
            self._linked = False
            self._groups_work = False  # the group may be the cause; a socket always works
        return answer

    def revive(self) -> bool:
        """Whether the head is up and linked; if not, starts a restart or opens a link."""
        if not self._restart_policy.poll():
            self._linked = False
            return False
        if not self._linked and self._backoff.try_due():
            self._open()
        return self._linked

    def detach(self) -> None:
        """Has the target gather nothing more for this head, in the thread that asks for drafts."""
        self._target.on_restart.remove(self._open_again)
        self._linked = False
        if self._target.alive:
            with suppress(WorkerError):  # a dead target is reported by its next step
                self._target.call(OpenFeatures(self._link, None, (), self._timeout_s))

    def shutdown(self) -> None:
        self._restart_policy.end()

    def _open_again(self) -> None:
        """Opens a link to the target's new workers, which have none."""
        self._linked = False
        if self._restart_policy.poll():
            self._open()

    def _open(self) -> None:
        """Opens a link; on failure `_linked` stays false and `revive` tries again."""
        head = self._group.reports[0].head
        assert head is not None, "the group runs a head"
        try:
            offer = self._listen(self._how())
            self._target.call(OpenFeatures(self._link, offer, head.capture, self._timeout_s))
        except WorkerError as error:  # a dead target is reported by its next step
            log.warning("a feature link could not be opened: %s", error.message)
            self._groups_work &= isinstance(error, WorkerDiedError)
            return
        self._linked = True

    def _listen(self, message: ListenFeatures) -> LinkOffer:
        """Asks the head to listen; discards answers to earlier requests, which arrive first."""
        before, self._asked_at = len(self._asked_at), []
        self._group.send(message)
        deadline = time.monotonic() + _LINK_TIMEOUT_S
        for _ in range(before):
            try:
                self._until(deadline)
            except WorkerDiedError:
                raise
            except WorkerError as error:  # an earlier request failed; later ones may succeed
                log.debug("the head failed before it was linked: %s", error.message)
        offer = self._until(deadline)
        assert isinstance(offer, LinkOffer), type(offer)
        return offer

    def _until(self, deadline: float) -> Any:
        """The head's next answer; shuts the group down if there is none by `deadline`."""
        try:
            return self._group.receive(max(0.0, deadline - time.monotonic()))
        except NoAnswerError:
            self._group.shutdown()
            raise WorkerDiedError(f"the head did not answer within {_LINK_TIMEOUT_S} s") from None

    def _how(self) -> ListenFeatures:
        """The fastest transport between the two workers, unless the configuration names one.

        Two ranks on one GPU cannot form a NCCL group, and a group has no advantage on a CPU.
        """
        ours, theirs = self._group.reports[0].location, self._target.reports[0].location
        choose = self._transport == "auto"
        apart = bool(ours.gpu and theirs.gpu and ours.gpu != theirs.gpu)
        return ListenFeatures(
            here=choose and (ours.node, ours.process) == (theirs.node, theirs.process),
            remote=ours.node != theirs.node,
            distributed=apart and self._groups_work if choose else self._transport == "distributed",
        )
