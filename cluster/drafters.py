"""Drafter groups: draft models of the cluster that several engines share.

A group is a named, detached actor, `DrafterGroup`, which owns its members: each a draft model over
its own ranks, with a placement group of its own. Engines find the group by its name and connect to
rank 0 of every member (`SharedEnd`); no step passes Ray. A member that died is started anew under
the same id; members come and go while engines draft with them (`Members` in
`drafters/draft_target.py`). An actor that died is started again by Ray, and takes over the members
that are noted at Ray's head: engines draft with them meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import (
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)

from ..config import EngineConfig
from ..drafters.protocol import DraftModel
from ..engine.checkpoints import of_another_kind, resolved
from ..engine.host import MembersAsk, model_spec, worker_spec
from ..errors import ConfigError, OutriderError, WorkerDiedError, WorkerError
from ..workers.group import BACKOFF_S, GroupDraftModel
from ..workers.spec import OpenLease, WeightsAnswer, WorkerReport, WorkerSpec
from ..workers.transport import framing
from ..workers.transport.socket_channel import Monitor, SocketChannel
from .process import start_thread
from .rank_actors import NAMESPACE, ConnectedGroup, Formed, RankActors, answers_of

log = logging.getLogger(__name__)
_PREFIX = "outrider-drafters-"
_FIELD = "speculative_config.drafter_group"
_ANSWER_S = 30.0
_POLL_S = 5.0  # of an engine that waits for members to come or go
_RETRY_S = 1.0
_CONNECT_S = 10.0
_MAX_CALLS = 256  # at once, nearly all of which wait
_KEYS = {  # of an engine's configuration, which a draft model has as well
    *("model", "revision", "trust_remote_code", "allow_pickle", "dtype", "device", "forward"),
    *("tensor_parallel_size", "symmetric_memory", "resources", "executor"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "num_kv_blocks", "kv_memory_fraction", "kv_cpu_bytes"),
    *("step_timeout_s", "heartbeat_timeout_s"),
}


@dataclass(frozen=True, slots=True)
class MemberPlace:
    """Where engines connect to a member."""

    addresses: tuple[framing.Address, ...]  # a Unix socket on its node, TCP
    node: str
    secret: bytes
    reports: tuple[WorkerReport, ...]


@dataclass(slots=True)
class _Member:
    ranks: RankActors
    place: MemberPlace | None = None  # None: it is being started
    formed: Formed | None = None  # its ranks, once it has a place
    is_ending: bool = False
    reason: str = ""  # why it is not up


@dataclass(frozen=True, slots=True)
class _Note:
    """What the actor has to know of its members when it is started again; at Ray's head."""

    mark: str
    count: int
    members: dict[str, tuple[Formed, MemberPlace] | None]  # by id; None: it was being started

    @classmethod
    def read(cls, name: str) -> _Note | None:
        """That of a group, if there is one."""
        found = internal_kv._internal_kv_get(_note_key(name))
        return None if found is None else cast("_Note", ray.cloudpickle.loads(found))

    def write(self, name: str) -> None:
        """Replaces it."""
        internal_kv._internal_kv_put(_note_key(name), ray.cloudpickle.dumps(self))


def _note_key(name: str) -> bytes:
    return f"outrider drafters {name}".encode()


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group in plain values."""

    name: str
    folder: str
    vocab_size: int
    max_engines: int
    block_size: int
    members: dict[str, str] = field(default_factory=dict)  # by id: "" where it is up, or why not


class DrafterGroup:
    """The actor.

    Args:
        config: of the members: its model is the draft model.
        max_engines: that may share a member.
    """

    def __init__(self, name: str, config: EngineConfig, max_engines: int, vocab_size: int) -> None:
        self._name, self._config, self._max_engines = name, config, max_engines
        self._vocab_size = vocab_size
        self._itself = ray.get_runtime_context().current_actor
        self._node = ray.get_runtime_context().get_node_id()
        self._members: dict[str, _Member] = {}
        self._count = 0
        self._mark = secrets.token_hex(4)  # ids of another group of this name differ
        self._changed = threading.Condition()
        self._version = secrets.randbits(31)  # engines may have that of the process before
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._take_over()

    def recall(self) -> None:
        """Ranks ask for this, to see whether their owner is there."""

    def facts(self) -> GroupFacts:
        """What the group is, and who is up."""
        members = {
            name: "" if each.place else each.reason or "it is being started"
            for name, each in self._members.items()
        }
        config = self._config
        return GroupFacts(
            self._name,
            config.model,
            self._vocab_size,
            self._max_engines,
            config.block_size,
            members,
        )

    def scale(self, num_members: int) -> None:
        """Starts members, or ends the newest, until there are so many; does not wait for them."""
        with self._changed:
            while len(self._members) > num_members:
                _, member = self._members.popitem()
                member.is_ending = True
                start_thread("ending", member.ranks.shutdown)
            while len(self._members) < num_members:
                self._count += 1
                self._add(f"{self._mark}-{self._count}")
            self._note_change()

    def members(self, version: int, timeout_s: float) -> tuple[int, list[str]]:
        """The members that are up, by their ids, once that is another version than the given."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout_s)
            return self._version, [name for name, each in self._members.items() if each.place]

    def place(self, member: str) -> MemberPlace | None:
        """Where a member is; None: it is not up, or there is none of that id."""
        found = self._members.get(member)
        return found.place if found is not None else None

    def end(self) -> None:
        """Ends all members."""
        with self._changed:
            ended = [*self._members.values()]
            self._members.clear()
            for member in ended:
                member.is_ending = True
            self._note_change()
        for member in ended:
            member.ranks.shutdown()
        internal_kv._internal_kv_del(_note_key(self._name))

    def _add(self, name: str, found: tuple[Formed, MemberPlace] | None = None) -> None:
        """A member, which is started, or found running."""
        ranks = RankActors(
            self._spec(), self._config.resources, keeper=self._itself, mark=self._placements
        )
        member = self._members[name] = _Member(ranks)
        if found is not None:
            member.formed, member.place = found
            ranks.adopt(member.formed)
        start_thread("member", self._keep, member)

    def _take_over(self) -> None:
        """Goes on with the members of the process that died; one that it was starting begins anew.

        Engines are connected to the others, and have noticed nothing.
        """
        note = _Note.read(self._name)
        if note is None:
            return
        self._mark, self._count = note.mark, note.count
        kept = [found[0].placement for found in note.members.values() if found is not None]
        ids = {each.id.hex() for each in kept if each is not None}
        for placement_id, row in placement_group_table().items():
            is_ours = row["name"].startswith(self._placements) and row["state"] != "REMOVED"
            if is_ours and placement_id not in ids:
                with contextlib.suppress(ValueError):  # it is gone
                    remove_placement_group(get_placement_group(row["name"]))
        with self._changed:  # no member that is found dead notes the others' absence
            for name, found in note.members.items():
                self._add(name, found)

    @property
    def _placements(self) -> str:
        """What the names of placement groups begin with."""
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
        """Tells engines, and whoever is in the place of this process one day."""
        self._version += 1
        self._changed.notify_all()
        members = {
            name: None if each.formed is None or each.place is None else (each.formed, each.place)
            for name, each in self._members.items()
        }
        try:
            _Note(self._mark, self._count, members).write(self._name)
        except RayError as error:  # the next change notes everything again
            log.warning("drafter group %s could not be noted: %s", self._name, error)

    def _keep(self, member: _Member) -> None:
        """Starts a member, and again whenever one of its ranks has died, with pauses."""
        num_tries = 0
        while not member.is_ending:
            try:
                if member.place is None:
                    self._set_place(member, *self._start(member))
                ranks = member.formed.ranks if member.formed is not None else []
                sentinels = [rank.sentinel.remote() for rank in ranks]
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
            member.reason = "a rank died; it is started again"
            self._set_place(member, None)
        member.ranks.shutdown()

    def _set_place(
        self, member: _Member, place: MemberPlace | None, formed: Formed | None = None
    ) -> None:
        with self._changed:
            if not member.is_ending:
                member.place, member.formed = place, formed
                self._note_change()

    def _start(self, member: _Member) -> tuple[MemberPlace, Formed]:
        """Forms the ranks and has rank 0 listen."""
        formed = member.ranks.form(self._node, False, self._spec())
        secret, node = secrets.token_bytes(32), formed.places[0].node_id
        first, *others = formed.ranks
        followers = answers_of(
            [
                rank.listen.remote(secret, place.node_id == node)
                for rank, place in zip(others, formed.places[1:], strict=True)
            ]
        )
        addresses = ray.get(first.share.remote(followers, secret), timeout=_ANSWER_S)
        place = MemberPlace(
            tuple((str(kind), str(host), int(port)) for kind, host, port in addresses),
            node,
            secret,
            tuple(formed.reports),
        )
        return place, formed


def start_group(
    name: str, config: EngineConfig, *, num_members: int = 1, max_engines: int = 4
) -> Any:
    """Starts a drafter group; its actor. Members start behind it.

    Args:
        config: of the members; its model is the draft model.
        max_engines: that may share a member, each with an equal part of its KV cache.

    Raises:
        ConfigError: there is a group of this name, or a key is set that no draft model has.
        CheckpointError: the model's files are damaged, or are those of a head.
    """
    from ..workers.model.info import outline

    for key in sorted(config.model_fields_set - _KEYS):
        if getattr(config, key) != EngineConfig.model_fields[key].get_default():
            raise ConfigError.at(key, "it is a target's, and no drafter group has it")
    if name in group_names():
        raise ConfigError.at("name", f"there is a drafter group {name!r} already")
    config = resolved(config)
    if (error := of_another_kind(config).get("model")) is not None:
        raise error
    trust = {"trust_remote_code": config.trust_remote_code, "allow_pickle": config.allow_pickle}
    found = outline(Path(config.model), config.tensor_parallel_size, **trust)
    config = config.model_copy(update={"model": str(Path(config.model).resolve())})
    resources = config.resources.model_copy(update={"spare_workers": False})
    config = config.model_copy(update={"resources": resources})
    actor: Any = (
        ray.remote(DrafterGroup)
        .options(
            name=_PREFIX + name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_MAX_CALLS,
            max_restarts=-1,
        )
        .remote(name, config, max_engines, found.vocab_size)
    )
    scale_group(actor, num_members)
    return actor


def group_names() -> list[str]:
    """The drafter groups of the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return sorted(each.removeprefix(_PREFIX) for each in names if each.startswith(_PREFIX))


def find_group(name: str, field: str) -> Any:
    """The actor of a group (raises `ConfigError`, which names `field`)."""
    try:
        return ray.get_actor(_PREFIX + name, namespace=NAMESPACE)
    except ValueError:
        known = ", ".join(map(repr, group_names())) or "none"
        raise ConfigError.at(
            field, f"there is no drafter group {name!r} in this cluster; there is {known}"
        ) from None


def facts_of(actor: Any) -> GroupFacts:
    """What a group is (raises `WorkerDiedError` where it has ended, or does not answer)."""
    found: GroupFacts = _answer(actor.facts.remote)
    return found


def scale_group(actor: Any, num_members: int) -> None:
    """Has members join or leave a group that runs; does not wait until those that join are up.

    Raises:
        WorkerDiedError: it has ended, or does not answer.
    """
    _answer(actor.scale.remote, num_members)


def _answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """What the actor answers, also where it is started again meanwhile."""
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
    """Ends a group and its members; engines go on without them."""
    with contextlib.suppress(RayError):
        ray.get(actor.end.remote(), timeout=_ANSWER_S)
    ray.kill(actor)


class SharedGroup(ConnectedGroup):
    """A member as one of its engines uses it: a lease, which ends with the connection.

    A restart connects to the member again, if the group has started it anew.

    Raises (also from `restart`):
        WorkerDiedError: the member is not up, or cannot be reached.
        ConfigError: it has no room for another engine.
    """

    is_concurrent = True

    def __init__(self, actor: Any, member: str, ask: MembersAsk) -> None:
        self._actor, self._member, self._asker = actor, member, ask
        super().__init__(WorkerSpec(1, "auto", None, ask.timeout_s))
        self._replace_ranks()

    def shutdown(self) -> None:
        self._hang_up()

    def _replace_ranks(self) -> None:
        self.shutdown()
        try:
            place = ray.get(self._actor.place.remote(self._member), timeout=_ANSWER_S)
            if place is None:
                raise WorkerDiedError(f"member {self._member} of the drafter group is not up")
            self._connect(place)
        except (RayError, OSError) as error:
            self.shutdown()
            reason = str(error).splitlines()[0]
            raise WorkerDiedError(f"the drafter group cannot be reached: {reason}") from None
        except OutriderError:
            self.shutdown()
            raise

    def _connect(self, place: MemberPlace) -> None:
        is_here = place.node == ray.get_runtime_context().get_node_id()
        address = place.addresses[0 if is_here else 1]
        steps, beats = (
            framing.connect(address, place.secret, _CONNECT_S, purpose)
            for purpose in (framing.STEPS, framing.BEATS)
        )
        channel = SocketChannel([steps], 1, self._spec.spin_s)
        self._channel = channel
        self._monitor = Monitor([beats], self._spec.heartbeat_timeout_s, channel.kill)
        num_scratch_blocks = self._asker.num_scratch_blocks(_draft_of(place).block_size)
        answer = channel.call(OpenLease(self._asker.engine, num_scratch_blocks), _ANSWER_S)
        if isinstance(answer, WeightsAnswer):
            raise ConfigError.at(f"speculative_config.{answer.field}", answer.problem)
        assert isinstance(answer, WorkerReport), type(answer)
        self.reports = [answer, *place.reports[1:]]
        self.reports = [replace(each, draft=answer.draft) for each in self.reports]


def _draft_of(place: MemberPlace) -> Any:
    report = place.reports[0].draft
    assert report is not None, "members run a draft model"
    return report


class GroupLink:
    """An engine's line to a drafter group; its thread is the only one that waits for Ray.

    A group that ends, or whose actor dies, is looked for by its name until there is another.

    Raises:
        ConfigError: there is no such group, its model cannot draft for the engine's target, or it
            has no room for another engine.
    """

    def __init__(self, ask: MembersAsk) -> None:
        self._ask = ask
        self.reason = ""
        self._known: set[str] = set()
        self._news: queue.SimpleQueue[tuple[str, DraftModel | None]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._find()
        self._look(0.0, is_first=True)
        start_thread("members", self._follow)

    def changes(self) -> Sequence[tuple[str, DraftModel | None]]:
        """As `DraftMembers`."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def shutdown(self) -> None:
        """As `DraftMembers`."""
        self._closed.set()
        for _, model in self.changes():
            if model is not None:
                model.shutdown()

    def _find(self) -> None:
        """Takes the group of that name, if its model can draft for the engine."""
        actor = find_group(self._ask.name, _FIELD)
        facts = facts_of(actor)
        self.folder, self.vocab_size = facts.folder, facts.vocab_size
        self._ask.check(self)
        self._actor, self._version, self.reason = actor, -1, ""

    def _follow(self) -> None:
        while not self._closed.is_set() and ray.is_initialized():
            try:
                self._look(_POLL_S)
            except GetTimeoutError:
                continue  # it is busy
            except ActorUnavailableError:
                self._closed.wait(_RETRY_S)  # it is being started again; its members go on
            except RayError as error:
                log.debug("drafter group %s: %s", self._ask.name, error)
                self._take([])
                self.reason = "it has ended"
                self._seek()

    def _seek(self) -> None:
        """Waits for a group of that name that can draft; the reason is why the last could not."""
        while not self._closed.wait(_RETRY_S) and ray.is_initialized():
            try:
                return self._find()
            except OutriderError as refusal:
                self.reason = refusal.message
            except RayError as error:
                log.debug("drafter group %s: %s", self._ask.name, error)
        return None

    def _look(self, timeout_s: float, *, is_first: bool = False) -> None:
        """Takes in who has come or gone, and waits for that."""
        asked = self._actor.members.remote(self._version, timeout_s)
        version, names = ray.get(asked, timeout=timeout_s + _ANSWER_S)
        if self._take(names, is_first=is_first):
            self._version = version
        else:
            self._closed.wait(_RETRY_S)

    def _take(self, names: Sequence[str], *, is_first: bool = False) -> bool:
        """Whether the engine is connected to all these; if not, it is to be tried again."""
        for name in self._known - {*names}:
            self._known.discard(name)
            self._news.put((name, None))
        for name in names:
            if name in self._known:
                continue
            try:
                group = SharedGroup(self._actor, name, self._ask)
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
        is_whole = self._known == {*names}
        if is_whole:
            self.reason = ""
        return is_whole
