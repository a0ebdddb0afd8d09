"""Checks a configuration and its files before anything is deployed or started.

There are three stages, in this order. `require_checkpoints` looks for folders. `preflight` reads
the headers and shapes of all files while Ray starts. `check_models` checks small files again when
the engine starts. Weights are never read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ..config import DraftModelConfig, EngineConfig, HeadConfig, NoSpeculation
from ..config.section import seconds_to_measure
from ..drafters import vocabulary
from ..drafters.vocabulary import Translation
from ..errors import CheckpointError, ConfigError, InvalidRequestError, OutriderError
from .chat.template import check_stored_template, read_template
from .checkpoints import (
    HEAD_AS_DRAFT,
    check_adaptation,
    check_tokenizer_files,
    checkpoint_folders,
    draft_sections,
    draft_size,
    has_head_tensors,
    head_as_target,
    head_section,
    load_tokenizer,
    mapping_of,
    named_heads,
    of_another_kind,
    opened_adapters,
    resolved,
    trust,
)
from .estimate import at_most, head_facts, serving_on, target_facts

if TYPE_CHECKING:
    import torch

    from ..workers.model.fit import Serving
    from ..workers.model.info import ModelInfo, ModelOutline

log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_KEYS_PER_TILE = 256  # tile of attention on a CPU


def require_checkpoints(config: EngineConfig) -> None:
    """Checks that the folders of `config` exist; downloads those that are on the Hub.

    Raises:
        ConfigError, CheckpointError: a folder is missing or incomplete, the target's is no
            checkpoint, or the model has too few heads or layers for the ranks or too short a
            context; the message names the field.
    """
    from ..workers.model.checkpoint.hub import check_whole, require_checkpoint
    from ..workers.model.info import check_numbers

    config = resolved(config)
    check_whole(require_checkpoint(Path(config.model), allow_pickle=config.allow_pickle))
    _require_drafters(config)
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        raise ConfigError.at("tokenizer", f"{config.tokenizer!r} does not exist")
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    check_numbers(Path(config.model), *sizes, config.max_model_len)
    opened_adapters(config)


def _require_drafters(config: EngineConfig) -> None:
    """Raises `CheckpointError` if a drafter's folder is missing or incomplete; names the field."""
    from ..workers.model.checkpoint.hub import check_whole

    for field, section in draft_sections(config):
        if not Path(section.speculative_model).exists():
            raise CheckpointError.at(
                field, f"model path {section.speculative_model!r} does not exist"
            )
        check_whole(Path(section.speculative_model), field)
    for field, head in named_heads(config):
        check_whole(head.folder_beside(config.model), field)


def check_request(config: EngineConfig, prompts: Sequence[str], max_tokens: int) -> None:
    """Checks the requests of a command using small files only, before anything is loaded.

    Raises:
        InvalidRequestError: a prompt has no token, or `max_tokens` leaves no room for one.
    """
    from ..workers.model.info import stated_context

    config = resolved(config)
    limit = config.max_model_len or stated_context(Path(config.model))
    if limit is not None and max_tokens >= limit:
        raise InvalidRequestError.at(
            "max_tokens",
            f"{max_tokens} with a prompt exceed this model's context of {limit} tokens",
        )
    if "" in prompts and not load_tokenizer(config).encode(""):  # some tokenizers add a first token
        raise InvalidRequestError.at("prompt", "it is empty; at least one token")


def added_adapter(config: EngineConfig, name: str, path: str) -> str:
    """Returns the folder of a new adapter; raises `CheckpointError` if it does not hold one."""
    from ..workers.model.checkpoint.adapters import open_adapters
    from ..workers.model.checkpoint.hub import local_folder

    folder = str(Path(local_folder(path, "lora_request")).resolve())
    open_adapters([(name, folder)], config.max_lora_rank)
    return folder


def check_files(
    config: EngineConfig,
    *,
    is_local: bool,
    in_full: bool = False,
    errors: list[ConfigError] | None = None,
) -> Set[str]:
    """Runs the fast checks of `preflight`, which import neither torch nor models.

    Returns:
        Keys whose folders hold another kind of model; further checks skip them.

    Raises:
        ConfigError, CheckpointError: as `preflight`.
    """
    from ..workers.devices import require_cuda
    from ..workers.model.checkpoint.hub import INDEX_NAME

    findings = _Findings(errors)
    if config.num_kv_blocks is not None:
        room = config.num_kv_blocks, config.block_size, config.max_model_len or 0
        findings.of(check_room, *room)
    findings.of(check_adaptation, config)
    mistaken = of_another_kind(config)
    for error in mistaken.values():
        findings.add(error)
    findings.of(read_template, config.chat_template)
    tokenizer = Path(config.tokenizer or config.model)
    if config.tokenizer is not None or ("model" not in mistaken and tokenizer.exists()):
        findings.of(check_tokenizer_files, tokenizer)
    if config.chat_template is None and (config.tokenizer is not None or "model" not in mistaken):
        findings.of(check_stored_template, tokenizer)
    for field, folder in checkpoint_folders(config):
        for name in ("config.json", "generation_config.json", INDEX_NAME):
            findings.of(mapping_of, folder / name, field)
    if "model" not in mistaken:
        findings.of(_check_overrides, config)
    if is_local and not in_full:  # otherwise `preflight` builds them
        findings.of(_import_drafters, config)
    if is_local and config.device == "cuda":
        findings.of(require_cuda)
    return mistaken.keys()


def preflight(
    config: EngineConfig,
    *,
    is_local: bool | None = None,
    in_full: bool = False,
    errors: list[ConfigError] | None = None,
) -> dict[str, Any]:
    """Checks the checkpoints; returns facts from their configurations.

    Args:
        is_local: whether the workers will run on this machine, so that its devices, memory and
            Python modules are checked; None: only if the executor is `local`.
        in_full: also renders the checkpoint's own chat template, and builds drafters without a
            model as the engine will. This may be slow (large tables), and a user's code may occupy
            a resource that the engine needs. The drafters are shut down again.
        errors: collects all errors; None: the first error is raised.

    Raises:
        ConfigError, CheckpointError: a model is missing, vocabularies differ, a size does not
            divide, weights are damaged or do not match their configuration, the KV cache is too
            small or too large, a head does not fit, the tokenizer is missing, a drafter's table or
            snapshot is damaged or has another vocabulary, or a user's drafter cannot be imported or
            built or lacks a method; the message names the field.
    """
    from ..workers.model.info import FIELD, STAGES_FIELD, outline, stage_layers

    config = resolved(config)
    size, path = config.tensor_parallel_size, Path(config.model)
    is_local = config.executor == "local" if is_local is None else is_local
    findings = _Findings(errors)
    findings.of(seconds_to_measure)  # the environment variable that the start reads
    mistaken = check_files(config, is_local=is_local, in_full=in_full, errors=errors)
    if "model" in mistaken:
        return {}
    target = findings.of(outline, path, size, **trust(config))
    if target is None:  # continue with checks that do not depend on the number of ranks
        with suppress(ConfigError):
            target = outline(path, **trust(config))
            config = config.model_copy(update={FIELD: 1})
    if target is None:
        return {}
    findings.of(stage_layers, target.num_layers, config.pipeline_parallel_size)
    if config.pipeline_parallel_size > target.num_layers:
        config = config.model_copy(update={STAGES_FIELD: 1})
    findings.of(_check_limits, config, target)
    findings.of(_check_frontend, config, target, renders=in_full)
    found: dict[str, Any] = {}
    for field, section in draft_sections(config):
        if field not in mistaken:
            other = findings.of(_check_vocabulary, config, section, field, target.vocab_size)
            found |= {} if other is None else {f"{_label(field)}draft vocabulary": str(other)}
    found |= findings.of(_check_drafters, config, target.vocab_size, builds=in_full) or {}
    return _check_models(config, mistaken, findings, is_local=is_local) | found


def _check_models(
    config: EngineConfig, mistaken: Set[str], findings: _Findings, *, is_local: bool
) -> dict[str, Any]:
    """Compares names and shapes of all weights with the models; returns facts about them.

    Args:
        mistaken: keys whose folders hold another kind of model.
    """
    from ..workers.devices import pick_device
    from ..workers.model.fit import CPU
    from ..workers.ops import prompt_library

    # None if the workers run on other machines.
    device = findings.of(pick_device, config.device) if is_local else None
    if device is not None:
        findings.of(prompt_library, config.prompt_attention, device, None)
    serving = serving_on(config, device or CPU, config.kv_cache_dtype)
    target, kv_bytes = findings.of(_check_target, config, serving) or (None, None)
    facts: dict[str, Any] = {}
    if target is not None:
        facts = target_facts(config, target, serving, device, kv_bytes)
        findings.of(_check_cache, config, kv_bytes, device)
        facts |= findings.of(_check_adapters, config, serving) or {}
    for field, section in draft_sections(config):
        draft = None if field in mistaken else findings.of(_check_draft, config, section, field)
        if draft is not None:
            label = _label(field)
            facts[f"{label}draft model"] = section.speculative_model
            facts[f"{label}draft architecture"] = draft.architecture
            facts[f"{label}draft ranks"] = f"{draft_size(config, section)} ({section.placement})"
    if target is not None:
        facts |= findings.of(_check_heads, config, target, mistaken) or {}
    return facts


def _check_target(config: EngineConfig, serving: Serving) -> tuple[ModelInfo, int | None]:
    """Returns the model on a rank of the target, and the KV bytes per token.

    Raises:
        CheckpointError: its files are damaged, or hold a head.
    """
    from ..workers.model.fit import check_weights

    folder, stages = Path(config.model), config.pipeline_parallel_size
    try:
        size = config.tensor_parallel_size
        return check_weights(folder, size, serving, stages, **trust(config))
    except CheckpointError as error:
        if error.field == "model" and has_head_tensors(folder):
            raise head_as_target(folder) from None
        raise


def _label(field: str) -> str:
    """Returns the prefix of a draft model's facts: its member in a composition."""
    return field.removeprefix("speculative_config.").removesuffix("speculative_model")


def _check_adapters(config: EngineConfig, serving: Serving) -> dict[str, Any]:
    """Describes the LoRA adapters and their memory; raises if one does not fit."""
    from ..workers.model.fit import check_adapters

    adapters = opened_adapters(config)
    if not adapters:
        return {}
    path, size = Path(config.model), config.tensor_parallel_size
    stages = config.pipeline_parallel_size
    held = check_adapters(path, size, adapters, serving, stages, **trust(config))
    named = ", ".join(f"{each.name} (rank {each.config.max_rank})" for each in adapters)
    return {"adapters": named, "adapters per rank": f"{at_most(config)}{held:,} bytes"}


class _Findings:
    """Collects the errors of checks; if `errors` is None, raises the first."""

    def __init__(self, errors: list[ConfigError] | None) -> None:
        self._errors = errors

    def of(
        self, check: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result | None:
        """Returns the check's result; None if it found an error."""
        try:
            return check(*args, **options)
        except ConfigError as error:
            self.add(error)
            return None

    def add(self, error: ConfigError) -> None:
        """Adds an error, unless another check has found the same one."""
        if self._errors is None:
            raise error
        reason = error.message.removeprefix(f"{error.field}: ")
        if not any(e.field == error.field and e.message.endswith(reason) for e in self._errors):
            self._errors.append(error)


def check_models(config: EngineConfig) -> int:
    """Checks what small files of the checkpoints contain; returns the target's vocabulary size.

    An engine that replaces one with the same configuration skips these checks, because they import
    transformers, which takes a second.

    Raises:
        ConfigError, CheckpointError: something does not fit; the message names the field.
    """
    from ..workers.model.info import outline, stage_layers

    check_adaptation(config)
    target = outline(Path(config.model), config.tensor_parallel_size, **trust(config))
    check_quantization(config)
    if "torch" in sys.modules:  # otherwise the ranks, which load torch, check adapters
        opened_adapters(config)
    stage_layers(target.num_layers, config.pipeline_parallel_size)
    _check_limits(config, target)
    _check_overrides(config)
    for field, section in draft_sections(config):
        _check_vocabulary(config, section, field, target.vocab_size)
    return target.vocab_size


def check_quantization(config: EngineConfig) -> None:
    """Logs whether weights are dequantised at load.

    Raises:
        ConfigError: the target's quantisation differs from `quantization`.
        CheckpointError: the format of quantisation is not supported.
    """
    from ..workers.model.checkpoint.quantised_formats import find_format

    found = find_format(Path(config.model))
    method, wanted = ("none" if found is None else found.method), config.quantization
    if wanted not in ("auto", method):
        raise ConfigError.at(
            "quantization",
            f"{wanted!r}, but the checkpoint {config.model!r} has {method!r}; "
            "allowed for it: 'auto' and its own",
        )
    if found is None:
        return
    import torch  # only needed for quantised targets

    from ..workers.devices import dtype_of
    from ..workers.model.fit import keeps_on_cpu

    # Best guess whether the target's ranks have kernels for quantised weights.
    keeps = found.is_kept and config.forward != "bridge" and config.keep_quantised == "auto"
    if keeps and config.device != "cuda" and not torch.cuda.is_available():
        keeps = keeps_on_cpu(Path(config.model), dtype_of(config.dtype), **trust(config))
    wide = "are dequantised at load and take the memory of an unquantised model"
    level, fate = (logging.INFO, "stay so in memory") if keeps else (logging.WARNING, wide)
    log.log(level, "%s is quantised (%s): its weights %s", config.model, found.description, fate)


def _check_overrides(config: EngineConfig) -> None:
    """Rejects overrides without effect, and drafters of a model that generates no text."""
    from ..workers.model.checkpoint.pooling import read_pooling

    overrides, section = config.hf_overrides.given(), config.speculative_config
    if not overrides and isinstance(section, NoSpeculation):
        return
    pooling = read_pooling(Path(config.model), overrides)
    if isinstance(pooling, str):
        if overrides:
            raise ConfigError.at("hf_overrides", f"{', '.join(overrides)}: {pooling}")
    elif not pooling.generates and not isinstance(section, NoSpeculation):
        raise ConfigError.at(
            "speculative_config",
            f"{section.decoding_type!r} has no text to draft: {config.model!r} has no output layer "
            "to generate text with; leave the section out",
        )


def _check_limits(config: EngineConfig, target: ModelOutline) -> None:
    """Raises `ConfigError` for a length or a token id beyond the target's."""
    from ..workers.model.info import check_length

    if config.max_model_len is not None:
        check_length(config.max_model_len, target.max_model_len)
    check_thinking_tokens(config, target.vocab_size)


def check_thinking_tokens(config: EngineConfig, vocab_size: int) -> None:
    """Raises `ConfigError` if the verification rule needs tokens that the target does not have."""
    section = config.speculative_config
    for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
        token = getattr(section, name)
        if section.thinking_tokens is not None and token >= vocab_size:
            raise ConfigError.at(
                f"speculative_config.{name}",
                f"{token} is outside the target's vocabulary of "
                f"{vocab_size} tokens; verification {section.verification!r} needs it",
            )


def check_trees(config: EngineConfig, operations: str) -> None:
    """Raises `ConfigError` if a deterministic engine cannot verify trees."""
    if not config.deterministic:
        return
    if not operations.startswith("cpu"):
        raise ConfigError.at(
            "deterministic",
            f"drafts must be chains on GPUs, and {config.speculative_config.decoding_type} "
            "proposes trees here; siblings change the order in which attention adds keys up",
        )
    if _KEYS_PER_TILE % config.block_size:
        raise ConfigError.at(
            "block_size",
            f"{config.block_size} does not divide {_KEYS_PER_TILE}, as `deterministic` with a "
            "drafter of trees needs; allowed: 1, 2, 4, ... 256",
        )


def check_room(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raises `ConfigError` if the KV cache cannot hold the longest sequence."""
    if num_blocks * block_size < max_model_len:
        raise ConfigError.at(
            "num_kv_blocks",
            f"{num_blocks} blocks of {block_size} tokens hold less than max_model_len "
            f"({max_model_len})",
        )


def _check_cache(config: EngineConfig, kv_bytes: int | None, device: torch.device | None) -> None:
    """Raises `ConfigError` if the KV cache is too large for `device`."""
    import torch

    from ..workers.model.fit import check_blocks

    blocks, block_size = config.num_kv_blocks, config.block_size
    if device is None or blocks is None or kv_bytes is None:
        return
    ranks = config.num_ranks
    share = ranks if device.type == "cpu" else -(-ranks // torch.cuda.device_count())
    check_blocks(blocks, block_size, kv_bytes, device, share)


def _check_frontend(config: EngineConfig, target: ModelOutline, *, renders: bool) -> None:
    """Loads the tokenizer and the chat template.

    Raises `ConfigError` if they cannot be loaded. A given template (with `renders`, also the
    checkpoint's own) must render a single user message.
    """
    from .frontend import Frontend

    if config.chat_template is None:
        check_stored_template(Path(config.tokenizer or config.model))
    frontend = Frontend(config, target)
    if not frontend.has_chat_template or not (renders or config.chat_template is not None):
        return
    try:
        frontend.chat_prompt([{"role": "user", "content": "Hello"}])
    except OutriderError as error:
        raise ConfigError.at(
            "chat_template", f"a conversation of one user message cannot be rendered: {error}"
        ) from None


def translation_of(
    config: EngineConfig, section: DraftModelConfig, vocab_size: int
) -> Translation | None:
    """Returns the mapping from a draft model's vocabulary to the target's; None if they match.

    Args:
        vocab_size: of the target.

    Raises:
        ConfigError, CheckpointError: the draft model cannot draft for the target, or is missing.
    """
    return _check_vocabulary(config, section, "speculative_config.speculative_model", vocab_size)


def _check_vocabulary(
    config: EngineConfig, section: DraftModelConfig, field: str, vocab_size: int
) -> Translation | None:
    """Like `translation_of`, for a section whose model the key `field` names."""
    from ..workers.model.info import outline

    draft = section.speculative_model
    try:
        info = outline(Path(draft), draft_size(config, section), **trust(config))
    except ConfigError as error:
        raise type(error).at(field, error.message) from None
    sizes = vocab_size, info.vocab_size
    return _compare_vocabularies(config, section, field, draft, draft, sizes)


def check_members(
    config: EngineConfig, section: DraftModelConfig, folder: str, their_size: int, vocab_size: int
) -> Translation | None:
    """Like `translation_of`, for the draft model in `folder` of a section's drafter group.

    Raises:
        ConfigError: it cannot draft for the target; names `speculative_config.drafter_group`.
    """
    field, sizes = "speculative_config.drafter_group", (vocab_size, their_size)
    name = f"the draft model of {section.drafter_group!r}"
    return _compare_vocabularies(config, section, field, name, folder, sizes)


def _compare_vocabularies(
    config: EngineConfig,
    section: DraftModelConfig,
    field: str,
    name: str,
    folder: str,
    sizes: tuple[int, int],
) -> Translation | None:
    """Like `translation_of`; raises if token ids differ and are not translated.

    Args:
        name: of the draft model, for messages.
        folder: its files, which may be missing on this node.
        sizes: vocabulary sizes of the target and of the draft model.
    """
    target, translates = config.model, section.use_heterogeneous_vocab
    hint = ", or have it translated (use_heterogeneous_vocab: true)" if section.translates else ""
    if sizes[0] != sizes[1] and not translates:
        raise ConfigError.at(
            field,
            f"{name} has a vocabulary of {sizes[1]} tokens, the target "
            f"{target} one of {sizes[0]}; a drafter must share the target's{hint}",
        )
    tokenizers = Path(config.tokenizer or target), Path(folder)
    try:
        theirs = _vocabulary(tokenizers[1])
    except ConfigError as error:
        raise type(error).at(field, error.message) from None
    ours = _vocabulary(tokenizers[0])
    if theirs is None or ours is None:
        if not translates:
            return None
        lacking = tokenizers[0 if ours is None else 1]
        raise ConfigError.at(
            field,
            f"use_heterogeneous_vocab compares the texts of tokens, and {str(lacking)!r} has no "
            f"tokenizer.json{'' if lacking.exists() else ' on this node'}",
        )
    differing = vocabulary.differing(ours, theirs)
    if not differing and sizes[0] == sizes[1]:
        return None
    if translates:
        try:
            found = vocabulary.translation(*tokenizers, sizes)
        except ConfigError as error:
            raise type(error).at(field, error.message) from None
        if not found.num_shared:
            raise ConfigError.at(field, f"{name} has no token in common with the target {target}")
        return found
    first = differing[0]
    raise ConfigError.at(
        field,
        f"{folder} has another tokenizer than the target {target}: "
        f"{len(differing)} of {len(ours.tokens)} tokens differ, the first is {first}: "
        f"{theirs.tokens.get(first)!r}, not {ours.tokens.get(first)!r}; "
        f"a drafter must share the target's{hint}",
    )


def _vocabulary(tokenizer: Path) -> vocabulary.Vocabulary | None:
    """Reads the vocabulary of a folder's `tokenizer.json`; None if there is no such file."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    return vocabulary.read(file) if file.is_file() else None


def _check_draft(config: EngineConfig, section: DraftModelConfig, field: str) -> ModelInfo:
    """Returns the model on a rank of a draft model.

    Raises:
        CheckpointError: its files are damaged, or hold a head; the message names `field`.
    """
    from ..workers.model.fit import check_weights, refuse_recurrent
    from ..workers.model.info import read_config

    folder = Path(section.speculative_model)
    try:
        model = read_config(folder, trust_remote_code=config.trust_remote_code)
        refuse_recurrent(model, "a draft model")
        return check_weights(folder, draft_size(config, section), **trust(config))[0]
    except CheckpointError as error:
        hint = HEAD_AS_DRAFT if has_head_tensors(folder) else ""
        raise CheckpointError.at(field, f"{error.message}{hint}") from None


def _check_heads(config: EngineConfig, target: ModelInfo, mistaken: Set[str]) -> dict[str, str]:
    """Checks that the heads fit the target; returns their folders and placements."""
    head_section(config)  # raises if several are colocated
    facts: dict[str, str] = {}
    for index, (field, head) in enumerate(named_heads(config)):
        if field in mistaken:
            continue
        folder = str(head.folder_beside(config.model))
        _check_head(config, head, folder, target)
        facts[f"head {index + 1}" if index else "head"] = f"{folder} ({head.placement})"
    return facts


def _check_head(config: EngineConfig, head: HeadConfig, folder: str, target: ModelInfo) -> None:
    """Raises `CheckpointError` or `ConfigError` if the head in `folder` does not fit."""
    from ..drafters.registry import check_head

    placed = head.model_copy(update={"speculative_model": folder})
    check_head(placed, head_facts(config, target))


def check_drafter(
    config: EngineConfig, section: DraftModelConfig | HeadConfig, folder: str
) -> None:
    """Checks that a drafter with its own workers can draft with the weights in `folder`.

    Raises:
        CheckpointError, ConfigError: it cannot; the message names `drafter`.
    """
    from ..workers.model.fit import ServedModel
    from ..workers.model.info import describe

    try:
        if isinstance(section, DraftModelConfig):
            served = ServedModel.of(
                Path(section.speculative_model), trust_remote_code=config.trust_remote_code
            )
            served.check(Path(folder), draft_size(config, section), **trust(config))
            return
        target = describe(Path(config.model), **trust(config))
        _check_head(config, section, folder, target)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError.at("drafter", error.message) from None


def check_new_drafters(config: EngineConfig, vocab_size: int) -> None:
    """Checks drafters that join a running target, from small files only; does not import torch.

    Raises:
        ConfigError, CheckpointError: the target generates no text, a folder is missing or
            incomplete, a vocabulary differs, or a table or a user's drafter cannot be used; the
            message names the field.
    """
    _check_overrides(config)
    _require_drafters(config)
    for field, section in draft_sections(config):
        _check_vocabulary(config, section, field, vocab_size)
    head_section(config)
    _import_drafters(config)
    _check_drafters(config, vocab_size, builds=False)


def _import_drafters(config: EngineConfig) -> None:
    """Imports users' drafters, without building them."""
    from ..drafters.registry import method_of

    for section in config.speculative_config.sections:
        if (check := method_of(section).check_code) is not None:
            check(section)


def _check_drafters(config: EngineConfig, vocab_size: int, *, builds: bool) -> dict[str, str]:
    """Checks the files that drafters start from; if `builds`, builds drafters without a model.

    Returns the import paths of users' drafters by name.
    """
    from ..drafters.registry import method_of

    tokenizer = Path(config.tokenizer or config.model)
    facts: dict[str, str] = {}
    for section in config.speculative_config.sections:
        method = method_of(section)
        if method.check_files is not None:
            method.check_files(section, tokenizer, vocab_size)
        if builds and method.probe is not None:
            found = method.probe(section, tokenizer, vocab_size)
            facts |= {f"drafter {name!r}": path for path, name in found.items()}
    return facts
