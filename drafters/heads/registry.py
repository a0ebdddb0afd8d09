"""From a configuration section to its head. A new head adds one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...config import (
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MTPConfig,
    ReDrafterConfig,
)
from .eagle_head import load_eagle
from .eagle_load import read_eagle
from .medusa import load_medusa
from .mtp_head import load_mtp
from .mtp_load import read_mtp
from .protocol import Head, TargetFacts
from .redrafter import load_redrafter

_LOADERS: dict[type[HeadConfig], Callable[[Any, TargetFacts], Head]] = {
    EagleConfig: load_eagle,
    Eagle3Config: load_eagle,
    MedusaConfig: load_medusa,
    MTPConfig: load_mtp,
    ReDrafterConfig: load_redrafter,
}
_READERS: dict[type[HeadConfig], Callable[[Any, TargetFacts], object]] = {
    **_LOADERS,
    EagleConfig: read_eagle,
    Eagle3Config: read_eagle,
    MTPConfig: read_mtp,
}
"""Without what only a head at work needs."""


def build_head(config: HeadConfig, target: TargetFacts) -> Head:
    """The head that `config` describes, loaded.

    Raises:
        CheckpointError: its tensors are not what they should be, or do not fit the target.
        ConfigError: `config` asks for more than the checkpoint has.
    """
    return _LOADERS[type(config)](config, target)


def check_head(config: HeadConfig, target: TargetFacts) -> None:
    """That the head's files are whole and fit the target; no weights are read.

    Raises as `build_head` does.
    """
    _READERS[type(config)](config, replace(target, device=torch.device("meta")))
