"""Checks a configuration and its files before anything is deployed or started.

In the order in which they run: `require_checkpoints` looks for folders, `preflight` reads headers
and shapes of all files while Ray starts, and `check_models` is the engine's own look at what small
files show. No weight is read.
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
_KEYS_PER_TILE = 256  # of attention on a CPU


def require_checkpoints(config: EngineConfig) -> None:
    """Looks for the folders of `config`, and fetches those that are on the Hub.

    Raises:
        ConfigError, CheckpointError: one is missing or cut short, the target's is no checkpoint,
            or too many ranks or too long a context are asked of it; by field.
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
    """Raises `CheckpointError` where a drafter's folder is missing or cut short, by field."""
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
    """What small files show of requests that a command is to run, before anything is loaded.

    Raises:
        InvalidRequestError: a prompt has no token, or max_tokens leave no room for one.
    """
    from ..workers.model.info import stated_context

    config = resolved(config)
    limit = config.max_model_len or stated_context(Path(config.model))
    if limit is not None and max_tokens >= limit:
        raise InvalidRequestError.at(
            "max_tokens",
            f"{max_tokens} with a prompt exceed this model's context of {limit} tokens",
        )
    if "" in prompts and not load_tokenizer(config).encode(""):  # of some it has a first token
        raise InvalidRequestError.at("prompt", "it is empty; at least one token")


def added_adapter(config: EngineConfig, name: str, path: str) -> str:
    """The folder of an adapter that is new; raises `CheckpointError` where it is none."""
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
    """What `preflight` checks first: whatever takes no time, and imports neither torch nor models.

    Returns:
        Keys whose folders are of another kind, so that nothing more is to be found in them.

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
    if is_local and not in_full:  # which builds them as well
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
    """Checks the checkpoints; returns what their configurations contain.

    Args:
        is_local: whether the workers will run on this machine, so that its devices, its memory and
            its Python modules decide; None: only if the executor is `local`.
        in_full: renders the checkpoint's own chat template too, and builds drafters without a model
            as the engine will: a large table takes time, and a user's code may occupy a resource
            that the engine's process needs. They are shut down again.
        errors: takes every error, so that the checks go on; None: the first is raised.

    Raises:
        ConfigError, CheckpointError: model or draft model missing, vocabularies that differ, a
            size that does not divide, weights that are damaged or do not fit their configuration, a
            KV cache that is too small or too large, a head that does not fit, no tokenizer, a
            drafter's table or snapshot that is damaged or another vocabulary's, a drafter that
            cannot be imported or built or lacks a method; names the field.
    """
    from ..workers.model.info import FIELD, STAGES_FIELD, outline, stage_layers

    config = resolved(config)
    size, path = config.tensor_parallel_size, Path(config.model)
    is_local = config.executor == "local" if is_local is None else is_local
    findings = _Findings(errors)
    findings.of(seconds_to_measure)  # the environment's, which a start reads
    mistaken = check_files(config, is_local=is_local, in_full=in_full, errors=errors)
    if "model" in mistaken:
        return {}
    target = findings.of(outline, path, size, **trust(config))
    if target is None:  # go on with what does not depend on the number of ranks
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
    """Compares all weights' names and shapes with the models; what these contain.

    Args:
        mistaken: keys whose folders are of another kind.
    """
    from ..workers.devices import pick_device
    from ..workers.model.fit import CPU
    from ..workers.ops import prompt_library

    # None: other machines'.
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
    """What a rank of the target is, and the bytes of a token's KV cache.

    Raises:
        CheckpointError: its files are damaged, or those of a head.
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
    """What the facts of a draft model begin with: of a composition, its member."""
    return field.removeprefix("speculative_config.").removesuffix("speculative_model")


def _check_adapters(config: EngineConfig, serving: Serving) -> dict[str, Any]:
    """What the LoRA adapters are and take, for people; raises where one does not fit."""
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
    """The errors of checks; None: the first is raised."""

    def __init__(self, errors: list[ConfigError] | None) -> None:
        self._errors = errors

    def of(
        self, check: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result | None:
        """What a check returns; None: it has found an error."""
        try:
            return check(*args, **options)
        except ConfigError as error:
            self.add(error)
            return None

    def add(self, error: ConfigError) -> None:
        """Keeps an error, unless another check has found the same."""
        if self._errors is None:
            raise error
        reason = error.message.removeprefix(f"{error.field}: ")
        if not any(e.field == error.field and e.message.endswith(reason) for e in self._errors):
            self._errors.append(error)


def check_models(config: EngineConfig) -> int:
    """Checks what the checkpoints' small files show; the target's vocabulary size.

    An engine that follows one with the same configuration skips this: reading the files imports
    transformers, which takes a second.

    Raises:
        ConfigError, CheckpointError: what does not fit, by field.
    """
    from ..workers.model.info import outline, stage_layers

    check_adaptation(config)
    target = outline(Path(config.model), config.tensor_parallel_size, **trust(config))
    check_quantization(config)
    if "torch" in sys.modules:  # else the ranks, which load it, say what is wrong with an adapter
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
        ConfigError: the target is not quantised as `quantization` requires.
        CheckpointError: it is quantised in a format that is not read.
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
    import torch  # a process without a quantised target need not have it

    from ..workers.devices import dtype_of
    from ..workers.model.fit import keeps_on_cpu

    # Whether the target's ranks have kernels for quantised weights, as far as is known here.
    keeps = found.is_kept and config.forward != "bridge" and config.keep_quantised == "auto"
    if keeps and config.device != "cuda" and not torch.cuda.is_available():
        keeps = keeps_on_cpu(Path(config.model), dtype_of(config.dtype), **trust(config))
    wide = "are dequantised at load and take the memory of an unquantised model"
    level, fate = (logging.INFO, "stay so in memory") if keeps else (logging.WARNING, wide)
    log.log(level, "%s is quantised (%s): its weights %s", config.model, found.description, fate)


def _check_overrides(config: EngineConfig) -> None:
    """Refuses overrides that leave a checkpoint text alone, and drafters where it gives none."""
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
    """Raises `ConfigError` for a length or a token that is beyond the target's."""
    from ..workers.model.info import check_length

    if config.max_model_len is not None:
        check_length(config.max_model_len, target.max_model_len)
    check_thinking_tokens(config, target.vocab_size)


def check_thinking_tokens(config: EngineConfig, vocab_size: int) -> None:
    """Raises `ConfigError` where the rule needs tokens that the target does not have."""
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
    """Raises `ConfigError` where a deterministic engine cannot verify trees."""
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
    """Raises `ConfigError` where the KV cache does not hold the longest sequence."""
    if num_blocks * block_size < max_model_len:
        raise ConfigError.at(
            "num_kv_blocks",
            f"{num_blocks} blocks of {block_size} tokens hold less than max_model_len "
            f"({max_model_len})",
        )


def _check_cache(config: EngineConfig, kv_bytes: int | None, device: torch.device | None) -> None:
    """Raises `ConfigError` where the KV cache is too large for `device`."""
    import torch

    from ..workers.model.fit import check_blocks

    blocks, block_size = config.num_kv_blocks, config.block_size
    if device is None or blocks is None or kv_bytes is None:
        return
    ranks = config.num_ranks
    share = ranks if device.type == "cpu" else -(-ranks // torch.cuda.device_count())
    check_blocks(blocks, block_size, kv_bytes, device, share)


def _check_frontend(config: EngineConfig, target: ModelOutline, *, renders: bool) -> None:
    """Loads tokenizer and chat template.

    Raises `ConfigError` where they cannot be, or where a template that was given, or `renders`,
    does not take one user message.
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
    """A draft model's tokens in the place of the target's; None: they are the same.

    Args:
        vocab_size: of the target.

    Raises:
        ConfigError, CheckpointError: it cannot draft for the target, or is not there.
    """
    return _check_vocabulary(config, section, "speculative_config.speculative_model", vocab_size)


def _check_vocabulary(
    config: EngineConfig, section: DraftModelConfig, field: str, vocab_size: int
) -> Translation | None:
    """As `translation_of`, of a section whose model `field` names."""
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
    """As `translation_of`, of the draft model in `folder` of a section's drafter group.

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
    """As `translation_of`; raises where a draft model's ids are others, and are not translated.

    Args:
        name: of the draft model, in a message.
        folder: its files, which need not be on this node.
        sizes: of the target's vocabulary and of its own.
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
    """The vocabulary of a folder's `tokenizer.json`; None if there is no such file."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    return vocabulary.read(file) if file.is_file() else None


def _check_draft(config: EngineConfig, section: DraftModelConfig, field: str) -> ModelInfo:
    """What a rank of a draft model is.

    Raises:
        CheckpointError: its files are damaged, or those of a head; names `field`.
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
    """Whether the heads fit the target; their folders and placements."""
    head_section(config)  # one at most in the target's workers
    facts: dict[str, str] = {}
    for index, (field, head) in enumerate(named_heads(config)):
        if field in mistaken:
            continue
        folder = str(head.folder_beside(config.model))
        _check_head(config, head, folder, target)
        facts[f"head {index + 1}" if index else "head"] = f"{folder} ({head.placement})"
    return facts


def _check_head(config: EngineConfig, head: HeadConfig, folder: str, target: ModelInfo) -> None:
    """Raises `CheckpointError` or `ConfigError` where the head in `folder` does not fit."""
    from ..drafters.registry import check_head

    placed = head.model_copy(update={"speculative_model": folder})
    check_head(placed, head_facts(config, target))


def check_drafter(
    config: EngineConfig, section: DraftModelConfig | HeadConfig, folder: str
) -> None:
    """Whether a drafter in workers of its own can draft with the weights in `folder`.

    Raises:
        CheckpointError, ConfigError: it cannot; names `drafter`.
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
    """What small files show of drafters that join a target which is served; imports no torch.

    Raises:
        ConfigError, CheckpointError: the target generates no text, a folder is missing or cut
            short, a vocabulary is another's, a table or a user's drafter cannot be used; by field.
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
    """Reads the files that drafters start from, and `builds` those without a model.

    Returns the import paths of users' drafters by their names.
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
