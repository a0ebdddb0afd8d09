"""Changes while an engine serves: drafters, weights, adapters, pauses and sleep.

The slow parts of a change of drafters run beside the engine, which continues with its drafters
meanwhile: files are checked, workers are started, and look-ups read their tables. Then the loop's
thread switches over between two steps. Running requests keep their tokens, which the new drafters
receive. If anything fails, the previous drafters stay.
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
_WARNED = (1, 10, 100, 1000)  # numbers of missed updates at which a warning is logged
_POLL_S = 0.05  # interval of checks for requests of an adapter that is being removed
IDLE_S = 1.0  # how long an idle loop sleeps between checks of its deadlines


def _identity(section: SpeculationBase, target: str) -> tuple[Any, ...]:
    """Returns a key that is equal for sections that one drafter can serve."""
    own = written_member(section)
    if isinstance(section, HeadConfig):
        own["speculative_model"] = str(section.folder_beside(target).resolve())
    elif "speculative_model" in own:
        own["speculative_model"] = str(Path(own["speculative_model"]).resolve())
    return type(section), repr(sorted(own.items()))


@dataclass
class Parts:
    """The drafters that serve, and the code that calls them."""

    drafting: Drafting
    drafters: dict[int, Drafter]  # by the `id` of their section
    num_changes: int = 0

    def names(self, config: SpeculationBase) -> list[str]:
        """Returns the names of the drafters of `config`, in the order of its sections."""
        by_drafter = {id(each.drafter): each.name for each in self.drafting.parts}
        sections = [each for each in config.sections if not isinstance(each, NoSpeculation)]
        return [by_drafter[id(self.drafters[id(each)])] for each in sections]

    def described(self, config: SpeculationBase, served: SpeculationBase) -> dict[str, Any]:
        """Describes the drafters in plain values, for users and for `DrafterChange`.

        Args:
            served: `config` with the current weights.
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
    """One change. `prepare` and `discard` run beside the engine, the rest in its thread."""

    host: EngineHost
    parts: Parts
    config: EngineConfig  # with the new drafters
    _kept: dict[int, Drafter] = field(default_factory=dict)  # by the `id` of the new section
    _ready: dict[int, Drafter] = field(default_factory=dict)  # likewise, with newly built ones
    _started: dict[int, WorkerGroup] = field(default_factory=dict)  # likewise, not yet a drafter's
    _groups: dict[int, WorkerGroup] = field(default_factory=dict)  # likewise, of kept ones
    _replaced: list[Drafter] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Finds the drafters that stay."""
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
        """Whether a drafter with weights stays unchanged."""
        sections = self.config.speculative_config.sections
        return any(each.has_model and id(each) in self._kept for each in sections)

    @classmethod
    def of(cls, host: EngineHost, parts: Parts, given: Mapping[str, Any]) -> Swap:
        """Creates a change to the given `speculative_config`.

        Raises:
            ConfigError, CheckpointError: it is invalid, or needs another verification rule.
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
        """Raises `ConfigError` if the change adds a drafter of the user's own code."""
        for section in self.config.speculative_config.sections:
            if isinstance(section, UserConfig) and id(section) not in self._kept:
                raise ConfigError.at(
                    "speculative_config.decoding_type",
                    f"{section.drafter!r}: code of the user's own is imported where the engine is "
                    "started, or by `LLM.load_drafter`; over HTTP no code can be chosen",
                )

    @property
    def changes_nothing(self) -> bool:
        """Whether the drafters are those that serve already."""
        before = self.host.served_sections(self.host.config.speculative_config)
        return written(before) == written(self.config.speculative_config)

    def check(self) -> None:
        """Raises `ConfigError` or `CheckpointError` if files cannot be used."""
        check_new_drafters(self.config, self.host.vocab_size)

    def prepare(self) -> None:
        """Checks files, starts workers and builds the drafters that need no workers.

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
        """Returns the `speculative_config` of only the drafters that stay."""
        section = self.config.speculative_config
        kept = [each for each in section.sections if id(each) in self._kept]
        return composed(section, map(written_member, kept))

    def check_ranks(self) -> None:
        """Makes the target's ranks check their new drafters (raises `CheckpointError`)."""
        news = self._news()
        if news is not None:
            self.host.target_group.check_drafters(news)

    def perform(self, loop: Loop, drafting: WithPredictions) -> Parts:
        """Performs the change between two steps; returns the new drafters.

        Raises:
            CheckpointError, ConfigError: they cannot serve; nothing has changed.
            WorkerError: the ranks must be replaced; they will have the previous drafters.
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
        """Returns the change in the target's ranks (raises `ConfigError` if they cannot change)."""
        news = self.host.new_drafters(self.config, self._kept)
        if news is not None and self.config.pipeline_parallel_size > 1:
            raise ConfigError.at(
                "speculative_config.placement",
                "what drafts in the ranks of a target with pipeline stages stays that of the "
                "start; use placement 'separate'",
            )
        return news

    def build(self) -> Parts:
        """Builds the new drafters, once their workers are up.

        Raises:
            OutriderError: they cannot serve together; the previous drafters still serve.
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
        """Ends what was started for a change that is not performed."""
        for group in self._started.values():
            with suppress(OutriderError):
                group.shutdown()
        kept = {id(each) for each in self._kept.values()}
        for drafter in self._ready.values():
            if id(drafter) not in kept:
                _end(drafter)

    def end_replaced(self) -> None:
        """Ends the replaced drafters."""
        for drafter in self._replaced:
            _end(drafter)


def facts_of(drafting: Drafting, host: EngineHost) -> dict[str, Any]:
    """Returns the facts of an engine that change with its drafters."""
    return {
        "drafter": drafting.drafter.name,
        "drafters": tuple(name for name in drafting.all_stats() if name != NoDrafter.name),
        "heads": tuple(host.heads),
    }


def _end(drafter: Drafter) -> None:
    try:
        drafter.shutdown()
    except Exception:  # it is gone in any case
        log.warning("drafter %s failed as it ended", drafter.name, exc_info=True)


# -- changes while an engine serves


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
        self._changes: deque[Change] = deque()  # performed when no request runs
        self._is_paused = False
        self._asleep: set[str] = set()  # what was freed: tags of `wake_up`
        self._num_updates = 0
        self.weight_version = ""  # of the target's weights, in outputs; "": those of the start
        self._num_behind = 0  # target updates that drafters with weights have missed
        self._sent: str | None = None  # state of weights from a trainer
        self._sent_id = ""  # id of these weights if they were staged
        self._staged = ("", 0.0)  # id of weights that ranks keep staged, and since when
        self._sleep_level = 0
        self.on_lack: list[Callable[[], None]] = []  # called when a lack begins or ends

    @abstractmethod
    def check(self) -> None:
        """Raises `EngineDeadError` if the loop is not running."""

    @abstractmethod
    def _recover(self, error: WorkerError, *, counts: bool = True) -> None:
        """Starts new workers; every request continues from its tokens."""

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stops computing until `resume`; returns once nothing is computed.

        Requests that arrive meanwhile wait.

        Raises:
            EngineDeadError.
        """

        def stop() -> None:
            self._is_paused = True

        self._change(mode, stop)

    def resume(self, *, takes_folder: bool = True) -> None:
        """Continues after `pause`, even if it still waits for requests to end.

        Args:
            takes_folder: if weights from a trainer are lost, continue with the folder's weights.
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
        """Whether a replacement of workers takes so long that other engines should compute."""
        return False

    @property
    def is_recovering(self) -> bool:
        """Whether workers are being replaced."""
        return False

    @property
    def lacks_weights(self) -> bool:
        """Whether weights from a trainer are lost, so that nothing is computed."""
        return self._sent == "lost"

    @property
    def is_sleeping(self) -> bool:
        """Whether requests wait for `wake_up`."""
        return bool(self._asleep)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Implements `LLM.sleep`: frees memory; requests wait until `wake_up`."""

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
        """Implements `LLM.wake_up`: allocates memory again; replaces ranks that cannot."""

        def wake() -> None:
            group = self._host.target_group
            if not self._asleep:
                return
            try:
                group.wake(tags)
            except WorkerError as error:  # new ranks have everything
                self._asleep.clear()
                self._recover(error)
                return
            if "weights" in self._asleep and self._sleep_level == 2 and self._sent == "served":
                self.lose_weights()  # they were dropped and not replaced
            self._asleep -= set(SLEEP_TAGS if "kv_cache" in tags else tags)

        self._change("keep", wake)

    def _check_awake(self) -> None:
        if self._asleep:
            raise InvalidRequestError("the engine sleeps; wake it up first")

    def update_weights(
        self, target: str, drafter: str = "", mode: PauseMode = "keep", version: str = ""
    ) -> int:
        """Serves other weights of the same models from the next step on.

        Stored prefixes are dropped, and running requests are computed again from their tokens.

        Args:
            target, drafter: folders of the weights; "": unchanged.
            version: version of the target's weights in outputs; "": the number of updates.

        Returns:
            The number of updates, including this one.

        Raises:
            CheckpointError, ConfigError: the weights cannot replace the current ones; nothing has
                changed.
            WorkerError: a rank failed while loading them; all ranks are replaced, with the previous
                weights.
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
        """Number of ranks to which a trainer sends weights; 0: only folders are supported."""
        return self._config.tensor_parallel_size if self._config.pipeline_parallel_size == 1 else 0

    def link_trainer(self, link: TrainerLink) -> None:
        """Makes the target's ranks join a trainer's process group, or leave it.

        Once a trainer listens, steps wait until the ranks have joined.

        Raises:
            ConfigError: they could not join or leave in time.
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
        """Does the same as `update_weights`, with weights that a trainer sends to the ranks.

        Returns:
            The number of updates, including this one.

        Raises:
            ConfigError: they do not fit the target, or did not arrive; nothing has changed.
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
        """Serves weights that `take_weights` has staged; returns False if the ranks lack them.

        Ranks that serve them already continue. An empty id drops the staged weights.

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
        """Returns the id of weights that have been staged for at least `for_s`; "" if none."""
        staged_id, since_s = self._staged
        return staged_id if staged_id and time.monotonic() - since_s >= for_s else ""

    def drop_staged(self, staged_id: str) -> None:
        """Frees staged weights, unless they are served or others were staged (raises as above)."""

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
        """Counts an update, and warns if drafters keep older weights."""
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
        """Stops computing until weights arrive, because weights from a trainer are lost."""
        self._serve_sent("lost")
        log.error(
            "the weights that a trainer had sent are lost: nothing is computed until they are "
            "sent again, or others are loaded, or requests go on with those of %s",
            self._host.weights()["model"],
        )

    def check_weights(self, target: str, drafter: str = "") -> None:
        """Checks weights as `update_weights` does, with the same exceptions; changes nothing."""
        self._change(
            "keep", lambda: self._host.check_weights(self._host.changes(target, drafter), drafter)
        )

    def add_adapter(self, name: str, path: str) -> None:
        """Serves another LoRA adapter of the target from the next step on.

        Raises:
            ConfigError: the engine does not support adapters.
            CheckpointError: the folder is not an adapter of the target; nothing has changed.
            WorkerError: a rank failed; all ranks are replaced, without the adapter.
            EngineDeadError.
        """
        self._change_adapter(NewAdapter(name, path))

    def remove_adapter(self, name: str) -> None:
        """Removes a LoRA adapter: rejects new requests, and waits for running ones.

        Raises (in addition to those of `add_adapter`):
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
            else:  # an adapter of that name may be added again
                scheduler.pool.clear_cache()

        self._change("keep", change)

    def serve_adapters(self, adapters: Mapping[str, str]) -> None:
        """Serves exactly the LoRA adapters in these folders, by name (raises as above)."""
        served = self.adapters()
        for name in served.keys() - adapters.keys():
            self.remove_adapter(name)
        for name in adapters.keys() - served.keys():
            self.add_adapter(name, adapters[name])

    def adapters(self) -> dict[str, str]:
        """Returns the folders of the target's LoRA adapters, by name."""
        target = self._host.target_group.spec.target
        return dict(target.adapters or ()) if target is not None else {}

    def drafters(self) -> dict[str, Any]:
        """Returns the drafters in plain values, with the configuration that has all of them."""
        served = self._host.config.speculative_config
        return self._parts.described(served, self._host.served_sections(served))

    def planned_drafters(self, change: DrafterChange) -> dict[str, Any]:
        """Returns the `speculative_config` that a change would make; changes nothing.

        Raises:
            InvalidRequestError, ConfigError, CheckpointError: the change is impossible.
            WorkerError, EngineDeadError.
        """
        with change.named(self._names()):
            swap = self._planned(change)
            swap.check()
            self._change("keep", swap.check_ranks)
        return written(swap.config.speculative_config)

    def change_drafters(self, change: DrafterChange) -> None:
        """Changes the drafters between two steps, under the same verification rule.

        Drafters whose section stays continue unchanged. Others are loaded beside the engine, which
        uses the previous drafters until the new ones are up. Drafters in the target's ranks share
        their caches; these are rebuilt, and running requests are computed again from their tokens.

        Raises:
            InvalidRequestError, ConfigError, CheckpointError, ResourcesError: the drafters cannot
                serve; nothing has changed.
            WorkerError: a rank of the target failed while loading them; all ranks are replaced,
                with the previous drafters.
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
        """Returns the names of the drafters, in the order of their sections."""
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
        """Performs the swap in the loop's thread, between two steps."""
        self._check_awake()
        with self._recovering():
            self._parts = swap.perform(self._loop, self._drafting)
        if not swap.keeps_weights:
            self._num_behind = 0
        self._config = swap.config
        self.info = replace(self.info, **facts_of(self._parts.drafting, self._host))

    def weights(self) -> dict[str, Any]:
        """Returns the served folders, the number of updates, and the version.

        `num_behind`: updates of the target's weights that drafters with weights have missed.

        `sent`: "served": weights from a trainer replace the folder's; "lost": they did, until a
        rank was replaced.
        """
        found = {
            **self._host.weights(),
            "num_updates": self._num_updates,
            "weight_version": self.weight_version,
            "num_behind": self._num_behind,
        }
        return found if self._sent is None else found | {"sent": self._sent}

    def _change(self, mode: PauseMode, perform: Callable[[], None]) -> None:
        """Performs a change in the loop's thread and waits for it (raises likewise)."""
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
        """Starts new workers if changed ones fail, and raises their error."""
        try:
            yield
        except WorkerError as error:
            self._recover(error)
            raise
