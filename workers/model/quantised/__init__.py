"""Quantised checkpoints: which formats are read, and their weights as tensors."""

from .formats import Layout, WeightFormat, find_format
from .sources import QuantisedSource, make_source

__all__ = ["Layout", "QuantisedSource", "WeightFormat", "find_format", "make_source"]
