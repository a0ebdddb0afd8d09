"""The frozen target of training: transformers' own model, unsharded, without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from ..config.trust import reason
from ..drafters.heads.protocol import TargetFacts
from ..errors import CheckpointError
from ..workers.model.checkpoint.folder import require_checkpoint
from .protocol import TargetStates


class LoadedTarget:
    """`FrozenTarget` over a checkpoint folder.

    Args:
        dtype: None: the checkpoint's.

    Raises:
        CheckpointError: the folder holds no causal language model.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self.path = path
        try:
            require_checkpoint(path, allow_pickle=allow_pickle)
        except CheckpointError as error:
            raise CheckpointError(f"target: {error.message}", field="target") from None
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype or "auto",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                use_safetensors=None if allow_pickle else True,
            )
        except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"target: {str(path)!r} is no causal language model: {reason(error, path)}",
                field="target",
            ) from error
        self.model: Any = model.to(device).eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.facts = TargetFacts(
            self.config.hidden_size,
            self.config.vocab_size,
            self.config.num_hidden_layers,
            self.model.dtype,
            device,
        )

    def embed(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., hidden_size]
        with torch.no_grad():
            states: Tensor = self.model.get_input_embeddings()(token_ids)
        return states

    def unembed(self, states: Tensor) -> Tensor:  # [..., hidden_size] -> [..., vocab]
        output = self.model.get_output_embeddings()
        return linear(states, output.weight.to(states.dtype), output.bias)

    @torch.no_grad()
    def states(self, tokens: Tensor, capture: tuple[int, ...]) -> TargetStates:
        """One forward; hidden state i is the input of layer i, the last one after the norm."""
        out = self.model(input_ids=tokens, use_cache=False, output_hidden_states=list(capture))
        wanted = sorted(set(capture))
        if not wanted:
            return TargetStates({}, out.logits)
        # transformers returns the requested layers in ascending order, or all layers.
        if len(out.hidden_states) == len(wanted):
            hidden = dict(zip(wanted, out.hidden_states, strict=True))
        else:
            hidden = {layer: out.hidden_states[layer] for layer in wanted}
        return TargetStates(hidden, out.logits)
