"""Starts the worker groups of one engine, on the backend that its configuration names.

Checks that need no loading run first, so that a wrong path, a vocabulary that does not match or a
size that does not divide is reported within a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config import DraftModelConfig, EngineConfig, HeadConfig, ResourcesConfig, SpeculationBase
from ..config.strict import tag
from ..drafters import vocabulary
from ..drafters.lookup.pool import LocalLink, PoolLink, PoolStore
from ..drafters.protocol import DraftMembers, blocks_per_outcome
from ..drafters.vocabulary import Translation
from ..errors import ConfigError, OutriderError
from ..workers.drafter_ends import GroupDraftModel, GroupHead
from ..workers.group import LocalGroup, WorkerGroup, agreed_blocks
from ..workers.spec import DeviceStepReport, ModelSpec, NewDrafters, NewWeights, WorkerSpec
from .checkpoints import draft_sections, draft_size, head_section, head_sections, resolved
from .preflight import check_drafter, check_members, check_models, translation_of
from .statistics import HeadInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MembersAsk:
    """The facts about an engine that it sends to a drafter group."""

    name: str  # name of the group
    engine: str
    # Returns the translation, as in `ModelSpec`; raises `ConfigError` if the members cannot draft.
    check: Callable[[DraftMembers], bytes]
    num_scratch_blocks: Callable[[int], int]  # for a block size
    max_num_batched_tokens: int
    timeout_s: float


class Backend:
    """Creates worker groups and links between engines; here, ranks are threads of this process.

    `cluster/` overrides every method, so this folder does not import Ray.
    """

    shares_pools = False  # whether other engines may use `shared_pool` too

    def start(self, config: EngineConfig) -> None:
        """Makes the resources for one engine available; raises `ConfigError`."""

    def stop(self) -> None:
        """Releases what `start` created, but nothing that existed before it."""

    def recall(self) -> int | None:
        """Returns the value that a previous engine passed to `note`, if there is such an engine."""
        return None

    def note(self, vocab_size: int) -> None:
        """Records that the checkpoints were checked, and the size of the target's vocabulary."""

    def retain(self) -> None:
        """Ends workers of a previous engine that this one has not taken over."""

    def group(self, spec: WorkerSpec, resources: ResourcesConfig) -> WorkerGroup:
        """Starts a group of workers; raises `OutriderError`."""
        return LocalGroup(spec)

    def placed(self, config: EngineConfig) -> EngineConfig:
        """Returns `config` with a placement for every drafter that names none.

        Raises:
            ConfigError: a placement is not possible; names `placement`.
        """
        return config  # this process

    def can_start_at_once(self, specs: Sequence[WorkerSpec], resources: ResourcesConfig) -> bool:
        """Returns True if no group can take resources that another needs, in any order."""
        return False  # all groups share this process

    def draft_members(self, ask: MembersAsk) -> DraftMembers:
        """Returns the members of a drafter group of the cluster.

        Raises:
            ConfigError: there is no such group; names `speculative_config.drafter_group`.
        """
        raise ConfigError.at(
            "speculative_config.drafter_group",
            f"{ask.name!r}: drafter groups are found on Ray; the executor is 'local'",
        )

    def shared_pool(
        self, fingerprint: str, max_tokens: int, vocab_size: int, snapshot: str | None
    ) -> PoolLink:
        """Returns the link to the pool of all engines; requires `shares_pools`."""
        raise AssertionError("pools of this backend belong to one engine")


def local_backend(config: EngineConfig) -> Backend:
    """Returns the backend of an engine that was given none.

    Raises:
        ConfigError: the configuration's executor is not `local`.
    """
    if config.executor != "local":
        raise ConfigError.at(
            "executor",
            f"{config.executor!r} needs a backend; use outrider.LLM, or pass "
            "outrider.cluster.backend.backend_of(config)",
        )
    return Backend()


class EngineHost:
    """Owns the groups; drafters get their groups through `draft_model` and `head_model`."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        config = resolved(config)
        self.config = config  # the served configuration, with folders for all checkpoints
        self._backend = backend
        self._num_links = 0  # separate drafters that the target sends to
        self._apart: list[tuple[DraftModelConfig | HeadConfig, WorkerGroup]] = []  # of drafters
        self.tokenizer = Path(config.tokenizer or config.model)
        known = backend.recall()
        self.vocab_size = check_models(config) if known is None else known
        backend.note(self.vocab_size)
        own_head = self._own_head = head_section(config)
        # The folders are resolved now, because they may be removed later.
        self._drafters = _with_weights(config)
        target = self._target_worker(own_head)
        self._early = self._start_drafts(target)
        try:
            self.target_group = self._backend.group(target, config.resources)
            # A previous engine, whose ranks were taken over, may have changed its drafters.
            if NewDrafters.of(self.target_group.spec).kinds() != NewDrafters.of(target).kinds():
                self.target_group.change_drafters(NewDrafters.of(target))
        except BaseException:
            self._end_early()
            raise

    @property
    def heads(self) -> list[HeadInfo]:
        """The heads of this engine, and what computes their layers."""
        found = [(self._own_head, self.target_group), *self._apart]
        return [
            HeadInfo(str(tag(type(each))), each.placement, report.layers, report.layers_reason)
            for each, group in found
            if isinstance(each, HeadConfig) and (report := group.reports[0].head) is not None
        ]

    @property
    def device_step(self) -> DeviceStepReport:
        """The target's report, with that of the first draft model, wherever it runs."""
        own = [group for each, group in self._apart if isinstance(each, DraftModelConfig)]
        found = [group.reports[0].device_step for group in [self.target_group, *own]]
        drafting = (step.draft_model for step in found if step.draft_model is not None)
        return replace(found[0], draft_model=next(drafting, None))

    def draft_model(self, config: Any) -> GroupDraftModel:
        """Returns the draft model of a section, in the target's workers or in its own group."""
        known = [section for _, section in draft_sections(self.config)]
        assert any(config is section for section in known), "a section of this engine's"
        owned = config.placement == "separate"
        group, verdicts_of = self.target_group, None
        if owned:
            group = self._apart_group(config)
        # A verdict reaches only one rank between two steps, so that others would lack it.
        if owned and config.speculation_cache is not None and group.spec.size == 1:
            self._num_links += 1
            verdicts_of = self.target_group, self._num_links
        return GroupDraftModel(
            group,
            self.config.max_num_batched_tokens,
            owned=owned,
            timeout_s=self.config.step_timeout_s,
            verdicts_of=verdicts_of,
        )

    def draft_members(self, config: DraftModelConfig) -> DraftMembers:
        """Returns the drafter group of a section."""
        name = config.drafter_group
        assert name is not None, "the section names one"
        return self._backend.draft_members(
            MembersAsk(
                name,
                f"{self.config.model_name}-{os.getpid()}",
                lambda members: _table(
                    check_members(
                        self.config, config, members.folder, members.vocab_size, self.vocab_size
                    )
                ),
                lambda block_size: _scratch_blocks(config, block_size),
                self.config.max_num_batched_tokens,
                self.config.step_timeout_s,
            )
        )

    def head_model(self, config: Any) -> GroupHead:
        """Returns the separate head of a section, linked to the target's group."""
        group = self._apart_group(config)
        self._num_links += 1
        return GroupHead(
            self.target_group,
            group,
            self._num_links,
            config.feature_transport,
            self.config.step_timeout_s,
        )

    def pool_link(self, config: Any) -> PoolLink:
        """Returns the link to a shared pool: the backend's if engines share it, else a local
        one."""
        snapshot = config.pool_snapshot and str(Path(config.pool_snapshot).resolve())
        size, is_shared = config.pool_max_patterns, config.pool_scope == "cluster"
        is_shared = is_shared and self._backend.shares_pools
        if not is_shared and snapshot is None:  # no tokens of other engines are added
            return LocalLink(PoolStore("", size, self.vocab_size))
        key = f"pool_scope: {config.pool_scope}" if is_shared else "pool_snapshot"
        needed_by = f"speculative_config.{key}"
        mark = vocabulary.fingerprint(self.tokenizer, self.vocab_size, needed_by=needed_by)
        if is_shared:
            return self._backend.shared_pool(mark, size, self.vocab_size, snapshot)
        is_common = config.pool_scope == "replica"
        store = PoolStore(mark, size, self.vocab_size, is_common=is_common)
        return LocalLink(store, snapshot)

    def changes(self, target: str, drafter: str) -> NewWeights:
        """Returns the weights that change in the target's workers; "" leaves weights unchanged.

        Raises:
            ConfigError: there is not exactly one drafter with weights.
        """
        own, _ = self._drafter_with_weights() if drafter else (None, None)
        head = self._own_head
        if own is None or own.placement == "separate":
            is_part = head is not None and self._is_part_of_target(head)
            return NewWeights(target, head=target if is_part else "")
        if isinstance(own, DraftModelConfig):
            return NewWeights(target, draft=drafter)
        return NewWeights(target, head=drafter)

    def check_weights(self, weights: NewWeights, drafter: str) -> None:
        """Checks that weights can be loaded; raises `CheckpointError`, and nothing has changed.

        Every message to the target's workers has been answered on return.
        """
        if weights != NewWeights():
            self.target_group.check_weights(weights)
        if not drafter:
            return
        section, apart = self._drafter_with_weights()
        if apart is not None:
            served = self.weights()
            config = self.config.model_copy(update={"model": served["model"]})
            section = section.model_copy(update={"speculative_model": served["drafter"]})
            check_drafter(config, section, drafter)

    def load_weights(self, weights: NewWeights, drafter: str) -> None:
        """Loads the checked weights; every request has to be computed again.

        Separate drafters whose weights change are restarted in the background.

        Raises:
            WorkerError: the target's workers must be restarted; they then have the previous
                weights.
        """
        if weights != NewWeights():
            self.target_group.load_weights(weights)
        apart = self._drafter_with_weights()[1] if drafter else None
        for section, group in self._apart:
            path = drafter if group is apart else ""
            if isinstance(section, DraftModelConfig):
                news, report = NewWeights(draft=path), group.reports[0]
            else:
                path = path or (weights.target if self._is_part_of_target(section) else "")
                news, report = NewWeights(weights.target, head=path), self.target_group.reports[0]
            if news != NewWeights():
                group.respecify(news.applied(group.spec, report))
                group.discard()

    def has_own_weights(self) -> bool:
        """Returns True if a drafter has weights that are not part of the target's checkpoint."""
        heads = [each for each in self._drafters if isinstance(each, HeadConfig)]
        return len(self._drafters) > sum(map(self._is_part_of_target, heads))

    def _is_part_of_target(self, head: HeadConfig) -> bool:
        """Returns True if a head's weights are in the target's checkpoint."""
        target = self.config.model
        return head.folder_beside(target).resolve() == Path(target).resolve()

    def weights(self) -> dict[str, str | None]:
        """Returns the folders of the served weights; `drafter` only if those can be replaced."""
        spec, drafter = self.target_group.spec, None
        with suppress(ConfigError):
            apart = self._drafter_with_weights()[1]
            held = spec if apart is None else apart.spec
            if held.draft is not None:
                drafter = held.draft.path
            elif held.head is not None:
                drafter = held.head.speculative_model
        assert spec.target is not None, "the group has a target"
        return {"model": spec.target.path, "drafter": drafter}

    def _drafter_with_weights(self) -> tuple[Any, WorkerGroup | None]:
        """Returns the section of the only drafter with a checkpoint, and its own group or None.

        Raises:
            ConfigError: there is none, or there are several.
        """
        sections = self._drafters
        if len(sections) != 1:
            raise ConfigError.at(
                "drafter",
                f"it replaces the weights of the one drafter that has some; here {len(sections)} "
                "drafters have",
            )
        groups = (group for section, group in self._apart if section is sections[0])
        return sections[0], next(groups, None)

    def shutdown(self) -> None:
        """Ends the target's workers and those that no drafter has taken; drafters end their own."""
        self._end_early()
        group = getattr(self, "target_group", None)
        if group is not None:
            group.shutdown()

    def served_sections(self, config: SpeculationBase) -> SpeculationBase:
        """Returns the served `config` with the folder that `update_weights` has set."""
        if len(self._drafters) != 1:
            return config
        section, folder = self._drafters[0], self.weights()["drafter"]
        place = Path(section.speculative_model or "")
        if isinstance(section, HeadConfig):
            place = section.folder_beside(self.config.model)
            if self._is_part_of_target(section):
                return config
        if folder is None or place.resolve() == Path(folder):
            return config
        news = {id(section): section.model_copy(update={"speculative_model": folder})}
        if id(config) in news:
            return news[id(config)]
        members = tuple(news.get(id(each), each) for each in config.sections)
        return config.model_copy(update={"members": members})

    def placed(self, config: EngineConfig) -> EngineConfig:
        """Returns the backend's `placed`."""
        return self._backend.placed(config)

    def start_apart(self, config: EngineConfig, section: Any) -> WorkerGroup:
        """Starts the workers of a separate drafter; nothing else changes.

        Raises:
            OutriderError: they cannot be placed, or cannot load.
        """
        return self._backend.group(self._apart_worker(section, config), config.resources)

    def new_drafters(self, config: EngineConfig, kept: Collection[int]) -> NewDrafters | None:
        """Returns the change of the target's ranks for the drafters of `config`; None: no change.

        Args:
            kept: the `id`s of sections whose drafter stays.
        """
        own_head, spec = head_section(config), self.target_group.spec
        assert spec.target is not None, "the group has a target"
        wanted = self._target_worker(own_head, config, spec.target.path)
        colocated = (s for _, s in draft_sections(config) if s.placement == "colocated")
        if id(own_head) in kept:  # even if its weights have been replaced
            wanted = replace(wanted, head=spec.head)
        if any(id(section) in kept for section in colocated):
            wanted = replace(wanted, draft=spec.draft)
        old, new = NewDrafters.of(spec), NewDrafters.of(wanted)
        if new == old:
            return None
        # Graphs output the layers that separate heads read, regardless of the heads' weights.
        is_off = not self.target_group.reports[0].device_step.on
        same_layers = is_off or new.kinds() == old.kinds()
        if same_layers and new == replace(old, fed_heads=new.fed_heads):
            self.target_group.respecify(replace(spec, fed_heads=wanted.fed_heads))
            return None
        return new

    def adopt(self, config: EngineConfig, groups: Mapping[int, WorkerGroup]) -> EngineConfig:
        """Serves the drafters of `config` from now on; returns the previous configuration.

        Args:
            groups: workers of separate drafters, by their section's `id`.
        """
        before, self.config = self.config, config
        self._own_head, self._drafters = head_section(config), _with_weights(config)
        self._apart = [(each, groups[id(each)]) for each in self._drafters if id(each) in groups]
        return before

    def apart(self) -> dict[int, WorkerGroup]:
        """Returns the workers of separate drafters, by their section's `id`."""
        return {id(section): group for section, group in self._apart}

    def workers(self) -> list[dict[str, Any]]:
        """Describes every worker and spare worker in plain values."""
        found = []
        apart = [
            ("head" if isinstance(each, HeadConfig) else "draft", group)
            for each, group in self._apart
        ]
        for role, group in [("target", self.target_group), *apart]:
            every = [("active", report.location) for report in group.reports if group.alive]
            every += [("spare", location) for location in group.spares()]
            found += [{"role": role, "state": state, **asdict(at)} for state, at in every]
        return found

    def _start_drafts(self, target: WorkerSpec) -> dict[int, Future[WorkerGroup]]:
        """Starts separate draft models, which load alongside the target; returns them by
        section."""
        apart = [s for _, s in draft_sections(self.config) if s.placement == "separate"]
        specs = [self._draft_worker(section) for section in apart]
        resources = self.config.resources
        if not specs or not self._backend.can_start_at_once([target, *specs], resources):
            return {}
        threads = ThreadPoolExecutor(len(specs), "outrider-drafts")
        started = [threads.submit(self._backend.group, spec, resources) for spec in specs]
        threads.shutdown(wait=False)
        return {id(section): each for section, each in zip(apart, started, strict=True)}

    def _end_early(self) -> None:
        """Ends the workers that no drafter has taken."""
        while self._early:
            _, early = self._early.popitem()
            with suppress(OutriderError):
                early.result().shutdown()

    def _apart_group(self, section: Any) -> WorkerGroup:
        """Returns the workers of a separate drafter, which may have been started earlier."""
        known = self.apart().get(id(section))
        if known is not None:
            return known
        early = self._early.pop(id(section), None)
        group = self.start_apart(self.config, section) if early is None else early.result()
        self._apart.append((section, group))
        return group

    def _apart_worker(self, section: Any, config: EngineConfig) -> WorkerSpec:
        if isinstance(section, DraftModelConfig):
            return self._draft_worker(section, config)
        spec = self.target_group.spec.target
        assert spec is not None, "the group has a target"
        num_blocks = agreed_blocks(self.target_group.reports)[0]
        return worker_spec(
            self.config,
            1,
            head=section.at_its_place(spec.path),
            head_target=model_spec(self.config, spec.path, num_blocks),
        )

    def _target_worker(
        self,
        own_head: HeadConfig | None,
        config: EngineConfig | None = None,  # None: the served configuration
        model: str | None = None,  # folder of the target's weights; None: that of the configuration
    ) -> WorkerSpec:
        config = config or self.config
        model = model or config.model
        colocated = [s for _, s in draft_sections(config) if s.placement == "colocated"]
        separate = [each for each in head_sections(config) if each.placement == "separate"]
        draft = None
        if colocated:
            draft = self._draft_spec(colocated[0], config)
        return worker_spec(
            self.config,
            config.num_ranks,
            stages=config.pipeline_parallel_size,
            rule=config.speculative_config.verification,
            rule_parameters=config.speculative_config.rule_parameters,
            device_step=config.device_step,
            symmetric_memory=config.symmetric_memory,
            target=replace(
                model_spec(self.config, model, config.num_kv_blocks, config.max_model_len),
                deterministic=config.deterministic,
                kv_dtype=config.kv_cache_dtype,
                prompt_attention=config.prompt_attention,
                whole_experts=config.enable_expert_parallel,
                hf_overrides=tuple(config.hf_overrides.given().items()),
                adapters=_adapters(config),
            ),
            draft=draft,
            head=own_head and own_head.at_its_place(model),
            fed_heads=tuple(each.at_its_place(model) for each in separate),
        )

    def _draft_worker(
        self, section: DraftModelConfig, config: EngineConfig | None = None
    ) -> WorkerSpec:
        config = config or self.config
        model = self._draft_spec(section, config)
        num_scratch_blocks = _scratch_blocks(section, model.block_size)
        return worker_spec(
            self.config,
            draft_size(config, section),
            device_step=self.config.device_step,
            symmetric_memory=self.config.symmetric_memory,
            draft=replace(model, num_scratch_blocks=num_scratch_blocks),
        )

    def _draft_spec(self, section: DraftModelConfig, config: EngineConfig) -> ModelSpec:
        model = model_spec(self.config, section.speculative_model, section.num_kv_blocks)
        if section.draws_in_turn and not section.wants_draft_probs:
            model = replace(model, max_draft_len=section.draft_len)
        if not section.use_heterogeneous_vocab:
            return model
        return replace(model, translation=_table(translation_of(config, section, self.vocab_size)))


def _table(translation: Translation | None) -> bytes:
    """Returns the table that workers get; logs how much of another vocabulary can be drafted."""
    if translation is None:
        return b""
    log.log(
        logging.WARNING if translation.is_poor else logging.INFO,
        "the draft model's vocabulary is %s",
        translation,
    )
    return translation.table


def worker_spec(config: EngineConfig, size: int, **parts: Any) -> WorkerSpec:
    """Returns a group of `size` workers with the settings shared by all groups."""
    return WorkerSpec(
        size=size,
        device=config.device,
        threads=config.resources.threads_per_worker,
        spin_s=config.resources.spin_s,
        timeout_s=config.step_timeout_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        **parts,
    )


def model_spec(
    config: EngineConfig, path: str, num_blocks: int | None, max_model_len: int | None = None
) -> ModelSpec:
    """Returns a model with the settings shared by all models."""
    return ModelSpec(
        path=str(Path(path).resolve()),
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cpu_bytes=config.kv_cpu_bytes,
        kv_memory_fraction=config.kv_memory_fraction,
        num_checkpoints=config.num_checkpoints,
        forward=config.forward,
        keeps_quantised=config.keep_quantised == "auto",
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )


def _scratch_blocks(section: DraftModelConfig, block_size: int) -> int:
    """Returns the number of blocks for chains that are prepared after outcomes."""
    cache = section.speculation_cache
    return cache.budget * blocks_per_outcome(section.prepared_len, block_size) if cache else 0


def _adapters(config: EngineConfig) -> tuple[tuple[str, str], ...] | None:
    """Returns the target's LoRA adapters; None if it takes none."""
    if not config.takes_adapters:
        return None
    return tuple((each.name, str(Path(each.path).resolve())) for each in config.lora_modules)


def _with_weights(config: EngineConfig) -> list[Any]:
    """Returns the sections of drafters that have a checkpoint."""
    return [*(each for _, each in draft_sections(config)), *head_sections(config)]
