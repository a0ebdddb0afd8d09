"""Other drafters for an engine that serves: how a change is made.

What takes time is done beside the engine, which drafts as before meanwhile: files are checked,
workers are started, look-ups read their tables. Then the loop's thread changes over between two
steps. Running requests keep their tokens; a new drafter is told what they are. Whatever fails on
the way leaves the drafters from before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import EngineConfig, HeadConfig, NoSpeculation, SpeculationBase, UserConfig
from ..drafters.drafting import Drafting, WithPredictions
from ..drafters.protocol import Drafter, NoDrafter
from ..drafters.registry import build_parts
from ..errors import ConfigError, OutriderError
from ..scheduler.loop import Loop, OverlapLoop
from ..workers.group import WorkerGroup
from ..workers.spec import NewDrafters
from .checkpoints import resolved
from .host import EngineHost
from .preflight import check_new_drafters, check_trees
from .weights import with_members, written, written_member

log = logging.getLogger(__name__)


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
    _is_matched: bool = False

    @classmethod
    def of(cls, host: EngineHost, parts: Parts, given: Mapping[str, Any]) -> Swap:
        """A change to the `speculative_config` that is given.

        Raises:
            ConfigError, CheckpointError: it is wrong, or needs another verification.
        """
        old = host.config
        data: dict[str, Any] = {key: getattr(old, key) for key in old.model_fields_set}
        config = resolved(EngineConfig.load({**data, "speculative_config": dict(given)}))
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
        self._match()
        for section in self.config.speculative_config.sections:
            if isinstance(section, UserConfig) and id(section) not in self._kept:
                raise ConfigError.at(
                    "decoding_type",
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
        self._match()
        for section in self.config.speculative_config.sections:
            if id(section) in self._kept:
                continue
            if getattr(section, "placement", "") == "separate":
                self._started[id(section)] = self.host.start_apart(self.config, section)
            elif not section.has_model:
                self._ready |= build_parts(section, self.host, {})[1]

    def staying(self) -> dict[str, Any]:
        """The `speculative_config` of the drafters that stay, alone."""
        self._match()
        section = self.config.speculative_config
        return with_members(section, [each for each in section.sections if id(each) in self._kept])

    def check_ranks(self) -> None:
        """Has the target's ranks look at what would draft in them (raises `CheckpointError`)."""
        self._match()
        news = self._news()
        if news is not None:
            self.host.target_group.check_drafters(news)

    def perform(self, loop: Loop, drafting: WithPredictions) -> Parts:
        """The change itself, between two steps; the new drafters.

        Raises:
            CheckpointError, ConfigError: they cannot serve; nothing has changed.
            WorkerError: the ranks have to be replaced; they will have the drafters from before.
        """
        scheduler = loop.scheduler
        before = self.change_ranks()
        if before is not None:  # their caches are empty
            scheduler.requeue_all()
        try:
            parts = self.build()
        except OutriderError:
            if before is not None:
                self.host.target_group.change_drafters(before)
            raise
        requests = scheduler.requests()
        self.parts.drafting.close([each.id for each in requests])
        drafting.replace(parts.drafting)
        parts.drafting.open(requests)
        may_append = parts.drafting.is_idle or parts.drafting.ranks_draft
        may_append &= self.config.pipeline_parallel_size == 1
        scheduler.change_drafters(
            self.config.speculative_config,
            tree_drafts=parts.drafting.proposes_trees,
            ranks_append=isinstance(loop, OverlapLoop) and may_append,
        )
        return parts

    def change_ranks(self) -> NewDrafters | None:
        """Changes what drafts in the target's ranks; returns what did before, None: no change.

        Raises:
            CheckpointError: nothing has changed. WorkerError: the ranks have to be replaced.
        """
        group = self.host.target_group
        before = NewDrafters.of(group.spec)
        news = self._news()
        if news is None:
            return None
        group.change_drafters(news)
        return before

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

    def _match(self) -> None:
        """Finds which drafters stay."""
        if self._is_matched:
            return
        self._is_matched = True
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
