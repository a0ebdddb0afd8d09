"""The forward: flat rows in, logits out, over the operations of `workers/ops/`.

A layer is two blocks around a residual stream. A block reads a normed copy of the stream and
returns an update, which the next `add_norm` adds, so a layer takes eight operations. Weights are
packed products, described per layer by the frozen classes below; `load.py` creates them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ....scheduler.types import IntArray, StepInput
from ...attention import KVCache, KVShape
from ...collective import Collective
from ...ops import Ops, PagedStep, PlannedOps
from ...ops.invariant import by_row
from ...ops.plan import Signals, Turn, bounds_of, part_of
from ...ops.program import LayerParts, Program, Tail
from ...ops.protocol import (
    AttentionSpec,
    Experts,
    Gate,
    Mixture,
    Norm,
    Projection,
    Rotation,
    Router,
)
from ...states import RecurrentStep, StateShape
from ..info import ModelInfo, Range
from ..sharding import ShardedOutput, ShardPlan, own_choices
from .adapted import Adapters
from .spec import FamilySpec

Reduce = Callable[[Tensor], Tensor]
"""Sums over the ranks, or returns its argument if a block is not cut."""


@dataclass(frozen=True, slots=True, eq=False)
class Builder:
    """The inputs of building every layer."""

    spec: FamilySpec
    ops: Ops
    plan: ShardPlan
    collective: Collective
    adapters: Adapters | None = None

    def reduce(self, name: str) -> Reduce:
        """Returns the sum over ranks if module `name` returns a partial sum, else the identity."""
        if self.collective.size > 1 and name in self.plan.summed:
            return self.collective.all_reduce
        return as_is

    def own_experts(self, name: str) -> Range | None:
        """Returns the whole experts of mixture `name` on this rank; None: it has a part of each."""
        return self.plan.own_experts.get(name)

    def pack(self, *linears: Any) -> Projection:
        """Packs linears with one input into one product."""
        return self.adapted(self.ops.pack(*joined_weight(linears)), linears)

    def adapted(
        self, product: Projection, linears: Sequence[Any], rows: Tensor | None = None
    ) -> Projection:
        """Adds the adapters of `linears` to `product`.

        `rows` are those of the linears' joined outputs that the product computes, in order.
        """
        if self.adapters is None:
            return product
        return self.adapters.beside(self.ops, product, linears, rows)

    def norm(self, module: Any) -> Norm:
        """Returns a norm's weights in the form that operations take."""
        eps = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if weight is not None:
            weight = weight.detach().float()
            weight = weight + 1 if self.spec.unit_offset else weight.clone()
        return Norm(weight, float(module.eps if eps is None else eps))

    def norm_or_none(self, module: Any, name: str) -> Norm | None:
        child = getattr(module, name, None)
        return None if child is None else self.norm(child)


def halves(heads: Tensor, begin: int, dim: int) -> Tensor:  # [num_heads, head_dim] -> alike
    """Reorders columns `[begin, begin + dim)` to evens, then odds; scores stay the same."""
    first, turned, last = heads.split([begin, dim, heads.shape[1] - begin - dim], dim=1)
    return torch.cat([first, turned[:, 0::2], turned[:, 1::2], last], dim=1)


def joined_weight(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Returns the stacked weights and biases of linears with one input."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(bias is None for bias in biases):
        return weight, None
    filled = [
        bias.detach() if bias is not None else part.new_zeros(part.shape[0])
        for bias, part in zip(biases, weights, strict=True)
    ]
    return weight, torch.cat(filled)


def elementwise(ops: Ops, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Applies `function`; invariant operations on a CPU apply it row by row, for equal rounding."""
    on_cpu = values.device.type == "cpu"
    return by_row(function, values) if ops.is_invariant and on_cpu else function(values)


def as_is(update: Tensor) -> Tensor:
    return update


# -- a layer's second block: only the chosen experts of a mixture are computed; the sum over ranks
# is computed once, after shared and routed parts are added


@dataclass(frozen=True, slots=True, eq=False)
class GatedUnit:
    """`down(activation(gate) * up)`."""

    ops: Ops
    gate_up: Projection
    down: Projection
    gate: Gate
    reduce: Reduce

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, hidden_size], alike
        return self.reduce(self.down(self.ops.gate(self.gate_up(states), self.gate)))


@dataclass(frozen=True, slots=True, eq=False)
class MixtureBlock:
    """Routed experts, optionally with a shared expert."""

    ops: Ops
    router: Router
    logits: Projection
    is_wide: bool  # router logits in float32
    experts: Mixture
    shared: GatedUnit | None  # a partial sum if the experts are
    reduce: Reduce
    shared_gate: Projection | None = None  # projects to [num_tokens, 1]
    own: Range | None = None  # numbers of the experts; None: all

    def __call__(self, states: Tensor) -> Tensor:  # [num_tokens, hidden_size], alike
        logits = self.logits(states.float() if self.is_wide else states)
        chosen, scores = self.ops.route(logits, self.router)
        if self.own is not None:
            chosen = own_choices(chosen, self.own)
        out = self.experts(states, chosen, scores)
        if self.shared is not None:
            shared = self.shared(states)
            if self.shared_gate is not None:
                gate = self.shared_gate(states)
                shared = shared * elementwise(self.ops, torch.sigmoid, gate)
            out = out + shared
        return self.reduce(out)


def build_mlp(builder: Builder, module: Any, name: str) -> GatedUnit | MixtureBlock:
    """Builds the block of `module`: a mixture if it has experts."""
    if hasattr(module, "experts"):
        return _mixture(builder, module, name)
    return _gated_unit(builder, module, builder.reduce(f"{name}.down_proj"))


def build_shared(builder: Builder, layer: Any, name: str) -> GatedUnit | MixtureBlock:
    """Builds the shared block of Granite 4's layers, alone or with routed experts."""
    routed, shared = layer.block_sparse_moe, layer.shared_mlp
    if routed is None:
        reduce = builder.reduce(f"{name}.shared_mlp.output_linear")
        return _gated_unit(builder, shared, reduce)
    return _mixture(builder, routed, f"{name}.block_sparse_moe", shared)


def _gated_unit(builder: Builder, module: Any, reduce: Reduce) -> GatedUnit:
    fused = getattr(module, "gate_up_proj", getattr(module, "input_linear", None))
    linears = (module.gate_proj, module.up_proj) if fused is None else (fused,)
    last = getattr(module, "down_proj", getattr(module, "output_linear", None))
    gate_up, down = builder.pack(*linears), builder.pack(last)
    return GatedUnit(builder.ops, gate_up, down, builder.spec.gate, reduce)


def _mixture(builder: Builder, module: Any, name: str, beside: Any = None) -> MixtureBlock:
    spec = builder.spec
    if spec.router is None:
        raise ValueError(f"{name} has experts, its configuration describes no router")
    gate: Any = module.gate if hasattr(module, "gate") else module.router
    weight = gate.weight.detach()
    bias = getattr(gate, "bias", None)
    router = spec.router
    statics = getattr(gate, "moe_statics", gate)  # ERNIE's
    correction = getattr(statics, "e_score_correction_bias", None)
    if correction is not None:
        router = replace(router, correction=correction.detach().float().flatten().clone())
    shared = getattr(module, "shared_experts", None) or getattr(module, "shared_expert", beside)
    shared_gate = getattr(module, "shared_expert_gate", None)
    reduce, own = builder.reduce(f"{name}.experts"), builder.own_experts(f"{name}.experts")
    experts = replace(_experts(builder, module.experts), is_part=own is not None)
    return MixtureBlock(
        builder.ops,
        router,
        builder.ops.pack(weight.float() if spec.wide_router else weight, bias),
        spec.wide_router,
        builder.ops.pack_experts(experts),
        None if shared is None else _gated_unit(builder, shared, as_is),
        reduce,
        None if shared_gate is None else builder.pack(shared_gate),
        own,
    )


def _experts(builder: Builder, module: Any) -> Experts:
    """Returns the experts' tensors in the layout of the operations; the module drops its own."""
    spec = builder.spec
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    biases = [getattr(module, f"{key}_proj_bias", None) for key in ("gate_up", "down")]
    module._parameters.clear()
    if spec.experts_transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    gate_up_bias, down_bias = (None if bias is None else bias.detach() for bias in biases)
    if spec.gates_interleaved:
        gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
        if gate_up_bias is not None:
            gate_up_bias = torch.cat([gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]], dim=1)
    gate = spec.expert_gate or spec.gate
    return Experts(gate_up, down, gate, gate_up_bias, down_bias, spec.scores_input)


# -- rotary frequencies, taken from the bridge's module


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary frequencies of one kind."""

    frequencies: Tensor  # [rotary_dim / 2] float32
    scale: float  # factor of cosines and sines

    @property
    def rotary_dim(self) -> int:
        return 2 * self.frequencies.shape[0]

    def rotation(self, ops: Ops, plan: PagedStep) -> Rotation:
        """Returns cosines and sines of a step's rows."""
        return ops.rotation(plan.positions, self.frequencies, self.scale)


def read_ropes(module: Any, kinds: tuple[str, ...] | None) -> dict[str, Rope]:
    """Returns the frequencies of transformers' rotary module by kind; "" if there is only one."""
    ropes = {}
    for kind in sorted(set(kinds or ("",))):
        prefix = f"{kind}_" if kind else ""
        frequencies = getattr(module, f"{prefix}inv_freq").detach().float().clone()
        scale = float(getattr(module, f"{prefix}attention_scaling"))
        ropes[kind] = Rope(frequencies, scale)
    return ropes


@dataclass(frozen=True, slots=True)
class StepContext:
    """The inputs of one step that every layer reads."""

    plan: PagedStep
    cache: KVCache
    rotations: tuple[Rotation, ...]  # per kind of frequencies
    temperature: Tensor | None  # [num_tokens]
    recurrent: RecurrentStep | None = None  # None: no layer has a state


class StateBlock(Protocol):
    """Replaces attention in a layer that keeps a state, from the normed stream to the update.

    Collective.
    """

    @property
    def state(self) -> StateShape | None:
        """Shape of the state; None: there is none."""

    def __call__(
        self, states: Tensor, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size], alike
        """Reads and advances the states of the step's sequences."""


class PromptAttention(Protocol):
    """An alternative way to compute an attention block, for steps of many rows."""

    @property
    def spec(self) -> AttentionSpec:
        """The spec with which the operations attend."""

    def takes(self, plan: PagedStep) -> bool:
        """Returns True if it computes such a step, which depends only on lengths."""

    def __call__(
        self,
        states: Tensor,  # [num_tokens, hidden_size]
        rotation: Rotation | None,
        temperature: Tensor | None,  # [num_tokens] float32
        step: StepContext,
        layer: int,
    ) -> Tensor:  # [num_tokens, hidden_size]
        """Computes this rank's part of the update from the normed stream."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Attention, from the normed stream to the update."""

    joined: Projection  # [num_tokens, hidden_size] to [num_tokens, spec.joined_width]
    output: Projection
    reduce: Reduce
    spec: AttentionSpec
    rope: int | None  # index into the step's rotations; None: not rotated
    tempered: bool
    gate: Projection | None = None  # projects to [num_tokens, num_heads * value_dim]
    beside: StateBlock | None = None  # reads the same input as attention; the updates are added
    state: StateShape | None = None  # of `beside`
    prompts: PromptAttention | None = None  # only without a gate and without `beside`


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer on this rank. Norms that the architecture lacks are None."""

    before_attention: Norm | None
    attention: AttentionBlock | StateBlock
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Callable[[Tensor], Tensor | None]
    after_mlp: Norm | None


def _parts_of(layer: Layer) -> LayerParts | None:
    """Returns a layer's operations for a program; None if some are unsupported or sharded."""
    block, mlp = layer.attention, layer.mlp
    if not isinstance(block, AttentionBlock) or block.gate is not None or block.beside is not None:
        return None
    if not isinstance(mlp, GatedUnit):
        return None
    if block.reduce is not as_is or mlp.reduce is not as_is:
        return None
    return LayerParts(
        layer.before_attention, block.joined, block.spec, block.rope, block.tempered, block.output,
        layer.after_attention, layer.before_mlp, mlp.gate_up, mlp.gate, mlp.down, layer.after_mlp,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LayerStack:
    """Layers of a target or of a head, and the norm after the last one; `run` is collective."""

    ops: Ops
    spec: FamilySpec
    layers: Sequence[Layer]
    ropes: tuple[Rope, ...]
    norm: Norm | None
    program: Program | None = field(init=False)
    has_states: bool = field(init=False)  # whether layers keep states

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_states", any(self.state_shapes))
        parts = [_parts_of(layer) for layer in self.layers]
        scale, unembed = self.spec.residual_scale, getattr(self, "unembed", None)
        program = Program.of(self.ops, parts, scale, self.norm, unembed)
        object.__setattr__(self, "program", program)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer stores for one token."""
        return tuple(
            _kv_shape(layer.attention.spec)
            if isinstance(layer.attention, AttentionBlock)
            else KVShape(0, 0, 0)
            for layer in self.layers
        )

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Attention specs of the layers that have attention."""
        all_blocks = [layer.attention for layer in self.layers]
        blocks = [block for block in all_blocks if isinstance(block, AttentionBlock)]
        prompts = [block.prompts.spec for block in blocks if block.prompts is not None]
        return tuple([block.spec for block in blocks] + prompts)

    @property
    def state_shapes(self) -> tuple[StateShape | None, ...]:
        """What each layer keeps per sequence; None: only keys and values."""
        return tuple(layer.attention.state for layer in self.layers)

    def run(
        self,
        residual: Tensor,  # [num_tokens, hidden_size]; overwritten by the last layer's output
        step: StepContext,
        first: int = 0,  # the first layer's index in the cache
        capture: Collection[int] = (),
        *,
        normed: bool = True,
        read: Tensor | None = None,  # [num_tokens, input_size]; the first layer reads it
        layers: Sequence[Layer] | None = None,  # replaces its own layers
    ) -> tuple[Tensor, list[Tensor]]:  # [num_tokens, hidden_size], and each of the captured
        """Returns the final norm's output (`residual` without `normed`), and captured inputs.

        The next norm may overwrite the buffer of the final norm's output.
        """
        is_own = layers is None or layers is self.layers
        if is_own and self.program is not None and self.program.takes(step.plan):
            captures = sorted(each for each in capture if each < len(self.layers))
            tail, turned = Tail(tuple(captures), normed), step.rotations
            return self.program.run(
                residual, read, step.plan, turned, step.temperature, step.cache, first, tail
            )
        ops, spec = self.ops, self.spec
        update: Tensor | None = None
        after: Norm | None = None
        captured: list[Tensor] = []
        for index, layer in enumerate(self.layers if layers is None else layers):
            kept = torch.empty_like(residual) if index in capture else None
            states = ops.add_norm(
                residual, update, after, spec.residual_scale, layer.before_attention, kept
            )
            if kept is not None:
                captured.append(kept)
            if read is not None and index == 0:
                states = read
            update = self._attend(states, layer.attention, first + index, step)
            states = ops.add_norm(
                residual, update, layer.after_attention, spec.residual_scale, layer.before_mlp
            )
            update, after = layer.mlp(states), layer.after_mlp
        norm = self.norm if normed else None
        return ops.add_norm(residual, update, after, spec.residual_scale, norm), captured

    def context(self, plan: PagedStep, cache: KVCache) -> StepContext:
        """Computes the values that all layers share."""
        rotations = tuple([rope.rotation(self.ops, plan) for rope in self.ropes])
        recurrent = None
        if self.has_states:  # a head's stack has none, but shares the cache
            assert plan.host is not None, "a step of states is planned on the host"
            assert cache.states is not None, "the cache was made without states"
            recurrent = cache.states.begin(plan.host)
        temperature = None
        if (tuning := self.spec.temperature) is not None:
            log1p = partial(elementwise, self.ops, torch.log1p)
            temperature = tuning.factors(plan.positions, log1p)
        return StepContext(plan, cache, rotations, temperature, recurrent)

    def _attend(
        self, states: Tensor, block: AttentionBlock | StateBlock, layer: int, step: StepContext
    ) -> Tensor:  # [num_tokens, hidden_size]
        if not isinstance(block, AttentionBlock):
            return block(states, layer, step)
        rotation = None if block.rope is None else step.rotations[block.rope]
        temperature = step.temperature if block.tempered else None
        if block.prompts is not None and block.prompts.takes(step.plan):
            return block.reduce(block.prompts(states, rotation, temperature, step, layer))
        gate = None if block.gate is None else block.gate(states)
        out = self.ops.rope_store_attend(
            block.joined(states),
            rotation,
            temperature,
            step.plan,
            step.cache,
            layer,
            block.spec,
        )
        if gate is not None:
            out = out * elementwise(self.ops, torch.sigmoid, gate)
        out = block.reduce(block.output(out))
        return out if block.beside is None else out + block.beside(states, layer, step)


@dataclass(frozen=True, slots=True, eq=False)
class FamilyModel(LayerStack):
    """One rank's shard: the layers between the embedding and the output layer."""

    norm: Norm
    embed: Callable[[Tensor], Tensor]  # [num_tokens] to [num_tokens, hidden_size]
    unembed: Callable[[Tensor], Tensor]  # [num_rows, hidden_size] to [num_rows, vocab]
    output: ShardedOutput | None = None  # the same, if the vocabulary is divided among ranks
    adapters: Adapters | None = None
    adapted: Sequence[Layer] = ()  # the layers with adapters, for steps that use them

    def forward(
        self,
        plan: PagedStep,
        cache: KVCache,
        rows: Tensor | None,  # [num_rows]; None: every row
        capture: Sequence[int] = (),
        entering: Tensor | None = None,  # [num_tokens, hidden_size], overwritten; None: embedded
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        """Returns logits of `rows`, and the inputs of layers `capture`.

        The input of the layer after the last one is the output of the final norm.
        """
        step, program = self.context(plan, cache), self.program
        if program is None or program.unembed is None or not program.takes(plan):
            states, captured = self.states(step, rows, capture, entering)
            return self.logits(states), captured
        tail = Tail(tuple(sorted(set(capture))), len(self.layers) in capture, has_logits=True)
        residual = self.embedded(plan) if entering is None else entering
        rotations, tempered = step.rotations, step.temperature
        logits, kept = program.run(residual, None, plan, rotations, tempered, cache, 0, tail, rows)
        return self._finished(logits), tuple(kept)

    def states(
        self,
        step: StepContext,
        rows: Tensor | None,  # [num_rows]
        capture: Sequence[int],
        entering: Tensor | None = None,  # [num_tokens, hidden_size], overwritten; None: embedded
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # each [num_rows, hidden_size], [num_tokens, ...]
        """Returns the output layer's input, and the inputs of layers `capture`."""
        layers = self.layers_for(step.plan)
        wanted, residual = set(capture), entering
        if residual is None:
            residual = self.embedded(step.plan)
        last = len(self.layers) in wanted
        states, captured = self.run(residual, step, 0, wanted, normed=last, layers=layers)
        if last:
            captured.append(states.clone() if self.ops.reuses_results else states)
        if rows is not None:
            states = states.index_select(0, rows)
        return states if last else self.ops.norm(states, self.norm), tuple(captured)

    def layers_for(self, plan: PagedStep) -> Sequence[Layer]:
        """Returns the layers, with adapters if rows of this thread's step use them."""
        if self.adapters is None or plan.adapters is None:
            return self.layers
        self.adapters.begin(plan.adapters)
        return self.adapted

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        """Returns logits of normed states."""
        return self._finished(self.unembed(states))

    def embedded(self, plan: PagedStep) -> Tensor:  # [num_tokens, hidden_size]
        """Returns the first layer's input."""
        states = self.embed(plan.token_ids)
        scale = self.spec.embedding_scale
        return states if scale == 1.0 else states * scale

    @property
    def first_token(self) -> int:
        """First token of this rank's part of the vocabulary."""
        return 0 if self.output is None else self.output.first

    def part_of_logits(
        self, states: Tensor
    ) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, width]
        """Returns logits of this rank's part of the vocabulary."""
        if self.output is None:
            return self.logits(states)
        return self._finished(self.output.part(states))

    def logits_of_own_rows(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size]
        """Returns logits of this rank's share of the rows, as `ShardedOutput.own_rows` does."""
        if self.output is None:
            return self.logits(states)
        return self._finished(self.output.own_rows(states))

    def _finished(self, logits: Tensor) -> Tensor:  # [num_rows, vocab], alike
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:
            logits = elementwise(self.ops, torch.tanh, logits / cap) * cap
        return logits


def _kv_shape(spec: AttentionSpec) -> KVShape:
    value_dim = 0 if spec.shared_values else spec.value_dim
    return KVShape(spec.num_kv_heads, spec.head_dim, value_dim)


Outcome = tuple[Tensor, tuple[Tensor, ...]]
"""Logits [num_rows, vocab] and captured states, each [num_tokens, hidden_size]."""


class PartThreads:
    """Computes a step's rows in parts, each in its own thread, from embedding to logits.

    All operations except attention work row by row, so the threads wait for each other only where a
    sequence is cut (`Turn` in `workers/ops/plan.py`). Dividing every operation, as torch does,
    would wake all threads a hundred times per step.
    """

    def __init__(self, model: FamilyModel) -> None:
        self._model = model
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0

    def forward(
        self,
        context: StepContext,
        rows: IntArray,  # [num_rows], ascending
        capture: Sequence[int],
        bounds: Sequence[int],  # from `bounds_of`
    ) -> Outcome:
        """Does the same as `FamilyModel.forward`, for the whole step."""
        parts = _parts(self._model, context, bounds)
        ends = np.searchsorted(rows, bounds)
        wanted = [
            torch.from_numpy(rows[ends[index] : ends[index + 1]] - np.int32(begin))
            for index, begin in enumerate(bounds[:-1])
        ]
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            pool = self._threads(len(parts) - 1)
            others = [
                pool.submit(self._compute, part, mine, capture)
                for part, mine in zip(parts[1:], wanted[1:], strict=True)
            ]
            try:
                outcomes = [self._compute(parts[0], wanted[0], capture)]
            finally:
                wait(others)
            outcomes += [each.result() for each in others]
        finally:
            torch.set_num_threads(num_threads)
        logits, captured = zip(*outcomes, strict=True)
        return torch.cat(logits), tuple(torch.cat(each) for each in zip(*captured, strict=True))

    def _threads(self, size: int) -> ThreadPoolExecutor:
        if self._pool is None or self._size < size:
            if self._pool is not None:
                self._pool.shutdown()
            self._size = size
            self._pool = ThreadPoolExecutor(
                size, "part", initializer=torch.set_num_threads, initargs=(1,)
            )
        return self._pool

    def _compute(self, part: StepContext, rows: Tensor, capture: Sequence[int]) -> Outcome:
        try:
            with torch.inference_mode():  # inference mode is set per thread
                states, captured = self._model.states(part, rows, capture)
                return self._model.logits(states), captured
        except BaseException:
            assert part.plan.turn is not None, "every part has its turn"
            part.plan.turn.fail()
            raise


def _parts(model: FamilyModel, context: StepContext, bounds: Sequence[int]) -> list[StepContext]:
    """Returns the step's parts, with the places where their sequences continue."""
    starts = set(context.plan.query_start.tolist())
    before: Signals | None = None
    parts = []
    for begin, end in pairwise(bounds):
        after: Signals | None = None if end in starts else SimpleQueue()
        plan = replace(part_of(context.plan, begin, end), turn=Turn(before, after))
        rows = slice(begin, end)
        part = replace(
            context,
            plan=model.ops.adopt(plan),
            rotations=tuple((cos[rows], sin[rows]) for cos, sin in context.rotations),
            temperature=None if context.temperature is None else context.temperature[rows],
        )
        parts.append(part)
        before = after
    return parts


# The family's decoder as a `Runner`: from a step's arrays to logits.


class FamilyRunner:
    """One rank's decoder over a paged cache."""

    def __init__(self, model: FamilyModel, info: ModelInfo, num_ranks: int = 1) -> None:
        self.model = model
        # Several threads would not keep the fixed order of sums over ranks.
        # With recurrent layers, a state passes from one row to the next.
        self.state_shapes = model.state_shapes
        self._takes_parts = model.ops.takes_parts and num_ranks == 1 and not model.has_states
        self._threads = PartThreads(model)
        self._info = info
        self.planned = PlannedOps(model.ops)
        self.kv_shapes: tuple[KVShape, ...] = model.kv_shapes
        self.attention_specs = model.attention_specs

    def run(
        self, step: StepInput, cache: KVCache, capture: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # [num_rows, vocab], each [num_tokens, hidden_size]
        plan = self.model.ops.plan(step, cache)
        self.planned.last = (step, cache, plan)  # heads read it
        program = self.model.program
        is_program = program is not None and program.takes(plan)
        num_threads = torch.get_num_threads()
        if self._takes_parts and num_threads > 1 and not is_program:
            bounds = bounds_of(plan, num_threads, self._info.hidden_size)
            if len(bounds) > 2:
                context = self.model.context(plan, cache)
                return self._threads.forward(context, step.rows, capture, bounds)
        return self.model.forward(plan, cache, self.rows_of(step, cache), capture)

    @staticmethod
    def rows_of(step: StepInput, cache: KVCache) -> Tensor | None:  # [num_rows]; None: every row
        """Returns the rows whose logits are computed, on the device; None: all."""
        if len(step.rows) == len(step.token_ids):
            return None
        return torch.from_numpy(step.rows).to(cache.device, non_blocking=True)

    def logits(self, states: Tensor) -> Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab]
        return self.model.logits(states)
