"""What every drafter's section of the configuration shares: length, load, verification."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import ConfigError
from .strict import Strict, at_key, check_order, tag

# Rules with keys of their own: the section's key -> the rule's parameter.
RULE_KEYS: Mapping[str, Mapping[str, str]] = {
    "typical": {"posterior_threshold": "threshold", "posterior_alpha": "alpha"},
    "relaxed": {
        "relaxed_topk": "topk",
        "relaxed_delta": "delta",
        "begin_thinking_phase_token": "begin",
        "end_thinking_phase_token": "end",
    },
    "synthetic": {"synthetic_acceptance_rate": "rate"},
}
LONGEST_DRAFT = 1024  # nodes of any section, per request and step
Rule = Literal["coupled", "rejection", "block", "typical", "relaxed", "synthetic"]
BatchSize = Annotated[int, Field(ge=1)]
DraftLength = Annotated[int, Field(ge=0, le=LONGEST_DRAFT)]
MaxDraftLen = Annotated[int | None, Field(ge=0, le=LONGEST_DRAFT)]
_LOSSY = ("typical", "relaxed", "synthetic")  # change what is emitted
_WITH_PROBS = ("rejection", "block")  # weigh a node by the probability it was drawn with
_OWN_DRAWS = ("coupled", "relaxed")  # compare a node with the target's own draw


MEASURE_S = "OUTRIDER_MEASURE_S"
_MEASURE_S, _MOST_MEASURE_S = 2.0, 3600


def seconds_to_measure() -> float:
    """How long a start may measure what steps cost, from `OUTRIDER_MEASURE_S`; 0: not at all.

    Raises:
        ConfigError: it is no number of seconds.
    """
    given = os.environ.get(MEASURE_S, "").strip()
    try:
        seconds = float(given) if given else _MEASURE_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_MEASURE_S:
        reason = f"{given!r} is no number of seconds, 0 to {_MOST_MEASURE_S}"
        raise ConfigError.at(MEASURE_S, reason)
    return seconds


class SpeculationBase(Strict):
    """What every drafter's section shares.

    Three lengths: `max_draft_len` is what was written, and may be unset (None, in some sections 0);
    `draft_len` is the length that holds then, which other keys of a section may decide; `max_nodes`
    is the number of nodes of a tree whose paths are at most `draft_len` long. A configuration that
    is read again must keep what was written, so that the first is not replaced by the second.
    """

    shortens: ClassVar[bool] = True  # whether a draft that is cut is a shorter draft
    has_model: ClassVar[bool] = False  # whether the drafter computes with weights
    continues: ClassVar[bool] = False  # whether it can continue another drafter's chain
    # Limits by the number of running requests, which hold for all drafters together.
    of_load: ClassVar[tuple[str, ...]] = (
        "max_concurrency",
        "draft_len_schedule",
        "adaptive_draft_len",
        "acceptance_window",
        "acceptance_length_threshold",
    )

    max_draft_len: MaxDraftLen = Field(4, description="Draft nodes per request and step.")
    verification: Rule = "coupled"
    """Rule by which drafted tokens are accepted."""
    lossy: bool = False
    """Confirms a rule that changes the output: typical, relaxed, synthetic."""
    posterior_threshold: float = Field(0.09, gt=0, le=1)
    """typical: the probability that is always enough for a token."""
    posterior_alpha: float = Field(0.3, gt=0)
    """typical: factor of exp(-entropy)."""
    relaxed_topk: int = Field(1, ge=1, le=1024)
    """relaxed: most likely tokens that may be accepted."""
    relaxed_delta: float = Field(0.0, ge=0)
    """relaxed: how far below the best token's probability."""
    begin_thinking_phase_token: int = Field(128798, ge=0, lt=2**31)
    """relaxed: id that begins the thinking phase."""
    end_thinking_phase_token: int = Field(128799, ge=0, lt=2**31)
    """relaxed: id that ends the thinking phase."""
    synthetic_acceptance_rate: float | None = Field(None, ge=0, le=1)
    """synthetic: probability that a coin accepts a node."""
    max_concurrency: int | None = Field(None, ge=1)
    """Running requests above which nothing is drafted."""
    draft_len_schedule: dict[BatchSize, DraftLength] | None = Field(None, min_length=1)
    """Most draft nodes by the number of running requests; above the last, none."""
    adaptive_draft_len: bool | None = None
    """Drafts fewer nodes, or none, where that gives more tokens per second, as measured while
    serving; unset: where the output of a seed does not depend on lengths (verification `coupled`),
    unless `OUTRIDER_MEASURE_S` is 0. Of `Lookahead`, all nodes or none."""
    acceptance_window: int = Field(0, ge=0)
    """Finished requests over which acceptance is averaged; 0: off."""
    acceptance_length_threshold: float = Field(0.0, ge=0)
    """Accepted tokens per step below which drafting ends."""

    @model_validator(mode="after")
    def _consistent(self) -> SpeculationBase:
        checks = (
            (
                "lossy",
                self.lossy == (self.verification in _LOSSY),
                f"verification {', '.join(map(repr, _LOSSY))} are lossy: they change what is "
                "emitted; give `lossy: true` with them, and with nothing else",
            ),
            (
                "end_thinking_phase_token",
                self.begin_thinking_phase_token != self.end_thinking_phase_token,
                "begin_thinking_phase_token and end_thinking_phase_token are the same token "
                f"({self.end_thinking_phase_token})",
            ),
            (
                "synthetic_acceptance_rate",
                not self.is_synthetic or self.synthetic_acceptance_rate is not None,
                "verification 'synthetic' requires it, from 0 to 1",
            ),
            (
                "max_concurrency",
                self.draft_len_schedule is None or self.max_concurrency is None,
                "draft_len_schedule drafts nothing above its largest batch size; give one of the "
                "two",
            ),
            (
                "acceptance_window",
                (self.acceptance_window == 0) == (self.acceptance_length_threshold == 0),
                "acceptance_window and acceptance_length_threshold belong together: so many "
                "finished requests, and the mean accepted tokens a step below which drafting ends",
            ),
        )
        for key, is_met, message in checks:
            if not is_met:
                raise at_key(key, message)
        return self

    @model_validator(mode="after")
    def _keys_of_its_rule(self) -> SpeculationBase:
        for rule, keys in RULE_KEYS.items():
            for key in keys:
                if rule != self.verification and not self.is_default(key):
                    reason = f"belongs to verification {rule!r}; this is {self.verification!r}"
                    raise at_key(key, f"{key} {reason}")
        return self

    def is_default(self, key: str) -> bool:
        """Whether a key has its default, given or not: a configuration may be written in full."""
        return bool(getattr(self, key) == type(self).model_fields[key].default)

    @property
    def rule_parameters(self) -> tuple[tuple[str, float], ...]:
        """The verification rule's parameters by its own names."""
        keys = RULE_KEYS.get(self.verification, {})
        return tuple((name, getattr(self, key)) for key, name in keys.items())

    @property
    def adapts(self) -> bool:
        """Whether drafts get shorter where that is faster."""
        if self.adaptive_draft_len is None:
            return self.verification == "coupled" and seconds_to_measure() > 0
        return self.adaptive_draft_len

    @property
    def is_synthetic(self) -> bool:
        """Whether coins accept drafts, so that figures tell nothing about the drafter."""
        return self.verification == "synthetic"

    @property
    def label(self) -> str:
        """The drafter's name for tables of figures."""
        rate = self.synthetic_acceptance_rate
        mark = f" (synthetic, rate {rate:g})" if self.is_synthetic else ""
        return f"{tag(type(self))}{mark}"

    @property
    def thinking_tokens(self) -> tuple[int, int] | None:
        """Tokens that begin and end the phase that the rule depends on; None if it does not."""
        if self.verification != "relaxed":
            return None
        return self.begin_thinking_phase_token, self.end_thinking_phase_token

    @property
    def wants_draft_probs(self) -> bool:
        """Whether the rule uses the distributions that nodes were drawn from."""
        return self.verification in _WITH_PROBS

    @property
    def shares_noise(self) -> bool:
        """Whether a node drawn with the target's noise is accepted more often."""
        return self.verification in _OWN_DRAWS

    @property
    def salts_rounds(self) -> bool:
        """Whether no round may draw with the noise of nodes that an earlier one did not emit.

        The rule `block` looks at such nodes, and so does what a speculation cache prepares.
        """
        return self.wants_draft_probs

    @property
    def draft_len(self) -> int:
        """`max_draft_len`, or what the section drafts without it."""
        return self.max_draft_len or 0

    @property
    def max_nodes(self) -> int:
        """Most draft nodes per request and step."""
        return self.draft_len

    def nodes_at(self, num_running: int, most: int) -> int:
        """`most` draft nodes of one request, or fewer while so many run."""
        if self.max_concurrency is not None and num_running > self.max_concurrency:
            return 0
        if self.draft_len_schedule is None:
            return most
        sizes = [size for size in self.draft_len_schedule if size >= num_running]
        return min(most, self.draft_len_schedule[min(sizes)]) if sizes else 0

    @property
    def reach(self) -> int:
        """Number of following tokens that a cached KV row depends on."""
        return 0

    @property
    def sections(self) -> tuple[SpeculationBase, ...]:
        """The sections of single drafters: this one, or the members of a composition."""
        return (self,)


class ShortestDraft(SpeculationBase):
    """A section with a least length of drafts."""

    draft_min: int = Field(0, ge=0, le=LONGEST_DRAFT, description="Shorter drafts are dropped.")

    @model_validator(mode="after")
    def _lengths_in_order(self) -> ShortestDraft:
        if self.draft_len:
            why = ": nothing would ever be drafted"
            check_order("draft_min", self.draft_min, "max_draft_len", self.draft_len, why)
        return self


class PlacedConfig(SpeculationBase):
    """A drafter with weights, which run in the target's workers or in their own."""

    has_model = True
    of_separate: ClassVar[tuple[str, ...]] = ("draft_timeout_s",)  # keys of that placement

    placement: Literal["separate", "colocated"] = "separate"
    """separate: in workers of its own; colocated: in the target's."""
    draft_timeout_s: float | None = Field(None, gt=0, le=60)
    """separate: seconds after which a step goes without the draft; None: 0.1 to 0.25, by how long
    drafts take, or as long as a step of the target takes, if that is longer."""

    @model_validator(mode="after")
    def _keys_of_its_placement(self) -> PlacedConfig:
        for key in self.of_separate:
            if self.placement == "colocated" and not self.is_default(key):
                raise at_key(
                    key,
                    f"{key} belongs to placement 'separate'; a colocated drafter runs in the "
                    "target's workers, and its draft comes with the verdict",
                )
        return self


class SpeculationCacheConfig(Strict):
    """Drafts of the next step that a separate drafter prepares while the target verifies."""

    outcomes: int = Field(12, ge=1, le=256)
    """Outcomes prepared per request and step: pairs of accepted tokens and the token after them.
    Under coupled, more of them with fewer tokens each, where that is more likely to be of use."""
    depth: int | None = Field(None, ge=1, le=LONGEST_DRAFT)
    """Tokens prepared per outcome; default: max_draft_len."""
    budget: int = Field(64, ge=1, le=4096)
    """Outcomes prepared per step, of all requests together."""
    on_miss: Literal["auto", "draft", "none"] = "auto"
    """Where the outcome was not prepared. draft: the step waits for a draft; none: it goes without
    one; auto: whichever gives more tokens per second."""
    adaptive: bool = True
    """Prepares fewer outcomes where the drafter lags, and none where that gives more tokens per
    second, by measurement."""


class PreparingConfig(PlacedConfig):
    """A drafter of chains that can prepare those of the next step."""

    speculation_cache: SpeculationCacheConfig | None = None
    """separate, chains: drafts the next step while the target verifies; default: off."""

    @model_validator(mode="after")
    def _depth_in_order(self) -> PreparingConfig:
        cache = self.speculation_cache
        if cache is not None and cache.depth is not None:
            why = ": more would never be verified"
            order = "speculation_cache.depth", cache.depth, "max_draft_len", self.draft_len
            check_order(*order, why)
        return self

    @property
    def prepared_len(self) -> int:
        """Tokens prepared per outcome, where there is a speculation cache."""
        cache = self.speculation_cache
        return (cache.depth if cache else None) or max(1, self.draft_len)
