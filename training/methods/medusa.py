"""Method `medusa`: heads on the frozen target's last state, each a token further ahead.

Head d at row t predicts token t + 2 + d, so its teacher is the target at position t + 1 + d. A head
is initialized as the target's output layer behind blocks that add nothing.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.2.1 (Medusa-1), with the target's
distributions in place of the text's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...drafters.heads.medusa import MedusaModule
from ...errors import ConfigError
from ..options import MedusaOptions
from ..protocol import FrozenTarget, TargetStates, Windows
from ..state import write_tensors
from .distil import ChainMethod, output_rows


class MedusaMethod(ChainMethod):
    """Trains the module that is used for serving.

    Raises:
        ConfigError: the layout does not support a draft vocabulary, or it is too large.
    """

    module: MedusaModule

    def __init__(self, options: MedusaOptions, target: FrozenTarget) -> None:
        facts = target.facts
        if options.draft_vocab_size and not _LAYOUTS[options.layout].maps_tokens:
            raise ConfigError.at(
                "layout",
                f"{options.layout!r} has no place for a draft vocabulary "
                f"(draft_vocab_size {options.draft_vocab_size}); use 'vllm'",
            )
        super().__init__(
            target,
            (facts.num_layers,),
            argmax_weight=options.argmax_weight,
            decay=options.head_decay,
            num_trained=options.num_heads,
            draft_vocab_size=options.draft_vocab_size,
        )
        self._options = options
        self.module = MedusaModule(
            facts.hidden_size, self.draft_vocab_size, options.num_heads, options.num_layers
        )
        self.module.to(facts.device)
        for weight in self.module.blocks.parameters():
            nn.init.zeros_(weight)
        if not self.has_own_vocabulary:
            self.begin_output(output_rows(target))

    def levels(
        self, windows: Windows, states: TargetStates, target: FrozenTarget, count: int
    ) -> Iterator[tuple[Tensor, float]]:
        hidden = states.hidden[self.capture[0]].float()
        for head in range(count):
            read = self.module.states(head, hidden[:, : hidden.shape[1] - 2 - head])
            yield self.module.lm_heads[head](read), 0.0

    def export(self, folder: Path) -> None:
        layout, options, facts = _LAYOUTS[self._options.layout], self._options, self._target.facts
        tensors = self._named(layout)
        config = {
            "base_model_name_or_path": self._target.path.name,
            "hidden_size": facts.hidden_size,
            "vocab_size": facts.vocab_size,
            layout.heads_key: options.num_heads,
            layout.layers_key: options.num_layers,
            **layout.keys,
        }
        if self.target_ids is not None:
            tensors["token_map"] = self.target_ids
            config["truncated_vocab_size"] = len(self.target_ids)
        write_tensors(folder, tensors, config, self._target, layout.file)

    @torch.no_grad()
    def begin_output(self, rows: Tensor) -> None:  # [draft_vocab, hidden_size]
        for output in self.module.lm_heads.parameters():
            output.copy_(rows)

    def _named(self, layout: _Layout) -> dict[str, Tensor]:
        """Returns the weights by the names of a layout."""
        named = {}
        for name, tensor in self.module.state_dict().items():
            parts = name.split(".")  # blocks.{head}.{layer}.{kind}, lm_heads.{head}.weight
            if parts[0] == "blocks":
                stem = layout.linear.format(head=parts[1], layer=parts[2])
                named[f"{stem}.{parts[3]}"] = tensor
            else:
                layers = self._options.num_layers
                named[layout.output.format(head=parts[1], layers=layers)] = tensor
        return named


@dataclass(frozen=True, slots=True)
class _Layout:
    """A layout of the files."""

    file: str
    linear: str  # a block's name
    output: str  # an output layer's
    heads_key: str
    layers_key: str
    keys: Mapping[str, Any]
    maps_tokens: bool  # heads may have a part of the vocabulary


_LAYOUTS: Mapping[str, _Layout] = {
    "vllm": _Layout(
        "model",
        "blocks.{head}.layers.{layer}",
        "lm_heads.{head}.weight",
        "num_heads",
        "num_hidden_layers",
        {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True},
        maps_tokens=True,
    ),
    "reference": _Layout(
        "medusa_lm_head",
        "{head}.{layer}.linear",
        "{head}.{layers}.weight",
        "medusa_num_heads",
        "medusa_num_layers",
        {"version": "2"},
        maps_tokens=False,
    ),
}
