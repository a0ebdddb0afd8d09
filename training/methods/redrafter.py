"""Method `redrafter`: a recurrent head, unrolled over the text that follows every position.

From row t (c is its hidden state, s begins at zero) position d reads the embeddings of tokens
t + 1 .. t + 1 + d and predicts token t + 2 + d, so its teacher is the target at position
t + 1 + d. All rows of a batch are unrolled together. The text is given, not drafted: a draft that
errs is not continued when it serves, so that what the head reads there is the text as well.

Source: Zhang et al. 2024, arXiv:2403.09919, section 3 (recurrent head, knowledge distillation).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...drafters.heads.redrafter import ReDrafterModule
from ..options import ReDrafterOptions
from ..protocol import FrozenTarget, Losses, TargetStates, Windows
from ..state import write_tensors
from .distil import chain_losses, output_rows

MODEL_TYPE = "recurrent_drafting_drafter"  # as published


class ReDrafterMethod:
    """Trains the module that serves."""

    def __init__(self, options: ReDrafterOptions, target: FrozenTarget) -> None:
        facts = target.facts
        self.capture: tuple[int, ...] = (facts.num_layers,)
        exit_dim = options.exit_dim or 2 * facts.hidden_size
        self.module = ReDrafterModule(
            facts.hidden_size,
            facts.vocab_size,
            exit_dim,
            options.num_draft_layers,
            rnn=options.rnn,
        )
        self._options, self._target, self._exit_dim = options, target, exit_dim
        self.module.to(facts.device)
        _begin(self.module, target if options.init_from_target else None)

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """The mean over positions; without gradients, `max_draft_len` of them are judged."""
        options, window_len = self._options, windows.tokens.shape[1]
        hidden = states.hidden[self.capture[0]].float()
        embedded = target.embed(windows.tokens).float()
        count = options.num_positions
        if not torch.is_grad_enabled():
            count = max(count, options.max_draft_len)

        def levels() -> Iterator[tuple[Tensor, float]]:
            state = hidden.new_zeros(hidden[:, 2:].shape)
            for index in range(min(count, window_len - 2)):
                inside = window_len - 2 - index  # rows whose token is within the window
                read = embedded[:, 1 + index : 1 + index + inside]
                state = self.module.recur(read, state[:, :inside])
                yield self.module(hidden[:, :inside], state), 0.0

        return chain_losses(
            levels(),
            windows,
            states,
            argmax_weight=options.argmax_weight,
            decay=options.position_decay,
            num_trained=options.num_positions,
        )

    def export(self, folder: Path) -> None:
        config = {
            "architectures": ["Drafter"],
            "model_type": MODEL_TYPE,
            "vocab_size": self._target.facts.vocab_size,
            "hidden_size": self._target.facts.hidden_size,
            "exit_dim": self._exit_dim,
            "num_draft_layers": self._options.num_draft_layers,
            "rnn": self._options.rnn,
        }
        write_tensors(folder, self.module.state_dict(), config, self._target)


@torch.no_grad()
def _begin(module: ReDrafterModule, target: FrozenTarget | None) -> None:
    """First weights: the blocks are the identity; the output layer is the target's for c, and zero
    for s."""
    layers: list[Any] = list(module.lm_head)
    for block in layers[:-1]:
        nn.init.zeros_(block.linear.weight)
        nn.init.zeros_(block.linear.bias)
    hidden, output, enter = module.hidden_size, layers[-1].weight, module.input_proj
    if target is None or output.shape[1] < hidden:
        return
    if enter is not None:
        nn.init.zeros_(enter.bias)
        nn.init.zeros_(enter.weight[:hidden])
        nn.init.eye_(enter.weight[:hidden, :hidden])
    nn.init.zeros_(output)
    output[:, :hidden] = output_rows(target)
