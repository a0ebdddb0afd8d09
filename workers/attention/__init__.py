"""Paged tree attention: the cache, the plan of a step, and the backends that run it."""

from .backend import AttentionBackend, StepAttention
from .cache import KVCache, KVShape
from .sdpa import SdpaBackend

__all__ = ["AttentionBackend", "KVCache", "KVShape", "SdpaBackend", "StepAttention"]
