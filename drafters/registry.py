"""The `Method` records of all drafters, looked up by configuration section.

The rest of the system uses a drafter only through its record, and this file is the only list of
them. Training methods are registered by section in `training/options.py`, since `training/` is
above this layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .. import config as sections
from ..config.files import check_writable
from ..config.heads import Choice
from ..config.speculation import LlamaMapConfig
from ..scheduler.types import Request
from . import vocabulary
from .compose import Compose, Member
from .draft_target import PARD, DraftTarget
from .head_drafters import Colocated, SeparateHead
from .lookahead import Lookahead
from .lookup import corpus, ngram_file
from .lookup.base import LookupDrafter, Memory
from .lookup.ngram import ngram, prompt_lookup
from .lookup.ngram_map import MapK4VMemory, MapKMemory, SimpleMemory
from .lookup.pool import PoolStore
from .members import Members
from .protocol import Drafter, DraftFault, DraftHost, DraftModel, DraftWait, NoDrafter
from .speculation_cache import SpeculationCache
from .user import User, find
from .vocabulary import mask_candidates, mask_token

if TYPE_CHECKING:
    from .heads.protocol import Head, TargetFacts


Section = TypeVar("Section", bound=sections.SpeculationBase)


@dataclass(frozen=True, slots=True)
class Variant:
    """A key of a section that checkpoints describe inconsistently, and the values to try."""

    key: str
    values: tuple[Any, ...]


# Arguments: target layers whose inputs the head reads, in its order; number of target layers;
# rotary base of the target, None if it has none.
Variants = Callable[[Sequence[int], int, "float | None"], "list[Variant]"]


@dataclass(frozen=True, slots=True)
class Method(Generic[Section]):
    """How one drafter is built, loaded, checked and calibrated.

    Args:
        section: its configuration section.
        build: returns the drafter that the engine's thread calls.
        check_files: raises `ConfigError` if a file that the drafter starts from cannot be used.
            Arguments: section, folder of the target's tokenizer, size of its vocabulary.
        check_code: raises `ConfigError` if a user's code cannot be imported.
        probe: builds the drafter and shuts it down, with the arguments of `check_files`; returns
            the name of a user's drafter by its import path.
        load_head: heads only: returns the loaded head.
        check_head: heads only: raises as `load_head` does, without reading weights.
        variants: heads only: values that calibration tries, since published checkpoints disagree.
        mask_tokens: drafters with masks only: tokens that calibration tries as the mask, by the
            checkpoint's folder.
        tensors: heads only: a pattern that the name of at least one of their tensors contains.
        tree_key: heads with static trees only: the key of `section` that holds the tree's paths.
        continues: heads only: whether training can go on with a checkpoint.
    """

    section: type[Section]
    build: Callable[[Section, DraftHost], Drafter]
    check_files: Callable[[Section, Path, int], object] | None = None
    check_code: Callable[[Section], object] | None = None
    probe: Callable[[Section, Path, int], dict[str, str]] | None = None
    load_head: Callable[[Section, TargetFacts], Head] | None = None
    check_head: Callable[[Section, TargetFacts], object] | None = None
    variants: Variants | None = None
    mask_tokens: Callable[[Path], tuple[int, ...]] | None = None
    tensors: str | None = None
    tree_key: str | None = None
    continues: bool = False

    def with_tree(self, section: Section, choices: tuple[Choice, ...]) -> Section | None:
        """Returns `section` with a static tree that replaces its chain or dynamic tree.

        Returns:
            The new section; None if the drafter has no static trees, or for an empty tree.
        """
        if self.tree_key is None or not choices:
            return None
        given = section.model_dump(exclude_defaults=True)
        for other in ("max_draft_len", *_DYNAMIC_TREE_KEYS, *_RANK_KEYS):
            given.pop(other, None)
        widest = max(max(path) for path in choices) + 1
        ranks = {name: widest for name in _RANK_KEYS if name in type(section).model_fields}
        return type(section).model_validate({**given, self.tree_key: choices, **ranks})


_RANK_KEYS = ("top_k",)  # keys that bound the ranks of a tree
_DYNAMIC_TREE_KEYS = (
    *("use_dynamic_tree", "dynamic_tree_max_topK"),
    *("max_total_draft_tokens", "shape"),
)


# Readings of a head's checkpoint that calibration tries: published configurations contradict one
# another on these points, and a wrong reading shows only as low acceptance. They are which layers
# are captured (ids name inputs in some files, outputs in others), the rotary base (trainers ignore
# the target's), the layout of rotary pairs, whether the residual is normed, and which output is the
# next feature.
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)


def eagle_variants(
    capture: Sequence[int],  # target layers whose inputs the head reads, in its order
    num_layers: int,  # of the target
    target_theta: float | None,
) -> list[Variant]:
    """Returns variants of EAGLE heads; fewer for EAGLE-1, which captures only the last state."""
    found = _rope_variants(target_theta)
    if tuple(capture) == (num_layers,):
        return found
    inside = _shifted(capture, num_layers - 1)
    captured = [Variant("eagle3_layers_to_capture", inside)] if inside else []
    return [
        *captured,
        *found,
        Variant("norm_before_residual", (False, True)),
        Variant("recycle", ("pre_norm", "post_norm")),
    ]


def block_variants(
    capture: Sequence[int], num_layers: int, target_theta: float | None
) -> list[Variant]:
    """Returns variants of block drafters."""
    return [
        Variant("target_layer_ids", _shifted(capture, num_layers)),
        Variant("causal", (False, True)),
        Variant("sample_from_anchor", (False, True)),
        Variant("output_layer", ("own", "target")),
        *_rope_variants(target_theta),
    ]


def _rope_variants(target_theta: float | None) -> list[Variant]:
    thetas = sorted({*_THETAS, *([target_theta] if target_theta else [])})
    return [Variant("rope_theta", tuple(thetas)), Variant("rope_layout", ("half", "interleaved"))]


def _shifted(capture: Sequence[int], num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Returns layers whose outputs the keys name, and their neighbours, if all are layers."""
    shifted = (tuple(layer + by for layer in capture) for by in (-2, -1, 0))
    return tuple(ids for ids in shifted if min(ids) >= 0 and max(ids) < num_layers)


def pard2_variants(
    capture: Sequence[int], num_layers: int, target_theta: float | None
) -> list[Variant]:
    """Returns variants of PARD-2."""
    shifted = (tuple(state + by for state in capture) for by in (-1, 0, 1))
    states = tuple(ids for ids in shifted if min(ids) >= 0 and max(ids) <= num_layers)
    return [
        Variant("pard2_target_layers", states),
        Variant("pard2_scale", (0.02, 1.0)),
        *_rope_variants(target_theta),
    ]


def mtp_variants(
    capture: Sequence[int], num_layers: int, target_theta: float | None
) -> list[Variant]:
    """Returns variants of multi-token prediction modules."""
    return [
        Variant("recycle", ("post_norm", "pre_norm")),
        Variant("target_state", ("post_norm", "pre_norm")),
        Variant("zero_first_embedding", (False, True)),
    ]


def build(config: sections.SpeculationBase, host: DraftHost) -> Drafter:
    """Builds the drafter of `config` and starts its models, if any, on `host`.

    Raises:
        ConfigError: its model is missing or does not fit the target.
    """
    return method_of(config).build(config, host)


def build_head(config: sections.HeadConfig, target: TargetFacts) -> Head:
    """Loads the head of `config`.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or does not fit the target.
        ConfigError: `config` requires more than the checkpoint has.
    """
    load = method_of(config).load_head
    assert load is not None, f"{type(config).__name__} is no head's section"
    return load(config, target)


def check_head(config: sections.HeadConfig, target: TargetFacts) -> None:
    """Checks that the head's files are complete and fit the target; reads no weights.

    Raises as `build_head` does.
    """
    method = method_of(config)
    check = method.check_head or method.load_head
    assert check is not None, f"{type(config).__name__} is no head's section"
    import torch

    check(config, replace(target, device=torch.device("meta")))


def captured_layers(config: sections.HeadConfig, target: TargetFacts) -> tuple[int, ...]:
    """Returns layers of the target whose inputs the head reads, ascending; reads no weights.

    Raises as `build_head` does.
    """
    import torch

    head = build_head(config, replace(target, device=torch.device("meta")))
    return tuple(sorted(set(head.capture)))


def method_of(config: sections.SpeculationBase) -> Method[Any]:
    """Returns the record of the drafter that `config` describes."""
    return METHODS[type(config)]


def _colocated_or_separate(config: sections.HeadConfig, host: DraftHost) -> Drafter:
    """Builds a head inside the target's worker, or in its own worker."""
    name = config.decoding_type.lower()  # type: ignore[attr-defined]
    if config.placement == "colocated":
        return Colocated(name, is_chain=config.is_chain)
    cache: SpeculationCache | None = None
    if isinstance(config, sections.PreparingConfig) and config.speculation_cache is not None:
        cache = SpeculationCache(config, name)
    model, wait = host.head_model(config), DraftWait(config.draft_timeout_s)
    return SeparateHead(name, model, wait, is_chain=config.is_chain, cache=cache)


def _draft_model(
    kind: type[DraftTarget], config: sections.DraftTargetConfig, host: DraftHost
) -> Drafter:
    """Builds a draft model of the engine's own, or the members of a drafter group."""
    if config.drafter_group is None:
        return kind(config, host.draft_model(config))
    members = host.draft_members(config)

    def of_group() -> sections.DraftTargetConfig:  # it may have another model later
        return config.model_copy(update={"speculative_model": members.folder})

    def make(model: DraftModel) -> DraftTarget:
        return kind(of_group(), model)

    try:
        if isinstance(section := of_group(), sections.PARDConfig):
            mask_token(section, members.vocab_size)
        return Members(config, members, kind.name, make)
    except BaseException:
        members.shutdown()
        raise


def _imported(module: str, name: str) -> Callable[..., Any]:
    """Returns a class or function of this package that is imported when it is called.

    Heads import transformers, which takes seconds; look-ups import kernels, which compiles them.
    """
    return lambda *given: getattr(import_module(f".{module}", __package__), name)(*given)


_NGRAM_CACHE = _imported("lookup.ngram_cache", "NGramCache")
_NGRAM_MOD = _imported("lookup.ngram_mod", "NGramMod")
_SUFFIX = _imported("lookup.suffix", "Suffix")


def _ngram(config: sections.NGramConfig, host: DraftHost) -> Drafter:
    """Builds the drafter, linked to a pool if the pool is shared or has a snapshot file."""
    is_linked = config.pool_scope == "cluster" or config.pool_snapshot is not None
    return ngram(config, host.pool_link(config) if is_linked else None)


def _llama_map(
    name: str, memory: Callable[[Request, Any], Memory]
) -> Callable[[LlamaMapConfig, DraftHost], Drafter]:
    """Returns the `build` of a drafter that uses n-grams of one size."""
    return lambda config, host: LookupDrafter(
        name, lambda request: memory(request, config), config.draft_min
    )


def _check_snapshot(config: sections.NGramConfig, tokenizer: Path, vocab_size: int) -> None:
    """Reads the pool's snapshot, and checks that it can be written again."""
    if config.pool_snapshot is None:
        return
    field, path = "speculative_config.pool_snapshot", Path(config.pool_snapshot)
    mark = vocabulary.fingerprint(tokenizer, vocab_size, needed_by=field)
    if path.resolve().parent.is_dir():  # otherwise the folder is created
        check_writable(path, field)
    is_common = config.pool_scope == "replica"
    PoolStore(mark, config.pool_max_patterns, vocab_size, is_common=is_common).load(str(path))


def _probe_user(config: sections.UserConfig, tokenizer: Path, vocab_size: int) -> dict[str, str]:
    drafter = User(config)
    with suppress(DraftFault, TimeoutError):  # only the construction matters
        drafter.shutdown()
    return {config.path: drafter.name}


def build_parts(
    config: sections.SpeculationBase, host: DraftHost, ready: Mapping[int, Drafter]
) -> tuple[Drafter, dict[int, Drafter]]:
    """Does the same as `build`, reusing the drafters of some sections.

    If one cannot be built, those that were built before it are shut down.

    Args:
        ready: drafters by the `id` of their section.

    Returns:
        The drafter, and all of its parts by the `id` of their section.
    """
    made = dict(ready)
    try:
        for section in config.sections:
            if id(section) not in made:
                made[id(section)] = method_of(section).build(section, host)
        if not isinstance(config, sections.ComposeConfig):
            return made[id(config)], made
        members = [
            Member(made[id(each)], each.max_nodes, each.has_model, each.continues)
            for each in config.members
        ]
        return Compose(config, members, host.vocab_size), made
    except BaseException:
        for key, drafter in made.items():
            if key not in ready:
                drafter.shutdown()
        raise


OF_HEADS = re.compile(
    r"(d2t|t2d|token_map)$|(model\.)?fc\.|midlayer\.|lm_heads\.|lm_head\.\d|mtp\.|"
    r"(medusa_heads?\.)?(\d+\.)+linear\.|blocks\.\d+\.layers\."
)
"""Prefixes of tensors' names that only heads have."""

_RECORDS: tuple[Method[Any], ...] = (
    Method(sections.NoSpeculation, lambda config, host: NoDrafter()),
    Method(sections.LookaheadConfig, lambda config, host: Lookahead(config)),
    Method(sections.NGramConfig, _ngram, check_files=_check_snapshot),
    Method(sections.PromptLookupConfig, lambda config, host: prompt_lookup(config)),
    Method(sections.NGramSimpleConfig, _llama_map("ngram_simple", SimpleMemory)),
    Method(sections.NGramMapKConfig, _llama_map("ngram_map_k", MapKMemory)),
    Method(sections.NGramMapK4VConfig, _llama_map("ngram_map_k4v", MapK4VMemory)),
    Method(sections.NGramModConfig, lambda config, host: _NGRAM_MOD(config)),
    Method(
        sections.NGramCacheConfig,
        lambda config, host: _NGRAM_CACHE(config, host.tokenizer, host.vocab_size),
        check_files=ngram_file.load_tables,
    ),
    Method(
        sections.SuffixConfig,
        lambda config, host: _SUFFIX(config, corpus.texts(config, host.tokenizer, host.vocab_size)),
        check_files=corpus.check,
    ),
    Method(sections.DraftTargetConfig, partial(_draft_model, DraftTarget)),
    Method(
        sections.PARDConfig,
        partial(_draft_model, PARD),
        check_files=lambda config, tokenizer, vocab_size: (
            mask_token(config, vocab_size) if config.drafter_group is None else None
        ),
        mask_tokens=mask_candidates,
    ),
    Method(
        sections.MedusaConfig,
        _colocated_or_separate,
        load_head=_imported("heads.medusa", "load_medusa"),
        tensors=r"^(medusa_heads?\.)?(\d+\.\d+|blocks\.\d+)\.",
        tree_key="medusa_choices",
    ),
    Method(
        sections.ReDrafterConfig,
        _colocated_or_separate,
        load_head=_imported("heads.redrafter", "load_redrafter"),
        tensors=r"^(lm_heads?\.|0\.)?\d+\.(linear\.)?weight$",
    ),
    *(
        Method(
            section,
            _colocated_or_separate,
            load_head=_imported("heads.eagle", "read_eagle"),
            variants=eagle_variants,
            tensors=r"(^|\.)(fc|fusion_fc|hidden_norm|midlayer|eh_proj)\.",
            mask_tokens=mask_candidates if section is sections.PEagleConfig else None,
            tree_key="eagle_choices",
            continues=section is not sections.PEagleConfig,
        )
        for section in (sections.EagleConfig, sections.Eagle3Config, sections.PEagleConfig)
    ),
    *(
        Method(
            section,
            _colocated_or_separate,
            load_head=_imported("heads.dflash_head", "read_block"),
            variants=block_variants,
            tensors=r"(^|\.)fc\.",
            mask_tokens=mask_candidates,
        )
        for section in (sections.DFlashConfig, sections.DSparkConfig)
    ),
    Method(
        sections.PARD2Config,
        _colocated_or_separate,
        load_head=_imported("heads.pard2", "read_pard2"),
        variants=pard2_variants,
        tensors=r"(^|\.)embed_tokens\.",
        mask_tokens=mask_candidates,
    ),
    Method(
        sections.MTPConfig,
        _colocated_or_separate,
        load_head=_imported("heads.mtp", "MTPHead"),
        check_head=_imported("heads.mtp", "read_mtp"),
        variants=mtp_variants,
        tensors=r"(^|\.)(mtp|mtp_\w+|enorm|hnorm|eh_proj|shared_head)\.",
        tree_key="mtp_choices",
        continues=True,
    ),
    Method(
        sections.UserConfig, lambda config, host: User(config), check_code=find, probe=_probe_user
    ),
    Method(sections.ComposeConfig, lambda config, host: build_parts(config, host, {})[0]),
)
METHODS: Mapping[type[sections.SpeculationBase], Method[Any]] = {
    record.section: record for record in _RECORDS
}
