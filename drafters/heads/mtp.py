"""Multi-token-prediction modules: a decoder layer of the target's own kind over one projection.

Row i of the first module consumes the target's state h_i (after its final norm) and the embedding
of token i + 1, and predicts token i + 2:

    x = eh_proj(enorm(embedding) beside hnorm(h));  y = layer(x);  z = norm(y);  logits = head(z)

Embedding and output layer are the target's. The next feature is z, or y where `pre_norm` says so.
A second module takes the first one's feature of row i and the embedding of token i + 2, and so
on; one module alone takes its own, as EAGLE's do. How they run in the worker is in `mtp_head.py`;
how files are read in `mtp_load.py`.

Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .block import Block
from .load import fail
from .protocol import Attend, HeadLayer


class MTPModule(nn.Module):
    """One module, built without weights on the meta device.

    Args:
        config: transformers' configuration of the target, or of a checkpoint like it.
        layer: of the head, where its keys and values are kept.
    """

    lm_head: nn.Linear | None = None  # the target's

    def __init__(self, config: Any, *, layer: int = 0, pre_norm: bool = False) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.block = Block(config)
        self.enorm, self.hnorm = self.block.new_norm(), self.block.new_norm()
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, device="meta")
        self.norm = self.block.new_norm()
        self.layer, self.pre_norm = layer, pre_norm

    def fuse(self, features: Tensor) -> Tensor:  # [num_rows, hidden_size], alike
        """The target's state is the first feature as it is."""
        return features

    def forward(
        self,
        embedded: Tensor,  # [num_rows, hidden_size]
        feature: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows]
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each: next feature, what is read
        states = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(feature)], dim=-1))
        states = self.block(states, positions, self.layer, attend)
        normed: Tensor = self.norm(states)
        return (states if self.pre_norm else normed), normed

    @torch.inference_mode()
    def kept(self) -> HeadLayer:
        """What a row leaves in the cache: observed, so true of any architecture.

        Raises:
            CheckpointError: the layer needs more of an attention than a head's has.
        """
        shapes: list[HeadLayer] = []

        def watch(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            shapes.append(HeadLayer(key.shape[1], key.shape[2], value.shape[2]))
            return value.new_zeros(query.shape[0], query.shape[1], value.shape[2])

        weight = self.eh_proj.weight
        row = weight.new_zeros(1, weight.shape[0])
        try:
            self(row, row, torch.zeros(1, dtype=torch.int64, device=weight.device), watch)
        except (RuntimeError, TypeError, ArithmeticError) as error:
            raise fail(f"the layer that config.json describes does not run: {error}") from None
        assert len(shapes) == 1, (len(shapes), "one layer attends once")
        return shapes[0]
