"""A configuration whose Hugging Face ids and GGUF files have become folders, and its sampling
defaults."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..config import DraftModelConfig, EngineConfig, HeadConfig, SpeculationBase
from ..config.hub import reason
from ..errors import CheckpointError, ConfigError, InvalidRequestError
from ..scheduler.sampling import SamplingParams

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def trust(config: EngineConfig) -> dict[str, Any]:
    """What the checkpoints' readers may do."""
    return {"trust_remote_code": config.trust_remote_code, "allow_pickle": config.allow_pickle}


def resolved(config: EngineConfig) -> EngineConfig:
    """`config` with folders for all checkpoints; unchanged where they are folders already.

    Raises:
        CheckpointError: one is neither here nor on the Hub, or a GGUF file that is damaged or not
            read; names the field.
    """
    from ..workers.model.checkpoint.hub import local_folder

    place: Callable[..., str] = partial(local_folder, **trust(config))
    has_own = config.tokenizer is None
    changes: dict[str, Any] = {
        "model": place(config.model, revision=config.revision, needs_tokenizer=has_own)
    }
    if config.tokenizer is not None:
        changes["tokenizer"] = place(config.tokenizer, "tokenizer", needs_tokenizer=True)
    if config.lora_modules:
        changes["lora_modules"] = tuple(
            each.model_copy(update={"path": place(each.path, "lora_modules")})
            for each in config.lora_modules
        )
    old = config.speculative_config
    sections = [_placed(section, place) for section in old.sections]
    if old.sections == (old,):
        changes["speculative_config"] = sections[0]
    else:
        changes["speculative_config"] = old.model_copy(update={"members": tuple(sections)})
    if changes["model"] != config.model:
        changes["served_model_name"] = config.model_name
    same = all(getattr(config, key) == value for key, value in changes.items())
    return config if same else config.model_copy(update=changes)


def _placed(section: SpeculationBase, place: Any) -> SpeculationBase:
    source = getattr(section, "speculative_model", None)
    if not isinstance(section, (DraftModelConfig, HeadConfig)) or not source:
        return section
    field = "speculative_config.speculative_model"
    if isinstance(section, HeadConfig) and source.lower().endswith(".gguf"):
        raise CheckpointError.at(
            field, f"{source!r}: heads are folders; a GGUF file is a target or a draft model"
        )
    folder = place(source, field)
    if folder == source:
        return section
    return section.model_copy(update={"speculative_model": folder})


def sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Sampling defaults of requests, from generation_config.json.

    `generation_config: auto` reads the model's folder, `vllm` nothing, anything else is a folder.

    Raises:
        ConfigError: the file of a given folder is missing, or a value is out of range.
    """
    source = config.generation_config
    if source == "vllm":
        return {}
    folder = Path(config.model if source == "auto" else source)
    file = folder if folder.is_file() else folder / "generation_config.json"
    if source == "auto" and not file.is_file():
        return {}
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError.at(
            "generation_config", f"{str(file)!r} cannot be read: {error}"
        ) from None
    if not isinstance(stored, dict):
        raise ConfigError.at("generation_config", f"{str(file)!r} holds no mapping")
    found = {name: stored[name] for name in _FIELDS if stored.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise ConfigError.at("generation_config", f"{str(file)!r}: {error.message}") from None
    return found


def load_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer of a configuration.

    Raises:
        CheckpointError: it cannot be loaded from local files.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer or config.model
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        check_tokenizer_files(Path(path))
        why = reason(error, path)
        if why.endswith(":") or " one of: " in why:  # a list of ways, all of which failed
            why = "it has no tokenizer.json, and no files that make one"
        raise CheckpointError.at("tokenizer", f"none can be loaded from {path!r}: {why}") from None


def check_tokenizer_files(folder: Path) -> None:
    """Raises `CheckpointError` where a tokenizer is not there, or its files are damaged."""
    from tokenizers import Tokenizer

    from ..workers.model.checkpoint.hub import read_mapping, unreadable

    if not folder.exists():
        raise CheckpointError.at("tokenizer", f"{str(folder)!r} does not exist")
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        read_mapping(file.parent / "tokenizer_config.json")
    except CheckpointError as error:
        raise CheckpointError.at("tokenizer", error.message) from None
    if not file.is_file():
        return  # one of another kind, which transformers reads
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001, it raises nothing narrower
        raise CheckpointError.at("tokenizer", unreadable(file, error)) from None
