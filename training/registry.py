"""The training methods by name: options, builder and default learning rates.

A method's module is imported when it is built: it imports torch, which the help of a command and
the check of its options do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..config import Strict
from .options import (
    DraftOptions,
    Eagle3TrainOptions,
    EagleOptions,
    MedusaOptions,
    MTPOptions,
    ReDrafterOptions,
)

if TYPE_CHECKING:
    from .protocol import FrozenTarget, Method


@dataclass(frozen=True, slots=True)
class Entry:
    """A training method."""

    summary: str  # one line, for the help of the command line
    options: type[Strict]
    build: Callable[[Any, FrozenTarget], Method]  # arguments: options, target
    adam_lr: float = 1e-3
    muon_lr: float = 1e-2


def _entry(name: str, summary: str, options: type[Strict], **rates: float) -> Entry:
    """The entry of a class of `methods/`, given as module and class."""
    module, _, kind = name.partition(".")

    def build(given: Any, target: FrozenTarget) -> Method:
        made: Method = getattr(import_module(f".methods.{module}", __package__), kind)(
            given, target
        )
        return made

    return Entry(summary, options, build, **rates)


METHODS: Mapping[str, Entry] = MappingProxyType(
    {
        "medusa": _entry(
            "medusa.MedusaMethod",
            "Heads on the target's last hidden state (Medusa).",
            MedusaOptions,
            muon_lr=2e-2,
        ),
        "draft": _entry(
            "draft.DraftMethod",
            "A small model of the target's family, distilled from it.",
            DraftOptions,
            adam_lr=3e-3,
            muon_lr=2e-2,
        ),
        "eagle": _entry(
            "eagle.EagleMethod",
            "A layer that predicts the target's next feature (EAGLE-1 and 2).",
            EagleOptions,
        ),
        "eagle3": _entry(
            "eagle.Eagle3Method",
            "A layer on features of several target layers (EAGLE-3).",
            Eagle3TrainOptions,
        ),
        "mtp": _entry("mtp.MTPMethod", "A multi-token-prediction module (MTP).", MTPOptions),
        "redrafter": _entry(
            "redrafter.ReDrafterMethod",
            "A recurrent head on the target's last hidden state (ReDrafter).",
            ReDrafterOptions,
        ),
    }
)
