"""Types that cross process boundaries: frozen, slotted; arrays are int32 numpy unless noted.

A step goes: `Batch` (who runs) + `Draft`s (guesses) -> `StepPlan` (the message to every rank; both
in `plan.py`) -> `StepInput` (a rank's flat arrays) -> `Verdict` (rank 0's answer) -> `Delta`s (what
the edge streams).
Dimension names are those of the glossary in ARCHITECTURE.md.
"""

from __future__ import annotations

from .arrays import FloatArray, IntArray, ints, slots_of, starts_of
from .delta import Delta, RequestTimes, SpeculationUsage, StepTrace, TokenLogprobs
from .draft import Draft, DraftProbs, Masks
from .request import Keep, Request, SpeculationOptions
from .step import Bias, KnownTokens, Penalties, SamplingRows, StepInput
from .verdict import Logprobs, NextDrafts, Verdict

__all__ = [
    "Bias",
    "Delta",
    "Draft",
    "DraftProbs",
    "FloatArray",
    "IntArray",
    "Keep",
    "KnownTokens",
    "Logprobs",
    "Masks",
    "NextDrafts",
    "Penalties",
    "Request",
    "RequestTimes",
    "SamplingRows",
    "SpeculationOptions",
    "SpeculationUsage",
    "StepInput",
    "StepTrace",
    "TokenLogprobs",
    "Verdict",
    "ints",
    "slots_of",
    "starts_of",
]
