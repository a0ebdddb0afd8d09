"""What an attention backend is: it plans a step once, then attends layer by layer.

The model side (`workers/model/bridge.py`) hands every layer an `AttentionContext` and knows no
backend by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...scheduler.types import StepInput
from .cache import KVCache

Plan = TypeVar("Plan")


class AttentionBackend(Protocol[Plan]):
    """Paged attention of a flat batch over block tables, with a tree among the new tokens."""

    def plan(self, step: StepInput, block_size: int, device: torch.device) -> Plan:
        """All that is the same for every layer of one step, on `device`."""
        ...

    def attend(
        self,
        plan: Plan,
        cache: KVCache,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        *,
        scale: float,
        window: int | None,  # a query sees keys whose position is above its own minus `window`
        softcap: float | None,
        sinks: Tensor | None,  # [num_heads], logits of a key that holds no value
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        """Write keys and values into their slots, then attend."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionContext(Generic[Plan]):
    """One step's attention, as it travels through the model's layers."""

    backend: AttentionBackend[Plan]
    plan: Plan
    cache: KVCache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **kinds: Any) -> Tensor:
        return self.backend.attend(self.plan, self.cache, layer, query, key, value, **kinds)
