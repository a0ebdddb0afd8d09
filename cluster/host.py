"""Starts the worker groups of one engine: the target's, and those that drafters ask for.

Checks first what can be checked without loading anything, so that a wrong path, a vocabulary
that does not match or a size that does not divide is said in a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import DraftModelConfig, EngineConfig
from ..errors import ConfigError
from ..workers.group import GroupDraftModel, LocalGroup, WorkerGroup
from ..workers.model import describe
from ..workers.spec import ModelSpec, WorkerSpec


class EngineHost:
    """Owns the groups; drafters get theirs through `draft_model`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._section = _draft_section(config)
        target = describe(Path(config.model), tensor_parallel_size=config.tensor_parallel_size)
        self.vocab_size = target.vocab_size
        section, draft, colocated = self._section, None, False
        if section is not None:
            check_vocabulary(config.model, section.speculative_model, self._draft_size())
            draft = self._model_spec(section.speculative_model, section.num_kv_blocks)
            colocated = section.placement == "colocated"
        self._draft_spec = draft
        self.target_group = self._group(
            WorkerSpec(
                size=config.tensor_parallel_size,
                device=config.device,
                threads=config.resources.threads_per_worker,
                timeout_s=config.step_timeout_s,
                rule=config.speculative_config.verification,
                target=self._model_spec(config.model, config.num_kv_blocks, config.max_model_len),
                draft=draft if colocated else None,
            )
        )

    def draft_model(self, section: Any) -> GroupDraftModel:
        """The draft model of `section`: the target's own workers, or a group of its own."""
        assert section is self._section, "the engine's one drafter asks once"
        assert self._draft_spec is not None
        owned = section.placement == "separate"
        group = self.target_group
        if owned:
            group = self._group(
                WorkerSpec(
                    size=self._draft_size(),
                    device=self._config.device,
                    threads=self._config.resources.threads_per_worker,
                    timeout_s=self._config.step_timeout_s,
                    draft=self._draft_spec,
                )
            )
        return GroupDraftModel(group, self._config.max_num_batched_tokens, owned=owned)

    def shutdown(self) -> None:
        """Ends the target's workers; drafters end their own."""
        group = getattr(self, "target_group", None)
        if group is not None:
            group.shutdown()

    def _group(self, spec: WorkerSpec) -> WorkerGroup:
        if self._config.executor == "local":
            return LocalGroup(spec)
        from .ray_group import RayGroup  # Ray is loaded only where it is used

        return RayGroup(spec, self._config.resources)

    def _draft_size(self) -> int:
        """Tensor-parallel size of the draft model."""
        assert self._section is not None
        if self._section.placement == "colocated":
            return self._config.tensor_parallel_size
        return self._section.draft_tensor_parallel_size or 1

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
        )


def check_vocabulary(target: str, draft: str, draft_size: int) -> None:
    """A draft model must speak the target's tokens.

    Raises:
        ConfigError, CheckpointError: the two differ, or the draft model is not there.
    """
    field = "speculative_config.speculative_model"
    try:
        draft_info = describe(Path(draft), tensor_parallel_size=draft_size)
    except ConfigError as error:
        raise type(error)(f"{field}: {error.message}", field=field) from None
    target_info = describe(Path(target), tensor_parallel_size=1)
    if draft_info.vocab_size != target_info.vocab_size:
        raise ConfigError(
            f"{field}: {draft} has a vocabulary of {draft_info.vocab_size} tokens, the target "
            f"{target} one of {target_info.vocab_size}; a drafter must share the target's",
            field=field,
        )
    theirs, ours = _vocabulary(Path(draft)), _vocabulary(Path(target))
    if theirs is not None and ours is not None and theirs != ours:
        differing = [token for token, index in ours.items() if theirs.get(token) != index]
        raise ConfigError(
            f"{field}: {draft} has another tokenizer than the target {target}: "
            f"{len(differing)} of {len(ours)} tokens differ, the first is {differing[0]!r}"
            if differing
            else f"{field}: {draft} has tokens that the target {target} lacks",
            field=field,
        )


def _vocabulary(path: Path) -> dict[str, int] | None:
    """Token to id, from `tokenizer.json`; None where there is no such file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    model = json.loads(file.read_text(encoding="utf-8")).get("model", {})
    vocab = model.get("vocab")
    return vocab if isinstance(vocab, dict) else None


def _draft_section(config: EngineConfig) -> DraftModelConfig | None:
    section = config.speculative_config
    return section if isinstance(section, DraftModelConfig) else None
