"""The engine's proxy of a separate head: requests, answers, feature links and restarts.

Features go from the target's rank 0 directly to the head; the engine only exchanges addresses
(`transport/channel.py`), once per link. When either group restarts or the
link breaks, a new link is opened and the head starts with an empty cache.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any, Literal

from ..drafters.protocol import HeadAnswer, HeadAsk
from ..errors import WorkerDiedError, WorkerError
from .group import Backoff, RestartPolicy, WorkerGroup
from .transport.channel import LinkOffer, ListenFeatures, NoAnswerError, OpenFeatures

log = logging.getLogger(__name__)
_LINK_TIMEOUT_S = 10.0
Transport = Literal["auto", "socket", "distributed"]


class GroupHead:
    """The head's group and its link to the target's.

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

    def ask(self, step: int, wait_s: float) -> None:
        """Requests the head's drafts after `step`, whose features rank 0 sends.

        Raises:
            WorkerDiedError: the head is gone, and with it all answers; or no link is open.
        """
        if not self._linked:
            raise WorkerDiedError("the head is not linked to the target")
        try:
            self._group.send(HeadAsk(step, wait_s))
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
