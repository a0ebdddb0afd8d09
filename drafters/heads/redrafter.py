"""ReDrafter: a recurrent head over the target's last hidden state, with beam search.

Let c be the target's hidden state (after the final norm) at the last accepted position, constant
over the draft, and s = 0. Each step reads e, the target's embedding of the previous token:

    s <- SiLU(W_w e + W_u s + b_u), or s <- e + s without the recurrent weights;
    x = [c, s] -> an optional projection -> residual SiLU blocks -> an output layer.

Log-probabilities are normalised over the 50 likeliest tokens. All beams start from the token that
the target just emitted; the final beams are merged into a tree of their prefixes. The state is
reset for every draft, so nothing is stored between steps.

Source: Zhang et al. 2024, arXiv:2403.09919. File layouts: the reference's and those that
TensorRT-LLM reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...config import ReDrafterConfig
from .load import Tensors
from .protocol import DraftStart, HeadHost, LastStateHead, TargetFacts, Trees
from .tree_drafting import best_nodes

TOP = 50  # tokens per step with a probability

_FILES = ("model", "pytorch_model")
_OUTPUT = re.compile(r"^(?:lm_heads?\.|0\.)?(\d+\.(?:linear\.)?(?:weight|bias))$")


class ResBlock(nn.Module):
    """`x <- x + SiLU(W x + b)`."""

    def __init__(self, exit_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(exit_dim, exit_dim)

    def forward(self, states: Tensor) -> Tensor:  # [..., exit_dim], same shape
        return states + silu(self.linear(states))


class ReDrafterModule(nn.Module):
    """The weights, under their published names."""

    def __init__(
        self, hidden_size: int, vocab_size: int, exit_dim: int, num_layers: int, *, rnn: bool
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input_proj = (
            None if exit_dim == 2 * hidden_size else nn.Linear(2 * hidden_size, exit_dim)
        )
        self.lm_head = nn.Sequential(
            *(ResBlock(exit_dim) for _ in range(num_layers)),
            nn.Linear(exit_dim, vocab_size, bias=False),
        )
        self.rnn_u = nn.Linear(hidden_size, hidden_size) if rnn else None
        self.rnn_w = nn.Linear(hidden_size, hidden_size, bias=False) if rnn else None

    def recur(
        self,
        embedded: Tensor,  # [..., hidden_size], of the previous token
        state: Tensor,  # [..., hidden_size], initially zeros
    ) -> Tensor:  # [..., hidden_size]
        """Returns the state after reading that token."""
        if self.rnn_u is None or self.rnn_w is None:
            return embedded + state
        return silu(self.rnn_w(embedded) + self.rnn_u(state))

    def forward(
        self,
        context: Tensor,  # [..., hidden_size]
        state: Tensor,  # [..., hidden_size]
    ) -> Tensor:  # [..., vocab]
        """Returns logits of the next token."""
        states = torch.cat([context, state.to(context.dtype)], dim=-1)
        if self.input_proj is not None:
            states = self.input_proj(states)
        return self.lm_head(states)


BeamLevel = tuple[Tensor, Tensor, Tensor]
"""Tokens, scores of the paths that end there (none above its parent's), and parent rows in the
level before, [num_drafts, width] each. No two rows of a level are the same path, so a row is a node
of the prefix tree."""


class ReDrafterHead(LastStateHead):
    """The module and its beam search."""

    def __init__(
        self, module: ReDrafterModule, config: ReDrafterConfig, target: TargetFacts
    ) -> None:
        super().__init__(target)
        self.module = module
        self._num_beams = config.redrafter_num_beams
        self._length = config.draft_len
        self._max_nodes = config.max_nodes

    @property
    def outputs(self) -> tuple[nn.Linear, ...]:
        output = self.module.lm_head[-1]
        assert isinstance(output, nn.Linear), type(output)
        return (output,)

    def expand(self, start: DraftStart, depth: int, host: HeadHost) -> Trees:
        room = min(depth, self._max_nodes)
        length = min(self._length, room)  # a path cannot have more nodes than the tree
        return merged(self._search(start.read, start.emitted, length, host), room)

    def _search(
        self,
        context: Tensor,  # [num_drafts, hidden_size]
        emitted: Tensor,  # [num_drafts], first token of all beams
        length: int,
        host: HeadHost,
    ) -> list[BeamLevel]:
        """Beam search for all sequences, one token per round."""
        num_drafts, levels = len(context), list[BeamLevel]()
        tokens, score = emitted[:, None], context.new_zeros(num_drafts, 1, dtype=torch.float32)
        state = torch.zeros_like(context)[:, None]
        for _ in range(length):
            embedded = host.embed(tokens.flatten()).unflatten(0, tokens.shape)
            state = self.module.recur(embedded, state)
            logits = self.module(context[:, None].expand_as(state), state).float()
            best, ranked = logits.topk(min(TOP, logits.shape[2]), dim=2)
            # At most `num_beams` tokens of one beam can survive.
            best = best.log_softmax(2)[..., : self._num_beams]
            width = best.shape[2]
            scores = (best + score[..., None]).flatten(1)
            score, chosen = scores.topk(min(self._num_beams, scores.shape[1]), dim=1)
            above = chosen // width
            tokens = ranked[..., :width].flatten(1).gather(1, chosen)
            state = state.gather(1, above[..., None].expand(-1, -1, state.shape[2]))
            levels.append((tokens, score, above))
        return levels


def merged(levels: Sequence[BeamLevel], max_nodes: int) -> Trees:
    """Returns the last level's prefixes as trees.

    The best nodes come first, so every prefix of the nodes is a tree.
    """
    tokens, path_scores, aboves = zip(*levels, strict=True)
    begins = [0, *accumulate(level.shape[1] for level in tokens)]
    used = [torch.ones_like(aboves[-1])]  # rows that the last level descends from
    for depth in range(len(aboves) - 1, 0, -1):
        width = tokens[depth - 1].shape[1]
        count = used[-1].new_zeros(len(used[-1]), width)
        used.append(count.scatter_add_(1, aboves[depth], used[-1]).clamp_(max=1))
    kept = torch.cat(used[::-1], dim=1)
    parents = [torch.full_like(aboves[0], -1)]
    parents += [above + begin for above, begin in zip(aboves[1:], begins)]
    scores = torch.cat(path_scores, dim=1).masked_fill(kept == 0, -torch.inf)
    trees = best_nodes(torch.cat(tokens, dim=1), scores, torch.cat(parents, dim=1), max_nodes)
    return replace(trees, sizes=kept.sum(1).clamp(max=trees.tokens.shape[1]))


def load_redrafter(config: ReDrafterConfig, target: TargetFacts) -> ReDrafterHead:
    """Loads the head of `config`'s folder; depth and width come from its tensors.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of another shape.
    """
    tensors = Tensors(
        config.folder, _FILES, _published, target.device, allow_pickle=target.allow_pickle
    )
    outputs = tensors.matches(r"lm_head\.(\d+)\.weight")
    if not outputs:
        raise tensors.fault(
            "holds no ReDrafter head: it lacks the output layer, "
            "'lm_head.1.weight' for one residual layer"
        )
    num_layers = max(int(match[1]) for match in outputs)
    output = f"lm_head.{num_layers}.weight"
    if num_layers == 0:
        raise tensors.fault(
            f"has no residual layer: {output!r} is its only layer; "
            "expected 'lm_head.0.linear.weight' before it"
        )
    hidden, vocab = target.hidden_size, target.vocab_size
    shape = tensors.shape(output)
    exit_dim = shape[1] if len(shape) == 2 else 2 * hidden
    rnn = bool(tensors.matches(r"rnn_[uw]\.(weight|bias)"))
    with torch.device("meta"):
        module = ReDrafterModule(hidden, vocab, exit_dim, num_layers, rnn=rnn)
    state = tensors.state_of(module)
    tensors.finish()
    module.load_state_dict(state, assign=True)
    module.to(target.device, target.dtype).eval().requires_grad_(False)
    return ReDrafterHead(module, config, target)


def _published(stored: str) -> str:
    """Returns the reference's name of a tensor."""
    if stored.startswith("input_projs."):
        return stored.replace("input_projs.", "input_proj.", 1)
    return _OUTPUT.sub(r"lm_head.\1", stored)
