"""The sections that `speculative_config` may be, one class per drafter.

Keys are TensorRT-LLM's where it has the drafter, llama.cpp's where it has.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .strict import Strict


class SpeculationBase(Strict):
    """What every drafter's section shares."""

    max_draft_len: int = Field(4, ge=0, le=64)  # draft nodes per request and step
    verification: Literal["coupled", "rejection"] = "coupled"
    max_concurrency: int | None = Field(None, ge=1)  # no drafts while more requests run


class NoSpeculation(SpeculationBase):
    """Plain decoding: a drafter that proposes nothing."""

    decoding_type: Literal["None"] = "None"
    max_draft_len: Literal[0] = 0  # type: ignore[assignment]


class NGramConfig(SpeculationBase):
    """TensorRT-LLM's n-gram pool (`tensorrt_llm/_torch/speculative/ngram.py`)."""

    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: int = Field(4, ge=1, le=64)
    min_matching_ngram_size: int = Field(1, ge=1, le=64)
    is_public_pool: bool = False  # one pool per tenant; off by default: timing could leak
    is_keep_all: bool = True
    is_use_oldest: bool = True

    @model_validator(mode="after")
    def _sizes_in_order(self) -> NGramConfig:
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise ValueError(
                f"min_matching_ngram_size ({self.min_matching_ngram_size}) must not exceed "
                f"max_matching_ngram_size ({self.max_matching_ngram_size})"
            )
        return self


class LookaheadConfig(SpeculationBase):
    """Lookahead decoding (arXiv:2402.02057), with TensorRT-LLM's keys for its W, N and G."""

    decoding_type: Literal["Lookahead"] = "Lookahead"
    max_window_size: int = Field(4, ge=1, le=64)  # W
    max_ngram_size: int = Field(3, ge=2, le=16)  # N
    max_verification_set_size: int = Field(4, ge=1, le=64)  # G
    pool_from_prompt: bool = True  # the prompt's n-grams are guesses too
    max_draft_len: int = Field(0, ge=0, le=1024)  # nodes; 0: all that W, N and G make

    @model_validator(mode="after")
    def _nodes(self) -> LookaheadConfig:
        length = self.max_ngram_size - 1
        window = length * self.max_window_size - 1
        if self.max_draft_len == 0:
            every = window + length * self.max_verification_set_size
            object.__setattr__(self, "max_draft_len", every)  # the section is not in use yet
        if self.max_draft_len < window + length:
            raise ValueError(
                f"max_draft_len ({self.max_draft_len}) has no room for the window of {window} "
                f"nodes and one guess of {length}"
            )
        return self


class DraftModelConfig(SpeculationBase):
    """What sections with a draft model of its own share: which, where, how large."""

    speculative_model: str
    placement: Literal["separate", "colocated"] = "separate"
    draft_tensor_parallel_size: int | None = Field(None, ge=1)  # None: 1, or the target's
    num_kv_blocks: int | None = Field(None, ge=2)  # None: as many as there is room for

    @model_validator(mode="after")
    def _colocated_size(self) -> DraftTargetConfig:
        if self.placement == "colocated" and self.draft_tensor_parallel_size is not None:
            raise ValueError(
                "draft_tensor_parallel_size belongs to placement 'separate'; "
                "a colocated drafter has the target's"
            )
        return self


class DraftTargetConfig(DraftModelConfig):
    """A small model of the same vocabulary drafts for the target."""

    decoding_type: Literal["DraftTarget"] = "DraftTarget"
    probs_top: int = Field(32, ge=1, le=1024)  # width of the distribution that `rejection` sees


SpeculativeConfig = Annotated[
    NoSpeculation | NGramConfig | LookaheadConfig | DraftTargetConfig,
    Field(discriminator="decoding_type"),
]
