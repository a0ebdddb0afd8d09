"""Pipeline stages: a rank holds a slice of the target's layers, and the KV cache of that slice.

Every rank gets the same plan and lays out the step itself, with its own layers' states and
adapters. The first stage embeds. Each stage runs its layers and sends the residual stream, with the
inputs of layers that a head reads, to the rank at the same place of the next stage. The last stage
computes logits, verifies and drafts (Huang et al. 2018, GPipe, arXiv:1811.06965). Ranks are
numbered from the last stage on: rank 0 answers.

At load, each stage is compared with the bridge by itself. Artificial states replace an embedding
that it does not hold; an output layer that it does not hold is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...scheduler.types import StepInput
from ..attention import KVCache
from ..collective import Collective
from ..ops import PagedStep
from .bridge import tied_names
from .family import FamilyModel, FamilyRunner
from .info import ModelInfo, stage_layers
from .sharding import ShardPlan


class Stage:
    """One of `count` stages, as seen by one of its ranks.

    Args:
        index: the first is 0.
        link: the ranks at the same place of every stage, from the last stage on.
    """

    def __init__(self, index: int, count: int, link: Collective) -> None:
        self.index, self.count = index, count
        self._link = link
        self._sent: tuple[Any, Tensor] | None = None  # the last message, which may be in flight

    @staticmethod
    def join(ranks: Collective, count: int) -> tuple[Collective, Stage]:
        """Returns the ranks of this rank's stage, and the stage. Collective; called once."""
        own, link = ranks.divided(count)
        return own, Stage(count - 1 - link.rank, count, link)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Returns this stage's layers out of `num_layers`."""
        return stage_layers(num_layers, self.count)[self.index]

    def send(self, states: Sequence[Tensor]) -> None:  # each [num_tokens, hidden_size]
        """Sends states to the next stage without waiting for their arrival."""
        if self._sent is not None:
            self._sent[0].wait()
        joined = states[0].contiguous() if len(states) == 1 else torch.stack(list(states))
        self._sent = self._link.start_send(joined, self._link.rank - 1), joined

    def receive(
        self, states: Tensor
    ) -> Tensor:  # [num_states, num_tokens, hidden_size], overwritten; returned
        """Receives the states of the previous stage."""
        return self._link.receive(states, self._link.rank + 1)

    def capture_of_last(
        self, layers: Collection[int], num_layers: int, device: torch.device
    ) -> tuple[int, ...]:
        """Returns the layers that the last stage requests, on all stages. Collective."""
        chosen = torch.zeros(num_layers + 1, dtype=torch.int32, device=device)
        if layers:
            chosen[sorted(layers)] = 1
        return tuple(self._link.broadcast(chosen).nonzero().flatten().tolist())


class StageCut:
    """Determines which of a model's tensors and modules a stage holds.

    Every stage holds tensors that belong neither to a layer nor to an end, such as the final norm.
    The last stage also holds the embedding if the output layer shares its weight.
    """

    def __init__(self, model: Any, layers: range) -> None:
        self._model = model
        self.layers = layers
        self._base = getattr(model, model.base_model_prefix, None) or model.model
        names = {id(module): name for name, module in model.named_modules()}
        prefix = names[id(self._base)]
        self._layers_prefix = f"{prefix}.layers." if prefix else "layers."
        self._embedding, self._output = model.get_input_embeddings(), model.get_output_embeddings()
        self._names = names[id(self._embedding)], names[id(self._output)]
        self._is_first, self._is_last = layers.start == 0, layers.stop == len(self._base.layers)

    def holds(self, name: str) -> bool:
        """Returns True if the stage holds the tensor or the module of that name."""
        if name.startswith(self._layers_prefix):
            return int(name.removeprefix(self._layers_prefix).partition(".")[0]) in self.layers
        embedding, output = self._names
        if name == embedding or name.startswith(f"{embedding}."):
            is_tied = f"{output}.weight" in tied_names(self._model)
            return self._is_first or (self._is_last and is_tied)
        if name == output or name.startswith(f"{output}."):
            return self._is_last
        return True

    def ends(self) -> list[nn.Module]:
        """Returns the embedding and the output layer, as far as the stage computes them."""
        held = [self._embedding] * self._is_first + [self._output] * self._is_last
        return list(held)

    def apply(self, plan: ShardPlan, device: torch.device) -> None:
        """Removes what other stages hold from the loaded model and from its `plan`."""
        plan.summed = [name for name in plan.summed if self.holds(name)]
        plan.attentions = [name for name in plan.attentions if self.holds(name)]
        plan.recurrent = [name for name in plan.recurrent if self.holds(name)]
        returns_pair = self._model.config.model_type in _RETURN_PAIRS
        for index, layer in enumerate(self._base.layers):
            if index not in self.layers:
                self._base.layers[index] = _Elsewhere(layer, returns_pair=returns_pair)
        if not self._is_first:
            plan.embedding = None
            object.__setattr__(self._embedding, "forward", _MadeUp(self._embedding))
        if not self._is_last:
            plan.head = None
            object.__setattr__(self._output, "forward", _as_it_is)
        for module in (self._embedding, self._output):
            if module not in self.ends():  # keeps only the shape, on the device
                hollow = torch.zeros((), dtype=module.weight.dtype, device=device)
                hollow = hollow.expand(module.weight.shape)
                module.weight = nn.Parameter(hollow, requires_grad=False)


_RETURN_PAIRS = ("bamba", "falcon_h1")
"""Model types whose layers also return attention weights (transformers 5.23)."""


class _Elsewhere(nn.Module):
    """Stands in for another stage's layer, with the attributes that the model's forward reads."""

    is_elsewhere = True

    def __init__(self, layer: nn.Module, *, returns_pair: bool) -> None:
        super().__init__()
        self._returns_pair = returns_pair
        plain = {name: value for name, value in vars(layer).items() if name[:1] != "_"}
        self.__dict__.update({name: value for name, value in plain.items() if name != "forward"})

    def forward(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> Tensor | tuple[Tensor, None]:  # [1, num_tokens, hidden_size]
        return (hidden_states, None) if self._returns_pair else hidden_states


def _as_it_is(states: Tensor) -> Tensor:
    """Stands in for an output layer."""
    return states.clone()  # the next step may overwrite their buffer


class _MadeUp:
    """Stands in for an embedding: states that differ from token to token, without weights."""

    def __init__(self, embedding: nn.Module) -> None:
        assert isinstance(embedding.weight, Tensor)
        self._width, self._dtype = embedding.weight.shape[1], embedding.weight.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:  # [...] -> [..., hidden_size]
        # torch's default dtype may be changed by another thread that loads a model.
        columns = torch.arange(1, self._width + 1, dtype=torch.float32, device=token_ids.device)
        phases = (token_ids.unsqueeze(-1).float() + 1) * (columns * 0.618)
        return torch.sin(phases).to(self._dtype)


class StageRunner(FamilyRunner):
    """The family's decoder of one stage; only the last one returns logits and states."""

    def __init__(self, model: FamilyModel, info: ModelInfo, stage: Stage) -> None:
        super().__init__(model, info, stage.count)
        self._stage, self._layers = stage, stage.layers(info.num_layers)

    def run(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        model, stage, first = self.model, self._stage, self._layers.start
        plan = model.ops.plan(step, cache)
        self.planned.last = (step, cache, plan)
        num_before = sum(layer < first for layer in capture)
        residual, *before = self._entering(plan, cache, 1 + num_before)
        own = [layer - first for layer in capture[num_before:]]
        if stage.is_last:
            rows = self.rows_of(step, cache)
            logits, captured = model.forward(plan, cache, rows, own, residual)
            return logits, (*before, *captured)
        here = [layer for layer in own if layer < len(self._layers)]
        context, layers = model.context(plan, cache), model.layers_for(plan)
        states, kept = model.run(residual, context, 0, here, normed=False, layers=layers)
        stage.send([states, *before, *kept])
        return states[:0], ()

    def _entering(
        self, plan: PagedStep, cache: KVCache, num_states: int
    ) -> tuple[Tensor, ...]:  # each [num_tokens, hidden_size]
        """Returns the first layer's input, and captured inputs of earlier stages' layers."""
        if self._stage.is_first:
            return (self.model.embedded(plan),)
        size = (num_states, plan.num_tokens, self._info.hidden_size)
        empty = torch.empty(size, dtype=self._info.dtype, device=cache.device)
        return self._stage.receive(empty).unbind()
