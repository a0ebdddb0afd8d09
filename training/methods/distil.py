"""Shared parts of the training methods: distillation losses, and weights taken from the target.

The teacher's distributions are computed once per batch; heads that draft several positions read
them shifted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..protocol import FrozenTarget, Losses, Method, TargetStates, Windows


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distribution at every position of a batch, over the head's vocabulary."""

    probs: Tensor  # [num_windows, window_len, draft_vocab], what the head is to learn
    best: Tensor  # [num_windows, window_len], the likeliest token, as the target numbers it


def teacher_of(
    logits: Tensor,  # [num_windows, window_len, vocab]
    argmax_weight: float = 0.0,
    target_ids: Tensor | None = None,  # [draft_vocab], the head's vocabulary; None: all
) -> Teacher:
    """Returns the target's distributions, moved towards their likeliest token by `argmax_weight`.

    Greedy requests accept only that token, sampled ones the distribution, so the head learns
    (1 - w) * probs + w * one_hot(argmax). With a reduced vocabulary, probabilities are not
    renormalised: a position's weight is then the probability that a draft can win, and a position
    whose likeliest token is unknown to the head has little effect.
    """
    best = likeliest(logits)
    probs = torch.softmax(logits, -1, dtype=torch.float32)
    if argmax_weight:
        weight = torch.tensor(argmax_weight, dtype=probs.dtype, device=probs.device)
        probs.mul_(1 - argmax_weight)
        probs.scatter_add_(-1, best[..., None], weight.expand(*best.shape, 1))
    if target_ids is not None:
        probs = probs.index_select(-1, target_ids)
    return Teacher(probs.to(logits.dtype), best)


def soft_cross_entropy(
    logits: Tensor,  # [..., draft_vocab], the head's
    probs: Tensor,  # [..., draft_vocab], the teacher's; may sum to less than 1
    weights: Tensor,  # [...]
) -> Tensor:  # []
    """Returns the mean over `weights` of -sum(probs * log softmax(logits)); 0 if nothing counts."""
    share = weights / weights.sum().clamp(min=1e-6)
    return _SoftCrossEntropy.apply(logits, probs, share)


class _SoftCrossEntropy(torch.autograd.Function):
    """Keeps only the logits for the backward pass, where autograd would keep float32 copies."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(logits, probs, share)
        mass = probs.sum(-1, dtype=torch.float32)
        matched = (logits * probs).sum(-1, dtype=torch.float32)
        return ((mass * logits.float().logsumexp(-1) - matched) * share).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, probs, share = ctx.saved_tensors
        mass = probs.sum(-1, dtype=torch.float32)
        slope = torch.softmax(logits, -1, dtype=torch.float32)
        slope.mul_(mass[..., None]).sub_(probs).mul_((share * grads[0])[..., None])
        return slope.to(logits.dtype), None, None


def likeliest(logits: Tensor) -> Tensor:  # [..., vocab] -> [...]
    """Returns the best token of each row; argmax() is several times slower on a CPU in bfloat16."""
    return logits.detach().max(-1).indices


def checked_mask(token: int | None, target: FrozenTarget) -> int | None:
    """Returns a token that was given as the mask.

    Raises:
        ConfigError: it is outside the target's vocabulary.
    """
    size = target.facts.vocab_size
    if token is not None and token >= size:
        raise ConfigError.at("mask_token_id", f"{token} exceeds the target's {size} tokens")
    return token


def rarest(token_counts: Tensor) -> int:  # [vocab]
    """Returns a token to use as the mask: the last among the rarest, since padding comes last."""
    ranked = token_counts.flip(0).sort(stable=True).indices
    return len(token_counts) - 1 - int(ranked[0])


class Agreement:
    """Counts for `Losses`: how far greedy drafts from every row would have been accepted."""

    def __init__(self) -> None:
        self._so_far: Tensor | None = None
        self._agreed: list[Tensor] = []
        self._judged: list[Tensor] = []

    def add(
        self,
        guessed: Tensor,  # [num_windows, num_rows], the draft's next token, as the target numbers
        best: Tensor,  # [num_windows, num_rows]
        counts: Tensor,  # [num_windows, num_rows], true where the token counts
    ) -> None:
        """Adds the next position; rows whose draft leaves the window are dropped at the end."""
        agrees = guessed == best
        if self._so_far is not None:
            agrees &= self._so_far[:, : agrees.shape[1]]
        self._so_far = agrees
        self._agreed.append((agrees & counts).sum())
        self._judged.append(counts.sum())

    def totals(self) -> tuple[Tensor, Tensor]:  # [num_positions] each
        """Returns how many rows agreed up to each position, and out of how many."""
        return torch.stack(self._agreed), torch.stack(self._judged)


class VocabularyMethod(Method):
    """A method whose head may draft a part of the target's vocabulary.

    Args:
        draft_vocab_size: size of the head's vocabulary; None: the target's.

    Raises:
        ConfigError: the draft vocabulary is larger than the target's.
    """

    def __init__(self, target: FrozenTarget, draft_vocab_size: int | None = None) -> None:
        vocab_size = target.facts.vocab_size
        if draft_vocab_size is not None and draft_vocab_size > vocab_size:
            raise ConfigError.at(
                "draft_vocab_size", f"{draft_vocab_size} exceeds the target's {vocab_size} tokens"
            )
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self.target_ids: Tensor | None = None  # [draft_vocab]; None: the target's vocabulary
        self._target = target

    @property
    def has_own_vocabulary(self) -> bool:
        return self.draft_vocab_size < self._target.facts.vocab_size

    def begin_output(self, rows: Tensor) -> None:  # [draft_vocab, hidden_size]
        """Initializes the output layers with the target's rows of the draft vocabulary."""

    def prepare(self, token_counts: Tensor) -> None:  # [vocab]
        """Selects the most frequent tokens as the draft vocabulary; among equals, the first."""
        if self.has_own_vocabulary:
            ranked = token_counts.sort(descending=True, stable=True).indices
            ids = ranked[: self.draft_vocab_size].sort().values
            self.target_ids = ids.to(self._target.facts.device)
            self.begin_output(output_rows(self._target)[self.target_ids])

    def known_ids(self) -> Tensor | None:  # [draft_vocab]
        """Returns the target's ids of the draft vocabulary that `prepare` has selected."""
        assert self.target_ids is not None or not self.has_own_vocabulary, "prepare() comes first"
        return self.target_ids

    def vocabulary_tensors(self) -> dict[str, Tensor]:
        """Returns `d2t` (offsets) and `t2d` (known tokens) of a draft vocabulary, if any."""
        ids = self.known_ids()
        if ids is None:
            return {}
        known = torch.zeros(self._target.facts.vocab_size, dtype=torch.bool)
        ids = ids.cpu()
        return {"d2t": ids - torch.arange(len(ids)), "t2d": known.index_fill_(0, ids, True)}


class ChainMethod(VocabularyMethod):
    """A method whose loss is the mean over draft positions.

    Row t of position d predicts token t + 2 + d, so its teacher is the target at position
    t + 1 + d.

    Args:
        decay: weight of each position's loss, in units of the one before.
        num_trained: positions with a loss.
        num_judged: positions that are judged without gradients, if these are more.
    """

    def __init__(
        self,
        target: FrozenTarget,
        capture: tuple[int, ...],
        *,
        argmax_weight: float,
        decay: float,
        num_trained: int,
        num_judged: int = 0,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(target, draft_vocab_size)
        self.capture = capture
        self._argmax_weight, self._decay = argmax_weight, decay
        self._num_trained, self._num_judged = num_trained, num_judged

    def levels(
        self, windows: Windows, states: TargetStates, target: FrozenTarget, count: int
    ) -> Iterator[tuple[Tensor, Tensor | float]]:
        """Yields logits and an additional loss for each of `count` positions.

        The logits [num_windows, num_rows, draft_vocab] are of the rows whose token is within the
        window.
        """
        raise NotImplementedError

    def loss(self, windows: Windows, states: TargetStates, target: FrozenTarget) -> Losses:
        ids, count = self.known_ids(), self._num_trained
        if not torch.is_grad_enabled():
            count = max(count, self._num_judged)
        count = min(count, windows.tokens.shape[1] - 2)
        teacher = teacher_of(states.logits, self._argmax_weight, ids)
        agreement, total = Agreement(), 0.0
        loss = windows.weights.new_zeros(())
        for level, (logits, further) in enumerate(self.levels(windows, states, target, count)):
            here = slice(1 + level, 1 + level + logits.shape[1])
            weights = windows.weights[:, 2 + level :]
            guessed = likeliest(logits)
            agreement.add(
                guessed if ids is None else ids[guessed], teacher.best[:, here], weights > 0
            )
            if level < self._num_trained:
                share = self._decay**level
                learnt = soft_cross_entropy(logits, teacher.probs[:, here], weights)
                loss, total = loss + share * (learnt + further), total + share
        return Losses(loss / total, *agreement.totals())


def output_rows(target: FrozenTarget) -> Tensor:  # [vocab, hidden_size] float32
    """Returns the weight of the target's output layer, without its bias."""
    axes = torch.eye(target.facts.hidden_size, device=target.facts.device)
    with torch.no_grad():
        return (target.unembed(axes) - target.unembed(torch.zeros_like(axes[:1]))).T.contiguous()
