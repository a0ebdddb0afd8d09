"""The checkpoints that a configuration names.

Resolves them to folders, lists the sections that have one, identifies their kind by the names of
tensors and files, and loads tokenizer and sampling defaults. This module does not import torch; it
imports transformers only to load a tokenizer.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import SECTIONS, DraftModelConfig, EngineConfig, HeadConfig, SpeculationBase
from ..config.files import reason
from ..errors import CheckpointError, ConfigError, InvalidRequestError
from ..scheduler.sampling import SamplingParams

if TYPE_CHECKING:
    from ..workers.model.checkpoint.adapters import Adapter

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def trust(config: EngineConfig) -> dict[str, Any]:
    """Returns the permissions that readers of checkpoints take as keyword arguments."""
    return {"trust_remote_code": config.trust_remote_code, "allow_pickle": config.allow_pickle}


def resolved(config: EngineConfig) -> EngineConfig:
    """Returns `config` with a local folder for every checkpoint; unchanged if all are folders.

    Raises:
        CheckpointError: a checkpoint is neither local nor on the Hub, or a GGUF file is damaged or
            not supported; the message names the field.
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


# The sections of a speculation configuration that have a model: draft models and heads.


def draft_sections(config: EngineConfig) -> list[tuple[str, DraftModelConfig]]:
    """Returns the sections with a draft model and the keys that name the models.

    Sections that use a drafter group are left out.

    Raises:
        ConfigError: more than one draft model is to be colocated.
    """
    stored = _stored_sections(config)
    found = [(key, each) for key, each, _ in stored if isinstance(each, DraftModelConfig)]
    colocated = [field for field, section in found if section.placement == "colocated"]
    if len(colocated) > 1:
        field = colocated[1].replace("speculative_model", "placement")
        raise ConfigError.at(
            field,
            "one draft model at most can be colocated with the target; make this one 'separate'",
        )
    return found


def head_section(config: EngineConfig) -> HeadConfig | None:
    """Returns the section of the head that drafts in the target's workers; None if there is none.

    Raises:
        ConfigError: there are several.
        CheckpointError: its folder does not exist.
    """
    found = [section for section in head_sections(config) if section.placement == "colocated"]
    if len(found) > 1:
        raise ConfigError.at(
            "speculative_config.members",
            "one head at most can draft inside the target's workers, "
            f"these are {len(found)}; give the others `placement: separate`",
        )
    return found[0] if found else None


def head_sections(config: EngineConfig) -> list[HeadConfig]:
    """Returns the sections of all heads, colocated or separate; raises as `named_heads`."""
    return [section for _, section in named_heads(config)]


def named_heads(config: EngineConfig) -> list[tuple[str, HeadConfig]]:
    """Returns the sections of all heads and the keys that name their folders.

    Raises:
        CheckpointError: a folder does not exist.
    """
    stored = _stored_sections(config)
    found = [(key, each, folder) for key, each, folder in stored if isinstance(each, HeadConfig)]
    for field, section, folder in found:
        if not folder.is_dir():
            raise CheckpointError.at(field, f"{section.speculative_model!r} is not a folder")
    return [(field, section) for field, section, _ in found]


def checkpoint_folders(config: EngineConfig) -> list[tuple[str, Path]]:
    """Returns the keys and folders of target, draft models and heads."""
    folders = [(field, folder) for field, _, folder in _stored_sections(config)]
    return [("model", Path(config.model)), *folders]


def _stored_sections(
    config: EngineConfig,
) -> list[tuple[str, DraftModelConfig | HeadConfig, Path]]:
    """Returns the key, section and folder of every drafter with a checkpoint."""
    whole, found = config.speculative_config, list[tuple[str, Any, Path]]()
    for index, section in enumerate(whole.sections):
        place = "" if section is whole else f"members.{index}."
        field = f"speculative_config.{place}speculative_model"
        if isinstance(section, HeadConfig):
            found.append((field, section, section.folder_beside(config.model)))
        elif isinstance(section, DraftModelConfig) and section.drafter_group is None:
            found.append((field, section, Path(section.speculative_model)))
    return found


def draft_size(config: EngineConfig, section: DraftModelConfig) -> int:
    """Returns the tensor-parallel size of a section's draft model."""
    if section.placement == "colocated":
        return config.tensor_parallel_size
    return section.draft_tensor_parallel_size or 1


# The kind of a folder, by the names of its tensors.

_EMBEDDING, _FIRST_LAYER = re.compile("emb|wte"), re.compile(r"(^|\.)(layers|h|blocks?)\.0\.")
_PICKLES = ("*.bin", "*.pt", "*.pth")


def has_head_tensors(folder: Path) -> bool:
    """Returns True if there are tensors that only heads have; a whole model may have them too."""
    from ..drafters.registry import OF_HEADS
    from ..workers.model.checkpoint.hub import stored_names

    return any(map(OF_HEADS.match, stored_names(folder)))


def of_another_kind(config: EngineConfig) -> dict[str, CheckpointError]:
    """Returns errors by key: folders with a head where a model is expected, and vice versa.

    Only certain cases are reported; other weights are compared with the model in full later.
    """
    found: dict[str, CheckpointError] = {}
    if _holds_a_head(Path(config.model)):
        found["model"] = head_as_target(Path(config.model))
    for field, section, folder in _stored_sections(config):
        error = ""
        if isinstance(section, HeadConfig):
            error = _holds_no_head(config, section)
        elif _holds_a_head(folder):
            error = f"{section.speculative_model!r} is no model{HEAD_AS_DRAFT}"
        if error:
            found[field] = CheckpointError.at(field, error)
    return found


HEAD_AS_DRAFT = (
    "; these are the tensors of a head, which reads the target's hidden states and is no draft "
    "model: set the decoding_type of its method"
)


def head_as_target(folder: Path) -> CheckpointError:
    """Returns the error for a target whose folder holds a head."""
    return CheckpointError.at(
        "model",
        f"{str(folder)!r} holds the tensors of a head, which drafts for a target: name the target "
        "here, and this folder in speculative_config.speculative_model",
    )


def _holds_a_head(folder: Path) -> bool:
    """Returns True if a folder has a head's tensors but is not a whole model."""
    from ..drafters.registry import OF_HEADS
    from ..workers.model.checkpoint.hub import stored_names

    names = stored_names(folder)
    return not _is_whole(names) and any(map(OF_HEADS.match, names))


def _is_whole(names: set[str]) -> bool:
    """Returns True if the names include an embedding and a first layer, as in every model."""
    return any(map(_EMBEDDING.search, names)) and any(map(_FIRST_LAYER.search, names))


def _holds_no_head(config: EngineConfig, section: HeadConfig) -> str:
    """Returns why a folder holds no head of its section's kind; empty if it may hold one."""
    from ..drafters.registry import method_of
    from ..workers.model.checkpoint.hub import read_mapping, stored_names

    folder, pattern = section.folder_beside(config.model), method_of(section).tensors
    names = stored_names(folder)
    if pattern is None or not names or any(any(folder.glob(each)) for each in _PICKLES):
        return ""  # pickled weights are not inspected
    if any(re.search(pattern, name) for name in names):
        return ""
    kind = section.decoding_type  # type: ignore[attr-defined]
    error = f"{str(folder)!r} holds no tensor of a head of decoding_type {kind}"
    if not _is_whole(names) or folder == Path(config.model):
        return error
    with suppress(CheckpointError):
        named = read_mapping(folder / "config.json").get("architectures") or ["a model"]
        error += f"; it is a whole model, {named[0]}: name it as --draft-model"
    return error


# Sampling defaults and tokenizer.


def mapping_of(file: Path, field: str) -> dict[str, Any]:
    """Returns the content of one of a checkpoint's JSON files; empty if there is no such file.

    Raises:
        CheckpointError: it is not JSON, or not a mapping; the message names `field`.
    """
    from ..workers.model.checkpoint.hub import read_mapping

    try:
        return read_mapping(file)
    except CheckpointError as error:
        raise CheckpointError.at(field, error.message) from None


def sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Returns the sampling defaults of requests, from generation_config.json.

    `generation_config: auto` reads the model's folder, and `vllm` reads nothing; any other value is
    a folder.

    Raises:
        ConfigError: the file of a given folder is missing, or a value is out of range.
    """
    source = config.generation_config
    if source == "vllm":
        return {}
    folder = Path(config.model if source == "auto" else source)
    file = folder if folder.is_file() else folder / "generation_config.json"
    if source != "auto" and not file.is_file():
        raise ConfigError.at("generation_config", f"there is no file {str(file)!r}")
    stored = mapping_of(file, "generation_config")
    found = {name: stored[name] for name in _FIELDS if stored.get(name) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise ConfigError.at("generation_config", f"{str(file)!r}: {error.message}") from None
    return found


def load_tokenizer(config: EngineConfig) -> Any:
    """Loads the tokenizer of a configuration.

    Raises:
        CheckpointError: it cannot be loaded from local files.
    """
    from transformers import AutoTokenizer

    path = config.tokenizer or config.model
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        check_tokenizer_files(Path(path))
        why = reason(error, path)
        if why.endswith(":") or " one of: " in why:  # transformers lists all the ways that failed
            why = _NO_TOKENIZER
        raise CheckpointError.at("tokenizer", f"none can be loaded from {path!r}: {why}") from None


_NO_TOKENIZER = "it has no tokenizer.json, and no files that make one"
_TOKENIZERS = ("*token*.json", "*.model", "*.tiktoken", "*.txt", "vocab*", "*.bpe", "*.spm")


def _may_hold_a_tokenizer(folder: Path) -> bool:
    """Returns True if transformers may load a tokenizer from a folder without tokenizer.json.

    Without tokenizer_config.json, config.json names the tokenizer's class. Byte tokenizers have no
    files, but none of the models that tests compare uses one.
    """
    from ..workers.model.checkpoint.hub import read_mapping
    from ..workers.model.info import TESTED

    if not folder.is_dir() or (folder / "tokenizer_config.json").is_file():
        return True
    if not (folder / "config.json").is_file():
        return False
    if any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        return True
    settings = read_mapping(folder / "config.json")
    has_own = settings.get("tokenizer_class") or settings.get("auto_map")
    return bool(has_own) or settings.get("model_type") not in TESTED


def check_tokenizer_files(folder: Path) -> None:
    """Raises `CheckpointError` if a tokenizer is missing or its files are damaged."""
    from tokenizers import Tokenizer

    from ..workers.model.checkpoint.hub import unreadable

    if not folder.exists():
        raise CheckpointError.at("tokenizer", f"{str(folder)!r} does not exist")
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    mapping_of(file.parent / "tokenizer_config.json", "tokenizer")
    if not file.is_file():
        if not _may_hold_a_tokenizer(folder):
            raise CheckpointError.at(
                "tokenizer", f"none can be loaded from {str(folder)!r}: {_NO_TOKENIZER}"
            )
        return  # a tokenizer of another kind, which transformers reads
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001, it raises nothing narrower
        raise CheckpointError.at("tokenizer", unreadable(file, error)) from None


def check_adaptation(config: EngineConfig) -> None:
    """Raises `ConfigError` unless `online_adaptation` has one head to train and a folder."""
    from ..drafters.registry import METHODS

    section = config.online_adaptation
    if section is None:
        return
    heads = [each for each in config.speculative_config.sections if isinstance(each, HeadConfig)]
    if sum(METHODS[type(each)].continues for each in heads) != 1:
        kinds = ", ".join(
            name for each in heads for name in SECTIONS if SECTIONS[name] is type(each)
        )
        allowed = ", ".join(map(repr, continuing()))
        raise ConfigError.at(
            "online_adaptation",
            "it trains one head of speculative_config, whose decoding_type is one of "
            f"{allowed}; here are {kinds or 'no heads'}",
        )
    folder = Path(section.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError.at(
            "online_adaptation.folder", f"{section.folder!r} cannot be written: {error.strerror}"
        ) from None


def continuing() -> list[str]:
    """Returns the decoding types of heads that can be trained further."""
    from ..drafters.registry import METHODS

    return [name for name, section in SECTIONS.items() if METHODS[section].continues]


def draft_outline(config: EngineConfig) -> tuple[EngineConfig, int]:
    """Returns a draft model's settings without a target, with its folder, and its vocabulary size.

    Raises:
        ConfigError, CheckpointError: its files are damaged or hold a head; the message names the
            key.
    """
    from ..workers.model.info import outline

    config = resolved(config)
    if (error := of_another_kind(config).get("model")) is not None:
        raise error
    found = outline(Path(config.model), config.tensor_parallel_size, **trust(config))
    folder = str(Path(config.model).resolve())
    return config.model_copy(update={"model": folder}), found.vocab_size


def opened_adapters(config: EngineConfig) -> list[Adapter]:
    """Opens the target's LoRA adapters; raises `CheckpointError` if one cannot be served."""
    if not config.lora_modules:
        return []
    from ..workers.model.checkpoint.adapters import open_adapters

    modules = [(each.name, each.path) for each in config.lora_modules]
    return open_adapters(modules, config.max_lora_rank)
