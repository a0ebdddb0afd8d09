"""Configuration: read once, checked strictly, frozen."""

from .engine import EngineConfig, ResourcesConfig
from .lookup import (
    NGramCacheConfig,
    NGramMapK4VConfig,
    NGramMapKConfig,
    NGramModConfig,
    NGramSimpleConfig,
    PromptLookupConfig,
    SuffixConfig,
)
from .section import SpeculationBase
from .speculation import (
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
    "ComposeConfig",
    "DraftModelConfig",
    "DraftTargetConfig",
    "EngineConfig",
    "LookaheadConfig",
    "NGramCacheConfig",
    "NGramConfig",
    "NGramMapK4VConfig",
    "NGramMapKConfig",
    "NGramModConfig",
    "NGramSimpleConfig",
    "NoSpeculation",
    "PromptLookupConfig",
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
