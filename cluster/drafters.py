"""Drafter groups: draft models of the cluster that several engines share.

A group is a named, detached actor, `DrafterGroup`, which owns its members. Each member is a draft
model over its own ranks, with its own placement group. Engines find the group by its name and
connect to rank 0 of every member (`SharedGroup`); steps do not use Ray. A member that died is
restarted under the same id. Members join and leave while engines draft with them (`Members` in
`drafters/members.py`). Ray restarts an actor that died; it takes over the members noted at Ray's
head, with which engines continue to draft meanwhile.

A group that Serve applications hold (`serve/drafters.py`) ends when no application holds it any
longer; a group of `outrider drafter` ends on request.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import (
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..config import GROUP_KEYS, EngineConfig, GroupAutoscalingConfig
from ..drafters.protocol import DraftModel
from ..engine.checkpoints import draft_outline
from ..engine.host import MembersAsk, model_spec, worker_spec
from ..errors import ConfigError, OutriderError, WorkerDiedError, WorkerError
from ..workers.drafter_ends import BACKOFF_S, GroupDraftModel
from ..workers.spec import WorkerSpec
from .process import start_thread
from .rank_actors import NAMESPACE, Formed, MemberPlace, RankActors, SharedGroup, share

log = logging.getLogger(__name__)
_PREFIX = "outrider-drafters-"
_FIELD = "speculative_config.drafter_group"
_ANSWER_S = 30.0
_POLL_S = 5.0  # of an engine that waits for changes of members
_RETRY_S = 1.0
_FREED_S = 0.05  # between checks whether a name is free
_MAX_CALLS = 256  # concurrent calls, nearly all of which wait
_LOOK_S = 0.5  # between the actor's checks of load and applications
_REPORT_S = 1.0  # between engines' reports of their requests, if the group scales
_SILENT_S = 15.0  # after which an engine counts as gone
_LEAVE_S = 2.0  # until engines have moved the requests of a member that leaves
_LEAST_KEEP_S = 15.0  # without an application that claims the group
STARTING = "it is being started"
RESTARTING = "a rank died; it is started again"
Size = int | GroupAutoscalingConfig
"""Number of members of a group: fixed, or limits between which it scales with the load."""


_Up = tuple[Formed, MemberPlace]
"""A running member: its ranks, and the address for engines."""


@dataclass(slots=True)
class _Member:
    ranks: RankActors
    up: _Up | None = None  # None: it is being started
    is_ending: bool = False
    reason: str = ""  # why it is not running


@dataclass(frozen=True, slots=True)
class _Note:
    """The state that a restarted actor needs of its members, stored at Ray's head."""

    mark: str
    count: int
    size: Size
    members: dict[str, _Up | None]  # by id; None: it was being started

    @classmethod
    def read(cls, name: str) -> _Note | None:
        """Returns the note of a group, or None."""
        found = internal_kv._internal_kv_get(_note_key(name))
        return None if found is None else cast("_Note", ray.cloudpickle.loads(found))

    def write(self, name: str) -> None:
        """Replaces the group's note."""
        internal_kv._internal_kv_put(_note_key(name), ray.cloudpickle.dumps(self))


def _note_key(name: str) -> bytes:
    return f"outrider drafters {name}".encode()


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Describes a group in plain values."""

    name: str
    folder: str
    vocab_size: int
    max_engines: int
    block_size: int
    size: Size
    applications: tuple[str, ...]  # that claim it
    members: dict[str, str] = field(default_factory=dict)  # by id: "" if running, else the reason

    @property
    def num_up(self) -> int:
        return sum(not reason for reason in self.members.values())


class MemberScaling:
    """Decides how many members a group should have, from the requests that its engines report.

    Like Serve's autoscaler for engines, it provides one member per `target` requests, within the
    limits, once more or fewer members have been needed for the configured delay. If there is no
    member, the first one starts without a delay.
    """

    def __init__(
        self,
        config: GroupAutoscalingConfig,
        max_num_seqs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._clock = config, clock
        self._target = config.target_ongoing_requests or max_num_seqs
        self._reports: dict[str, tuple[float, int]] = {}  # by engine: time, number of requests
        self._begin_s = self._since_s = clock()
        self._direction = 0

    def report(self, engine: str, num_requests: int) -> None:
        """Records the number of requests that an engine drafts for."""
        self._reports[engine] = self._clock(), num_requests

    def wanted(self, num_members: int) -> int:
        """Returns the number of members that there should be, given the current number."""
        now_s, config = self._clock(), self._config
        oldest_s = now_s - _SILENT_S
        self._reports = {name: each for name, each in self._reports.items() if each[0] > oldest_s}
        if not self._reports and self._begin_s > oldest_s:
            return num_members  # engines may not have reported yet
        needed = math.ceil(sum(count for _, count in self._reports.values()) / self._target)
        needed = min(max(needed, config.min_members), config.max_members)
        direction = (needed > num_members) - (needed < num_members)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        if not num_members:
            return min(needed, 1)
        delay_s = config.upscale_delay_s if direction > 0 else config.downscale_delay_s
        if not direction or now_s - self._since_s < delay_s:
            return num_members
        self._direction = 0
        return needed


class DrafterGroup:
    """The actor.

    Args:
        config: configuration of the members; its model is the draft model.
        max_engines: maximum number of engines that share a member.
        application: the application that starts and holds the group; "": it stays until it is
            ended.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        max_engines: int,
        vocab_size: int,
        size: Size,
        application: str,
    ) -> None:
        self._name, self._config, self._max_engines = name, config, max_engines
        self._vocab_size = vocab_size
        self._size = self._asked = size  # current, and as requested by the application
        self._scaling: MemberScaling | None = None
        self._is_held, self._is_over, self._begin_s = bool(application), False, time.monotonic()
        self._claims = {application: self._begin_s} if application else {}
        self._keep_s = max(config.resources.keep_workers_s, _LEAST_KEEP_S)
        self._leaving: list[_Member] = []
        self._itself = ray.get_runtime_context().current_actor
        self._node = ray.get_runtime_context().get_node_id()
        self._members: dict[str, _Member] = {}
        self._count = 0
        self._mark = secrets.token_hex(4)  # tells ids from those of another such group
        self._changed = threading.Condition()
        self._version = secrets.randbits(31)  # engines may have a version of the previous process
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._take_over()
        else:
            self.scale(size)
        start_thread("looking", self._look_after)

    def recall(self) -> None:
        """Called by ranks to check that their owner is alive."""

    def facts(self) -> GroupFacts:
        """Returns the group's settings and the state of its members."""
        config = self._config
        return GroupFacts(
            self._name,
            config.model,
            self._vocab_size,
            self._max_engines,
            config.block_size,
            self._size,
            tuple(sorted(self._claims)),
            self._states(),
        )

    def _states(self) -> dict[str, str]:
        """Returns the members by id: "" if running, else the reason."""
        members = list(self._members.items())
        return {name: "" if each.up else each.reason or STARTING for name, each in members}

    def scale(self, size: Size) -> None:
        """Sets the size of the group; does not wait for new members."""
        with self._changed:
            self._size, self._scaling, num_members = size, None, size
            if isinstance(size, GroupAutoscalingConfig):
                self._scaling = MemberScaling(size, self._config.max_num_seqs)
                num_members = min(max(len(self._members), size.min_members), size.max_members)
            assert isinstance(num_members, int), num_members
            self._resize(num_members)

    def _resize(self, num_members: int) -> None:
        """Starts members or ends the newest ones until there are `num_members`."""
        while len(self._members) > num_members:
            _, member = self._members.popitem()
            member.is_ending = True
            self._leaving.append(member)
            start_thread("ending", self._part, member)
        while len(self._members) < num_members:
            self._count += 1
            self._add(f"{self._mark}-{self._count}")
        self._note_change()

    def _part(self, member: _Member) -> None:
        """Ends a member after its requests have moved to others."""
        time.sleep(_LEAVE_S)
        member.ranks.shutdown()
        with self._changed:
            if member in self._leaving:
                self._leaving.remove(member)

    def members(
        self, version: int, timeout_s: float, engine: str = "", num_requests: int = 0
    ) -> tuple[int, dict[str, str]]:
        """Returns the members, as in `GroupFacts`, once their version differs from `version`.

        Args:
            num_requests: number of requests that `engine` drafts for.
        """
        with self._changed:
            if self._scaling is not None:
                timeout_s = min(timeout_s, _REPORT_S)
                if engine:
                    self._scaling.report(engine, num_requests)
            self._changed.wait_for(lambda: self._version != version, timeout_s)
            return self._version, self._states()

    def claim(
        self, application: str, config: EngineConfig, max_engines: int, size: Size
    ) -> tuple[str, bool]:
        """Claims this group for an application, which repeats this while it lives.

        Returns:
            How the group differs from the claimed settings ("": not at all), and whether the
            application may end it because no other holds it.
        """
        with self._changed:
            others = self._claims.keys() - {application}
            wrong = self._difference(config, max_engines)
            if not wrong and self._is_held and size != self._asked:
                if others:
                    wrong = f"its number of members is {self._asked!r}, not {size!r}"
                else:
                    self._asked = size
                    self.scale(size)
            if wrong:
                return wrong, self._is_held and not others
            self._claims[application], self._is_over = time.monotonic(), False
            return "", False

    def release(self, application: str) -> None:
        """Releases an application's claim; a group without claims ends."""
        with self._changed:
            self._claims.pop(application, None)
            self._is_over = self._is_held and not self._claims

    def _difference(self, config: EngineConfig, max_engines: int) -> str:
        """Returns the first setting in which this group differs."""
        mine, theirs = self._config.model_dump(), config.model_dump()
        pairs = [("max_engines", self._max_engines, max_engines)]
        pairs += [(key, mine[key], theirs[key]) for key in sorted(GROUP_KEYS)]
        return next((f"its {key} is {a!r}, not {b!r}" for key, a, b in pairs if a != b), "")

    def _look_after(self) -> None:
        """Scales with the load; ends the group if no application has claimed it for a while."""
        while True:
            time.sleep(_LOOK_S)
            with self._changed:
                if self._scaling is not None:
                    before = len(self._members)
                    wanted = self._scaling.wanted(before)
                    if wanted != before:
                        log.info("drafter group %s: %d members, not %d", self._name, wanted, before)
                        self._resize(wanted)
                oldest_s = time.monotonic() - self._keep_s
                self._claims = {name: at for name, at in self._claims.items() if at > oldest_s}
                is_forgotten = self._is_held and not self._claims and self._begin_s <= oldest_s
                if self._is_over or is_forgotten:
                    break
        log.info("drafter group %s ends: no application names it", self._name)
        self.end()
        ray.kill(self._itself)

    def place(self, member: str) -> MemberPlace | None:
        """Returns the address of a member; None if it is not running or does not exist."""
        found = self._members.get(member)
        return found.up[1] if found is not None and found.up is not None else None

    def end(self) -> None:
        """Ends all members."""
        with self._changed:
            ended = [*self._members.values(), *self._leaving]
            self._members.clear()
            for member in ended:
                member.is_ending = True
            self._note_change()
        for member in ended:
            member.ranks.shutdown()
        internal_kv._internal_kv_del(_note_key(self._name))

    def _add(self, name: str, found: _Up | None = None) -> None:
        """Adds a member, which is started unless it was found running."""
        ranks = RankActors(
            self._spec(), self._config.resources, keeper=self._itself, mark=self._placements
        )
        member = self._members[name] = _Member(ranks, found)
        if found is not None:
            ranks.adopt(found[0])
        start_thread("member", self._keep, member)

    def _take_over(self) -> None:
        """Takes over the members of the process that died; restarts those that it was starting.

        Engines remain connected to the other members.
        """
        note = _Note.read(self._name)
        if note is None:
            return
        self._mark, self._count = note.mark, note.count
        self._size = self._asked = note.size
        if isinstance(note.size, GroupAutoscalingConfig):
            self._scaling = MemberScaling(note.size, self._config.max_num_seqs)
        kept = [found[0].placement for found in note.members.values() if found is not None]
        ids = {each.id.hex() for each in kept if each is not None}
        for placement_id, row in placement_group_table().items():
            is_ours = row["name"].startswith(self._placements) and row["state"] != "REMOVED"
            if is_ours and placement_id not in ids:
                with contextlib.suppress(ValueError):  # it is gone
                    remove_placement_group(get_placement_group(row["name"]))
        with self._changed:  # keeps a dead member's note from omitting the others
            for name, found in note.members.items():
                self._add(name, found)

    @property
    def _placements(self) -> str:
        """Prefix of the names of placement groups."""
        return f"{_PREFIX}{self._name}/"

    def _spec(self) -> WorkerSpec:
        config = self._config
        draft = model_spec(config, config.model, config.num_kv_blocks, config.max_model_len)
        return worker_spec(
            config,
            config.tensor_parallel_size,
            symmetric_memory=config.symmetric_memory,
            draft=draft,
            num_leases=self._max_engines,
        )

    def _note_change(self) -> None:
        """Notifies engines, and stores a note for a restarted actor."""
        self._version += 1
        self._changed.notify_all()
        members = {name: each.up for name, each in self._members.items()}
        try:
            _Note(self._mark, self._count, self._size, members).write(self._name)
        except RayError as error:  # the next change writes a complete note
            log.warning("drafter group %s could not be noted: %s", self._name, error)

    def _keep(self, member: _Member) -> None:
        """Starts a member, and restarts it with pauses whenever one of its ranks has died."""
        num_tries = 0
        while not member.is_ending:
            try:
                if member.up is None:
                    formed = member.ranks.form(self._node, False, self._spec())
                    self._set_up(member, (formed, share(formed)))
                else:
                    formed, _ = member.up
                sentinels = [rank.sentinel.remote() for rank in formed.ranks]
            except (OutriderError, RayError, OSError) as error:
                num_tries += 1
                member.reason = str(getattr(error, "message", error)).splitlines()[0]
                log.warning("a member of drafter group %s: %s", self._name, member.reason)
                time.sleep(BACKOFF_S[min(num_tries, len(BACKOFF_S) - 1)])
                continue
            if member.is_ending:
                break
            num_tries = 0
            with contextlib.suppress(RayError):
                ray.get(ray.wait(sentinels, num_returns=1)[0])
            if member.is_ending:
                break
            member.reason = RESTARTING
            self._set_up(member, None)
        member.ranks.shutdown()

    def _set_up(self, member: _Member, up: _Up | None) -> None:
        with self._changed:
            if not member.is_ending:
                member.up = up
                self._note_change()


def start_group(
    name: str,
    config: EngineConfig,
    *,
    num_members: Size = 1,
    max_engines: int = 4,
    application: str = "",
) -> Any:
    """Starts a drafter group and returns its actor; members start in the background.

    Args:
        config: configuration of the members; its model is the draft model.
        max_engines: maximum number of engines that share a member, each with an equal part of its
            KV cache.
        application: the application that holds the group; "": it stays until it is ended.

    Raises:
        ConfigError: there is a group of this name, or a key is set that draft models do not have.
        CheckpointError: the model's files are damaged, or hold a head.
    """
    for key in sorted(config.model_fields_set - GROUP_KEYS - {"executor"}):
        if getattr(config, key) != EngineConfig.model_fields[key].get_default():
            raise ConfigError.at(key, "it is a target's, and no drafter group has it")
    if name in group_names():
        raise ConfigError.at("name", f"there is a drafter group {name!r} already")
    found, vocab_size = of_members(config)
    actor: Any = (
        ray.remote(DrafterGroup)
        .options(
            name=_PREFIX + name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_MAX_CALLS,
            max_restarts=-1,
            # Not on a drafter's node by chance, because an autoscaler could then not remove that
            # node.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=True
            ),
        )
        .remote(name, found, max_engines, vocab_size, num_members, application)
    )
    facts_of(actor)
    return actor


def of_members(config: EngineConfig) -> tuple[EngineConfig, int]:
    """Returns the full settings of a group's members, and the size of their vocabulary.

    Raises:
        CheckpointError: the model's files are damaged, or hold a head.
    """
    config, vocab_size = draft_outline(config)
    resources = config.resources.model_copy(update={"spare_workers": False})
    return config.model_copy(update={"resources": resources}), vocab_size


def group_names() -> list[str]:
    """Returns the names of the cluster's drafter groups."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return sorted(each.removeprefix(_PREFIX) for each in names if each.startswith(_PREFIX))


def find_group(name: str, field: str) -> Any:
    """Returns the actor of a group; raises `ConfigError`, which names `field`."""
    try:
        return ray.get_actor(_PREFIX + name, namespace=NAMESPACE)
    except ValueError:
        known = ", ".join(map(repr, group_names())) or "none"
        raise ConfigError.at(
            field, f"there is no drafter group {name!r} in this cluster; there is {known}"
        ) from None


def facts_of(actor: Any) -> GroupFacts:
    """Returns a group's facts; raises `WorkerDiedError` if it has ended or does not answer."""
    found: GroupFacts = answer_of(actor.facts.remote)
    return found


def scale_group(actor: Any, num_members: Size) -> None:
    """Adds or removes members of a running group; does not wait until new ones run.

    Raises:
        WorkerDiedError: the group has ended, or does not answer.
    """
    answer_of(actor.scale.remote, num_members)


def release_group(name: str, application: str) -> None:
    """Releases an application's claim to a group, which ends if no other holds it."""
    with contextlib.suppress(RayError, ValueError):
        actor = ray.get_actor(_PREFIX + name, namespace=NAMESPACE)
        ray.get(actor.release.remote(application), timeout=_ANSWER_S)


def answer_of(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the answer of a group's actor, even if that is restarted meanwhile.

    Raises:
        WorkerDiedError: the group has ended, or does not answer.
    """
    until = time.monotonic() + _ANSWER_S
    try:
        while True:
            try:
                return ray.get(call(*arguments), timeout=max(0.0, until - time.monotonic()))
            except ActorUnavailableError:
                time.sleep(_RETRY_S)
    except GetTimeoutError:
        raise WorkerDiedError(f"no answer of the drafter group within {_ANSWER_S:g} s") from None
    except RayActorError:
        raise WorkerDiedError("the drafter group has ended") from None


def end_group(actor: Any) -> None:
    """Ends a group and its members, and frees its name; engines continue without them."""
    with contextlib.suppress(RayError):
        ray.get(actor.end.remote(), timeout=_ANSWER_S)
    ray.kill(actor)  # returns while the cluster still has its name
    with contextlib.suppress(WorkerDiedError):
        while True:
            facts_of(actor)
            time.sleep(_FREED_S)


class GroupLink:
    """An engine's link to a drafter group; only its thread waits for Ray.

    If the group ends or its actor dies, a group of that name is looked for until there is one.

    Raises:
        ConfigError: there is no such group, its model cannot draft for the engine's target, or it
            has no room for another engine.
    """

    def __init__(self, ask: MembersAsk) -> None:
        self._ask = ask
        self._mark = secrets.token_hex(8)
        self.reason, self.num_members, self.num_requests = "", 0, 0
        self._known: set[str] = set()
        self._news: queue.SimpleQueue[tuple[str, DraftModel | None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._find()
        self._look(0.0, is_first=True)
        start_thread("members", self._follow)

    def changes(self) -> Sequence[tuple[str, DraftModel | None]]:
        """See `DraftMembers`."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def shutdown(self) -> None:
        """See `DraftMembers`."""
        self._closed.set()
        for _, model in self.changes():
            if model is not None:
                model.shutdown()

    def _find(self) -> None:
        """Connects to the group of that name, if its model can draft for the engine."""
        actor = find_group(self._ask.name, _FIELD)
        facts = facts_of(actor)
        self.folder, self.vocab_size = facts.folder, facts.vocab_size
        self._translation = self._ask.check(self)
        self._actor, self._version, self.reason = actor, -1, ""

    def _follow(self) -> None:
        while not self._closed.is_set() and ray.is_initialized():
            try:
                self._look(_POLL_S)
            except GetTimeoutError:
                continue  # it is busy
            except ActorUnavailableError:
                self._closed.wait(_RETRY_S)  # it is being restarted; its members continue
            except RayError as error:
                log.debug("drafter group %s: %s", self._ask.name, error)
                self._take([])
                self.num_members, self.reason = 0, "it has ended"
                self._seek()

    def _seek(self) -> None:
        """Waits for a group of that name that can draft; `reason` is why the last one could not."""
        while not self._closed.wait(_RETRY_S) and ray.is_initialized():
            try:
                return self._find()
            except OutriderError as refusal:
                self.reason = refusal.message
            except RayError as error:
                log.debug("drafter group %s: %s", self._ask.name, error)
        return None

    def _look(self, timeout_s: float, *, is_first: bool = False) -> None:
        """Waits for changes of members and applies them."""
        asked = self._actor.members.remote(self._version, timeout_s, self._mark, self.num_requests)
        version, members = ray.get(asked, timeout=timeout_s + _ANSWER_S)
        self.num_members = len(members)
        if self._take([name for name in members if not members[name]], is_first=is_first):
            self._version, self.reason = version, "; ".join(sorted({*members.values()} - {""}))
        else:
            self._closed.wait(_RETRY_S)

    def _take(self, names: Sequence[str], *, is_first: bool = False) -> bool:
        """Connects to these members; returns False if any connection has to be retried."""
        for name in self._known - {*names}:
            self._known.discard(name)
            self._news.put((name, None))
        for name in names:
            if name in self._known:
                continue
            try:
                group = SharedGroup(self._actor, name, self._ask, self._translation)
            except (ConfigError, WorkerError) as error:
                if is_first and isinstance(error, ConfigError):
                    raise
                if self.reason != error.message:
                    log.warning("drafter group %s: %s", self._ask.name, error.message)
                self.reason = error.message
                continue
            if self._closed.is_set():
                group.shutdown()
                continue
            self._known.add(name)
            model = GroupDraftModel(
                group, self._ask.max_num_batched_tokens, owned=True, timeout_s=self._ask.timeout_s
            )
            self._news.put((name, model))
        return self._known == {*names}
