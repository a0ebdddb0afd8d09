"""Medusa: several output heads on one hidden state, each predicting one token further ahead.

Head h (0-based) reads the target's last hidden state x (after the final norm) at position j and
predicts the token at j + 2 + h: one or more blocks `x <- x + SiLU(W x + b)`, then an output layer.
The draft is a static tree of ranks, in which head d's likeliest tokens fill level d, or the best
tree under the heads' probabilities (`tree_drafting.py`).

Source: Cai et al. 2024, arXiv:2401.10774. File layouts: the reference's and vLLM's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...config import MedusaConfig
from ...errors import ConfigError
from .load import Tensors
from .protocol import DraftStart, HeadHost, LastStateHead, TargetFacts, Trees
from .tree_drafting import best_first_tree, fixed_tree, ranked

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
        """Returns the input of the head's output layer."""
        for linear in self.blocks[head]:  # type: ignore[attr-defined]
            hidden = hidden + silu(linear(hidden))
        return hidden

    def forward(self, hidden: Tensor) -> list[Tensor]:  # per head [..., vocab]
        """Returns logits of every head that has its own output layer."""
        return [output(self.states(head, hidden)) for head, output in enumerate(self.lm_heads)]


class MedusaHead(LastStateHead):
    """The heads and the tree that they fill."""

    def __init__(
        self,
        module: MedusaModule,
        config: MedusaConfig,
        target: TargetFacts,
        token_map: Tensor | None,  # [truncated vocab], the target's ids
    ) -> None:
        super().__init__(target)
        self.module = module
        self._token_map = token_map
        nodes = config.nodes
        if config.medusa_choices is None:  # a chain of at most one token per head
            nodes = nodes[: module.num_heads]
        for path in nodes:
            if len(path) > module.num_heads:
                raise ConfigError.at(
                    "speculative_config.medusa_choices",
                    f"path {list(path)} is {len(path)} deep, "
                    f"but the checkpoint has {module.num_heads} heads",
                )
        self._nodes = nodes
        self._num_levels = min(config.draft_len, module.num_heads)
        self._num_best = config.max_nodes if config.shape == "tree" else 0

    @property
    def outputs(self) -> list[nn.Linear]:
        return list(self.module.lm_heads)  # type: ignore[arg-type]

    def expand(self, start: DraftStart, depth: int, host: HeadHost) -> Trees:
        if self._num_best:
            return best_first_tree(
                lambda level, _: self._likeliest(level, start.read, host),
                start.emitted,
                self._num_levels,
                self._num_best,
            )
        tree = fixed_tree(self._nodes, start.read.device)
        parts, logs = [], []
        for head, level in enumerate(tree.levels):
            logits = self._logits(head, start.read, host)[:, None]
            columns, own = level.take(logits, with_logs=start.cut is not None)
            parts.append(self._ids(columns))
            logs.append(own)
        return tree.filled(parts, logs)

    def _likeliest(
        self, head: int, hidden: Tensor, host: HeadHost
    ) -> tuple[Tensor, Tensor]:  # [num_drafts, 1, num_ranks] each
        """Returns log-probabilities of the head's likeliest tokens, and the tokens."""
        best, columns = ranked(self._logits(head, hidden, host)[:, None], self._num_best)
        return best, self._ids(columns)

    def _logits(self, head: int, hidden: Tensor, host: HeadHost) -> Tensor:
        """Returns logits [num_drafts, vocab], or of the truncated vocabulary."""
        states = self.module.states(head, hidden)
        shared = len(self.module.lm_heads) == 0
        logits = host.draft_logits(states) if shared else self.module.lm_heads[head](states)
        if self._token_map is not None and shared:
            logits = logits[:, self._token_map]
        return logits

    def _ids(self, columns: Tensor) -> Tensor:
        """Returns the target's ids of columns of the logits."""
        return columns if self._token_map is None else self._token_map[columns]


def load_medusa(config: MedusaConfig, target: TargetFacts) -> MedusaHead:
    """Loads the heads of `config`'s folder, in either layout.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of another shape.
        ConfigError: the tree is deeper than there are heads.
    """
    tensors = Tensors(
        config.folder, _FILES, _without_prefix, target.device, allow_pickle=target.allow_pickle
    )
    names = _names(tensors)
    if not names.num_heads:
        raise tensors.fault("holds no Medusa heads")
    if config.num_medusa_heads not in (None, names.num_heads):
        raise ConfigError.at(
            "speculative_config.num_medusa_heads",
            f"{config.num_medusa_heads}, but the checkpoint has {names.num_heads}",
        )
    vocab, hidden, token_map = target.vocab_size, target.hidden_size, None
    if "token_map" in tensors:
        shape = tensors.shape("token_map")
        token_map = tensors.take_ids("token_map", shape[0] if shape else 0)
        inside = (token_map >= 0) & (token_map < vocab)
        if not bool(inside.all()) or not 0 < len(token_map.unique()) == len(token_map):
            raise tensors.bad("token_map", f"must hold distinct ids of the target's {vocab} tokens")
        token_map = token_map.to(target.device)
    is_full = True  # whether output layers have one row per token of the target
    if token_map is not None:
        first = names.stored("lm_heads.0.weight")
        is_full = first in tensors and tensors.shape(first)[:1] == (vocab,)
    with torch.device("meta"):
        module = MedusaModule(
            hidden,
            vocab if is_full or token_map is None else len(token_map),
            names.num_heads,
            names.num_layers,
            bias=names.bias,
            own_output=names.own_output,
        )
    module.load_state_dict(tensors.state_of(module, names.stored), assign=True)
    tensors.finish(names.ignored)
    module.to(target.device, target.dtype).eval().requires_grad_(False)
    if is_full and token_map is not None:
        for output in module.lm_heads:
            assert isinstance(output, nn.Linear), type(output)
            output.weight = nn.Parameter(output.weight[token_map], requires_grad=False)
    return MedusaHead(module, config, target, token_map)


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

    def stored(self, name: str) -> str:
        """Returns the file's name of a weight: blocks.{head}.{layer}.{kind} or lm_heads.{head}."""
        kind, head, layer, *rest = name.split(".")
        if kind == "blocks":
            return ".".join([self.linear.format(head=head, layer=layer), *rest])
        return self.output.format(head=head, layer=self.num_layers)


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
        ignored = r"lm_head\.weight"  # belongs to the whole model that the heads are part of
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
