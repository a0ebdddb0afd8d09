"""The training methods by name: options, class and default learning rates.

A method's module is imported when it is built: it imports torch, which the help of a command and
the check of its options do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..config import Strict
from .options import (
    DFlashTrainOptions,
    DraftOptions,
    DSparkTrainOptions,
    Eagle3TrainOptions,
    EagleOptions,
    MedusaOptions,
    MTPOptions,
    PARDOptions,
    PEagleOptions,
    ReDrafterOptions,
)

if TYPE_CHECKING:
    from .protocol import FrozenTarget, Method


@dataclass(frozen=True, slots=True)
class Entry:
    """A training method."""

    method: str  # module and class, in `methods/`
    options: type[Strict]
    adam_lr: float = 1e-3
    muon_lr: float = 1e-2

    @property
    def summary(self) -> str:
        """The first line of what its options say of it, for the help of the command line."""
        return (self.options.__doc__ or "").partition("\n")[0]

    def build(self, options: Any, target: FrozenTarget) -> Method:
        """The method with these options, of the type that the entry has."""
        module, _, kind = self.method.partition(".")
        found = import_module(f".methods.{module}", __package__)
        return getattr(found, kind)(options, target)


METHODS: Mapping[str, Entry] = MappingProxyType(
    {
        "medusa": Entry("medusa.MedusaMethod", MedusaOptions, muon_lr=2e-2),
        "draft": Entry("draft.DraftMethod", DraftOptions, adam_lr=3e-3, muon_lr=2e-2),
        "pard": Entry("pard.PARDMethod", PARDOptions, adam_lr=3e-3, muon_lr=2e-2),
        "eagle": Entry("eagle.EagleMethod", EagleOptions),
        "eagle3": Entry("eagle.Eagle3Method", Eagle3TrainOptions),
        "peagle": Entry("eagle.PEagleMethod", PEagleOptions),
        "dflash": Entry("dflash.DFlashMethod", DFlashTrainOptions),
        "dspark": Entry("dflash.DSparkMethod", DSparkTrainOptions),
        "mtp": Entry("mtp.MTPMethod", MTPOptions),
        "redrafter": Entry("redrafter.ReDrafterMethod", ReDrafterOptions),
    }
)
