"""transformers without torch: most of a process's start, and of its memory, would be torch's.

transformers imports torch wherever it finds it, and takes along all that belongs to models. Its
tokenizers and configurations need none of that. Called by `Ingress` and by `EngineReplica`, whose
ranks are processes of their own: neither has another use for torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_HIDDEN = ("torch", "torchvision", "torchaudio")


@contextmanager
def without_torch(*, unless: bool = False) -> Iterator[None]:
    """transformers, if it is imported here for the first time, finds no torch.

    Args:
        unless: torch may be needed, as by a tokenizer's own code.
    """
    if unless or "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(_HIDDEN))
    try:
        yield
    finally:
        for name in _HIDDEN:
            del modules[name]
