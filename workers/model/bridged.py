"""The bridge's forward over a paged cache, and what it observes of every layer's attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...scheduler.types import IntArray, StepInput
from ..attention import AttentionBackend, KVCache, SdpaBackend
from .bridge import Forward
from .facts import AttentionFacts
from .info import ModelInfo


class BridgeRunner:
    """Transformers' modules as a `Runner`."""

    def __init__(self, module: Any, info: ModelInfo) -> None:
        self._forward = Forward(module)
        self._module = module
        self.backend: AttentionBackend = SdpaBackend()
        self.facts = self._observe(info)
        self.kv_shapes = tuple(facts.kv_shape for facts in self.facts)

    def run(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        def put(values: IntArray) -> Tensor:
            return torch.from_numpy(values).to(cache.device, torch.int64, non_blocking=True)

        every_row = len(step.rows) == len(step.token_ids)
        return self._forward(
            put(step.token_ids),
            put(step.positions),
            None if every_row else put(step.rows),
            self.backend.begin(step, cache),
            capture,
        )

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        return self._forward.logits(states)

    @torch.inference_mode()
    def _observe(self, info: ModelInfo) -> tuple[AttentionFacts, ...]:
        """Run one token to see what each layer's attention is called with."""
        observer = _Observer()
        device = self._module.get_input_embeddings().weight.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        logits = self._forward(zero, zero, None, observer)[0]
        assert logits.shape == (1, info.vocab_size), (logits.shape, info.vocab_size)
        others = [layer for layer in range(info.num_layers) if layer not in observer.facts]
        if others:
            raise CheckpointError(
                f"layers {others} of this {type(self._module).__name__} keep a state other than "
                "keys and values; recurrent and hybrid models are not served",
                field="model",
            )
        return tuple(observer.facts[layer] for layer in sorted(observer.facts))


class _Observer:
    """Stands in for attention and notes what it is called with."""

    def __init__(self) -> None:
        self.facts: dict[int, AttentionFacts] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,  # [num_heads]
        chunk: int | None = None,
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        self.facts[layer] = AttentionFacts(
            query.shape[1],
            key.shape[1],
            key.shape[2],
            value.shape[2],
            scale,
            window,
            softcap,
            sinks,
            chunk,
        )
        return value.new_zeros(query.shape[0], query.shape[1], value.shape[2])
