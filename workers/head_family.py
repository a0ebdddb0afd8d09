"""A head's layer of the target's kind on the family decoder.

`drafters/heads/block.py` wraps transformers' layer: training differentiates it, and loading
converts the checkpoint's names with it. Here the family's layer takes over its weights, after both
were compared on a short text and a tree; no weight is in memory twice. Where the architecture is
not of the family, transformers' layer serves. With several ranks its weights are divided as those
of the target's layers are, where that pays. Called by `head_loading.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..drafters.heads.block import BlockModule
from ..drafters.heads.protocol import Attend, HeadLayer
from ..errors import ConfigError
from ..scheduler.types import StepInput
from .attention import KVCache, KVShape, SdpaBackend
from .collective import Collective
from .head_attention import PagedAttend
from .head_layers import SAMPLE_TABLE, sample_steps
from .model.bridge import tp_hints
from .model.facts import AttentionFacts
from .model.family import FamilySpec, LayerStack, build_layers, read_spec
from .model.family.builder import Builder
from .model.family.compare import BLOCK_SIZE, mismatch
from .model.head_shards import WHOLE, HeadShards
from .model.sharding import ShardPlan, plan_shards
from .ops import Ops, PlannedOps
from .ops.protocol import Norm, Projection

_Runs = Callable[[StepInput, Tensor, Tensor], Tensor]
"""A module on a step's rows, given embeddings and features, each [num_tokens, hidden_size]."""


@dataclass(frozen=True, slots=True, eq=False)
class FamilyModule:
    """`BlockModule.forward` in operations."""

    stack: LayerStack
    embedding_norm: Norm
    feature_norm: Norm
    project: Projection
    layer: int  # of the head
    pre_norm: bool

    def __call__(
        self,
        embedded: Tensor,  # [num_rows, hidden_size]
        feature: Tensor,  # [num_rows, hidden_size]
        positions: Tensor,  # [num_rows], as in the plan
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:  # [num_rows, hidden_size] each: next feature, output layer's input
        assert isinstance(attend, PagedAttend), type(attend)
        norm = self.stack.ops.norm
        first = norm(embedded, self.embedding_norm).clone()  # the next norm reuses its buffer
        states = self.project(torch.cat([first, norm(feature, self.feature_norm)], dim=1))
        step = self.stack.context(attend.plan, attend.cache)
        normed, _ = self.stack.run(states, step, attend.first + self.layer)
        normed = normed.clone()
        return (states if self.pre_norm else normed), normed


def family_of(modules: Sequence[BlockModule]) -> FamilySpec | str:
    """The family's description of the modules' layers, or why they have none."""
    return read_spec(modules[0].block.whole.config)


def take_over(
    modules: Sequence[BlockModule],
    spec: FamilySpec,
    planned: PlannedOps,
    dtype: torch.dtype,
    shards: HeadShards = WHOLE,
) -> str:
    """Replaces the modules' forwards by the family's; returns why one differs, or nothing.

    In that case the weights of some modules are gone. Collective if `shards` are several.
    """
    for module in modules:
        sample = _Sample(module, planned, dtype)
        wanted = sample.of_module()
        try:
            cut = _cut(module, sample.facts, shards)
            found = _family_module(module, spec, planned.ops, cut)
            found_rows = sample.of_family(found)
        except (AttributeError, ValueError) as error:
            return f"layer {module.layer} is not of the family: {error}"
        if difference := mismatch(found_rows, wanted, dtype, shards.collective):
            return f"layer {module.layer} differs from its module: {difference}"
        object.__setattr__(module, "forward", found)
        for name, _ in list(module.named_children()):
            setattr(module, name, nn.Identity())
    return ""


def kept_by(module: BlockModule, layer: HeadLayer) -> HeadLayer:
    """What `layer` stores once its module was taken over: latents where they are not expanded."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, FamilyModule):
        return layer
    shape = forward.stack.kv_shapes[0]
    return replace(
        layer,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a rank has of a module's layer."""

    facts: AttentionFacts
    plan: ShardPlan
    collective: Collective


def _cut(module: BlockModule, facts: AttentionFacts, shards: HeadShards) -> _Cut:
    """Drops the other ranks' parts of the layer's weights, if two sums cost less than they save."""
    whole = module.block.whole
    num_bytes = sum(each.numel() * each.element_size() for each in module.block.parameters())
    uncut = _Cut(facts, ShardPlan(), Collective.single())
    if not shards.pays(num_bytes, 2):
        return uncut
    heads = shards.heads(facts.num_heads, facts.num_kv_heads)
    try:
        plan = plan_shards(whole, heads, tp_hints(whole))
    except ConfigError:  # the ranks do not divide its sizes
        return uncut
    for name, parameter in whole.named_parameters():
        if (shard := plan.shards.get(name)) is not None:
            parts = [parameter.data.narrow(shard.dim, a, b - a) for a, b in shard.ranges]
            parameter.data = torch.cat(parts, dim=shard.dim)
        if name in plan.rank0_only and shards.rank:
            parameter.data = torch.zeros_like(parameter.data)
    if plan.attentions:
        begin, end = heads.kv_range
        facts = replace(facts, num_heads=heads.local, num_kv_heads=end - begin)
    return _Cut(facts, plan, shards.collective)


def _family_module(module: BlockModule, spec: FamilySpec, ops: Ops, cut: _Cut) -> FamilyModule:
    """Of the module's weights; its layer is gone afterwards."""
    builder = Builder(spec, ops, cut.plan, cut.collective)
    prefix = module.block.whole.base_model_prefix
    layers, ropes = build_layers(builder, module.block.base, prefix, [cut.facts])
    return FamilyModule(
        LayerStack(ops, spec, layers, ropes, builder.norm(module.norm)),
        builder.norm(module.enorm),
        builder.norm(module.hnorm),
        builder.pack(module.eh_proj),
        module.layer,
        module.pre_norm,
    )


class _Sample:
    """Random rows of a short text and of a tree after it, through a module and what replaces it."""

    def __init__(self, module: BlockModule, planned: PlannedOps, dtype: torch.dtype) -> None:
        weight, kept = module.eh_proj.weight, module.kept()
        assert kept.value_dim is not None, kept
        self._module, self._planned, self._dtype = module, planned, dtype
        self._device, self._hidden_size = weight.device, weight.shape[0]
        self._shape = KVShape(kept.num_kv_heads, kept.head_dim, kept.value_dim)
        self._facts: list[AttentionFacts] = []

    @property
    def facts(self) -> AttentionFacts:
        """What the layer's attention was called with."""
        return self._facts[0]

    def of_module(self) -> Tensor:  # [num_rows, 2 * hidden_size] float32
        cache = self._new_cache(self._shape)

        def run(step: StepInput, embedded: Tensor, feature: Tensor) -> Tensor:
            planned = SdpaBackend().begin(step, cache)

            def attend(
                layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
            ) -> Tensor:
                sizes = (query.shape[1], key.shape[1], key.shape[2], value.shape[2])
                self._facts.append(AttentionFacts(*sizes, scale, None, None, None, None))
                return planned.attend(0, query, key, value, scale)

            positions = torch.from_numpy(step.positions).to(self._device, torch.int64)
            return torch.cat(self._module(embedded, feature, positions, attend), dim=1)

        return self._outputs(run)

    def of_family(self, found: FamilyModule) -> Tensor:  # [num_rows, 2 * hidden_size] float32
        cache = self._new_cache(found.stack.kv_shapes[0])

        def run(step: StepInput, embedded: Tensor, feature: Tensor) -> Tensor:
            plan = self._planned.plan(step, cache)
            attend = PagedAttend(self._planned, plan, cache, -found.layer)  # it is the only one
            return torch.cat(found(embedded, feature, plan.positions, attend), dim=1)

        return self._outputs(run)

    def _new_cache(self, shape: KVShape) -> KVCache:
        num_blocks = len(SAMPLE_TABLE) + 1
        return KVCache([shape], num_blocks, BLOCK_SIZE, self._dtype, self._device)

    @torch.inference_mode()
    def _outputs(self, run: _Runs) -> Tensor:  # [num_rows, 2 * hidden_size] float32
        source = torch.Generator().manual_seed(0)
        outputs = []
        for step in sample_steps():
            rows = torch.randn(2, len(step.token_ids), self._hidden_size, generator=source)
            embedded, feature = rows.to(self._device, self._dtype)
            outputs.append(run(step, embedded, feature).float())
        return torch.cat(outputs)
