"""The target model: transformers' own modules, sharded by us, over paged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .info import ModelInfo, describe
    from .paged import ForwardChoice, PagedModel
    from .target import load_ends, load_model, whole_module

__all__ = [
    "ForwardChoice",
    "ModelInfo",
    "PagedModel",
    "describe",
    "load_ends",
    "load_model",
    "whole_module",
]


def __getattr__(name: str) -> Any:
    """Imports at first use: what describes a model does not need what computes it."""
    from importlib import import_module

    homes = {
        "ForwardChoice": ".paged",
        "ModelInfo": ".info",
        "PagedModel": ".paged",
        "describe": ".info",
        "load_ends": ".target",
        "load_model": ".target",
        "whole_module": ".target",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name], __name__), name)
