"""Sections of the drafters that look tokens up instead of computing them.

Keys and defaults are those of where each comes from: transformers, llama.cpp, vLLM. What another
spelling calls them is in `compat/`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from .section import LONGEST_DRAFT, MaxDraftLen, ShortestDraft, SpeculationBase
from .strict import at_key


class PromptLookupConfig(SpeculationBase):
    """transformers' prompt lookup: the leftmost match of the longest tail."""

    continues = True

    decoding_type: Literal["PromptLookup"] = "PromptLookup"
    max_draft_len: MaxDraftLen = Field(10, description="Most tokens of a draft.")
    max_matching_ngram_size: int = Field(2, ge=1, le=64)
    """Longest tail that is looked up."""


class LlamaMapConfig(ShortestDraft):
    """Those that draft the m tokens after a known n-gram."""

    max_draft_len: MaxDraftLen = None
    """Most tokens of a draft; default: ngram_size_m."""
    ngram_size_n: int = Field(12, ge=1, le=1024, description="Tokens that are looked up.")
    ngram_size_m: int = Field(48, ge=1, le=1024, description="Tokens that are drafted.")
    check_rate: int = Field(1, ge=1, description="Tokens from one look-up to the next.")

    @property
    def draft_len(self) -> int:
        return self.ngram_size_m if self.max_draft_len is None else self.max_draft_len


class NGramSimpleConfig(LlamaMapConfig):
    """llama.cpp's `ngram-simple`: the last match of an n-gram gives the m tokens after it."""

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
    """llama.cpp's `ngram-map-k`: a hash table of n-grams, each with its acceptance."""

    decoding_type: Literal["NGramMapK"] = "NGramMapK"


class NGramMapK4VConfig(LlamaMapConfig):
    """llama.cpp's `ngram-map-k4v`: up to four continuations a key, the dominant one drafts.

    A key drafts from its `min_hits`-th look-up on.
    """

    decoding_type: Literal["NGramMapK4V"] = "NGramMapK4V"
    min_hits: int = Field(1, ge=1, description="Look-ups of a key before it drafts.")


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
        if 0 < self.draft_len < self.n_min:
            raise at_key(
                "n_min",
                f"n_min ({self.n_min}) must not exceed max_draft_len ({self.draft_len}, "
                "llama.cpp's n_max): nothing would ever be drafted",
            )
        return self


class NGramCacheConfig(ShortestDraft):
    """llama.cpp's `ngram-cache`: counted n-grams of the context, the past, and a file."""

    continues = True

    decoding_type: Literal["NGramCache"] = "NGramCache"
    max_draft_len: MaxDraftLen = Field(8, description="Most tokens of a draft.")
    lookup_cache_static: str | None = None
    """Table of `outrider ngram build`; implies ngram-cache."""
    lookup_cache_dynamic: str | None = None
    """Past requests' table, read and written; implies ngram-cache."""
    max_dynamic_entries: int = Field(2**20, ge=0)
    """Entries of the past's table, all tenants together; the oldest go first."""

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
    """Most tokens of a draft; default: max_tree_depth."""
    max_tree_depth: int = Field(24, ge=1, le=256, description="Longest match and draft together.")
    max_cached_requests: int = Field(10_000, ge=0)
    """Finished requests that are searched, per tenant; 0: none."""
    max_cached_tokens: int = Field(2**18, ge=0)
    """Tokens of their outputs, all tenants together."""
    max_spec_factor: float = Field(1.0, ge=0, le=1024)
    """Draft tokens per matched token."""
    max_spec_offset: float = Field(0.0, ge=-1024, le=1024, description="Draft tokens beside those.")
    min_token_prob: float = Field(0.1, ge=0, le=1)
    """Least estimated probability of a drafted token."""
    shape: Literal["chain", "tree"] = "chain"
    """chain: the likeliest continuation; tree: several."""

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
