"""Checks a configuration and its files without loading or starting anything.

Run before anything is deployed, while Ray starts: damaged files are reported in seconds, and a
folder that is missing at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigError, OutriderError

if TYPE_CHECKING:
    import torch

    from ..config import DraftModelConfig, EngineConfig
    from ..workers.model import ModelInfo
    from ..workers.model.fit import Serving
    from .frontend import Frontend


def require_checkpoints(config: EngineConfig) -> None:
    """Looks for the folders of `config`, and fetches those that are on the Hub.

    Raises:
        ConfigError, CheckpointError: one is missing, or the target's is no checkpoint; by field.
    """
    from ..workers.model.checkpoint.folder import require_checkpoint
    from .checkpoints import resolved
    from .sections import draft_sections, head_sections

    config = resolved(config)
    require_checkpoint(Path(config.model), allow_pickle=config.allow_pickle)
    for field, section in draft_sections(config):
        if not Path(section.speculative_model).exists():
            raise CheckpointError(
                f"{field}: model path {section.speculative_model!r} does not exist", field=field
            )
    head_sections(config)


def preflight(config: EngineConfig, *, is_local: bool | None = None) -> dict[str, Any]:
    """Checks the checkpoints; returns what their configurations contain.

    Args:
        is_local: whether the workers will run on this machine, so that its devices and its memory
            decide; None: only if the executor is `local`.

    Raises:
        ConfigError, CheckpointError: model or draft model missing, vocabularies that differ, a
            size that does not divide, weights that are damaged or do not fit their configuration, a
            KV cache that is too small or too large, a head that does not fit, no tokenizer, a
            drafter's table or snapshot that is damaged or another vocabulary's; names the field.
    """
    import torch

    from ..drafters.heads.protocol import TargetFacts
    from ..drafters.registry import check_head
    from ..workers.model.fit import check_weights
    from .checkpoints import resolved
    from .checks import check_length, check_thinking_tokens, check_vocabulary
    from .frontend import Frontend
    from .sections import draft_sections, draft_size, head_section, head_sections

    config = resolved(config)
    size = config.tensor_parallel_size
    trust = _trust(config)
    device = _device(config, is_local=_is_local(config, is_local))
    target, kv_bytes = check_weights(Path(config.model), size, _serving(config, device), **trust)
    check_length(config, target.max_model_len)
    _check_cache(config, kv_bytes, device)
    check_thinking_tokens(config, target.vocab_size)
    frontend = Frontend(config, target)  # tokenizer and chat template
    if config.chat_template is not None:
        check_template(frontend)
    facts: dict[str, Any] = {
        "model": config.model,
        "architecture": target.architecture,
        "layers": target.num_layers,
        "vocabulary": target.vocab_size,
        "context": config.max_model_len or target.max_model_len,
        "ranks": size,
        "heads per rank": f"{target.num_heads} ({target.num_kv_heads} of keys and values)",
        "drafter": config.speculative_config.decoding_type,
    }
    if device is not None and kv_bytes is not None:
        facts["KV cache per rank"] = f"{kv_bytes:,} bytes a token of the target"
    for field, section in draft_sections(config):
        ranks = draft_size(config, section)
        check_vocabulary(
            config.model,
            section.speculative_model,
            ranks,
            field,
            config.tokenizer,
            **trust,
        )
        draft = _check_draft(section, ranks, field, trust)
        label = field.removeprefix("speculative_config.").removesuffix("speculative_model")
        facts[f"{label}draft model"] = section.speculative_model
        facts[f"{label}draft architecture"] = draft.architecture
        facts[f"{label}draft ranks"] = f"{ranks} ({section.placement})"
    head_section(config)  # one at most in the target's workers
    fits = TargetFacts(
        target.hidden_size,
        target.vocab_size,
        target.num_layers,
        target.dtype,
        torch.device("meta"),
    )
    _check_files(config, target.vocab_size)
    for index, head in enumerate(head_sections(config)):
        folder = str(head.folder_beside(config.model))
        check_head(head.model_copy(update={"speculative_model": folder}), fits)
        label = f"head {index + 1}" if index else "head"
        facts[label] = f"{folder} ({head.placement})"
    return facts


def _is_local(config: EngineConfig, is_local: bool | None) -> bool:
    return config.executor == "local" if is_local is None else is_local


def _trust(config: EngineConfig) -> dict[str, Any]:
    """What the checkpoints' readers may do."""
    return {
        "trust_remote_code": config.trust_remote_code,
        "allow_pickle": config.allow_pickle,
    }


def _check_draft(
    section: DraftModelConfig, ranks: int, field: str, trust: dict[str, Any]
) -> ModelInfo:
    """What a rank of a draft model is.

    Raises:
        CheckpointError: its files are damaged, or those of a head; names `field`.
    """
    from ..drafters.heads.load import has_head_tensors
    from ..workers.model.fit import check_weights

    folder = Path(section.speculative_model)
    try:
        return check_weights(folder, ranks, **trust)[0]
    except CheckpointError as error:
        hint = ""
        if has_head_tensors(folder):
            hint = (
                "; these are the tensors of a head, which reads the target's hidden states and is "
                "no draft model: set the decoding_type of its method"
            )
        raise CheckpointError(f"{field}: {error.message}{hint}", field=field) from None


def _device(config: EngineConfig, *, is_local: bool) -> torch.device | None:
    """The workers' device; None: they run on other machines.

    Raises:
        ConfigError: this machine does not have it.
    """
    from ..workers.worker import pick_device

    return pick_device(config.device) if is_local else None


def _serving(config: EngineConfig, device: torch.device | None) -> Serving:
    """How the workers will load the target."""
    from ..workers.model.fit import CPU, Serving
    from ..workers.worker import DTYPES

    return Serving(device or CPU, DTYPES.get(config.dtype), config.forward, config.deterministic)


def _check_cache(config: EngineConfig, kv_bytes: int | None, device: torch.device | None) -> None:
    """Raises `ConfigError` where the KV cache is too small, or too large for `device`."""
    import torch

    from ..workers.model.fit import check_blocks

    blocks, block_size = config.num_kv_blocks, config.block_size
    least = config.max_model_len or 0
    if blocks is not None and blocks * block_size < least:
        raise ConfigError(
            f"num_kv_blocks: {blocks} blocks of {block_size} tokens hold less than "
            f"max_model_len ({least})",
            field="num_kv_blocks",
        )
    if device is None or blocks is None or kv_bytes is None:
        return
    ranks = config.tensor_parallel_size
    share = ranks if device.type == "cpu" else -(-ranks // torch.cuda.device_count())
    check_blocks(blocks, block_size, kv_bytes, device, share)


def check_template(frontend: Frontend) -> None:
    """Renders a conversation of one message.

    Raises:
        ConfigError: the chat template does not take it.
    """
    if not frontend.has_chat_template:
        return
    try:
        frontend.chat_prompt([{"role": "user", "content": "Hello"}])
    except (OutriderError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"chat_template: a conversation of one user message cannot be rendered: {error}",
            field="chat_template",
        ) from None


def try_template(config: EngineConfig) -> None:
    """Renders a conversation, also where the template is the checkpoint's own.

    Raises:
        ConfigError: as `check_template`.
    """
    from ..workers.model import describe
    from .frontend import Frontend

    target = describe(Path(config.model), **_trust(config))
    check_template(Frontend(config, target))


def try_drafters(config: EngineConfig) -> dict[str, str]:
    """Builds drafters without a model as the engine will, and shuts them down.

    Returns the names of user drafters by import path. No part of `preflight`: a large table takes
    time, and a user's code may occupy a resource that the engine's process needs.

    Raises:
        ConfigError: one cannot be imported or built, lacks a method, or cannot use its files.
    """
    from ..drafters.registry import method_of
    from ..workers.model import describe

    target = describe(
        Path(config.model),
        tensor_parallel_size=config.tensor_parallel_size,
        **_trust(config),
    )
    tokenizer = Path(config.tokenizer or config.model)
    names: dict[str, str] = {}
    for section in config.speculative_config.sections:
        probe = method_of(section).probe
        if probe is not None:
            names |= probe(section, tokenizer, target.vocab_size)
    return names


def _check_files(config: EngineConfig, vocab_size: int) -> None:
    """Reads the files that drafters start from.

    Raises:
        ConfigError: as `preflight`, of a table or a snapshot.
    """
    from ..drafters.registry import method_of

    tokenizer = Path(config.tokenizer or config.model)
    for section in config.speculative_config.sections:
        check = method_of(section).check_files
        if check is not None:
            check(section, tokenizer, vocab_size)
