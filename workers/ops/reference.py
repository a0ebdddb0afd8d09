"""The operations in plain torch, on any device: the oracle for other implementations.

`ReferenceOps` are written for readability. No value of a tensor is read on the host. Attention
gathers whole contexts and pads every sequence to the longest: correct for every step, but slow for
long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import gelu, grouped_mm, linear, relu, silu

from ...scheduler.types import StepInput
from ..attention import KVCache, KVCode, KVFormat
from .plan import WORD_BITS, PagedStep, copied_contexts, part_of, plan_step
from .protocol import (
    AttentionSpec,
    Experts,
    Gate,
    GateKind,
    HeadProjection,
    LatentHeads,
    Mixture,
    Norm,
    Projection,
    Rotation,
    Router,
    Scoring,
)


class ReferenceOps:
    """Implements `Ops` by torch operations."""

    name = "reference"
    reads_device_only = False
    is_invariant = False
    reuses_results = False
    keeps_quantised = False
    keeps_codes = False
    takes_parts = False
    max_latent_heads = 1 << 30
    expands_latents = False

    def plan(self, step: StepInput, cache: KVCache) -> PagedStep:
        return plan_step(step, cache.block_size, cache.device)

    def warm_up(
        self, specs: Iterable[AttentionSpec], dtype: torch.dtype, block_size: int,
        form: KVFormat | None = None, *, shows_progress: bool = False,
    ) -> bool:  # fmt: skip
        return False

    def adopt(self, plan: PagedStep) -> PagedStep:
        return plan

    def plain_inputs(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return lambda states: linear(states, weight, bias)

    def pack_heads(self, weight: Tensor) -> HeadProjection:
        turned = weight.transpose(1, 2).contiguous()
        return lambda states: torch.bmm(states.transpose(0, 1), turned).transpose(0, 1)

    def pack_experts(self, experts: Experts) -> Mixture:
        return lambda states, chosen, scores: mix(states, chosen, scores, experts)

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float) -> Rotation:
        angles = positions.unsqueeze(1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        return rms_norm(states, norm)

    def add_norm(
        self, residual: Tensor, update: Tensor | None, after: Norm | None, scale: float,
        before: Norm | None, kept: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if update is not None:
            residual.add_(update if after is None else self.norm(update, after), alpha=scale)
        if kept is not None:
            kept.copy_(residual)
        return residual if before is None else self.norm(residual, before)

    def enter(
        self, embedded: Tensor, embedding_norm: Norm | None, feature: Tensor,
        feature_norm: Norm | None, *, is_residual_normed: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        size = embedded.shape[1]
        both = feature.new_empty(len(feature), size + feature.shape[1])
        first = embedded if embedding_norm is None else self.norm(embedded, embedding_norm)
        both[:, :size].copy_(first)
        both[:, size:].copy_(feature if feature_norm is None else self.norm(feature, feature_norm))
        kept = both[:, size:] if is_residual_normed else feature
        return both, kept.clone(memory_format=torch.contiguous_format)

    def rope_store_attend(
        self, joined: Tensor, rotation: Rotation | None, temperature: Tensor | None,
        plan: PagedStep, cache: KVCache, layer: int, spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        query, key, value = prepared_heads(joined, rotation, temperature, spec)
        keys, values, code = cache.keys[layer], cache.values[layer], cache.codes[layer]
        cache.write(layer, plan.slots.long(), key, None if spec.shared_values else value)
        if spec.shared_values:
            values = keys[..., : spec.value_dim]
        if plan.turn is not None:
            plan.turn.stored()
        return self.attend(query, keys, values, plan, spec, code).flatten(1)

    def expand_attend(
        self, query: Tensor, latent: Tensor, rotation: Rotation | None, temperature: Tensor | None,
        plan: PagedStep, cache: KVCache, layer: int, spec: AttentionSpec, heads: LatentHeads,
    ) -> Tensor:  # fmt: skip
        each, width, code = heads.spec, spec.value_dim, cache.codes[layer]
        query = prepare(query, None, rotation, each)
        if temperature is not None:
            query = (query * temperature[:, None, None]).to(query.dtype)
        cache.write(layer, plan.slots.long(), prepare(latent[:, None], None, rotation, spec), None)
        blocks, copied = copied_contexts(plan)
        paged = cache.keys[layer][: cache.num_slots].view(cache.num_blocks, cache.block_size, -1)
        kept = paged[blocks].flatten(0, 1)  # [num_keys, spec.head_dim]
        if code is not None:
            kept = code.keys(kept, query.dtype)
        latents, turned = kept[:, :width], kept[:, None, width:]
        out = query.new_empty(*query.shape[:2], each.value_dim)
        keys = query.new_empty(len(kept), each.num_heads, each.head_dim)
        keys[..., each.rotary_begin :] = turned
        for begin in range(0, query.shape[1], each.num_heads):
            own = slice(begin, begin + each.num_heads)
            plain = linear(latents, heads.keys[own].flatten(0, 1))
            keys[..., : each.rotary_begin] = plain.unflatten(1, (each.num_heads, -1))
            values = torch.matmul(latents, heads.values[own]).transpose(0, 1)
            out[:, own] = self.attend(query[:, own], keys, values, copied, each)
        return out.flatten(1)

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: Tensor,  # [num_slots, num_kv_heads, value_dim]
        plan: PagedStep,
        spec: AttentionSpec,
        code: KVCode | None = None,  # code of keys and values
    ) -> Tensor:  # [num_tokens, num_heads, value_dim]
        """Computes attention over keys that are in their slots."""
        lanes = torch.arange(plan.max_query_len, device=query.device)
        rows = (plan.query_start[:-1, None] + lanes).clamp(max=plan.num_tokens - 1)
        index = torch.arange(plan.max_key_len, device=query.device)
        blocks = plan.block_tables[:, index // plan.block_size].long()
        slots = blocks * plan.block_size + index % plan.block_size
        hidden = ~visible(plan, rows, index, spec)[:, None, None]
        fold = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        grouped = query[rows].unflatten(2, fold)  # [num_seqs, query_len, kv heads, fold, dim]
        keys, values = keys[slots], values[slots]
        if code is not None:
            keys, values = code.keys(keys, query.dtype), code.values(values, query.dtype)
        scores = torch.einsum("sqhgd,skhd->shgqk", grouped.float(), keys.float())
        scores = scores * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        # Not -inf: rows that pad a short query may see no key.
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        if spec.sinks is not None:
            sinks = spec.sinks.float().view(1, *fold, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : plan.max_key_len]
        out = torch.einsum("shgqk,skhd->sqhgd", weights, values.float())
        lane = torch.arange(plan.num_tokens, device=query.device) - plan.query_start[plan.row_seq]
        return out[plan.row_seq, lane].flatten(1, 2).to(query.dtype)

    def gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        return gated(gate_up, gate)

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        return route(logits, router)


def rms_norm(states: Tensor, norm: Norm) -> Tensor:  # [..., size], alike
    """Computes RMSNorm in float32, rounded once."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (wide if norm.weight is None else wide * norm.weight).to(states.dtype)


def split_heads(
    joined: Tensor,  # [num_tokens, spec.joined_width]
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # each [num_tokens, heads, dim]
    """Returns queries, keys and values of a joined row; shared values are views of the keys."""
    query = joined[:, : spec.key_begin].unflatten(1, (spec.num_heads, spec.head_dim))
    key = joined[:, spec.key_begin : spec.value_begin]
    key = key.unflatten(1, (spec.num_kv_heads, spec.head_dim))
    if spec.shared_values:
        return query, key, key[..., : spec.value_dim]
    value = joined[:, spec.value_begin :]
    return query, key, value.unflatten(1, (spec.num_kv_heads, spec.value_dim))


def prepared_heads(
    joined: Tensor,  # [num_tokens, spec.joined_width]
    rotation: Rotation | None,
    temperature: Tensor | None,  # [num_tokens] float32
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # each [num_tokens, heads, dim]
    """Returns prepared queries, keys and values; shared values are views of the keys."""
    query, key, value = split_heads(joined, spec)
    query = prepare(query, spec.query_norm, rotation, spec)
    if temperature is not None:
        query = (query * temperature[:, None, None]).to(query.dtype)
    return query, prepare(key, spec.key_norm, rotation, spec), value


def prepare(
    heads: Tensor,  # [num_tokens, num_heads, head_dim]
    norm: Norm | None,
    rotation: Rotation | None,
    spec: AttentionSpec,
) -> Tensor:  # alike
    """Applies norm and rotation to queries or keys."""
    if norm is not None and not spec.norms_after_rotation:
        heads = normed_heads(heads, norm, spec)
    if rotation is not None and spec.rotary_dim:
        heads = rotate(heads, rotation, spec)
    if norm is not None and spec.norms_after_rotation:
        heads = normed_heads(heads, norm, spec)
    return heads


def normed_heads(heads: Tensor, norm: Norm, spec: AttentionSpec) -> Tensor:
    if spec.norms_all_heads:
        return rms_norm(heads.flatten(1), norm).view_as(heads)
    return rms_norm(heads, norm)


def rotate(
    heads: Tensor,  # [num_tokens, num_heads, head_dim]
    rotation: Rotation,
    spec: AttentionSpec,
) -> Tensor:  # alike
    """Rotates the first half of the rotary dimensions with the second."""
    cos, sin = (part[:, None, :] for part in rotation)
    begin, middle = spec.rotary_begin, spec.rotary_begin + spec.rotary_dim // 2
    end = begin + spec.rotary_dim
    first, second = heads[..., begin:middle].float(), heads[..., middle:end].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([heads[..., :begin], turned.to(heads.dtype), heads[..., end:]], dim=-1)


def visible(
    plan: PagedStep,
    rows: Tensor,  # [num_seqs, query_len] into the flat rows
    index: Tensor,  # [key_len], key indices
    spec: AttentionSpec,
) -> Tensor:  # [num_seqs, query_len, key_len] bool
    """Returns which keys each row sees, by the rule in `plan.py`."""
    node = index - plan.tree_start[:, None]  # [num_seqs, key_len]
    word = node.clamp(0, plan.ancestors.shape[1] * WORD_BITS - 1) // WORD_BITS
    words = plan.ancestors[rows].gather(2, word[:, None, :].expand(-1, rows.shape[1], -1))
    bit = (words >> (node % WORD_BITS)[:, None, :]) & 1
    is_node = (node >= 0) & (node < plan.ancestors.shape[1] * WORD_BITS)
    causal = (node[:, None, :] < 0) & (index <= plan.row_index[rows][:, :, None])
    seen = causal | ((bit == 1) & is_node[:, None, :])
    if spec.window is None and spec.chunk is None:
        return seen
    flat = plan.query_start[:-1, None] + index - plan.context_lens[:, None]
    own = plan.positions[flat.clamp(0, plan.num_tokens - 1)]
    keys = torch.where(node < 0, index, own)[:, None, :]
    queries = plan.positions[rows][:, :, None]
    if spec.window is not None:
        seen = seen & (keys > queries - spec.window)
    if spec.chunk is not None:
        seen = seen & (keys // spec.chunk == queries // spec.chunk)
    return seen


def gated(gate_up: Tensor, gate: Gate) -> Tensor:  # [num_rows, 2 * width] -> [num_rows, width]
    """Computes the gated unit in float32."""
    first, up = gate_up.float().chunk(2, dim=-1)
    if gate.kind is GateKind.CLAMPED_SILU:
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return ((up + 1) * first * torch.sigmoid(first * gate.alpha)).to(gate_up.dtype)
    if gate.kind is GateKind.SILU:
        first = silu(first)
    elif gate.kind is GateKind.RELU:
        first = relu(first)
    else:
        first = gelu(first, approximate="tanh" if gate.kind is GateKind.GELU_TANH else "none")
    return (first * up).to(gate_up.dtype)


def route(
    logits: Tensor,  # [num_tokens, num_experts]
    router: Router,
    *,
    stable: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns chosen experts and their scores, each [num_tokens, top].

    `stable` chooses the lower of two equal experts and adds scores in order, on every device.
    """
    logits = logits.float()
    if router.scoring is Scoring.SOFTMAX:
        scores = logits.softmax(dim=-1)
    elif router.scoring is Scoring.SIGMOID:
        scores = logits.sigmoid()
    else:
        scores = logits
    wanted = scores if router.correction is None else scores + router.correction
    if router.num_groups > 1:
        wanted = _within_groups(wanted, router, stable=stable)
    chosen = _best(wanted, router.top, stable=stable)
    best = scores.gather(1, chosen)
    if router.scoring is Scoring.SOFTMAX_OF_TOP:
        best = best.softmax(dim=-1)
    elif router.scoring is Scoring.SIGMOID_OF_TOP:
        best = best.sigmoid()
    if router.normalise:
        total = _sum(best, stable=stable).unsqueeze(-1) + 1e-20
        best = best / total.clamp(min=router.norm_min)
    return chosen, best * router.scale


def _best(scores: Tensor, count: int, *, stable: bool) -> Tensor:  # int64 [..., count]
    if stable:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return scores.topk(count, dim=-1).indices


def sum_in_order(values: Tensor) -> Tensor:  # [num_tokens, count, ...] -> [num_tokens, ...]
    """Sums over dimension 1, with the same order of additions on every device."""
    total = values[:, 0]
    for place in range(1, values.shape[1]):
        total = total + values[:, place]
    return total


def _sum(scores: Tensor, *, stable: bool) -> Tensor:  # over the last dimension
    return sum_in_order(scores.movedim(-1, 1)) if stable else scores.sum(dim=-1)


def route_by_row(
    logits: Tensor, route: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:  # as `route` of [num_tokens, num_experts]
    """Applies `route` to every row separately, so an element's place in a vector never changes."""
    chosen, scores = zip(*[route(row) for row in logits.split(1)], strict=True)
    return torch.cat(chosen), torch.cat(scores)


def _within_groups(
    wanted: Tensor,  # [num_tokens, num_experts]
    router: Router,
    *,
    stable: bool,
) -> Tensor:  # alike
    """Returns `wanted` with minus infinity outside of the best groups."""
    grouped = wanted.unflatten(1, (router.num_groups, -1))
    best = grouped.gather(-1, _best(grouped, router.group_top, stable=stable))
    merit = _sum(best, stable=stable)
    kept = torch.zeros_like(merit, dtype=torch.bool)
    kept.scatter_(1, _best(merit, router.top_groups, stable=stable), True)
    return grouped.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)


def mix(states: Tensor, chosen: Tensor, scores: Tensor, experts: Experts) -> Tensor:
    """Computes a `Mixture`: the chosen experts' weighted sum, over rows sorted by expert."""
    pairs = chosen.flatten()
    if experts.is_part:
        pairs = pairs.clamp(min=0)
    order = pairs.argsort(stable=True)
    numbers = torch.arange(experts.down.shape[0], device=pairs.device)
    ends = (pairs[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
    expert, score = pairs[order], scores.flatten()[order, None]
    read = states[order // chosen.shape[1]]
    if experts.scores_input:
        read = (read * score).to(states.dtype)
    inner = grouped_mm(read, experts.gate_up.transpose(1, 2), offs=ends)
    if experts.gate_up_bias is not None:
        inner = inner + experts.gate_up_bias[expert]
    given = grouped_mm(gated(inner, experts.gate), experts.down.transpose(1, 2), offs=ends)
    if experts.down_bias is not None:
        given = given + experts.down_bias[expert]
    wide = given.float() if experts.scores_input else given.float() * score
    placed = torch.empty_like(wide)
    placed[order] = wide
    if experts.is_part:
        placed.masked_fill_(chosen.flatten()[:, None] < 0, 0)
    return placed.unflatten(0, chosen.shape).sum(1).to(states.dtype)


def suits_torch(spec: AttentionSpec) -> bool:
    """Returns True if torch's fused attention supports the layer: no soft cap and no sinks."""
    return spec.softcap is None and spec.sinks is None


MAX_FOLDED = 64  # rows; for more, the repeated mask costs more than it saves


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's new rows."""

    begin: int  # the first row of the step
    plan: PagedStep  # of this sequence alone
    slots: Tensor  # [key_len] int64, slots of all its keys
    _masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self,
        query: Tensor,  # [num_tokens of the step, num_heads, head_dim], prepared
        keys: Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: Tensor,  # [num_slots, num_kv_heads, value_dim]
        spec: AttentionSpec,
        out: Tensor,  # [num_tokens of the step, num_heads, value_dim], output
        code: KVCode | None = None,  # code of keys and values
    ) -> None:
        """Computes attention over keys and values that are in their slots.

        Heads of a short query are folded into its rows, so that every key head is read once for all
        query heads that share it.
        """
        num_rows, num_keys = self.plan.num_tokens, len(self.slots)
        rows = slice(self.begin, self.begin + num_rows)
        is_near = all(each is None or num_keys <= each for each in (spec.window, spec.chunk))
        is_plain = is_near and num_keys == int(self.plan.tree_start[0])
        is_triangle = is_plain and MAX_FOLDED < num_rows == num_keys
        mask = None if is_triangle or (is_plain and num_rows == 1) else self._mask(spec, query)
        shape = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, num_rows)
        lines = query[rows].transpose(0, 1)
        is_folded = num_rows <= MAX_FOLDED and shape[1] > 1
        if is_folded:
            lines = lines.reshape(shape[0], shape[1] * num_rows, -1)
            mask = None if mask is None else mask.repeat(shape[1], 1)
        keys, values = keys.index_select(0, self.slots), values.index_select(0, self.slots)
        if code is not None:
            keys, values = code.keys(keys, query.dtype), code.values(values, query.dtype)
        found = functional.scaled_dot_product_attention(
            lines[None],
            keys[None].transpose(1, 2),
            values[None].transpose(1, 2),
            mask,
            is_causal=is_triangle,
            scale=spec.scale,
            enable_gqa=shape[1] > 1 and not is_folded,
        )
        out[rows].copy_(found.reshape(spec.num_heads, num_rows, -1).transpose(0, 1))

    def _mask(self, spec: AttentionSpec, query: Tensor) -> Tensor:  # [num_tokens, key_len]
        """Returns 0 for visible keys and -inf for others; cached per step and kind of layer."""
        reach = (spec.window, spec.chunk)
        if reach not in self._masks:
            device = self.slots.device
            rows = torch.arange(self.plan.num_tokens, device=device)
            index = torch.arange(len(self.slots), device=device)
            seen = visible(self.plan, rows[None], index, spec)[0]
            zeros = torch.zeros(seen.shape, dtype=query.dtype, device=device)
            self._masks[reach] = zeros.masked_fill(~seen, -torch.inf)
        return self._masks[reach]


def passes_of(plan: PagedStep) -> Iterator[SequenceRows]:
    """Splits a step into its sequences."""
    for seq, (begin, end) in enumerate(pairwise(plan.query_start.tolist())):
        if begin == end:
            continue
        num_keys = int(plan.context_lens[seq]) + end - begin
        index = torch.arange(num_keys, device=plan.slots.device)
        blocks = plan.block_tables[seq].long()[index // plan.block_size]
        slots = blocks * plan.block_size + index % plan.block_size
        yield SequenceRows(begin, part_of(plan, begin, end), slots)


class TorchOps(ReferenceOps):
    """Torch's fused attention and norm, for devices without kernels. Plans are made on the host."""

    name = "torch"
    max_latent_heads = 0  # keys are expanded

    def plan(self, step: StepInput, cache: KVCache) -> PagedStep:
        plan = super().plan(step, cache)
        return replace(plan, passes=tuple(passes_of(plan)))

    def norm(self, states: Tensor, norm: Norm) -> Tensor:
        # Torch's function requires states and weight of one dtype; float32 is also the precision.
        out = functional.rms_norm(states.float(), states.shape[-1:], norm.weight, norm.eps)
        return out.to(states.dtype)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: PagedStep, spec: AttentionSpec,
        code: KVCode | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes attention sequence by sequence, so that none is padded."""
        out = query.new_empty(plan.num_tokens, spec.num_heads, spec.value_dim)
        for each in plan.passes or passes_of(plan):
            if suits_torch(spec):
                each.attend(query, keys, values, spec, out, code)
                continue
            rows = slice(each.begin, each.begin + each.plan.num_tokens)
            out[rows] = super().attend(query[rows], keys, values, each.plan, spec, code)
        return out
