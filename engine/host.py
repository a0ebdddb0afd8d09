"""Starts the worker groups of one engine: the target's, and those that drafters require.

Checks first what can be checked without loading anything, so that a wrong path, a vocabulary that
does not match or a size that does not divide is reported within a second.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config import DraftModelConfig, EngineConfig, HeadConfig
from ..drafters import vocabulary
from ..drafters.lookup.pool import LocalLink, PoolLink, PoolStore
from ..errors import OutriderError
from ..workers.group import GroupDraftModel, WorkerGroup, agreed_blocks
from ..workers.group_head import GroupHead
from ..workers.spec import ModelSpec, WorkerSpec
from .backend import Backend
from .checkpoints import resolved
from .checks import check_models
from .info import HeadInfo
from .sections import draft_sections, draft_size, head_section, head_sections

log = logging.getLogger(__name__)


class EngineHost:
    """Owns the groups; drafters get theirs through `draft_model` and `head_model`."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        config = resolved(config)
        self._config = config
        self.speculative_config = config.speculative_config  # with folders for all checkpoints
        self._backend = backend
        self._num_links = 0  # heads in workers of their own
        self.heads: list[HeadInfo] = []
        self._groups: list[tuple[str, WorkerGroup]] = []  # by what their workers compute
        self.tokenizer = Path(config.tokenizer or config.model)
        known = backend.recall()
        self.vocab_size = check_models(config) if known is None else known
        backend.note(self.vocab_size)
        own_head = head_section(config)
        target = self._target_worker(own_head)
        self._early = self._start_drafts(target)
        try:
            self.target_group = self._group("target", target)
        except BaseException:
            self._end_early()
            raise
        self._note_head(own_head, self.target_group)

    def draft_model(self, config: Any) -> GroupDraftModel:
        """The draft model of a section: in the target's own workers, or in a group of its own."""
        known = [section for _, section in draft_sections(self._config)]
        assert any(config is section for section in known), "a section of this engine's"
        owned = config.placement == "separate"
        group = self.target_group
        if owned:
            early = self._early.pop(id(config), None)
            group = early.result() if early is not None else self._start(self._draft_worker(config))
            self._groups.append(("draft", group))
        return GroupDraftModel(
            group,
            self._config.max_num_batched_tokens,
            owned=owned,
            timeout_s=self._config.step_timeout_s,
        )

    def head_model(self, config: Any) -> GroupHead:
        """The head of a section that places it in a worker of its own, linked to the target's."""
        num_blocks = agreed_blocks(self.target_group.reports)[0]
        group = self._group(
            "head",
            WorkerSpec(
                size=1,
                device=self._config.device,
                threads=self._config.resources.threads_per_worker,
                spin_s=self._config.resources.spin_s,
                timeout_s=self._config.step_timeout_s,
                heartbeat_timeout_s=self._config.heartbeat_timeout_s,
                head=_at_its_place(config, self._config.model),
                head_target=self._model_spec(self._config.model, num_blocks),
            ),
        )
        self._num_links += 1
        self._note_head(config, group)
        return GroupHead(
            self.target_group,
            group,
            self._num_links,
            config.feature_transport,
            self._config.step_timeout_s,
        )

    def pool_link(self, config: Any) -> PoolLink:
        """The link to a shared pool: the backend's if other engines share it, else a local one."""
        snapshot = config.pool_snapshot and str(Path(config.pool_snapshot).resolve())
        size, is_shared = config.pool_max_patterns, config.scope == "cluster"
        is_shared = is_shared and self._backend.shares_pools
        if not is_shared and snapshot is None:  # nobody else's tokens ever come in
            return LocalLink(PoolStore("", size, self.vocab_size))
        key = f"pool_scope: {config.scope}" if is_shared else "pool_snapshot"
        needed_by = f"speculative_config.{key}"
        mark = vocabulary.fingerprint(self.tokenizer, self.vocab_size, needed_by=needed_by)
        if is_shared:
            return self._backend.shared_pool(mark, size, self.vocab_size, snapshot)
        is_common = config.scope == "replica"
        store = PoolStore(mark, size, self.vocab_size, is_common=is_common)
        return LocalLink(store, snapshot)

    def shutdown(self) -> None:
        """Ends the target's workers, and those that no drafter took; drafters end their own."""
        self._end_early()
        group = getattr(self, "target_group", None)
        if group is not None:
            group.shutdown()

    def _note_head(self, section: HeadConfig | None, group: WorkerGroup) -> None:
        report = group.reports[0].head
        if section is not None and report is not None:
            decoding_type = section.decoding_type  # type: ignore[attr-defined]
            self.heads.append(
                HeadInfo(decoding_type, section.placement, report.layers, report.layers_reason)
            )

    def workers(self) -> list[dict[str, Any]]:
        """Every worker and spare worker, as plain values."""
        found = []
        for role, group in self._groups:
            every = [("active", report.location) for report in group.reports if group.alive]
            every += [("spare", location) for location in group.spares()]
            found += [{"role": role, "state": state, **asdict(at)} for state, at in every]
        return found

    def _start_drafts(self, target: WorkerSpec) -> dict[int, Future[WorkerGroup]]:
        """Draft models in workers of their own, which load beside the target; by their sections."""
        apart = [s for _, s in draft_sections(self._config) if s.placement == "separate"]
        specs = [self._draft_worker(section) for section in apart]
        resources = self._config.resources
        if not specs or not self._backend.can_start_at_once([target, *specs], resources):
            return {}
        threads = ThreadPoolExecutor(len(specs), "outrider-drafts")
        started = [threads.submit(self._start, spec) for spec in specs]
        threads.shutdown(wait=False)
        return {id(section): each for section, each in zip(apart, started, strict=True)}

    def _end_early(self) -> None:
        """Ends the workers that no drafter has taken."""
        while self._early:
            _, early = self._early.popitem()
            with suppress(OutriderError):
                early.result().shutdown()

    def _group(self, role: str, spec: WorkerSpec) -> WorkerGroup:
        group = self._start(spec)
        self._groups.append((role, group))
        return group

    def _start(self, spec: WorkerSpec) -> WorkerGroup:
        return self._backend.group(spec, self._config.resources)

    def _target_worker(self, own_head: HeadConfig | None) -> WorkerSpec:
        config = self._config
        colocated = [s for _, s in draft_sections(config) if s.placement == "colocated"]
        return WorkerSpec(
            size=config.tensor_parallel_size,
            device=config.device,
            threads=config.resources.threads_per_worker,
            spin_s=config.resources.spin_s,
            timeout_s=config.step_timeout_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            rule=config.speculative_config.verification,
            rule_parameters=config.speculative_config.rule_parameters,
            device_step=config.device_step,
            symmetric_memory=config.symmetric_memory,
            target=replace(
                self._model_spec(config.model, config.num_kv_blocks, config.max_model_len),
                deterministic=config.deterministic,
            ),
            draft=self._draft_spec(colocated[0]) if colocated else None,
            head=_at_its_place(own_head, config.model),
            feeds_heads=any(each.placement == "separate" for each in head_sections(config)),
        )

    def _draft_worker(self, section: DraftModelConfig) -> WorkerSpec:
        config = self._config
        return WorkerSpec(
            size=draft_size(config, section),
            device=config.device,
            threads=config.resources.threads_per_worker,
            spin_s=config.resources.spin_s,
            timeout_s=config.step_timeout_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            symmetric_memory=config.symmetric_memory,
            draft=self._draft_spec(section),
        )

    def _draft_spec(self, section: DraftModelConfig) -> ModelSpec:
        return self._model_spec(section.speculative_model, section.num_kv_blocks)

    def _model_spec(
        self, path: str, num_blocks: int | None, max_model_len: int | None = None
    ) -> ModelSpec:
        config = self._config
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
            forward=config.forward,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )


def _at_its_place(section: HeadConfig | None, target: str) -> HeadConfig | None:
    """`section` with a path that holds in every process."""
    if section is None:
        return None
    folder = str(section.folder_beside(target).resolve())
    return section.model_copy(update={"speculative_model": folder})
