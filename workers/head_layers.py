"""A head's layers on the family decoder's stack.

Checkpoints are read into torch modules (`FeatureModule`), which can be trained. At load, the stack
takes over the weights of a module's layers, after both were compared on a short text and a tree; no
weight is in memory twice. Layers stay torch modules if the family cannot describe them or if the
outputs differ. With several ranks, the weights are sharded like the target's layers, where that
pays.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import HeadConfig
from ..drafters.heads.block import DecoderBlock
from ..drafters.heads.dflash import BlockModule
from ..drafters.heads.llama import Attention, LlamaModule, rotate
from ..drafters.heads.protocol import (
    Attend,
    BlockView,
    Entrance,
    FeatureModule,
    Frontier,
    Head,
    HeadLayer,
    TargetFacts,
)
from ..drafters.registry import build_head
from ..errors import ConfigError
from ..scheduler.types import IntArray, StepInput, Verdict, ints
from .attention import KVCache, KVShape
from .collective import Collective
from .model.bridge import tp_hints
from .model.family import FamilySpec, LayerStack, build_layers, read_spec
from .model.family.compare import NUM_TOKENS, mismatch, sample_cache, sample_steps
from .model.family.decoder import Builder, Rope, joined_weight, read_ropes
from .model.sharding import WHOLE, HeadShards, ShardPlan, plan_shards
from .model.target import pack_linears
from .ops import Ops, PagedStep, PlannedOps, ReferenceOps
from .ops.plan import WORD_BITS
from .ops.protocol import AttentionSpec, Gate, GateKind, Norm

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StackedLayers:
    """Implements `FeatureModule.decode` by operations."""

    stack: LayerStack
    layer: int  # the first, of the head

    def __call__(
        self, states: Tensor, read: Tensor | None, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(attend, PagedAttend), type(attend)
        step = self.stack.context(attend.plan, attend.cache)
        normed, _ = self.stack.run(states, step, attend.first + self.layer, read=read)
        is_reused = self.stack.ops.reuses_results and self.stack.norm is not None
        return states, normed.clone() if is_reused else normed


@dataclass(frozen=True, slots=True, eq=False)
class _Entered:
    """Implements `FeatureModule.enter` by operations; returns a new residual stream."""

    ops: Ops
    parts: Entrance
    embedding_norm: Norm | None
    feature_norm: Norm | None

    @staticmethod
    def of(ops: Ops, parts: Entrance) -> _Entered:
        found = [None if part is None else norm_of(part)
                 for part in (parts.embedding_norm, parts.feature_norm)]  # fmt: skip
        return _Entered(ops, parts, *found)

    def __call__(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.parts.adds:
            return embedded + feature, None
        both, residual = self.ops.enter(
            embedded, self.embedding_norm, feature, self.feature_norm,
            is_residual_normed=self.parts.is_residual_normed,
        )  # fmt: skip
        return (residual, both) if self.parts.join is None else (self.parts.join(both), None)


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayers:
    """Implements `BlockModule.decode` by operations."""

    stack: LayerStack

    def __call__(self, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        assert isinstance(attend, BlockAttend), type(attend)
        paged = attend.plain or attend.causal
        assert paged is not None, "a kind of view is planned"
        step = self.stack.context(paged.plan, paged.cache)
        normed, _ = self.stack.run(rows.flatten(0, 1), step, paged.first)
        return (normed.clone() if self.stack.ops.reuses_results else normed).view(rows.shape)


class _StoredBlock:
    """Implements `BlockModule.stored`: one product yields the keys and values of all layers."""

    def __init__(self, ops: Ops, attentions: Sequence[Attention]) -> None:
        parts = [each for one in attentions for each in (one.k_proj, one.v_proj)]
        self._product, sizes = ops.pack(*joined_weight(parts)), attentions[0].sizes
        self._head_dim = sizes.head_dim
        self._norms = [each.k_norm if sizes.qk_norm else nn.Identity() for each in attentions]

    def __call__(
        self, states: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        both = self._product(states).unflatten(-1, (2 * len(self._norms), -1, self._head_dim))
        for index, norm in enumerate(self._norms):
            yield rotate(norm(both[:, 2 * index]), rotation), both[:, 2 * index + 1]


class _Normed:
    """Implements a norm's forward by one operation."""

    def __init__(self, ops: Ops, norm: Norm) -> None:
        self._ops, self.norm = ops, norm

    def __call__(self, states: Tensor) -> Tensor:  # [num_rows, size], alike
        normed = self._ops.norm(states, self.norm)
        return normed.clone() if self._ops.reuses_results else normed


def norm_of(module: nn.Module) -> Norm | None:
    """Returns the norm that a module's forward computes; None if the forward is torch's."""
    forward = module.forward
    return forward.norm if isinstance(forward, _Normed) else None


def attention_specs(head: nn.Module) -> list[AttentionSpec]:
    """Returns the attention specs of the layers that run on a stack."""
    decodes = [getattr(module, "decode", None) for module in head.modules()]
    stacks = [each.stack for each in decodes if isinstance(each, StackedLayers | BlockLayers)]
    return [spec for stack in stacks for spec in stack.attention_specs]


def load_head(
    config: HeadConfig,
    target: TargetFacts,
    planned: PlannedOps,
    shards: HeadShards,
    *,
    fused: bool = True,
) -> tuple[Head, str]:
    """Loads the head of `config`; also returns why its layers are torch modules, or "".

    Args:
        shards: how it is divided among the ranks that run it; collective if there are several.
        fused: False: layers stay modules, for comparisons.

    Raises as `build_head` does.
    """
    head, reason = build_head(config, target), "the caller asked for modules"
    if not head.layers:
        reason = "it has no decoder layers"
    elif isinstance(head.module, BlockModule):
        if fused and not (reason := _obstacle(head.module)):
            reason = stack_block(head.module, head.layers, planned, target.dtype)
            if reason:
                log.warning("the head's layers run as torch modules: %s", reason)
                head = build_head(config, target)  # `stack_layers` may have taken weights
    elif fused:
        layers = stack_layers(head.module, head.layers, planned, target.dtype, shards)
        if isinstance(layers, str):
            reason = layers
            log.warning("the head's layers run as torch modules: %s", reason)
            head = build_head(config, target)  # `stack_block` may have taken weights
        else:
            head.layers, reason = layers, ""
    cut = [(output, shards.cut_output(output)) for output in head.outputs]
    pack_linears(head.module, target.device, None if reason else planned.ops)
    for output, vocab_size in cut:
        if vocab_size is not None:
            shards.connect_output(output, vocab_size)
    return head, reason


def stack_layers(
    head: nn.Module,
    layers: Sequence[HeadLayer],
    planned: PlannedOps,
    dtype: torch.dtype,
    shards: HeadShards = WHOLE,
) -> tuple[HeadLayer, ...] | str:
    """Replaces the layers of a head's modules; collective if there are several `shards`.

    Returns what this rank stores of each layer: latents if keys are not expanded. Returns a reason
    instead if the layers stay modules; some of them may have lost their weights.
    """
    kept = list(layers)
    for module in head.modules():
        if not isinstance(module, FeatureModule):
            continue
        spec, first = describe(module), module.layer
        if isinstance(spec, str):
            return spec
        facts, wanted = _observe(module, layers[first:], dtype)
        try:
            stack = _stack(module, spec, planned.ops, facts, shards)
            found = _outputs(module, stack.kv_shapes, dtype, partial(_paged, planned, first))
        except (AttributeError, ValueError) as error:
            return f"layer {first} is not of the family: {error}"
        if difference := mismatch(found, wanted, dtype, shards.collective):
            return f"layer {first} differs from its module: {difference}"
        for index, shape in enumerate(stack.kv_shapes, first):
            kept[index] = replace(
                kept[index],
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                value_dim=shape.value_dim,
            )
    return tuple(kept)


def stack_block(
    module: BlockModule, layers: Sequence[HeadLayer], planned: PlannedOps, dtype: torch.dtype
) -> str:
    """Replaces the layers of a block drafter.

    Returns "", or why the replacement is invalid; the modules may have lost their weights.
    """
    device = next(module.parameters()).device
    wanted = _block_outputs(module, layers, PlannedOps(ReferenceOps()), dtype)
    sizes, spec = module.sizes, FamilySpec(Gate(GateKind.SILU))
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.head_dim)
    fact = AttentionSpec(*heads, sizes.head_dim**-0.5)
    attentions: list[Any] = [layer.self_attn for layer in module.layers]
    builder = Builder(spec, planned.ops, ShardPlan(), Collective.single())
    ropes = {"": Rope(module.rope.frequencies.to(device), module.rope.scale)}
    stored = _StoredBlock(planned.ops, attentions)
    try:
        built = build_layers(builder, module, "", [fact] * len(attentions), ropes)
        norm = builder.norm(module.norm)
        stack = LayerStack(planned.ops, spec, built, tuple(ropes.values()), norm)
        fused_norm = _Normed(planned.ops, builder.norm(module.hidden_norm))
        object.__setattr__(module.hidden_norm, "forward", fused_norm)
        object.__setattr__(module, "decode", BlockLayers(stack))
        object.__setattr__(module, "stored", stored)
        found = _block_outputs(module, layers, planned, dtype)
    except (AttributeError, ValueError) as error:
        return f"its layers are not of the family: {error}"
    difference = mismatch(found, wanted, dtype, Collective.single())
    return difference and f"its layers differ from their modules: {difference}"


def _obstacle(module: BlockModule) -> str:
    """Returns why a block's layers cannot run on a stack; "" if they can."""
    options = module.options
    if next(module.parameters()).device.type != "cpu":
        return "blocks are drafted by modules on a GPU, where a captured step replays them"
    if options.convolutions is not None or module.sizes.unit_qk:
        return "its layers are not of the family"
    if len({view.causal for view in options.views}) > 1 or any(v.window for v in options.views):
        return "its layers see different rows"
    return ""


@torch.inference_mode()
def _block_outputs(
    module: BlockModule, layers: Sequence[HeadLayer], planned: PlannedOps, dtype: torch.dtype
) -> Tensor:  # [num_rows, hidden_size] float32
    """Returns the outputs of random blocks behind two random contexts."""
    device, source = next(module.parameters()).device, torch.Generator().manual_seed(0)
    width, known = layers[0].num_draft_rows, torch.tensor([5, 3])
    shapes = [
        KVShape(each.num_kv_heads, each.head_dim, each.value_width, 2 * width) for each in layers
    ]
    cache = KVCache(shapes, 1, 16, dtype, device)
    for kept in (*cache.keys, *cache.values):
        kept.copy_(torch.randn(kept.shape, generator=source))
    ahead = torch.arange(width)
    slots = torch.arange(5).repeat(2, 1) + torch.tensor([[0], [8]])
    slots = torch.cat([slots, torch.zeros(2, width, dtype=torch.int64)], dim=1)
    slots = slots.int().scatter(1, known[:, None] + ahead, spare_slots(cache, 2, width))
    rows = CommittedRows(slots, known.int(), known - 1, 5)
    levels = PagedLevels(planned, cache, 0, rows, width, branches=True)
    states = torch.randn(2, width, module.sizes.hidden_size, generator=source).to(device, dtype)
    positions = known[:, None] + ahead
    return (
        module(states, positions, levels.block(width, module.options.views)).flatten(0, 1).float()
    )


def describe(module: FeatureModule) -> FamilySpec | str:
    """Returns the family's description of a module's layers, or why they have none."""
    if not isinstance(module, LlamaModule):
        return read_spec(_block(module).whole.config)
    latents = module.layer_sizes[0].latents
    return FamilySpec(
        Gate(GateKind.SILU),
        neighbours=latents is not None and latents.neighbours,
        rotated=tuple(index not in module.no_rope_layers for index in range(len(module.layers))),
        temperature=module.temperature,
    )


def _block(module: FeatureModule) -> DecoderBlock:
    assert isinstance(module.block, DecoderBlock), type(module)
    return module.block


def _stack(
    module: FeatureModule,
    spec: FamilySpec,
    ops: Ops,
    facts: Sequence[AttentionSpec],  # per layer, of all ranks
    shards: HeadShards,
) -> LayerStack:
    """Returns the stack of the module's weights, which replaces the module's `decode` and norms."""
    owner: Any  # the module to which the names in a shard plan are relative
    base: Any  # the module that has the layers
    if isinstance(module, LlamaModule):
        owner, base, prefix, hints = module, module, "", {}
        device = next(module.parameters()).device
        ropes = {"": Rope(module.rope.frequencies.to(device), module.rope.scale)}
    else:
        block = _block(module)
        owner, base, prefix = block.whole, block.base, f"{block.whole.base_model_prefix}."
        hints, ropes = tp_hints(owner), read_ropes(base.rotary_emb, spec.rope_kinds)
    facts, plan, collective = _cut(owner, base.layers, hints, facts, shards)
    builder = Builder(spec, ops, plan, collective)
    layers = build_layers(builder, base, prefix, facts, ropes)
    norm = builder.norm_or_none(module, "norm")
    stack = LayerStack(ops, spec, layers, tuple(ropes.values()), norm)
    object.__setattr__(module, "decode", StackedLayers(stack, module.layer))
    module.block = module.norm = nn.Identity()
    for part in module.modules():
        if "RMSNorm" in type(part).__name__:
            object.__setattr__(part, "forward", _Normed(ops, builder.norm(part)))
    object.__setattr__(module, "enter", _Entered.of(ops, module.entrance()))
    return stack


def _cut(
    owner: nn.Module,
    layers: nn.Module,
    hints: Mapping[str, str],
    facts: Sequence[AttentionSpec],
    shards: HeadShards,
) -> tuple[Sequence[AttentionSpec], ShardPlan, Collective]:
    """Drops the other ranks' shards if this saves more than two sums per layer cost.

    Returns this rank's attention specs, the shard plan, and the ranks that share the layers.
    """
    uncut = facts, ShardPlan(), Collective.single()
    num_bytes = sum(each.numel() * each.element_size() for each in layers.parameters())
    if not shards.pays(num_bytes, 2 * len(facts)):
        return uncut
    heads = shards.heads(facts[0].num_heads, facts[0].num_kv_heads)
    try:
        plan = plan_shards(owner, heads, hints)
    except ConfigError:  # the ranks do not divide its sizes
        return uncut
    for name, parameter in owner.named_parameters():
        if (shard := plan.shards.get(name)) is not None:
            parts = [parameter.data.narrow(shard.dim, a, b - a) for a, b in shard.ranges]
            parameter.data = torch.cat(parts, dim=shard.dim)
        if name in plan.rank0_only and shards.rank:
            parameter.data = torch.zeros_like(parameter.data)
    if plan.attentions:
        begin, end = heads.kv_range
        facts = [replace(each, num_heads=heads.local, num_kv_heads=end - begin) for each in facts]
    return facts, plan, shards.collective


def _observe(
    module: FeatureModule, layers: Sequence[HeadLayer], dtype: torch.dtype
) -> tuple[list[AttentionSpec], Tensor]:  # per layer; [num_rows, 2 * hidden_size] float32
    """Returns the specs that the torch module passes to attention, and the module's outputs."""
    facts: dict[int, AttentionSpec] = {}
    planned = PlannedOps(ReferenceOps())

    def attention(step: StepInput, cache: KVCache) -> Attend:
        paged = _paged(planned, module.layer, step, cache)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            sizes = (query.shape[1], key.shape[1], key.shape[2], value.shape[2])
            facts[layer] = AttentionSpec(*sizes, scale)
            return paged(layer, query, key, value, scale)

        return attend

    shapes = [KVShape(each.num_kv_heads, each.head_dim, each.value_width) for each in layers]
    outputs = _outputs(module, shapes, dtype, attention)
    return [facts[layer] for layer in sorted(facts)], outputs


def _paged(planned: PlannedOps, first: int, step: StepInput, cache: KVCache) -> PagedAttend:
    """Returns attention over a cache that begins with the head's layer `first`."""
    return PagedAttend(planned, planned.plan(step, cache), cache, -first)


@torch.inference_mode()
def _outputs(
    module: FeatureModule,
    shapes: Sequence[KVShape],
    dtype: torch.dtype,
    attention: Callable[[StepInput, KVCache], Attend],
) -> Tensor:  # [num_rows, 2 * hidden_size] float32
    """Returns the outputs of random rows of a short text and of a tree behind it."""
    device, source = next(module.parameters()).device, torch.Generator().manual_seed(0)
    cache = sample_cache(shapes, dtype, device)
    outputs = []
    for step in sample_steps([0] * NUM_TOKENS):
        embedded, feature = (
            torch.randn(len(step.token_ids), width, generator=source).to(device, dtype)
            for width in (module.embedding_size, module.hidden_size)
        )
        positions = torch.from_numpy(step.positions).to(device, torch.int64)
        rows = module(embedded, feature, positions, attention(step, cache))
        outputs.append(torch.cat(rows, dim=1).float())
    return torch.cat(outputs)


# -- attention over the paged cache: of a step, and of the levels of a draft
#
# A draft's rows lie in slots behind those of the blocks (`KVShape.num_spare`) and are overwritten
# by the next draft: keys that come from the head's own guesses never enter a block. A level of a
# draft is planned like a step of the target, with ancestor bits, so a context is never copied.
# Blocks have one slot each there, because accepted nodes are still in the slots that the step gave
# them.


def committed(
    step: StepInput, verdict: Verdict, ends: Frontier, block_size: int, room: int
) -> tuple[IntArray, IntArray]:  # [num_drafts, key_len + room], [num_drafts]
    """Returns the slots and the number of all committed rows of the sequences.

    Accepted nodes are still in the slots that the step gave them; they move before the next step.
    """
    # The newest token has no row yet.
    chunks, roots = step.query_lens - step.num_nodes, step.root_rows
    known = (step.context_lens + chunks + verdict.num_accepted)[ends.seqs]
    num_keys = int(known.max(initial=0)) + room
    tables = step.block_tables[ends.seqs, : -(-num_keys // block_size)]
    within = np.arange(block_size, dtype=np.int32)
    held = (tables[:, :, None] * np.int32(block_size) + within).reshape(len(tables), -1)
    slots = np.zeros((len(tables), num_keys), dtype=np.int32)
    for draft, (seq, size) in enumerate(zip(ends.seqs.tolist(), known.tolist(), strict=True)):
        slots[draft, :size] = held[draft, :size]
        path = verdict.nodes(seq)
        if len(path):
            rows = roots[seq] + 1 + path
            slots[draft, size - len(path) : size] = step.slot_mapping[rows]
    return slots, known


_spec = functools.cache(AttentionSpec)  # one object for equal layers: operations use it as a key


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Attention of planned rows whose queries and keys a head's layer has prepared.

    Implements `Attend`.
    """

    planned: PlannedOps
    plan: PagedStep
    cache: KVCache
    first: int  # the head's first layer in the cache

    @property
    def positions(self) -> Tensor:  # [num_rows] int32
        return self.plan.positions

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        sizes = (query.shape[1], key.shape[1], query.shape[2], value.shape[2])
        spec = _spec(*sizes, scale, window=window)
        place = (self.plan, self.cache, self.first + layer)
        return self.planned.attend(query, key, value, *place, spec)


@dataclass(frozen=True, slots=True)
class BlockAttend:
    """Attention of a draft's block; implements `Attend`."""

    plain: PagedAttend | None  # for layers whose rows see the whole block
    causal: PagedAttend | None  # for layers whose rows see only earlier rows
    views: Sequence[BlockView]  # by layer

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        view = self.views[layer]
        rows = self.causal if view.causal else self.plain
        assert rows is not None, "every kind of view is planned"
        return rows(layer, query, key, value, scale, view.window)


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """The committed rows of sequences that draft, on the device."""

    # [num_drafts, key_len + room] int32: committed rows, then the draft's rows, then padding.
    slots: Tensor
    known: Tensor  # [num_drafts] int32, number of committed rows
    base: Tensor  # [num_drafts] int64, position of the last committed row
    max_known: int  # upper bound of `known`
    first_spare: int = 0  # index of the first spare slot of the drafts' own rows


def committed_rows(
    step: StepInput, verdict: Verdict, ends: Frontier, cache: KVCache, room: int
) -> CommittedRows:
    """Returns the committed rows after a step on the host."""
    held, known = committed(step, verdict, ends, cache.block_size, room)

    def put(values: NDArray[np.int32], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(values).to(cache.device, dtype, non_blocking=True)

    index = put(ints(known))[:, None] + torch.arange(room, device=cache.device, dtype=torch.int32)
    slots = put(ints(held)).scatter(1, index.long(), spare_slots(cache, len(known), room))
    base = put(step.positions[ends.rows], torch.int64)
    return CommittedRows(slots, put(ints(known)), base, int(known.max()))


def spare_slots(cache: KVCache, num_drafts: int, room: int) -> Tensor:  # [num_drafts, room] int32
    """Returns the slots of drafts' rows."""
    spare = torch.arange(num_drafts * room, device=cache.device, dtype=torch.int32)
    return (spare + cache.num_slots).view(num_drafts, room)


class PagedLevels:
    """The levels of one draft for each of `num_drafts` sequences; implements `DraftLevels`.

    It reads no device value on the host.

    Args:
        room: maximum number of rows added per sequence.
        branches: whether rows may have siblings. If not, rows are causal and need no bits.
    """

    def __init__(
        self,
        planned: PlannedOps,
        cache: KVCache,
        first: int,
        rows: CommittedRows,
        room: int,
        *,
        branches: bool,
    ) -> None:
        self._planned, self._cache, self._first, self._rows = planned, cache, first, rows
        self._room, self._branches = room, branches
        self._seen: Tensor | None = None  # [num_drafts, width, num_words], of the last level
        self._size, self._depth = 0, 0

    @cached_property
    def _index(self) -> Tensor:  # [num_drafts, room] int32
        ahead = torch.arange(self._room, device=self._cache.device, dtype=torch.int32)
        return self._rows.known[:, None] + ahead

    @cached_property
    def _bits(self) -> Tensor:  # [room, num_words] int64
        return _own_bits(self._room if self._branches else 0, self._cache.device)

    @cached_property
    def _seqs(self) -> Tensor:  # [num_drafts + 1] int32
        count = len(self._rows.known) + 1
        return torch.arange(count, device=self._cache.device, dtype=torch.int32)

    @cached_property
    def _spare(self) -> Tensor:  # [num_drafts, room] int32
        spare = spare_slots(self._cache, len(self._rows.known), self._room)
        return spare + first if (first := self._rows.first_spare) else spare

    @cached_property
    def _tree_start(self) -> Tensor:  # [num_drafts] int32
        return self._rows.known if self._branches else self._rows.known + self._room

    def level(self, above: Tensor) -> PagedAttend:  # [num_drafts, width]
        width = above.shape[1]
        self._depth += 1
        positions = (self._rows.base + self._depth).to(torch.int32).repeat_interleave(width)
        ancestors = self._ancestors(above, self._size, self._size + width)
        return self._attend(width, positions, ancestors)

    def chain(self, width: int) -> PagedAttend:
        assert not self._branches, "rows that are causal need no bits"
        ahead = torch.arange(1, width + 1, device=self._rows.base.device) + self._depth
        self._depth += width
        positions = (self._rows.base[:, None] + ahead).to(torch.int32).flatten()
        return self._attend(width, positions, self._causal(width))

    def block(self, width: int, views: Sequence[BlockView]) -> BlockAttend:
        assert self._branches, "rows of a block may see later ones"
        assert not self._size, "a block is a draft of its own"
        # Windows count rows: if features were lost, a position exceeds its row's index.
        positions = self._index[:, :width].flatten().contiguous()
        if not any(view.window for view in views):  # rotate rows by true positions
            ahead = torch.arange(1, width + 1, device=self._cache.device)
            positions = (self._rows.base[:, None] + ahead).to(torch.int32).flatten()
        own = self._bits[:width]
        seen = {True: own.cumsum(0), False: own.sum(0).expand(width, -1)}  # ancestor bits
        attends: dict[bool, PagedAttend] = {}
        for causal in {view.causal for view in views}:
            ancestors = seen[causal].repeat(len(self._rows.known), 1)
            self._size = 0  # both kinds use the same rows
            attends[causal] = self._attend(width, positions, ancestors)
        return BlockAttend(attends.get(False), attends.get(True), tuple(views))

    def _attend(
        self,
        width: int,
        positions: Tensor,  # [num_drafts * width] int32
        ancestors: Tensor,  # [num_drafts * width, num_words] int64
    ) -> PagedAttend:
        """Returns the attention of the next `width` rows of every sequence."""
        begin, end = self._size, self._size + width
        self._size = end
        plan = PagedStep(
            token_ids=positions,  # attention does not read them
            positions=positions,
            slots=self._spare[:, begin:end].flatten().contiguous(),
            row_seq=self._seqs[:-1].repeat_interleave(width),
            row_index=self._index[:, begin:end].flatten().contiguous(),
            query_start=self._seqs * width,
            context_lens=self._index[:, begin].contiguous(),
            tree_start=self._tree_start,
            block_tables=self._rows.slots,
            ancestors=ancestors,
            block_size=1,
            max_query_len=width,
            max_key_len=self._rows.max_known + end,
        )
        return PagedAttend(self._planned, self._planned.ops.adopt(plan), self._cache, self._first)

    def _ancestors(
        self,
        above: Tensor,  # [num_drafts, width]
        begin: int,
        end: int,
    ) -> Tensor:  # [num_drafts * width, num_words] int64
        if not self._branches:
            return self._causal(end - begin)
        own = self._bits[begin:end]
        if self._seen is None:
            self._seen = own.expand(len(self._rows.known), -1, -1)
        else:
            words = self._seen.shape[2]
            seen = self._seen.gather(1, above[..., None].expand(-1, -1, words))
            self._seen = seen | own
        return self._seen.flatten(0, 1)

    def _causal(self, width: int) -> Tensor:  # [num_drafts * width, num_words] int64
        """Returns empty ancestor bits of causal rows."""
        return self._bits.new_zeros(len(self._rows.known) * width, self._bits.shape[1])


def _own_bits(room: int, device: torch.device) -> Tensor:  # [room, num_words] int64
    """Returns each row's bit among all rows of a draft."""
    rows = torch.arange(room, device=device)
    words = torch.arange(max(1, -(-room // WORD_BITS)), device=device)
    bit = torch.ones_like(rows) << rows % WORD_BITS
    return torch.where(rows[:, None] // WORD_BITS == words, bit[:, None], 0)
