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
from ..protocol import FrozenTarget, TargetStates, Windows
from ..state import write_tensors
from .distil import ChainMethod, output_rows

MODEL_TYPE = "recurrent_drafting_drafter"  # as published


class ReDrafterMethod(ChainMethod):
    """Trains the module that is used for serving."""

    module: ReDrafterModule

    def __init__(self, options: ReDrafterOptions, target: FrozenTarget) -> None:
        facts = target.facts
        super().__init__(
            target,
            (facts.num_layers,),
            argmax_weight=options.argmax_weight,
            decay=options.position_decay,
            num_trained=options.num_positions,
            num_judged=options.max_draft_len,
        )
        self._options = options
        self._exit_dim = options.exit_dim or 2 * facts.hidden_size
        self.module = ReDrafterModule(
            facts.hidden_size,
            facts.vocab_size,
            self._exit_dim,
            options.num_draft_layers,
            rnn=options.rnn,
        )
        self.module.to(facts.device)
        _begin(self.module, target if options.init_from_target else None)

    def levels(
        self, windows: Windows, states: TargetStates, target: FrozenTarget, count: int
    ) -> Iterator[tuple[Tensor, float]]:
        hidden = states.hidden[self.capture[0]].float()
        embedded = target.embed(windows.tokens).float()
        num_rows = hidden.shape[1] - 2
        state = hidden.new_zeros(hidden[:, 2:].shape)
        for index in range(count):
            inside = num_rows - index  # rows whose token is within the window
            read = embedded[:, 1 + index : 1 + index + inside]
            state = self.module.recur(read, state[:, :inside])
            yield self.module(hidden[:, :inside], state), 0.0

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
