"""Keys shared by all drafters' sections: length, load, verification."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ..errors import ConfigError
from .strict import Strict, at_key, check_order, tag

# Rules with their own keys: key of the section -> parameter of the rule.
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
_LOSSY = ("typical", "relaxed", "synthetic")  # these change the output
_WITH_PROBS = ("rejection", "block")  # these use the probability that a node was drawn with
_OWN_DRAWS = ("coupled", "relaxed")  # these compare a node with the target's own draw


MEASURE_S = "OUTRIDER_MEASURE_S"
_MEASURE_S, _MOST_MEASURE_S = 2.0, 3600


def seconds_to_measure() -> float:
    """Returns how long a start may measure step costs, from `OUTRIDER_MEASURE_S`; 0: not at all.

    Raises:
        ConfigError: the value is not a number of seconds.
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
    """The keys shared by all drafters' sections.

    There are three lengths. `max_draft_len` is the given value, which may be unset (None, or 0 in
    some sections). `draft_len` is the effective length, which other keys of a section may
    determine. `max_nodes` is the number of nodes of a tree with paths of at most `draft_len` nodes.
    When a configuration is written and read again, the given value must be kept, so `max_draft_len`
    must not be replaced by `draft_len`.
    """

    shortens: ClassVar[bool] = True  # whether cutting a draft yields a valid shorter draft
    has_model: ClassVar[bool] = False  # whether the drafter has weights
    continues: ClassVar[bool] = False  # whether it can continue another drafter's chain
    # Limits by the number of running requests, which apply to all drafters together.
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
    """typical: probability at which a token is always accepted."""
    posterior_alpha: float = Field(0.3, gt=0)
    """typical: factor of exp(-entropy)."""
    relaxed_topk: int = Field(1, ge=1, le=1024)
    """relaxed: number of most likely tokens that may be accepted."""
    relaxed_delta: float = Field(0.0, ge=0)
    """relaxed: maximum distance from the best token's probability."""
    begin_thinking_phase_token: int = Field(128798, ge=0, lt=2**31)
    """relaxed: id that begins the thinking phase."""
    end_thinking_phase_token: int = Field(128799, ge=0, lt=2**31)
    """relaxed: id that ends the thinking phase."""
    synthetic_acceptance_rate: float | None = Field(None, ge=0, le=1)
    """synthetic: probability with which a node is accepted."""
    max_concurrency: int | None = Field(None, ge=1)
    """Running requests above which nothing is drafted."""
    draft_len_schedule: dict[BatchSize, DraftLength] | None = Field(None, min_length=1)
    """Maximum number of draft nodes by the number of running requests; above the last, none."""
    adaptive_draft_len: bool | None = None
    """Drafts fewer nodes or none where that increases tokens per second, as measured while serving.
    Unset: on if the output for a seed does not depend on draft lengths (verification `coupled`),
    unless `OUTRIDER_MEASURE_S` is 0. `Lookahead` drafts all nodes or none."""
    acceptance_window: int = Field(0, ge=0)
    """Finished requests over which acceptance is averaged; 0: off."""
    acceptance_length_threshold: float = Field(0.0, ge=0)
    """Accepted tokens per step below which drafting stops."""

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
        """Returns True if a key has its default value, whether it was given or not."""
        return bool(getattr(self, key) == type(self).model_fields[key].default)

    @property
    def rule_parameters(self) -> tuple[tuple[str, float], ...]:
        """Parameters of the verification rule, under the rule's own names."""
        keys = RULE_KEYS.get(self.verification, {})
        return tuple((name, getattr(self, key)) for key, name in keys.items())

    @property
    def adapts(self) -> bool:
        """True if draft lengths adapt to what is faster."""
        if self.adaptive_draft_len is None:
            return self.verification == "coupled" and seconds_to_measure() > 0
        return self.adaptive_draft_len

    @property
    def is_synthetic(self) -> bool:
        """True if drafts are accepted at random, so that figures do not describe the drafter."""
        return self.verification == "synthetic"

    @property
    def label(self) -> str:
        """The drafter's name in tables."""
        rate = self.synthetic_acceptance_rate
        mark = f" (synthetic, rate {rate:g})" if self.is_synthetic else ""
        return f"{tag(type(self))}{mark}"

    @property
    def thinking_tokens(self) -> tuple[int, int] | None:
        """Tokens that begin and end the thinking phase; None if the rule does not use it."""
        if self.verification != "relaxed":
            return None
        return self.begin_thinking_phase_token, self.end_thinking_phase_token

    @property
    def wants_draft_probs(self) -> bool:
        """True if the rule uses the distributions that nodes were drawn from."""
        return self.verification in _WITH_PROBS

    @property
    def shares_noise(self) -> bool:
        """True if a node drawn with the target's noise is accepted more often."""
        return self.verification in _OWN_DRAWS

    @property
    def salts_rounds(self) -> bool:
        """True if a round may not reuse the noise of nodes that an earlier round did not emit.

        The rule `block` takes such nodes into account, and so does a speculation cache.
        """
        return self.wants_draft_probs

    @property
    def draft_len(self) -> int:
        """Effective length: `max_draft_len`, or the section's default."""
        return self.max_draft_len or 0

    @property
    def max_nodes(self) -> int:
        """Maximum number of draft nodes per request and step."""
        return self.draft_len

    def nodes_at(self, num_running: int, most: int) -> int:
        """Returns `most` draft nodes per request, or fewer at this number of running requests."""
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
    """A section with a minimum length of drafts."""

    draft_min: int = Field(0, ge=0, le=LONGEST_DRAFT, description="Shorter drafts are dropped.")

    @model_validator(mode="after")
    def _lengths_in_order(self) -> ShortestDraft:
        if self.draft_len:
            why = ": nothing would ever be drafted"
            check_order("draft_min", self.draft_min, "max_draft_len", self.draft_len, why)
        return self


class PlacedConfig(SpeculationBase):
    """A drafter with weights, which runs in the target's workers or in its own."""

    has_model = True
    of_separate: ClassVar[tuple[str, ...]] = ("draft_timeout_s",)  # keys of placement `separate`

    placement: Literal["separate", "colocated"] = "separate"
    """separate: in its own workers; colocated: in the target's."""
    draft_timeout_s: float | None = Field(None, gt=0, le=60)
    """separate: seconds after which a step proceeds without the draft. None: 0.1 to 0.25, depending
    on how long drafts take, or the duration of a target step, if that is longer."""

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
    """Drafts of the next step, which a separate drafter prepares while the target verifies."""

    outcomes: int = Field(12, ge=1, le=256)
    """Outcomes prepared per request and step, each a number of accepted tokens and the token after
    them. With coupled, more outcomes with fewer tokens each, where that is more likely to be
    useful."""
    depth: int | None = Field(None, ge=1, le=LONGEST_DRAFT)
    """Tokens prepared per outcome; default: max_draft_len."""
    budget: int = Field(64, ge=1, le=4096)
    """Outcomes prepared per step for all requests together."""
    on_miss: Literal["auto", "draft", "none"] = "auto"
    """What happens if the outcome was not prepared. draft: the step waits for a draft; none: it
    proceeds without one; auto: whichever gives more tokens per second."""
    adaptive: bool = True
    """Prepares fewer outcomes if the drafter falls behind, and none where that measurably gives
    more tokens per second."""


class PreparingConfig(PlacedConfig):
    """A drafter of chains that can prepare chains for the next step."""

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
        """Number of tokens prepared per outcome, if there is a speculation cache."""
        cache = self.speculation_cache
        return (cache.depth if cache else None) or max(1, self.draft_len)
