"""The possible sections of `speculative_config`, one class per drafter.

Keys and defaults are those of the drafter's origin: TensorRT-LLM, llama.cpp, transformers or vLLM.
Other spellings are translated in `compat/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from .heads import (
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MTPConfig,
    PARD2Config,
    PEagleConfig,
    ReDrafterConfig,
)
from .section import (
    LONGEST_DRAFT,
    RULE_KEYS,
    MaxDraftLen,
    PreparingConfig,
    ShortestDraft,
    SpeculationBase,
)
from .strict import at_key, check_order, sections_in, tag


class PromptLookupConfig(SpeculationBase):
    """transformers' prompt lookup: the leftmost match of the longest suffix of the text."""

    continues = True

    decoding_type: Literal["PromptLookup"] = "PromptLookup"
    max_draft_len: MaxDraftLen = Field(10, description="Most tokens of a draft.")
    max_matching_ngram_size: int = Field(2, ge=1, le=64)
    """Longest suffix that is looked up."""


class LlamaMapConfig(ShortestDraft):
    """Drafters that propose the m tokens after a known n-gram."""

    max_draft_len: MaxDraftLen = None
    """Maximum number of draft tokens; default: ngram_size_m."""
    ngram_size_n: int = Field(12, ge=1, le=1024, description="Tokens that are looked up.")
    ngram_size_m: int = Field(48, ge=1, le=1024, description="Tokens that are drafted.")
    check_rate: int = Field(1, ge=1, description="Tokens from one look-up to the next.")

    @property
    def draft_len(self) -> int:
        return self.ngram_size_m if self.max_draft_len is None else self.max_draft_len


class NGramSimpleConfig(LlamaMapConfig):
    """llama.cpp's `ngram-simple`: drafts the m tokens after the last match of an n-gram."""

    decoding_type: Literal["NGramSimple"] = "NGramSimple"

    @model_validator(mode="after")
    def _sizes_in_order(self) -> NGramSimpleConfig:
        if self.ngram_size_m < self.ngram_size_n:
            raise at_key(
                "ngram_size_m",
                f"ngram_size_m ({self.ngram_size_m}) must be at least ngram_size_n "
                f"({self.ngram_size_n}): shorter continuations are dropped",
            )
        return self


class NGramMapKConfig(LlamaMapConfig):
    """llama.cpp's `ngram-map-k`: a hash table of n-grams with the acceptance of each.

    A key drafts once the same m tokens have followed it `min_hits` times.
    """

    decoding_type: Literal["NGramMapK"] = "NGramMapK"
    min_hits: int = Field(1, ge=1, description="Occurrences of a key before it drafts.")


class NGramMapK4VConfig(LlamaMapConfig):
    """llama.cpp's `ngram-map-k4v`: up to four continuations per key; the dominant one drafts.

    A key drafts from its `min_hits`-th look-up on.
    """

    decoding_type: Literal["NGramMapK4V"] = "NGramMapK4V"
    min_hits: int = Field(1, ge=1, description="Occurrences of a key before it drafts.")


class NGramModConfig(SpeculationBase):
    """llama.cpp's `ngram-mod`: a hash pool from n-gram to next token; `max_draft_len` is n_max."""

    continues = True

    decoding_type: Literal["NGramMod"] = "NGramMod"
    max_draft_len: MaxDraftLen = Field(64, description="Most tokens of a draft.")
    n_match: int = Field(24, ge=1, le=1024, description="Tokens that are looked up.")
    n_min: int = Field(48, ge=0, le=LONGEST_DRAFT, description="Shorter drafts are dropped.")
    max_pools: int = Field(4, ge=1, le=256, description="Tenants with a pool; each takes 16 MiB.")

    @model_validator(mode="after")
    def _lengths_in_order(self) -> NGramModConfig:
        if self.draft_len:
            why = ", llama.cpp's n_max: nothing would ever be drafted"
            check_order("n_min", self.n_min, "max_draft_len", self.draft_len, why)
        return self


class NGramCacheConfig(ShortestDraft):
    """llama.cpp's `ngram-cache`: counted n-grams of the context, past requests, and a file."""

    continues = True

    decoding_type: Literal["NGramCache"] = "NGramCache"
    max_draft_len: MaxDraftLen = Field(8, description="Most tokens of a draft.")
    lookup_cache_static: str | None = None
    """Table built by `outrider ngram build`; implies ngram-cache."""
    lookup_cache_dynamic: str | None = None
    """Table of past requests, which is read and written; implies ngram-cache."""
    max_dynamic_entries: int = Field(2**20, ge=0)
    """Entries of the table of past requests for all tenants together; the oldest are dropped
    first."""

    @field_validator("lookup_cache_static", "lookup_cache_dynamic")
    @classmethod
    def _not_empty(cls, path: str | None) -> str | None:
        if path == "":
            raise ValueError("must name a file")
        return path


class SuffixConfig(SpeculationBase):
    """Suffix decoding (arXiv:2411.04975) with vLLM's defaults."""

    continues = True

    decoding_type: Literal["Suffix"] = "Suffix"
    max_draft_len: MaxDraftLen = None
    """Maximum number of draft tokens; default: max_tree_depth."""
    max_tree_depth: int = Field(24, ge=1, le=256, description="Longest match and draft together.")
    max_cached_requests: int = Field(10_000, ge=0)
    """Finished requests that are searched, per tenant; 0: none."""
    max_cached_tokens: int = Field(2**18, ge=0)
    """Output tokens of those requests, for all tenants together."""
    max_spec_factor: float = Field(1.0, ge=0, le=1024)
    """Draft tokens per matched token."""
    max_spec_offset: float = Field(0.0, ge=-1024, le=1024, description="Draft tokens beside those.")
    min_token_prob: float = Field(0.1, ge=0, le=1)
    """Minimum estimated probability of a drafted token."""
    shape: Literal["chain", "tree"] = "chain"
    """chain: the most likely continuation; tree: several."""
    corpora: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Files of texts that are searched for requests of every tenant: .txt, or .jsonl with `text` or
    `tokens`."""
    max_corpus_tokens: int = Field(2**20, ge=1, le=2**30)
    """Maximum number of tokens of all corpora together."""

    @property
    def draft_len(self) -> int:
        return self.max_tree_depth if self.max_draft_len is None else self.max_draft_len


LookupConfig = (
    PromptLookupConfig
    | NGramSimpleConfig
    | NGramMapKConfig
    | NGramMapK4VConfig
    | NGramModConfig
    | NGramCacheConfig
    | SuffixConfig
)


class NoSpeculation(SpeculationBase):
    """Plain decoding: a drafter that proposes nothing."""

    decoding_type: Literal["None"] = "None"
    max_draft_len: Literal[0] = Field(0, description="Nothing is drafted.")


class NGramConfig(SpeculationBase):
    """TensorRT-LLM's n-gram pool (`tensorrt_llm/_torch/speculative/ngram.py`)."""

    continues = True

    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: int = Field(4, ge=1, le=64)
    """Longest n-gram that is looked up."""
    min_matching_ngram_size: int = Field(1, ge=1, le=64)
    """Shortest n-gram that is looked up."""
    is_use_oldest: bool = True
    """Draft from the oldest match; false: from the newest."""
    pool_scope: Literal["request", "tenant", "replica", "cluster"] = "request"
    """Which requests share a pool; sharing may be observable through timing."""
    pool_max_patterns: int = Field(2**18, ge=1024)
    """Maximum number of patterns in shared pools, for all tenants together."""
    pool_snapshot: str | None = None
    """File from which a shared pool is loaded and to which it is saved."""

    @model_validator(mode="after")
    def _sizes_in_order(self) -> NGramConfig:
        sizes = self.min_matching_ngram_size, self.max_matching_ngram_size
        check_order("min_matching_ngram_size", sizes[0], "max_matching_ngram_size", sizes[1])
        return self

    @model_validator(mode="after")
    def _snapshot_of_a_shared_pool(self) -> NGramConfig:
        if self.pool_snapshot is not None and self.pool_scope == "request":
            raise at_key(
                "pool_snapshot", "pool_snapshot belongs to a shared pool; pool_scope is 'request'"
            )
        return self


class LookaheadConfig(SpeculationBase):
    """Lookahead decoding (arXiv:2402.02057), with TensorRT-LLM's keys for its W, N and G."""

    shortens = False

    decoding_type: Literal["Lookahead"] = "Lookahead"
    max_window_size: int = Field(4, ge=1, le=64, description="W: width of the window.")
    max_ngram_size: int = Field(3, ge=1, le=16)
    """N: length of n-grams; 1 proposes nothing."""
    max_verification_set_size: int = Field(4, ge=1, le=64, description="G: guesses per step.")
    pool_from_prompt: bool = Field(True, description="The prompt's n-grams are guesses too.")
    max_draft_len: MaxDraftLen = Field(0, description="Draft nodes; 0: all of W, N and G.")

    @model_validator(mode="after")
    def _nodes(self) -> LookaheadConfig:
        if self.draft_len < self._window_nodes + self._guess_nodes:
            raise at_key(
                "max_draft_len",
                f"max_draft_len ({self.draft_len}) has no room for the window of "
                f"{self._window_nodes} nodes and one guess of {self._guess_nodes}",
            )
        return self

    @property
    def draft_len(self) -> int:
        every = self._window_nodes + self._guess_nodes * self.max_verification_set_size
        return self.max_draft_len or every

    @property
    def _guess_nodes(self) -> int:
        return self.max_ngram_size - 1

    @property
    def _window_nodes(self) -> int:
        return max(0, self._guess_nodes * self.max_window_size - 1)


GROUP_NAME = r"^[A-Za-z0-9][\w.-]{0,63}$"


class DraftModelConfig(PreparingConfig):
    """Keys shared by sections with a draft model: the model, its placement and size."""

    of_separate = (
        *("draft_timeout_s", "draft_tensor_parallel_size", "speculation_cache"),
        *("drafter_group", "drafter_routing"),
    )
    translates: ClassVar[bool] = True  # whether its vocabulary may differ from the target's
    draws_in_turn: ClassVar[bool] = True  # whether each token of a chain takes its own forward

    speculative_model: str = Field(
        description="Folder, Hugging Face id or address of the draft model."
    )
    drafter_group: str | None = Field(None, pattern=GROUP_NAME)
    """separate: name of a drafter group of the cluster, instead of a model of this engine."""
    drafter_routing: Literal["least_loaded", "round_robin", "prefix"] = "least_loaded"
    """drafter_group: how the member that drafts for a request is chosen. prefix: requests with
    equal prefixes use the same member, which has them in its cache."""
    draft_tensor_parallel_size: int | None = Field(None, ge=1)
    """Ranks of the draft model; default: 1, or the target's if colocated."""
    num_kv_blocks: int | None = Field(None, ge=2)
    """KV blocks of the draft model; default: as many as fit."""
    use_heterogeneous_vocab: bool = False
    """Whether the draft model may have another vocabulary; it then drafts tokens whose text is in
    both."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_group(cls, data: Any) -> Any:
        """Allows a section with a drafter group to name no model, because the group has one."""
        if isinstance(data, dict) and data.get("drafter_group") is not None:
            return {"speculative_model": "", **data}
        return data

    @model_validator(mode="after")
    def _model_or_group(self) -> DraftModelConfig:
        if self.drafter_group is None:
            if self.drafter_routing != "least_loaded":
                raise at_key("drafter_routing", "drafter_routing needs a drafter_group")
            return self
        for key in ("speculative_model", "draft_tensor_parallel_size", "num_kv_blocks"):
            if getattr(self, key):
                raise at_key(
                    key, f"{key} is that of drafter_group {self.drafter_group!r}; leave it out"
                )
        return self


class DraftTargetConfig(DraftModelConfig, ShortestDraft):
    """A small model that drafts for the target."""

    decoding_type: Literal["DraftTarget"] = "DraftTarget"
    max_draft_len: MaxDraftLen = Field(3, description="Draft tokens per request and step.")
    p_min: float = Field(0.0, ge=0, le=1)
    """A draft ends where the probability of its best token is lower."""
    probs_top: int = Field(32, ge=1, le=1024)
    """Tokens of the draft distribution that are passed to the verification rule."""


class PARDConfig(DraftTargetConfig):
    """A small model that drafts all tokens in one forward (PARD, arXiv:2504.18583)."""

    translates = draws_in_turn = False

    decoding_type: Literal["PARD"] = "PARD"  # type: ignore[assignment]
    max_draft_len: MaxDraftLen = Field(8, description="Draft tokens per request and step.")
    mask_token_id: int | None = Field(None, ge=0, lt=2**31)
    """Mask token for tokens to be drafted; default: the checkpoint's `pard_token`."""

    @model_validator(mode="after")
    def _same_vocabulary(self) -> PARDConfig:
        if self.use_heterogeneous_vocab:
            raise at_key(
                "use_heterogeneous_vocab",
                "use_heterogeneous_vocab is not implemented for PARD, whose mask has no text; "
                "use decoding_type DraftTarget",
            )
        return self


class UserConfig(SpeculationBase):
    """A user's drafter: an import path or, in Python, an object or a class."""

    decoding_type: Literal["User"] = "User"
    drafter: str | object = Field(examples=["package.module:Class"])
    """Import path of the drafter: package.module:Class; in Python also an object."""
    resource_manager: object = None
    """In Python: an object with TensorRT-LLM's hooks, for a drafter with prepare_draft_tokens."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    timeout_s: float = Field(0.1, gt=0, le=60)
    """Timeout of each call in seconds; a later result is not used."""

    @field_validator("drafter")
    @classmethod
    def _is_a_drafter(cls, given: object) -> object:
        if isinstance(given, str):
            if re.fullmatch(r"[\w.]+:[\w.]+", given) is None:
                raise ValueError("expected the import path of a class")
        elif not _has_one_of(given, DRAFT_METHODS):
            methods = " or ".join(DRAFT_METHODS)
            raise ValueError(f"expected an import path, or in Python an object with {methods}")
        return given

    @field_validator("resource_manager")
    @classmethod
    def _is_a_manager(cls, given: object) -> object:
        if given is not None and not _has_one_of(given, RESOURCE_HOOKS):
            hooks = " or ".join(RESOURCE_HOOKS)
            raise ValueError(f"expected an object, which only Python can give, with {hooks}")
        return given

    @model_validator(mode="after")
    def _is_not_constructed_twice(self) -> UserConfig:
        if self.options and not isinstance(self.drafter, str | type):
            raise at_key("options", "options are of a class; the drafter is an object")
        return self

    @field_serializer("drafter", "resource_manager", when_used="json")
    def _as_text(self, given: object) -> str | None:
        """Writes an object as text; it cannot be read back."""
        return given if isinstance(given, str | None) else f"<{_path_of(given)}>"

    @property
    def path(self) -> str:
        """The import path of the drafter's class, for messages."""
        return self.drafter if isinstance(self.drafter, str) else _path_of(self.drafter)


DRAFT_METHODS = ("draft", "propose", "prepare_draft_tokens")
RESOURCE_HOOKS = ("prepare_resources", "update_resources", "free_resources")


def _has_one_of(given: object, methods: tuple[str, ...]) -> bool:
    return any(callable(getattr(given, name, None)) for name in methods)


def _path_of(given: object) -> str:
    kind = given if isinstance(given, type) else type(given)
    return f"{kind.__module__}:{kind.__qualname__}"


MemberConfig = Annotated[
    NGramConfig
    | LookupConfig
    | LookaheadConfig
    | DraftTargetConfig
    | PARDConfig
    | MedusaConfig
    | EagleConfig
    | Eagle3Config
    | PEagleConfig
    | DFlashConfig
    | DSparkConfig
    | PARD2Config
    | MTPConfig
    | ReDrafterConfig
    | UserConfig,
    Field(discriminator="decoding_type"),
]


_RULES = ("verification", "lossy", *(key for keys in RULE_KEYS.values() for key in keys))
SHARED_KEYS = (*_RULES, *SpeculationBase.of_load)  # keys of a composition, not of its members


class ComposeConfig(SpeculationBase):
    """Several drafters: the first with a guess, which another may continue, or all in one tree."""

    decoding_type: Literal["Compose"] = "Compose"
    members: tuple[MemberConfig, ...] = Field(min_length=1, max_length=16)
    """Sections of the drafters."""
    mode: Literal["precedence", "extend", "merge", "choose"] = "precedence"
    """precedence: the first with a guess; extend: a look-up continues a model's guess; merge: one
    tree of all guesses; choose: each request uses one member, by tokens emitted per second."""
    keep_order: bool = False
    """precedence, extend: keeps the order of members; false: members without a model are asked
    first."""
    max_draft_len: MaxDraftLen = 0
    """Draft nodes; 0: those of the longest member, with its continuation, or of all merged."""

    @model_validator(mode="before")
    @classmethod
    def _hand_down(cls, data: Any) -> Any:
        """Gives members the composition's verification rule, because they are verified together."""
        if not isinstance(data, dict) or not isinstance(data.get("members"), (list, tuple)):
            return data
        rule = {key: data[key] for key in _RULES if key in data}
        members = [rule | each if isinstance(each, dict) else each for each in data["members"]]
        return {**data, "members": members}

    @model_validator(mode="after")
    def _fits(self) -> ComposeConfig:
        for index, member in enumerate(self.members):
            if member.verification != self.verification:
                raise at_key(
                    f"members.{index}.verification",
                    f"members.{index}.verification is {member.verification!r}, but that of all is "
                    f"{self.verification!r}; set it once, beside `members`",
                )
            if member.rule_parameters != self.rule_parameters:
                raise at_key(
                    f"members.{index}",
                    f"the keys of verification {self.verification!r} hold for all members; set "
                    "them once, beside `members`",
                )
            for key in SpeculationBase.of_load:
                if not member.is_default(key):
                    raise at_key(f"members.{index}.{key}", "set it once, beside `members`")
        if self.keep_order and self.mode == "merge":
            raise at_key(
                "keep_order", "keep_order belongs to mode 'precedence'; 'merge' keeps the order"
            )
        if self.mode == "extend":
            self._check_extends()
        return self

    def _check_extends(self) -> None:
        """Raises a ValueError unless a member can be continued by another."""
        if not any(member.has_model for member in self.members):
            raise at_key("mode", "mode 'extend' needs a member with a model or a head to continue")
        if not any(member.continues for member in self.members):
            able = [name for name, each in SECTIONS.items() if each.continues]
            raise at_key(
                "mode", f"mode 'extend' needs a member that continues drafts: {', '.join(able)}"
            )

    @property
    def draft_len(self) -> int:
        lengths = [member.max_nodes for member in self.members]
        if self.max_draft_len or self.mode in ("precedence", "choose"):
            return self.max_draft_len or max(lengths)
        if self.mode == "merge":
            return sum(lengths)
        models = [each.max_nodes for each in self.members if each.has_model]
        return max(*lengths, max(models) + max(e.max_nodes for e in self.members if e.continues))

    @property
    def sections(self) -> tuple[SpeculationBase, ...]:
        return self.members


SpeculativeConfig = Annotated[
    NoSpeculation | MemberConfig | ComposeConfig, Field(discriminator="decoding_type")
]

SECTIONS: Mapping[str, type[SpeculationBase]] = {
    name: section
    for section in sections_in(SpeculativeConfig)
    if issubclass(section, SpeculationBase) and (name := tag(section)) is not None
}
