"""Configuration: read once, checked strictly, frozen."""

from .engine import EngineConfig, ResourcesConfig
from .speculation import (
    DraftModelConfig,
    DraftTargetConfig,
    LookaheadConfig,
    NGramConfig,
    NoSpeculation,
    SpeculationBase,
    SpeculativeConfig,
)
from .strict import Strict, config_error, parse, unknown_key

__all__ = [
    "DraftModelConfig",
    "DraftTargetConfig",
    "EngineConfig",
    "LookaheadConfig",
    "NGramConfig",
    "NoSpeculation",
    "ResourcesConfig",
    "SpeculationBase",
    "SpeculativeConfig",
    "Strict",
    "config_error",
    "parse",
    "unknown_key",
]
