"""Optimizers and their schedule.

Muon (Jordan et al. 2024: orthogonalised momentum) updates hidden matrices; AdamW updates
embeddings, output layers, norms and biases. The learning rate warms up, stays constant, then falls
to zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .options import TrainingOptions
from .parallel import Ranks

_TABLES = ("embed", "lm_head", "markov_w")  # parts of the names of layers with one row per token


class Optimization:
    """A module's optimizers and their schedule.

    Raises:
        ConfigError: Muon is requested and the module has no hidden matrix.
    """

    def __init__(
        self,
        module: nn.Module,
        options: TrainingOptions,
        adam_lr: float,
        muon_lr: float,
        vocab_size: int,
    ) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if _is_matrix(name, p, vocab_size)]
        if options.optimizer == "adamw":
            matrices = []
        elif options.optimizer == "muon" and not matrices:
            raise ConfigError.at(
                "optimizer", "'muon' needs hidden matrices, but this method has none; use 'adamw'"
            )
        taken = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in taken]
        self._options = options
        self._parameters = [p for _, p in named]
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            decay = options.weight_decay
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=decay)
            )
        if others:  # weight decay applies only to matrices
            deep, flat = [p for p in others if p.dim() >= 2], [p for p in others if p.dim() < 2]
            decayed = [(deep, options.weight_decay), (flat, 0.0)]
            groups = [{"params": some, "weight_decay": each} for some, each in decayed if some]
            self._optimizers.append(torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.95)))
        self._rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers
        ]

    def share(self, ranks: Ranks, extra: Tensor) -> Tensor:  # [num_extra], same shape
        """Sums gradients and the numbers in `extra` over all processes; returns `extra`'s sum."""
        if ranks.num_ranks == 1:
            return extra
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        parts = [*(p.grad for p in self._parameters if p.grad is not None), extra]
        flat = nn.utils.parameters_to_vector(parts)
        ranks.add(flat)
        nn.utils.vector_to_parameters(flat, parts)
        return extra

    def step(self, step: int) -> float:
        """Takes one step; returns the gradient norm before clipping.

        Raises:
            ConfigError: the norm is not finite; the weights are unchanged.
        """
        norm = float(nn.utils.clip_grad_norm_(self._parameters, self._options.max_grad_norm))
        if not math.isfinite(norm):
            raise ConfigError.at(
                "adam_lr",
                f"the gradient norm of step {step + 1} is {norm}; start another run with "
                "lower rates (adam_lr, muon_lr) or a longer warmup",
            )
        scale = rate(step, self._options)
        for optimizer, peaks in zip(self._optimizers, self._rates, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
            optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def state(self) -> list[dict[str, Any]]:
        """Optimizer states for a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Restores the states of a checkpoint of the same module and options."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def rate(step: int, options: TrainingOptions) -> float:
    """Learning rate factor of a step."""
    num_decaying = max(1, round(options.decay * options.steps))
    warm = (step + 1) / max(1, options.warmup)
    return min(1.0, warm, (options.steps - step) / num_decaying)


def _is_matrix(name: str, parameter: Tensor, vocab_size: int) -> bool:
    layer = name.split(".")[-2:-1]
    table = any(part.startswith(_TABLES) for part in layer) or vocab_size in parameter.shape
    return parameter.dim() == 2 and min(parameter.shape) > 1 and not table
