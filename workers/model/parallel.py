"""Where ranks talk: forwards of the modules whose weights `sharding.py` has cut.

A module keeps its class and its names; only its `forward` is replaced, and only where its output
is a part of the whole. With one rank nothing is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..collective import Collective
from .sharding import ShardPlan


def connect(model: nn.Module, plan: ShardPlan, collective: Collective, vocab_size: int) -> None:
    """Give every module of the plan the forward that takes part in its collective."""
    if collective.size == 1:
        return
    for name in plan.summed:
        module = model.get_submodule(name)
        object.__setattr__(module, "forward", _Summed(module.forward, collective))
    if plan.embedding is not None and plan.head is not None:
        embedding, head = model.get_submodule(plan.embedding), model.get_submodule(plan.head)
        assert isinstance(head, nn.Linear), type(head)
        object.__setattr__(embedding, "forward", _Embedding(embedding, collective))
        object.__setattr__(head, "forward", ShardedOutput(head, collective, vocab_size))


class _Summed:
    """A module whose output is a partial sum: a row-parallel linear, sliced experts."""

    def __init__(self, forward: Any, collective: Collective) -> None:
        self._forward = forward
        self._collective = collective

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self._forward(*args, **kwargs)
        return self._collective.all_reduce(out.contiguous())


class _Embedding:
    """Each rank looks up the tokens it holds and gives zeros for the others."""

    def __init__(self, module: nn.Module, collective: Collective) -> None:
        assert isinstance(module.weight, Tensor)
        self._forward = module.forward  # a subclass may scale what it looks up
        self._length = module.weight.shape[0]
        self._first = collective.rank * self._length
        self._collective = collective

    def __call__(self, token_ids: Tensor) -> Tensor:  # [1, num_tokens]
        local = token_ids - self._first
        absent = (local < 0) | (local >= self._length)
        out = self._forward(local.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(-1), 0)
        return self._collective.all_reduce(out)


class ShardedOutput:
    """Each rank computes its tokens' logits; all ranks get all of them, or each its own part."""

    def __init__(self, module: nn.Linear, collective: Collective, vocab_size: int) -> None:
        length = module.weight.shape[0]
        self._forward = module.forward
        self.collective = collective
        self._vocab_size = vocab_size
        self.first = collective.rank * length  # token of this rank's first column
        self.length = max(0, min(length, vocab_size - self.first))  # without padding

    def __call__(self, states: Tensor) -> Tensor:  # [..., num_rows, hidden_size]
        if states.shape[-2] == 0:
            return states.new_zeros(*states.shape[:-1], self._vocab_size)
        gathered = self.collective.all_gather(self._forward(states), dim=-1)
        return torch.narrow(gathered, -1, 0, self._vocab_size)

    def part(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, length]
        """The logits of this rank's tokens."""
        logits: Tensor = self._forward(states)
        return torch.narrow(logits, -1, 0, self.length)

    def own_rows(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size]
        """All logits of this rank's even share of the rows, [num_rows / size, vocab]."""
        parts = self.collective.all_to_all(self._forward(states))
        joined = parts.unflatten(0, (self.collective.size, -1)).transpose(0, 1).flatten(1)
        return torch.narrow(joined, 1, 0, self._vocab_size)
