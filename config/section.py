"""What every drafter's section of the configuration shares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .strict import Strict


class SpeculationBase(Strict):
    """What every drafter's section shares."""

    max_draft_len: int = Field(4, ge=0, le=64)  # draft nodes per request and step
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    lossy: bool = False  # says that `typical`, which changes what is emitted, is wanted
    max_concurrency: int | None = Field(None, ge=1)  # no drafts while more requests run

    @model_validator(mode="after")
    def _lossy_by_name(self) -> SpeculationBase:
        if self.lossy != (self.verification == "typical"):
            raise ValueError(
                "verification 'typical' is lossy: it changes what is emitted; give `lossy: true` "
                "with it, and with nothing else"
            )
        return self

    @property
    def max_nodes(self) -> int:
        """Most draft nodes per request and step."""
        return self.max_draft_len

    @property
    def sections(self) -> tuple[SpeculationBase, ...]:
        """The sections of single drafters: this one, or the members of a composition."""
        return (self,)
