"""A tensor-parallel group seen from the engine, and its twin inside one process.

`LocalGroup` runs the ranks as threads here; `cluster/ray_group.py` runs them as Ray actors. What
the scheduler and the drafters see of a group is `GroupTarget` and `GroupDraftModel`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ..errors import OutriderError, WorkerDiedError
from ..scheduler import tree
from ..scheduler.types import Batch, Draft, Drafted, DraftStep, Verdict
from .collective import Collective
from .spec import ModelReport, WorkerReport, WorkerSpec
from .transport.channel import Channel, ThreadChannel
from .worker import Worker, pick_device

log = logging.getLogger(__name__)
_JOIN_S = 10.0


class WorkerGroup(Protocol):
    """Ranks that load together, answer together and die together."""

    reports: list[WorkerReport]

    @property
    def alive(self) -> bool:
        """Whether messages can be answered."""
        ...

    def call(self, message: Any) -> Any:
        """Rank 0's answer (raises as `Channel.call` does)."""
        ...

    def restart(self) -> None:
        """Throws all ranks away and starts fresh ones, with empty caches."""
        ...

    def shutdown(self) -> None:
        """Ends all ranks."""
        ...


def agreed_blocks(reports: Sequence[WorkerReport]) -> tuple[int, int]:
    """KV blocks of the target and of the draft model that every rank has room for."""
    target = [report.target.num_blocks for report in reports if report.target]
    draft = [report.draft.num_blocks for report in reports if report.draft]
    return min(target, default=0), min(draft, default=0)


class LocalGroup:
    """Ranks as threads of this process, joined by gloo."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._channel: Channel | None = None
        self.reports: list[WorkerReport] = []
        self.restart()

    @property
    def alive(self) -> bool:
        return self._channel is not None

    def call(self, message: Any) -> Any:
        if self._channel is None:
            raise WorkerDiedError("the workers are down")
        try:
            return self._channel.call(message, self._spec.timeout_s)
        except WorkerDiedError:
            self.shutdown()
            raise

    def restart(self) -> None:
        self.shutdown()
        spec = self._spec
        device = pick_device(spec.device)
        members = Collective.threads(spec.size, spec.timeout_s)
        workers = [Worker(spec, member, device) for member in members]
        with ThreadPoolExecutor(spec.size) as pool:
            self.reports = list(pool.map(Worker.load, workers))
            blocks = agreed_blocks(self.reports)
            list(pool.map(lambda worker: worker.allocate(*blocks), workers))
        self._channel = ThreadChannel([worker.handle for worker in workers])

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class GroupTarget:
    """The target as the loop sees it."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        report = group.reports[0].target
        assert report is not None, "the group has no target"
        self.report: ModelReport = report
        self.num_blocks = agreed_blocks(group.reports)[0]

    def verify(self, batch: Batch, drafts: Sequence[Draft]) -> Verdict:
        verdict = self._group.call(tree.join(batch, drafts, self.report.block_size))
        assert isinstance(verdict, Verdict), type(verdict)
        return verdict


class GroupDraftModel:
    """A draft model as its drafter sees it, in its own group or in the target's.

    Args:
        owned: whether the group is the drafter's own, to be restarted and ended by it.
    """

    _BACKOFF_S = (0.0, 1.0, 5.0, 15.0, 60.0)

    def __init__(self, group: WorkerGroup, max_num_batched_tokens: int, *, owned: bool) -> None:
        self._group = group
        self._owned = owned
        report = group.reports[0].draft
        assert report is not None, "the group has no draft model"
        self.vocab_size = report.vocab_size
        self.max_model_len = report.max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks = agreed_blocks(group.reports)[1]
        self.block_size = report.block_size
        self._reports = group.reports  # a restarted group has new ones
        self._reviving: threading.Thread | None = None
        self._num_tries = 0
        self._closed = threading.Event()

    def draft(self, step: DraftStep) -> Drafted:
        if self._group.reports is not self._reports:
            raise WorkerDiedError("the draft model was restarted, with the target's workers")
        drafted = self._group.call(step)
        assert isinstance(drafted, Drafted), type(drafted)
        self._num_tries = 0
        return drafted

    def revive(self) -> bool:
        """True once the group is up; its restart runs in the background, with growing pauses."""
        if self._reviving is not None and self._reviving.is_alive():
            return False
        if self._group.alive:
            self._reports = self._group.reports
            return True
        if self._owned:
            self._reviving = threading.Thread(target=self._restart, daemon=True)
            self._reviving.start()
        return False

    def shutdown(self) -> None:
        self._closed.set()
        if self._reviving is not None:
            self._reviving.join(timeout=_JOIN_S)  # if it takes longer, it ends what it started
        if self._owned:
            self._group.shutdown()

    def _restart(self) -> None:
        pause_s = self._BACKOFF_S[min(self._num_tries, len(self._BACKOFF_S) - 1)]
        self._num_tries += 1
        if self._closed.wait(pause_s):
            return
        try:
            self._group.restart()
        except OutriderError as error:
            log.warning("the draft workers did not come back: %s", error.message)
        if self._closed.is_set():
            self._group.shutdown()
