"""The engine's proxies of drafters that run in workers: a draft model and a separate head.

If the drafter's own group dies, it is restarted in the background. Steps wait neither for the
restart nor for a head's reply with its address.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from ..drafters.protocol import Drafted, DraftStep, HeadAnswer, HeadAsk
from ..errors import ConfigError, OutriderError, WorkerDiedError, WorkerError, WorkersReplacedError
from .group import WorkerGroup, agreed_blocks, log_forward
from .spec import WorkerReport
from .transport.channel import LinkOffer, ListenFeatures, NoAnswerError, OpenFeatures

log = logging.getLogger(__name__)


class GroupDraftModel:
    """A drafter's draft model, in its own group or in the target's.

    Args:
        owned: whether the drafter owns the group, and so restarts it and shuts it down.
        timeout_s: a separate model that does not answer within it counts as dead.
        verdicts_of: the target that sends verdicts to it, and the link's number; None: no target.
    """

    def __init__(
        self,
        group: WorkerGroup,
        max_num_batched_tokens: int,
        *,
        owned: bool,
        timeout_s: float = 120.0,
        verdicts_of: tuple[WorkerGroup, int] | None = None,
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._step: DraftStep | None = None  # the unanswered request
        self._asked_at = 0.0  # monotonic clock
        self._sent_bytes = 0  # of that request
        self._owned = owned
        report = group.reports[0].draft
        assert report is not None, "the group has no draft model"
        log_forward("draft model", report)
        self.vocab_size = report.vocab_size
        self.max_model_len = report.max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = agreed_blocks(group.reports)[1]
        self.block_size = report.block_size
        self._reports = group.reports  # a restarted group has new ones
        self._restart_policy = RestartPolicy(group, owned=owned)
        self._verdicts_of, self.reads_verdicts = verdicts_of, False
        if verdicts_of is not None:
            verdicts_of[0].on_restart.append(self._listen)
            self._listen()

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
        until_s = time.monotonic() + timeout_s
        try:
            # In the target's workers no deadline applies: they cannot verify in the meantime.
            drafted = self._group.receive(timeout_s) if self._owned else self._group.call(step)
            while isinstance(drafted, LinkOffer):
                self._link(drafted)
                drafted = self._group.receive(max(0.0, until_s - time.monotonic()))
        except NoAnswerError:
            if time.monotonic() - self._asked_at < self._timeout_s:
                self._step = step
                return None
            self._group.drop()
            raise WorkerDiedError(f"no draft within {self._timeout_s} s") from None
        assert isinstance(drafted, Drafted), type(drafted)
        if drafted.step != step.plan.step:  # of an earlier request: this one is open
            self._step = step
        self._restart_policy.succeeded()
        received = self._group.message_bytes[1]
        return replace(drafted, sent_bytes=self._sent_bytes, received_bytes=received)

    def revive(self) -> bool:
        """Returns True if the group is up; otherwise, restarts it in the background with pauses."""
        if not self._restart_policy.poll():
            return False
        reports = self._group.reports
        is_new = reports is not self._reports
        if is_new:
            self._check_fit(reports)
        self._step, self._reports = None, reports
        if is_new:
            self._listen()
        return True

    def _listen(self) -> None:
        """Makes the model listen for verdicts; its offer arrives before its next answer."""
        self.reads_verdicts = False
        if self._verdicts_of is None or not self._group.alive:
            return
        ours = self._group.reports[0].location
        theirs = self._verdicts_of[0].reports[0].location
        here = (ours.node, ours.process) == (theirs.node, theirs.process)
        with suppress(WorkerError):  # a dead model is reported by the next request
            self._group.send(ListenFeatures(here, ours.node != theirs.node, distributed=False))

    def _link(self, offer: LinkOffer) -> None:
        """Makes the target send verdicts to the model."""
        assert self._verdicts_of is not None, "nobody asked for an offer"
        target, link = self._verdicts_of
        try:
            target.call(OpenFeatures(link, offer, (), self._timeout_s))
            self.reads_verdicts = True
        except WorkerError as error:  # a dead target is reported by its next step
            log.warning("a link for verdicts could not be opened: %s", error.message)

    def detach(self) -> None:
        """Stops the target from sending verdicts; called in the thread that requests drafts."""
        if self._verdicts_of is None:
            return
        (target, link), self._verdicts_of = self._verdicts_of, None
        self.reads_verdicts = False
        target.on_restart.remove(self._listen)
        if target.alive:
            with suppress(WorkerError):
                target.call(OpenFeatures(link, None, (), self._timeout_s))

    def _check_fit(self, reports: Sequence[WorkerReport]) -> None:
        """Raises `ConfigError` if the restarted model does not fit the drafter."""
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
    """Computes the pause before each attempt; call `reset` after a success."""

    def __init__(self) -> None:
        self._num_tries = 0
        self._not_before = 0.0  # monotonic clock

    def next_pause_s(self) -> float:
        """Returns the pause before the next attempt and counts the attempt."""
        pause_s = BACKOFF_S[min(self._num_tries, len(BACKOFF_S) - 1)]
        self._num_tries += 1
        return pause_s

    def try_due(self) -> bool:
        """Returns True and counts an attempt if one may be made now."""
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
        """Returns True if the group is up; otherwise, starts a restart unless one is running."""
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
# How long the engine's thread waits for an offer: of a new head, of one that may be drafting.
_FIRST_WAIT_S, _LINK_WAIT_S = 2.0, 0.1
Transport = Literal["auto", "socket", "distributed"]


class GroupHead:
    """The engine's proxy of a separate head: its group, and its link to the target's.

    Features go from the target's rank 0 directly to the head; the engine only exchanges addresses
    (`transport/channel.py`), once per link. When either group restarts or the link breaks, a new
    link is opened and the head starts with an empty cache. Since a head may be drafting or may
    hang, a thread waits for its offer while steps continue without it.

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
        self._feed = link
        self._transport: Transport = transport
        self._groups_work = True  # whether "auto" may choose a process group for the tensors
        self._timeout_s = timeout_s
        self._restart_policy = RestartPolicy(group, owned=True)
        self._backoff = Backoff()  # between attempts to open a link while both groups are up
        self._linked = False
        self._offer: Future[LinkOffer] | None = None  # the requested offer
        self._asked_at: list[float] = []  # monotonic clock, per outstanding answer
        target.on_restart.append(self._open_again)
        self._open(_FIRST_WAIT_S)

    @property
    def num_outstanding(self) -> int:
        return len(self._asked_at)

    def ask(self, ask: HeadAsk) -> None:
        """Requests the head's drafts after a step, whose features rank 0 sends.

        Raises:
            WorkersReplacedError: no link is open because the head's workers are being replaced.
            WorkerDiedError: the head is gone, and with it all answers; or no link is open.
        """
        if not self._linked and self._group.is_being_replaced:
            raise WorkersReplacedError("the head's workers are being replaced")
        if self._offer is not None:
            raise WorkersReplacedError("the head's link to the target is being opened")
        if not self._linked:
            raise WorkerDiedError("the head is not linked to the target")
        try:
            self._group.send(ask)
        except WorkerDiedError:
            self._asked_at.clear()
            raise
        self._asked_at.append(time.monotonic())

    def answer(self, timeout_s: float) -> HeadAnswer | None:
        """Returns the head's answer to the oldest request; None if there is none yet.

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
            self._group.drop()
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
        """Returns True if the head is up and linked; else, starts a restart or opens a link."""
        if not self._restart_policy.poll():
            self._linked, self._offer = False, None
            return False
        if self._offer is not None:
            self._link(0.0)
        elif not self._linked and self._backoff.try_due():
            self._open()
        return self._linked

    def detach(self) -> None:
        """Stops the target's gathering for this head; called in the thread that requests drafts."""
        self._target.on_restart.remove(self._open_again)
        self._linked, self._offer = False, None
        if self._target.alive:
            with suppress(WorkerError):  # a dead target is reported by its next step
                self._target.call(OpenFeatures(self._feed, None, (), self._timeout_s))

    def shutdown(self) -> None:
        self._restart_policy.end()

    def _open_again(self) -> None:
        """Opens a new link after the target's workers were replaced."""
        self._linked = False
        if self._restart_policy.poll() and self._offer is None:
            self._open()

    def _open(self, wait_s: float = _LINK_WAIT_S) -> None:
        """Makes the head listen; if there is no offer at once, `revive` opens the link later."""
        before, self._asked_at = len(self._asked_at), []
        self._offer = offer = Future[LinkOffer]()

        def wait() -> None:
            try:
                offer.set_result(self._offered(before))
            except WorkerError as error:
                offer.set_exception(error)

        message = self._how()
        try:
            self._group.send(message)
        except WorkerError as error:
            offer.set_exception(error)
        else:
            threading.Thread(target=wait, name="outrider-link", daemon=True).start()
        self._link(wait_s)

    def _link(self, wait_s: float) -> None:
        """Opens the offered link; on failure, `_linked` stays False."""
        head, offer = self._group.reports[0].head, self._offer
        assert head is not None, "the group runs a head"
        assert offer is not None, "the head was asked"
        try:
            opening = OpenFeatures(self._feed, offer.result(wait_s), head.capture, self._timeout_s)
            self._target.call(opening)
            self._linked = True
        except TimeoutError:
            return
        except WorkerError as error:  # a dead target is reported by its next step
            log.warning("a feature link could not be opened: %s", error.message)
            self._groups_work &= isinstance(error, WorkerDiedError)
        self._offer = None

    def _offered(self, before: int) -> LinkOffer:
        """Returns the head's offer; first discards the answers to `before` earlier requests."""
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
        """Returns the head's next answer; shuts the group down if there is none by `deadline`."""
        try:
            return self._group.receive(max(0.0, deadline - time.monotonic()))
        except NoAnswerError:
            self._group.drop()
            raise WorkerDiedError(f"the head did not answer within {_LINK_TIMEOUT_S} s") from None

    def _how(self) -> ListenFeatures:
        """Returns the fastest transport between the two workers, or the configured one.

        Two ranks on one GPU cannot form an NCCL group, and a group has no advantage on a CPU.
        """
        ours, theirs = self._group.reports[0].location, self._target.reports[0].location
        choose = self._transport == "auto"
        apart = bool(ours.gpu and theirs.gpu and ours.gpu != theirs.gpu)
        return ListenFeatures(
            here=choose and (ours.node, ours.process) == (theirs.node, theirs.process),
            remote=ours.node != theirs.node,
            distributed=apart and self._groups_work if choose else self._transport == "distributed",
        )
