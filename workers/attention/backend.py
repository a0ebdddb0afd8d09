"""What an attention backend is: it plans a step once, then attends layer by layer.

`workers/model/bridge.py` hands a step's attention to every layer and knows no backend by name.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...scheduler.types import StepInput
from .cache import KVCache


class StepAttention(Protocol):
    """One step's attention: paged, over block tables, with a tree among the new tokens."""

    def attend(
        self,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        scale: float,
        window: int | None,  # a query sees keys whose position is above its own minus `window`
        softcap: float | None,
        sinks: Tensor | None,  # [num_heads], logits of a key that holds no value
        chunk: int | None = None,  # a query sees keys whose position // chunk is its own's
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        """Write keys and values into their slots, then attend."""
        ...


class AttentionBackend(Protocol):
    """Makes a step's attention: all that is the same for every layer is computed here."""

    def begin(self, step: StepInput, cache: KVCache) -> StepAttention: ...
