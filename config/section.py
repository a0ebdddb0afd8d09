"""What every drafter's section of the configuration shares: length, load, verification."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .strict import Strict, at_key, tag

# Rules with keys of their own: the section's key -> the rule's parameter.
RULE_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "typical": {"posterior_threshold": "threshold", "posterior_alpha": "alpha"},
        "relaxed": {
            "relaxed_topk": "topk",
            "relaxed_delta": "delta",
            "begin_thinking_phase_token": "begin",
            "end_thinking_phase_token": "end",
        },
        "synthetic": {"synthetic_acceptance_rate": "rate"},
    }
)
LONGEST_DRAFT = 1024  # nodes of any section, per request and step
BatchSize = Annotated[int, Field(ge=1)]
DraftLength = Annotated[int, Field(ge=0, le=LONGEST_DRAFT)]
_LOSSY = ("typical", "relaxed", "synthetic")  # change what is emitted
_WITH_PROBS = ("rejection", "block")  # weigh a node by the probability it was drawn with
_OWN_DRAWS = ("coupled", "relaxed")  # compare a node with the target's own draw


class SpeculationBase(Strict):
    """What every drafter's section shares."""

    max_draft_len: int | None = Field(
        4, ge=0, le=LONGEST_DRAFT, description="Draft nodes per request and step."
    )
    verification: Literal["coupled", "rejection", "block", "typical", "relaxed", "synthetic"] = (
        Field("coupled", description="Rule by which drafted tokens are accepted.")
    )
    lossy: bool = Field(
        False, description="Confirms a rule that changes the output: typical, relaxed, synthetic."
    )
    posterior_threshold: float = Field(
        0.09,
        gt=0,
        le=1,
        description="typical: the probability that is always enough for a token.",
    )
    posterior_alpha: float = Field(
        0.3, gt=0, allow_inf_nan=False, description="typical: factor of exp(-entropy)."
    )
    relaxed_topk: int = Field(
        1, ge=1, le=1024, description="relaxed: most likely tokens that may be accepted."
    )
    relaxed_delta: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="relaxed: how far below the best token's probability.",
    )
    begin_thinking_phase_token: int = Field(
        128798, ge=0, lt=2**31, description="relaxed: id that begins the thinking phase."
    )
    end_thinking_phase_token: int = Field(
        128799, ge=0, lt=2**31, description="relaxed: id that ends the thinking phase."
    )
    synthetic_acceptance_rate: float | None = Field(
        None, ge=0, le=1, description="synthetic: probability that a coin accepts a node."
    )
    max_concurrency: int | None = Field(
        None, ge=1, description="Running requests above which nothing is drafted."
    )
    draft_len_schedule: dict[BatchSize, DraftLength] | None = Field(
        None,
        min_length=1,
        description="Most draft nodes by the number of running requests; above the last, none.",
    )
    adaptive_draft_len: bool = Field(
        False,
        description="Drafts fewer nodes, or none, where that gives more tokens per second, by "
        "measured acceptance and step times.",
    )
    acceptance_window: int = Field(
        0, ge=0, description="Finished requests over which acceptance is averaged; 0: off."
    )
    acceptance_length_threshold: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Accepted tokens per step below which drafting ends.",
    )

    @model_validator(mode="after")
    def _lossy_by_name(self) -> SpeculationBase:
        if self.lossy != (self.verification in _LOSSY):
            raise at_key(
                "lossy",
                f"verification {', '.join(map(repr, _LOSSY))} are lossy: they change what is "
                "emitted; give `lossy: true` with them, and with nothing else",
            )
        return self

    @model_validator(mode="after")
    def _keys_of_its_rule(self) -> SpeculationBase:
        for rule, keys in RULE_KEYS.items():
            for key in keys:  # defaults pass: a configuration written out in full is read again
                value, default = getattr(self, key), type(self).model_fields[key].default
                if rule != self.verification and value != default:
                    raise at_key(
                        key,
                        f"{key} belongs to verification {rule!r}; this is {self.verification!r}",
                    )
        if self.begin_thinking_phase_token == self.end_thinking_phase_token:
            raise at_key(
                "end_thinking_phase_token",
                "begin_thinking_phase_token and end_thinking_phase_token are the same token "
                f"({self.end_thinking_phase_token})",
            )
        return self

    @model_validator(mode="after")
    def _synthetic_has_a_rate(self) -> SpeculationBase:
        if self.is_synthetic and self.synthetic_acceptance_rate is None:
            raise at_key(
                "synthetic_acceptance_rate",
                "synthetic_acceptance_rate: verification 'synthetic' requires it, from 0 to 1",
            )
        return self

    @model_validator(mode="after")
    def _limits_of_load(self) -> SpeculationBase:
        if self.draft_len_schedule is not None and self.max_concurrency is not None:
            raise at_key(
                "max_concurrency",
                "max_concurrency: draft_len_schedule drafts nothing above its largest batch size; "
                "give one of the two",
            )
        if (self.acceptance_window == 0) != (self.acceptance_length_threshold == 0):
            raise at_key(
                "acceptance_window",
                "acceptance_window and acceptance_length_threshold belong together: so many "
                "finished requests, and the mean accepted tokens a step below which drafting ends",
            )
        return self

    @property
    def rule_parameters(self) -> tuple[tuple[str, float], ...]:
        """The verification rule's parameters by its own names."""
        keys = RULE_KEYS.get(self.verification, {})
        return tuple((name, getattr(self, key)) for key, name in keys.items())

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
        """Whether the rule looks ahead, so that no round may draw with an earlier one's noise."""
        return self.verification == "block"

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
