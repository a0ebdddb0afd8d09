"""Method `medusa`: heads on the frozen target's last state, each a token further ahead.

Head d at row t predicts token t + 2 + d, so its teacher is the target at position t + 1 + d.
A head begins as the target's own output layer behind blocks that add nothing.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.2.1 (Medusa-1), with the target's
distributions in place of the text's tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from ...config import Strict
from ..heads.medusa import MedusaModule
from .distil import (
    Agreement,
    draft_vocabulary,
    most_frequent,
    soft_cross_entropy,
    teacher_of,
)
from .eagle_files import output_rows
from .protocol import FrozenTarget, Losses, TargetStates, Windows


class MedusaOptions(Strict):
    """Options of `medusa`."""

    num_heads: int = Field(4, ge=1, le=64)
    num_layers: int = Field(1, ge=1, le=16)  # residual blocks of a head
    head_decay: float = Field(0.8, gt=0, le=1)  # how much less each later head counts
    argmax_weight: float = Field(0.5, ge=0, le=1)  # of the target's likeliest token in the lesson
    draft_vocab_size: int | None = Field(None, ge=1)  # most frequent tokens; None: all


class MedusaMethod:
    """Trains the module that serves."""

    def __init__(self, options: MedusaOptions, target: FrozenTarget) -> None:
        facts = target.facts
        vocab = draft_vocabulary(options.draft_vocab_size, facts.vocab_size)
        self.capture: tuple[int, ...] = (facts.num_layers,)
        self.module = MedusaModule(facts.hidden_size, vocab, options.num_heads, options.num_layers)
        self._vocab, self._options, self._target = vocab, options, target
        self._target_ids: Tensor | None = None  # [draft_vocab]; None: the target's vocabulary
        self.module.to(facts.device)
        for weight in self.module.blocks.parameters():
            nn.init.zeros_(weight)
        if vocab == facts.vocab_size:
            self._begin(output_rows(target))

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """The draft vocabulary is the most frequent tokens; among equals, the first."""
        if self._vocab < len(token_counts):
            self._target_ids = most_frequent(token_counts, self._vocab).to(
                self._target.facts.device
            )
            self._begin(output_rows(self._target)[self._target_ids])

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        """The mean over heads, each over the rows whose token is within the window."""
        options, window_len = self._options, windows.tokens.shape[1]
        teacher = teacher_of(states.logits, options.argmax_weight, self._target_ids)
        hidden = states.hidden[self.capture[0]].float()
        agreement = Agreement()
        loss, total = hidden.new_zeros(()), 0.0
        for head in range(min(options.num_heads, window_len - 2)):
            inside = window_len - 2 - head
            here = slice(1 + head, 1 + head + inside)
            read = self.module.states(head, hidden[:, :inside])
            logits = self.module.lm_heads[head](read)
            weights = windows.weights[:, 2 + head :]
            guessed = logits.max(-1).indices
            if self._target_ids is not None:
                guessed = self._target_ids[guessed]
            agreement.add(guessed, teacher.best[:, here], weights > 0)
            share = options.head_decay**head
            loss = loss + share * soft_cross_entropy(logits, teacher.probs[:, here], weights)
            total += share
        return Losses(loss / total, *agreement.totals())

    def export(self, folder: Path) -> None:
        """In the reference's names; with a draft vocabulary in vLLM's, which has a place for it."""
        folder.mkdir(parents=True, exist_ok=True)
        dtype = self._target.facts.dtype
        partial = self._target_ids is not None
        named = self._named(_THEIRS if partial else _REFERENCE)
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in named.items()}
        config = {
            "base_model_name_or_path": self._target.path.name,
            "hidden_size": self._target.facts.hidden_size,
            "vocab_size": self._target.facts.vocab_size,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if self._target_ids is not None:
            tensors["token_map"] = self._target_ids.cpu()
            config |= {
                "model_type": "medusa",
                "architectures": ["MedusaModel"],
                "num_heads": self._options.num_heads,
                "num_hidden_layers": self._options.num_layers,
                "truncated_vocab_size": len(self._target_ids),
                "medusa_fc_bias": True,
            }
        else:
            config |= {
                "medusa_num_heads": self._options.num_heads,
                "medusa_num_layers": self._options.num_layers,
                "version": "2",
            }
        file = "model" if partial else "medusa_lm_head"
        save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    @torch.no_grad()
    def _begin(self, rows: Tensor) -> None:  # [draft_vocab, hidden_size]
        """Every head begins with what the target says of the next token."""
        for output in self.module.lm_heads.parameters():
            output.copy_(rows)

    def _named(self, names: _Names) -> dict[str, Tensor]:
        """The weights by the names of a layout."""
        named = {}
        for name, tensor in self.module.state_dict().items():
            parts = name.split(".")  # blocks.{head}.{layer}.{kind}, lm_heads.{head}.weight
            if parts[0] == "blocks":
                stem = names.linear.format(head=parts[1], layer=parts[2])
                named[f"{stem}.{parts[3]}"] = tensor
            else:
                layers = self._options.num_layers
                named[names.output.format(head=parts[1], layers=layers)] = tensor
        return named


@dataclass(frozen=True, slots=True)
class _Names:
    """How a layout calls a block and an output layer."""

    linear: str
    output: str


_REFERENCE = _Names("{head}.{layer}.linear", "{head}.{layers}.weight")
_THEIRS = _Names("blocks.{head}.layers.{layer}", "lm_heads.{head}.weight")


def build(options: MedusaOptions, target: FrozenTarget) -> MedusaMethod:
    """The method, as the registry asks for it."""
    return MedusaMethod(options, target)
