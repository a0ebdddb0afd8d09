"""Outrider: speculative decoding for large language models, distributed on Ray.

`from outrider import LLM, SamplingParams` is all that most users need. Names load on first use,
so that importing the package costs neither torch nor ray.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

# Read once, when torch loads: OpenMP threads that spin while they wait for work make a machine
# with more threads than cores ten times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Read once, at the first product: what oneDNN and torch keep for every number of rows and shape of
# a weight. 300 numbers with four weights take 720 MB unbounded, 86 with 64 entries of each, and
# bounding one of the two does little.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "128")

if TYPE_CHECKING:
    from .cluster.backend import LLM, AsyncLLM
    from .engine.frontend import LoRARequest
    from .engine.outputs import CompletionOutput, RequestOutput
    from .scheduler.sampling import SamplingParams, StructuredOutputs


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = {
        "LLM": ".cluster.backend",
        "AsyncLLM": ".cluster.backend",
        "CompletionOutput": ".engine.outputs",
        "LoRARequest": ".engine.frontend",
        "RequestOutput": ".engine.outputs",
        "SamplingParams": ".scheduler.sampling",
        "StructuredOutputs": ".scheduler.sampling",
    }
    if name.endswith("DecodingConfig"):  # TensorRT-LLM's names, one for each drafter
        homes[name] = ".config.compat.translate"
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(homes[name], __name__)
    try:
        return getattr(home, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
