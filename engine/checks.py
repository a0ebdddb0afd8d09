"""Checks of an engine's configuration against its checkpoints' files; nothing is loaded for them.

Called by `host.py` before anything is started, and by `preflight.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..drafters import vocabulary
from ..errors import ConfigError
from .sections import draft_sections, draft_size

log = logging.getLogger(__name__)


def check_models(config: EngineConfig) -> int:
    """Checks what the checkpoints' files show; the target's vocabulary size.

    An engine that follows one with the same configuration skips this: reading the files imports
    transformers, which takes a second.

    Raises:
        ConfigError, CheckpointError: what does not fit, by field.
    """
    from ..workers.model.outline import outline

    target = outline(
        Path(config.model),
        tensor_parallel_size=config.tensor_parallel_size,
        trust_remote_code=config.trust_remote_code,
        allow_pickle=config.allow_pickle,
    )
    check_quantization(config)
    check_length(config, target.max_model_len)
    check_thinking_tokens(config, target.vocab_size)
    for field, section in draft_sections(config):
        check_vocabulary(
            config.model,
            section.speculative_model,
            draft_size(config, section),
            field,
            config.tokenizer,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )
    return int(target.vocab_size)


def check_chains(config: EngineConfig, *, proposes_trees: bool) -> None:
    """Raises `ConfigError` where a deterministic engine's drafter proposes trees."""
    if config.deterministic and proposes_trees:
        raise ConfigError(
            f"deterministic: drafts must be chains, and {config.speculative_config.decoding_type} "
            "proposes trees here; siblings change the order in which attention adds keys up",
            field="deterministic",
        )


def check_quantization(config: EngineConfig) -> None:
    """Logs what is dequantised at load.

    Raises:
        ConfigError: the target is not quantised as `quantization` requires.
        CheckpointError: it is quantised in a format that is not read.
    """
    from ..workers.model.checkpoint.quantised.formats import find_format

    found = find_format(Path(config.model))
    method, wanted = ("none" if found is None else found.method), config.quantization
    if wanted not in ("auto", method):
        raise ConfigError(
            f"quantization: {wanted!r}, but the checkpoint {config.model!r} has {method!r}; "
            "allowed for it: 'auto' and its own",
            field="quantization",
        )
    if found is None:
        return
    if _may_keep(config):
        log.info(
            "%s is quantised (%s): its weights stay so on CUDA devices",
            config.model,
            found.description,
        )
        return
    log.warning(
        "%s is quantised (%s): its weights are dequantised at load and take the memory of an "
        "unquantised model",
        config.model,
        found.description,
    )


def _may_keep(config: EngineConfig) -> bool:
    """Whether the target's ranks have kernels for quantised weights, as far as is known here."""
    import torch

    on_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return on_cuda and config.forward != "bridge"


def check_length(config: EngineConfig, limit: int) -> None:
    """Raises `ConfigError` where `max_model_len` is beyond what the checkpoint was made for."""
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} exceeds the checkpoint's {limit}",
            field="max_model_len",
        )


def check_thinking_tokens(config: EngineConfig, vocab_size: int) -> None:
    """Raises `ConfigError` where the rule needs tokens that the target does not have."""
    section = config.speculative_config
    for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
        token = getattr(section, name)
        if section.thinking_tokens is not None and token >= vocab_size:
            raise ConfigError(
                f"speculative_config.{name}: {token} is outside the target's vocabulary of "
                f"{vocab_size} tokens; verification {section.verification!r} needs it",
                field=f"speculative_config.{name}",
            )


def check_vocabulary(
    target: str,
    draft: str,
    draft_size: int,
    field: str = "speculative_config.speculative_model",
    tokenizer: str | None = None,  # the target's, if it is not in its folder
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> None:
    """A draft model must have the target's vocabulary.

    Raises:
        ConfigError, CheckpointError: the two differ, or the draft model is not there.
    """
    from ..workers.model.outline import outline

    trust: Any = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    try:
        draft_info = outline(Path(draft), tensor_parallel_size=draft_size, **trust)
        theirs = _vocabulary(Path(draft))
    except ConfigError as error:
        raise type(error)(f"{field}: {error.message}", field=field) from None
    target_info = outline(Path(target), tensor_parallel_size=1, **trust)
    if draft_info.vocab_size != target_info.vocab_size:
        raise ConfigError(
            f"{field}: {draft} has a vocabulary of {draft_info.vocab_size} tokens, the target "
            f"{target} one of {target_info.vocab_size}; a drafter must share the target's",
            field=field,
        )
    ours = _vocabulary(Path(tokenizer or target))
    if theirs is None or ours is None:
        return
    differing = vocabulary.differing(ours, theirs)
    if differing:
        first = differing[0]
        raise ConfigError(
            f"{field}: {draft} has another tokenizer than the target {target}: "
            f"{len(differing)} of {len(ours.tokens)} tokens differ, the first is {first}: "
            f"{theirs.tokens.get(first)!r}, not {ours.tokens.get(first)!r}",
            field=field,
        )


def _vocabulary(tokenizer: Path) -> vocabulary.Vocabulary | None:
    """The vocabulary of a folder's `tokenizer.json`; None if there is no such file."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    return vocabulary.read(file) if file.is_file() else None
