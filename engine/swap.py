"""What changes while an engine serves: drafters, weights, adapters, pauses and sleep.

Of drafters, what takes time is done beside the engine, which drafts as before meanwhile: files are
checked, workers are started, look-ups read their tables. Then the loop's thread changes over
between two steps. Running requests keep their tokens; a new drafter is told what they are. Whatever
fails on the way leaves the drafters from before.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import EngineConfig, HeadConfig, NoSpeculation, SpeculationBase, UserConfig
from ..drafters.drafting import Drafting, WithPredictions
from ..drafters.protocol import Drafter, NoDrafter
from ..drafters.registry import build_parts
from ..errors import ConfigError, InvalidRequestError, OutriderError, WorkerError
from ..scheduler.loop import Loop
from ..workers.group import WorkerGroup
from ..workers.spec import NewAdapter, NewDrafters, NewWeights, SentWeights, TrainerLink
from .checkpoints import resolved
from .host import EngineHost
from .preflight import check_new_drafters, check_trees
from .statistics import EngineInfo
from .weights import (
    SLEEP_TAGS,
    Change,
    DrafterChange,
    PauseMode,
    await_trainer,
    composed,
    written,
    written_member,
)

log = logging.getLogger(__name__)
_WARNED = (1, 10, 100, 1000)  # updates behind which a drafter is
_POLL_S = 0.05  # between looks at the requests of an adapter that goes
IDLE_S = 1.0  # how long an idle loop sleeps between looks at its deadlines


def _identity(section: SpeculationBase, target: str) -> tuple[Any, ...]:
    """Equal for sections of which one drafter serves both."""
    own = written_member(section)
    if isinstance(section, HeadConfig):
        own["speculative_model"] = str(section.folder_beside(target).resolve())
    elif "speculative_model" in own:
        own["speculative_model"] = str(Path(own["speculative_model"]).resolve())
    return type(section), repr(sorted(own.items()))


@dataclass
class Parts:
    """The drafters that serve, and what calls them."""

    drafting: Drafting
    drafters: dict[int, Drafter]  # by the `id` of their section
    num_changes: int = 0

    def names(self, config: SpeculationBase) -> list[str]:
        """Of the drafters of `config`, which is served, in the order of its sections."""
        by_drafter = {id(each.drafter): each.name for each in self.drafting.parts}
        sections = [each for each in config.sections if not isinstance(each, NoSpeculation)]
        return [by_drafter[id(self.drafters[id(each)])] for each in sections]

    def described(self, config: SpeculationBase, served: SpeculationBase) -> dict[str, Any]:
        """The drafters in plain values, for people and for `DrafterChange`.

        Args:
            served: `config` with the weights that serve now.
        """
        health = self.drafting.all_health()
        sections = [each for each in served.sections if not isinstance(each, NoSpeculation)]
        drafters = [
            {
                "name": name,
                "decoding_type": getattr(section, "decoding_type"),  # noqa: B009
                "placement": getattr(section, "placement", "engine"),
                "speculative_model": getattr(section, "speculative_model", None),
                **health.get(name, {}),
            }
            for name, section in zip(self.names(config), sections, strict=True)
        ]
        return {
            "drafters": drafters,
            "speculative_config": written(served),
            "num_changes": self.num_changes,
        }


@dataclass
class Swap:
    """One change. `prepare` and what ends it run beside the engine, the rest in its thread."""

    host: EngineHost
    parts: Parts
    config: EngineConfig  # with the new drafters
    _kept: dict[int, Drafter] = field(default_factory=dict)  # by the `id` of the new section
    _ready: dict[int, Drafter] = field(default_factory=dict)  # alike, also those built beside
    _started: dict[int, WorkerGroup] = field(default_factory=dict)  # alike, not yet a drafter's
    _groups: dict[int, WorkerGroup] = field(default_factory=dict)  # alike, of kept ones
    _replaced: list[Drafter] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Finds which drafters stay."""
        target = self.host.config.model
        apart, left = self.host.apart(), dict[tuple[Any, ...], SpeculationBase]()
        before = self.host.config.speculative_config
        served = self.host.served_sections(before)
        for old, section in zip(before.sections, served.sections, strict=True):
            left[_identity(section, target)] = old
        for section in self.config.speculative_config.sections:
            known = left.pop(_identity(section, target), None)
            if known is not None:
                self._kept[id(section)] = self._ready[id(section)] = self.parts.drafters[id(known)]
                if id(known) in apart:
                    self._groups[id(section)] = apart[id(known)]

    @property
    def keeps_weights(self) -> bool:
        """Whether a drafter with weights stays as it is."""
        sections = self.config.speculative_config.sections
        return any(each.has_model and id(each) in self._kept for each in sections)

    @classmethod
    def of(cls, host: EngineHost, parts: Parts, given: Mapping[str, Any]) -> Swap:
        """A change to the `speculative_config` that is given.

        Raises:
            ConfigError, CheckpointError: it is wrong, or needs another verification.
        """
        old = host.config
        data: dict[str, Any] = {key: getattr(old, key) for key in old.model_fields_set}
        config = EngineConfig.load({**data, "speculative_config": dict(given)})
        config = host.placed(resolved(config))
        before, after = old.speculative_config, config.speculative_config
        ours, theirs = ((each.verification, each.rule_parameters) for each in (before, after))
        if ours != theirs:
            raise ConfigError.at(
                "speculative_config.verification",
                f"{after.verification!r} with {dict(after.rule_parameters)}, but the target "
                f"verifies by {before.verification!r} with {dict(before.rule_parameters)}, which "
                "stays for as long as the engine runs",
            )
        return cls(host, parts, config)

    def check_code(self) -> None:
        """Raises `ConfigError` where a drafter of the user's own comes that did not serve."""
        for section in self.config.speculative_config.sections:
            if isinstance(section, UserConfig) and id(section) not in self._kept:
                raise ConfigError.at(
                    "speculative_config.decoding_type",
                    f"{section.drafter!r}: code of the user's own is imported where the engine is "
                    "started, or by `LLM.load_drafter`; over HTTP no code can be chosen",
                )

    @property
    def changes_nothing(self) -> bool:
        """Whether these are the drafters that serve."""
        before = self.host.served_sections(self.host.config.speculative_config)
        return written(before) == written(self.config.speculative_config)

    def check(self) -> None:
        """Raises `ConfigError` or `CheckpointError` where files cannot be used."""
        check_new_drafters(self.config, self.host.vocab_size)

    def prepare(self) -> None:
        """Checks files, starts workers and builds what needs no workers.

        Raises:
            OutriderError: a drafter cannot be started; `discard` ends the others.
        """
        self.check()
        for section in self.config.speculative_config.sections:
            if id(section) in self._kept:
                continue
            if getattr(section, "drafter_group", None) is not None:
                self._ready |= build_parts(section, self.host, {})[1]
            elif getattr(section, "placement", "") == "separate":
                self._started[id(section)] = self.host.start_apart(self.config, section)
            elif not section.has_model:
                self._ready |= build_parts(section, self.host, {})[1]

    def staying(self) -> dict[str, Any]:
        """The `speculative_config` of the drafters that stay, alone."""
        section = self.config.speculative_config
        kept = [each for each in section.sections if id(each) in self._kept]
        return composed(section, map(written_member, kept))

    def check_ranks(self) -> None:
        """Has the target's ranks look at what would draft in them (raises `CheckpointError`)."""
        news = self._news()
        if news is not None:
            self.host.target_group.check_drafters(news)

    def perform(self, loop: Loop, drafting: WithPredictions) -> Parts:
        """The change itself, between two steps; the new drafters.

        Raises:
            CheckpointError, ConfigError: they cannot serve; nothing has changed.
            WorkerError: the ranks have to be replaced; they will have the drafters from before.
        """
        scheduler, group, news = loop.scheduler, self.host.target_group, self._news()
        before = NewDrafters.of(group.spec)
        if news is not None:
            group.change_drafters(news)
            scheduler.requeue_all()  # the caches are empty
        try:
            parts = self.build()
        except OutriderError:
            if news is not None:
                group.change_drafters(before)
            raise
        requests = scheduler.requests()
        self.parts.drafting.close([each.id for each in requests])
        drafting.replace(parts.drafting)
        parts.drafting.open(requests)
        trees = parts.drafting.proposes_trees
        scheduler.change_drafters(self.config.speculative_config, tree_drafts=trees)
        parts.drafting.shorten = scheduler.budget.shorten
        reports = self.host.target_group.reports
        scheduler.budget.let_ranks_choose(reports[0].device_step.chooses)
        return parts

    def _news(self) -> NewDrafters | None:
        """What changes in the target's ranks (raises `ConfigError` where nothing can)."""
        news = self.host.new_drafters(self.config, self._kept)
        if news is not None and self.config.pipeline_parallel_size > 1:
            raise ConfigError.at(
                "speculative_config.placement",
                "what drafts in the ranks of a target with pipeline stages stays that of the "
                "start; use placement 'separate'",
            )
        return news

    def build(self) -> Parts:
        """The new drafters, once their workers are there.

        Raises:
            OutriderError: they cannot serve together; what was served before still is.
        """
        host, old = self.host, self.parts
        before, groups = host.config, host.apart()
        host.adopt(self.config, self._groups | self._started)
        section = self.config.speculative_config
        try:
            drafter, made = build_parts(section, host, self._ready)
            in_ranks = host.target_group.reports[0].device_step.drafts
            drafting = Drafting(drafter, host.vocab_size, section=section, ranks_draft=in_ranks)
            if drafting.proposes_trees:
                target = host.target_group.reports[0].target
                check_trees(self.config, target.operations if target else "")
        except BaseException:
            host.adopt(before, groups)
            raise
        self._started, self._ready = {}, {}
        stats = {id(each.drafter): each.stats for each in old.drafting.parts}
        for part in drafting.parts:
            part.stats = stats.get(id(part.drafter), part.stats)
        kept = {id(each) for each in made.values()}
        self._replaced = [each for each in old.drafters.values() if id(each) not in kept]
        for each in self._replaced:
            each.detach()
        return Parts(drafting, made, old.num_changes + 1)

    def discard(self) -> None:
        """Ends what was started for a change that is not made."""
        for group in self._started.values():
            with suppress(OutriderError):
                group.shutdown()
        kept = {id(each) for each in self._kept.values()}
        for drafter in self._ready.values():
            if id(drafter) not in kept:
                _end(drafter)

    def end_replaced(self) -> None:
        """Ends the drafters that went."""
        for drafter in self._replaced:
            _end(drafter)


def facts_of(drafting: Drafting, host: EngineHost) -> dict[str, Any]:
    """What of an engine's facts changes with its drafters."""
    return {
        "drafter": drafting.drafter.name,
        "drafters": tuple(name for name in drafting.all_stats() if name != NoDrafter.name),
        "heads": tuple(host.heads),
    }


def _end(drafter: Drafter) -> None:
    try:
        drafter.shutdown()
    except Exception:  # it is gone either way
        log.warning("drafter %s failed as it ended", drafter.name, exc_info=True)


# -- what changes while an engine serves


class Changing(ABC):
    """The engine's changes; each is performed in the loop's thread, between two steps."""

    info: EngineInfo
    _config: EngineConfig
    _host: EngineHost
    _loop: Loop
    _drafting: WithPredictions
    _inbox: queue.SimpleQueue[Callable[[], None] | None]
    _closed: threading.Event

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._swapping = threading.Lock()  # held while drafters are replaced
        self._changes: deque[Change] = deque()  # for when no request runs
        self._is_paused = False
        self._asleep: set[str] = set()  # what is given back: tags of `wake_up`
        self._num_updates = 0
        self.weight_version = ""  # by which outputs name the target's weights; "": the start's
        self._num_behind = 0  # updates of these that drafters with weights have not had
        self._sent: str | None = None  # what became of weights that a trainer has sent
        self._sent_id = ""  # of those, where they were staged
        self._staged = ("", 0.0)  # id of weights that ranks keep until they are served, since when
        self._sleep_level = 0
        self.on_lack: list[Callable[[], None]] = []  # called where what it lacks changes

    @abstractmethod
    def check(self) -> None:
        """Raises `EngineDeadError` if the loop is not running."""

    @abstractmethod
    def _recover(self, error: WorkerError, *, counts: bool = True) -> None:
        """Starts new workers; every request continues from its tokens."""

    def pause(self, mode: PauseMode = "abort") -> None:
        """Computes nothing from now on, until `resume`; returns once that is so.

        Requests that arrive meanwhile wait.

        Raises:
            EngineDeadError.
        """

        def stop() -> None:
            self._is_paused = True

        self._change(mode, stop)

    def resume(self, *, takes_folder: bool = True) -> None:
        """Goes on after `pause`, also after one that still waits for requests to end.

        Args:
            takes_folder: also where weights that a trainer had sent are lost: with the folder's.
        """
        self.check()

        def go_on() -> None:
            self._is_paused = False
            if takes_folder and self.lacks_weights:
                self._serve_sent(None)

        change = Change("keep", go_on, lambda error: None)
        self._inbox.put(lambda: self._changes.append(change))

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`, or for weights."""
        return self._is_paused or self.lacks_weights

    @property
    def lacks_workers(self) -> bool:
        """Whether workers have been replaced for so long that others had better compute."""
        return False

    @property
    def is_recovering(self) -> bool:
        """Whether workers are being replaced."""
        return False

    @property
    def lacks_weights(self) -> bool:
        """Whether weights that a trainer had sent are lost, so that nothing is computed."""
        return self._sent == "lost"

    @property
    def is_sleeping(self) -> bool:
        """Whether requests wait for `wake_up`."""
        return bool(self._asleep)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """As of `LLM`: memory is given back, and requests wait until `wake_up`."""

        def rest() -> None:
            host = self._host
            self._loop.scheduler.requeue_all()
            for group in host.apart().values():
                group.discard()
            with self._recovering():
                host.target_group.sleep(level)
            self._asleep, self._sleep_level = set(SLEEP_TAGS), level

        self._change(mode, rest)

    def wake_up(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """As of `LLM`: takes memory again; ranks that cannot are replaced."""

        def wake() -> None:
            group = self._host.target_group
            if not self._asleep:
                return
            try:
                group.wake(tags)
            except WorkerError as error:  # new ranks have all of it
                self._asleep.clear()
                self._recover(error)
                return
            if "weights" in self._asleep and self._sleep_level == 2 and self._sent == "served":
                self.lose_weights()  # they were dropped, and no others came
            self._asleep -= set(SLEEP_TAGS if "kv_cache" in tags else tags)

        self._change("keep", wake)

    def _check_awake(self) -> None:
        if self._asleep:
            raise InvalidRequestError("the engine sleeps; wake it up first")

    def update_weights(
        self, target: str, drafter: str = "", mode: PauseMode = "keep", version: str = ""
    ) -> int:
        """Serves other weights of the same models from the next step on.

        Stored prefixes are dropped, and requests that go on are computed again from their tokens.

        Args:
            target, drafter: folders of the weights; "": as before.
            version: of the target's weights, for outputs; "": the number of updates.

        Returns:
            How many updates there were, with this one.

        Raises:
            CheckpointError, ConfigError: the weights cannot be served in place of these; nothing
                has changed.
            WorkerError: a rank failed as it loaded them; it and the others are replaced, with the
                weights from before.
            EngineDeadError.
        """

        def update() -> None:
            news = self._host.changes(target, drafter)
            self._host.check_weights(news, drafter)
            self._loop.scheduler.requeue_all()
            with self._recovering():
                self._host.load_weights(news, drafter)
            if news != NewWeights():
                self._asleep.discard("weights")
            if target:
                self._serve_sent(None)
            self._count_update(version, of_target=bool(target), of_drafter=bool(drafter))

        self._change(mode, update)
        return self._num_updates

    def num_sent_ranks(self) -> int:
        """Ranks that a trainer sends weights to; 0: they take folders only."""
        return self._config.tensor_parallel_size if self._config.pipeline_parallel_size == 1 else 0

    def link_trainer(self, link: TrainerLink) -> None:
        """Has the target's ranks join a trainer's process group, or leave it.

        Once a trainer listens, steps wait until it has joined, too.

        Raises:
            ConfigError: they could not, within the time.
            WorkerError: a rank failed; all are replaced.
            EngineDeadError.
        """

        def join() -> None:
            with self._recovering():
                self._host.target_group.link_trainer(link)

        if link.host:
            await_trainer(link)
        self._change("keep", join)

    def take_weights(self, sent: SentWeights, mode: PauseMode = "keep") -> int:
        """As `update_weights`, of weights that a trainer sends to the ranks.

        Returns:
            How many updates there were, with this one.

        Raises:
            ConfigError: they are not those of the target, or did not arrive; nothing has changed.
            WorkerError: a rank failed; all are replaced, with the weights of the last folder.
            EngineDeadError.
        """

        def take() -> None:
            with self._recovering():
                self._host.target_group.take_weights(sent, self._config.step_timeout_s)
            if sent.until == "stage":
                self._staged = (sent.id, time.monotonic())
            elif sent.until == "take":
                self._have_taken(sent.id, sent.version)

        self._change(mode, take)
        return self._num_updates

    def take_sent(self, sent_id: str, mode: PauseMode = "keep", version: str = "") -> bool:
        """Serves weights that `take_weights` has staged; False: the ranks do not have them.

        Ranks that serve them already go on. "" drops what is staged.

        Raises:
            WorkerError: a rank failed; all are replaced, with the weights of the last folder.
            EngineDeadError.
        """
        if sent_id and (self._sent, self._sent_id) == ("served", sent_id):
            return True

        def take() -> None:
            with self._recovering():
                self._host.target_group.take_sent(sent_id)
            self._staged = ("", 0.0)
            if sent_id:
                self._have_taken(sent_id, version)

        try:
            self._change(mode, take)
        except ConfigError:
            return False
        return True

    def staged(self, for_s: float) -> str:
        """Id of weights that have been staged for at least so long; "": there are none."""
        staged_id, since_s = self._staged
        return staged_id if staged_id and time.monotonic() - since_s >= for_s else ""

    def drop_staged(self, staged_id: str) -> None:
        """Frees these, unless they are served or others came meanwhile (raises as above)."""

        def drop() -> None:
            if self._staged[0] == staged_id:
                self._staged = ("", 0.0)
                with self._recovering():
                    self._host.target_group.take_sent("")

        self._change("keep", drop)

    def _have_taken(self, sent_id: str, version: str) -> None:
        self._loop.scheduler.requeue_all()
        self._asleep.discard("weights")
        self._count_update(version, of_target=True, of_drafter=False)
        self._serve_sent("served", sent_id)

    def _count_update(self, version: str, *, of_target: bool, of_drafter: bool) -> None:
        """Counts an update, and warns where it leaves drafters with older weights."""
        self._num_updates += 1
        if of_target:
            self.weight_version = version or str(self._num_updates)
        if of_drafter:
            self._num_behind = 0
        elif of_target and self._host.has_own_weights():
            self._num_behind += 1
            if self._num_behind in _WARNED:
                log.warning(
                    "drafters with weights have not had the last %d updates of the target's: "
                    "update them, or let them adapt, if less of their drafts is accepted",
                    self._num_behind,
                )

    def _serve_sent(self, sent: str | None, sent_id: str = "") -> None:
        lacked, self._sent, self._sent_id = self.lacks_weights, sent, sent_id
        if lacked != self.lacks_weights:
            for callback in self.on_lack:
                callback()

    def lose_weights(self) -> None:
        """Computes nothing until weights come: those that a trainer has sent are not here."""
        self._serve_sent("lost")
        log.error(
            "the weights that a trainer had sent are lost: nothing is computed until they are "
            "sent again, or others are loaded, or requests go on with those of %s",
            self._host.weights()["model"],
        )

    def check_weights(self, target: str, drafter: str = "") -> None:
        """Whether `update_weights` would take these; raises as it does, and changes nothing."""
        self._change(
            "keep", lambda: self._host.check_weights(self._host.changes(target, drafter), drafter)
        )

    def add_adapter(self, name: str, path: str) -> None:
        """Serves another LoRA adapter of the target from the next step on.

        Raises:
            ConfigError: the engine takes no adapters.
            CheckpointError: the folder is no adapter of the target; nothing has changed.
            WorkerError: a rank failed; it and the others are replaced, without the adapter.
            EngineDeadError.
        """
        self._change_adapter(NewAdapter(name, path))

    def remove_adapter(self, name: str) -> None:
        """Serves a LoRA adapter no more: new requests are refused, and those that run end first.

        Raises (beside those of `add_adapter`):
            InvalidRequestError: it is not served.
        """
        counts: queue.SimpleQueue[int] = queue.SimpleQueue()
        scheduler = self._loop.scheduler

        def refuse() -> None:
            if name not in scheduler.adapters:
                raise InvalidRequestError.at("lora_name", f"no adapter {name!r} is served")
            scheduler.adapters.discard(name)

        self._change("keep", refuse)
        while True:
            self.check()
            self._inbox.put(lambda: counts.put(scheduler.num_adapted(name)))
            with suppress(queue.Empty):
                if not counts.get(timeout=IDLE_S):
                    break
            self._closed.wait(_POLL_S)
        self._change_adapter(NewAdapter(name, ""))

    def _change_adapter(self, adapter: NewAdapter) -> None:
        def change() -> None:
            self._check_awake()
            if not self._config.takes_adapters:
                raise ConfigError.at("enable_lora", "it is not true: the engine takes no adapters")
            scheduler = self._loop.scheduler
            with self._recovering():
                self._host.target_group.add_adapter(adapter)
            if adapter.path:
                scheduler.adapters.add(adapter.name)
            else:  # another of that name may come
                scheduler.pool.clear_cache()

        self._change("keep", change)

    def serve_adapters(self, adapters: Mapping[str, str]) -> None:
        """Serves the LoRA adapters in these folders, by name, and no others (raises as above)."""
        served = self.adapters()
        for name in served.keys() - adapters.keys():
            self.remove_adapter(name)
        for name in adapters.keys() - served.keys():
            self.add_adapter(name, adapters[name])

    def adapters(self) -> dict[str, str]:
        """The folders of the target's LoRA adapters, by name."""
        target = self._host.target_group.spec.target
        return dict(target.adapters or ()) if target is not None else {}

    def drafters(self) -> dict[str, Any]:
        """The drafters in plain values, with the configuration that has them all."""
        served = self._host.config.speculative_config
        return self._parts.described(served, self._host.served_sections(served))

    def planned_drafters(self, change: DrafterChange) -> dict[str, Any]:
        """The `speculative_config` that a change makes; nothing changes yet.

        Raises:
            InvalidRequestError, ConfigError, CheckpointError: it cannot be made.
            WorkerError, EngineDeadError.
        """
        with change.named(self._names()):
            swap = self._planned(change)
            swap.check()
            self._change("keep", swap.check_ranks)
        return written(swap.config.speculative_config)

    def change_drafters(self, change: DrafterChange) -> None:
        """Drafts otherwise from some step on, under the same verification.

        Drafters whose section stays go on as they are. Others are loaded beside the engine, which
        drafts as before until they are up. What drafts in the target's ranks shares their caches:
        those are made anew, and requests that run are computed again from their tokens.

        Raises:
            InvalidRequestError, ConfigError, CheckpointError, ResourcesError: the drafters cannot
                serve; nothing has changed.
            WorkerError: a rank of the target failed as it loaded them; it and the others are
                replaced, with the drafters from before.
            EngineDeadError.
        """
        with self._swapping, change.named(self._names()):
            self._check_awake()
            swap = self._planned(change)
            if swap.changes_nothing:
                return
            swap.check()
            if not change.make_room:
                self._swap(swap)
                return
            before, after = self.drafters()["speculative_config"], swap.config.speculative_config
            num_behind = self._num_behind
            self._swap(Swap.of(self._host, self._parts, swap.staying()))
            try:
                self._swap(Swap.of(self._host, self._parts, written(after)))
            except OutriderError:
                self._swap(Swap.of(self._host, self._parts, before))
                self._num_behind = num_behind
                raise

    def _names(self) -> list[str]:
        """Of the drafters, in the order of their sections."""
        return self._parts.names(self._host.config.speculative_config)

    def _planned(self, change: DrafterChange) -> Swap:
        host, parts = self._host, self._parts
        served = host.served_sections(host.config.speculative_config)
        swap = Swap.of(host, parts, change.applied(served, self._names()))
        if not change.may_run_code:
            swap.check_code()
        return swap

    def _swap(self, swap: Swap) -> None:
        try:
            swap.prepare()
            self._change("keep", partial(self._perform_swap, swap))
        except BaseException:
            swap.discard()
            raise
        swap.end_replaced()

    def _perform_swap(self, swap: Swap) -> None:
        """In the loop's thread, between two steps."""
        self._check_awake()
        with self._recovering():
            self._parts = swap.perform(self._loop, self._drafting)
        if not swap.keeps_weights:
            self._num_behind = 0
        self._config = swap.config
        self.info = replace(self.info, **facts_of(self._parts.drafting, self._host))

    def weights(self) -> dict[str, Any]:
        """What is served: the folders, the number of updates, and the version.

        `num_behind`: updates of the target's weights that drafters with weights have not had.

        `sent`: "served": by a trainer, in place of the folder's; "lost": those were, until a rank
        was replaced.
        """
        found = {
            **self._host.weights(),
            "num_updates": self._num_updates,
            "weight_version": self.weight_version,
            "num_behind": self._num_behind,
        }
        return found if self._sent is None else found | {"sent": self._sent}

    def _change(self, mode: PauseMode, perform: Callable[[], None]) -> None:
        """Performs in the loop's thread, and waits for it (raises alike)."""
        outcome: queue.SimpleQueue[OutriderError | None] = queue.SimpleQueue()
        change = Change(mode, perform, outcome.put)
        self._inbox.put(lambda: self._changes.append(change))
        while True:
            try:
                error = outcome.get(timeout=IDLE_S)
                break
            except queue.Empty:
                self.check()
        if error is not None:
            raise error

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Starts new workers where those that are to change fail, and raises their error."""
        try:
            yield
        except WorkerError as error:
            self._recover(error)
            raise
