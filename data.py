"""Offline batches on Ray Data, with one engine per worker."""

from .cluster.data import Processor, ProcessorConfig, build_processor

__all__ = ["Processor", "ProcessorConfig", "build_processor"]
