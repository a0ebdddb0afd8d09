"""EAGLE's modules: one or a few layers that predict the target's next feature, and so its token.

Row j consumes the target's feature f_j and the embedding of token j + 1, stores its keys and
values in token j's slot, and predicts token j + 2. While drafting, the head's own output replaces
the feature.

- EAGLE-1 (arXiv:2401.15077): f is the target's output after its final norm; the layer reads
  fc(embedding, f) without an input norm, and the target's output layer reads the result. EAGLE-2
  differs only in the tree. Llama-4's heads have both norms, and layers without rotary positions.
- EAGLE-3 (arXiv:2503.01840): f is fc over the inputs of three layers, low to high; the attention
  reads the concatenation of both normed halves; the output layer may cover a reduced vocabulary.
- P-EAGLE (arXiv:2602.01469): EAGLE-3 whose later rows of a draft read the embedding of a mask token
  and a learnt state in place of features, so that all of them are computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .llama import LayerSizes, LlamaModule, RMSNorm, Rope
from .protocol import Entrance

BESIDE = ("input_layernorm.", "hidden_norm.")
"""Norms of `Eagle3Module` before layer 0, which checkpoints have among layer 0's tensors."""


class Eagle1Module(LlamaModule):
    """EAGLE-1 and EAGLE-2.

    Args:
        options: of `LlamaModule`, which has no norms here by default; only Llama-4's heads have
            more than an embedding of their own.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        num_layers: int,
        rope: Rope,
        *,
        fc_bias: bool,
        para_norm: bool = False,
        **options: Any,
    ) -> None:
        hidden = sizes.hidden_size
        options = {"input_norm": False, "final_norm": False, **options}
        super().__init__((sizes,) * num_layers, rope, embedding_size=hidden, **options)
        self.fc = nn.Linear(2 * hidden, hidden, bias=fc_bias)
        self.para_norm = para_norm
        if para_norm:
            self.embedding_layernorm = RMSNorm(hidden, sizes.eps)
            self.hidden_states_layernorm = RMSNorm(hidden, sizes.eps)

    def entrance(self) -> Entrance:
        if not self.para_norm:
            return Entrance(join=self.fc)
        norms = self.embedding_layernorm, self.hidden_states_layernorm
        return Entrance((), None, None, *norms, self.fc)


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """The published variants of EAGLE-3."""

    num_features: int = 3  # concatenated target states; 0: one state, without fc
    norm_before_residual: bool = False  # the residual is the normed feature
    fc_norm: bool = False  # a norm per captured state, before fc
    norm_before_fc: bool = False  # one norm over all of them
    norm_output: bool = False  # the next feature is the output after the final norm
    fc_bias: bool = False
    # Width of the embedding that `eh_proj` joins to the feature before a plain layer 0
    # (TensorRT-LLM's `eh_proj_before_attn`); 0: layer 0 reads both directly.
    eh_proj: int = 0
    eh_bias: bool = False
    mask_shape: tuple[int, ...] = ()  # of P-EAGLE's `mask_hidden`; (): there is none


class Eagle3Module(LlamaModule):
    """EAGLE-3 in its published variants."""

    def __init__(
        self,
        sizes: LayerSizes,  # of layer 0; the others read hidden_size
        num_layers: int,
        rope: Rope,
        options: Eagle3Options,
        *,
        target_hidden_size: int,
        draft_vocab_size: int | None,
        vocab_size: int | None = None,
    ) -> None:
        hidden, eps = sizes.hidden_size, sizes.eps
        width, count = target_hidden_size, options.num_features
        embedding_size = options.eh_proj or sizes.input_size - hidden
        later = replace(sizes, input_size=hidden)
        super().__init__(
            (later if options.eh_proj else sizes, *(later,) * (num_layers - 1)),
            rope,
            embedding_size=embedding_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            input_norm=bool(options.eh_proj),
            norm_output=options.norm_output,
        )
        self.options = options
        if options.eh_proj:
            self.enorm = RMSNorm(embedding_size, eps)
            self.eh_proj = nn.Linear(embedding_size + hidden, hidden, bias=options.eh_bias)
        else:
            self.input_layernorm = RMSNorm(embedding_size, eps)
            self.hidden_norm = RMSNorm(hidden, eps)
        if count:
            self.fc = nn.Linear(count * width, hidden, bias=options.fc_bias)
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count))
        if options.norm_before_fc:
            self.input_norm = RMSNorm(count * width, eps)
        if options.mask_shape:
            self.mask_hidden = nn.Parameter(torch.zeros(options.mask_shape))

    def entrance(self) -> Entrance:
        options = self.options
        fuse = self.fc if options.num_features else None
        state_norms = tuple(self.fc_norm) if options.fc_norm else ()
        fused_norm = self.input_norm if options.norm_before_fc else None
        if options.eh_proj:
            return Entrance(state_norms, fused_norm, fuse, self.enorm, None, self.eh_proj)
        norms = self.input_layernorm, self.hidden_norm
        return Entrance(state_norms, fused_norm, fuse, *norms, None, options.norm_before_residual)

    def mask_feature(self) -> Tensor:  # [1, hidden_size]
        """The feature of P-EAGLE's masks, which stand for tokens without states of the target."""
        return self.fuse(self.mask_hidden.reshape(1, -1))
