"""What every drafter's section of the configuration shares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .strict import Strict


class SpeculationBase(Strict):
    """What every drafter's section shares."""

    max_draft_len: int = Field(4, ge=0, le=64)  # draft nodes per request and step
    verification: Literal["coupled", "rejection"] = "coupled"
    max_concurrency: int | None = Field(None, ge=1)  # no drafts while more requests run

    @property
    def sections(self) -> tuple[SpeculationBase, ...]:
        """The sections of single drafters: this one, or the members of a composition."""
        return (self,)
