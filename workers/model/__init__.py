"""The target model: transformers' own modules, sharded by us, over paged attention."""

from .ends import load_ends
from .target import ModelInfo, PagedModel, describe, load_model, whole_module

__all__ = ["ModelInfo", "PagedModel", "describe", "load_ends", "load_model", "whole_module"]
