"""Medusa: several output heads on one hidden state, each predicting one token further ahead.

Head h (0-based) reads the target's last hidden state x (after the final norm) at position j and
predicts the token at j + 2 + h: one or more blocks `x <- x + SiLU(W x + b)`, then an output layer.
The draft is a static tree of ranks; head d's likeliest tokens fill level d.

Source: Cai et al. 2024, arXiv:2401.10774. File layouts: the reference's and vLLM's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...config import MedusaConfig
from ...errors import ConfigError
from ...scheduler.types import NextDrafts, ints
from .load import Tensors, fail
from .protocol import (
    DraftStart,
    Expansion,
    HeadHost,
    HeadLayer,
    HeadRows,
    TargetFacts,
    Trees,
    Verified,
    drafts_of,
    frontier,
    on,
)

_FILES = ("medusa_lm_head", "model", "pytorch_model")
_PREFIX = re.compile(r"^(medusa_head|medusa_heads)\.")


class MedusaModule(nn.Module):
    """The residual blocks and output layers."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int,
        num_layers: int,
        *,
        bias: bool = True,
        own_output: bool = True,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=False)
            for _ in range(num_heads if own_output else 0)
        )

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    def states(self, head: int, hidden: Tensor) -> Tensor:  # [..., hidden_size], same shape
        """The input of the head's output layer."""
        for linear in self.blocks[head]:  # type: ignore[attr-defined]
            hidden = hidden + silu(linear(hidden))
        return hidden

    def forward(self, hidden: Tensor) -> list[Tensor]:  # per head [..., vocab]
        """Logits of every head that has an output layer of its own."""
        return [output(self.states(head, hidden)) for head, output in enumerate(self.lm_heads)]


class MedusaHead:
    """The heads and the static tree that they fill."""

    layers: tuple[HeadLayer, ...] = ()
    target_ids: Tensor | None = None  # nothing is drawn
    branches, room = True, 0

    def __init__(
        self,
        module: MedusaModule,
        config: MedusaConfig,
        target: TargetFacts,
        token_map: Tensor | None,  # [truncated vocab], the target's ids
    ) -> None:
        self.module = module
        self.capture: tuple[int, ...] = (target.num_layers,)
        self._token_map = token_map
        nodes = config.nodes
        if config.medusa_choices is None:  # a chain of at most one token per head
            nodes = nodes[: module.num_heads]
        for path in nodes:
            if len(path) > module.num_heads:
                raise ConfigError(
                    f"speculative_config.medusa_choices: path {list(path)} is {len(path)} deep, "
                    f"but the checkpoint has {module.num_heads} heads",
                    field="speculative_config.medusa_choices",
                )
        place = {path: index for index, path in enumerate(nodes)}
        parents = [place.get(path[:-1], -1) for path in nodes]
        depths = [len(path) for path in nodes]
        self._widths = [
            1 + max(path[-1] for path in nodes if len(path) == depth + 1)
            for depth in range(max(depths))
        ]
        starts = np.concatenate([[0], np.cumsum(self._widths)])
        columns = [starts[len(path) - 1] + path[-1] for path in nodes]
        self._tree = ints([parents, columns])
        self._placed: dict[torch.device, Tensor] = {}  # `_tree`, once per device

    @property
    def drafting(self) -> Expansion:
        return self

    @property
    def outputs(self) -> list[nn.Linear]:
        return list(self.module.lm_heads)  # type: ignore[arg-type]

    def draft(self, done: Verified, host: HeadHost) -> NextDrafts:
        ends = frontier(done.step, done.verdict)
        hidden = done.hidden[self.capture[0]][on(ends.rows, host.target.device)]
        tokens, parents = torch.stack(self._filled(hidden, host)).cpu().numpy()
        return drafts_of(done.step, ends, ints(tokens), ints(parents))

    def rows(self, step: HeadRows, host: HeadHost) -> tuple[Tensor, Tensor]:
        hidden = step.hidden[self.capture[0]]
        return hidden, hidden

    def expand(self, start: DraftStart, depth: int, host: HeadHost) -> Trees:
        return Trees(*self._filled(start.read, host))

    def _filled(
        self,
        hidden: Tensor,  # [num_drafts, hidden_size]
        host: HeadHost,
    ) -> tuple[Tensor, Tensor]:  # [num_drafts, num_nodes] each
        """The tokens of the static tree, and its parents."""
        if hidden.device not in self._placed:
            self._placed[hidden.device] = on(self._tree, hidden.device)
        parents, columns = self._placed[hidden.device]
        best = [self._best(head, width, hidden, host) for head, width in enumerate(self._widths)]
        tokens = torch.cat(best, dim=1)[:, columns]
        return tokens, parents.expand_as(tokens)

    def _best(self, head: int, width: int, hidden: Tensor, host: HeadHost) -> Tensor:
        """The head's most likely tokens [num_drafts, width], best first."""
        states = self.module.states(head, hidden)
        shared = len(self.module.lm_heads) == 0
        logits = host.unembed(states) if shared else self.module.lm_heads[head](states)
        if self._token_map is not None and shared:
            logits = logits[:, self._token_map]
        ranked = logits.topk(width, dim=1).indices
        return ranked if self._token_map is None else self._token_map[ranked]


def load_medusa(config: MedusaConfig, target: TargetFacts) -> MedusaHead:
    """Loads the heads of `config`'s folder, in either layout.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of another shape.
        ConfigError: the tree is deeper than there are heads.
    """
    tensors = Tensors(config.folder, _FILES, _without_prefix, target.device)
    names = _names(tensors)
    if not names.num_heads:
        raise fail(f"{str(config.folder)!r} holds no Medusa heads")
    if config.num_medusa_heads not in (None, names.num_heads):
        raise ConfigError(
            f"speculative_config.num_medusa_heads: {config.num_medusa_heads}, but the checkpoint "
            f"has {names.num_heads}",
            field="speculative_config.num_medusa_heads",
        )
    vocab, hidden, token_map = target.vocab_size, target.hidden_size, None
    if "token_map" in tensors:
        shape = tensors.shape("token_map")
        token_map = tensors.take_ids("token_map", shape[0] if shape else 0)
        inside = (token_map >= 0) & (token_map < vocab)
        if not bool(inside.all()) or not 0 < len(token_map.unique()) == len(token_map):
            raise fail(
                f"tensor 'token_map' of {str(config.folder)!r} must hold distinct ids of the "
                f"target's {vocab} tokens"
            )
        vocab = len(token_map) if names.own_output else vocab
    state_rows = None  # of full-size output layers, those that the map leaves
    if token_map is not None and names.own_output:
        first = names.output.format(head=0, layer=names.num_layers)
        full = first in tensors and tensors.shape(first)[:1] == (target.vocab_size,)
        state_rows = token_map if full else None
    state: dict[str, Tensor] = {}
    for head in range(names.num_heads):
        for layer in range(names.num_layers):
            name = names.linear.format(head=head, layer=layer)
            state[f"blocks.{head}.{layer}.weight"] = tensors.take(f"{name}.weight", hidden, hidden)
            if names.bias:
                state[f"blocks.{head}.{layer}.bias"] = tensors.take(f"{name}.bias", hidden)
        if names.own_output:
            name = names.output.format(head=head, layer=names.num_layers)
            if state_rows is None:
                state[f"lm_heads.{head}.weight"] = tensors.take(name, vocab, hidden)
            else:
                rows = tensors.take(name, target.vocab_size, hidden)
                state[f"lm_heads.{head}.weight"] = rows[state_rows.to(rows.device)]
    tensors.finish(names.ignored)
    with torch.device("meta"):
        module = MedusaModule(
            hidden,
            vocab,
            names.num_heads,
            names.num_layers,
            bias=names.bias,
            own_output=names.own_output,
        )
    module.load_state_dict(state, assign=True)
    module.to(target.device, target.dtype).eval().requires_grad_(False)
    return MedusaHead(
        module, config, target, None if token_map is None else token_map.to(target.device)
    )


@dataclass(frozen=True, slots=True)
class _Names:
    """Tensor names of a file's layout, and the numbers of heads and layers."""

    linear: str
    output: str
    num_heads: int
    num_layers: int
    bias: bool
    own_output: bool
    ignored: str = "(?!)"


def _names(tensors: Tensors) -> _Names:
    """Detects the layout of a file: vLLM's has `blocks`, the reference's only numbers."""
    theirs = tensors.matches(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
    if theirs:
        shared = "lm_head.weight" in tensors and "lm_heads.0.weight" not in tensors
        linear, output = "blocks.{head}.layers.{layer}", "lm_heads.{head}.weight"
        output = "lm_head.weight" if shared else output
        outputs = tensors.matches(r"lm_head\.weight" if shared else r"lm_heads\.(\d+)\.weight")
        blocks, ignored = theirs, "(?!)"
        heads = [] if shared else outputs
        if {match[1] for match in outputs if not shared} == {"0"}:  # `original_lm_head`
            output = "lm_heads.0.weight"
    else:
        blocks = tensors.matches(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
        heads = outputs = tensors.matches(r"(\d+)\.(\d+)\.weight")
        linear, output = "{head}.{layer}.linear", "{head}.{layer}.weight"
        ignored = r"lm_head\.weight"  # of the whole model that the heads are part of
    return _Names(
        linear,
        output,
        num_heads=1 + max((int(match[1]) for match in [*blocks, *heads]), default=-1),
        num_layers=1 + max((int(match[2]) for match in blocks), default=-1),
        bias=any(match[3] == "bias" for match in blocks),
        own_output=bool(outputs),
        ignored=ignored,
    )


def _without_prefix(stored: str) -> str | None:
    """Removes the module's name; ignores tensors of the target."""
    return None if stored.startswith("model.") else _PREFIX.sub("", stored)
