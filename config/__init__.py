"""Configuration: read once, checked strictly, frozen."""

from .engine import EngineConfig, ResourcesConfig
from .heads import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MTPConfig, ReDrafterConfig
from .lookup import (
    NGramCacheConfig,
    NGramMapK4VConfig,
    NGramMapKConfig,
    NGramModConfig,
    NGramSimpleConfig,
    PromptLookupConfig,
    SuffixConfig,
)
from .section import LONGEST_DRAFT, SpeculationBase
from .speculation import (
    SECTIONS,
    ComposeConfig,
    DraftModelConfig,
    DraftTargetConfig,
    LookaheadConfig,
    NGramConfig,
    NoSpeculation,
    SpeculativeConfig,
    UserConfig,
)
from .strict import Strict, config_error, parse, unknown_key

__all__ = [
    "LONGEST_DRAFT",
    "SECTIONS",
    "ComposeConfig",
    "DraftModelConfig",
    "DraftTargetConfig",
    "Eagle3Config",
    "EagleConfig",
    "EngineConfig",
    "HeadConfig",
    "LookaheadConfig",
    "MTPConfig",
    "MedusaConfig",
    "NGramCacheConfig",
    "NGramConfig",
    "NGramMapK4VConfig",
    "NGramMapKConfig",
    "NGramModConfig",
    "NGramSimpleConfig",
    "NoSpeculation",
    "PromptLookupConfig",
    "ReDrafterConfig",
    "ResourcesConfig",
    "SpeculationBase",
    "SpeculativeConfig",
    "Strict",
    "SuffixConfig",
    "UserConfig",
    "config_error",
    "parse",
    "unknown_key",
]
